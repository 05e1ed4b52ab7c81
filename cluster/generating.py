"""Submitting more than the engine's queue may hold: in order, and no faster than room comes.

The module knows no Ray, and of a request only its handle.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.handle import RequestHandle
from cluster.patience import pause_before_retry
from scheduler.errors import HaversackError, Overloaded

Submit = Callable[[list[RequestHandle]], "list[RequestHandle | HaversackError]"]
"""Returns for each handle itself, or why it was refused."""
_MAX_BATCH = 1024


def submit_as_room_comes(
    handles: list[RequestHandle], submit: Submit, wait: Callable[[float], object] = time.sleep
) -> None:
    """Submit all, the first ones first; wait and try again where the queue is full.

    One that is refused for another reason ends with that, and nothing after it is sent any more.

    Args:
        wait: lets so many seconds pass.

    Raises:
        EngineUnavailable: the engine is gone.
    """
    pending, size = handles, _MAX_BATCH
    while pending:
        batch, pending = pending[:size], pending[size:]
        waiting: list[RequestHandle] = []
        pause_s = 0.0
        for handle, outcome in zip(batch, submit(batch), strict=True):
            if isinstance(outcome, Overloaded):
                waiting.append(handle)
                pause_s = max(pause_s, pause_before_retry(outcome))
            elif isinstance(outcome, HaversackError):
                handle.fail(outcome)
                pending = []
                break
        size = max(len(batch) - len(waiting), 1) if waiting else min(2 * size, _MAX_BATCH)
        pending = waiting + pending
        if waiting:
            wait(pause_s)
