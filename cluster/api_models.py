"""What the endpoint takes: its bodies, field by field, and the parameters that they stand for.

Rules:
- Unknown fields are refused by name. Types are strict: no "1" for 1, no true for 1.
- A field that is null counts as left out, but for `max_tokens`: null there fills the context.
- Ranges are not checked here: `SamplingParams` and the engine do, for every entry point alike.
The module knows no engine and no web framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from cluster.scoring import ScoringParams
from scheduler.errors import InvalidRequest
from scheduler.sampling_params import SamplingParams

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Ids = Annotated[Any, WithJsonSchema({k: v for k, v in _IDS.items() if k != "minItems"})]
"""Token ids, or none; checked where they are used, like the following."""
OnePrompt = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _IDS]})]
"""Text or token ids; `cluster.prompts` checks which."""
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _IDS,
                {"type": "array", "items": _TEXT, "minItems": 1},
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
"""One prompt or several."""
_WITH_IDS = frozenset({"prompt", "context", "continuations", "tokens"})
"""Fields of those types."""
_MAX_ID_DIGITS = 10

OneOfPrompts: TypeAlias = "str | list[int] | np.ndarray[Any, Any]"
"""A prompt as it came in a body: text, or token ids in either form."""


class Body(BaseModel):
    """A body that refuses what it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    """One of the names that `/v1/models` lists; left out, it is the one model that there is."""


class StreamOptions(BaseModel):
    """What a stream has beside its text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    """Whether a last event, without choices, tells the numbers of tokens."""


class Generation(Body):
    """What completions and chat completions have in common: OpenAI's fields, then ours."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Taken and not used."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int | None = None
    prompt_logprob_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    return_token_ids: bool | None = None
    """Whether choices have `token_ids` and `prompt_token_ids`."""
    request_id: str | None = None
    """The engine's name for the request; that of prompt i, where there are several, is
    `<request_id>-<i>`."""
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None

    @property
    def wants_usage_event(self) -> bool:
        """Whether the stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether choices have `prompt_logprobs`."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    def check_stream(self) -> None:
        """Raise `InvalidRequest` where there are options of a stream and no stream."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is allowed only with stream=true", param="stream_options"
            )

    def shared_params(self) -> dict[str, Any]:
        """Return the fields that are parameters of the engine and were given."""
        names = SamplingParams.__struct_fields__
        values = {name: getattr(self, name) for name in names if name in Generation.model_fields}
        found = {name: value for name, value in values.items() if value is not None}
        if self.logit_bias is not None:
            found["logit_bias"] = _bias(self.logit_bias)
        return found


