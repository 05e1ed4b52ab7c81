"""The OpenAI-compatible endpoint: its routes, and how errors are answered.

Rules:
- All that is asked of the engine goes through a `Client`; nothing here knows how work is scheduled.
- Every error has OpenAI's shape and names what was wrong; see `cluster.api_errors`.
- `/health` and `/metrics` tell what is known and wait for nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from cluster.api_bodies import BodyRoute
from cluster.api_choices import ChatAnswer, CompletionAnswer
from cluster.api_engine import ApiEngine
from cluster.api_errors import (
    ErrorAnswer,
    ErrorBody,
    answer_to,
    answer_to_invalid,
    error_answer,
)
from cluster.api_generation import chat, complete
from cluster.api_guard import Guard
from cluster.api_live import router as live_router
from cluster.api_metrics import CONTENT_TYPE, ApiMetrics
from cluster.api_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ScoreRequest,
    TokenizeRequest,
)
from cluster.api_settings import ApiSettings
from cluster.api_streaming import Json, unless_gone
from cluster.api_tools import (
    ScoreAnswer,
    Text,
    Tokens,
    detokenize,
    score,
    tokenize,
    tokenizer_info,
)
from cluster.live_feed import LiveFeed
from scheduler.errors import EngineUnavailable, HaversackError

logger = logging.getLogger(__name__)

router = APIRouter(
    route_class=BodyRoute,
    responses={
        "4XX": {"model": ErrorBody, "description": "The request is wrong, or was not let in"},
        "5XX": {
            "model": ErrorBody,
            "description": "The engine can't compute it, or not now",
        },
    },
)
_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "The answer, or a stream's events"}
}
_FIELDS: dict[str, tuple[str, ...]] = {
    "/v1/completions": tuple(CompletionRequest.model_fields),
    "/v1/chat/completions": tuple(ChatRequest.model_fields),
    "/score": tuple(ScoreRequest.model_fields),
    "/tokenize": tuple(TokenizeRequest.model_fields),
    "/detokenize": tuple(DetokenizeRequest.model_fields),
}


def create_app(settings: ApiSettings) -> FastAPI:
    """Return the ASGI application of an endpoint; it joins the engine when it is started."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.engine = await run_in_threadpool(ApiEngine, settings)
        yield
        await run_in_threadpool(app.state.engine.close)

    app = FastAPI(
        title="Haversack",
        summary="Exact prompt logprobs and generation, in OpenAI's terms.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.created = int(time.time())
    app.state.metrics = ApiMetrics(settings.engine.name, lambda: _engine(app).stats)
    app.state.feed = LiveFeed(lambda: _engine(app).look())
    app.include_router(router)
    app.include_router(live_router)
    app.add_middleware(Guard, settings=settings, metrics=app.state.metrics)
    app.add_exception_handler(HaversackError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    return app


def _engine(app: FastAPI) -> ApiEngine:
    engine: ApiEngine = app.state.engine
    return engine


def _engine_of(request: Request) -> ApiEngine:
    return _engine(request.app)


# ------------------------------------------------------------------------------------- routes


@router.post("/v1/completions", response_model=CompletionAnswer, responses=_STREAMS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts, score them, or both."""
    return await unless_gone(request.receive, complete(_engine_of(request), body))


@router.post("/v1/chat/completions", response_model=ChatAnswer, responses=_STREAMS)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer the last message of a conversation."""
    return await unless_gone(request.receive, chat(_engine_of(request), body))


@router.post("/score", response_model=ScoreAnswer)
async def score_continuations(body: ScoreRequest, request: Request) -> Response:
    """Tell how probable continuations are after a context."""
    return await unless_gone(request.receive, score(_engine_of(request), body))


@router.post("/tokenize", response_model=Tokens)
async def tokenize_text(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a text or of a conversation."""
    return await unless_gone(request.receive, tokenize(_engine_of(request), body))


@router.post("/detokenize", response_model=Text)
async def detokenize_ids(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids."""
    return await unless_gone(request.receive, detokenize(_engine_of(request), body))


@router.get("/tokenizer_info")
async def tokenizer(request: Request) -> dict[str, Any]:
    """Return what a client needs to know of the tokenizer."""
    engine = _engine_of(request)
    return await engine.run(tokenizer_info, engine.texts)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the one model, under each of its names."""
    engine = _engine_of(request)
    data = [
        {
            "id": name,
            "object": "model",
            "created": request.app.state.created,
            "owned_by": "haversack",
            "root": engine.settings.engine.model,
            "max_model_len": engine.texts.max_model_len,
        }
        for name in engine.settings.served_names
    ]
    return {"object": "list", "data": data}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """Tell of one of the model's names what the list tells."""
    _engine_of(request).check_model(name)
    listed = await models(request)
    return next(each for each in listed["data"] if each["id"] == name)


@router.get("/health")
async def health(request: Request) -> Response:
    """Answer 200 where the engine can compute, else 503 and why not."""
    trouble = _engine_of(request).trouble()
    if trouble is not None:
        return _respond(answer_to(EngineUnavailable(trouble)))
    return Json(b'{"status":"ok"}')


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return counters in Prometheus' text format."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE)


# ------------------------------------------------------------------------------------- errors


def _respond(answer: ErrorAnswer) -> Response:
    return Response(answer.body, answer.status, answer.headers, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, HaversackError):
        return await _unexpected(request, error)
    answer = answer_to(error)
    if answer.status == 500:
        logger.error("%s failed", request.url.path, exc_info=error)
    return _respond(answer)


async def _invalid(request: Request, error: Exception) -> Response:
    errors = error.errors() if isinstance(error, RequestValidationError) else []
    path = getattr(request.scope.get("route"), "path", "")
    return _respond(answer_to_invalid(errors, _FIELDS.get(path, ())))


async def _http_error(request: Request, error: Exception) -> Response:
    # What goes wrong while a body is read arrives wrapped.
    if isinstance(error.__cause__, HaversackError):
        return await _refused(request, error.__cause__)
    if isinstance(error.__cause__, RequestValidationError):
        return await _invalid(request, error.__cause__)
    if not isinstance(error, HTTPException):
        return await _unexpected(request, error)
    path = f"{request.method} {request.url.path}"
    messages = {
        404: f"there is no {path} here; see /openapi.json for what there is",
        405: f"{path} is not allowed; see /openapi.json for what is",
    }
    message = messages.get(error.status_code, str(error.detail))
    headers = dict(error.headers or {})
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return _respond(error_answer(error.status_code, message, kind, headers=headers))


async def _unexpected(request: Request, error: Exception) -> Response:
    message = "the endpoint failed because of a bug in it: report this"
    return _respond(error_answer(500, message, "server_error", "internal_error"))
