"""How a request gets onto a worker, off it again, and what of it goes to the offload store.

Rules:
- A block is held by exactly those who will free it: a request's table, a store operation, or a
  chunk under way.
- A block is reused only after whoever reads or writes it has reported back: a request that leaves
  in the middle hands its blocks to that operation or chunk. (Only a copy to another worker whose
  request has left may read what it likes: nobody looks at what it brings.)
- Blocks for all known tokens are taken at admission, so a prompt never stops half-way for lack
  of them; only generated tokens need more later.
"""

from __future__ import annotations

from scheduler import policy
from scheduler.actions import LoadBlocks, LookupBlocks, ReleaseBlocks, SaveBlocks
from scheduler.core import Core
from scheduler.life import SpanKind
from scheduler.live import LiveRequest, StoreOp, WorkerView
from scheduler.placement import Placement
from scheduler.request import RequestStatus
from scheduler.row_reuse import bring_rows


def place(core: Core, live: LiveRequest, placement: Placement) -> None:
    """Give a waiting request blocks on a worker, and ask the store for what it may read."""
    request, worker = live.request, placement.worker
    cached = placement.cached_block_ids
    core.unqueue(live)
    worker.pool.take(cached)
    total = policy.blocks_for(request.num_tokens, live.block_size)
    live.worker = worker
    live.block_ids = cached + worker.pool.allocate(total - len(cached))
    live.num_kv_tokens = len(cached) * live.block_size
    live.num_registered_blocks = len(cached)
    worker.residents[live.id] = live
    core.touch(worker)

    limits = policy.read_limits(live)
    _count_query(core, live)
    num_asked = max(limits) // live.block_size
    if not core.config.enable_offload or num_asked <= len(cached):
        run(core, live, "nothing to load")
        return
    live.move_to(RequestStatus.LOADING, core.now_s, "looks in the offload store")
    op = core.open_op(worker, live, num_asked)
    core.stats.num_store_queries += limits.shared > 0
    core.actions.append(
        LookupBlocks(
            op_id=op.op_id,
            request_id=live.id,
            block_hashes=live.block_hashes(num_asked),
            num_readable_tokens=limits.shared,
            num_own_tokens=limits.own,
            skip_reading_prefix_cache=request.sampling_params.skips_reading_prefix_cache,
        )
    )


