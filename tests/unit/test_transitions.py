"""The life of a request: every legal change of status, and every other one refused."""

from __future__ import annotations

import itertools
import pickle

import pytest

from scheduler.codec import int_array
from scheduler.errors import InvalidTransition
from scheduler.request import Request, RequestStatus
from scheduler.sampling_params import SamplingParams
from scheduler.transitions import TRANSITIONS, change_status

S = RequestStatus
LEGAL = {
    (S.WAITING, S.LOADING),
    (S.WAITING, S.RUNNING),
    (S.WAITING, S.FINISHED),
    (S.LOADING, S.RUNNING),
    (S.LOADING, S.WAITING),
    (S.LOADING, S.FINISHED),
    (S.RUNNING, S.SAVING),
    (S.RUNNING, S.WAITING),
    (S.RUNNING, S.FINISHED),
    (S.SAVING, S.WAITING),
    (S.SAVING, S.FINISHED),
}
ILLEGAL = [edge for edge in itertools.product(S, S) if edge not in LEGAL]
STORY = ("1.000s loading on w0 (looks in the offload store)", "1.200s running on w0 (loaded)")


def request_in(status: RequestStatus) -> Request:
    return Request(
        request_id="r-17",
        prompt_token_ids=int_array([1, 2]),
        sampling_params=SamplingParams(),
        seed=0,
        max_tokens=1,
        status=status,
    )


def names(edge: tuple[RequestStatus, RequestStatus]) -> str:
    return f"{edge[0].value}-{edge[1].value}"


@pytest.mark.parametrize("edge", sorted(LEGAL, key=names), ids=names)
def test_a_legal_change_is_made(edge: tuple[RequestStatus, RequestStatus]) -> None:
    request = request_in(edge[0])
    change_status(request, edge[1], STORY)
    assert request.status is edge[1]
    assert TRANSITIONS[edge], "each edge says why it exists"


@pytest.mark.parametrize("edge", ILLEGAL, ids=names)
def test_an_illegal_change_is_refused_with_the_story(
    edge: tuple[RequestStatus, RequestStatus],
) -> None:
    """Whoever reads the error must learn what happened before, also in another process."""
    request = request_in(edge[0])
    with pytest.raises(InvalidTransition) as caught:
        change_status(request, edge[1], STORY)
    assert request.status is edge[0]
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is InvalidTransition
    for part in (*STORY, "r-17", edge[0].value, edge[1].value):
        assert part in str(error)
    assert error.details == {
        "request_id": "r-17",
        "source": edge[0].value,
        "target": edge[1].value,
    }


def test_a_request_without_a_story_says_so() -> None:
    with pytest.raises(InvalidTransition, match="nothing happened to it yet"):
        change_status(request_in(S.FINISHED), S.RUNNING, ())


def test_the_table_has_these_edges_and_no_other() -> None:
    assert set(TRANSITIONS) == LEGAL


def test_every_status_can_be_reached_and_only_the_end_is_never_left() -> None:
    reached = {S.WAITING}
    while new := {to for source, to in TRANSITIONS if source in reached} - reached:
        reached |= new
    assert reached == set(S)
    assert set(S) - {source for source, _ in TRANSITIONS} == {S.FINISHED}
    for status in set(S) - {S.FINISHED}:
        assert (status, S.FINISHED) in TRANSITIONS, "a request can be aborted wherever it is"
