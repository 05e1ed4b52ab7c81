"""How the bodies of requests are read: large ones in the process for large work.

The module knows FastAPI's way from a body to a model, and nothing of what is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response

from cluster.api_engine import ApiEngine
from cluster.api_errors import most_telling
from cluster.api_models import Body, packed
from cluster.api_work import LARGE, Texts


class Unreadable(NamedTuple):
    """What is wrong with a body."""

    error: dict[str, Any]
    """As pydantic lists it."""


class BodyRoute(APIRoute):
    """A route whose large bodies are read elsewhere."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request of this route."""
        handle = super().get_route_handler()
        field = self.body_field
        kind: Any = None if field is None else field.field_info.annotation

        async def read_and_handle(request: Request) -> Response:
            return await handle(_BodyRequest(request, kind))

        return read_and_handle


class _BodyRequest(Request):
    """A request whose JSON may be its model already."""

    def __init__(self, request: Request, kind: type[Body] | None) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind

    async def json(self) -> Any:
        """Return the body's JSON; of a large one the model that was made of it.

        Raises:
            RequestValidationError: it is no JSON; or it is large and not as the model wants it.
        """
        data = await self.body()
        if len(data) <= LARGE or self._kind is None:
            try:
                return json.loads(data)
            except (ValueError, RecursionError) as error:
                raise RequestValidationError([_no_json(error).error]) from None
        engine: ApiEngine = self.app.state.engine
        found = await engine.work(len(data), read_body, self._kind, data)
        if isinstance(found, Unreadable):
            raise RequestValidationError([found.error])
        return found


def read_body(texts: Texts, kind: type[Body], data: bytes) -> Body | Unreadable:
    """Return the model of a body, its lists of token ids as arrays."""
    try:
        body = kind.model_validate(json.loads(data))
    except ValidationError as error:
        first = most_telling(error.errors(include_input=False, include_url=False))
        place = ("body", *first["loc"])
        return Unreadable({"type": first["type"], "loc": place, "msg": first["msg"]})
    except (ValueError, RecursionError) as error:
        return _no_json(error)
    packed(body)
    return body


def _no_json(error: Exception) -> Unreadable:
    return Unreadable({"type": "json_invalid", "loc": ("body",), "msg": str(error)})
