"""Traces in files: which requests go into one, and when they are written."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.chrome_trace import ChromeTrace
from cluster.handle import RequestHandle
from cluster.watchers import Watchers
from scheduler.errors import HaversackError
from scheduler.messages import Lives, RequestLife

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
MAX_ENDED = 256
"""Requests that have ended that the scheduler can tell of."""


@contextmanager
def trace_own(path: str | Path, watchers: Watchers) -> Iterator[ChromeTrace]:
    """Write the lives of requests that are submitted inside and are over at the end."""
    with ChromeTrace(path) as trace:

        def look(handle: RequestHandle) -> None:
            for index, life in enumerate(handle.lives()):
                name = handle.request_id + (f"#{index}" if len(handle.lives()) > 1 else "")
                trace.add(name, life or (), prompt_tokens=len(handle.submission.prompt_token_ids))

        watchers.add(look)
        try:
            yield trace
        finally:
            watchers.remove(look)


@contextmanager
def trace_all(path: str | Path, ask: Callable[[int, int], Lives]) -> Iterator[ChromeTrace]:
    """Write the lives of everybody's requests that end meanwhile.

    The engine is asked every now and then for those that have ended lately. Where more of them end
    in between than it remembers, some are missing, which the log says.

    Args:
        ask: `Client.lives`.
    """
    with ChromeTrace(path) as trace:
        looks = _Looks(trace, ask)
        over = threading.Event()
        thread = threading.Thread(
            target=looks.run, args=(over,), name="haversack-trace", daemon=True
        )
        thread.start()
        try:
            yield trace
        finally:
            over.set()
            thread.join()


class _Looks:
    """Asks again and again, and writes what is new."""

    def __init__(self, trace: ChromeTrace, ask: Callable[[int, int], Lives]) -> None:
        self._trace = trace
        self._ask = ask
        self._seen: deque[tuple[str, float]] = deque(maxlen=2 * MAX_ENDED)
        """Id and end of those that are written, or had ended before."""
        self._has_warned = False
        for life in ask(0, MAX_ENDED).ended:
            self._seen.append(_key(life))

    def run(self, over: threading.Event) -> None:
        while not over.wait(_LOOK_EVERY_S):
            self.look()
        self.look()

    def look(self) -> None:
        try:
            ended = self._ask(0, MAX_ENDED).ended
        except HaversackError as error:
            logger.warning("the trace misses what ends now: %s", error)
            return
        new = [life for life in ended if _key(life) not in self._seen]
        if len(new) == MAX_ENDED and not self._has_warned:
            self._has_warned = True
            logger.warning("more requests end than can be followed: the trace misses some")
        for life in new:
            self._seen.append(_key(life))
            self._trace.add(
                life.info.request_id,
                life.spans,
                prompt_tokens=life.info.num_prompt_tokens,
                output_tokens=life.info.num_output_tokens,
                client=life.info.client_id,
            )


def _key(life: RequestLife) -> tuple[str, float]:
    return life.info.request_id, life.spans[-1].start_s if life.spans else 0.0
