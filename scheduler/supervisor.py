"""Keeps the wanted number of workers alive: decides when one is started, where it stood, how often.

Rules:
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
from dataclasses import replace
from typing import Protocol

from scheduler.calls import Worker
from scheduler.codec import decode, encode
from scheduler.errors import EngineUnavailable, HaversackError, StartupFailed
from scheduler.events import AnyEvent, WorkerExpected, WorkerNotComing
from scheduler.fleet import Fleet, FleetWorker, WorkerDied
from scheduler.lifetime import Tasks, end_all
from scheduler.messages import WorkerInfo
from scheduler.places import Memory, Place, Places
from scheduler.restarts import Death, RestartLimits
from scheduler.scaling import Change, Load, Scaling

logger = logging.getLogger(__name__)

NODE_WATCH_INTERVAL_S = 1.0
LOAD_WATCH_INTERVAL_S = 1.0
DRAIN_MARGIN_S = 2.0
"""How long before a node's deadline its workers are to be empty."""
_LONGEST_LOOK_S = 1.0
_GIVE_BACK_S = 30.0
"""In which an idle worker that is given back is to be empty: somebody may have come meanwhile."""


class Engine(Protocol):
    """What the supervisor tells the scheduler's loop."""

    def post(self, *events: AnyEvent) -> None: ...

    async def add_worker(self, worker: Worker, info: WorkerInfo) -> None: ...

    async def drain(self, worker_id: str, deadline_s: float) -> None: ...

    def leave_node(self, node_id: str) -> None: ...

    def load(self) -> Load: ...


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
        self._places = Places(num_workers, self._limits, clock)
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
        places = [self._places.new() for _ in range(self._places.memory.num_workers)]
        tasks = [asyncio.ensure_future(self._bring(place)) for place in places]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_all(tasks)
        info = places[0].info
        if info is None:
            raise StartupFailed("a worker was lost while the engine started")
        self._places.memory.info = info
        await self._remember()
        return info

    async def recall(self) -> WorkerInfo | None:
        """Return what the workers of this engine are like, where an earlier scheduler knew it."""
        found = await self._fleet.recall()
        if found is None:
            return None
        self._places.memory = decode(found, Memory)
        self._epoch = max(self._epoch, self._places.memory.epoch + 1)
        return self._places.memory.info

    async def take_over(self) -> None:
        """After `recall`: take over the workers that are there, and start those that lack."""
        await self._remember()
        for worker_id in await self._fleet.find():
            place = self._places.new(worker_id)
            place.is_found = True
            place.is_leaving = worker_id in self._places.memory.drained_ids
        self._fill()

    async def serve(self, engine: Engine) -> None:
        """Hand over the workers that are ready, and from now on those that become so.

        Raises:
            InvalidConfig: the workers are not alike.
        """
        self._engine = engine
        places = list(self._places)
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
        return self._places.num_ready()

    # ------------------------------------------------------------------------ what the loop says

    def worker_lost(self, worker_id: str, reason: str) -> Iterable[AnyEvent]:
        """Begin to replace a worker; return what the core has to know before it knows the loss."""
        place = self._places.get(worker_id)
        if place is None:
            return []
        death = self._places.death(place)
        self._places.empty(place)
        if place.is_leaving:
            self._places.remove(place)
            return []
        delay_s = place.policy.next_delay_s(death)
        if delay_s is None:
            self._give_up(place, reason)
            return []
        self._places.rename(place)
        place.bringing = self._tasks.spawn(self._keep(place, delay_s))
        return self._expect(place)

    def worker_stopped(self, worker_id: str) -> None:
        """Note that a drained worker has ended."""
        place = self._places.get(worker_id)
        if place is not None:
            self._places.empty(place)
            self._places.remove(place)

    def expect_drain(self, worker_id: str, *, replace: bool = False) -> None:
        """Note that an operator drains a worker: nobody replaces it, or somebody does at once."""
        place = self._places.get(worker_id)
        if place is None or place.is_leaving:
            return
        place.is_leaving = True
        if replace:
            self._fill()
        else:
            self._places.memory.drained_ids.append(worker_id)
            self._tasks.spawn(self._remember())

    # -------------------------------------------------------------------------- a single worker

    async def _keep(self, place: Place, delay_s: float = 0.0) -> None:
        """Bring up a place's worker, or give the place up."""
        await asyncio.sleep(delay_s)
        try:
            await self._bring(place)
        except StartupFailed as error:
            self._give_up(place, error.message)

    async def _bring(self, place: Place) -> None:
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
            self._places.empty(place)
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

    async def _start(self, place: Place) -> None:
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

    async def _patiently(self, place: Place) -> tuple[FleetWorker, WorkerInfo]:
        """Wait for a worker to be ready; say when nobody should wait for it any longer."""
        begin = self._fleet.take_over if place.is_found else self._fleet.start
        starting = asyncio.ensure_future(begin(place.worker_id, self._epoch))
        try:
            while not starting.done():
                await asyncio.wait([starting], timeout=min(self._patience_s, _LONGEST_LOOK_S))
                waited_s = self._clock() - max(place.asked_s, self._places.alone_since_s)
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

    # ------------------------------------------------------------------------------- the places

    def _fill(self) -> None:
        """Have somebody on the way for every wanted worker that lacks."""
        for _ in range(self._places.num_missing()):
            place = self._places.new()
            if self._engine is not None:
                self._engine.post(*self._expect(place))
                place.bringing = self._tasks.spawn(self._keep(place))

    def _follow(self, place: Place, reason: str) -> None:
        """Put a new worker in the place of one that did not come up."""
        failed_id, was_expected = place.worker_id, place.is_expected
        self._places.rename(place)
        # Once it has been said that nobody comes, that holds until somebody does.
        if was_expected and self._engine is not None:
            gone = WorkerNotComing(failed_id, reason)
            self._engine.post(*self._expect(place), gone)

    def _expect(self, place: Place) -> list[AnyEvent]:
        """Return what tells the core to wait for a place's worker, where it is not ready."""
        info = self._places.memory.info
        if place.worker is not None or info is None:
            return []
        place.is_expected = True
        return [WorkerExpected(place.worker_id, info.num_blocks)]

    def _give_no_hope(self, place: Place, reason: str) -> None:
        """Tell the core not to wait for a place's worker; it may come all the same."""
        if place.is_expected and self._engine is not None:
            place.is_expected = False
            self._engine.post(WorkerNotComing(place.worker_id, reason))

    def _give_up(self, place: Place, reason: str) -> None:
        """Start no more workers in a place."""
        logger.error("worker %s is not replaced any more: %s", place.worker_id, reason)
        self._places.give_up(place)
        self._give_no_hope(place, reason)

    # -------------------------------------------------------------------------------- the nodes

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            nodes = await self._fleet.draining_nodes()
            for place in list(self._places):
                if place.info is None or place.is_leaving:
                    continue
                left_s = [nodes[node] for node in place.info.node_ids if node in nodes]
                if not left_s:
                    continue
                place.is_leaving = True
                if self._limits.max_restarts > 0:
                    self._fill()
                self._tasks.spawn(self._leave(place, min(left_s)))

    async def _leave(self, place: Place, left_s: float) -> None:
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
            staying = [place for place in self._places if not place.is_leaving]
            coming = [place for place in staying if place.worker is None]
            load = engine.load()
            # The newest first: of those that have been idle equally long, that one goes.
            is_busy = {
                place.worker_id: place.has_worked() or load.is_busy[place.worker_id]
                for place in reversed(staying)
                if place.worker_id in load.is_busy and place.worker is not None
            }
            load = replace(load, is_busy=is_busy)
            change = scaling.look(load, len(coming), self._clock(), self._places.num_barred())
            if change != Change():
                self._adapt(change, coming)
                await self._remember()

    def _adapt(self, change: Change, coming: list[Place]) -> None:
        """Ask for more workers, call off those that nobody needs, or give an idle one back."""
        for place in coming[len(coming) - change.num_fewer_coming :]:
            self._call_off(place)
        idle = self._places.get(change.idle_id or "")
        if idle is not None:
            logger.info("worker %s is idle and given back", idle.worker_id)
            idle.is_leaving = True
            self._tasks.spawn(self._give_back(idle))
        self._places.want(change.num_more)
        if change.num_more:
            logger.info("%d more workers are wanted", change.num_more)
            self._fill()

    def _call_off(self, place: Place) -> None:
        """Wait no longer for a worker that is not ready."""
        logger.info("worker %s is not needed any more", place.worker_id)
        if place.bringing is not None:
            place.bringing.cancel()
        self._places.remove(place)
        self._give_no_hope(place, "it was not needed any more")

    async def _give_back(self, place: Place) -> None:
        """Drain an idle worker, and leave its node where it was the last one there."""
        assert self._engine is not None
        node_id = place.info.node_id if place.info is not None else ""
        try:
            await self._engine.drain(place.worker_id, _GIVE_BACK_S)
        except HaversackError as error:
            logger.info("worker %s is not given back: %s", place.worker_id, error)
            place.is_leaving = False
            self._places.want()
            return
        others = [other.info for other in self._places if other is not place]
        if all(info is None or info.node_id != node_id for info in others):
            self._engine.leave_node(node_id)

    # ----------------------------------------------------------------------------- bookkeeping

    async def _remember(self) -> None:
        async with self._remembering:
            self._places.memory.epoch = self._epoch
            await self._fleet.remember(encode(self._places.memory))
