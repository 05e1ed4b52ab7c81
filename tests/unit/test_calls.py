"""What becomes of Ray's errors in calls to the scheduler."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from cluster.calls import SchedulerCalls
from cluster.patience import Unreachable


class OutOfReach:
    """A scheduler behind a `ray://` address whose connection is lost."""

    def __getattr__(self, method: str) -> Any:
        return self

    def remote(self, *args: Any) -> Any:
        raise ConnectionError("Request can't be sent because the Ray client has already closed")


def test_a_lost_connection_of_a_client_from_outside_is_a_scheduler_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    calls = SchedulerCalls(OutOfReach(), "scheduler", "haversack")
    with pytest.raises(Unreachable, match="already closed") as caught:
        calls.call("stats", timeout_s=1.0)
    assert not caught.value.is_absent
    calls.tell("acknowledge", 3)
