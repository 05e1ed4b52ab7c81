"""The workers that are there, and all that is asked of them.

Rules:
- A worker that dies, or does not answer a step, a ping or a fence in time, is lost: once, with all
  that was asked of it, and killed to make sure.
- What a lost worker still says is not listened to.
- Blocks are not reported free while somebody may still write into them. A copy or load that came
  to less than it should is reported after a fence, behind which no earlier write can happen.
- A step is sent at once, also while others are under way, and answered in its turn.
- A step takes as long as it has tokens, so its deadline grows with them, and begins when the one
  before it is answered. A ping is answered in the middle of a step, so its deadline does neither.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from scheduler.actions import CopyBlocks, RunBatch
from scheduler.calls import ActorLost, CallFailed, Post, Timeouts, Worker, within
from scheduler.codec import decode, encode
from scheduler.errors import HaversackError, InvalidConfig, RequestFailed, UnknownWorker
from scheduler.events import (
    AnyEvent,
    BatchDone,
    BatchFailed,
    CopyDone,
    WorkerLost,
)
from scheduler.lifetime import Lifetime, first_of
from scheduler.messages import ModelRunnerOutput, WorkerInfo

logger = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], object]
"""Starts a task that the loop looks after."""
OnLost = Callable[[str, str], Iterable[AnyEvent]]
OnStopped = Callable[[str], None]


@dataclass(eq=False, slots=True)
class Member:
    """A worker that is there."""

    worker: Worker
    info: WorkerInfo
    ended: asyncio.Future[None]
    """Done once it is lost or was stopped."""
    is_pinged: bool = False
    last_step: asyncio.Future[None] | None = None
    """Done once the step that was sent last has been answered."""

    @property
    def id(self) -> str:
        return self.info.worker_id

    @property
    def name(self) -> str:
        return f"worker {self.info.worker_id}"


class WorkerCalls:
    """Every worker that has joined and not ended."""

    def __init__(
        self,
        post: Post,
        spawn: Spawn,
        timeouts: Timeouts,
        lifetime: Lifetime,
        on_lost: OnLost | None,
        on_stopped: OnStopped | None,
    ) -> None:
        """Start with none.

        Args:
            on_lost: called with the id of a lost worker and the reason; returns events that the
                core has to know before the loss.
            on_stopped: called with the id of a worker that was stopped on purpose.
        """
        self._post = post
        self._spawn = spawn
        self._timeouts = timeouts
        self._lifetime = lifetime
        self._on_lost = on_lost
        self._on_stopped = on_stopped
        self._members: dict[str, Member] = {}

    def add(self, worker: Worker, info: WorkerInfo) -> None:
        """Take in a worker.

        Raises:
            InvalidConfig: its name is taken, or its KV blocks are not interchangeable with the
                others'.
        """
        if info.worker_id in self._members:
            raise InvalidConfig(f"a worker is called {info.worker_id!r} already")
        for member in self._members.values():
            other = member.info
            if (other.model_fingerprint, other.block_size) != (
                info.model_fingerprint,
                info.block_size,
            ):
                raise InvalidConfig(
                    f"worker {info.worker_id} computes {info.model_fingerprint} in blocks of "
                    f"{info.block_size} tokens, {other.worker_id} {other.model_fingerprint} in "
                    f"blocks of {other.block_size}: workers of one engine must be alike"
                )
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._members[info.worker_id] = Member(worker, info, ended)

    def find(self, worker_id: str) -> Member | None:
        """Return a worker, None where it has ended."""
        return self._members.get(worker_id)

    def get(self, worker_id: str) -> Member:
        """Return a worker.

        Raises:
            UnknownWorker: there is none of this name.
        """
        member = self._members.get(worker_id)
        if member is None:
            names = ", ".join(sorted(self._members)) or "none"
            raise UnknownWorker(f"no worker is called {worker_id!r}; there are: {names}")
        return member

    def infos(self) -> list[WorkerInfo]:
        """Return what the workers said about themselves."""
        return [member.info for member in self._members.values()]

    # --------------------------------------------------------------------------- what is asked

    def run_batch(self, action: RunBatch) -> None:
        """Have a step run; a worker that has ended has no answer, the core knows or will."""
        member = self._members.get(action.worker_id)
        if member is not None:
            before, after = member.last_step, asyncio.get_running_loop().create_future()
            member.last_step = after
            self._spawn(self._run_batch(action, member, before, after))

    def copy_blocks(self, action: CopyBlocks) -> None:
        """Have blocks copied from one worker to another."""
        source = self._members.get(action.source_id)
        target = self._members.get(action.target_id)
        if source is None or target is None:
            self._post(CopyDone(action.op_id, 0))
        else:
            self._spawn(self._copy_blocks(action, source, target))

    def stop(self, worker_id: str) -> None:
        """End a worker that the core has emptied and forgotten."""
        member = self._members.pop(worker_id, None)
        if member is not None:
            logger.info("%s is drained and ends", member.name)
            member.ended.set_result(None)
            member.worker.kill()
            if self._on_stopped is not None:
                self._on_stopped(worker_id)

    def ping_all(self) -> None:
        """Find out who is there; a worker that does not answer is lost."""
        for member in self._members.values():
            if not member.is_pinged:
                member.is_pinged = True
                self._spawn(self._routine_ping(member))

    async def settle(self, member: Member) -> None:
        """Return once no write into a worker's blocks that was asked for before can happen.

        A worker that does not say so is lost.
        """
        try:
            fence = member.worker.settle()
            await within(self._timeouts.store_s, fence, f"the fence of {member.name}", member.ended)
        except CallFailed as error:
            logger.warning("the fence of %s was reached, but failed: %s", member.name, error)
        except ActorLost as error:
            self._lose(member, str(error))

    # ----------------------------------------------------------------------- how it is answered

    async def _run_batch(
        self,
        action: RunBatch,
        member: Member,
        before: asyncio.Future[None] | None,
        after: asyncio.Future[None],
    ) -> None:
        """Send a step, and report its outcome once `before` is done; then `after` is."""
        step = asyncio.ensure_future(member.worker.execute(encode(action.output)))
        try:
            if before is not None:
                await first_of(before, member.ended)
            event = await self._outcome(action, member, step)
        finally:
            step.cancel()
        if event is not None and not member.ended.done():
            self._post(event)
        after.set_result(None)

    async def _outcome(
        self, action: RunBatch, member: Member, step: asyncio.Future[bytes]
    ) -> AnyEvent | None:
        """Return how a step ended; None where its worker is lost."""
        step_id = action.output.step_id
        num_tokens = sum(len(c.token_ids) + c.max_more_tokens for c in action.output.chunks)
        timeout_s = self._timeouts.for_step(num_tokens)
        try:
            who = f"{member.name}, given a step of {num_tokens} tokens,"
            answer = await within(timeout_s, step, who, member.ended)
            return BatchDone(member.id, decode(answer, ModelRunnerOutput))
        except ActorLost as error:
            self._lose(member, str(error))
            return None
        except (CallFailed, msgspec.MsgspecError) as error:
            logger.warning("step %d of %s failed: %s", step_id, member.name, error)
            failure: HaversackError = (
                error.error
                if isinstance(error, CallFailed)
                else RequestFailed(f"{member.name} gave an answer that can't be read: {error}")
            )
            return BatchFailed(member.id, step_id, failure.to_wire())

    async def _copy_blocks(self, action: CopyBlocks, source: Member, target: Member) -> None:
        num_copied = 0
        try:
            copy = source.worker.copy_blocks(
                action.source_block_ids, target.worker, action.target_block_ids
            )
            who = f"the copy from {source.name} to {target.name}"
            num_copied = await within(self._timeouts.store_s, copy, who, source.ended, target.ended)
        except CallFailed as error:
            logger.warning("a copy for %s failed: %s", action.request_id, error)
        except ActorLost as error:
            logger.warning("a copy for %s failed: %s", action.request_id, error)
            await asyncio.gather(self._ping(source), self._ping(target))
        if num_copied < len(action.target_block_ids):
            await self.settle(target)
        self._post(CopyDone(action.op_id, num_copied))

    async def _routine_ping(self, member: Member) -> None:
        try:
            await self._ping(member)
        finally:
            member.is_pinged = False

    async def _ping(self, member: Member) -> None:
        try:
            ping = member.worker.ping()
            await within(self._timeouts.ping_s, ping, f"{member.name}, pinged,", member.ended)
        except CallFailed:
            pass  # it answered, which is all that was asked
        except ActorLost as error:
            self._lose(member, str(error))

    def _lose(self, member: Member, reason: str) -> None:
        """Report a worker lost, once, and make sure that it is.

        The workers of an engine that is closed are lost on purpose.
        """
        if member.ended.done() or self._lifetime.reason is not None:
            return
        logger.warning("%s is lost: %s", member.name, reason)
        del self._members[member.id]
        member.ended.set_result(None)
        member.worker.kill()
        events = self._on_lost(member.id, reason) if self._on_lost is not None else ()
        self._post(*events, WorkerLost(member.id, reason))
