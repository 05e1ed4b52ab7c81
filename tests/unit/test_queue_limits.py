"""A queue that is bounded, and requests that are bounded in time: what is refused, and when."""

from __future__ import annotations

import pytest

from scheduler.acceptance import retry_after_s
from scheduler.actions import Emit, LoadBlocks, LookupBlocks, Refuse, RunBatch, SaveBlocks
from scheduler.errors import DeadlineExceeded, Overloaded, from_wire
from scheduler.events import (
    EvictRequested,
    LookupDone,
    RequestCancelled,
    RequestRestored,
    SaveDone,
    Tick,
    WorkerExpected,
    WorkerJoined,
    WorkerLost,
)
from scheduler.messages import SchedulerStats
from scheduler.request import Request, RequestStatus
from tests.sim.script import Script, worker_info

LATE = Tick(time_s=10.0)


def told_error(script: Script) -> DeadlineExceeded:
    error = from_wire(script.last(Emit).delta.error)
    assert isinstance(error, DeadlineExceeded)
    return error


# ------------------------------------------------------------------------------------ deadlines


def test_a_queued_request_past_its_deadline_ends_before_it_costs_anything() -> None:
    """Its client has given up long ago: no worker computes for it, and those behind it move up."""
    script = Script(enable_offload=False, max_num_seqs=1)
    script.submit("runs", 17)
    script.submit("late", 17, timeout_s=5.0)
    script.submit("next", 3)
    assert script.say(Tick(time_s=4.999)) == []
    assert script.say(Tick(time_s=5.0)) == ["tell late.0 error DeadlineExceeded"]
    assert "timeout_s" in told_error(script).message
    assert told_error(script).details == {"num_computed_tokens": 0}
    script.computed()
    script.computed()
    assert script.computed()[-1] == "w0 runs forget runs, next[0:3] new"
    chunks = [c for a in script.actions if isinstance(a, RunBatch) for c in a.output.chunks]
    assert "late" not in {chunk.request_id for chunk in chunks}
    stats = script.state.stats()
    assert (stats.num_expired, stats.num_failed) == (1, 1)


def test_any_event_that_comes_late_enough_ends_what_is_past_its_deadline() -> None:
    """The submission of another one, for instance, which then takes its place."""
    script = Script(enable_offload=False, max_num_seqs=1)
    script.submit("a", 17, timeout_s=5.0)
    assert script.submit("b", 4, time_s=6.0) == ["tell a.0 error DeadlineExceeded"]
    assert script.computed() == ["w0 runs forget a, b[0:4] new"]


def test_a_running_request_past_its_deadline_keeps_its_blocks_until_its_step_ends() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 17, timeout_s=5.0)
    script.computed()
    assert script.say(LATE) == ["tell a.0 error DeadlineExceeded"]
    assert told_error(script).details == {"num_computed_tokens": 8}
    assert script.state.stats().num_used_blocks == 5
    assert script.computed() == ["w0 runs forget a"]
    assert script.state.stats().num_used_blocks == 0


def test_a_step_that_ends_after_the_deadline_is_too_late() -> None:
    """Time is looked at once per event, so what the same event brings is still taken."""
    script = Script(enable_offload=False)
    script.submit("a", 4, max_tokens=3, timeout_s=5.0)
    done = script.batch_done()
    late = type(done)(done.worker_id, done.output, time_s=9.0)
    assert script.say(late) == [
        "tell a.0 tokens=[7]",
        "tell a.0 error DeadlineExceeded",
        "w0 runs forget a",
    ]


@pytest.mark.parametrize("phase", ["looking up", "loading"])
def test_a_loading_request_past_its_deadline_gives_its_blocks_back_after_the_load(phase) -> None:
    script = Script()
    script.submit("a", 13, timeout_s=5.0)
    if phase == "loading":
        script.say(LookupDone(script.last(LookupBlocks).op_id, 12))
    assert script.status("a") is RequestStatus.LOADING
    assert script.say(LATE) == ["release a for ever", "tell a.0 error DeadlineExceeded"]
    assert script.state.stats().num_used_blocks == 4
    op_id = script.last(LookupBlocks if phase == "looking up" else LoadBlocks).op_id
    assert script.say(LookupDone(op_id, 12)) == [], "no load is begun for it"
    assert script.state.stats().num_used_blocks == 0


def test_a_saving_request_past_its_deadline_is_not_queued_again() -> None:
    script = Script()
    script.submit("a", 17, prompt_logprobs=1, timeout_s=5.0)
    script.say(EvictRequested("a"))
    script.computed()
    assert script.status("a") is RequestStatus.SAVING
    assert script.say(LATE)[:2] == ["release a for ever", "tell a.0 error DeadlineExceeded"]
    script.computed()
    assert script.say(SaveDone(script.last(SaveBlocks).op_id, 2, 2)) == []
    assert script.state.stats().num_used_blocks == 0


def test_all_completions_share_a_deadline_and_it_starts_when_they_arrive() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 4, max_tokens=9, n=2, timeout_s=5.0, time_s=100.0)
    assert script.say(Tick(time_s=104.9)) == []
    told = script.say(Tick(time_s=105.0))
    assert told == ["tell a.0 error DeadlineExceeded", "tell a.1 error DeadlineExceeded"]


