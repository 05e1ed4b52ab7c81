"""The engine's event loop: every action ends in one event, and nobody is left waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scheduler.actions import (
    RecordFinished,
    RecordProgress,
    Refuse,
    StopWorker,
)
from scheduler.calls import ActorLost
from scheduler.codec import encode
from scheduler.errors import (
    CannotMigrate,
    EngineUnavailable,
    InvalidConfig,
    InvalidRequest,
    UnknownWorker,
)
from scheduler.events import (
    DrainRequested,
    MigrateRequested,
    RequestSubmitted,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from scheduler.lifetime import unix_clock
from scheduler.messages import ModelRunnerOutput
from scheduler.request import FinishReason, RequestStats
from tests.loop_fakes import (
    FakeJournal,
    FakeWorker,
    ScriptedState,
    batch,
    emit,
    info,
    make,
    run,
    submission,
    turns,
    until,
)
from tests.sizes import sizes


def test_events_of_one_turn_are_handled_together() -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state)
        loop.connect("c")
        await asyncio.gather(*(loop.submit("c", [submission(f"r{i}")]) for i in range(20)))
        assert [len(call) for call in state.calls] == [20]

    run(test)


def test_every_event_carries_the_time_at_which_it_came() -> None:
    """Also those of the host, which knows no time."""

    async def test() -> None:
        now_s = 1000.0
        state = ScriptedState()
        loop = make(state, clock=lambda: now_s)
        loop.post(WorkerLost("w"))
        await loop.cancel(["a"])
        now_s = 2000.0
        await loop.evict(["a"])
        assert [event.time_s for event in state.events] == [1000.0, 1000.0, 2000.0]

    run(test)


def test_the_clock_does_not_jump_when_the_machines_clock_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.time", lambda: 5_000_000.0)
    monkeypatch.setattr("time.monotonic", lambda: 70.0)
    clock = unix_clock()
    assert clock() == 5_000_000.0
    monkeypatch.setattr("time.time", lambda: 1.0)
    monkeypatch.setattr("time.monotonic", lambda: 72.5)
    assert clock() == 5_000_002.5


def test_the_core_is_told_that_time_passes() -> None:
    async def test() -> None:
        state = ScriptedState()
        make(state, watch_interval_s=0.001)
        await until(lambda: len(state.of_kind(Tick)) >= 3)

    run(test)


def test_a_refused_submission_is_answered_alone() -> None:
    async def test() -> None:
        state = ScriptedState()
        error = InvalidRequest("no").to_wire()
        state.script = lambda event: (
            [Refuse(event.ticket, error)] if event.submission.request_id == "bad" else []
        )
        loop = make(state)
        loop.connect("c")
        answers = await loop.submit("c", [submission("a"), submission("bad"), submission("b")])
        assert answers == [None, error, None]

    run(test)


def test_a_bug_in_the_core_closes_the_engine_and_tells_everybody() -> None:
    async def test() -> None:
        def explode(event: Any) -> list[Any]:
            raise RuntimeError("impossible")

        state = ScriptedState()
        state.script = explode
        loop = make(state)
        loop.connect("c")
        loop.connect("d")
        waiting = asyncio.create_task(loop.poll("d", 0, 1000.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="RuntimeError: impossible"):
            await loop.submit("c", [submission()])
        closed = (await waiting).closed
        assert closed is not None
        assert "impossible" in closed.message
        with pytest.raises(EngineUnavailable):
            loop.connect("e")

    run(test)


def test_a_bug_while_an_action_is_performed_closes_the_engine_too() -> None:
    async def execute(message: bytes) -> bytes:
        raise RuntimeError("impossible")

    async def test() -> None:
        state = ScriptedState()
        state.script = lambda event: [batch()] if isinstance(event, WorkerJoined) else []
        loop = make(state)
        loop.connect("c")
        waiting = asyncio.create_task(loop.poll("c", 0, 1000.0))
        await asyncio.sleep(0)
        await loop.add_worker(FakeWorker(execute), info())
        assert (await waiting).closed is not None
        with pytest.raises(EngineUnavailable, match="impossible"):
            loop.stats()

    run(test)


@pytest.mark.parametrize("hook", ["on_worker_lost", "on_worker_stopped", "on_client_gone"])
def test_a_bug_in_the_host_closes_the_engine_too(hook: str) -> None:
    async def test() -> None:
        def explode(*args: Any) -> Any:
            raise RuntimeError("impossible")

        state = ScriptedState()
        loop = make(state, watch_interval_s=0.001, **{hook: explode})
        worker = FakeWorker()
        await loop.add_worker(worker, info())
        loop.connect("c")
        loop.connect("d")
        waiting = asyncio.create_task(loop.poll("d", 0, 1000.0))
        if hook == "on_worker_lost":
            worker.always["ping"] = ActorLost("dead")
        elif hook == "on_worker_stopped":
            state.script = lambda event: [StopWorker("w")] if isinstance(event, Tick) else []
        else:
            await loop.disconnect("c")
        closed = (await waiting).closed
        assert closed is not None
        assert "impossible" in closed.message

    run(test)


def test_what_came_before_the_end_is_delivered_with_it() -> None:
    async def test() -> None:
        state = ScriptedState()
        state.script = lambda event: [emit("c", "a")]
        loop = make(state)
        loop.connect("c")
        await loop.submit("c", [submission()])
        loop.close(EngineUnavailable("over"))
        answer = await loop.poll("c", 0, 1.0)
        assert [d.delta.request_id for d in answer.deliveries] == ["a"]
        assert answer.closed is not None

    run(test)


@pytest.mark.parametrize("changes", [{"model_fingerprint": "n"}, {"block_size": 8}, {}])
def test_a_worker_unlike_the_others_or_of_the_same_name_is_refused(changes: Any) -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state)
        await loop.add_worker(FakeWorker(), info("w"))
        with pytest.raises(InvalidConfig):
            await loop.add_worker(FakeWorker(), info("v" if changes else "w", **changes))
        assert len(state.of_kind(WorkerJoined)) == 1
        loop.connect("c")  # the engine goes on

    run(test)


# ------------------------------------------------------------------------- migrations and drains


def test_a_migration_is_begun_or_refused_with_its_reason() -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state)
        await loop.migrate("r", "w")
        [event] = state.of_kind(MigrateRequested)
        assert (event.request_id, event.worker_id) == ("r", "w")
        error = CannotMigrate("no room").to_wire()
        state.script = lambda event: [Refuse(event.ticket, error)]
        with pytest.raises(CannotMigrate, match="no room"):
            await loop.migrate("r", "w")

    run(test)


def test_a_drain_returns_when_the_worker_has_ended_however_often_it_was_asked_for() -> None:
    async def test() -> None:
        state = ScriptedState()
        stopped: list[str] = []
        loop = make(state, clock=lambda: 500.0, on_worker_stopped=stopped.append)
        worker = FakeWorker()
        await loop.add_worker(worker, info())
        drains = [asyncio.create_task(loop.drain("w", 30.0)) for _ in range(2)]
        await turns()
        assert [event.deadline_s for event in state.of_kind(DrainRequested)] == [530.0, 530.0]
        assert not any(drain.done() for drain in drains)
        state.script = lambda event: [StopWorker("w")] if isinstance(event, Tick) else []
        loop.post(Tick())
        await asyncio.gather(*drains)
        assert worker.was_killed
        assert stopped == ["w"]
        assert loop.worker_infos() == []
        assert not state.of_kind(WorkerLost), "a worker that was stopped is not lost"
        with pytest.raises(UnknownWorker, match="'w'"):
            await loop.drain("w", 30.0)

    run(test)


def test_a_drain_also_returns_when_the_worker_is_lost_on_the_way() -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state, watch_interval_s=0.001)
        worker = FakeWorker()
        await loop.add_worker(worker, info())
        drain = asyncio.create_task(loop.drain("w", 30.0))
        await turns()
        worker.always["ping"] = ActorLost("dead")
        await drain
        assert len(state.of_kind(WorkerLost)) == 1

    run(test)


def test_a_drain_of_a_worker_that_ends_in_the_same_turn_is_done_and_not_refused() -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state)
        await loop.add_worker(FakeWorker(), info())
        state.script = lambda event: [
            StopWorker("w"),
            Refuse(event.ticket, UnknownWorker("it is gone").to_wire()),
        ]
        await loop.drain("w", 30.0)

    run(test)


def test_a_drain_that_the_core_refuses_says_why() -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state)
        await loop.add_worker(FakeWorker(), info())
        state.script = lambda event: [Refuse(event.ticket, UnknownWorker("odd").to_wire())]
        with pytest.raises(UnknownWorker, match="odd"):
            await loop.drain("w", 30.0)

    run(test)


def test_a_drain_of_an_engine_that_closes_ends_with_the_reason() -> None:
    async def test() -> None:
        loop = make(ScriptedState())
        await loop.add_worker(FakeWorker(), info())
        drain = asyncio.create_task(loop.drain("w", 30.0))
        await turns()
        loop.close(EngineUnavailable("over"))
        with pytest.raises(EngineUnavailable, match="over"):
            await drain

    run(test)


# ------------------------------------------------------------------------------------ the journal


def _progress(request_id: str) -> RecordProgress:
    return RecordProgress(request_id, 1, None, None, None)


def _finished(request_id: str) -> RecordFinished:
    return RecordFinished(request_id, request_id, FinishReason.STOP, None, None, RequestStats())


def test_the_records_of_a_turn_are_written_together() -> None:
    """A crash between two halves of a turn would leave a request half finished."""

    async def test() -> None:
        state, journal = ScriptedState(), FakeJournal()
        records = {"a": [_progress("a"), _progress("b")], "b": [_finished("b")], "c": []}
        state.script = lambda event: records[event.request_id]
        loop = make(state, journal=journal)
        await loop.cancel(["a", "b"])
        await loop.cancel(["c"])
        await loop.cancel(["b"])
        assert journal.appended == [records["a"] + records["b"], records["b"]]
        assert loop.journal_stats() == {"num_results": 0}

    run(test)


def test_a_core_that_writes_to_no_journal_is_a_bug() -> None:
    async def test() -> None:
        state = ScriptedState()
        state.script = lambda event: [_finished("a")]
        loop = make(state)
        assert loop.journal_stats() is None
        await loop.cancel(["a"])
        with pytest.raises(EngineUnavailable, match="journal"):
            loop.stats()

    run(test)


# ----------------------------------------------------------------------------------------- leaks


def test_answered_clients_leave_nothing_behind() -> None:
    """A list that is never drained shows only after tens of thousands of requests."""

    async def test() -> None:
        state = ScriptedState()
        error = InvalidRequest("no").to_wire()
        state.script = lambda event: (
            [emit("c", "a"), Refuse(event.ticket, error)]
            if isinstance(event, RequestSubmitted)
            else []
        )
        loop = make(state)
        acked = 0
        loop.connect("c")
        for _ in range(200):
            await loop.submit("c", [submission()])
            acked = (await loop.poll("c", acked, 1.0)).deliveries[-1].seq
        await loop.poll("c", acked, 0.0)
        await loop.disconnect("c")
        left = sizes(loop)
        assert left.pop("Tasks._tasks") == 1, "only the watch goes on"
        assert set(left.values()) == {0}, left

    run(test)


def test_a_caller_that_gives_up_leaves_nothing_behind() -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state)
        loop.connect("c")
        await loop.add_worker(_stepping(), info())
        before, others = sizes(loop), asyncio.all_tasks()
        state.script = lambda event: (
            [Refuse(event.ticket, InvalidRequest("no").to_wire())]
            if isinstance(event, RequestSubmitted)
            else []
        )
        callers = [
            asyncio.create_task(call)
            for call in (
                loop.submit("c", [submission()]),
                loop.poll("c", 0, 1000.0),
                loop.drain("w", 1000.0),
            )
        ]
        await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        await turns()
        assert sizes(loop) == before
        assert asyncio.all_tasks() == others

    run(test)


def _stepping() -> FakeWorker:
    async def execute(message: bytes) -> bytes:
        return encode(ModelRunnerOutput(7, []))

    return FakeWorker(execute)
