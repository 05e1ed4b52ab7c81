"""The engine's promises as checks on the core's data; run after every event in tests."""

from __future__ import annotations

from scheduler import policy
from scheduler.balancing import is_moving
from scheduler.core import Core
from scheduler.errors import InvariantViolation
from scheduler.life import SpanKind
from scheduler.live import LiveRequest, WorkerView
from scheduler.placement import choose_worker
from scheduler.request import RequestStatus
from scheduler.roster import load_of

_TOLD_AS: dict[RequestStatus, set[SpanKind | None]] = {
    RequestStatus.WAITING: {SpanKind.QUEUED},
    RequestStatus.LOADING: {SpanKind.LOADING},
    RequestStatus.RUNNING: {SpanKind.READY, SpanKind.DECODE, None},
    RequestStatus.SAVING: {SpanKind.SAVING},
}
_RESIDENT = {RequestStatus.LOADING, RequestStatus.RUNNING, RequestStatus.SAVING}


def check_invariants(core: Core) -> None:
    """Check requests, blocks and operations against each other.

    Raises:
        InvariantViolation: something does not fit, with what and where.
    """
    for live in core.requests.values():
        live.request.validate()
        _check_place(core, live)
    for worker in core.workers.values():
        _check_worker(core, worker)
    for op in core.ops.values():
        _require(core.workers.get(op.worker.id) is op.worker, f"op {op.op_id}: its worker is gone")
        _require(op.live is None or op.live.op_id == op.op_id, f"op {op.op_id}: not its request's")
        for_whom = op.beneficiary
        _require(
            for_whom is None
            or for_whom.save_op_id == op.op_id
            or (for_whom.migration is not None and for_whom.migration.op_id == op.op_id),
            f"op {op.op_id}: unknown to whom it is for",
        )
    _check_roster(core)
    core.row_cache.validate()
    waiting = [r for r in core.requests.values() if r.status is RequestStatus.WAITING]
    _require(core.num_waiting == len(waiting), "the queue's length is miscounted")
    _require(
        core.num_queued_tokens == sum(r.request.num_tokens for r in waiting),
        "the queue's tokens are miscounted",
    )
    listed = sorted(name for family in core.families.values() for name in family)
    _require(listed == sorted(core.requests), "families and requests disagree")
    _require(core.ended_siblings.keys() <= core.families.keys(), "ended with no sibling alive")


