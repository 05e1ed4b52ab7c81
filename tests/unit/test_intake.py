"""Submitting and attaching: the same is computed once, told to whoever asks, and acknowledged when
it is written."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from scheduler.actions import RecordFinished, Refuse
from scheduler.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    InvalidRequest,
    NumericalError,
    RequestFailed,
    UnknownClient,
    UnknownRequest,
)
from scheduler.events import ReplayRequested, RequestCancelled, RequestSubmitted
from scheduler.loop import SchedulerLoop
from scheduler.messages import OutputDelta, Submission
from scheduler.request import FinishReason, RequestStats
from tests.loop_fakes import (
    FakeJournal,
    ScriptedState,
    ended,
    make,
    run,
    submission,
    turns,
    until,
)
from tests.sizes import sizes


class Desk:
    """A loop with a journal and the connected client "c"."""

    def __init__(self, journal: FakeJournal | None = None, **settings: Any) -> None:
        self.state = ScriptedState()
        self.journal = journal if journal is not None else FakeJournal()
        self.loop: SchedulerLoop = make(self.state, journal=self.journal, **settings)
        self.epoch = self.loop.connect("c")

    def submit(self, *submissions: Submission) -> asyncio.Task[Any]:
        return asyncio.create_task(self.loop.submit("c", list(submissions)))

    async def told(self) -> list[OutputDelta]:
        return [d.delta for d in (await self.loop.poll("c", self.epoch, 0.0)).deliveries]

    @property
    def submitted(self) -> list[str]:
        return [e.submission.request_id for e in self.state.of_kind(RequestSubmitted)]


def last(request_id: str) -> RecordFinished:
    return RecordFinished(request_id, request_id, FinishReason.LENGTH, None, None, RequestStats())


# -------------------------------------------------------------------------------- acknowledgement


def test_a_submission_is_acknowledged_when_it_is_written() -> None:
    async def test() -> None:
        desk = Desk()
        desk.journal.writes_at_once = False
        submitting = desk.submit(submission("a"), submission("b"))
        await until(lambda: bool(desk.journal.waiters))
        assert desk.submitted == ["a", "b"]
        await turns()
        assert not submitting.done()
        desk.journal.write(True)
        assert await submitting == [None, None]

    run(test)


def test_a_submission_that_can_not_be_written_is_cancelled_and_refused() -> None:
    """A disk is full. What was live before, or was refused anyway, is not concerned."""

    async def test() -> None:
        desk = Desk()
        desk.journal.writes_at_once = False
        desk.state.live["live"] = submission("live")
        refusal = InvalidRequest("no").to_wire()
        desk.state.script = lambda event: (
            [Refuse(event.ticket, refusal)]
            if isinstance(event, RequestSubmitted) and event.submission.request_id == "bad"
            else []
        )
        submitting = desk.submit(submission("new"), submission("live"), submission("bad"))
        await until(lambda: bool(desk.journal.waiters))
        desk.journal.write(False)
        new, live, bad = await submitting
        assert new.kind == "EngineUnavailable"
        assert "journal" in new.message
        assert live is None
        assert bad == refusal
        assert [e.request_id for e in desk.state.of_kind(RequestCancelled)] == ["new"]

    run(test)


def test_refusals_wait_for_no_disk() -> None:
    async def test() -> None:
        desk = Desk()
        desk.journal.writes_at_once = False
        refusal = InvalidRequest("no").to_wire()
        desk.state.script = lambda event: [Refuse(event.ticket, refusal)]
        assert await desk.submit(submission()) == [refusal]

    run(test)


def test_a_disk_that_does_not_answer_keeps_nobody_waiting_for_a_closed_engine() -> None:
    async def test() -> None:
        desk = Desk()
        desk.journal.writes_at_once = False
        submitting = desk.submit(submission())
        await until(lambda: bool(desk.journal.waiters))
        desk.loop.close(EngineUnavailable("over"))
        with pytest.raises(EngineUnavailable, match="over"):
            await submitting
        desk.journal.write(True)
        await turns()

    run(test)


# ----------------------------------------------------------------------------------- kept results


def test_what_has_ended_is_told_again_and_not_computed_again() -> None:
    async def test() -> None:
        desk = Desk()
        done = submission("done", n=2)
        desk.journal.results["done"] = ended(done)
        assert await desk.submit(submission("new"), done) == [None, None]
        assert desk.submitted == ["new"]
        deltas = await desk.told()
        assert [(d.request_id, d.index, d.finish_reason) for d in deltas] == [
            ("done", 0, FinishReason.LENGTH),
            ("done", 1, FinishReason.LENGTH),
        ]
        assert [d.new_token_ids.tolist() for d in deltas if d.new_token_ids is not None] == [
            [40],
            [41],
        ]

    run(test)


def test_a_failure_of_its_own_is_told_again() -> None:
    """A prompt that makes workers die would else be computed as often as its client asks."""

    async def test() -> None:
        desk = Desk()
        error = NumericalError("NaN").to_wire()
        desk.journal.results["r"] = ended(submission("r"), FinishReason.ERROR, error=error)
        assert await desk.submit(submission("r")) == [None]
        assert desk.submitted == []
        assert [d.error for d in await desk.told()] == [error]

    run(test)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        (FinishReason.ABORT, {}),
        (FinishReason.ERROR, {"error": EngineUnavailable("no worker").to_wire()}),
        (FinishReason.ERROR, {"error": DeadlineExceeded("late").to_wire()}),
    ],
)
def test_what_was_ended_from_outside_is_computed_when_it_is_submitted_again(
    reason: FinishReason, changes: dict[str, Any]
) -> None:
    """A client that was given up, and its requests cancelled, comes back."""

    async def test() -> None:
        desk = Desk()
        desk.journal.results["r"] = ended(submission("r"), reason, **changes)
        assert await desk.submit(submission("r")) == [None]
        assert desk.submitted == ["r"]
        assert await desk.told() == []

    run(test)


def test_other_content_under_the_id_of_a_result_is_a_new_request() -> None:
    async def test() -> None:
        desk = Desk()
        desk.journal.results["r"] = ended(submission("r", seed=1))
        assert await desk.submit(submission("r", seed=2)) == [None]
        assert desk.submitted == ["r"]
        assert await desk.told() == []

    run(test)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_a_half_ended_submission_is_told_what_has_ended_and_follows_the_rest(
    reason: FinishReason,
) -> None:
    """Also of the one that was cancelled, where its stop string came: it won't be told again."""

    async def test() -> None:
        desk = Desk()
        both = submission("r", n=2)
        desk.journal.results["r"] = ended(both, reason)[:1]
        desk.state.live["r"] = both
        assert await desk.submit(both) == [None]
        assert desk.submitted == ["r"], "the core tells what is live"
        assert [d.index for d in await desk.told()] == [0]

    run(test)


