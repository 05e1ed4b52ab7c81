"""Prompt logprobs: complete, aligned, made once, and the same whatever happens on the way."""

from __future__ import annotations

import pytest

from scheduler.actions import Emit, RunBatch
from scheduler.events import EvictRequested
from scheduler.messages import ChunkResult, ModelRunnerOutput
from scheduler.request import FinishReason
from tests.sim.cases import (
    BLOCK_SIZE,
    CHUNK,
    add_worker,
    check,
    fake_engine,
    finish,
    generating,
    prompt,
    scoring,
)
from tests.sim.engine import SimEngine


def chunks_of(engine: SimEngine, name: str) -> list[tuple[int, int]]:
    """(start, end) of every chunk of a request so far."""
    return [
        (c.start, c.start + len(c.token_ids))
        for a in engine.log
        if isinstance(a, RunBatch)
        for c in a.output.chunks
        if c.request_id == name
    ]


@pytest.mark.parametrize("skip", [None, False, True])
@pytest.mark.parametrize("n", [3, 4, 5, 8, 9])
def test_a_prompt_scored_twice_has_the_same_rows_with_a_warm_cache(n: int, skip) -> None:
    """The second time around the blocks are cached, but rows are not."""
    engine = fake_engine()
    for name in ("first", "second"):
        assert engine.submit(name, prompt(n), scoring(skip_reading_prefix_cache=skip)) is None
        finish(engine, name)
    first, second = engine.result("first"), engine.result("second")
    assert first.bits() == second.bits()
    assert second.prompt_logprobs.num_rows == n - 1


def test_nothing_is_visible_before_the_prefill_is_done() -> None:
    engine = fake_engine()
    n = 3 * CHUNK + 1
    engine.submit("a", prompt(n), scoring(max_tokens=2))
    for _ in range(3):
        engine.complete()
        assert not [a for a in engine.log if isinstance(a, Emit)]
    engine.complete()
    told = [a.delta for a in engine.log if isinstance(a, Emit)]
    assert [(d.prompt_logprobs.num_rows, len(d.new_token_ids)) for d in told] == [(n - 1, 1)]
    finish(engine, "a")


@pytest.mark.parametrize("store_blocks", [0, 4000])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_rows_survive_eviction_after_every_possible_chunk(num_workers: int, store_blocks) -> None:
    """The wish for rows is not forgotten, none is doubled or lost, and it comes to an end."""
    n = 3 * CHUNK + 1
    for num_chunks in range(4):
        engine = fake_engine(num_workers, store_blocks=store_blocks)
        engine.submit("a", prompt(n), scoring(max_tokens=3, logprobs=1))
        for _ in range(num_chunks):
            engine.complete()
        engine.evict("a")
        finish(engine, "a")
        stats = engine.result("a").stats
        assert stats.num_evictions == 1
        assert stats.num_recomputed_tokens < (BLOCK_SIZE if store_blocks else n + 3)
        assert engine.state.stats().num_recomputed_rows == 0
        assert engine.state.stats().num_prompt_rows == n - 1


@pytest.mark.parametrize("store_blocks", [0, 4000])
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_a_request_evicted_at_every_turn_comes_to_its_end(chunk: int, store_blocks: int) -> None:
    """Chunks below a block save nothing new: a stay without progress would repeat for ever."""
    engine = fake_engine(2, chunk=chunk, store_blocks=store_blocks)
    n = 40
    engine.submit("a", prompt(n), scoring(max_tokens=3, skip_reading_prefix_cache=True))
    for _ in range(5_000):
        if not engine.live:
            break
        engine.evict("a")
        engine.step()
    finish(engine, "a")
    stats = engine.result("a").stats
    assert stats.num_evictions >= n // (chunk * engine.config.max_steps_in_flight)
    if store_blocks:
        assert stats.num_recomputed_tokens < BLOCK_SIZE * stats.num_evictions


def test_thirty_four_prompts_in_a_tiny_pool_equal_unevicted_runs() -> None:
    engine = fake_engine(2, num_blocks=18, chunk=5)
    names = [f"r{i}" for i in range(34)]
    for i, name in enumerate(names):
        params = scoring(max_tokens=40, logprobs=2)
        assert engine.submit(name, prompt(5 + i % 25, seed=i), params, seed=i) is None
    finish(engine, *names)
    assert engine.state.stats().num_evictions > 0
    assert engine.state.stats().num_recomputed_rows == 0
    for name in names:
        result = engine.result(name)
        assert len(result.token_ids) == sum(part.num_rows for part in result.logprobs) == 40


@pytest.mark.parametrize("store_blocks", [0, 4000])
def test_an_eviction_after_m_generated_tokens_neither_adds_nor_drops_a_row(store_blocks) -> None:
    """Generated tokens never turn into prompt rows, and output rows are one per token."""
    n, num_tokens = 9, 12
    for m in range(1, num_tokens):
        engine = fake_engine(store_blocks=store_blocks)
        engine.submit("a", prompt(n), scoring(max_tokens=num_tokens, logprobs=2), seed=3)
        while len(engine.result("a").token_ids) < m:
            engine.step()
        engine.evict("a")
        finish(engine, "a")
        result = engine.result("a")
        is_last_under_way = m >= num_tokens - engine.config.max_steps_in_flight
        assert result.stats.num_evictions == (not is_last_under_way)
        assert result.prompt_logprobs.num_rows == n - 1
        assert len(result.token_ids) == sum(p.num_rows for p in result.logprobs) == num_tokens


