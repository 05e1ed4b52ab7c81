"""Which worker a waiting request goes to.

The rule: of the workers with room the one that would be done with it first, which is the one with
the fewest tokens to compute, those counted that its prefix cache does not supply. It is found
without a look at every worker: for each number of leading blocks that some workers hold, the least
busy one of these with room is the best one of these; and the least busy one of all is the best one
of those that hold nothing.

That is exact where a worker's tokens are those before the request, which is so for each request
that comes after all others in order. For one that comes before others (its priority is higher, or
it was evicted) the tokens behind it are counted too; but whether there is room for it is a
matter of those before it only, so that it is at most a few steps' tokens worse off.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from scheduler import policy
from scheduler.config import SchedulerConfig
from scheduler.live import LiveRequest, WorkerView
from scheduler.request import RequestStatus
from scheduler.roster import Load, Roster


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker that can take a request now."""

    worker: WorkerView
    cached_block_ids: list[int]
    """Leading blocks that its prefix cache supplies."""


@dataclass(frozen=True, slots=True)
class _Offer:
    cost: int
    """Tokens until it is done."""
    num_active: int
    placement: Placement

    def is_better_than(self, other: _Offer | None) -> bool:
        return other is None or (self.cost, self.num_active) < (other.cost, other.num_active)


def choose_worker(
    live: LiveRequest,
    roster: Roster,
    config: SchedulerConfig,
    among: Sequence[WorkerView] | None = None,
) -> Placement | None:
    """Return where to put a waiting request, or None while no worker has room.

    A worker has room if a place and the blocks for all known tokens are free, and less work stands
    before the request than the steps take that it may be sent. Unless the worker is empty, one
    block per running request stays free too, so that a readmitted request is not evicted again at
    their next step. A worker that is about to compute the block that the request lacks next has
    room once it has done so.
    The worker that an operator has named is chosen where it has room.

    Args:
        among: the only workers to look at; None is all.
    """
    named = roster.load(live.migrate_to) if live.migrate_to is not None else None
    if named is not None and (among is None or named.worker in among):
        offer = _offer(live, named, config)
        if offer is not None:
            return offer.placement
    if among is None:
        best = _best_of_all(live, roster, config)
    else:
        best = None
        for worker in among:
            load = roster.load(worker.id)
            offer = _offer(live, load, config) if load is not None else None
            if offer is not None and offer.is_better_than(best):
                best = offer
    return best.placement if best is not None else None


def _best_of_all(live: LiveRequest, roster: Roster, config: SchedulerConfig) -> _Offer | None:
    best: _Offer | None = None
    is_last = live.rank > roster.last_rank
    levels: list[tuple[int, Collection[str] | None]] = [(0, None), *_holders(live, roster)]
    for num_blocks, names in reversed(levels):
        num_own_tokens = live.request.num_tokens - num_blocks * config.block_size
        for load in roster.by_load(names):
            if best is not None and load.num_pending_tokens + num_own_tokens > best.cost:
                break
            if is_last and load.num_pending_tokens >= _max_tokens_before(config):
                break
            offer = _offer(live, load, config)
            if offer is None:
                continue
            if offer.is_better_than(best):
                best = offer
            if len(offer.placement.cached_block_ids) >= num_blocks:
                break
    return best


def _holders(live: LiveRequest, roster: Roster) -> list[tuple[int, Collection[str]]]:
    """Numbers of leading blocks, ascending, and the workers that hold so many of the request's.

    Of the numbers that the same workers hold only the greatest one is given.
    """
    levels: list[tuple[int, Collection[str]]] = []
    for num_blocks, block_hash in enumerate(policy.readable_hashes(live), 1):
        names = roster.prefixes.holders(block_hash)
        if not names:
            break
        if levels and len(levels[-1][1]) == len(names):
            levels.pop()
        levels.append((num_blocks, names))
    return levels


def _offer(live: LiveRequest, load: Load, config: SchedulerConfig) -> _Offer | None:
    """What it would cost to compute the request there; None where there is no room."""
    request, worker = live.request, load.worker
    if worker.num_seats_taken >= config.max_num_seqs or not policy.is_open_to(request, worker):
        return None
    if _num_tokens_before(live, load) >= _max_tokens_before(config):
        return None
    cached = policy.cached_blocks(live, worker)
    if policy.is_prefix_coming(live, worker, len(cached), config):
        return None
    if policy.num_blocks_to_take(live, worker, cached) + load.num_active > worker.pool.num_free:
        return None
    cost = load.num_pending_tokens + request.num_tokens - len(cached) * config.block_size
    return _Offer(cost, load.num_active, Placement(worker, cached))


def _max_tokens_before(config: SchedulerConfig) -> int:
    return config.max_num_batched_tokens * config.max_steps_in_flight


def _num_tokens_before(live: LiveRequest, load: Load) -> int:
    if live.rank > load.last_rank:
        return load.num_pending_tokens
    return sum(
        max(resident.num_pending_tokens, 0)
        for resident in load.worker.residents.values()
        if resident.rank < live.rank and resident.status is not RequestStatus.SAVING
    )
