"""The scheduling core: `SchedulerState.handle(*events) -> actions`, and no other way in.

Rules:
- No IO, no clock, no randomness. Time comes in on events; every outcome of an action, failure
  included, comes back as an event.
- The request first in order (priority, then submission) can always go on: it may take blocks
  from any request after it, and one that could never fit is refused at submission.
- Requests are admitted in order. A head that finds no room keeps those behind it waiting, so
  that a stream of small requests can't starve a large one.
"""

from __future__ import annotations

from offload_store.keys import HashChain
from scheduler import policy
from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.core import Core
from scheduler.ending import finish
from scheduler.errors import (
    DuplicateRequest,
    EngineUnavailable,
    HaversackError,
    InvalidConfig,
    RequestTooLarge,
)
from scheduler.invariants import check_invariants
from scheduler.live import LiveRequest, WorkerView
from scheduler.messages import (
    AnyAction,
    AnyEvent,
    BatchDone,
    BatchFailed,
    EvictRequested,
    LoadDone,
    LoadFailed,
    LookupDone,
    Refuse,
    RequestCancelled,
    RequestInfo,
    RequestSubmitted,
    SaveDone,
    SaveFailed,
    SchedulerStats,
    WorkerJoined,
    WorkerLost,
)
from scheduler.reports import request_info
from scheduler.request import FinishReason, Request, RequestStatus
from scheduler.residency import admit, end_load, evict, forget_place, load, requeue
from scheduler.stepping import fail_batch, start_step, take_batch


