"""Workers that are too full or too busy: requests move by themselves, and not back and forth."""

from __future__ import annotations

import random

import pytest

from scheduler.actions import CopyBlocks, RunBatch
from tests.sim.cases import (
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


def growing_engine(first: int = 8, second: int = 8, **config: object) -> SimEngine:
    """Two requests outgrow w0 in decode; w1 has just come and is empty."""
    engine = fake_engine(1, num_blocks=12, chunk=64, **config)
    for i, num_tokens in enumerate((first, second)):
        max_tokens = 48 - max(num_tokens, 8)
        engine.submit("ab"[i], prompt(num_tokens, seed=i), scoring(max_tokens=max_tokens), seed=i)
    for _ in range(3):
        engine.step()
    add_worker(engine, "w1", 12)
    return engine


def complete_by(engine: SimEngine, order: str, rng: random.Random) -> None:
    """Complete an action: copies before steps, after as many steps as there are, or any."""
    copy, step = engine.index_of(CopyBlocks), engine.index_of(RunBatch)
    if order == "copies first" and copy is not None:
        engine.complete(copy)
    elif order == "steps first" and step is not None:
        engine.complete(step)
    else:
        engine.complete(rng.randrange(len(engine.pending)))


@pytest.mark.parametrize("order", ["copies first", "steps first", "any order"])
@pytest.mark.parametrize("first", [8, 33, 34, 35])
@pytest.mark.parametrize("second", [5, 6, 7])
def test_a_request_that_is_in_the_way_moves_where_there_is_room(first, second, order) -> None:
    """One worker runs out of blocks, another is idle: nothing is saved or computed again.

    The one that leaves is in the batch that is being put together. Where its last blocks are on
    their way already, it must be left out of that.
    """
    engine = growing_engine(first, second)
    rng = random.Random(first)
    while engine.pending:
        complete_by(engine, order, rng)
    for name in "ab":
        check(engine, name)
    check_idle(engine)
    stats = engine.state.stats()
    assert stats.migrations_by_reason == {"blocks": 1}
    assert (stats.num_evictions, stats.num_recomputed_tokens) == (0, 0)


def test_a_request_that_is_in_the_way_is_evicted_where_moving_is_switched_off() -> None:
    engine = growing_engine(enable_migration=False)
    finish(engine, "a", "b")
    stats = engine.state.stats()
    assert (stats.num_migrations, stats.num_migrations_failed) == (0, 0)
    assert stats.num_evictions == 1


def test_a_request_that_is_in_the_way_is_evicted_where_nobody_has_room() -> None:
    engine = growing_engine()
    engine.submit("c", prompt(16, seed=9), scoring(max_tokens=33))
    while engine.state.stats().num_evictions == 0:
        assert engine.step()
    assert engine.state.stats().num_migrations == 0
    finish(engine, "a", "b", "c")
    assert engine.result("b").stats.num_evictions == 1


def test_copies_that_always_fail_do_not_keep_a_worker_from_going_on() -> None:
    """The two workers can't reach each other: whoever is in the way is evicted in the end."""
    engine = growing_engine()
    num_copies = 0
    for _ in range(500):
        if not engine.pending:
            break
        index = engine.index_of(CopyBlocks)
        if index is None:
            engine.complete()
        else:
            num_copies += 1
            engine.fail(index)
    finish(engine, "a", "b")
    assert engine.state.stats().num_evictions == 1
    assert num_copies <= 2


# ------------------------------------------------------------------------------------------- load


def lopsided_engine(num_requests: int = 6, **config: object) -> SimEngine:
    engine = fake_engine(1, num_blocks=400, chunk=64, **config)
    for i in range(num_requests):
        engine.submit(f"r{i}", prompt(9, seed=i), generating(300 + i), seed=i)
    for _ in range(4):
        engine.step()
    add_worker(engine, "w1", 400)
    return engine


def seats(engine: SimEngine) -> list[int]:
    return [report.num_running for report in engine.state.worker_reports()]


def test_a_worker_that_joins_takes_its_share_of_what_runs() -> None:
    """One request a tick, and only as long as both gain by it."""
    engine = lopsided_engine()
    for _ in range(12):
        engine.tick()
        for _ in range(4):
            engine.step()
    assert seats(engine) == [3, 3]
    assert engine.state.stats().migrations_by_reason == {"load": 3}
    assert engine.state.stats().num_migrations_failed == 0
    finish(engine, *(f"r{i}" for i in range(6)))


@pytest.mark.parametrize("num_requests", [5, 6])
def test_a_load_that_is_even_stays_as_it_is(num_requests: int) -> None:
    """A thousand ticks: no request is sent there and back."""
    engine = lopsided_engine(num_requests)
    steps = 0
    for _ in range(1000):
        engine.tick(0.1)
        if steps < 60:
            steps += 1
            engine.step()
    assert engine.state.stats().num_migrations <= num_requests // 2
    assert max(engine.state._core.requests[n].request.stats.num_migrations for n in engine.live) < 2
    for name in engine.live:
        engine.cancel(name)
    engine.run()
    check_idle(engine)


def test_a_request_that_is_almost_done_is_not_moved_for_the_load() -> None:
    engine = fake_engine(1, num_blocks=100, chunk=64)
    for i in range(4):
        engine.submit(f"r{i}", prompt(9, seed=i), generating(20), seed=i)
    for _ in range(4):
        engine.step()
    add_worker(engine, "w1")
    for _ in range(10):
        engine.tick()
        engine.step()
    assert engine.state.stats().num_migrations == 0
    finish(engine, *(f"r{i}" for i in range(4)))


def test_no_load_is_evened_out_while_requests_wait_or_where_it_is_switched_off() -> None:
    engine = lopsided_engine(enable_migration=False)
    for _ in range(5):
        engine.tick()
        engine.step()
    assert seats(engine) == [6, 0]
    engine = fake_engine(1, num_blocks=40, chunk=64)
    for i in range(4):
        engine.submit(f"r{i}", prompt(9, seed=i), generating(100), seed=i)
    for _ in range(4):
        engine.step()
    engine.submit("waits", prompt(150, seed=8), generating(2))
    add_worker(engine, "small", 28)
    for _ in range(3):
        engine.tick()
        engine.step()
    assert engine.state.request_infos(0)[-1].worker_id is None
    assert not [a for a in engine.log if isinstance(a, CopyBlocks)]
    finish(engine, "waits", *(f"r{i}" for i in range(4)))


def test_random_loads_with_ticks_all_end_with_the_right_bits() -> None:
    for seed in range(4):
        rng = random.Random(seed)
        engine = fake_engine(2, num_blocks=24, chunk=16, save_segment_tokens=8)
        names = [f"r{i}" for i in range(9)]
        for i, name in enumerate(names):
            engine.submit(name, prompt(5 + i, seed=i), generating(20 + i, logprobs=0), seed=i)
            for _ in range(rng.randrange(12)):
                if engine.pending:
                    engine.complete(rng.randrange(len(engine.pending)))
            engine.tick(0.1)
            if i == 5:
                add_worker(engine, "w2", 24)
        engine.run(rng)
        finish(engine, *names)
