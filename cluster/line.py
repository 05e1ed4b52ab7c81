"""One client's line to the scheduler, which outlives the scheduler's restarts.

Rules:
- One long poll is kept under way. What it brings is acknowledged by the next one, so an answer that
  is lost comes again; handles drop what they have.
- A scheduler that does not know the client (it restarted, or gave the client up) is connected to
  again under the same client id, and everything that is live is submitted again. To a scheduler
  that has it still, that means "tell me everything from the start"; to one that has not, it is a
  new request of the same seed, and so of the same bits.
- All trying ends: see `cluster.patience`. Then the line ends, and everything live with it. It ends
  at once where the engine says that it was shut down.
`turn` is for one thread alone, and nothing else connects; `attempt` and `submit` are for any. The
module knows no text and no Ray: `cluster.calls` does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import msgspec

from cluster.ledger import Entry, Ledger
from cluster.patience import (
    UNREACHABLE_S,
    NotConnected,
    Patience,
    Unreachable,
    pause_before_retry,
)
from scheduler.codec import decode, encode
from scheduler.errors import (
    HaversackError,
    Overloaded,
    UnknownClient,
    WireError,
    from_wire,
)
from scheduler.messages import Submission
from scheduler.outbox import EngineInfo, PollAnswer

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
_POLL_TIMEOUT_S = 10.0
_POLL_GRACE_S = 20.0
_MAX_MESSAGE_BYTES = 32 * 2**20
_LAST_MOMENT_S = 0.001
"""Time limit of a request that is submitted again with none left."""


class Calls(Protocol):
    """The scheduler; see `cluster.calls.SchedulerCalls`."""

    def call(self, method: str, *args: Any, timeout_s: float) -> Any: ...

    def tell(self, method: str, *args: Any) -> None: ...


class Line:
    """A client's outbox at the scheduler, and what is needed to have one again."""

    def __init__(
        self,
        calls: Calls,
        client_id: str,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect.

        Args:
            client_id: unlike any other client's.
            wait: lets so many seconds pass, or fewer where nothing more is wanted.
            clock: seconds that only grow.

        Raises:
            EngineUnavailable: the scheduler is gone.
        """
        self.client_id = client_id
        self.ledger = Ledger()
        self._calls = calls
        self._wait = wait
        self._clock = clock
        self._patience = Patience(clock)
        self._is_lost = False
        """Whether the scheduler does not know this client."""
        self._is_troubled = False
        """Whether a call that nobody waits for may have been lost."""
        self._unsent: deque[Entry] = deque()
        """What is live and the scheduler has not been told of since it was connected to."""
        self._unsent_until_s = 0.0
        self._unsent_not_before_s = 0.0
        self._orphans: deque[Entry] = deque()
        """What `adopt` was given; a deque's ends may be used by different threads."""
        self.info = decode(self._call(Patience(clock), "connect", client_id), EngineInfo)
        """What the engine said of itself when it was last connected to."""
        self._patience.unreachable_s = self._unreachable_s
        self._acked = self.info.epoch

    # ---------------------------------------------------------------------------- for any thread

    def patience(self) -> Patience:
        return Patience(self._clock, self._unreachable_s)

    @property
    def _unreachable_s(self) -> float:
        """How long the scheduler may be out of reach, the start of all its workers included."""
        return UNREACHABLE_S + float(self.info.settings.get("startup_timeout_s") or 0.0)

    def pause(self, patience: Patience, failure: Unreachable) -> None:
        """Let some time pass before the next try.

        Raises:
            EngineUnavailable: patience is at its end.
        """
        self._wait(patience.pause_after(failure))

    def call(self, method: str, *args: Any) -> bytes:
        """Return the scheduler's answer, from whichever try.

        Raises:
            HaversackError: what it raised.
            EngineUnavailable: it is gone.
        """
        return self._call(self.patience(), method, *args)

    def _call(self, patience: Patience, method: str, *args: Any) -> bytes:
        while True:
            try:
                return self.attempt(method, *args)
            except Unreachable as failure:
                self.pause(patience, failure)

    def attempt(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> bytes:
        """Return the scheduler's answer.

        Raises:
            HaversackError: what it raised, or why the line has ended.
            Unreachable: it did not answer, or (`NotConnected`) does not know this client.
        """
        self.ledger.check_open()
        try:
            answer: bytes = self._calls.call(method, *args, timeout_s=timeout_s)
        except UnknownClient as error:
            raise NotConnected(error.message) from None
        return answer

    def tell_cancel(self, request_ids: list[str]) -> None:
        """Ask for the end of requests, without waiting."""
        if request_ids:
            self._calls.tell("cancel", request_ids)

    def adopt(self, entries: Iterable[Entry]) -> None:
        """See entries through of which nobody knows whether the scheduler has them.

        They are submitted (again), and if their handles are cancelled, cancelled then.
        """
        entries = list(entries)
        self.ledger.leave_to_line(entries)
        self._orphans.extend(entries)

    def submit(self, entries: list[Entry]) -> list[HaversackError | None]:
        """Submit once; return for each why it was refused, or None where it was taken.

        Raises:
            Unreachable: there is no answer.
        """
        submissions = [self._as_of_now(entry) for entry in entries]
        answer = self.attempt("submit", self.client_id, encode(submissions))
        refusals: list[WireError | None] = decode(answer, list[WireError | None])
        return [from_wire(refusal) if refusal is not None else None for refusal in refusals]

    def _as_of_now(self, entry: Entry) -> Submission:
        """Return the submission with what is left of its time."""
        submission = entry.submission
        if entry.sent_s is None:
            entry.sent_s = self._clock()
        elif submission.timeout_s is not None:
            left_s = submission.timeout_s - (self._clock() - entry.sent_s)
            return msgspec.structs.replace(submission, timeout_s=max(left_s, _LAST_MOMENT_S))
        return submission

    # ----------------------------------------------------------------------- for the line's thread

    def turn(self) -> HaversackError | None:
        """Hand on what comes next, or try to; return why the line has ended, if it has."""
        try:
            if self._is_lost:
                self._connect_again()
            self._take_orphans()
            self._submit_again()
            if self._is_troubled and not self._unsent:
                self._is_troubled = False
                self.tell_cancel(self.ledger.unwanted_ids())
            answer = self._poll()
            if answer.is_forgotten:
                raise NotConnected("the engine does not know this client")
        except Unreachable as failure:
            self._is_troubled = True
            self._is_lost |= isinstance(failure, NotConnected)
            try:
                self.pause(self._patience, failure)
            except HaversackError as error:
                return error
            return None
        except HaversackError as error:
            return error
        self._patience.answered()
        if answer.closed is not None and not answer.deliveries:
            return from_wire(answer.closed)
        return None

    def _poll(self) -> PollAnswer:
        timeout_s = _POLL_TIMEOUT_S
        if self._unsent:
            timeout_s = min(timeout_s, max(self._unsent_not_before_s - self._clock(), 0.0))
        data = self.attempt(
            "poll", self.client_id, self._acked, timeout_s, timeout_s=timeout_s + _POLL_GRACE_S
        )
        answer = decode(data, PollAnswer)
        for delivery in answer.deliveries:
            self._acked = delivery.seq
            self.ledger.deliver(delivery.delta, len(data))
        return answer

    def _connect_again(self) -> None:
        self.info = decode(self.attempt("connect", self.client_id), EngineInfo)
        self._acked = self.info.epoch
        self._is_lost = False
        self._unsent = deque(self.ledger.renew())
        self._begin_submitting()
        logger.warning(
            "connected again to the engine; requests to submit again: %d", len(self._unsent)
        )

    def _take_orphans(self) -> None:
        while self._orphans:
            self._unsent.append(self._orphans.popleft())
            self._is_troubled = True
            self._begin_submitting()

    def _begin_submitting(self) -> None:
        self._unsent_not_before_s = self._clock()
        self._unsent_until_s = self._clock() + self._unreachable_s

    def _submit_again(self) -> None:
        """Tell the scheduler of what is live and it has not been told of.

        What there is no room for is tried again for a while: it was accepted once.
        """
        while self._unsent and self._clock() >= self._unsent_not_before_s:
            batch = next(batches(self._unsent))
            live = [entry for entry in batch if not entry.is_done]
            refusals = self.submit(live) if live else []
            for _ in batch:
                self._unsent.popleft()
            waiting = []
            for entry, refusal in zip(live, refusals, strict=True):
                if isinstance(refusal, Overloaded) and self._clock() < self._unsent_until_s:
                    waiting.append(entry)
                    self._unsent_not_before_s = self._clock() + pause_before_retry(refusal)
                elif refusal is not None:
                    self.ledger.fail(entry, refusal)
            self._unsent.extendleft(reversed(waiting))


def batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield the entries in order, as many at a time as a message may hold."""
    batch: list[Entry] = []
    num_bytes = 0
    for entry in entries:
        size = entry.submission.prompt_token_ids.nbytes
        if batch and num_bytes + size > _MAX_MESSAGE_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(entry)
        num_bytes += size
    if batch:
        yield batch
