"""What an answer is made of: choices that grow, piece by piece, until they are whole.

A stream sends each piece as it comes; an answer in one is the same thing, made of one piece. So the
pieces of a stream put together are the answer. The module knows results and deltas of requests,
and nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import NotRequired, TypedDict

from cluster.api_text import (
    CompletionLogprobs,
    Offsets,
    PromptEntry,
    TokenLogprob,
    TokenStrings,
    chat_logprobs,
    completion_logprobs,
    echo_of,
    prompt_entries,
)
from scheduler.logprobs import Logprobs
from scheduler.outputs import CompletionDelta, CompletionOutput


class _CommonChoice(TypedDict):
    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    """The stop string or token id that ended it; None for an end-of-sequence token."""
    prompt_logprobs: NotRequired[list[dict[str, PromptEntry] | None]]
    """Where they were asked for: one entry per token of the prompt, the first is None."""
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class CompletionChoice(_CommonChoice):
    """A choice of a completion, or a piece of one."""

    text: str
    logprobs: CompletionLogprobs | None


class ChatMessage(TypedDict):
    """What the model says, or a piece of it."""

    role: NotRequired[str]
    content: str
    refusal: NotRequired[str | None]


class ChatLogprobs(TypedDict):
    """Of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None


class ChatChoice(_CommonChoice):
    """A choice of a chat completion; a stream has `delta` for `message`."""

    message: NotRequired[ChatMessage]
    delta: NotRequired[ChatMessage]
    logprobs: ChatLogprobs | None


class PromptTokensDetails(TypedDict):
    """Of a prompt's tokens."""

    cached_tokens: int


class Usage(TypedDict):
    """Numbers of tokens of all prompts and choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]


class Answer(TypedDict):
    """What all answers have."""

    id: str
    object: str
    created: int
    model: str
    usage: NotRequired[Usage | None]


class CompletionAnswer(Answer):
    """The answer of `/v1/completions`, or an event of its stream."""

    choices: list[CompletionChoice]


class ChatAnswer(Answer):
    """The answer of `/v1/chat/completions`, or an event of its stream."""

    choices: list[ChatChoice]


def usage_of(num_prompt: int, num_generated: int, num_cached: int | None = None) -> Usage:
    """Return the numbers of tokens; `num_cached` is None where nobody knows it."""
    usage: Usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
    if num_cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return usage


@dataclass(frozen=True)
class Asked:
    """What choices have to show."""

    echo: bool = False
    num_logprobs: int | None = None
    """Alternatives per token of a completion; -1 shows all that there are."""
    num_prompt_logprobs: int | None = None
    """Alternatives per token in `prompt_logprobs`, which there is none of where this is None."""
    token_ids: bool = False
    skip_special_tokens: bool = True

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether a choice can't begin without the prompt's rows."""
        return self.num_prompt_logprobs is not None or (self.echo and self.num_logprobs is not None)


class Prompt(NamedTuple):
    """What a choice continues."""

    token_ids: Sequence[int]
    text: str | None
    """None where token ids were given."""


class Piece(NamedTuple):
    """What is new of a choice."""

    text: str
    token_ids: list[int]
    rows: Logprobs | None
    """Of the tokens; None where none were asked for."""
    finish_reason: str | None
    stop_reason: int | str | None

    @classmethod
    def of(cls, found: CompletionDelta | CompletionOutput) -> Piece:
        """Return a delta, or a whole output, as a piece."""
        rows = None if found.logprobs is None else found.logprobs.arrays
        return cls(found.text, found.token_ids, rows, found.finish_reason, found.stop_reason)


class CompletionWriter:
    """One choice of a completion."""

    def __init__(self, index: int, prompt: Prompt, asked: Asked) -> None:
        self._index = index
        self._asked = asked
        self._prompt: Prompt | None = prompt
        """Until the first piece, as it may be long."""
        self._offsets = Offsets(asked.skip_special_tokens)

    def add(
        self, strings: TokenStrings, piece: Piece, prompt_rows: Logprobs | None
    ) -> CompletionChoice:
        """Return what a piece adds; the first one brings the prompt along.

        Args:
            strings: of the model's tokens.
            piece: what is new.
            prompt_rows: of the prompt's last tokens; None where none were asked for.
        """
        asked, text = self._asked, piece.text
        parts: list[CompletionLogprobs] = []
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            echoed, parts = self._opening(strings, prompt, prompt_rows)
            text = echoed + text
            self._offsets = Offsets(asked.skip_special_tokens, len(echoed))
        if asked.num_logprobs is not None and piece.rows is not None:
            places = self._offsets.take(strings, piece.token_ids)
            parts.append(self._logprobs(strings, piece.token_ids, piece.rows, places))
        choice: CompletionChoice = {
            "index": self._index,
            "text": text,
            "logprobs": _joined(parts),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        _add_extras(choice, piece, prompt, prompt_rows, asked, strings)
        return choice

    def _opening(
        self, strings: TokenStrings, prompt: Prompt, prompt_rows: Logprobs | None
    ) -> tuple[str, list[CompletionLogprobs]]:
        """Return the text that comes before the first token, and what logprobs it has."""
        asked = self._asked
        if not asked.echo:
            return "", []
        skips = asked.skip_special_tokens
        text, offsets = echo_of(strings, prompt.token_ids, prompt.text, skip_special=skips)
        if asked.num_logprobs is None or prompt_rows is None:
            return text, []
        return text, [self._logprobs(strings, prompt.token_ids, prompt_rows, offsets)]

    def _logprobs(
        self, strings: TokenStrings, token_ids: Sequence[int], rows: Logprobs, offsets: list[int]
    ) -> CompletionLogprobs:
        num_logprobs = self._asked.num_logprobs
        return completion_logprobs(
            strings, token_ids, rows, 0 if num_logprobs is None else num_logprobs, offsets
        )


class ChatWriter:
    """One choice of a chat completion."""

    def __init__(self, index: int, prompt: Prompt, asked: Asked, *, streams: bool) -> None:
        self._index = index
        self._asked = asked
        self._streams = streams
        self._prompt: Prompt | None = prompt
        """Until the first piece, as it may be long."""

    def add(self, strings: TokenStrings, piece: Piece, prompt_rows: Logprobs | None) -> ChatChoice:
        """Return what a piece adds; see `CompletionWriter.add`."""
        prompt, self._prompt = self._prompt, None
        message: ChatMessage = {"content": piece.text}
        if prompt is not None:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
        choice: ChatChoice = {
            "index": self._index,
            "logprobs": None
            if piece.rows is None
            else {"content": chat_logprobs(strings, piece.rows), "refusal": None},
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        choice["delta" if self._streams else "message"] = message
        _add_extras(choice, piece, prompt, prompt_rows, self._asked, strings)
        return choice


def _add_extras(
    choice: Any,
    piece: Piece,
    prompt: Prompt | None,
    prompt_rows: Logprobs | None,
    asked: Asked,
    strings: TokenStrings,
) -> None:
    """Add what not every choice has; the prompt is there in the first piece alone."""
    if asked.token_ids:
        choice["token_ids"] = piece.token_ids
    if prompt is None:
        return
    if asked.token_ids:
        choice["prompt_token_ids"] = list(prompt.token_ids)
    if asked.num_prompt_logprobs is not None and prompt_rows is not None:
        choice["prompt_logprobs"] = prompt_entries(
            strings, len(prompt.token_ids), prompt_rows, asked.num_prompt_logprobs
        )


def _joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    first, second = parts
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }
