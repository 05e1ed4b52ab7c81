"""The scheduler actor without Ray: how an engine comes up, comes back and ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler import actor
from scheduler.actor import EngineSpec, SchedulerActor
from scheduler.calls import ActorLost
from scheduler.codec import decode
from scheduler.config import SchedulerConfig
from scheduler.errors import EngineUnavailable, InvalidConfig, ModelNotFound, StartupFailed
from scheduler.messages import WorkerInfo
from scheduler.outbox import EngineInfo, EngineStats
from scheduler.restarts import RestartLimits
from tests.loop_fakes import FakeWorker, info, run, until


class FakeStore:
    def __init__(self, story: list[str]) -> None:
        self.story = story
        self.error: Exception | None = None
        self.is_restarted = asyncio.Event()

    async def open(self) -> None:
        self.story.append("open store")
        if self.error is not None:
            raise self.error

    async def retain(self, request_ids: list[str]) -> None:
        if self.error is not None:
            raise self.error

    async def leave_node(self, node_id: str) -> None:
        raise NotImplementedError(node_id)

    async def restart(self) -> None:
        self.is_restarted.set()

    async def stats(self) -> dict[str, int] | None:
        return None


class FakeParts:
    """Every actor of an engine but the scheduler; what is done to them is in `story`, in order."""

    def __init__(self, *there: str) -> None:
        self.there = list(there)
        self.story: list[str] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.memory: bytes | None = None
        self.the_store = FakeStore(self.story)

    async def start(self, worker_id: str, epoch: int) -> tuple[Any, WorkerInfo]:
        self.story.append(f"start {worker_id}")
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        worker = FakeWorker()
        worker.num_steps_begun = worker.num_steps_done = 0  # type: ignore[attr-defined]
        return worker, info(worker_id)

    async def take_over(self, worker_id: str, epoch: int) -> tuple[Any, WorkerInfo]:
        self.story.append(f"take over {worker_id}")
        worker, found = await self.start(worker_id, epoch)
        self.story.pop()
        return worker, found

    async def find(self) -> list[str]:
        return self.there

    async def shortage(self) -> str:
        return "There is too little of everything"

    async def draining_nodes(self) -> dict[str, float]:
        return {}

    async def remember(self, memory: bytes) -> None:
        self.memory = memory

    async def recall(self) -> bytes | None:
        return self.memory

    def store(self, found: WorkerInfo, epoch: int) -> Any:
        return self.the_store

    async def clear(self) -> None:
        self.story.append("clear")
        self.memory = None

    def end_this_scheduler(self) -> None:
        self.story.append("end scheduler")


def limits(found: WorkerInfo) -> SchedulerConfig:
    return SchedulerConfig(block_size=found.block_size, enable_offload=False)


def make(parts: FakeParts, **settings: Any) -> SchedulerActor:
    spec = EngineSpec(
        model="tiny",
        settings={"name": "e"},
        fleet=parts,
        limits=limits,
        num_workers=2,
        startup_timeout_s=5.0,
        restarts=RestartLimits(max_restarts=0),
    )
    return SchedulerActor(_replaced(spec, settings))


def _replaced(spec: EngineSpec, settings: dict[str, Any]) -> EngineSpec:
    return EngineSpec(**{**spec.__dict__, **settings})


@pytest.fixture(autouse=True)
def _short_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "_FAREWELL_S", 0.01)
    monkeypatch.setattr(actor, "_FAILED_START_S", 0.05)
    monkeypatch.setattr(actor, "_PUBLISH_EVERY_S", 0.01)


def ended(parts: FakeParts) -> Callable[[], bool]:
    return lambda: "end scheduler" in parts.story


def test_a_new_engine_ends_what_an_earlier_one_left_and_starts_its_own_parts() -> None:
    async def test() -> None:
        parts = FakeParts("worker-7")
        engine = make(parts)
        await engine.ready()
        assert parts.story == ["clear", "start worker-0", "start worker-1", "open store"]
        answer = decode(await engine.connect("c"), EngineInfo)
        assert (answer.model, answer.settings) == ("tiny", {"name": "e"})
        assert [worker.worker_id for worker in answer.workers] == ["worker-0", "worker-1"]

    run(test)


def test_a_restarted_scheduler_ends_nothing_and_is_ready_before_its_workers_are() -> None:
    async def test() -> None:
        parts = FakeParts()
        await make(parts).ready()
        parts.story.clear()
        parts.there = ["worker-0"]
        parts.gate.clear()
        engine = make(parts)
        await engine.ready()
        assert parts.story[0] == "open store"
        await until(lambda: len(parts.story) >= 3)
        assert "take over worker-0" in parts.story
        assert "start worker-2" in parts.story
        assert "clear" not in parts.story

    run(test)


@pytest.mark.parametrize("error", [ModelNotFound("no such model"), InvalidConfig("no such dtype")])
def test_a_start_that_fails_says_why_and_leaves_nothing(error: Exception) -> None:
    async def test() -> None:
        parts = FakeParts()
        parts.error = error
        engine = make(parts)
        for call in (engine.ready(), engine.connect("c"), engine.stats()):
            with pytest.raises(type(error), match=str(error)):
                await call
        await until(ended(parts))
        assert parts.story[-2:] == ["clear", "end scheduler"]

    run(test)


def test_a_start_that_takes_too_long_says_what_is_missing_and_leaves_nothing() -> None:
    async def test() -> None:
        parts = FakeParts()
        parts.gate.clear()
        with pytest.raises(StartupFailed, match=r"2 of 2 workers .* 0\.05 s.* too little of every"):
            await make(parts, startup_timeout_s=0.05).ready()
        await until(ended(parts))

    run(test)


def test_a_bug_while_the_engine_is_put_together_is_an_answer_too() -> None:
    async def test() -> None:
        parts = FakeParts()
        parts.error = ZeroDivisionError("a bug")
        with pytest.raises(StartupFailed, match="a bug"):
            await make(parts).ready()
        await until(ended(parts))

    run(test)


def test_a_journal_that_can_not_be_used_is_said_before_anything_is_started(tmp_path: Path) -> None:
    async def test() -> None:
        parts = FakeParts()
        with pytest.raises(InvalidConfig, match=tmp_path.name):
            await make(parts, journal_path=str(tmp_path)).ready()
        assert not [said for said in parts.story if said.startswith("start")]
        await until(ended(parts))

    run(test)


def test_a_restarted_scheduler_waits_for_the_one_before_it_to_let_go_of_the_journal(
    tmp_path: Path,
) -> None:
    """A frozen process takes seconds to end, and holds the file until then."""

    async def test() -> None:
        parts, path = FakeParts(), str(tmp_path / "requests.db")
        before = make(parts, journal_path=path)
        await before.ready()
        after = make(parts, journal_path=path)
        ready = asyncio.ensure_future(after.ready())
        assert before._journal is not None
        await asyncio.wait([ready], timeout=0.1)
        assert not ready.done()
        before._journal.close()
        await ready
        await after.shutdown()

    run(test)


def test_counters_are_told_again_and_again_also_where_that_fails() -> None:
    """Those who watch are no reason to stop, nor to keep the engine's own thread waiting."""

    async def test() -> None:
        told: list[EngineStats] = []
        threads: set[int] = set()

        def publish(stats: EngineStats) -> None:
            told.append(stats)
            threads.add(threading.get_ident())
            if len(told) == 1:
                raise RuntimeError("nobody can be told")

        before_s = time.time()
        engine = make(FakeParts(), publish=publish)
        await until(lambda: len(told) >= 3)
        assert [use.worker_id for use in told[-1].workers] == ["worker-0", "worker-1"]
        assert told[-1].scheduler.num_workers == 2
        assert before_s <= told[-1].started_s <= time.time()
        assert threading.get_ident() not in threads
        await engine.shutdown()

    run(test)


