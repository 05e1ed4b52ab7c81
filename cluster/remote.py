"""Workers and the offload store behind the handles of their actors.

All that is known of Ray's errors is here: what means that a method failed, and what means that an
actor is lost. Seen of Ray 2.60: `ray.kill` takes an actor out of the cluster's books at once, so
that calls fail and its name is free, and ends its process within 5 s also where that is frozen.
No call in here blocks an event loop: those of Ray's that block run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from scheduler.actions import LoadBlocks, LookupBlocks, ReleaseBlocks, SaveBlocks
from scheduler.calls import ActorLost, CallFailed, within
from scheduler.errors import HaversackError, RequestFailed

logger = logging.getLogger(__name__)

_MAX_BLOCKED_THREADS = 32
_STORE_STATS_TIMEOUT_S = 5.0
_STORE_PATIENCE_S = 5.0
"""How long a call may take before the store is asked whether it is there at all."""
_STORE_PING_TIMEOUT_S = 10.0
"""For a store that has been up: past it, it hangs."""
_STORE_START_TIMEOUT_S = 30.0
_STORE_RETRY_S = 0.1
_STORE_END_S = 10.0
"""In which a store that was ended no longer answers."""

T = TypeVar("T")

_threads = ThreadPoolExecutor(_MAX_BLOCKED_THREADS, thread_name_prefix="ray-calls")


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """Run a call that blocks, with the event loop free meanwhile."""
    return await asyncio.get_running_loop().run_in_executor(_threads, call, *args)


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


async def call(who: str, answer: Awaitable[T]) -> T:
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
    """A `scheduler.fleet.FleetWorker` behind the handle of a `WorkerActor`."""

    def __init__(
        self, worker_id: str, handle: Any, epoch: int, give_back: Callable[[], None]
    ) -> None:
        """Call the worker as the scheduler of `epoch`.

        Args:
            worker_id: the worker's name in messages.
            handle: of its actor.
            epoch: see `workers.actor`.
            give_back: gives back what was reserved for it beside its actor; may block.
        """
        self.handle = handle
        self.epoch = epoch
        self.node_id = ""
        """Where it is, once it has said so."""
        self._give_back = give_back
        self.num_steps_begun = 0
        self.num_steps_done = 0
        self._name = f"worker {worker_id}"

    async def reset(self) -> bytes:
        """Have it serve the epoch; return its encoded `WorkerInfo`."""
        return bytes(await call(self._name, self.handle.reset.remote(self.epoch)))

    async def execute(self, message: bytes) -> bytes:
        self.num_steps_begun += 1
        try:
            answer = await call(self._name, self.handle.execute.remote(self.epoch, message))
        except CallFailed:
            self.num_steps_done += 1
            raise
        self.num_steps_done += 1
        return bytes(answer)

    async def copy_blocks(
        self, block_ids: list[int], target: Any, target_block_ids: list[int]
    ) -> int:
        data, count = self.handle.read_blocks.remote(self.epoch, block_ids)
        # The number comes with the array, and only the number comes here.
        await call(self._name, count)
        rows = [(0, row) for row in range(len(block_ids))]
        written = target.handle.write_blocks.remote(target.epoch, target_block_ids, [data], rows)
        return int(await call(target._name, written))

    async def settle(self) -> None:
        await call(self._name, self.handle.write_blocks.remote(self.epoch, [], [], []))

    async def ping(self) -> None:
        await call(self._name, self.handle.ping.remote())

    def kill(self) -> None:
        _threads.submit(_kill, self.handle, True)
        _threads.submit(self._give_back)


def _kill(handle: Any, no_restart: bool) -> None:
    with contextlib.suppress(Exception):
        ray.kill(handle, no_restart=no_restart)


class RemoteStore:
    """A `scheduler.calls.Store` behind the handle of an `OffloadStoreActor`."""

    def __init__(self, epoch: int, find_or_start: Callable[[], tuple[Any, bool]]) -> None:
        """Know nothing of it yet: until `open` or `restart` has ended, it is lost.

        Args:
            epoch: of the calling scheduler.
            find_or_start: returns the actor's handle, and whether it is a new one; may block.
        """
        self._epoch = epoch
        self._find_or_start = find_or_start
        self._handle: Any = None
        self._incarnation: str | None = None
        """Of the store that is called; None before the first."""
        self._is_starting = False
        """Whether a new one was asked for that has not answered yet."""
        self._must_be_new = False
        """Whether what is there is no good, whichever it is."""
        self._search: asyncio.Future[None] | None = None
        """Goes on where those who wait for it are cancelled."""
        self._name = "the offload store"

    async def open(self) -> None:
        """Return once the store answers; one that is there is used as it is."""
        await self._found()

    async def restart(self) -> None:
        """End the store that is there; return once another, empty one answers.

        A store that died by itself has been restarted by Ray, and is not ended once more. What was
        begun goes on where this is cancelled, and the next call waits for that: a store that
        hangs is ended however briefly each caller waits.
        """
        self._must_be_new = True
        await self._found()

    async def _found(self) -> None:
        """Wait for the search that is under way, or begin one."""
        if self._search is None:
            self._search = asyncio.ensure_future(self._find_one())
        try:
            await asyncio.shield(self._search)
        except Exception:
            self._search = None
            raise
        self._search = None

    async def _find_one(self) -> None:
        """Return once there is a store that will do."""
        ended_s: float | None = None
        while True:
            found = await self._answering()
            if self._incarnation is None and not self._is_starting and self._must_be_new:
                self._incarnation = found  # nobody knows what it holds
            if found != self._incarnation:
                self._incarnation, self._is_starting = found, False
                return
            # Ending it may have come to nothing: then it is there as before, and ended again.
            if ended_s is None or time.monotonic() - ended_s > _STORE_END_S:
                await self._end()
                ended_s = time.monotonic()
            await asyncio.sleep(_STORE_RETRY_S)

    async def _answering(self) -> str:
        """Return which incarnation of the store is there, when it answers; end one that hangs."""
        while True:
            try:
                return await self._find()
            except asyncio.TimeoutError:
                logger.warning("%s does not answer a ping: it is ended", self._name)
                await self._end()
            except (ActorLost, CallFailed, RayError, ValueError) as error:
                logger.info("waiting for %s: %s", self._name, error)
                await asyncio.sleep(_STORE_RETRY_S)

    async def _find(self) -> str:
        """Return which incarnation of the store answers now."""
        self._handle, is_new = await in_thread(self._find_or_start)
        self._is_starting |= is_new
        timeout_s = _STORE_START_TIMEOUT_S if self._is_starting else _STORE_PING_TIMEOUT_S
        asked = call(self._name, self._handle.serve.remote(self._epoch))
        return await asyncio.wait_for(asked, timeout_s)

    async def _end(self) -> None:
        await in_thread(_kill, self._handle, False)
        self._is_starting = True

    async def _call(self, method: str, *args: Any) -> Any:
        """Call the store; one that meanwhile does not answer a ping is frozen, and so lost."""
        handle = self._handle
        if self._incarnation is None or handle is None:
            raise ActorLost(f"{self._name} has not been found yet")
        answer = call(self._name, getattr(handle, method).remote(*args))
        pending = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait([pending], timeout=_STORE_PATIENCE_S))[0]:
                ping = call(self._name, handle.ping.remote())
                await within(_STORE_PING_TIMEOUT_S, ping, f"{self._name}, pinged,")
            return pending.result()
        finally:
            pending.cancel()

    async def lookup(self, action: LookupBlocks) -> int:
        num_tokens = await self._call(
            "lookup",
            self._epoch,
            action.request_id,
            action.block_hashes,
            action.num_readable_tokens,
            action.num_own_tokens,
            action.skip_reading_prefix_cache,
        )
        return int(num_tokens)

    async def load(self, action: LoadBlocks, worker: Any) -> int:
        num_blocks = await self._call(
            "load",
            action.request_id,
            worker.handle,
            worker.epoch,
            action.block_hashes,
            action.block_ids,
        )
        return int(num_blocks)

    async def save(self, action: SaveBlocks, worker: Any) -> tuple[int, int]:
        num_saved, num_copied = await self._call(
            "save",
            action.request_id,
            worker.handle,
            worker.epoch,
            action.block_hashes,
            action.block_ids,
            action.owned,
            action.replace,
            worker.node_id,
        )
        return int(num_saved), int(num_copied)

    async def release(self, action: ReleaseBlocks) -> None:
        await self._call("release", action.request_id, action.forget)

    async def retain(self, request_ids: list[str]) -> None:
        """Have it forget every request but these."""
        await self._call("retain", request_ids)

    async def leave_node(self, node_id: str) -> None:
        """Have it keep nothing on a node that nobody needs; see `OffloadStoreActor.leave_node`."""
        await self._call("leave_node", node_id)

    async def stats(self) -> dict[str, int] | None:
        """Return its counters; None where it does not answer in time."""
        try:
            return dict(await asyncio.wait_for(self._call("stats"), _STORE_STATS_TIMEOUT_S))
        except (CallFailed, ActorLost, asyncio.TimeoutError):
            return None
