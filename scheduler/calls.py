"""How the engine's loop calls the actors around it: what they offer and how they fail.

Rules:
- A call ends in its answer, in `CallFailed` (the actor lives) or in `ActorLost` (it is dead, out of
  reach, or has not answered in time, so that it may or may not have done what it was asked).
- Nobody is blamed for time in which this process itself stood still, since answers that came
  meanwhile are still on their way in when it wakes up: a wait is cut into slices, and each of them
  counts for its own length, however long it took.
The module knows no Ray and nothing of what the calls are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar

import msgspec

from scheduler.actions import LoadBlocks, LookupBlocks, Record, ReleaseBlocks, SaveBlocks
from scheduler.errors import HaversackError
from scheduler.events import AnyEvent
from scheduler.lifetime import first_of
from scheduler.request import Request

_NUM_SLICES = 8

T = TypeVar("T")


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long an actor may take before it counts as lost."""

    step_s: float = 60.0
    """A step, and in addition"""
    step_s_per_token: float = 0.1
    """for each token of its batch."""
    store_s: float = 90.0
    """A call to the offload store, or one that moves KV between workers."""
    store_retry_s: float = 1.0
    """How long to wait before a store that was started in vain is started again; doubles with each
    time, up to a minute."""
    ping_s: float = 30.0
    """A ping, which a worker answers also in the middle of a step."""

    def for_step(self, num_tokens: int) -> float:
        """Return the seconds that a step of so many tokens may take."""
        return self.step_s + self.step_s_per_token * num_tokens


class CallFailed(Exception):
    """An actor's method raised; the actor lives. `error` is what clients may be told."""

    def __init__(self, error: HaversackError) -> None:
        super().__init__(error.message)
        self.error = error


class ActorLost(Exception):
    """An actor died, can't be reached or does not answer: it may or may not have done its work."""


class Worker(Protocol):
    """A worker. Its calls raise `CallFailed` or `ActorLost`."""

    async def execute(self, message: bytes) -> bytes:
        """Run a `SchedulerOutput` and return a `ModelRunnerOutput`."""

    async def copy_blocks(
        self, block_ids: list[int], target: Worker, target_block_ids: list[int]
    ) -> int:
        """Copy blocks to another worker; return how many leading ones were written there."""

    async def settle(self) -> None:
        """Return once no write into its blocks that was asked for before can still happen."""

    async def ping(self) -> None: ...

    def kill(self) -> None:
        """End it, if it is still there, without waiting; also a process that is frozen."""


class Store(Protocol):
    """The offload store. Its calls raise `CallFailed` or `ActorLost`."""

    async def lookup(self, action: LookupBlocks) -> int:
        """Return how many leading tokens it can supply."""

    async def load(self, action: LoadBlocks, worker: Worker) -> int:
        """Return how many leading blocks were written."""

    async def save(self, action: SaveBlocks, worker: Worker) -> tuple[int, int]:
        """Return how many leading blocks it holds, and how many were copied."""

    async def release(self, action: ReleaseBlocks) -> None: ...

    async def retain(self, request_ids: list[str]) -> None:
        """Drop all pins, and all that is kept for other requests than these."""

    async def leave_node(self, node_id: str) -> None:
        """Drop what lies on a node where no worker is any more, and is kept for no request."""

    async def restart(self) -> None:
        """End it if it is still there; return once a fresh, empty one answers."""


class Journal(Protocol):
    """The durable record of requests; only `result` may block, and is called on other threads."""

    def append(self, records: Iterable[Record]) -> None:
        """Have records written soon, all of them at once."""

    def when_durable(self, callback: Callable[[bool], None]) -> None:
        """Have all that was appended before written.

        The callback is called on another thread, with True once it is, with False where it failed.
        """

    def result(self, parent_id: str) -> list[Request] | None:
        """Return the ended requests of a submission, None where there are none; what has been
        appended counts, written or not.

        Raises:
            RequestFailed: there is a result, but it can't be read.
        """

    def stats(self) -> object:
        """Return a struct of counters."""


class Post(Protocol):
    """Gives events to the core; returns before it has handled them."""

    def __call__(self, *events: AnyEvent) -> None: ...


async def within(timeout_s: float, call: Awaitable[T], who: str, *ends: asyncio.Future[None]) -> T:
    """Await a call, for `timeout_s` at most and until one of `ends` is done at the latest.

    Args:
        who: the actor's name, for the error.
        ends: futures of which each says that no answer will come.

    Raises:
        ActorLost: no answer came; the call has been cancelled here.
        Exception: what the call raised.
    """
    answer = asyncio.ensure_future(call)
    try:
        for _ in range(_NUM_SLICES):
            if not answer.done() and not any(end.done() for end in ends):
                await first_of(answer, *ends, timeout_s=timeout_s / _NUM_SLICES)
        if answer.done():
            return answer.result()
    finally:
        answer.cancel()
    if any(end.done() for end in ends):
        raise ActorLost(f"{who} is gone")
    raise ActorLost(f"{who} has not answered within {timeout_s:g} s")
