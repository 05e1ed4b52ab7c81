"""The wanted workers of an engine as places: who fills which, how many lack, who comes back.

Rules:
- A worker's id is worker-N, and no N is used twice in an engine's life, the scheduler's restarts
  included: what is said about a worker is never about another one.
- Places that an operator drained, or that were given up, are barred: nobody is to fill them.
The module starts nobody and tells nobody: that is the supervisor's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from scheduler.fleet import FleetWorker
from scheduler.messages import WorkerInfo
from scheduler.restarts import Death, RestartLimits, RestartPolicy


class Memory(msgspec.Struct):
    """What the next scheduler has to know of the workers."""

    num_workers: int
    """Wanted, but for those that an operator drained."""
    next_number: int = 0
    drained_ids: list[str] = []
    """Workers that an operator drained: so many fewer are wanted."""
    info: WorkerInfo | None = None
    """What one of the workers said; they are all alike."""
    epoch: int = 0
    """Of the latest scheduler; workers take orders of later ones only."""


@dataclass
class Place:
    """One of the wanted workers, whoever fills it now."""

    worker_id: str
    policy: RestartPolicy
    asked_s: float
    """When its current worker was asked for."""
    is_found: bool = False
    """Whether an earlier scheduler started that worker."""
    is_expected: bool = False
    """Whether the engine waits for that worker."""
    is_leaving: bool = False
    """Whether it is being drained: nobody follows it here."""
    bringing: asyncio.Task[None] | None = None
    """What has its worker come up."""
    worker: FleetWorker | None = None
    """Set while it is ready."""
    info: WorkerInfo | None = None
    ready_s: float = 0.0
    num_steps_seen: int = 0
    """Of its worker, at the last look at the load."""

    def has_worked(self) -> bool:
        """Whether its worker was given a step since this was asked last."""
        before = self.num_steps_seen
        self.num_steps_seen = self.worker.num_steps_begun if self.worker is not None else 0
        return self.num_steps_seen != before


class Places:
    """All places, by the id of the worker that fills each now."""

    def __init__(self, num_workers: int, limits: RestartLimits, clock: Callable[[], float]) -> None:
        """Have none yet; `num_workers` are wanted."""
        self.memory = Memory(num_workers)
        self.alone_since_s = clock()
        """Since when no worker has been ready, where none is."""
        self._limits = limits
        self._clock = clock
        self._places: dict[str, Place] = {}
        self._num_given_up = 0

    def __iter__(self) -> Iterator[Place]:
        """Go through those that are there now, in the order in which they came."""
        return iter(list(self._places.values()))

    def get(self, worker_id: str) -> Place | None:
        """Return the place that a worker fills."""
        return self._places.get(worker_id)

    def new(self, worker_id: str | None = None) -> Place:
        """Return a new place, for a worker that is there already or one with the next id."""
        place = Place(worker_id or self._next_id(), RestartPolicy(self._limits), self._clock())
        self._places[place.worker_id] = place
        return place

    def rename(self, place: Place) -> None:
        """Make room in a place for a new worker."""
        del self._places[place.worker_id]
        place.worker_id, place.asked_s = self._next_id(), self._clock()
        place.is_found = place.is_expected = False
        self._places[place.worker_id] = place

    def empty(self, place: Place) -> None:
        """Note that a place's worker is no more."""
        place.worker = place.info = None
        if self.num_ready() == 0:
            self.alone_since_s = self._clock()

    def remove(self, place: Place) -> None:
        """Have a place no more."""
        del self._places[place.worker_id]

    def give_up(self, place: Place) -> None:
        """Have a place no more, and nobody in its stead."""
        self.remove(place)
        self._num_given_up += 1

    def num_ready(self) -> int:
        """Return how many workers are ready."""
        return sum(place.worker is not None for place in self)

    def num_missing(self) -> int:
        """Return how many wanted workers nobody is on the way for."""
        return self.memory.num_workers - self.num_barred() - self._num_staying()

    def num_barred(self) -> int:
        """Return how many places nobody is to fill."""
        return len(self.memory.drained_ids) + self._num_given_up

    def want(self, num_more: int = 0) -> None:
        """Want those that stay or are on their way, and so many more."""
        self.memory.num_workers = self._num_staying() + self.num_barred() + num_more

    def death(self, place: Place) -> Death:
        """Return how a place's worker died, if it died now."""
        worker = place.worker
        if worker is None:
            return Death.FRUITLESS
        if worker.num_steps_done > 0:
            return Death.HAD_WORKED
        if worker.num_steps_begun > 0:
            return Death.IN_FIRST_STEP
        is_proven = self._clock() - place.ready_s >= self._limits.proving_s
        return Death.HAD_WORKED if is_proven else Death.FRUITLESS

    def _next_id(self) -> str:
        number = self.memory.next_number
        self.memory.next_number += 1
        return f"worker-{number}"

    def _num_staying(self) -> int:
        """Return how many workers are there or on their way, and are not being drained."""
        return sum(not place.is_leaving for place in self)
