"""What a client asks of the scheduler is no part of the Ray task in which it asks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.exceptions import TaskCancelledError

from cluster.calls import SchedulerCalls
from tests.engine.conftest import DEADLINE_S, wait_for


@ray.remote(num_cpus=0)
class Slow:
    """Stands for a scheduler that does a call a little later."""

    def __init__(self) -> None:
        self._may_go_on = asyncio.Event()
        self._came: set[str] = set()
        self._ended: dict[str, str] = {}

    async def cancel(self, name: str) -> None:
        self._came.add(name)
        try:
            await self._may_go_on.wait()
        except asyncio.CancelledError:
            self._ended[name] = "cancelled"
            raise
        self._ended[name] = "done"

    async def look(self) -> tuple[set[str], dict[str, str]]:
        return self._came, self._ended

    async def go_on(self) -> None:
        self._may_go_on.set()


@ray.remote(num_cpus=0)
class Asker:
    """Stands for an endpoint: an async actor whose tasks are cancelled when clients hang up."""

    async def ask(self, slow: Any) -> None:
        calls = SchedulerCalls(slow, "slow", "")
        calls.tell("cancel", "told")
        await asyncio.to_thread(calls.call, "cancel", "called", timeout_s=DEADLINE_S)


def test_a_call_is_done_also_where_the_task_that_made_it_is_cancelled(local_cluster: None) -> None:
    """Serve cancels the task of a client that hangs up, and Ray what that task has called."""
    slow = Slow.remote()  # type: ignore[attr-defined]
    asker = Asker.remote()  # type: ignore[attr-defined]
    asked = asker.ask.remote(slow)
    names = {"told", "called"}
    wait_for(lambda: ray.get(slow.look.remote())[0] == names, "both calls have come")
    ray.cancel(asked)
    with pytest.raises(TaskCancelledError):
        ray.get(asked, timeout=DEADLINE_S)
    ray.get(slow.go_on.remote())
    wait_for(lambda: set(ray.get(slow.look.remote())[1]) == names, "both have ended")
    assert ray.get(slow.look.remote())[1] == dict.fromkeys(names, "done")
