"""What the scheduler actor and its clients say to each other, and what waits for a client.

A delta stays in its client's outbox until the client has acknowledged it, so a poll that is
repeated after a lost answer brings it again, under the same number. Each outbox numbers from an
epoch of its own on, so an acknowledgement says by itself which outbox it is about: one that was
meant for an earlier outbox of the same client, or for an earlier scheduler, changes nothing. The
module knows no Ray, no clock and no event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from scheduler.config import SchedulerConfig
from scheduler.errors import WireError
from scheduler.logprobs import Logprobs
from scheduler.messages import OutputDelta, SchedulerStats, WorkerInfo, WorkerUse
from scheduler.timings import Timings

MAX_ANSWER_BYTES = 32 * 2**20


class EngineInfo(msgspec.Struct, frozen=True):
    """What a client learns about the engine when it connects."""

    model: str
    """The model's name as the engine was started with it."""
    settings: dict[str, str | int | float | bool | None]
    """The engine's settings, field by field."""
    limits: SchedulerConfig
    """What a request may ask for."""
    workers: list[WorkerInfo]
    epoch: int = 0
    """Of the client's outbox, whose first delta has the next number. The same as at an earlier
    connection: the outbox was kept, and numbers go on. Another one: the outbox is new, what is to
    be acknowledged starts again here, and what the client has under way has to be submitted again.
    """


class EngineStats(msgspec.Struct, frozen=True):
    """Counters of the engine's parts."""

    scheduler: SchedulerStats
    store: dict[str, int] | None = None
    """Counters of the offload store; None where there is none, or it does not answer."""
    journal: dict[str, int | float | str | None] | None = None
    """What the journal says of itself; None where there is none."""
    timings: Timings = msgspec.field(default_factory=Timings)
    """The latencies of requests."""
    workers: list[WorkerUse] = []
    started_s: float = 0.0
    """Since when the scheduler counts: unix time at which it was started, or restarted."""


class Delivery(msgspec.Struct, frozen=True, eq=False):
    """A delta with its number in the outbox's order, from the outbox's epoch + 1 on."""

    seq: int
    delta: OutputDelta


class PollAnswer(msgspec.Struct, frozen=True, eq=False):
    """What is new for a client."""

    deliveries: list[Delivery] = []
    closed: WireError | None = None
    """Nothing more will come, for this reason."""
    is_forgotten: bool = False
    """The engine runs but does not know the client: it did not poll for long, so that what it had
    submitted was cancelled, or the scheduler started anew. It has to connect again, and to submit
    again what it has under way."""


class Outbox:
    """What one client has not acknowledged yet."""

    def __init__(self, epoch: int, *, is_connected: bool = True) -> None:
        """Number deltas from `epoch` + 1 on."""
        self.epoch = epoch
        self.is_connected = is_connected
        """Whether the client knows of this outbox; until then its polls are not about it."""
        self.silent_s = 0.0
        """How long the client has not polled."""
        self._deliveries: deque[Delivery] = deque()
        self._last_seq = epoch

    def __len__(self) -> int:
        return len(self._deliveries)

    def put(self, delta: OutputDelta) -> None:
        """Add a delta at the end."""
        self._last_seq += 1
        self._deliveries.append(Delivery(self._last_seq, delta))

    def acknowledge(self, seq: int) -> None:
        """Forget every delta numbered up to `seq`; a number not given out here is ignored."""
        if seq > self._last_seq:
            return
        while self._deliveries and self._deliveries[0].seq <= seq:
            self._deliveries.popleft()

    def ready(self, max_bytes: int = MAX_ANSWER_BYTES) -> list[Delivery]:
        """Return the oldest deltas, up to about `max_bytes`, but at least one if there is one."""
        chosen: list[Delivery] = []
        num_bytes = 0
        for delivery in self._deliveries:
            num_bytes += _num_bytes(delivery.delta)
            if chosen and num_bytes > max_bytes:
                break
            chosen.append(delivery)
        return chosen


def _num_bytes(delta: OutputDelta) -> int:
    rows: Iterable[Logprobs | None] = (delta.prompt_logprobs, delta.new_logprobs)
    ids = delta.new_token_ids.nbytes if delta.new_token_ids is not None else 0
    return ids + sum(part.num_bytes for part in rows if part is not None)
