"""Workers that fail, die or hang: lost once, with what they were asked, and never by mistake."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from scheduler.actions import CopyBlocks, SaveBlocks, StopWorker
from scheduler.calls import ActorLost, CallFailed, Timeouts
from scheduler.codec import encode
from scheduler.errors import EngineUnavailable, NumericalError, RequestFailed
from scheduler.events import (
    BatchDone,
    BatchFailed,
    CopyDone,
    SaveFailed,
    Tick,
    WorkerExpected,
    WorkerJoined,
    WorkerLost,
)
from scheduler.loop import SchedulerLoop
from scheduler.messages import ModelRunnerOutput
from tests.loop_fakes import (
    FakeStore,
    FakeWorker,
    ScriptedState,
    batch,
    info,
    make,
    run,
    turns,
    until,
)
from tests.sizes import sizes

DONE = encode(ModelRunnerOutput(7, []))
COPY = CopyBlocks(3, "r", "w", [1, 2], "v", [5, 6])


def on_join(*actions: Any) -> ScriptedState:
    """A core that asks for `actions` when "w" joins."""
    state = ScriptedState()
    state.script = lambda event: (
        list(actions) if isinstance(event, WorkerJoined) and event.info.worker_id == "w" else []
    )
    return state


async def pair(
    state: ScriptedState, **settings: Any
) -> tuple[SchedulerLoop, FakeWorker, FakeWorker]:
    """A loop with the workers "v" and, joined last, "w"."""
    loop = make(state, **settings)
    v, w = FakeWorker(), FakeWorker()
    await loop.add_worker(v, info("v"))
    await loop.add_worker(w, info("w"))
    return loop, v, w


# ----------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_step_that_raises_fails_the_batch_and_a_death_loses_the_worker(is_lost: bool) -> None:
    async def test() -> None:
        state = on_join(batch())
        worker = FakeWorker()
        failure = ActorLost("killed") if is_lost else CallFailed(NumericalError("NaN"))
        worker.always["execute"] = failure
        loop = make(state)
        await loop.add_worker(worker, info())
        await until(lambda: len(state.events) == 2)
        event = state.events[1]
        if is_lost:
            assert isinstance(event, WorkerLost)
            assert (event.worker_id, event.reason) == ("w", "killed")
            assert loop.worker_infos() == []
        else:
            assert isinstance(event, BatchFailed)
            assert (event.step_id, event.error) == (7, NumericalError("NaN").to_wire())
            assert loop.worker_infos() == [info()]
        assert worker.was_killed is is_lost

    run(test)


def test_an_answer_that_can_not_be_read_fails_the_batch() -> None:
    async def test() -> None:
        state = on_join(batch())
        worker = FakeWorker()
        worker.always["execute"] = b"nonsense"
        await make(state).add_worker(worker, info())
        await until(lambda: bool(state.of_kind(BatchFailed)))

    run(test)


def test_a_worker_that_dies_while_it_computes_is_lost_once_and_not_listened_to() -> None:
    async def test() -> None:
        state = on_join(batch())
        worker = FakeWorker()
        loop = make(state, watch_interval_s=0.001)
        await loop.add_worker(worker, info())
        await until(lambda: worker.num_waiting("execute") == 1)
        step = worker.calls["execute"][0]
        worker.always["ping"] = ActorLost("dead")
        await until(lambda: bool(state.of_kind(WorkerLost)))
        if not step.done():
            step.set_result(DONE)
        await turns()
        assert len(state.of_kind(WorkerLost)) == 1
        assert not state.of_kind(BatchDone), "an answer of a lost worker came through"

    run(test)


def test_an_answer_that_comes_with_the_end_of_its_worker_is_not_listened_to() -> None:
    """The core has forgotten the worker by the time at which the answer would reach it."""

    async def test() -> None:
        state = on_join(batch())
        worker = FakeWorker()
        loop = make(state)
        await loop.add_worker(worker, info())
        await until(lambda: worker.num_waiting("execute") == 1)
        state.script = lambda event: [StopWorker("w")] if isinstance(event, Tick) else []
        worker.calls["execute"][0].set_result(DONE)
        loop.post(Tick())
        await turns()
        assert worker.was_killed
        assert not state.of_kind(BatchDone)
        assert not state.of_kind(WorkerLost)

    run(test)


def test_a_worker_that_answers_no_step_is_killed_and_its_reason_says_so() -> None:
    async def test() -> None:
        state = on_join(batch())
        worker = FakeWorker()
        loop = make(state, timeouts=Timeouts(step_s=0.02))
        await loop.add_worker(worker, info())
        await until(lambda: bool(state.of_kind(WorkerLost)))
        [event] = state.of_kind(WorkerLost)
        assert "step of 0 tokens" in event.reason
        assert "0.02 s" in event.reason
        assert worker.was_killed
        assert worker.num_waiting("execute") == 0, "somebody still waits for it"

    run(test)


def test_a_larger_batch_is_given_more_time() -> None:
    async def test() -> None:
        state = ScriptedState()
        state.script = lambda event: (
            [batch("v", num_tokens=1000), batch("w", num_tokens=1)]
            if isinstance(event, WorkerJoined) and event.info.worker_id == "w"
            else []
        )
        timeouts = Timeouts(step_s=0.02, step_s_per_token=0.001)
        _, v, w = await pair(state, timeouts=timeouts)
        await until(lambda: bool(state.of_kind(WorkerLost)))
        assert [event.worker_id for event in state.of_kind(WorkerLost)] == ["w"]
        await v.answer("execute", DONE)
        await until(lambda: bool(state.of_kind(BatchDone)))
        assert w.was_killed
        assert not v.was_killed

    run(test)


def two_steps(**settings: Any) -> tuple[ScriptedState, FakeWorker, SchedulerLoop]:
    state = on_join(batch(step_id=7), batch(step_id=8))
    return state, FakeWorker(), make(state, **settings)


@pytest.mark.parametrize("fails", [False, True])
def test_steps_are_sent_at_once_and_reported_in_their_order(fails: bool) -> None:
    async def test() -> None:
        state, worker, loop = two_steps()
        await loop.add_worker(worker, info())
        await until(lambda: worker.num_waiting("execute") == 2)
        first, second = worker.calls["execute"]
        second.set_result(encode(ModelRunnerOutput(8, [])))
        await turns()
        assert not state.of_kind(BatchDone)
        if fails:
            first.set_exception(CallFailed(NumericalError("NaN")))
        else:
            first.set_result(DONE)
        await until(lambda: len(state.events) == 3)
        assert [type(event) for event in state.events[1:]] == [
            BatchFailed if fails else BatchDone,
            BatchDone,
        ]

    run(test)


def test_the_deadline_of_a_step_begins_when_the_one_before_it_is_answered() -> None:
    """Two long steps together take longer than one may."""

    async def test() -> None:
        state, worker, loop = two_steps(timeouts=Timeouts(step_s=0.3))
        await loop.add_worker(worker, info())
        await until(lambda: worker.num_waiting("execute") == 2)
        first, second = worker.calls["execute"]
        await asyncio.sleep(0.2)
        first.set_result(DONE)
        await asyncio.sleep(0.2)
        second.set_result(encode(ModelRunnerOutput(8, [])))
        await until(lambda: len(state.of_kind(BatchDone)) == 2)
        assert not state.of_kind(WorkerLost)

    run(test)


def test_a_worker_that_dies_with_two_steps_is_lost_once() -> None:
    async def test() -> None:
        state, worker, loop = two_steps()
        await loop.add_worker(worker, info())
        await until(lambda: worker.num_waiting("execute") == 2)
        for step in list(worker.calls["execute"]):
            step.set_exception(ActorLost("killed"))
        await until(lambda: bool(state.of_kind(WorkerLost)))
        await turns()
        assert len(state.of_kind(WorkerLost)) == 1
        assert not state.of_kind(BatchDone)

    run(test)


def test_a_worker_that_computes_for_long_but_answers_pings_is_not_lost() -> None:
    async def test() -> None:
        state = on_join(batch())
        worker = FakeWorker()
        loop = make(state, watch_interval_s=0.001, timeouts=Timeouts(ping_s=0.02))
        await loop.add_worker(worker, info())
        await until(lambda: worker.names.count("ping") > 40)
        await worker.answer("execute", DONE)
        await until(lambda: bool(state.of_kind(BatchDone)))
        assert not state.of_kind(WorkerLost)

    run(test)


def test_a_frozen_worker_that_computes_nothing_is_found_by_its_silence() -> None:
    async def test() -> None:
        state = ScriptedState()
        worker = FakeWorker()
        del worker.always["ping"]
        loop = make(state, watch_interval_s=0.001, timeouts=Timeouts(ping_s=0.02))
        await loop.add_worker(worker, info())
        await until(lambda: bool(state.of_kind(WorkerLost)))
        assert "pinged" in state.of_kind(WorkerLost)[0].reason
        assert worker.names.count("ping") == 1, "one ping at a time"

    run(test)


def test_a_ping_that_raises_is_an_answer() -> None:
    async def test() -> None:
        state = ScriptedState()
        worker = FakeWorker()
        worker.always["ping"] = CallFailed(RequestFailed("odd"))
        loop = make(state, watch_interval_s=0.001)
        await loop.add_worker(worker, info())
        await until(lambda: worker.names.count("ping") > 3)
        assert not state.of_kind(WorkerLost)

    run(test)


def test_nobody_is_blamed_for_time_in_which_the_scheduler_itself_was_frozen() -> None:
    """Its process is stopped for longer than every deadline. When it goes on, the answers that came
    meanwhile are still on their way in, and all timers have run out."""

    async def test() -> None:
        state = on_join(batch())
        worker = FakeWorker()
        loop = make(state, timeouts=Timeouts(step_s=0.4))
        loop.connect("c")
        await loop.add_worker(worker, info())
        await until(lambda: worker.num_waiting("execute") == 1)
        step = worker.calls["execute"][0]
        this = asyncio.get_running_loop()
        woke = threading.Event()

        def answer_late() -> None:
            assert woke.wait(5.0)
            this.call_soon_threadsafe(step.set_result, DONE)

        thread = threading.Thread(target=answer_late)
        thread.start()
        time.sleep(0.5)  # the process is frozen
        this.call_later(0.02, woke.set)
        await until(lambda: bool(state.of_kind(BatchDone)) or bool(state.of_kind(WorkerLost)))
        thread.join()
        assert not state.of_kind(WorkerLost)

    run(test)


def test_the_replacement_is_announced_before_the_loss() -> None:
    """With one worker, the core would otherwise end every request for want of workers."""

    async def test() -> None:
        state = on_join(batch())
        told: list[tuple[str, str]] = []

        def replace(worker_id: str, reason: str) -> list[Any]:
            told.append((worker_id, reason))
            return [WorkerExpected("w2", 8)]

        worker = FakeWorker()
        worker.always["execute"] = ActorLost("killed")
        loop = make(state, on_worker_lost=replace)
        await loop.add_worker(worker, info())
        await until(lambda: bool(state.of_kind(WorkerLost)))
        assert [type(event) for event in state.calls[-1]] == [WorkerExpected, WorkerLost]
        assert told == [("w", "killed")]
        await loop.add_worker(FakeWorker(), info("w2"))

    run(test)


def test_what_is_asked_of_a_worker_whose_loss_the_core_learns_in_the_same_turn_fails() -> None:
    """Evicted and lost in one turn: the save that the core asked for has nobody to come from."""

    async def test() -> None:
        state = ScriptedState()
        loop, _, _ = await pair(state, store=FakeStore())
        asked = [
            SaveBlocks(1, "r", "gone", [b"h"], [0], owned=True, replace=False),
            CopyBlocks(2, "r", "w", [0], "gone", [0]),
            CopyBlocks(3, "r", "gone", [0], "w", [0]),
            batch("gone"),
        ]
        state.script = lambda event: asked if isinstance(event, WorkerLost) else []
        loop.post(WorkerLost("gone"))
        await until(lambda: len(state.calls[-1]) == 3)
        assert [event.op_id for event in state.of_kind(SaveFailed)] == [1]
        copies = [(event.op_id, event.num_copied_blocks) for event in state.of_kind(CopyDone)]
        assert copies == [(2, 0), (3, 0)]
        loop.connect("c")  # the engine goes on

    run(test)


# ---------------------------------------------------------------------------------------- copies


def test_a_copy_reports_what_was_written() -> None:
    async def test() -> None:
        state = on_join(COPY)
        _, v, w = await pair(state)
        await w.answer("copy_blocks", 2)
        await until(lambda: bool(state.of_kind(CopyDone)))
        [event] = state.of_kind(CopyDone)
        assert (event.op_id, event.num_copied_blocks) == (3, 2)
        assert "settle" not in v.names, "a whole copy needs no fence"

    run(test)


@pytest.mark.parametrize("answer", [1, CallFailed(RequestFailed("no"))])
def test_blocks_of_a_copy_that_fell_short_are_given_back_behind_a_fence(answer: Any) -> None:
    """A write that still waits at the target would change blocks that are another's by then."""

    async def test() -> None:
        state = on_join(COPY)
        _, v, w = await pair(state)
        del v.always["settle"]
        await w.answer("copy_blocks", answer)
        await until(lambda: v.num_waiting("settle") == 1)
        await turns()
        assert not state.of_kind(CopyDone)
        await v.answer("settle", None)
        await until(lambda: bool(state.of_kind(CopyDone)))
        [event] = state.of_kind(CopyDone)
        assert event.num_copied_blocks == (answer if isinstance(answer, int) else 0)
        assert not state.of_kind(WorkerLost)

    run(test)


