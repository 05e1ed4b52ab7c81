"""Submissions against the engine's limits: what is cut, what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler import acceptance, policy
from scheduler.block_pool import BlockPool
from scheduler.codec import int_array
from scheduler.config import SchedulerConfig
from scheduler.errors import InvalidRequest, RequestTooLarge
from scheduler.live import WorkerView
from scheduler.messages import Submission, WorkerInfo
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams

BLOCK_SIZE = 4
CONFIG = SchedulerConfig(
    block_size=BLOCK_SIZE, max_num_batched_tokens=8, max_model_len=40, vocab_size=50
)


def accept(num_tokens: int, num_blocks: int = 100, **params: Any) -> list[Request]:
    submission = Submission("a", int_array([1] * num_tokens), SamplingParams(**params), 0)
    return acceptance.accept(submission, CONFIG, num_blocks, "client")


@pytest.mark.parametrize(
    ("num_tokens", "asked", "granted"),
    [(39, 10, 2), (40, 10, 1), (40, 1, 1), (40, 0, 0), (5, 10, 10), (5, None, 36)],
)
def test_generation_is_cut_to_what_the_context_holds(num_tokens, asked, granted) -> None:
    assert accept(num_tokens, max_tokens=asked)[0].max_tokens == granted


def test_an_open_end_is_cut_to_what_the_pool_holds() -> None:
    assert accept(5, num_blocks=4, max_tokens=None)[0].max_tokens == 12


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a_prompt_beyond_the_context_is_refused_with_the_limit(max_tokens: int) -> None:
    with pytest.raises(RequestTooLarge, match="at most 40") as caught:
        accept(41, max_tokens=max_tokens)
    assert caught.value.details["param"] == "prompt"


@pytest.mark.parametrize("extra", [0, 1])
def test_admission_and_refusal_count_kv_slots_by_one_formula(extra: int) -> None:
    info = WorkerInfo("w0", "cpu", 4, BLOCK_SIZE, 64, 50, 40, (9,), "model")
    view = WorkerView(info, BlockPool(4, BLOCK_SIZE))
    for num_tokens in range(1, 17):
        max_tokens = 17 - num_tokens + extra
        if extra:
            with pytest.raises(RequestTooLarge):
                accept(num_tokens, num_blocks=4, max_tokens=max_tokens)
        else:
            request = accept(num_tokens, num_blocks=4, max_tokens=max_tokens)[0]
            assert policy.fits(request, view)
            assert policy.blocks_for(request.max_kv_tokens, BLOCK_SIZE) == 4


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_in_parameters_are_checked_against_the_vocabulary(name: str) -> None:
    value: Any = {50: 1.0} if name == "logit_bias" else (50,)
    with pytest.raises(InvalidRequest, match=name):
        accept(5, **{name: value})


@pytest.mark.parametrize("start", range(7))
def test_a_first_row_beyond_the_prompt_is_refused(start: int) -> None:
    """At its very end it is legal, and asks for no row."""
    if start <= 5:
        (request,) = accept(5, prompt_logprobs=1, prompt_logprobs_start=start)
        assert request.num_rows_missing == min(5 - start, 4)
    else:
        with pytest.raises(InvalidRequest, match="from 0 to 5") as caught:
            accept(5, prompt_logprobs=1, prompt_logprobs_start=start)
        assert caught.value.details["param"] == "prompt_logprobs_start"


def test_token_ids_of_rows_count_as_their_columns() -> None:
    (request,) = accept(5, prompt_logprob_token_ids=[4, 2, 49])
    assert request.prompt_logprobs is not None
    assert request.prompt_logprobs.num_logprobs == 3
    with pytest.raises(InvalidRequest, match="prompt_logprob_token_ids holds 50"):
        accept(5, prompt_logprob_token_ids=[4, 50])
    config = SchedulerConfig(vocab_size=50, max_logprobs=2)
    params = SamplingParams(prompt_logprob_token_ids=(1, 2, 3))
    with pytest.raises(InvalidRequest, match=r"prompt_logprob_token_ids.*max_logprobs"):
        acceptance.accept(Submission("a", int_array([1]), params, 0), config, 100, "")


def test_only_rows_that_are_asked_for_have_to_fit_in_memory() -> None:
    config = SchedulerConfig(vocab_size=50, max_model_len=40, max_rows_bytes=51 * 12 * 10)
    for start in (10, 9):
        params = SamplingParams(prompt_logprobs=-1, prompt_logprobs_start=start, max_tokens=0)
        submission = Submission("a", int_array([1] * 20), params, 0)
        if start == 10:
            acceptance.accept(submission, config, 100, "")
        else:
            with pytest.raises(RequestTooLarge, match="max_rows_bytes"):
                acceptance.accept(submission, config, 100, "")


def test_rows_that_would_not_fit_in_memory_are_refused() -> None:
    config = SchedulerConfig(vocab_size=50, max_model_len=40, max_rows_bytes=51 * 12 * 10)
    params = SamplingParams(prompt_logprobs=-1, max_tokens=0)
    for num_tokens in (10, 11):
        submission = Submission("a", int_array([1] * num_tokens), params, 0)
        if num_tokens == 10:
            acceptance.accept(submission, config, 100, "")
        else:
            with pytest.raises(RequestTooLarge, match="max_rows_bytes"):
                acceptance.accept(submission, config, 100, "")
