"""What clients and operators get to see of a live request."""

from __future__ import annotations

from msgspec import structs

from scheduler.codec import id_array
from scheduler.live import LiveRequest, WorkerView
from scheduler.logprobs import LogprobRows
from scheduler.messages import (
    OutputDelta,
    RequestInfo,
    RequestLife,
    SchedulerStats,
    WorkerReport,
    WorkerUse,
)
from scheduler.request import FinishReason, Request
from scheduler.scaling import Load

_MAX_ROWS_BYTES = 8 * 2**20
"""Of a prompt's rows in one delta: what encodes it does nothing else meanwhile."""


def output_deltas(live: LiveRequest) -> list[OutputDelta]:
    """Return what became visible since the last call, and note that it was.

    Nothing of a prompt is visible before all of it is computed; then all its rows are. An aborted
    or failed prompt shows none.
    """
    request = live.request
    is_last = request.finish_reason is not None
    first, live.num_emitted_tokens = live.num_emitted_tokens, len(request.output_token_ids)
    prompt_rows: LogprobRows | None = None
    if not request.is_prefilling and not live.is_prompt_emitted:
        live.is_prompt_emitted = True
        prompt_rows = request.prompt_logprobs
    elif first == live.num_emitted_tokens and not is_last:
        return []
    failed = request.finish_reason is FinishReason.ERROR
    delta = OutputDelta(
        request_id=request.parent_id,
        index=request.index,
        num_previous_tokens=first,
        new_token_ids=id_array(request.output_token_ids[first:]),
        new_logprobs=(
            request.output_logprobs.last(live.num_emitted_tokens - first)
            if request.output_logprobs is not None
            else None
        ),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        stats=request.stats if is_last else None,
        life=live.life.spans() if is_last else None,
        content_hash=request.content_hash,
    )
    return _with_rows(delta, None if failed else prompt_rows)


def whole_deltas(request: Request) -> list[OutputDelta]:
    """Return all that may be seen of a request, live or finished."""
    failed = request.finish_reason is FinishReason.ERROR
    rows, own = request.prompt_logprobs, request.output_logprobs
    delta = OutputDelta(
        request_id=request.parent_id,
        index=request.index,
        new_token_ids=id_array(request.output_token_ids),
        new_logprobs=own.array() if own is not None else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        stats=request.stats if request.finish_reason is not None else None,
        content_hash=request.content_hash,
    )
    return _with_rows(delta, None if request.is_prefilling or failed else rows)


def _with_rows(delta: OutputDelta, rows: LogprobRows | None) -> list[OutputDelta]:
    """Return the delta with a prompt's rows, after deltas with those that are too many for it."""
    if rows is None:
        return [delta]
    *leading, last = rows.parts(_MAX_ROWS_BYTES)
    deltas, num_rows = [], 0
    for part in leading:
        deltas.append(
            OutputDelta(
                request_id=delta.request_id,
                index=delta.index,
                num_previous_tokens=delta.num_previous_tokens,
                new_token_ids=id_array([]),
                prompt_logprobs=part,
                num_previous_rows=num_rows,
                content_hash=delta.content_hash,
            )
        )
        num_rows += part.num_rows
    whole = structs.replace(delta, prompt_logprobs=last, num_previous_rows=num_rows)
    return [*deltas, whole]


def worker_report(worker: WorkerView) -> WorkerReport:
    """Return what operators see of a worker."""
    info = worker.info
    return WorkerReport(
        worker_id=info.worker_id,
        node_id=info.node_id,
        pid=info.pid,
        device=info.device,
        is_draining=worker.is_draining,
        num_running=len(worker.residents),
        num_pending_tokens=num_pending_tokens(worker),
        num_blocks=worker.pool.num_blocks,
        num_used_blocks=worker.pool.num_used,
        tensor_parallel_size=info.tensor_parallel_size,
    )


def worker_use(worker: WorkerView, now_s: float) -> WorkerUse:
    """Return what a worker is used for, with its time accounted for up to now."""
    work = worker.work
    work.settle(now_s)
    return WorkerUse(
        worker_id=worker.id,
        num_running=len(worker.residents),
        num_blocks=worker.pool.num_blocks,
        num_used_blocks=worker.pool.num_used,
        compute_s=work.compute_s,
        dispatch_s=work.dispatch_s,
        idle_s=work.idle_s,
    )


def request_life(live: LiveRequest, now_s: float) -> RequestLife:
    """Return what has happened to a request."""
    request = live.request
    return RequestLife(
        request_info(live, now_s), live.life.spans(), request.finish_reason, request.error
    )


def load_of(
    head: LiveRequest | None,
    num_queued_tokens: int,
    workers: list[WorkerView],
    stats: SchedulerStats,
    now_s: float,
) -> Load:
    """Return what decides how many workers there should be.

    Args:
        head: the first in the queue.
        num_queued_tokens: of all in the queue.
        workers: those that stay.
    """
    has_run = head is None or head.request.num_computed_tokens > 0
    return Load(
        waited_s=0.0 if head is None or has_run else max(now_s - head.submitted_s, 0.0),
        num_tokens_to_do=num_queued_tokens + sum(num_pending_tokens(w) for w in workers),
        num_computed_tokens=stats.num_computed_tokens,
        compute_s=stats.compute_s,
        is_busy={worker.id: bool(worker.residents) for worker in workers},
    )


def num_pending_tokens(worker: WorkerView) -> int:
    """Return how many known tokens a worker's requests still need computed."""
    return sum(max(r.num_pending_tokens, 0) for r in worker.residents.values())


def request_info(live: LiveRequest, now_s: float) -> RequestInfo:
    """Return what operators see of a request."""
    request = live.request
    return RequestInfo(
        request_id=request.request_id,
        client_id=request.client_id,
        status=request.status,
        worker_id=live.worker.id if live.worker else None,
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=len(request.output_token_ids),
        num_blocks=len(live.block_ids),
        num_evictions=request.stats.num_evictions,
        num_migrations=request.stats.num_migrations,
        num_workers_lost=request.stats.num_workers_lost,
        waited_s=max(now_s - live.submitted_s, 0.0),
        arrival=request.arrival,
    )
