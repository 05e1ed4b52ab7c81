"""Decoder layers that compute their rows in one call, on CPU.

A step that decodes a handful of requests consists of hundreds of small computations, and calling
them one by one takes longer than some of them do. A layer that is made of the parts that
`workers.layer_kernels` puts together, and that gives the same bits by it, computes small batches
so, and larger ones where its products are made by `workers.tile_kernels` for any number of rows.
All others are computed part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from workers import attention, compiled, layer_kernels
from workers.attention import AttentionBatch, use_batch
from workers.cpu_attention import KEY_PARTITION, BlockedKernel, split_scaling, tiles_agree
from workers.exact_linear import ExactLinear
from workers.fused import FusedNorm, GatedMLP
from workers.kernel_calls import as_array
from workers.kv_cache import KVCache, LayerSpec, Span
from workers.linear_groups import JointPart
from workers.tile_products import Product, few_rows

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_PROBE_CONTEXTS = (1, 6, 150, 16, 31, 300, 129)
"""Tokens, the last one included, of the requests that a layer is tried with; the last one has
more than one token in the batch."""
_MANY_ROWS = 100
"""Of them, where a layer takes so many."""
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class _Parts:
    """What a layer is made of."""

    first_norm: FusedNorm
    qkv: Product
    joined: Product
    """Of the attention's heads."""
    second_norm: FusedNorm
    gate_up: Product
    down: Product


