"""The supervisor: how many workers there are, who follows whom, when, and how often."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scheduler.errors import InvalidConfig, ModelNotFound, StartupFailed, UnknownWorker
from scheduler.events import AnyEvent, WorkerExpected, WorkerNotComing
from scheduler.fleet import WorkerDied
from scheduler.messages import WorkerInfo
from scheduler.restarts import Death, RestartLimits, RestartPolicy
from scheduler.scaling import Load, Scaling, ScalingLimits
from scheduler.supervisor import Supervisor
from tests.loop_fakes import info, run, turns, until

SOON = RestartLimits(max_restarts=3, max_in_first_step=2, first_delay_s=0.001, max_delay_s=0.002)


class FakeFleetWorker:
    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.num_steps_begun = 0
        self.num_steps_done = 0
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


class FakeFleet:
    """Starts a worker when the test says so; what was asked of it is in `asked`, in order."""

    def __init__(self, *there: str) -> None:
        self.asked: list[str] = []
        self.starts: dict[str, asyncio.Future[tuple[Any, WorkerInfo]]] = {}
        self.there = list(there)
        self.given_up: list[str] = []
        self.draining: dict[str, float] = {}
        self.memory: bytes | None = None
        self.epochs: list[int] = []

    async def start(self, worker_id: str, epoch: int) -> tuple[Any, WorkerInfo]:
        return await self._begin("start", worker_id, epoch)

    async def take_over(self, worker_id: str, epoch: int) -> tuple[Any, WorkerInfo]:
        return await self._begin("take over", worker_id, epoch)

    async def _begin(self, what: str, worker_id: str, epoch: int) -> tuple[Any, WorkerInfo]:
        assert epoch >= 7
        self.epochs.append(epoch)
        self.asked.append(f"{what} {worker_id}")
        self.starts[worker_id] = asyncio.get_running_loop().create_future()
        try:
            return await self.starts[worker_id]
        except asyncio.CancelledError:
            self.given_up.append(worker_id)
            raise

    async def up(self, worker_id: str, **changes: Any) -> FakeFleetWorker:
        """Let a worker that was asked for be ready."""
        await until(lambda: worker_id in self.starts)
        worker = FakeFleetWorker(worker_id)
        self.starts[worker_id].set_result((worker, info(worker_id, **changes)))
        await turns()
        return worker

    async def fail(self, worker_id: str, error: Exception | None = None) -> None:
        """Let a worker that was asked for die, or be impossible."""
        await until(lambda: worker_id in self.starts)
        self.starts[worker_id].set_exception(error or WorkerDied(f"{worker_id} died"))
        await turns()

    async def find(self) -> list[str]:
        return self.there

    async def shortage(self) -> str:
        return "There is too little of everything"

    async def draining_nodes(self) -> dict[str, float]:
        return self.draining

    async def remember(self, memory: bytes) -> None:
        self.memory = memory

    async def recall(self) -> bytes | None:
        return self.memory


class FakeEngine:
    """Notes what the supervisor tells the scheduler's loop."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.joined: list[str] = []
        self.drained: list[tuple[str, float]] = []
        self.left_node_ids: list[str] = []
        self.refusal: Exception | None = None
        self.num_tokens = 0
        """To do; workers have computed 1,000 in a second so far."""
        self.busy = set[str]()
        self.num_looks = 0

    def load(self) -> Load:
        self.num_looks += 1
        is_busy = {worker_id: worker_id in self.busy for worker_id in self.joined}
        return Load(0.0, self.num_tokens, 100_000, 100.0, is_busy)

    def post(self, *events: AnyEvent) -> None:
        self.events.extend(events)

    async def add_worker(self, worker: Any, found: WorkerInfo) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.joined.append(found.worker_id)

    async def drain(self, worker_id: str, deadline_s: float) -> None:
        self.drained.append((worker_id, deadline_s))

    def leave_node(self, node_id: str) -> None:
        self.left_node_ids.append(node_id)

    def told(self) -> list[str]:
        """What was said of workers that are to come: "+ID" to expect it, "-ID" not to."""
        signs = {WorkerExpected: "+", WorkerNotComing: "-"}
        return [f"{signs[type(event)]}{event.worker_id}" for event in self.events]  # type: ignore

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, WorkerNotComing)]


