"""Steps: which chunks a worker computes next, and what their results change.

Rules:
- A worker may be sent a step while it still computes the one before. The chunks of a step continue
  where those under way will have brought their requests, so that who is in one is in the next too.
- Nothing else depends on what is under way: KV counts, is registered, saved and copied to other
  workers only once it was answered.
- What continues a chunk that failed is void: whatever comes of it is dropped. So is what was
  computed past a request's end.
- A request under suspicion, or one that is to leave, is never sent ahead.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler import policy
from scheduler.actions import RecordProgress, RunBatch
from scheduler.balancing import is_moving, make_way
from scheduler.core import Core
from scheduler.ending import finish
from scheduler.errors import InvariantViolation, RequestFailed, from_wire
from scheduler.events import BatchDone, BatchFailed
from scheduler.live import InFlight, LiveRequest, Step, WorkerView
from scheduler.messages import Chunk, ChunkResult, SchedulerOutput
from scheduler.migration import advance_migration
from scheduler.request import FinishReason, RequestStatus
from scheduler.residency import evict, register_full_blocks, save_progress
from scheduler.row_reuse import keep_rows
from scheduler.steps import make_chunk

_MAX_LONE_DEATHS = 5
"""Workers in a row that may die of one request alone before it is given up."""


def start_steps(core: Core, worker: WorkerView) -> None:
    """Send a worker as many steps as it may have under way, while there is anything to send."""
    while len(worker.steps) < core.config.max_steps_in_flight and _start_step(core, worker):
        pass


def _start_step(core: Core, worker: WorkerView) -> bool:
    """Send a worker its next step if there is anything to compute or to tell it.

    Those that have to leave go first, so that they do; then decodes, then prefill chunks, each in
    order of service, within the token budget. Requests whose last batch failed as a whole are
    tried out before all others and away from them.
    """
    running = [r for r in worker.active() if r.status is RequestStatus.RUNNING and not is_moving(r)]
    suspects = policy.choose_suspects(running)
    if suspects and worker.steps:
        return False
    running = [r for r in suspects or running if policy.may_be_planned(r, worker)]
    if not policy.is_worth_sending(running, worker, core.config):
        return False
    num_more = policy.num_more_tokens(core.num_waiting, running, worker, core.config)
    budget = core.config.max_num_batched_tokens
    flights: list[InFlight] = []
    for live in policy.in_step_order(running):
        if budget <= 0:
            break
        if live.status is not RequestStatus.RUNNING or live.worker is not worker or is_moving(live):
            continue  # evicted or moved away meanwhile, for one of those before it
        end = policy.chunk_end(live, budget, core.config)
        if not _has_blocks(core, live, end):
            continue
        budget -= end - live.planned_position
        if live.times.sent_s is None:
            core.timings.sent(live.times, core.now_s)
        num_left = max(live.request.max_tokens - live.num_planned_outputs - 1, 0)
        flights.append(_begin_flight(live, end, min(num_more, num_left)))
    has_releases = worker.released_request_ids and not worker.has_refused_releases
    if not flights and (worker.steps or not has_releases):
        return False
    _send_step(core, worker, flights)
    return True


def _begin_flight(live: LiveRequest, end: int, num_more: int) -> InFlight:
    """Note a chunk as sent, and `num_more` tokens after it, for which blocks are free."""
    missing = policy.blocks_for(end + num_more, live.block_size) - len(live.block_ids)
    if missing > 0 and live.worker is not None:
        live.block_ids += live.worker.pool.allocate(missing)
    flight = InFlight(live, make_chunk(live, end, num_more))
    live.in_flight.append(flight)
    live.is_known_to_worker = True
    live.num_sent_blocks = len(live.block_ids)
    return flight


def _send_step(core: Core, worker: WorkerView, flights: list[InFlight]) -> None:
    step = Step(core.next_step_id, flights, worker.released_request_ids)
    worker.released_request_ids = []
    worker.steps.append(step)
    worker.work.sent(core.now_s)
    core.next_step_id += 1
    core.stats.num_steps += 1
    core.stats.num_chunks += len(flights)
    output = SchedulerOutput(
        step_id=step.step_id,
        chunks=[flight.chunk for flight in flights],
        released_request_ids=step.told_released_ids,
    )
    core.actions.append(RunBatch(worker_id=worker.id, output=output))


def _has_blocks(core: Core, live: LiveRequest, end: int) -> bool:
    """Give the request blocks for the positions before `end`, evicting others if need be.

    A request that may evict nobody keeps its blocks and waits: giving them up would cost a save
    and a load, and those before it take them when they need them.
    """
    worker = live.worker
    if worker is None:
        return False
    missing = policy.blocks_for(end, live.block_size) - len(live.block_ids)
    if missing <= 0:
        return True
    while worker.pool.num_free + worker.num_leaving_blocks() < missing:
        victim = policy.choose_victim(live.request, worker)
        if victim is None:
            return False
        make_way(core, victim, f"its blocks go to {live.id}")
    if worker.pool.num_free < missing:
        return False
    live.block_ids += worker.pool.allocate(missing)
    return True


def take_batch(core: Core, worker: WorkerView, event: BatchDone) -> None:
    """Hand a step's results to their requests."""
    core.stats.compute_s += event.output.compute_s
    worker.has_refused_releases = False
    results = {result.request_id: result for result in event.output.results}
    step = worker.steps.popleft()
    worker.work.answered(core.now_s, event.output.compute_s, is_last=not worker.steps)
    decode_s = policy.decode_s(step, event.output.compute_s)
    worker.decode_s = worker.decode_s if decode_s is None else decode_s
    worker_id, now_s = worker.id, core.now_s
    began_s = now_s - event.output.compute_s
    for flight in _end_step(core, worker, step):
        live = flight.live
        if flight.is_void:
            _heed_wishes(core, live)
            continue
        result = results.get(live.id)
        if result is None:
            lost = RequestFailed("the worker's answer holds nothing for this request")
            result = ChunkResult(live.id, error=lost.to_wire())
        chunk, more = flight.chunk, result.more_token_ids
        num_tokens = len(chunk.token_ids)
        is_decode = num_tokens == 1 and chunk.start >= live.request.num_prompt_tokens
        end = chunk.start + num_tokens + (len(more) if more is not None else 0)
        live.life.computed(worker_id, chunk.start, end, began_s, now_s, is_decode)
        _take_result(core, live, chunk, result)


