"""Attention by kernels of ours: the bits of the library's products, or these instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.own_products import OwnProducts
from workers import attention_kernels, cpu_attention, tile_products
from workers.cpu_attention import BlockedKernel
from workers.kv_cache import KVCache, LayerSpec, Span

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXTS = [1, 2, 15, 16, 17, 31, 127, 128, 129, 255, 256, 257, 384, 700]
"""Tokens, the last one included: a block, a tile and a partition, and one more or less of each."""


@pytest.fixture(autouse=True)
def _probed_anew() -> Any:
    cpu_attention.tiles_agree.cache_clear()
    with torch.inference_mode():
        yield
    cpu_attention.tiles_agree.cache_clear()


def agrees(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    return cpu_attention.tiles_agree(head_dim, dtype)


CHUNKS = [(context - 1, context) for context in CONTEXTS] + [
    (0, 1),
    (0, 128),
    (0, 200),
    (100, 103),
    (128, 256),
    (200, 500),
    (255, 258),
    (511, 640),
]
"""Decodes, and chunks that begin and end within tiles, at their borders and in partitions."""


def outputs(
    use_tiles: bool | None,
    head_dim: int = 64,
    block_size: int = 16,
    heads: tuple[int, int] = (9, 3),
    window: int | None = None,
    scaling: float | None = None,
) -> torch.Tensor:
    """Return what a batch of all chunks gives, in blocks in random order."""
    num_blocks = sum(-(-end // block_size) for _, end in CHUNKS)
    cache = KVCache(
        [LayerSpec(heads[1], head_dim)],
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=torch.bfloat16,
    )
    generator = torch.Generator().manual_seed(7)
    for kept in (cache.key(0), cache.value(0)):
        kept[:num_blocks] = torch.randn(kept[:num_blocks].shape, generator=generator)
    ids = np.random.default_rng(5).permutation(num_blocks).astype(np.int32)
    spans, row = [], 0
    for start, end in CHUNKS:
        count = -(-end // block_size)
        table, ids = ids[:count], ids[count:]
        for kept in (cache.key(0), cache.value(0)):
            # What an earlier request left behind this one's last token.
            kept[int(table[-1]), :, (end - 1) % block_size + 1 :] = torch.nan
        spans.append(Span(row, start, end - start, table))
        row += end - start
    query = 4 * torch.randn(row, heads[0], head_dim, generator=generator)
    kernel = BlockedKernel(spans, cache, use_tiles=use_tiles)
    scaling = head_dim**-0.5 if scaling is None else scaling
    with OwnProducts():
        return kernel.attend(0, query.bfloat16(), scaling, window, None)


@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "heads", "scaling"),
    [
        (64, 16, (9, 3), None),
        (32, 128, (4, 4), None),
        (96, 8, (4, 1), 0.11),
        (128, 48, (8, 2), None),
        (256, 1, (2, 1), None),
        (64, 16, (32, 2), 0.3),
    ],
)
def test_tiles_give_the_bits_of_the_products(
    head_dim: int,
    block_size: int,
    heads: tuple[int, int],
    scaling: float | None,
    window: int | None,
) -> None:
    if not agrees(head_dim):
        pytest.skip("attention of this machine has other bits")
    found, expected = (
        outputs(use_tiles, head_dim, block_size, heads, window, scaling)
        for use_tiles in (True, False)
    )
    assert torch.isfinite(found).all()
    assert torch.equal(found.view(torch.uint16), expected.view(torch.uint16))


def test_this_machine_uses_tiles_where_it_has_them() -> None:
    """Were they refused by a fault of ours, nothing else would show it but the clock."""
    if not tile_products.is_available():
        pytest.skip("no such instructions here")
    assert agrees(64)


def test_two_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    one = outputs(None)
    torch.set_num_threads(2)
    monkeypatch.setattr("workers.kernel_calls._NUMBERS_PER_THREAD", 1)
    assert torch.equal(outputs(None), one)


def test_where_the_bits_differ_the_products_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a version of torch that sums otherwise: here one number is rounded otherwise."""
    if tile_products.widens():
        pytest.skip("the library's bits are none of the engine's here")
    expected = outputs(False)
    original = attention_kernels.attend

    def other(*arguments: Any) -> None:
        original(*arguments)
        arguments[-1][0, 0, 0] ^= 1

    monkeypatch.setattr(attention_kernels, "attend", other)
    assert not agrees(64)
    assert torch.equal(outputs(None), expected)


def test_what_tiles_are_not_made_for_goes_through_the_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not agrees(64, torch.float32)
    assert not agrees(64, torch.float16)
    assert not agrees(80)
    cpu_attention.tiles_agree.cache_clear()
    monkeypatch.setattr(tile_products, "is_available", lambda: False)
    assert not agrees(64)


def test_a_key_that_is_spoilt_spoils_those_alone_that_see_it() -> None:
    cache = KVCache([LayerSpec(3, 64)], num_blocks=8, block_size=16, dtype=torch.bfloat16)
    for kept in (cache.key(0), cache.value(0)):
        kept.normal_()
    cache.key(0)[4, 1, 5] = torch.nan
    spans = [Span(0, 0, 64, np.arange(4)), Span(64, 0, 64, np.arange(4, 8))]
    query = torch.randn(128, 9, 64).bfloat16()
    found = BlockedKernel(spans, cache).attend(0, query, 0.125, None, None)
    assert torch.isfinite(found[:64]).all()
    # The key of position 5 and KV head 1, so of query heads 3 to 5.
    assert torch.isfinite(found[64 + 4]).all()
    assert not torch.isfinite(found[64 + 5 :, 3:6]).any()


@given(st.lists(st.integers(1, 128 * 8192), min_size=1, max_size=40))
def test_halves_of_a_batch_are_about_as_much_work(work: list[int]) -> None:
    """Each thread gets tiles that follow each other."""
    order = cpu_attention._evenly(np.array(work))
    assert sorted(order) == list(range(len(work)))
    half = len(work) // 2
    first, second = (sum(work[i] for i in part) for part in (order[:half], order[half:]))
    assert abs(first - second) <= 2 * max(work)