def make(fleet: FakeFleet, num_workers: int = 2, **settings: Any) -> Supervisor:
    def unexpected(error: BaseException) -> None:
        raise error

    return Supervisor(fleet, num_workers, 7, **{"limits": SOON, "on_bug": unexpected, **settings})


async def running(
    fleet: FakeFleet, num_workers: int = 2, **settings: Any
) -> tuple[Supervisor, FakeEngine, dict[str, FakeFleetWorker]]:
    """An engine whose first workers are ready."""
    supervisor, engine = make(fleet, num_workers, **settings), FakeEngine()
    starting = asyncio.ensure_future(supervisor.start_all())
    workers = {w: await fleet.up(w) for w in (f"worker-{n}" for n in range(num_workers))}
    await starting
    await supervisor.serve(engine)
    return supervisor, engine, workers


# --------------------------------------------------------------------------------- the policy


def test_the_first_replacement_starts_at_once_and_the_others_at_growing_intervals() -> None:
    limits = RestartLimits(max_restarts=9, first_delay_s=1.0, max_delay_s=60.0)
    policy = RestartPolicy(limits)
    delays = [policy.next_delay_s(Death.HAD_WORKED)]
    delays += [policy.next_delay_s(Death.FRUITLESS) for _ in range(9)]
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, None]


def test_a_worker_that_worked_makes_up_for_all_that_did_not() -> None:
    policy = RestartPolicy(RestartLimits(max_restarts=2))
    for _ in range(100):
        assert policy.next_delay_s(Death.HAD_WORKED) == 0.0
        assert policy.next_delay_s(Death.FRUITLESS) == 1.0
    assert policy.next_delay_s(Death.FRUITLESS) is None


def test_the_search_for_a_poisonous_request_is_not_held_against_workers() -> None:
    """Halving a batch of 64 takes seven deaths of which none is the worker's fault."""
    policy = RestartPolicy(RestartLimits(max_restarts=2, max_in_first_step=7))
    assert [policy.next_delay_s(Death.IN_FIRST_STEP) for _ in range(7)] == [0.0] * 7
    assert [policy.next_delay_s(Death.IN_FIRST_STEP) for _ in range(3)] == [0.0, 1.0, None]


def test_no_restarts_means_none_even_for_a_worker_that_worked() -> None:
    policy = RestartPolicy(RestartLimits(max_restarts=0))
    assert [policy.next_delay_s(death) for death in Death] == [None, None, None]


# ----------------------------------------------------------------------- as many as the load wants

FOLLOWING = {"load_watch_interval_s": 0.001, "clock": lambda: 0.0}
"""Idle workers count as idle for long at once."""


def following(idle_s: float = 0.0) -> dict[str, Any]:
    """Settings of an engine of 1 to 4 workers, each of which does 10,000 tokens in time."""
    limits = ScalingLimits(1, 4, target_queue_s=10.0, idle_s=idle_s)
    return FOLLOWING | {"scaling": Scaling(limits)}


def test_under_load_more_workers_are_asked_for_and_join() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        _, engine, _ = await running(fleet, 1, **following(idle_s=100.0))
        engine.num_tokens = 25_000
        await until(lambda: len(fleet.asked) == 3)
        assert engine.told() == ["+worker-1", "+worker-2"]
        await fleet.up("worker-1")
        await fleet.up("worker-2")
        await asyncio.sleep(0.02)
        assert engine.joined == ["worker-0", "worker-1", "worker-2"]
        assert len(fleet.asked) == 3, "those on their way count"

    run(test)


def test_an_idle_worker_is_drained_and_nobody_follows_it() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet, 3, **following())
        engine.busy = {"worker-0", "worker-2"}
        await until(lambda: bool(engine.drained))
        supervisor.worker_stopped("worker-1")
        engine.joined.remove("worker-1")
        await asyncio.sleep(0.02)
        assert [worker_id for worker_id, _ in engine.drained] == ["worker-1"]
        assert supervisor.num_ready() == 2
        assert len(fleet.asked) == 3

    run(test)


