"""The core by its messages alone: what happens, and what it then asks for.

Each test tells a story from real life as events and compares the actions, in short words, with
those that must come of it. Blocks hold 4 tokens, steps 8.
"""

from __future__ import annotations

import pytest

from scheduler.actions import CopyBlocks, LoadBlocks, LookupBlocks, SaveBlocks
from scheduler.errors import InvalidConfig, InvariantViolation, NumericalError
from scheduler.events import (
    BatchDone,
    CopyDone,
    DrainRequested,
    EvictRequested,
    LoadDone,
    LoadFailed,
    LookupDone,
    MigrateRequested,
    RequestCancelled,
    SaveDone,
    SaveFailed,
    StoreLost,
    WorkerExpected,
    WorkerJoined,
    WorkerLost,
)
from scheduler.messages import ChunkResult, ModelRunnerOutput, WorkerInfo
from scheduler.request import RequestStatus
from tests.sim.script import EOS, Script, submitted, worker_info

# -------------------------------------------------------------------------------- one request


def test_a_prompt_goes_chunk_by_chunk_and_is_visible_when_it_is_done() -> None:
    """A user scores 17 tokens on a worker that takes 8 at a time: one answer, of 16 rows."""
    script = Script()
    assert script.submit("a", 17, prompt_logprobs=1) == ["w0 runs a[0:8] rows=8 new"]
    assert script.computed() == ["w0 runs a[8:16] rows=8"]
    assert script.computed() == ["w0 runs a[16:17]"]
    assert script.computed() == [
        "release a for ever",
        "tell a.0 rows=16 length",
        "w0 runs forget a",
    ]


def test_generated_tokens_are_told_one_by_one_until_a_stop_token() -> None:
    script = Script()
    assert script.submit("a", 5, max_tokens=4, skip_reading_prefix_cache=True) == [
        "w0 runs a[0:5] sample new"
    ]
    assert script.computed() == ["tell a.0 tokens=[7]", "w0 runs a[5:6] sample"]
    assert script.computed(token=EOS) == [
        "release a for ever",
        "tell a.0 tokens=[99] stop",
        "w0 runs forget a",
    ]


def test_decodes_go_before_prefill_chunks_within_one_budget() -> None:
    """A long prompt arrives while somebody is being answered: the answer does not stall."""
    script = Script(enable_prefix_caching=False, enable_offload=False)
    script.submit("a", 5, max_tokens=9)
    script.submit("b", 20, max_tokens=1)
    assert script.computed() == ["tell a.0 tokens=[7]", "w0 runs a[5:6] sample, b[0:7] new"]
    assert script.computed() == ["tell a.0 tokens=[7]", "w0 runs a[6:7] sample, b[7:14]"]


def test_requests_beyond_max_num_seqs_wait_in_order() -> None:
    script = Script(enable_offload=False, max_num_seqs=1)
    script.submit("a", 5)
    assert script.submit("b", 5) == script.submit("c", 5) == []
    assert script.computed() == ["tell a.0 length", "w0 runs forget a, b[4:5] new"]
    assert script.status("c") is RequestStatus.WAITING


def test_finished_requests_leave_their_full_blocks_in_the_store() -> None:
    script = Script(save_finished=True)
    script.submit("a", 9, skip_reading_prefix_cache=True)
    script.computed()
    assert script.computed() == [
        "save 2 of a",
        "release a for ever",
        "tell a.0 length",
        "w0 runs forget a",
    ]
    assert script.state.stats().num_used_blocks == 2, "held until the save is done"
    script.say(SaveDone(script.last(SaveBlocks).op_id, 2, 2))
    assert script.state.stats().num_used_blocks == 0


# ---------------------------------------------------------------------------- the offload store


def test_a_request_asks_the_store_waits_for_the_load_and_computes_the_rest() -> None:
    script = Script()
    assert script.submit("a", 13) == ["look up 3 for a: shared 12, own 0"]
    assert script.say(LookupDone(script.last(LookupBlocks).op_id, 8)) == ["load 2 for a on w0"]
    assert script.status("a") is RequestStatus.LOADING
    assert script.say(LoadDone(script.last(LoadBlocks).op_id, 2)) == [
        "release a",
        "w0 runs a[8:13] new",
    ]


