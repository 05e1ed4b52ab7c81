"""One client's line to the scheduler: calls there, and what is new coming back.

Rules:
- A thread keeps one long poll under way. What it brings is acknowledged by the next one, so an
  answer that is lost comes again, and none is handed on twice.
- The line ends once, with an error that says why; whoever is interested is told.
The module knows no request beyond its id, and no text.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from scheduler.codec import decode, encode
from scheduler.errors import EngineUnavailable, HaversackError, WireError, from_wire
from scheduler.messages import OutputDelta, RequestInfo, Submission
from scheduler.outbox import EngineInfo, EngineStats, PollAnswer

logger = logging.getLogger(__name__)

_POLL_TIMEOUT_S = 10.0
_POLL_GRACE_S = 20.0
_CALL_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 5.0
_UNREACHABLE_S = 30.0
"""How long a scheduler may be out of reach before it counts as gone."""
_RETRY_S = 0.5

OnDelta = Callable[[OutputDelta, int], None]
"""Called with a delta and the bytes of the message that it came in."""
OnLoss = Callable[[HaversackError], None]
"""Called when nothing more will come of what was submitted so far, with the reason."""


class Connection:
    """A client's outbox at the scheduler, and the thread that empties it."""

    def __init__(self, scheduler: Any, on_delta: OnDelta, on_loss: OnLoss) -> None:
        """Connect; both functions are called on the connection's thread, from `start` on.

        Raises:
            EngineUnavailable: the scheduler is gone.
        """
        self.client_id = secrets.token_hex(8)
        self._scheduler = scheduler
        self._on_delta = on_delta
        self._on_loss = on_loss
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run, name=f"haversack-client-{self.client_id}", daemon=True
        )
        self.info = self._connect()

    def start(self) -> None:
        """Begin to fetch what is new."""
        self._thread.start()

    def submit(self, submissions: list[Submission]) -> list[HaversackError | None]:
        """Return for each submission why it was refused, or None where it was taken."""
        answer = self._call("submit", self.client_id, encode(submissions))
        refusals: list[WireError | None] = decode(answer, list[WireError | None])
        return [from_wire(refusal) if refusal is not None else None for refusal in refusals]

    def cancel(self, request_ids: list[str]) -> None:
        """Cancel, and return when the scheduler has done it."""
        self._call("cancel", request_ids)

    def tell_cancel(self, request_ids: list[str]) -> None:
        """Ask the scheduler to cancel, without waiting; a dead one is noticed elsewhere."""
        if request_ids:
            with contextlib.suppress(RayError):
                self._scheduler.cancel.remote(request_ids)

    def evict(self, request_ids: list[str]) -> None:
        self._call("evict", request_ids)

    def stats(self) -> EngineStats:
        return decode(self._call("stats"), EngineStats)

    def requests(self) -> list[RequestInfo]:
        return decode(self._call("requests"), list[RequestInfo])

    def close(self) -> None:
        """Cancel at the scheduler what is left of this client, and end the thread."""
        self._is_closing = True
        with contextlib.suppress(RayError):
            ray.get(self._scheduler.disconnect.remote(self.client_id), timeout=_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _connect(self) -> EngineInfo:
        return decode(self._call("connect", self.client_id), EngineInfo)

    def _call(self, method: str, *args: Any) -> bytes:
        """Return the scheduler's answer.

        Raises:
            HaversackError: what it raised.
            EngineUnavailable: it is dead or does not answer.
        """
        try:
            answer: bytes = ray.get(
                getattr(self._scheduler, method).remote(*args), timeout=_CALL_TIMEOUT_S
            )
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, HaversackError):
                raise cause from None
            raise
        except RayError as error:
            raise EngineUnavailable(f"the engine does not answer: {error}") from error
        return answer

    def _run(self) -> None:
        try:
            reason = self._fetch()
        except Exception as error:
            logger.exception("the client's thread stops")
            reason = EngineUnavailable(f"the client stopped because of a bug in it: {error!r}")
        self._on_loss(reason)

    def _fetch(self) -> HaversackError:
        """Hand on what comes until the line ends; return why it did."""
        acked = 0
        last_answer_s = time.monotonic()
        while True:
            try:
                poll = self._scheduler.poll.remote(self.client_id, acked, _POLL_TIMEOUT_S)
                data: bytes = ray.get(poll, timeout=_POLL_TIMEOUT_S + _POLL_GRACE_S)
            except (GetTimeoutError, ActorUnavailableError) as error:
                if time.monotonic() - last_answer_s > _UNREACHABLE_S:
                    return EngineUnavailable(f"the engine does not answer: {error}")
                time.sleep(_RETRY_S)
                continue
            except RayError as error:
                return EngineUnavailable(f"the engine is gone: {error}")
            last_answer_s = time.monotonic()
            answer = decode(data, PollAnswer)
            for delivery in answer.deliveries:
                if delivery.seq > acked:
                    acked = delivery.seq
                    self._on_delta(delivery.delta, len(data))
            if answer.closed is not None and not answer.deliveries:
                return from_wire(answer.closed)
            if answer.is_forgotten:
                if self._is_closing:
                    return EngineUnavailable("the client was closed before the request had ended")
                acked = 0
                self._on_loss(
                    EngineUnavailable(
                        "the engine gave this client up, because it had not been heard of for "
                        "long, and cancelled its requests: submit them again"
                    )
                )
                try:
                    self._connect()
                except EngineUnavailable as error:
                    return error
