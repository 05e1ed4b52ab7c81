"""Completions and chat completions: from a body to requests, and from results to an answer.

The module knows bodies, choices and the engine's requests, and nothing of HTTP but how answers are
sent.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from cluster.api_choices import (
    Answer,
    Asked,
    ChatWriter,
    CompletionWriter,
    Piece,
    Prompt,
    Usage,
    usage_of,
)
from cluster.api_engine import ApiEngine, Options, cancelled
from cluster.api_models import ChatRequest, CompletionRequest, Generation, Message, prompts_of
from cluster.api_settings import Limits
from cluster.api_streaming import EventStream, merged
from cluster.handle import RequestHandle
from cluster.prompts import is_text
from scheduler.errors import InvalidRequest, ModelNotFound
from scheduler.logprobs import Logprobs
from scheduler.outputs import CompletionDelta, RequestOutput
from scheduler.sampling_params import ALL_LOGPROBS, SamplingParams

Writer = CompletionWriter | ChatWriter


class Json(Response):
    """An answer in one piece."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


@dataclass(frozen=True)
class _Job:
    """One HTTP request, ready to be submitted."""

    body: Generation
    prompts: Sequence[str | list[int]]
    params: SamplingParams
    asked: Asked
    answer_id: str
    kind: str
    """`object` in the answer."""
    make_writer: Callable[[int, Prompt], Writer]
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, engine: ApiEngine) -> Answer:
        return {
            "id": self.answer_id,
            "object": self.kind,
            "created": self.created,
            "model": engine.served_name,
        }


async def complete(engine: ApiEngine, body: CompletionRequest) -> Response:
    """Answer a completion.

    Raises:
        HaversackError: why there is no answer.
    """
    engine.check_model(body.model)
    prompts = prompts_of(body.prompt)
    check_count("prompt", len(prompts), engine.settings.limits)
    params = body.sampling_params(detokenize=engine.has_tokenizer)
    asked = _asked(body, params, echo=bool(body.echo), num_logprobs=body.logprobs)

    def writer(index: int, prompt: Prompt) -> Writer:
        return CompletionWriter(index, prompt, asked, engine.strings)

    answer_id = new_id("cmpl", body.request_id)
    job = _Job(body, prompts, params, asked, answer_id, "text_completion", writer)
    return await _run(engine, job)


async def chat(engine: ApiEngine, body: ChatRequest) -> Response:
    """Answer a chat completion.

    Raises:
        HaversackError: why there is no answer.
    """
    engine.check_model(body.model)
    params = body.sampling_params()
    asked = _asked(body, params)
    prompt = await engine.run(template_ids, engine, body.messages)
    streams = bool(body.stream)

    def writer(index: int, prompt: Prompt) -> Writer:
        return ChatWriter(index, prompt, asked, engine.strings, streams=streams)

    kind = "chat.completion.chunk" if streams else "chat.completion"
    answer_id = new_id("chatcmpl", body.request_id)
    return await _run(engine, _Job(body, [prompt], params, asked, answer_id, kind, writer))


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


def template_ids(engine: ApiEngine, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins.

    Raises:
        InvalidRequest: the model has no chat template, or it does not take these messages.
    """
    try:
        tokenizer = engine.tokenizer
    except ModelNotFound:
        tokenizer = None
    if tokenizer is None or not tokenizer.chat_template:
        raise InvalidRequest(
            "the model has no chat template: use /v1/completions", param="messages"
        )
    turns = [message.for_template() for message in messages]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program: it raises what it likes
        raise InvalidRequest(
            f"the model's chat template does not take these messages: {error}", param="messages"
        ) from None
    if not is_text(text):
        raise InvalidRequest(
            "messages hold half of a character (a lone surrogate)", param="messages"
        )
    return list(tokenizer(text, add_special_tokens=False).input_ids)


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
    options = Options(
        job.body.request_id if job.body.request_id is not None else job.answer_id,
        job.body.priority or 0,
        job.body.cache_salt,
        job.body.timeout_s,
    )
    async with AsyncExitStack() as stack:
        requests = engine.requests(job.prompts, job.params, options)
        handles = await stack.enter_async_context(requests)
        _check_size(engine, job, handles)
        if job.body.stream:
            return EventStream(_events(engine, job, handles), stack.pop_all())
        outputs = await engine.results(handles)
        return await engine.run(_whole_answer, engine, job, outputs)


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
        width = 1 + (engine.vocab_size if k == ALL_LOGPROBS else k)
        start = job.params.prompt_logprobs_start
        lengths = (len(handle.submission.prompt_token_ids) - start for handle in handles)
        engine.check_entries(sum(lengths) * width * job.params.n)


def _prompt_of(handle_prompt: Any, given: str | list[int]) -> Prompt:
    return Prompt(handle_prompt, given if isinstance(given, str) else None)


def _whole_answer(engine: ApiEngine, job: _Job, outputs: Sequence[RequestOutput]) -> Response:
    choices = []
    for place, (output, given) in enumerate(zip(outputs, job.prompts, strict=True)):
        prompt = _prompt_of(output.prompt_token_ids, given)
        view = output.prompt_logprobs
        rows = None if view is None else view.arrays
        for completion in output.outputs:
            writer = job.make_writer(place * job.params.n + completion.index, prompt)
            choices.append(writer.add(Piece.of(completion), rows))
    return Json({**job.answer(engine), "choices": choices, "usage": _usage(outputs)})


def _usage(outputs: Sequence[RequestOutput]) -> Usage:
    return usage_of(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        sum(output.num_cached_tokens or 0 for output in outputs),
    )


async def _events(
    engine: ApiEngine, job: _Job, handles: Sequence[RequestHandle]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream."""
    base: dict[str, Any] = {**job.answer(engine)}
    if job.body.wants_usage_event:
        base["usage"] = None
    prompts = [
        _PromptStream(job, place, _prompt_of(handle.submission.prompt_token_ids.tolist(), given))
        for place, (handle, given) in enumerate(zip(handles, job.prompts, strict=True))
    ]
    async for place, delta in merged(handles):
        if delta.finish_reason == "abort":
            raise cancelled(delta.request_id)
        prompt = prompts[place]
        if prompt.has_begun(delta):
            choices = prompt.take(delta)
        else:  # a long prompt takes its time to be told
            choices = await engine.run(prompt.take, delta)
        for choice in choices:
            yield {**base, "choices": [choice]}
    if job.body.wants_usage_event:
        outputs = [handle.result(0) for handle in handles]
        yield {**base, "choices": [], "usage": _usage(outputs)}


class _PromptStream:
    """The choices of one prompt, as they grow."""

    def __init__(self, job: _Job, place: int, prompt: Prompt) -> None:
        num = job.params.n
        self._writers = [job.make_writer(place * num + index, prompt) for index in range(num)]
        self._is_waiting = job.asked.needs_prompt_rows
        self._rows: Logprobs | None = None
        self._begun: set[int] = set()
        self._held: list[CompletionDelta] = []
        """What came before the prompt's rows, which come with the first choice."""

    def has_begun(self, delta: CompletionDelta) -> bool:
        """Whether the delta's choice has its first piece, and with it the prompt."""
        return delta.index in self._begun

    def take(self, delta: CompletionDelta) -> list[Any]:
        """Return the pieces that a delta brings."""
        if delta.prompt_logprobs is not None:
            self._rows = delta.prompt_logprobs.arrays
            self._is_waiting = False
        self._held.append(delta)
        if self._is_waiting:
            return []
        held, self._held = self._held, []
        self._begun.update(each.index for each in held)
        return [self._writers[each.index].add(Piece.of(each), self._rows) for each in held]
