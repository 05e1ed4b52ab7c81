"""Requests that move to another worker while they go on, and what can go wrong at every step.

A move is followed action by action. Whatever happens after any number of them, the request is
computed by one worker at a time, its bits are those of a request that nothing happened to, and
neither worker keeps anything of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.actions import CopyBlocks, RunBatch
from scheduler.errors import CannotMigrate, DeadlineExceeded, UnknownRequest, UnknownWorker
from scheduler.request import FinishReason
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

Fault = Callable[[SimEngine], None]


class Pace:
    """Completes actions in a fixed order: a copy is answered after so many steps."""

    def __init__(self, engine: SimEngine, steps_per_copy: int) -> None:
        self._engine = engine
        self._steps_per_copy = steps_per_copy
        self._num_steps = 0
        self._num_calls = 0

    def next(self) -> None:
        engine = self._engine
        self._num_calls += 1
        assert self._num_calls < 1000, "it comes to no end"
        copy, step = engine.index_of(CopyBlocks), engine.index_of(RunBatch)
        if copy is not None and (step is None or self._num_steps >= self._steps_per_copy):
            self._num_steps = 0
            engine.complete(copy)
        elif step is not None:
            self._num_steps += copy is not None
            engine.complete(step)
        else:
            engine.complete()
        assert_one_owner(engine)


def assert_one_owner(engine: SimEngine) -> None:
    """No request is being computed in two places, and none holds a seat in two."""
    computed = [
        chunk.request_id
        for action in engine.pending
        if isinstance(action, RunBatch)
        for chunk in action.output.chunks
        if chunk.request_id in engine.live
    ]
    assert len(computed) == len(set(computed))
    seats = [name for worker in engine.state._core.workers.values() for name in worker.residents]
    assert len(seats) == len(set(seats))


def moving_engine(kind: str, steps_per_copy: int, max_tokens: int = 9) -> tuple[SimEngine, Pace]:
    """`a` is in decode or in mid-prefill on w0, beside `b`, and has just been sent to w1."""
    engine = fake_engine(1, num_blocks=40, chunk=12, enable_journal=True, save_segment_tokens=16)
    num_tokens = 24 if kind == "decode" else 52
    engine.submit("a", prompt(num_tokens), scoring(max_tokens=max_tokens), timeout_s=1e6)
    engine.submit("b", prompt(6, seed=1), scoring(max_tokens=14, logprobs=1))
    for _ in range(4 if kind == "decode" else 2):
        engine.step()
    add_worker(engine, "w1", 40)
    assert engine.migrate("a", "w1") is None
    return engine, Pace(engine, steps_per_copy)


def lose(worker_id: str) -> Fault:
    def fault(engine: SimEngine) -> None:
        add_worker(engine, "w2", 40)
        engine.lose(worker_id)

    return fault


def fail_copy(num_done: int) -> Fault:
    def fault(engine: SimEngine) -> None:
        index = engine.index_of(CopyBlocks)
        if index is not None:
            engine.fail(index, num_done=num_done)

    return fault


def fail_step(engine: SimEngine) -> None:
    """The step of w0 raises; the worker lives on."""
    for index, action in enumerate(engine.pending):
        if isinstance(action, RunBatch) and len(action.output.chunks) > 1:
            engine.fail(index)
            return


def move_back(engine: SimEngine) -> None:
    refused = engine.migrate("a", "w0")
    assert refused is None


FAULTS: dict[str, Fault] = {
    "nothing": lambda engine: None,
    "source killed": lose("w0"),
    "target killed": lose("w1"),
    "copy fails": fail_copy(0),
    "copy fails half-way": fail_copy(1),
    "step fails": fail_step,
    "cancelled": lambda engine: engine.cancel("a"),
    "evicted": lambda engine: engine.evict("a"),
    "source drained": lambda engine: engine.drain("w0"),
    "source drained at once": lambda engine: engine.drain("w0", 0.0),
    "target drained": lambda engine: engine.drain("w1"),
    "sent back": move_back,
    "store lost": lambda engine: engine.lose_store(),
    "scheduler lost": lambda engine: engine.restart_scheduler(),
    "deadline passed": lambda engine: engine.tick(2e6),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_move_disturbed_after_any_number_of_its_actions_leaves_one_owner(kind, name) -> None:
    """Before each copy, between the pause and the last one, after the switch: either side."""
    for steps_per_copy in (0, 2):
        has_moved = False
        for num_events in range(30):
            if has_moved:
                break
            engine, pace = moving_engine(kind, steps_per_copy)
            for _ in range(num_events):
                pace.next()
            has_moved = engine.state.stats().num_migrations > 0
            FAULTS[name](engine)
            assert_one_owner(engine)
            while engine.pending:
                pace.next()
            check_outcome(engine)
        assert has_moved, "the faults have been there at every step"


def check_outcome(engine: SimEngine) -> None:
    check_idle(engine)
    check(engine, "b")
    assert engine.state.stats().num_recomputed_rows == 0
    assert not engine.journal
    result = engine.result("a")
    if isinstance(result.error, DeadlineExceeded) or result.finish_reason is FinishReason.ABORT:
        return
    check(engine, "a")


@pytest.mark.parametrize("steps_per_copy", [0, 1, 4])
def test_a_request_that_ends_during_its_move_ends_once_and_leaves_nothing(steps_per_copy) -> None:
    """It may be done before the first copy, between two of them, or right after the switch."""
    moves = []
    for max_tokens in range(4, 14):
        engine, pace = moving_engine("decode", steps_per_copy, max_tokens)
        while engine.pending:
            pace.next()
        check_outcome(engine)
        moves.append(engine.state.stats().num_migrations)
    assert moves == sorted(moves)
    assert moves[-1] == 1


def test_a_move_computes_nothing_again_and_carries_the_partial_block() -> None:
    engine, pace = moving_engine("decode", 1)
    while engine.pending:
        pace.next()
    stats = engine.state.stats()
    assert stats.migrations_by_reason == {"asked": 1}
    assert (stats.num_recomputed_tokens, stats.num_evictions) == (0, 0)
    assert stats.num_migrated_blocks * engine.infos["w0"].block_bytes == stats.num_migrated_bytes
    assert engine.result("a").stats.num_migrations == 1


def test_a_prefill_whose_copy_is_faster_than_its_chunk_is_not_switched_under_it() -> None:
    """The copy brings all that was computed when it began, to the block; a chunk is under way."""
    engine = fake_engine(1, chunk=8)
    engine.submit("a", prompt(60), scoring(max_tokens=2))
    for _ in range(3):
        engine.step()
    add_worker(engine, "w1")
    engine.migrate("a", "w1")
    assert engine.state.request("a").num_computed_tokens == 24
    engine.complete(engine.index_of(CopyBlocks))
    assert engine.state.request_infos(0.0)[0].worker_id == "w0"
    finish(engine, "a")
    assert engine.state.stats().num_migrations == 1


def test_a_copy_so_slow_that_the_request_outgrows_its_place_there_asks_for_more() -> None:
    """Each round leaves more than was foreseen: the target's block table grows with it."""
    for steps_per_copy in (13, 30):
        engine = fake_engine(1, chunk=64)
        engine.submit("a", prompt(41), scoring(max_tokens=150))
        for _ in range(2):
            engine.step()
        add_worker(engine, "w1")
        engine.migrate("a", "w1")
        pace = Pace(engine, steps_per_copy)
        while engine.pending:
            pace.next()
        finish(engine, "a")
        assert engine.state.stats().num_migrations == 1


