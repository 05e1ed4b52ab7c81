"""The routes beside generation: scores, and what a tokenizer does.

The module knows bodies and the engine's requests, and nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response
from typing_extensions import NotRequired, TypedDict

from cluster.api_choices import Usage, usage_of
from cluster.api_encoding import template_ids
from cluster.api_engine import ApiEngine, Options
from cluster.api_generation import check_count, check_logprobs, new_id
from cluster.api_models import DetokenizeRequest, ScoreRequest, TokenizeRequest, prompts_of
from cluster.api_streaming import Json
from cluster.api_text import LOWEST_LOGPROB, as_json, chat_logprobs, prompt_text
from cluster.api_work import Texts
from cluster.prompts import is_text
from cluster.scoring import Score
from scheduler.errors import InvalidRequest
from scheduler.logprobs import Logprobs


class ScoreEntry(TypedDict):
    """One continuation's score; see `cluster.scoring.Score`."""

    index: int
    object: str
    logprob: float
    is_greedy: bool
    num_tokens: int
    token_ids: list[int]
    tokens: list[str]
    token_logprobs: list[float]
    token_ranks: list[int]
    top_logprobs: NotRequired[list[Any]]
    """Where alternatives were asked for: those of each token, as in a chat's logprobs."""
    num_context_tokens: int
    num_truncated_tokens: int


class ScoreAnswer(TypedDict):
    """The answer of `/score`: an entry for each continuation, in order."""

    id: str
    object: str
    model: str
    data: list[ScoreEntry]
    usage: Usage


class Tokens(TypedDict):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    """The answer of `/detokenize`."""

    prompt: str


async def score(engine: ApiEngine, body: ScoreRequest) -> Response:
    """Score continuations.

    Raises:
        HaversackError: why there is no answer.
    """
    engine.check_model(body.model)
    limits = engine.settings.limits
    continuations = prompts_of(body.continuations, "continuations")
    check_count("continuations", len(continuations), limits)
    params = body.scoring_params()
    check_logprobs("logprobs", body.logprobs, limits)
    answer_id = new_id("score", body.request_id)
    options = Options(
        body.request_id if body.request_id is not None else answer_id,
        body.priority or 0,
        body.cache_salt,
        body.timeout_s,
    )
    pairs = [(body.context, continuation) for continuation in continuations]
    scores = [Scored.of(each) for each in await engine.scores(pairs, params, options)]
    size = sum(each.rows.num_rows * each.rows.width for each in scores)
    head = {"id": answer_id, "object": "list", "model": engine.served_name}
    return Json(await engine.work(size, score_answer, head, scores, body.logprobs))


@dataclass(frozen=True)
class Scored:
    """What an answer tells of one continuation; see `cluster.scoring.Score`."""

    index: int
    logprob: float
    is_greedy: bool
    token_ids: list[int]
    rows: Logprobs
    num_context_tokens: int
    num_truncated_tokens: int
    num_cached_tokens: int

    @classmethod
    def of(cls, score: Score) -> Scored:
        return cls(
            score.index,
            score.logprob,
            score.is_greedy,
            score.token_ids,
            score.token_logprobs.arrays,
            score.num_context_tokens,
            score.num_truncated_tokens,
            score.num_cached_tokens,
        )


def score_answer(
    texts: Texts, head: dict[str, str], scores: Sequence[Scored], num_logprobs: int
) -> bytes:
    """Return the JSON of an answer.

    Args:
        texts: the model's.
        head: what it has beside its entries.
        scores: in order.
        num_logprobs: alternatives of each token to tell.
    """
    num_tokens = sum(score.num_context_tokens + len(score.token_ids) for score in scores)
    num_cached = sum(score.num_cached_tokens for score in scores)
    data = [_entry(texts, score, num_logprobs) for score in scores]
    return msgspec.json.encode({**head, "data": data, "usage": usage_of(num_tokens, 0, num_cached)})


def _entry(texts: Texts, score: Scored, num_logprobs: int) -> ScoreEntry:
    rows = score.rows
    entry: ScoreEntry = {
        "index": score.index,
        "object": "score",
        "logprob": max(score.logprob, LOWEST_LOGPROB),
        "is_greedy": score.is_greedy,
        "num_tokens": len(score.token_ids),
        "token_ids": score.token_ids,
        "tokens": [texts.strings.string(token) for token in score.token_ids],
        "token_logprobs": as_json(rows.logprobs[:, 0]),
        "token_ranks": rows.ranks[:, 0].tolist(),
        "num_context_tokens": score.num_context_tokens,
        "num_truncated_tokens": score.num_truncated_tokens,
    }
    if num_logprobs:
        tokens = chat_logprobs(texts.strings, rows)
        entry["top_logprobs"] = [token["top_logprobs"] for token in tokens]
    return entry


async def tokenize(engine: ApiEngine, body: TokenizeRequest) -> Response:
    """Return the tokens of a text or of a conversation.

    Raises:
        InvalidRequest: there is neither, or both, or it can't be encoded.
        ModelNotFound: the model has no tokenizer.
    """
    engine.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give one of prompt and messages", param="prompt")
    num_chars = len(body.prompt or "") + sum(message.num_chars for message in body.messages or ())
    return Json(await engine.work(num_chars, tokens_answer, body))


def tokens_answer(texts: Texts, body: TokenizeRequest) -> bytes:
    """Return the JSON of a text's or a conversation's tokens; for the rest see `tokenize`."""
    if body.messages is not None:
        ids = template_ids(texts, body.messages).tolist()
    else:
        text = body.prompt or ""
        if not is_text(text):
            raise InvalidRequest(
                "prompt holds half of a character (a lone surrogate)", param="prompt"
            )
        ids = texts.token_ids(text, add_special_tokens=body.add_special_tokens)
    answer: Tokens = {"count": len(ids), "max_model_len": texts.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [texts.strings.string(token) for token in ids]
    return msgspec.json.encode(answer)


async def detokenize(engine: ApiEngine, body: DetokenizeRequest) -> Response:
    """Return the text of token ids, special tokens included.

    Raises:
        InvalidRequest: an id is none of the model's.
        ModelNotFound: the model has no tokenizer.
    """
    engine.check_model(body.model)
    if not isinstance(body.tokens, (list, np.ndarray)):
        kind = type(body.tokens).__name__
        raise InvalidRequest(f"tokens is a {kind}: give a list of token ids", param="tokens")
    return Json(await engine.work(len(body.tokens), text_answer, body.tokens))


def text_answer(texts: Texts, token_ids: list[Any] | np.ndarray[Any, Any]) -> bytes:
    """Return the JSON of the text of token ids; for the rest see `detokenize`."""
    ids = token_ids if isinstance(token_ids, list) else token_ids.tolist()
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < texts.vocab_size:
            raise InvalidRequest(
                f"token {place} is {token!r}; token ids here are from 0 to {texts.vocab_size - 1}",
                param="tokens",
            )
    texts.check_tokenizer()
    return msgspec.json.encode({"prompt": prompt_text(texts.strings, ids, skip_special=False)})


def tokenizer_info(texts: Texts) -> dict[str, Any]:
    """Return what a client needs to know of the tokenizer.

    Raises:
        ModelNotFound: the model has none.
    """
    tokenizer = texts.tokenizer
    facts: dict[str, Any] = {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": texts.vocab_size,
        "model_max_length": texts.max_model_len,
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
    for name in ("bos", "eos", "pad", "unk"):
        facts[f"{name}_token"] = getattr(tokenizer, f"{name}_token", None)
        facts[f"{name}_token_id"] = getattr(tokenizer, f"{name}_token_id", None)
    return facts
