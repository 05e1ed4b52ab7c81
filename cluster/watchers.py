"""Looks at requests when they are over, on a thread of its own, so that no answer waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from cluster.handle import RequestHandle

logger = logging.getLogger(__name__)

Look = Callable[[RequestHandle], object]
"""Is given a request that is over, however it ended."""

_SETTLE_TIMEOUT_S = 30.0


class Watchers:
    """Those who look at what becomes of a client's requests."""

    def __init__(self) -> None:
        """Begin with nobody, and without a thread."""
        self._looks: list[Look] = []
        self._lock = threading.Lock()
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, look: Look) -> None:
        """Have all requests looked at that are made from now on."""
        with self._lock:
            self._looks.append(look)

    def remove(self, look: Look) -> None:
        """End that; what was over before has been looked at when this returns."""
        with self._lock:
            self._looks.remove(look)
        self.settle()

    def follow(self, handle: RequestHandle) -> None:
        """Have a new request looked at by those who are there now, once it is over."""
        with self._lock:
            looks = list(self._looks)
        for look in looks:
            handle.add_done_callback(partial(self._put, partial(look, handle)))

    def settle(self) -> None:
        """Return when what was over before has been looked at."""
        with self._lock:
            if self._thread is None:
                return
        done = threading.Event()
        self._work.put(done.set)
        done.wait(_SETTLE_TIMEOUT_S)

    def close(self) -> None:
        """Look at what is over, and end the thread."""
        self.settle()
        self._work.put(None)

    def _put(self, work: Callable[[], object]) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="haversack-watchers", daemon=True
                )
                self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("a request that is over could not be looked at")
            # A result may be hundreds of megabytes, and the next one hours away.
            del work
