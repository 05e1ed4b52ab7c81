"""What every HTTP request passes on its way in and out: keys, the size of its body, the counters.

Keys are compared as digests, in a time that says nothing about them, and stand in no log. The
module knows ASGI, and nothing of what is asked.
"""

from __future__ import annotations

import hmac
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api_errors import BodyTooLarge, ErrorAnswer, InvalidKey, UnreadableBody, answer_to
from cluster.api_metrics import ApiMetrics
from cluster.api_settings import ApiSettings, digest
from cluster.otel import coming_from
from scheduler.errors import HaversackError

OPEN_PATHS = frozenset({"/health", "/", ""})
"""What needs no key: probes have none, and the live page holds nothing but its script."""
HUNG_UP = 499


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, metrics: ApiMetrics) -> None:
        self._app = app
        self._digests = settings.key_digests
        self._max_body_bytes = settings.limits.max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s, status = time.monotonic(), HUNG_UP

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        traceparent = Headers(scope=scope).get("traceparent")
        with self._metrics.in_progress.track_inprogress(), coming_from(traceparent):
            try:
                await self._pass(scope, receive, send_counted)
            finally:
                route = getattr(scope.get("route"), "path", "unknown")
                self._metrics.answered(route, status, time.monotonic() - start_s)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_key(scope, headers)
            self._check_size(_number(headers.get("content-length")))
            _check_encoding(headers.get("content-encoding", "identity"))
        except HaversackError as error:
            await send_error(answer_to(error), send)
            return
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check_size(num_bytes)
            return message

        await self._app(scope, receive_limited, send)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not self._digests or path in OPEN_PATHS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = digest(key.strip())
        known = [hmac.compare_digest(given, each) for each in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            raise InvalidKey(
                "a valid API key is needed here: send it as 'Authorization: Bearer <key>'"
            )

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise BodyTooLarge(
                f"the body is larger than the {self._max_body_bytes:,} bytes that this endpoint "
                "takes: send less at once"
            )


async def send_error(answer: ErrorAnswer, send: Send) -> None:
    """Send an error as the whole answer."""
    body = answer.body
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **answer.headers,
    }
    raw: list[Any] = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise UnreadableBody(
            f"bodies with content-encoding {encoding!r} are not taken here: send it as it is"
        )


def _number(written: str | None) -> int:
    """Return a header's number, 0 where it holds none: what is sent is counted all the same."""
    is_number = written is not None and written.isascii() and written.isdigit()
    return int(written) if written is not None and is_number and len(written) < 20 else 0
