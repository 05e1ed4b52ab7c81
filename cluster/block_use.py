"""How many blocks of each worker were in use while something ran: samples, bounded in number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cluster.pictures import worker_view
from scheduler.errors import HaversackError
from scheduler.messages import WorkerReport

_INTERVAL_S = 0.25
_MAX_SAMPLES = 400
"""When there are more, every other one goes, and half as many come from then on."""


class BlockUse:
    """Looks at an engine's workers from time to time, on a thread of its own."""

    def __init__(self, workers: Callable[[], list[WorkerReport]]) -> None:
        """Begin.

        Args:
            workers: tells the workers as they are now; where it raises, that look is left out.
        """
        self._workers = workers
        self._last: dict[str, WorkerReport] = {}
        self._samples: dict[str, list[tuple[float, int]]] = {}
        self._interval_s = _INTERVAL_S
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="haversack-block-use", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def views(self, base_s: float) -> list[dict[str, Any]]:
        """Return what pages draw of each worker that was seen, as it was seen last.

        Args:
            base_s: what the samples' times are told after.
        """
        with self._lock:
            return [
                worker_view(report)
                | {"samples": [(round(t - base_s, 3), n) for t, n in self._samples[name]]}
                for name, report in self._last.items()
            ]

    def _run(self) -> None:
        while True:
            with suppress(HaversackError):
                self.add(self._workers(), time.time())
            if self._over.wait(self._interval_s):
                return

    def add(self, reports: list[WorkerReport], now_s: float) -> None:
        """Take a sample."""
        with self._lock:
            for report in reports:
                self._last[report.worker_id] = report
                samples = self._samples.setdefault(report.worker_id, [])
                samples.append((now_s, report.num_used_blocks))
            if any(len(samples) > _MAX_SAMPLES for samples in self._samples.values()):
                self._interval_s *= 2
                for samples in self._samples.values():
                    del samples[1::2]
