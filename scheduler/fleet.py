"""What starts workers, on whatever there is to run them on, as the supervisor sees it."""

from __future__ import annotations

from typing import Protocol

from scheduler.calls import Worker
from scheduler.messages import WorkerInfo


class WorkerDied(Exception):
    """A worker's process ended, or was ended, before the worker was ready."""


class FleetWorker(Worker, Protocol):
    """A worker that counts its steps."""

    num_steps_begun: int
    num_steps_done: int
    """Those that were answered; a worker that has none has not proved itself."""


class Fleet(Protocol):
    """Starts workers on whatever there is to run them on."""

    async def start(self, worker_id: str, epoch: int) -> tuple[FleetWorker, WorkerInfo]:
        """Start a worker and return when it serves `epoch`; wait for room as long as it takes.

        Where this is cancelled, nothing of the worker is left.

        Raises:
            WorkerDied: it ended first.
            HaversackError: it can't be started, for a reason that starting it again won't change.
        """

    async def take_over(self, worker_id: str, epoch: int) -> tuple[FleetWorker, WorkerInfo]:
        """Have a worker that an earlier scheduler started serve `epoch`; end it where it won't.

        Raises:
            WorkerDied: it had ended, or did not answer in time.
        """

    async def find(self) -> list[str]:
        """Return the ids of workers that an earlier scheduler started and that are still there."""

    async def shortage(self) -> str:
        """Return, as sentences, what the workers asked for and what there is."""

    async def draining_nodes(self) -> dict[str, float]:
        """Return the ids of nodes that are to go, and in how many seconds."""

    async def remember(self, memory: bytes) -> None:
        """Keep `memory` where the next scheduler finds it."""

    async def recall(self) -> bytes | None:
        """Return what was remembered last."""
