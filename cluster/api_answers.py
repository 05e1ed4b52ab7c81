"""From results and deltas of requests to the bytes of an answer, whole or as a stream's events.

Everything here is work for `ApiEngine.work`, so what it is given can be handed to another process.
The module knows choices and a model's texts, and neither engine nor HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from cluster.api_choices import (
    Answer,
    Asked,
    ChatChoice,
    ChatWriter,
    CompletionChoice,
    CompletionWriter,
    Piece,
    Prompt,
    Usage,
    usage_of,
)
from cluster.api_streaming import event
from cluster.api_work import Texts
from scheduler.codec import IntArray
from scheduler.logprobs import Logprobs
from scheduler.outputs import RequestOutput


@dataclass(frozen=True)
class Form:
    """How an answer looks."""

    answer: Answer
    """What it has beside its choices."""
    asked: Asked
    num_choices: int
    """Per prompt."""
    is_chat: bool
    streams: bool

    def writers(self, place: int, prompt: Prompt) -> list[CompletionWriter | ChatWriter]:
        """Return what writes the choices of the prompt at a place."""
        first = place * self.num_choices
        if self.is_chat:
            return [
                ChatWriter(first + i, prompt, self.asked, streams=self.streams)
                for i in range(self.num_choices)
            ]
        return [CompletionWriter(first + i, prompt, self.asked) for i in range(self.num_choices)]


class Result(NamedTuple):
    """What an answer tells of one prompt."""

    prompt_token_ids: IntArray
    text: str | None
    """The prompt's; None where token ids were given."""
    prompt_rows: Logprobs | None
    pieces: list[Piece]
    """Each whole, in the order of the choices."""
    num_cached_tokens: int

    @classmethod
    def of(cls, output: RequestOutput, prompt_token_ids: IntArray, text: str | None) -> Result:
        """Return what a request brought."""
        view = output.prompt_logprobs
        pieces = [Piece.of(completion) for completion in output.outputs]
        rows = None if view is None else view.arrays
        return cls(prompt_token_ids, text, rows, pieces, output.num_cached_tokens or 0)

    @property
    def size(self) -> int:
        """Tokens and logprobs."""
        return len(self.prompt_token_ids) + sum(map(_size, [self.prompt_rows, *self.pieces]))


def _size(part: Logprobs | Piece | None) -> int:
    if isinstance(part, Piece):
        return len(part.token_ids) + _size(part.rows)
    return 0 if part is None else part.num_rows * part.width


def whole_answer(texts: Texts, form: Form, results: Sequence[Result]) -> bytes:
    """Return the JSON of an answer in one piece."""
    choices: list[CompletionChoice | ChatChoice] = []
    for place, result in enumerate(results):
        prompt = Prompt(result.prompt_token_ids.tolist(), result.text)
        pairs = zip(form.writers(place, prompt), result.pieces, strict=True)
        choices += [writer.add(texts.strings, piece, result.prompt_rows) for writer, piece in pairs]
    return msgspec.json.encode({**form.answer, "choices": choices, "usage": usage(results)})


def usage(results: Sequence[Result]) -> Usage:
    """Return the numbers of tokens of all prompts together."""
    return usage_of(
        sum(len(result.prompt_token_ids) for result in results),
        sum(len(piece.token_ids) for result in results for piece in result.pieces),
        sum(result.num_cached_tokens for result in results),
    )


class PromptStream:
    """The choices of one prompt, as they grow."""

    def __init__(
        self, form: Form, place: int, prompt_token_ids: IntArray, text: str | None
    ) -> None:
        """Begin with nothing; see `Result`."""
        self._answer = form.answer
        self._writers = form.writers(place, Prompt(prompt_token_ids.tolist(), text))
        self._num_prompt_tokens = len(prompt_token_ids)
        self._is_waiting = form.asked.needs_prompt_rows
        self._rows: Logprobs | None = None
        self._begun: set[int] = set()
        self._held: list[tuple[int, Piece]] = []
        """What came before the prompt's rows, which come with the first choice."""

    def has_begun(self, index: int) -> bool:
        """Whether a choice has its first piece, and with it the prompt."""
        return index in self._begun

    def size(self, piece: Piece, prompt_rows: Logprobs | None) -> int:
        """Return the tokens and logprobs that taking a choice's first piece has to do with."""
        rows = self._rows if prompt_rows is None else prompt_rows
        return self._num_prompt_tokens + _size(rows) + _size(piece)

    def take(self, texts: Texts, index: int, piece: Piece, prompt_rows: Logprobs | None) -> bytes:
        """Return the events that a new piece brings, one after the other.

        Args:
            texts: the model's.
            index: of its choice, of those of this prompt.
            piece: what is new.
            prompt_rows: of the prompt, where they came with it.
        """
        if prompt_rows is not None:
            self._rows = prompt_rows
            self._is_waiting = False
        self._held.append((index, piece))
        if self._is_waiting:
            return b""
        held, self._held = self._held, []
        self._begun.update(index for index, _ in held)
        choices = (self._writers[i].add(texts.strings, each, self._rows) for i, each in held)
        return b"".join(event({**self._answer, "choices": [choice]}) for choice in choices)


def take(
    texts: Texts, stream: PromptStream, index: int, piece: Piece, prompt_rows: Logprobs | None
) -> tuple[PromptStream, bytes]:
    """Do what `PromptStream.take` does; return the stream as it is then, and the events."""
    events = stream.take(texts, index, piece, prompt_rows)
    return stream, events
