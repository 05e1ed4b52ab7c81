"""Results as lines of a JSONL file, which can be gone on with after any interruption.

Rules:
- Each result is one line, handed to the operating system as a whole before the next one is computed
  on: a process that is killed loses none. A torn line, or whatever a power cut left at the end, is
  cut off when the file is opened again, and its rows count as not done.
- The file is synced to the disk every few seconds and at the end: a power cut costs the rows of
  those seconds.
- Only one process at a time has the file.
A logprob of minus infinity is null, as JSON has no word for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from cluster.batch_input import LineSet
from cluster.batch_rows import RowResult
from scheduler.errors import HaversackError, OutputConflict
from scheduler.outputs import DecodeToken

_SYNC_INTERVAL_S = 5.0


@dataclass
class Finished:
    """The rows whose results are written."""

    rows: LineSet = field(default_factory=LineSet)
    num_failed: int = 0
    num_tokens: int = 0
    """Scored ones."""
    logprob: float = 0.0
    """Of all of them."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a result; a logprob that is None is minus infinity."""
        self.rows.add(record["index"])
        if record.get("error") is not None:
            self.num_failed += 1
            return
        logprob = record["logprob"]
        self.num_tokens += record["num_tokens"]
        self.logprob += -math.inf if logprob is None else logprob


class Expected:
    """Which row may come next in an output: the next one of the input, or any that is not there."""

    def __init__(self, rows: LineSet, *, ordered: bool) -> None:
        self._rows = rows
        self._next = iter(rows) if ordered else None

    def may_follow(self, index: int, finished: Finished) -> bool:
        """Whether the row of this index is due; each is asked about once."""
        if self._next is not None:
            return index == next(self._next, None)
        return index in self._rows and index not in finished.rows


class Output(Protocol):
    """Where results go."""

    def is_empty(self) -> bool:
        """Whether nothing has been written."""

    def clear(self) -> None:
        """Forget what has been written."""

    def recover(self, expected: Expected) -> Finished:
        """Return what is written, after cutting off what is damaged."""

    def records(self) -> Generator[dict[str, Any], None, None]:
        """Yield the results that are written, in order; to be read before others are added."""

    def write(self, record: dict[str, Any]) -> None:
        """Add a result."""

    def complete(self) -> None:
        """Say that all results are there; they are on the disk when this returns."""

    def close(self) -> None:
        """Let go of it, complete or not."""


def record_of(
    result: RowResult, decode: DecodeToken | None, *, with_tokens: bool, num_logprobs: int
) -> dict[str, Any]:
    """Return what is written of a result.

    Args:
        result: of a row.
        decode: gives a token's own text.
        with_tokens: whether each token is told, or only what they sum up to.
        num_logprobs: k; where it is not 0, each token's k likeliest alternatives are told.
    """
    row, outcome = result.row, result.outcome
    record: dict[str, Any] = {"index": row.index}
    if row.id is not None:
        record["id"] = row.id
    if isinstance(outcome, HaversackError):
        record["error"] = {"type": type(outcome).__name__, "message": outcome.message}
        return record
    record["logprob"] = outcome.logprob
    record["num_tokens"] = outcome.num_tokens
    record["is_greedy"] = outcome.is_greedy
    if not with_tokens:
        return record
    first = result.first_token_ids
    unscored = [None] * len(first)
    arrays = outcome.token_logprobs.arrays
    record["token_ids"] = [*first, *outcome.token_ids]
    if outcome.tokens is not None and decode is not None:
        record["tokens"] = [*map(decode, first), *outcome.tokens]
    record["token_logprobs"] = [*unscored, *arrays.logprobs[:, 0].tolist()]
    record["token_ranks"] = [*unscored, *arrays.ranks[:, 0].tolist()]
    if num_logprobs:
        rows = zip(
            arrays.token_ids[:, 1:].tolist(),
            arrays.logprobs[:, 1:].tolist(),
            arrays.ranks[:, 1:].tolist(),
            strict=True,
        )
        alternatives = [[_alternative(a, decode) for a in zip(*r, strict=True)] for r in rows]
        record["top_logprobs"] = [*unscored, *alternatives]
    return record


def _alternative(entry: tuple[int, float, int], decode: DecodeToken | None) -> dict[str, Any]:
    token_id, logprob, rank = entry
    text = {} if decode is None else {"token": decode(token_id)}
    return {"token_id": token_id, **text, "logprob": logprob, "rank": rank}


class _Written(msgspec.Struct):
    """What of a line tells what is done."""

    index: int
    num_tokens: int = -1
    logprob: float | None = None
    error: dict[str, str] | None = None

    @property
    def is_whole(self) -> bool:
        return self.error is not None or self.num_tokens >= 0


class JsonlOutput:
    """A file of JSON lines; see `Output`."""

    def __init__(self, path: Path) -> None:
        """Take hold of the file, which is made where it is not there.

        Raises:
            OutputConflict: another process has it.
            OSError: it can't be opened.
        """
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115
        with _closed_on_error(self.close):
            lock(self._file.fileno(), path)
        self._path = path
        self._synced_s = time.monotonic()

    def is_empty(self) -> bool:
        return os.fstat(self._file.fileno()).st_size == 0

    def clear(self) -> None:
        self._file.truncate(0)

    def recover(self, expected: Expected) -> Finished:
        finished = Finished()
        decoder = msgspec.json.Decoder(_Written)
        self._file.seek(0)
        num_good_bytes = 0
        for line in self._file:
            try:
                written = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
            if not line.endswith(b"\n") or not written.is_whole:
                break
            if not expected.may_follow(written.index, finished):
                break
            finished.add(msgspec.structs.asdict(written))
            num_good_bytes += len(line)
        self._file.truncate(num_good_bytes)
        return finished

    def records(self) -> Generator[dict[str, Any], None, None]:
        with self._path.open("rb") as file:
            yield from map(msgspec.json.decode, file)

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json_line(record))
        self._file.flush()
        if time.monotonic() >= self._synced_s + _SYNC_INTERVAL_S:
            self.complete()

    def complete(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_s = time.monotonic()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())
        self._file.close()


class StreamOutput:
    """Lines of JSON for whoever reads them; nothing can be gone on with."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def is_empty(self) -> bool:
        return True

    def clear(self) -> None:
        pass

    def recover(self, expected: Expected) -> Finished:
        return Finished()

    def records(self) -> Generator[dict[str, Any], None, None]:
        yield from ()

    def write(self, record: dict[str, Any]) -> None:
        self._stream.write(json_line(record))
        self._stream.flush()

    def complete(self) -> None:
        pass

    def close(self) -> None:
        pass


def json_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line; numbers that JSON does not know are null."""
    return msgspec.json.encode(record) + b"\n"


def lock(descriptor: int, path: Path) -> None:
    """Take hold of an open file or folder until it is closed.

    Raises:
        OutputConflict: another process has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputConflict(
            f"another process is writing {path}: wait for its end, or give another output",
            path=str(path),
        ) from None


@contextlib.contextmanager
def _closed_on_error(close: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        close()
        raise
