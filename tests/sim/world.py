"""Everything around the engine's loop but Ray and models: workers, a store and clients that fail.

The loop, the core, the store's index and the journal are the real ones. Workers compute as
`FakeRunner` does, so a block that somebody writes too late, or reads too early, changes results.
As with real actors, a call that its caller gives up goes on where it is: a write that has begun
happens, and only a worker's fence says when.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offload_store.store import OffloadStore
from scheduler.actions import LoadBlocks, LookupBlocks, ReleaseBlocks, SaveBlocks
from scheduler.calls import ActorLost, CallFailed, Timeouts
from scheduler.codec import decode, encode
from scheduler.config import SchedulerConfig
from scheduler.errors import StaleEpoch
from scheduler.events import AnyEvent, WorkerExpected
from scheduler.journal import Journal
from scheduler.loop import SchedulerLoop
from scheduler.messages import SchedulerOutput, Submission
from scheduler.state import SchedulerState
from tests.sim.engine import Result
from tests.sim.fake_runner import FakeRunner

TIMEOUTS = Timeouts(step_s=0.5, step_s_per_token=0, store_s=0.5, store_retry_s=0.001, ping_s=0.5)
LONGEST_DELAY = 12
"""Turns of the loop that a call may take."""
SLOW_WRITE_S = 0.02
"""What a write takes now and then, so that many a step is done before it."""


class Worker:
    """A process that computes until it dies or freezes."""

    def __init__(self, world: World, worker_id: str) -> None:
        self.world = world
        self.runner = FakeRunner(worker_id, world.num_blocks, world.config.block_size)
        self.epoch = 0
        self.is_dead = False
        self.is_frozen = False
        self.writes: set[asyncio.Task[int]] = set()
        self.computing = asyncio.Lock()
        """Steps are run in the order in which they were sent."""

    def reset(self, epoch: int) -> None:
        self.epoch = epoch
        self.runner.forget_all()

    async def alive(self, epoch: int | None = None) -> None:
        """Take some time, for ever while frozen; raise where it is dead or serves another."""
        await self.world.some_time()
        while self.is_frozen and not self.is_dead:
            await asyncio.sleep(0.01)
        if self.is_dead:
            raise ActorLost(f"{self.runner.worker_id} is dead")
        if epoch is not None and epoch != self.epoch:
            raise CallFailed(StaleEpoch("another scheduler's"))

    async def read(self, epoch: int, block_ids: list[int]) -> np.ndarray:
        await self.alive(epoch)
        return np.array(self.runner.read_blocks(block_ids))

    async def write(self, epoch: int, block_ids: list[int], data: np.ndarray) -> int:
        """Write in its own time, whether or not the caller waits."""

        async def write() -> int:
            if self.world.rng.random() < 0.2:
                await asyncio.sleep(SLOW_WRITE_S)
            await self.alive(epoch)
            self.runner.write_blocks(block_ids, data)
            return len(block_ids)

        task = asyncio.ensure_future(write())
        self.writes.add(task)
        task.add_done_callback(self.writes.discard)
        task.add_done_callback(lambda done: done.exception())
        return await asyncio.shield(task)


@dataclass
class WorkerHandle:
    """One scheduler's line to a worker."""

    worker: Worker
    epoch: int

    async def execute(self, message: bytes) -> bytes:
        async with self.worker.computing:
            await self.worker.alive(self.epoch)
            return encode(self.worker.runner.execute(decode(message, SchedulerOutput)))

    async def copy_blocks(
        self, block_ids: list[int], target: Any, target_block_ids: list[int]
    ) -> int:
        data = await self.worker.read(self.epoch, block_ids)
        return await target.worker.write(target.epoch, target_block_ids, data)

    async def settle(self) -> None:
        await self.worker.alive(self.epoch)
        await asyncio.gather(*list(self.worker.writes), return_exceptions=True)

    async def ping(self) -> None:
        await self.worker.alive()

    def kill(self) -> None:
        self.worker.is_dead = True


@dataclass
class StoreHandle:
    """The store as the scheduler of an epoch calls it."""

    store: Store
    epoch: int

    def __post_init__(self) -> None:
        self.store.epoch = self.epoch
        self.load, self.save = self.store.load, self.store.save
        self.release, self.retain = self.store.release, self.store.retain
        self.leave_node = self.store.leave_node
        self.restart = self.store.restart

    async def lookup(self, action: LookupBlocks) -> int:
        return await self.store.lookup(self.epoch, action)


