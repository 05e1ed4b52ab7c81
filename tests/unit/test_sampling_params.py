"""`SamplingParams`: vLLM's names and defaults, and one rule for each value at every entry point."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given

from scheduler.codec import decode, encode
from scheduler.errors import InvalidRequest
from scheduler.sampling_params import SamplingParams
from tests.strategies import assert_same, sampling_params


def test_the_defaults_are_vllms() -> None:
    """A script that moves by changing its import must mean the same thing afterwards."""
    assert msgspec.structs.asdict(SamplingParams()) == {
        "n": 1,
        "max_tokens": 16,
        "min_tokens": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "seed": None,
        "stop": (),
        "include_stop_str_in_output": False,
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "prompt_logprobs_start": 0,
        "prompt_logprob_token_ids": None,
        "skip_reading_prefix_cache": None,
        "detokenize": True,
        "skip_special_tokens": True,
    }


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("k", [None, 0, 1, 20, 21, -1])
def test_a_number_of_logprobs_that_is_allowed(name: str, k: int | None) -> None:
    assert getattr(SamplingParams(**{name: k}), name) == k


@pytest.mark.parametrize("k", [None, 0])
def test_token_ids_for_prompt_rows_ask_for_rows_by_themselves(k: int | None) -> None:
    params = SamplingParams(prompt_logprobs=k, prompt_logprob_token_ids=[5, 3])  # type: ignore[arg-type]
    assert params.prompt_logprob_token_ids == (5, 3)
    assert (params.prompt_logprobs, params.num_prompt_logprobs) == (0, 2)
    assert decode(encode(params), SamplingParams) == params
    bare = params.without_prompt_logprobs()
    assert bare == SamplingParams()
    assert bare.num_prompt_logprobs is None


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("k", [-2, True, False, 1.5, 1.0, "1", [1], 2**31, 2**70])
def test_a_number_of_logprobs_that_is_refused(name: str, k: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: k})
    assert caught.value.details["param"] == name
    assert repr(k) in str(caught.value)


REFUSED = [
    *[("n", bad) for bad in (0, -1, 1.0, True, None, 10**6)],
    *[("max_tokens", bad) for bad in (-1, 1.0, "16", True, 2**70)],
    *[("min_tokens", bad) for bad in (-1, 0.0, None, 2**70)],
    *[("temperature", bad) for bad in (-0.1, math.nan, math.inf, "1", None, True, 10**400)],
    *[("top_k", bad) for bad in (-2, 1.5, None, True, 2**70)],
    *[("top_p", bad) for bad in (0, 0.0, 1.01, -1, math.nan, None)],
    *[("min_p", bad) for bad in (-0.1, 1.1, math.nan)],
    *[("presence_penalty", bad) for bad in (-2.1, 2.1, math.nan, -(10**400))],
    *[("frequency_penalty", bad) for bad in (-2.1, 2.1, math.nan)],
    *[("repetition_penalty", bad) for bad in (0, -1.0, math.inf, math.nan, 10**400)],
    *[("prompt_logprobs_start", bad) for bad in (-1, 1.0, None, True, 2**31)],
    *[("prompt_logprob_token_ids", bad) for bad in ([], [-1], [1, 1], [True], "12", 5, [2**31])],
    *[("seed", bad) for bad in (-1, 2**63, 1.0, True, "7")],
    *[("stop", bad) for bad in ("", ["a", ""], [1], 5, b"x", ["\ud800"])],
    *[("stop_token_ids", bad) for bad in ([-1], [1.0], ["1"], [True], 5, 0, False, "12", [2**64])],
    *[("allowed_token_ids", bad) for bad in ([], [-1], [None], [2**64], "12")],
    *[
        ("logit_bias", bad)
        for bad in ({"1": 1.0}, {1: "x"}, {1: math.nan}, {-1: 1.0}, {True: 1.0}, [1], {2**64: 1.0})
    ],
    *[
        (name, bad)
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
            "skip_reading_prefix_cache",
        )
        for bad in (1, 0, "true", 1.0)
    ],
]


@pytest.mark.parametrize(("name", "bad"), REFUSED, ids=lambda value: repr(value)[:20])
def test_a_bad_value_is_refused_and_its_parameter_named(name: str, bad: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: bad})
    assert caught.value.details["param"] == name


def test_values_that_can_not_go_together_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(InvalidRequest, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(InvalidRequest, match="prompt_logprobs_start"):
        SamplingParams(prompt_logprobs_start=3)
    with pytest.raises(InvalidRequest, match="prompt_logprobs=1"):
        SamplingParams(prompt_logprobs=1, prompt_logprob_token_ids=[3])
    assert SamplingParams(max_tokens=None, min_tokens=4).min_tokens == 4
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3


def test_values_at_the_edge_are_taken() -> None:
    params = SamplingParams(max_tokens=0, temperature=0, top_p=1, top_k=-1, min_p=1, seed=2**63 - 1)
    assert (params.temperature, params.top_p, params.min_p) == (0.0, 1.0, 1.0)
    assert {type(params.temperature), type(params.top_p), type(params.min_p)} == {float}


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError, match="max_token"):
        decode(encode({"max_token": 3}), SamplingParams)


@pytest.mark.parametrize(
    ("given_", "kept"),
    [("x", ("x",)), (["x", "yz"], ("x", "yz")), (("x",), ("x",)), (None, ()), ([], ())],
)
def test_stop_strings_are_taken_as_vllm_takes_them(given_: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given_).stop == kept


def test_lists_and_sets_of_token_ids_become_tuples() -> None:
    params = SamplingParams(
        stop_token_ids=[3, 1],  # type: ignore[arg-type]
        allowed_token_ids={7},  # type: ignore[arg-type]
    )
    assert params.stop_token_ids == (3, 1)
    assert params.allowed_token_ids == (7,)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]


def test_biases_are_clamped() -> None:
    params = SamplingParams(logit_bias={1: 500, 2: -math.inf, 3: 10**400, 4: -1})
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 100.0, 4: -1.0}
    assert {type(bias) for bias in (params.logit_bias or {}).values()} == {float}


@pytest.mark.parametrize(
    ("prompt_logprobs", "flag", "skips"),
    [
        (None, None, False),
        (0, None, False),
        (-1, None, False),
        (None, True, True),
        (None, False, False),
        (1, True, True),
        (1, False, False),
    ],
)
def test_the_cache_is_bypassed_only_where_the_user_says_so(
    prompt_logprobs: int | None, flag: bool | None, skips: bool
) -> None:
    params = SamplingParams(prompt_logprobs=prompt_logprobs, skip_reading_prefix_cache=flag)
    assert params.skips_reading_prefix_cache is skips


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, False),
        ({"temperature": 0.0, "seed": 3, "top_k": 5, "logit_bias": {1: 2.0}}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_only_penalties_look_at_earlier_tokens(changes: dict[str, Any], needs: bool) -> None:
    assert SamplingParams(**changes).needs_token_history is needs


@given(sampling_params())
def test_parameters_lose_no_field_when_they_travel(params: SamplingParams) -> None:
    assert_same(decode(encode(params), SamplingParams), params)


def test_parameters_that_travelled_are_checked_again() -> None:
    """A message made elsewhere can't bring in what the constructor refuses."""
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        decode(encode({"top_p": 7.0}), SamplingParams)


def test_parameters_can_not_be_changed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]
