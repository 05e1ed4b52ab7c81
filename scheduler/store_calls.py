"""The offload store as the loop sees it: calls in order, and an empty store in place of a lost one.

Rules:
- Calls about one request are made one after the other. Calls under way may overtake each other on
  their way to an actor, and a release that overtook the save before it would leave blocks that
  nobody ever gives back.
- A store that dies or does not answer in time is lost, with all that it was asked. It is ended and
  a fresh, empty one takes its place; until that answers, every call is a miss or a failure at once.
  A release that falls into that time is done by the restart itself.
- The engine works without a store. One that can't be started, or is lost again as soon as it is
  there, is tried again at growing intervals, for as long as the engine lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from scheduler.actions import LoadBlocks, LookupBlocks, ReleaseBlocks, SaveBlocks
from scheduler.calls import ActorLost, CallFailed, Post, Store, Timeouts, within
from scheduler.events import (
    AnyEvent,
    LoadDone,
    LoadFailed,
    LookupDone,
    SaveDone,
    SaveFailed,
    StoreLost,
)
from scheduler.lifetime import Lifetime, first_of
from scheduler.worker_calls import Member, Spawn, WorkerCalls

logger = logging.getLogger(__name__)

MAX_RETRY_S = 60.0
_STORE = "the offload store"

T = TypeVar("T")


class StoreCalls:
    """What is asked of the offload store, if there is one."""

    def __init__(
        self,
        store: Store | None,
        workers: WorkerCalls,
        post: Post,
        spawn: Spawn,
        timeouts: Timeouts,
        lifetime: Lifetime,
    ) -> None:
        self._store = store
        self._workers = workers
        self._post = post
        self._spawn = spawn
        self._timeouts = timeouts
        self._lifetime = lifetime
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        """Done once the store that is there now is known to be lost; a new one has a new one."""
        self._num_restarts = 0
        """Since a store answered last."""
        self._turns: dict[str, asyncio.Future[None]] = {}
        """The latest call about a request; done when it is answered."""

    def perform(self, action: LookupBlocks | LoadBlocks | SaveBlocks | ReleaseBlocks) -> None:
        """Ask the store; the outcome comes as one event, but for a release."""
        match action:
            case LookupBlocks():
                self._spawn(self._lookup(action))
            case LoadBlocks():
                worker = self._workers.find(action.worker_id)
                if worker is None:
                    self._post(LoadFailed(action.op_id, "the worker is gone"))
                else:
                    self._spawn(self._load(action, worker))
            case SaveBlocks():
                worker = self._workers.find(action.worker_id)
                if worker is None:
                    self._post(SaveFailed(action.op_id, "the worker is gone"))
                else:
                    self._spawn(self._save(action, worker))
            case ReleaseBlocks():
                self._spawn(self._release(action))

    def retain(self, request_ids: list[str]) -> None:
        """Have the store forget every request but these."""
        if self._store is not None:
            # What it keeps for those that are gone would never be given back.
            self._spawn(self._tell(self._store.retain(request_ids)))

    def leave_node(self, node_id: str) -> None:
        """Have the store leave a node where no worker is any more."""
        if self._store is not None:
            # What it keeps there would keep the node from being taken for idle.
            self._spawn(self._tell(self._store.leave_node(node_id)))

    # ------------------------------------------------------------------------------- the calls

    async def _lookup(self, action: LookupBlocks) -> None:
        num_hit_tokens = 0
        try:
            num_hit_tokens = await self._ask(action.request_id, lambda store: store.lookup(action))
        except (CallFailed, ActorLost) as error:
            _note("lookup", action.request_id, error)
        self._post(LookupDone(action.op_id, num_hit_tokens))

    async def _load(self, action: LoadBlocks, member: Member) -> None:
        event: AnyEvent
        num_loaded = 0
        try:
            num_loaded = await self._ask(
                action.request_id, lambda store: store.load(action, member.worker)
            )
            event = LoadDone(action.op_id, num_loaded)
        except (CallFailed, ActorLost) as error:
            _note("load", action.request_id, error)
            event = LoadFailed(action.op_id, str(error))
        if num_loaded < len(action.block_ids):
            await self._workers.settle(member)
        self._post(event)

    async def _save(self, action: SaveBlocks, member: Member) -> None:
        event: AnyEvent
        try:
            num_saved, num_copied = await self._ask(
                action.request_id, lambda store: store.save(action, member.worker)
            )
            event = SaveDone(action.op_id, num_saved, num_copied)
        except (CallFailed, ActorLost) as error:
            _note("save", action.request_id, error)
            event = SaveFailed(action.op_id, str(error))
        self._post(event)

    async def _release(self, action: ReleaseBlocks) -> None:
        try:
            await self._ask(action.request_id, lambda store: store.release(action))
        except (CallFailed, ActorLost) as error:
            _note("release", action.request_id, error)

    async def _tell(self, call: Awaitable[None]) -> None:
        """Await a call that has to succeed: a store that fails it is replaced by an empty one."""
        lost = self._lost
        try:
            await within(self._timeouts.store_s, call, _STORE, lost)
        except (CallFailed, ActorLost) as error:
            self._lose(lost, error)

    async def _ask(self, request_id: str, call: Callable[[Store], Awaitable[T]]) -> T:
        """Make a call about a request when it is its turn.

        Raises:
            CallFailed, ActorLost: see there; after `ActorLost` a new store is on its way.
        """
        async with self._turn(request_id):
            store, lost = self._store, self._lost
            if store is None:
                raise ActorLost("this engine has no offload store")
            if lost.done():
                raise ActorLost("the offload store is being restarted")
            try:
                answer = await within(self._timeouts.store_s, call(store), _STORE, lost)
            except ActorLost as error:
                self._lose(lost, error)
                raise
            if lost is self._lost:
                self._num_restarts = 0
            return answer

    @contextlib.asynccontextmanager
    async def _turn(self, request_id: str) -> AsyncIterator[None]:
        """Wait until every earlier call about the request is answered."""
        earlier = self._turns.get(request_id)
        mine = self._turns[request_id] = self._loop.create_future()
        try:
            if earlier is not None:
                await first_of(earlier)
            yield
        finally:
            mine.set_result(None)
            if self._turns.get(request_id) is mine:
                del self._turns[request_id]

    # --------------------------------------------------------------------------------- its loss

    def _lose(self, lost: asyncio.Future[None], error: CallFailed | ActorLost) -> None:
        """Note the loss of the store that `lost` stands for, once, and have it replaced."""
        if not lost.done():
            logger.warning("the offload store is lost, and its contents with it: %s", error)
            lost.set_result(None)
            self._spawn(self._replace())

    async def _replace(self) -> None:
        over = self._lifetime.over
        while self._store is not None and not over.done():
            if self._num_restarts > 0:
                await first_of(over, timeout_s=self._retry_s())
            self._num_restarts += 1
            try:
                restart = self._store.restart()
                await within(self._timeouts.store_s, restart, "the new offload store", over)
            except (CallFailed, ActorLost) as error:
                logger.warning("there is no offload store for now: %s", error)
                continue
            self._lost = self._loop.create_future()
            self._post(StoreLost())
            return

    def _retry_s(self) -> float:
        growing_s: float = self._timeouts.store_retry_s * 2 ** min(self._num_restarts - 1, 30)
        return min(growing_s, MAX_RETRY_S)


def _note(what: str, request_id: str, error: CallFailed | ActorLost) -> None:
    """Log a failed call; the loss of the whole store has been logged already."""
    level = logging.WARNING if isinstance(error, CallFailed) else logging.DEBUG
    logger.log(level, "%s for %s failed: %s", what, request_id, error)