def test_a_deadline_of_an_id_that_ended_does_not_touch_its_successor() -> None:
    """Cancelled, and sent again with more time."""
    script = Script(enable_offload=False)
    script.submit("a", 17, timeout_s=5.0)
    script.say(RequestCancelled("a"))
    script.submit("a", 17, timeout_s=50.0)
    assert script.say(LATE) == []
    assert script.status("a") is not None
    assert script.say(Tick(time_s=50.0)) == ["tell a.0 error DeadlineExceeded"]


def test_a_request_that_waits_for_a_replacement_runs_out_of_time_like_any_other() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 17, timeout_s=5.0)
    script.say(WorkerExpected("w1", 16), WorkerLost("w0"))
    assert script.say(LATE) == ["tell a.0 error DeadlineExceeded"]


def test_a_deadline_passed_while_the_scheduler_was_down_ends_the_request_at_once() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 17, timeout_s=5.0)
    request = Request.decode(script.state.request("a").encode())
    request.status = RequestStatus.WAITING
    again = Script(0, enable_offload=False)
    told = again.say(WorkerExpected("w0", 16), RequestRestored(request, time_s=60.0))
    assert told == ["tell a.0 error DeadlineExceeded"]
    assert "-" not in told_error(again).message.split(":")[0], "no negative time"


# ------------------------------------------------------------------------------------- overload


def full_script(**limits: int) -> Script:
    """One request runs; whatever comes now waits."""
    script = Script(enable_offload=False, max_num_seqs=1, **limits)
    script.submit("runs", 30)
    return script


def test_a_full_queue_refuses_by_requests_and_says_when_to_try_again() -> None:
    script = full_script(max_queued_requests=2)
    assert script.submit("a") == script.submit("b") == []
    assert script.submit("c", ticket=7) == ["refuse 7: Overloaded"]
    error = from_wire(script.last(Refuse).error)
    assert isinstance(error, Overloaded)
    assert error.details["retry_after_s"] == 1.0
    assert script.state.stats().num_refused == 1
    assert script.state.live_ids() == ["runs", "a", "b"]
    script.say(RequestCancelled("a"))
    assert script.submit("c") == [], "there is room again"


def test_a_full_queue_refuses_by_tokens() -> None:
    script = full_script(max_queued_tokens=20)
    assert script.submit("a", 12) == []
    assert script.submit("b", 9) == ["refuse 1: Overloaded"]
    assert script.submit("c", 8) == []
    assert script.state.stats().num_queued_tokens == 20
    assert script.submit("d", 1) == ["refuse 1: Overloaded"]


def test_an_empty_queue_takes_one_request_however_large() -> None:
    """Else it could never be served at all, although nobody is in its way."""
    script = full_script(max_queued_tokens=20, max_queued_requests=1)
    assert script.submit("large", 40) == []
    assert script.submit("b", 1) == ["refuse 1: Overloaded"]
    script = full_script(max_queued_requests=1)
    assert script.submit("n", 4, n=3, max_tokens=2) == []


def test_all_completions_of_a_submission_are_counted_and_refused_together() -> None:
    script = full_script(max_queued_requests=3)
    script.submit("a")
    assert script.submit("b", 4, n=3, max_tokens=2) == ["refuse 1: Overloaded"]
    assert script.submit("c", 4, n=2, max_tokens=2) == []


def test_what_was_taken_once_is_never_refused_when_it_comes_back() -> None:
    """Evicted, lost with its worker, or restored after the scheduler was lost."""
    script = full_script(max_queued_requests=1)
    script.submit("a")
    script.say(EvictRequested("runs"), WorkerExpected("w1", 16), WorkerLost("w0"))
    assert script.state.stats().num_waiting == 2
    assert script.state.live_ids() == ["runs", "a"]
    requests = [Request.decode(script.state.request(n).encode()) for n in script.state.live_ids()]
    again = Script(0, enable_offload=False, max_queued_requests=1, max_num_seqs=1)
    again.say(WorkerExpected("w1", 16), *(RequestRestored(r) for r in reversed(requests)))
    assert sorted(again.state.live_ids()) == ["a", "runs"]
    told = again.say(WorkerJoined(worker_info("w1")))
    assert told == ["w1 runs runs[0:8] new"], "in the old order"
    assert again.submit("b") == ["refuse 1: Overloaded"]


def test_the_same_submission_again_is_not_refused_by_a_full_queue() -> None:
    script = full_script(max_queued_requests=1)
    script.submit("a")
    assert script.submit("a") == []
    assert script.submit("runs", 30) == []


@pytest.mark.parametrize(
    ("num_queued", "computed", "seconds", "expected"),
    [(1000, 0, 0.0, 1.0), (1000, 100, 1.0, 1.0), (100_000, 100, 1.0, 60.0), (2000, 100, 10.0, 20)],
)
def test_a_retry_is_advised_when_a_tenth_of_the_queue_is_done(
    num_queued: int, computed: int, seconds: float, expected: float
) -> None:
    stats = SchedulerStats(num_computed_tokens=computed, compute_s=seconds)
    assert retry_after_s(num_queued, stats) == expected
