"""The data of the scheduling core, with the few changes that every part of it makes.

`residency`, `stepping` and `state` decide on this data; nothing else changes it.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from scheduler.actions import AnyAction, Emit
from scheduler.config import SchedulerConfig
from scheduler.live import LiveRequest, StoreOp, WorkerView
from scheduler.messages import RequestLife, SchedulerStats
from scheduler.reports import output_deltas, whole_deltas
from scheduler.request import Request, RequestStatus
from scheduler.roster import Roster
from scheduler.row_cache import RowCache
from scheduler.timings import Timings, WorkTimes

_number = attrgetter("number")
_MAX_ENDED = 256


@dataclass(slots=True, eq=False)
class Core:
    """Every request, worker and store operation of an engine."""

    config: SchedulerConfig
    workers: dict[str, WorkerView] = field(default_factory=dict)
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    families: dict[str, list[str]] = field(default_factory=dict)
    """Submitted id -> ids of its live requests (several where n > 1)."""
    ended_siblings: dict[str, list[Request]] = field(default_factory=dict)
    """Submitted id -> its requests that have ended while others of it go on, to be told to whoever
    follows it from now on; none where there is a journal, which keeps them."""
    lately_ended: deque[RequestLife] = field(default_factory=lambda: deque(maxlen=_MAX_ENDED))
    """What has happened to the requests that ended last."""
    ops: dict[int, StoreOp] = field(default_factory=dict)
    actions: list[AnyAction] = field(default_factory=list)
    """What the events being handled ask for."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    timings: Timings = field(default_factory=Timings)
    row_cache: RowCache = field(init=False)
    expected: dict[str, int] = field(default_factory=dict)
    """Workers that are being started -> the KV blocks that they will have."""
    wanted_elsewhere: dict[str, LiveRequest] = field(default_factory=dict)
    """Requests that an operator wants on another worker and that can't move yet."""
    draining: dict[str, WorkerView] = field(default_factory=dict)
    """Workers that are going away."""
    roster: Roster = field(init=False)
    """The workers as admission looks for one; up to date but for those that were touched."""
    blocked: LiveRequest | None = None
    """The request that no worker had room for, nor those that were not touched have now."""
    cleared: WorkerView | None = None
    """Where enough is leaving for `blocked`."""
    now_s: float = 0.0
    """The latest time seen on an event."""
    num_waiting: int = 0
    num_queued_tokens: int = 0
    """Known tokens of all waiting requests."""
    next_arrival: int = 0
    next_op_id: int = 0
    next_step_id: int = 0
    next_worker: int = 0
    _touched: dict[str, WorkerView] = field(default_factory=dict)
    """Workers that have changed since admission looked at them."""
    _to_step: dict[str, WorkerView] = field(default_factory=dict)
    """Workers that have changed since they were last asked whether a step can start."""
    _largest_num_blocks: int | None = None
    """Memory of `largest_num_blocks`; None where it has to be computed again."""
    _waiting: list[tuple[tuple[int, int], LiveRequest]] = field(default_factory=list)
    """Heap in order of service. Entries that are not WAITING any more are skipped."""
    _deadlines: list[tuple[float, int, str]] = field(default_factory=list)
    """Heap of (deadline, arrival, id) of requests; those that have ended are skipped."""

    def __post_init__(self) -> None:
        self.row_cache = RowCache(self.config.row_cache_bytes)
        self.roster = Roster(self.config.max_num_seqs)

    def add_worker(self, worker: WorkerView) -> None:
        """Begin to use a worker."""
        worker.number, self.next_worker = self.next_worker, self.next_worker + 1
        worker.work = WorkTimes(self.now_s)
        self.workers[worker.id] = worker
        self.stop_expecting(worker.id)
        self._largest_num_blocks = None
        self.touch(worker)

    def remove_worker(self, worker: WorkerView) -> None:
        """Forget a worker that is gone."""
        del self.workers[worker.id]
        self.draining.pop(worker.id, None)
        self._touched.pop(worker.id, None)
        self._to_step.pop(worker.id, None)
        self.roster.remove(worker)
        worker.pool.close()
        self._largest_num_blocks = None
        self.blocked = self.cleared = None

    def expect(self, worker_id: str, num_blocks: int) -> None:
        """Count on a worker that is being started."""
        self.expected[worker_id] = num_blocks
        self._largest_num_blocks = None

    def stop_expecting(self, worker_id: str) -> bool:
        """Count no longer on a worker's start; return whether that was done so far."""
        self._largest_num_blocks = None
        return self.expected.pop(worker_id, None) is not None

    @property
    def largest_num_blocks(self) -> int:
        """KV blocks of the largest worker, expected ones included; 0 where there is none."""
        if self._largest_num_blocks is None:
            sizes = [w.pool.num_blocks for w in self.workers.values()]
            self._largest_num_blocks = max([*sizes, *self.expected.values()], default=0)
        return self._largest_num_blocks

    def touch(self, worker: WorkerView) -> None:
        """Note that a worker has changed, so that admission and stepping look at it again.

        Due after whatever may make room there, let one of its requests be computed, or change the
        tokens that it has to compute.
        """
        if self.workers.get(worker.id) is worker:
            self._touched[worker.id] = worker
            self._to_step[worker.id] = worker

    def is_touched(self, worker: WorkerView) -> bool:
        """Whether admission has still to look at a worker's changes."""
        return worker.id in self._touched

    def take_touched(self) -> list[WorkerView]:
        """Bring the roster up to date, and return the workers that were not."""
        if not self._touched:
            return []
        touched = list(self._touched.values())
        self._touched.clear()
        for worker in touched:
            self.roster.update(worker)
        return touched

    def take_to_step(self) -> list[WorkerView]:
        """Return the workers that have changed since they were returned last, as they joined."""
        workers = sorted(self._to_step.values(), key=_number)
        self._to_step.clear()
        return workers

    def watch_deadline(self, live: LiveRequest) -> None:
        """End the request when its deadline has passed, if it has one."""
        request = live.request
        if request.deadline_s is None:
            return
        heapq.heappush(self._deadlines, (request.deadline_s, request.arrival, live.id))
        if len(self._deadlines) > 2 * len(self.requests) + 64:
            self._deadlines = [e for e in self._deadlines if self._is_live(e[2], e[1])]
            heapq.heapify(self._deadlines)

    def pop_expired(self) -> LiveRequest | None:
        """Return a live request whose deadline has passed, each one once."""
        while self._deadlines and self._deadlines[0][0] <= self.now_s:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            if self._is_live(request_id, arrival):
                return self.requests[request_id]
        return None

    def _is_live(self, request_id: str, arrival: int) -> bool:
        live = self.requests.get(request_id)
        return live is not None and live.request.arrival == arrival

    def queue(self, live: LiveRequest) -> None:
        """Put a WAITING request in its place among those that wait."""
        live.num_queued_tokens = live.request.num_tokens
        self.num_waiting += 1
        self.num_queued_tokens += live.num_queued_tokens
        heapq.heappush(self._waiting, (live.rank, live))
        if len(self._waiting) > 2 * len(self.requests) + 64:
            self._waiting = [
                (r.rank, r) for r in self.requests.values() if r.status is RequestStatus.WAITING
            ]
            heapq.heapify(self._waiting)

    def unqueue(self, live: LiveRequest) -> None:
        """Take a request that waits no more out of the queue's counts."""
        self.num_waiting -= 1
        self.num_queued_tokens -= live.num_queued_tokens
        live.num_queued_tokens = 0
        if live is self.blocked:
            self.blocked = self.cleared = None

    def head(self) -> LiveRequest | None:
        """Return the request that is to be admitted next."""
        while self._waiting:
            live = self._waiting[0][1]
            if live.status is RequestStatus.WAITING and self.requests.get(live.id) is live:
                return live
            heapq.heappop(self._waiting)
        return None

    def emit(self, live: LiveRequest) -> None:
        """Tell the followers what became visible of a request, if anything did."""
        for delta in output_deltas(live):
            self.actions += [Emit(client_id=client_id, delta=delta) for client_id in live.followers]

    def replay(self, live: LiveRequest, client_id: str) -> None:
        """Make a client a follower, and tell it all that is visible so far."""
        if client_id not in live.followers:
            live.followers.append(client_id)
        if live.is_prompt_emitted:
            self._tell(client_id, live.request)

    def replay_ended(self, parent_id: str, client_id: str) -> None:
        """Tell a client all of those of a live submission that have ended before the others."""
        for request in self.ended_siblings.get(parent_id, []):
            self._tell(client_id, request)

    def _tell(self, client_id: str, request: Request) -> None:
        deltas = whole_deltas(request)
        self.actions += [Emit(client_id=client_id, delta=delta) for delta in deltas]

    def open_op(
        self,
        worker: WorkerView,
        live: LiveRequest | None,
        num_blocks: int,
        *,
        first_block: int = 0,
        beneficiary: LiveRequest | None = None,
    ) -> StoreOp:
        """Start to wait for an operation on behalf of a request that waits too, or of none."""
        op = StoreOp(
            self.next_op_id,
            worker,
            live,
            self.now_s,
            first_block=first_block,
            num_blocks=num_blocks,
            beneficiary=beneficiary,
        )
        self.next_op_id += 1
        self.ops[op.op_id] = op
        if live is not None:
            live.op_id = op.op_id
        return op

    def close_op(self, op_id: int) -> StoreOp | None:
        """Take an answered operation off the books and free what only it held.

        Returns:
            None where the operation is unknown: its worker was lost meanwhile.
        """
        op = self.ops.pop(op_id, None)
        if op is None:
            return None
        op.worker.pool.free(op.held_block_ids)
        self.touch(op.worker)
        if op.live is not None:
            op.live.op_id = None
        return op
