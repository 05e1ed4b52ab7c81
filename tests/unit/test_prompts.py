"""What comes with a prompt is checked before anything is sent."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from cluster.prompts import check_arguments, parse_prompt, seed_for
from scheduler.errors import InvalidRequest
from scheduler.sampling_params import SEED_LIMIT, SamplingParams


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("request_id", ""),
        ("request_id", 7),
        ("request_id", "half \ud800"),
        ("request_id", "x" * 513),
        ("priority", True),
        ("priority", 1.0),
        ("priority", 2**31),
        ("priority", -(2**80)),
        ("cache_salt", b"salt"),
        ("cache_salt", "\udfff"),
        ("params", {"max_tokens": 1}),
        ("timeout_s", 0),
        ("timeout_s", -1.0),
        ("timeout_s", float("inf")),
        ("timeout_s", float("nan")),
        ("timeout_s", True),
        ("timeout_s", "1"),
        ("detached", 1),
        ("detached", None),
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
    check_arguments(SamplingParams(), "naïve-Ω", -(2**31) + 1, "", 1, True)


def test_a_request_with_an_id_has_the_same_seed_in_every_process() -> None:
    """A retry elsewhere must ask for the same; two requests without an id must not."""
    code = (
        "from cluster.prompts import seed_for\n"
        "from scheduler.sampling_params import SamplingParams\n"
        "print(seed_for(SamplingParams(), 'job-7'))"
    )
    seeds = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert seeds == {str(seed_for(SamplingParams(), "job-7"))}
    assert 0 <= seed_for(SamplingParams(), "job-7") < SEED_LIMIT
    assert seed_for(SamplingParams(), "job-7") != seed_for(SamplingParams(), "job-8")
    assert seed_for(SamplingParams(), None) != seed_for(SamplingParams(), None)
    assert seed_for(SamplingParams(seed=5), "job-7") == 5


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
