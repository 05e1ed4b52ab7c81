"""A `Request` is what is parked, moved and recovered: in mid-flight it keeps every field.

And what a submission becomes at the start of its way: n requests, each with a stream of its own.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.codec import encode, int_array
from scheduler.errors import WireError
from scheduler.logprobs import LogprobRows
from scheduler.messages import Submission
from scheduler.request import (
    FinishReason,
    Request,
    RequestStats,
    RequestStatus,
)
from scheduler.sampling_params import SEED_LIMIT, SamplingParams
from scheduler.submissions import make_requests
from tests.strategies import ROW_LOGPROBS as K
from tests.strategies import assert_same, of_type, rows_for, sampling_params


def fresh_request() -> Request:
    (request,) = make_requests(Submission("r", int_array([1, 2, 3]), SamplingParams(), seed=7))
    return request


# ---------------------------------------------------------------- travelling


@st.composite
def requests_in_flight(draw: st.DrawFn) -> Request:
    """A request somewhere between submission and its end, no field at its default for sure."""
    params = draw(sampling_params())
    total = draw(st.integers(1, 6))
    request = Request(
        request_id=draw(of_type(str)),
        prompt_token_ids=int_array(
            draw(st.lists(st.integers(0, 2**31 - 1), min_size=total, max_size=total))
        ),
        sampling_params=params,
        seed=draw(st.integers(0, SEED_LIMIT - 1)),
        max_tokens=draw(st.integers(0, 5)),
        client_id=draw(of_type(str)),
        parent_id=draw(of_type(str)),
        index=draw(st.integers(0, 9)),
        priority=draw(of_type(int)),
        arrival=draw(st.integers(0, 2**40)),
        cache_salt=draw(st.none() | of_type(str)),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 99), max_size=3))),
        status=draw(of_type(RequestStatus)),
        prompt_logprobs=None if params.prompt_logprobs is None else LogprobRows(K),
        output_logprobs=None if params.logprobs is None else LogprobRows(K),
        finish_reason=draw(st.none() | of_type(FinishReason)),
        stop_reason=draw(st.none() | st.integers(0, 99)),
        error=draw(st.none() | of_type(WireError)),
        stats=draw(of_type(RequestStats)),
    )
    for _ in range(draw(st.integers(0, 10))):
        start = request.num_computed_tokens
        if len(request.output_token_ids) >= request.max_tokens and not request.is_prefilling:
            break
        end = draw(st.integers(start + 1, request.num_tokens))
        targets = request.row_target_ids(start, end)
        samples = end == request.num_tokens and len(request.output_token_ids) < request.max_tokens
        row = (
            rows_for(int_array([end])) if samples and request.output_logprobs is not None else None
        )
        request.advance(
            end, rows_for(targets) if len(targets) else None, end if samples else None, row
        )
    return request


@given(requests_in_flight())
def test_a_request_in_mid_flight_keeps_every_field(request: Request) -> None:
    """Sets that come back as lists, dropped stop ids, a lost seed: each changes what follows."""
    data = request.encode()
    back = Request.decode(data)
    assert_same(back, request)
    assert back.encode() == data


@given(requests_in_flight())
def test_a_request_goes_on_after_its_travel_as_if_it_had_stayed(request: Request) -> None:
    back = Request.decode(request.encode())
    if request.is_prefilling:
        for each in (request, back):
            targets = each.row_target_ids(each.num_computed_tokens, each.num_tokens)
            samples = each.max_tokens > 0
            each.advance(
                each.num_tokens,
                rows_for(targets) if len(targets) else None,
                3 if samples else None,
                rows_for(int_array([3])) if samples and each.output_logprobs is not None else None,
            )
    assert_same(Request.decode(back.encode()), Request.decode(request.encode()))


def test_an_unset_salt_is_not_an_empty_one() -> None:
    for salt in (None, "", "x"):
        request = fresh_request()
        request.cache_salt = salt
        assert Request.decode(request.encode()).cache_salt == salt


def test_a_damaged_request_is_refused() -> None:
    data = fresh_request().encode()
    with pytest.raises(msgspec.DecodeError):
        Request.decode(data[:-1])
    with pytest.raises(msgspec.ValidationError, match="request_id"):
        Request.decode(encode({"seed": 1}))


# ---------------------------------------------------------------- submission


def test_one_submission_becomes_n_requests_with_streams_of_their_own() -> None:
    """Prompt logprobs belong to the prompt: the first one computes them, for all."""
    params = SamplingParams(
        n=3, prompt_logprob_token_ids=[4], prompt_logprobs_start=1, logprobs=2, max_tokens=9
    )
    submission = Submission("id", int_array([1, 2]), params, seed=5, priority=-1, cache_salt="")
    made = make_requests(submission, client_id="c")
    assert [request.request_id for request in made] == ["id#0", "id#1", "id#2"]
    assert [request.index for request in made] == [0, 1, 2]
    assert [request.seed for request in made] == [5, 6, 7]
    assert [request.sampling_params.num_prompt_logprobs for request in made] == [1, None, None]
    assert [request.sampling_params.prompt_logprobs_start for request in made] == [1, 0, 0]
    for request in made:
        assert request.parent_id == "id"
        assert (request.client_id, request.priority, request.cache_salt) == ("c", -1, "")
        assert (request.max_tokens, request.sampling_params.logprobs) == (9, 2)
        assert request.prompt_token_ids.tolist() == [1, 2]
        assert request.status is RequestStatus.WAITING


def test_one_completion_keeps_the_id_that_the_user_gave() -> None:
    (request,) = make_requests(Submission("id", int_array([1]), SamplingParams(), seed=0))
    assert (request.request_id, request.parent_id, request.index) == ("id", "id", 0)


@pytest.mark.parametrize("flag", [True, False])
def test_siblings_keep_what_the_user_said_about_the_cache(flag: bool) -> None:
    params = SamplingParams(n=2, prompt_logprobs=1, skip_reading_prefix_cache=flag)
    made = make_requests(Submission("id", int_array([1]), params, seed=0))
    assert [r.sampling_params.skips_reading_prefix_cache for r in made] == [flag, flag]


def test_seeds_of_siblings_stay_in_their_range() -> None:
    made = make_requests(Submission("id", int_array([1]), SamplingParams(n=3), seed=SEED_LIMIT - 2))
    assert [request.seed for request in made] == [SEED_LIMIT - 2, SEED_LIMIT - 1, 0]


def test_requests_do_not_share_what_grows() -> None:
    one, two = make_requests(Submission("id", int_array([1]), SamplingParams(n=2), seed=0))
    one.output_token_ids.append(1)
    one.stats.num_evictions += 1
    assert two.output_token_ids == []
    assert two.stats.num_evictions == 0
