"""Decodes that read KV where it lies: the bits of the matrix products, or these instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workers import attention_kernels, cpu_attention, decode_attention
from workers.cpu_attention import BlockedKernel
from workers.kv_cache import KVCache, LayerSpec, Span

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXTS = [1, 2, 15, 16, 17, 31, 127, 128, 129, 255, 256, 257, 384, 700]
"""Tokens, the last one included: a block, a tile and a partition, and one more or less of each."""


@pytest.fixture(autouse=True)
def _probed_anew() -> Any:
    decode_attention.agrees_with_products.cache_clear()
    with torch.inference_mode():
        yield
    decode_attention.agrees_with_products.cache_clear()


def agrees(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    return decode_attention.agrees_with_products(head_dim, dtype, cpu_attention.KEY_PARTITION)


def outputs(
    head_dim: int, block_size: int, heads: tuple[int, int], window: int | None, **settings: Any
) -> torch.Tensor:
    """Return what a batch of one decode per context gives, in blocks in random order."""
    num_blocks = sum(-(-context // block_size) for context in CONTEXTS)
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
    spans = []
    for row, context in enumerate(CONTEXTS):
        count = -(-context // block_size)
        table, ids = ids[:count], ids[count:]
        for kept in (cache.key(0), cache.value(0)):
            # What an earlier request left behind this one's last token.
            kept[int(table[-1]), :, (context - 1) % block_size + 1 :] = torch.nan
        spans.append(Span(row, context - 1, 1, table))
    query = 4 * torch.randn(48, heads[0], head_dim, generator=generator)
    scaling, cap = settings.get("scaling", head_dim**-0.5), settings.get("cap")
    kernel = BlockedKernel(spans, cache)
    return kernel.attend(0, query.bfloat16(), scaling, window, cap)


@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "heads", "settings"),
    [
        (64, 16, (9, 3), {}),
        (32, 128, (4, 4), {"cap": 5.0}),
        (96, 8, (4, 1), {"scaling": 0.11}),
        (128, 48, (8, 2), {}),
        (256, 1, (2, 1), {}),
    ],
)
def test_decodes_have_the_bits_of_the_products(
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    block_size: int,
    heads: tuple[int, int],
    settings: dict[str, Any],
    window: int | None,
) -> None:
    if not agrees(head_dim):
        pytest.skip("the products of this machine sum in another order")
    found = outputs(head_dim, block_size, heads, window, **settings)
    monkeypatch.setattr(cpu_attention, "agrees_with_products", lambda *_: False)
    expected = outputs(head_dim, block_size, heads, window, **settings)
    count = len(CONTEXTS)
    assert torch.isfinite(found).all()
    assert torch.equal(found[:count].view(torch.uint16), expected[:count].view(torch.uint16))


def test_decodes_on_two_threads_have_the_same_bits() -> None:
    one = outputs(64, 16, (9, 3), None)
    torch.set_num_threads(2)
    assert torch.equal(outputs(64, 16, (9, 3), None), one)


@pytest.mark.parametrize("name", ["decode_scores", "decode_outputs"])
def test_where_sums_are_in_another_order_the_products_are_used(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on a processor without AMX: here the loops round one number otherwise."""
    original = getattr(attention_kernels, name)

    def other(*arguments: Any) -> None:
        original(*arguments)
        arguments[-1].reshape(-1)[0] ^= 1

    monkeypatch.setattr(attention_kernels, name, other)
    assert not agrees(64)


def test_what_the_loops_are_not_made_for_goes_through_the_products() -> None:
    assert not agrees(64, torch.float32)
    assert not agrees(64, torch.float16)
    assert not agrees(80)
