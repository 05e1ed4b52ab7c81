"""Typed errors that a user or an operator can meet.

Each says what was wrong, what is allowed and what to do. All of them survive pickling (Ray raises
them in another process) and travel in messages as `WireError`. This module knows nothing else of
the engine.
"""

from __future__ import annotations

from typing import Any

import msgspec

_MAX_MESSAGE_CHARS = 8192
"""Room for any text of ours and a traceback beside it."""


class WireError(msgspec.Struct, frozen=True):
    """A `HaversackError` inside a message: the class by name, its text and its facts."""

    kind: str
    message: str
    details: dict[str, str | int | float | bool | None] = {}


class HaversackError(Exception):
    """Base of every error of the engine.

    `details` holds the facts behind the text (numbers, names) for programs that want them. Of a
    text that is longer than anybody reads, since it shows what a user gave, the middle is left out.
    """

    def __init__(self, message: str, **details: str | int | float | bool | None) -> None:
        message = _bounded(message)
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details))

    def to_wire(self) -> WireError:
        """Return this error as a message part."""
        return WireError(type(self).__name__, self.message, dict(self.details))


def _bounded(message: str) -> str:
    if len(message) <= _MAX_MESSAGE_CHARS:
        return message
    half = _MAX_MESSAGE_CHARS // 2 - 50
    story = f" [... {len(message) - 2 * half} characters left out ...] "
    return message[:half] + story + message[-half:]


def _rebuild(cls: type[HaversackError], message: str, details: dict[str, Any]) -> HaversackError:
    return cls(message, **details)


class InvalidRequest(HaversackError, ValueError):
    """The request itself is wrong; sending it again unchanged can't help.

    `details["param"]` names the offending parameter where there is one.
    """


class RequestTooLarge(InvalidRequest):
    """The request can never fit the model's context, a worker's block pool or the row budget."""


class DuplicateRequest(InvalidRequest):
    """A live request already has this id; the first one is not touched."""


class UnknownClient(HaversackError):
    """The scheduler does not know this client, or not any more: it has to connect first."""


class UnknownRequest(InvalidRequest):
    """No live request and no kept result has this id."""


class UnknownWorker(InvalidRequest):
    """The engine has no worker of this name."""


class CannotMigrate(InvalidRequest):
    """The request can't be moved there now; it goes on where it is."""


class Overloaded(HaversackError):
    """The queue is full; `details["retry_after_s"]` says when to try again."""


class RequestFailed(HaversackError):
    """The engine accepted the request but could not compute it; other requests are unharmed."""


class Cancelled(RequestFailed):
    """The request was cancelled before it was done, by its client or by an operator."""


class DeadlineExceeded(RequestFailed):
    """The request was not done within its `timeout_s`."""


class NumericalError(RequestFailed):
    """The model produced NaN for this request; nothing of it was cached or saved."""


class UnsupportedModel(HaversackError):
    """The model's architecture, format or size can't be run by this engine."""


class ModelNotFound(HaversackError):
    """No model with this name could be found locally or fetched."""


class InvalidConfig(HaversackError, ValueError):
    """An engine setting is unknown, has the wrong type or an impossible value."""


class OutputConflict(HaversackError):
    """Results can't go where they were to go: what is there belongs to something else."""


class MissingPackage(HaversackError):
    """An optional package is needed for this and is not installed."""


class StartupFailed(HaversackError):
    """The engine did not come up in time, or a part of it died while starting."""


class EngineUnavailable(HaversackError):
    """No engine is running, it has shut down, or no worker is left to compute."""


class StaleEpoch(HaversackError):
    """A worker serves a newer scheduler than the one that this call is for; it did nothing.

    `details` has the call's `epoch` and the worker's, `current_epoch` (None: not reset yet).
    """


class InvalidTransition(HaversackError):
    """A request was asked to change its status in a way the transition table forbids.

    The message carries the story of the request so far.
    """


class InvariantViolation(HaversackError):
    """An invariant of the engine does not hold: a bug in the engine, never the user's fault."""


def _kinds(base: type[HaversackError]) -> dict[str, type[HaversackError]]:
    found = {base.__name__: base}
    for sub in base.__subclasses__():
        found.update(_kinds(sub))
    return found


def from_wire(error: WireError) -> HaversackError:
    """Return the exception that `error` stands for (`RequestFailed` for a kind unknown here)."""
    cls = _kinds(HaversackError).get(error.kind, RequestFailed)
    return cls(error.message, **error.details)
