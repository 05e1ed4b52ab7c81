"""Lives of requests as a trace that Perfetto (ui.perfetto.dev) and Chrome (about:tracing) show.

Three kinds of processes are drawn, each with as many rows as things happened at once:
- "requests": a slice for each request from its submission to its end, and in it what it did;
- each worker: a slice for each stay of a request, and in it the chunks that were computed;
- "saves and copies": blocks on their way to the store or another worker meanwhile.

Rules:
- Requests are written as they end, and nothing is kept but where rows are free; a file that lacks
  its end, since its writer died, can be opened all the same.
- Slices of a row never cross: the formats nest by time alone. So what began before the one beside
  it had ended is shortened.
Format: the array form of Chrome's trace events; times are whole microseconds since the epoch.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from scheduler.errors import InvalidRequest
from scheduler.life import Span, SpanKind

Event = dict[str, Any]

_REQUESTS, _TRANSFERS, _FIRST_WORKER = 1, 2, 3
_BESIDE = (SpanKind.SAVED, SpanKind.COPIED)
"""What goes on while a request is computed."""
_COMPUTED = (SpanKind.PREFILL, SpanKind.DECODE)
_US = 1_000_000


class ChromeTrace:
    """A file of lives, open until it is closed. Its methods may be called from any thread."""

    def __init__(self, path: str | Path) -> None:
        """Begin a file, in the place of one that is there.

        Raises:
            InvalidRequest: it can't be written.
        """
        self._lock = threading.Lock()
        self._processes: dict[int, _Rows] = {}
        self._workers: dict[str, int] = {}
        self.num_requests = 0
        """Requests written so far."""
        try:
            self._file = Path(path).open("wb")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise InvalidRequest(
                f"the trace can't be written to {path}: {error.strerror}: give another file",
                param="trace",
            ) from None
        self._file.write(b"[")
        self._is_empty = True

    def __enter__(self) -> ChromeTrace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write the end. Closing twice does nothing."""
        with self._lock:
            if not self._file.closed:
                self._file.write(b"\n]\n")
                self._file.close()

    def add(self, name: str, spans: Sequence[Span], **facts: Any) -> None:
        """Write the life of a request that has ended; ignored once the file is closed.

        Args:
            name: what it is called in the trace.
            spans: its life, see `scheduler.life`.
            facts: what else is to be shown about it.
        """
        if not spans:
            return
        with self._lock:
            if self._file.closed:
                return
            self._write(self._life(name, spans, facts))
            for worker_id, stay in _stays(spans):
                self._write(self._stay(name, worker_id, stay))
            for span in spans:
                if span.kind in _BESIDE:
                    self._write(self._transfer(name, span))
            self.num_requests += 1

    def _write(self, events: Iterable[Event]) -> None:
        for event in events:
            self._file.write((b"\n" if self._is_empty else b",\n") + msgspec.json.encode(event))
            self._is_empty = False

    # ------------------------------------------------------------------------------- processes

    def _life(self, name: str, spans: Sequence[Span], facts: dict[str, Any]) -> Iterator[Event]:
        start, end = _whole(spans)
        row, new = self._row(_REQUESTS, "requests", start, end)
        yield from new
        yield _slice(row, name, start, end, facts)
        done = start
        for span in spans:
            if span.kind in _BESIDE:
                continue
            first, last = _bounds(span, end)
            if first == last:
                yield _moment(row, span, first)
            elif last > done:
                yield _slice(row, span.kind.value, max(first, done), last, _facts(span))
                done = last

    def _stay(self, name: str, worker_id: str, spans: list[Span]) -> Iterator[Event]:
        process = self._workers.setdefault(worker_id, _FIRST_WORKER + len(self._workers))
        start, end = _whole(spans)
        row, new = self._row(process, worker_id, start, end)
        yield from new
        yield _slice(row, name, start, end, {})
        done = start
        for span in spans:
            first, last = _bounds(span, end)
            if last > max(first, done):
                yield _slice(row, span.kind.value, max(first, done), last, _facts(span))
                done = last

    def _transfer(self, name: str, span: Span) -> Iterator[Event]:
        start, end = _bounds(span, None)
        row, new = self._row(_TRANSFERS, "saves and copies", start, end)
        yield from new
        yield _slice(row, f"{span.kind.value}: {name}", start, end, _facts(span))

    def _row(
        self, process: int, name: str, start: int, end: int
    ) -> tuple[tuple[int, int], list[Event]]:
        """Return a row that is free, and what has to be written before it is used."""
        new = []
        rows = self._processes.get(process)
        if rows is None:
            rows = self._processes[process] = _Rows()
            new = [
                _about(process, "process_name", {"name": name}),
                _about(process, "process_sort_index", {"sort_index": process}),
            ]
        return (process, rows.take(start, end)), new


class _Rows:
    """The rows of a process, and until when each is taken."""

    def __init__(self) -> None:
        self._free_from: list[tuple[int, int]] = []
        """Heap of (time, row)."""

    def take(self, start: int, end: int) -> int:
        """Return a row, from 1 on, with nothing in it from `start` on, and take it up to `end`."""
        if self._free_from and self._free_from[0][0] <= start:
            row = heapq.heapreplace(self._free_from, (end, self._free_from[0][1]))[1]
        else:
            row = len(self._free_from) + 1
            heapq.heappush(self._free_from, (end, row))
        return row


def _stays(spans: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    """Yield the chunks of each stay on a worker."""
    stay: list[Span] = []
    for span in spans:
        if span.kind in _COMPUTED and span.worker_id is not None:
            if stay and stay[-1].worker_id != span.worker_id:
                yield str(stay[-1].worker_id), stay
                stay = []
            stay.append(span)
        elif span.kind is SpanKind.QUEUED and stay:
            yield str(stay[-1].worker_id), stay
            stay = []
    if stay:
        yield str(stay[-1].worker_id), stay


def _whole(spans: Sequence[Span]) -> tuple[int, int]:
    bounds = [_bounds(span, None) for span in spans]
    return min(start for start, _ in bounds), max(end for _, end in bounds)


def _bounds(span: Span, latest: int | None) -> tuple[int, int]:
    start = int(span.start_s * _US)
    end = start if span.end_s is None else max(int(span.end_s * _US), start)
    return start, end if latest is None else min(end, latest)


def _facts(span: Span) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "worker": span.worker_id,
        "tokens": f"{span.first} to {span.end}" if span.kind in (*_COMPUTED, *_BESIDE) else None,
        "steps": span.num_steps,
        "why": span.why,
    }
    return {name: value for name, value in facts.items() if value}


def _slice(row: tuple[int, int], name: str, start: int, end: int, args: dict[str, Any]) -> Event:
    process, thread = row
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def _moment(row: tuple[int, int], span: Span, at: int) -> Event:
    process, thread = row
    return {
        "ph": "i",
        "s": "t",
        "name": span.kind.value,
        "pid": process,
        "tid": thread,
        "ts": at,
        "args": _facts(span),
    }


def _about(process: int, name: str, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": process, "args": args}
