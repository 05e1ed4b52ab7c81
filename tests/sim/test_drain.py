"""Workers that have to go by a deadline: their requests are elsewhere before, and lose nothing."""

from __future__ import annotations

import random

import pytest

from scheduler.actions import CopyBlocks, LoadBlocks, LookupBlocks, RunBatch, SaveBlocks, StopWorker
from scheduler.errors import EngineUnavailable, RequestTooLarge, UnknownWorker
from scheduler.events import DrainRequested
from scheduler.request import FinishReason, RequestStatus
from tests.sim.cases import (
    BLOCK_SIZE,
    add_worker,
    check,
    check_idle,
    fake_engine,
    finish,
    generating,
    prompt,
    scoring,
)
from tests.sim.engine import SimEngine


def busy_engine(num_requests: int = 3, num_blocks: int = 64, **config: object) -> SimEngine:
    """w0 computes some requests; w1 has just come and is empty."""
    engine = fake_engine(1, num_blocks=64, chunk=64, **config)
    for i in range(num_requests):
        params = scoring(max_tokens=30 + 10 * i, logprobs=0)
        engine.submit(f"r{i}", prompt(9 + i, seed=i), params, seed=i)
    for _ in range(4):
        engine.step()
    add_worker(engine, "w1", num_blocks)
    return engine


def run_until_stopped(engine: SimEngine, worker_id: str = "w0") -> None:
    for _ in range(10_000):
        if worker_id in engine.stopped:
            return
        assert engine.step(), "nothing is under way, and the worker is not stopped"
    raise AssertionError("the worker is not stopped")


def names(engine: SimEngine) -> list[str]:
    return list(engine.submissions)


def workers_of(engine: SimEngine) -> dict[str, str | None]:
    return {info.request_id: info.worker_id for info in engine.state.request_infos(0)}


# ----------------------------------------------------------------------------- with room elsewhere


def test_a_drained_worker_is_empty_soon_and_nothing_is_computed_again() -> None:
    engine = busy_engine()
    engine.drain("w0", 60.0)
    run_until_stopped(engine)
    assert engine.live, "nobody had to end for it"
    finish(engine, *names(engine))
    stats = engine.state.stats()
    assert stats.migrations_by_reason == {"drain": 3}
    assert (stats.num_workers_drained, stats.num_workers_lost) == (1, 0)
    assert (stats.num_recomputed_tokens, stats.num_evictions) == (0, 0)


def test_those_with_the_most_left_to_do_go_first() -> None:
    engine = busy_engine(7)
    engine.drain("w0", 60.0)
    copies = [a.request_id for a in engine.log if isinstance(a, CopyBlocks)]
    assert copies == ["r6", "r5", "r4", "r3"], "a few at a time"
    run_until_stopped(engine)
    finish(engine, *names(engine))


def test_a_draining_worker_takes_nothing_new() -> None:
    """Not from the queue, not by a move, and not for its cache."""
    engine = fake_engine(2, max_num_seqs=3)
    engine.submit("warm", prompt(21), generating(1))
    finish(engine, "warm")
    engine.submit("long", prompt(9, seed=9), generating(60))
    assert workers_of(engine) == {"long": "w0"}
    engine.drain("w0", 1e6)
    engine.submit("same", prompt(21), generating(2))
    engine.submit("other", prompt(21, seed=1), generating(2))
    engine.submit("waits", prompt(21, seed=2), generating(2))
    while engine.pending and len(engine.live) > 1:
        assert {w for n, w in workers_of(engine).items() if n != "long"} <= {"w1", None}
        engine.complete()
    finish(engine, *names(engine))
    assert engine.stopped == ["w0"]


def test_an_idle_worker_is_stopped_at_once_and_its_last_words_are_not_waited_for() -> None:
    engine = fake_engine(2)
    engine.drain("w1")
    assert engine.stopped == ["w1"]
    assert [r.worker_id for r in engine.state.worker_reports()] == ["w0"]
    engine.submit("a", prompt(9), generating(1))
    finish(engine, "a")


def test_workers_that_can_not_reach_each_other_are_drained_through_the_store() -> None:
    engine = busy_engine()
    engine.drain("w0", 20.0)
    num_copies = 0
    while "w0" not in engine.stopped:
        index = engine.index_of(CopyBlocks)
        if index is not None:
            num_copies += 1
            engine.fail(index)
        elif not engine.step():
            engine.tick()
        elif engine.state.stats().num_steps > 15:
            engine.tick(5.0)
    assert num_copies <= 2 * 3
    assert engine.state.stats().num_evictions == 3
    for _ in range(4):
        engine.step()
    add_worker(engine, "w2")
    engine.drain("w1", 60.0)
    finish(engine, *names(engine))
    stats = engine.state.stats()
    assert stats.migrations_by_reason == {"drain": 3}, "from elsewhere they are tried again"
    assert stats.num_evictions == 3
    assert stats.num_recomputed_tokens < 3 * BLOCK_SIZE


