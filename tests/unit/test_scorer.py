"""A client scores any number of pairs, in bounded memory, whatever becomes of some of them."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from cluster import intake as intake_module
from cluster import scorer as scorer_module
from cluster.scoring import Score, ScoringParams
from scheduler.errors import (
    Cancelled,
    EngineUnavailable,
    HaversackError,
    InvalidRequest,
    ModelNotFound,
    NumericalError,
    RequestTooLarge,
)
from scheduler.request import FinishReason
from tests.fake_scheduler import rows
from tests.scoring_engine import Engine, ScoringClient, scoring_client
from tests.tiny_models import BOS, byte_tokenizer

WINDOW = 32


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(intake_module, "load_tokenizer", lambda name: byte_tokenizer())
    monkeypatch.setattr(scorer_module, "_MIN_WINDOW", WINDOW)
    return Engine()


@pytest.fixture
def client(engine: Engine) -> Iterator[ScoringClient]:
    with scoring_client(engine) as made:
        yield made


def ends_of(engine: Engine, token: int) -> list[FinishReason | None]:
    """How the requests whose prompts end with a token have ended."""
    return [
        family.requests[0].finish_reason
        for family in engine.families.values()
        if family.submission.prompt_token_ids[-1] == token
    ]


def test_a_score_is_made_of_the_rows_of_the_continuation(
    client: ScoringClient, engine: Engine
) -> None:
    score = client.score([3, 1, 4], [1, 5], ScoringParams(logprobs=2))
    (submission,) = engine.seen
    assert submission.prompt_token_ids.tolist() == [3, 1, 4, 1, 5]
    params = submission.sampling_params
    assert (params.prompt_logprobs, params.max_tokens, params.n) == (2, 0, 1)
    whole = rows(0, 1, submission.prompt_token_ids[1:], 2)
    assert score.token_logprobs.arrays.same_bits(whole[2:])
    assert score.token_ids == [1, 5]
    assert (score.num_tokens, score.num_context_tokens, score.index) == (2, 3, 0)
    assert score.logprob == float(whole.logprobs[2, 0]) + float(whole.logprobs[3, 0])
    assert not score.is_greedy
    assert client.score([3, 1, 4], [0, 0]).is_greedy, "token 0 is the likeliest everywhere"
    assert not client.score([3, 1, 4], [0, 1]).is_greedy


def test_text_and_its_tokens_text(client: ScoringClient, engine: Engine) -> None:
    score = client.score("ab ", "c")
    assert engine.seen[0].prompt_token_ids.tolist() == [BYTE[c] for c in "ab c"]
    assert score.token_ids == [BYTE[" "], BYTE["c"]]
    assert score.tokens == [" ", "c"]
    assert client.score("", "c").num_context_tokens == 1
    assert engine.seen[1].prompt_token_ids.tolist() == [BOS, BYTE["c"]]
    assert pickle.loads(pickle.dumps(score)) == score


def test_without_a_tokenizer_ids_are_scored(
    client: ScoringClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> Any:
        raise ModelNotFound("no tokenizer")

    monkeypatch.setattr(intake_module, "load_tokenizer", fail)
    assert client.score([3], [1, 5]).tokens is None
    with pytest.raises(ModelNotFound):
        client.score("a", "b")


def test_what_goes_with_a_pair_goes_with_its_request(client: ScoringClient, engine: Engine) -> None:
    params = ScoringParams(skip_reading_prefix_cache=True)
    client.score([3], [1], params, priority=-2, cache_salt="salt", timeout_s=9)
    (submission,) = engine.seen
    assert (submission.priority, submission.cache_salt) == (-2, "salt")
    assert submission.timeout_s == 9.0
    assert submission.sampling_params.skip_reading_prefix_cache is True


# ------------------------------------------------------------------------------------- many


def pairs(count: int) -> list[tuple[list[int], list[int]]]:
    return [([3, 1 + i % 5], [i % 7, 2]) for i in range(count)]


def test_many_are_scored_in_their_order(client: ScoringClient) -> None:
    many = pairs(5 * WINDOW)
    scores = list(client.score_many(iter(many)))
    assert [score.index for score in scores] == list(range(5 * WINDOW))
    for pair, score in zip(many[:9], scores[:9], strict=True):
        alone = client.score(*pair)
        assert score.token_logprobs == alone.token_logprobs
        assert score.logprob == alone.logprob
    assert list(client.score_many([])) == []


def test_requests_may_have_names_that_say_which_pair(client: ScoringClient, engine: Engine) -> None:
    list(client.score_many(pairs(3), request_id="exam"))
    assert [submission.request_id for submission in engine.seen] == ["exam-0", "exam-1", "exam-2"]
    list(client.score_many(pairs(2)))
    assert len({submission.request_id for submission in engine.seen}) == 5


def test_no_more_is_under_way_than_the_window_holds(client: ScoringClient, engine: Engine) -> None:
    """The pairs have no end, and their reader is slower than the engine."""
    num_read = 0

    def endless() -> Iterator[tuple[list[int], list[int]]]:
        nonlocal num_read
        for pair in itertools.cycle(pairs(35)):
            num_read += 1
            assert num_read < 100 * WINDOW
            yield pair

    scores = client.score_many(endless())
    assert num_read == 0, "nothing is read before the first score is asked for"
    for count, score in enumerate(itertools.islice(scores, 10 * WINDOW)):
        assert score.index == count
        assert num_read - count <= WINDOW
    assert len(engine.seen) == num_read
    messages = engine.num_calls("submit")
    assert messages <= 60, "many go in one message"


def test_large_rows_make_the_window_smaller(
    client: ScoringClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_module, "_MAX_RESULT_BYTES", 1000)
    num_read = 0

    def counted() -> Iterator[tuple[list[int], list[int]]]:
        nonlocal num_read
        for pair in pairs(40):
            num_read += 1
            yield pair

    # Two rows of 10 + 1 columns of 12 bytes each: four pairs are more than 1,000 bytes.
    for count, _ in enumerate(client.score_many(counted(), ScoringParams(logprobs=10))):
        assert num_read - count <= 4
    assert num_read == 40


def test_as_they_come_a_slow_one_keeps_no_other_waiting(
    client: ScoringClient, engine: Engine
) -> None:
    engine.held_tokens = {9}
    many = [([3], [2, 9]), *pairs(3 * WINDOW)]
    found = []
    for score in client.score_many(many, ordered=False):
        found.append(score.index)
        if len(found) == 3 * WINDOW:
            assert 0 not in found
            engine.release()
    assert found[-1] == 0
    assert sorted(found) == list(range(len(many)))


def test_a_full_queue_is_waited_for(client: ScoringClient, engine: Engine) -> None:
    engine.max_live = 5
    scores = list(client.score_many(pairs(2 * WINDOW)))
    assert [score.index for score in scores] == list(range(2 * WINDOW))
    assert engine.num_overloaded


# ------------------------------------------------------------------------------------- bad ones


BAD: list[tuple[Any, type[HaversackError]]] = [
    (([3], []), InvalidRequest),
    (([3], [2**31]), InvalidRequest),
    (([3], ["a"]), InvalidRequest),
    (([3], 7), InvalidRequest),
    (([3],), InvalidRequest),
    (None, InvalidRequest),
    (([3], [8]), RequestTooLarge),
]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("bad", "kind"), BAD, ids=repr)
def test_a_bad_one_among_many_harms_no_other(
    client: ScoringClient, engine: Engine, bad: Any, kind: type, ordered: bool
) -> None:
    engine.refused_tokens[8] = RequestTooLarge("too large", limit=7)
    many: list[Any] = pairs(50)
    many[20] = bad
    found: dict[int, Score | HaversackError] = {}
    for result in client.score_many(many, ordered=ordered, on_error="yield"):
        is_error = isinstance(result, HaversackError)
        index = result.details["pair_index"] if is_error else result.index
        if ordered:
            assert index == len(found)
        found[index] = result
    assert sorted(found) == list(range(50))
    error = found.pop(20)
    assert type(error) is kind
    assert "pair 20: " in str(error)
    assert all(isinstance(result, Score) for result in found.values())


@pytest.mark.parametrize(("bad", "kind"), BAD, ids=repr)
def test_or_it_ends_the_iteration_in_its_place(
    client: ScoringClient, engine: Engine, bad: Any, kind: type
) -> None:
    engine.refused_tokens[8] = RequestTooLarge("too large")
    many: list[Any] = pairs(50)
    many[20] = bad
    scores = client.score_many(many)
    assert [next(scores).index for _ in range(20)] == list(range(20))
    with pytest.raises(kind) as caught:
        next(scores)
    assert caught.value.details["pair_index"] == 20
    assert next(scores, None) is None


def test_an_error_of_one_alone_says_nothing_of_pairs(client: ScoringClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.score([3], [])
    assert "pair_index" not in caught.value.details


def test_one_that_fails_on_its_way_is_told_in_its_place(
    client: ScoringClient, engine: Engine
) -> None:
    """NaN, or a user who cancels it by its id."""
    engine.held_tokens = {8, 9}
    many = [*pairs(4), ([3], [8]), ([3], [9]), *pairs(4)]
    results = client.score_many(many, on_error="yield")
    for _ in range(4):
        assert isinstance(next(results), Score)
    by_token = {int(s.prompt_token_ids[-1]): s.request_id for s in engine.seen}
    engine.tell("cancel", [by_token[9]])
    client._connection._ledger.handle(by_token[8]).fail(NumericalError("NaN"))
    kinds = [type(result) for result in results]
    assert kinds == [NumericalError, Cancelled, *[Score] * 4]


@pytest.mark.parametrize("how", ["closed", "bad pair", "reader fails"])
def test_whoever_stops_early_leaves_nothing_running(
    client: ScoringClient, engine: Engine, how: str
) -> None:
    engine.held_tokens = {9}

    def read() -> Iterator[Any]:
        yield ([3], [2])
        if how == "bad pair":
            yield ([3], [])
        yield from [([3], [9])] * 8
        yield ([3], [2])
        if how == "reader fails":
            yield from [([3], [2])] * WINDOW
            raise KeyError("the file ends")

    with closing(client.score_many(read(), ordered=how == "bad pair")) as scores:
        assert next(scores).num_tokens == 1
        if how == "bad pair":
            with pytest.raises(InvalidRequest):
                next(scores)
        elif how == "reader fails":
            with pytest.raises(KeyError):
                list(scores)
    assert engine.live() == []
    assert ends_of(engine, 9) == [FinishReason.ABORT] * 8


@pytest.mark.parametrize("on_error", ["raise", "yield"])
def test_the_engines_end_ends_the_iteration(
    client: ScoringClient, engine: Engine, on_error: Any
) -> None:
    engine.held_tokens = {9}
    results = client.score_many([*pairs(3), ([3], [9])], on_error=on_error)
    for _ in range(3):
        assert isinstance(next(results), Score)
    engine.closed = EngineUnavailable("shut down")
    with pytest.raises(EngineUnavailable, match="shut down"):
        next(results)
    with pytest.raises(EngineUnavailable, match="shut down"):
        list(client.score_many(pairs(3), on_error=on_error))


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("on_error", "ignore"),
        ("priority", "high"),
        ("cache_salt", 7),
        ("timeout_s", 0),
        ("params", {"logprobs": 1}),
    ],
)
def test_a_wrong_argument_is_refused_at_once(client: ScoringClient, param: str, value: Any) -> None:
    """Not for each pair, nor when the first score is asked for."""
    with pytest.raises(InvalidRequest) as refusal:
        client.score_many(pairs(3), **{param: value})
    assert refusal.value.details["param"] == param


# ------------------------------------------------------------------------------------- length


def test_what_is_too_long_loses_its_beginning_only_where_that_is_asked_for(
    client: ScoringClient, engine: Engine
) -> None:
    limit = client._connection.info.limits.max_model_len
    engine.refused_tokens[7] = RequestTooLarge("too long")
    long = [1] * 5 + [2] * (limit - 2)
    score = client.score(long, [4, 5, 6], ScoringParams(truncate=True))
    sent = engine.seen[-1].prompt_token_ids.tolist()
    assert sent == [2] * (limit - 3) + [4, 5, 6]
    assert (score.num_context_tokens, score.num_truncated_tokens) == (limit - 3, 6)
    assert score.token_ids == [4, 5, 6]
    with pytest.raises(RequestTooLarge):
        client.score(long, [5, 6, 7])
    for length in (limit - 1, limit):
        exact = client.score([2] * (length - 1), [4], ScoringParams(truncate=True))
        assert exact.num_truncated_tokens == 0


def test_a_document_is_scored_window_by_window(client: ScoringClient, engine: Engine) -> None:
    document = [i % 7 for i in range(25)]
    score = client.score_rolling(document, ScoringParams(logprobs=1), max_window_tokens=5)
    assert score.token_ids == document
    assert score.num_tokens == 25
    assert score.num_context_tokens == 1
    prompts = [submission.prompt_token_ids.tolist() for submission in engine.seen]
    assert prompts[0] == [BOS, *document[:4]]
    assert prompts[-1] == document[-5:]
    assert len(prompts) == 7
    ways = [client.score(p[:1], p[1:], ScoringParams(logprobs=1)) for p in prompts[:6]]
    expected = [entry for way in ways for entry in way.token_logprobs]
    assert [*score.token_logprobs][:24] == expected
    whole = client.score_rolling(document)
    assert whole.token_ids == document
    assert engine.seen[-1].prompt_token_ids.tolist() == [BOS, *document]
    for size in (1, True, "5", client._connection.info.limits.max_model_len + 1):
        with pytest.raises(InvalidRequest):
            client.score_rolling(document, max_window_tokens=size)
    with pytest.raises(InvalidRequest):
        client.score_rolling([])


BYTE = dict(zip("abc ", byte_tokenizer()("abc ").input_ids, strict=True))
