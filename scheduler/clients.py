"""What waits for each client, and the polls that wait for something.

Rules:
- A client that connects again under its id keeps its outbox and its numbering.
- A client that is expected, because an earlier scheduler took what it submitted, has an outbox too,
  but its polls are answered with "connect again" until it does: what ended while nobody was
  listening comes only to those who submit it again.
- Silence is counted in the looks that are taken for it, so that time in which this process stood
  still is nobody's fault.
The module knows no request, no Ray and no worker.
"""

from __future__ import annotations

import asyncio
import time

from scheduler.errors import UnknownClient
from scheduler.lifetime import Lifetime, first_of
from scheduler.messages import OutputDelta
from scheduler.outbox import Outbox, PollAnswer


class Clients:
    """The outboxes of all clients."""

    def __init__(self, lifetime: Lifetime, grace_s: float) -> None:
        """Start with none.

        Args:
            grace_s: a client that has not polled for so long is silent; a poll waits no longer.
        """
        self._lifetime = lifetime
        self._grace_s = grace_s
        self._outboxes: dict[str, Outbox] = {}
        self._polls: dict[str, asyncio.Future[None]] = {}
        self._last_epoch = 0

    # ---------------------------------------------------------------------------------- coming

    def connect(self, client_id: str) -> int:
        """Open an outbox, or keep the one that is there; return its epoch."""
        outbox = self._outboxes.get(client_id)
        if outbox is None:
            outbox = self._outboxes[client_id] = Outbox(self._new_epoch())
        outbox.is_connected = True
        outbox.silent_s = 0.0
        return outbox.epoch

    def expect(self, client_id: str) -> None:
        """Open an outbox for a client that has yet to connect; it has the grace to do so."""
        if client_id not in self._outboxes:
            self._outboxes[client_id] = Outbox(self._new_epoch(), is_connected=False)

    def forget(self, client_id: str) -> bool:
        """Drop a client's outbox; return whether there was one."""
        is_known = self._outboxes.pop(client_id, None) is not None
        self._wake(client_id)
        return is_known

    def check_connected(self, client_id: str) -> None:
        """Do nothing for a client that is connected.

        Raises:
            UnknownClient: it is not.
        """
        outbox = self._outboxes.get(client_id)
        if outbox is None or not outbox.is_connected:
            raise UnknownClient(f"no client {client_id!r} is connected: connect first")

    def silent(self, passed_s: float) -> list[str]:
        """Count `passed_s` more of silence; return the clients that have been silent for long."""
        found = []
        for client_id, outbox in self._outboxes.items():
            if client_id not in self._polls:
                outbox.silent_s += passed_s
                if outbox.silent_s > self._grace_s:
                    found.append(client_id)
        return found

    # --------------------------------------------------------------------------------- telling

    def deliver(self, client_id: str, delta: OutputDelta) -> None:
        """Put a delta into a client's outbox, if the client is known."""
        outbox = self._outboxes.get(client_id)
        if outbox is not None:
            outbox.put(delta)
            self._wake(client_id)

    async def poll(self, client_id: str, acked: int, timeout_s: float) -> PollAnswer:
        """Return deltas numbered above `acked`; wait for one at most `timeout_s`."""
        outbox = self._outboxes.get(client_id)
        if outbox is not None:
            outbox.silent_s = 0.0
        if outbox is None or not outbox.is_connected:
            reason = self._lifetime.reason
            return PollAnswer(closed=reason, is_forgotten=reason is None)
        outbox.acknowledge(acked)
        self._wake(client_id)
        if not outbox and self._lifetime.reason is None:
            await self._arrival(client_id, min(timeout_s, self._grace_s))
        return PollAnswer(outbox.ready(), self._lifetime.reason)

    async def _arrival(self, client_id: str, timeout_s: float) -> None:
        arrival = self._polls[client_id] = asyncio.get_running_loop().create_future()
        try:
            await first_of(arrival, self._lifetime.over, timeout_s=timeout_s)
        finally:
            if self._polls.get(client_id) is arrival:
                del self._polls[client_id]

    def _wake(self, client_id: str) -> None:
        arrival = self._polls.pop(client_id, None)
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    def _new_epoch(self) -> int:
        """Return a number above every one that was given out before, also by earlier schedulers.

        Where the machine's clock was set back between two schedulers it may be below; so a client
        that finds a new epoch starts anew.
        """
        self._last_epoch = max(time.time_ns(), self._last_epoch + 1)
        return self._last_epoch