class CompletionRequest(Generation):
    """The body of `/v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    """Whether the text begins with the prompt, and its logprobs with the prompt's."""
    logprobs: int | None = None
    """Alternatives per token; 0 gives each token's own, -1 the whole vocabulary."""
    best_of: int | None = None
    """Only the value of `n` is allowed."""
    suffix: str | None = None
    """Refused: the model continues texts, and fills none in."""

    def sampling_params(self, *, detokenize: bool) -> SamplingParams:
        """Return the parameters that the body stands for.

        Args:
            detokenize: whether there is a tokenizer to make text with.

        Raises:
            InvalidRequest: a value, or a combination, is not allowed.
        """
        self.check_stream()
        if self.suffix is not None:
            raise InvalidRequest(
                "suffix is not supported: give the text before it as prompt", param="suffix"
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest(
                f"best_of={self.best_of} is not supported: leave it out, or give n "
                f"({self.n or 1}), and choose among the n choices yourself",
                param="best_of",
            )
        params = self.shared_params() | {"detokenize": detokenize}
        if "max_tokens" in self.model_fields_set:
            params["max_tokens"] = self.max_tokens
        if self.logprobs is not None:
            params["logprobs"] = self.logprobs
            if self.echo:
                params["prompt_logprobs"] = self._prompt_logprobs_with_echo(self.logprobs)
        return SamplingParams(**params)

    def _prompt_logprobs_with_echo(self, logprobs: int) -> int:
        """Return the columns that show both `logprobs` and `prompt_logprobs` of the prompt."""
        if self.prompt_logprob_token_ids is None:
            return (
                -1
                if -1 in (logprobs, self.prompt_logprobs)
                else max(logprobs, self.prompt_logprobs or 0)
            )
        if logprobs:
            raise InvalidRequest(
                f"logprobs={logprobs} is not allowed with echo and prompt_logprob_token_ids, which "
                "say what the prompt's rows hold: give logprobs=0, or no echo",
                param="logprobs",
            )
        return 0


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: str | list[TextPart]
    name: str | None = None

    @property
    def num_chars(self) -> int:
        """Characters of the content."""
        content = self.content
        return len(content) if isinstance(content, str) else sum(len(p.text) for p in content)

    def for_template(self) -> dict[str, str]:
        """Return it as chat templates expect it."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        found = {"role": self.role, "content": content}
        return found if self.name is None else found | {"name": self.name}


class ChatRequest(Generation):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None
    """Whether choices have logprobs."""
    top_logprobs: int | None = None
    """Alternatives per token; needs `logprobs`."""
    max_completion_tokens: int | None = None
    """The same as `max_tokens`; without either the context may be filled."""

    def sampling_params(self) -> SamplingParams:
        """Return the parameters that the body stands for.

        Raises:
            InvalidRequest: a value, or a combination, is not allowed.
        """
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs is allowed only with logprobs=true", param="top_logprobs"
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ: give one of them",
                param="max_completion_tokens",
            )
        params = self.shared_params() | {"max_tokens": limits.pop() if limits else None}
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        try:
            return SamplingParams(**params)
        except InvalidRequest as error:
            names = {"logprobs": "top_logprobs"}
            if self.max_tokens is None:
                names["max_tokens"] = "max_completion_tokens"
            raise _renamed(error, names) from None


class ScoreRequest(Body):
    """The body of `/score`."""

    context: OnePrompt
    """What every continuation is conditioned on; empty stands for the token texts begin with."""
    continuations: Prompts
    """One or several, each with the space in front of its first word, or as token ids."""
    logprobs: int = 0
    truncate: bool = False
    add_special_tokens: bool = True
    prefix_token_id: int | None = None
    skip_reading_prefix_cache: bool | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None

    def scoring_params(self) -> ScoringParams:
        """Return the parameters that the body stands for.

        Raises:
            InvalidRequest: a value is not allowed.
        """
        return ScoringParams(
            logprobs=self.logprobs,
            truncate=self.truncate,
            add_special_tokens=self.add_special_tokens,
            prefix_token_id=self.prefix_token_id,
            skip_reading_prefix_cache=self.skip_reading_prefix_cache,
        )


class TokenizeRequest(Body):
    """The body of `/tokenize`: a text or a conversation."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    """Whether a text gets what the tokenizer puts around one; templates bring their own."""
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    tokens: Ids


def packed(body: Body) -> None:
    """Turn the lists of integers in prompts and the like into arrays, which are quick to hand on.

    Lists that hold anything else stay as they are, and so do integers that no array has.
    """
    for name in _WITH_IDS & type(body).model_fields.keys():
        value = getattr(body, name)
        if isinstance(value, list):
            whole = _as_array(value)
            if isinstance(whole, list):
                whole = [_as_array(item) if isinstance(item, list) else item for item in value]
            setattr(body, name, whole)


def _as_array(items: list[Any]) -> list[Any] | np.ndarray[Any, Any]:
    if not items or any(type(item) is not int for item in items):
        return items
    try:
        return np.array(items, np.int64)
    except OverflowError:
        return items


def prompts_of(value: Any, param: str = "prompt") -> list[OneOfPrompts]:
    """Return the prompts of a field that holds one or several of them.

    Raises:
        InvalidRequest: it holds none, or something else. What the prompts are is not looked at.
    """
    forms = "give text, a list of texts, one list of token ids, or a list of such lists"
    if isinstance(value, (str, np.ndarray)):
        return [value]
    if not isinstance(value, Sequence):
        raise InvalidRequest(f"{param} is a {type(value).__name__}: {forms}", param=param)
    if not value:
        raise InvalidRequest(f"{param} is empty: {forms}", param=param)
    kinds = {list if isinstance(item, np.ndarray) else type(item) for item in value}
    if kinds <= {str} or kinds <= {list}:
        return list(value)
    if kinds & {str, list}:
        raise InvalidRequest(f"{param} is a mixed list: {forms}", param=param)
    return [list(value)]


def _bias(written: dict[str, float]) -> dict[int, float]:
    """Return a bias by token id; JSON has ids as text there."""
    for key in written:
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS):
            raise InvalidRequest(
                f"logit_bias has the key {key!r}: give token ids", param="logit_bias"
            )
    return {int(key): value for key, value in written.items()}


def _renamed(error: InvalidRequest, names: dict[str, str]) -> InvalidRequest:
    """Return the error as one about the fields that the user gave."""
    param = str(error.details.get("param"))
    if param not in names:
        return error
    message = error.message.replace(f"{param}=", f"{names[param]}=")
    return type(error)(message, **{**error.details, "param": names[param]})
