"""Made-up lives of requests, as an engine would tell them."""

from __future__ import annotations

from typing import Any

from scheduler.life import Span, SpanKind
from scheduler.messages import Lives, RequestInfo, RequestLife, SchedulerStats, WorkerReport
from scheduler.request import FinishReason, RequestStatus

NASTY = "</script><script>boom()</script><img src=x onerror=boom()>&amp;\u2028\"'{style}`"
"""Text that would end the element around it, run, or be taken for something else."""


def span(kind: SpanKind, start_s: float, end_s: float | None, **more: Any) -> Span:
    return Span(kind=kind, start_s=start_s, end_s=end_s, **more)


def life_of(
    name: str, start_s: float, *, num_chunks: int = 3, worker: str = "w0", is_over: bool = False
) -> RequestLife:
    """A request that waited a second, and whose chunks of 64 tokens take half a second each."""
    began_s = start_s + 1.0
    spans = [
        span(SpanKind.QUEUED, start_s, began_s, why="submitted"),
        span(SpanKind.READY, began_s, began_s + 0.1, worker_id=worker, why="nothing to load"),
    ]
    for i in range(num_chunks):
        chunk_s = began_s + 0.1 + 0.5 * i
        spans.append(
            span(
                SpanKind.PREFILL,
                chunk_s,
                chunk_s + 0.5,
                worker_id=worker,
                first=64 * i,
                end=64 * i + 64,
                num_steps=1,
            )
        )
    if is_over:
        end_s = spans[-1].end_s or began_s
        spans.append(span(SpanKind.FINISHED, end_s, end_s, end=64 * num_chunks, why="length"))
    info = RequestInfo(
        request_id=name,
        client_id="client",
        status=RequestStatus.FINISHED if is_over else RequestStatus.RUNNING,
        worker_id=worker,
        priority=0,
        num_prompt_tokens=64 * num_chunks,
        num_computed_tokens=64 * num_chunks,
        num_output_tokens=0,
        num_blocks=4 * num_chunks,
        num_evictions=0,
        num_migrations=0,
        num_workers_lost=0,
        waited_s=1.0,
    )
    return RequestLife(info, spans, FinishReason.LENGTH if is_over else None)


def waiting(name: str, start_s: float, arrival: int = 0) -> RequestLife:
    """A request that is in the queue."""
    made = life_of(name, start_s, num_chunks=0)
    info = RequestInfo(
        **{
            **{field: getattr(made.info, field) for field in made.info.__struct_fields__},
            "status": RequestStatus.WAITING,
            "worker_id": None,
            "arrival": arrival,
        }
    )
    return RequestLife(info, [span(SpanKind.QUEUED, start_s, None, why="submitted")])


def lives(now_s: float, live: list[RequestLife], ended: list[RequestLife], more: int = 0) -> Lives:
    return Lives(now_s=now_s, live=live, ended=ended, num_live=len(live) + more)


def report_of(worker_id: str, num_used_blocks: int = 3) -> WorkerReport:
    return WorkerReport(
        worker_id=worker_id,
        node_id="0123456789abcdef",
        pid=1,
        device="cpu",
        is_draining=False,
        num_running=1,
        num_pending_tokens=0,
        num_blocks=16,
        num_used_blocks=num_used_blocks,
    )


def stats(**counters: Any) -> SchedulerStats:
    return SchedulerStats(**counters)
