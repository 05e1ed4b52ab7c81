"""What a client asks of the scheduler: each call ends, and may meet a restart on its way.

Rules:
- Every call can be repeated, and is, after a pause, where the scheduler does not answer: submitting
  the same again follows what is there.
- What was submitted is followed from before it is sent, so nothing that comes back is missed; from
  when the scheduler has taken it, the line submits it again to whichever scheduler comes next.
- The line's thread fetches what is new. When the line ends, so does every handle, with the reason.
The module knows no text and no Ray.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cluster.handle import RequestHandle
from cluster.ledger import Entry
from cluster.line import CALL_TIMEOUT_S, Calls, Line, batches
from cluster.patience import Unreachable
from scheduler.codec import decode
from scheduler.errors import DuplicateRequest, EngineUnavailable, HaversackError, UnknownWorker
from scheduler.messages import Lives, RequestInfo, Submission, WorkerReport
from scheduler.outbox import EngineInfo, EngineStats
from scheduler.submissions import content_hash

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0

MakeHandle = Callable[[Submission], RequestHandle]


class Connection:
    """A client's calls to the scheduler, and the thread that keeps its line."""

    def __init__(
        self,
        calls: Calls,
        client_id: str,
        *,
        wait: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect.

        Args:
            client_id: unlike any other client's.
            wait: lets so many seconds pass between two tries; None waits, or until this is closed.
            clock: seconds that only grow.

        Raises:
            EngineUnavailable: the scheduler is gone.
        """
        self._calls = calls
        self._closing = threading.Event()
        self._clock = clock
        self._line = Line(calls, client_id, wait or self._closing.wait, clock)
        self._ledger = self._line.ledger
        self._thread = threading.Thread(
            target=self._run, name=f"haversack-client-{self.client_id}", daemon=True
        )

    @property
    def client_id(self) -> str:
        return self._line.client_id

    @property
    def info(self) -> EngineInfo:
        return self._line.info

    def start(self) -> None:
        """Begin to fetch what is new."""
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set() and self.turn():
            pass

    def turn(self) -> bool:
        """Fetch once what is new; return whether the line goes on. The thread does nothing else."""
        try:
            reason = self._line.turn()
        except Exception as error:
            logger.exception("the client's thread stops")
            reason = EngineUnavailable(f"the client stopped because of a bug in it: {error!r}")
        if reason is not None and not self._closing.is_set():
            for handle in self._ledger.end(reason):
                handle.fail(reason)
        return reason is None

    def close(self) -> bool:
        """Leave: the scheduler cancels what only this client follows and is not detached.

        Returns:
            whether it has confirmed that. What is live here is left to the caller: see `end`.
        """
        self._closing.set()
        try:
            self._calls.call("disconnect", self.client_id, timeout_s=_CLOSE_TIMEOUT_S)
        except (Unreachable, HaversackError):
            is_confirmed = False
        else:
            is_confirmed = True
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)
        return is_confirmed

    def end(self, error: HaversackError) -> list[RequestHandle]:
        """Take nothing more, for this reason; return the handles that were live."""
        return self._ledger.end(error)

    # --------------------------------------------------------------------------------- requests

    def submit(self, handles: list[RequestHandle]) -> list[RequestHandle | HaversackError]:
        """Submit what the handles stand for.

        Returns:
            for each the handle to use, an earlier one where the same is live already; or why it
            was refused.

        Raises:
            EngineUnavailable: the scheduler is gone.
        """
        claims: list[Entry | DuplicateRequest] = []
        mine: list[Entry] = []
        try:
            for handle in handles:
                claim = self._claim(handle)
                claims.append(claim)
                if isinstance(claim, Entry) and claim.handle is handle:
                    mine.append(claim)
            for batch in batches(mine):
                self._send(batch)
        except BaseException:
            self._give_up(mine)
            raise
        return [_outcome(claim) for claim in claims]

    def attach(self, request_id: str, make_handle: MakeHandle) -> RequestHandle:
        """Return a handle of a request that anybody submitted.

        Args:
            make_handle: called with what was submitted, where this client has no live handle of it.

        Raises:
            UnknownRequest: no live request and no kept result has this id.
            EngineUnavailable: the scheduler is gone.
        """
        while True:
            entry, is_new = self._ledger.claim(request_id, None)
            if is_new:
                break
            entry.is_decided.wait()
            if entry.error is None:
                return entry.known_handle
        try:
            return self._attach(entry, make_handle)
        except BaseException as error:
            self._ledger.fail(entry, _reason(error))
            raise

    def cancel(self, request_id: str) -> None:
        """Cancel, and return when the scheduler has done it."""
        handle = self._ledger.handle(request_id)
        if handle is not None:
            handle.cancel()
        self._line.call("cancel", [request_id])

    def tell_cancel(self, request_ids: list[str]) -> None:
        """Ask the scheduler to cancel, without waiting.

        Where that is lost with the scheduler, it is repeated for what handles want to end.
        """
        self._line.tell_cancel(request_ids)

    def _claim(self, handle: RequestHandle) -> Entry | DuplicateRequest:
        """Return the entry of the handle's id, a live one's where it asks for the same."""
        while True:
            entry, is_new = self._ledger.claim(handle.request_id, handle)
            if is_new:
                return entry
            if entry.handle is None:  # it is being attached to
                entry.is_decided.wait()
            elif content_hash(entry.submission) != content_hash(handle.submission):
                return DuplicateRequest(
                    f"this client has a live request called {handle.request_id!r} that asks for "
                    "something else: give another request_id, or wait for it to end",
                    param="request_id",
                )
            elif entry.handle.is_cancelled:
                entry.is_gone.wait()
            else:
                return entry

    def _send(self, entries: list[Entry]) -> None:
        """Submit until every entry is accepted, refused or done.

        Raises:
            EngineUnavailable: the scheduler is gone.
        """
        patience = self._line.patience()
        while entries := [entry for entry in entries if not entry.is_done]:
            generation = self._ledger.generation
            try:
                refusals = self._line.submit(entries)
            except Unreachable as failure:
                self._line.pause(patience, failure)
                continue
            taken = []
            for entry, refusal in zip(entries, refusals, strict=True):
                if refusal is None:
                    taken.append(entry)
                else:
                    self._ledger.refuse(entry, refusal)
            if self._ledger.accept(taken, generation):
                return
            entries = taken

    def _attach(self, entry: Entry, make_handle: MakeHandle) -> RequestHandle:
        patience = self._line.patience()
        while True:
            generation = self._ledger.generation
            try:
                data = self._line.attempt("attach", self.client_id, entry.request_id)
            except Unreachable as failure:
                self._line.pause(patience, failure)
                continue
            if entry.handle is None:
                self._ledger.bind(entry, make_handle(decode(data, Submission)))
            if self._ledger.accept([entry], generation):
                return entry.known_handle

    def _give_up(self, entries: list[Entry]) -> None:
        """Leave to the line what nobody waits for any more: it is cancelled, if not detached."""
        left = [entry for entry in entries if not entry.is_gone.is_set()]
        for entry in left:
            if not entry.submission.detached:
                entry.known_handle.cancel()
        self._line.adopt(left)

    # -------------------------------------------------------------------------------- operators

    def evict(self, request_ids: list[str]) -> None:
        self._line.call("evict", request_ids)

    def migrate(self, request_id: str, worker_id: str) -> None:
        self._line.call("migrate", request_id, worker_id)

    def drain(self, worker_id: str, deadline_s: float, replace: bool) -> None:
        """Return when the worker has ended; `deadline_s` is in seconds from now."""
        patience, end_s = self._line.patience(), self._clock() + deadline_s
        is_repeated = False
        while True:
            left_s = max(end_s - self._clock(), 0.0)
            try:
                self._line.attempt(
                    "drain", worker_id, left_s, replace, timeout_s=left_s + CALL_TIMEOUT_S
                )
            except Unreachable as failure:
                self._line.pause(patience, failure)
                is_repeated = True
            except UnknownWorker:
                if not is_repeated:
                    raise
                return
            else:
                return

    def stats(self) -> EngineStats:
        return decode(self._line.call("stats"), EngineStats)

    def requests(self) -> list[RequestInfo]:
        return decode(self._line.call("requests"), list[RequestInfo])

    def lives(self, max_live: int, max_ended: int) -> Lives:
        return decode(self._line.call("lives", max_live, max_ended), Lives)

    def workers(self) -> list[WorkerReport]:
        return decode(self._line.call("workers"), list[WorkerReport])


def _outcome(claim: Entry | DuplicateRequest) -> RequestHandle | HaversackError:
    """Return the handle to use, or why there is none."""
    if isinstance(claim, DuplicateRequest):
        return claim
    claim.is_decided.wait()
    return claim.known_handle if claim.error is None else claim.error


def _reason(error: BaseException) -> HaversackError:
    if isinstance(error, HaversackError):
        return error
    return EngineUnavailable("the submission was interrupted")
