"""What a score says of the rows that it is made from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cluster.scoring import Score, ScoringParams, joined, score_of
from scheduler.errors import InvalidRequest
from scheduler.logprobs import Logprobs


def rows(*tokens: tuple[float, list[tuple[int, float]]]) -> Logprobs:
    """Rows of tokens 10, 11, ...: each its logprob, and the likeliest tokens with theirs."""
    ids, logprobs, ranks = [], [], []
    for i, (own, top) in enumerate(tokens):
        ids.append([10 + i, *(token for token, _ in top)])
        logprobs.append([own, *(value for _, value in top)])
        ranks.append([1 + sum(v > value for _, v in top) for value in logprobs[-1]])
    return Logprobs(
        np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(ranks, np.int32)
    )


def score(found: Logprobs, **params: Any) -> Score:
    return score_of(found, ScoringParams(**params), str, num_context_tokens=3)


def test_a_sum_is_of_the_fp32_values_and_exact() -> None:
    values = [-1e8, -0.1, -1e-9, -3.0]
    found = score(rows(*((value, [(7, -0.01)]) for value in values)))
    assert found.logprob == math.fsum(float(np.float32(value)) for value in values)
    assert found.num_tokens == 4


def test_a_token_of_no_probability_makes_the_sum_infinite() -> None:
    assert score(rows((-math.inf, [(7, 0.0)]), (-1.0, [(7, -0.5)]))).logprob == -math.inf


@pytest.mark.parametrize(
    ("second", "is_greedy"),
    [
        ((-0.5, [(11, -0.5)]), True),
        ((-0.7, [(12, -0.5)]), False),
        ((-0.5, [(11, -0.5), (12, -0.5)]), True),
        # As probable as the best one, so of rank 1, and yet greedy decoding gives the other.
        ((-0.5, [(4, -0.5), (11, -0.5)]), False),
    ],
)
def test_greedy_is_what_greedy_decoding_would_give(
    second: tuple[float, list[tuple[int, float]]], is_greedy: bool
) -> None:
    first = (-0.2, [(10, -0.2), (5, -3.0)][: len(second[1])])
    found = score(rows(first, second), logprobs=len(second[1]))
    assert found.is_greedy is is_greedy
    assert joined([found, found], None).is_greedy is is_greedy
    greedy = score(rows(first), logprobs=1)
    assert greedy.is_greedy
    assert joined([greedy, found], None).is_greedy is is_greedy


@pytest.mark.parametrize(("logprobs", "width"), [(0, 1), (1, 2), (3, 4), (-1, 4)])
def test_rows_have_the_alternatives_that_were_asked_for(logprobs: int, width: int) -> None:
    top = [(7, -0.1), (8, -2.0), (9, -3.0)]
    params = ScoringParams(logprobs=logprobs)
    asked = params.sampling_params(3).prompt_logprobs
    whole = rows((-1.5, top[:asked] if asked != -1 else top))
    found = score_of(whole, params, str, num_context_tokens=3)
    arrays = found.token_logprobs.arrays
    assert arrays.same_bits(
        Logprobs(
            whole.token_ids[:, :width].copy(),
            whole.logprobs[:, :width].copy(),
            whole.ranks[:, :width].copy(),
        )
    )
    (entry,) = found.token_logprobs
    assert list(entry) == [10, *(token for token, _ in top)][:width]
    assert entry[10].decoded_token == "10"


def test_text_is_there_where_a_tokenizer_is() -> None:
    found = rows((-1.0, [(7, -0.5)]), (-1.0, [(7, -0.5)]))
    assert score(found).tokens == ["10", "11"]
    bare = score_of(found, ScoringParams(), None, num_context_tokens=1)
    assert bare.tokens is None
    assert joined([bare], None).tokens is None


def test_windows_join_to_one_score() -> None:
    first = score(rows((-1.0, [(10, -1.0)]), (-2.0, [(11, -2.0)])), logprobs=1)
    second = score(rows((-4.0, [(3, -0.1)])), logprobs=1)
    whole = joined([first, second], str)
    assert (whole.logprob, whole.num_tokens, whole.is_greedy) == (-7.0, 3, False)
    assert whole.token_ids == [10, 11, 10]
    assert whole.tokens == ["10", "11", "10"]
    assert [*whole.token_logprobs] == [*first.token_logprobs, *second.token_logprobs]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("logprobs", -2),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("logprobs", None),
        ("truncate", 1),
        ("add_special_tokens", None),
        ("prefix_token_id", -1),
        ("prefix_token_id", "a"),
        ("skip_reading_prefix_cache", 1),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ScoringParams(**{param: value})
    assert refusal.value.details["param"] == param