def test_a_node_is_left_with_the_last_worker_that_is_given_back() -> None:
    """Two workers are on one node, and a third one, which stays, on another."""

    async def test() -> None:
        fleet, engine = FakeFleet(), FakeEngine()
        supervisor = make(fleet, 3, **following())
        starting = asyncio.ensure_future(supervisor.start_all())
        await fleet.up("worker-0", node_id="stays")
        await fleet.up("worker-1", node_id="goes")
        await fleet.up("worker-2", node_id="goes")
        await starting
        await supervisor.serve(engine)
        engine.busy = {"worker-0", "worker-1"}
        await until(lambda: bool(engine.drained))
        supervisor.worker_stopped("worker-2")
        engine.joined.remove("worker-2")
        await turns()
        assert engine.left_node_ids == []
        engine.busy = {"worker-0"}
        await until(lambda: len(engine.drained) == 2)
        supervisor.worker_stopped("worker-1")
        engine.joined.remove("worker-1")
        await until(lambda: engine.left_node_ids == ["goes"])

    run(test)


def test_a_worker_that_works_between_two_looks_is_not_idle() -> None:
    """A request of some milliseconds is gone before anybody looks."""

    async def test() -> None:
        fleet = FakeFleet()
        _, engine, workers = await running(fleet, 2, **following())
        engine.busy = {"worker-0"}
        for _ in range(10):
            workers["worker-1"].num_steps_begun += 1
            num_looks = engine.num_looks
            await until(lambda seen=num_looks: engine.num_looks > seen)
            assert engine.drained == []
        await until(lambda: bool(engine.drained))

    run(test)


def test_a_worker_that_waits_for_room_is_called_off_when_nobody_needs_it() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        _, engine, _ = await running(fleet, 1, **following())
        engine.busy, engine.num_tokens = {"worker-0"}, 25_000
        await until(lambda: len(fleet.starts) == 3)
        engine.num_tokens = 0
        await until(lambda: len(fleet.given_up) == 2)
        assert engine.told() == ["+worker-1", "+worker-2", "-worker-1", "-worker-2"]
        engine.num_tokens = 15_000
        await fleet.up("worker-3")
        assert engine.joined == ["worker-0", "worker-3"]

    run(test)


def test_a_replacement_is_called_off_in_the_very_moment_in_which_it_begins() -> None:
    """Its worker would come up in no place, and nobody would ever give it back."""

    async def test() -> None:
        fleet = FakeFleet()
        every_turn = following() | {"load_watch_interval_s": 0.0}
        supervisor, engine, _ = await running(fleet, 2, **every_turn)
        engine.busy, engine.num_tokens = {"worker-0"}, 15_000
        supervisor.worker_lost("worker-1", "killed")
        worker = await fleet.up("worker-2")
        worker.num_steps_begun = worker.num_steps_done = 1
        engine.busy, engine.num_tokens = {"worker-0", "worker-2"}, 0
        await turns()
        supervisor.worker_lost("worker-2", "killed")
        await turns()
        assert fleet.asked == [f"start worker-{n}" for n in range(3)]

    run(test)


@pytest.mark.parametrize("num_turns", range(6))
def test_a_worker_that_is_called_off_while_it_comes_up_joins_or_is_ended(num_turns: int) -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet, 1)
        supervisor.worker_lost("worker-0", "killed")
        await until(lambda: "worker-1" in fleet.starts)
        worker = FakeFleetWorker("worker-1")
        fleet.starts["worker-1"].set_result((worker, info("worker-1")))
        await turns(num_turns)
        await supervisor.stop()
        was_ended = worker.is_killed or fleet.given_up == ["worker-1"]
        assert was_ended == ("worker-1" not in engine.joined)

    run(test)


def test_a_worker_that_is_lost_while_it_is_given_back_is_not_wanted_any_more() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet, 2, **following())

        async def lose(worker_id: str, _: float) -> None:
            supervisor.worker_lost(worker_id, "killed")
            engine.joined.remove(worker_id)
            engine.drained.append((worker_id, 0.0))
            raise UnknownWorker(f"there is no worker {worker_id}")

        engine.drain = lose  # type: ignore[method-assign]
        engine.busy = {"worker-0"}
        await until(lambda: bool(engine.drained))
        engine.num_tokens = 15_000
        await until(lambda: len(fleet.asked) == 3)
        num_looks = engine.num_looks
        await until(lambda: engine.num_looks > num_looks + 2)
        assert len(fleet.asked) == 3

    run(test)


