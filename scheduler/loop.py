"""The engine's event loop: performs the core's actions and turns every outcome into an event.

Rules:
- A `SchedulerLoop` and the core inside it are used on one asyncio loop only.
- `SchedulerState.handle` is called from one place. Events that arrive in one turn of the loop go in
  together, and actions are performed after it has returned, never inside.
- Every action that has an outcome brings exactly one event, also where an actor is dead.
- A fault in the core or in here is a bug of the engine, never of a request: it closes the engine,
  and every client is told, rather than leaving anybody waiting.
The module decides nothing, and knows no Ray: workers and store are behind the two protocols, which
`scheduler.actor` fulfils.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import traceback
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

import msgspec

from scheduler.codec import decode, encode
from scheduler.errors import (
    EngineUnavailable,
    HaversackError,
    InvalidConfig,
    InvalidRequest,
    RequestFailed,
    WireError,
    from_wire,
)
from scheduler.messages import (
    AnyAction,
    AnyEvent,
    BatchDone,
    BatchFailed,
    Emit,
    EvictRequested,
    LoadBlocks,
    LoadDone,
    LoadFailed,
    LookupBlocks,
    LookupDone,
    ModelRunnerOutput,
    Refuse,
    ReleaseBlocks,
    RequestCancelled,
    RequestInfo,
    RequestSubmitted,
    RunBatch,
    SaveBlocks,
    SaveDone,
    SaveFailed,
    SchedulerStats,
    Submission,
    WorkerInfo,
    WorkerJoined,
    WorkerLost,
)
from scheduler.outbox import Outbox, PollAnswer
from scheduler.state import SchedulerState

logger = logging.getLogger(__name__)

CLIENT_GRACE_S = 60.0
WATCH_INTERVAL_S = 5.0


class CallFailed(Exception):
    """An actor's method raised; the actor lives. `error` is what clients may be told."""

    def __init__(self, error: HaversackError) -> None:
        super().__init__(error.message)
        self.error = error


class ActorLost(Exception):
    """An actor died or can't be reached: it may or may not have done what it was asked."""


class Worker(Protocol):
    """A worker. Its calls raise `CallFailed` or `ActorLost`."""

    async def execute(self, message: bytes) -> bytes:
        """Run a `SchedulerOutput` and return a `ModelRunnerOutput`."""

    async def ping(self) -> None: ...

    def kill(self) -> None:
        """End it, if it is still there."""


class Store(Protocol):
    """The offload store. Its calls raise `CallFailed` or `ActorLost`."""

    async def lookup(self, action: LookupBlocks) -> int:
        """Return how many leading tokens it can supply."""

    async def load(self, action: LoadBlocks, worker: Worker) -> int:
        """Return how many leading blocks were written."""

    async def save(self, action: SaveBlocks, worker: Worker) -> tuple[int, int]:
        """Return how many leading blocks it holds, and how many were copied."""

    async def release(self, action: ReleaseBlocks) -> None: ...


