"""Sampling: what each parameter leaves, and draws that depend on seed and position only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scheduler.errors import RequestFailed
from scheduler.sampling_params import SamplingParams
from workers.sampler import Draw, TokenCounts, sample, uniform

VOCAB = 64


def random_logits(seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=vocab) * 2).astype(np.float32)


def draw(index: int = 0, seed: int = 7, **params: Any) -> Draw:
    banned = params.pop("banned", ())
    counts = params.pop("counts", None)
    return Draw(SamplingParams(**params), seed, index, banned, counts)


def drawn(logits: np.ndarray, count: int = 400, **params: Any) -> list[int]:
    """Tokens drawn at so many positions of one stream."""
    return [sample(logits, draw(index, **params)) for index in range(count)]


def counts(prompt: list[int], output: list[int]) -> TokenCounts:
    return TokenCounts(np.array(prompt + output, np.int32), len(prompt))


def test_a_draw_is_a_function_of_seed_and_position() -> None:
    """A request that starts again elsewhere at token 5 draws what it would have drawn."""
    logits = random_logits()
    first = drawn(logits, 50)
    assert drawn(logits, 50) == first
    assert [sample(logits, draw(index)) for index in reversed(range(50))] == first[::-1]
    assert drawn(logits, 50, seed=8) != first


def test_the_random_stream_is_pinned() -> None:
    """Written down once: an upgrade of numpy that changed it would change users' results."""
    pinned = ["0x1.be80697053d3fp-1", "0x1.5352da77ecee8p-4", "0x1.ce47ef2d93800p-7"]
    assert [uniform(7, i).hex() for i in range(3)] == pinned
    assert 0.0 <= uniform(2**63 - 1, 2**31) < 1.0


def test_numbers_of_the_stream_are_uniform() -> None:
    numbers = np.array([uniform(3, i) for i in range(4000)])
    assert np.histogram(numbers, bins=10, range=(0, 1))[0].min() > 320
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06


def test_greedy_takes_the_likeliest_and_the_lowest_id_of_equals() -> None:
    logits = random_logits()
    assert sample(logits, draw(temperature=0.0)) == int(np.argmax(logits))
    logits[[9, 40, 50]] = 99.0
    assert drawn(logits, 5, temperature=0.0) == [9] * 5


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits()
    before = logits.tobytes()
    sample(logits, draw(logit_bias={3: 5.0}, allowed_token_ids=(3, 4), top_k=3, min_p=0.1))
    assert logits.tobytes() == before


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    logits = random_logits(vocab=6)
    weights = np.exp(logits.astype(np.float64) / temperature)
    found = np.bincount(drawn(logits, 5000, temperature=temperature), minlength=6) / 5000
    assert np.abs(found - weights / weights.sum()).max() < 0.03


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_leaves_k_tokens(k: int) -> None:
    logits = random_logits()
    best = set(np.argsort(-logits)[:k].tolist())
    assert set(drawn(logits, 600, top_k=k, temperature=2.0)) == best


def test_top_k_settles_a_tie_at_its_edge_by_id() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[50] = 1.0
    assert set(drawn(logits, 600, top_k=3)) == {50, 0, 1}


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.6, 0.9])
def test_top_p_leaves_the_fewest_tokens_that_hold_the_share(top_p: float) -> None:
    logits = random_logits(vocab=8)
    weights = np.exp(logits.astype(np.float64))
    order = np.argsort(-weights)
    shares = np.cumsum(weights[order]) / weights.sum()
    expected = set(order[: int(np.argmax(shares >= top_p)) + 1].tolist())
    assert set(drawn(logits, 1500, top_p=top_p)) == expected


def test_top_p_settles_equal_tokens_by_id() -> None:
    assert set(drawn(np.zeros(10, np.float32), 600, top_p=0.35)) == {0, 1, 2, 3}