def fail_batch(core: Core, worker: WorkerView, event: BatchFailed) -> None:
    """Deal with a step that raised: a lone request is at fault, several are halved.

    Those that left in the middle of the step were in it all the same. A step that held no request
    is not tried again by itself, or a worker of which every step fails would never be idle again.
    """
    step = worker.steps.popleft()
    worker.work.answered(core.now_s, 0.0, is_last=not worker.steps)
    num_flights = len(step.flights)
    worker.has_refused_releases = num_flights == 0
    worker.released_request_ids += step.told_released_ids
    for flight in _end_step(core, worker, step):
        live = flight.live
        if flight.is_void:
            _heed_wishes(core, live)
            continue
        # What the worker made of the message is unknown: it is told everything anew.
        worker.released_request_ids.append(live.id)
        live.is_known_to_worker = False
        live.num_sent_blocks = 0
        for later in live.in_flight:
            later.is_void = True
        if num_flights == 1:
            finish(core, live, FinishReason.ERROR, error=from_wire(event.error))
        else:
            live.batch_limit = num_flights // 2
            advance_migration(core, live)
    worker.released_request_ids = list(dict.fromkeys(worker.released_request_ids))


def suspect_batch(core: Core, worker: WorkerView, reason: str) -> None:
    """Deal with a worker that died in the middle of a step: any one of its requests may be why.

    Workers die of other things too. Only a request that several workers in a row have died of, when
    they computed nothing else, is at fault. Which of the steps under way it was is not known.
    """
    suspects = {flight.live: None for step in worker.steps for flight in step.flights}
    staying = {live: None for live in suspects if live.in_flight}
    while worker.steps:
        _end_step(core, worker, worker.steps.popleft())
    for live in staying:
        if len(suspects) > 1:
            live.batch_limit = len(suspects) // 2
            continue
        live.batch_limit = 1
        live.num_lone_deaths += 1
        if live.num_lone_deaths >= _MAX_LONE_DEATHS:
            error = RequestFailed(
                f"{live.num_lone_deaths} workers in a row died while they computed this request "
                f"alone (the last one: {reason})"
            )
            finish(core, live, FinishReason.ERROR, error=error)


