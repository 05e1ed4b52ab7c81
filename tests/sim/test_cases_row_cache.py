"""Rows from the cache: what a hit spares, and where it ends.

Blocks hold 4 tokens. `finish` compares every answer bit for bit with what it must be, so the tests
state what was computed for it.
"""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.actions import LoadBlocks, LookupBlocks, RunBatch
from scheduler.errors import NumericalError
from scheduler.sampling_params import SamplingParams
from tests.sim.cases import (
    BLOCK_SIZE,
    CHUNK,
    check,
    check_idle,
    fake_engine,
    finish,
    generating,
    prompt,
    scoring,
)
from tests.sim.engine import SimEngine
from tests.sim.fake_runner import POISON

LENGTHS = range(1, 3 * BLOCK_SIZE + 2)


def cost(
    engine: SimEngine, name: str, tokens: list[int], params: SamplingParams, **more: Any
) -> tuple[int, int]:
    """Run a request; return how many tokens and how many rows were computed for it."""
    stats = engine.state.stats()
    before = (stats.num_computed_tokens, stats.num_prompt_rows)
    assert engine.submit(name, tokens, params, **more) is None
    finish(engine, name)
    stats = engine.state.stats()
    assert (stats.num_recomputed_tokens, stats.num_recomputed_rows) == (0, 0)
    return stats.num_computed_tokens - before[0], stats.num_prompt_rows - before[1]


def expected_cost(num_tokens: int, num_cached_blocks: int, max_tokens: int = 0) -> tuple[int, int]:
    """Rows of cached blocks are not computed, nor any position but that of the next row."""
    cached = num_cached_blocks * BLOCK_SIZE
    decodes = max(max_tokens - 1, 0)
    if cached == num_tokens or num_tokens == 1:
        return (1 + decodes if max_tokens else 0), 0
    if not cached:
        return num_tokens + decodes, num_tokens - 1
    return num_tokens - (cached - 1) + decodes, num_tokens - cached


# --------------------------------------------------------------------- who owns which row


