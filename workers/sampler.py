"""Sampling: which token follows, given raw logits and what the user asked for.

The module knows logits, parameters and the tokens a request has so far. Rules:
- A draw depends on the logits, the seed and the number of tokens generated before, and on nothing
  else: no state is kept between draws, so a request that moves or starts again draws the same.
- All arithmetic is fp64 on the host, so that every device draws the same token from equal logits.
- Order, as in vLLM: allowed ids, bans, bias, penalties, temperature, min_p, top_k, top_p.
- Ties go to the lower token id, in greedy choice and at the edge of top_k and top_p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from scheduler.codec import FloatArray, IntArray
from scheduler.errors import RequestFailed
from scheduler.sampling_params import SamplingParams

Float64Array = npt.NDArray[np.float64]
_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""


class TokenCounts:
    """What the penalties need of a request's tokens: those seen, and how often in the output."""

    def __init__(self, history: IntArray, num_prompt_tokens: int) -> None:
        """Count `history`, int32: the prompt's tokens, then the output's."""
        self._prompt_ids = np.unique(history[:num_prompt_tokens])
        self._output: dict[int, int] = {}
        self.append(history[num_prompt_tokens:].tolist())

    def append(self, token_ids: Iterable[int]) -> None:
        """Count further output tokens."""
        for token in token_ids:
            self._output[token] = self._output.get(token, 0) + 1

    @property
    def seen_ids(self) -> IntArray:
        """Ids of the prompt and the output, each once."""
        ids: IntArray = np.union1d(self._prompt_ids, self.output_ids)
        return ids

    @property
    def output_ids(self) -> IntArray:
        """Ids of the output, each once."""
        return np.fromiter(self._output.keys(), np.int32, len(self._output))

    @property
    def output_counts(self) -> IntArray:
        """How often each of `output_ids` occurs."""
        return np.fromiter(self._output.values(), np.int32, len(self._output))


class Draw(msgspec.Struct, frozen=True):
    """All that a draw depends on, besides the logits."""

    params: SamplingParams
    seed: int
    num_output_tokens: int
    """Tokens generated before this one."""
    banned_until_min_tokens: tuple[int, ...] = ()
    counts: TokenCounts | None = None
    """Needed where `params.needs_token_history`."""

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < _GREEDY_BELOW

    @property
    def uses_raw_logits(self) -> bool:
        """Whether nothing changes the logits before a token is chosen."""
        params = self.params
        return not (
            params.logit_bias
            or params.allowed_token_ids is not None
            or params.needs_token_history
            or (self.banned_until_min_tokens and self.num_output_tokens < params.min_tokens)
        )


def sample(logits: FloatArray, draw: Draw) -> int:
    """Return the token that follows.

    Args:
        logits: raw float32 [vocab]; left as they are.
        draw: parameters and place in the random stream.

    Raises:
        RequestFailed: no token is left that could be sampled.
    """
    scores = logits.astype(np.float64)
    if not draw.uses_raw_logits:
        _adjust(scores, draw)
    best = int(np.argmax(scores))
    if not math.isfinite(scores[best]):
        raise RequestFailed(
            "no token can be sampled: allowed_token_ids, logit_bias and min_tokens together leave "
            "none with a finite logit; allow more tokens"
        )
    if draw.is_greedy:
        return best
    scores -= scores[best]
    scores /= draw.params.temperature
    ids = _candidates(scores, draw.params)
    share = np.cumsum(np.exp(scores[ids]))
    place = np.searchsorted(share, uniform(draw.seed, draw.num_output_tokens) * share[-1], "right")
    return int(ids[min(int(place), len(ids) - 1)])


def uniform(seed: int, index: int) -> float:
    """Return number `index` of the seed's random stream, in [0, 1): 53 bits of Philox4x64-10."""
    bits = np.random.Philox(key=seed, counter=index).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def _adjust(scores: Float64Array, draw: Draw) -> None:
    """Change the logits in place as the parameters ask, up to the temperature."""
    params = draw.params
    vocab = len(scores)
    if params.allowed_token_ids is not None:
        allowed = [token for token in params.allowed_token_ids if 0 <= token < vocab]
        kept = scores[allowed]
        scores.fill(-np.inf)
        scores[allowed] = kept
    if draw.num_output_tokens < params.min_tokens:
        scores[[token for token in draw.banned_until_min_tokens if 0 <= token < vocab]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        if 0 <= token < vocab:
            scores[token] += bias
    counts = draw.counts
    if counts is None or not params.needs_token_history:
        return
    if params.repetition_penalty != 1.0:
        seen = counts.seen_ids
        values = scores[seen]
        scores[seen] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    ids = counts.output_ids
    scores[ids] -= params.frequency_penalty * counts.output_counts + params.presence_penalty


def _candidates(scores: Float64Array, params: SamplingParams) -> npt.NDArray[np.int64]:
    """Return the ids that min_p, top_k and top_p leave, ascending.

    Args:
        scores: logits over the temperature, the largest of them 0.
        params: the three of them.
    """
    if params.min_p > 0.0:
        scores = np.where(scores >= math.log(params.min_p), scores, -np.inf)
    k = params.top_k
    if 0 < k < len(scores):
        edge = np.partition(scores, len(scores) - k)[len(scores) - k]
        above = np.flatnonzero(scores > edge)
        ties = np.flatnonzero(scores == edge)[: k - len(above)]
        ids = np.union1d(above, ties[np.isfinite(scores[ties])])
    else:
        ids = np.flatnonzero(scores > -np.inf)
    if params.top_p < 1.0:
        ids = _nucleus(scores, ids, params.top_p)
    return ids


def _nucleus(
    scores: Float64Array, ids: npt.NDArray[np.int64], top_p: float
) -> npt.NDArray[np.int64]:
    """Return the fewest of the likeliest `ids` that hold a share of `top_p`, ascending."""
    weights = np.exp(scores[ids])
    needed = top_p * weights.sum()
    # All tokens below this weight together hold less than 1 - top_p, so none of them is needed.
    likely = weights >= (weights.sum() - needed) / len(ids)
    ids, weights = ids[likely], weights[likely]
    order = np.argsort(-weights, kind="stable")
    count = int(np.searchsorted(np.cumsum(weights[order]), needed, "left")) + 1
    return np.sort(ids[order[:count]])
