"""What the core does of its own accord with workers that are too full, too busy or going away.

Draining: nothing new comes, requests move to other workers while they go on, those with the most
left to do first; shortly before the deadline the rest is saved and queued again.
"""

from __future__ import annotations

from scheduler import policy
from scheduler.actions import StopWorker
from scheduler.core import Core
from scheduler.ending import finish
from scheduler.errors import EngineUnavailable, HaversackError, RequestTooLarge
from scheduler.live import LiveRequest, WorkerView
from scheduler.migration import start_migration
from scheduler.request import FinishReason, RequestStatus
from scheduler.residency import abandon_migration, evict

_MAX_MOVES_AWAY = 4
"""Requests that leave a draining worker at once."""
_MAX_MARGIN_S = 5.0
_MARGIN = 0.25
"""Part of a drain's time, at most `_MAX_MARGIN_S`, that is kept for saving what could not move."""


def move_wanted(core: Core) -> None:
    """Start the moves that operators asked for before they were possible."""
    for live in list(core.wanted_elsewhere.values()):
        target = core.workers.get(live.migrate_to or "")
        if target is None or live.worker is target:
            live.migrate_to = None
            del core.wanted_elsewhere[live.id]
        elif policy.is_movable(live) and policy.has_room_for(live, target, core.config):
            del core.wanted_elsewhere[live.id]
            start_migration(core, live, target, "asked")


def begin_drain(core: Core, worker: WorkerView, deadline_s: float) -> None:
    """Take nothing new there; an earlier deadline than the one in force replaces it."""
    if worker.drain_deadline_s is None:
        worker.drain_started_s = core.now_s
        worker.drain_deadline_s = deadline_s
        core.draining[worker.id] = worker
        for live in list(worker.incoming.values()):
            abandon_migration(core, live)
    else:
        worker.drain_deadline_s = min(worker.drain_deadline_s, deadline_s)


def drain(core: Core) -> None:
    """Move requests off the draining workers, and let those go that are empty."""
    for worker in list(core.draining.values()):
        if _is_late(core, worker):
            for live in list(worker.residents.values()):
                evict(core, live, "its worker is drained", at_once=True)
        else:
            _move_away(core, worker)
        if not worker.residents and not worker.incoming and worker.pool.num_used == 0:
            core.remove_worker(worker)
            core.stats.num_workers_drained += 1
            core.actions.append(StopWorker(worker_id=worker.id))
            fail_hopeless(core, f"the last worker, {worker.id}, was drained")


def _is_late(core: Core, worker: WorkerView) -> bool:
    deadline_s = worker.drain_deadline_s
    if deadline_s is None:
        return False
    margin_s = min(_MARGIN * (deadline_s - worker.drain_started_s), _MAX_MARGIN_S)
    return core.now_s >= deadline_s - margin_s


def _move_away(core: Core, worker: WorkerView) -> None:
    free = _MAX_MOVES_AWAY - sum(1 for r in worker.residents.values() if r.migration)
    staying = [r for r in worker.residents.values() if policy.is_worth_moving(r)]
    for live in sorted(staying, key=policy.num_tokens_to_go, reverse=True):
        if free <= 0:
            return
        target = policy.choose_target(live, core.workers.values(), core.config)
        if target is not None:
            start_migration(core, live, target, "drain")
            free -= 1


def even_out(core: Core) -> None:
    """Move one request from the busiest worker to the least busy one, if that helps both."""
    if not core.config.enable_migration or core.head() is not None:
        return
    if any(w.incoming for w in core.workers.values()):
        return
    choice = policy.choose_rebalance(core.workers.values(), core.config)
    if choice is not None:
        start_migration(core, choice[0], choice[1], "load")


def make_way(core: Core, victim: LiveRequest, why: str) -> None:
    """Take a request off its worker for the sake of another one: moved where there is room, else
    evicted.
    """
    target = None
    if core.config.enable_migration and policy.is_worth_moving(victim):
        target = policy.choose_target(victim, core.workers.values(), core.config)
    if target is not None:
        start_migration(core, victim, target, "blocks")
    else:
        evict(core, victim, why)


def fail_hopeless(core: Core, reason: str) -> None:
    """End every request that no worker can take, now or when those expected are there."""
    largest = core.largest_num_blocks * core.config.block_size
    for live in list(core.requests.values()):
        if not (core.workers or core.expected):
            error: HaversackError = EngineUnavailable(f"{reason}: restart the engine")
        elif live.request.max_kv_tokens > largest:
            error = RequestTooLarge("no worker that is left has enough KV blocks for it")
        else:
            continue
        finish(core, live, FinishReason.ERROR, error=error)


def is_moving(live: LiveRequest) -> bool:
    """Whether the request stands still because its last blocks are being copied."""
    migration = live.migration
    return (
        migration is not None
        and migration.paused_s is not None
        and live.status is RequestStatus.RUNNING
    )