@pytest.mark.parametrize("is_failure", [False, True])
def test_what_a_load_does_not_bring_is_computed(is_failure: bool) -> None:
    """The store promised three blocks, and the node that had them went away in the middle."""
    script = Script()
    script.submit("a", 13)
    script.say(LookupDone(script.last(LookupBlocks).op_id, 12))
    op_id = script.last(LoadBlocks).op_id
    event = LoadFailed(op_id, "gone") if is_failure else LoadDone(op_id, 1)
    start, end = (0, 8) if is_failure else (4, 12)
    assert script.say(event) == ["release a", f"w0 runs a[{start}:{end}] new"]


def test_a_request_that_wants_rows_asks_the_store_for_nothing() -> None:
    """Blocks of others carry no rows. The bypass is no lookup in the hit rate either."""
    script = Script()
    assert script.submit("a", 13, prompt_logprobs=1) == ["w0 runs a[0:8] rows=8 new"]
    stats = script.state.stats()
    assert (stats.num_cache_bypasses, stats.num_store_queries) == (1, 0)
    assert stats.num_worker_cache_queries == 0


def test_a_store_that_promises_more_than_was_asked_for_is_not_believed() -> None:
    script = Script()
    script.submit("a", 7, max_tokens=1)
    assert script.say(LookupDone(script.last(LookupBlocks).op_id, 8)) == ["load 1 for a on w0"]


def test_the_last_token_is_computed_where_all_is_in_the_store_and_its_kv_is_left_alone() -> None:
    """Its logits are what the user wants."""
    script = Script()
    assert script.submit("a", 8, max_tokens=1) == ["look up 2 for a: shared 8, own 0"]
    assert script.say(LookupDone(script.last(LookupBlocks).op_id, 8)) == ["load 2 for a on w0"]
    assert script.say(LoadDone(script.last(LoadBlocks).op_id, 2)) == [
        "release a",
        "w0 runs a[7:8] keeps 8 sample new",
    ]
    assert "tell a.0 tokens=[7] length" in script.computed()


# ------------------------------------------------------------------------- eviction and resuming


def test_an_evicted_request_saves_its_full_blocks_and_reads_only_its_own_back() -> None:
    """Evicted between chunks: no row is asked for twice, less than one block is recomputed."""
    script = Script()
    script.submit("a", 17, prompt_logprobs=1, skip_reading_prefix_cache=True)
    assert script.say(EvictRequested("a")) == [], "a chunk is under way"
    assert script.computed() == ["save 2 of a owned replace"]
    assert script.status("a") is RequestStatus.SAVING
    assert script.say(SaveDone(script.last(SaveBlocks).op_id, 2, 2)) == [
        "look up 2 for a: shared 0, own 8, skip",
        "w0 runs forget a",
    ]
    script.computed()
    assert script.say(LookupDone(script.last(LookupBlocks).op_id, 8)) == ["load 2 for a on w0"]
    assert script.say(LoadDone(script.last(LoadBlocks).op_id, 2)) == [
        "release a",
        "w0 runs a[8:16] rows=8 new",
    ]


def test_a_save_that_fails_costs_kv_and_no_row() -> None:
    script = Script()
    script.submit("a", 17, prompt_logprobs=1, skip_reading_prefix_cache=True)
    script.say(EvictRequested("a"))
    script.computed()
    script.say(SaveFailed(script.last(SaveBlocks).op_id, "disk full"))
    script.computed()
    assert script.say(LookupDone(script.last(LookupBlocks).op_id, 0)) == [
        "release a",
        "w0 runs a[0:8] new",
    ]
    assert script.computed() == ["w0 runs a[8:16] rows=8"]
    assert script.state.stats().num_recomputed_rows == 0


def test_a_request_evicted_while_it_loads_computes_a_chunk_and_goes() -> None:
    """Its blocks are being written: nobody else may have them before. And every stay on a worker
    brings it further, however often it is evicted."""
    script = Script()
    script.submit("a", 25)
    script.say(LookupDone(script.last(LookupBlocks).op_id, 12))
    assert script.say(EvictRequested("a")) == []
    assert script.state.stats().num_used_blocks == 7
    assert script.say(LoadDone(script.last(LoadBlocks).op_id, 3)) == [
        "release a",
        "w0 runs a[12:20] new",
    ]
    assert script.computed() == ["save 5 of a owned"]