class Store:
    """The real index, and an actor around it that dies, freezes and comes back empty."""

    def __init__(self, world: World, capacity_bytes: int) -> None:
        self.world = world
        self.capacity_bytes = capacity_bytes
        self.epoch = 0
        self.start()

    def start(self) -> None:
        self.incarnation = object()
        self.is_dead = self.is_frozen = False
        self.data: dict[int, np.ndarray] = {}
        data = self.data
        self.index = OffloadStore(
            self.capacity_bytes,
            self.world.block_bytes,
            self.world.config.block_size,
            segment_bytes=2 * self.world.block_bytes,
            on_drop=lambda segment_id: data.pop(segment_id, None),
        )

    async def _alive(self, incarnation: object | None = None) -> object:
        await self.world.some_time()
        while self.is_frozen and not self.is_dead:
            await asyncio.sleep(0.01)
        if self.is_dead or incarnation not in (None, self.incarnation):
            raise ActorLost("the store is dead")
        return self.incarnation

    async def lookup(self, epoch: int, action: LookupBlocks) -> int:
        await self._alive()
        self.check(epoch)
        return self.index.lookup(
            action.request_id,
            action.block_hashes,
            num_readable_tokens=action.num_readable_tokens,
            num_own_tokens=action.num_own_tokens,
            skip_reading_prefix_cache=action.skip_reading_prefix_cache,
        ).num_hit_tokens

    async def load(self, action: LoadBlocks, worker: Any) -> int:
        incarnation = await self._alive()
        self.check(worker.epoch)
        rows = self.index.segments_of(action.request_id, action.block_hashes)
        if not rows:
            return 0
        data = np.stack([self.data[row.segment_id][row.row] for row in rows])
        try:
            num_written = await worker.worker.write(
                worker.epoch, action.block_ids[: len(rows)], data
            )
        except ActorLost as error:
            raise CallFailed(StaleEpoch(str(error))) from None
        await self._alive(incarnation)
        return int(num_written)

    async def save(self, action: SaveBlocks, worker: Any) -> tuple[int, int]:
        incarnation = await self._alive()
        self.check(worker.epoch)
        index, kept = self.index, self.data
        plan = index.prepare_save(
            action.request_id,
            action.block_hashes,
            owned=action.owned,
            replace=action.replace,
            node_id=worker.worker.runner.worker_id,
        )
        failed = set()
        for segment_id, positions in plan.segments:
            try:
                kept[segment_id] = await worker.worker.read(
                    worker.epoch, [action.block_ids[position] for position in positions]
                )
            except (ActorLost, CallFailed):
                failed.add(segment_id)
            index.complete_save(segment_id, ok=segment_id not in failed)
        await self._alive(incarnation)
        copied = sum(len(p) for segment_id, p in plan.segments if segment_id not in failed)
        return index.num_saved_blocks(plan, failed), copied

    async def release(self, action: ReleaseBlocks) -> None:
        await self._alive()
        self.index.release(action.request_id, forget=action.forget)

    async def retain(self, request_ids: list[str]) -> None:
        await self._alive()
        self.index.retain(request_ids)

    async def leave_node(self, node_id: str) -> None:
        await self._alive()
        self.index.leave(node_id)

    def check(self, epoch: int) -> None:
        """Refuse a scheduler in whose place another one has come."""
        if epoch < self.epoch:
            raise CallFailed(StaleEpoch("another scheduler is served"))

    async def restart(self) -> None:
        self.is_dead = True
        await self.world.some_time()
        if self.world.rng.random() < 0.3:
            raise ActorLost("no room for it")
        self.start()