@pytest.mark.parametrize("dead", ["v", "w", ""])
def test_a_copy_that_is_lost_loses_the_side_that_is_dead_and_no_other(dead: str) -> None:
    async def test() -> None:
        state = on_join(COPY)
        loop, v, w = await pair(state)
        for name, worker in (("v", v), ("w", w)):
            if name == dead:
                worker.always["ping"] = worker.always["settle"] = ActorLost("dead")
        await w.answer("copy_blocks", ActorLost("one of them"))
        await until(lambda: bool(state.of_kind(CopyDone)))
        assert [event.worker_id for event in state.of_kind(WorkerLost)] == [dead] * bool(dead)
        assert state.of_kind(CopyDone)[0].num_copied_blocks == 0
        assert {i.worker_id for i in loop.worker_infos()} == {"v", "w"} - {dead}

    run(test)


def test_a_copy_that_hangs_ends_and_a_frozen_target_is_lost() -> None:
    async def test() -> None:
        state = on_join(COPY)
        _, v, w = await pair(state, timeouts=Timeouts(store_s=0.02, ping_s=0.02))
        del v.always["ping"], v.always["settle"]
        await until(lambda: bool(state.of_kind(CopyDone)))
        assert [event.worker_id for event in state.of_kind(WorkerLost)] == ["v"]
        assert v.was_killed
        assert not w.was_killed

    run(test)


