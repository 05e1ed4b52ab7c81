"""Logprob rows in flat arrays: what a worker computes and a request owns.

Row layout: column 0 is the actual token, columns 1..k are the k most likely tokens in descending
order of logprob (equal ones by ascending token id). A rank is 1 + the number of tokens of the
vocabulary with a strictly greater logprob. The module knows no text and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from scheduler.codec import FloatArray, IntArray
from scheduler.errors import InvariantViolation

_MAX_SEGMENTS = 64


class Logprobs(msgspec.Struct, frozen=True, eq=False):
    """Rows of logprobs. Compare two of them with `same_bits`."""

    token_ids: IntArray
    """int32 [rows, k + 1]: the actual token, then the top k."""
    logprobs: FloatArray
    """float32 [rows, k + 1]: natural-log softmax of the raw logits, computed in fp32."""
    ranks: IntArray
    """int32 [rows, k + 1]: 1 + number of strictly greater logprobs in the vocabulary."""

    @classmethod
    def empty(cls, num_logprobs: int) -> Logprobs:
        """Return zero rows of width `num_logprobs` + 1."""
        shape = (0, num_logprobs + 1)
        return cls(
            np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(shape, np.int32)
        )

    @classmethod
    def concat(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Return the rows of `parts` in order; they must have one width."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([p.token_ids for p in parts]),
            np.concatenate([p.logprobs for p in parts]),
            np.concatenate([p.ranks for p in parts]),
        )

    @property
    def num_rows(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def width(self) -> int:
        """k + 1."""
        return int(self.token_ids.shape[1])

    @property
    def num_bytes(self) -> int:
        return self.token_ids.nbytes + self.logprobs.nbytes + self.ranks.nbytes

    def __getitem__(self, rows: slice) -> Logprobs:
        """Return a view of some rows."""
        return Logprobs(self.token_ids[rows], self.logprobs[rows], self.ranks[rows])

    def same_bits(self, other: Logprobs) -> bool:
        """Whether both hold the same rows bit for bit (NaN equals itself, -0.0 is not 0.0)."""
        return all(
            a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
            for a, b in zip(self._arrays(), other._arrays(), strict=True)
        )

    def _arrays(self) -> tuple[IntArray, FloatArray, IntArray]:
        return (self.token_ids, self.logprobs, self.ranks)


class LogprobRows(msgspec.Struct, eq=False):
    """Rows that grow at the end, a segment at a time, as their request advances.

    Prompt logprobs: row j stands for prompt index j + 1, since index 0 has no distribution.
    Output logprobs: row j stands for output token j.
    """

    num_logprobs: int
    """k; every segment has k + 1 columns."""
    segments: list[Logprobs] = msgspec.field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(segment.num_rows for segment in self.segments)

    def check(self, rows: Logprobs) -> None:
        """Raise `InvariantViolation` where `rows` can't be appended: not k + 1 wide, or ragged."""
        shape = rows.token_ids.shape
        is_even = shape == rows.logprobs.shape == rows.ranks.shape
        if not is_even or shape[1:] != (self.num_logprobs + 1,):
            shapes = {array.shape for array in (rows.token_ids, rows.logprobs, rows.ranks)}
            raise InvariantViolation(
                f"rows of shape {sorted(shapes)} where {self.num_logprobs + 1} columns were due"
            )

    def append(self, rows: Logprobs) -> None:
        """Add rows at the end.

        Raises:
            InvariantViolation: they do not pass `check`; nothing has changed then.
        """
        self.check(rows)
        if rows.num_rows:
            self.segments.append(rows)
        if len(self.segments) > _MAX_SEGMENTS:
            self.array()

    def last(self, count: int) -> Logprobs:
        """Return the last `count` rows, or all of fewer; the others are not joined."""
        parts: list[Logprobs] = []
        for segment in reversed(self.segments):
            if count <= 0:
                break
            parts.append(segment if segment.num_rows <= count else segment[-count:])
            count -= segment.num_rows
        return Logprobs.concat(parts[::-1]) if parts else Logprobs.empty(self.num_logprobs)

    def rows(self, start: int, end: int) -> Logprobs:
        """Return the rows [start, end), without touching the others."""
        parts = []
        first = 0
        for segment in self.segments:
            if first >= end:
                break
            num_rows = segment.num_rows
            if first + num_rows > start:
                parts.append(segment[max(start - first, 0) : end - first])
            first += num_rows
        return Logprobs.concat(parts) if parts else Logprobs.empty(self.num_logprobs)

    def parts(self, max_bytes: int) -> list[Logprobs]:
        """Return all rows in order, as one or more `Logprobs` of at most so many bytes or one row.

        Rows that do not fit one are not copied.
        """
        if sum(segment.num_bytes for segment in self.segments) <= max_bytes:
            return [self.array()]
        parts = []
        for segment in self.segments:
            step = max(1, max_bytes * segment.num_rows // segment.num_bytes)
            parts += [segment[i : i + step] for i in range(0, segment.num_rows, step)]
        return parts

    def array(self) -> Logprobs:
        """Return all rows as one `Logprobs`, and keep them that way."""
        if not self.segments:
            return Logprobs.empty(self.num_logprobs)
        if len(self.segments) > 1:
            self.segments = [Logprobs.concat(self.segments)]
        return self.segments[0]