def _count_query(core: Core, live: LiveRequest) -> None:
    limits, stats = policy.read_limits(live), core.stats
    num_own, num_others = _split_hits(live, 0, live.num_kv_tokens // live.block_size)
    stats.num_own_hit_tokens += num_own
    if limits.shared == 0:
        stats.num_cache_bypasses += 1
        return
    stats.num_queried_tokens += live.request.num_tokens - limits.own
    if core.config.enable_prefix_caching:
        stats.num_worker_cache_queries += 1
        stats.num_worker_cache_hit_tokens += num_others


def _split_hits(live: LiveRequest, first_block: int, num_blocks: int) -> tuple[int, int]:
    """Return how many tokens of some blocks the request had computed before, and had not."""
    num_before = policy.read_limits(live).own // live.block_size
    num_own = min(max(num_before - first_block, 0), num_blocks)
    return num_own * live.block_size, (num_blocks - num_own) * live.block_size


def run(core: Core, live: LiveRequest, why: str) -> None:
    """Make a placed request computable, with the rows that go with the KV it was given."""
    is_fresh = not live.request.num_computed_tokens
    bring_rows(core, live, live.num_kv_tokens // live.block_size)
    if is_fresh:
        live.request.stats.num_cached_tokens = live.next_position
    live.move_to(RequestStatus.RUNNING, core.now_s, why)


def load(core: Core, live: LiveRequest, worker: WorkerView, num_hit_blocks: int) -> None:
    """Load what the store promised beyond the blocks that are here already."""
    num_here = live.num_kv_tokens // live.block_size
    op = core.open_op(worker, live, num_hit_blocks - num_here)
    core.actions.append(
        LoadBlocks(
            op_id=op.op_id,
            request_id=live.id,
            worker_id=worker.id,
            block_hashes=live.block_hashes(num_hit_blocks)[num_here:],
            block_ids=live.block_ids[num_here:num_hit_blocks],
        )
    )


def end_load(core: Core, live: LiveRequest, num_loaded_blocks: int, why: str) -> None:
    """Go on from the blocks that the store supplied, if any, and drop its pins."""
    num_own, num_others = _split_hits(
        live, live.num_kv_tokens // live.block_size, num_loaded_blocks
    )
    core.stats.num_own_hit_tokens += num_own
    core.stats.num_store_hit_tokens += num_others
    live.num_kv_tokens += num_loaded_blocks * live.block_size
    live.request.stats.num_restored_blocks += num_loaded_blocks
    core.stats.num_loaded_blocks += num_loaded_blocks
    if live.worker is not None:
        core.stats.num_loaded_bytes += num_loaded_blocks * live.worker.info.block_bytes
    register_full_blocks(live)
    core.actions.append(ReleaseBlocks(request_id=live.id, forget=False))
    run(core, live, why)


def register_full_blocks(live: LiveRequest) -> None:
    """Offer the blocks that have become full to the worker's prefix cache."""
    num_full = live.num_kv_tokens // live.block_size
    if live.worker is None or num_full <= live.num_registered_blocks:
        return
    hashes = live.block_hashes(num_full)
    for i in range(live.num_registered_blocks, num_full):
        live.worker.pool.register(live.block_ids[i], hashes[i])
    live.num_registered_blocks = num_full


def evict(core: Core, live: LiveRequest, why: str, *, at_once: bool = False) -> None:
    """Take a request off its worker, now or once it has got on there.

    Each stay on a worker brings progress, for which admission has taken all blocks: however often
    a request is evicted, it comes to its end. Only where the worker is going away (`at_once`) is
    that not waited for.
    """
    worker = live.worker
    if worker is None or live.status is RequestStatus.SAVING:
        return
    core.touch(worker)
    abandon_migration(core, live)
    is_busy = bool(live.in_flight) or live.status is RequestStatus.LOADING
    if is_busy or not (live.has_progressed_here or at_once):
        live.is_evict_wanted = True
        return
    live.request.stats.num_evictions += 1
    core.stats.num_evictions += 1
    num_full = live.num_kv_tokens // live.block_size
    if not core.config.enable_offload or not num_full:
        requeue(core, live, why)
        return
    worker.pool.free(live.block_ids[num_full:])
    del live.block_ids[num_full:]
    live.num_kv_tokens = num_full * live.block_size
    live.is_evict_wanted = False
    live.move_to(RequestStatus.SAVING, core.now_s, why)
    op = core.open_op(worker, live, num_full)
    _save(core, live, op, owned=True)


def save_progress(core: Core, live: LiveRequest) -> None:
    """Save what a running request has computed since its last save, once that is a segment.

    A save that brought less than that is not tried again before another segment is computed.
    """
    worker, segment_tokens = live.worker, core.config.save_segment_tokens
    if worker is None or live.save_op_id is not None:
        return
    if not (core.config.enable_offload and segment_tokens):
        return
    first, end = live.num_saved_blocks, live.num_kv_tokens // live.block_size
    if (end - max(first, live.num_tried_blocks)) * live.block_size < segment_tokens:
        return
    live.num_tried_blocks = end
    op = core.open_op(worker, None, end - first, first_block=first, beneficiary=live)
    op.held_block_ids = live.block_ids[first:end]
    worker.pool.take(op.held_block_ids)
    live.save_op_id = op.op_id
    _save(core, live, op, owned=True)


def end_save(core: Core, op: StoreOp, num_saved_blocks: int, num_copied_blocks: int) -> None:
    """Note what the store holds now of the request that a save was for."""
    core.stats.num_saved_blocks += num_saved_blocks
    core.stats.num_copied_blocks += num_copied_blocks
    core.stats.num_saved_bytes += num_copied_blocks * op.worker.info.block_bytes
    live = op.live or op.beneficiary
    if live is None:
        return
    if live.save_op_id == op.op_id:
        live.save_op_id = None
        if num_saved_blocks:
            live.life.note(
                SpanKind.SAVED,
                op.started_s,
                core.now_s,
                op.worker.id,
                op.first_block * live.block_size,
                (op.first_block + num_saved_blocks) * live.block_size,
            )
    if op.first_block <= live.num_saved_blocks:
        live.num_saved_blocks = max(live.num_saved_blocks, op.first_block + num_saved_blocks)


def save_finished(core: Core, live: LiveRequest) -> None:
    """Offer a finished request's blocks to other workers, unless that would cramp this one."""
    worker = live.worker
    num_full = live.num_kv_tokens // live.block_size
    if worker is None or not (core.config.enable_offload and core.config.save_finished):
        return
    if not 0 < num_full <= worker.pool.num_free:
        return
    op = core.open_op(worker, None, num_full)
    op.held_block_ids = live.block_ids[:num_full]
    worker.pool.take(op.held_block_ids)
    _save(core, live, op, owned=False)


def _save(core: Core, live: LiveRequest, op: StoreOp, *, owned: bool) -> None:
    end = op.first_block + op.num_blocks
    core.actions.append(
        SaveBlocks(
            op_id=op.op_id,
            request_id=live.id,
            worker_id=op.worker.id,
            block_hashes=live.block_hashes(end)[op.first_block :],
            block_ids=live.block_ids[op.first_block : end],
            owned=owned,
            replace=owned and live.request.sampling_params.skips_reading_prefix_cache,
        )
    )


def requeue(core: Core, live: LiveRequest, why: str) -> None:
    """Send a request back to wait in its old place, with all its progress and no blocks."""
    live.move_to(RequestStatus.WAITING, core.now_s, why)
    leave_worker(core, live)
    core.queue(live)


def leave_worker(core: Core, live: LiveRequest) -> None:
    """Detach a request from its worker; blocks still in use go to their user."""
    worker = live.worker
    if worker is None:
        return
    core.touch(worker)
    abandon_migration(core, live)
    op = core.ops.get(live.op_id) if live.op_id is not None else None
    if op is not None:
        op.live = None
        op.held_block_ids += live.block_ids
    elif live.in_flight:
        live.in_flight[-1].orphaned_block_ids += live.block_ids
    else:
        worker.pool.free(live.block_ids)
    if live.is_known_to_worker:
        worker.released_request_ids.append(live.id)
    del worker.residents[live.id]
    forget_place(live)


def abandon_migration(core: Core, live: LiveRequest) -> None:
    """Give a move up: the request stays with its worker, and the target gets its blocks back.

    A copy under way keeps them until it has ended. What it reads does not matter any more.
    """
    migration = live.migration
    if migration is None:
        return
    live.migration = None
    core.stats.num_migrations_failed += 1
    target = migration.target
    target.incoming.pop(live.id, None)
    core.touch(target)
    if live.worker is not None:
        core.touch(live.worker)
    op = core.ops.get(migration.op_id) if migration.op_id is not None else None
    if op is not None:
        op.beneficiary = None
        op.held_block_ids += migration.block_ids
    else:
        target.pool.free(migration.block_ids)


def forget_place(live: LiveRequest) -> None:
    """Reset everything that was true of the request on its last worker only."""
    live.worker = None
    live.block_ids = []
    live.num_kv_tokens = 0
    live.num_registered_blocks = 0
    live.num_sent_blocks = 0
    live.is_known_to_worker = False
    live.in_flight = []
    live.op_id = None
    live.has_progressed_here = False
    live.num_failed_copies = 0
    live.num_tried_blocks = 0
    live.is_evict_wanted = False
