"""The scheduler's choices by themselves: whom to admit where, whom to evict, when to stop."""

from __future__ import annotations

from typing import Any

import pytest

from offload_store.keys import HashChain
from scheduler import acceptance, policy
from scheduler.block_pool import BlockPool
from scheduler.codec import int_array
from scheduler.config import SchedulerConfig
from scheduler.live import LiveRequest, Migration, WorkerView
from scheduler.messages import Submission, WorkerInfo
from scheduler.placement import choose_worker
from scheduler.request import FinishReason, Request, RequestStatus
from scheduler.roster import Roster
from scheduler.sampling_params import SamplingParams

BLOCK_SIZE = 4
EOS = 9
CONFIG = SchedulerConfig(
    block_size=BLOCK_SIZE, max_num_batched_tokens=8, max_model_len=40, vocab_size=50
)


def accept(num_tokens: int, num_blocks: int = 100, **params: Any) -> list[Request]:
    submission = Submission("a", int_array([1] * num_tokens), SamplingParams(**params), 0)
    return acceptance.accept(submission, CONFIG, num_blocks, "client")


def live_request(
    arrival: int, num_tokens: int = 8, *, priority: int = 0, **params: Any
) -> LiveRequest:
    request = accept(num_tokens, **params)[0]
    request.request_id, request.arrival, request.priority = f"r{arrival}", arrival, priority
    request.eos_token_ids = (EOS,)
    return LiveRequest(request, 0.0, HashChain("", None, BLOCK_SIZE), BLOCK_SIZE)


def worker(name: str = "w0", num_blocks: int = 16) -> WorkerView:
    info = WorkerInfo(name, "cpu", num_blocks, BLOCK_SIZE, 64, 50, 40, (EOS,), "model")
    return WorkerView(info, BlockPool(num_blocks, BLOCK_SIZE))


def settle(view: WorkerView, live: LiveRequest, num_blocks: int) -> LiveRequest:
    live.request.status = RequestStatus.RUNNING
    live.worker, live.block_ids = view, view.pool.allocate(num_blocks)
    view.residents[live.id] = live
    return live


def roster(*workers: WorkerView) -> Roster:
    known = Roster(CONFIG.max_num_seqs)
    for view in workers:
        known.update(view)
    return known


# ----------------------------------------------------------------------------------- admission


def test_the_worker_that_is_done_first_is_chosen() -> None:
    busy, idle = worker("busy"), worker("idle")
    settle(busy, live_request(0), 2)
    chosen = choose_worker(live_request(1), roster(busy, idle), CONFIG)
    assert chosen is not None
    assert chosen.worker is idle


def test_one_block_per_running_request_stays_free() -> None:
    """Else the newcomer would be evicted again at their next step."""
    view = worker(num_blocks=5)
    settle(view, live_request(0, 8), 2).num_kv_tokens = 8
    assert choose_worker(live_request(1, 8, max_tokens=1), roster(view), CONFIG) is not None
    assert choose_worker(live_request(1, 9, max_tokens=1), roster(view), CONFIG) is None


def test_a_worker_that_an_operator_has_named_is_chosen_if_it_has_room() -> None:
    idle, busy, full = worker("idle"), worker("busy"), worker("full", 4)
    settle(busy, live_request(0), 2).num_kv_tokens = 7
    settle(full, live_request(1, 12), 3)
    for named, chosen in (("busy", busy), ("full", idle), ("nobody", idle)):
        live = live_request(2)
        live.migrate_to = named
        placement = choose_worker(live, roster(idle, busy, full), CONFIG)
        assert placement is not None
        assert placement.worker is chosen


def test_a_draining_worker_is_not_chosen_although_it_is_idle() -> None:
    view = worker()
    view.drain_deadline_s = 5.0
    assert choose_worker(live_request(0), roster(view), CONFIG) is None
    assert policy.choose_worker_to_clear(live_request(0), [view], CONFIG) is None


def test_cached_blocks_that_nobody_holds_are_not_counted_as_free_too() -> None:
    view = worker(num_blocks=4)
    live = live_request(0, 16)
    blocks = view.pool.allocate(2)
    for block_id, block_hash in zip(blocks, live.block_hashes(2), strict=True):
        view.pool.register(block_id, block_hash)
    view.pool.free(blocks)
    assert policy.cached_blocks(live, view) == blocks
    assert policy.num_blocks_to_take(live, view, blocks) == 4
    assert policy.cached_blocks(live_request(1, 16, prompt_logprobs=0), view) == []


# ------------------------------------------------------------------------------------ eviction


def test_the_youngest_of_equals_goes_and_never_one_that_came_before() -> None:
    view = worker()
    first, second, third = (settle(view, live_request(i), 2) for i in range(3))
    assert policy.choose_victim(first.request, view) is third
    assert policy.choose_victim(second.request, view) is third
    assert policy.choose_victim(third.request, view) is None


def test_a_request_that_is_on_its_way_elsewhere_is_no_victim() -> None:
    """Its blocks come free without anybody's doing."""
    view, other = worker(num_blocks=8), worker("w1")
    first, moves = settle(view, live_request(0), 2), settle(view, live_request(1, priority=1), 6)
    moves.migration = Migration(other, [], "asked")
    assert policy.choose_victim(first.request, view) is None
    assert view.num_leaving_blocks() == 6
    assert policy.choose_worker_to_clear(live_request(2, max_tokens=1), [view], CONFIG) == (
        view,
        [],
    )


