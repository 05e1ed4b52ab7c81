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

import heapq
from operator import attrgetter

from offload_store.keys import HashChain
from scheduler import policy
from scheduler.acceptance import accept, retry_after_s
from scheduler.actions import AnyAction, RecordSubmitted, Refuse
from scheduler.admission import admit
from scheduler.balancing import begin_drain, drain, even_out, fail_hopeless, move_wanted
from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.core import Core
from scheduler.ending import expire, finish
from scheduler.errors import (
    CannotMigrate,
    DuplicateRequest,
    EngineUnavailable,
    HaversackError,
    InvalidConfig,
    InvariantViolation,
    Overloaded,
    UnknownRequest,
    UnknownWorker,
)
from scheduler.events import (
    AnyEvent,
    BatchDone,
    BatchFailed,
    ClientGone,
    CopyDone,
    DrainRequested,
    EvictRequested,
    LoadDone,
    LoadFailed,
    LookupDone,
    MigrateRequested,
    ReplayRequested,
    RequestCancelled,
    RequestRestored,
    RequestSubmitted,
    SaveDone,
    SaveFailed,
    StoreLost,
    Tick,
    WorkerExpected,
    WorkerJoined,
    WorkerLost,
    WorkerNotComing,
)
from scheduler.invariants import check_invariants
from scheduler.live import LiveRequest, WorkerView
from scheduler.messages import (
    Lives,
    RequestInfo,
    SchedulerStats,
    Submission,
    WorkerReport,
    WorkerUse,
)
from scheduler.migration import start_migration, take_copy
from scheduler.reports import load_of, request_info, request_life, worker_report, worker_use
from scheduler.request import FinishReason, Request, RequestStatus
from scheduler.residency import (
    abandon_migration,
    end_load,
    end_save,
    evict,
    forget_place,
    load,
    requeue,
)
from scheduler.scaling import Load
from scheduler.stepping import fail_batch, start_steps, suspect_batch, take_batch
from scheduler.submissions import content_hash, submission_of
from scheduler.timings import Timings


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
        while (late := core.pop_expired()) is not None:
            expire(core, late)
        move_wanted(core)
        drain(core)
        admit(core)
        while workers := core.take_to_step():
            for worker in workers:
                start_steps(core, worker)
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
        stats.num_waiting = core.num_waiting
        stats.num_queued_tokens = core.num_queued_tokens
        stats.num_running = len(core.requests) - core.num_waiting
        stats.num_workers = len(core.workers)
        stats.num_blocks = sum(w.pool.num_blocks for w in core.workers.values())
        stats.num_used_blocks = sum(w.pool.num_used for w in core.workers.values())
        stats.num_row_cache_blocks = core.row_cache.num_blocks
        stats.num_row_cache_bytes = core.row_cache.num_bytes
        return stats

    def timings(self) -> Timings:
        """Return the latencies of requests so far."""
        return self._core.timings

    def worker_uses(self) -> list[WorkerUse]:
        """Return what each worker is used for, as of the latest event."""
        return [worker_use(worker, self._core.now_s) for worker in self._core.workers.values()]

    def load(self, now_s: float) -> Load:
        """Return what there is to do and was done."""
        core = self._core
        staying = [worker for worker in core.workers.values() if not worker.is_draining]
        return load_of(core.head(), core.num_queued_tokens, staying, core.stats, now_s)

    def request_infos(self, now_s: float) -> list[RequestInfo]:
        """Return what operators see of each live request, in order of service."""
        ordered = sorted(self._core.requests.values(), key=lambda live: live.rank)
        return [request_info(live, now_s) for live in ordered]

    def lives(self, now_s: float, max_live: int, max_ended: int) -> Lives:
        """Return what has happened to requests.

        Args:
            now_s: the time now.
            max_live: live requests that are told: the first ones in order of service.
            max_ended: requests that have ended that are told: the last ones, of those kept.
        """
        core = self._core
        first = heapq.nsmallest(max_live, core.requests.values(), key=attrgetter("rank"))
        return Lives(
            now_s=now_s,
            live=[request_life(live, now_s) for live in first],
            ended=list(core.lately_ended)[-max_ended:] if max_ended else [],
            num_live=len(core.requests),
        )

    def worker_reports(self) -> list[WorkerReport]:
        """Return what operators see of each worker."""
        return [worker_report(worker) for worker in self._core.workers.values()]

    def live_ids(self) -> list[str]:
        """Return the ids of the requests that have not ended."""
        return list(self._core.requests)

    def submission(self, request_id: str) -> Submission | None:
        """Return what was submitted under an id that is live."""
        family = self._family(request_id)
        return submission_of(family[0].request) if family else None

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
            case MigrateRequested():
                self._migrate(event)
            case ClientGone():
                self._forget_client(event.client_id)
            case ReplayRequested():
                self._replay(event.request_id, event.client_id)
            case RequestRestored():
                self._restore(event)
            case WorkerJoined():
                self._join(event)
            case WorkerExpected():
                self._core.expect(event.worker_id, event.num_blocks)
            case WorkerNotComing():
                if self._core.stop_expecting(event.worker_id):
                    fail_hopeless(self._core, f"{event.worker_id} can't be started: {event.reason}")
            case DrainRequested():
                self._drain(event)
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
            case CopyDone():
                op = self._core.close_op(event.op_id)
                if op is not None:
                    take_copy(self._core, op, min(event.num_copied_blocks, op.num_blocks))
            case StoreLost():
                self._core.stats.num_stores_lost += 1
                for live in self._core.requests.values():
                    live.num_saved_blocks = live.num_tried_blocks = 0
            case Tick():
                even_out(self._core)

    # -------------------------------------------------------------------------- submissions

    def _family(self, request_id: str) -> list[LiveRequest]:
        """Return the live requests of a submission, or the one of n that has this id itself."""
        core = self._core
        if request_id in core.families:
            return [core.requests[name] for name in core.families[request_id]]
        return [core.requests[request_id]] if request_id in core.requests else []

    def _replay(self, request_id: str, client_id: str) -> None:
        """Make a client follow a submission, and tell it all that is visible so far."""
        self._core.replay_ended(request_id, client_id)
        for live in self._family(request_id):
            self._core.replay(live, client_id)

    def _submit(self, event: RequestSubmitted) -> None:
        core = self._core
        family = core.families.get(event.submission.request_id)
        if family and core.requests[family[0]].request.content_hash == content_hash(
            event.submission
        ):
            self._replay(event.submission.request_id, event.client_id)
            return
        try:
            accepted = self._accepted(event)
        except HaversackError as error:
            core.stats.num_refused += 1
            core.actions.append(Refuse(ticket=event.ticket, error=error.to_wire()))
            return
        timeout_s = event.submission.timeout_s
        for request in accepted:
            request.arrival = core.next_arrival
            core.next_arrival += 1
            request.deadline_s = None if timeout_s is None else event.time_s + timeout_s
            self._take_in(request, event.time_s)
            core.stats.num_prompt_tokens += request.num_prompt_tokens
            if core.config.enable_journal:
                core.actions.append(
                    RecordSubmitted(
                        request=request.encode(),
                        request_id=request.request_id,
                        parent_id=request.parent_id,
                    )
                )

    def _take_in(self, request: Request, now_s: float, *, is_restored: bool = False) -> LiveRequest:
        """Make a waiting request live."""
        core = self._core
        chain = HashChain(core.config.cache_namespace, request.cache_salt, core.config.block_size)
        live = LiveRequest(request, now_s, chain, core.config.block_size, is_restored)
        if request.client_id:
            live.followers.append(request.client_id)
        core.requests[live.id] = live
        core.families.setdefault(request.parent_id, []).append(live.id)
        core.queue(live)
        core.watch_deadline(live)
        return live

    def _accepted(self, event: RequestSubmitted) -> list[Request]:
        core, config = self._core, self._core.config
        if not (core.workers or core.expected):
            raise EngineUnavailable("no worker is there to compute requests: restart the engine")
        accepted = accept(event.submission, config, core.largest_num_blocks, event.client_id)
        for name in (event.submission.request_id, *(r.request_id for r in accepted)):
            if name in core.families or name in core.requests:
                raise DuplicateRequest(
                    f"a live request with other content is called {name!r}: give another "
                    "request_id, or wait until it has ended",
                    param="request_id",
                )
        num_tokens = sum(request.num_tokens for request in accepted)
        if core.num_waiting and (
            core.num_waiting + len(accepted) > config.max_queued_requests
            or core.num_queued_tokens + num_tokens > config.max_queued_tokens
        ):
            wait_s = retry_after_s(core.num_queued_tokens, core.stats)
            raise Overloaded(
                f"{core.num_waiting} requests with {core.num_queued_tokens} tokens wait already; "
                f"the engine lets {config.max_queued_requests} with {config.max_queued_tokens} "
                f"wait: try again in {wait_s:g} s",
                retry_after_s=wait_s,
            )
        return accepted

    def _restore(self, event: RequestRestored) -> None:
        """Take a request back in, with the progress and the place in the queue that it had."""
        core, request = self._core, event.request
        if request.request_id in core.requests:
            return
        core.next_arrival = max(core.next_arrival, request.arrival + 1)
        core.stats.num_requests_restored += 1
        live = self._take_in(request, event.time_s, is_restored=True)
        ended = policy.end_of(request)
        if ended is not None:
            finish(core, live, ended[0], stop_reason=ended[1])

    def _forget_client(self, client_id: str) -> None:
        core = self._core
        for live in list(core.requests.values()):
            if client_id not in live.followers:
                continue
            live.followers.remove(client_id)
            if not live.followers and not live.request.detached:
                finish(core, live, FinishReason.ABORT)

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
            name=info.worker_id,
            index=core.roster.prefixes,
        )
        core.add_worker(WorkerView(info, pool))
        fail_hopeless(core, "no worker is left")

    def _lose(self, event: WorkerLost) -> None:
        """Requeue a lost worker's requests: they keep their rows and lose only KV."""
        core = self._core
        worker = core.workers.get(event.worker_id)
        if worker is None:
            return
        core.remove_worker(worker)
        core.stats.num_workers_lost += 1
        for op in [op for op in core.ops.values() if op.worker is worker]:
            del core.ops[op.op_id]
            if op.beneficiary is not None and op.beneficiary.save_op_id == op.op_id:
                op.beneficiary.save_op_id = None
        for live in list(worker.incoming.values()):
            abandon_migration(core, live)
        suspect_batch(core, worker, event.reason)
        for live in list(worker.residents.values()):
            abandon_migration(core, live)
            live.request.stats.num_workers_lost += 1
            live.move_to(RequestStatus.WAITING, core.now_s, f"worker lost: {event.reason}")
            forget_place(live)
            core.queue(live)
        fail_hopeless(core, f"the last worker was lost ({event.reason})")

    def _drain(self, event: DrainRequested) -> None:
        core = self._core
        worker = core.workers.get(event.worker_id)
        if worker is None:
            self._refuse(event.ticket, _no_such_worker(core, event.worker_id))
        else:
            begin_drain(core, worker, event.deadline_s)

    def _migrate(self, event: MigrateRequested) -> None:
        core = self._core
        target = core.workers.get(event.worker_id)
        family = self._family(event.request_id)
        if target is None:
            self._refuse(event.ticket, _no_such_worker(core, event.worker_id))
            return
        if not family:
            error = UnknownRequest(f"no live request is called {event.request_id!r}")
            self._refuse(event.ticket, error)
            return
        for live in family:
            if live.worker is target:
                continue
            if not policy.is_open_to(live.request, target):
                why = "is being drained" if target.is_draining else "has too few blocks for it"
                self._refuse(event.ticket, CannotMigrate(f"worker {target.id!r} {why}"))
                return
            self._want_on(live, target, event.ticket)

    def _want_on(self, live: LiveRequest, target: WorkerView, ticket: int) -> None:
        core = self._core
        if not policy.is_movable(live):
            live.migrate_to = target.id
            core.wanted_elsewhere[live.id] = live
        elif policy.has_room_for(live, target, core.config):
            start_migration(core, live, target, "asked")
        else:
            why = f"worker {target.id!r} has no room for {live.id!r} now: try again later"
            self._refuse(ticket, CannotMigrate(why))

    def _refuse(self, ticket: int, error: HaversackError) -> None:
        self._core.actions.append(Refuse(ticket=ticket, error=error.to_wire()))

    def _end_batch(self, worker_id: str, step_id: int, event: BatchDone | BatchFailed) -> None:
        worker = self._core.workers.get(worker_id)
        if worker is None or all(step.step_id != step_id for step in worker.steps):
            return
        if worker.steps[0].step_id != step_id:
            raise InvariantViolation(f"{worker_id}: step {step_id} was answered before its turn")
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
        live, limits = op.live, policy.read_limits(op.live)
        num_hit_tokens = min(event.num_hit_tokens, max(limits))
        live.num_saved_blocks = min(live.num_saved_blocks, num_hit_tokens // live.block_size)
        if num_hit_tokens - live.num_kv_tokens < live.block_size:
            end_load(core, live, 0, "nothing to load")
        else:
            load(core, live, op.worker, num_hit_tokens // live.block_size)

    def _end_load(self, op_id: int, num_loaded_blocks: int, why: str) -> None:
        op = self._core.close_op(op_id)
        if op is None or op.live is None:
            return
        live = op.live
        end_load(self._core, live, min(num_loaded_blocks, op.num_blocks), why)
        if num_loaded_blocks < op.num_blocks:
            num_here = live.num_kv_tokens // live.block_size
            live.num_saved_blocks = min(live.num_saved_blocks, num_here)

    def _end_save(self, event: SaveDone | SaveFailed) -> None:
        core = self._core
        op = core.close_op(event.op_id)
        if op is None:
            return
        if isinstance(event, SaveDone):
            end_save(core, op, event.num_saved_blocks, event.num_copied_blocks)
            why = "saved"
        else:
            end_save(core, op, 0, 0)
            why = f"the save failed: {event.reason}"
        if op.live is not None:
            requeue(core, op.live, why)


def _no_such_worker(core: Core, worker_id: str) -> UnknownWorker:
    names = ", ".join(sorted(core.workers)) or "none"
    return UnknownWorker(f"no worker is called {worker_id!r}; there are: {names}")
