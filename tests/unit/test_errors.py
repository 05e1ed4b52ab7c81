"""Errors keep their kind, words and facts through pickling and through messages."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import errors
from scheduler.codec import decode, encode
from scheduler.errors import (
    HaversackError,
    InvalidRequest,
    NumericalError,
    RequestFailed,
    WireError,
    from_wire,
)
from tests.strategies import TEXT, assert_same, of_type

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, HaversackError)
]
DETAILS = {"param": "n", "limit": 2**40, "share": 0.5, "given": None, "fatal": True}


def test_there_are_errors_to_look_at() -> None:
    assert len(KINDS) > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_survives_pickling(kind: type[HaversackError], way: object) -> None:
    """Ray raises it in another process; a wrong __init__ would turn it into a TypeError there."""
    assert callable(way)
    error = way(kind("it is wrong: do that", **DETAILS))
    assert type(error) is kind
    assert str(error) == error.message == "it is wrong: do that"
    assert_same(error.details, DETAILS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_a_message(kind: type[HaversackError]) -> None:
    sent = kind("it is wrong: do that", **DETAILS)
    error = from_wire(decode(encode(sent.to_wire()), WireError))
    assert type(error) is kind
    assert str(error) == "it is wrong: do that"
    assert_same(error.details, DETAILS)


@given(of_type(WireError))
def test_a_wire_error_loses_nothing(error: WireError) -> None:
    assert_same(decode(encode(error), WireError), error)


@given(TEXT.filter(lambda kind: kind not in {k.__name__ for k in KINDS}), TEXT)
def test_an_error_of_a_kind_unknown_here_is_still_an_error(kind: str, message: str) -> None:
    """A newer peer sends a kind that this version does not have."""
    error = from_wire(WireError(kind, message, {"why": 1}))
    assert type(error) is RequestFailed
    assert (error.message, error.details) == (message, {"why": 1})


@given(st.sampled_from(KINDS), TEXT)
def test_the_text_is_shown_as_it_is(kind: type[HaversackError], message: str) -> None:
    assert str(kind(message)) == message


def test_a_text_that_shows_what_a_user_gave_is_bounded() -> None:
    error = HaversackError("begin " + "x" * 10_000_000 + " end")
    assert len(error.message) < 10_000
    assert error.message.startswith("begin ")
    assert error.message.endswith(" end")
    assert "characters left out" in error.message
    assert HaversackError("x" * 8192).message == "x" * 8192


def test_callers_can_catch_what_they_know() -> None:
    assert issubclass(InvalidRequest, ValueError)
    assert issubclass(NumericalError, RequestFailed)
    assert issubclass(errors.InvalidConfig, ValueError)
    assert all(issubclass(kind, HaversackError) for kind in KINDS)


def test_details_of_one_error_are_not_shared_with_its_message() -> None:
    error = InvalidRequest("wrong", param="n")
    wire = error.to_wire()
    error.details["param"] = "changed"
    assert wire.details == {"param": "n"}
