"""The row cache: whole blocks' rows by hash, for whoever wants as many columns or fewer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.errors import InvariantViolation
from scheduler.logprobs import LogprobRows, Logprobs
from scheduler.row_cache import Columns, RowCache
from tests.strategies import logprobs

ENTRY_BYTES = 512
K = 3


def top(k: int) -> Columns:
    return Columns((), k)


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def rows_of(number: int, k: int = K, num_rows: int = 4) -> Logprobs:
    """The rows of a block, any k of them cut out of the same wide ones."""
    wide = logprobs(num_rows, 9, first=number * 10)
    return Logprobs(wide.token_ids[:, : k + 1], wide.logprobs[:, : k + 1], wide.ranks[:, : k + 1])


def size(k: int = K, num_rows: int = 4) -> int:
    return num_rows * (k + 1) * 12 + ENTRY_BYTES


def filled(*numbers: int, capacity_bytes: int = 2**20, k: int = K) -> RowCache:
    cache = RowCache(capacity_bytes)
    for number in numbers:
        cache.put(name(number), top(k), rows_of(number, k))
    return cache


def test_the_rows_of_leading_blocks_come_back_as_they_were() -> None:
    cache = filled(1, 2, 4)
    count, rows = cache.take([name(n) for n in (1, 2, 3, 4)], top(K))
    assert count == 2
    assert rows.same_bits(Logprobs.concat([rows_of(1), rows_of(2)]))
    count, rows = cache.take([name(3), name(4)], top(K))
    assert (count, rows.num_rows, rows.width) == (0, 0, K + 1)


def test_every_bit_comes_back() -> None:
    values = np.array([[np.nan, -0.0], [-np.inf, 1e-45]], np.float32)
    ids = np.array([[1, 2], [3, 2**31 - 1]], np.int32)
    cache = RowCache(2**20)
    cache.put(name(1), top(1), Logprobs(ids, values, ids))
    assert cache.take([name(1)], top(1))[1].same_bits(Logprobs(ids, values, ids))


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 9])
def test_rows_serve_those_who_want_as_many_columns_or_fewer(k: int) -> None:
    cache = filled(1)
    count, rows = cache.take([name(1)], top(k))
    assert count == (k <= K)
    assert cache.num_leading([name(1)], top(k)) == count
    if count:
        assert rows.same_bits(rows_of(1, k))


def test_more_columns_take_the_place_of_fewer_and_not_the_other_way_round() -> None:
    cache = filled(1)
    cache.put(name(1), top(5), rows_of(1, 5))
    cache.put(name(1), top(2), rows_of(1, 2))
    assert cache.num_blocks == 1
    assert cache.num_bytes == size(5)
    assert cache.take([name(1)], top(5))[1].same_bits(rows_of(1, 5))
    cache.validate()


def test_rows_of_given_tokens_serve_nobody_who_wants_others() -> None:
    cache = RowCache(2**20)
    cache.put(name(1), Columns((7, 5), 2), rows_of(1, 2))
    for columns in (top(2), top(0), Columns((5, 7), 2), Columns((7,), 1), Columns((7, 5, 3), 3)):
        assert not cache.has(name(1), columns)
    assert cache.take([name(1)], Columns((7, 5), 2))[1].same_bits(rows_of(1, 2))


def test_the_least_recently_used_go_first_and_of_a_chain_its_end() -> None:
    cache = filled(1, 2, 3, capacity_bytes=3 * size())
    cache.take([name(1), name(2)], top(K))
    for number, gone in ((4, 3), (5, 2), (6, 1)):
        cache.put(name(number), top(K), rows_of(number))
        assert not cache.has(name(gone), top(K))
        assert cache.num_bytes == 3 * size()
    assert cache.take([name(n) for n in (4, 5, 6)], top(K))[0] == 3


def test_rows_larger_than_the_budget_are_not_kept_and_drive_nobody_out() -> None:
    cache = filled(1, capacity_bytes=size())
    cache.put(name(2), top(K), rows_of(2, num_rows=5))
    assert cache.has(name(1), top(K))
    cache.put(name(1), top(9), rows_of(1, 9))
    assert cache.has(name(1), top(K)), "what serves fewer columns is better than nothing"
    cache.validate()


def test_a_block_that_takes_much_of_the_budget_is_not_kept() -> None:
    """Rows of a whole vocabulary would drive out those of a thousand other blocks."""
    capacity, k = 128 * 2**20, 49151
    for num_rows, is_kept in ((3, True), (4, False)):
        cache = filled(1, capacity_bytes=capacity)
        ids = np.zeros((num_rows, k + 1), np.int32)
        cache.put(name(2), top(k), Logprobs(ids, ids.view(np.float32), ids))
        assert cache.has(name(2), top(k)) == is_kept
        assert cache.has(name(1), top(K))


def test_a_budget_of_nothing_keeps_nothing() -> None:
    cache = filled(1, capacity_bytes=0)
    assert not cache.is_on
    assert (cache.num_blocks, cache.num_bytes) == (0, 0)


def test_what_is_kept_is_a_copy() -> None:
    """A view would hold the whole message that the rows came in."""
    mine = rows_of(1)
    cache = RowCache(2**20)
    cache.put(name(1), top(K), mine)
    mine.logprobs[:] = 5
    _, rows = cache.take([name(1)], top(K))
    rows.ranks[:] = 9
    assert cache.take([name(1)], top(K))[1].same_bits(rows_of(1))


def test_a_miscount_is_found() -> None:
    cache = filled(1, 2)
    cache._num_bytes += 1
    with pytest.raises(InvariantViolation, match="row cache"):
        cache.validate()


@given(
    st.integers(0, 5 * size(2)),
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 7), st.integers(0, 4), st.sampled_from([(), (1,)]))
    ),
)
def test_whatever_happens_what_is_found_is_right_and_the_budget_is_kept(capacity, steps) -> None:
    cache = RowCache(capacity)
    for is_put, number, k, token_ids in steps:
        columns = Columns(token_ids, 1 if token_ids else k)
        offset = 100 if token_ids else 0
        if is_put:
            rows = rows_of(number + offset, columns.num_logprobs)
            cache.put(name(number), columns, rows)
            assert cache.has(name(number), columns) or rows.num_bytes + ENTRY_BYTES > capacity
        else:
            chain = [name(n) for n in range(number, 8)]
            count, rows = cache.take(chain, columns)
            own = [rows_of(n + offset, columns.num_logprobs) for n in range(number, number + count)]
            assert rows.same_bits(
                Logprobs.concat(own) if own else Logprobs.empty(columns.num_logprobs)
            )
        cache.validate()


# ---------------------------------------------------------------- cutting out a block's rows


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 20), st.integers(0, 20))
def test_any_run_of_rows_is_found_in_whatever_segments_they_came(sizes, start, length) -> None:
    rows = LogprobRows(2)
    first = 0
    for count in sizes:
        rows.append(logprobs(count, 2, first=first))
        first += count
    end = min(start + length, first)
    found = rows.rows(start, start + length)
    assert found.num_rows == max(end - start, 0)
    assert found.same_bits(logprobs(max(end - start, 0), 2, first=start))
