"""Who is told about a request: clients that send it again, attach by its id, and go away."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from scheduler.actions import Emit, RunBatch
from scheduler.events import (
    ClientGone,
    ReplayRequested,
    RequestCancelled,
    RequestRestored,
    WorkerExpected,
    WorkerLost,
)
from scheduler.reports import whole_deltas
from scheduler.request import Request, RequestStatus
from scheduler.submissions import content_hash, submission_of
from tests.sim.script import Script, submitted


def followers(script: Script) -> set[str]:
    return {name for live in script.state._core.requests.values() for name in live.followers}


def test_the_same_submission_again_is_no_new_one() -> None:
    """The answer to a submission got lost, and the client sends it again: one request, not two."""
    script = Script(enable_offload=False)
    script.submit("a", 4, max_tokens=3)
    assert script.submit("a", 4, max_tokens=3) == [], "nothing is visible yet"
    assert script.computed() == ["tell a.0 tokens=[7]", "w0 runs a[4:5] sample"]
    assert script.state.live_ids() == ["a"]
    assert script.state.stats().num_prompt_tokens == 4


@pytest.mark.parametrize(
    "more",
    [
        {"num_tokens": 5},
        {"max_tokens": 4},
        {"seed": 1},
        {"priority": 1},
        {"prompt_logprobs": 1},
        {"n": 2},
    ],
)
def test_other_content_under_a_live_id_is_refused_and_the_first_goes_on(more) -> None:
    script = Script(enable_offload=False)
    first = {"num_tokens": 4, "max_tokens": 3}
    script.say(submitted("a", **first))
    assert script.say(submitted("a", **{**first, **more})) == ["refuse 1: DuplicateRequest"]
    assert script.computed() == ["tell a.0 tokens=[7]", "w0 runs a[4:5] sample"]


def test_a_time_limit_is_not_part_of_the_content() -> None:
    """A client that asks again after a restart asks for what is left of its patience."""
    script = Script(enable_offload=False)
    script.submit("a", 4, max_tokens=3, timeout_s=100.0)
    assert script.submit("a", 4, max_tokens=3, timeout_s=7.0, client_id="b") == []
    assert script.state.request("a").deadline_s == 100.0


def test_a_second_client_is_told_all_that_is_visible_and_what_follows() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 5, max_tokens=4, prompt_logprobs=1)
    script.computed(token=21)
    script.computed(token=22)
    told = script.submit("a", 5, max_tokens=4, prompt_logprobs=1, client_id="b")
    assert told == ["tell a.0 rows=4 tokens=[21, 22] (b)"]
    assert script.last(Emit).delta.num_previous_tokens == 0
    assert script.computed(token=23)[:2] == ["tell a.0 tokens=[23]", "tell a.0 tokens=[23] (b)"]
    assert script.last(Emit).delta.num_previous_tokens == 2


def test_a_client_attaches_by_id_alone_even_before_anything_is_visible() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 9, max_tokens=1)
    assert script.say(ReplayRequested("a", "b"), ReplayRequested("nobody", "b")) == []
    script.computed()
    assert script.computed()[:2] == ["tell a.0 tokens=[7] length", "tell a.0 tokens=[7] length (b)"]


def test_attaching_tells_of_every_completion_that_is_live() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 3, max_tokens=3, n=2)
    script.computed()
    assert script.say(ReplayRequested("a", "b")) == [
        "tell a.0 tokens=[7] (b)",
        "tell a.1 tokens=[7] (b)",
    ]
    assert script.say(ReplayRequested("a#1", "c")) == ["tell a.1 tokens=[7] (c)"]


@pytest.mark.parametrize("how", ["sends it again", "attaches"])
def test_who_comes_late_is_told_of_completions_that_have_ended_already(how: str) -> None:
    """One was cancelled, one was completed, one goes on. Nobody would ever tell of the first two
    again, and whoever waits for all of them would wait for ever."""
    script = Script(enable_offload=False)
    script.submit("a", 5, n=3, max_tokens=4, prompt_logprobs=1, stop_token_ids=(8,))
    script.computed()
    script.computed()
    script.say(RequestCancelled("a#0"))
    done = script.batch_done()
    results = [msgspec.structs.replace(r, sampled_token_id=8) for r in done.output.results]
    done.output.results[1] = results[1]
    script.say(done)
    assert script.state.live_ids() == ["a#2"]
    if how == "attaches":
        told = script.say(ReplayRequested("a", "b"))
    else:
        told = script.submit(
            "a", 5, n=3, max_tokens=4, prompt_logprobs=1, stop_token_ids=(8,), client_id="b"
        )
    assert told == [
        "tell a.0 rows=4 tokens=[7, 7] abort (b)",
        "tell a.1 tokens=[7, 8] stop (b)",
        "tell a.2 tokens=[7, 7] (b)",
    ]
    script.say(RequestCancelled("a"))
    assert script.submit("a", 5, client_id="b") == [], "nothing of the old ones is told"


def test_a_client_that_attaches_twice_is_told_everything_again_but_once_after_that() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 4, max_tokens=3)
    script.computed()
    assert script.say(ReplayRequested("a", "client")) == ["tell a.0 tokens=[7]"]
    assert script.computed()[0] == "tell a.0 tokens=[7]"
    assert followers(script) == {"client"}


# ------------------------------------------------------------------------------- clients that go


def test_a_request_is_cancelled_when_the_last_of_those_who_follow_it_goes() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 9, max_tokens=4)
    script.say(ReplayRequested("a", "b"))
    assert followers(script) == {"client", "b"}
    assert script.say(ClientGone("client")) == []
    assert followers(script) == {"b"}
    assert script.say(ClientGone("nobody")) == []
    assert script.say(ClientGone("b")) == []
    assert script.state.live_ids() == []
    assert script.state.stats().num_aborted == 1
    assert script.computed() == ["w0 runs forget a"]
    assert script.state.stats().num_used_blocks == 0


def test_a_client_that_goes_takes_only_its_own_requests_along() -> None:
    """Queued, running, and all completions of one."""
    script = Script(enable_offload=False, max_num_seqs=2)
    script.submit("runs", 9, max_tokens=4)
    script.submit("other", 9, max_tokens=4, client_id="b")
    script.submit("queued", 9)
    script.submit("n", 9, n=2, max_tokens=2)
    script.say(ClientGone("client"))
    assert script.state.live_ids() == ["other"]


def test_a_detached_request_goes_on_when_its_client_has_gone_and_can_be_followed_again() -> None:
    script = Script(enable_offload=False, enable_journal=True)
    told = script.submit("a", 4, max_tokens=3, detached=True)
    assert told == ["write submitted a", "w0 runs a[0:4] sample new"]
    script.say(ClientGone("client"))
    assert followers(script) == set()
    assert script.computed() == ["write progress a", "w0 runs a[4:5] sample"]
    assert script.say(ReplayRequested("a", "b")) == ["tell a.0 tokens=[7] (b)"]
    script.computed()
    assert "tell a.0 tokens=[7] length (b)" in script.computed()
    assert script.state.live_ids() == []


def test_a_detached_request_needs_a_journal_to_leave_its_result_in() -> None:
    assert Script().submit("a", 4, detached=True) == ["refuse 1: InvalidRequest"]


# ----------------------------------------------------------------------------- after a restart


def restored(script: Script, name: str, **config: object) -> Script:
    """A new scheduler that has found the request in the journal, and no worker yet."""
    request = Request.decode(script.state.request(name).encode())
    request.status = RequestStatus.WAITING
    again = Script(0, enable_offload=False, **config)
    again.say(WorkerExpected("w0", 16), RequestRestored(request))
    return again


def test_a_restored_request_knows_its_client_and_the_same_submission_finds_it() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 5, max_tokens=4, prompt_logprobs=1)
    script.computed(token=21)
    again = restored(script, "a")
    assert followers(again) == {"client"}
    told = again.submit("a", 5, max_tokens=4, prompt_logprobs=1, client_id="b")
    assert told == [], "what is visible comes with the next token"
    assert again.submit("a", 6, max_tokens=4) == ["refuse 1: DuplicateRequest"]
    assert followers(again) == {"client", "b"}
    assert again.say(WorkerLost("w0"), RequestRestored(again.state.request("a"))) == []
    assert again.state.live_ids() == ["a"], "restored twice is once"


def test_what_was_submitted_can_be_told_from_any_of_its_requests() -> None:
    """A client that compares what it attaches to with what it would have sent."""
    script = Script(enable_offload=False)
    event = submitted("a", 4, max_tokens=3, n=3, seed=5, prompt_logprobs=1)
    script.say(event)
    for name in ("a", "a#0", "a#2"):
        found = script.state.submission(name)
        assert content_hash(found) == content_hash(event.submission)
    assert submission_of(script.state.request("a#2")).seed == 5
    assert script.state.submission("nobody") is None


def test_a_whole_result_shows_what_the_deltas_showed() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 5, max_tokens=2, prompt_logprobs=1)
    request = script.state.request("a")
    (unfinished,) = whole_deltas(request)
    assert unfinished.prompt_logprobs is None, "nothing before the prompt is done"
    script.computed(token=21)
    script.computed(token=22)
    deltas = [a.delta for a in script.actions if isinstance(a, Emit)]
    (whole,) = whole_deltas(request)
    tokens = np.concatenate([d.new_token_ids for d in deltas])
    assert whole.new_token_ids.tolist() == tokens.tolist() == [21, 22]
    assert whole.prompt_logprobs.same_bits(deltas[0].prompt_logprobs)
    assert (whole.finish_reason, whole.stats) == (deltas[-1].finish_reason, deltas[-1].stats)


def test_a_failed_request_shows_no_rows_in_its_whole_result_either() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 5, max_tokens=3, prompt_logprobs=1, timeout_s=1.0)
    script.computed()
    request = script.state.request("a")
    script.submit("b", 3, time_s=2.0)
    (whole,) = whole_deltas(request)
    assert whole.error is not None
    assert whole.prompt_logprobs is None


def test_a_cancelled_id_can_be_used_again_with_other_content() -> None:
    script = Script(enable_offload=False)
    script.submit("a", 4, max_tokens=3)
    script.say(RequestCancelled("a"))
    assert script.submit("a", 6, max_tokens=3, client_id="b") == []
    script.computed()
    run = script.last(RunBatch)
    assert [len(c.token_ids) for c in run.output.chunks] == [6]
