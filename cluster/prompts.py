"""What a user may submit: a prompt, checked and turned into token ids, and what comes with it.

A request that is given an id and no seed gets a seed that follows from the id, so that submitting
it again, from whichever process, asks for the same.

Text goes through the model's own tokenizer, with its special tokens, as vLLM does. The module
knows no Ray and no engine.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from cluster.otel import is_traceparent
from scheduler.codec import IntArray, int_array
from scheduler.errors import InvalidRequest
from scheduler.sampling_params import SEED_LIMIT, SamplingParams

Prompt: TypeAlias = "str | Sequence[int] | np.ndarray[Any, Any] | Mapping[str, Any]"
"""Text, token ids, or vLLM's {"prompt": text} or {"prompt_token_ids": ids}."""

_FORMS = "give text, or one list of token ids"
MAX_ID_CHARS = 512
"""Of a request's id, which stands in every message about it."""
_MAX_PRIORITY = 2**31 - 1


def is_one_prompt(prompts: Any) -> bool:
    """Whether `prompts` is a single prompt and not a list of them."""
    if isinstance(prompts, (str, Mapping)):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return isinstance(prompts, Sequence) and bool(prompts) and all(map(_is_number, prompts))


def parse_prompt(
    prompt: Any, vocab_size: int, tokenize: Callable[[str], list[int]]
) -> tuple[IntArray, str | None]:
    """Return a prompt's token ids, int32 [N], and its text where text was given.

    Raises:
        InvalidRequest: it is empty, of another form, or holds something that is no token id.
    """
    if isinstance(prompt, Mapping):
        keys = set(prompt) & {"prompt", "prompt_token_ids"}
        if len(keys) != 1:
            raise _refusal(f'a prompt has one of "prompt" and "prompt_token_ids", not {keys or 0}')
        prompt = prompt[keys.pop()]
    if isinstance(prompt, str):
        if not is_text(prompt):
            raise _refusal("the prompt holds half of a character (a lone surrogate)")
        token_ids = tokenize(prompt) if prompt else []
        return _checked_ids(token_ids, vocab_size), prompt
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise _refusal(
                f"a prompt is not an array of {prompt.dtype} with shape {prompt.shape}: {_FORMS}"
            )
        return _checked_array(prompt, vocab_size), None
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        return _checked_ids(prompt, vocab_size), None
    raise _refusal(f"a prompt is not a {type(prompt).__name__}: {_FORMS}")


def seed_for(params: SamplingParams, request_id: str | None) -> int:
    """Return the seed in force: the user's, or the id's, or where there is neither a drawn one."""
    if params.seed is not None:
        return params.seed
    if request_id is None:
        return secrets.randbelow(SEED_LIMIT)
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"haversack-seed").digest()
    return int.from_bytes(digest, "little") % SEED_LIMIT


def check_arguments(
    params: Any,
    request_id: Any,
    priority: Any,
    cache_salt: Any,
    timeout_s: Any = None,
    detached: Any = False,
    traceparent: Any = None,
) -> None:
    """Check the types of what comes with a prompt.

    Raises:
        InvalidRequest: `details["param"]` says which is wrong.
    """
    if type(params) is not SamplingParams:
        raise InvalidRequest(
            f"sampling_params is a {type(params).__name__}: give SamplingParams",
            param="sampling_params",
        )
    if request_id is not None:
        check_request_id(request_id)
    rules = {
        "priority": (
            type(priority) is int and abs(priority) <= _MAX_PRIORITY,
            f"an integer from {-_MAX_PRIORITY} to {_MAX_PRIORITY}",
        ),
        "cache_salt": (
            cache_salt is None or is_text(cache_salt),
            "a string of whole characters, or None",
        ),
        "timeout_s": (
            timeout_s is None or is_seconds(timeout_s, above_zero=True),
            "a finite number of seconds > 0, or None",
        ),
        "detached": (type(detached) is bool, "True or False"),
        "traceparent": (
            traceparent is None or is_traceparent(traceparent),
            "version, trace id, parent id and flags as W3C writes them, or None",
        ),
    }
    values = {
        "priority": priority,
        "cache_salt": cache_salt,
        "timeout_s": timeout_s,
        "detached": detached,
        "traceparent": traceparent,
    }
    for param, (holds, allowed) in rules.items():
        if not holds:
            raise InvalidRequest(
                f"{param}={values[param]!r} is not allowed: give {allowed}", param=param
            )


def check_request_id(request_id: Any) -> None:
    """Raise `InvalidRequest` where that can't be a request's id."""
    if not is_text(request_id) or not 0 < len(request_id) <= MAX_ID_CHARS:
        raise InvalidRequest(
            f"request_id={request_id!r} is not allowed: give a string of 1 to {MAX_ID_CHARS} whole "
            "characters",
            param="request_id",
        )


def is_seconds(value: object, *, above_zero: bool = False) -> bool:
    """Whether it is a finite number of at least 0, or above it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value > 0 if above_zero else value >= 0


def is_text(value: object) -> bool:
    """Whether it is a string that can be sent: JSON can carry halves of characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_ids(token_ids: Sequence[Any], vocab_size: int) -> IntArray:
    if not len(token_ids):
        raise _refusal("the prompt is empty: give at least one token")
    for where, token in enumerate(token_ids):
        if not _is_number(token):
            raise _refusal(f"prompt token {where} is {token!r}, which is no token id: {_FORMS}")
        if not 0 <= token < vocab_size:
            raise _out_of_range(where, token, vocab_size)
    return int_array(token_ids)


def _checked_array(token_ids: np.ndarray[Any, Any], vocab_size: int) -> IntArray:
    if not len(token_ids):
        raise _refusal("the prompt is empty: give at least one token")
    wrong = (token_ids < 0) | (token_ids >= vocab_size)
    if wrong.any():
        where = int(wrong.argmax())
        raise _out_of_range(where, token_ids[where], vocab_size)
    return int_array(token_ids)


def _out_of_range(where: int, token: int, vocab_size: int) -> InvalidRequest:
    return _refusal(
        f"prompt token {where} is {token}; token ids here are from 0 to {vocab_size - 1}"
    )


def _is_number(value: object) -> bool:
    return type(value) is int or isinstance(value, np.integer)


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="prompt")
