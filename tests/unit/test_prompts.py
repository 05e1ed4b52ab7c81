"""What comes with a prompt is checked before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.prompts import check_arguments, parse_prompt
from scheduler.errors import InvalidRequest
from scheduler.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("request_id", ""),
        ("request_id", 7),
        ("request_id", "half \ud800"),
        ("priority", True),
        ("priority", 1.0),
        ("priority", 2**31),
        ("priority", -(2**80)),
        ("cache_salt", b"salt"),
        ("cache_salt", "\udfff"),
        ("params", {"max_tokens": 1}),
    ],
)
def test_a_wrong_argument_is_refused_by_name(param: str, value: Any) -> None:
    arguments = {
        "params": SamplingParams(),
        "request_id": None,
        "priority": 0,
        "cache_salt": None,
        param: value,
    }
    with pytest.raises(InvalidRequest) as refusal:
        check_arguments(**arguments)
    assert refusal.value.details["param"] == {"params": "sampling_params"}.get(param, param)


def test_right_arguments_pass() -> None:
    check_arguments(SamplingParams(), "naïve-Ω", -(2**31) + 1, "")


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [1.5], [True], [-1], [100], [2**32 - 1]])
def test_an_impossible_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_prompt(prompt, 100, lambda text: [])


def test_half_characters_in_a_prompt_are_refused() -> None:
    """A tokenizer raises an error of its own on them, which says nothing to the user."""

    def tokenize(text: str) -> list[int]:
        text.encode()
        return [1]

    with pytest.raises(InvalidRequest):
        parse_prompt("\ud800", 100, tokenize)
