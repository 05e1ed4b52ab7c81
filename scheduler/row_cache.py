"""Prompt rows of full KV blocks, kept for other requests with the same prefix.

Block b owns the rows of its own tokens: those of the prompt indices [b * B, (b + 1) * B), where B
is the block size. Index 0 has no row, so block 0 owns B - 1. A row depends on the tokens up to its
own index and on nothing else, so the block's chained hash names it. (It is computed at the position
before: the first row of a block comes from the last position of the block before.)

Rules:
- Rows with k alternatives serve whoever wants as many or fewer: their first columns.
- Rows for given token ids serve only those who ask for the same ids in the same order.
- The bytes of all entries stay within the budget, least recently used first out, and the end of a
  chain before its head, without which it is of no use.
The module knows hashes, columns and rows; it knows no request, no worker and no KV.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.errors import InvariantViolation
from scheduler.logprobs import Logprobs

_ENTRY_BYTES = 512
"""What an entry takes beside its numbers: its key and the objects that hold it."""
_SMALL_BYTES = 2**20
"""A block of no more than this is kept in any budget that it fits."""


class Columns(NamedTuple):
    """What rows hold beside the actual token."""

    token_ids: tuple[int, ...]
    """These, in this order; empty for the most likely ones."""
    num_logprobs: int
    """How many."""


class RowCache:
    """Rows by block hash, within a budget of bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        """Start empty; a capacity of 0 keeps nothing."""
        self._capacity_bytes = capacity_bytes
        self._max_entry_bytes = min(max(capacity_bytes // 64, _SMALL_BYTES), capacity_bytes)
        self._entries: OrderedDict[tuple[bytes, tuple[int, ...]], npt.NDArray[np.int32]] = (
            OrderedDict()
        )
        """(block hash, token ids) -> int32 [3, rows, k + 1]: token ids, the bits of the logprobs,
        ranks; least recently used first."""
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._capacity_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries, what it takes to hold them included."""
        return self._num_bytes

    @property
    def num_blocks(self) -> int:
        """Entries."""
        return len(self._entries)

    def num_leading(self, block_hashes: Sequence[bytes], columns: Columns) -> int:
        """Return of how many leading blocks `take` would find the rows."""
        for index, block_hash in enumerate(block_hashes):
            if self._find(block_hash, columns) is None:
                return index
        return len(block_hashes)

    def take(self, block_hashes: Sequence[bytes], columns: Columns) -> tuple[int, Logprobs]:
        """Return how many leading blocks have the rows asked for, and those rows, copied."""
        count = self.num_leading(block_hashes, columns)
        if not count:
            return 0, Logprobs.empty(columns.num_logprobs)
        keys = [(block_hash, columns.token_ids) for block_hash in block_hashes[:count]]
        for key in reversed(keys):
            self._entries.move_to_end(key)
        width = columns.num_logprobs + 1
        found = np.concatenate([self._entries[key][:, :, :width] for key in keys], axis=1)
        return count, Logprobs(found[0], found[1].view(np.float32), found[2])

    def has(self, block_hash: bytes, columns: Columns) -> bool:
        """Whether rows of a block that serve `columns` are here."""
        return self._find(block_hash, columns) is not None

    def put(self, block_hash: bytes, columns: Columns, rows: Logprobs) -> None:
        """Keep a copy of all the rows of a block, unless ones that serve the same are here already.

        A block that would take much of the budget by itself is not kept: a prompt of such blocks
        would drive everybody else's rows out.
        """
        num_bytes = rows.num_bytes + _ENTRY_BYTES
        if num_bytes > self._max_entry_bytes or self.has(block_hash, columns):
            return
        key = (block_hash, columns.token_ids)
        before = self._entries.pop(key, None)
        if before is not None:
            self._num_bytes -= _entry_bytes(before)
        self._num_bytes += num_bytes
        while self._num_bytes > self._capacity_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= _entry_bytes(dropped)
        entry = np.empty((3, *rows.token_ids.shape), np.int32)
        entry[0], entry[1], entry[2] = rows.token_ids, rows.logprobs.view(np.int32), rows.ranks
        self._entries[key] = entry

    def validate(self) -> None:
        """Raise `InvariantViolation` where the bytes are miscounted or beyond the budget."""
        counted = sum(_entry_bytes(entry) for entry in self._entries.values())
        if counted != self._num_bytes or counted > self._capacity_bytes:
            raise InvariantViolation(
                f"the row cache holds {counted} bytes of {self._capacity_bytes}, and counts "
                f"{self._num_bytes}"
            )

    def _find(self, block_hash: bytes, columns: Columns) -> npt.NDArray[Any] | None:
        entry = self._entries.get((block_hash, columns.token_ids))
        return entry if entry is not None and entry.shape[2] > columns.num_logprobs else None


def _entry_bytes(entry: npt.NDArray[Any]) -> int:
    return entry.nbytes + _ENTRY_BYTES
