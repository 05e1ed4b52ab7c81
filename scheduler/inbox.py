"""The one way to the core: events on their way in, and who waits until they are handled.

Events that arrive in one turn of the loop go in together, with the time at which they came. What
the core asks for is done after `handle` has returned, never inside.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import msgspec

from scheduler.actions import AnyAction, Refuse
from scheduler.errors import WireError
from scheduler.events import AnyEvent, DrainRequested, MigrateRequested, RequestSubmitted
from scheduler.lifetime import Clock, Lifetime
from scheduler.state import SchedulerState

Refusable = RequestSubmitted | MigrateRequested | DrainRequested


class Inbox:
    """Events that the core has not handled yet."""

    def __init__(
        self,
        state: SchedulerState,
        clock: Clock,
        lifetime: Lifetime,
        perform: Callable[[AnyAction], None],
        end_turn: Callable[[], None],
        on_bug: Callable[[Exception], None],
    ) -> None:
        """Start empty, on the running event loop.

        Args:
            perform: does what the core asks for, except to refuse.
            end_turn: called when all of a turn's actions have been performed.
            on_bug: called with what the core or one of these two raises.
        """
        self._state = state
        self._clock = clock
        self._lifetime = lifetime
        self._perform = perform
        self._end_turn = end_turn
        self._on_bug = on_bug
        self._loop = asyncio.get_running_loop()
        self._events: list[AnyEvent] = []
        self._handled: asyncio.Future[None] | None = None
        """Done when these have been handled; None while there are none."""
        self._tickets = itertools.count(1)
        self._refusals: dict[int, WireError | None] = {}
        """What the core said to those that wait for it, by ticket."""

    def post(self, *events: AnyEvent) -> None:
        """Give events to the core in the loop's next turn; dropped once the engine is closed."""
        if not events or self._lifetime.reason is not None:
            return
        now_s = self._clock()
        self._events += [msgspec.structs.replace(event, time_s=now_s) for event in events]
        if self._handled is None:
            self._handled = self._loop.create_future()
            self._loop.call_soon(self.catch_up)

    async def handle(self, *events: AnyEvent) -> None:
        """Give events to the core and return when it has handled them."""
        self.post(*events)
        if events and self._handled is not None:
            await asyncio.shield(self._handled)

    async def ask(self, *events: Refusable) -> list[WireError | None]:
        """Give events to the core and return for each why it was refused, or None.

        Raises:
            HaversackError: the engine was closed meanwhile.
        """
        asked = [msgspec.structs.replace(event, ticket=next(self._tickets)) for event in events]
        self._refusals |= dict.fromkeys(event.ticket for event in asked)
        try:
            await self.handle(*asked)
            self._lifetime.check()
            return [self._refusals[event.ticket] for event in asked]
        finally:
            for event in asked:
                del self._refusals[event.ticket]

    def catch_up(self) -> None:
        """Have the core handle what is here, and do what it asks for, now."""
        events, self._events = self._events, []
        handled, self._handled = self._handled, None
        try:
            if events and self._lifetime.reason is None:
                for action in self._state.handle(*events):
                    if not isinstance(action, Refuse):
                        self._perform(action)
                    elif action.ticket in self._refusals:
                        self._refusals[action.ticket] = action.error
                self._end_turn()
        except Exception as error:
            self._on_bug(error)
        finally:
            if handled is not None:
                handled.set_result(None)
