"""What a score is: how probable a continuation is after a context, and how to ask for it.

Rules:
- A score is made from the prompt rows of requests that generate nothing, so its numbers are the
  bits that plain prompt logprobs of the same tokens have.
- A sum of logprobs is that of the exact fp32 values, rounded once, to fp64.
The module knows rows and parameters; it knows no text and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import numpy as np

from scheduler.errors import InvalidRequest
from scheduler.life import Span
from scheduler.logprobs import Logprobs
from scheduler.outputs import DecodeToken, SampleLogprobsView
from scheduler.sampling_params import SamplingParams


class ScoringParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to score a pair of a context and a continuation.

    Raises:
        InvalidRequest: a value is out of its range; `details["param"]` names it.
    """

    logprobs: int = 0
    """Alternatives per token; 0 gives the token's own row, -1 all of the vocabulary."""
    truncate: bool = False
    """Whether a pair that is longer than the model's context loses the beginning of its context;
    else it is refused."""
    add_special_tokens: bool = True
    """Whether a context that is text gets what the tokenizer puts in front of a text, unless it
    spells that out itself."""
    prefix_token_id: int | None = None
    """What an empty context stands for; None is the tokenizer's beginning-of-sequence token, or
    where it has none its end-of-sequence token."""
    skip_reading_prefix_cache: bool | None = None
    """See `SamplingParams`."""

    def __post_init__(self) -> None:
        for name in ("truncate", "add_special_tokens"):
            if type(getattr(self, name)) is not bool:
                refuse(name, getattr(self, name), "True or False")
        if type(self.logprobs) is not int or self.logprobs < -1:
            refuse("logprobs", self.logprobs, "an integer of at least -1")
        prefix: object = self.prefix_token_id
        if prefix is not None and (type(prefix) is not int or prefix < 0):
            refuse("prefix_token_id", prefix, "a token id, or None")
        # What is passed on is checked where it goes.
        self.sampling_params(1)

    @property
    def num_logprobs(self) -> int:
        """Alternatives that the engine is asked for: the likeliest token tells what is greedy."""
        return self.logprobs or 1

    def sampling_params(self, num_context_tokens: int) -> SamplingParams:
        """Return the parameters of the request that brings the rows."""
        return SamplingParams(
            prompt_logprobs=self.num_logprobs,
            prompt_logprobs_start=num_context_tokens,
            max_tokens=0,
            detokenize=False,
            skip_reading_prefix_cache=self.skip_reading_prefix_cache,
        )


@dataclass(frozen=True)
class Score:
    """What the model makes of a continuation."""

    logprob: float
    """Natural log of the continuation's probability: the sum of its tokens' logprobs."""
    is_greedy: bool
    """Whether greedy decoding would give exactly this: each token has the largest logprob, and of
    equals the lowest id."""
    num_tokens: int
    """Tokens of the continuation."""
    token_ids: list[int]
    token_logprobs: SampleLogprobsView
    """One entry per token: the token first, then the alternatives that were asked for."""
    tokens: list[str] | None
    """Each token's own text (U+FFFD where its bytes are no text by themselves); None where the
    model has no tokenizer."""
    num_context_tokens: int
    """Tokens that the first one was conditioned on."""
    num_truncated_tokens: int = 0
    """Tokens at the context's beginning that were left out for want of room."""
    num_cached_tokens: int = 0
    """Tokens of the pair that a cache supplied."""
    index: int = 0
    """The place of the pair among those that were given."""
    lives: tuple[list[Span], ...] = field(default=(), compare=False, repr=False)
    """What happened to the requests that brought it, and when, see `scheduler.life`: one for each
    window; none where a journal told the result."""


def score_of(
    rows: Logprobs,
    params: ScoringParams,
    decode: DecodeToken | None,
    *,
    num_context_tokens: int,
    num_truncated_tokens: int = 0,
    num_cached_tokens: int = 0,
    index: int = 0,
    lives: tuple[list[Span], ...] = (),
) -> Score:
    """Return the score that rows stand for.

    Args:
        rows: of the continuation's tokens, in order, as `params.sampling_params` asked for them.
        params: what was asked for.
        decode: gives a token's own text; None where there is no tokenizer.
        num_context_tokens: see `Score`, like what follows.
        num_truncated_tokens: see `Score`.
        num_cached_tokens: see `Score`.
        index: see `Score`.
        lives: see `Score`.
    """
    token_ids = rows.token_ids[:, 0].tolist()
    return Score(
        logprob=math.fsum(rows.logprobs[:, 0].tolist()),
        is_greedy=bool((rows.token_ids[:, 0] == rows.token_ids[:, 1]).all()),
        num_tokens=rows.num_rows,
        token_ids=token_ids,
        token_logprobs=SampleLogprobsView(_columns(rows, params), decode),
        tokens=None if decode is None else [decode(token) for token in token_ids],
        num_context_tokens=num_context_tokens,
        num_truncated_tokens=num_truncated_tokens,
        num_cached_tokens=num_cached_tokens,
        index=index,
        lives=lives,
    )


def _columns(rows: Logprobs, params: ScoringParams) -> Logprobs:
    """Return the rows without the likeliest tokens where nobody asked for them."""
    if params.logprobs:
        return rows
    return Logprobs(
        np.ascontiguousarray(rows.token_ids[:, :1]),
        np.ascontiguousarray(rows.logprobs[:, :1]),
        np.ascontiguousarray(rows.ranks[:, :1]),
    )


def joined(scores: Sequence[Score], decode: DecodeToken | None) -> Score:
    """Return the score of all tokens of one or more windows, in order; see `score_of`."""
    rows = Logprobs.concat([score.token_logprobs.arrays for score in scores])
    return Score(
        logprob=math.fsum(rows.logprobs[:, 0].tolist()),
        is_greedy=all(score.is_greedy for score in scores),
        num_tokens=rows.num_rows,
        token_ids=[token for score in scores for token in score.token_ids],
        token_logprobs=SampleLogprobsView(rows, decode),
        tokens=None if decode is None else [t for score in scores for t in score.tokens or ()],
        num_context_tokens=scores[0].num_context_tokens,
        num_cached_tokens=sum(score.num_cached_tokens for score in scores),
        lives=tuple(life for score in scores for life in score.lives),
    )


def refuse(param: str, value: object, allowed: str) -> NoReturn:
    """Raise `InvalidRequest` for an argument that has an impossible value."""
    raise InvalidRequest(f"{param}={value!r} is not allowed: give {allowed}", param=param)