def test_half_a_result_whose_rest_is_gone_is_computed_as_a_whole() -> None:
    async def test() -> None:
        desk = Desk()
        both = submission("r", n=2)
        desk.journal.results["r"] = ended(both)[1:]
        assert await desk.submit(both) == [None]
        assert desk.submitted == ["r"]
        assert await desk.told() == []

    run(test)


def test_a_result_that_can_not_be_read_is_as_good_as_none() -> None:
    async def test() -> None:
        class Damaged(FakeJournal):
            def result(self, parent_id: str) -> Any:
                raise RequestFailed("damaged")

        desk = Desk(Damaged())
        assert await desk.submit(submission("r")) == [None]
        assert desk.submitted == ["r"]
        with pytest.raises(UnknownRequest):
            await desk.loop.attach("c", "r")

    run(test)


def test_what_ends_while_results_are_looked_up_is_looked_up_again() -> None:
    """It was live when the reading began and is not when it is over: neither a new request, nor
    one to follow."""

    async def test() -> None:
        desk = Desk()
        one = submission("r")
        desk.state.live["r"] = one
        desk.journal.may_read.clear()
        submitting = desk.submit(one, submission("other"))
        await until(lambda: bool(desk.journal.reads))

        def end(event: Any) -> list[Any]:
            if isinstance(event, RequestCancelled):
                del desk.state.live["r"]
                return [last("r")]
            return []

        desk.state.script = end
        # The reading sees none, and the end comes before anybody has looked at that.
        result = ended(one)
        desk.journal.may_read.set()
        await until(lambda: len(desk.journal.reads) == 2)
        desk.loop.post(RequestCancelled("r"))
        desk.journal.results["r"] = result
        assert await submitting == [None, None]
        assert desk.submitted == ["other"]
        assert [d.finish_reason for d in await desk.told()] == [FinishReason.LENGTH]
        assert desk.journal.reads.count("other") == 1, "nothing else is looked up twice"

    run(test)


