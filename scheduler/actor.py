"""The scheduler as a Ray actor: the engine's front door.

Ray gives each concurrency group of an asyncio actor an event loop on a thread of its own. The
engine's loop is the default group's; the other groups only carry calls to it. So waiting polls,
however many, can't keep a control call from starting. All that is known of Ray's errors is here:
what means that a method failed, and what means that an actor is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from scheduler.codec import decode, encode
from scheduler.config import SchedulerConfig
from scheduler.errors import EngineUnavailable, HaversackError, InvalidRequest, RequestFailed
from scheduler.loop import CLIENT_GRACE_S, ActorLost, CallFailed, SchedulerLoop
from scheduler.messages import (
    LoadBlocks,
    LookupBlocks,
    ReleaseBlocks,
    SaveBlocks,
    Submission,
    WorkerInfo,
)
from scheduler.outbox import EngineInfo, EngineStats
from scheduler.state import SchedulerState

logger = logging.getLogger(__name__)

CONCURRENCY_GROUPS = {"poll": 10_000, "control": 1_000}
"""Calls of each group that Ray starts at once; `cluster.launch` hands them to Ray."""

_STORE_STATS_TIMEOUT_S = 5.0

T = TypeVar("T")


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


async def _call(who: str, answer: Awaitable[T]) -> T:
    """Await a call to another actor.

    Raises:
        CallFailed: its method raised.
        ActorLost: it is dead, can't be reached, or its answer is lost.
    """
    try:
        return await answer
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HaversackError):
            raise CallFailed(cause) from None
        logger.warning("%s raised: %s", who, error)
        raise CallFailed(RequestFailed(f"{who} failed: {_last_line(error)}")) from None
    except RayError as error:
        raise ActorLost(f"{who}: {_last_line(error)}") from None


class RemoteWorker:
    """A `scheduler.loop.Worker` behind the handle of a `WorkerActor`."""

    def __init__(self, worker_id: str, handle: Any) -> None:
        self.handle = handle
        self._name = f"worker {worker_id}"

    async def execute(self, message: bytes) -> bytes:
        answer: bytes = await _call(self._name, self.handle.execute.remote(message))
        return answer

    async def ping(self) -> None:
        await _call(self._name, self.handle.ping.remote())

    def kill(self) -> None:
        with contextlib.suppress(Exception):
            ray.kill(self.handle)


class RemoteStore:
    """A `scheduler.loop.Store` behind the handle of an `OffloadStoreActor`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def lookup(self, action: LookupBlocks) -> int:
        answer = self._handle.lookup.remote(
            action.request_id,
            action.block_hashes,
            action.num_readable_tokens,
            action.num_own_tokens,
            action.skip_reading_prefix_cache,
        )
        return int(await _call("the offload store", answer))

    async def load(self, action: LoadBlocks, worker: Any) -> int:
        answer = self._handle.load.remote(
            action.request_id, worker.handle, action.block_hashes, action.block_ids
        )
        return int(await _call("the offload store", answer))

    async def save(self, action: SaveBlocks, worker: Any) -> tuple[int, int]:
        answer = self._handle.save.remote(
            action.request_id,
            worker.handle,
            action.block_hashes,
            action.block_ids,
            action.owned,
            action.replace,
        )
        num_saved, num_copied = await _call("the offload store", answer)
        return int(num_saved), int(num_copied)

    async def release(self, action: ReleaseBlocks) -> None:
        answer = self._handle.release.remote(action.request_id, action.forget)
        await _call("the offload store", answer)

    async def stats(self) -> dict[str, int] | None:
        """Return its counters; None where it does not answer in time."""
        answer = _call("the offload store", self._handle.stats.remote())
        try:
            return dict(await asyncio.wait_for(answer, _STORE_STATS_TIMEOUT_S))
        except (CallFailed, ActorLost, asyncio.TimeoutError):
            return None


