"""Where a waiting request goes: the best worker, found without a look at all of them."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest

from offload_store.keys import HashChain
from scheduler import policy
from scheduler.acceptance import accept
from scheduler.block_pool import BlockPool
from scheduler.codec import int_array
from scheduler.config import SchedulerConfig
from scheduler.events import BatchDone, RequestSubmitted, WorkerJoined
from scheduler.live import LiveRequest, WorkerView
from scheduler.messages import ChunkResult, ModelRunnerOutput, Submission, WorkerInfo
from scheduler.placement import choose_worker
from scheduler.request import RequestStatus
from scheduler.roster import Roster, load_of
from scheduler.sampling_params import SamplingParams
from scheduler.state import SchedulerState

BLOCK_SIZE = 4
CONFIG = SchedulerConfig(
    block_size=BLOCK_SIZE,
    max_num_batched_tokens=24,
    max_num_seqs=4,
    max_model_len=200,
    vocab_size=50,
    enable_offload=False,
)


def info(name: str, num_blocks: int) -> WorkerInfo:
    return WorkerInfo(name, "cpu", num_blocks, BLOCK_SIZE, 64, 50, 200, (), "model")


def join(roster: Roster, name: str, number: int = 0, num_blocks: int = 24) -> WorkerView:
    pool = BlockPool(num_blocks, BLOCK_SIZE, name=name, index=roster.prefixes)
    view = WorkerView(info(name, num_blocks), pool, number)
    roster.update(view)
    return view


def waiting(arrival: int, tokens: list[int], priority: int = 0, **params: Any) -> LiveRequest:
    submission = Submission(
        f"r{arrival}", int_array(tokens), SamplingParams(max_tokens=2, **params), 0, priority
    )
    request = accept(submission, CONFIG, 24, "client")[0]
    request.arrival = arrival
    return LiveRequest(request, 0.0, HashChain("", None, BLOCK_SIZE), BLOCK_SIZE)


def settle(view: WorkerView, live: LiveRequest, num_kv_tokens: int) -> None:
    """Put a request on a worker that has computed so much of it."""
    live.request.status = RequestStatus.RUNNING
    live.worker = view
    live.num_kv_tokens = num_kv_tokens
    live.block_ids = view.pool.allocate(policy.blocks_for(live.request.num_tokens, BLOCK_SIZE))
    full = num_kv_tokens // BLOCK_SIZE
    for block_id, block_hash in zip(live.block_ids, live.block_hashes(full), strict=False):
        view.pool.register(block_id, block_hash)
    view.residents[live.id] = live


def leave(view: WorkerView, live: LiveRequest) -> None:
    view.pool.free(live.block_ids)
    del view.residents[live.id]


def cost_by_definition(live: LiveRequest, view: WorkerView) -> tuple[int, int] | None:
    """Tokens before it and its own uncached ones, then who is there; None without room."""
    active = view.active()
    before = sum(max(r.num_pending_tokens, 0) for r in active if r.rank < live.rank)
    cached = policy.cached_blocks(live, view)
    if (
        view.is_draining
        or len(active) >= CONFIG.max_num_seqs
        or before >= CONFIG.max_num_batched_tokens * CONFIG.max_steps_in_flight
        or policy.is_prefix_coming(live, view, len(cached), CONFIG)
        or policy.num_blocks_to_take(live, view, cached) + len(active) > view.pool.num_free
    ):
        return None
    return before + live.request.num_tokens - len(cached) * BLOCK_SIZE, len(active)


def random_prompt(rng: random.Random, families: list[list[int]]) -> list[int]:
    return [*rng.choice(families)[: rng.randrange(1, 25)], rng.randrange(50)]


def random_fleet(rng: random.Random) -> tuple[Roster, list[WorkerView], list[list[int]]]:
    """Workers with some load and with prefixes of a few families, at various depths."""
    roster = Roster(CONFIG.max_num_seqs)
    families = [[rng.randrange(50) for _ in range(24)] for _ in range(3)]
    views = [join(roster, f"w{i}", i) for i in range(rng.choice([1, 3, 24]))]
    arrival = 0
    for view in views:
        for _ in range(rng.randrange(8)):
            prompt = random_prompt(rng, families)
            live = waiting(arrival, prompt)
            arrival += 1
            need = policy.blocks_for(len(prompt), BLOCK_SIZE)
            if need > view.pool.num_free or len(view.residents) >= CONFIG.max_num_seqs:
                continue
            settle(view, live, rng.randrange(len(prompt) + 1))
            if rng.random() < 0.5:
                leave(view, live)
        if rng.random() < 0.1:
            view.drain_deadline_s = 1.0
        roster.update(view)
    return roster, views, families


@pytest.mark.parametrize("seed", range(60))
def test_the_last_in_order_gets_the_worker_that_would_be_done_with_it_first(seed: int) -> None:
    rng = random.Random(seed)
    roster, views, families = random_fleet(rng)
    for number in range(6):
        prompt = random_prompt(rng, families)
        skips = rng.random() < 0.2
        live = waiting(1000 + number, prompt, skip_reading_prefix_cache=skips)
        costs = {view.id: cost_by_definition(live, view) for view in views}
        placement = choose_worker(live, roster, CONFIG)
        best = min((cost for cost in costs.values() if cost is not None), default=None)
        if placement is None:
            assert best is None
        else:
            assert costs[placement.worker.id] == best
            assert placement.cached_block_ids == policy.cached_blocks(live, placement.worker)


@pytest.mark.parametrize("seed", range(30))
def test_one_that_comes_before_others_finds_room_wherever_there_is_any(seed: int) -> None:
    """Those behind it may have more to compute than a step holds: they don't keep it out."""
    rng = random.Random(seed)
    roster, views, families = random_fleet(rng)
    for number in range(6):
        live = waiting(rng.randrange(60), rng.choice(families)[:9], priority=-(number % 2))
        open_ones = {view.id for view in views if cost_by_definition(live, view) is not None}
        placement = choose_worker(live, roster, CONFIG)
        if placement is None:
            assert not open_ones
        else:
            assert placement.worker.id in open_ones
        among = rng.sample(views, rng.randrange(len(views) + 1))
        placement = choose_worker(live, roster, CONFIG, among)
        if placement is None:
            assert not open_ones & {view.id for view in among}
        else:
            assert placement.worker in among


