"""Paged attention, plugged into transformers' attention interface.

The models of transformers call `_attention_interface` for every layer with q, k and v of the whole
flattened batch. What that batch consists of (which rows are whose, at which positions, in which
blocks) is an `AttentionBatch`, made current with `use_batch` around the model's forward. The
module knows positions, blocks and shapes; it knows no request, no parameter and no token.

A kernel is chosen by device: `workers.cpu_attention` on CPU, torch's variable-length attention on
CUDA. Both give a row the same bits whatever the chunking and the rest of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast

import numpy as np
import torch
from transformers import AttentionInterface

from scheduler.codec import IntArray
from scheduler.errors import UnsupportedModel
from workers.kv_cache import KVCache, Span

IMPLEMENTATION = "haversack_paged"
MAX_CPU_HEAD_DIM = 256
"""Largest head size for which the product of q and k sums over few enough numbers on CPU."""
_UNDERSTOOD = frozenset({"dropout", "is_causal", "position_ids", "output_attentions", "use_cache"})


class Kernel(Protocol):
    """Computes the attention of one step's batch, a layer at a time."""

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float, window: int | None, cap: float | None
    ) -> torch.Tensor:
        """Return the attention output of all rows, [rows, heads, head_dim].

        Args:
            layer: whose KV, which already holds this step's tokens.
            query: [rows, heads, head_dim]; rows of no span get finite numbers.
            scaling: factor of the scores.
            window: keys that a query sees, itself included; None is all before it.
            cap: soft cap of the scores, or None.
        """
        ...


class AttentionBatch:
    """One step's ragged batch: where its rows' KV goes, and the kernel that reads it."""

    def __init__(self, spans: Sequence[Span], cache: KVCache) -> None:
        self.cache = cache
        device = cache.key(0).device
        self._new_rows: torch.Tensor | slice = slice(sum(span.num_tokens for span in spans))
        if any(span.num_kept for span in spans):
            rows = [
                np.arange(span.first_row + span.num_kept, span.first_row + span.num_tokens)
                for span in spans
            ]
            self._new_rows = torch.from_numpy(np.concatenate(rows)).to(device)
        slots = np.concatenate([span.slots(cache.block_size) for span in spans])
        self._slots = torch.from_numpy(slots).to(device)
        self._rows: dict[int, torch.Tensor] = {}
        """Where the new KV goes, by a layer's number of KV heads."""
        self.kernel = make_kernel(spans, cache)

    @functools.cached_property
    def new_places(self) -> tuple[IntArray, IntArray]:
        """On CPU: slots of the cache for the batch's new KV, and the rows that it is of, int64."""
        rows = self._new_rows
        if isinstance(rows, slice):
            return self._slots.numpy(), np.arange(rows.stop)
        return self._slots.numpy(), rows.numpy()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
    ) -> torch.Tensor:
        """Store the batch's KV of one layer and return its attention, [rows, heads, head_dim].

        Args:
            query: [rows, heads, head_dim]; rows after the last token are padding.
            key: [rows, kv_heads, head_dim]; `value` likewise.
        """
        rows = self._rows.get(key.shape[1])
        if rows is None:
            rows = self._rows[key.shape[1]] = self.cache.rows(self._slots, key.shape[1])
        self.cache.write(layer, rows, key[self._new_rows], value[self._new_rows])
        return self.kernel.attend(layer, query, scaling, window, cap)


def make_kernel(spans: Sequence[Span], cache: KVCache) -> Kernel:
    """Return the kernel for the device that the cache is on."""
    if cache.key(0).is_cuda:
        return VarlenKernel(spans, cache)
    # Not imported with this module: it brings numba, which has no part in what runs on CUDA.
    from workers.cpu_attention import BlockedKernel

    return BlockedKernel(spans, cache)


