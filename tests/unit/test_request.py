"""`Request` owns its progress: rows and `num_computed_tokens` move together, and nothing is lost.

The prompt logprobs of a prompt of N tokens are N - 1 rows; the hidden state at position p gives the
row of index p + 1. `compute` plays a worker that brings exactly the rows it was asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.codec import int_array
from scheduler.errors import InvariantViolation
from scheduler.logprobs import LogprobRows, Logprobs
from scheduler.request import FinishReason, ReadLimits, Request, RequestStatus
from scheduler.sampling_params import SamplingParams
from tests.strategies import ROW_LOGPROBS as K
from tests.strategies import rows_for

PROMPT = 100
"""The first prompt token; token at index i is PROMPT + i."""


def make_request(
    num_prompt_tokens: int,
    *,
    max_tokens: int = 4,
    rows: bool = True,
    logprobs: bool = False,
    skip: bool | None = None,
    start: int = 0,
) -> Request:
    params = SamplingParams(
        max_tokens=max_tokens,
        prompt_logprobs=K if rows else None,
        prompt_logprobs_start=start,
        logprobs=K if logprobs else None,
        skip_reading_prefix_cache=skip,
    )
    return Request(
        request_id="r",
        prompt_token_ids=int_array(range(PROMPT, PROMPT + num_prompt_tokens)),
        sampling_params=params,
        seed=7,
        max_tokens=max_tokens,
        prompt_logprobs=LogprobRows(K) if rows else None,
        output_logprobs=LogprobRows(K) if logprobs else None,
    )


def compute(request: Request, start: int, end: int, token: int = 1) -> None:
    """Advance `request` by a chunk [start, end), as a worker would answer it."""
    targets = request.row_target_ids(start, end)
    samples = end == request.num_tokens and len(request.output_token_ids) < request.max_tokens
    row = rows_for(int_array([token])) if samples and request.output_logprobs is not None else None
    request.advance(
        end, rows_for(targets) if len(targets) else None, token if samples else None, row
    )
    request.validate()


def chunkings(total: int) -> list[list[int]]:
    """Every way to cut `total` tokens into chunks, as lists of their ends."""
    cuts = range(1, total)
    return [
        [cut for cut in cuts if bits >> (cut - 1) & 1] + [total] for bits in range(2 ** len(cuts))
    ]


# ---------------------------------------------------------------- completeness over chunks


@pytest.mark.parametrize("total", range(1, 9))
def test_every_chunking_of_a_prompt_gives_the_same_rows(total: int) -> None:
    for ends in chunkings(total):
        request = make_request(total)
        start = 0
        for end in ends:
            compute(request, start, end)
            assert request.prompt_logprobs is not None
            assert request.prompt_logprobs.num_rows == min(end, total - 1), ends
            start = end
        expected = rows_for(request.prompt_token_ids[1:])
        assert request.prompt_logprobs.array().same_bits(expected), ends
        assert request.num_rows_missing == 0
        assert not request.is_prefilling
        assert request.output_token_ids == [1]


@pytest.mark.parametrize("total", range(1, 7))
def test_rows_from_any_index_on_are_the_last_ones_of_all_whatever_the_chunking(total: int) -> None:
    for start_index in range(total + 1):
        for ends in chunkings(total):
            request = make_request(total, start=start_index)
            first = max(start_index, 1)
            start = 0
            for end in ends:
                targets = request.row_target_ids(start, end)
                if len(targets):
                    position = request.row_position(start)
                    assert start <= position < end
                    assert targets[0] == request.prompt_token_ids[position + 1]
                compute(request, start, end)
                request.validate()
                assert request.prompt_logprobs is not None
                assert request.prompt_logprobs.num_rows == max(min(end, total - 1) - first + 1, 0)
                start = end
            expected = rows_for(request.prompt_token_ids[first:])
            assert request.prompt_logprobs.array().same_bits(expected), (start_index, ends)
            assert request.num_rows_missing == 0


def test_a_last_chunk_of_one_token_adds_no_row_and_still_completes() -> None:
    """The chunk before ends at exactly N-1: every row is there, and the request is not done."""
    request = make_request(5)
    compute(request, 0, 4)
    assert request.num_rows_missing == 0
    assert request.is_prefilling
    assert len(request.row_target_ids(4, 5)) == 0
    compute(request, 4, 5)
    assert not request.is_prefilling
    assert request.output_token_ids == [1]


def test_a_chunk_that_ends_one_before_the_last_row_leaves_that_row_to_the_last_chunk() -> None:
    request = make_request(5)
    compute(request, 0, 3)
    assert request.num_rows_missing == 1
    assert request.row_target_ids(3, 5).tolist() == [PROMPT + 4]
    compute(request, 3, 5)
    assert request.num_rows_missing == 0


def test_a_prompt_of_one_token_has_no_rows() -> None:
    request = make_request(1)
    assert request.num_rows_missing == 0
    compute(request, 0, 1)
    assert request.prompt_logprobs is not None
    assert request.prompt_logprobs.num_rows == 0


def test_a_row_scores_the_next_token_not_its_own() -> None:
    """Off by one, every logprob would be that of the token before."""
    request = make_request(5)
    assert request.row_target_ids(0, 2).tolist() == [PROMPT + 1, PROMPT + 2]
    assert request.row_target_ids(0, 5).tolist() == [PROMPT + i for i in (1, 2, 3, 4)]


def test_scoring_alone_samples_nothing() -> None:
    request = make_request(4, max_tokens=0)
    compute(request, 0, 4)
    assert request.output_token_ids == []
    assert request.num_rows_missing == 0
    with pytest.raises(InvariantViolation, match="sampled token"):
        make_request(4, max_tokens=0).advance(4, rows_for(int_array([1, 2, 3])), 5)


# ---------------------------------------------------------------- recomputing after an eviction


@given(st.integers(1, 8), st.data())
def test_nothing_is_computed_twice_or_lost_over_evictions(total: int, data: st.DataObject) -> None:
    """KV is lost at any point, chunks start again at any earlier position, output grows between."""
    first = data.draw(st.integers(1, total), label="first row")
    request = make_request(total, max_tokens=5, logprobs=True, start=first)
    brought = 0
    start = 0
    for _ in range(60):
        if len(request.output_token_ids) == 5:
            break
        if data.draw(st.booleans(), label="evicted"):
            start = data.draw(st.integers(0, start), label="restart")
        end = data.draw(st.integers(start + 1, request.num_tokens), label="end")
        before = request.num_computed_tokens
        brought += len(request.row_target_ids(start, end))
        compute(request, start, end, token=50 + len(request.output_token_ids))
        assert request.num_computed_tokens == max(before, end)
        start = end
    assert brought <= total - first
    assert request.prompt_logprobs is not None
    assert request.output_logprobs is not None
    held = request.prompt_logprobs.array()
    assert held.same_bits(rows_for(request.prompt_token_ids[first:][: held.num_rows]))
    sampled = int_array(request.output_token_ids)
    assert request.output_logprobs.array().same_bits(rows_for(sampled))


def test_positions_computed_before_ask_for_no_rows() -> None:
    request = make_request(8)
    compute(request, 0, 5)
    assert len(request.row_target_ids(0, 3)) == 0
    assert len(request.row_target_ids(0, 5)) == 0
    assert request.row_target_ids(0, 7).tolist() == [PROMPT + 6, PROMPT + 7]
    compute(request, 0, 3)
    assert request.num_computed_tokens == 5
    compute(request, 3, 8)
    assert request.num_rows_missing == 0


def test_a_chunk_over_prompt_and_output_is_recomputed_after_an_eviction_in_decode() -> None:
    request = make_request(3, max_tokens=4, logprobs=True)
    compute(request, 0, 3, token=11)
    compute(request, 3, 4, token=12)
    assert request.token_ids(0, 5).tolist() == [PROMPT, PROMPT + 1, PROMPT + 2, 11, 12]
    assert request.token_ids(2, 4).tolist() == [PROMPT + 2, 11]
    assert request.token_ids(3, 5).tolist() == [11, 12]
    assert request.token_ids(4, 5).tolist() == [12]
    assert request.token_ids(0, 2).tolist() == [PROMPT, PROMPT + 1]
    assert request.token_ids(0, 5).dtype == request.token_ids(4, 5).dtype == np.int32
    compute(request, 0, 2)
    compute(request, 2, 5, token=13)
    assert request.output_token_ids == [11, 12, 13]


# ---------------------------------------------------------------- refusals


def snapshot(request: Request) -> bytes:
    return request.encode()


@pytest.mark.parametrize(
    ("end", "num_rows"), [(3, 2), (3, 4), (3, 0), (5, 5), (5, 3), (6, 4), (0, 1)]
)
def test_too_few_or_too_many_rows_are_refused_and_nothing_changes(end: int, num_rows: int) -> None:
    request = make_request(5)
    before = snapshot(request)
    rows = rows_for(int_array(range(num_rows)))
    with pytest.raises(InvariantViolation, match="rows"):
        request.advance(end, rows, 1 if end >= 5 else None)
    assert snapshot(request) == before


def test_missing_rows_are_refused() -> None:
    request = make_request(5)
    with pytest.raises(InvariantViolation, match="0 rows where 3 were due"):
        request.advance(3, None)


def test_rows_that_nobody_asked_for_are_refused() -> None:
    with pytest.raises(InvariantViolation, match="1 rows where 0 were due"):
        make_request(5, rows=False).advance(3, rows_for(int_array([1])))


def test_rows_of_another_width_are_refused_and_nothing_changes() -> None:
    request = make_request(5)
    before = snapshot(request)
    narrow = rows_for(int_array([1, 2, 3]))
    narrow = Logprobs(narrow.token_ids[:, :2], narrow.logprobs[:, :2], narrow.ranks[:, :2])
    with pytest.raises(InvariantViolation, match="columns"):
        request.advance(3, narrow)
    assert snapshot(request) == before


@pytest.mark.parametrize(
    ("end", "token", "num_logprobs"),
    [
        (2, 9, 1),
        (2, 9, None),
        (2, None, 1),
        (3, None, None),
        (3, None, 1),
        (3, 9, None),
        (3, 9, 0),
        (3, 9, 2),
    ],
)
def test_a_sampled_token_or_its_row_out_of_place_is_refused_and_nothing_changes(
    end: int, token: int | None, num_logprobs: int | None
) -> None:
    """A token without its row would make output logprobs and tokens differ in length."""
    request = make_request(3, logprobs=True)
    before = snapshot(request)
    rows = rows_for(request.row_target_ids(0, end))
    sampled = None if num_logprobs is None else rows_for(int_array([9] * num_logprobs))
    with pytest.raises(InvariantViolation):
        request.advance(end, rows, token, sampled)
    assert snapshot(request) == before


def test_an_output_row_of_another_width_is_refused_and_nothing_changes() -> None:
    request = make_request(3, logprobs=True)
    before = snapshot(request)
    ids = np.zeros((1, K + 2), np.int32)
    wide = Logprobs(ids, ids.astype(np.float32), ids)
    with pytest.raises(InvariantViolation, match="columns"):
        request.advance(3, rows_for(int_array([1, 2])), 9, wide)
    assert snapshot(request) == before


def test_an_output_row_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(InvariantViolation):
        make_request(3, rows=False).advance(3, None, 9, rows_for(int_array([9])))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_computed_tokens": 2},
        {"num_computed_tokens": -1},
        {"num_computed_tokens": 9, "prompt_logprobs": None},
        {"output_token_ids": [1], "output_logprobs": None},
        {"status": RequestStatus.FINISHED},
        {"finish_reason": FinishReason.STOP},
        {"prompt_logprobs": LogprobRows(K)},
        {"output_logprobs": LogprobRows(K, [rows_for(int_array([3]))])},
        {
            "max_tokens": 0,
            "output_token_ids": [1],
            "num_computed_tokens": 5,
            "prompt_logprobs": None,
            "output_logprobs": None,
        },
    ],
)
def test_what_does_not_fit_together_is_found(changes: dict[str, Any]) -> None:
    request = make_request(5, logprobs=True)
    compute(request, 0, 3)
    request.validate()
    for name, value in changes.items():
        setattr(request, name, value)
    with pytest.raises(InvariantViolation, match="'r'"):
        request.validate()


# ---------------------------------------------------------------- what a cache may supply


@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 5])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("skip", [None, False, True])
def test_what_may_be_read_from_a_cache(
    num_prompt_tokens: int, rows: bool, skip: bool | None
) -> None:
    """At every point of progress: never a position whose row is missing, never the last token."""
    request = make_request(num_prompt_tokens, rows=rows, skip=skip)
    while True:
        last = request.num_tokens - 1
        own = min(request.num_computed_tokens, last)
        if skip:
            expected = ReadLimits(0, own)
        elif rows and request.num_computed_tokens < num_prompt_tokens - 1:
            expected = ReadLimits(own, own)
        else:
            expected = ReadLimits(last, own)
        assert request.num_readable_tokens(block_size=1) == expected
        if len(request.output_token_ids) == 3:
            return
        compute(request, request.num_computed_tokens, request.num_computed_tokens + 1)


@pytest.mark.parametrize("start", range(7))
def test_positions_before_the_first_row_may_come_from_any_cache(start: int) -> None:
    """The row of index i is made at position i-1, which has to be computed."""
    request = make_request(6, start=start)
    expected = 5 if start == 6 else max(start - 1, 0)
    assert request.num_readable_tokens(block_size=1) == ReadLimits(expected, 0)


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 14), st.data())
def test_others_kv_is_read_to_the_end_of_the_block_of_the_first_position_due(
    total: int, start: int, computed: int, num_row_tokens: int, data: st.DataObject
) -> None:
    """No further, and not that block either where all of it is due."""
    request = make_request(total, start=min(start, total))
    for _ in range(min(computed, total - 1)):
        compute(request, request.num_computed_tokens, request.num_computed_tokens + 1)
    block_size = data.draw(st.integers(1, 6), label="block size")
    shared, _ = request.num_readable_tokens(block_size, num_row_tokens)
    due = request.first_due_position(num_row_tokens)
    held = request.num_prompt_rows_at(request.num_computed_tokens) + request.first_row_index
    needed = range(max(held, num_row_tokens), total)
    assert due == (needed[0] - 1 if needed else total - 1)
    for first in range(0, total, block_size):
        is_whole = first + block_size <= total
        assert (first < shared) == (is_whole and first < due)


@pytest.mark.parametrize("start", [0, 4])
def test_rows_from_a_cache_move_progress_as_computed_ones_do(start: int) -> None:
    request = make_request(12, start=start)
    request.advance(7, rows_for(request.prompt_token_ids[request.first_row_index : 8]))
    request.validate()
    assert (request.num_computed_tokens, request.first_due_position()) == (7, 7)
    compute(request, 7, 12)
    assert request.num_rows_missing == 0


@given(
    st.integers(1, 9),
    st.integers(0, 3),
    st.integers(0, 12),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from([None, False, True]),
)
def test_a_hit_supplies_all_that_is_needed_or_is_none(
    total: int, max_tokens: int, steps: int, start: int, rows: bool, skip: bool | None
) -> None:
    start = min(start, total) if rows else 0
    request = make_request(total, rows=rows, skip=skip, max_tokens=max_tokens, start=start)
    for _ in range(min(steps, total + max_tokens)):
        compute(request, request.num_computed_tokens, request.num_computed_tokens + 1)
    shared, own = request.num_readable_tokens(block_size=1)
    for limit in (shared, own):
        assert 0 <= limit < request.num_tokens
        assert request.num_prompt_rows_at(limit) <= request.num_prompt_rows_at(
            request.num_computed_tokens
        )
    if request.sampling_params.skips_reading_prefix_cache:
        assert shared == 0


def test_a_resumed_request_reads_its_own_blocks_although_it_bypasses_the_cache() -> None:
    """The bypass is about others' blocks; without its own, an eviction would recompute it all."""
    request = make_request(10, skip=True)
    compute(request, 0, 6)
    assert request.num_readable_tokens(block_size=1) == ReadLimits(shared=0, own=6)


# ---------------------------------------------------------------- numbers for the scheduler


def test_service_goes_by_priority_then_by_arrival() -> None:
    ranks = []
    for priority, arrival in [(1, 0), (0, 5), (0, 2), (-1, 9)]:
        request = make_request(1)
        request.priority, request.arrival = priority, arrival
        ranks.append(request.rank)
    assert sorted(ranks) == [(-1, 9), (0, 2), (0, 5), (1, 0)]


@pytest.mark.parametrize(("max_tokens", "slots"), [(0, 5), (1, 5), (2, 6), (10, 14)])
def test_the_last_sampled_token_needs_no_slot(max_tokens: int, slots: int) -> None:
    assert make_request(5, max_tokens=max_tokens).max_kv_tokens == slots
