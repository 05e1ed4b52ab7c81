"""The one way in which a request ends, whatever the reason and wherever it is."""

from __future__ import annotations

from scheduler.actions import RecordFinished, ReleaseBlocks
from scheduler.core import Core
from scheduler.errors import DeadlineExceeded, HaversackError
from scheduler.live import LiveRequest
from scheduler.reports import request_life
from scheduler.request import FinishReason, RequestStatus
from scheduler.residency import leave_worker, save_finished


def finish(
    core: Core,
    live: LiveRequest,
    reason: FinishReason,
    *,
    stop_reason: int | None = None,
    error: HaversackError | None = None,
) -> None:
    """End a request, give back or hand over all that it holds, and tell its client.

    Only a request that came to a good end is offered to the offload store.
    """
    request = live.request
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        save_finished(core, live)
    if live.status is RequestStatus.WAITING:
        core.unqueue(live)
    live.move_to(RequestStatus.FINISHED, core.now_s, reason.value)
    request.finish_reason = reason
    request.stop_reason = stop_reason
    request.error = error.to_wire() if error is not None else None
    core.lately_ended.append(request_life(live, core.now_s))
    leave_worker(core, live)
    del core.requests[live.id]
    core.wanted_elsewhere.pop(live.id, None)
    family = core.families[request.parent_id]
    family.remove(live.id)
    if not family:
        del core.families[request.parent_id]
        core.ended_siblings.pop(request.parent_id, None)
    elif not core.config.enable_journal:
        core.ended_siblings.setdefault(request.parent_id, []).append(request)
    if core.config.enable_offload:
        core.actions.append(ReleaseBlocks(request_id=live.id, forget=True))
    if core.config.enable_journal:
        core.actions.append(
            RecordFinished(
                request_id=live.id,
                parent_id=request.parent_id,
                finish_reason=reason,
                stop_reason=stop_reason,
                error=request.error,
                stats=request.stats,
            )
        )
    _count(core, live, reason)
    core.emit(live)


def _count(core: Core, live: LiveRequest, reason: FinishReason) -> None:
    stats = core.stats
    ends = stats.finished_by_reason
    ends[reason.value] = ends.get(reason.value, 0) + 1
    if reason is FinishReason.ERROR:
        stats.num_failed += 1
    elif reason is FinishReason.ABORT:
        stats.num_aborted += 1
    else:
        stats.num_finished += 1
        core.timings.ended(live.times, core.now_s)


def expire(core: Core, live: LiveRequest) -> None:
    """End a request whose deadline has passed."""
    core.stats.num_expired += 1
    error = DeadlineExceeded(
        "it was not done within its timeout_s; "
        f"{live.request.num_computed_tokens} of {live.request.num_tokens} tokens were computed: "
        "give a longer timeout_s, or send less at once",
        num_computed_tokens=live.request.num_computed_tokens,
    )
    finish(core, live, FinishReason.ERROR, error=error)
