"""Answers on their way: whole ones, those that come as server-sent events, clients that go away.

Rules:
- A client that hangs up ends the work for it at once, whether it waited for an answer or read a
  stream.
- What an answer holds is given back, at whichever moment whoever waits for it is cancelled.
- A stream that has begun has its status already: an error that comes later is an event, in the
  shape that the body of an error has. In any case `[DONE]` is last.
- What is long is sent in parts: handing on all of it at once would hold up everybody else.
The module knows no tokens and no scheduling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cluster.api_errors import answer_to
from cluster.handle import RequestHandle
from scheduler.errors import Cancelled, HaversackError
from scheduler.outputs import CompletionDelta

_DONE = b"data: [DONE]\n\n"
_PART_BYTES = 2**20
_closing: set[asyncio.Future[None]] = set()
"""Streams that are being closed; the event loop itself would let go of them."""

Found = TypeVar("Found")
Bytes: TypeAlias = "bytes | np.ndarray[Any, np.dtype[np.uint8]]"
"""Bytes, or an array of them."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Found]) -> Found:
    """Do some work while the client waits for it; where it hangs up, stop.

    Args:
        receive: brings what the client sends, its body having been read.

    Raises:
        Cancelled: the client has hung up. The work has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client hung up")
        # Nothing is waited for from here on: whoever is cancelled then would lose what was found.
        gone.cancel()
        return task.result()
    except BaseException:
        task.cancel()
        gone.cancel()
        task.add_done_callback(_give_back)
        await asyncio.gather(task, gone, return_exceptions=True)
        raise


def _give_back(task: asyncio.Future[Any]) -> None:
    """Close a stream that came too late: nobody will send it, and it holds requests."""
    if not task.cancelled() and task.exception() is None:
        found = task.result()
        if isinstance(found, EventStream):
            closing = asyncio.ensure_future(found.aclose())
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)


async def _gone(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


class Json(Response):
    """An answer in one piece, which is JSON already."""

    media_type = "application/json"

    def __init__(self, body: Bytes) -> None:
        self.status_code = 200
        self.background = None
        self._body = body
        self.init_headers({"content-length": str(len(body))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_start(send, self)
        await _send_parts(send, self._body)
        await _send_part(send, b"", more=False)


class EventStream(Response):
    """Sends events as they come."""

    media_type = "text/event-stream"

    def __init__(self, answers: AsyncIterator[Any], resources: AsyncExitStack) -> None:
        """Take over what is to be given back when the stream is over.

        Args:
            answers: each the JSON of an event; or bytes that are events already, see `event`.
            resources: what goes with them.
        """
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._answers = answers
        self._resources = resources

    async def aclose(self) -> None:
        """Give back what goes with it, where it is not sent."""
        await self._resources.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            try:
                await unless_gone(receive, self._send(send))
            except Cancelled:
                return

    async def _send(self, send: Send) -> None:
        await _send_start(send, self)
        try:
            async for answer in self._answers:
                is_made = isinstance(answer, (bytes, np.ndarray))
                await _send_parts(send, answer if is_made else event(answer))
        except HaversackError as error:
            await _send_part(send, event({"error": answer_to(error).error}))
        await _send_part(send, _DONE, more=False)


def event(answer: Any) -> bytes:
    """Return an event that holds the JSON of an answer."""
    return b"data: " + msgspec.json.encode(answer) + b"\n\n"


async def _send_start(send: Send, response: Response) -> None:
    status, headers = response.status_code, response.raw_headers
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_parts(send: Send, data: Bytes) -> None:
    for start in range(0, len(data), _PART_BYTES):
        await _send_part(send, bytes(data[start : start + _PART_BYTES]))


async def _send_part(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


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
