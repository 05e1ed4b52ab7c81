"""Caches: who may read what, blocks that are reused too early, promises that are not kept."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler.actions import LoadBlocks, LookupBlocks, SaveBlocks
from scheduler.errors import NumericalError
from scheduler.events import LookupDone
from scheduler.request import FinishReason
from tests.sim.cases import (
    BLOCK_SIZE,
    check,
    check_idle,
    computed_kv,
    fake_engine,
    finish,
    generating,
    hold_back,
    prompt,
    scoring,
    stored_kv,
)
from tests.sim.fake_runner import POISON, FakeRunner

N = 21


# ----------------------------------------------------------------------------- bypass and keys


def test_the_bypass_is_honoured_by_the_store_and_is_no_lookup() -> None:
    """Run, so that the store and the worker have the blocks; again, with bypass and with rows,
    which nobody has computed yet."""
    engine = fake_engine(2)
    engine.submit("cold", prompt(N), generating(2))
    finish(engine, "cold")
    engine.submit("hit", prompt(N), generating(2))
    finish(engine, "hit")
    assert engine.result("hit").stats.num_cached_tokens == 20
    before = engine.state.stats().num_store_queries
    computed = engine.state.stats().num_computed_tokens
    engine.submit("skips", prompt(N), generating(2, skip_reading_prefix_cache=True))
    engine.submit("scores", prompt(N), scoring(k=1, max_tokens=2))
    finish(engine, "skips", "scores")
    for name in ("skips", "scores"):
        assert engine.result(name).stats.num_cached_tokens == 0
        assert engine.result(name).stats.num_restored_blocks == 0
    stats = engine.state.stats()
    assert stats.num_store_queries == before
    assert stats.num_cache_bypasses == 2
    assert stats.num_computed_tokens - computed == 2 * (N + 1)


def test_an_id_that_hit_the_store_and_comes_again_with_bypass_gets_nothing_and_no_pin() -> None:
    """The first try is cancelled with its blocks pinned; the second may not live off them."""
    engine = fake_engine(2, enable_prefix_caching=False)
    engine.submit("warm", prompt(N), generating(1))
    finish(engine, "warm")
    engine.submit("again", prompt(N), generating(2))
    engine.complete(engine.index_of(LookupBlocks))
    assert engine.store.stats.num_pins > 0
    assert engine.index_of(LoadBlocks) is not None
    engine.cancel("again")
    engine.submit("again", prompt(N), scoring(k=1))
    engine.results["again", 0] = type(engine.result("again"))()
    finish(engine, "again")
    assert engine.result("again").stats.num_restored_blocks == 0
    lookup = engine.store.lookup(
        "again",
        next(a for a in engine.log if isinstance(a, SaveBlocks)).block_hashes,
        num_readable_tokens=100,
        num_own_tokens=0,
        skip_reading_prefix_cache=True,
    )
    assert lookup == (0, False)
    assert engine.store.stats.num_pins == 0


SALTS = [None, "", "a", "a|b", "b", "None", "\x00", "ns"]


def test_no_cache_is_shared_across_salts() -> None:
    """In the worker's cache and in the store alike; "" is a salt, and differs from none."""
    engine = fake_engine(2)
    for i, salt in enumerate(SALTS):
        engine.submit(f"s{i}", prompt(N), generating(2), cache_salt=salt)
        finish(engine, f"s{i}")
        assert engine.result(f"s{i}").stats.num_cached_tokens == 0, repr(salt)
    for i, salt in enumerate(SALTS):
        engine.submit(f"t{i}", prompt(N), generating(2), cache_salt=salt)
        finish(engine, f"t{i}")
        assert engine.result(f"t{i}").stats.num_cached_tokens == 20, repr(salt)


# --------------------------------------------------------------------------------- the data