def test_the_cheapest_of_the_lowest_priority_goes_first() -> None:
    view = worker()
    first = settle(view, live_request(0), 2)
    settle(view, live_request(1, priority=1), 1)
    settle(view, live_request(2, priority=2), 3)
    cheap = settle(view, live_request(3, priority=2), 2)
    settle(view, live_request(4), 1)
    assert policy.choose_victim(first.request, view) is cheap


def test_admission_evicts_only_for_strictly_higher_priority() -> None:
    view = worker(num_blocks=4)
    low = settle(view, live_request(0, 12, priority=1), 3)
    equal = live_request(1, 12, priority=1, max_tokens=1)
    high = live_request(2, 12, max_tokens=1)
    assert policy.choose_worker_to_clear(equal, [view], CONFIG) is None
    assert policy.choose_worker_to_clear(high, [view], CONFIG) == (view, [low])


# ----------------------------------------------------------------------------------- migration


def decoding(arrival: int, view: WorkerView, max_tokens: int = 30) -> LiveRequest:
    live = settle(view, live_request(arrival, 8, max_tokens=max_tokens), 3)
    live.num_kv_tokens = live.request.num_computed_tokens = 8
    live.request.output_token_ids = [1]
    live.has_progressed_here = True
    return live


def test_the_least_busy_worker_with_room_to_grow_is_the_target_of_a_move() -> None:
    source, busy, idle, small = worker("s"), worker("b"), worker("i"), worker("t", 4)
    live = decoding(0, source, max_tokens=5)
    decoding(1, busy)
    assert policy.choose_target(live, [source, busy, idle, small], CONFIG) is idle
    assert policy.choose_target(live, [source, busy], CONFIG) is busy
    assert policy.choose_target(live, [source], CONFIG) is None
    settle(small, live_request(2, 4), 1)
    assert policy.has_room_for(live, small, CONFIG)
    assert policy.choose_target(live, [source, small], CONFIG) is None, "the next token has none"
    idle.drain_deadline_s = 5.0
    assert policy.choose_target(live, [source, idle], CONFIG) is None


def test_the_load_is_evened_out_only_where_that_leaves_no_reason_to_move_back() -> None:
    config = SchedulerConfig(block_size=BLOCK_SIZE, max_model_len=100, vocab_size=50)
    busy, idle = worker("busy", 40), worker("idle", 40)
    lives = [decoding(i, busy) for i in range(2)]
    lives[1].request.max_tokens = 80
    assert policy.choose_rebalance([busy, idle], config) == (lives[1], idle)
    assert policy.choose_rebalance([busy], config) is None
    assert policy.num_tokens_to_go(lives[1]) == 8 + 79 - 8
    for field, value in {"num_failed_copies": 2, "is_evict_wanted": True}.items():
        before = getattr(lives[1], field)
        setattr(lives[1], field, value)
        assert policy.choose_rebalance([busy, idle], config) is None, "the other is almost done"
        setattr(lives[1], field, before)
    decoding(3, idle)
    assert policy.choose_rebalance([busy, idle], config) is None


# ------------------------------------------------------------------------------------ progress


def test_chunks_keep_to_the_budget_and_to_the_memory_for_rows() -> None:
    live = live_request(0, 20, prompt_logprobs=1)
    assert policy.chunk_end(live, 8, CONFIG) == 8
    assert policy.chunk_end(live, 100, CONFIG) == 20
    tight = SchedulerConfig(vocab_size=50, max_rows_bytes_per_step=5 * 24)
    assert policy.chunk_end(live, 100, tight) == 5


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([5], None),
        ([5, EOS], None),
        ([5, 6, EOS], (FinishReason.STOP, None)),
        ([5, 6, 3], (FinishReason.STOP, 3)),
        ([5, 6, 7], None),
        ([5, 6, 7, 8], (FinishReason.LENGTH, None)),
        ([5, 6, 7, 3], (FinishReason.STOP, 3)),
    ],
)
def test_stop_conditions_count_generated_tokens_only(output: list[int], expected) -> None:
    """The prompt is long, and does not count as `min_tokens`."""
    request = live_request(0, 20, max_tokens=4, min_tokens=3, stop_token_ids=(3,)).request
    request.num_computed_tokens = 20
    request.output_token_ids = output
    assert policy.end_of(request) == expected


def test_ignore_eos_goes_on_and_bans_nothing() -> None:
    request = live_request(0, 20, max_tokens=4, ignore_eos=True, stop_token_ids=(3,)).request
    request.num_computed_tokens = 20
    request.output_token_ids = [EOS]
    assert policy.end_of(request) is None
    assert policy.stop_ids(request) == (3,)


def test_nothing_ends_before_its_prompt_is_done() -> None:
    request = live_request(0, 20, max_tokens=0).request
    request.num_computed_tokens = 19
    assert policy.end_of(request) is None
    request.num_computed_tokens = 20
    assert policy.end_of(request) == (FinishReason.LENGTH, None)
