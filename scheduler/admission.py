"""Places waiting requests on workers, in order, until the first one finds no room.

A request that needs nothing computed ends here, and never gets to a worker.
"""

from __future__ import annotations

from scheduler import policy
from scheduler.core import Core
from scheduler.ending import finish
from scheduler.residency import evict, place
from scheduler.row_reuse import complete_rows, look_for_rows


def admit(core: Core) -> None:
    """Place waiting requests in order until the head finds no room."""
    while (live := core.head()) is not None:
        look_for_rows(core, live)
        if complete_rows(core, live):
            ended = policy.end_of(live.request)
            if ended is not None:
                finish(core, live, ended[0], stop_reason=ended[1])
            continue
        placement = policy.choose_worker(live, core.workers.values(), core.config)
        if placement is None:
            choice = policy.choose_worker_to_clear(live, core.workers.values(), core.config)
            if choice is None or not choice[1]:
                return
            for victim in choice[1]:
                evict(core, victim, f"its place goes to {live.id}")
            placement = policy.choose_worker(live, core.workers.values(), core.config)
            if placement is None:
                return
        place(core, live, placement)
