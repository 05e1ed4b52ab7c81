"""The scheduler as a Ray actor: the engine's front door, and what puts the engine together.

Rules:
- Everything that the engine is made of is in the `EngineSpec` that the actor is made with, so that
  a restart by Ray, which runs the constructor again, builds the engine again: it takes over the
  workers and the store that are there, and goes on with the requests of the journal.
- Every incarnation has an epoch of its own, and makes the workers serve that: what is still under
  way on behalf of an earlier one changes nothing any more.
- A new engine comes up whole, or leaves nothing behind and says why.
- An engine that ends, ends all its parts, this actor last.

Ray gives each concurrency group of an asyncio actor an event loop on a thread of its own. The
engine's loop is the default group's; the other groups only carry calls to it. So waiting polls,
however many, can't keep a control call from starting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
import ray

from scheduler.calls import ActorLost, Store, Timeouts, within
from scheduler.codec import decode, encode
from scheduler.config import SchedulerConfig
from scheduler.errors import (
    EngineUnavailable,
    HaversackError,
    InvalidConfig,
    InvalidRequest,
    StartupFailed,
)
from scheduler.fleet import Fleet
from scheduler.journal import Journal
from scheduler.lifetime import Tasks
from scheduler.loop import SchedulerLoop
from scheduler.messages import Submission, WorkerInfo
from scheduler.outbox import EngineInfo, EngineStats
from scheduler.restarts import RestartLimits
from scheduler.scaling import Scaling, ScalingLimits
from scheduler.state import SchedulerState
from scheduler.supervisor import Supervisor

logger = logging.getLogger(__name__)

CONCURRENCY_GROUPS = {"poll": 10_000, "control": 1_000}
"""Calls of each group that Ray starts at once."""

_FAREWELL_S = 0.3
"""How long nobody must have called before an ended engine's actor ends."""
_FAILED_START_S = 10.0
"""The same, after a start that failed: who asks is to hear why."""
_LONGEST_FAREWELL_S = 5.0
"""For how much longer it answers those who go on calling."""
_STORE_TIMEOUT_S = 60.0
_JOURNAL_TIMEOUT_S = 20.0
_JOURNAL_RETRY_S = 0.5
_PUBLISH_EVERY_S = 1.0

T = TypeVar("T")


class EngineStore(Store, Protocol):
    """The offload store, for the one who puts the engine together."""

    async def open(self) -> None:
        """Return once it answers; what is there is used as it is."""

    async def stats(self) -> dict[str, int] | None:
        """Return its counters; None where it does not answer."""


class EngineFleet(Fleet, Protocol):
    """Starts and ends the actors that the engine is made of."""

    def store(self, info: WorkerInfo, epoch: int) -> EngineStore | None:
        """Return the engine's store, not opened yet; None where it has none."""

    async def clear(self) -> None:
        """End every part of the engine but the scheduler, and forget what was remembered."""

    def end_this_scheduler(self) -> None:
        """End this actor for good."""


@dataclass(frozen=True)
class EngineSpec:
    """All that an engine is made of; it travels to the scheduler and has to stay small."""

    model: str
    """The model's name, for clients."""
    settings: dict[str, str | int | float | bool | None]
    """The engine's settings, for clients."""
    fleet: EngineFleet
    limits: Callable[[WorkerInfo], SchedulerConfig]
    """The core's settings for workers of this kind."""
    num_workers: int
    startup_timeout_s: float
    owner_client_id: str | None = None
    """The engine ends when this client has gone; None: it stays until it is shut down."""
    client_grace_s: float = 60.0
    journal_path: str | None = None
    result_ttl_s: float = 3600.0
    timeouts: Timeouts = field(default_factory=Timeouts)
    restarts: RestartLimits = field(default_factory=RestartLimits)
    publish: Callable[[EngineStats], None] | None = None
    """Tells the engine's counters to whoever watches; called once a second, on another thread."""
    scaling: ScalingLimits | None = None
    """Between how many workers the engine follows its load; None: it keeps `num_workers`."""


