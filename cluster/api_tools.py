"""The routes beside generation: scores, and what a tokenizer does.

The module knows bodies and the engine's requests, and nothing of HTTP.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from typing_extensions import NotRequired, TypedDict

from cluster.api_choices import Usage, usage_of
from cluster.api_engine import ApiEngine, Options
from cluster.api_generation import Json, check_count, check_logprobs, new_id, template_ids
from cluster.api_models import DetokenizeRequest, ScoreRequest, TokenizeRequest, prompts_of
from cluster.api_text import LOWEST_LOGPROB, as_json, chat_logprobs, prompt_text
from cluster.prompts import is_text
from cluster.scoring import Score
from scheduler.errors import InvalidRequest


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
    scores = await engine.scores(pairs, params, options)
    return await engine.run(_score_answer, engine, body, answer_id, scores)


def _score_answer(
    engine: ApiEngine, body: ScoreRequest, answer_id: str, scores: list[Score]
) -> Response:
    num_tokens = sum(score.num_context_tokens + score.num_tokens for score in scores)
    num_cached = sum(score.num_cached_tokens for score in scores)
    return Json(
        {
            "id": answer_id,
            "object": "list",
            "model": engine.served_name,
            "data": [_entry(engine, body, score) for score in scores],
            "usage": usage_of(num_tokens, 0, num_cached),
        }
    )


def _entry(engine: ApiEngine, body: ScoreRequest, score: Score) -> ScoreEntry:
    rows = score.token_logprobs.arrays
    entry: ScoreEntry = {
        "index": score.index,
        "object": "score",
        "logprob": max(score.logprob, LOWEST_LOGPROB),
        "is_greedy": score.is_greedy,
        "num_tokens": score.num_tokens,
        "token_ids": score.token_ids,
        "tokens": [engine.strings.string(token) for token in score.token_ids],
        "token_logprobs": as_json(rows.logprobs[:, 0]),
        "token_ranks": rows.ranks[:, 0].tolist(),
        "num_context_tokens": score.num_context_tokens,
        "num_truncated_tokens": score.num_truncated_tokens,
    }
    if body.logprobs:
        tokens = chat_logprobs(engine.strings, rows)
        entry["top_logprobs"] = [token["top_logprobs"] for token in tokens]
    return entry


def tokenize(engine: ApiEngine, body: TokenizeRequest) -> Response:
    """Return the tokens of a text or of a conversation.

    Raises:
        InvalidRequest: there is neither, or both, or it can't be encoded.
        ModelNotFound: the model has no tokenizer.
    """
    engine.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give one of prompt and messages", param="prompt")
    if body.messages is not None:
        ids = template_ids(engine, body.messages)
    else:
        text = body.prompt or ""
        if not is_text(text):
            raise InvalidRequest(
                "prompt holds half of a character (a lone surrogate)", param="prompt"
            )
        found = engine.tokenizer(text, add_special_tokens=body.add_special_tokens)
        ids = list(found.input_ids)
    answer: Tokens = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [engine.strings.string(token) for token in ids]
    return Json(answer)


def detokenize(engine: ApiEngine, body: DetokenizeRequest) -> dict[str, str]:
    """Return the text of token ids, special tokens included.

    Raises:
        InvalidRequest: an id is none of the model's.
        ModelNotFound: the model has no tokenizer.
    """
    engine.check_model(body.model)
    for place, token in enumerate(body.tokens):
        if not 0 <= token < engine.vocab_size:
            raise InvalidRequest(
                f"token {place} is {token}; token ids here are from 0 to {engine.vocab_size - 1}",
                param="tokens",
            )
    engine.check_tokenizer()
    return {"prompt": prompt_text(engine.strings, body.tokens, skip_special=False)}


def tokenizer_info(engine: ApiEngine) -> dict[str, Any]:
    """Return what a client needs to know of the tokenizer.

    Raises:
        ModelNotFound: the model has none.
    """
    tokenizer = engine.tokenizer
    facts: dict[str, Any] = {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": engine.vocab_size,
        "model_max_length": engine.max_model_len,
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
    for name in ("bos", "eos", "pad", "unk"):
        facts[f"{name}_token"] = getattr(tokenizer, f"{name}_token", None)
        facts[f"{name}_token_id"] = getattr(tokenizer, f"{name}_token_id", None)
    return facts
