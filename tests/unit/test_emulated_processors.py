"""Kernels for processors with instructions for bfloat16, on a machine that may have none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import emulated_instructions


@pytest.mark.slow
@pytest.mark.parametrize("kind", emulated_instructions.KINDS)
def test_kernels_compute_what_they_should_with_instructions_for_bfloat16(
    kind: str, tmp_path: Path
) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "MALLOC_PERTURB_": "128"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.emulated_instructions", kind],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:]
