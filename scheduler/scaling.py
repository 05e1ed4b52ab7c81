"""How many workers an engine should have, from what it has to do and how fast it does it.

- There are to be so many that all known work is done within `target_queue_s` at the speed that was
  measured. Work whose size nobody knows, such as long outputs, is noticed by those who wait: where
  the first in the queue has waited for so long, there is to be one more, and after as long again
  another one.
- Workers that were asked for and are not ready count as there, so that none is asked for twice.
- A worker is given back when nobody has been on it for `idle_s`; where it is not ready yet, when it
  has not been needed for so long. So no burst makes the number go up and down.
Nobody knows a clock, a worker or Ray here: `Scaling.look` is told how things are and when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MEASURED_S = 1.0
"""Seconds of computing, before which the speed counts as unknown."""
_REMEMBERED_S = 60.0
"""Seconds of computing that the speed is mostly taken from: what computes changes."""


@dataclass(frozen=True)
class ScalingLimits:
    """Between how many workers, and how soon."""

    min_workers: int
    max_workers: int
    target_queue_s: float = 30.0
    """In which workers should be through with what there is to do."""
    idle_s: float = 300.0
    """After which a worker without use is given back."""


@dataclass(frozen=True)
class Load:
    """What an engine has to do and has done."""

    waited_s: float
    """How long the first in the queue has waited; 0 where it has run before, or nobody waits."""
    num_tokens_to_do: int
    """Known tokens to compute, of requests that wait and that run."""
    num_computed_tokens: int
    """Since the engine started."""
    compute_s: float
    """What workers took for them, all together."""
    is_busy: Mapping[str, bool]
    """Whether anybody is on a worker, for each one that is ready and is not drained."""


@dataclass(frozen=True)
class Change:
    """What is to be done about the number of workers."""

    num_more: int = 0
    """To be asked for."""
    idle_id: str | None = None
    """A worker to drain and give back."""
    num_fewer_coming: int = 0
    """Of those that were asked for and are not ready, to be called off."""


class Scaling:
    """Remembers how fast workers are and since when they have been of no use."""

    def __init__(self, limits: ScalingLimits) -> None:
        self._limits = limits
        self._num_seen_tokens = 0
        self._seen_s = 0.0
        self._num_tokens = 0.0
        """Computed lately; what is longer ago counts for less."""
        self._compute_s = 0.0
        """What they took, likewise."""
        self._idle_since_s: dict[str, float] = {}
        """When each idle worker was seen idle first."""
        self._last_needed_s = -math.inf
        """When as many workers as there are were wanted last."""
        self._last_coming_s = -math.inf
        """When a worker was last asked for, or on its way."""

    @property
    def tokens_per_s(self) -> float | None:
        """What a worker computes in a second of computing; None before that is known."""
        return self._num_tokens / self._compute_s if self._compute_s >= MEASURED_S else None

    def look(self, load: Load, num_coming: int, now_s: float, num_barred: int = 0) -> Change:
        """Return what is to change, which the caller does before the next look.

        Args:
            load: as it is now.
            num_coming: workers that were asked for and are not ready.
            now_s: later than at the look before.
            num_barred: by how many there are to be fewer than the limits say.
        """
        least = self._limits.min_workers - num_barred
        most = self._limits.max_workers - num_barred
        self._measure(load)
        self._note_idle(load, now_s)
        present = len(load.is_busy) + num_coming
        if num_coming:
            self._last_coming_s = now_s
        wanted = max(min(self._wanted(load, present, now_s), most), least)
        if wanted > present:
            self._last_coming_s = now_s
        if wanted >= present:
            self._last_needed_s = now_s
            return Change(num_more=wanted - present)
        unneeded_s = now_s - self._last_needed_s
        if num_coming and unneeded_s >= self._limits.idle_s:
            return Change(num_fewer_coming=min(num_coming, present - wanted))
        return Change(idle_id=None if num_coming else self._longest_idle(now_s))

    def _wanted(self, load: Load, present: int, now_s: float) -> int:
        wanted = 0
        if self.tokens_per_s:
            in_time = self.tokens_per_s * self._limits.target_queue_s
            wanted = math.ceil(load.num_tokens_to_do / in_time)
        if load.waited_s >= self._limits.target_queue_s:
            has_had_time = now_s - self._last_coming_s >= self._limits.target_queue_s
            wanted = max(wanted, present + has_had_time)
        return wanted

    def _measure(self, load: Load) -> None:
        """Take in what was computed since the last look."""
        took_s = load.compute_s - self._seen_s
        kept = math.exp(-took_s / _REMEMBERED_S)
        num_tokens = load.num_computed_tokens - self._num_seen_tokens
        self._num_tokens = kept * self._num_tokens + num_tokens
        self._compute_s = kept * self._compute_s + took_s
        self._num_seen_tokens, self._seen_s = load.num_computed_tokens, load.compute_s

    def _note_idle(self, load: Load, now_s: float) -> None:
        before = self._idle_since_s
        self._idle_since_s = {
            name: before.get(name, now_s) for name, is_busy in load.is_busy.items() if not is_busy
        }

    def _longest_idle(self, now_s: float) -> str | None:
        """Return the worker that has been idle for longest, if it was that for long enough."""
        found = min(self._idle_since_s, key=self._idle_since_s.__getitem__, default=None)
        if found is None or now_s - self._idle_since_s[found] < self._limits.idle_s:
            return None
        return found