class SchedulerState:
    """Every request, worker and store operation, and what is to be done next."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._core = Core(config)

    def handle(self, *events: AnyEvent) -> list[AnyAction]:
        """Take in what happened, in order, and return what is to be done.

        Events about operations, steps or requests that are over are ignored: they come late after
        a cancellation or a loss.
        """
        core = self._core
        for event in events:
            core.now_s = max(core.now_s, event.time_s)
            self._dispatch(event)
        admit(core)
        for worker in core.workers.values():
            if worker.is_idle:
                start_step(core, worker)
        actions, core.actions = core.actions, []
        return actions

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            InvariantViolation: one does not hold.
        """
        check_invariants(self._core)

    def stats(self) -> SchedulerStats:
        """Return the counters, and the gauges as of now."""
        core, stats = self._core, self._core.stats
        statuses = [live.status for live in core.requests.values()]
        stats.num_waiting = statuses.count(RequestStatus.WAITING)
        stats.num_running = len(statuses) - stats.num_waiting
        stats.num_workers = len(core.workers)
        stats.num_blocks = sum(w.pool.num_blocks for w in core.workers.values())
        stats.num_used_blocks = sum(w.pool.num_used for w in core.workers.values())
        return stats

    def request_infos(self, now_s: float) -> list[RequestInfo]:
        """Return what operators see of each live request, in order of service."""
        ordered = sorted(self._core.requests.values(), key=lambda live: live.request.rank)
        return [request_info(live, now_s) for live in ordered]

    def request(self, request_id: str) -> Request | None:
        """Return a live request's own state, which is all that has to survive of it."""
        live = self._core.requests.get(request_id)
        return live.request if live is not None else None

    def _dispatch(self, event: AnyEvent) -> None:
        match event:
            case RequestSubmitted():
                self._submit(event)
            case RequestCancelled():
                for live in self._family(event.request_id):
                    finish(self._core, live, FinishReason.ABORT)
            case EvictRequested():
                for live in self._family(event.request_id):
                    evict(self._core, live, "asked for")
            case WorkerJoined():
                self._join(event)
            case WorkerLost():
                self._lose(event)
            case BatchDone():
                self._end_batch(event.worker_id, event.output.step_id, event)
            case BatchFailed():
                self._end_batch(event.worker_id, event.step_id, event)
            case LookupDone():
                self._take_lookup(event)
            case LoadDone():
                self._end_load(event.op_id, event.num_loaded_blocks, "blocks loaded")
            case LoadFailed():
                self._end_load(event.op_id, 0, f"the load failed: {event.reason}")
            case SaveDone():
                self._end_save(event)
            case SaveFailed():
                self._end_save(event)

    # -------------------------------------------------------------------------- submissions

    def _family(self, request_id: str) -> list[LiveRequest]:
        """Return the live requests of a submission, or the one of n that has this id itself."""
        core = self._core
        if request_id in core.families:
            return [core.requests[name] for name in core.families[request_id]]
        return [core.requests[request_id]] if request_id in core.requests else []

    def _submit(self, event: RequestSubmitted) -> None:
        core = self._core
        try:
            accepted = self._accepted(event)
        except HaversackError as error:
            core.stats.num_refused += 1
            core.actions.append(Refuse(ticket=event.ticket, error=error.to_wire()))
            return
        core.families[event.submission.request_id] = [r.request_id for r in accepted]
        for request in accepted:
            request.arrival = core.next_arrival
            core.next_arrival += 1
            chain = HashChain(
                core.config.cache_namespace, request.cache_salt, core.config.block_size
            )
            live = LiveRequest(request, event.time_s, chain, core.config.block_size)
            core.requests[request.request_id] = live
            core.queue(live)
            core.stats.num_prompt_tokens += request.num_prompt_tokens

    def _accepted(self, event: RequestSubmitted) -> list[Request]:
        core = self._core
        if not core.workers:
            raise EngineUnavailable("no worker is there to compute requests: restart the engine")
        largest = max(worker.pool.num_blocks for worker in core.workers.values())
        accepted = policy.accept(event.submission, core.config, largest, event.client_id)
        for name in (event.submission.request_id, *(r.request_id for r in accepted)):
            if name in core.families or name in core.requests:
                raise DuplicateRequest(
                    f"a live request is called {name!r}: give another request_id, or wait until "
                    "it has ended",
                    param="request_id",
                )
        return accepted

    # ------------------------------------------------------------------------------ workers

    def _join(self, event: WorkerJoined) -> None:
        core, info = self._core, event.info
        if info.worker_id in core.workers or info.block_size != core.config.block_size:
            raise InvalidConfig(
                f"worker {info.worker_id!r} can't join: the name is taken, or its blocks of "
                f"{info.block_size} tokens are not the engine's ({core.config.block_size})"
            )
        pool = BlockPool(
            info.num_blocks,
            info.block_size,
            enable_prefix_caching=core.config.enable_prefix_caching,
        )
        core.workers[info.worker_id] = WorkerView(info, pool)

    def _lose(self, event: WorkerLost) -> None:
        """Requeue a lost worker's requests: they keep their rows and lose only KV."""
        core = self._core
        worker = core.workers.pop(event.worker_id, None)
        if worker is None:
            return
        core.stats.num_workers_lost += 1
        for op_id in [op.op_id for op in core.ops.values() if op.worker is worker]:
            del core.ops[op_id]
        for live in worker.active() + [
            r for r in worker.residents.values() if r.status is RequestStatus.SAVING
        ]:
            live.request.stats.num_workers_lost += 1
            live.move_to(RequestStatus.WAITING, core.now_s, f"worker lost: {event.reason}")
            forget_place(live)
            core.queue(live)
        for live in list(core.requests.values()):
            if not core.workers:
                error: HaversackError = EngineUnavailable(
                    f"the last worker was lost ({event.reason}): restart the engine"
                )
            elif not any(policy.fits(live.request, w) for w in core.workers.values()):
                error = RequestTooLarge("no worker that is left has enough KV blocks for it")
            else:
                continue
            finish(core, live, FinishReason.ERROR, error=error)

    def _end_batch(self, worker_id: str, step_id: int, event: BatchDone | BatchFailed) -> None:
        worker = self._core.workers.get(worker_id)
        if worker is None or worker.step_id != step_id:
            return
        if isinstance(event, BatchDone):
            take_batch(self._core, worker, event)
        else:
            fail_batch(self._core, worker, event)

    # -------------------------------------------------------------------- the offload store

    def _take_lookup(self, event: LookupDone) -> None:
        core = self._core
        op = core.close_op(event.op_id)
        if op is None or op.live is None:
            return
        live, limits = op.live, op.live.request.num_readable_tokens
        num_hit_tokens = min(event.num_hit_tokens, max(limits))
        extra_tokens = max(num_hit_tokens - live.num_kv_tokens, 0)
        if limits.shared:
            core.stats.num_store_hit_tokens += extra_tokens
        if extra_tokens < live.block_size:
            end_load(core, live, 0, "nothing to load")
        else:
            load(core, live, op.worker, num_hit_tokens // live.block_size)

    def _end_load(self, op_id: int, num_loaded_blocks: int, why: str) -> None:
        op = self._core.close_op(op_id)
        if op is not None and op.live is not None:
            end_load(self._core, op.live, min(num_loaded_blocks, op.num_blocks), why)

    def _end_save(self, event: SaveDone | SaveFailed) -> None:
        core = self._core
        op = core.close_op(event.op_id)
        if op is None:
            return
        why = "saved"
        if isinstance(event, SaveDone):
            core.stats.num_saved_blocks += event.num_saved_blocks
            core.stats.num_copied_blocks += event.num_copied_blocks
        else:
            why = f"the save failed: {event.reason}"
        if op.live is not None:
            requeue(core, op.live, why)
