"""What the journal keeps of a request, and how a request is made of it again.

A request in the journal is the `Request` as it was submitted, what its chunks brought since, and
the record that ended it. The records of one request that wait
together are written as one, so that a token costs no row of its own in the file.
The module knows no file, no thread and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from scheduler.actions import RecordFinished, RecordProgress
from scheduler.codec import decode, encode
from scheduler.errors import InvariantViolation
from scheduler.logprobs import LogprobRows, Logprobs
from scheduler.request import Request, RequestStatus

_MAX_PART_BYTES = 2**20
"""Progress is merged up to this size and cut beyond it, since a database limits a value's size."""


class _Rows(msgspec.Struct, frozen=True, array_like=True):
    """`Logprobs` as raw little-endian bytes: a tenth of the time of arrays, where rows are few."""

    num_rows: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes

    @classmethod
    def join(cls, parts: list[Logprobs]) -> _Rows | None:
        """Return the rows of all parts; None where there is no part."""
        if not parts:
            return None
        return cls(
            sum([part.num_rows for part in parts]),
            b"".join([np.ascontiguousarray(part.token_ids, "<i4").data for part in parts]),
            b"".join([np.ascontiguousarray(part.logprobs, "<f4").data for part in parts]),
            b"".join([np.ascontiguousarray(part.ranks, "<i4").data for part in parts]),
        )

    def append_to(self, held: LogprobRows | None) -> None:
        if held is None:
            raise InvariantViolation("the journal holds rows that the request does not ask for")
        shape = (self.num_rows, held.num_logprobs + 1)
        held.append(
            Logprobs(
                np.frombuffer(self.token_ids, "<i4").reshape(shape),
                np.frombuffer(self.logprobs, "<f4").reshape(shape),
                np.frombuffer(self.ranks, "<i4").reshape(shape),
            )
        )


class _Progress(msgspec.Struct, frozen=True, array_like=True):
    """What one or more chunks of a request brought."""

    num_computed_tokens: int
    """After the last of them."""
    token_ids: list[int]
    rows: _Rows | None
    output_rows: _Rows | None

    @classmethod
    def merge(cls, records: list[RecordProgress]) -> _Progress:
        """Return the progress of records that follow each other, at least one."""
        return cls(
            records[-1].num_computed_tokens,
            [r.sampled_token_id for r in records if r.sampled_token_id is not None],
            _Rows.join([r.rows for r in records if r.rows is not None]),
            _Rows.join([r.sampled_logprobs for r in records if r.sampled_logprobs is not None]),
        )

    def apply(self, request: Request) -> None:
        """Add this to `request`.

        Raises:
            InvariantViolation, ValueError: it can't be this request's.
        """
        if self.rows is not None:
            self.rows.append_to(request.prompt_logprobs)
        if self.output_rows is not None:
            self.output_rows.append_to(request.output_logprobs)
        request.output_token_ids += self.token_ids
        request.num_computed_tokens = max(request.num_computed_tokens, self.num_computed_tokens)


class StoredRequest(NamedTuple):
    """One request as the journal holds it."""

    request_id: str
    parts: list[bytes]
    """The encoded `Request` as submitted, then its progress in order."""
    finished: bytes | None
    """The encoded `RecordFinished`; None while it is live."""

    def restore(self) -> Request:
        """Return the request with all its progress, WAITING or FINISHED.

        Raises:
            InvariantViolation, ValueError: the records do not fit together (an error of msgspec's
                where they are none at all).
        """
        submitted, *progress = self.parts or [b""]
        request = Request.decode(submitted)
        if request.request_id != self.request_id:
            raise InvariantViolation(f"the journal holds {request.request_id!r} under its id")
        request.status = RequestStatus.WAITING
        for part in progress:
            decode(part, _Progress).apply(request)
        if self.finished is not None:
            end = decode(self.finished, RecordFinished)
            request.status = RequestStatus.FINISHED
            request.finish_reason, request.stop_reason = end.finish_reason, end.stop_reason
            request.error, request.stats = end.error, end.stats
        request.validate()
        return request


def encoded_progress(records: Iterable[RecordProgress]) -> Iterator[bytes]:
    """Yield the records of one request as few parts of a bounded size, in order."""
    group: list[RecordProgress] = []
    size = 0
    for record in records:
        for piece in _pieces(record):
            num_bytes = num_array_bytes(piece)
            if group and size + num_bytes > _MAX_PART_BYTES:
                yield encode(_Progress.merge(group))
                group, size = [], 0
            group.append(piece)
            size += num_bytes
    if group:
        yield encode(_Progress.merge(group))


def num_array_bytes(record: RecordProgress) -> int:
    """Return the size of the rows that a record brings."""
    num_bytes = record.rows.num_bytes if record.rows is not None else 0
    if record.sampled_logprobs is not None:
        num_bytes += record.sampled_logprobs.num_bytes
    return num_bytes


def _pieces(record: RecordProgress) -> Iterator[RecordProgress]:
    """Cut a record whose prompt rows are too large for one part; the last piece has the token."""
    rows = record.rows
    if rows is None or rows.num_bytes <= _MAX_PART_BYTES:
        yield record
        return
    step = max(1, _MAX_PART_BYTES * rows.num_rows // rows.num_bytes)
    last = (rows.num_rows - 1) // step * step
    for start in range(0, last, step):
        piece = rows[start : start + step]
        yield msgspec.structs.replace(
            record, rows=piece, sampled_token_id=None, sampled_logprobs=None
        )
    yield msgspec.structs.replace(record, rows=rows[last:])
