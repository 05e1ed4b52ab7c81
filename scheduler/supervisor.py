"""Keeps the wanted number of workers alive: decides when one is started, where it stood, how often.

Rules:
- A worker's id is worker-N, and no N is used twice in an engine's life, the scheduler's restarts
  included: what is said about a worker is never about another one.
- Whoever dies is replaced at once. Replacements that come to nothing are started at growing
  intervals, and after so many in a row no more (`RestartLimits`).
- Waiting for room in the cluster is no death. A worker that waits is waited for as long as others
  work; where there are none, only so long, then what waits for it ends with an error. It is taken
  in all the same when it comes after that.
- Workers on a node that is to go are drained, and replaced elsewhere at once. Workers that an
  operator drains are not replaced.
- Where the number of workers follows the load (`scheduler.scaling`), an idle one is drained like
  any other, and one that still waits for room is called off.
The module knows no Ray and no request: a `Fleet` starts workers, and the scheduler's loop is told
what to expect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from scheduler.calls import Worker
from scheduler.codec import decode, encode
from scheduler.errors import EngineUnavailable, HaversackError, StartupFailed
from scheduler.events import AnyEvent, WorkerExpected, WorkerNotComing
from scheduler.lifetime import Tasks, end_all
from scheduler.messages import WorkerInfo
from scheduler.restarts import Death, RestartLimits, RestartPolicy
from scheduler.scaling import Change, Load, Scaling

logger = logging.getLogger(__name__)

NODE_WATCH_INTERVAL_S = 1.0
LOAD_WATCH_INTERVAL_S = 1.0
DRAIN_MARGIN_S = 2.0
"""How long before a node's deadline its workers are to be empty."""
_LONGEST_LOOK_S = 1.0
_GIVE_BACK_S = 30.0
"""In which an idle worker that is given back is to be empty: somebody may have come meanwhile."""


class WorkerDied(Exception):
    """A worker's process ended, or was ended, before the worker was ready."""


class FleetWorker(Worker, Protocol):
    """A worker that counts its steps."""

    num_steps_begun: int
    num_steps_done: int
    """Those that were answered; a worker that has none has not proved itself."""


class Fleet(Protocol):
    """Starts workers on whatever there is to run them on."""

    async def start(self, worker_id: str, epoch: int) -> tuple[FleetWorker, WorkerInfo]:
        """Start a worker and return when it serves `epoch`; wait for room as long as it takes.

        Where this is cancelled, nothing of the worker is left.

        Raises:
            WorkerDied: it ended first.
            HaversackError: it can't be started, for a reason that starting it again won't change.
        """

    async def take_over(self, worker_id: str, epoch: int) -> tuple[FleetWorker, WorkerInfo]:
        """Have a worker that an earlier scheduler started serve `epoch`; end it where it won't.

        Raises:
            WorkerDied: it had ended, or did not answer in time.
        """

    async def find(self) -> list[str]:
        """Return the ids of workers that an earlier scheduler started and that are still there."""

    async def shortage(self) -> str:
        """Return, as sentences, what the workers asked for and what there is."""

    async def draining_nodes(self) -> dict[str, float]:
        """Return the ids of nodes that are to go, and in how many seconds."""

    async def remember(self, memory: bytes) -> None:
        """Keep `memory` where the next scheduler finds it."""

    async def recall(self) -> bytes | None:
        """Return what was remembered last."""


class Engine(Protocol):
    """What the supervisor tells the scheduler's loop."""

    def post(self, *events: AnyEvent) -> None: ...

    async def add_worker(self, worker: Worker, info: WorkerInfo) -> None: ...

    async def drain(self, worker_id: str, deadline_s: float) -> None: ...

    def load(self) -> Load: ...


class Memory(msgspec.Struct):
    """What the next scheduler has to know of the workers."""

    num_workers: int
    """Wanted, but for those that an operator drained."""
    next_number: int = 0
    drained_ids: list[str] = []
    """Workers that an operator drained: so many fewer are wanted."""
    info: WorkerInfo | None = None
    """What one of the workers said; they are all alike."""
    epoch: int = 0
    """Of the latest scheduler; workers take orders of later ones only."""


