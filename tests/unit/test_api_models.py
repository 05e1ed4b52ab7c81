"""From a body to parameters, and from an error to an answer, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.api_errors import answer_to, error_answer
from cluster.api_models import ChatRequest, CompletionRequest
from cluster.api_settings import Limits, digest, key_digests
from scheduler import errors
from scheduler.errors import HaversackError, InvalidConfig, InvalidRequest, Overloaded
from scheduler.sampling_params import SamplingParams


def params(**body: Any) -> SamplingParams:
    return CompletionRequest(prompt="a", **body).sampling_params(detokenize=True)


def test_what_is_left_out_or_null_is_the_default() -> None:
    assert params() == SamplingParams()
    assert params(n=None, stop=None, temperature=None, logprobs=None) == SamplingParams()


def test_null_max_tokens_fills_the_context() -> None:
    assert params(max_tokens=None).max_tokens is None
    chat = ChatRequest(messages=[{"role": "user", "content": "a"}])  # type: ignore[list-item]
    assert chat.sampling_params().max_tokens is None


def test_every_field_of_the_parameters_is_taken() -> None:
    """All that vLLM's users know by name, but for what the endpoint decides itself."""
    missing = set(SamplingParams.__struct_fields__) - set(CompletionRequest.model_fields)
    assert missing == {"detokenize"}
    body = {
        "n": 3, "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_k": 4, "top_p": 0.9,
        "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5,
        "logit_bias": {"5": 2}, "allowed_token_ids": [5, 6], "seed": 9, "stop": ["x"],
        "include_stop_str_in_output": True, "stop_token_ids": [3], "ignore_eos": True,
        "logprobs": 2, "prompt_logprobs": 3, "prompt_logprobs_start": 1,
        "skip_reading_prefix_cache": True, "skip_special_tokens": False,
    }  # fmt: skip
    wanted = {k: tuple(v) if isinstance(v, list) else v for k, v in body.items()}
    assert params(**body) == SamplingParams(**{**wanted, "logit_bias": {5: 2.0}})


@pytest.mark.parametrize(
    ("body", "k"),
    [
        ({"logprobs": 2}, None),
        ({"logprobs": 2, "echo": True}, 2),
        ({"logprobs": 0, "echo": True}, 0),
        ({"logprobs": 2, "echo": True, "prompt_logprobs": 1}, 2),
        ({"logprobs": 2, "echo": True, "prompt_logprobs": 5}, 5),
        ({"logprobs": 2, "echo": True, "prompt_logprobs": -1}, -1),
        ({"echo": True}, None),
    ],
)
def test_an_echo_with_logprobs_needs_the_prompts(body: dict[str, Any], k: int | None) -> None:
    assert params(**body).prompt_logprobs == k


def kinds(base: type[HaversackError]) -> list[type[HaversackError]]:
    return [base, *(found for sub in base.__subclasses__() for found in kinds(sub))]


@pytest.mark.parametrize("kind", kinds(HaversackError))
def test_every_error_has_an_answer(kind: type[HaversackError]) -> None:
    answer = answer_to(kind("it failed", param="prompt"))
    assert answer.status in (400, 401, 404, 413, 415, 429, 499, 500, 503)
    assert issubclass(kind, InvalidRequest) <= (answer.status == 400)
    told = json.loads(answer.body)["error"]
    assert (told["message"], told["param"]) == ("it failed", "prompt")
    assert told["code"]


@pytest.mark.parametrize(("after_s", "header"), [(1.2, "2"), (60, "60"), (None, "5")])
def test_a_full_queue_says_when(after_s: float | None, header: str) -> None:
    answer = answer_to(Overloaded("full", retry_after_s=after_s))
    assert answer.headers == {"retry-after": header}
    assert answer_to(errors.EngineUnavailable("gone")).headers["retry-after"]


def test_halves_of_characters_can_be_told() -> None:
    body = error_answer(400, "bad \ud800", param="\udfff").body
    assert json.loads(body)["error"]["message"] == "bad ?"


@pytest.mark.parametrize("key", ["", "a b", "é", "a\n"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        key_digests(["good", key])
    assert key not in str(raised.value) or not key
    assert key_digests(["good"]) == (digest("good"),)


@pytest.mark.parametrize("limits", [{"max_n": 0}, {"max_logprobs": -2}, {"max_prompts": True}])
def test_limits_are_checked(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(limits))):
        Limits(**limits)
