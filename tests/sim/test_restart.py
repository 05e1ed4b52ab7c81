"""A scheduler that dies and goes on from its journal, at any point of what it was doing.

The workers and the store live on; what was under way is void. Nothing that was written is computed
again but KV, nothing is told wrongly, and the order of service is kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from scheduler.actions import Emit, RecordFinished, RunBatch
from scheduler.errors import DeadlineExceeded, RequestTooLarge
from scheduler.events import RequestRestored
from scheduler.reports import whole_deltas
from scheduler.request import Request
from tests.sim.cases import (
    BLOCK_SIZE,
    add_worker,
    check,
    check_idle,
    fake_engine,
    generating,
    prompt,
    scoring,
)
from tests.sim.engine import Result, SimEngine


def some_engine() -> SimEngine:
    """Scoring, generating with n > 1 and stop tokens, evictions, saves, and a queue."""
    engine = fake_engine(
        2, num_blocks=12, chunk=10, enable_journal=True, save_segment_tokens=8, max_num_seqs=3
    )
    engine.submit("scores", prompt(33), scoring(max_tokens=3))
    stops = generating(12, n=3, logprobs=1, ignore_eos=False, stop_token_ids=tuple(range(0, 40, 5)))
    engine.submit("n", prompt(10, seed=1), stops, seed=3)
    engine.submit("long", prompt(9, seed=2), scoring(max_tokens=22, logprobs=0))
    engine.submit("first", prompt(13, seed=3), scoring(), priority=-1)
    return engine


def resubmit_all(engine: SimEngine) -> None:
    """What clients do when they have connected again: they send all again that has not ended for
    them, and what has ended meanwhile is told them from the journal."""
    for name, submission in list(engine.submissions.items()):
        for request in engine.written_results.values():
            if request.parent_id == name:
                for delta in whole_deltas(request):
                    engine.result(name, request.index).take(delta)
        results = [engine.result(name, i) for i in range(submission.sampling_params.n)]
        if any(result.finish_reason is None for result in results):
            assert engine.submit_all(submission) == [None]


def run(engine: SimEngine, rng: random.Random | None = None) -> None:
    engine.run(rng)
    for name in engine.submissions:
        check(engine, name)
    check_idle(engine)
    assert not engine.journal
    stats = engine.state.stats()
    assert stats.num_recomputed_rows + engine.past_recomputed_rows == 0


def num_events(build: Callable[[], SimEngine]) -> int:
    engine = build()
    count = 0
    while engine.pending:
        engine.complete()
        count += 1
    return count


@pytest.mark.parametrize("in_order", [True, False])
def test_a_scheduler_lost_after_any_number_of_actions_brings_every_request_to_its_end(
    in_order: bool,
) -> None:
    for count in range(num_events(some_engine) + 1):
        engine, rng = some_engine(), random.Random(count)
        for _ in range(count):
            if engine.pending:
                engine.complete(0 if in_order else rng.randrange(len(engine.pending)))
        before = {r.request_id: r.num_computed_tokens for r in engine.journal.values()}
        engine.restart_scheduler()
        assert {name: engine.state.request(name).num_computed_tokens for name in before} == before
        run(engine, None if in_order else rng)


@pytest.mark.parametrize("lag", [1, 6])
def test_records_that_were_not_written_in_time_are_made_again_with_the_same_bits(lag: int) -> None:
    """The journal writes in batches: the last ones die with the scheduler, and clients may have
    been told already what is lost. They submit again; seeds are theirs, so bits are the same."""
    for count in range(0, num_events(some_engine) + 1, 2):
        engine = some_engine()
        engine.journal_lag = lag
        for _ in range(count):
            if engine.pending:
                engine.complete()
        engine.restart_scheduler()
        engine.journal_lag = 0
        resubmit_all(engine)
        run(engine)


def test_a_scheduler_that_is_lost_again_and_again_gets_on() -> None:
    engine = some_engine()
    for i in range(60):
        for _ in range(3 + i % 4):
            if engine.pending:
                engine.complete()
        engine.restart_scheduler()
    run(engine)


def test_kv_that_the_store_has_is_read_back_and_less_than_a_segment_computed_again() -> None:
    engine = fake_engine(1, enable_journal=True, save_segment_tokens=16)
    engine.submit("a", prompt(90), scoring(max_tokens=3))
    for _ in range(9):
        engine.step()
    engine.settle()
    engine.restart_scheduler()
    run(engine)
    stats = engine.result("a").stats
    assert 0 < stats.num_recomputed_tokens < 16
    assert engine.state.stats().num_requests_restored == 1


def test_an_evicted_request_that_waits_keeps_its_saved_blocks_through_a_restart() -> None:
    engine = fake_engine(1, enable_journal=True, max_num_seqs=1)
    engine.submit("a", prompt(41), scoring(max_tokens=3))
    for _ in range(4):
        engine.step()
    engine.submit("b", prompt(9, seed=1), scoring(max_tokens=9), priority=-1)
    for _ in range(engine.config.max_steps_in_flight):
        engine.step()
        engine.settle()
    assert engine.state.request_infos(0)[1].worker_id is None
    engine.restart_scheduler()
    run(engine)
    assert engine.result("a").stats.num_recomputed_tokens < BLOCK_SIZE


def test_the_order_of_service_is_kept_and_newcomers_come_after() -> None:
    engine = fake_engine(1, enable_journal=True, max_num_seqs=1)
    for i, name in enumerate("abcdef"):
        priority = {"e": -1, "b": 1}.get(name, 0)
        engine.submit(name, prompt(9, seed=i), scoring(max_tokens=2), priority=priority)
    for _ in range(3):
        engine.step()
    ended = [a.request_id for a in engine.log if isinstance(a, RecordFinished)]
    engine.restart_scheduler()
    engine.submit("late", prompt(9, seed=9), scoring(max_tokens=2))
    engine.submit("urgent", prompt(9, seed=10), scoring(max_tokens=2), priority=-2)
    run(engine)
    ended = [a.request_id for a in engine.log if isinstance(a, RecordFinished)]
    assert [name for name in ended if name != "urgent"] == ["e", "a", "c", "d", "f", "late", "b"]


def test_arrivals_go_on_where_they_were_whatever_order_the_journal_gives() -> None:
    requests = []
    for i, name in enumerate("abc"):
        engine = fake_engine(1, enable_journal=True)
        engine.submit(name, prompt(9, seed=i), scoring())
        request = engine.journal[name]
        request.arrival = 10 + i
        requests.append(request)
    for order in ([0, 1, 2], [2, 0, 1], [2, 1, 0]):
        engine = fake_engine(0, enable_journal=True, max_num_seqs=1)
        engine.expect("w0", 64)
        engine.handle(*(RequestRestored(Request.decode(requests[i].encode())) for i in order))
        engine.submit("new", prompt(3), scoring())
        add_worker(engine, "w0")
        first = next(a for a in reversed(engine.log) if isinstance(a, RunBatch))
        assert first.output.chunks[0].request_id == "a"
        assert engine.state.request("new").arrival == 13


def test_completions_of_one_prompt_that_have_ended_are_not_computed_again() -> None:
    """One of three is done; the other two go on."""
    params = generating(30, n=3, ignore_eos=False, stop_token_ids=tuple(range(0, 40, 4)))
    for seed in range(8):
        engine = fake_engine(1, chunk=64, enable_journal=True)
        engine.submit("a", prompt(9), params, seed=seed)
        while engine.step() and len(engine.live) == 3:
            pass
        ended = {f"a#{i}" for i in range(3)} - set(engine.live)
        engine.restart_scheduler()
        restored_from = len(engine.log)
        run(engine)
        chunks = [
            chunk.request_id
            for action in engine.log[restored_from:]
            if isinstance(action, RunBatch)
            for chunk in action.output.chunks
        ]
        assert not ended & set(chunks)


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_a_request_whose_last_token_was_written_but_not_its_end_ends_without_computing(
    max_tokens: int,
) -> None:
    """The journal alone knows that it was done; its client is told everything at once."""
    engine = fake_engine(1, enable_journal=True)
    params = scoring(max_tokens=max_tokens, logprobs=1 if max_tokens else None)
    engine.submit("a", prompt(9), params)
    while engine.live:
        engine.complete()
    request = engine.written_results.pop("a")
    request.finish_reason = None
    engine.journal["a"] = request
    engine.results["a", 0] = Result()
    engine.restart_scheduler()
    assert not engine.live
    assert not [action for action in engine.pending if isinstance(action, RunBatch)]
    told = [action.delta for action in engine.log if isinstance(action, Emit)][-1]
    assert (told.num_previous_tokens, len(told.new_token_ids)) == (0, max_tokens)
    run(engine)


def test_a_deadline_survives_and_counts_from_the_first_submission() -> None:
    engine = fake_engine(1, enable_journal=True)
    engine.submit("a", prompt(90), scoring(), timeout_s=10.0)
    engine.submit("b", prompt(90, seed=1), scoring(), timeout_s=1000.0)
    for _ in range(3):
        engine.step()
    engine.tick(6.0)
    engine.restart_scheduler()
    assert engine.result("a").finish_reason is None
    engine.tick(3.5)
    assert engine.result("a").finish_reason is None
    engine.tick(1.0)
    assert isinstance(engine.result("a").error, DeadlineExceeded)
    engine.run()
    check(engine, "b")
    check_idle(engine)


def test_workers_are_lost_together_with_the_scheduler() -> None:
    """The node that had both: replacements are expected, and come."""
    for count in range(0, 40, 3):
        engine = some_engine()
        for _ in range(count):
            if engine.pending:
                engine.complete()
        del engine.runners["w0"]
        engine.expected["w2"] = 12
        engine.restart_scheduler()
        add_worker(engine, "w2", 12)
        run(engine)


def test_requests_restored_before_any_worker_is_there_wait_for_one() -> None:
    engine = fake_engine(1, enable_journal=True)
    engine.submit("a", prompt(30), scoring(max_tokens=3))
    for _ in range(2):
        engine.step()
    engine.runners.clear()
    engine.expected["w1"] = 64
    engine.restart_scheduler()
    engine.tick()
    assert engine.live == ["a"]
    add_worker(engine, "w1")
    run(engine)


def test_a_restored_request_that_the_workers_found_again_can_not_hold_ends() -> None:
    engine = fake_engine(1, enable_journal=True)
    engine.submit("a", prompt(30), scoring(max_tokens=3))
    engine.submit("b", prompt(3), scoring(max_tokens=3))
    engine.runners.clear()
    engine.expected["w1"] = 64
    engine.restart_scheduler()
    assert engine.live == ["a", "b"]
    add_worker(engine, "w1", 2)
    assert isinstance(engine.result("a").error, RequestTooLarge)
    engine.run()
    check(engine, "b")