def test_an_eviction_asked_for_during_the_lookup_waits_for_the_first_chunk_too() -> None:
    script = Script()
    script.submit("a", 13)
    script.say(EvictRequested("a"))
    assert script.say(LookupDone(script.last(LookupBlocks).op_id, 0)) == [
        "release a",
        "w0 runs a[0:8] new",
    ]
    assert script.computed() == ["save 2 of a owned"]


def test_a_decode_without_a_block_waits_for_older_ones_and_evicts_younger_ones() -> None:
    """Two answers grow into the last block: the older one gets it, and then the other's too."""
    script = Script(
        num_blocks=5, enable_prefix_caching=False, enable_offload=False, max_num_batched_tokens=16
    )
    script.say(submitted("a", 7, max_tokens=10), submitted("b", 7, max_tokens=6))
    assert script.computed()[-1] == "w0 runs a[7:8] sample, b[7:8] sample"
    assert script.computed()[-1] == "w0 runs a[8:9] sample", "b may evict nobody"
    for _ in range(3):
        script.computed()
        assert script.status("b") is RequestStatus.RUNNING
    assert script.computed()[-1] == "w0 runs forget b, a[12:13] sample"
    assert script.status("b") is RequestStatus.WAITING


def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    script = Script(num_blocks=4, enable_offload=False, row_cache_bytes=0)
    script.submit("low", 12, priority=1, prompt_logprobs=1)
    assert script.submit("equal", 12, priority=1, prompt_logprobs=1) == []
    script.submit("high", 12, priority=0, prompt_logprobs=1)
    assert script.computed() == ["w0 runs forget low, high[0:8] rows=8 new"]
    assert script.status("low") is RequestStatus.WAITING
    assert script.state.request("low").prompt_logprobs.num_rows == 8


# ------------------------------------------------------------------------------------ cancelling


def test_a_request_cancelled_in_the_middle_of_a_step_keeps_its_blocks_until_it_ends() -> None:
    """The worker still writes there. The late result is nobody's."""
    script = Script()
    script.submit("a", 17, prompt_logprobs=1)
    assert script.say(RequestCancelled("a")) == ["release a for ever", "tell a.0 abort"]
    assert script.state.stats().num_used_blocks == 5
    assert script.computed() == ["w0 runs forget a"]
    assert script.state.stats().num_used_blocks == 0


def test_a_request_cancelled_while_it_loads_gives_its_blocks_back_after_the_load() -> None:
    script = Script()
    script.submit("a", 13)
    script.say(LookupDone(script.last(LookupBlocks).op_id, 12))
    assert script.say(RequestCancelled("a")) == ["release a for ever", "tell a.0 abort"]
    assert script.state.stats().num_used_blocks == 4
    assert script.say(LoadDone(script.last(LoadBlocks).op_id, 3)) == []
    assert script.state.stats().num_used_blocks == 0


def test_a_request_cancelled_while_it_saves_gives_its_blocks_back_after_the_save() -> None:
    script = Script()
    script.submit("a", 17, prompt_logprobs=1)
    script.say(EvictRequested("a"))
    script.computed()
    assert script.say(RequestCancelled("a")) == [
        "release a for ever",
        "tell a.0 abort",
        "w0 runs forget a",
    ]
    assert script.state.stats().num_used_blocks == 2
    script.say(SaveDone(script.last(SaveBlocks).op_id, 2, 2))
    assert script.state.stats().num_used_blocks == 0


def test_an_id_used_again_while_the_old_step_runs_is_another_request() -> None:
    """A client gives up and tries again at once: the old result must not land on the new one."""
    script = Script(max_num_seqs=4)
    script.submit("a", 17, prompt_logprobs=1)
    script.say(RequestCancelled("a"))
    assert script.submit("a", 9, prompt_logprobs=1) == []
    assert script.computed() == ["w0 runs forget a, a[0:8] rows=8 new"]
    assert script.state.request("a").num_computed_tokens == 0


