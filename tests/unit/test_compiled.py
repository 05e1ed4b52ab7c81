"""Compiled loops: whose folder they are kept in, by whom, and that one process makes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workers import compiled

SIGNATURES = """
import sys, torch
from workers import fused
print(fused.signature(getattr(torch, sys.argv[1])))
"""


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=kept | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> str:
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0
    return printed


def test_code_is_kept_in_the_users_cache_and_another_folder_goes_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And whoever else uses numba in the process keeps files where they did."""
    monkeypatch.setattr(compiled.numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("HAVERSACK_CACHE", str(tmp_path / "cache"))

    @compiled.kernel
    def twice(x: float) -> float:
        return 2 * x

    own = Path(twice.stats.cache_path).parent  # type: ignore[attr-defined]
    assert own.parent == tmp_path / "cache" / "kernels"
    assert own.name.startswith(f"numba-{compiled.numba.__version__}-")
    assert compiled.numba.config.CACHE_DIR == ""
    monkeypatch.setattr(compiled.numba.config, "CACHE_DIR", str(tmp_path / "other"))
    assert compiled.folder() == tmp_path / "other" / own.name


def test_where_nothing_can_be_kept_on_disk_kernels_are_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = compiled.numba.njit

    def njit(*functions: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(*functions, **options)

    monkeypatch.setattr(compiled.numba, "njit", njit)

    @compiled.kernel
    def twice(x: float) -> float:
        return 2 * x

    assert twice(4.0) == 8.0
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled.numba.config, "CACHE_DIR", str(tmp_path / "file" / "under"))
    with compiled.alone():
        assert twice(4) == 8


def test_one_process_at_a_time_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = """
from workers import compiled
print("asks", flush=True)
with compiled.alone():
    print("is alone", flush=True)
"""
    monkeypatch.setattr(compiled.numba.config, "CACHE_DIR", str(tmp_path))
    with compiled.alone():
        other = start(code, NUMBA_CACHE_DIR=str(tmp_path))
        assert other.stdout is not None
        assert other.stdout.readline() == "asks\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=0.5)
    assert answer(other) == "is alone\n"


def test_what_runs_on_cuda_does_not_import_numba() -> None:
    code = """
import sys, torch
from workers import actor, loader, logprobs, model_runner, sampler
on_device = logprobs.Logits([torch.empty(3, 100, device="meta")], 100)
logprobs.normalise(on_device)
logprobs.top_1(on_device)
print("numba" in sys.modules)
"""
    assert answer(start(code)) == "False\n"


@pytest.mark.slow
def test_processes_that_compile_at_once_leave_a_whole_cache(tmp_path: Path) -> None:
    """For two dtypes, whose code stands in the same files; the same bits out of every process."""
    dtypes = ["bfloat16", "float32"]
    cache = {"HAVERSACK_CACHE": str(tmp_path)}
    together = [(dtype, start(SIGNATURES, dtype, **cache)) for dtype in dtypes + dtypes]
    found = {(dtype, answer(process)) for dtype, process in together}
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}
    assert made
    assert found == {(dtype, answer(start(SIGNATURES, dtype, **cache))) for dtype in dtypes}
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")} == made
