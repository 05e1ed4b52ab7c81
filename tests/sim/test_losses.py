"""Workers, stores and data that vanish: what it costs, and that it is no more than that."""

from __future__ import annotations

import pytest

from scheduler.actions import RunBatch, SaveBlocks
from scheduler.errors import EngineUnavailable, RequestTooLarge
from tests.sim.cases import (
    BLOCK_SIZE,
    CHUNK,
    add_worker,
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
from tests.sim.engine import SimEngine

SEGMENT = 16

# -------------------------------------------------------------------------------- save as you go


def saved_tokens(num_tokens: int, num_answered: int | None = None) -> int:
    """Tokens that are in the store once so many are computed in chunks.

    Args:
        num_answered: saves that have been answered; all of those begun where it is None.
    """
    ends = [0]
    for computed in [*range(CHUNK, num_tokens, CHUNK), num_tokens]:
        full = computed // BLOCK_SIZE * BLOCK_SIZE
        if full - ends[-1] >= SEGMENT:
            ends.append(full)
    return ends[-1] if num_answered is None else ends[num_answered]


@pytest.mark.parametrize("num_steps", range(1, 14))
def test_a_lost_worker_costs_what_the_answered_saves_do_not_cover(num_steps: int) -> None:
    """All saves begun have been answered: less than one segment."""
    engine = fake_engine(2, save_segment_tokens=SEGMENT)
    engine.submit("a", prompt(90), scoring(max_tokens=5, logprobs=1))
    for _ in range(num_steps):
        engine.step()
    engine.settle()
    computed = engine.state.request("a").num_computed_tokens
    engine.lose("w0")
    finish(engine, "a")
    recomputed = engine.result("a").stats.num_recomputed_tokens
    assert recomputed == computed - saved_tokens(computed)
    assert recomputed < SEGMENT
    assert engine.state.stats().num_recomputed_rows == 0


@pytest.mark.parametrize("num_answered", [0, 1, 2])
def test_a_save_that_is_late_costs_its_segment_and_all_after_it(num_answered: int) -> None:
    """A save begins when the one before it is answered, so that saves yield to computing."""
    engine = fake_engine(2, save_segment_tokens=SEGMENT)
    engine.submit("a", prompt(90), scoring(max_tokens=5))
    for _ in range(9):
        index = engine.index_of(SaveBlocks)
        num_begun = sum(isinstance(a, SaveBlocks) for a in engine.log)
        if index is not None and num_begun <= num_answered:
            engine.complete(index)
        engine.complete(engine.index_of(RunBatch))
    assert sum(isinstance(a, SaveBlocks) for a in engine.log) == num_answered + 1
    computed = engine.state.request("a").num_computed_tokens
    engine.lose("w0")
    finish(engine, "a")
    expected = computed - saved_tokens(computed, num_answered)
    assert engine.result("a").stats.num_recomputed_tokens == expected


def test_generated_tokens_are_saved_as_they_come_too() -> None:
    engine = fake_engine(2, save_segment_tokens=SEGMENT)
    engine.submit("a", prompt(6), generating(80))
    for _ in range(70):
        engine.step()
    engine.settle()
    engine.lose("w0")
    finish(engine, "a")
    assert engine.result("a").stats.num_recomputed_tokens < SEGMENT


def test_nothing_is_saved_on_the_way_where_that_is_switched_off() -> None:
    engine = fake_engine(2, save_finished=False)
    engine.submit("a", prompt(90), scoring())
    finish(engine, "a")
    assert engine.state.stats().num_saved_blocks == 0


def test_worker_after_worker_is_lost_and_each_costs_less_than_a_segment() -> None:
    engine = fake_engine(1, save_segment_tokens=SEGMENT)
    engine.submit("a", prompt(90), scoring(max_tokens=30))
    for i in range(8):
        for _ in range(4):
            engine.step()
        engine.settle()
        add_worker(engine, f"w{i + 1}")
        engine.lose(f"w{i}")
    finish(engine, "a")
    stats = engine.result("a").stats
    assert stats.num_workers_lost == 8
    assert stats.num_recomputed_tokens < 8 * SEGMENT


def test_a_save_lost_with_its_worker_is_made_up_for_on_the_next_one() -> None:
    """What was begun there does not count here: the first full segment is saved."""
    engine = fake_engine(2, save_segment_tokens=SEGMENT)
    engine.submit("a", prompt(90), scoring(max_tokens=5))
    for _ in range(4):
        engine.complete(engine.index_of(RunBatch))
    engine.lose("w0")
    add_worker(engine, "w2")
    for _ in range(3):
        engine.step()
    engine.settle()
    engine.lose("w1")
    finish(engine, "a")
    assert engine.result("a").stats.num_recomputed_tokens == 3 * CHUNK + (4 * CHUNK - SEGMENT)


@pytest.mark.parametrize("store_blocks", [1, 3, 6, 12])
def test_a_store_that_is_full_is_not_asked_again_with_every_chunk(store_blocks: int) -> None:
    """It takes what it has room for. A save that brings nothing is tried again a segment later."""
    engine = fake_engine(2, save_segment_tokens=SEGMENT, store_blocks=store_blocks)
    engine.submit("a", prompt(90), generating(120))
    for _ in range(120):
        engine.step()
    engine.settle()
    saves = [a for a in engine.log if isinstance(a, SaveBlocks)]
    num_tokens = engine.state.request("a").num_computed_tokens
    assert 2 <= len(saves) <= num_tokens // SEGMENT
    engine.lose("w0")
    finish(engine, "a")
    recomputed = engine.result("a").stats.num_recomputed_tokens
    assert recomputed == num_tokens - store_blocks * BLOCK_SIZE


def test_a_store_lost_on_the_way_is_filled_again_from_the_start() -> None:
    for num_steps in range(1, 12):
        engine = fake_engine(2, save_segment_tokens=SEGMENT)
        engine.submit("a", prompt(140), scoring(max_tokens=5))
        for _ in range(num_steps):
            engine.complete(engine.index_of(RunBatch))
            if num_steps % 2:
                engine.settle()
        engine.lose_store()
        engine.complete(engine.index_of(RunBatch))
        engine.settle()
        engine.lose("w0")
        finish(engine, "a")
        assert engine.result("a").stats.num_recomputed_tokens < SEGMENT


@pytest.mark.parametrize("lost", ["before the lookup", "between lookup and load"])
def test_blocks_that_a_lost_node_took_out_of_the_store_are_saved_again(lost: str) -> None:
    """The first worker dies with the node that held its saves. The second loss must cost no more
    than a segment again: a chain of blocks without its head would be of no use."""
    engine = fake_engine(2, save_segment_tokens=SEGMENT)
    engine.submit("a", prompt(140), scoring(max_tokens=5))
    for _ in range(9):
        engine.step()
    engine.settle()
    if lost == "before the lookup":
        drop_all_segments(engine)
    engine.lose("w0")
    if lost != "before the lookup":
        engine.complete(0)
        drop_all_segments(engine)
        engine.fail(0, num_done=2)
    add_worker(engine, "w2")
    for _ in range(12):
        engine.step()
    engine.settle()
    before = engine.state.request("a").stats.num_recomputed_tokens
    assert before >= 9 * CHUNK - 2 * BLOCK_SIZE
    engine.lose("w1")
    finish(engine, "a")
    assert engine.result("a").stats.num_recomputed_tokens - before < SEGMENT


def drop_all_segments(engine: SimEngine) -> None:
    for segment_id in list(engine.data):
        engine.store.drop_segment(segment_id)


@pytest.mark.parametrize("how", ["cancelled", "evicted", "done", "moved"])
def test_blocks_of_a_save_that_is_late_are_not_given_to_others(how: str) -> None:
    """Whoever they belonged to has left; a reused block would be stored with another's bytes."""
    engine = fake_engine(1, num_blocks=24, save_segment_tokens=SEGMENT, save_finished=False)
    engine.submit("a", prompt(40), scoring(max_tokens=2))
    num_steps = 6 if how == "done" else 4
    for _ in range(num_steps):
        engine.complete(engine.index_of(RunBatch))
    add_worker(engine, "w1", 24)
    if how == "cancelled":
        engine.cancel("a")
    elif how == "evicted":
        engine.evict("a")
    elif how == "moved":
        engine.migrate("a", "w1")
    assert isinstance(engine.pending[engine.index_of(SaveBlocks)], SaveBlocks)
    names = [f"r{i}" for i in range(8)]
    for i, name in enumerate(names):
        engine.submit(name, prompt(30, seed=i + 1), scoring(max_tokens=1))
    assert hold_back(engine, SaveBlocks)
    save = next(a for a in engine.log if isinstance(a, SaveBlocks))
    assert save.request_id == "a"
    engine.run()
    stored = stored_kv(engine, save)
    assert len(stored) == len(save.block_ids)
    assert stored.tobytes() == computed_kv(prompt(40))[: len(stored)].tobytes()
    for name in names:
        check(engine, name)
    check_idle(engine)


def test_blocks_saved_on_the_way_serve_nobody_who_would_miss_rows() -> None:
    """Others may read them where KV is all they need, in the same salt, and not with bypass."""
    engine = fake_engine(2, save_segment_tokens=SEGMENT, enable_prefix_caching=False)
    engine.submit("saves", prompt(60), scoring(max_tokens=30))
    for _ in range(12):
        engine.step()
    engine.settle()
    assert engine.store.stats.num_blocks >= 12
    engine.submit("scores", prompt(60), scoring(k=1))
    engine.submit("scores and reads", prompt(60), scoring(skip_reading_prefix_cache=False))
    engine.submit("skips", prompt(60), generating(2, skip_reading_prefix_cache=True))
    engine.submit("salted", prompt(60), generating(2), cache_salt="x")
    engine.submit("reads", prompt(60), generating(2))
    finish(engine, "saves", "scores", "scores and reads", "skips", "salted", "reads")
    restored = {n: engine.result(n).stats.num_restored_blocks for n in engine.submissions}
    assert restored.pop("reads") >= 12
    assert set(restored.values()) == {0}


def test_a_resumed_request_with_bypass_reads_its_own_saved_blocks_and_no_other() -> None:
    """Somebody else has computed the same prompt before: those blocks are not its own."""
    engine = fake_engine(2, save_segment_tokens=SEGMENT, enable_prefix_caching=False)
    engine.submit("other", prompt(60), generating(1))
    finish(engine, "other")
    engine.submit("a", prompt(60), scoring(max_tokens=3, skip_reading_prefix_cache=True))
    for _ in range(5):
        engine.step()
    engine.settle()
    engine.lose(engine.state.request_infos(0)[0].worker_id)
    finish(engine, "a")
    stats = engine.result("a").stats
    assert stats.num_restored_blocks * BLOCK_SIZE == saved_tokens(5 * CHUNK)
    assert stats.num_recomputed_tokens == 5 * CHUNK - saved_tokens(5 * CHUNK)


def test_a_request_that_comes_back_on_a_worker_reports_no_cache_hit_of_its_own_blocks() -> None:
    engine = fake_engine(2, save_segment_tokens=SEGMENT, enable_journal=True)
    engine.submit("a", prompt(60), scoring(max_tokens=3))
    for _ in range(5):
        engine.step()
    engine.settle()
    engine.restart_scheduler()
    finish(engine, "a")
    assert engine.result("a").stats.num_cached_tokens == 0
    assert engine.result("a").stats.num_restored_blocks > 0


# -------------------------------------------------------------------------- workers that may come


def test_requests_wait_for_a_worker_that_is_being_started_again() -> None:
    engine = fake_engine(1, save_segment_tokens=SEGMENT)
    engine.submit("a", prompt(50), scoring(max_tokens=4))
    for _ in range(5):
        engine.step()
    engine.settle()
    engine.expect("w1", 64)
    engine.lose("w0")
    assert engine.submit("b", prompt(9, seed=1), generating(3)) is None
    while engine.pending:
        engine.complete()
    assert engine.live == ["a", "b"]
    add_worker(engine, "w1")
    finish(engine, "a", "b")
    assert engine.result("a").stats.num_recomputed_tokens < SEGMENT


def test_requests_whose_worker_will_not_come_are_told_so() -> None:
    engine = fake_engine(1)
    engine.submit("a", prompt(50), scoring(max_tokens=4))
    engine.step()
    engine.expect("w1", 64)
    engine.expect("w2", 64)
    engine.lose("w0")
    engine.give_up("w1")
    assert engine.live == ["a"], "there is still w2 to come"
    engine.give_up("w2")
    engine.run()
    assert isinstance(engine.result("a").error, EngineUnavailable)
    assert "w2" in str(engine.result("a").error)
    assert isinstance(engine.submit("b", prompt(9), generating(1)), EngineUnavailable)
    check_idle(engine)


@pytest.mark.parametrize("how", ["given up", "smaller than expected"])
def test_what_only_a_worker_gone_for_good_could_hold_ends_and_the_others_go_on(how: str) -> None:
    engine = fake_engine(1, num_blocks=64)
    engine.submit("large", prompt(100), scoring(max_tokens=60))
    engine.submit("small", prompt(9, seed=1), scoring(max_tokens=60))
    add_worker(engine, "w1", 20)
    engine.expect("w2", 64)
    engine.lose("w0")
    engine.settle()
    assert set(engine.live) == {"large", "small"}
    if how == "given up":
        engine.give_up("w2")
    else:
        add_worker(engine, "w2", 30)
    engine.run()
    assert isinstance(engine.result("large").error, RequestTooLarge)
    check(engine, "small")
    check_idle(engine)


def test_a_worker_given_up_that_nobody_waits_for_changes_nothing() -> None:
    engine = fake_engine(1)
    engine.submit("a", prompt(50), scoring(max_tokens=4))
    engine.step()
    engine.expect("w1", 64)
    engine.give_up("w1")
    finish(engine, "a")