def test_cancelling_what_nobody_knows_does_nothing() -> None:
    assert Script().say(RequestCancelled("a"), EvictRequested("b")) == []


# ----------------------------------------------------------------------- failures and lost workers


def test_a_step_that_raises_is_tried_one_by_one_and_the_one_at_fault_fails() -> None:
    script = Script(enable_offload=False)
    script.say(submitted("a", 3), submitted("b", 3, prompt_logprobs=1))
    assert script.batch_failed() == ["w0 runs forget a, forget b, a[0:3] new"]
    assert script.computed() == ["tell a.0 length", "w0 runs forget a, b[0:3] rows=2 new"]
    assert script.batch_failed() == ["tell b.0 error RequestFailed", "w0 runs forget a, forget b"]


def test_who_is_left_of_a_failed_step_after_a_cancellation_is_not_blamed_for_it() -> None:
    """The one at fault may be the one whose client hung up while the step ran."""
    script = Script(enable_offload=False)
    script.say(submitted("a", 3), submitted("b", 3))
    script.say(RequestCancelled("a"))
    assert script.batch_failed() == ["w0 runs forget a, forget b, b[0:3] new"]
    assert script.computed()[0] == "tell b.0 length"


def test_nan_fails_one_request_and_nothing_of_its_chunk_is_cached_or_saved() -> None:
    script = Script(save_finished=True)
    params = {"prompt_logprobs": 1, "skip_reading_prefix_cache": True}
    script.say(submitted("a", 4, **params), submitted("b", 4, **params))
    done = script.batch_done()
    bad = ChunkResult("a", error=NumericalError("NaN").to_wire())
    output = ModelRunnerOutput(done.output.step_id, [bad, done.output.results[1]])
    assert script.say(BatchDone("w0", output)) == [
        "release a for ever",
        "tell a.0 error NumericalError",
        "save 1 of b",
        "release b for ever",
        "tell b.0 rows=3 length",
        "w0 runs forget a, forget b",
    ]


@pytest.mark.parametrize("fault", ["no rows", "no result"])
def test_an_answer_that_lacks_something_fails_its_request_and_not_the_engine(fault: str) -> None:
    """A half-filled field must never reach what all requests share."""
    script = Script()
    script.say(submitted("a", 3, prompt_logprobs=1), submitted("b", 3, prompt_logprobs=1))
    done = script.batch_done()
    results = [done.output.results[1]]
    if fault == "no rows":
        results.append(ChunkResult("a"))
    told = script.say(BatchDone("w0", ModelRunnerOutput(done.output.step_id, results)))
    assert "tell a.0 error RequestFailed" in told
    assert "tell b.0 rows=2 length" in told


def test_a_lost_worker_costs_kv_and_no_row() -> None:
    script = Script(num_workers=2)
    script.submit("a", 17, prompt_logprobs=1, skip_reading_prefix_cache=True)
    script.computed()
    assert script.say(WorkerLost("w0", "killed")) == ["look up 2 for a: shared 0, own 8, skip"]
    assert script.say(LookupDone(script.last(LookupBlocks).op_id, 0)) == [
        "release a",
        "w1 runs a[0:8] new",
    ]
    assert script.computed("w1") == ["w1 runs a[8:16] rows=8"]


def test_what_a_lost_worker_answers_late_is_ignored() -> None:
    script = Script(num_workers=2)
    script.submit("a", 9, prompt_logprobs=1)
    late = script.batch_done("w0")
    script.say(WorkerLost("w0"))
    assert script.say(late, WorkerLost("w0")) == []
    assert script.state.request("a").num_computed_tokens == 0


def test_the_last_worker_lost_ends_everything_and_refuses_what_comes() -> None:
    script = Script()
    script.submit("a", 9)
    assert script.say(WorkerLost("w0")) == [
        "release a for ever",
        "tell a.0 error EngineUnavailable",
    ]
    assert script.submit("b", 9) == ["refuse 1: EngineUnavailable"]