def test_what_an_operator_drained_is_not_asked_for_again_to_have_the_least() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        settings = FOLLOWING | {"scaling": Scaling(ScalingLimits(2, 3, 10.0, 100.0))}
        supervisor, engine, _ = await running(fleet, 2, **settings)
        supervisor.expect_drain("worker-1")
        supervisor.worker_stopped("worker-1")
        engine.joined.remove("worker-1")
        await asyncio.sleep(0.02)
        assert len(fleet.asked) == 2
        engine.num_tokens = 10**9
        await until(lambda: len(fleet.asked) == 3)
        await asyncio.sleep(0.02)
        assert len(fleet.asked) == 3, "nor up to the most"

    run(test)


def test_a_new_scheduler_wants_as_many_as_the_one_before() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet, 1, **following(idle_s=100.0))
        engine.num_tokens = 25_000
        for worker_id in ("worker-1", "worker-2"):
            await fleet.up(worker_id)
        await supervisor.stop()
        fleet.there, fleet.starts = ["worker-0", "worker-2"], {}
        following_one = make(fleet, 1)
        await following_one.recall()
        await following_one.take_over()
        await following_one.serve(FakeEngine())
        await until(lambda: len(fleet.starts) == 3)
        assert fleet.asked[-3:] == ["take over worker-0", "take over worker-2", "start worker-3"]
        await following_one.stop()

    run(test)


# ------------------------------------------------------------------------------- a new engine


def test_a_new_engine_is_there_when_all_its_workers_are() -> None:
    async def test() -> None:
        fleet, engine = FakeFleet(), FakeEngine()
        supervisor = make(fleet)
        starting = asyncio.ensure_future(supervisor.start_all())
        await fleet.up("worker-1")
        assert not starting.done()
        await fleet.up("worker-0")
        assert (await starting).worker_id == "worker-0"
        await supervisor.serve(engine)
        assert (engine.joined, engine.events) == (["worker-0", "worker-1"], [])
        assert fleet.asked == ["start worker-0", "start worker-1"]

    run(test)


def test_a_new_engine_whose_model_is_not_there_says_so_and_leaves_nothing() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        starting = asyncio.ensure_future(make(fleet).start_all())
        await fleet.fail("worker-1", ModelNotFound("no such model"))
        with pytest.raises(ModelNotFound):
            await starting
        assert fleet.given_up == ["worker-0"]

    run(test)


def test_a_worker_that_dies_while_a_new_engine_starts_is_replaced() -> None:
    async def test() -> None:
        fleet, engine = FakeFleet(), FakeEngine()
        supervisor = make(fleet)
        starting = asyncio.ensure_future(supervisor.start_all())
        await fleet.up("worker-1")
        await fleet.fail("worker-0")
        await fleet.up("worker-2")
        await starting
        await supervisor.serve(engine)
        assert sorted(engine.joined) == ["worker-1", "worker-2"]

    run(test)


def test_a_new_engine_whose_workers_die_again_and_again_does_not_start() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        starting = asyncio.ensure_future(make(fleet, 1).start_all())
        for number in range(SOON.max_restarts + 1):
            await fleet.fail(f"worker-{number}")
        with pytest.raises(StartupFailed, match="worker-3 died"):
            await starting
        assert len(fleet.asked) == SOON.max_restarts + 1

    run(test)


def test_a_start_that_is_called_off_leaves_nothing() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(make(fleet).start_all(), 0.01)
        assert fleet.given_up == ["worker-0", "worker-1"]

    run(test)


# -------------------------------------------------------------------------------------- losses


