"""What is counted and timed, on virtual time, whatever happens to requests meanwhile.

The parts of a request's life add up to the whole, and what it finds again is attributed to whom it
comes from.
"""

from __future__ import annotations

import pytest

from scheduler.actions import LoadBlocks, LookupBlocks, SaveBlocks
from scheduler.events import EvictRequested, LoadDone, LookupDone, RequestCancelled, SaveDone
from scheduler.request import RequestStatus
from tests.sim.cases import (
    BLOCK_SIZE,
    add_worker,
    check_idle,
    fake_engine,
    finish,
    generating,
    prompt,
    scoring,
)
from tests.sim.engine import SimEngine
from tests.sim.script import Script

NUM_TOKENS = 7


def busy_engine() -> SimEngine:
    """Five requests that generate, on two workers too small for them."""
    engine = fake_engine(2, num_blocks=14, save_segment_tokens=8, max_num_seqs=2)
    for i in range(5):
        engine.submit(f"r{i}", prompt(17 + i, seed=i), generating(NUM_TOKENS, n=1))
    return engine


def lose_a_worker(engine: SimEngine) -> None:
    engine.lose("w1")


def evict_all(engine: SimEngine) -> None:
    for name in engine.live:
        engine.evict(name)


def let_time_pass(engine: SimEngine) -> None:
    engine.tick(3.0)


@pytest.mark.parametrize("happens", [let_time_pass, evict_all, lose_a_worker])
@pytest.mark.parametrize("after", [1, 8, 20])
def test_the_parts_of_requests_lives_add_up(happens: object, after: int) -> None:
    """Queue and prefill are the time to the first token, which with decode is the whole."""
    assert callable(happens)
    engine = busy_engine()
    for _ in range(after):
        engine.step()
    happens(engine)
    engine.run()
    times = engine.state.timings()
    counts = {name: getattr(times, name).num_observations for name in times.__struct_fields__}
    assert counts.pop("inter_token") == 5 * (NUM_TOKENS - 1)
    assert counts.pop("migration_pause") == engine.state.stats().num_migrations
    assert set(counts.values()) == {5}
    first = times.time_to_first_token.total_s
    assert first == pytest.approx(times.queue.total_s + times.prefill.total_s)
    assert times.end_to_end.total_s == pytest.approx(first + times.decode.total_s)
    assert times.inter_token.total_s == pytest.approx(times.decode.total_s)


def test_what_was_cancelled_is_counted_but_in_no_latency_from_end_to_end() -> None:
    engine = busy_engine()
    engine.step()
    engine.cancel("r0")
    engine.cancel("r4")
    engine.run()
    assert engine.state.stats().finished_by_reason == {"abort": 2, "length": 3}
    times = engine.state.timings()
    assert times.end_to_end.num_observations == times.decode.num_observations == 3


def test_a_restored_request_is_not_counted_twice() -> None:
    """Its prompt was accepted by the scheduler before, and is done in this one."""
    engine = fake_engine(1, enable_journal=True)
    engine.submit("a", prompt(20), generating(3))
    engine.step()
    engine.restart_scheduler()
    engine.run()
    stats, times = engine.state.stats(), engine.state.timings()
    assert (stats.num_prompt_tokens, stats.num_prefilled_tokens) == (0, 20)
    assert stats.finished_by_reason == {"length": 1}
    counts = {name: getattr(times, name).num_observations for name in times.__struct_fields__}
    assert {name: count for name, count in counts.items() if count} == {"inter_token": 2}


def test_tokens_that_caches_supply_are_counted_by_where_they_come_from() -> None:
    """Blocks hold 4 tokens: the same 21 tokens come from the worker, then from the store."""
    engine = fake_engine(1, num_blocks=12)
    engine.submit("cold", prompt(21), generating(1))
    finish(engine, "cold")
    stats = engine.state.stats()
    assert (stats.num_queried_tokens, stats.num_worker_cache_hit_tokens) == (21, 0)
    engine.submit("warm", prompt(21), generating(1))
    finish(engine, "warm")
    assert (stats.num_queried_tokens, stats.num_worker_cache_hit_tokens) == (42, 20)
    assert stats.num_store_hit_tokens == 0
    add_worker(engine, "w1")
    engine.lose("w0")
    engine.submit("elsewhere", prompt(21), generating(1))
    finish(engine, "elsewhere")
    assert (stats.num_worker_cache_hit_tokens, stats.num_store_hit_tokens) == (20, 20)
    engine.submit("bypass", prompt(21), generating(1, skip_reading_prefix_cache=True))
    finish(engine, "bypass")
    assert (stats.num_queried_tokens, stats.num_cache_bypasses) == (63, 1)
    assert stats.num_own_hit_tokens == 0


