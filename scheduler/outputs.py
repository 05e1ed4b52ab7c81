"""What a user gets back: `RequestOutput` and its parts, with vLLM's names and meanings.

Logprobs stay in the flat arrays they were computed in. A view reads like vLLM's list of dicts and
builds a dict only for the position that is looked at, so a long prompt with many alternatives does
not turn into millions of Python objects. The module knows no tokenizer: a view is given a function
from token id to text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import msgspec

from scheduler.life import Span
from scheduler.logprobs import Logprobs
from scheduler.request import RequestStats

DecodeToken = Callable[[int], str]


class Logprob(msgspec.Struct, frozen=True):
    """One token at one position."""

    logprob: float
    """Natural log of its probability, from the raw logits in fp32."""
    rank: int
    """1 + the number of tokens of the vocabulary with a strictly greater logprob."""
    decoded_token: str | None = None
    """The token's own text (U+FFFD where its bytes are no text by themselves), if asked for."""


class _LogprobsView(Sequence[Any]):
    """Rows as a sequence of dicts from token id to `Logprob`, each built when it is looked at."""

    def __init__(
        self, arrays: Logprobs, decode: DecodeToken | None = None, num_leading_nones: int = 0
    ) -> None:
        """Show `arrays` after some positions without a row.

        Args:
            arrays: the rows.
            decode: gives a token's text; None leaves `decoded_token` empty.
            num_leading_nones: positions before the first row.
        """
        self._num_leading_nones = num_leading_nones
        self._arrays = arrays
        self._decode = decode

    @property
    def arrays(self) -> Logprobs:
        """The rows themselves: `token_ids`, `logprobs` and `ranks`, each [rows, k + 1]."""
        return self._arrays

    def __len__(self) -> int:
        return self._num_leading_nones + self._arrays.num_rows

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._entry(i) for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is outside of {len(self)} positions")
        return self._entry(position)

    def __iter__(self) -> Iterator[Any]:
        return (self._entry(i) for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _LogprobsView):
            return (
                type(self) is type(other)
                and self._num_leading_nones == other._num_leading_nones
                and self._arrays.same_bits(other._arrays)
            )
        if isinstance(other, list):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} positions, k={self._arrays.width - 1}>"

    def _entry(self, position: int) -> dict[int, Logprob] | None:
        row = position - self._num_leading_nones
        if row < 0:
            return None
        decode = self._decode
        columns = zip(
            self._arrays.token_ids[row].tolist(),
            self._arrays.logprobs[row].tolist(),
            self._arrays.ranks[row].tolist(),
            strict=True,
        )
        entry: dict[int, Logprob] = {}
        for token_id, logprob, rank in columns:
            if token_id not in entry:
                text = None if decode is None else decode(token_id)
                entry[token_id] = Logprob(logprob, rank, text)
        return entry


class PromptLogprobsView(_LogprobsView):
    """Logprobs of a prompt of N tokens: N entries, the first is None.

    Entry i maps the actual token i first, then the k most likely ones (or those that
    `prompt_logprob_token_ids` names), to their `Logprob`; it has k entries where the actual token
    is among the k, else k + 1. Entries before `prompt_logprobs_start` are None.
    """

    def __init__(
        self, arrays: Logprobs, decode: DecodeToken | None = None, first_row_index: int = 1
    ) -> None:
        """Show rows that stand for prompt indices from `first_row_index` on."""
        super().__init__(arrays, decode, first_row_index)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return super().__getitem__(index)


class SampleLogprobsView(_LogprobsView):
    """Logprobs of generated tokens: entry i maps token i first, then the k most likely ones."""

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return super().__getitem__(index)


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n continuations of a prompt."""

    index: int
    text: str
    """"" where `detokenize=False` or the model has no tokenizer."""
    token_ids: list[int]
    """Up to and including the token that ended it."""
    cumulative_logprob: float | None
    """Sum of the sampled tokens' logprobs; None where `logprobs` was not asked for."""
    logprobs: SampleLogprobsView | None
    """One entry per token id."""
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token id or the stop string that ended it; None for an end-of-sequence token."""
    life: list[Span] | None = field(default=None, compare=False, repr=False)
    """What happened to it and when, see `scheduler.life`; None where a journal told the result."""

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt, its logprobs and its n continuations."""

    request_id: str
    prompt: str | None
    """The text that was given; None where token ids were given."""
    prompt_token_ids: list[int]
    """What was computed: special tokens that the tokenizer puts around a text are among them."""
    prompt_logprobs: PromptLogprobsView | None
    """None where they were not asked for, or the request was cancelled before the prompt's end."""
    outputs: list[CompletionOutput]
    """In the order of their indices."""
    finished: bool
    num_cached_tokens: int | None = None
    """Prompt tokens that a cache supplied at first admission; None while unknown."""
    stats: RequestStats | None = None
    """What happened to the request on its way (of the first completion where n > 1)."""


@dataclass(frozen=True)
class CompletionDelta:
    """What became visible of one continuation since its previous delta."""

    request_id: str
    index: int
    text: str
    """New text; the texts of all deltas joined are `CompletionOutput.text`."""
    token_ids: list[int]
    """New token ids; ids run ahead of the text where a character or a stop string may be
    unfinished."""
    logprobs: SampleLogprobsView | None
    """One entry per new token id."""
    prompt_logprobs: PromptLogprobsView | None = None
    """All of them, in the first delta of index 0."""
    finish_reason: str | None = None
    """See `CompletionOutput`; None until the last delta of this continuation."""
    stop_reason: int | str | None = None
    """See `CompletionOutput`."""