def test_a_lost_worker_is_replaced_by_one_of_a_new_name() -> None:
    """The engine knows of the replacement before it hears of the loss, so that it gives up no
    request for want of a worker."""

    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet)
        for number, lost in enumerate(("worker-0", "worker-2", "worker-1"), start=2):
            [expected] = supervisor.worker_lost(lost, "killed")
            assert isinstance(expected, WorkerExpected)
            assert (expected.worker_id, expected.num_blocks) == (f"worker-{number}", 8)
            worker = await fleet.up(f"worker-{number}")
            worker.num_steps_begun = worker.num_steps_done = 1
        assert engine.joined[2:] == ["worker-2", "worker-3", "worker-4"]

    run(test)


def test_a_loss_that_is_reported_twice_is_one_loss() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, _, _ = await running(fleet)
        assert list(supervisor.worker_lost("worker-0", "killed"))
        assert not list(supervisor.worker_lost("worker-0", "killed"))
        assert not list(supervisor.worker_lost("worker-9", "nobody"))
        await turns()
        assert fleet.asked[2:] == ["start worker-2"]

    run(test)


def test_replacements_that_die_at_every_start_end_and_what_waits_is_told_why() -> None:
    """Somewhere a driver is broken: without an end this would load models for ever."""

    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet, 1)
        engine.events += supervisor.worker_lost("worker-0", "killed")
        for number in range(1, SOON.max_restarts + 1):
            await fleet.fail(f"worker-{number}")
        await until(lambda: len(engine.reasons()) == SOON.max_restarts)
        assert engine.told() == [
            *["+worker-1", "+worker-2", "-worker-1"],
            *["+worker-3", "-worker-2", "-worker-3"],
        ]
        assert "worker-3 died" in engine.reasons()[-1]
        assert "max_worker_restarts=3" in engine.reasons()[-1]
        await asyncio.sleep(0.01)
        assert len(fleet.asked) == SOON.max_restarts + 1

    run(test)


def test_workers_that_die_in_their_first_step_are_replaced_for_longer_but_not_for_ever() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, _, workers = await running(fleet, 1)
        worker, number = workers["worker-0"], 0
        while True:
            worker.num_steps_begun = 1
            if not list(supervisor.worker_lost(f"worker-{number}", "killed")):
                break
            number += 1
            worker = await fleet.up(f"worker-{number}")
        assert number == SOON.max_restarts + SOON.max_in_first_step

    run(test)


def test_workers_that_die_idle_but_old_are_always_replaced() -> None:
    """On a spot cluster whole nights pass without a request, and every hour a node goes."""

    async def test() -> None:
        now_s = 0.0
        fleet = FakeFleet()
        supervisor, _, _ = await running(fleet, 1, clock=lambda: now_s)
        for number in range(20):
            now_s += SOON.proving_s
            assert list(supervisor.worker_lost(f"worker-{number}", "node gone"))
            await fleet.up(f"worker-{number + 1}")

    run(test)


def test_where_no_worker_is_to_be_replaced_none_is() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet, limits=RestartLimits(max_restarts=0))
        assert not list(supervisor.worker_lost("worker-0", "killed"))
        await turns()
        assert (fleet.asked[2:], engine.events) == ([], [])

    run(test)


def test_a_replacement_that_is_not_like_the_others_is_ended_and_counts_as_failed() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet)
        engine.events += supervisor.worker_lost("worker-0", "killed")
        engine.refusal = InvalidConfig("workers of one engine must be alike")
        assert (await fleet.up("worker-2")).is_killed
        engine.refusal = None
        await fleet.up("worker-3")
        assert engine.joined[2:] == ["worker-3"]
        assert engine.told() == ["+worker-2", "+worker-3", "-worker-2"]

    run(test)


# ------------------------------------------------------------------------------ waiting for room


def test_a_replacement_without_room_is_waited_for_as_long_as_others_work() -> None:
    """A node went and none comes in its place for an hour: that is no fault of the worker."""

    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet, patience_s=0.01)
        engine.events += supervisor.worker_lost("worker-0", "killed")
        await asyncio.sleep(0.05)
        assert engine.told() == ["+worker-2"]
        await fleet.up("worker-2")
        assert engine.joined[2:] == ["worker-2"]

    run(test)


