"""Decoder layers that compute their rows in one call: the bits of their parts, or the parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny_models
from workers import decoder_layers, layer_kernels, tile_products
from workers.attention import AttentionBatch, use_batch
from workers.decoder_layers import FusedLayer
from workers.kv_cache import KVCache, Span
from workers.loader import LoadedModel, load_model
from workers.tile_kernels import MAX_ROWS

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXTS = [1, 7, 16, 17, 128, 129, 255, 257, 40, 90]
NUM_BLOCKS = sum(-(-context // 16) for context in CONTEXTS)


@pytest.fixture(scope="module", params=["llama", "qwen2", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """One without and one with biases, and one with a window."""
    folder = tmp_path_factory.mktemp(request.param)
    return load_model(str(getattr(tiny_models, f"tiny_{request.param}")(folder)), dtype="bf16")


def fused(model: LoadedModel) -> list[FusedLayer]:
    return [x.forward for x in model.model.model.layers if isinstance(x.forward, FusedLayer)]


def states(model: LoadedModel, spans: list[Span]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a batch's hidden states, and all KV after it."""
    cache = KVCache(model.layers, num_blocks=NUM_BLOCKS, block_size=16, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    kept = [x for i in range(len(model.layers)) for x in (cache.key(i), cache.value(i))]
    for tensor in kept:
        tensor[:-1] = torch.randn(tensor[:-1].shape, generator=generator)
    num_tokens = sum(span.num_tokens for span in spans)
    num_rows = num_tokens if model.padding.least == 1 else -(-num_tokens // 16) * 16
    ids, positions = torch.zeros(num_rows, dtype=torch.int64), np.zeros(num_rows, np.int64)
    for span in spans:
        own = slice(span.first_row, span.first_row + span.num_tokens)
        positions[own] = np.arange(span.start, span.end)
    ids[:num_tokens] = (torch.arange(num_tokens) + 5) % model.vocab_size
    with use_batch(AttentionBatch(spans, cache)):
        hidden = model.hidden_states(ids, torch.from_numpy(positions))
    return hidden[:num_tokens], kept


def spans_of(num_tokens: list[int], num_kept: int = 0) -> list[Span]:
    """Return the last tokens of requests of all `CONTEXTS`, so many of each."""
    spans, row, block = [], 0, 0
    for context, count in zip(CONTEXTS, num_tokens, strict=False):
        blocks = np.arange(block, block + -(-context // 16), dtype=np.int32)
        count = min(count, context)
        start = context - count
        spans.append(Span(row, start, count, blocks, first_new=start + num_kept))
        row, block = row + count, block + len(blocks)
    return spans


BATCHES = [
    spans_of([1]),
    spans_of([1, 1, 1]),
    spans_of([1] * 10),
    spans_of([1, 5, 16, 1, 1]),
    spans_of([1, 7, 16]),
    spans_of([1, 7, 3], num_kept=1),
    spans_of([1, 7, 16, 9]),
    spans_of([1, 7, 16, 1, 23]),
    spans_of([1, 7, 16, 17, 100, 1, 200, 1]),
    spans_of([1, 7, 16, 17, 100, 110], num_kept=5),
]


@pytest.mark.parametrize("batch", range(len(BATCHES)))
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_have_the_bits_of_the_layers_parts(
    model: LoadedModel, batch: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = BATCHES[batch]
    if not fused(model):
        pytest.skip("this machine computes layers part by part")
    if sum(span.num_tokens for span in spans) > MAX_ROWS and not tile_products.widens():
        pytest.skip("this machine computes layers of many rows part by part")
    torch.set_num_threads(threads)
    monkeypatch.setattr("workers.kernel_calls._NUMBERS_PER_THREAD", 1)
    calls = []
    original = layer_kernels.decoder_layer

    def counted(*arguments: Any) -> None:
        calls.append(arguments[0])
        original(*arguments)

    monkeypatch.setattr(layer_kernels, "decoder_layer", counted)
    hidden, kept = states(model, spans)
    assert calls == [threads] * len(model.layers)
    monkeypatch.setattr(FusedLayer, "_takes", lambda *_: False)
    expected_hidden, expected_kept = states(model, spans)
    assert len(calls) == len(model.layers)
    assert torch.equal(hidden, expected_hidden)
    for found, expected in zip(kept, expected_kept, strict=True):
        assert torch.equal(found, expected)


def test_this_machine_fuses_layers_where_it_has_the_instructions(model: LoadedModel) -> None:
    """Were they refused by a fault of ours, nothing else would show it but the clock."""
    if not tile_products.is_available():
        pytest.skip("no such instructions here")
    assert len(fused(model)) == len(model.layers)


def test_a_layer_of_other_arithmetic_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that scales what it adds: its parts are the same, and its numbers are not."""
    fuse = decoder_layers.fuse

    def of_a_changed_model(model: Any, layers: Any) -> None:
        layer = model.model.layers[1]
        plain = layer.forward
        layer.forward = lambda x, **named: x + 0.5 * (plain(x, **named) - x)
        fuse(model, layers)

    monkeypatch.setattr(decoder_layers, "fuse", of_a_changed_model)
    model = load_model(str(tiny_models.tiny_llama(tmp_path)), dtype="bf16")
    assert not isinstance(model.model.model.layers[1].forward, FusedLayer)
    if tile_products.is_available():
        assert len(fused(model)) == len(model.layers) - 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_are_computed_part_by_part(tmp_path: Path, dtype: str) -> None:
    model = load_model(str(tiny_models.tiny_llama(tmp_path)), dtype=dtype)
    assert not fused(model)
