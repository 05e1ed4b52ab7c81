"""Log-likelihoods on real actors: the bits of plain prompt logprobs, and what generation gives."""

from __future__ import annotations

import numpy as np
import pytest

from cluster import (
    Client,
    HaversackError,
    InvalidRequest,
    RequestTooLarge,
    SamplingParams,
    Score,
    ScoringParams,
)
from scheduler.logprobs import Logprobs
from tests.engine.conftest import DEADLINE_S
from tests.tiny_models import BOS, MAX_MODEL_LEN, VOCAB_SIZE

CONTEXT = [40 + i % 90 for i in range(37)]
CONTINUATION = [50, 61, 50, 72, 83]


def prompt_rows(client: Client, prompt: list[int], k: int) -> Logprobs:
    """All rows of a prompt, computed from scratch."""
    params = SamplingParams(prompt_logprobs=k, max_tokens=0, skip_reading_prefix_cache=True)
    output = client.submit(prompt, params).result(timeout=DEADLINE_S)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs.arrays


def greedy_tokens(client: Client, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return client.submit(prompt, params).result(timeout=DEADLINE_S).outputs[0].token_ids


@pytest.mark.parametrize("num_context", [1, 7, 8, 9, 16, 36, 37])
@pytest.mark.parametrize("skip", [None, True])
def test_rows_are_the_bits_of_plain_prompt_logprobs(
    client: Client, num_context: int, skip: bool | None
) -> None:
    """At the edges of KV blocks, cold and with a warm cache."""
    context = CONTEXT[:num_context]
    expected = prompt_rows(client, context + CONTINUATION, 3)[num_context - 1 :]
    params = ScoringParams(logprobs=3, skip_reading_prefix_cache=skip)
    for score in (client.score(context, CONTINUATION, params) for _ in range(2)):
        assert score.token_logprobs.arrays.same_bits(expected)
        assert score.token_ids == CONTINUATION
        assert score.logprob == pytest.approx(expected.logprobs[:, 0].sum(dtype=np.float64))
    # What stands before the first row's own position is read, in whole blocks.
    assert score.num_cached_tokens >= (0 if skip else (num_context - 1) // 8 * 8)
    assert not (skip and score.num_cached_tokens)


def test_the_actual_token_alone_has_the_same_bits_as_with_alternatives(client: Client) -> None:
    alone = client.score(CONTEXT, CONTINUATION)
    wide = client.score(CONTEXT, CONTINUATION, ScoringParams(logprobs=-1))
    assert wide.token_logprobs.arrays.width == VOCAB_SIZE + 1
    for narrow, whole in zip(alone.token_logprobs, wide.token_logprobs, strict=True):
        assert len(narrow) == 1
        assert narrow.items() <= whole.items()
    assert (alone.logprob, alone.is_greedy) == (wide.logprob, wide.is_greedy)


def test_greedy_is_what_generation_gives(client: Client) -> None:
    for start in range(3, 12):
        context = CONTEXT[start:]
        right = greedy_tokens(client, context, 6)
        assert client.score(context, right).is_greedy
        for place in range(6):
            wrong = [*right[:place], (right[place] + 1) % 250, *right[place + 1 :]]
            assert not client.score(context, wrong).is_greedy
        (entry,) = client.score(context, right[:1]).token_logprobs
        assert entry[right[0]].rank == 1


def test_text_is_scored_as_the_model_reads_it(client: Client) -> None:
    score = client.score("The sky is ", "blue")
    ids = client.tokenizer("The sky is blue").input_ids
    split = len(client.tokenizer("The sky is").input_ids)
    expected = prompt_rows(client, ids, 0)[split - 1 :]
    assert score.token_logprobs.arrays.same_bits(expected)
    assert score.tokens == list(" blue")
    assert "".join(score.tokens) == " blue"
    empty = client.score("", "blue")
    assert empty.token_logprobs.arrays.same_bits(
        prompt_rows(client, [BOS, *client.tokenizer("blue").input_ids], 0)
    )


def test_a_document_longer_than_a_window_is_scored_once_through(client: Client) -> None:
    document = CONTEXT * 3
    score = client.score_rolling(document, max_window_tokens=50)
    assert score.token_ids == document
    first = prompt_rows(client, [BOS, *document[:49]], 0)
    second = prompt_rows(client, document[48:98], 0)
    last = prompt_rows(client, document[-50:], 0)[-13:]
    assert score.token_logprobs.arrays.same_bits(Logprobs.concat([first, second, last]))


@pytest.mark.parametrize("ordered", [True, False])
def test_many_are_scored_each_by_itself_and_a_bad_one_harms_no_other(
    client: Client, ordered: bool
) -> None:
    """Choices that share a context; one of them is no token of this model, one is too long."""
    rng = np.random.default_rng(4)
    pairs = [
        (CONTEXT[: 10 + question], rng.integers(0, 250, int(rng.integers(1, 6))).tolist())
        for question in range(20)
        for _ in range(4)
    ]
    alone = [client.score(*pair, ScoringParams(skip_reading_prefix_cache=True)) for pair in pairs]
    pairs[30] = (CONTEXT, [VOCAB_SIZE])
    pairs[50] = ([1] * MAX_MODEL_LEN, [2])
    found: dict[int, Score | HaversackError] = {}
    for result in client.score_many(iter(pairs), ordered=ordered, on_error="yield"):
        is_score = isinstance(result, Score)
        index = result.index if is_score else result.details["pair_index"]
        assert not ordered or index == len(found)
        found[int(index or 0)] = result
    assert type(found[30]) is InvalidRequest
    assert type(found[50]) is RequestTooLarge
    for index, expected in enumerate(alone):
        score = found[index]
        if index in (30, 50):
            continue
        assert isinstance(score, Score)
        assert score.token_logprobs == expected.token_logprobs
        assert (score.logprob, score.is_greedy) == (expected.logprob, expected.is_greedy)


def test_whoever_stops_early_leaves_nothing_behind(client: Client) -> None:
    """The fixture checks that no request is left, and no block."""
    scores = client.score_many((CONTEXT * 8, [i % 250]) for i in range(100))
    assert next(scores).index == 0
    scores.close()
    with pytest.raises(InvalidRequest) as caught:
        list(client.score_many([(CONTEXT, [1]), (CONTEXT, []), (CONTEXT * 8, [1])]))
    assert caught.value.details["pair_index"] == 1
