"""Steps: which chunks a worker computes next, and what their results change."""

from __future__ import annotations

from scheduler import policy
from scheduler.actions import RecordProgress, RunBatch
from scheduler.balancing import is_moving, make_way
from scheduler.core import Core
from scheduler.ending import finish
from scheduler.errors import InvariantViolation, RequestFailed, from_wire
from scheduler.events import BatchDone, BatchFailed
from scheduler.live import InFlight, LiveRequest, WorkerView
from scheduler.messages import Chunk, ChunkResult, SchedulerOutput
from scheduler.migration import advance_migration
from scheduler.request import FinishReason, RequestStatus
from scheduler.residency import evict, register_full_blocks, save_progress
from scheduler.row_reuse import keep_rows
from scheduler.steps import make_chunk

_MAX_LONE_DEATHS = 5
"""Workers in a row that may die of one request alone before it is given up."""


def start_step(core: Core, worker: WorkerView) -> None:
    """Start the next step of an idle worker if there is anything to compute or to tell it.

    Those that have to leave go first, so that they do; then decodes, then prefill chunks, each in
    order of service, within the token budget. Requests whose last batch failed as a whole are
    tried out before all others and away from them.
    """
    running = [r for r in worker.active() if r.status is RequestStatus.RUNNING and not is_moving(r)]
    running = policy.choose_suspects(running) or running
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
        budget -= end - live.next_position
        chunk = make_chunk(live, end)
        live.in_flight = chunk
        live.is_known_to_worker = True
        live.num_sent_blocks = len(live.block_ids)
        flights.append(InFlight(live, chunk))
    if not flights and (worker.has_refused_releases or not worker.released_request_ids):
        return
    worker.step_id = core.next_step_id
    worker.in_flight = flights
    core.next_step_id += 1
    core.stats.num_steps += 1
    core.stats.num_chunks += len(flights)
    output = SchedulerOutput(
        step_id=worker.step_id,
        chunks=[flight.chunk for flight in flights],
        released_request_ids=worker.released_request_ids,
    )
    worker.told_released_ids, worker.released_request_ids = worker.released_request_ids, []
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
    for flight in _end_step(core, worker):
        live = flight.live
        result = results.get(live.id)
        if result is None:
            lost = RequestFailed("the worker's answer holds nothing for this request")
            result = ChunkResult(live.id, error=lost.to_wire())
        _take_result(core, live, flight.chunk, result)


def fail_batch(core: Core, worker: WorkerView, event: BatchFailed) -> None:
    """Deal with a step that raised: a lone request is at fault, several are halved.

    Those that left in the middle of the step were in it all the same. A step that held no request
    is not tried again by itself, or a worker of which every step fails would never be idle again.
    """
    num_flights = len(worker.in_flight)
    worker.has_refused_releases = num_flights == 0
    flights = _end_step(core, worker)
    worker.released_request_ids += worker.told_released_ids
    for flight in flights:
        live = flight.live
        # What the worker made of the message is unknown: it is told everything anew.
        worker.released_request_ids.append(live.id)
        live.is_known_to_worker = False
        live.num_sent_blocks = 0
        if num_flights == 1:
            finish(core, live, FinishReason.ERROR, error=from_wire(event.error))
        else:
            live.batch_limit = num_flights // 2
            advance_migration(core, live)
    worker.released_request_ids = list(dict.fromkeys(worker.released_request_ids))


def suspect_batch(core: Core, worker: WorkerView, reason: str) -> None:
    """Deal with a worker that died in the middle of a step: any one of its requests may be why.

    Workers die of other things too. Only a request that several workers in a row have died of, when
    they computed nothing else, is at fault.
    """
    num_flights = len(worker.in_flight)
    for flight in _end_step(core, worker):
        live = flight.live
        if num_flights > 1:
            live.batch_limit = num_flights // 2
            continue
        live.batch_limit = 1
        live.num_lone_deaths += 1
        if live.num_lone_deaths >= _MAX_LONE_DEATHS:
            error = RequestFailed(
                f"{live.num_lone_deaths} workers in a row died while they computed this request "
                f"alone (the last one: {reason})"
            )
            finish(core, live, FinishReason.ERROR, error=error)


def _end_step(core: Core, worker: WorkerView) -> list[InFlight]:
    """Make the worker idle; return the flights whose requests are still there."""
    core.touch(worker)
    flights, worker.in_flight, worker.step_id = worker.in_flight, [], None
    staying = []
    for flight in flights:
        worker.pool.free(flight.orphaned_block_ids)
        if flight.live.in_flight is flight.chunk:
            flight.live.in_flight = None
            staying.append(flight)
    return staying


def _take_result(core: Core, live: LiveRequest, chunk: Chunk, result: ChunkResult) -> None:
    request = live.request
    start, end = chunk.start, chunk.start + len(chunk.token_ids)
    num_computed = request.num_computed_tokens
    core.stats.num_computed_tokens += end - start
    if result.error is not None:
        finish(core, live, FinishReason.ERROR, error=from_wire(result.error))
        return
    try:
        request.advance(end, result.rows, result.sampled_token_id, result.sampled_logprobs)
    except InvariantViolation as error:
        finish(core, live, FinishReason.ERROR, error=RequestFailed(error.message))
        return
    core.stats.num_recomputed_rows += _num_rows_again(chunk, num_computed)
    again = max(min(end, num_computed) - start, 0)
    request.stats.num_recomputed_tokens += again
    core.stats.num_recomputed_tokens += again
    core.stats.num_prompt_rows += len(chunk.row_target_ids)
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
        return
    core.emit(live)
    if live.is_evict_wanted:
        evict(core, live, "wanted before")
    if live.status is RequestStatus.RUNNING:
        save_progress(core, live)
        advance_migration(core, live)


def _num_rows_again(chunk: Chunk, num_computed: int) -> int:
    """Rows that a chunk was asked for although the request held them: none, if all is right."""
    end = chunk.first_row_position + len(chunk.row_target_ids)
    return max(min(end, num_computed) - chunk.first_row_position, 0)
