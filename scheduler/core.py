"""The data of the scheduling core, with the few changes that every part of it makes.

`residency`, `stepping` and `state` decide on this data; nothing else changes it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from scheduler.config import SchedulerConfig
from scheduler.live import LiveRequest, StoreOp, WorkerView
from scheduler.messages import AnyAction, Emit, SchedulerStats
from scheduler.reports import output_delta
from scheduler.request import RequestStatus


@dataclass(slots=True, eq=False)
class Core:
    """Every request, worker and store operation of an engine."""

    config: SchedulerConfig
    workers: dict[str, WorkerView] = field(default_factory=dict)
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    families: dict[str, list[str]] = field(default_factory=dict)
    """Submitted id -> ids of its live requests (several where n > 1)."""
    ops: dict[int, StoreOp] = field(default_factory=dict)
    actions: list[AnyAction] = field(default_factory=list)
    """What the events being handled ask for."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    now_s: float = 0.0
    """The latest time seen on an event."""
    next_arrival: int = 0
    next_op_id: int = 0
    next_step_id: int = 0
    _waiting: list[tuple[tuple[int, int], LiveRequest]] = field(default_factory=list)
    """Heap in order of service. Entries that are not WAITING any more are skipped."""

    def queue(self, live: LiveRequest) -> None:
        """Put a WAITING request in its place among those that wait."""
        heapq.heappush(self._waiting, (live.request.rank, live))
        if len(self._waiting) > 2 * len(self.requests) + 64:
            self._waiting = [
                (r.request.rank, r)
                for r in self.requests.values()
                if r.status is RequestStatus.WAITING
            ]
            heapq.heapify(self._waiting)

    def head(self) -> LiveRequest | None:
        """Return the request that is to be admitted next."""
        while self._waiting:
            live = self._waiting[0][1]
            if live.status is RequestStatus.WAITING and self.requests.get(live.id) is live:
                return live
            heapq.heappop(self._waiting)
        return None

    def emit(self, live: LiveRequest) -> None:
        """Tell the client what became visible of a request, if anything did."""
        delta = output_delta(live)
        if delta is not None:
            self.actions.append(Emit(client_id=live.request.client_id, delta=delta))

    def open_op(self, worker: WorkerView, live: LiveRequest | None, num_blocks: int) -> StoreOp:
        """Start to wait for the store on behalf of a request, or of nobody."""
        op = StoreOp(self.next_op_id, worker, live, num_blocks=num_blocks)
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
        if op.live is not None:
            op.live.op_id = None
        return op
