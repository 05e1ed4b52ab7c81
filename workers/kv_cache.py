"""Paged KV memory of one worker: per layer one tensor of blocks for K and one for V.

The module knows layers and shapes, and nothing of requests: block ids come from the scheduler.
Rules:
- All memory starts as zeros, and what a block held before it is given to the next request is only
  ever that cache's own KV, so memory that was never written never leaves in `read_blocks`. On CPU
  the system gives it when a block is first written: an engine takes as much as it has used.
- One block more than `num_blocks` is kept, is never written and stays zero. Attention points keys
  beyond a request's end at it, so nothing stale (least of all a NaN) reaches a sum.
- A block's bytes are, layer after layer, its K then its V in the cache's dtype. On CPU these are
  `[kv_heads, block_size, head_dim]`, so that a head's keys are copied many at a time; on CUDA
  `[block_size, kv_heads, head_dim]`, which its kernel reads. Equal devices, shapes and dtype make
  blocks interchangeable between workers.
- On CPU blocks are read and written without torch. Those who do that have threads of their own, and
  with OpenMP threads for these as well there would be more than cores: from then on none of them,
  the step's included, spins any more while it waits, and a step takes much longer.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from scheduler.codec import IntArray
from scheduler.errors import InvalidConfig, InvariantViolation

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class LayerSpec:
    """What one attention layer needs of the cache and of the attention kernel."""

    kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """Keys a query sees, itself included; None is all before it."""
    softcap: float | None = None


@dataclass(frozen=True)
class Span:
    """A chunk's place in the flattened batch of a step and in the KV cache."""

    first_row: int
    """Row of the batch that holds the chunk's first token."""
    start: int
    """Position of that token; KV of all earlier positions is in the blocks."""
    num_tokens: int
    block_table: IntArray
    """int32: block ids of the request, at least up to the chunk's end."""
    first_new: int = 0
    """Position before which KV is in the blocks already, and stays as it is."""

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + self.num_tokens

    @property
    def num_kept(self) -> int:
        """Leading tokens of the chunk whose KV stays as it is."""
        return min(max(self.first_new - self.start, 0), self.num_tokens)

    def slots(self, block_size: int) -> IntArray:
        """Return the token slots that the chunk's new KV goes to, int64 [new tokens]."""
        positions = np.arange(self.start + self.num_kept, self.end)
        blocks = self.block_table[positions // block_size].astype(np.int64)
        slots: IntArray = blocks * block_size + positions % block_size
        return slots


class KVCache:
    """`num_blocks` blocks of `block_size` tokens over all layers."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InvalidConfig(
                f"a KV cache needs at least one block of one token; got num_blocks={num_blocks}, "
                f"block_size={block_size}",
                num_blocks=num_blocks,
                block_size=block_size,
            )
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.is_heads_first = torch.device(device).type == "cpu"
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        for spec in self.layers:
            sizes = (
                (spec.kv_heads, block_size) if self.is_heads_first else (block_size, spec.kv_heads)
            )
            shape = (num_blocks + 1, *sizes, spec.head_dim)
            self._tensors.append(
                (_zeros(shape, dtype, device), _zeros(shape, dtype, device)),
            )

    @staticmethod
    def bytes_per_block(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of KV that one block holds over all layers."""
        return sum(2 * block_size * x.kv_heads * x.head_dim * dtype.itemsize for x in layers)

    @staticmethod
    def blocks_in(
        kv_bytes: int, layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype
    ) -> int:
        """Return how many blocks fit a budget of `kv_bytes`, the zero block included in it.

        Raises:
            InvalidConfig: the budget does not hold a single block.
        """
        block_bytes = KVCache.bytes_per_block(layers, block_size, dtype)
        num_blocks = kv_bytes // block_bytes - 1
        if num_blocks < 1:
            raise InvalidConfig(
                f"kv_bytes={kv_bytes} is too little: a block of {block_size} tokens takes "
                f"{block_bytes} bytes and two are needed; give at least {2 * block_bytes}",
                kv_bytes=kv_bytes,
                block_bytes=block_bytes,
            )
        return num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of KV per block over all layers."""
        return self.bytes_per_block(self.layers, self.block_size, self.dtype)

    def key(self, layer: int) -> torch.Tensor:
        """Return K of a layer.

        Returns:
            [num_blocks + 1, kv_heads, block_size, head_dim] on CPU, where `is_heads_first`; else
            [num_blocks + 1, block_size, kv_heads, head_dim].
        """
        return self._tensors[layer][0]

    def value(self, layer: int) -> torch.Tensor:
        """Return V of a layer, shaped like K."""
        return self._tensors[layer][1]

    def rows(self, slots: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Return where token slots are in a layer seen as [rows, head_dim].

        Args:
            slots: int64 [tokens]; slot = block id * block_size + offset in the block.
            kv_heads: of the layer.

        Returns:
            int64 [tokens * kv_heads], the heads of a token together.
        """
        heads = torch.arange(kv_heads, device=slots.device)
        if not self.is_heads_first:
            return (slots[:, None] * kv_heads + heads).reshape(-1)
        offsets = slots % self.block_size
        first = (slots - offsets) * kv_heads + offsets
        return (first[:, None] + heads * self.block_size).reshape(-1)

    def write(
        self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store KV of tokens.

        Args:
            layer: which layer's.
            rows: where, distinct; see `rows`.
            keys: [tokens, kv_heads, head_dim]; `values` likewise.
        """
        for cache, new in zip(self._tensors[layer], (keys, values), strict=True):
            head_dim = cache.shape[-1]
            cache.view(-1, head_dim).index_copy_(0, rows, new.reshape(-1, head_dim))

    def zero_slots(self, slots: torch.Tensor) -> None:
        """Set the KV of some token slots back to zero, in every layer."""
        for spec, pair in zip(self.layers, self._tensors, strict=True):
            rows = self.rows(slots, spec.kv_heads)
            for cache in pair:
                cache.view(-1, spec.head_dim).index_fill_(0, rows, 0)

    def read_blocks(self, block_ids: Sequence[int]) -> ByteArray:
        """Return the bytes of some blocks as a C-contiguous copy, uint8 [n, block_bytes]."""
        ids = self._checked(block_ids)
        out = np.empty((len(block_ids), self.block_bytes), np.uint8)
        start = 0
        for pair in self._tensors:
            for cache in pair:
                part = _gather(cache, ids)
                out[:, start : start + part.shape[1]] = part
                start += part.shape[1]
        return out

    def write_blocks(self, block_ids: Sequence[int], data: ByteArray) -> None:
        """Store what `read_blocks` gave (of this cache or one of the same layout).

        Args:
            block_ids: distinct ids.
            data: uint8 [n, block_bytes]; may be read-only.

        Raises:
            InvariantViolation: an id is not of this cache, or the data has another size.
        """
        ids = self._checked(block_ids)
        shape = (len(block_ids), self.block_bytes)
        if data.dtype != np.uint8 or data.shape != shape:
            raise InvariantViolation(
                f"KV of {len(block_ids)} blocks must be uint8 {list(shape)}; "
                f"got {data.dtype} {list(data.shape)}"
            )
        if not len(block_ids):
            return
        start = 0
        for pair in self._tensors:
            for cache in pair:
                size = cache[0].numel() * cache.element_size()
                _scatter(cache, ids, data[:, start : start + size])
                start += size

    def _checked(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        ids = np.asarray(block_ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_blocks):
            raise InvariantViolation(
                f"block ids must be in 0..{self.num_blocks - 1}; got {ids.min()}..{ids.max()}"
            )
        return ids


def _gather(cache: torch.Tensor, ids: npt.NDArray[np.int64]) -> ByteArray:
    """Return blocks' bytes, uint8 [n, bytes of a block in this tensor]."""
    if cache.device.type == "cpu":
        return _bytes(cache)[ids]
    part = cache.index_select(0, torch.from_numpy(ids).to(cache.device))
    return _bytes(part.cpu())


def _scatter(cache: torch.Tensor, ids: npt.NDArray[np.int64], data: ByteArray) -> None:
    """Store what `_gather` gave."""
    if cache.device.type == "cpu":
        _bytes(cache)[ids] = data
        return
    part = torch.from_numpy(np.array(data, order="C")).view(cache.dtype)
    part = part.view(-1, *cache.shape[1:]).to(cache.device)
    cache.index_copy_(0, torch.from_numpy(ids).to(cache.device), part)


def _bytes(blocks: torch.Tensor) -> ByteArray:
    """Return a view of a CPU tensor of blocks, uint8 [n, bytes of a block]."""
    return blocks.view(torch.uint8).flatten(1).numpy()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Steps read blocks all over the cache: with small pages each costs a search for its page.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
