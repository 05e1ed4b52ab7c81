"""Compiled loops on as many threads as torch computes with.

The module knows how many rows there are, and no formula: a loop gives each row the same bits
whoever runs it. Its threads sleep while there is nothing to do, and never call torch, which would
give each of them OpenMP threads of its own; see `workers.kv_cache`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy.typing as npt
import torch

_NUMBERS_PER_THREAD = 2**18
"""Fewer take about as long as waking a thread up."""
NUMBERS_AT_ONCE = 8
"""A loop of multiply-adds goes through so many numbers while others go through one."""
_MAX_THREADS = 256
_POOL = ThreadPoolExecutor(_MAX_THREADS, "haversack-rows")
"""Has as many threads as were ever needed at once."""


def as_array(x: torch.Tensor) -> npt.NDArray[Any]:
    """Return a contiguous tensor's memory as the kernels take it: bf16 as its bits."""
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def over_rows(loop: Callable[[slice], None], num_rows: int, numbers_per_row: int) -> None:
    """Call `loop` with slices that make up so many rows, at once where that is worth it.

    Args:
        loop: what to call; it lets go of the interpreter's lock, and calls nothing of torch.
        num_rows: rows to cover.
        numbers_per_row: how much there is to do for a row.
    """
    worth_it = num_rows * numbers_per_row // _NUMBERS_PER_THREAD
    threads = min(torch.get_num_threads(), worth_it, num_rows, _MAX_THREADS)
    if threads <= 1:
        loop(slice(0, num_rows))
        return
    bounds = [num_rows * i // threads for i in range(threads + 1)]
    own, *others = (slice(*pair) for pair in itertools.pairwise(bounds))
    running = [_POOL.submit(loop, rows) for rows in others]
    try:
        loop(own)
    finally:
        # What the others write to may be gone once this has returned.
        wait(running)
    for future in running:
        future.result()