def test_an_end_that_has_come_in_and_is_not_handled_yet_counts() -> None:
    async def test() -> None:
        this = asyncio.get_running_loop()
        one = submission("r")

        class Racing(FakeJournal):
            def result(self, parent_id: str) -> Any:
                found = super().result(parent_id)
                if found is None:
                    # It ends after the reading, in the very turn in which that is taken notice of.
                    end = RequestCancelled("r")
                    this.call_soon_threadsafe(this.call_soon, desk.loop.post, end)
                    self.results["r"] = ended(one)
                return found

        desk = Desk(Racing())
        desk.state.live["r"] = one

        def act(event: Any) -> list[Any]:
            if isinstance(event, RequestCancelled):
                del desk.state.live["r"]
                return [last("r")]
            return []

        desk.state.script = act
        assert await desk.submit(one) == [None]
        assert desk.submitted == []
        assert [d.finish_reason for d in await desk.told()] == [FinishReason.LENGTH]

    run(test)


def test_a_client_that_is_given_up_while_results_are_looked_up_submits_nothing() -> None:
    """Nobody would ever cancel it."""

    async def test() -> None:
        desk = Desk()
        desk.journal.may_read.clear()
        submitting = desk.submit(submission("r"))
        await until(lambda: bool(desk.journal.reads))
        await desk.loop.disconnect("c")
        desk.journal.may_read.set()
        with pytest.raises(UnknownClient, match="connect"):
            await submitting
        assert desk.submitted == []

    run(test)


# -------------------------------------------------------------------------------------- attaching


@pytest.mark.parametrize("has_journal", [False, True])
def test_attaching_to_what_is_live_has_the_core_tell_all_of_it(has_journal: bool) -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state, journal=FakeJournal() if has_journal else None)
        loop.connect("d")
        state.live["r"] = one = submission("r")
        assert await loop.attach("d", "r") is one
        [event] = state.of_kind(ReplayRequested)
        assert (event.request_id, event.client_id) == ("r", "d")

    run(test)


def test_attaching_to_what_has_ended_tells_it_and_says_what_was_submitted() -> None:
    async def test() -> None:
        desk = Desk()
        one = submission("r", seed=5, n=2)
        desk.journal.results["r"] = ended(one, FinishReason.ABORT)
        found = await desk.loop.attach("c", "r")
        assert (found.request_id, found.seed, found.sampling_params) == (
            "r",
            5,
            one.sampling_params,
        )
        assert np.array_equal(found.prompt_token_ids, one.prompt_token_ids)
        assert [(d.index, d.finish_reason) for d in await desk.told()] == [
            (0, FinishReason.ABORT),
            (1, FinishReason.ABORT),
        ]
        assert not desk.state.of_kind(ReplayRequested)

    run(test)


@pytest.mark.parametrize("has_journal", [False, True])
def test_attaching_to_what_nobody_knows_is_an_error(has_journal: bool) -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state, journal=FakeJournal() if has_journal else None)
        loop.connect("c")
        with pytest.raises(UnknownRequest, match="'r'"):
            await loop.attach("c", "r")
        with pytest.raises(UnknownClient, match="connect"):
            await loop.attach("stranger", "r")

    run(test)


def test_attaching_to_what_ends_in_the_same_turn_is_no_wait_without_end() -> None:
    """It is live when the client asks, and the end that has just come in is not handled yet."""

    async def test() -> None:
        state = ScriptedState()
        loop = make(state)
        loop.connect("c")
        state.live["r"] = submission("r")

        def end(event: Any) -> list[Any]:
            if isinstance(event, RequestCancelled):
                del state.live["r"]
            return []

        state.script = end
        loop.post(RequestCancelled("r"))
        with pytest.raises(UnknownRequest):
            await loop.attach("c", "r")

    run(test)


def test_a_duplicate_of_live_content_that_differs_is_refused_by_the_core() -> None:
    async def test() -> None:
        desk = Desk()
        error = DuplicateRequest("taken").to_wire()
        desk.state.live["r"] = submission("r", seed=1)
        desk.state.script = lambda event: [Refuse(event.ticket, error)]
        assert await desk.submit(submission("r", seed=2)) == [error]
        assert not desk.state.of_kind(RequestCancelled)

    run(test)


def test_submissions_leave_nothing_behind() -> None:
    async def test() -> None:
        desk = Desk()
        before, others = sizes(desk.loop), asyncio.all_tasks()
        error = InvalidRequest("no").to_wire()

        def act(event: Any) -> list[Any]:
            if not isinstance(event, RequestSubmitted):
                return []
            index = int(event.submission.request_id)
            return [Refuse(event.ticket, error)] if index % 3 else [last(str(index))]

        desk.state.script = act
        for start in range(0, 300, 10):
            batch = [submission(str(start + i)) for i in range(10)]
            calls = [desk.submit(each) for each in batch]
            calls[0].cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: asyncio.all_tasks() == others)
        await turns()
        assert sizes(desk.loop) == before

    run(test)
