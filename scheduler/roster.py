"""The workers as admission looks for one: by their load, and by what their prefix caches hold.

Rules:
- A load is a snapshot: `update` takes a new one, and must be called for every worker that has
  changed before anything here is read. `Core.take_touched` does that.
- Work is proportional to the workers that have changed and to those that are looked at, not to
  those that are there: a worker without a free place is not looked at.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from scheduler.live import WorkerView
from scheduler.prefix_index import PrefixIndex
from scheduler.request import RequestStatus

Rank = tuple[int, int]
"""See `Request.rank`."""

_NOBODY: Rank = (-(2**63), -1)
_FEW = 16
"""So many workers are sorted by themselves; of more, the sorted list of all is filtered."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has to do, when it was last looked at."""

    worker: WorkerView
    num_pending_tokens: int
    """Known tokens that its requests still have to compute."""
    num_active: int
    """Requests that compute there or will."""
    last_rank: Rank
    """The rank of the one of them that is served last."""


def load_of(worker: WorkerView) -> Load:
    """Take a worker's load."""
    num_pending_tokens = num_active = 0
    last_rank = _NOBODY
    for live in worker.residents.values():
        if live.request.status is RequestStatus.SAVING:
            continue
        num_active += 1
        pending = live.num_pending_tokens
        if pending > 0:
            num_pending_tokens += pending
        if live.rank > last_rank:
            last_rank = live.rank
    return Load(worker, num_pending_tokens, num_active, last_rank)


_Entry = tuple[int, int, int, str]
"""Pending tokens, active requests, `WorkerView.number`, name."""


class Roster:
    """Every worker of an engine."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self.prefixes = PrefixIndex()
        self._loads: dict[str, Load] = {}
        self._entries: dict[str, _Entry] = {}
        """Of the workers that may take a request."""
        self._by_load: list[_Entry] = []
        """The same, sorted."""
        self._priorities: Counter[int] = Counter()
        """Lowest priority on a worker (the greatest number) -> workers of which that is true."""
        self.last_rank = _NOBODY
        """No request here has ever had a later one."""

    def update(self, worker: WorkerView) -> None:
        """Note a worker's load as it is now."""
        name = worker.id
        load = load_of(worker)
        self._discard(name)
        self._loads[name] = load
        self._priorities[load.last_rank[0]] += 1
        self.last_rank = max(self.last_rank, load.last_rank)
        if not worker.is_draining and worker.num_seats_taken < self._max_num_seqs:
            entry = (load.num_pending_tokens, load.num_active, worker.number, name)
            self._entries[name] = entry
            insort(self._by_load, entry)

    def remove(self, worker: WorkerView) -> None:
        """Forget a worker that is gone; its pool has to be closed by itself."""
        self._discard(worker.id)
        self._loads.pop(worker.id, None)

    def _discard(self, name: str) -> None:
        before = self._loads.get(name)
        if before is None:
            return
        priority = before.last_rank[0]
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        entry = self._entries.pop(name, None)
        if entry is not None:
            del self._by_load[bisect_left(self._by_load, entry)]

    def load(self, name: str) -> Load | None:
        """A worker's load; None where no such worker is there."""
        return self._loads.get(name)

    def by_load(self, names: Collection[str] | None = None) -> Iterator[Load]:
        """Those of some workers (None: of all) that have a free place, the least busy first."""
        if names is None:
            entries = iter(self._by_load)
        elif len(names) <= _FEW:
            entries = iter(sorted(self._entries[name] for name in names if name in self._entries))
        else:
            entries = (entry for entry in self._by_load if entry[3] in names)
        return (self._loads[entry[3]] for entry in entries)

    def has_lower_priority_than(self, priority: int) -> bool:
        """Whether a request of lower priority is on any worker."""
        return max(self._priorities, default=priority) > priority