def test_a_worker_that_is_full_or_going_away_is_not_looked_at() -> None:
    roster = Roster(max_num_seqs=2)
    full, leaving, busy, idle = (join(roster, name) for name in ("full", "leaving", "busy", "idle"))
    for arrival, view in enumerate([full, full, busy]):
        settle(view, waiting(arrival, [1] * 5), 0)
    leaving.drain_deadline_s = 1.0
    for view in (full, leaving, busy, idle):
        roster.update(view)
    assert [load.worker for load in roster.by_load()] == [idle, busy]
    assert [load.worker for load in roster.by_load({"busy", "full"})] == [busy]
    many = {f"x{i}" for i in range(40)} | {"busy"}
    assert [load.worker for load in roster.by_load(many)] == [busy]
    roster.remove(idle)
    assert [load.worker for load in roster.by_load()] == [busy]


def test_it_is_known_whether_anybody_of_lower_priority_is_there() -> None:
    roster = Roster(max_num_seqs=2)
    view = join(roster, "w0")
    assert not roster.has_lower_priority_than(-(2**31))
    low = waiting(0, [1], priority=3)
    settle(view, low, 0)
    roster.update(view)
    assert roster.has_lower_priority_than(2)
    assert not roster.has_lower_priority_than(3)
    leave(view, low)
    roster.update(view)
    assert not roster.has_lower_priority_than(2)
    assert roster.load("w0") == load_of(view)


# ---------------------------------------------------------------------------------------- work


def calls_of(work: Any) -> int:
    """How many Python functions are called."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def loaded_engine(num_workers: int, num_waiting: int) -> tuple[SchedulerState, BatchDone]:
    """An engine whose workers are all full, and the answer to one worker's first step."""
    state = SchedulerState(CONFIG)
    for i in range(num_workers):
        state.handle(WorkerJoined(info(f"w{i}", 24)))
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    count = num_workers * CONFIG.max_num_seqs + num_waiting
    prompts = rng.integers(0, 50, (count, 6), dtype=np.int32)
    submissions = [Submission(f"r{i}", p, params, 0) for i, p in enumerate(prompts)]
    actions = state.handle(*(RequestSubmitted(submission, "") for submission in submissions))
    batch = next(a for a in actions if getattr(a, "worker_id", None) == "w0")
    results = [
        ChunkResult(c.request_id, None, 1 if c.sample else None) for c in batch.output.chunks
    ]
    assert state.stats().num_waiting >= num_waiting
    return state, BatchDone("w0", ModelRunnerOutput(batch.output.step_id, results))


def test_a_step_costs_the_same_however_many_workers_there_are_and_requests_wait() -> None:
    """The first one in the queue has found no room anywhere, and one worker has answered: neither
    is the queue gone through nor any other worker looked at."""
    costs = set()
    for num_workers, num_waiting in ((2, 10), (60, 10), (2, 2000), (60, 2000)):
        state, done = loaded_engine(num_workers, num_waiting)
        costs.add(calls_of(lambda s=state, d=done: s.handle(d)))
        state.validate()
    assert len(costs) == 1, costs


def test_a_submission_costs_the_same_however_many_workers_there_are_and_requests_wait() -> None:
    costs = set()
    for num_workers, num_waiting in ((2, 10), (60, 2000)):
        state, _ = loaded_engine(num_workers, num_waiting)
        submission = Submission("new", int_array([1] * 9), SamplingParams(max_tokens=1), 0)
        event = RequestSubmitted(submission, "")
        costs.add(calls_of(lambda s=state, e=event: s.handle(e)))
    assert len(costs) == 1, costs
