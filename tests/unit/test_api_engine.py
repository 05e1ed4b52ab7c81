"""The endpoint's side of the engine: what becomes of a submission whose client hangs up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.api_engine import ApiEngine, Options
from scheduler.sampling_params import SamplingParams

OPTIONS = Options("mine", 0, None, None)


class Handle:
    """A handle that notes whether it is cancelled."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def done(self) -> bool:
        return False

    def cancel(self) -> None:
        self.is_cancelled = True


class OpenEngine(ApiEngine):
    """Submits when the test says so."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[list[Handle]] = asyncio.get_running_loop().create_future()
        self._client: Any = SimpleNamespace(submit_many=None)
        self._live_ids = set()

    async def run(self, *args: Any, **keywords: Any) -> Any:
        return await self.answer


async def turns(count: int) -> None:
    """Let the loop go round so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_turns_before", range(-1, 8))
def test_whenever_a_client_hangs_up_what_was_submitted_for_it_is_cancelled(
    num_turns_before: int,
) -> None:
    """Before the scheduler has answered, after it, and in each turn of the loop in between."""

    async def test() -> None:
        engine, handles = OpenEngine(), [Handle(), Handle()]

        async def ask() -> None:
            async with engine.requests(["a", "b"], SamplingParams(), OPTIONS):
                await asyncio.get_running_loop().create_future()

        asking = asyncio.ensure_future(ask())
        await turns(5)
        if num_turns_before >= 0:
            engine.answer.set_result(handles)
            await turns(num_turns_before)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        if not engine.answer.done():
            engine.answer.set_result(handles)
        await turns(5)
        assert [handle.is_cancelled for handle in handles] == [True, True]
        assert not engine._live_ids

    asyncio.run(test())
