"""A client may hang up, or Serve give up, at any moment: what an answer holds is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.types import Message

from cluster.api_streaming import EventStream, unless_gone
from scheduler.errors import Cancelled


async def nothing() -> AsyncIterator[Any]:
    for each in ():
        yield each


class Work:
    """Makes a stream that holds something, after some turns of the event loop."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns
        self.has_taken = False
        self.has_given_back = False

    async def run(self) -> EventStream:
        async with AsyncExitStack() as stack:
            for _ in range(self._num_turns):
                await asyncio.sleep(0)
            self.has_taken = True
            stack.callback(self._give_back)
            return EventStream(nothing(), stack.pop_all())

    def _give_back(self) -> None:
        self.has_given_back = True


async def stays() -> Message:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_turns", range(4))
@pytest.mark.parametrize("cancelled_after", range(1, 12))
def test_a_stream_whose_taker_is_cancelled_is_closed(num_turns: int, cancelled_after: int) -> None:
    """Serve cancels the replica's task when a client is gone, be its stream just made or not."""

    async def scene() -> None:
        work = Work(num_turns)
        taker = asyncio.ensure_future(unless_gone(stays, work.run()))
        await turns(cancelled_after)
        taker.cancel()
        await asyncio.gather(taker, return_exceptions=True)
        await turns(3)
        is_handed_on = not taker.cancelled() and isinstance(taker.result(), EventStream)
        assert work.has_given_back == (work.has_taken and not is_handed_on)

    asyncio.run(scene())


@pytest.mark.parametrize("num_turns", range(4))
@pytest.mark.parametrize("gone_after", range(8))
def test_a_stream_whose_client_hangs_up_meanwhile_is_closed(
    num_turns: int, gone_after: int
) -> None:
    async def scene() -> None:
        work = Work(num_turns)

        async def leaves() -> Message:
            await turns(gone_after)
            return {"type": "http.disconnect"}

        try:
            await unless_gone(leaves, work.run())
        except Cancelled:
            await turns(3)
            assert work.has_given_back == work.has_taken
        else:
            assert work.has_taken
            assert not work.has_given_back

    asyncio.run(scene())