def test_a_request_that_outgrows_a_full_target_stays_where_it_is() -> None:
    engine = fake_engine(1, chunk=64)
    engine.submit("a", prompt(41), scoring(max_tokens=150))
    for _ in range(2):
        engine.step()
    add_worker(engine, "w1", 48)
    engine.submit("c", prompt(130, seed=1), scoring(max_tokens=60))
    engine.migrate("a", "w1")
    pace = Pace(engine, 45)
    while engine.pending:
        pace.next()
    finish(engine, "a", "c")
    assert engine.state.stats().num_migrations_failed == 1


# -------------------------------------------------------------------------------------- the pause


@pytest.mark.parametrize("num_tokens", [50, 200, 800])
def test_the_pause_of_a_decoding_request_is_as_short_with_a_long_context(num_tokens: int) -> None:
    """Copies take as long as their blocks are many; only the last, small one is waited for."""
    blocks_per_step = 2
    engine = fake_engine(1, num_blocks=400, chunk=1000)
    engine.submit("a", prompt(num_tokens), generating(190))
    engine.submit("b", prompt(8, seed=1), generating(300))
    for _ in range(3):
        engine.step()
    add_worker(engine, "w1", 400)
    started, num_steps = len(engine.log), 0
    engine.migrate("a", "w1")
    while engine.state.stats().num_migrations == 0:
        index = engine.index_of(CopyBlocks)
        if index is not None and num_steps >= len(engine.pending[index].source_block_ids) / (
            blocks_per_step
        ):
            num_steps = 0
            engine.complete(index)
        else:
            num_steps += 1
            engine.complete(engine.index_of(RunBatch))
    told = engine.log[started:]
    copies = [len(a.source_block_ids) for a in told if isinstance(a, CopyBlocks)]
    assert sum(copies) >= num_tokens // BLOCK_SIZE
    assert copies[-1] <= 3
    on_source = [a for a in told if isinstance(a, RunBatch) and a.worker_id == "w0"]
    without_it = [a for a in on_source if all(c.request_id != "a" for c in a.output.chunks)]
    assert len(without_it) <= 3
    assert len(on_source) - len(without_it) >= num_tokens // BLOCK_SIZE / blocks_per_step - 3
    finish(engine, "a", "b")