class VarlenKernel:
    """torch's variable-length attention on CUDA.

    Its kernel reads a block table where blocks are multiples of 256 tokens; smaller blocks are
    gathered first, each request's keys in one run. `num_splits=1` keeps a row's sum over keys
    independent of the rest of the batch.
    """

    _PAGE_MULTIPLE = 256

    def __init__(self, spans: Sequence[Span], cache: KVCache) -> None:
        device = cache.key(0).device
        self._cache = cache
        lengths_q = [span.num_tokens for span in spans]
        lengths_k = [span.end for span in spans]
        self._max_q = max(lengths_q)
        self._max_k = max(lengths_k)
        self._cu_q = _cumulative(lengths_q, device)
        self._cu_k = _cumulative(lengths_k, device)
        self._used_k = torch.tensor(lengths_k, dtype=torch.int32, device=device)
        self._num_tokens = sum(lengths_q)
        self._paged = cache.block_size % self._PAGE_MULTIPLE == 0
        if self._paged:
            self._table = torch.from_numpy(_padded_table(spans, cache)).to(device)
        else:
            slots = np.concatenate([_prefix_slots(span, cache.block_size) for span in spans])
            self._gather = torch.from_numpy(slots).to(device)

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float, window: int | None, cap: float | None
    ) -> torch.Tensor:
        """See `Kernel.attend`; soft caps are refused when the model is loaded."""
        from torch.nn.attention.varlen import varlen_attn

        key, value = self._cache.key(layer), self._cache.value(layer)
        if self._paged:
            keys: dict[str, Any] = {"seqused_k": self._used_k, "block_table": self._table}
        else:
            key = key.view(-1, *key.shape[2:]).index_select(0, self._gather)
            value = value.view(-1, *value.shape[2:]).index_select(0, self._gather)
            keys = {}
        out = varlen_attn(
            query[: self._num_tokens].contiguous(),
            key,
            value,
            self._cu_q,
            None if self._paged else self._cu_k,
            self._max_q,
            self._max_k,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[-2],
            num_splits=1,
            **keys,
        )
        padded = query.new_zeros(query.shape)
        padded[: self._num_tokens] = cast(torch.Tensor, out)
        return padded


def _cumulative(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)


def _prefix_slots(span: Span, block_size: int) -> IntArray:
    return Span(0, 0, span.end, span.block_table).slots(block_size)


def _padded_table(spans: Sequence[Span], cache: KVCache) -> IntArray:
    longest = max(len(span.block_table) for span in spans)
    table = np.full((len(spans), longest), cache.num_blocks, np.int32)
    for row, span in zip(table, spans, strict=True):
        row[: len(span.block_table)] = span.block_table
    return table


class Attention(Protocol):
    """What the interface hands a layer's q, k and v to: a batch, or the loader's probe."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
    ) -> torch.Tensor:
        """See `AttentionBatch.attend`."""
        ...


_CURRENT: ContextVar[Attention] = ContextVar("haversack_attention")


@contextmanager
def use_batch(attention: Attention) -> Iterator[None]:
    """Let the model's attention layers go to `attention` within the `with` block."""
    token = _CURRENT.set(attention)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_batch() -> AttentionBatch | None:
    """Return the batch that is being computed; None in the loader's probe."""
    found = _CURRENT.get()
    return found if isinstance(found, AttentionBatch) else None


def _attention_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks.

    Takes q `[1, heads, rows, head_dim]`, returns `[1, rows, heads, head_dim]` and no weights.

    Raises:
        UnsupportedModel: the layer asks for something that the kernels do not do.
    """
    strange = sorted(
        name for name, value in others.items() if name not in _UNDERSTOOD and value is not None
    )
    if attention_mask is not None:
        strange.append("attention_mask")
    if strange:
        raise UnsupportedModel(
            f"{type(module).__name__} passes {', '.join(strange)} to attention, which the paged "
            f"kernels do not support; they do causal attention, sliding windows and soft caps"
        )
    out = _CURRENT.get().attend(
        cast(int, module.layer_idx),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Make `attn_implementation=IMPLEMENTATION` known to transformers.

    No mask function goes with it: transformers then builds no mask at all, which is what a kernel
    that works from positions wants.
    """
    AttentionInterface.register(IMPLEMENTATION, _attention_interface)
