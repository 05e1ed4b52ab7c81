"""Places waiting requests on workers, in order, until the first one finds no room.

A head that found no room is offered again only to workers that have changed since: what was not
enough on the others is not enough now. `invariants` checks that nothing is overlooked.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler import policy
from scheduler.core import Core
from scheduler.live import LiveRequest, WorkerView
from scheduler.placement import Placement, choose_worker
from scheduler.residency import evict, place


def admit(core: Core) -> None:
    """Place waiting requests in order until the head finds no room."""
    changed = core.take_touched()
    while (live := core.head()) is not None:
        is_known = live is core.blocked
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