def test_where_no_worker_is_left_what_waits_ends_in_time_but_one_that_comes_later_joins() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet, patience_s=0.01)
        for lost in ("worker-0", "worker-1"):
            engine.events += supervisor.worker_lost(lost, "killed")
        await until(lambda: len(engine.reasons()) == 2)
        assert all("0.01 s" in reason for reason in engine.reasons())
        assert all("too little of everything" in reason for reason in engine.reasons())
        assert fleet.given_up == []
        await fleet.up("worker-3")
        assert engine.joined[2:] == ["worker-3"]

    run(test)


def test_once_nobody_is_expected_failed_starts_are_not_announced_again() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet, 1, patience_s=0.01)
        engine.events += supervisor.worker_lost("worker-0", "killed")
        await until(lambda: engine.told() == ["+worker-1", "-worker-1"])
        await fleet.fail("worker-1")
        await fleet.up("worker-2")
        assert engine.told() == ["+worker-1", "-worker-1"]
        assert engine.joined[1:] == ["worker-2"]

    run(test)


# -------------------------------------------------------------------------------------- drains


def test_a_worker_that_an_operator_drains_is_not_replaced() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine, _ = await running(fleet)
        supervisor.expect_drain("worker-1")
        supervisor.worker_stopped("worker-1")
        await turns()
        assert (fleet.asked[2:], engine.events) == ([], [])
        assert list(supervisor.worker_lost("worker-0", "killed")), "the other one still is"

    run(test)


def test_a_worker_that_an_operator_drains_may_be_replaced_at_once() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, _, _ = await running(fleet)
        supervisor.expect_drain("worker-1", replace=True)
        supervisor.expect_drain("worker-1", replace=True)
        await turns()
        assert fleet.asked[2:] == ["start worker-2"], "asked for once, before the drain has ended"
        supervisor.worker_stopped("worker-1")
        await turns()
        assert fleet.asked[3:] == []

    run(test)


def test_a_clock_that_went_back_makes_no_worker_refuse_the_new_scheduler() -> None:
    """Workers take orders of later epochs only."""

    async def test() -> None:
        fleet = FakeFleet()
        await running(fleet)
        again = make(fleet)
        fleet.there = ["worker-0"]
        await again.recall()
        await again.take_over()
        await again.serve(FakeEngine())
        await until(lambda: "take over worker-0" in fleet.asked)
        assert fleet.epochs[-1] > max(fleet.epochs[:2])

    run(test)


def test_a_worker_that_dies_while_an_operator_drains_it_is_not_replaced() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, _, _ = await running(fleet)
        supervisor.expect_drain("worker-1")
        assert not list(supervisor.worker_lost("worker-1", "killed"))
        await turns()
        assert fleet.asked[2:] == []

    run(test)


def test_workers_of_a_node_that_is_to_go_are_replaced_at_once_and_drained_in_time() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine = make(fleet, node_watch_interval_s=0.001), FakeEngine()
        starting = asyncio.ensure_future(supervisor.start_all())
        await fleet.up("worker-0", node_id="spot")
        await fleet.up("worker-1", node_id="safe")
        await starting
        await supervisor.serve(engine)
        fleet.draining = {"spot": 30.0}
        await until(lambda: bool(engine.drained))
        assert engine.drained == [("worker-0", 28.0)]
        assert engine.told() == ["+worker-2"]
        supervisor.worker_stopped("worker-0")
        await fleet.up("worker-2", node_id="safe")
        await asyncio.sleep(0.01)
        assert engine.drained == [("worker-0", 28.0)]
        assert fleet.asked[2:] == ["start worker-2"]

    run(test)


def test_a_worker_leaves_when_the_node_of_any_of_its_processes_is_to_go() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, engine = make(fleet, node_watch_interval_s=0.001), FakeEngine()
        starting = asyncio.ensure_future(supervisor.start_all())
        await fleet.up("worker-0", node_id="safe", other_node_ids=("soon", "spot"))
        await fleet.up("worker-1", node_id="safe", other_node_ids=("safe",))
        await starting
        await supervisor.serve(engine)
        fleet.draining = {"spot": 30.0, "soon": 10.0}
        await until(lambda: bool(engine.drained))
        assert engine.drained == [("worker-0", 8.0)]
        assert engine.told() == ["+worker-2"]

    run(test)