class Client:
    """Polls, and after a restart of the scheduler submits again what has not ended."""

    def __init__(self, world: World, client_id: str) -> None:
        self.world = world
        self.client_id = client_id
        self.results: dict[tuple[str, int], Result] = {}
        self.live: dict[str, Submission] = {}
        self.epoch = self.acked = world.loop.connect(client_id)

    async def submit(self, submissions: Iterable[Submission]) -> None:
        submissions = list(submissions)
        for submission in submissions:
            self.live[submission.request_id] = submission
            for index in range(submission.sampling_params.n):
                key = (submission.request_id, index)
                self.results.setdefault(key, Result(may_repeat=True))
        loop = self.world.loop
        try:
            answers = await loop.submit(self.client_id, submissions)
            assert answers == [None] * len(submissions)
        except Exception:
            # A scheduler that died leaves it to the next one.
            if loop is self.world.loop:
                raise

    async def reconnect(self) -> None:
        epoch = self.world.loop.connect(self.client_id)
        if epoch != self.epoch:
            self.epoch = self.acked = epoch
        await self.submit(list(self.live.values()))

    async def poll(self) -> None:
        answer = await self.world.loop.poll(self.client_id, self.acked, 0.01)
        for delivery in answer.deliveries:
            if delivery.seq > self.acked:
                self.acked = delivery.seq
                self._take(delivery.delta)
        if answer.closed is not None:
            # A killed scheduler is followed by another one; what closed it otherwise is a fault.
            assert answer.closed.kind == StaleEpoch.__name__, answer.closed.message
            await asyncio.sleep(0.001)
        if answer.is_forgotten:
            await self.reconnect()

    def _take(self, delta: Any) -> None:
        self.results[delta.request_id, delta.index].take(delta)
        submission = self.live.get(delta.request_id)
        if submission is not None and all(
            self.results[delta.request_id, index].finish_reason is not None
            for index in range(submission.sampling_params.n)
        ):
            del self.live[delta.request_id]


@dataclass
class World:
    """An engine, whichever scheduler it has now, and the means to do it harm."""

    config: SchedulerConfig
    journal_path: Any
    rng: random.Random
    num_workers: int = 2
    num_blocks: int = 24
    workers: dict[str, Worker] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    num_restarts: int = 0
    _num_started: int = 0
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def block_bytes(self) -> int:
        return self.config.block_size * 8

    async def some_time(self) -> None:
        for _ in range(self.rng.randrange(LONGEST_DELAY)):
            await asyncio.sleep(0)

    async def start(self) -> None:
        self.store = Store(self, 60 * self.block_bytes)
        await self._start_scheduler()

    async def restart_scheduler(self) -> None:
        """The scheduler dies: nothing that it still does or hears matters any more."""
        self.num_restarts += 1
        for task in list(self._tasks):
            task.cancel()
        self.loop.close(StaleEpoch("it is dead"))
        self.journal.close()
        await self._start_scheduler()

    def heal(self) -> None:
        """End what is broken and has not been noticed, since nobody asks for anything any more."""
        if self.store.is_dead or self.store.is_frozen:
            self.store.start()
        for worker in self.workers.values():
            worker.is_dead |= worker.is_frozen

    async def _start_scheduler(self) -> None:
        self.epoch = self.num_restarts + 1
        self.journal = Journal(self.journal_path, result_ttl_s=1000.0, min_interval_s=0.001)
        self.state = SchedulerState(self.config)
        self.loop = SchedulerLoop(
            self.state,
            StoreHandle(self.store, self.epoch),
            journal=self.journal,
            client_grace_s=20.0,
            watch_interval_s=0.01,
            timeouts=TIMEOUTS,
            on_worker_lost=self._replace,
            on_worker_stopped=self._note_stop,
        )
        for worker_id in self.workers:
            self.loop.post(WorkerExpected(worker_id, self.num_blocks))
        self.loop.restore(self.journal.load())
        found = list(self.workers.values())
        self.loop.post(*(self._begin_worker() for _ in range(self.num_workers - len(found))))
        for worker in found:
            worker.reset(self.epoch)
            info = worker.runner.info()
            await self.loop.add_worker(WorkerHandle(worker, self.epoch), info)

    def _next_id(self) -> str:
        self._num_started += 1
        return f"w{self._num_started}"

    async def _start_worker(self, worker_id: str) -> None:
        worker = Worker(self, worker_id)
        worker.reset(self.epoch)
        await self.some_time()
        self.workers[worker_id] = worker
        await self.loop.add_worker(WorkerHandle(worker, self.epoch), worker.runner.info())

    def _replace(self, worker_id: str, reason: str) -> list[AnyEvent]:
        self.workers.pop(worker_id)
        return [self._begin_worker()]

    def _note_stop(self, worker_id: str) -> None:
        self.workers.pop(worker_id)
        self.stopped.append(worker_id)
        self.loop.post(self._begin_worker())

    def _begin_worker(self) -> WorkerExpected:
        worker_id = self._next_id()
        task = asyncio.ensure_future(self._start_worker(worker_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return WorkerExpected(worker_id, self.num_blocks)