def test_every_order_of_completion_of_a_drain_ends_well() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        engine = busy_engine(4, 40, max_num_seqs=3 + seed % 2)
        for _ in range(rng.randrange(10)):
            engine.complete(rng.randrange(len(engine.pending)))
        engine.drain("w0", rng.choice([0.0, 0.1, 5.0]))
        for _ in range(40):
            if engine.pending:
                engine.complete(rng.randrange(len(engine.pending)))
            engine.tick(0.2)
        engine.run(rng)
        assert engine.stopped == ["w0"]
        finish(engine, *names(engine))
        assert engine.state.stats().num_recomputed_tokens < 4 * BLOCK_SIZE


# ------------------------------------------------------------------------------ with none elsewhere


def test_what_finds_no_room_is_saved_before_the_deadline_and_goes_on_from_the_store() -> None:
    """The other worker is too small for them all: some wait, and their KV waits in the store."""
    engine = busy_engine(5, num_blocks=21)
    engine.drain("w0", 10.0)
    for _ in range(12):
        engine.step()
    staying = [name for name, worker in workers_of(engine).items() if worker == "w0"]
    assert staying, "they go on computing as long as there is time"
    assert not [a for a in engine.log if isinstance(a, SaveBlocks)]
    engine.tick(6.0)
    while "w0" not in engine.stopped:
        engine.step()
    assert engine._now_s < 10.0
    saved = {a.request_id for a in engine.log if isinstance(a, SaveBlocks) and a.worker_id == "w0"}
    assert saved == set(staying)
    finish(engine, *names(engine))
    stats = engine.state.stats()
    assert stats.num_recomputed_tokens < BLOCK_SIZE * stats.num_evictions
    assert stats.num_loaded_blocks > 0


def test_the_last_worker_is_drained_and_what_waits_is_told_or_waits_for_a_new_one() -> None:
    for is_replaced in (False, True):
        engine = busy_engine(2)
        engine.lose("w1")
        if is_replaced:
            engine.expect("w2", 64)
        engine.drain("w0", 10.0)
        for _ in range(5):
            engine.step()
        assert not engine.stopped
        engine.tick(8.0)
        engine.settle()
        for _ in range(engine.config.max_steps_in_flight):
            engine.step()
            engine.settle()
        assert engine.stopped == ["w0"]
        if is_replaced:
            assert [i.status for i in engine.state.request_infos(0)] == [RequestStatus.WAITING] * 2
            add_worker(engine, "w2")
            finish(engine, "r0", "r1")
            assert engine.state.stats().num_recomputed_tokens < 2 * BLOCK_SIZE
        else:
            assert isinstance(engine.result("r0").error, EngineUnavailable)
            assert isinstance(engine.result("r1").error, EngineUnavailable)
            engine.run()
            check_idle(engine)
        assert isinstance(engine.submit("new", prompt(3), generating(1)), EngineUnavailable) == (
            not is_replaced
        )


def test_a_request_that_fitted_the_drained_worker_only_ends_when_that_has_gone() -> None:
    engine = fake_engine(1, num_blocks=64)
    engine.submit("large", prompt(100), generating(60))
    engine.submit("small", prompt(9, seed=1), generating(60))
    add_worker(engine, "w1", 20)
    for _ in range(20):
        engine.step()
    engine.drain("w0", 4.0)
    assert engine.result("large").finish_reason is None
    engine.tick(4.0)
    engine.run()
    assert isinstance(engine.result("large").error, RequestTooLarge)
    check(engine, "small")
    check_idle(engine)


# ------------------------------------------------------------------------------ at awkward moments


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_a_drain_without_time_saves_everything_at_once(seconds: float) -> None:
    engine = busy_engine(3)
    engine.drain("w0", seconds)
    run_until_stopped(engine)
    stats = engine.state.stats()
    assert (stats.num_migrations, stats.num_evictions) == (0, 3)
    finish(engine, *names(engine))
    assert engine.state.stats().num_recomputed_tokens < 3 * BLOCK_SIZE


def test_a_drain_asked_for_again_can_only_be_hastened() -> None:
    engine = busy_engine(2, num_blocks=13, max_num_seqs=2)
    for i in range(2):
        engine.submit(f"w1-{i}", prompt(9, seed=8 + i), generating(15))
    engine.drain("w0", 100.0)
    engine.drain("w0", 1000.0)
    engine.step()
    assert engine.state.stats().num_evictions == 0
    engine.drain("w0", 0.0)
    run_until_stopped(engine)
    assert engine.state.stats().num_evictions == 2
    assert engine.state.stats().num_workers_drained == 1
    finish(engine, *names(engine))


