"""How long an engine takes part, why it ended, what goes on and what time it is meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from scheduler.errors import HaversackError, WireError, from_wire

Clock = Callable[[], float]
"""Returns seconds since the Unix epoch."""


def unix_clock() -> Clock:
    """Return a clock that starts right and never jumps, however the machine's clock is set."""
    start_s = time.time() - time.monotonic()
    return lambda: start_s + time.monotonic()


async def first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Return once one of some futures is done, or the time is up.

    None of them is cancelled where the caller is.
    """
    await asyncio.wait(set(futures), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


class Tasks:
    """Work that nobody waits for: kept until it ends, and what it raises is told."""

    def __init__(self, on_bug: Callable[[BaseException], None]) -> None:
        """Start with none.

        Args:
            on_bug: called with what a task raises, since none should.
        """
        self._on_bug = on_bug
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task on the running event loop; whoever wants to may cancel it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._take_end)
        return task

    async def end(self) -> None:
        """Cancel all, and return when they have ended."""
        await end_all(self._tasks)

    def _take_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(error)


async def end_all(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel them, and return when they have ended."""
    futures = list(futures)
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


class Lifetime:
    """Whether the engine is open, and what ended it."""

    def __init__(self) -> None:
        """Begin, on the running event loop."""
        self.reason: WireError | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the engine is closed."""

    def end(self, reason: HaversackError) -> None:
        """Close the engine; the first reason stays."""
        if self.reason is None:
            self.reason = reason.to_wire()
            self.over.set_result(None)

    def check(self) -> None:
        """Do nothing while the engine is open.

        Raises:
            HaversackError: the reason why it is closed.
        """
        if self.reason is not None:
            raise from_wire(self.reason)

    async def until(self, event: asyncio.Future[Any]) -> None:
        """Return once `event` is done.

        Raises:
            HaversackError: the engine was closed first.
        """
        if not event.done():
            await first_of(event, self.over)
        if not event.done():
            self.check()