def test_a_target_whose_writes_hang_is_lost_though_it_answers_pings() -> None:
    async def test() -> None:
        state = on_join(COPY)
        _, v, w = await pair(state, timeouts=Timeouts(store_s=0.02))
        del v.always["settle"]
        await w.answer("copy_blocks", 0)
        await until(lambda: bool(state.of_kind(CopyDone)))
        assert [event.worker_id for event in state.of_kind(WorkerLost)] == ["v"]

    run(test)


def test_a_fence_that_raises_was_reached() -> None:
    async def test() -> None:
        state = on_join(COPY)
        _, v, w = await pair(state)
        v.always["settle"] = CallFailed(RequestFailed("odd"))
        await w.answer("copy_blocks", 0)
        await until(lambda: bool(state.of_kind(CopyDone)))
        assert not state.of_kind(WorkerLost)

    run(test)


def test_a_lost_worker_leaves_no_call_behind() -> None:
    async def test() -> None:
        state = on_join(COPY, batch())
        loop = make(state, watch_interval_s=0.001)
        before = sizes(loop)
        others = asyncio.all_tasks()
        workers = [FakeWorker(), FakeWorker()]
        for name, worker in zip("vw", workers, strict=True):
            await loop.add_worker(worker, info(name))
        await until(lambda: workers[1].num_waiting("execute") == 1)
        for worker in workers:
            worker.always["ping"] = ActorLost("dead")
        await until(lambda: len(state.of_kind(WorkerLost)) == 2)
        await until(lambda: asyncio.all_tasks() == others)
        await turns()
        assert sizes(loop) == before
        loop.close(EngineUnavailable("over"))

    run(test)


def test_no_worker_of_a_closed_engine_is_replaced() -> None:
    """Its host ends the workers one after the other, which looks like their death."""

    async def test() -> None:
        replaced: list[str] = []

        def replace(worker_id: str, reason: str) -> list[Any]:
            replaced.append(worker_id)
            return []

        others = asyncio.all_tasks()
        loop = make(on_join(batch()), on_worker_lost=replace)
        worker = FakeWorker()
        await loop.add_worker(worker, info())
        loop.close(EngineUnavailable("over"))
        await worker.answer("execute", ActorLost("ended"))
        await until(lambda: asyncio.all_tasks() == others)
        assert replaced == []

    run(test)