@pytest.mark.parametrize("skips", [False, True])
def test_what_an_evicted_request_finds_of_itself_is_its_own_and_no_hit(skips: bool) -> None:
    engine = fake_engine(1, num_blocks=12, enable_prefix_caching=not skips)
    params = generating(9, skip_reading_prefix_cache=skips)
    engine.submit("a", prompt(21), params)
    for _ in range(4):
        engine.step()
    engine.evict("a")
    while (request := engine.state.request("a")) and request.status is not RequestStatus.SAVING:
        engine.complete()
    assert request is not None
    num_computed = request.num_computed_tokens
    finish(engine, "a")
    stats = engine.state.stats()
    assert stats.num_evictions == 1
    assert stats.num_own_hit_tokens == num_computed // BLOCK_SIZE * BLOCK_SIZE
    assert stats.num_worker_cache_hit_tokens == stats.num_store_hit_tokens == 0
    assert stats.num_queried_tokens == (0 if skips else 21 + 1)


def test_what_the_store_supplies_beyond_a_requests_own_progress_is_a_hit() -> None:
    """Evicted after two blocks of five, which are still on the worker; the rest others saved."""
    script = Script()
    script.submit("a", 21)
    script.say(LookupDone(script.last(LookupBlocks).op_id, 0))
    script.say(EvictRequested("a"))
    script.computed()
    script.say(SaveDone(script.last(SaveBlocks).op_id, 2, 2))
    script.say(LookupDone(script.last(LookupBlocks).op_id, 20))
    assert script.say(LoadDone(script.last(LoadBlocks).op_id, 3))
    stats = script.state.stats()
    assert (stats.num_own_hit_tokens, stats.num_store_hit_tokens) == (8, 12)


def test_a_move_is_counted_and_its_pause_timed() -> None:
    engine = fake_engine(2)
    engine.submit("a", prompt(40), generating(20))
    for _ in range(8):
        engine.step()
    (use,) = [use for use in engine.state.worker_uses() if use.num_running]
    engine.migrate("a", "w1" if use.worker_id == "w0" else "w0")
    finish(engine, "a")
    stats, pause = engine.state.stats(), engine.state.timings().migration_pause
    assert stats.migrations_by_reason == {"asked": 1}
    assert pause.num_observations == 1
    assert pause.total_s == stats.migration_pause_s > 0


def test_prompts_that_are_done_are_counted_however_their_rows_came() -> None:
    """The second one has all of its rows from the row cache, and is never computed."""
    engine = fake_engine(1, row_cache_bytes=2**20)
    for name in ("a", "b"):
        engine.submit(name, prompt(20), scoring())
        finish(engine, name)
    stats, times = engine.state.stats(), engine.state.timings()
    assert stats.num_prefilled_tokens == 40
    assert stats.num_computed_tokens == 20
    assert times.end_to_end.num_observations == 2
    assert times.queue.num_observations == times.prefill.num_observations == 1


def test_a_worker_whose_last_step_failed_is_idle_from_then_on() -> None:
    """It was to be told of a request that had failed, which is not tried again by itself."""
    script = Script(enable_offload=False)
    script.submit("a", 5)
    script.batch_failed()
    script.batch_failed()
    script.say(RequestCancelled("nobody", time_s=5.0))
    [use] = script.state.worker_uses()
    assert (use.dispatch_s, use.idle_s) == (0.0, 5.0)


def test_a_workers_time_adds_up_to_that_since_it_joined() -> None:
    engine = fake_engine(2, max_num_seqs=1)
    started_s = engine._now_s
    engine.tick(5.0)
    engine.submit("a", prompt(20), generating(5))
    engine.tick(2.0)
    while engine.step():
        engine.tick(1.0)
    engine.tick(4.0)
    check_idle(engine)
    passed_s = engine._now_s - started_s
    uses = engine.state.worker_uses()
    for use in uses:
        assert use.compute_s + use.dispatch_s + use.idle_s == pytest.approx(passed_s, abs=0.05)
    busy = [use.dispatch_s for use in uses]
    assert sorted(busy)[0] == 0.0
    assert max(busy) > 2.0
