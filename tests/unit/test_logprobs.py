"""Rows of logprobs: they are kept in order, bit for bit, and refused where they do not fit."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.codec import decode, encode
from scheduler.errors import InvariantViolation
from scheduler.logprobs import LogprobRows, Logprobs
from tests.strategies import assert_same, logprobs, of_type


def with_logprobs(values: list[float]) -> Logprobs:
    array = np.array(values, dtype=np.float32).reshape(-1, 1)
    ids = np.zeros(array.shape, dtype=np.int32)
    return Logprobs(ids, array, ids)


@given(st.lists(st.integers(0, 4), max_size=150), st.integers(0, 3))
def test_rows_come_back_in_the_order_they_were_added(counts: list[int], k: int) -> None:
    """However many pieces they came in, and however often they were put together on the way."""
    rows = LogprobRows(k)
    for index, count in enumerate(counts):
        rows.append(logprobs(count, k, first=sum(counts[:index])))
        assert rows.num_rows == sum(counts[: index + 1])
    assert rows.array().same_bits(logprobs(sum(counts), k))
    assert rows.num_rows == sum(counts)


@given(st.lists(st.integers(0, 4), max_size=90), st.integers(0, 40), st.integers(0, 3))
def test_the_last_rows_are_those_of_the_whole(counts: list[int], num_last: int, k: int) -> None:
    """A token that is told as it comes takes its row along, whatever pieces came before."""
    rows = LogprobRows(k)
    for index, count in enumerate(counts):
        rows.append(logprobs(count, k, first=sum(counts[:index])))
    pieces = list(rows.segments)
    last = rows.last(num_last)
    assert rows.segments == pieces, "the others are left as they are"
    whole = logprobs(sum(counts), k)
    assert last.same_bits(whole[max(sum(counts) - num_last, 0) :])


def test_many_single_rows_do_not_stay_many_pieces() -> None:
    """Ten thousand decode steps must not leave ten thousand arrays per request."""
    rows = LogprobRows(1)
    for index in range(1000):
        rows.append(logprobs(1, 1, first=index))
        assert len(rows.segments) <= 64
    assert rows.array().same_bits(logprobs(1000, 1))


def test_rows_of_another_width_are_refused_and_nothing_changes() -> None:
    rows = LogprobRows(2, [logprobs(3, 2)])
    for wrong in (logprobs(1, 1), logprobs(1, 3), logprobs(0, 1)):
        with pytest.raises(InvariantViolation, match="3 columns"):
            rows.append(wrong)
    assert rows.array().same_bits(logprobs(3, 2))


def test_rows_with_a_number_missing_are_refused() -> None:
    whole = logprobs(3, 2)
    ragged = Logprobs(whole.token_ids, whole.logprobs[:2], whole.ranks)
    with pytest.raises(InvariantViolation):
        LogprobRows(2).append(ragged)


def test_no_rows_are_rows_too() -> None:
    rows = LogprobRows(4)
    rows.append(logprobs(0, 4))
    assert rows.num_rows == 0
    array = rows.array()
    assert (array.num_rows, array.width, array.num_bytes) == (0, 5, 0)
    assert [a.dtype.name for a in (array.token_ids, array.logprobs, array.ranks)] == [
        "int32",
        "float32",
        "int32",
    ]


def test_some_rows_can_be_looked_at() -> None:
    part = logprobs(5, 1)[1:3]
    assert part.same_bits(logprobs(2, 1, first=1))
    assert part.num_bytes == 2 * 2 * 4 * 3


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ([0.0], [0.0], True),
        ([0.0], [-0.0], False),
        ([float("nan")], [float("nan")], True),
        ([float("-inf")], [float("-inf")], True),
        ([1.0], [np.nextafter(np.float32(1.0), np.float32(2.0))], False),
        ([1.0], [1.0, 1.0], False),
        ([], [], True),
    ],
)
def test_same_bits_means_the_same_bits(left: list[float], right: list[float], same: bool) -> None:
    assert with_logprobs(left).same_bits(with_logprobs(right)) is same


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "ranks"])
def test_same_bits_looks_at_every_array(field: str) -> None:
    rows = logprobs(2, 1)
    changed = getattr(rows, field).copy()
    changed[1, 1] += 1
    assert not rows.same_bits(msgspec.structs.replace(rows, **{field: changed}))


@given(of_type(Logprobs))
def test_rows_keep_every_bit_in_a_message(rows: Logprobs) -> None:
    """NaN payloads, infinities, negative zeros, and shapes without an element included."""
    back = decode(encode(rows), Logprobs)
    assert_same(back, rows)
    assert back.same_bits(rows)


def test_rows_cut_out_of_a_larger_array_travel_as_they_are_seen() -> None:
    """A slice with gaps between its rows is no contiguous piece of memory."""
    wide = logprobs(6, 3)
    cut = Logprobs(wide.token_ids[::2, :2], wide.logprobs[::2, :2], wide.ranks[::2, :2])
    assert decode(encode(cut), Logprobs).same_bits(cut)


def test_rows_of_a_big_endian_machine_mean_the_same_numbers() -> None:
    rows = logprobs(3, 1)
    swapped = Logprobs(
        rows.token_ids.astype(">i4"), rows.logprobs.astype(">f4"), rows.ranks.astype(">i4")
    )
    assert decode(encode(swapped), Logprobs).same_bits(rows)


def test_a_decoded_array_keeps_nothing_else_of_its_message_in_memory() -> None:
    """Rows of one request must not hold on to those of everybody who was in the same batch."""
    back = decode(encode([logprobs(1000, 3), logprobs(2, 3)]), list[Logprobs])[1]
    for array in (back.token_ids, back.logprobs, back.ranks):
        assert not array.flags.writeable
        owner: Any = array
        while isinstance(owner, np.ndarray):
            owner = owner.base
        assert len(owner) == array.nbytes


def test_decoded_rows_can_be_added_to() -> None:
    rows = decode(encode(LogprobRows(1, [logprobs(3, 1)])), LogprobRows)
    rows.append(logprobs(2, 1, first=3))
    assert rows.array().same_bits(logprobs(5, 1))