def test_a_request_that_no_worker_left_can_hold_ends() -> None:
    script = Script(num_workers=0)
    script.say(WorkerJoined(worker_info("big", 16)), WorkerJoined(worker_info("small", 2)))
    script.submit("a", 30, prompt_logprobs=1)
    assert script.say(WorkerLost("big")) == [
        "release a for ever",
        "tell a.0 error RequestTooLarge",
    ]


def test_an_answer_to_an_operation_that_is_over_is_ignored() -> None:
    script = Script()
    assert script.say(LookupDone(5, 8), LoadDone(6, 1), SaveDone(7, 1), SaveFailed(8, "x")) == []


@pytest.mark.parametrize("info", [worker_info("w0"), worker_info("w9", block_size=8)])
def test_a_worker_that_does_not_fit_in_is_refused(info: WorkerInfo) -> None:
    with pytest.raises(InvalidConfig):
        Script().say(WorkerJoined(info))


# ----------------------------------------------------------------------------------- choices


def test_a_request_goes_where_its_prefix_is_unless_that_worker_is_busy() -> None:
    script = Script(num_workers=2, enable_offload=False, max_num_batched_tokens=64)
    script.submit("a", 9)
    script.computed("w0")
    script.computed("w0")
    assert script.submit("b", 40) == ["w0 runs b[8:40] new"]
    assert script.submit("c", 9) == ["w1 runs c[0:9] new"]


def test_work_is_spread_over_idle_workers() -> None:
    script = Script(num_workers=2)
    ran = script.say(*(submitted(name, 8, prompt_logprobs=1) for name in "ab"))
    assert ran == ["w0 runs a[0:8] rows=7 new", "w1 runs b[0:8] rows=7 new"]


# -------------------------------------------------------------------------------- submissions


def test_a_live_id_given_again_is_refused_and_the_first_is_untouched() -> None:
    """In one message, and later."""
    script = Script()
    first = submitted("a", 9, ticket=1, prompt_logprobs=1)
    told = script.say(first, submitted("a", 5, ticket=2))
    assert told == ["refuse 2: DuplicateRequest", "w0 runs a[0:8] rows=8 new"]
    assert script.say(submitted("a", 5, ticket=3)) == ["refuse 3: DuplicateRequest"]
    assert script.computed() == ["w0 runs a[8:9]"]


def test_one_bad_submission_in_a_message_leaves_the_others_alone() -> None:
    script = Script()
    told = script.say(submitted("a", 0, ticket=1), submitted("b", 3, ticket=2, prompt_logprobs=1))
    assert told == ["refuse 1: InvalidRequest", "w0 runs b[0:3] rows=2 new"]


def test_a_request_tells_its_story() -> None:
    script = Script()
    script.submit("a", 9, prompt_logprobs=1)
    info = script.state.request_infos(3.0)[0]
    assert (info.request_id, info.worker_id, info.status) == ("a", "w0", RequestStatus.RUNNING)
    assert (info.num_prompt_tokens, info.num_computed_tokens, info.num_blocks) == (9, 0, 3)


def test_a_block_held_twice_is_found_by_validate() -> None:
    script = Script()
    script.submit("a", 9, prompt_logprobs=1)
    live = script.state._core.requests["a"]
    live.block_ids.append(live.block_ids[0])
    with pytest.raises(InvariantViolation, match="a block twice"):
        script.state.validate()


# ------------------------------------------------------------- moving, draining, saving on the way


def test_a_decoding_request_moves_while_it_goes_on_and_stands_still_for_its_last_block() -> None:
    """An operator wants it elsewhere: 17 tokens are 4 full blocks and the beginning of one."""
    script = Script(enable_offload=False, max_num_batched_tokens=32)
    script.submit("a", 17, max_tokens=9)
    script.computed()
    script.say(WorkerJoined(worker_info("w1")))
    assert script.say(MigrateRequested("a", "w1")) == ["copy 4 of a from w0 to w1"]
    assert script.computed() == ["tell a.0 tokens=[7]", "w0 runs a[18:19] sample"]
    assert script.say(CopyDone(script.last(CopyBlocks).op_id, 4)) == [], "a step is under way"
    assert script.computed() == ["tell a.0 tokens=[7]", "copy 1 of a from w0 to w1"]
    assert script.say(CopyDone(script.last(CopyBlocks).op_id, 1)) == [
        "w0 runs forget a",
        "w1 runs a[19:20] sample new",
    ]
    used = {r.worker_id: r.num_used_blocks for r in script.state.worker_reports()}
    assert used == {"w0": 0, "w1": 5}


