"""Continuations scored over and over, with caches that hold KV, rows, both or neither.

`finish` holds every answer against the one right one, bit for bit; what is tested besides is who
was allowed to read what.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from scheduler.errors import InvalidRequest, RequestTooLarge
from scheduler.request import FinishReason
from scheduler.sampling_params import SamplingParams
from tests.sim.cases import (
    BLOCK_SIZE,
    CHUNK,
    MAX_MODEL_LEN,
    fake_engine,
    finish,
    generating,
    prompt,
    scoring,
)
from tests.sim.engine import SimEngine

B = BLOCK_SIZE
LENGTHS = [1, B - 1, B, B + 1, 2 * B, 2 * B + 1, CHUNK * 2 + 1]


def starts(n: int) -> list[int]:
    """First rows at and around the edges of blocks, and none at all."""
    return sorted({s for s in (0, 1, B - 1, B, B + 1, 2 * B, n - 1, n) if 0 <= s <= n})


def score(
    engine: SimEngine, name: str, tokens: list[int], params: SamplingParams, **options: Any
) -> int:
    """Run a request to its end and check it; return how many tokens were computed for it."""
    before = engine.state.stats().num_computed_tokens
    assert engine.submit(name, tokens, params, **options) is None
    finish(engine, name)
    return engine.state.stats().num_computed_tokens - before


@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}, {"row_cache_bytes": 0}])
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("n", LENGTHS)
def test_every_window_cold_and_warm_is_that_window_of_the_prompt(
    n: int, max_tokens: int, settings: dict[str, Any]
) -> None:
    """Each start after each other one: what it finds cached has rows from elsewhere on, or none."""
    for first, second in itertools.product(starts(n), repeat=2):
        engine = fake_engine(2, **settings)
        for name, start in (("cold", first), ("warm", second), ("again", second)):
            params = scoring(max_tokens=max_tokens, prompt_logprobs_start=start)
            score(engine, name, prompt(n), params)
            rows = engine.result(name).prompt_logprobs
            assert rows.num_rows == n - max(start, 1)
            assert rows.token_ids[:, 0].tolist() == prompt(n)[max(start, 1) :]


@pytest.mark.parametrize("start", [0, 1, B, 2 * B + 1, 4 * B])
def test_the_bypass_reads_neither_kv_nor_rows_and_is_no_lookup(start: int) -> None:
    """Also where the whole answer lies ready; what it computes serves others."""
    engine = fake_engine(2)
    tokens = prompt(4 * B)
    params = scoring(k=1, prompt_logprobs_start=start)
    bypass = scoring(k=1, prompt_logprobs_start=start, skip_reading_prefix_cache=True)
    score(engine, "cold", tokens, params)
    queries = engine.state.stats().num_store_queries
    rows = engine.state.stats().num_row_cache_hit_rows
    computed = score(engine, "skips", tokens, bypass)
    assert computed == (4 * B if start < 4 * B else 0), "nothing is wanted of the whole prompt"
    assert engine.result("skips").stats.num_cached_tokens == 0
    assert engine.state.stats().num_row_cache_hit_rows == rows
    assert engine.state.stats().num_store_queries == queries
    fresh = fake_engine(2)
    score(fresh, "skips", tokens, bypass)
    assert score(fresh, "reads", tokens, params) < 4 * B


@pytest.mark.parametrize("kind", ["generated", "scored with fewer", "scored from the middle on"])
@pytest.mark.parametrize("store", [False, True])
def test_blocks_without_the_rows_that_are_wanted_shorten_no_answer(kind: str, store: bool) -> None:
    """The worker's cache, or the store on another worker, has all of the KV."""
    engine = fake_engine(2, enable_prefix_caching=not store)
    tokens = prompt(5 * B + 1)
    before = {
        "generated": generating(1),
        "scored with fewer": scoring(k=1),
        "scored from the middle on": scoring(k=3, prompt_logprobs_start=2 * B + 1),
    }[kind]
    score(engine, "before", tokens, before)
    score(engine, "whole", tokens, scoring(k=3))
    assert engine.result("whole").prompt_logprobs.num_rows == 5 * B
    assert engine.result("whole").stats.num_cached_tokens < 2 * B


