"""Answers that come as server-sent events, and clients that go away.

Rules:
- A client that hangs up ends the work for it at once, whether it waited for an answer or read a
  stream.
- A stream that has begun has its status already: an error that comes later is an event, in the
  shape that the body of an error has. In any case `[DONE]` is last.
The module knows no tokens and no scheduling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cluster.api_errors import RequestCancelled, answer_to
from cluster.handle import RequestHandle
from scheduler.errors import HaversackError
from scheduler.outputs import CompletionDelta

_DONE = b"data: [DONE]\n\n"

Found = TypeVar("Found")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Found]) -> Found:
    """Do some work while the client waits for it; where it hangs up, stop.

    Args:
        receive: brings what the client sends, its body having been read.

    Raises:
        RequestCancelled: the client has hung up. The work has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestCancelled("the client hung up")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


class EventStream(Response):
    """Sends events as they come, each the JSON of an answer."""

    media_type = "text/event-stream"

    def __init__(self, answers: AsyncIterator[Any], resources: AsyncExitStack) -> None:
        """Take over what is to be given back when the stream is over."""
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._answers = answers
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            try:
                await unless_gone(receive, self._send(send))
            except RequestCancelled:
                return

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            async for answer in self._answers:
                await self._send_part(send, _event(answer))
        except HaversackError as error:
            await self._send_part(send, _event({"error": answer_to(error).error}))
        await self._send_part(send, _DONE, more=False)

    async def _send_part(self, send: Send, data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})


def _event(answer: Any) -> bytes:
    return b"data: " + msgspec.json.encode(answer) + b"\n\n"


async def merged(
    handles: Sequence[RequestHandle],
) -> AsyncIterator[tuple[int, CompletionDelta]]:
    """Yield the deltas of several requests as they come, each with its request's place.

    Raises:
        HaversackError: why one of them failed, after what came before that.
    """
    # So few that a client that reads slowly gets larger deltas instead of a queue of them.
    queue: asyncio.Queue[tuple[int, CompletionDelta | HaversackError | None]] = asyncio.Queue(
        len(handles)
    )

    async def feed(place: int, handle: RequestHandle) -> None:
        try:
            async for delta in handle.stream():
                await queue.put((place, delta))
        except HaversackError as error:
            await queue.put((place, error))
        else:
            await queue.put((place, None))

    feeders = [asyncio.ensure_future(feed(*each)) for each in enumerate(handles)]
    num_live = len(feeders)
    try:
        while num_live:
            place, item = await queue.get()
            if item is None:
                num_live -= 1
            elif isinstance(item, HaversackError):
                raise item
            else:
                yield place, item
    finally:
        for feeder in feeders:
            feeder.cancel()
        await asyncio.gather(*feeders, return_exceptions=True)
