"""Peers of the benchmark: what they say, and how they fail, without any of them installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import machine
from bench.peers.catalogue import PEERS, PeerSpec, PeerUnavailable
from bench.peers.process import PeerProcess, command_of
from bench.peers.protocol import Job

DEADLINE_S = 60.0
PROMPTS = [[1, 2, 3], [4, 5]]

Start = Callable[..., PeerProcess]


@pytest.fixture
def start(repo_root: Path) -> Iterator[Start]:
    started: list[PeerProcess] = []

    def make(job_timeout_s: float = DEADLINE_S, **settings: Any) -> PeerProcess:
        started.append(
            PeerProcess(
                command_of(Path(sys.executable), "tests.bench_peer"),
                {"PYTHONPATH": str(repo_root)},
                settings,
                start_timeout_s=DEADLINE_S,
                job_timeout_s=job_timeout_s,
            )
        )
        return started[-1]

    yield make
    for peer in started:
        peer.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_peer_answers_whatever_else_is_printed(start: Start) -> None:
    peer = start(threads=2)
    assert peer.about["threads"] == 2
    outcome = peer.run(Job.score("unique", PROMPTS))
    assert outcome.num_rows == [2, 1]
    assert peer.run(Job.score("unique", PROMPTS, starts=[2, 1])).num_rows == [1, 1]
    assert peer.run(Job.generate("generate", PROMPTS, 4)).num_generated == 8


def test_a_job_that_fails_says_why_and_the_next_one_is_done(start: Start) -> None:
    peer = start()
    with pytest.raises(PeerUnavailable, match="ValueError: this one is too much"):
        peer.run(Job.score("fail", PROMPTS))
    with pytest.raises(PeerUnavailable, match="serve"):
        peer.run(Job("mixed", "serve", PROMPTS))
    assert peer.run(Job.score("unique", PROMPTS)).num_rows == [2, 1]


def test_a_peer_that_ends_leaves_its_last_words(start: Start) -> None:
    peer = start()
    with pytest.raises(PeerUnavailable, match=r"it ended: .*a last word"):
        peer.run(Job.score("end", PROMPTS))
    with pytest.raises(PeerUnavailable, match="it ended"):
        peer.run(Job.score("unique", PROMPTS))


def test_a_peer_that_cannot_load_says_why(start: Start) -> None:
    with pytest.raises(PeerUnavailable, match="ValueError: no such model"):
        start(fails_to_load=True)


def test_a_peer_that_hangs_is_given_up_and_leaves_nothing_running(start: Start) -> None:
    peer = start(job_timeout_s=0.5, has_child=True)
    pids = peer.pids().values()
    assert peer.about["child"] in pids
    with pytest.raises(PeerUnavailable, match="no answer within"):
        peer.run(Job.score("hang", PROMPTS))
    peer.close()
    wait_for(lambda: not any(_is_running(pid) for pid in pids))


def test_all_of_a_peer_stands_still_between_its_turns(start: Start) -> None:
    """A peer's idle processes may poll; while another side is timed they must cost nothing."""
    peer = start(has_child=True)
    for _ in range(2):
        wait_for(
            lambda: all(
                psutil.Process(pid).status() == psutil.STATUS_STOPPED
                for pid in peer.pids().values()
            )
        )
        assert peer.run(Job.score("unique", PROMPTS)).num_rows == [2, 1]


def test_a_suspended_peer_ends_with_the_benchmark(repo_root: Path) -> None:
    """Whoever kills the benchmark leaves no process behind that holds gigabytes."""
    code = (
        "import os, sys; from bench.peers.process import PeerProcess; "
        "peer = PeerProcess([sys.executable, '-m', 'tests.bench_peer'], "
        "{'PYTHONPATH': os.getcwd()}, {}, start_timeout_s=30, job_timeout_s=30); "
        "print(peer.pids()['main'], flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repo_root,
        env=os.environ | {"PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    pid = int(done.stdout)
    wait_for(lambda: not _is_running(pid))


def environment_of(python: Path, script: str) -> None:
    """Make a peer's environment, of which the Python is a shell script."""
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


def test_a_peer_that_cannot_be_installed_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment is there, but pip can't reach what it needs; then it can."""
    monkeypatch.setenv("HAVERSACK_BENCH_VENVS", str(tmp_path))
    python = tmp_path / "vllm" / "bin" / "python"
    environment_of(python, "echo 'ERROR: no matching distribution' >&2; exit 1")
    told: list[str] = []
    with pytest.raises(PeerUnavailable, match="no matching distribution"):
        PEERS["vllm"].python(told.append)
    assert "vllm" in told[0], "whoever waits is told for what"
    python.write_text("#!/bin/sh\nexit 0\n")
    assert PEERS["vllm"].python(told.append) == python
    assert len(told) == 2
    assert PEERS["vllm"].python(told.append) == python
    assert len(told) == 2, "what is installed is not installed again"


def test_an_environment_that_checkouts_share_sees_the_packages_of_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, and shows those of another checkout, which may be gone by now."""
    monkeypatch.setenv("HAVERSACK_BENCH_VENVS", str(tmp_path))
    python = tmp_path / "lm_eval" / "bin" / "python"
    environment_of(python, "exit 0")
    bases = {"base": str(tmp_path / "lm_eval"), "platbase": str(tmp_path / "lm_eval")}
    theirs = Path(sysconfig.get_path("purelib", vars=bases))
    theirs.mkdir(parents=True)
    spec = PeerSpec("lm_eval", "lm_eval", own_environment=True, sees_ours=True)
    for _ in range(2):
        assert spec.python(lambda _: None) == python
        (shown,) = theirs.glob("*.pth")
        assert shown.read_text().split() == [sysconfig.get_path("purelib")]
        shown.write_text("/another/checkout\n")


def test_vllm_runs_with_what_its_users_preload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    variables, notes = PEERS["vllm"].variables(tmp_path / "bin" / "python", 2)
    assert len(notes) == 2, "a run without them is not the one that users are told to have"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.4")
    variables, notes = PEERS["vllm"].variables(tmp_path / "bin" / "python", 2)
    assert not notes
    preloads = variables["LD_PRELOAD"].split(":")
    assert preloads == ["libtcmalloc_minimal.so.4", str(tmp_path / "lib" / "libiomp5.so")]


def test_a_peer_inherits_nothing_that_changes_how_it_allocates(
    repo_root: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=17179869184")
    peer = start()
    assert "GLIBC_TUNABLES" not in psutil.Process(peer.pids()["main"]).environ()
    assert "GLIBC_TUNABLES" in os.environ


def test_every_peer_has_a_script_and_what_it_needs(repo_root: Path) -> None:
    for spec in PEERS.values():
        assert isinstance(spec, PeerSpec)
        script = repo_root / spec.module.replace(".", "/")
        assert script.with_suffix(".py").is_file()
        assert (script.parent / f"{spec.name}.txt").is_file() == spec.own_environment


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_peers_compute_in_what_the_processor_is_fast_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPU_INFO", info)
    for flags, dtype in (("avx512f avx512_bf16", "bfloat16"), ("fma avx512f", "float32")):
        info.write_text(f"processor : 0\nmodel name : One\nflags : {flags}\n")
        assert machine.library_dtype() == dtype
        assert bool(machine.machine()["bf16"]) == (dtype == "bfloat16")
