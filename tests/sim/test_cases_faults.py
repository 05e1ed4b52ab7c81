"""What users of other engines report, while workers, the store and the scheduler are lost.

Whatever is lost in between, requests are cancelled without a trace, keep their place and their
random streams, come to their end, and leave no container fuller than it was.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.actions import RecordFinished, RunBatch
from scheduler.errors import CannotMigrate, DeadlineExceeded, Overloaded
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
from tests.sim.fake_runner import expected_output
from tests.sizes import sizes

NUM_BLOCKS = 14
Fault = Callable[[SimEngine], None]


def frail_engine(num_workers: int = 2, **settings: Any) -> SimEngine:
    """Small pools, saves on the way, and a journal."""
    own = {"num_blocks": NUM_BLOCKS, "chunk": 10, "enable_journal": True, "save_segment_tokens": 8}
    return fake_engine(num_workers, **{**own, **settings})


# ----------------------------------------------------------------------------------- the faults


def new_name(engine: SimEngine) -> str:
    numbers = (int(name[1:]) for name in [*engine.infos, *engine.expected])
    return f"w{max(numbers) + 1}"


def victim(engine: SimEngine) -> str:
    """The worker of the request that is first in order, or any."""
    infos = engine.state.request_infos(0)
    return next((i.worker_id for i in infos if i.worker_id), min(engine.runners))


def is_draining(engine: SimEngine, worker_id: str) -> bool:
    reports = engine.state.worker_reports()
    return any(r.is_draining for r in reports if r.worker_id == worker_id)


def lose_worker(engine: SimEngine) -> None:
    """Its replacement joins when some more has happened; that of a drained one is there."""
    name, lost = new_name(engine), victim(engine)
    if is_draining(engine, lost):
        engine.lose(lost)
        return
    engine.expect(name, NUM_BLOCKS)
    engine.lose(lost)
    for _ in range(2):
        if engine.pending:
            engine.complete()
    add_worker(engine, name, NUM_BLOCKS)


def move(engine: SimEngine) -> None:
    for name in engine.live:
        for worker_id in engine.runners:
            engine.migrate(name, worker_id)


def drain(engine: SimEngine) -> None:
    leaving = victim(engine)
    if not is_draining(engine, leaving):
        add_worker(engine, new_name(engine), NUM_BLOCKS)
        engine.drain(leaving, 0.3)


def evict(engine: SimEngine) -> None:
    for name in engine.live:
        engine.evict(name)


def fail_operation(engine: SimEngine) -> None:
    """A load, a save or a copy; a step that fails would end a lone request rightly."""
    index = next((i for i, a in enumerate(engine.pending) if not isinstance(a, RunBatch)), None)
    if index is not None:
        engine.fail(index)


def lose_scheduler(engine: SimEngine) -> None:
    """Not while a worker is being drained, which a new scheduler would have to be told again."""
    if not any(is_draining(engine, worker_id) for worker_id in engine.runners):
        engine.restart_scheduler()


FAULTS: dict[str, Fault] = {
    "worker lost": lose_worker,
    "moved": move,
    "drained": drain,
    "evicted": evict,
    "operation failed": fail_operation,
    "store lost": SimEngine.lose_store,
    "scheduler lost": lose_scheduler,
}
each_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


def go_on(engine: SimEngine, num_events: int) -> None:
    for _ in range(num_events):
        if engine.pending:
            engine.complete()


def end_all(engine: SimEngine, *names: str) -> None:
    """Run to the end, letting the time of drains pass, and check results and what is left."""
    engine.tick(10.0)
    finish(engine, *names)
    assert not engine.journal
    assert engine.state.stats().num_recomputed_rows + engine.past_recomputed_rows == 0


# --------------------------------------------------------------------------- cancelled and counted


@each_fault
def test_an_abort_soon_after_a_fault_gives_back_all_blocks(fault: Fault) -> None:
    """In every phase, and while what the fault has begun is under way."""
    for num_before, num_after in itertools.product(range(0, 26, 2), (0, 1, 3)):
        engine = frail_engine()
        engine.submit("a", prompt(30), scoring(max_tokens=6))
        engine.submit("b", prompt(9, seed=1), generating(9))
        go_on(engine, num_before)
        fault(engine)
        go_on(engine, num_after)
        engine.cancel("a")
        assert "a" not in engine.live
        end_all(engine, "b")
        if engine.result("a").finish_reason is not FinishReason.LENGTH:
            assert engine.result("a").finish_reason is FinishReason.ABORT


def test_two_thousand_requests_under_every_fault_leave_usage_and_containers_as_they_were() -> None:
    """One block lost with each move, or one entry of a list with each loss, is seen only late."""
    engine = frail_engine(store_blocks=20, validate=False)
    rng = random.Random(0)
    before = sizes(engine.state)
    num_done: Counter[str] = Counter()
    for batch in range(100):
        for i in range(20):
            name = f"r{batch}-{i}"
            params = scoring(k=0, max_tokens=1) if i % 3 else generating(3, n=1 + i % 2)
            engine.submit(name, prompt(3 + i, rng.randrange(50)), params, timeout_s=50.0)
            if i % 9 == 0:
                engine.cancel(name)
        # The scheduler is lost rarely: what leaks into it would be lost with it.
        kinds = rng.sample([name for name in FAULTS if name != "scheduler lost"], 2)
        for name in [*kinds, *(["scheduler lost"] if batch % 30 == 29 else [])]:
            go_on(engine, rng.randrange(20))
            FAULTS[name](engine)
            num_done[name] += 1
        engine.tick(5.0)
        engine.run(rng)
        engine.tick(60.0)
        engine.state.validate()
        check_idle(engine)
        assert not engine.journal
        assert sizes(engine.state) == before, batch
        assert max(sizes(engine.store).values()) <= 2 * 20
        for log in (engine.log, engine.results, engine.submissions, engine.written_results):
            log.clear()
    assert set(num_done) == set(FAULTS)


def test_what_is_refused_after_a_look_at_the_cached_prefix_keeps_no_reference() -> None:
    """Moves to a full worker that has the prefix, and submissions to a full queue."""
    engine = frail_engine(max_queued_requests=1, max_num_seqs=1, enable_prefix_caching=True)
    for name in ("warm", "warm too"):
        engine.submit(name, prompt(21), generating(1))
    finish(engine, "warm", "warm too")
    engine.submit("a", prompt(21), generating(30))
    engine.submit("b", prompt(21, seed=1), generating(30))
    engine.step()
    engine.submit("queued", prompt(21), generating(1))
    for restarts in range(2):
        used = engine.state.stats().num_used_blocks
        for _ in range(20):
            assert isinstance(engine.submit("c", prompt(21), generating(1)), Overloaded)
            refused = [engine.migrate(n, w) for n in "ab" for w in sorted(engine.runners)]
            assert Counter(map(type, refused)) == {type(None): 2, CannotMigrate: 2}
        assert engine.state.stats().num_used_blocks == used
        if not restarts:
            engine.restart_scheduler()
            engine.settle()
            engine.step()
    end_all(engine, "a", "b", "queued")


# ------------------------------------------------------------------------------------- n > 1


def test_completions_that_end_at_different_times_live_through_a_lost_worker_and_scheduler() -> None:
    """And an abort reaches all of those that are left, however much has been lost."""
    params = generating(40, n=4, logprobs=0, ignore_eos=False, stop_token_ids=(3, 5, 8, 11))
    num_ended: Counter[int] = Counter()
    for num_steps, is_cancelled in itertools.product(range(2, 26, 2), (False, True)):
        engine = frail_engine(chunk=64, num_blocks=60)
        engine.submit("a", prompt(9), params, seed=2)
        for _ in range(num_steps):
            engine.step()
        num_ended[4 - len(engine.live)] += 1
        lose_worker(engine)
        go_on(engine, 3)
        engine.restart_scheduler()
        go_on(engine, 3)
        if not is_cancelled:
            end_all(engine, "a")
            continue
        left = set(engine.live)
        engine.cancel("a")
        assert not engine.live
        end_all(engine)
        for index in range(4):
            result = engine.result("a", index)
            whole = expected_output(
                engine.submissions["a"].prompt_token_ids, params, 2 + index, 40
            ).token_ids
            is_left = f"a#{index}" in left
            assert (result.finish_reason is FinishReason.ABORT) == is_left
            assert result.token_ids == (whole[: len(result.token_ids)] if is_left else whole)
    assert len(num_ended) > 2, "children do end at different times"


def test_one_completion_can_be_ended_alone_before_and_after_a_restart() -> None:
    engine = frail_engine(chunk=64)
    engine.submit("a", prompt(9), generating(20, n=3), seed=4)
    engine.step()
    engine.cancel("a#1")
    engine.restart_scheduler()
    assert engine.live == ["a#0", "a#2"]
    engine.cancel("a#0")
    lose_worker(engine)
    assert engine.live == ["a#2"]
    engine.run()
    reasons = [engine.result("a", i).finish_reason for i in range(3)]
    assert reasons == [FinishReason.ABORT, FinishReason.ABORT, FinishReason.LENGTH]
    check_idle(engine)


# -------------------------------------------------------------------------------- order and room


@pytest.mark.parametrize("seed", range(12))
def test_requests_of_sixty_percent_of_a_pool_all_finish_under_moves_and_drains(seed: int) -> None:
    """None is sent away for ever by the others: what was not asked for is bounded."""
    engine = fake_engine(2, num_blocks=20, save_segment_tokens=8)
    names, rng = "abcd", random.Random(seed)
    for i, name in enumerate(names):
        engine.submit(name, prompt(12, seed=i), scoring(max_tokens=36), seed=i)
    num_drains = 0
    for i in range(60):
        go_on(engine, rng.randrange(6))
        if engine.live:
            engine.migrate(rng.choice(engine.live), rng.choice(sorted(engine.runners)))
        if i % 20 == 19 and engine.live:
            num_drains += 1
            add_worker(engine, new_name(engine), 20)
            engine.drain(victim(engine), rng.choice([0.2, 5.0]))
    engine.tick(10.0)
    finish(engine, *names)
    for name in names:
        stats = engine.result(name).stats
        assert stats.num_evictions <= len(names) + num_drains
        assert stats.num_recomputed_tokens < 4 * max(stats.num_evictions, 1)


@pytest.mark.parametrize("num_blocks", range(8, 15))
def test_two_requests_that_each_want_the_other_s_place_both_get_on(num_blocks: int) -> None:
    """Each holds what it has and a part of what it wants; one of the two moves yields."""
    for num_steps in range(1, 12):
        engine = fake_engine(2, num_blocks=num_blocks, enable_prefix_caching=False)
        for i, name in enumerate("ab"):
            engine.submit(name, prompt(12, seed=i), generating(20), seed=i)
        for _ in range(num_steps):
            engine.step()
        places = {info.request_id: info.worker_id for info in engine.state.request_infos(0)}
        assert set(places.values()) == {"w0", "w1"}
        engine.migrate("a", places["b"])
        engine.migrate("b", places["a"])
        if num_steps % 3 == 0:
            add_worker(engine, "w2", num_blocks)
            for worker_id in ("w0", "w1"):
                engine.drain(worker_id, 0.5)
            engine.tick(1.0)
        finish(engine, "a", "b")


def order_of_ends(engine: SimEngine) -> list[str]:
    return [a.request_id for a in engine.log if isinstance(a, RecordFinished)]


@each_fault
def test_the_order_of_service_is_kept_through_every_fault(fault: Fault) -> None:
    """Whoever has lost its place in the engine has not lost it in the queue: those behind it wait.

    (Only the order in which workers are given to requests is the scheduler's; so there is one.)
    """
    priorities = {"c": -1, "d": 1, "f": -1}
    right = ["c", "f", "a", "b", "e", "d"]
    for num_events in range(0, 50, 2):
        engine = frail_engine(1, max_num_seqs=1)
        engine.expect("w1", NUM_BLOCKS)
        for i, name in enumerate("abcdef"):
            tokens, priority = prompt(17, seed=i), priorities.get(name, 0)
            engine.submit(name, tokens, scoring(max_tokens=3), priority=priority)
        go_on(engine, num_events)
        if fault is not drain:
            fault(engine)
        engine.restart_scheduler()
        go_on(engine, 3)
        fault(engine)
        if fault is drain:
            engine.tick(1.0)
        engine.run()
        if fault in (drain, move, evict):
            # For a while there are two workers, or the next one begins while the one that an
            # operator wanted off the worker is saved; so neighbours may change places.
            ends = order_of_ends(engine)
            assert all(abs(ends.index(name) - i) <= 1 for i, name in enumerate(right)), ends
        else:
            assert order_of_ends(engine) == right, num_events
        for name in right:
            check(engine, name)
        assert engine.result("b").stats.num_evictions <= 2
        check_idle(engine)


# ------------------------------------------------------------------------------------ dead work


def test_clients_that_run_out_of_time_and_try_again_do_not_fill_the_queue() -> None:
    """Under the same ids, again and again, while the head waits for a worker to be replaced and
    the scheduler is lost: what is queued is one request for each id, and no dead one is computed.
    """
    engine = frail_engine(1, max_num_seqs=1, max_queued_requests=12)
    engine.submit("runs", prompt(9), generating(30))
    go_on(engine, 3)
    engine.expect("w1", NUM_BLOCKS)
    engine.lose("w0")
    idle = sizes(engine.state)
    names = [f"r{i}" for i in range(11)]
    largest: Counter[str] = Counter()
    for attempt in range(200):
        for result in engine.results.values():
            result.may_repeat = True
        cancelled = names[attempt % 3 :: 3]
        for i, name in enumerate(names):
            tokens, limit_s = prompt(5, seed=i), 1e6 if name in cancelled else 1.0
            assert engine.submit(name, tokens, generating(2), timeout_s=limit_s) is None
            assert engine.submit(name, tokens, generating(2), timeout_s=9.0) is None
        assert isinstance(engine.submit("more", prompt(3), generating(1)), Overloaded)
        assert engine.refused[engine._tickets].details["retry_after_s"] >= 1.0
        assert engine.state.stats().num_waiting == 12
        assert set(engine.journal) == {"runs", *names}
        for name in cancelled:
            engine.cancel(name)
        engine.tick(1.1)
        assert engine.live == ["runs"], "what is late is gone before anything is done for it"
        assert all(engine.result(n).finish_reason is not None for n in names)
        largest |= Counter(sizes(engine.state))
        engine.log.clear()
        if attempt == 100:
            engine.restart_scheduler()
    bounded = {name: size - idle.get(name, 0) for name, size in largest.items()}
    assert max(bounded.values()) <= 200, bounded
    assert {type(engine.result(n).error) for n in names} == {type(None), DeadlineExceeded}
    engine.results.clear()
    engine.submit("r0", prompt(5), generating(2))
    add_worker(engine, "w1", NUM_BLOCKS)
    engine.log.clear()
    engine.run()
    check_idle(engine)
    chunks = [c for a in engine.log if isinstance(a, RunBatch) for c in a.output.chunks]
    assert {chunk.request_id for chunk in chunks} <= {"runs", "r0"}
