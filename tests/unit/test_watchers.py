"""Looking at requests that are over keeps nothing of them."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from cluster.handle import RequestHandle
from cluster.watchers import Watchers
from scheduler.codec import int_array
from scheduler.errors import EngineUnavailable
from scheduler.messages import Submission
from scheduler.sampling_params import SamplingParams

DEADLINE_S = 20.0


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_looked_at_takes_no_memory_while_nothing_else_comes(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread waits for the next request, maybe for hours; a result may be hundreds of MB."""
    # What is logged is kept by pytest, with the frames of its error.
    monkeypatch.setattr("cluster.watchers.logger.exception", lambda _: None)
    watchers, looked = Watchers(), threading.Event()

    def look(handle: RequestHandle) -> None:
        looked.set()
        if fails:
            raise ValueError("no good")

    watchers.add(look)
    submission = Submission("r", int_array([1]), SamplingParams(max_tokens=1), seed=0)
    handle = RequestHandle(submission, None, None, lambda ids: None)
    watchers.follow(handle)
    handle.fail(EngineUnavailable("it is over"))
    assert looked.wait(DEADLINE_S)
    gone = threading.Event()
    weakref.finalize(handle, gone.set)
    del handle
    gc.collect()
    assert gone.wait(DEADLINE_S)
    watchers.close()
