"""What a user may submit: a prompt, checked and turned into token ids, and what comes with it.

Text goes through the model's own tokenizer, with its special tokens, as vLLM does. The module
knows no Ray and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from scheduler.codec import IntArray, int_array
from scheduler.errors import InvalidRequest
from scheduler.sampling_params import SamplingParams

Prompt: TypeAlias = "str | Sequence[int] | np.ndarray[Any, Any] | Mapping[str, Any]"
"""Text, token ids, or vLLM's {"prompt": text} or {"prompt_token_ids": ids}."""

_FORMS = "give text, or one list of token ids"
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
        if not _is_text(prompt):
            raise _refusal("the prompt holds half of a character (a lone surrogate)")
        token_ids = tokenize(prompt) if prompt else []
        return _checked_ids(token_ids, vocab_size), prompt
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise _refusal(
                f"a prompt is not an array of {prompt.dtype} with shape {prompt.shape}: {_FORMS}"
            )
        return _checked_ids(prompt.tolist(), vocab_size), None
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        return _checked_ids(prompt, vocab_size), None
    raise _refusal(f"a prompt is not a {type(prompt).__name__}: {_FORMS}")


def check_arguments(params: Any, request_id: Any, priority: Any, cache_salt: Any) -> None:
    """Check the types of what comes with a prompt.

    Raises:
        InvalidRequest: `details["param"]` says which is wrong.
    """
    if type(params) is not SamplingParams:
        raise InvalidRequest(
            f"sampling_params is a {type(params).__name__}: give SamplingParams",
            param="sampling_params",
        )
    rules = {
        "request_id": (
            request_id is None or (_is_text(request_id) and request_id != ""),
            "a non-empty string of whole characters",
        ),
        "priority": (
            type(priority) is int and abs(priority) <= _MAX_PRIORITY,
            f"an integer from {-_MAX_PRIORITY} to {_MAX_PRIORITY}",
        ),
        "cache_salt": (
            cache_salt is None or _is_text(cache_salt),
            "a string of whole characters, or None",
        ),
    }
    values = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt}
    for param, (holds, allowed) in rules.items():
        if not holds:
            raise InvalidRequest(
                f"{param}={values[param]!r} is not allowed: give {allowed}", param=param
            )


def _is_text(value: object) -> bool:
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
            raise _refusal(
                f"prompt token {where} is {token}; token ids here are from 0 to {vocab_size - 1}"
            )
    return int_array(token_ids)


def _is_number(value: object) -> bool:
    return type(value) is int or isinstance(value, np.integer)


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="prompt")