def test_a_last_chunk_of_one_token_brings_no_row_and_completes_the_prompt() -> None:
    engine = fake_engine()
    n = 2 * CHUNK + 1
    engine.submit("a", prompt(n), scoring())
    finish(engine, "a")
    assert chunks_of(engine, "a") == [(0, 8), (8, 16), (16, 17)]
    assert engine.result("a").prompt_logprobs.num_rows == n - 1


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_a_chunk_that_ends_one_before_the_end_leaves_the_last_token_to_the_next(max_tokens) -> None:
    """All n-1 rows are there before the last chunk, which still completes the request."""
    engine = fake_engine()
    n = 2 * CHUNK + 1
    engine.submit("a", prompt(n), scoring(max_tokens=max_tokens))
    engine.complete()
    engine.complete()
    request = engine.state.request("a")
    assert (request.num_computed_tokens, request.prompt_logprobs.num_rows) == (n - 1, n - 1)
    assert request.is_prefilling
    engine.evict("a")
    finish(engine, "a")


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 9, 16, 100])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17])
def test_chunk_budgets_change_no_bit(chunk: int, n: int) -> None:
    engine = fake_engine(chunk=chunk)
    engine.submit("a", prompt(n), scoring(k=-1, max_tokens=2))
    finish(engine, "a")


@pytest.mark.parametrize("cut", [1, BLOCK_SIZE, 2 * BLOCK_SIZE, 19, 20])
def test_any_window_of_the_rows_is_that_window_of_the_prompt(cut: int) -> None:
    """Rows from s on are those of positions s.., never shifted, and only position 0 has none."""
    engine = fake_engine()
    tokens = prompt(20)
    engine.submit("whole", tokens, scoring())
    engine.submit("head", tokens[:cut], scoring())
    finish(engine, "whole", "head")
    whole, head = engine.result("whole").prompt_logprobs, engine.result("head").prompt_logprobs
    assert head.num_rows == cut - 1
    assert whole[: cut - 1].same_bits(head)
    assert whole.token_ids[:, 0].tolist() == tokens[1:]


@pytest.mark.parametrize("num_shared", [5, 10, 19, 20])
def test_kv_reuse_never_shortens_the_rows(num_shared: int) -> None:
    """The caches could serve a quarter, a half, all but one, all of the prompt."""
    engine = fake_engine(2)
    tokens = prompt(20)
    engine.submit("warm", tokens[:num_shared], generating(1))
    finish(engine, "warm")
    for skip, num_cached in ((None, 0), (True, 0), (False, 20)):
        name = f"scored-{skip}"
        engine.submit(name, tokens, scoring(k=1, skip_reading_prefix_cache=skip))
        finish(engine, name)
        assert engine.result(name).prompt_logprobs.num_rows == 19
        assert engine.result(name).stats.num_cached_tokens == num_cached


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 3])
def test_a_worker_lost_in_mid_prefill_costs_kv_and_no_row(num_chunks: int) -> None:
    engine = fake_engine(2)
    n = 3 * CHUNK + 3
    engine.submit("a", prompt(n), scoring(max_tokens=2))
    for _ in range(num_chunks):
        engine.complete()
    engine.lose("w0")
    finish(engine, "a")
    stats = engine.state.stats()
    assert engine.result("a").stats.num_workers_lost == 1
    assert stats.num_recomputed_tokens == CHUNK * num_chunks
    assert (stats.num_recomputed_rows, stats.num_prompt_rows) == (0, n - 1)


def test_three_workers_lost_in_turn_and_every_request_still_ends() -> None:
    engine = fake_engine(3, num_blocks=24)
    names = [f"r{i}" for i in range(12)]
    for i, name in enumerate(names):
        engine.submit(name, prompt(10 + i, seed=i), scoring(max_tokens=4), seed=i)
    for lost in range(3):
        for _ in range(6):
            engine.step()
        engine.lose(f"w{lost}")
        add_worker(engine, f"w{3 + lost}", 24)
    finish(engine, *names)
    assert engine.state.stats().num_recomputed_rows == 0


def test_a_bad_request_fails_alone_and_the_loop_goes_on() -> None:
    engine = fake_engine(chunk=64)
    for i, name in enumerate("abc"):
        engine.submit(name, prompt(9, seed=i), scoring(max_tokens=2))
    runner = engine.runners["w0"]
    execute = runner.execute

    def without_rows(output):
        answer = execute(output)
        bad = ChunkResult("b", sampled_token_id=1)
        results = [bad if r.request_id == "b" else r for r in answer.results]
        return ModelRunnerOutput(answer.step_id, results)

    runner.execute = without_rows
    engine.run()
    check(engine, "a")
    check(engine, "c")
    assert engine.result("b").finish_reason is FinishReason.ERROR
    assert engine.result("b").prompt_logprobs is None


def test_an_eviction_of_everybody_at_once_changes_no_bit() -> None:
    engine = fake_engine(2, chunk=16)
    names = [f"r{i}" for i in range(8)]
    for i, name in enumerate(names):
        engine.submit(name, prompt(15 + i, seed=i), scoring(max_tokens=6, logprobs=0), seed=i)
    for _ in range(4):
        engine.step()
        engine.handle(*(EvictRequested(name) for name in engine.live))
    finish(engine, *names)
    stats = engine.state.stats()
    assert stats.num_evictions >= 6
    assert stats.num_recomputed_tokens < BLOCK_SIZE * stats.num_evictions
