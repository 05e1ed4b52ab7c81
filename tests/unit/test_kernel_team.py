"""Work shared among torch's threads: each part done once, to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch

from workers import kernel_calls, kernel_team
from workers.compiled import helper
from workers.fused import FusedNorm, _gated, _rotated
from workers.kernel_calls import num_threads
from workers.logprobs import Logits, normalise, select_rows, top_1


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    """Three threads while a test runs, as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@helper(set())
def _mark(done: Any, firsts: Any, first: Any, end: Any) -> None:
    for i in range(first, end):
        done[i] += 1
        firsts[i] = first


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def mark(threads: Any, done: Any, firsts: Any) -> None:
    kernel_team.on_team(_mark, threads, done.shape[0], (done, firsts))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 100])
def test_every_part_is_done_once(count: int, threads: int) -> None:
    done, firsts = np.zeros((2, count), np.int64)
    mark(threads, done, firsts)
    assert done.tolist() == [1] * count
    if kernel_team.HAS_TEAM:
        least = min(threads, count)
        assert least <= len(set(firsts.tolist())) <= (1 if threads == 1 else count)


def test_torch_brings_threads_that_can_be_asked() -> None:
    """Were its library of threads not found, nothing else would show it but the clock."""
    assert kernel_team.HAS_TEAM


def test_little_work_stays_on_the_thread_that_asks() -> None:
    assert num_threads(0) == num_threads(1000) == 1
    assert num_threads(10**9) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, up = torch.randn(2, 50, 128, generator=generator).to(dtype)
    norm = FusedNorm(torch.randn(128, generator=generator), 1e-5, True)
    heads = x.view(1, 50, 2, 64).transpose(1, 2)
    angles = up[None, :, :64].contiguous()
    wide = Logits([x, up, x[:, :20]], 270)
    targets = torch.arange(50) % 270

    def results() -> list[torch.Tensor]:
        rows = select_rows(normalise(wide), targets, 1)
        turned = _rotated(heads, angles, angles).contiguous()
        found = [norm(x), _gated(torch.cat([x, up], dim=1)), turned, *top_1(wide)]
        return [*found, rows.token_ids, rows.logprobs, rows.ranks]

    with torch.inference_mode():
        alone = results()
        monkeypatch.setattr(kernel_calls, "_NUMBERS_PER_THREAD", 1)
        for one, three in zip(alone, results(), strict=True):
            assert (
                one.view(torch.uint8).numpy().tobytes() == three.view(torch.uint8).numpy().tobytes()
            )