def test_saves_delayed_while_blocks_are_wanted_hold_their_blocks_until_they_are_read() -> None:
    """A block that is reused while its save is pending would be stored with another's bytes."""
    engine = fake_engine(num_blocks=16)
    names = [f"r{i}" for i in range(6)]
    for i, name in enumerate(names):
        engine.submit(name, prompt(N, seed=i), scoring(max_tokens=1), seed=i)
        hold_back(engine, SaveBlocks)
        if i % 2:
            engine.run(random.Random(i))
    engine.run()
    for i, name in enumerate(names):
        check(engine, name)
        save = next(a for a in engine.log if isinstance(a, SaveBlocks) and a.request_id == name)
        assert stored_kv(engine, save).tobytes() == computed_kv(prompt(N, seed=i)).tobytes()
    check_idle(engine)


def test_the_saves_of_evicted_requests_are_what_was_computed_in_any_order_of_completion() -> None:
    for seed in range(6):
        rng = random.Random(seed)
        engine = fake_engine(2, num_blocks=14, chunk=5, save_finished=False)
        names = [f"r{i}" for i in range(5)]
        for i, name in enumerate(names):
            engine.submit(name, prompt(N + i, seed=i), scoring(max_tokens=3), seed=i)
        for _ in range(60):
            if engine.pending:
                engine.complete(rng.randrange(len(engine.pending)))
            if engine.live and rng.random() < 0.3:
                engine.evict(rng.choice(engine.live))
        engine.run(rng)
        for name in names:
            check(engine, name)
        for save in (a for a in engine.log if isinstance(a, SaveBlocks)):
            kv = computed_kv(prompt(N + int(save.request_id[1:]), seed=int(save.request_id[1:])))
            stored = stored_kv(engine, save)
            size = min(len(stored), len(kv))
            assert stored[:size].tobytes() == kv[:size].tobytes()
        check_idle(engine)


def test_loads_delayed_hold_the_blocks_that_they_will_write() -> None:
    """A load that ends late would overwrite whoever was given its blocks meanwhile."""
    engine = fake_engine(num_blocks=14, enable_prefix_caching=False)
    engine.submit("warm", prompt(N), generating(1))
    finish(engine, "warm")
    engine.submit("loads", prompt(N), generating(2))
    engine.complete(engine.index_of(LookupBlocks))
    engine.cancel("loads")
    engine.submit("next", prompt(N, seed=1), scoring(max_tokens=2))
    engine.submit("after", prompt(N, seed=2), scoring(max_tokens=2))
    hold_back(engine, LoadBlocks)
    check(engine, "next")
    finish(engine, "next", "after")


def test_a_promise_of_more_blocks_than_are_loaded_is_filled_up_by_computing() -> None:
    for num_done in range(1, 5):
        engine = fake_engine(enable_prefix_caching=False)
        engine.submit("warm", prompt(N), generating(1))
        finish(engine, "warm")
        engine.submit("a", prompt(N), generating(3))
        engine.complete(engine.index_of(LookupBlocks))
        engine.fail(engine.index_of(LoadBlocks), num_done=num_done)
        finish(engine, "a")
        assert engine.result("a").stats.num_restored_blocks == num_done


def test_a_promise_is_not_broken_by_others_that_fill_the_store() -> None:
    """The store has room for one prompt; what a lookup promised stays until it is loaded."""
    engine = fake_engine(2, store_blocks=6, enable_prefix_caching=False)
    engine.submit("warm", prompt(N), generating(1))
    finish(engine, "warm")
    engine.submit("a", prompt(N), generating(3))
    engine.complete(engine.index_of(LookupBlocks))
    engine.submit("other", prompt(40, seed=1), generating(1))
    hold_back(engine, LoadBlocks)
    finish(engine, "a", "other")
    assert engine.result("a").stats.num_restored_blocks == 5


def test_data_that_is_gone_when_it_is_read_is_a_miss() -> None:
    """Between the promise and the read the node with the bytes is lost."""
    engine = fake_engine(enable_prefix_caching=False)
    engine.submit("warm", prompt(N), generating(1))
    finish(engine, "warm")
    engine.submit("a", prompt(N), generating(3))
    engine.complete(engine.index_of(LookupBlocks))
    for segment_id in list(engine.data):
        engine.store.drop_segment(segment_id)
    engine.fail(engine.index_of(LoadBlocks))
    finish(engine, "a")
    assert engine.result("a").stats.num_restored_blocks == 0