@pytest.mark.parametrize("num_copied", [0, 3])
def test_a_copy_that_fails_leaves_the_request_where_it_is(num_copied: int) -> None:
    script = Script(enable_offload=False, max_num_batched_tokens=32)
    script.submit("a", 17, max_tokens=9)
    script.computed()
    script.say(WorkerJoined(worker_info("w1")), MigrateRequested("a", "w1"))
    assert script.say(CopyDone(script.last(CopyBlocks).op_id, num_copied)) == []
    assert script.computed() == ["tell a.0 tokens=[7]", "w0 runs a[18:19] sample"]
    used = {r.worker_id: r.num_used_blocks for r in script.state.worker_reports()}
    assert used == {"w0": 5, "w1": 0}
    assert script.state.stats().num_migrations_failed == 1


def test_a_request_whose_worker_dies_in_the_middle_of_its_move_is_queued_and_not_moved() -> None:
    """The blocks that were being written keep their place until the copy has ended."""
    script = Script(enable_offload=False, max_num_batched_tokens=32)
    script.submit("a", 17, max_tokens=9)
    script.computed()
    script.say(WorkerJoined(worker_info("w1")), MigrateRequested("a", "w1"))
    assert script.say(WorkerLost("w0")) == ["w1 runs a[0:18] sample new"]
    assert script.state.stats().num_used_blocks == 5 + 5
    assert script.say(CopyDone(script.last(CopyBlocks).op_id, 0)) == []
    assert script.state.stats().num_used_blocks == 5


def test_a_step_that_fails_during_a_move_is_tried_again_without_the_one_that_stands_still() -> None:
    """It was in the batch too, and is first in order; the others do not wait for its copy."""
    script = Script(enable_prefix_caching=False, enable_offload=False, max_num_batched_tokens=32)
    script.say(submitted("a", 6, max_tokens=9), submitted("b", 6, max_tokens=9))
    script.computed()
    script.say(WorkerJoined(worker_info("w1")), MigrateRequested("a", "w1"))
    assert script.batch_failed() == [
        "copy 2 of a from w0 to w1",
        "w0 runs forget a, forget b, b[6:7] sample new",
    ]
    assert script.say(CopyDone(script.last(CopyBlocks).op_id, 2)) == ["w1 runs a[6:7] sample new"]


def test_a_drained_worker_is_stopped_when_its_last_request_has_left() -> None:
    script = Script(enable_offload=False, max_num_batched_tokens=32)
    script.submit("a", 6, max_tokens=9)
    script.computed()
    script.say(WorkerJoined(worker_info("w1")))
    assert script.say(DrainRequested("w0", 60.0)) == [], "its step is waited for"
    assert script.computed() == ["tell a.0 tokens=[7]", "copy 2 of a from w0 to w1"]
    assert script.say(CopyDone(script.last(CopyBlocks).op_id, 2)) == [
        "stop w0",
        "w1 runs a[7:8] sample new",
    ]


def test_a_draining_worker_waits_for_the_copies_that_write_into_it() -> None:
    """They were meant for a request that does not come any more."""
    script = Script(enable_offload=False, max_num_batched_tokens=32)
    script.submit("a", 17, max_tokens=9)
    script.computed()
    script.say(WorkerJoined(worker_info("w1")), MigrateRequested("a", "w1"))
    assert script.say(DrainRequested("w1", 60.0)) == []
    assert script.say(CopyDone(script.last(CopyBlocks).op_id, 4)) == ["stop w1"]


