"""What can befall an engine's processes and requests, each chosen by a seeded random source."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable

import ray

from cluster import Client
from cluster.fleet import find_parts, part_name
from scheduler.errors import HaversackError, InvalidRequest
from scheduler.messages import WorkerReport
from tests.engine.conftest import pid_of

_ASK_S = 10.0
_PAUSE_S = 2.0
_DRAIN_S = 5.0


def engine_of(client: Client) -> tuple[str, str]:
    """Return the namespace and the name of a client's engine."""
    settings = client.info.settings
    return str(settings["namespace"]), str(settings["name"])


def num_parts(client: Client) -> Counter[str]:
    """Count the engine's actors: "worker", "store", "scheduler"."""
    return Counter(part.split("-")[0] for part in find_parts(*engine_of(client)))


def actor_pid(client: Client, part: str) -> int | None:
    """Return the process of the scheduler or the store; None while it is down or frozen."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        return pid_of(part_name(engine_of(client)[1], part), _ASK_S)
    return None


def send(pid: int | None, sign: int) -> None:
    """Send a signal to a process that may be gone."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


class Faults:
    """The faults of one engine, by name."""

    def __init__(self, client: Client, rng: random.Random) -> None:
        self._client = client
        self._rng = rng
        self.kinds: dict[str, Callable[[], None]] = {
            "kill worker": lambda: self._signal_worker(signal.SIGKILL),
            "freeze worker": lambda: self._signal_worker(signal.SIGSTOP),
            "kill every worker": self._kill_workers,
            "kill store": lambda: send(actor_pid(client, "store"), signal.SIGKILL),
            "freeze store": lambda: send(actor_pid(client, "store"), signal.SIGSTOP),
            "kill scheduler": lambda: send(actor_pid(client, "scheduler"), signal.SIGKILL),
            "pause scheduler": self._pause_scheduler,
            "drain worker": self._drain,
            "migrate": self._migrate,
            "evict": self._evict,
        }

    def _worker(self) -> WorkerReport | None:
        workers = sorted(self._client.workers(), key=lambda worker: worker.worker_id)
        return self._rng.choice(workers) if workers else None

    def _signal_worker(self, sign: int) -> None:
        worker = self._worker()
        send(worker.pid if worker else None, sign)

    def _kill_workers(self) -> None:
        for worker in self._client.workers():
            send(worker.pid, signal.SIGKILL)

    def _pause_scheduler(self) -> None:
        pid = actor_pid(self._client, "scheduler")
        send(pid, signal.SIGSTOP)
        threading.Timer(_PAUSE_S, send, (pid, signal.SIGCONT)).start()

    def _drain(self) -> None:
        worker = self._worker()

        def drain() -> None:
            with contextlib.suppress(HaversackError):
                self._client.drain(worker.worker_id if worker else "", _DRAIN_S, replace=True)

        threading.Thread(target=drain, daemon=True).start()

    def _some_requests(self) -> list[str]:
        ids = [info.request_id for info in self._client.requests()]
        return self._rng.sample(ids, min(len(ids), 10))

    def _migrate(self) -> None:
        for request_id in self._some_requests():
            worker = self._worker()
            with contextlib.suppress(InvalidRequest):
                self._client.migrate(request_id, worker.worker_id if worker else "")

    def _evict(self) -> None:
        for request_id in self._some_requests():
            self._client.evict(request_id)