def test_top_p_counts_only_what_top_k_left() -> None:
    """As in vLLM: of four tokens at 0.4, 0.3, 0.2, 0.1, two are left, at 4/7 and 3/7."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    assert set(drawn(logits, 400, top_k=2, top_p=0.5)) == {0}
    assert set(drawn(logits, 400, top_p=0.5)) == {0, 1}


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = np.log(np.array([0.5, 0.26, 0.14, 0.1])).astype(np.float32)
    assert set(drawn(logits, 800, min_p=0.5)) == {0, 1}
    assert set(drawn(logits, 800, min_p=0.25)) == {0, 1, 2}
    assert set(drawn(logits, 800, min_p=1.0)) == {0}


def test_the_stages_agree_with_a_plain_softmax_where_nothing_is_cut() -> None:
    logits = random_logits(vocab=1000)
    plain = drawn(logits, 50)
    assert drawn(logits, 50, top_k=1000, top_p=1.0, min_p=0.0) == plain
    assert drawn(logits, 50, top_k=-1) == plain


def test_only_allowed_tokens_are_drawn() -> None:
    logits = random_logits()
    assert set(drawn(logits, 600, allowed_token_ids=(3, 9, 11), temperature=3.0)) == {3, 9, 11}
    best = max((3, 9, 11), key=lambda token: logits[token])
    assert sample(logits, draw(allowed_token_ids=(3, 9, 11), temperature=0.0)) == best


def test_bias_moves_the_choice() -> None:
    logits = random_logits()
    assert drawn(logits, 30, logit_bias={17: 100.0}) == [17] * 30
    likeliest = int(np.argmax(logits))
    assert likeliest not in drawn(logits, 300, logit_bias={likeliest: -100.0})


def test_stop_tokens_are_banned_until_enough_tokens_are_generated() -> None:
    """min_tokens counts generated tokens only; the prompt has no part in it."""
    logits = np.zeros(4, np.float32)
    logits[2] = 50.0
    tokens = drawn(logits, 8, min_tokens=5, banned=(2,))
    assert 2 not in tokens[:5]
    assert tokens[5:] == [2, 2, 2]
    biased = drawn(logits, 8, min_tokens=5, banned=(2,), logit_bias={1: 1.0})
    assert [token == 2 for token in biased] == [False] * 5 + [True] * 3


def test_repetition_penalty_counts_prompt_and_output_and_respects_the_sign() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.5], np.float32)
    params = {"temperature": 0.0, "repetition_penalty": 1.5}
    assert sample(logits, draw(counts=counts([0], []), **params)) == 1
    assert sample(logits, draw(counts=counts([], [0]), **params)) == 1
    assert sample(logits, draw(counts=counts([], []), **params)) == 0
    below = np.array([-1.0, -1.2], np.float32)
    assert sample(below, draw(counts=counts([0], []), **params)) == 1


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = np.array([2.0, 1.4, 0.9], np.float32)
    presence = {"temperature": 0.0, "presence_penalty": 1.0}
    assert sample(logits, draw(counts=counts([0, 0], []), **presence)) == 0
    assert sample(logits, draw(counts=counts([], [0]), **presence)) == 1
    frequency = {"temperature": 0.0, "frequency_penalty": 0.4}
    assert sample(logits, draw(counts=counts([], [0]), **frequency)) == 0
    assert sample(logits, draw(counts=counts([], [0, 0]), **frequency)) == 1


def test_counts_kept_as_tokens_come_equal_counts_from_a_history() -> None:
    grown = counts([5, 5, 6], [])
    for token in (1, 2, 1):
        grown.append([token])
    fresh = counts([5, 5, 6], [1, 2, 1])
    assert grown.seen_ids.tolist() == fresh.seen_ids.tolist() == [1, 2, 5, 6]
    assert dict(zip(grown.output_ids, grown.output_counts, strict=True)) == {1: 2, 2: 1}
    assert grown.output_counts.tolist() == fresh.output_counts.tolist()


def test_tokens_with_no_probability_are_never_drawn() -> None:
    logits = random_logits()
    logits[10:] = -np.inf
    assert max(drawn(logits, 500, temperature=5.0)) < 10
    assert max(drawn(logits, 500, temperature=5.0, top_k=40)) < 10


def test_nothing_left_to_sample_is_the_requests_failure() -> None:
    logits = random_logits()
    with pytest.raises(RequestFailed, match="no token can be sampled"):
        sample(logits, draw(allowed_token_ids=(3,), min_tokens=2, banned=(3,)))