def test_a_long_prompt_is_saved_in_segments_while_it_is_computed() -> None:
    """Each save begins when a segment is there and the one before it is done."""
    script = Script(save_segment_tokens=8)
    script.submit("a", 33, prompt_logprobs=1, skip_reading_prefix_cache=True)
    assert script.computed() == ["save 2 of a owned replace", "w0 runs a[8:16] rows=8"]
    assert script.computed() == ["w0 runs a[16:24] rows=8"], "the first one is under way"
    assert script.say(SaveDone(script.last(SaveBlocks).op_id, 2, 2)) == []
    assert script.computed() == ["save 4 of a owned replace", "w0 runs a[24:32] rows=8"]
    script.say(WorkerJoined(worker_info("w1")))
    assert script.say(WorkerLost("w0"), SaveFailed(script.last(SaveBlocks).op_id, "gone")) == [
        "look up 6 for a: shared 0, own 24, skip"
    ]
    assert script.say(LookupDone(script.last(LookupBlocks).op_id, 8)) == ["load 2 for a on w1"]
    assert script.say(LoadDone(script.last(LoadBlocks).op_id, 2)) == [
        "release a",
        "w1 runs a[8:16] new",
    ]


def test_a_save_answered_by_a_store_that_is_gone_counts_for_nothing() -> None:
    """The answer was on its way when the store died: what it speaks of is not there any more."""
    script = Script(save_segment_tokens=8)
    script.submit("a", 49, prompt_logprobs=1, skip_reading_prefix_cache=True)
    script.computed()
    script.say(SaveDone(script.last(SaveBlocks).op_id, 2, 2))
    script.computed()
    late = script.last(SaveBlocks).op_id
    script.say(StoreLost(), SaveDone(late, 2, 2))
    assert script.computed() == ["save 6 of a owned replace", "w0 runs a[24:32] rows=8"]


def test_a_lone_request_is_given_up_when_five_workers_in_a_row_have_died_of_it() -> None:
    script = Script(5, enable_offload=False)
    script.submit("a", 17)
    script.computed()
    assert script.say(WorkerLost("w0")) == ["w1 runs a[0:8] new"]
    assert script.computed("w1") == ["w1 runs a[8:16]"], "the way back there clears nobody"
    assert script.say(WorkerLost("w1")) == ["w2 runs a[0:8] new"]
    assert script.say(WorkerLost("w2")) == ["w3 runs a[0:8] new"]
    assert script.say(WorkerLost("w3")) == ["w4 runs a[0:8] new"]
    assert script.say(WorkerLost("w4"))[0] == "tell a.0 error RequestFailed"


def test_the_journal_is_told_of_a_request_its_progress_and_its_end_in_that_order() -> None:
    script = Script(enable_offload=False, enable_journal=True)
    assert script.submit("a", 9) == ["write submitted a", "w0 runs a[0:8] new"]
    assert script.computed() == ["write progress a", "w0 runs a[8:9]"]
    script.say(WorkerExpected("w1", 16), WorkerLost("w0"))
    script.say(WorkerJoined(worker_info("w1")))
    assert script.computed("w1") == ["w1 runs a[8:9]"], "made before, and written"
    assert script.computed("w1")[:3] == ["write progress a", "write finished a", "tell a.0 length"]


def test_the_load_is_what_is_due_who_is_busy_and_how_long_the_first_has_waited() -> None:
    script = Script(2, enable_offload=False, max_num_seqs=1)
    load = script.state.load(10.0)
    assert (load.num_tokens_to_do, load.waited_s) == (0, 0.0)
    assert load.is_busy == {"w0": False, "w1": False}
    script.submit("a", 17)
    script.computed()
    load = script.state.load(10.0)
    assert (load.num_tokens_to_do, load.num_computed_tokens) == (9, 8)
    assert load.is_busy == {"w0": True, "w1": False}
    script.submit("b", 20)
    script.submit("c", 5, time_s=4.0)
    load = script.state.load(10.0)
    assert (load.num_tokens_to_do, load.waited_s) == (34, 6.0)
    script.say(DrainRequested("w1", 60.0))
    assert script.state.load(10.0).is_busy == {"w0": True}


def test_a_request_that_was_evicted_has_not_waited_since_it_came() -> None:
    script = Script(save_segment_tokens=0, enable_offload=False, max_num_seqs=1)
    script.submit("a", 17)
    script.computed()
    script.submit("b", 5, time_s=50.0)
    script.say(WorkerExpected("w1", 16), WorkerLost("w0"))
    assert script.status("a") is RequestStatus.WAITING
    assert script.state.load(99.0).waited_s == 0.0
