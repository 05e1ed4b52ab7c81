"""The engine's event loop: every action ends in one event, and nobody is left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from scheduler.codec import encode
from scheduler.errors import EngineUnavailable, InvalidConfig, InvalidRequest, NumericalError
from scheduler.loop import ActorLost, CallFailed, SchedulerLoop
from scheduler.messages import (
    BatchDone,
    BatchFailed,
    Emit,
    LoadBlocks,
    LoadFailed,
    LookupBlocks,
    LookupDone,
    ModelRunnerOutput,
    OutputDelta,
    Refuse,
    ReleaseBlocks,
    RequestCancelled,
    RequestInfo,
    RequestSubmitted,
    RunBatch,
    SaveBlocks,
    SaveFailed,
    SchedulerOutput,
    Submission,
    WorkerInfo,
    WorkerJoined,
    WorkerLost,
)
from scheduler.request import RequestStatus
from scheduler.sampling_params import SamplingParams

DEADLINE_S = 10.0


class ScriptedState:
    """Stands for the core: notes every call of `handle` and answers by a script."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.script: Callable[[Any], list[Any]] = lambda event: []
        self.infos: list[RequestInfo] = []
        self.is_handling = False

    @property
    def events(self) -> list[Any]:
        return [event for call in self.calls for event in call]

    def handle(self, *events: Any) -> list[Any]:
        assert not self.is_handling, "handle was entered twice"
        self.is_handling = True
        self.calls.append(list(events))
        actions = [action for event in events for action in self.script(event)]
        self.is_handling = False
        return actions

    def request_infos(self, now_s: float) -> list[RequestInfo]:
        return self.infos


class FakeWorker:
    def __init__(self, execute: Callable[[bytes], Awaitable[bytes]]) -> None:
        self.execute = execute
        self.is_dead = False
        self.was_killed = False

    async def ping(self) -> None:
        if self.is_dead:
            raise ActorLost("it is dead")

    def kill(self) -> None:
        self.was_killed = True


class DeadStore:
    async def lookup(self, action: Any) -> int:
        raise ActorLost("the store is dead")

    async def load(self, action: Any, worker: Any) -> int:
        raise ActorLost("the store is dead")

    async def save(self, action: Any, worker: Any) -> tuple[int, int]:
        raise CallFailed(EngineUnavailable("the store is confused"))

    async def release(self, action: Any) -> None:
        raise ActorLost("the store is dead")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def info(worker_id: str = "w", **changes: Any) -> WorkerInfo:
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "device": "cpu",
        "num_blocks": 8,
        "block_size": 16,
        "block_bytes": 64,
        "vocab_size": 100,
        "max_model_len": 64,
        "eos_token_ids": (),
        "model_fingerprint": "m",
    }
    return WorkerInfo(**fields | changes)


def submission(request_id: str = "r") -> Submission:
    return Submission(request_id, np.array([1], np.int32), SamplingParams(), seed=0)


def emit(client_id: str, request_id: str) -> Emit:
    return Emit(client_id, OutputDelta(request_id))


def batch(step_id: int = 7) -> RunBatch:
    return RunBatch("w", SchedulerOutput(step_id, [], []))


def of_kind(state: ScriptedState, kind: type) -> list[Any]:
    return [event for event in state.events if isinstance(event, kind)]


def make(state: ScriptedState, store: Any = None, **settings: Any) -> SchedulerLoop:
    return SchedulerLoop(state, store, **settings)  # type: ignore[arg-type]


def test_events_of_one_turn_are_handled_together() -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state)
        loop.connect("c")
        await asyncio.gather(*(loop.submit("c", [submission(f"r{i}")]) for i in range(20)))
        assert [len(call) for call in state.calls] == [20]

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


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_step_that_raises_fails_the_batch_and_a_death_loses_the_worker(is_lost: bool) -> None:
    async def execute(message: bytes) -> bytes:
        raise ActorLost("killed") if is_lost else CallFailed(NumericalError("NaN"))

    async def test() -> None:
        state = ScriptedState()
        state.script = lambda event: [batch()] if isinstance(event, WorkerJoined) else []
        worker = FakeWorker(execute)
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
    async def execute(message: bytes) -> bytes:
        return b"nonsense"

    async def test() -> None:
        state = ScriptedState()
        state.script = lambda event: [batch()] if isinstance(event, WorkerJoined) else []
        await make(state).add_worker(FakeWorker(execute), info())
        await until(lambda: bool(of_kind(state, BatchFailed)))

    run(test)


def test_a_worker_that_dies_while_idle_is_found_and_lost_once() -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def execute(message: bytes) -> bytes:
            await gate.wait()
            return encode(ModelRunnerOutput(7, []))

        state = ScriptedState()
        state.script = lambda event: [batch()] if isinstance(event, WorkerJoined) else []
        worker = FakeWorker(execute)
        loop = make(state, watch_interval_s=0.001)
        await loop.add_worker(worker, info())
        worker.is_dead = True
        await until(lambda: bool(of_kind(state, WorkerLost)))
        gate.set()
        await asyncio.sleep(0.01)
        assert len(of_kind(state, WorkerLost)) == 1
        assert not of_kind(state, BatchDone), "an answer of a lost worker came through"

    run(test)


