"""What kernels are called with: tensors as arrays, and a number of threads for the work."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

_NUMBERS_PER_THREAD = 2**14
"""Fewer take about as long as handing them to another thread."""
NUMBERS_AT_ONCE = 8
"""A loop of multiply-adds goes through so many numbers while others go through one."""


def as_array(x: torch.Tensor) -> npt.NDArray[Any]:
    """Return a contiguous tensor's memory as the kernels take it: bf16 as its bits."""
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def num_threads(numbers: int) -> int:
    """Return how many of torch's threads a loop over so many numbers is worth."""
    from workers import kernel_team

    if not kernel_team.HAS_TEAM:
        return 1
    return max(1, min(torch.get_num_threads(), numbers // _NUMBERS_PER_THREAD))