def test_a_decoding_request_stands_still_from_the_last_copy_on() -> None:
    """A token made after its last block was copied would be missing there."""
    for steps_per_copy in (0, 1, 3):
        engine, pace = moving_engine("decode", steps_per_copy)
        while engine.state.stats().num_migrations == 0:
            migration = engine.state._core.requests["a"].migration
            is_last = migration.paused_s is not None and migration.op_id is not None
            pace.next()
            computed = [
                chunk.request_id
                for action in engine.pending
                if isinstance(action, RunBatch) and action.worker_id == "w0"
                for chunk in action.output.chunks
            ]
            assert not (is_last and "a" in computed)


# ------------------------------------------------------------------------------ asked by operators


def test_a_move_that_cant_be_is_refused_and_the_request_goes_on() -> None:
    engine = fake_engine(2, num_blocks=12)
    add_worker(engine, "small", 4)
    engine.submit("a", prompt(30), scoring(max_tokens=4))
    engine.submit("b", prompt(30, seed=1), scoring(max_tokens=4))
    engine.step()
    assert isinstance(engine.migrate("a", "nobody"), UnknownWorker)
    assert isinstance(engine.migrate("nobody", "w1"), UnknownRequest)
    assert isinstance(engine.migrate("a", "small"), CannotMigrate)
    assert isinstance(engine.migrate("a", "w1"), CannotMigrate), "b is there"
    assert engine.migrate("a", "w0") is None, "it is there already"
    engine.drain("w1", 1e6)
    assert isinstance(engine.migrate("a", "w1"), CannotMigrate)
    assert engine.state.stats().num_migrations == 0
    finish(engine, "a", "b")


def test_a_move_asked_for_while_a_request_waits_or_loads_happens_once_it_runs() -> None:
    for num_events in range(12):
        engine = fake_engine(1, enable_prefix_caching=False)
        engine.submit("warm", prompt(21), generating(1))
        finish(engine, "warm")
        engine.submit("a", prompt(21), generating(30))
        for _ in range(num_events):
            engine.complete()
        add_worker(engine, "w1")
        assert engine.migrate("a", "w1") is None
        while engine.pending and engine.state.request_infos(0)[0].worker_id != "w1":
            engine.complete()
        assert engine.live, "it moved before it was done"
        finish(engine, "a")


def test_all_completions_of_a_prompt_move_together() -> None:
    engine = fake_engine(1, chunk=64)
    engine.submit("a", prompt(9), generating(20, n=3))
    for _ in range(3):
        engine.step()
    add_worker(engine, "w1")
    assert engine.migrate("a", "w1") is None
    while any(info.worker_id != "w1" for info in engine.state.request_infos(0)):
        engine.step()
    finish(engine, "a")
    assert engine.state.stats().num_migrations == 3


def test_blocks_that_the_target_has_cached_already_are_not_copied() -> None:
    engine = fake_engine(1)
    engine.submit("a", prompt(40), generating(30))
    for _ in range(8):
        engine.step()
    add_worker(engine, "w1")
    engine.submit("same", prompt(40), generating(9))
    engine.migrate("same", "w1")
    while "same" in engine.live:
        engine.step()
    copied = engine.state.stats().num_migrated_blocks
    engine.migrate("a", "w1")
    while engine.state.request_infos(0)[0].worker_id != "w1":
        engine.step()
    assert engine.state.stats().num_migrated_blocks - copied <= 4
    finish(engine, "a", "same")


def test_a_request_with_bypass_takes_no_block_of_others_along() -> None:
    """What the target has of the same prompt was computed by somebody else: it is not used."""
    engine = fake_engine(1, store_blocks=0)
    engine.submit("a", prompt(40), scoring(max_tokens=30))
    for _ in range(8):
        engine.step()
    add_worker(engine, "w1")
    engine.submit("same", prompt(40), generating(2))
    while "same" in engine.live:
        engine.step()
    engine.migrate("a", "w1")
    while engine.state.request_infos(0)[0].worker_id != "w1":
        engine.step()
    assert engine.state.stats().num_migrated_blocks >= 10
    finish(engine, "a", "same")
    check_idle(engine)


def test_a_request_that_is_sent_back_and_forth_gets_on_between_two_moves() -> None:
    """Copies are quick and steps are slow: each stay brings progress all the same."""
    engine = fake_engine(2, chunk=64)
    engine.submit("a", prompt(9), scoring(max_tokens=12))
    engine.step()
    progress = []
    for _ in range(300):
        if not engine.live:
            break
        info = engine.state.request_infos(0)[0]
        if len(progress) < engine.state.stats().num_migrations:
            progress.append(info.num_computed_tokens)
        engine.migrate("a", "w1" if info.worker_id == "w0" else "w0")
        index = engine.index_of(CopyBlocks)
        if index is not None:
            engine.complete(index)
        elif engine.live:
            engine.complete()
    finish(engine, "a")
    assert len(progress) >= 4
    assert len(progress) == len(set(progress)), "no two moves at the same point"