def test_a_drain_that_the_engine_refuses_is_asked_for_again() -> None:
    async def test() -> None:
        class Refusing(FakeEngine):
            async def drain(self, worker_id: str, deadline_s: float) -> None:
                await super().drain(worker_id, deadline_s)
                raise UnknownWorker("it has ended")

        fleet, engine = FakeFleet(), Refusing()
        supervisor = make(fleet, node_watch_interval_s=0.001)
        starting = asyncio.ensure_future(supervisor.start_all())
        await fleet.up("worker-0", node_id="spot")
        await fleet.up("worker-1", node_id="spot")
        await starting
        await supervisor.serve(engine)
        fleet.draining = {"spot": 10.0}
        await until(lambda: len(engine.drained) > 5)
        assert {worker_id for worker_id, _ in engine.drained} == {"worker-0", "worker-1"}
        assert len(fleet.asked) == 4, "each was replaced once"

    run(test)


def test_a_fault_of_the_supervisor_is_told() -> None:
    """Silence would leave every request waiting for a worker that nobody starts."""

    async def test() -> None:
        fleet, found = FakeFleet(), []
        supervisor, _, _ = await running(fleet, on_bug=found.append)
        supervisor.worker_lost("worker-0", "killed")
        await fleet.fail("worker-2", ZeroDivisionError("a bug"))
        assert [type(error) for error in found] == [ZeroDivisionError]

    run(test)


# ------------------------------------------------------------------------ after a restart of it


async def restarted(fleet: FakeFleet, num_workers: int = 2) -> tuple[Supervisor, FakeEngine]:
    supervisor, engine = make(fleet, num_workers), FakeEngine()
    found = await supervisor.recall()
    assert found is not None
    await supervisor.take_over()
    await supervisor.serve(engine)
    await turns()
    return supervisor, engine


def test_a_new_scheduler_takes_over_the_workers_that_are_there_and_starts_the_others() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        before, _, _ = await running(fleet)
        before.worker_lost("worker-0", "killed")
        await turns()
        await before.stop()
        assert fleet.given_up == ["worker-2"]
        fleet.there, fleet.asked = ["worker-1"], []
        _, engine = await restarted(fleet)
        assert sorted(fleet.asked) == ["start worker-3", "take over worker-1"]
        assert sorted(engine.told()) == ["+worker-1", "+worker-3"]
        await fleet.up("worker-1")
        await fleet.up("worker-3")
        assert engine.joined == ["worker-1", "worker-3"]

    run(test)


def test_a_worker_that_does_not_answer_its_new_scheduler_is_replaced() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        await running(fleet)
        fleet.there, fleet.asked = ["worker-0", "worker-1"], []
        _, engine = await restarted(fleet)
        await fleet.fail("worker-0")
        await fleet.up("worker-1")
        await fleet.up("worker-2")
        assert engine.joined == ["worker-1", "worker-2"]

    run(test)


def test_a_new_scheduler_remembers_what_operators_drained() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        before, _, _ = await running(fleet)
        before.expect_drain("worker-0")
        before.worker_stopped("worker-0")
        await turns()
        fleet.there, fleet.asked = ["worker-1"], []
        await restarted(fleet)
        assert fleet.asked == ["take over worker-1"]

    run(test)


def test_a_scheduler_that_died_before_any_worker_was_ready_has_nothing_to_take_over() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        starting = asyncio.ensure_future(make(fleet).start_all())
        await until(lambda: len(fleet.asked) == 2)
        starting.cancel()
        assert await make(fleet).recall() is None

    run(test)


def test_when_the_engine_ends_workers_under_way_are_ended_and_none_follows() -> None:
    async def test() -> None:
        fleet = FakeFleet()
        supervisor, _, _ = await running(fleet)
        supervisor.worker_lost("worker-0", "killed")
        await until(lambda: "worker-2" in fleet.starts)
        await supervisor.stop()
        assert fleet.given_up == ["worker-2"]
        await asyncio.sleep(0.01)
        assert len(fleet.asked) == 3

    run(test)
