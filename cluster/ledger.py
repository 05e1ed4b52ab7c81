"""What a client follows: one entry per request id, from before it is sent until its end.

Rules:
- An id stands for one handle at a time: whoever comes second gets the first one's entry.
- An entry is accepted once the scheduler that the client is connected to has taken it. Accepted
  ones, and no others, are submitted again after a reconnection, which begins a new generation; an
  answer from before it accepts nothing.
- An entry stays until its end has come from the scheduler, or its refusal: what still comes under
  its id must not reach the next one.
- When the ledger ends, nothing is claimed any more, and nobody waits.
Used from any thread. The module knows no Ray, and sends nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import msgspec

from cluster.handle import RequestHandle
from scheduler.errors import HaversackError, InvariantViolation, from_wire
from scheduler.logprobs import Logprobs
from scheduler.messages import OutputDelta, Submission


class Entry:
    """A request that is being sent, attached to, or under way."""

    def __init__(self, request_id: str, handle: RequestHandle | None) -> None:
        self.request_id = request_id
        self.handle = handle
        """None while it is being attached to: then what it is has to come from the engine."""
        self.early: list[OutputDelta] = []
        """What came while there was no handle."""
        self.sent_s: float | None = None
        """When it was sent first."""
        self.is_accepted = False
        self.is_decided = threading.Event()
        """Set once it is accepted, or gone from the ledger."""
        self.is_gone = threading.Event()
        """Set once its id is free again."""
        self.error: HaversackError | None = None
        """Why it was not taken."""

    @property
    def known_handle(self) -> RequestHandle:
        """Its handle.

        Raises:
            InvariantViolation: there is none yet.
        """
        if self.handle is None:
            raise InvariantViolation(f"nobody knows yet what {self.request_id!r} asks for")
        return self.handle

    @property
    def submission(self) -> Submission:
        """What was, or is to be, sent."""
        return self.known_handle.submission

    @property
    def is_done(self) -> bool:
        return self.handle is not None and self.handle.done()


class Ledger:
    """The entries of one client."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._ended: HaversackError | None = None
        self.generation = 0
        """Reconnections so far."""

    def check_open(self) -> None:
        """Raise the error that the ledger ended with, if it has."""
        if self._ended is not None:
            raise from_wire(self._ended.to_wire())

    def claim(self, request_id: str, handle: RequestHandle | None) -> tuple[Entry, bool]:
        """Return the id's entry, and whether this call made it.

        Raises:
            HaversackError: the ledger has ended.
        """
        with self._lock:
            self.check_open()
            entry = self._entries.get(request_id)
            if entry is not None:
                return entry, False
            entry = self._entries[request_id] = Entry(request_id, handle)
            return entry, True

    def bind(self, entry: Entry, handle: RequestHandle) -> None:
        """Give an attached entry its handle, and the handle what came before."""
        with self._lock:
            entry.handle = handle
            for delta in entry.early:
                handle.feed(delta)
            entry.early.clear()
            if handle.done():
                self._remove(entry)
            if self._ended is not None:
                handle.fail(self._ended)

    def accept(self, entries: Iterable[Entry], generation: int) -> bool:
        """Note that the scheduler took them; False where it was another generation's scheduler."""
        with self._lock:
            if generation != self.generation:
                return False
            for entry in entries:
                entry.is_accepted = True
                entry.is_decided.set()
            return True

    def leave_to_line(self, entries: Iterable[Entry]) -> None:
        """Count them as accepted, although nobody knows: the line is going to see to it."""
        with self._lock:
            for entry in entries:
                entry.is_accepted = True
                entry.is_decided.set()

    def refuse(self, entry: Entry, error: HaversackError) -> None:
        """Note that the scheduler did not take it; its id is free again."""
        with self._lock:
            entry.error = error
            self._remove(entry)

    def fail(self, entry: Entry, error: HaversackError) -> None:
        """Refuse it, and end its handle."""
        self.refuse(entry, error)
        if entry.handle is not None:
            entry.handle.fail(error)

    def renew(self) -> list[Entry]:
        """Begin a new generation; return what has to be submitted again."""
        with self._lock:
            self.generation += 1
            return [entry for entry in self._entries.values() if entry.is_accepted]

    def handle(self, request_id: str) -> RequestHandle | None:
        """Return the live handle of that id, if there is one."""
        with self._lock:
            entry = self._entries.get(request_id)
            return entry.handle if entry is not None else None

    def unwanted_ids(self) -> list[str]:
        """Return what the scheduler should cancel, if it has not done so."""
        with self._lock:
            entries = [e for e in self._entries.values() if e.is_accepted]
        return [i for entry in entries for i in entry.known_handle.unwanted_ids()]

    def deliver(self, delta: OutputDelta, message_bytes: int) -> None:
        """Hand a delta to its handle; what nobody follows any more is dropped.

        Args:
            message_bytes: size of the message that it came in, which its arrays keep in memory.
        """
        rows = delta.prompt_logprobs
        if rows is not None and rows.num_bytes * 2 < message_bytes:
            delta = msgspec.structs.replace(delta, prompt_logprobs=_copied(rows))
        with self._lock:
            entry = self._entries.get(delta.request_id)
            if entry is None:
                return
            handle = entry.handle
            if handle is None:
                entry.early.append(delta)
                return
        handle.feed(delta)
        if handle.done():
            with self._lock:
                self._remove(entry)

    def end(self, error: HaversackError) -> list[RequestHandle]:
        """Take nothing more; return the handles that were live. The first error stays."""
        with self._lock:
            if self._ended is None:
                self._ended = error
            entries = list(self._entries.values())
            for entry in entries:
                entry.error = entry.error or (None if entry.is_accepted else error)
                self._remove(entry)
        return [entry.handle for entry in entries if entry.handle is not None]

    def _remove(self, entry: Entry) -> None:
        if self._entries.get(entry.request_id) is entry:
            del self._entries[entry.request_id]
        entry.is_decided.set()
        entry.is_gone.set()


def _copied(rows: Logprobs) -> Logprobs:
    """Return rows that don't keep the message alive in which they came."""
    return Logprobs(rows.token_ids.copy(), rows.logprobs.copy(), rows.ranks.copy())