def test_shutting_down_ends_the_parts_first_and_the_scheduler_last() -> None:
    async def test() -> None:
        parts = FakeParts()
        engine = make(parts)
        await engine.ready()
        await engine.connect("c")
        poll = asyncio.ensure_future(engine.poll("c", 0, 60.0))
        await engine.shutdown()
        assert parts.story[-1] == "clear"
        assert b"shut down" in await poll
        with pytest.raises(EngineUnavailable, match="shut down"):
            await engine.connect("late")
        await engine.shutdown()
        await until(ended(parts))
        assert parts.story[-2:] == ["clear", "end scheduler"]

    run(test)


def test_an_engine_whose_owner_never_comes_ends() -> None:
    """The client that started it was killed before it had connected."""

    async def test() -> None:
        parts = FakeParts()
        await make(parts, owner_client_id="owner", client_grace_s=0.05).ready()
        await until(ended(parts))

    run(test)


def test_an_engine_ends_when_its_owner_leaves_but_not_with_others() -> None:
    async def test() -> None:
        parts = FakeParts()
        engine = make(parts, owner_client_id="owner")
        for client_id in ("owner", "other"):
            await engine.connect(client_id)
        await engine.disconnect("other")
        await engine.stats()
        await engine.disconnect("owner")
        await until(ended(parts))

    run(test)


def test_an_engine_that_a_bug_has_closed_does_not_stay_for_ever() -> None:
    """Clients are told and go; workers would hold their memory for nobody."""

    async def test() -> None:
        parts = FakeParts()
        engine = make(parts, client_grace_s=0.05)
        await engine.ready()
        loop = engine._loop
        assert loop is not None
        loop.close(EngineUnavailable("a bug"))
        with pytest.raises(EngineUnavailable, match="a bug"):
            await engine.stats()
        await until(ended(parts))

    run(test)


def test_a_store_that_is_not_there_keeps_no_engine_from_coming_up() -> None:
    async def test() -> None:
        parts = FakeParts()
        parts.the_store.error = ActorLost("dead")
        engine = make(parts)
        await engine.ready()
        await parts.the_store.is_restarted.wait()

    run(test)
