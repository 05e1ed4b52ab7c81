"""The peers there are: what each runs in, and with which environment variables.

Each has a script beside this file, and those with a requirements file an environment of their own
under `HAVERSACK_BENCH_VENVS`, by default `.bench-venvs/` of the checkout, made on first use.
"""

from __future__ import annotations

import ctypes.util
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_KV_CACHE_GIB = 1
_COMMON = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PYTHONPATH": str(_HERE.parents[1]),
}

Show = Callable[[str], None]


class PeerUnavailable(Exception):
    """A peer that can't be installed or run; its text says why."""


@dataclass(frozen=True)
class PeerSpec:
    """How to run one peer."""

    name: str
    module: str
    own_environment: bool = False
    """Whether it has a requirements file, hence an environment of its own."""
    sees_ours: bool = False
    """Whether that environment also sees the packages of this one, torch and all."""
    unwanted: tuple[str, ...] = ()
    """Packages that its requirements bring and that keep it from being imported."""
    tune: Callable[[Path, int], tuple[dict[str, str], list[str]]] | None = None
    """Given its environment's folder and the threads, returns variables of its own, and notes."""

    def python(self, show: Show) -> Path:
        """Return the interpreter to run it with; make its environment where it is not there.

        Raises:
            PeerUnavailable: it can't be installed.
        """
        if not self.own_environment:
            return Path(sys.executable)
        folder = _environments() / self.name
        wanted = (_HERE / f"{self.name}.txt").read_text() + " ".join(self.unwanted)
        stamp = folder / ".installed"
        digest = hashlib.sha256(wanted.encode()).hexdigest()
        python = folder / "bin" / "python"
        is_ready = stamp.is_file() and stamp.read_text() == digest
        if not is_ready:
            show(f"{self.name}: installing into {folder}; this takes minutes and gigabytes, once")
        if not python.exists():
            _run(self.name, [sys.executable, "-m", "venv", str(folder)])
        if self.sees_ours:
            _show_ours_to(folder)  # another checkout's may have been shown to it last
        if is_ready:
            return python
        pip = [str(python), "-m", "pip"]
        _run(self.name, [*pip, "install", "--quiet", "-r", str(_HERE / f"{self.name}.txt")])
        if self.unwanted:
            _run(self.name, [*pip, "uninstall", "--quiet", "--yes", *self.unwanted])
        stamp.write_text(digest)
        return python

    def variables(self, python: Path, threads: int) -> tuple[dict[str, str], list[str]]:
        """Return its environment variables, and notes to be shown beside its figures."""
        own, notes = self.tune(python.parents[1], threads) if self.tune else ({}, [])
        return _COMMON | {"OMP_NUM_THREADS": str(threads)} | own, notes


def _tune_vllm(environment: Path, threads: int) -> tuple[dict[str, str], list[str]]:
    """Return what vLLM's documentation advises on CPU."""
    intel_openmp = sorted(environment.glob("lib/**/libiomp5.so"))
    preloads = {
        "tcmalloc (Debian: libtcmalloc-minimal4)": ctypes.util.find_library("tcmalloc_minimal"),
        "libiomp5": str(intel_openmp[0]) if intel_openmp else None,
    }
    variables = {
        "LD_PRELOAD": ":".join(path for path in preloads.values() if path is not None),
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return variables, [f"runs without {name}" for name, path in preloads.items() if path is None]


PEERS = {
    spec.name: spec
    for spec in (
        PeerSpec(
            "vllm",
            "bench.peers.vllm_peer",
            own_environment=True,
            unwanted=("torchvision", "torchaudio", "torchcodec"),
            tune=_tune_vllm,
        ),
        PeerSpec("transformers", "bench.peers.transformers_peer"),
        PeerSpec("linear", "bench.peers.linear_peer"),
    )
}


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without what would change how a peer allocates or where it imports from."""
    unwanted = {"GLIBC_TUNABLES", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV"}
    return {key: value for key, value in env.items() if key not in unwanted}


def _environments() -> Path:
    chosen = os.environ.get("HAVERSACK_BENCH_VENVS")
    return Path(chosen).expanduser() if chosen else _HERE.parents[1] / ".bench-venvs"


def _show_ours_to(environment: Path) -> None:
    """Let an environment find what this one has, behind its own packages."""
    scheme = {"base": str(environment), "platbase": str(environment)}
    theirs = Path(sysconfig.get_path("purelib", vars=scheme))
    (theirs / "haversack-bench.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _run(name: str, command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(os.environ)
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        errors = [line for line in lines if "ERROR" in line] or lines
        raise PeerUnavailable(f"{name} can't be installed: {' '.join(command[:4])}: {errors[-1]}")