class FusedLayer:
    """What is called in place of a layer's `forward`."""

    def __init__(self, layer: Any, spec: LayerSpec, parts: _Parts) -> None:
        """Take a layer, what it asks of the cache and of attention, and its parts."""
        self._forward = layer.forward
        self._number: int = layer.self_attn.layer_idx
        self._spec = spec
        self._parts = parts
        scaling = getattr(layer.self_attn, "scaling", spec.head_dim**-0.5)
        self._factor, self._scaling = split_scaling(scaling)

    def __call__(self, hidden_states: torch.Tensor, *others: Any, **named: Any) -> Any:
        """Return the layer's result for hidden states [1, rows, width]."""
        batch = attention.current_batch()
        turn = named.get("position_embeddings")
        if batch is None or turn is None or not self._takes(hidden_states, batch, *turn):
            return self._forward(hidden_states, *others, **named)
        return self.compute(hidden_states, batch, *turn)

    def _takes(
        self, x: torch.Tensor, batch: AttentionBatch, cos: torch.Tensor, sin: torch.Tensor
    ) -> bool:
        return (
            isinstance(batch.kernel, BlockedKernel)
            and x.dtype == cos.dtype == sin.dtype == torch.bfloat16
            and x.shape[0] == 1
            and x.shape[1] in self._parts.down.row_counts
            and cos.shape == sin.shape == (1, x.shape[1], self._spec.head_dim)
        )

    def compute(
        self, x: torch.Tensor, batch: AttentionBatch, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Do it in one call; the shapes are those that `_takes` asks for."""
        parts, spec = self._parts, self._spec
        kernel = batch.kernel
        assert isinstance(kernel, BlockedKernel)
        tiles = kernel.tile_batch(spec.sliding_window)
        rows = x[0].contiguous()
        out = torch.empty_like(rows)
        layer_kernels.decoder_layer(
            parts.down.num_threads(),
            tiles.num_threads(parts.joined.in_features),
            as_array(rows),
            parts.first_norm.arguments,
            parts.qkv.arguments,
            (as_array(cos[0].contiguous()), as_array(sin[0].contiguous())),
            batch.new_places,
            as_array(batch.cache.key(self._number)),
            as_array(batch.cache.value(self._number)),
            np.float32(self._factor),
            tiles.arguments(self._scaling, spec.sliding_window, KEY_PARTITION),
            parts.joined.arguments,
            parts.second_norm.arguments,
            parts.gate_up.arguments,
            parts.down.arguments,
            as_array(out),
        )
        return out.unsqueeze(0)

    def agrees(self, cache: KVCache) -> bool:
        """Return whether the layer itself gives the same bits, in its result and in the cache."""
        sizes = (few_rows()[0], few_rows()[-1], _MANY_ROWS)
        row_counts = self._parts.down.row_counts
        return all(self._agrees(cache, size) for size in sizes if size in row_counts)

    def _agrees(self, cache: KVCache, num_rows: int) -> bool:
        generator = torch.Generator().manual_seed(num_rows)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(torch.bfloat16)

        width = self._parts.qkv.in_features
        x = random(1, num_rows, width)
        cos, sin = (random(1, num_rows, self._spec.head_dim) for _ in range(2))
        kept = cache.key(self._number), cache.value(self._number)
        for tensor in kept:
            tensor[:-1] = random(*tensor[:-1].shape)
        before = [tensor.clone() for tensor in kept]
        spans = _probe_spans(num_rows)
        num_tokens = sum(span.num_tokens for span in spans)
        batch = AttentionBatch(spans, cache)
        with use_batch(batch):
            expected = self._forward(x, position_embeddings=(cos, sin))
        if not isinstance(expected, torch.Tensor) or not self._takes(x, batch, cos, sin):
            return False
        after = [tensor.clone() for tensor in kept]
        for tensor, old in zip(kept, before, strict=True):
            tensor.copy_(old)
        found = self.compute(x, batch, cos, sin)
        return torch.equal(found[:, :num_tokens], expected[:, :num_tokens]) and all(
            torch.equal(*pair) for pair in zip(kept, after, strict=True)
        )


def fuse(model: nn.Module, layers: Sequence[LayerSpec]) -> None:
    """Have the layers of a model compute few rows in one call where they can.

    Args:
        model: as `exact_linear.make_exact` has left it.
        layers: what each layer asks of the cache and of attention.
    """
    cache: KVCache | None = None
    module: Any
    for module in list(model.modules()):
        parts = _parts_of(module)
        if parts is None:
            continue
        spec = layers[module.self_attn.layer_idx]
        if spec.softcap is not None or not tiles_agree(spec.head_dim, torch.bfloat16):
            continue
        if cache is None:
            cache = _probe_cache(layers)
        fused = FusedLayer(module, spec, parts)
        with compiled.alone(), torch.inference_mode():
            if fused.agrees(cache):
                module.forward = fused


def _parts_of(layer: nn.Module) -> _Parts | None:
    """Return a layer's parts where it has those, and no others, by their names."""
    children = dict(layer.named_children())
    if set(children) != _PARTS:
        return None
    projections = dict(children["self_attn"].named_children())
    mlp = children["mlp"]
    norms = children["input_layernorm"], children["post_attention_layernorm"]
    if set(projections) != _PROJECTIONS or not isinstance(mlp, GatedMLP):
        return None
    query = projections["q_proj"]
    products = [
        product.few_rows if isinstance(product, ExactLinear) else None
        for product in (
            query.whole if isinstance(query, JointPart) else None,
            projections["o_proj"],
            mlp.gate_up_proj,
            mlp.down_proj,
        )
    ]
    first_norm, second_norm = norms
    qkv, joined, gate_up, down = products
    if not (isinstance(first_norm, FusedNorm) and isinstance(second_norm, FusedNorm)):
        return None
    if qkv is None or joined is None or gate_up is None or down is None:
        return None
    return _Parts(first_norm, qkv, joined, second_norm, gate_up, down)


def _probe_cache(layers: Sequence[LayerSpec]) -> KVCache:
    spans = _probe_spans(len(_PROBE_CONTEXTS))
    num_blocks = 1 + max(int(span.block_table.max()) for span in spans)
    return KVCache(layers, num_blocks=num_blocks, block_size=_BLOCK_SIZE, dtype=torch.bfloat16)


def _probe_spans(num_rows: int) -> list[Span]:
    """Return decodes and, as far as there are more rows, the end of a chunk."""
    spans: list[Span] = []
    row = block = 0
    for i, context in enumerate(_PROBE_CONTEXTS[:num_rows]):
        is_last = i == len(_PROBE_CONTEXTS) - 1
        num_tokens = num_rows - row if is_last else 1
        count = -(-context // _BLOCK_SIZE)
        table = np.arange(block, block + count, dtype=np.int32)
        spans.append(Span(row, context - num_tokens, num_tokens, table))
        row, block = row + num_tokens, block + count
    return spans
