"""Rows shared among threads: each computed once, to the same bits, and failures come out."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from workers import row_threads
from workers.fused import FusedNorm, _gated, _rotated
from workers.logprobs import Logits, normalise, select_rows, top_1
from workers.row_threads import over_rows

MANY = 2**24
"""Numbers per row that are worth a thread each."""


@pytest.fixture
def threads() -> Iterator[None]:
    """Three threads while a test runs, as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 100])
@pytest.mark.usefixtures("threads")
def test_every_row_is_done_once(num_rows: int) -> None:
    done = np.zeros(num_rows, np.int64)

    def loop(rows: slice) -> None:
        done[rows] += 1

    over_rows(loop, num_rows, MANY)
    assert done.tolist() == [1] * num_rows


@pytest.mark.usefixtures("threads")
def test_as_many_threads_as_torch_has_work_at_once() -> None:
    """Each waits for the two others; little work stays on the thread that asks."""
    together = threading.Barrier(3, timeout=60)
    seen: list[threading.Thread] = []

    def meet(rows: slice) -> None:
        together.wait()
        seen.append(threading.current_thread())

    over_rows(meet, 7, MANY)
    assert len(set(seen)) == 3
    seen.clear()
    over_rows(lambda rows: seen.append(threading.current_thread()), 7, 10)
    assert seen == [threading.current_thread()]


@pytest.mark.parametrize("bad_row", [0, 6])
@pytest.mark.usefixtures("threads")
def test_a_failure_comes_out_when_all_have_ended(bad_row: int) -> None:
    """Whether it is on the thread that asks or on another."""
    together = threading.Barrier(3, timeout=60)
    ended: list[int] = []

    def loop(rows: slice) -> None:
        together.wait()
        if rows.start <= bad_row < rows.stop:
            raise ValueError(f"row {bad_row}")
        ended.append(rows.start)

    with pytest.raises(ValueError, match=f"row {bad_row}"):
        over_rows(loop, 7, MANY)
    assert len(ended) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("threads")
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
        monkeypatch.setattr(row_threads, "_NUMBERS_PER_THREAD", 1)
        for one, three in zip(alone, results(), strict=True):
            assert (
                one.view(torch.uint8).numpy().tobytes() == three.view(torch.uint8).numpy().tobytes()
            )
