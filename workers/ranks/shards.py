"""The bytes of KV blocks, whole and cut into the shares of several ranks.

A whole block has the layout of `workers.kv_cache`, whichever number of ranks computes it, and a
rank's share is that layout with its own heads alone. So it can't be seen of the bytes of a saved
block how many ranks there were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.errors import InvariantViolation
from workers.kv_cache import ByteArray, LayerSpec


@dataclass(frozen=True)
class BlockShards:
    """How the bytes of one cache's blocks fall into the shares of `size` ranks."""

    layers: tuple[LayerSpec, ...]
    """Of one rank."""
    block_size: int
    itemsize: int
    """Bytes of a number."""
    is_heads_first: bool
    """Whether a block's heads come before its tokens; else each token's heads are together."""
    size: int

    def merge(self, shares: Sequence[ByteArray]) -> ByteArray:
        """Return whole blocks, uint8 [n, bytes], of every rank's, each [n, bytes / size]."""
        num_blocks, num_bytes = shares[0].shape
        blocks = np.empty((num_blocks, num_bytes * self.size), np.uint8)
        for outer, own, whole in self._pieces():
            by_rank = blocks[:, whole].reshape(num_blocks, outer, self.size, -1)
            for rank, share in enumerate(shares):
                by_rank[:, :, rank] = share[:, own].reshape(num_blocks, outer, -1)
        return blocks

    def split(self, blocks: ByteArray) -> list[ByteArray]:
        """Return every rank's share of whole blocks: what `merge` puts together.

        Raises:
            InvariantViolation: these are no blocks of this layout.
        """
        num_blocks = len(blocks)
        own_bytes = sum((own.stop - own.start) for _, own, _ in self._pieces())
        if blocks.shape != (num_blocks, own_bytes * self.size):
            raise InvariantViolation(
                f"whole blocks of {self.size} ranks must be uint8 [n, {own_bytes * self.size}]; "
                f"got {list(blocks.shape)}"
            )
        shares = [np.empty((num_blocks, own_bytes), np.uint8) for _ in range(self.size)]
        for outer, own, whole in self._pieces():
            by_rank = blocks[:, whole].reshape(num_blocks, outer, self.size, -1)
            for rank, share in enumerate(shares):
                share[:, own] = by_rank[:, :, rank].reshape(num_blocks, -1)
        return shares

    def _pieces(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield where each layer's K, and then its V, is in a share and in a whole block.

        First comes how many times the ranks take turns in it.
        """
        tokens = self.block_size if self.is_heads_first else 1
        outer = self.block_size // tokens
        start = 0
        for layer in self.layers:
            num_bytes = self.block_size * layer.kv_heads * layer.head_dim * self.itemsize
            for _ in ("K", "V"):
                end = start + num_bytes
                yield outer, slice(start, end), slice(start * self.size, end * self.size)
                start = end