class SchedulerActor:
    """The methods of `SchedulerLoop`, callable through Ray; structs travel as msgpack.

    Calls wait until the engine is there. Where it did not come up they raise why, and once it is
    closed all but `poll` and `disconnect` raise `EngineUnavailable`.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Begin to build the engine, for the first time or again."""
        self._spec = spec
        self._main = asyncio.get_running_loop()
        self._tasks = Tasks(self._on_bug)
        self._epoch = time.time_ns()
        self._started_s = time.time()
        self._supervisor = Supervisor(
            spec.fleet,
            spec.num_workers,
            self._epoch,
            limits=spec.restarts,
            scaling=Scaling(spec.scaling) if spec.scaling is not None else None,
            patience_s=spec.startup_timeout_s,
            on_bug=self._on_bug,
        )
        self._limits = SchedulerConfig()
        self._journal: Journal | None = None
        self._store: EngineStore | None = None
        self._state: SchedulerState | None = None
        self._loop: SchedulerLoop | None = None
        self._failure: HaversackError | None = None
        """Why the engine did not come up."""
        self._is_built = asyncio.Event()
        """Set when there is a loop or a failure."""
        self._is_ending = False
        self._num_calls = 0
        """Those that have not been answered."""
        self._last_call_s = 0.0
        """When the latest one was answered (monotonic)."""
        self._tasks.spawn(self._begin())

    def __repr__(self) -> str:
        """Say who this is, in Ray's dashboard and logs."""
        return f"scheduler of {self._spec.settings.get('name')}: {self._spec.model}"

    # ------------------------------------------------------------------------- the engine's life

    async def _begin(self) -> None:
        try:
            await self._build()
        except Exception as error:
            logger.exception("the engine did not come up")
            self._failure = (
                error
                if isinstance(error, HaversackError)
                else StartupFailed(f"the engine can't be put together: {error!r}")
            )
        self._is_built.set()
        if self._failure is not None:
            await self._end(self._failure, _FAILED_START_S)

    async def _build(self) -> None:
        spec, supervisor = self._spec, self._supervisor
        info = await supervisor.recall()
        if spec.journal_path is not None:
            self._journal = await self._open_journal(
                spec.journal_path, _JOURNAL_TIMEOUT_S if info is not None else 0.0
            )
        if info is not None:
            await supervisor.take_over()
        else:
            await spec.fleet.clear()
            info = await self._first_start()
        self._limits = spec.limits(info)
        self._state = SchedulerState(self._limits)
        self._store = spec.fleet.store(info, supervisor.epoch)
        loop = SchedulerLoop(
            self._state,
            self._store,
            journal=self._journal,
            client_grace_s=spec.client_grace_s,
            timeouts=spec.timeouts,
            on_worker_lost=supervisor.worker_lost,
            on_worker_stopped=supervisor.worker_stopped,
            on_client_gone=self._on_client_gone,
        )
        requests = []
        if self._journal is not None:
            await asyncio.to_thread(self._journal.claim, self._limits.cache_namespace)
            requests = await asyncio.to_thread(self._journal.load)
        if self._store is not None:
            await self._open_store(self._store)
        loop.restore(requests)
        await supervisor.serve(loop)
        if spec.owner_client_id is not None:
            loop.expect(spec.owner_client_id)
        self._loop = loop
        self._tasks.spawn(self._end_when_closed(loop))
        if spec.publish is not None:
            self._tasks.spawn(self._publish(loop, spec.publish))

    async def _open_journal(self, path: str, timeout_s: float) -> Journal:
        """Open the journal, which a scheduler that was ended may hold until its process is gone.

        Raises:
            InvalidConfig: it can't be used, also not after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return await asyncio.to_thread(Journal, path, result_ttl_s=self._spec.result_ttl_s)
            except InvalidConfig as error:
                if time.monotonic() >= deadline_s:
                    raise
                logger.warning("the journal is opened again soon: %s", error)
                await asyncio.sleep(_JOURNAL_RETRY_S)

    async def _first_start(self) -> WorkerInfo:
        """Start all workers.

        Raises:
            StartupFailed: they did not come up in time, or died.
            HaversackError: one can't be started, and says why.
        """
        spec = self._spec
        try:
            return await asyncio.wait_for(self._supervisor.start_all(), spec.startup_timeout_s)
        except asyncio.TimeoutError:
            num_late = spec.num_workers - self._supervisor.num_ready()
            raise StartupFailed(
                f"{num_late} of {spec.num_workers} workers did not start within "
                f"{spec.startup_timeout_s:g} s. {await spec.fleet.shortage()}"
            ) from None

    async def _open_store(self, store: EngineStore) -> None:
        """Find or start the store; where that fails, the loop goes on trying."""
        try:
            await within(_STORE_TIMEOUT_S, store.open(), "the offload store")
        except ActorLost as error:
            logger.error("the engine has no offload store for now: %s", error)

    def _on_client_gone(self, client_id: str) -> None:
        if client_id == self._spec.owner_client_id:
            logger.warning("the client that started the engine has gone: the engine ends")
            reason = EngineUnavailable("the engine ended with the client that had started it")
            self._tasks.spawn(self._end(reason, _FAREWELL_S))

    def _on_bug(self, error: BaseException) -> None:
        logger.error("the engine ends because of a bug in it", exc_info=error)
        reason = EngineUnavailable(
            f"the engine stopped because of a bug in it: {error!r}; start it again, and report this"
        )
        self._tasks.spawn(self._end(reason, self._spec.client_grace_s))

    async def _end_when_closed(self, loop: SchedulerLoop) -> None:
        """End an engine that closed because of a bug, when clients have had time to hear of it."""
        await loop.closed()
        await asyncio.sleep(self._spec.client_grace_s)
        await self._end(EngineUnavailable("the engine was closed"), _FAREWELL_S)

    async def _publish(self, loop: SchedulerLoop, publish: Callable[[EngineStats], None]) -> None:
        """Tell the counters again and again; that nobody can be told is no reason to stop."""
        has_failed = False
        while not loop.is_closed:
            try:
                # A copy, since the loop goes on counting meanwhile.
                stats = encode(await self._engine_stats(loop))
                await asyncio.to_thread(lambda data: publish(decode(data, EngineStats)), stats)
                has_failed = False
            except Exception:
                if not has_failed and not loop.is_closed:
                    logger.exception("the engine's metrics could not be told")
                has_failed = True
            await asyncio.sleep(_PUBLISH_EVERY_S)

    async def _engine_stats(self, loop: SchedulerLoop) -> EngineStats:
        store = await self._store.stats() if self._store is not None else None
        return EngineStats(
            scheduler=loop.stats(),
            store=store,
            journal=loop.journal_stats(),
            timings=loop.timings(),
            workers=loop.worker_uses(),
            started_s=self._started_s,
        )

    async def _end(self, reason: HaversackError, farewell_s: float) -> None:
        """End the engine with all its parts; this actor ends `farewell_s` later."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._loop is not None:
            self._loop.close(reason)
        try:
            await self._supervisor.stop()
            if self._journal is not None:
                await asyncio.to_thread(self._journal.close)
            await self._spec.fleet.clear()
        except Exception:
            logger.exception("a part of the engine was not ended")
        self._tasks.spawn(self._leave(farewell_s))

    async def _leave(self, farewell_s: float) -> None:
        """End this actor when nobody has called for a while, and everybody has an answer."""
        self._last_call_s = began_s = time.monotonic()
        while (now_s := time.monotonic()) < began_s + farewell_s + _LONGEST_FAREWELL_S:
            if self._num_calls == 0 and now_s >= self._last_call_s + farewell_s:
                break
            await asyncio.sleep(farewell_s / 4)
        self._spec.fleet.end_this_scheduler()

    # ------------------------------------------------------------------------ what clients call

    @ray.method(concurrency_group="poll")
    async def ready(self) -> None:
        """Return once the engine is there.

        Raises:
            StartupFailed, ModelNotFound, UnsupportedModel, InvalidConfig: it did not come up.
        """

        async def nothing(loop: SchedulerLoop) -> None: ...

        await self._on_main(nothing)

    @ray.method(concurrency_group="control")
    async def connect(self, client_id: str) -> bytes:
        """Open an outbox for a client, or keep the one that is there; return an `EngineInfo`."""

        async def connect(loop: SchedulerLoop) -> EngineInfo:
            epoch = loop.connect(client_id)
            return EngineInfo(
                self._spec.model, self._spec.settings, self._limits, loop.worker_infos(), epoch
            )

        return encode(await self._on_main(connect))

    @ray.method(concurrency_group="control")
    async def disconnect(self, client_id: str) -> None:
        """Cancel what the client has under way and forget it."""
        await self._on_main(lambda loop: loop.disconnect(client_id))

    @ray.method(concurrency_group="control")
    async def submit(self, client_id: str, submissions: bytes) -> bytes:
        """Take a list of `Submission`; return for each a `WireError`, or None where it is taken.

        What is live already with the same content is taken once more, and its client is told all
        that is visible of it and all that follows. With a journal the answer comes when they are
        written there.

        Raises:
            InvalidRequest: the message is no list of submissions.
            UnknownClient: the client is not connected.
        """
        try:
            decoded = decode(submissions, list[Submission])
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"the message holds no valid submissions: {error}") from None
        return encode(await self._on_main(lambda loop: loop.submit(client_id, decoded)))

    @ray.method(concurrency_group="control")
    async def attach(self, client_id: str, request_id: str) -> bytes:
        """Tell a client all that is visible of a submission, or of its result, and what follows.

        Returns:
            the `Submission`.

        Raises:
            UnknownClient: it is not connected.
            UnknownRequest: no live submission and no kept result has this id.
        """
        return encode(await self._on_main(lambda loop: loop.attach(client_id, request_id)))

    @ray.method(concurrency_group="poll")
    async def poll(self, client_id: str, acked: int, timeout_s: float) -> bytes:
        """Return a `PollAnswer`: deltas numbered above `acked`, or none after `timeout_s`.

        A client has one poll under way; a second one sends the first home.
        """
        return encode(await self._on_main(lambda loop: loop.poll(client_id, acked, timeout_s)))

    @ray.method(concurrency_group="control")
    async def cancel(self, request_ids: list[str]) -> None:
        """Cancel requests; unknown ids are ignored."""
        await self._on_main(lambda loop: loop.cancel(request_ids))

    @ray.method(concurrency_group="control")
    async def evict(self, request_ids: list[str]) -> None:
        """Evict requests from their workers; unknown and waiting ones are ignored."""
        await self._on_main(lambda loop: loop.evict(request_ids))

    @ray.method(concurrency_group="control")
    async def migrate(self, request_id: str, worker_id: str) -> None:
        """Move a request to a worker while it goes on.

        Raises:
            UnknownRequest, UnknownWorker, CannotMigrate: it can't be; nothing has changed.
        """
        await self._on_main(lambda loop: loop.migrate(request_id, worker_id))

    @ray.method(concurrency_group="poll")
    async def drain(self, worker_id: str, deadline_s: float, replace: bool = False) -> None:
        """Move a worker's requests away, end it, and return then.

        Args:
            deadline_s: seconds from now; what is still there then is evicted.
            replace: whether another worker is started in its place, at once.

        Raises:
            UnknownWorker: no worker has this id.
        """

        async def drain(loop: SchedulerLoop) -> None:
            self._supervisor.expect_drain(worker_id, replace=replace)
            await loop.drain(worker_id, deadline_s)

        await self._on_main(drain)

    @ray.method(concurrency_group="control")
    async def stats(self) -> bytes:
        """Return an `EngineStats`."""
        return encode(await self._on_main(self._engine_stats))

    @ray.method(concurrency_group="control")
    async def requests(self) -> bytes:
        """Return a list of `RequestInfo`, in order of service."""

        async def ask(loop: SchedulerLoop) -> bytes:
            return encode(loop.request_infos())

        return await self._on_main(ask)

    @ray.method(concurrency_group="control")
    async def lives(self, max_live: int, max_ended: int) -> bytes:
        """Return a `Lives`; see `SchedulerState.lives`."""

        async def ask(loop: SchedulerLoop) -> bytes:
            return encode(loop.lives(max_live, max_ended))

        return await self._on_main(ask)

    @ray.method(concurrency_group="control")
    async def workers(self) -> bytes:
        """Return a list of `WorkerReport`."""

        async def ask(loop: SchedulerLoop) -> bytes:
            return encode(loop.worker_reports())

        return await self._on_main(ask)

    @ray.method(concurrency_group="control")
    async def shutdown(self) -> None:
        """End the engine: every client is told, and nothing of it is left soon after this."""

        async def end(loop: SchedulerLoop) -> None:
            reason = EngineUnavailable("the engine was shut down: start it again")
            await self._end(reason, _FAREWELL_S)

        await self._on_main(end)

    async def _on_main(self, work: Callable[[SchedulerLoop], Awaitable[T]]) -> T:
        """Do `work` on the engine's loop, whichever loop this is called on."""

        async def run() -> T:
            self._num_calls += 1
            try:
                await self._is_built.wait()
                if self._failure is not None:
                    raise self._failure
                assert self._loop is not None
                return await work(self._loop)
            finally:
                self._num_calls -= 1
                self._last_call_s = time.monotonic()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._main))