class SchedulerLoop:
    """The core, the handles of those who act for it, and the clients' outboxes."""

    def __init__(
        self,
        state: SchedulerState,
        store: Store | None = None,
        *,
        client_grace_s: float = CLIENT_GRACE_S,
        watch_interval_s: float | None = None,
    ) -> None:
        """Start on the running event loop.

        Args:
            store: the offload store; None where there is none.
            client_grace_s: a client that has not polled for so long is given up.
            watch_interval_s: how often workers are pinged and clients looked at; None is
                `WATCH_INTERVAL_S`, or less where the grace is short.
        """
        self._state = state
        self._store = store
        self._grace_s = client_grace_s
        self._workers: dict[str, Worker] = {}
        self._worker_infos: dict[str, WorkerInfo] = {}
        self._pinged: set[str] = set()
        self._outboxes: dict[str, Outbox] = {}
        self._polls: dict[str, asyncio.Future[None]] = {}
        self._inbox: list[AnyEvent] = []
        self._handled: asyncio.Future[None] | None = None
        """Done when what is in the inbox now has been handled; None while the inbox is empty."""
        self._refused: dict[int, WireError] = {}
        self._tickets = itertools.count(1)
        self._closed: WireError | None = None
        self._store_turns: dict[str, asyncio.Future[None]] = {}
        """The latest call to the store about a request; done when it is answered."""
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        if watch_interval_s is None:
            watch_interval_s = min(WATCH_INTERVAL_S, client_grace_s / 2)
        self._spawn(self._watch(watch_interval_s))

    # ------------------------------------------------------------------------ what clients ask

    def connect(self, client_id: str) -> None:
        """Open an outbox, or keep the one that is there."""
        self._check_open()
        self._outboxes.setdefault(client_id, Outbox(time.monotonic()))

    async def disconnect(self, client_id: str) -> None:
        """Cancel what the client still has under way and forget it."""
        if self._outboxes.pop(client_id, None) is None:
            return
        self._wake(client_id)
        now_s = time.monotonic()
        mine = [i for i in self._state.request_infos(now_s) if i.client_id == client_id]
        await self.handle(*(RequestCancelled(info.request_id, time_s=now_s) for info in mine))

    async def submit(self, client_id: str, submissions: list[Submission]) -> list[WireError | None]:
        """Return for each submission why it was refused, or None."""
        self._check_open()
        if client_id not in self._outboxes:
            raise InvalidRequest(f"no client {client_id!r} is connected: connect first")
        now_s = time.monotonic()
        events = [
            RequestSubmitted(submission, client_id, next(self._tickets), time_s=now_s)
            for submission in submissions
        ]
        await self.handle(*events)
        refusals = [self._refused.pop(event.ticket, None) for event in events]
        self._check_open()
        return refusals

    async def poll(self, client_id: str, acked: int, timeout_s: float) -> PollAnswer:
        """Return deltas numbered above `acked`; wait for one at most `timeout_s`."""
        outbox = self._outboxes.get(client_id)
        if outbox is None:
            return PollAnswer(closed=self._closed, is_forgotten=self._closed is None)
        outbox.acknowledge(acked)
        outbox.last_seen_s = time.monotonic()
        self._wake(client_id)
        if not outbox and self._closed is None:
            arrival = self._polls[client_id] = self._loop.create_future()
            await asyncio.wait([arrival], timeout=timeout_s)
            if self._polls.get(client_id) is arrival:
                del self._polls[client_id]
            outbox.last_seen_s = time.monotonic()
        return PollAnswer(outbox.ready(), self._closed)

    async def cancel(self, request_ids: list[str]) -> None:
        now_s = time.monotonic()
        await self.handle(*(RequestCancelled(r, time_s=now_s) for r in request_ids))

    async def evict(self, request_ids: list[str]) -> None:
        now_s = time.monotonic()
        await self.handle(*(EvictRequested(r, time_s=now_s) for r in request_ids))

    async def add_worker(self, worker: Worker, info: WorkerInfo) -> None:
        """Take in a worker.

        Raises:
            InvalidConfig: its name is taken, or its KV blocks are not interchangeable with the
                others'.
        """
        self._check_open()
        if info.worker_id in self._worker_infos:
            raise InvalidConfig(f"a worker is called {info.worker_id!r} already")
        for other in self._worker_infos.values():
            if (other.model_fingerprint, other.block_size) != (
                info.model_fingerprint,
                info.block_size,
            ):
                raise InvalidConfig(
                    f"worker {info.worker_id} computes {info.model_fingerprint} in blocks of "
                    f"{info.block_size} tokens, {other.worker_id} {other.model_fingerprint} in "
                    f"blocks of {other.block_size}: workers of one engine must be alike"
                )
        self._workers[info.worker_id] = worker
        self._worker_infos[info.worker_id] = info
        await self.handle(WorkerJoined(info, time_s=time.monotonic()))
        self._check_open()

    def worker_infos(self) -> list[WorkerInfo]:
        """Return the workers that are not lost."""
        return list(self._worker_infos.values())

    def stats(self) -> SchedulerStats:
        self._check_open()
        return self._state.stats()

    def request_infos(self) -> list[RequestInfo]:
        self._check_open()
        return self._state.request_infos(time.monotonic())

    def close(self, reason: HaversackError) -> None:
        """Take nothing more in and tell every client why; the first reason stays."""
        if self._closed is None:
            self._closed = reason.to_wire()
            for client_id in list(self._polls):
                self._wake(client_id)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise from_wire(self._closed)

    def _wake(self, client_id: str) -> None:
        arrival = self._polls.pop(client_id, None)
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    # --------------------------------------------------------------------- events and actions

    async def handle(self, *events: AnyEvent) -> None:
        """Give events to the core and return when it has handled them."""
        if events and self._closed is None:
            self._post(*events)
            if self._handled is not None:
                await asyncio.shield(self._handled)

    def _post(self, *events: AnyEvent) -> None:
        self._inbox.extend(events)
        if self._handled is None:
            self._handled = self._loop.create_future()
            self._loop.call_soon(self._handle_inbox)

    def _handle_inbox(self) -> None:
        events, self._inbox = self._inbox, []
        handled, self._handled = self._handled, None
        try:
            if self._closed is None:
                for action in self._state.handle(*events):
                    self._perform(action)
        except Exception as error:
            self._fail(error)
        finally:
            if handled is not None and not handled.done():
                handled.set_result(None)

    def _perform(self, action: AnyAction) -> None:
        match action:
            case RunBatch():
                self._spawn(self._run_batch(action, self._workers[action.worker_id]))
            case Emit(client_id=client_id, delta=delta):
                outbox = self._outboxes.get(client_id)
                if outbox is not None:
                    outbox.put(delta)
                    self._wake(client_id)
            case Refuse(ticket=ticket, error=error):
                self._refused[ticket] = error
            case LookupBlocks():
                self._spawn(self._lookup(action))
            case LoadBlocks():
                self._spawn(self._load(action, self._workers[action.worker_id]))
            case SaveBlocks():
                self._spawn(self._save(action, self._workers[action.worker_id]))
            case ReleaseBlocks():
                self._spawn(self._release(action))

    async def _run_batch(self, action: RunBatch, worker: Worker) -> None:
        worker_id, step_id = action.worker_id, action.output.step_id
        try:
            answer = await worker.execute(encode(action.output))
            event: AnyEvent = BatchDone(
                worker_id, decode(answer, ModelRunnerOutput), time_s=time.monotonic()
            )
        except ActorLost as error:
            self._lose(worker_id, error)
            return
        except (CallFailed, msgspec.MsgspecError) as error:
            logger.warning("step %d of worker %s failed: %s", step_id, worker_id, error)
            failure = (
                error.error
                if isinstance(error, CallFailed)
                else RequestFailed(f"worker {worker_id} gave an answer that can't be read: {error}")
            )
            event = BatchFailed(worker_id, step_id, failure.to_wire(), time_s=time.monotonic())
        if worker_id in self._workers:
            self._post(event)

    async def _lookup(self, action: LookupBlocks) -> None:
        num_hit_tokens = 0
        try:
            async with self._store_turn(action.request_id) as store:
                num_hit_tokens = await store.lookup(action)
        except (CallFailed, ActorLost) as error:
            logger.warning("lookup for %s failed: %s", action.request_id, error)
        self._post(LookupDone(action.op_id, num_hit_tokens, time_s=time.monotonic()))

    async def _load(self, action: LoadBlocks, worker: Worker) -> None:
        event: AnyEvent
        try:
            async with self._store_turn(action.request_id) as store:
                num_loaded = await store.load(action, worker)
            event = LoadDone(action.op_id, num_loaded, time_s=time.monotonic())
        except (CallFailed, ActorLost) as error:
            logger.warning("load for %s failed: %s", action.request_id, error)
            event = LoadFailed(action.op_id, str(error), time_s=time.monotonic())
        self._post(event)

    async def _save(self, action: SaveBlocks, worker: Worker) -> None:
        event: AnyEvent
        try:
            async with self._store_turn(action.request_id) as store:
                num_saved, num_copied = await store.save(action, worker)
            event = SaveDone(action.op_id, num_saved, num_copied, time_s=time.monotonic())
        except (CallFailed, ActorLost) as error:
            logger.warning("save of %s failed: %s", action.request_id, error)
            event = SaveFailed(action.op_id, str(error), time_s=time.monotonic())
        self._post(event)

    async def _release(self, action: ReleaseBlocks) -> None:
        try:
            async with self._store_turn(action.request_id) as store:
                await store.release(action)
        except (CallFailed, ActorLost) as error:
            logger.warning("release of %s failed: %s", action.request_id, error)

    @contextlib.asynccontextmanager
    async def _store_turn(self, request_id: str) -> AsyncIterator[Store]:
        """Wait until the store has answered every earlier call about the request.

        Calls under way may overtake each other on their way to an actor. A release that overtook
        the save before it would leave blocks that nobody ever gives back.
        """
        if self._store is None:
            raise ActorLost("this engine has no offload store")
        earlier = self._store_turns.get(request_id)
        mine = self._store_turns[request_id] = self._loop.create_future()
        try:
            if earlier is not None:
                await earlier
            yield self._store
        finally:
            mine.set_result(None)
            if self._store_turns.get(request_id) is mine:
                del self._store_turns[request_id]

    # ------------------------------------------------------------------------------ what fails

    def _lose(self, worker_id: str, error: ActorLost) -> None:
        """Report a worker lost, once, and make sure that it is."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        del self._worker_infos[worker_id]
        logger.warning("worker %s is lost: %s", worker_id, error)
        worker.kill()
        self._post(WorkerLost(worker_id, str(error), time_s=time.monotonic()))

    def _fail(self, error: BaseException) -> None:
        story = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        logger.error("the scheduler stops because of a bug: %s", story)
        self.close(
            EngineUnavailable(
                f"the engine stopped because of a bug in it: {type(error).__name__}: {error}; "
                f"start it again, and report this:\n{story}"
            )
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _watch(self, interval_s: float) -> None:
        """Find workers that died while idle and clients that have gone."""
        while self._closed is None:
            await asyncio.sleep(interval_s)
            for worker_id, worker in self._workers.items():
                if worker_id not in self._pinged:
                    self._pinged.add(worker_id)
                    self._spawn(self._ping(worker_id, worker))
            horizon_s = time.monotonic() - self._grace_s
            for client_id, outbox in list(self._outboxes.items()):
                if client_id not in self._polls and outbox.last_seen_s < horizon_s:
                    logger.warning("client %s has not polled for long: given up", client_id)
                    await self.disconnect(client_id)

    async def _ping(self, worker_id: str, worker: Worker) -> None:
        try:
            await worker.ping()
        except CallFailed:
            pass  # it answered, which is all that was asked
        except ActorLost as error:
            self._lose(worker_id, error)
        finally:
            self._pinged.discard(worker_id)