@pytest.mark.parametrize("wants_rows", [False, True])
def test_cold_then_worker_hit_then_evicted_then_store_hit_give_equal_answers(wants_rows) -> None:
    engine = fake_engine(num_blocks=16, chunk=6)
    params = scoring(max_tokens=3, skip_reading_prefix_cache=False) if wants_rows else generating(3)
    bits = []
    for name in ("cold", "worker", "store"):
        if name == "store":
            engine.submit("flood", prompt(64, seed=9), scoring())
            finish(engine, "flood")
        engine.submit(name, prompt(N), params, seed=1)
        finish(engine, name)
        bits.append(engine.result(name).bits())
    assert bits[0] == bits[1] == bits[2]
    if not wants_rows:
        assert engine.result("worker").stats.num_cached_tokens == 20
        assert engine.result("worker").stats.num_restored_blocks == 0
        assert engine.result("store").stats.num_restored_blocks == 5


def test_a_request_with_rows_reads_others_blocks_only_where_it_holds_the_rows() -> None:
    """Evicted after its rows were made, it may take anybody's KV up to there, and no further."""
    engine = fake_engine(2)
    engine.submit("warm", prompt(N), generating(1))
    finish(engine, "warm")
    engine.submit("a", prompt(N), scoring(max_tokens=2, skip_reading_prefix_cache=False))
    engine.complete()
    engine.lose(engine.state.request_infos(0)[0].worker_id)
    finish(engine, "a")
    result = engine.result("a")
    assert engine.state.stats().num_prompt_rows == N - 1
    assert result.stats.num_recomputed_tokens == 0


def test_a_lookup_answered_with_nonsense_reads_nothing_beyond_the_limit() -> None:
    engine = fake_engine(2, enable_prefix_caching=False)
    engine.submit("warm", prompt(N), generating(1))
    finish(engine, "warm")
    engine.submit("a", prompt(N), generating(2))
    index = engine.index_of(LookupBlocks)
    op_id = engine.pending[index].op_id
    hashes = engine.pending[index].block_hashes
    assert len(hashes) == (N - 1) // BLOCK_SIZE
    engine.complete(index)
    engine.handle(LookupDone(op_id, 10**6))
    finish(engine, "a")


# ------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("place", [0, 3, 10, N - 1])
def test_nan_fails_one_request_and_its_blocks_are_neither_cached_nor_saved(place: int) -> None:
    engine = fake_engine(chunk=64)
    poisoned = prompt(N)
    poisoned[place] = POISON
    engine.submit("bad", poisoned, scoring(max_tokens=2))
    engine.submit("good", prompt(N, seed=1), scoring(max_tokens=2))
    engine.run()
    check(engine, "good")
    check_idle(engine)
    result = engine.result("bad")
    assert isinstance(result.error, NumericalError)
    assert result.finish_reason is FinishReason.ERROR
    assert result.prompt_logprobs is None
    assert not [a for a in engine.log if isinstance(a, SaveBlocks) and a.request_id == "bad"]
    engine.submit("again", poisoned, generating(2))
    engine.run()
    assert isinstance(engine.result("again").error, NumericalError)
    assert engine.result("again").stats.num_cached_tokens == 0


def test_blocks_handed_from_one_request_to_another_carry_nothing_over() -> None:
    """Memory that was never written for a request never reaches its answer."""
    engine = fake_engine(num_blocks=8, enable_prefix_caching=False, store_blocks=0)
    runner = engine.runners["w0"]
    assert isinstance(runner, FakeRunner)
    for i in range(5):
        runner.kv[:] = np.uint64(0xDEAD + i)
        engine.submit(f"r{i}", prompt(N, seed=i), scoring(max_tokens=3))
        finish(engine, f"r{i}")