def test_choices_of_one_question_compute_its_context_once() -> None:
    """One after the other; each answer's rows are those of the answer alone."""
    engine = fake_engine()
    context = prompt(6 * B + 1)
    for choice in range(4):
        answer = prompt(3, seed=choice + 1)
        params = scoring(k=1, prompt_logprobs_start=len(context))
        computed = score(engine, f"c{choice}", context + answer, params)
        assert engine.result(f"c{choice}").prompt_logprobs.num_rows == 3
        assert computed == (len(context) + 3 if not choice else 4), "the token before, and its own"


@pytest.mark.parametrize("n", [MAX_MODEL_LEN - 1, MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
@pytest.mark.parametrize("max_tokens", [0, 1, 10])
def test_a_prompt_may_fill_the_context_exactly(n: int, max_tokens: int) -> None:
    """Evaluation tools send exactly as many tokens as the context has; twice, here."""
    engine = fake_engine(num_blocks=MAX_MODEL_LEN // B + 10, chunk=128)
    tokens = (prompt(40) * 26)[:n]
    for name in ("cold", "warm"):
        params = scoring(k=1, max_tokens=max_tokens, prompt_logprobs_start=n - 5)
        if n > MAX_MODEL_LEN:
            assert isinstance(engine.submit(name, tokens, params), RequestTooLarge)
            continue
        score(engine, name, tokens, params)
        result = engine.result(name)
        assert result.finish_reason is FinishReason.LENGTH
        assert len(result.token_ids) == min(max_tokens, MAX_MODEL_LEN - n + 1)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("n", [B, 2 * B, 2 * B + 1])
def test_an_echo_that_lies_ready_is_still_continued_rightly(n: int, max_tokens: int) -> None:
    """Prompt rows, and those of generated tokens after them, however much was cached."""
    engine = fake_engine()
    for name in ("cold", "warm"):
        params = scoring(k=1, max_tokens=max_tokens, logprobs=1 if max_tokens else None)
        computed = score(engine, name, prompt(n), params, seed=5)
        assert len(engine.result(name).token_ids) == max_tokens
    assert computed <= n % B + 1 + max(max_tokens - 1, 0), "the rest came from the cache"


def test_a_start_beyond_the_prompt_is_refused_by_name() -> None:
    engine = fake_engine()
    refused = engine.submit("a", prompt(9), scoring(prompt_logprobs_start=10))
    assert isinstance(refused, InvalidRequest)
    assert refused.details["param"] == "prompt_logprobs_start"
    score(engine, "b", prompt(9), scoring(prompt_logprobs_start=9))


@pytest.mark.parametrize("start", [0, B + 1, 3 * B])
@pytest.mark.parametrize("row_cache_blocks", [0, 1, 3, 1000])
def test_evictions_and_a_small_row_cache_change_no_bit(start: int, row_cache_blocks: int) -> None:
    """Rows are dropped between the look at them and the bringing; requests resume in between."""
    engine = fake_engine(2, num_blocks=16, chunk=5, row_cache_bytes=row_cache_blocks * 700)
    context = prompt(4 * B)
    names = []
    for i in range(12):
        params = scoring(k=i % 3, max_tokens=i % 2, prompt_logprobs_start=start)
        names.append(f"r{i}")
        engine.submit(names[-1], context + prompt(1 + i % 6, seed=i), params, seed=i)
        for _ in range(4):
            engine.step()
        if engine.live:
            engine.evict(engine.live[i % len(engine.live)])
    finish(engine, *names)
    assert engine.state.stats().num_recomputed_rows == 0