@dataclass
class _Place:
    """One of the wanted workers, whoever fills it now."""

    worker_id: str
    policy: RestartPolicy
    asked_s: float
    """When its current worker was asked for."""
    is_found: bool = False
    """Whether an earlier scheduler started that worker."""
    is_expected: bool = False
    """Whether the engine waits for that worker."""
    is_leaving: bool = False
    """Whether it is being drained: nobody follows it here."""
    bringing: asyncio.Task[None] | None = None
    """What has its worker come up."""
    worker: FleetWorker | None = None
    """Set while it is ready."""
    info: WorkerInfo | None = None
    ready_s: float = 0.0
    num_steps_seen: int = 0
    """Of its worker, at the last look at the load."""

    def has_worked(self) -> bool:
        """Whether its worker was given a step since this was asked last."""
        before = self.num_steps_seen
        self.num_steps_seen = self.worker.num_steps_begun if self.worker is not None else 0
        return self.num_steps_seen != before


class Supervisor:
    """The wanted workers of an engine: those that are ready, and those that are to come."""

    def __init__(
        self,
        fleet: Fleet,
        num_workers: int,
        epoch: int,
        *,
        limits: RestartLimits | None = None,
        scaling: Scaling | None = None,
        patience_s: float = 300.0,
        node_watch_interval_s: float = NODE_WATCH_INTERVAL_S,
        load_watch_interval_s: float = LOAD_WATCH_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        on_bug: Callable[[BaseException], None],
    ) -> None:
        """Know of no worker yet.

        Args:
            fleet: starts them.
            num_workers: how many are wanted at first.
            epoch: of this scheduler; the workers are made to serve it.
            limits: how often and how soon a worker is replaced.
            scaling: says how many are wanted from then on; None: as many as at first.
            patience_s: how long a worker is waited for where no other is ready.
            node_watch_interval_s: how often to ask which nodes are to go.
            load_watch_interval_s: how often to look how many workers are wanted.
            clock: seconds; any zero will do.
            on_bug: called with what should not have been raised; nobody may be started any more.
        """
        self._fleet = fleet
        self._epoch = epoch
        self._limits = limits or RestartLimits()
        self._scaling = scaling
        self._patience_s = patience_s
        self._interval_s = node_watch_interval_s
        self._load_interval_s = load_watch_interval_s
        self._clock = clock
        self._engine: Engine | None = None
        self._places: dict[str, _Place] = {}
        """By the id of the worker that fills the place now."""
        self._num_given_up = 0
        self._alone_since_s = clock()
        """Since when no worker has been ready, where none is."""
        self._memory = Memory(num_workers)
        self._remembering = asyncio.Lock()
        self._tasks = Tasks(on_bug)

    @property
    def epoch(self) -> int:
        """Of this scheduler; later than that of any before it."""
        return self._epoch

    # --------------------------------------------------------------------------------- starting

    async def start_all(self) -> WorkerInfo:
        """Start the workers of a new engine, and return what they are like when all are ready.

        Raises:
            StartupFailed: one died again and again.
            HaversackError: one can't be started.
        """
        places = [self._new_place(self._next_id()) for _ in range(self._memory.num_workers)]
        tasks = [asyncio.ensure_future(self._bring(place)) for place in places]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_all(tasks)
        info = places[0].info
        if info is None:
            raise StartupFailed("a worker was lost while the engine started")
        self._memory.info = info
        await self._remember()
        return info

    async def recall(self) -> WorkerInfo | None:
        """Return what the workers of this engine are like, where an earlier scheduler knew it."""
        found = await self._fleet.recall()
        if found is None:
            return None
        self._memory = decode(found, Memory)
        self._epoch = max(self._epoch, self._memory.epoch + 1)
        return self._memory.info

    async def take_over(self) -> None:
        """After `recall`: take over the workers that are there, and start those that lack."""
        await self._remember()
        for worker_id in await self._fleet.find():
            place = self._new_place(worker_id)
            place.is_found = True
            place.is_leaving = worker_id in self._memory.drained_ids
        self._fill()

    async def serve(self, engine: Engine) -> None:
        """Hand over the workers that are ready, and from now on those that become so.

        Raises:
            InvalidConfig: the workers are not alike.
        """
        self._engine = engine
        places = list(self._places.values())
        engine.post(*(event for place in places for event in self._expect(place)))
        for place in places:
            if place.worker is not None and place.info is not None:
                await engine.add_worker(place.worker, place.info)
            else:
                place.bringing = self._tasks.spawn(self._keep(place))
        self._tasks.spawn(self._watch_nodes())
        if self._scaling is not None:
            self._tasks.spawn(self._watch_load(self._scaling, engine))

    async def stop(self) -> None:
        """Start no more workers, and end those that are being started."""
        await self._tasks.end()

    def num_ready(self) -> int:
        """Return how many workers are ready."""
        return sum(place.worker is not None for place in self._places.values())

    # ------------------------------------------------------------------------ what the loop says

    def worker_lost(self, worker_id: str, reason: str) -> Iterable[AnyEvent]:
        """Begin to replace a worker; return what the core has to know before it knows the loss."""
        place = self._places.get(worker_id)
        if place is None:
            return []
        death = self._death(place)
        self._empty(place)
        if place.is_leaving:
            del self._places[worker_id]
            return []
        delay_s = place.policy.next_delay_s(death)
        if delay_s is None:
            self._give_up(place, reason)
            return []
        self._rename(place)
        place.bringing = self._tasks.spawn(self._keep(place, delay_s))
        return self._expect(place)

    def worker_stopped(self, worker_id: str) -> None:
        """Note that a drained worker has ended."""
        place = self._places.get(worker_id)
        if place is not None:
            self._empty(place)
            del self._places[worker_id]

    def expect_drain(self, worker_id: str, *, replace: bool = False) -> None:
        """Note that an operator drains a worker: nobody replaces it, or somebody does at once."""
        place = self._places.get(worker_id)
        if place is None or place.is_leaving:
            return
        place.is_leaving = True
        if replace:
            self._fill()
        else:
            self._memory.drained_ids.append(worker_id)
            self._tasks.spawn(self._remember())

    # -------------------------------------------------------------------------- a single worker

    async def _keep(self, place: _Place, delay_s: float = 0.0) -> None:
        """Bring up a place's worker, or give the place up."""
        await asyncio.sleep(delay_s)
        try:
            await self._bring(place)
        except StartupFailed as error:
            self._give_up(place, error.message)

    async def _bring(self, place: _Place) -> None:
        """Start a place's worker, and if that fails others in its stead, until one is ready.

        Raises:
            StartupFailed: it failed too often.
            HaversackError: the engine's first worker can't be started at all.
        """
        while True:
            try:
                await self._start(place)
                return
            except EngineUnavailable:
                return
            except (WorkerDied, HaversackError) as error:
                if self._engine is None and isinstance(error, HaversackError):
                    raise
                reason = str(error)
            logger.warning("worker %s was not started: %s", place.worker_id, reason)
            self._empty(place)
            delay_s = place.policy.next_delay_s(Death.FRUITLESS)
            if delay_s is None:
                if self._limits.max_restarts > 0:
                    reason = (
                        f"{reason}. No other is started: of max_worker_restarts="
                        f"{self._limits.max_restarts} in a row none did any work"
                    )
                raise StartupFailed(reason)
            self._follow(place, reason)
            await asyncio.sleep(delay_s)

    async def _start(self, place: _Place) -> None:
        """Start a place's worker and have it join the engine, where that is there already."""
        await self._remember()
        worker, info = await self._patiently(place)
        place.worker, place.info, place.ready_s = worker, info, self._clock()
        if self._engine is None:
            return
        # From here on the loop may report its loss, which puts another worker in this place.
        was_expected, place.is_expected = place.is_expected, False
        try:
            await self._engine.add_worker(worker, info)
        except HaversackError:
            place.is_expected = was_expected
            worker.kill()
            raise

    async def _patiently(self, place: _Place) -> tuple[FleetWorker, WorkerInfo]:
        """Wait for a worker to be ready; say when nobody should wait for it any longer."""
        begin = self._fleet.take_over if place.is_found else self._fleet.start
        starting = asyncio.ensure_future(begin(place.worker_id, self._epoch))
        try:
            while not starting.done():
                await asyncio.wait([starting], timeout=min(self._patience_s, _LONGEST_LOOK_S))
                waited_s = self._clock() - max(place.asked_s, self._alone_since_s)
                is_late = waited_s >= self._patience_s and self.num_ready() == 0
                if is_late and place.is_expected and not starting.done():
                    self._give_no_hope(
                        place,
                        f"no worker is there, and none came up within {self._patience_s:g} s. "
                        + await self._fleet.shortage(),
                    )
        except BaseException:
            await end_all([starting])
            if not starting.cancelled() and starting.exception() is None:
                starting.result()[0].kill()  # it has just come up, and nobody knows of it
            raise
        return starting.result()

    def _death(self, place: _Place) -> Death:
        worker = place.worker
        if worker is None:
            return Death.FRUITLESS
        if worker.num_steps_done > 0:
            return Death.HAD_WORKED
        if worker.num_steps_begun > 0:
            return Death.IN_FIRST_STEP
        is_proven = self._clock() - place.ready_s >= self._limits.proving_s
        return Death.HAD_WORKED if is_proven else Death.FRUITLESS

    # ------------------------------------------------------------------------------- the places

    def _new_place(self, worker_id: str) -> _Place:
        place = _Place(worker_id, RestartPolicy(self._limits), self._clock())
        self._places[worker_id] = place
        return place

    def _next_id(self) -> str:
        number = self._memory.next_number
        self._memory.next_number += 1
        return f"worker-{number}"

    def _fill(self) -> None:
        """Have somebody on the way for every wanted worker that lacks."""
        wanted = self._memory.num_workers - self._num_barred()
        for _ in range(wanted - self._num_staying()):
            place = self._new_place(self._next_id())
            if self._engine is not None:
                self._engine.post(*self._expect(place))
                place.bringing = self._tasks.spawn(self._keep(place))

    def _num_staying(self) -> int:
        """Return how many workers are there or on their way, and are not being drained."""
        return sum(not place.is_leaving for place in self._places.values())

    def _num_barred(self) -> int:
        """Return how many places nobody is to fill."""
        return len(self._memory.drained_ids) + self._num_given_up

    def _empty(self, place: _Place) -> None:
        """Note that a place's worker is no more."""
        place.worker = place.info = None
        if self.num_ready() == 0:
            self._alone_since_s = self._clock()

    def _rename(self, place: _Place) -> None:
        """Make room in a place for a new worker."""
        del self._places[place.worker_id]
        place.worker_id, place.asked_s = self._next_id(), self._clock()
        place.is_found = place.is_expected = False
        self._places[place.worker_id] = place

    def _follow(self, place: _Place, reason: str) -> None:
        """Put a new worker in the place of one that did not come up."""
        failed_id, was_expected = place.worker_id, place.is_expected
        self._rename(place)
        # Once it has been said that nobody comes, that holds until somebody does.
        if was_expected and self._engine is not None:
            gone = WorkerNotComing(failed_id, reason)
            self._engine.post(*self._expect(place), gone)

    def _expect(self, place: _Place) -> list[AnyEvent]:
        """Return what tells the core to wait for a place's worker, where it is not ready."""
        info = self._memory.info
        if place.worker is not None or info is None:
            return []
        place.is_expected = True
        return [WorkerExpected(place.worker_id, info.num_blocks)]

    def _give_no_hope(self, place: _Place, reason: str) -> None:
        """Tell the core not to wait for a place's worker; it may come all the same."""
        if place.is_expected and self._engine is not None:
            place.is_expected = False
            self._engine.post(WorkerNotComing(place.worker_id, reason))

    def _give_up(self, place: _Place, reason: str) -> None:
        """Start no more workers in a place."""
        logger.error("worker %s is not replaced any more: %s", place.worker_id, reason)
        del self._places[place.worker_id]
        self._num_given_up += 1
        self._give_no_hope(place, reason)

    # -------------------------------------------------------------------------------- the nodes

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            nodes = await self._fleet.draining_nodes()
            for place in list(self._places.values()):
                if place.info is None or place.is_leaving or place.info.node_id not in nodes:
                    continue
                place.is_leaving = True
                if self._limits.max_restarts > 0:
                    self._fill()
                self._tasks.spawn(self._leave(place, nodes[place.info.node_id]))

    async def _leave(self, place: _Place, left_s: float) -> None:
        """Drain a worker from a node that is to go in `left_s` seconds."""
        assert self._engine is not None
        worker_id = place.worker_id
        logger.warning("the node of worker %s goes in %.0f s: it is drained", worker_id, left_s)
        try:
            await self._engine.drain(worker_id, max(left_s - DRAIN_MARGIN_S, 0.0))
        except HaversackError as error:  # it has gone, or is about to join: the next look tells
            logger.info("worker %s is not drained now: %s", worker_id, error)
            place.is_leaving = False

    # --------------------------------------------------------------------------------- the load

    async def _watch_load(self, scaling: Scaling, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._load_interval_s)
            staying = [place for place in self._places.values() if not place.is_leaving]
            coming = [place for place in staying if place.worker is None]
            load = engine.load()
            # The newest first: of those that have been idle equally long, that one goes.
            is_busy = {
                place.worker_id: place.has_worked() or load.is_busy[place.worker_id]
                for place in reversed(staying)
                if place.worker_id in load.is_busy and place.worker is not None
            }
            load = replace(load, is_busy=is_busy)
            change = scaling.look(load, len(coming), self._clock(), self._num_barred())
            if change != Change():
                self._adapt(change, coming)
                await self._remember()

    def _adapt(self, change: Change, coming: list[_Place]) -> None:
        """Ask for more workers, call off those that nobody needs, or give an idle one back."""
        for place in coming[len(coming) - change.num_fewer_coming :]:
            self._call_off(place)
        idle = self._places.get(change.idle_id or "")
        if idle is not None:
            logger.info("worker %s is idle and given back", idle.worker_id)
            idle.is_leaving = True
            self._tasks.spawn(self._give_back(idle))
        self._want(change.num_more)
        if change.num_more:
            logger.info("%d more workers are wanted", change.num_more)
            self._fill()

    def _want(self, num_more: int = 0) -> None:
        """Want those that stay or are on their way, and so many more."""
        self._memory.num_workers = self._num_staying() + self._num_barred() + num_more

    def _call_off(self, place: _Place) -> None:
        """Wait no longer for a worker that is not ready."""
        logger.info("worker %s is not needed any more", place.worker_id)
        if place.bringing is not None:
            place.bringing.cancel()
        del self._places[place.worker_id]
        self._give_no_hope(place, "it was not needed any more")

    async def _give_back(self, place: _Place) -> None:
        """Drain an idle worker."""
        assert self._engine is not None
        try:
            await self._engine.drain(place.worker_id, _GIVE_BACK_S)
        except HaversackError as error:
            logger.info("worker %s is not given back: %s", place.worker_id, error)
            place.is_leaving = False
            self._want()

    # ----------------------------------------------------------------------------- bookkeeping

    async def _remember(self) -> None:
        async with self._remembering:
            self._memory.epoch = self._epoch
            await self._fleet.remember(encode(self._memory))
