"""Completions and chat completions: from a body to requests, and from those to an answer.

The module knows bodies and the engine's requests, and nothing of HTTP but how answers are sent.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from cluster.api_answers import Form, PromptStream, Result, take, usage, whole_answer
from cluster.api_choices import Answer, Asked, Piece
from cluster.api_encoding import template_ids
from cluster.api_engine import ApiEngine, Options, cancelled
from cluster.api_models import (
    ChatRequest,
    CompletionRequest,
    Generation,
    OneOfPrompts,
    prompts_of,
)
from cluster.api_settings import Limits
from cluster.api_streaming import EventStream, Json, merged
from cluster.handle import RequestHandle
from scheduler.errors import InvalidRequest
from scheduler.outputs import RequestOutput
from scheduler.sampling_params import ALL_LOGPROBS, SamplingParams


@dataclass(frozen=True)
class _Job:
    """One HTTP request, ready to be submitted."""

    body: Generation
    prompts: Sequence[OneOfPrompts]
    params: SamplingParams
    form: Form
    name: str
    """Of the request, or what the names of several begin with."""

    def text(self, place: int) -> str | None:
        """Return the prompt at a place, if it was given as text."""
        prompt = self.prompts[place]
        return prompt if isinstance(prompt, str) else None


async def complete(engine: ApiEngine, body: CompletionRequest) -> Response:
    """Answer a completion.

    Raises:
        HaversackError: why there is no answer.
    """
    engine.check_model(body.model)
    prompts = prompts_of(body.prompt)
    check_count("prompt", len(prompts), engine.settings.limits)
    params = body.sampling_params(detokenize=engine.texts.has_tokenizer)
    asked = _asked(body, params, echo=bool(body.echo), num_logprobs=body.logprobs)
    return await _run(engine, _job(engine, body, prompts, params, asked))


async def chat(engine: ApiEngine, body: ChatRequest) -> Response:
    """Answer a chat completion.

    Raises:
        HaversackError: why there is no answer.
    """
    engine.check_model(body.model)
    params = body.sampling_params()
    num_chars = sum(message.num_chars for message in body.messages)
    prompt = await engine.work(num_chars, template_ids, body.messages)
    return await _run(engine, _job(engine, body, [prompt], params, _asked(body, params)))


def _job(
    engine: ApiEngine,
    body: Generation,
    prompts: Sequence[OneOfPrompts],
    params: SamplingParams,
    asked: Asked,
) -> _Job:
    is_chat, streams = isinstance(body, ChatRequest), bool(body.stream)
    answer_id = new_id("chatcmpl" if is_chat else "cmpl", body.request_id)
    kind = "text_completion"
    if is_chat:
        kind = "chat.completion.chunk" if streams else "chat.completion"
    answer: Answer = {
        "id": answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": engine.served_name,
    }
    if streams and body.wants_usage_event:
        answer["usage"] = None
    form = Form(answer, asked, params.n, is_chat, streams)
    name = answer_id if body.request_id is None else body.request_id
    return _Job(body, prompts, params, form, name)


def new_id(prefix: str, request_id: str | None) -> str:
    """Return an answer's id, which names its request where that has a name."""
    return f"{prefix}-{secrets.token_hex(12) if request_id is None else request_id}"


def check_count(param: str, count: int, limits: Limits) -> None:
    """Raise `InvalidRequest` where a field holds more prompts than allowed."""
    if count > limits.max_prompts:
        raise InvalidRequest(
            f"{param} holds {count} prompts; this endpoint takes {limits.max_prompts} at once: "
            "send them in several requests",
            param=param,
        )


def check_logprobs(param: str, k: int | None, limits: Limits) -> None:
    """Raise `InvalidRequest` where more alternatives are asked for than allowed."""
    limit = limits.max_logprobs
    if k is not None and limit != ALL_LOGPROBS and not 0 <= k <= limit:
        raise InvalidRequest(
            f"{param}={k} is not allowed: this endpoint gives 0 to {limit} alternatives per token "
            "(its --max-logprobs)",
            param=param,
        )


def _asked(
    body: Generation,
    params: SamplingParams,
    *,
    echo: bool = False,
    num_logprobs: int | None = None,
) -> Asked:
    num_prompt_logprobs = body.prompt_logprobs
    if body.prompt_logprob_token_ids is not None:
        num_prompt_logprobs = ALL_LOGPROBS
    return Asked(
        echo=echo,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        skip_special_tokens=params.skip_special_tokens,
    )


async def _run(engine: ApiEngine, job: _Job) -> Response:
    _check_limits(engine, job)
    body = job.body
    options = Options(job.name, body.priority or 0, body.cache_salt, body.timeout_s)
    async with AsyncExitStack() as stack:
        requests = engine.requests(job.prompts, job.params, options)
        handles = await stack.enter_async_context(requests)
        _check_size(engine, job, handles)
        if body.stream:
            return EventStream(_events(engine, job, handles), stack.pop_all())
        outputs = await engine.results(handles)
    results = _results(job, handles, outputs)
    size = sum(result.size for result in results)
    return Json(await engine.work(size, whole_answer, job.form, results))


def _check_limits(engine: ApiEngine, job: _Job) -> None:
    limits, params = engine.settings.limits, job.params
    if params.n > limits.max_n:
        raise InvalidRequest(
            f"n={params.n} is not allowed: give an integer from 1 to {limits.max_n}", param="n"
        )
    is_chat = isinstance(job.body, ChatRequest)
    check_logprobs("top_logprobs" if is_chat else "logprobs", params.logprobs, limits)
    if job.body.wants_prompt_logprobs:
        check_logprobs("prompt_logprobs", params.num_prompt_logprobs, limits)


def _check_size(engine: ApiEngine, job: _Job, handles: Sequence[RequestHandle]) -> None:
    """Refuse an answer of more logprobs than allowed; choices count at their shortest."""
    k = job.params.num_prompt_logprobs
    if k is not None:
        width = 1 + (engine.texts.vocab_size if k == ALL_LOGPROBS else k)
        start = job.params.prompt_logprobs_start
        lengths = (len(handle.submission.prompt_token_ids) - start for handle in handles)
        engine.check_entries(sum(lengths) * width * job.params.n)


def _results(
    job: _Job, handles: Sequence[RequestHandle], outputs: Sequence[RequestOutput]
) -> list[Result]:
    return [
        Result.of(output, handle.submission.prompt_token_ids, job.text(place))
        for place, (handle, output) in enumerate(zip(handles, outputs, strict=True))
    ]


async def _events(
    engine: ApiEngine, job: _Job, handles: Sequence[RequestHandle]
) -> AsyncIterator[Any]:
    """Yield the events of a stream."""
    streams = [
        PromptStream(job.form, place, handle.submission.prompt_token_ids, job.text(place))
        for place, handle in enumerate(handles)
    ]
    async for place, delta in merged(handles):
        if delta.finish_reason == "abort":
            raise cancelled(delta.request_id)
        stream, piece, view = streams[place], Piece.of(delta), delta.prompt_logprobs
        rows = None if view is None else view.arrays
        if stream.has_begun(delta.index):
            yield stream.take(engine.texts, delta.index, piece, rows)
            continue
        # A long prompt takes its time to be told.
        size = stream.size(piece, rows)
        streams[place], events = await engine.work(size, take, stream, delta.index, piece, rows)
        yield events
    if job.body.wants_usage_event:
        results = _results(job, handles, [handle.result(0) for handle in handles])
        yield {**job.form.answer, "choices": [], "usage": usage(results)}
