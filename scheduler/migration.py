"""Live migration: a request moves to another worker and stops computing only for its last blocks.

Rules:
- Rounds of copies bring full blocks to the target while the source goes on; what each round leaves
  is what was computed meanwhile. When that is little, or after a few rounds, the request pauses,
  its last blocks are copied, the partial one included, and the target takes over.
- The source's blocks stay the request's own until that moment, which is one change of the core's
  data: whatever fails before it, the request goes on where it is; whatever fails after it is the
  target's affair.
- A copy never goes through the offload store: it needs no full blocks, no hashes and no room there.
"""

from __future__ import annotations

from scheduler import policy
from scheduler.actions import CopyBlocks
from scheduler.core import Core
from scheduler.life import SpanKind
from scheduler.live import LiveRequest, Migration, StoreOp, WorkerView
from scheduler.request import RequestStatus
from scheduler.residency import abandon_migration, register_full_blocks

_MAX_ROUNDS = 4
_FEW_BLOCKS = 2
"""A round that leaves no more full blocks than this is followed by the last one."""


def start_migration(core: Core, live: LiveRequest, target: WorkerView, reason: str) -> None:
    """Begin to move a running request to a worker that `policy.has_room_for` it."""
    num_full = live.num_kv_tokens // live.block_size
    cached = policy.cached_blocks(live, target)[:num_full]
    target.pool.take(cached)
    total = policy.blocks_for(live.request.num_tokens, live.block_size)
    block_ids = cached + target.pool.allocate(total - len(cached))
    live.migration = Migration(target, block_ids, reason, num_copied_blocks=len(cached))
    live.migrate_to = None
    target.incoming[live.id] = live
    if live.worker is not None:
        core.touch(live.worker)
    advance_migration(core, live)


def advance_migration(core: Core, live: LiveRequest) -> None:
    """Start the next copy of a move, if none is under way and its time has come."""
    migration = live.migration
    if migration is None or migration.op_id is not None:
        return
    num_full = live.num_kv_tokens // live.block_size
    num_left = num_full - migration.num_copied_blocks
    is_paused = migration.paused_s is not None
    if num_left > _FEW_BLOCKS and migration.num_rounds < _MAX_ROUNDS and not is_paused:
        migration.num_rounds += 1
        _copy(core, live, migration, num_full)
        return
    if not live.has_progressed_here:
        return
    if migration.paused_s is None:
        migration.paused_s = core.now_s
    if not live.in_flight:
        _copy_last(core, live, migration)


def take_copy(core: Core, op: StoreOp, num_copied_blocks: int) -> None:
    """Go on with the move that a copy was for, or give it up where the copy has failed."""
    live = op.beneficiary
    migration = live.migration if live is not None else None
    if live is None or migration is None or migration.op_id != op.op_id:
        return
    migration.op_id = None
    core.stats.num_migrated_blocks += num_copied_blocks
    core.stats.num_migrated_bytes += num_copied_blocks * op.worker.info.block_bytes
    if num_copied_blocks < op.num_blocks:
        live.num_failed_copies += 1
        abandon_migration(core, live)
        return
    end = op.first_block + op.num_blocks
    live.life.note(
        SpanKind.COPIED,
        op.started_s,
        core.now_s,
        op.worker.id,
        op.first_block * live.block_size,
        end * live.block_size,
    )
    migration.num_copied_blocks = min(end, live.num_kv_tokens // live.block_size)
    if end * live.block_size >= live.num_kv_tokens and _is_still(live, migration):
        _switch(core, live, migration)
    else:
        advance_migration(core, live)


def _is_still(live: LiveRequest, migration: Migration) -> bool:
    """Whether nothing can have been computed since the copy began."""
    return migration.paused_s is not None and not live.in_flight


def _copy_last(core: Core, live: LiveRequest, migration: Migration) -> None:
    end = policy.blocks_for(live.num_kv_tokens, live.block_size)
    if end > migration.num_copied_blocks:
        _copy(core, live, migration, end)
    elif _grow(live, migration):
        _switch(core, live, migration)
    else:
        abandon_migration(core, live)


def _grow(live: LiveRequest, migration: Migration) -> bool:
    """Take blocks on the target for what the request has grown by; False where it is full."""
    pool = migration.target.pool
    missing = policy.blocks_for(live.request.num_tokens, live.block_size) - len(migration.block_ids)
    if missing > pool.num_free:
        return False
    migration.block_ids += pool.allocate(max(missing, 0))
    return True


def _copy(core: Core, live: LiveRequest, migration: Migration, end: int) -> None:
    source, first = live.worker, migration.num_copied_blocks
    if source is None:
        return
    if not _grow(live, migration):
        abandon_migration(core, live)
        return
    op = core.open_op(migration.target, None, end - first, first_block=first, beneficiary=live)
    migration.op_id = op.op_id
    core.actions.append(
        CopyBlocks(
            op_id=op.op_id,
            request_id=live.id,
            source_id=source.id,
            source_block_ids=live.block_ids[first:end],
            target_id=migration.target.id,
            target_block_ids=migration.block_ids[first:end],
        )
    )


def _switch(core: Core, live: LiveRequest, migration: Migration) -> None:
    """Make the target the request's worker."""
    source, target = live.worker, migration.target
    if source is None or live.status is not RequestStatus.RUNNING:
        return
    core.touch(source)
    core.touch(target)
    source.pool.free(live.block_ids)
    if live.is_known_to_worker:
        source.released_request_ids.append(live.id)
    del source.residents[live.id]
    del target.incoming[live.id]
    target.residents[live.id] = live
    live.migration = None
    live.worker = target
    live.block_ids = migration.block_ids
    live.num_registered_blocks = 0
    live.num_sent_blocks = 0
    live.is_known_to_worker = False
    live.has_progressed_here = False
    live.num_failed_copies = 0
    register_full_blocks(live)
    live.life.move(
        core.now_s,
        source.id,
        target.id,
        live.num_kv_tokens,
        f"from {source.id}: {migration.reason}",
        paused_s=migration.paused_s,
    )
    live.request.stats.num_migrations += 1
    core.stats.num_migrations += 1
    reasons = core.stats.migrations_by_reason
    reasons[migration.reason] = reasons.get(migration.reason, 0) + 1
    if migration.paused_s is not None:
        pause_s = core.now_s - migration.paused_s
        core.stats.migration_pause_s += pause_s
        core.timings.migration_pause.observe(pause_s)
