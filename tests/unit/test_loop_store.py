"""A store that dies, hangs or comes back empty: misses and failures at once, and a new one."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from scheduler.actions import LoadBlocks, LookupBlocks, ReleaseBlocks, SaveBlocks
from scheduler.calls import ActorLost, CallFailed, Timeouts
from scheduler.errors import EngineUnavailable, RequestFailed
from scheduler.events import (
    LoadDone,
    LoadFailed,
    LookupDone,
    SaveDone,
    SaveFailed,
    StoreLost,
    Tick,
    WorkerLost,
)
from scheduler.loop import SchedulerLoop
from tests.loop_fakes import (
    FakeStore,
    FakeWorker,
    ScriptedState,
    info,
    make,
    run,
    turns,
    until,
)
from tests.sizes import sizes

QUICK = Timeouts(store_retry_s=0.001)


def lookup(op_id: int, request_id: str = "r") -> LookupBlocks:
    return LookupBlocks(op_id, request_id, [b"h"], 16, 0, False)


def load(op_id: int, request_id: str = "r") -> LoadBlocks:
    return LoadBlocks(op_id, request_id, "w", [b"h", b"i"], [0, 1])


def save(op_id: int, request_id: str = "r") -> SaveBlocks:
    return SaveBlocks(op_id, request_id, "w", [b"h"], [0], owned=True, replace=False)


def release(request_id: str = "r") -> ReleaseBlocks:
    return ReleaseBlocks(request_id, forget=True)


class Bench:
    """A loop with one worker and a store, and a core that asks for what the test says."""

    def __init__(self, store: Any, **settings: Any) -> None:
        self.state = ScriptedState()
        self.state.script = self._act
        self.store = store
        self.worker = FakeWorker()
        self.loop: SchedulerLoop = make(self.state, store, **settings)
        self._wanted: list[Any] = []

    def _act(self, event: Any) -> list[Any]:
        wanted, self._wanted = self._wanted, []
        return wanted

    async def ask(self, *actions: Any) -> None:
        """Have the core ask for something."""
        if not self.loop.worker_infos():
            await self.loop.add_worker(self.worker, info())
        self._wanted = list(actions)
        await self.loop.handle(Tick())

    async def event(self, kind: type, count: int = 1) -> Any:
        await until(lambda: len(self.state.of_kind(kind)) >= count)
        return self.state.of_kind(kind)[-1]


def test_what_the_store_answers_reaches_the_core() -> None:
    async def test() -> None:
        store = FakeStore()
        store.always = {"lookup": 16, "load": 2, "save": (1, 1), "release": None}
        bench = Bench(store)
        await bench.ask(lookup(1, "a"), load(2, "b"), save(3, "c"), release("d"))
        looked_up = await bench.event(LookupDone)
        loaded, saved = await bench.event(LoadDone), await bench.event(SaveDone)
        assert (looked_up.op_id, looked_up.num_hit_tokens) == (1, 16)
        assert (loaded.op_id, loaded.num_loaded_blocks) == (2, 2)
        assert (saved.op_id, saved.num_saved_blocks, saved.num_copied_blocks) == (3, 1, 1)
        assert "settle" not in bench.worker.names, "a whole load needs no fence"

    run(test)


def test_an_engine_without_a_store_misses_and_goes_on() -> None:
    async def test() -> None:
        bench = Bench(None)
        await bench.ask(lookup(1), load(2), save(3), release())
        assert (await bench.event(LookupDone)).num_hit_tokens == 0
        await bench.event(LoadFailed)
        await bench.event(SaveFailed)
        await turns()
        assert not bench.state.of_kind(StoreLost)

    run(test)


def test_a_call_that_raises_fails_alone() -> None:
    async def test() -> None:
        store = FakeStore()
        store.always["save"] = CallFailed(RequestFailed("confused"))
        bench = Bench(store)
        await bench.ask(save(1))
        event = await bench.event(SaveFailed)
        assert (event.op_id, event.reason) == (1, "confused")
        await turns()
        assert "restart" not in store.names

    run(test)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_store_that_dies_or_hangs_is_restarted_once_and_everything_meanwhile_misses(
    hangs: bool,
) -> None:
    async def test() -> None:
        store = FakeStore()
        bench = Bench(store, timeouts=Timeouts(store_s=0.02 if hangs else 5.0))
        await bench.ask(lookup(1, "a"), load(2, "b"), save(3, "c"), release("d"))
        if not hangs:
            await store.answer("lookup", ActorLost("the store is dead"))
        # What was under way fails with the store, without waiting for time limits of its own.
        for kind in (LookupDone, LoadFailed, SaveFailed):
            await bench.event(kind)
        assert all(store.num_waiting(m) == 0 for m in ("lookup", "load", "save", "release"))
        made = len(store.names)
        await bench.ask(lookup(4, "a"), load(5, "b"), save(6, "c"), release("d"))
        assert (await bench.event(LookupDone, 2)).num_hit_tokens == 0
        await bench.event(LoadFailed, 2)
        await bench.event(SaveFailed, 2)
        assert set(store.names[made:]) <= {"restart"}, "a dead store was asked"
        assert not bench.state.of_kind(StoreLost)
        if not hangs:
            await store.answer("restart", None)
            await bench.event(StoreLost)
            await bench.ask(lookup(7, "a"))
            await store.answer("lookup", 16)
            assert (await bench.event(LookupDone, 3)).num_hit_tokens == 16
            assert store.names.count("restart") == 1
            assert len(bench.state.of_kind(StoreLost)) == 1

    run(test)


def test_a_late_failure_of_the_old_store_does_not_restart_the_new_one() -> None:
    async def test() -> None:
        store = FakeStore()
        bench = Bench(store)
        await bench.ask(lookup(1, "a"), lookup(2, "b"))
        await until(lambda: store.num_waiting("lookup") == 2)
        first, second = store.calls["lookup"]
        first.set_exception(ActorLost("dead"))
        second.set_exception(ActorLost("dead"))
        await store.answer("restart", None)
        await bench.event(LookupDone, 2)
        await turns()
        assert store.names.count("restart") == 1
        assert len(bench.state.of_kind(StoreLost)) == 1

    run(test)


def test_a_store_that_can_not_be_restarted_is_tried_again_and_missed_until_then() -> None:
    async def test() -> None:
        store = FakeStore()
        bench = Bench(store, timeouts=QUICK)
        store.always["lookup"] = ActorLost("dead")
        store.always["restart"] = ActorLost("no room for it")
        await bench.ask(lookup(1))
        await until(lambda: store.names.count("restart") >= 3)
        assert not bench.state.of_kind(StoreLost)
        await bench.ask(lookup(2))
        assert (await bench.event(LookupDone, 2)).num_hit_tokens == 0
        assert store.names.count("lookup") == 1
        store.always.update(restart=None, lookup=16)
        await bench.event(StoreLost)
        await bench.ask(lookup(3))
        assert (await bench.event(LookupDone, 3)).num_hit_tokens == 16

    run(test)


def test_restarts_in_vain_come_at_growing_intervals() -> None:
    async def test() -> None:
        store = FakeStore()
        bench = Bench(store, timeouts=Timeouts(store_retry_s=0.005))
        times: list[float] = []
        now_s = asyncio.get_running_loop().time

        async def restart() -> None:
            times.append(now_s())
            raise ActorLost("no room for it")

        store.restart = restart  # type: ignore[method-assign]
        store.always["lookup"] = ActorLost("dead")
        await bench.ask(lookup(1))
        await until(lambda: len(times) == 5)
        waits = [later - earlier for earlier, later in itertools.pairwise(times)]
        for wait, least in zip(waits, (0.005, 0.01, 0.02, 0.04), strict=True):
            assert wait >= 0.9 * least

    run(test)


def test_a_store_that_is_lost_as_soon_as_it_is_there_is_not_restarted_in_a_rush() -> None:
    async def test() -> None:
        store = FakeStore()
        bench = Bench(store, timeouts=Timeouts(store_retry_s=1000.0))
        store.always.update(lookup=ActorLost("dead"), restart=None)
        await bench.ask(lookup(1))
        await bench.event(StoreLost)
        await bench.ask(lookup(2))
        await bench.event(LookupDone, 2)
        await turns()
        assert store.names.count("restart") == 1, "the second restart does not wait"
        bench.loop.close(EngineUnavailable("over"))

    run(test)


def test_a_restart_that_hangs_is_given_up_and_tried_again() -> None:
    async def test() -> None:
        store = FakeStore()
        bench = Bench(store, timeouts=Timeouts(store_s=0.02, store_retry_s=0.001))
        store.always["lookup"] = ActorLost("dead")
        await bench.ask(lookup(1))
        await until(lambda: store.names.count("restart") == 2)
        await store.answer("restart", None)
        await bench.event(StoreLost)

    run(test)


def test_nobody_goes_on_restarting_the_store_of_a_closed_engine() -> None:
    async def test() -> None:
        others = asyncio.all_tasks()
        store = FakeStore()
        bench = Bench(store, timeouts=Timeouts(store_retry_s=1000.0))
        store.always.update(lookup=ActorLost("dead"), restart=ActorLost("no room for it"))
        await bench.ask(lookup(1))
        await bench.event(LookupDone)
        bench.loop.close(EngineUnavailable("over"))
        await until(lambda: asyncio.all_tasks() == others)

    run(test)


# --------------------------------------------------------------------------------- order and fences


def test_calls_about_one_request_keep_their_order_and_others_do_not_wait() -> None:
    """A release that overtook the save before it would leave blocks that nobody gives back."""

    async def test() -> None:
        store = FakeStore()
        bench = Bench(store)
        await bench.ask(save(1, "a"), release("a"), lookup(2, "b"))
        await until(lambda: store.num_waiting("lookup") == 1)
        await turns()
        assert store.names == ["save", "lookup"]
        await store.answer("save", (1, 1))
        await until(lambda: store.names == ["save", "lookup", "release"])

    run(test)


def test_a_release_behind_a_call_that_is_lost_is_not_sent_to_a_store_that_is_starting() -> None:
    async def test() -> None:
        store = FakeStore()
        bench = Bench(store)
        await bench.ask(save(1, "a"), release("a"))
        await store.answer("save", ActorLost("dead"))
        await store.answer("restart", None)
        await bench.event(StoreLost)
        await turns()
        assert "release" not in store.names

    run(test)


@pytest.mark.parametrize("answer", [1, CallFailed(RequestFailed("no")), ActorLost("dead")])
def test_blocks_of_a_load_that_fell_short_are_given_back_behind_a_fence(answer: Any) -> None:
    """The dead store's write may still wait at the worker, and would change blocks that are
    another's by then."""

    async def test() -> None:
        store = FakeStore()
        bench = Bench(store)
        del bench.worker.always["settle"]
        await bench.ask(load(1))
        await store.answer("load", answer)
        await until(lambda: bench.worker.num_waiting("settle") == 1)
        await turns()
        kind = LoadDone if isinstance(answer, int) else LoadFailed
        assert not bench.state.of_kind(kind)
        await bench.worker.answer("settle", None)
        await bench.event(kind)
        assert not bench.state.of_kind(WorkerLost)

    run(test)


