"""What the engine takes in: submissions against its limits, and what it tells whom it refuses.

Pure functions of a submission and the configuration; nothing here looks at requests under way.
"""

from __future__ import annotations

import numpy as np

from scheduler.codec import IntArray
from scheduler.config import SchedulerConfig
from scheduler.errors import InvalidRequest, RequestTooLarge
from scheduler.logprobs import LogprobRows
from scheduler.messages import SchedulerStats, Submission
from scheduler.request import Request
from scheduler.sampling_params import ALL_LOGPROBS, SamplingParams
from scheduler.submissions import make_requests

_BYTES_PER_LOGPROB = 12  # token id, logprob and rank, 4 bytes each
_TOKEN_IDS = "prompt_logprob_token_ids"
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


def accept(
    submission: Submission, config: SchedulerConfig, num_blocks: int, client_id: str
) -> list[Request]:
    """Return the requests of a submission that can be served.

    A prompt may fill the context (N <= max_model_len). Generation ends with "length" where the
    context is full: the token after the last position can still be sampled, so at most
    max_model_len - N + 1 tokens are made. What fits the context but not a worker's blocks is
    refused, by the same count of KV slots that the block tables follow.

    Args:
        num_blocks: blocks of the largest worker.

    Raises:
        InvalidRequest: it is malformed or asks for what the model does not have.
        RequestTooLarge: it could never be completed here.
    """
    params = submission.sampling_params
    prompt = _checked_prompt(submission, config)
    _check_token_ids_in_params(params, config)
    _check_num_logprobs("logprobs", params.logprobs, config)
    name = "prompt_logprobs" if params.prompt_logprob_token_ids is None else _TOKEN_IDS
    _check_num_logprobs(name, params.num_prompt_logprobs, config)

    num_prompt_tokens = len(prompt)
    pool_tokens = num_blocks * config.block_size
    if num_prompt_tokens > config.max_model_len:
        raise RequestTooLarge(
            f"the prompt has {num_prompt_tokens} tokens; this model takes at most "
            f"{config.max_model_len}: shorten it",
            param="prompt",
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=config.max_model_len,
        )
    max_tokens = config.max_model_len - num_prompt_tokens + 1
    if params.max_tokens is not None:
        max_tokens = min(max_tokens, params.max_tokens)
    elif pool_tokens >= num_prompt_tokens:
        max_tokens = min(max_tokens, pool_tokens - num_prompt_tokens + 1)
    num_kv_tokens = num_prompt_tokens + max(max_tokens - 1, 0)
    if num_kv_tokens > pool_tokens:
        raise RequestTooLarge(
            f"{num_prompt_tokens} prompt tokens and {max_tokens} generated ones need KV for "
            f"{num_kv_tokens} tokens; a worker here holds {pool_tokens}: shorten the prompt, "
            "lower max_tokens, or start the engine with more num_blocks",
            param="max_tokens" if num_prompt_tokens <= pool_tokens else "prompt",
            num_kv_tokens=num_kv_tokens,
            pool_tokens=pool_tokens,
        )
    _check_rows_size(params, num_prompt_tokens, max_tokens, config)
    requests = make_requests(submission, client_id=client_id)
    for request in requests:
        request.max_tokens = max_tokens
        request.eos_token_ids = config.eos_token_ids
        own = request.sampling_params
        if own.num_prompt_logprobs is not None:
            request.prompt_logprobs = LogprobRows(num_logprobs(own.num_prompt_logprobs, config))
        if own.logprobs is not None:
            request.output_logprobs = LogprobRows(num_logprobs(own.logprobs, config))
    return requests


