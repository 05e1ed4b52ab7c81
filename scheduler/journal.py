"""A durable record of requests and their progress, so that a new scheduler goes on with them.

Rules:
- Nobody but one thread writes, and only that thread and readers in threads of their own wait for
  the disk: `append`, `when_durable` and `stats` take a lock that is never held over IO.
- Everything that waits is written in one transaction, and records appended together stay together,
  so what a crash leaves is a prefix of the records, cut between two calls of `append`.
- Nobody waits for ever: where a write fails, those who wait for it are told that it is not durable,
  the records stay in memory, and the write is tried again until it works. The engine goes on.
- Memory is bounded by the unwritten rows of live requests plus a fixed room for unwritten results.
The module knows no request beyond its records, and nothing of the engine or of Ray.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from scheduler.actions import Record
from scheduler.errors import EngineUnavailable, InvalidConfig, RequestFailed
from scheduler.journal_file import JournalFile
from scheduler.journal_queue import Batch, UnwrittenQueue
from scheduler.request import Request

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.5
"""Seconds between two looks for results to delete."""
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 5.0
"""Seconds between two tries of a write that fails; they double from the first to the last."""


class JournalStats(msgspec.Struct, frozen=True):
    """The journal as operators see it."""

    num_live: int
    """Requests that a restart would continue."""
    num_results: int
    """Submissions that have ended and whose results the file keeps."""
    result_bytes: int
    file_bytes: int
    """Size of the file, room for more included, without the log beside it (16 MiB or so)."""
    num_queued_records: int
    """Records that are not written yet."""
    queued_bytes: int
    lag_s: float
    """Age of the oldest of them; 0 where there is none."""
    num_commits: int
    """Transactions since the start; so is all that follows."""
    written_bytes: int
    num_dropped_results: int
    """Results that were given up since too much waited for a disk that is slow or broken."""
    num_failed_writes: int
    last_error: str | None
    """Why nothing can be written now; None while all is well."""


class Journal:
    """Requests on disk: appended to by the scheduler's loop, written by a thread of its own."""

    def __init__(
        self,
        path: str | Path,
        *,
        result_ttl_s: float,
        max_result_bytes: int = 4 * 2**30,
        max_queued_bytes: int = 256 * 2**20,
        min_interval_s: float = 0.1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the journal, or create it and its folders, and start to write.

        Args:
            path: a file on a local disk.
            result_ttl_s: how long a result is kept after the last request of its submission ended.
            max_result_bytes: results beyond this are deleted, the oldest first.
            max_queued_bytes: unwritten results beyond this are given up, the oldest first; as much
                again can be under way to the disk.
            min_interval_s: from one write of mere progress to the next; a crash costs that much.
            clock: unix time, for `result_ttl_s`.

        Raises:
            InvalidConfig: the file can't be used; the text says why and what to do.
        """
        self._ttl_s = result_ttl_s
        self._max_result_bytes = max_result_bytes
        self._min_interval_s = min_interval_s
        self._clock = clock
        self._file = JournalFile(_absolute(path))
        self._file_lock = threading.Lock()
        """Guards `_file`; while it is free, a record is either in the file or in `_queue`."""
        self._lock = threading.Lock()
        """Guards all that follows; taken after `_file_lock` where both are."""
        self._wake = threading.Condition(self._lock)
        self._queue = UnwrittenQueue(max_queued_bytes)
        self._queued_since_s: float | None = None
        """When the oldest record in `_queue` came (monotonic)."""
        self._writing: _Write | None = None
        self._waiters: list[Callable[[bool], None]] = []
        self._next_write_s = 0.0
        self._next_housekeeping_s = 0.0
        self._retry_s = 0.0
        """How long to wait after the next failure, if the last write failed; else 0."""
        self._num_failed_writes = 0
        self._last_error: str | None = None
        self._is_closing = False
        self._is_closed = False
        for request_id, parent_id in self._file.live_ids():
            self._queue.add_live(request_id, parent_id)
        self._counts = _Counts.of(self._file)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def append(self, records: Iterable[Record]) -> None:
        """Have records written, all of them in one transaction; after `close` they are ignored."""
        now_s = self._clock()
        with self._lock:
            if not self._is_closing:
                for record in records:
                    self._queue.add(record, now_s)
                self._note_queued()

    def when_durable(self, callback: Callable[[bool], None]) -> None:
        """Have everything appended so far written at once, and be told.

        `callback` is called from the journal's thread (from here after `close`), with True once all
        is in the file, where the death of this process can't touch it, and with False where the
        write failed. The records then stay queued and are written as soon as that works again.
        """
        with self._lock:
            if not self._is_closing:
                self._waiters.append(callback)
                self._wake.notify()
                return
        callback(False)

    def claim(self, model_fingerprint: str) -> None:
        """Keep requests of this model, and of no other: their rows must not be mixed.

        Raises:
            InvalidConfig: it keeps those of another one, or the file is damaged.
            EngineUnavailable: the journal is closed.
        """
        with self._file_lock:
            try:
                self._open_file().claim(model_fingerprint)
            except sqlite3.Error as error:
                raise self._file.damaged(error) from error

    def load(self) -> list[Request]:
        """Return every live request in the file with all its progress, WAITING, by arrival.

        A request whose records make no sense is logged and deleted: sent again, it starts anew.

        Raises:
            InvalidConfig: the file is damaged.
            EngineUnavailable: the journal is closed.
        """
        found = []
        with self._file_lock:
            try:
                for request_id, parent_id in self._open_file().live_ids():
                    request = self._load_one(request_id, parent_id)
                    if request is not None:
                        found.append(request)
            except sqlite3.Error as error:
                raise self._file.damaged(error) from error
        return sorted(found, key=lambda request: request.arrival)

    def result(self, parent_id: str) -> list[Request] | None:
        """Return the requests of a submission that have ended, by index; None where none is kept.

        Sees all that was appended, written or not. Waits for the disk: call it in a thread.

        Raises:
            RequestFailed: there is one, but it can't be read.
            EngineUnavailable: the journal is closed.
        """
        with self._file_lock:
            try:
                stored, finished_s = self._open_file().read(parent_id)
            except sqlite3.Error as error:
                raise _unreadable(parent_id, error) from error
            with self._lock:
                unwritten = self._queue.peek(parent_id)
        if finished_s is not None and finished_s <= self._clock() - self._ttl_s:
            stored = []
        if unwritten is not None:
            stored = unwritten.over(stored)
        try:
            requests = [each.restore() for each in stored if each.finished is not None]
        except Exception as error:  # whatever a file holds that somebody edited
            raise _unreadable(parent_id, error) from error
        return sorted(requests, key=lambda request: request.index) or None

    def stats(self) -> JournalStats:
        """Return the counters, and the gauges as of now."""
        with self._lock:
            queue, writing, now_s = self._queue, self._writing, time.monotonic()
            since_s = writing.since_s if writing else self._queued_since_s
            return JournalStats(
                num_live=queue.num_live,
                num_queued_records=queue.num_records + (writing.num_records if writing else 0),
                queued_bytes=queue.num_bytes + (writing.num_bytes if writing else 0),
                lag_s=0.0 if since_s is None else now_s - since_s,
                num_dropped_results=queue.num_dropped,
                num_failed_writes=self._num_failed_writes,
                last_error=self._last_error,
                **self._counts._asdict(),
            )

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write all that waits, let go of the file and end the thread.

        Returns:
            Whether all is written; False too where the disk did not answer in time.
        """
        with self._lock:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        with self._lock:
            return not (self._thread.is_alive() or self._queue)

    # --------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        is_open = True
        while is_open:
            is_open = self._wait()
            self._write()
            if is_open and time.monotonic() >= self._next_housekeeping_s:
                self._keep_house()
        with self._file_lock:
            try:
                self._open_file().close()
            except sqlite3.Error:
                logger.exception("the journal could not be closed in good order")
            self._is_closed = True

    def _wait(self) -> bool:
        """Wait until there is something to do; return whether the journal goes on after that."""
        with self._wake:
            while not self._is_closing:
                due_s = self._next_housekeeping_s
                if self._waiters:
                    due_s = 0.0
                elif self._queue:
                    due_s = min(due_s, self._next_write_s)
                left_s = due_s - time.monotonic()
                if left_s <= 0:
                    return True
                self._wake.wait(left_s)
            return False

    def _write(self) -> None:
        """Write what waits if it is time to, and tell those who wait for it."""
        with self._file_lock:
            with self._lock:
                waiters, self._waiters = self._waiters, []
                batch = self._take(is_urgent=bool(waiters))
                is_durable = bool(batch) or not self._queue
            error = None
            if batch:
                try:
                    self._file.write(batch)
                except Exception as raised:  # the thread lives on, whatever it was
                    error = raised
                with self._lock:
                    self._settle(batch, error)
        if error is not None:
            self._report(error)
        for callback in waiters:
            _call(callback, is_durable and error is None)

    def _take(self, *, is_urgent: bool) -> Batch:
        """Return what is to be written now; nothing while it waits to try a failed write again."""
        is_due = time.monotonic() >= self._next_write_s or self._is_closing
        if not (is_due or (is_urgent and not self._retry_s)):
            return {}
        since_s = self._queued_since_s
        if since_s is not None:
            self._writing = _Write(self._queue.num_records, self._queue.num_bytes, since_s)
        self._queued_since_s = None
        return self._queue.take()

    def _settle(self, batch: Batch, error: Exception | None) -> None:
        """Take note of how a write went."""
        now_s = time.monotonic()
        writing, self._writing = self._writing, None
        if error is None:
            self._counts = _Counts.of(self._file)
            self._next_write_s = now_s + self._min_interval_s
            self._retry_s = 0.0
            self._last_error = None
            if self._file.result_bytes > self._max_result_bytes:
                self._next_housekeeping_s = now_s
            return
        self._queue.put_back(batch)
        self._queued_since_s = writing.since_s if writing is not None else now_s
        self._num_failed_writes += 1
        self._retry_s = min(max(2 * self._retry_s, _FIRST_RETRY_S), _LAST_RETRY_S)
        self._next_write_s = now_s + self._retry_s

    def _report(self, error: Exception) -> None:
        """Say in the log that writing has stopped working, once until it works again."""
        with self._lock:
            is_news = self._last_error is None
            self._last_error = f"{type(error).__name__}: {error}"
        if is_news:
            logger.error("the journal can't be written, and is tried again: %s", error)

    def _keep_house(self) -> None:
        """Delete some of the results that are too old or too much."""
        pause_s = _HOUSEKEEPING_S
        with self._file_lock:
            try:
                ended_by_s = self._clock() - self._ttl_s
                if self._file.delete_results(ended_by_s, self._max_result_bytes):
                    pause_s = 0.0
            except Exception as error:  # the thread lives on here too
                logger.error("old results could not be deleted from the journal: %s", error)
                pause_s = _LAST_RETRY_S
            with self._lock:
                self._counts = _Counts.of(self._file)
        self._next_housekeeping_s = time.monotonic() + pause_s

    # -------------------------------------------------------------------------------- inside

    def _note_queued(self) -> None:
        """Start the queue's age, and wake the thread, where the queue was empty."""
        if self._queue and self._queued_since_s is None:
            self._queued_since_s = time.monotonic()
            self._wake.notify()

    def _open_file(self) -> JournalFile:
        if self._is_closed:
            raise EngineUnavailable("the journal is closed: the engine has shut down")
        return self._file

    def _load_one(self, request_id: str, parent_id: str) -> Request | None:
        """Return a live request; where that can't be, delete it and return None."""
        try:
            return self._file.read_live(request_id, parent_id).restore()
        except sqlite3.Error:
            raise
        except Exception as error:  # whatever a file holds that somebody edited
            logger.error("request %r in the journal makes no sense: %s", request_id, error)
        with contextlib.suppress(sqlite3.Error):  # then the next start meets it again
            self._file.drop_live(request_id, parent_id, self._clock())
        with self._lock:
            self._queue.drop_live(request_id)
            self._counts = _Counts.of(self._file)
        return None


class _Write(NamedTuple):
    """What is being written."""

    num_records: int
    num_bytes: int
    since_s: float
    """When the oldest of it came (monotonic)."""


class _Counts(NamedTuple):
    """What the file counts, as of the last transaction."""

    num_results: int
    result_bytes: int
    file_bytes: int
    num_commits: int
    written_bytes: int

    @classmethod
    def of(cls, file: JournalFile) -> _Counts:
        return cls(
            file.num_results,
            file.result_bytes,
            file.file_bytes,
            file.num_commits,
            file.written_bytes,
        )


def _absolute(path: str | Path) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise InvalidConfig(
            f"the journal {str(path)!r} can't be used: {error}: give an absolute path",
            path=str(path),
        ) from error


def _call(callback: Callable[[bool], None], argument: bool) -> None:
    """Call back; what that raises is its owner's fault and does not end the thread."""
    try:
        callback(argument)
    except Exception:
        logger.exception("a callback of the journal failed")


def _unreadable(parent_id: str, error: Exception) -> RequestFailed:
    return RequestFailed(
        f"the result of {parent_id!r} can't be read from the journal ({error}): submit it again "
        "under another request_id"
    )
