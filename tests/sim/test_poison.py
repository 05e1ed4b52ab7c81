"""Requests that kill the workers which compute them, and requests that are only near by.

Which one of a batch it is can't be seen: batches that failed as a whole are halved until a request
is alone, and only then is it at fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from scheduler.actions import RunBatch
from scheduler.errors import RequestFailed
from scheduler.messages import Chunk
from scheduler.request import FinishReason
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


def run_with_killer(engine: SimEngine, kills: Callable[[Chunk], bool], *, dies: bool = True) -> int:
    """Run everything; a step with such a chunk kills its worker, or raises. Return how often."""
    num_deaths = 0
    while engine.pending:
        index = engine.index_of(RunBatch)
        if index is None or not any(map(kills, engine.pending[index].output.chunks)):
            engine.complete(0 if index is None else index)
            continue
        num_deaths += 1
        assert num_deaths < 100
        if dies:
            replace_worker(engine, engine.pending[index].worker_id)
        else:
            engine.fail(index)
        engine.settle()
    return num_deaths


def replace_worker(engine: SimEngine, worker_id: str) -> None:
    """A worker dies, and another one comes in its stead."""
    name = f"after {worker_id}"
    engine.expect(name, 200)
    engine.lose(worker_id)
    add_worker(engine, name, 200)


def bad_from(position: int) -> Callable[[Chunk], bool]:
    return lambda c: c.request_id == "bad" and c.start + len(c.token_ids) > position


@pytest.mark.parametrize("store_blocks", [0, 4000])
@pytest.mark.parametrize("position", [0, 100, 124])
@pytest.mark.parametrize(("count", "place"), [(1, 0), (8, 0), (8, 5), (16, 0), (16, 9), (16, 15)])
def test_a_request_that_kills_its_workers_is_found_by_halving(
    count: int, place: int, position: int, store_blocks: int
) -> None:
    """With its first chunk, with its third or in decode: all that it made before is made again
    on the way there, which must not clear it."""
    engine = fake_engine(1, num_blocks=200, chunk=48, store_blocks=store_blocks)
    others = [f"r{i}" for i in range(count - 1)]
    names = [*others[:place], "bad", *others[place:]]
    for i, name in enumerate(names):
        num_tokens = 120 if name == "bad" else 12
        engine.submit(name, prompt(num_tokens, seed=i), generating(12), seed=i)
    num_deaths = run_with_killer(engine, bad_from(position))
    assert 5 <= num_deaths <= math.log2(count) + 6
    assert isinstance(engine.result("bad").error, RequestFailed)
    assert "5 workers" in str(engine.result("bad").error)
    for name in others:
        check(engine, name)
    check_idle(engine)


@pytest.mark.parametrize("position", [0, 30])
def test_a_poisonous_request_among_two_workers_is_found_too(position: int) -> None:
    engine = fake_engine(2, num_blocks=400, chunk=100)
    others = [f"r{i}" for i in range(15)]
    for i, name in enumerate([*others[:4], "bad", *others[4:]]):
        engine.submit(name, prompt(24, seed=i), scoring(max_tokens=12), seed=i)
    num_deaths = run_with_killer(engine, bad_from(position))
    assert num_deaths <= math.log2(16) + 6
    assert engine.result("bad").finish_reason is FinishReason.ERROR
    for name in others:
        check(engine, name)
    check_idle(engine)


@pytest.mark.parametrize("position", [0, 30])
@pytest.mark.parametrize(("count", "place"), [(1, 0), (8, 5), (16, 0), (16, 15)])
def test_a_request_that_makes_steps_raise_is_found_by_halving(count, place, position) -> None:
    """The worker lives, and what is computed already stays there."""
    engine = fake_engine(1, num_blocks=400, chunk=400)
    others = [f"r{i}" for i in range(count - 1)]
    for i, name in enumerate([*others[:place], "bad", *others[place:]]):
        engine.submit(name, prompt(24, seed=i), scoring(max_tokens=12), seed=i)
    num_failures = run_with_killer(engine, bad_from(position), dies=False)
    # Those that are sent ahead of the first failure fail too.
    assert num_failures <= math.log2(count) + engine.config.max_steps_in_flight
    assert engine.result("bad").finish_reason is FinishReason.ERROR
    for name in others:
        check(engine, name)
    assert engine.state.stats().num_recomputed_tokens == 0
    check_idle(engine)


def test_workers_lost_for_other_reasons_do_not_end_a_request_that_was_alone_on_them() -> None:
    """Spot instances go in the middle of its steps, four times in a row; then it gets on."""
    engine = fake_engine(1, chunk=8)
    engine.submit("a", prompt(30), scoring(max_tokens=6))
    worker_id = "w0"
    num_losses = 0
    while engine.live:
        for _ in range(4):
            replace_worker(engine, worker_id)
            worker_id = f"after {worker_id}"
            num_losses += 1
            engine.settle()
        before = engine.state.request("a").num_computed_tokens
        while engine.live and engine.state.request("a").num_computed_tokens == before:
            engine.step()
    finish(engine, "a")
    assert engine.result("a").stats.num_workers_lost == num_losses >= 10


def test_requests_that_only_sat_on_workers_that_died_are_not_suspected() -> None:
    """Loading or saving ones were not computed; a batch of others may be at fault."""
    engine = fake_engine(1, enable_prefix_caching=False)
    engine.submit("warm", prompt(21), generating(1))
    finish(engine, "warm")
    engine.submit("a", prompt(21), generating(3))
    worker_id = "w0"
    for _ in range(6):
        replace_worker(engine, worker_id)
        worker_id = f"after {worker_id}"
    finish(engine, "a")
