"""Steps that are sent before the last one is answered, by the core's messages alone.

Blocks hold 4 tokens, steps 8; two steps may be under way.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from scheduler.actions import CopyBlocks, RecordProgress
from scheduler.codec import int_array
from scheduler.errors import InvariantViolation, NumericalError
from scheduler.events import (
    BatchDone,
    CopyDone,
    EvictRequested,
    MigrateRequested,
    RequestCancelled,
    WorkerJoined,
    WorkerLost,
)
from scheduler.messages import ChunkResult, ModelRunnerOutput
from scheduler.request import RequestStatus
from tests.sim.script import EOS, Script, submitted, words, worker_info
from tests.strategies import logprobs


def ahead(**config: Any) -> Script:
    settings = {"max_steps_in_flight": 2, "enable_offload": False, "enable_prefix_caching": False}
    return Script(**{**settings, **config})


def test_a_prompt_is_sent_two_chunks_ahead() -> None:
    script = ahead()
    assert script.submit("a", 20, prompt_logprobs=1) == [
        "w0 runs a[0:8] rows=8 new",
        "w0 runs a[8:16] rows=8",
    ]
    assert script.computed() == ["w0 runs a[16:20] rows=3"]
    assert script.computed() == [], "nothing is left to send"
    assert script.computed() == ["tell a.0 rows=19 length", "w0 runs forget a"]
    assert script.state.stats().num_recomputed_rows == 0


def test_a_token_that_is_not_known_yet_is_named_as_the_last_one() -> None:
    """And nothing is sent past `max_tokens`."""
    script = ahead()
    assert script.submit("a", 5, max_tokens=4) == [
        "w0 runs a[0:5] sample new",
        "w0 runs a[5:6] last sample",
    ]
    told = "tell a.0 tokens=[7]"
    assert script.computed() == [told, "w0 runs a[6:7] last sample"]
    assert script.computed() == [told, "w0 runs a[7:8] last sample"]
    assert script.computed() == [told]
    assert script.computed() == ["tell a.0 tokens=[7] length", "w0 runs forget a"]


def test_nothing_is_sent_past_the_context() -> None:
    script = ahead(max_model_len=6)
    assert script.submit("a", 5, max_tokens=9) == [
        "w0 runs a[0:5] sample new",
        "w0 runs a[5:6] last sample",
    ]
    assert script.computed() == ["tell a.0 tokens=[7]"]
    assert script.computed() == ["tell a.0 tokens=[7] length", "w0 runs forget a"]


def test_what_was_computed_past_a_stop_token_is_dropped_and_its_blocks_wait_for_it() -> None:
    script = ahead()
    script.submit("a", 8, max_tokens=9)
    script.computed()
    assert script.state.stats().num_used_blocks == 3, "a[8:9] is under way, in a third block"
    assert script.computed(token=EOS) == ["tell a.0 tokens=[99] stop"]
    stats = script.state.stats()
    assert stats.num_used_blocks == 3, "the step that writes into them has not been answered"
    assert script.computed() == ["w0 runs forget a"]
    stats = script.state.stats()
    assert (stats.num_used_blocks, stats.num_generated_tokens) == (0, 2)
    assert stats.num_recomputed_tokens == 0


def test_a_newcomer_joins_the_step_after_the_next_and_everybody_stays_in_every_step() -> None:
    """Two groups that took turns would have half the batch each."""
    script = ahead()
    script.submit("a", 3, max_tokens=9)
    assert script.submit("b", 3, max_tokens=9) == []
    assert script.computed()[-1] == "w0 runs a[4:5] last sample, b[0:3] sample new"
    assert script.computed()[-1] == "w0 runs a[5:6] last sample, b[3:4] last sample"
    assert script.computed()[-1] == "w0 runs a[6:7] last sample, b[4:5] last sample"


def test_a_few_newcomers_wait_for_each_other_behind_a_step_and_many_do_not() -> None:
    script = ahead()
    script.submit("a", 8)
    assert script.submit("b", 3) == []
    assert script.submit("c", 3) == ["w0 runs b[0:3] new, c[0:3] new"]


def test_a_request_that_waits_for_a_block_of_another_reads_it_when_it_is_there() -> None:
    """Ten answers to one question come at once: the question is computed once."""
    script = ahead(enable_prefix_caching=True)
    both = script.say(submitted("a", 9, max_tokens=2), submitted("b", 10, max_tokens=1))
    assert both == ["w0 runs a[0:8] new", "w0 runs a[8:9] sample"]
    assert script.status("b") is RequestStatus.WAITING
    assert script.computed() == ["w0 runs a[9:10] last sample, b[8:10] sample new"]


@pytest.mark.parametrize("k", [1, 2])
def test_rows_that_are_about_to_be_computed_are_waited_for_like_kv(k: int) -> None:
    """The same question is scored with two answers; rows of another kind are of no use."""
    script = ahead(enable_prefix_caching=True)
    params = {"max_tokens": 0, "skip_reading_prefix_cache": False}
    a = submitted("a", 9, prompt_logprobs=1, **params)
    b = submitted("b", 11, prompt_logprobs=k, **params)
    script.say(a, b)
    is_alike = k == 1
    assert script.status("b") is (RequestStatus.WAITING if is_alike else RequestStatus.RUNNING)
    script.computed()
    if is_alike:
        assert words(script.steps[-1]) == "w0 runs b[7:11] rows=3 keeps 8 new"


def test_a_request_that_reads_no_cache_waits_for_nobody() -> None:
    script = ahead(enable_prefix_caching=True)
    params = {"max_tokens": 1, "skip_reading_prefix_cache": True}
    both = script.say(submitted("a", 9, **params), submitted("b", 10, **params))
    assert both == ["w0 runs a[0:8] new", "w0 runs a[8:9] sample, b[0:7] new"]


# ------------------------------------------------------------------------------------ failures


def test_a_step_that_raises_voids_what_continues_it() -> None:
    """What comes of the later step is not looked at, and both requests are tried apart."""
    script = ahead()
    script.say(submitted("a", 3, max_tokens=9), submitted("b", 3, max_tokens=9))
    assert script.batch_failed() == [], "the step sent ahead has to come back first"
    assert script.computed() == ["w0 runs forget a, forget b, a[0:3] sample new"]
    assert script.state.stats().num_generated_tokens == 0
    assert script.computed() == [
        "tell a.0 tokens=[7]",
        "w0 runs b[0:3] sample new",
    ], "nobody is sent ahead while one is under suspicion"


def test_a_request_that_fails_alone_takes_what_was_sent_ahead_with_it() -> None:
    script = ahead()
    script.say(submitted("a", 3, max_tokens=9), submitted("b", 3, max_tokens=9))
    done = script.batch_done()
    bad = ChunkResult("a", error=NumericalError("NaN").to_wire())
    output = ModelRunnerOutput(done.output.step_id, [bad, done.output.results[1]])
    assert script.say(BatchDone("w0", output)) == [
        "tell a.0 error NumericalError",
        "tell b.0 tokens=[7]",
        "w0 runs forget a, b[4:5] last sample",
    ]
    assert script.state.stats().num_used_blocks == 2 + 1, "a step still writes into a's block"
    script.computed()
    assert script.state.stats().num_used_blocks == 2


def test_a_worker_that_dies_loses_both_steps_and_everybody_in_them_is_suspect() -> None:
    script = ahead()
    script.say(submitted("a", 3, max_tokens=9), submitted("b", 3, max_tokens=9))
    script.say(WorkerJoined(worker_info("w1")))
    assert script.say(WorkerLost("w0", "killed")) == ["w1 runs a[0:3] sample new"]


def test_a_step_answered_before_its_turn_is_a_fault_of_the_engine() -> None:
    script = ahead()
    script.submit("a", 20)
    later = script.steps[1].output
    with pytest.raises(InvariantViolation, match="before its turn"):
        script.state.handle(BatchDone("w0", ModelRunnerOutput(later.step_id, [])))


# ------------------------------------------------------------------------- leaving meanwhile


def test_a_request_is_cancelled_and_its_blocks_are_free_after_the_last_step_that_has_it() -> None:
    script = ahead()
    script.submit("a", 16)
    assert script.say(RequestCancelled("a")) == ["tell a.0 abort"]
    script.computed()
    assert script.state.stats().num_used_blocks == 4
    assert script.computed() == ["w0 runs forget a"]
    assert script.state.stats().num_used_blocks == 0


def test_a_request_that_is_to_leave_is_not_sent_ahead() -> None:
    script = ahead()
    script.submit("a", 40, max_tokens=1)
    assert script.say(EvictRequested("a")) == []
    assert script.computed() == []
    assert script.computed() == ["w0 runs forget a, a[0:8] new", "w0 runs a[8:16]"]
    assert script.state.stats().num_evictions == 1


def test_the_last_blocks_of_a_move_are_copied_when_nothing_is_under_way() -> None:
    """What is computed is copied only once it is known to be so."""
    script = ahead(num_workers=2)
    script.submit("a", 3, max_tokens=20)
    script.computed()
    assert script.say(MigrateRequested("a", "w1")) == []
    assert script.computed() == ["tell a.0 tokens=[7]"]
    assert script.computed() == ["tell a.0 tokens=[7]", "copy 2 of a from w0 to w1"]
    assert script.say(CopyDone(script.last(CopyBlocks).op_id, 2)) == [
        "w0 runs forget a",
        "w1 runs a[5:6] sample new",
        "w1 runs a[6:7] last sample",
    ]


def test_the_journal_is_told_of_what_was_answered_only() -> None:
    script = ahead(enable_journal=True)
    script.submit("a", 20)
    script.computed()
    written = [a for a in script.actions if isinstance(a, RecordProgress)]
    assert [record.num_computed_tokens for record in written] == [8]


# ------------------------------------------------------------------ several tokens in a step


def grouped(**config: Any) -> Script:
    """A core that has seen how long a decode takes: a millisecond."""
    script = ahead(**{"max_decode_steps": 4, "max_steps_in_flight": 1, **config})
    script.submit("a", 3, max_tokens=20, logprobs=1)
    script.computed()
    assert script.computed(compute_s=0.001)[-1] == "w0 runs a[4:5] sample+3"
    return script


def test_a_step_brings_several_tokens_where_all_decode_and_nobody_waits() -> None:
    script = grouped()
    assert script.computed(compute_s=0.004) == [
        "tell a.0 tokens=[7, 7, 7, 7]",
        "w0 runs a[8:9] sample+3",
    ]
    stats = script.state.stats()
    assert (stats.num_generated_tokens, stats.num_recomputed_tokens) == (6, 0)
    assert stats.num_computed_tokens == 8


def test_a_group_is_sent_ahead_of_the_one_before_it() -> None:
    script = ahead(max_decode_steps=3)
    script.submit("a", 3, max_tokens=12)
    assert script.computed()[-1] == "w0 runs a[4:5] last sample"
    assert script.computed(compute_s=0.001)[-1] == "w0 runs a[5:6] last sample+2"
    assert script.computed(compute_s=0.001) == [
        "tell a.0 tokens=[7]",
        "w0 runs a[8:9] last sample+2",
    ]
    assert script.computed(compute_s=0.003)[-1] == "w0 runs a[11:12] last sample+2"
    assert script.computed() == ["tell a.0 tokens=[7, 7, 7]"], "all 12 are under way"
    assert script.computed() == ["tell a.0 tokens=[7, 7, 7] length", "w0 runs forget a"]


def test_nobody_is_asked_for_more_than_it_may_generate() -> None:
    script = ahead(max_decode_steps=8, max_steps_in_flight=1)
    script.say(submitted("a", 3, max_tokens=4), submitted("b", 3, max_tokens=9))
    script.computed()
    assert script.computed(compute_s=0.001)[-1] == "w0 runs a[4:5] sample+1, b[4:5] sample+6"


def test_slow_tokens_come_one_by_one() -> None:
    """A newcomer would have to wait for them."""
    script = grouped()
    assert script.computed(compute_s=4 * 0.09)[-1] == "w0 runs a[8:9] sample+2"
    assert script.computed(compute_s=3 * 0.18)[-1] == "w0 runs a[11:12] sample"


@pytest.mark.parametrize("who", ["waits", "computes its prompt"])
def test_tokens_come_one_by_one_while_somebody_waits_or_a_prompt_is_computed(who: str) -> None:
    script = grouped(max_num_seqs=1 if who == "waits" else 8)
    script.submit("b", 20)
    more = "" if who == "waits" else ", b[0:7] new"
    assert script.computed(compute_s=0.001)[-1] == f"w0 runs a[8:9] sample{more}"


def test_tokens_come_one_by_one_where_blocks_are_scarce() -> None:
    script = ahead(num_blocks=5, max_decode_steps=4, max_steps_in_flight=1)
    script.say(submitted("a", 3, max_tokens=9), submitted("b", 3, max_tokens=9))
    script.computed()
    assert script.computed(compute_s=0.001)[-1] == "w0 runs a[4:5] sample, b[4:5] sample"


def test_a_stop_token_in_the_middle_of_a_group_ends_the_request_there() -> None:
    script = grouped()
    done = script.batch_done()
    result = msgspec.structs.replace(
        done.output.results[0],
        more_token_ids=int_array([EOS]),
        sampled_logprobs=logprobs(2, 1),
    )
    output = ModelRunnerOutput(done.output.step_id, [result])
    assert script.say(BatchDone("w0", output)) == [
        "tell a.0 tokens=[7, 99] stop",
        "w0 runs forget a",
    ]
    assert script.state.stats().num_used_blocks == 0


@pytest.mark.parametrize("num_more", [0, 2, 4])
def test_a_worker_that_brings_too_few_tokens_or_too_many_fails_the_request(num_more: int) -> None:
    script = grouped()
    done = script.batch_done()
    result = msgspec.structs.replace(
        done.output.results[0],
        more_token_ids=int_array([7] * num_more),
        sampled_logprobs=logprobs(1 + num_more, 1),
    )
    told = script.say(BatchDone("w0", ModelRunnerOutput(done.output.step_id, [result])))
    assert told[0] == f"tell a.0 tokens={[7] * (1 + num_more)} error RequestFailed"


def test_the_journal_is_told_of_each_token_of_a_group() -> None:
    script = grouped(enable_journal=True)
    script.actions.clear()
    script.computed()
    written = [a for a in script.actions if isinstance(a, RecordProgress)]
    assert [record.num_computed_tokens for record in written] == [5, 6, 7, 8]
    assert [record.sampled_logprobs.num_rows for record in written] == [1] * 4