def test_a_worker_whose_writes_hang_is_lost_with_the_load() -> None:
    async def test() -> None:
        store = FakeStore()
        bench = Bench(store, timeouts=Timeouts(store_s=0.05))
        del bench.worker.always["settle"]
        await bench.ask(load(1))
        await store.answer("load", 0)
        await bench.event(WorkerLost)
        await bench.event(LoadDone)
        assert bench.worker.was_killed

    run(test)


# ------------------------------------------------------------------------------- a new scheduler


def test_a_new_scheduler_has_the_store_forget_all_but_the_requests_that_go_on() -> None:
    async def test() -> None:
        store = FakeStore()
        bench = Bench(store)
        bench.loop.restore([])
        await until(lambda: store.num_waiting("retain") == 1)
        assert store.retained == []
        await store.answer("retain", None)
        await turns()
        assert "restart" not in store.names

    run(test)


@pytest.mark.parametrize("failure", [ActorLost("dead"), CallFailed(RequestFailed("no"))])
def test_a_store_that_does_not_forget_is_replaced_by_an_empty_one(failure: Exception) -> None:
    async def test() -> None:
        store = FakeStore()
        store.always["restart"] = None
        bench = Bench(store)
        bench.loop.restore([])
        await store.answer("retain", failure)
        await bench.event(StoreLost)

    run(test)


def test_a_store_leaves_nothing_behind() -> None:
    async def test() -> None:
        store = FakeStore()
        store.always = {"lookup": 0, "load": 0, "save": (0, 0), "release": None, "restart": None}
        bench = Bench(store, timeouts=QUICK)
        await bench.ask()
        before, others = sizes(bench.loop), asyncio.all_tasks()
        for i in range(100):
            if i % 10 == 5:
                store.always["save"] = ActorLost("dead")
            name = f"r{i % 7}"
            await bench.ask(lookup(i, name), save(i, name), load(i, name), release(name))
            await until(lambda: asyncio.all_tasks() == others)
            store.always["save"] = (0, 0)
        await turns()
        assert sizes(bench.loop) == before

    run(test)


# ----------------------------------------------------------------------------- a node that may go


def test_the_store_is_told_of_a_node_that_has_no_worker_any_more() -> None:
    async def test() -> None:
        store = FakeStore()
        bench = Bench(store)
        bench.loop.leave_node("a node")
        await until(lambda: store.num_waiting("leave_node") == 1)
        assert store.left_node_id == "a node"
        await store.answer("leave_node", None)
        await turns()
        assert "restart" not in store.names

    run(test)