def test_a_dead_store_is_a_miss_and_a_failure_and_nothing_waits() -> None:
    async def execute(message: bytes) -> bytes:
        return encode(ModelRunnerOutput(7, []))

    async def test() -> None:
        state = ScriptedState()
        asked = [
            LookupBlocks(1, "r", [b"h"], 16, 0, False),
            LoadBlocks(2, "r", "w", [b"h"], [0]),
            SaveBlocks(3, "r", "w", [b"h"], [0], owned=True, replace=False),
            ReleaseBlocks("r", forget=True),
        ]
        state.script = lambda event: asked if isinstance(event, WorkerJoined) else []
        loop = make(state, DeadStore())
        await loop.add_worker(FakeWorker(execute), info())
        await until(lambda: len(state.events) == 4)
        lookup, load, save = (of_kind(state, k)[0] for k in (LookupDone, LoadFailed, SaveFailed))
        assert (lookup.op_id, lookup.num_hit_tokens) == (1, 0)
        assert (load.op_id, load.reason) == (2, "the store is dead")
        assert (save.op_id, save.reason) == (3, "the store is confused")
        loop.connect("c")  # the engine goes on

    run(test)


def test_a_poll_that_is_repeated_brings_the_same_deltas_until_they_are_acknowledged() -> None:
    async def test() -> None:
        state = ScriptedState()
        state.script = lambda event: [emit("c", "a"), emit("c", "b"), emit("other", "x")]
        loop = make(state)
        loop.connect("c")
        await loop.submit("c", [submission()])
        for _ in range(2):
            answer = await loop.poll("c", 0, 1.0)
            assert [(d.seq, d.delta.request_id) for d in answer.deliveries] == [(1, "a"), (2, "b")]
        answer = await loop.poll("c", 1, 1.0)
        assert [d.seq for d in answer.deliveries] == [2]
        assert (await loop.poll("c", 2, 0.0)).deliveries == []

    run(test)


def test_a_waiting_poll_is_answered_as_soon_as_there_is_something() -> None:
    async def test() -> None:
        state = ScriptedState()
        state.script = lambda event: [emit("c", "a")]
        loop = make(state)
        loop.connect("c")
        poll = asyncio.create_task(loop.poll("c", 0, 1000.0))
        await asyncio.sleep(0)
        await loop.submit("c", [submission()])
        assert [d.seq for d in (await poll).deliveries] == [1]

    run(test)


def test_a_second_poll_sends_the_first_one_home() -> None:
    async def test() -> None:
        loop = make(ScriptedState())
        loop.connect("c")
        first = asyncio.create_task(loop.poll("c", 0, 1000.0))
        await asyncio.sleep(0)
        second = asyncio.create_task(loop.poll("c", 0, 1000.0))
        assert (await first).deliveries == []
        assert not second.done()
        loop.close(EngineUnavailable("over"))
        assert (await second).closed == EngineUnavailable("over").to_wire()

    run(test)


def test_a_client_that_stops_polling_is_forgotten_and_its_requests_are_cancelled() -> None:
    async def test() -> None:
        state = ScriptedState()
        state.infos = [
            RequestInfo(name, client, RequestStatus.RUNNING, "w", 0, 1, 0, 0, 1, 0, 0.0)
            for name, client in (("mine#0", "gone"), ("mine#1", "gone"), ("other", "c"))
        ]
        loop = make(state, client_grace_s=0.01, watch_interval_s=0.001)
        loop.connect("gone")
        await until(lambda: bool(of_kind(state, RequestCancelled)))
        cancelled = [event.request_id for event in of_kind(state, RequestCancelled)]
        assert cancelled == ["mine#0", "mine#1"]
        answer = await loop.poll("gone", 0, 0.0)
        assert answer.is_forgotten
        assert answer.closed is None
        with pytest.raises(InvalidRequest, match="connect"):
            await loop.submit("gone", [submission()])

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
        with pytest.raises(EngineUnavailable, match="impossible"):
            await loop.add_worker(FakeWorker(execute), info())
        assert (await waiting).closed is not None

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
    async def execute(message: bytes) -> bytes:
        raise AssertionError

    async def test() -> None:
        state = ScriptedState()
        loop = make(state)
        await loop.add_worker(FakeWorker(execute), info("w"))
        with pytest.raises(InvalidConfig):
            await loop.add_worker(FakeWorker(execute), info("v" if changes else "w", **changes))
        assert len(of_kind(state, WorkerJoined)) == 1
        loop.connect("c")  # the engine goes on

    run(test)


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
        state.calls.clear()
        sizes = {
            name: len(value) for name, value in vars(loop).items() if hasattr(value, "__len__")
        }
        assert sizes.pop("_tasks") == 1, "only the watch goes on"
        assert set(sizes.values()) == {0}, sizes

    run(test)