class SchedulerActor:
    """The methods of `SchedulerLoop`, callable through Ray; structs travel as msgpack.

    Calls wait until the engine has been started. All but `poll` and `disconnect` raise
    `EngineUnavailable` once it is closed.
    """

    def __init__(self, model: str, settings: dict[str, str | int | float | bool | None]) -> None:
        """Wait for `start`.

        Args:
            model: the model's name, for clients.
            settings: the engine's settings, for clients.
        """
        self._model = model
        self._settings = settings
        self._limits = SchedulerConfig()
        self._store: RemoteStore | None = None
        self._scheduler: SchedulerLoop | None = None
        self._main = asyncio.get_running_loop()
        self._started = asyncio.Event()
        self._has_worker = asyncio.Event()

    async def start(
        self, limits: bytes, store: Any, client_grace_s: float = CLIENT_GRACE_S
    ) -> None:
        """Begin; called once.

        Args:
            limits: a `SchedulerConfig`.
            store: handle of the offload store, or None.
            client_grace_s: a client that has not polled for so long is given up.
        """
        self._limits = decode(limits, SchedulerConfig)
        self._store = RemoteStore(store) if store is not None else None
        self._scheduler = SchedulerLoop(
            SchedulerState(self._limits), self._store, client_grace_s=client_grace_s
        )
        self._started.set()

    @ray.method(concurrency_group="control")
    async def add_worker(self, handle: Any, info: bytes) -> None:
        """Take in a worker that said `info`, a `WorkerInfo`, about itself."""
        decoded = decode(info, WorkerInfo)
        worker = RemoteWorker(decoded.worker_id, handle)

        async def add(scheduler: SchedulerLoop) -> None:
            await scheduler.add_worker(worker, decoded)
            self._has_worker.set()

        await self._on_main(add)

    @ray.method(concurrency_group="poll")
    async def ready(self) -> None:
        """Return once there is a worker."""

        async def wait(scheduler: SchedulerLoop) -> None:
            await self._has_worker.wait()

        await self._on_main(wait)

    @ray.method(concurrency_group="control")
    async def connect(self, client_id: str) -> bytes:
        """Open an outbox for a client and return an `EngineInfo`."""

        async def connect(scheduler: SchedulerLoop) -> EngineInfo:
            scheduler.connect(client_id)
            return EngineInfo(self._model, self._settings, self._limits, scheduler.worker_infos())

        return encode(await self._on_main(connect))

    @ray.method(concurrency_group="control")
    async def disconnect(self, client_id: str) -> None:
        """Cancel what the client has under way and forget it."""
        await self._on_main(lambda scheduler: scheduler.disconnect(client_id))

    @ray.method(concurrency_group="control")
    async def submit(self, client_id: str, submissions: bytes) -> bytes:
        """Take a list of `Submission`; return for each a `WireError`, or None where it is taken.

        Raises:
            InvalidRequest: the message is no list of submissions, or the client is not connected.
        """
        try:
            decoded = decode(submissions, list[Submission])
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"the message holds no valid submissions: {error}") from None
        return encode(await self._on_main(lambda scheduler: scheduler.submit(client_id, decoded)))

    @ray.method(concurrency_group="poll")
    async def poll(self, client_id: str, acked: int, timeout_s: float) -> bytes:
        """Return a `PollAnswer`: deltas numbered above `acked`, or none after `timeout_s`.

        A client has one poll under way; a second one sends the first home.
        """
        return encode(
            await self._on_main(lambda scheduler: scheduler.poll(client_id, acked, timeout_s))
        )

    @ray.method(concurrency_group="control")
    async def cancel(self, request_ids: list[str]) -> None:
        """Cancel requests; unknown ids are ignored."""
        await self._on_main(lambda scheduler: scheduler.cancel(request_ids))

    @ray.method(concurrency_group="control")
    async def evict(self, request_ids: list[str]) -> None:
        """Evict requests from their workers; unknown and waiting ones are ignored."""
        await self._on_main(lambda scheduler: scheduler.evict(request_ids))

    @ray.method(concurrency_group="control")
    async def stats(self) -> bytes:
        """Return an `EngineStats`."""

        async def ask(scheduler: SchedulerLoop) -> EngineStats:
            store = await self._store.stats() if self._store is not None else None
            return EngineStats(scheduler.stats(), store)

        return encode(await self._on_main(ask))

    @ray.method(concurrency_group="control")
    async def requests(self) -> bytes:
        """Return a list of `RequestInfo`, in order of service."""

        async def ask(scheduler: SchedulerLoop) -> bytes:
            return encode(scheduler.request_infos())

        return await self._on_main(ask)

    @ray.method(concurrency_group="control")
    async def shutdown(self) -> None:
        """Close the engine: nothing more is taken in, and every client is told."""

        async def close(scheduler: SchedulerLoop) -> None:
            scheduler.close(EngineUnavailable("the engine was shut down: start it again"))

        await self._on_main(close)

    async def _on_main(self, work: Callable[[SchedulerLoop], Awaitable[T]]) -> T:
        """Do `work` on the engine's loop, whichever loop this is called on."""

        async def run() -> T:
            await self._started.wait()
            if self._scheduler is None:
                raise EngineUnavailable("the engine has not been started")
            return await work(self._scheduler)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._main))