def test_the_first_deadline_holds_when_a_later_one_is_given() -> None:
    engine = busy_engine(2, num_blocks=13, max_num_seqs=2)
    for i in range(2):
        engine.submit(f"w1-{i}", prompt(9, seed=8 + i), generating(15))
    engine.drain("w0", 10.0)
    engine.drain("w0", 1000.0)
    engine.tick(9.0)
    run_until_stopped(engine)
    assert engine.state.stats().num_evictions == 2
    finish(engine, *names(engine))


def test_a_drain_of_nobody_is_refused() -> None:
    engine = fake_engine(1)
    engine.drain("w7")
    assert isinstance(engine.refused[max(engine.refused)], UnknownWorker)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_requests_that_load_or_save_on_a_draining_worker_come_away_too(seconds: float) -> None:
    """At any moment of a life: looking up, loading, computing, saving."""
    statuses = set()
    for num_events in range(16):
        engine = fake_engine(1, enable_prefix_caching=False, chunk=12)
        engine.submit("warm", prompt(21), generating(1))
        finish(engine, "warm")
        engine.submit("a", prompt(33), generating(8))
        for i in range(num_events):
            engine.complete()
            if i == 6:
                engine.evict("a")
        statuses.add(engine.state.request("a").status)
        add_worker(engine, "w1")
        engine.drain("w0", seconds)
        assert workers_of(engine)["a"] == "w0"
        engine.run()
        assert engine.stopped == ["w0"]
        finish(engine, "a")
        assert engine.result("a").stats.num_recomputed_tokens < 2 * BLOCK_SIZE
    assert statuses == {RequestStatus.LOADING, RequestStatus.RUNNING, RequestStatus.SAVING}


def test_a_load_under_way_when_time_is_up_is_not_lost_and_its_blocks_not_reused() -> None:
    engine = fake_engine(1, enable_prefix_caching=False)
    engine.submit("warm", prompt(21), generating(1))
    finish(engine, "warm")
    engine.submit("a", prompt(21), generating(8))
    engine.complete(engine.index_of(LookupBlocks))
    add_worker(engine, "w1")
    engine.drain("w0", 0.0)
    assert engine.index_of(LoadBlocks) is not None
    assert engine.stopped == []
    engine.complete(engine.index_of(LoadBlocks))
    assert engine.index_of(RunBatch) is None, "it goes at once"
    finish(engine, "a")
    assert engine.stopped == ["w0"]
    assert engine.result("a").stats.num_recomputed_tokens == 0


def test_a_worker_that_is_drained_while_requests_move_to_it_lets_none_of_them_in() -> None:
    engine = busy_engine(2)
    for name in ("r0", "r1"):
        assert engine.migrate(name, "w1") is None
    engine.drain("w1", 60.0)
    assert engine.stopped == [], "copies to it are under way"
    finish(engine, "r0", "r1")
    stats = engine.state.stats()
    assert engine.stopped == ["w1"]
    assert (stats.num_migrations, stats.num_migrations_failed) == (0, 2)
    assert stats.num_evictions == 0


def test_two_workers_drained_at_once_send_nothing_to_each_other() -> None:
    engine = busy_engine(3)
    engine.submit("on w1", prompt(9, seed=9), generating(40))
    engine.step()
    add_worker(engine, "w2")
    engine.handle(*(DrainRequested(name, 60.0) for name in ("w0", "w1")))
    finish(engine, *names(engine))
    assert engine.stopped in (["w0", "w1"], ["w1", "w0"])
    assert {a.target_id for a in engine.log if isinstance(a, CopyBlocks)} == {"w2"}


def test_a_draining_worker_that_dies_is_lost_and_not_stopped() -> None:
    engine = busy_engine(3)
    engine.drain("w0", 60.0)
    engine.lose("w0")
    finish(engine, *names(engine))
    stats = engine.state.stats()
    assert (stats.num_workers_drained, stats.num_workers_lost) == (0, 1)
    assert not [a for a in engine.log if isinstance(a, StopWorker)]


def test_a_request_cancelled_on_a_draining_worker_holds_it_up_only_until_its_step_ends() -> None:
    engine = busy_engine(1)
    engine.drain("w0", 60.0)
    engine.cancel("r0")
    assert engine.stopped == []
    engine.run()
    assert engine.stopped == ["w0"]
    assert engine.result("r0").finish_reason is FinishReason.ABORT
    check_idle(engine)
