"""Places waiting requests on workers, in order, until the first one finds no room.

A request that needs nothing computed ends here, and never gets to a worker.

A head that found no room is offered again only to workers that have changed since, unless it can
have more rows now and so read more of a cache: what was not enough on the others is not enough now.
`invariants` checks that nothing is overlooked.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler import policy
from scheduler.core import Core
from scheduler.ending import finish
from scheduler.live import LiveRequest, WorkerView
from scheduler.placement import Placement, choose_worker
from scheduler.residency import evict, place
from scheduler.row_reuse import complete_rows, look_for_rows


def admit(core: Core) -> None:
    """Place waiting requests in order until the head finds no room."""
    if core.head() is None:
        return  # nobody asks for loads before somebody waits
    changed = core.take_touched()
    while (live := core.head()) is not None:
        num_row_blocks = live.num_row_blocks
        look_for_rows(core, live)
        if complete_rows(core, live):
            ended = policy.end_of(live.request)
            if ended is not None:
                finish(core, live, ended[0], stop_reason=ended[1])
            continue
        is_known = live is core.blocked and live.num_row_blocks == num_row_blocks
        if is_known and not changed:
            return
        placement = _find_place(core, live, changed if is_known else None)
        core.blocked = live if placement is None else None
        if placement is None:
            return
        place(core, live, placement)
        changed = core.take_touched()


def _find_place(
    core: Core, live: LiveRequest, among: Sequence[WorkerView] | None
) -> Placement | None:
    if among is None:
        core.cleared = None
    placement = choose_worker(live, core.roster, core.config, among)
    if placement is not None or not core.roster.has_lower_priority_than(live.request.priority):
        return placement
    workers: Sequence[WorkerView] | None = among
    if among is None or core.cleared in among:
        workers = list(core.workers.values())
    elif core.cleared is not None:
        return None  # what leaves there already will do
    choice = policy.choose_worker_to_clear(live, workers or [], core.config)
    core.cleared = choice[0] if choice is not None else None
    if choice is None:
        return None
    for victim in choice[1]:
        evict(core, victim, f"its place goes to {live.id}")
    return choose_worker(live, core.roster, core.config, core.take_touched())
