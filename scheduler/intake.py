"""Submissions on their way in: what is new, what is live already, and what has ended before.

Rules:
- The same content under the same id is the same submission, whoever sends it and however often: it
  is computed once, and every sender is told all of it from the start.
- What the journal keeps is told again if the request itself came to that end. What was cancelled,
  ran out of time, or ended since there was no engine to compute it, is computed when it is
  submitted again.
- With a journal, a submission is acknowledged when it is written, and cancelled if it can't be.
"""

from __future__ import annotations

from scheduler.clients import Clients
from scheduler.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    UnknownRequest,
    WireError,
)
from scheduler.events import ReplayRequested, RequestCancelled, RequestSubmitted
from scheduler.inbox import Inbox
from scheduler.journal_calls import JournalCalls
from scheduler.lifetime import Lifetime
from scheduler.messages import Submission
from scheduler.reports import whole_deltas
from scheduler.request import FinishReason, Request
from scheduler.state import SchedulerState
from scheduler.submissions import content_hash, submission_of

Answers = dict[int, WireError | None]
"""Why a submission was refused, or None, by its position in the message."""


class Intake:
    """Takes in what clients submit, and gives out what they ask for again."""

    def __init__(
        self,
        state: SchedulerState,
        inbox: Inbox,
        clients: Clients,
        journal: JournalCalls | None,
        lifetime: Lifetime,
    ) -> None:
        self._state = state
        self._inbox = inbox
        self._clients = clients
        self._journal = journal
        self._lifetime = lifetime

    async def submit(self, client_id: str, submissions: list[Submission]) -> list[WireError | None]:
        """See `SchedulerLoop.submit`."""
        kept = await self._kept(client_id, [s.request_id for s in submissions])
        events: dict[int, RequestSubmitted] = {}
        for position, submission in enumerate(submissions):
            if not self._is_told(client_id, submission, kept.get(submission.request_id, [])):
                events[position] = RequestSubmitted(submission, client_id)
        if self._journal is None:
            answers = await self._take_in(events)
        else:
            answers = await self._take_in_for_good(events, self._journal)
        return [answers.get(position) for position in range(len(submissions))]

    async def attach(self, client_id: str, request_id: str) -> Submission:
        """See `SchedulerLoop.attach`."""
        kept = await self._kept(client_id, [request_id])
        ended = kept.get(request_id, [])
        self._inbox.catch_up()
        live = self._state.submission(request_id)
        if live is None and not ended:
            raise UnknownRequest(
                f"no request {request_id!r} is live, and no result of that id is kept",
                request_id=request_id,
            )
        self._tell(client_id, ended)
        if live is None:
            return submission_of(ended[0])
        await self._inbox.handle(ReplayRequested(request_id, client_id))
        return live

    async def _kept(self, client_id: str, request_ids: list[str]) -> dict[str, list[Request]]:
        """Return what has ended of these, as far as a journal keeps it.

        Raises:
            UnknownClient: it is not connected.
            HaversackError: the engine is closed.
        """
        kept: dict[str, list[Request]] = {}
        self._lifetime.check()
        self._clients.check_connected(client_id)
        if self._journal is not None:
            kept = await self._journal.results(request_ids)
            self._lifetime.check()
            self._clients.check_connected(client_id)
        return kept

    def _is_told(self, client_id: str, submission: Submission, kept: list[Request]) -> bool:
        """Tell a client what is kept of its submission; return whether that is all of it."""
        if not kept:
            return False
        content = content_hash(submission)
        if not all(request.content_hash == content for request in kept):
            return False
        if len(kept) < submission.sampling_params.n:
            if self._state.submission(submission.request_id) is not None:
                self._tell(client_id, kept)  # the others go on, and these don't, however they ended
            return False
        if not all(_is_own_end(request) for request in kept):
            return False
        self._tell(client_id, kept)
        return True

    def _tell(self, client_id: str, ended: list[Request]) -> None:
        for request in ended:
            for delta in whole_deltas(request):
                self._clients.deliver(client_id, delta)

    async def _take_in(self, events: dict[int, RequestSubmitted]) -> Answers:
        refusals = await self._inbox.ask(*events.values())
        return dict(zip(events, refusals, strict=True))

    async def _take_in_for_good(
        self, events: dict[int, RequestSubmitted], journal: JournalCalls
    ) -> Answers:
        """Take submissions in and return when they are written."""
        names = {position: event.submission.request_id for position, event in events.items()}
        live = {name for name in names.values() if self._state.submission(name) is not None}
        answers = await self._take_in(events)
        if None in answers.values() and not await journal.is_durable():
            lost = [p for p, answer in answers.items() if answer is None and names[p] not in live]
            await self._inbox.handle(*(RequestCancelled(names[position]) for position in lost))
            answers |= dict.fromkeys(lost, _NOT_WRITTEN.to_wire())
        return answers


_NOT_WRITTEN = EngineUnavailable(
    "the journal can't be written, so that the request would not survive the loss of the "
    "scheduler: give the journal room on its disk, and submit again"
)


_ENDED_BY_OTHERS = {EngineUnavailable.__name__, DeadlineExceeded.__name__}


def _is_own_end(request: Request) -> bool:
    """Whether a request would end so again, since nobody and nothing else ended it."""
    if request.finish_reason is FinishReason.ABORT:
        return False
    return request.error is None or request.error.kind not in _ENDED_BY_OTHERS
