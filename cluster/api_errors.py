"""From our typed errors to what OpenAI's clients understand: a status, and an error object.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

The text is the error's own. `code` says which kind it is, for programs. The module knows no engine.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from typing_extensions import TypedDict

from scheduler.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    HaversackError,
    InvalidRequest,
    ModelNotFound,
    NumericalError,
    Overloaded,
    RequestFailed,
    RequestTooLarge,
)

_RETRY_S = 5
"""When to try again an engine that is out of reach: roughly what a worker takes to come back."""


class UnknownModel(HaversackError):
    """No model of that name is served here."""


class InvalidKey(HaversackError):
    """No API key was given, or one that is not known here."""


class BodyTooLarge(HaversackError):
    """The body of the HTTP request is larger than this endpoint takes."""


class UnreadableBody(HaversackError):
    """The body is compressed, which this endpoint does not undo."""


class _Kind(NamedTuple):
    status: int
    type: str
    code: str


_KINDS: dict[type[HaversackError], _Kind] = {
    InvalidKey: _Kind(401, "authentication_error", "invalid_api_key"),
    UnknownModel: _Kind(404, "not_found_error", "model_not_found"),
    BodyTooLarge: _Kind(413, "invalid_request_error", "body_too_large"),
    UnreadableBody: _Kind(415, "invalid_request_error", "unsupported_encoding"),
    RequestTooLarge: _Kind(400, "invalid_request_error", "request_too_large"),
    DuplicateRequest: _Kind(400, "invalid_request_error", "duplicate_request"),
    InvalidRequest: _Kind(400, "invalid_request_error", "invalid_value"),
    ModelNotFound: _Kind(400, "invalid_request_error", "no_tokenizer"),
    Overloaded: _Kind(429, "rate_limit_error", "overloaded"),
    Cancelled: _Kind(499, "request_cancelled", "request_cancelled"),
    DeadlineExceeded: _Kind(503, "service_unavailable_error", "deadline_exceeded"),
    EngineUnavailable: _Kind(503, "service_unavailable_error", "engine_unavailable"),
    NumericalError: _Kind(500, "server_error", "numerical_error"),
    RequestFailed: _Kind(500, "server_error", "request_failed"),
}
_UNEXPECTED = _Kind(500, "server_error", "internal_error")


class ErrorObject(TypedDict):
    """What a client is told of an error, in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str | None
    """Which kind of error it is, for programs."""


class ErrorBody(TypedDict):
    """The body of an answer that tells of an error, or an event of a stream that does."""

    error: ErrorObject


class ErrorAnswer(NamedTuple):
    """How an error is answered."""

    status: int
    headers: dict[str, str]
    error: ErrorObject

    @property
    def body(self) -> bytes:
        """The answer's JSON."""
        return msgspec.json.encode({"error": self.error})


def answer_to(error: HaversackError) -> ErrorAnswer:
    """Return what to answer where `error` came up."""
    kind = next((_KINDS[cls] for cls in type(error).__mro__ if cls in _KINDS), _UNEXPECTED)
    headers = {}
    if isinstance(error, Overloaded):
        asked_s = error.details.get("retry_after_s")
        headers["retry-after"] = str(
            math.ceil(asked_s) if isinstance(asked_s, (int, float)) else _RETRY_S
        )
    elif isinstance(error, EngineUnavailable):
        headers["retry-after"] = str(_RETRY_S)
    elif isinstance(error, InvalidKey):
        headers["www-authenticate"] = "Bearer"
    param = error.details.get("param")
    code = "context_length_exceeded" if "max_model_len" in error.details else kind.code
    return error_answer(
        kind.status, error.message, kind.type, code, str(param) if param else None, headers
    )


def error_answer(
    status: int,
    message: str,
    type_: str = "invalid_request_error",
    code: str | None = None,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> ErrorAnswer:
    """Return an answer in OpenAI's shape; halves of characters in the texts become "?"."""
    error: ErrorObject = {
        "message": _sendable(message),
        "type": type_,
        "param": None if param is None else _sendable(param),
        "code": code,
    }
    return ErrorAnswer(status, headers or {}, error)


def answer_to_invalid(errors: Sequence[Any], known_fields: Sequence[str]) -> ErrorAnswer:
    """Return what to answer to a body that its pydantic model refuses.

    Args:
        errors: as pydantic lists them; the first one is told.
        known_fields: of the body's model, to name the nearest one.
    """
    first = most_telling(errors)
    place = _fields(first["loc"][1:])
    param = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(place[-1], known_fields, n=1) if len(place) == 1 else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        message = f"unknown field {param!r}: this endpoint does not have it{hint}"
        return error_answer(400, message, code="unknown_field", param=param)
    if first["type"] == "json_invalid":
        return error_answer(400, f"the body is no valid JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "string_unicode" and not place:
        message = "the body has a field whose name holds half of a character (a lone surrogate)"
        return error_answer(400, message, code="unknown_field")
    if not place:
        message = "the body is no JSON object: send one, with content-type: application/json"
        return error_answer(400, message, code="invalid_json")
    message = first["msg"].removeprefix("Value error, ")
    return error_answer(400, f"{param}: {message}", code="invalid_value", param=param)


def most_telling(errors: Sequence[Any]) -> Any:
    """Return the error to tell: the first; of a field of several forms, that of the form given.

    What pydantic lists first there is that the value is no text. What is wrong inside of a list
    stands deeper.
    """
    first = errors[0]
    if not first["loc"] or not _is_form(first["loc"][-1]):
        return first
    field = list(first["loc"][:-1])
    same = (error for error in errors if list(error["loc"][: len(field)]) == field)
    return max(same, key=lambda error: len(error["loc"]))


def _fields(place: Sequence[Any]) -> list[str]:
    """Return a place in a body without the forms that pydantic names in it."""
    return [str(part) for part in place[:1]] + [str(p) for p in place[1:] if not _is_form(p)]


def _is_form(part: Any) -> bool:
    return part == "str" or str(part).startswith("list[")


def _sendable(text: str) -> str:
    return text.encode(errors="replace").decode()