def _end_step(core: Core, worker: WorkerView, step: Step) -> list[InFlight]:
    """Take a step's flights off the books; return those whose requests are still there."""
    core.touch(worker)
    staying = []
    for flight in step.flights:
        worker.pool.free(flight.orphaned_block_ids)
        if flight in flight.live.in_flight:
            flight.live.in_flight.remove(flight)
            staying.append(flight)
    return staying


def _take_result(core: Core, live: LiveRequest, chunk: Chunk, result: ChunkResult) -> None:
    if result.error is not None:
        core.stats.num_computed_tokens += len(chunk.token_ids)
        finish(core, live, FinishReason.ERROR, error=from_wire(result.error))
        return
    num_again = _num_rows_again(chunk, live.request.num_computed_tokens)
    core.stats.num_recomputed_rows += num_again
    core.stats.num_prompt_rows += len(chunk.row_target_ids)
    start, end = chunk.start, chunk.start + len(chunk.token_ids)
    _time_result(core, live, end, result)
    last = end + chunk.max_more_tokens
    for piece in _pieces(result):
        if not _take_piece(core, live, start, end, piece):
            return
        start, end = end, end + 1
    if start != last:
        error = RequestFailed(f"the worker computed up to {start}, where {last} was asked for")
        finish(core, live, FinishReason.ERROR, error=error)
        return
    core.emit(live)
    _heed_wishes(core, live)


def _time_result(core: Core, live: LiveRequest, end: int, result: ChunkResult) -> None:
    """Take the time of a result that brings a request up to `end`, before it is handed over."""
    request = live.request
    if request.is_prefilling and end >= request.num_prompt_tokens:
        core.stats.num_prefilled_tokens += request.num_prompt_tokens
        core.timings.prefilled(live.times, core.now_s)
    if result.sampled_token_id is not None:
        more = result.more_token_ids
        num_tokens = 1 + (len(more) if more is not None else 0)
        core.timings.generated(live.times, core.now_s, num_tokens)


def _pieces(result: ChunkResult) -> Iterator[ChunkResult]:
    """Split what a chunk brought into results with one sampled token at most."""
    if result.more_token_ids is None:
        yield result
        return
    all_rows = result.sampled_logprobs
    for i, token in enumerate([result.sampled_token_id, *result.more_token_ids.tolist()]):
        own = all_rows[i : i + 1] if all_rows is not None else None
        yield ChunkResult(result.request_id, None if i else result.rows, token, own)


def _take_piece(core: Core, live: LiveRequest, start: int, end: int, result: ChunkResult) -> bool:
    """Hand a request the results of positions [start, end); return whether it goes on."""
    request = live.request
    num_computed = request.num_computed_tokens
    core.stats.num_computed_tokens += end - start
    try:
        request.advance(end, result.rows, result.sampled_token_id, result.sampled_logprobs)
    except InvariantViolation as error:
        finish(core, live, FinishReason.ERROR, error=RequestFailed(error.message))
        return False
    again = max(min(end, num_computed) - start, 0)
    request.stats.num_recomputed_tokens += again
    core.stats.num_recomputed_tokens += again
    core.stats.num_generated_tokens += result.sampled_token_id is not None
    if core.config.enable_journal and end > num_computed:
        core.actions.append(
            RecordProgress(
                request_id=live.id,
                num_computed_tokens=request.num_computed_tokens,
                rows=result.rows,
                sampled_token_id=result.sampled_token_id,
                sampled_logprobs=result.sampled_logprobs,
            )
        )
    if end > num_computed:
        # Only what was never computed before clears it: the way back there proves nothing.
        live.batch_limit = None
        live.num_lone_deaths = 0
        live.has_progressed_here = True
    live.num_kv_tokens = max(live.num_kv_tokens, end)
    register_full_blocks(live)
    keep_rows(core, live, num_computed)
    ended = policy.end_of(request)
    if ended is not None:
        finish(core, live, ended[0], stop_reason=ended[1])
    return ended is None


def _heed_wishes(core: Core, live: LiveRequest) -> None:
    """Let a request leave, or be saved, that is to, now that less of it is under way."""
    if live.is_evict_wanted:
        evict(core, live, "wanted before")
    if live.status is RequestStatus.RUNNING:
        save_progress(core, live)
        advance_migration(core, live)


def _num_rows_again(chunk: Chunk, num_computed: int) -> int:
    """Rows that a chunk was asked for although the request held them: none, if all is right."""
    end = chunk.first_row_position + len(chunk.row_target_ids)
    return max(min(end, num_computed) - chunk.first_row_position, 0)