@pytest.mark.parametrize("chunk", [1, 3, CHUNK, 64])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_the_same_prompt_again_costs_what_is_in_no_full_block(chunk: int, max_tokens: int) -> None:
    for n in LENGTHS:
        engine = fake_engine(chunk=chunk)
        params = scoring(max_tokens=max_tokens)
        assert cost(engine, "cold", prompt(n), params) == expected_cost(n, 0, max_tokens)
        again = expected_cost(n, n // BLOCK_SIZE, max_tokens)
        assert cost(engine, "again", prompt(n), params) == again
        cached = engine.result("again").stats.num_cached_tokens
        assert cached == (n + max(max_tokens - 1, 0) - again[0] if n > 1 else 0)
        assert engine.result("again").bits() == engine.result("cold").bits()


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_shared_prefix_serves_its_full_blocks_wherever_it_ends(chunk: int) -> None:
    """The first row of the block after it is made from the last token in it."""
    n = 3 * BLOCK_SIZE + 1
    for num_shared in range(n + 1):
        engine = fake_engine(chunk=chunk)
        cost(engine, "warm", prompt(n), scoring())
        tokens = prompt(n)[:num_shared] + [t + 20 for t in range(n - num_shared)]
        assert cost(engine, "a", tokens, scoring()) == expected_cost(n, num_shared // BLOCK_SIZE)


def test_a_longer_prompt_goes_on_from_a_shorter_one_that_ends_in_any_place() -> None:
    for n in LENGTHS:
        engine = fake_engine()
        cost(engine, "short", prompt(n), scoring())
        found = cost(engine, "long", prompt(n) + prompt(5, seed=1), scoring())
        assert found == expected_cost(n + 5, n // BLOCK_SIZE)


def test_rows_over_several_blocks_and_chunks_are_complete_only_once_their_last_token_is() -> None:
    """One token short of the block's end, its rows are all there, and the block is not."""
    engine = fake_engine(chunk=BLOCK_SIZE - 1)
    engine.submit("cut", prompt(9), scoring())
    engine.complete()
    engine.cancel("cut")
    engine.run()
    assert engine.state.stats().num_row_cache_blocks == 0
    assert cost(engine, "a", prompt(9), scoring()) == expected_cost(9, 0)


@pytest.mark.parametrize("chunk", [1, CHUNK])
@pytest.mark.parametrize("start", range(14))
def test_others_kv_serves_all_before_the_first_row(start: int, chunk: int) -> None:
    """Up to the end of the block in which that row is made; there is no row in the cache."""
    engine = fake_engine(chunk=chunk)
    cost(engine, "warm", prompt(13), generating(1))
    tokens, rows = cost(engine, "a", prompt(13), scoring(prompt_logprobs_start=start))
    assert rows == min(13 - start, 12)
    if start == 13:
        assert tokens == 0
    else:
        assert tokens == 13 - max(start - 1, 0)


@pytest.mark.parametrize("start", range(14))
def test_a_first_row_inside_of_a_block_takes_the_rest_of_its_rows_from_the_cache(
    start: int,
) -> None:
    engine = fake_engine()
    cost(engine, "warm", prompt(13), scoring())
    tokens, rows = cost(engine, "a", prompt(13), scoring(prompt_logprobs_start=start))
    if start == 13:
        assert (tokens, rows) == (0, 0)
    else:
        assert (tokens, rows) == (2, 1)


def test_rows_from_an_index_on_are_kept_for_the_blocks_that_they_fill() -> None:
    engine = fake_engine()
    cost(engine, "tail", prompt(12), scoring(prompt_logprobs_start=6))
    assert engine.state.stats().num_row_cache_blocks == 1
    assert cost(engine, "all", prompt(12), scoring()) == (12, 11)
    assert engine.state.stats().num_row_cache_blocks == 3
    assert cost(engine, "more", prompt(12), scoring(prompt_logprobs_start=4)) == (0, 0)


# ------------------------------------------------------------------------- which rows serve


@pytest.mark.parametrize("k", [0, 1, 2, 3, -1])
def test_rows_serve_fewer_alternatives_and_not_more(k: int) -> None:
    engine = fake_engine()
    cost(engine, "warm", prompt(12), scoring(2))
    is_hit = 0 <= k <= 2
    assert cost(engine, "a", prompt(12), scoring(k)) == expected_cost(12, 3 if is_hit else 0)
    assert cost(engine, "b", prompt(12), scoring(k)) == (0, 0), "the wider ones are kept now"
    assert cost(engine, "c", prompt(12), scoring(2)) == (0, 0)


def test_rows_over_the_whole_vocabulary_serve_any_number() -> None:
    engine = fake_engine()
    cost(engine, "warm", prompt(12), scoring(-1))
    for k in (0, 5, 39, 40, -1):
        assert cost(engine, f"k{k}", prompt(12), scoring(k)) == (0, 0)


def test_rows_of_given_tokens_serve_those_who_ask_for_the_same() -> None:
    engine = fake_engine()

    def params(*ids: int) -> SamplingParams:
        return SamplingParams(prompt_logprob_token_ids=ids, max_tokens=0)

    cost(engine, "warm", prompt(12), params(3, 1))
    assert cost(engine, "same", prompt(12), params(3, 1)) == (0, 0)
    for ids in ((1, 3), (3,), (3, 1, 2)):
        assert cost(engine, f"{ids}", prompt(12), params(*ids)) == expected_cost(12, 0)
    assert cost(engine, "top", prompt(12), scoring(0)) == expected_cost(12, 0)


def test_rows_are_not_shared_across_salts() -> None:
    engine = fake_engine()
    salts = (None, "", "a", "b")
    for salt in salts:
        found = cost(engine, f"{salt!r}", prompt(12), scoring(), cache_salt=salt)
        assert found == expected_cost(12, 0)
    for salt in salts:
        assert cost(engine, f"{salt!r} again", prompt(12), scoring(), cache_salt=salt) == (0, 0)


def test_who_skips_reading_reads_neither_kv_nor_rows_and_leaves_both() -> None:
    engine = fake_engine()
    skip = scoring(skip_reading_prefix_cache=True)
    for name in ("cold", "again"):
        assert cost(engine, name, prompt(12), skip) == expected_cost(12, 0)
        assert engine.result(name).stats.num_cached_tokens == 0
    assert engine.state.stats().num_cache_bypasses == 2
    assert engine.state.stats().num_row_cache_hit_rows == 0
    assert cost(engine, "reads", prompt(12), scoring()) == (0, 0)
    assert engine.state.stats().num_row_cache_hit_rows == 11


def test_without_a_budget_no_row_is_kept() -> None:
    engine = fake_engine(row_cache_bytes=0)
    for name in ("cold", "again"):
        assert cost(engine, name, prompt(12), scoring()) == expected_cost(12, 0)
    assert engine.state.stats().num_row_cache_bytes == 0


# --------------------------------------------------------------- one without the other


def test_kv_without_rows_is_a_miss() -> None:
    """The budget holds the rows of one prompt."""
    engine = fake_engine(num_blocks=128, row_cache_bytes=4 * (512 + 4 * 3 * 12))
    cost(engine, "warm", prompt(13), scoring())
    cost(engine, "flood", prompt(13, seed=1), scoring())
    assert cost(engine, "a", prompt(13), scoring()) == expected_cost(13, 0)


def test_of_rows_that_are_partly_gone_the_head_still_serves() -> None:
    engine = fake_engine(row_cache_bytes=4 * (512 + 4 * 3 * 12), chunk=64)
    cost(engine, "warm", prompt(13), scoring())
    cost(engine, "other", prompt(9, seed=1), scoring())
    assert cost(engine, "a", prompt(13), scoring()) == expected_cost(13, 2)


def test_rows_without_kv_are_a_miss_but_for_whoever_needs_nothing_else() -> None:
    engine = fake_engine(num_blocks=8, store_blocks=0)
    cost(engine, "warm", prompt(12), scoring())
    cost(engine, "flood", prompt(32, seed=1), scoring())
    assert cost(engine, "scores", prompt(12), scoring()) == (0, 0)
    assert cost(engine, "generates", prompt(12), scoring(max_tokens=1)) == expected_cost(12, 0)
    cost(engine, "flood again", prompt(32, seed=2), scoring())
    assert cost(engine, "longer", [*prompt(12), 5], scoring()) == expected_cost(13, 0)


@pytest.mark.parametrize("num_loaded", range(4))
def test_rows_come_for_as_many_blocks_as_the_store_has_brought(num_loaded: int) -> None:
    engine = fake_engine(enable_prefix_caching=False)
    cost(engine, "warm", prompt(14), scoring())
    before = engine.state.stats().num_computed_tokens
    engine.submit("a", prompt(14), scoring())
    engine.complete(engine.index_of(LookupBlocks))
    engine.fail(engine.index_of(LoadBlocks), num_done=num_loaded)
    finish(engine, "a")
    computed = engine.state.stats().num_computed_tokens - before
    assert computed == expected_cost(14, num_loaded)[0]
    assert engine.result("a").stats.num_restored_blocks == num_loaded


def test_a_store_hit_on_another_worker_brings_the_rows_too() -> None:
    engine = fake_engine(2, enable_prefix_caching=False)
    cost(engine, "warm", prompt(14), scoring())
    engine.lose("w0")
    assert cost(engine, "a", prompt(14), scoring(max_tokens=2)) == expected_cost(14, 3, 2)
    assert engine.result("a").stats.num_restored_blocks == 3


def test_rows_dropped_while_the_kv_is_loaded_are_computed_without_touching_it() -> None:
    engine = fake_engine(2, enable_prefix_caching=False, row_cache_bytes=3 * (512 + 4 * 3 * 12))
    cost(engine, "warm", prompt(13), scoring())
    engine.submit("a", prompt(13), scoring())
    engine.complete(engine.index_of(LookupBlocks))
    engine.submit("flood", prompt(13, seed=1), scoring())
    while (index := engine.index_of(RunBatch)) is not None:
        engine.complete(index)
    finish(engine, "a", "flood")
    assert engine.result("a").stats.num_restored_blocks == 3
    assert engine.state.stats().num_prompt_rows == 3 * 12


# ------------------------------------------------------------------------- lives of requests


@pytest.mark.parametrize("chunk", [1, 3, CHUNK])
def test_a_request_that_lives_off_the_cache_survives_evictions_moves_and_losses(
    chunk: int,
) -> None:
    for harm in ("evict", "migrate", "lose"):
        for num_steps in range(6):
            engine = fake_engine(3, chunk=chunk, enable_journal=True)
            engine.submit("warm", prompt(9), scoring())
            finish(engine, "warm")
            engine.submit("a", prompt(18), scoring(max_tokens=3, logprobs=1))
            for _ in range(num_steps):
                engine.step()
            infos = engine.state.request_infos(0.0)
            worker = infos[0].worker_id if infos else None
            if infos and harm == "evict":
                engine.evict("a")
            elif worker and harm == "migrate":
                engine.migrate("a", next(w for w in engine.runners if w != worker))
            elif worker:
                engine.lose(worker)
            finish(engine, "a")
            stats = engine.state.stats()
            assert stats.num_recomputed_rows == 0
            assert stats.num_prompt_rows + stats.num_row_cache_hit_rows == 8 + 17


def test_a_restarted_scheduler_keeps_the_rows_that_a_request_was_given() -> None:
    """Its cache is empty; what the request had from the old one is in the journal."""
    engine = fake_engine(enable_journal=True)
    engine.submit("warm", prompt(12), scoring())
    finish(engine, "warm")
    engine.submit("a", prompt(14), scoring())
    engine.restart_scheduler()
    assert engine.state.stats().num_row_cache_blocks == 0
    finish(engine, "a")
    assert engine.state.stats().num_prompt_rows == 2
    assert engine.state.stats().num_recomputed_rows == 0
    assert cost(engine, "new", prompt(12), scoring())[1] == 11, "the blocks of warm are not kept"


def test_a_result_that_needed_no_worker_is_in_the_journal() -> None:
    engine = fake_engine(enable_journal=True)
    for name in ("cold", "again"):
        engine.submit(name, prompt(12), scoring())
        finish(engine, name)
    rows = [engine.written_results[name].prompt_logprobs.array() for name in ("cold", "again")]
    assert rows[0].same_bits(rows[1])
    assert engine.written_results["again"].stats.num_cached_tokens == 12


def test_a_request_whose_rows_are_all_at_hand_needs_no_worker() -> None:
    """The only one is lost, and its replacement has not come yet."""
    engine = fake_engine()
    engine.submit("warm", prompt(12), scoring())
    finish(engine, "warm")
    engine.expect("w1", 64)
    engine.lose("w0")
    engine.submit("a", prompt(12), scoring())
    engine.submit("none", prompt(5), scoring(prompt_logprobs_start=5))
    assert engine.live == []
    for name in ("a", "none"):
        check(engine, name)


def test_a_request_evicted_with_all_its_rows_ends_where_it_waits() -> None:
    engine = fake_engine(chunk=CHUNK, store_blocks=0, max_steps_in_flight=1)
    engine.submit("a", prompt(CHUNK + 1), scoring())
    engine.evict("a")
    engine.complete()
    assert engine.live == []
    check(engine, "a")
    engine.run()
    check_idle(engine)


# ------------------------------------------------------------------------------------- NaN


def test_nan_right_after_a_shared_block_leaves_that_block_as_it_was() -> None:
    """The chunk that fails begins in the block that others read."""
    for chunk in (2, 64):
        engine = fake_engine(chunk=chunk)
        engine.submit("warm", prompt(9), scoring())
        finish(engine, "warm")
        bad = [*prompt(9)[:8], POISON, 5, 6]
        engine.submit("bad", bad, scoring(max_tokens=1))
        engine.run()
        assert isinstance(engine.result("bad").error, NumericalError)
        first = next(
            c
            for a in engine.log
            if isinstance(a, RunBatch)
            for c in a.output.chunks
            if c.request_id == "bad"
        )
        assert (first.start, first.first_new_position) == (7, 8)
        assert cost(engine, "good", prompt(9), scoring(max_tokens=2)) == expected_cost(9, 2, 2)


def test_a_prompt_with_nan_at_the_end_of_a_block_leaves_no_rows_of_it() -> None:
    """Else it would be refused the first time, and answered the second time."""
    engine = fake_engine(chunk=3)
    for name in ("first", "second"):
        engine.submit(name, [1, 2, 3, POISON], scoring())
        engine.run()
        assert isinstance(engine.result(name).error, NumericalError)
    check_idle(engine)