def _checked_prompt(submission: Submission, config: SchedulerConfig) -> IntArray:
    if not submission.request_id:
        raise InvalidRequest("the request id is empty: give a non-empty string", param="request_id")
    prompt = submission.prompt_token_ids
    if prompt.ndim != 1 or prompt.dtype != np.int32:
        raise InvalidRequest("prompt_token_ids must be one list of token ids", param="prompt")
    if not len(prompt):
        raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")
    out_of_range = (prompt < 0) | (prompt >= config.vocab_size)
    if out_of_range.any():
        where = int(out_of_range.argmax())
        raise InvalidRequest(
            f"prompt token {where} is {int(prompt[where])}; token ids here are from 0 to "
            f"{config.vocab_size - 1}",
            param="prompt",
        )
    start = submission.sampling_params.prompt_logprobs_start
    if start > len(prompt):
        raise InvalidRequest(
            f"prompt_logprobs_start={start} is not allowed: the prompt has {len(prompt)} tokens, "
            f"so give an index from 0 to {len(prompt)} (for no row at all)",
            param="prompt_logprobs_start",
        )
    if submission.timeout_s is not None and not submission.timeout_s > 0:
        raise InvalidRequest(
            f"timeout_s={submission.timeout_s!r} is not allowed: give seconds > 0, or None",
            param="timeout_s",
        )
    if submission.detached and not config.enable_journal:
        raise InvalidRequest(
            "a detached request leaves its result in the journal, and this engine has none: start "
            "it with journal_path",
            param="detached",
        )
    return prompt


def _check_token_ids_in_params(params: SamplingParams, config: SchedulerConfig) -> None:
    for name in ("allowed_token_ids", "stop_token_ids", "logit_bias", _TOKEN_IDS):
        for token in getattr(params, name) or ():
            if not 0 <= token < config.vocab_size:
                raise InvalidRequest(
                    f"{name} holds {token}; token ids here are from 0 to {config.vocab_size - 1}",
                    param=name,
                )


def _check_num_logprobs(name: str, k: int | None, config: SchedulerConfig) -> None:
    if k is None:
        return
    cap = most_logprobs(config)
    if num_logprobs(k, config) > cap:
        raise InvalidRequest(
            f"{name}={k} is not allowed: give at most {cap}"
            + (", the vocabulary" if cap == config.vocab_size else " (the engine's max_logprobs)"),
            param=name,
        )


def _check_rows_size(
    params: SamplingParams, num_prompt_tokens: int, max_tokens: int, config: SchedulerConfig
) -> None:
    num_bytes = 0
    num_prompt_rows = num_prompt_tokens - params.prompt_logprobs_start
    for k, rows in ((params.num_prompt_logprobs, num_prompt_rows), (params.logprobs, max_tokens)):
        if k is not None:
            num_bytes += rows * row_bytes(k, config)
    if num_bytes > config.max_rows_bytes:
        raise RequestTooLarge(
            f"its logprobs would take {num_bytes:,} bytes; a request may hold "
            f"{config.max_rows_bytes:,}: ask for fewer alternatives, split the prompt, or raise "
            "max_rows_bytes",
            param="prompt_logprobs" if params.prompt_logprobs is not None else "logprobs",
        )


def num_logprobs(k: int, config: SchedulerConfig) -> int:
    """Return how many alternatives `k` asks for; -1 is all of the vocabulary."""
    return config.vocab_size if k == ALL_LOGPROBS else k


def most_logprobs(config: SchedulerConfig) -> int:
    """Return how many alternatives a request may ask for."""
    return num_logprobs(config.max_logprobs, config)


def row_bytes(k: int, config: SchedulerConfig) -> int:
    """Bytes of one row with `k` alternatives and the actual token."""
    return (num_logprobs(k, config) + 1) * _BYTES_PER_LOGPROB


def retry_after_s(num_queued_tokens: int, stats: SchedulerStats) -> float:
    """Return in how many seconds a tenth of the queue will have been computed, roughly."""
    tokens_per_s = stats.num_computed_tokens / stats.compute_s if stats.compute_s > 0 else 0.0
    if not tokens_per_s:
        return _MIN_RETRY_S
    seconds = 0.1 * num_queued_tokens / tokens_per_s
    return float(round(min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S), 1))