def _check_place(core: Core, live: LiveRequest) -> None:
    name, status = f"request {live.id!r} ({live.status.value})", live.status
    _require(status is not RequestStatus.FINISHED, f"{name}: finished but still kept")
    _require(live.life.current_kind in _TOLD_AS[status], f"{name}: its life tells another story")
    _require((live.worker is not None) == (status in _RESIDENT), f"{name}: worker and status")
    _require(
        (live.op_id is not None) == (status in (RequestStatus.LOADING, RequestStatus.SAVING)),
        f"{name}: a store operation exactly while loading or saving",
    )
    _require(live.op_id is None or live.op_id in core.ops, f"{name}: waits for a closed operation")
    if live.migration is not None:
        target = live.migration.target
        _require(status is RequestStatus.RUNNING, f"{name}: moves without running")
        _require(core.workers.get(target.id) is target, f"{name}: moves to a lost worker")
        _require(target.incoming.get(live.id) is live, f"{name}: moves unknown to its target")
        _require(target is not live.worker, f"{name}: moves to where it is")
        is_last = live.migration.paused_s is not None and live.migration.op_id is not None
        _require(not (is_last and live.in_flight), f"{name}: computes while its last blocks move")
    for op_id in (live.save_op_id, live.migration.op_id if live.migration else None):
        _require(op_id is None or op_id in core.ops, f"{name}: counts on a closed operation")
    if status is RequestStatus.WAITING:
        _require(not live.block_ids and not live.num_kv_tokens, f"{name}: holds blocks")
        _require(not live.is_evict_wanted, f"{name}: waits for an eviction")
    _require(live.num_kv_tokens <= len(live.block_ids) * live.block_size, f"{name}: KV has blocks")
    _require(live.num_kv_tokens <= live.request.num_tokens, f"{name}: KV of unknown tokens")
    _require(len(set(live.block_ids)) == len(live.block_ids), f"{name}: a block twice")
    _require(not live.in_flight or status is RequestStatus.RUNNING, f"{name}: computed elsewhere")
    _check_flights(core, live, name)
    if live.worker is not None:
        to_write = live.block_ids[live.num_kv_tokens // live.block_size :]
        findable = [block for block in to_write if live.worker.pool.is_findable(block)]
        _require(not findable, f"{name}: would write to blocks {findable} that others may read")
        _require(live.worker.residents.get(live.id) is live, f"{name}: unknown to its worker")


def _check_flights(core: Core, live: LiveRequest, name: str) -> None:
    end, is_void = live.num_kv_tokens, False
    for flight in live.in_flight:
        _require(flight.live is live, f"{name}: another's chunk")
        _require(flight.is_void or not is_void, f"{name}: goes on from what has failed")
        _require(flight.is_void or flight.chunk.start <= end, f"{name}: skips positions")
        end, is_void = flight.end, flight.is_void
    _require(end <= len(live.block_ids) * live.block_size, f"{name}: writes past its blocks")
    _require(
        is_void or live.num_planned_outputs <= live.request.max_tokens,
        f"{name}: generates past its end",
    )
    steps = live.worker.steps if live.worker is not None else ()
    sent = [f for step in steps for f in step.flights if f in live.in_flight]
    _require(sent == live.in_flight, f"{name}: its chunks are in no step, or in another order")
    _require(
        live.batch_limit is None or is_void or len(live.in_flight) <= 1,
        f"{name}: under suspicion and sent ahead",
    )


def _check_worker(core: Core, worker: WorkerView) -> None:
    holds: list[int] = []
    for live in worker.residents.values():
        _require(core.requests.get(live.id) is live, f"{worker.id}: holds a request that ended")
        _require(live.worker is worker, f"{worker.id}: holds {live.id!r}, which is elsewhere")
        holds += live.block_ids
    for live in worker.incoming.values():
        _require(core.requests.get(live.id) is live, f"{worker.id}: expects a request that ended")
        if live.migration is None or live.migration.target is not worker:
            raise InvariantViolation(f"{worker.id}: expects {live.id!r}, which does not come")
        holds += live.migration.block_ids
    for op in core.ops.values():
        if op.worker is worker:
            holds += op.held_block_ids
    for flight in (flight for step in worker.steps for flight in step.flights):
        holds += flight.orphaned_block_ids
    worker.pool.validate(holds)
    step_ids = [step.step_id for step in worker.steps]
    _require(step_ids == sorted(step_ids), f"{worker.id}: steps out of order")
    _require(
        len(step_ids) <= core.config.max_steps_in_flight,
        f"{worker.id}: more than max_steps_in_flight steps",
    )
    saving = [r for r in worker.residents.values() if r.status is RequestStatus.SAVING]
    _require(worker.num_saving == len(saving), f"{worker.id}: requests that leave are miscounted")
    _require(worker.work.is_busy != worker.is_idle, f"{worker.id}: its time is miscounted")
    if worker.is_idle:
        _check_idle(core, worker)
    _require(
        worker.num_seats_taken <= core.config.max_num_seqs,
        f"{worker.id}: more than max_num_seqs requests",
    )


def _check_roster(core: Core) -> None:
    """What is remembered about workers so that not all have to be looked at, against all."""
    findable: dict[bytes, set[str]] = {}
    for worker in core.workers.values():
        for block_hash in worker.pool.findable_hashes:
            findable.setdefault(block_hash, set()).add(worker.id)
    prefixes = core.roster.prefixes
    _require(
        len(prefixes) == len(findable)
        and all(set(prefixes.holders(h)) == names for h, names in findable.items()),
        "the index of prefixes is not what the workers can find",
    )
    draining = {worker.id for worker in core.workers.values() if worker.is_draining}
    _require(core.draining.keys() == draining, "draining workers are miscounted")
    sizes = [w.pool.num_blocks for w in core.workers.values()] + list(core.expected.values())
    _require(core.largest_num_blocks == max(sizes, default=0), "the largest pool is misremembered")
    untouched = [worker for worker in core.workers.values() if not core.is_touched(worker)]
    for worker in untouched:
        _require(core.roster.load(worker.id) == load_of(worker), f"{worker.id}: unknown load")
    head = core.head()
    if head is not None and head is core.blocked:
        placement = choose_worker(head, core.roster, core.config, untouched)
        _require(placement is None, f"request {head.id!r} waits although there is room for it")
        if core.cleared is None or core.cleared in untouched:
            choice = policy.choose_worker_to_clear(head, untouched, core.config)
            _require(
                choice is None or not choice[1],
                f"request {head.id!r} waits although others have to make room for it",
            )


def _check_idle(core: Core, worker: WorkerView) -> None:
    """An idle worker has nothing to compute that it could, and nothing to be told."""
    running = [r for r in worker.active() if r.status is RequestStatus.RUNNING and not is_moving(r)]
    for live in policy.choose_suspects(running) or running:
        end = policy.chunk_end(live, core.config.max_num_batched_tokens, core.config)
        missing = policy.blocks_for(end, live.block_size) - len(live.block_ids)
        _require(
            missing > worker.pool.num_free, f"{worker.id}: idle, and could compute {live.id!r}"
        )
    _require(
        worker.has_refused_releases or not worker.released_request_ids,
        f"{worker.id}: idle, and does not know what to forget",
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantViolation(what)
