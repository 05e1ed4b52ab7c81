"""The codec: every message, event and action comes out as it went in, and nothing else does."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import actions, events, messages
from scheduler.actions import AnyAction
from scheduler.codec import decode, encode, id_array, int_array
from scheduler.events import AnyEvent, LookupDone, WorkerLost
from scheduler.messages import Chunk, SchedulerOutput, Submission
from scheduler.sampling_params import SamplingParams
from tests.strategies import assert_same, of_type

EVENTS = typing.get_args(AnyEvent)
ACTIONS = typing.get_args(AnyAction)
STRUCTS = [
    found
    for found in vars(messages).values()
    if isinstance(found, type) and issubclass(found, msgspec.Struct)
]

few_examples = settings(max_examples=25)


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
@few_examples
@given(data=st.data())
def test_a_message_comes_out_as_it_went_in(kind: type[Any], data: st.DataObject) -> None:
    sent = data.draw(of_type(kind))
    assert_same(decode(encode(sent), kind), sent)


@pytest.mark.parametrize(
    ("union", "kind"),
    [(AnyEvent, kind) for kind in EVENTS] + [(AnyAction, kind) for kind in ACTIONS],
    ids=lambda value: getattr(value, "__name__", ""),
)
@few_examples
@given(data=st.data())
def test_events_and_actions_are_told_apart_by_their_tag(
    union: Any, kind: type[Any], data: st.DataObject
) -> None:
    sent = data.draw(of_type(kind))
    assert_same(decode(encode(sent), union), sent)


@few_examples
@given(st.lists(of_type(Submission), max_size=3))
def test_a_list_of_messages_travels_as_one(sent: list[Submission]) -> None:
    assert_same(decode(encode(sent), list[Submission]), sent)


def test_every_event_and_action_is_in_its_union() -> None:
    """One that is left out would be refused by the decoder, or forgotten by a `match`."""
    assert set(EVENTS) == set(events.Event.__subclasses__())
    assert set(ACTIONS) == set(actions.Action.__subclasses__())


def test_an_event_is_no_action() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode(LookupDone(op_id=1, num_hit_tokens=2)), AnyAction)


def test_messages_can_not_be_changed_on_their_way() -> None:
    with pytest.raises(AttributeError):
        WorkerLost(worker_id="w").worker_id = "v"  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.float32, np.int16])
def test_token_ids_of_another_dtype_are_refused(dtype: Any) -> None:
    """Bytes of int64 token ids would hash to other blocks than the same ids as int32."""
    sent = Submission("r", np.array([1, 2, 3], dtype=dtype), SamplingParams(), 0)
    with pytest.raises(msgspec.ValidationError, match="int32"):
        decode(encode(sent), Submission)


@pytest.mark.parametrize(
    "wire",
    [
        None,
        [1, 2, 3],
        ("<i4", (3,), b"\0" * 8),
        ("<i4", (3,), b"\0" * 13),
        ("<i4", (2, -3), b"\0" * 4),
        ("|O", (1,), b"\0" * 8),
        ("no dtype", (1,), b"\0" * 4),
        ("<i4", "x", b"\0" * 4),
        ("<i4", (1,)),
    ],
)
def test_a_damaged_array_is_refused(wire: object) -> None:
    """It raises, with the field's place, and never gives numbers that nobody sent."""
    damaged = encode(
        {
            "step_id": 1,
            "released_request_ids": [],
            "chunks": [
                {
                    "request_id": "r",
                    "start": 0,
                    "token_ids": wire,
                    "new_block_ids": int_array([]),
                    "row_target_ids": int_array([]),
                    "first_row_position": 0,
                    "sample": False,
                }
            ],
        }
    )
    with pytest.raises(msgspec.ValidationError, match="token_ids"):
        decode(damaged, SchedulerOutput)


@few_examples
@given(of_type(Chunk), st.data())
def test_a_message_cut_short_is_refused(chunk: Chunk, data: st.DataObject) -> None:
    message = encode(chunk)
    end = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(msgspec.DecodeError):
        decode(message[:end], Chunk)


def test_what_is_no_message_can_not_be_encoded() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        encode(object())


@pytest.mark.parametrize(
    "values",
    [
        [0, 2**31 - 1, -(2**31)],
        (),
        np.array([5, 6], dtype=np.int64),
        np.array([5, 6], dtype=np.uint8),
        np.arange(10, dtype=np.int32)[::3],
        range(4),
    ],
)
def test_token_ids_become_int32_in_one_piece(values: Any) -> None:
    array = int_array(values)
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    assert array.tolist() == list(values)


@pytest.mark.parametrize("ids", [[], [7], [0, 2**31 - 1, 5]])
def test_ids_of_the_engine_become_what_any_token_ids_become(ids: list[int]) -> None:
    assert id_array(ids).tolist() == ids
    assert encode(id_array(ids)) == encode(int_array(ids))


@pytest.mark.parametrize(
    "values",
    [
        [2**31],
        [2**32 + 5],
        [-(2**31) - 1],
        [2**70],
        np.array([2**32 + 5], dtype=np.int64),
        np.array([2**32 - 1], dtype=np.uint32),
        np.array([2**63], dtype=np.uint64),
        [1.5],
        [float("nan")],
        ["7"],
        [None],
    ],
)
def test_token_ids_that_do_not_fit_never_wrap_around(values: Any) -> None:
    """2**32 + 5 would silently become token 5."""
    with pytest.raises(OverflowError):
        int_array(values)
