"""The throughput benchmark on a tiny model: it runs, notices what is wrong, and says so."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import throughput
from bench.measuring import Measured
from bench.peers.catalogue import PEERS, PeerSpec
from bench.workloads import ANSWERS, GROWTH, OURS, PEAK, QUICK, RATE, RESULT, TTFT
from tests.engine.conftest import ENGINE
from tests.tiny_models import VOCAB_SIZE

ALONE = [
    "full",
    "unique",
    "shared-tail",
    "shared-full",
    "rescore",
    "choices",
    f"generate-{QUICK.requests}",
    f"length-{QUICK.lengths[0]}",
    "mixed",
]


@pytest.fixture(autouse=True)
def small_engine(local_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that the benchmark leaves at their defaults: small here."""
    monkeypatch.setenv("HAVERSACK_KV_CACHE_BYTES", "16MiB")
    monkeypatch.setenv("HAVERSACK_OFFLOAD_BYTES", "16MiB")
    monkeypatch.setenv("HAVERSACK_NAMESPACE", ENGINE["namespace"])


def run(model: str, peers: list[str], chosen: list[str]) -> tuple[dict[str, Any], list[Measured]]:
    console = Console(file=io.StringIO())
    return throughput.run(model, peers, chosen, 1, QUICK, 1, 1, "bfloat16", console)


def test_it_measures_the_engine_and_writes_what_it_found(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, measured = run(tiny_model, [], ALONE)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["workload"] for line in lines] == ALONE, "one line as each is done"
    figures = {each["workload"]: each["figures"] for each in report["workloads"]}
    rates = {name: figures[name][ANSWERS if name == "choices" else RATE][OURS] for name in ALONE}
    assert all(rate > 0 for rate in rates.values())
    assert figures["mixed"][TTFT][OURS] > 0
    cached = {each["workload"]: each["cached_share"] for each in report["workloads"]}
    for name in ("full", "unique", "generate-3"):
        assert cached[name] == 0.0, "nothing that was computed before, to warm up or for another"
    assert cached["rescore"] > 0.5, "all whole blocks of it"
    rows_bytes = (QUICK.full_tokens - 1) * (VOCAB_SIZE + 1) * 12
    assert figures["full"][GROWTH][RESULT] == pytest.approx(rows_bytes / 2**20, rel=1e-3)
    peaks = report["workloads"][0]["peaks_mib"][OURS]
    assert set(peaks) == {"worker-0", "scheduler", "store", "client"}
    throughput.write(report, measured, tmp_path)
    assert json.loads((tmp_path / "throughput.json").read_text()) == report
    page = (tmp_path / "throughput.md").read_text()
    assert all(f"| {name} |" in page for name in ALONE)
    assert report["machine"]["cpu"] in page
    assert (tmp_path / "throughput.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_a_peer_is_measured_in_turn_and_may_fail(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that brings too few rows was not measured, and one that can't be started is absent."""
    monkeypatch.setitem(PEERS, "vllm", PeerSpec("vllm", "tests.bench_peer"))
    monkeypatch.setitem(PEERS, "transformers", PeerSpec("transformers", "tests.no_such_peer"))
    report, _ = run(tiny_model, ["vllm", "transformers"], ["long", "unique", "rescore"])
    long, unique, rescore = report["workloads"]
    theirs = QUICK.unique_prompts * QUICK.prompt_tokens / 0.5
    assert unique["figures"][RATE]["vllm"] == theirs
    ours = unique["figures"][RATE][OURS]
    assert unique["ratios"][RATE]["vllm"] == pytest.approx(ours / theirs, rel=1e-3)
    assert unique["goals"][f"{RATE} >= 1.2 x vllm"] == (ours >= 1.2 * theirs)
    assert unique["differences"]["vllm"] > 1.0, "its logprobs are all 0"
    assert long["figures"][PEAK]["vllm"] > 0
    assert "no_such_peer" in report["absent"]["transformers"]
    assert set(unique["absent"]) == {"transformers"}
    assert "rows" in rescore["absent"]["vllm"]
    assert set(rescore["figures"][RATE]) == {OURS}
