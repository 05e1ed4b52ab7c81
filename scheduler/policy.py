"""The scheduler's choices as pure functions: which worker, which victim, how long a chunk, when to
stop. They look at state and change none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.acceptance import row_bytes
from scheduler.config import SchedulerConfig
from scheduler.live import LiveRequest, Step, WorkerView
from scheduler.request import FinishReason, ReadLimits, Request, RequestStatus

# ------------------------------------------------------------------------------- admission


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


def fits(request: Request, worker: WorkerView) -> bool:
    """Whether the worker's whole pool could hold the request at its largest."""
    return request.max_kv_tokens <= worker.pool.num_blocks * worker.pool.block_size


def is_open_to(request: Request, worker: WorkerView) -> bool:
    """Whether the request may be given to the worker, now or when there is room."""
    return not worker.is_draining and fits(request, worker)


def read_limits(live: LiveRequest) -> ReadLimits:
    """How much caches may supply to the request, given the rows that it can have."""
    num_row_tokens = live.num_row_blocks * live.block_size
    return live.request.num_readable_tokens(live.block_size, num_row_tokens)


def readable_hashes(live: LiveRequest) -> list[bytes]:
    """Hashes of the leading blocks that another's cache may supply to the request."""
    if live.request.sampling_params.skips_reading_prefix_cache:
        return []
    return live.block_hashes(read_limits(live).shared // live.block_size)


def cached_blocks(live: LiveRequest, worker: WorkerView) -> list[int]:
    """Ids of the leading blocks that the worker's prefix cache may supply to the request."""
    limit = read_limits(live).shared
    return worker.pool.lookup(
        readable_hashes(live),
        num_readable_tokens=limit,
        skip_reading_prefix_cache=live.request.sampling_params.skips_reading_prefix_cache,
    )


def is_prefix_coming(
    live: LiveRequest, worker: WorkerView, num_cached: int, config: SchedulerConfig
) -> bool:
    """Whether a request before this one is about to compute the block that it lacks next.

    Then it waits and reads the block, and its rows where it needs them, instead of computing the
    same once more beside the other.
    """
    request, end = live.request, (num_cached + 1) * live.block_size
    skips = request.sampling_params.skips_reading_prefix_cache
    if skips or not worker.pool.is_caching or end > request.num_prompt_tokens:
        return False
    needs_rows = read_limits(live).shared < end
    if needs_rows and not (config.row_cache_bytes and request.num_rows_missing):
        return False
    return any(
        (other.request.num_computed_tokens if needs_rows else other.num_kv_tokens) < end
        and end <= other.request.num_prompt_tokens
        and other.rank < live.rank
        and other.status in (RequestStatus.LOADING, RequestStatus.RUNNING)
        and (not needs_rows or _brings_rows(other.request, request, end - live.block_size))
        and other.block_hashes(num_cached + 1)[num_cached] == live.block_hashes(num_cached + 1)[-1]
        for other in worker.residents.values()
    )


def _brings_rows(other: Request, request: Request, first_index: int) -> bool:
    """Whether `other` computes rows from `first_index` on, of the kind that `request` asks for."""
    rows, wanted = other.prompt_logprobs, request.prompt_logprobs
    return (
        rows is not None
        and wanted is not None
        and rows.num_logprobs == wanted.num_logprobs
        and other.sampling_params.prompt_logprob_token_ids
        == request.sampling_params.prompt_logprob_token_ids
        and other.first_row_index <= max(first_index, 1)
    )


def num_blocks_to_take(live: LiveRequest, worker: WorkerView, cached: Sequence[int]) -> int:
    """Free blocks that admission uses up: new ones, and cached ones that nobody holds."""
    total = blocks_for(live.request.num_tokens, worker.pool.block_size)
    return total - len(cached) + worker.pool.num_free_among(cached)


# -------------------------------------------------------------------------------- eviction


def choose_victim(for_request: Request, worker: WorkerView) -> LiveRequest | None:
    """Return whom to evict so that `for_request` gets blocks on `worker`; None if nobody.

    Only requests served after it are candidates. Of those with a lower priority the cheapest goes
    (the fewest blocks to save), else the youngest of the same priority. The order of service is
    total, so no two requests can evict each other in turn.
    """
    candidates = [
        r
        for r in worker.residents.values()
        if r.status in (RequestStatus.RUNNING, RequestStatus.LOADING)
        and not r.is_evict_wanted
        and not r.migration
        and r.block_ids
        and r.request.rank > for_request.rank
    ]
    lower = [r for r in candidates if r.request.priority > for_request.priority]
    if lower:
        lowest = max(r.request.priority for r in lower)
        return min(
            (r for r in lower if r.request.priority == lowest),
            key=lambda r: (len(r.block_ids), -r.request.arrival),
        )
    return max(candidates, key=lambda r: r.request.rank, default=None)


def choose_worker_to_clear(
    live: LiveRequest, workers: Iterable[WorkerView], config: SchedulerConfig
) -> tuple[WorkerView, list[LiveRequest]] | None:
    """Return the worker where the fewest lower-priority requests have to go to admit `live`.

    None where nothing can or needs to be done: no such worker, or evictions under way suffice.
    """
    best: tuple[int, WorkerView, list[LiveRequest]] | None = None
    for worker in workers:
        if not is_open_to(live.request, worker):
            continue
        candidates = sorted(
            (
                r
                for r in worker.residents.values()
                if r.status in (RequestStatus.RUNNING, RequestStatus.LOADING)
                and not r.is_evict_wanted
                and not r.migration
                and r.request.priority > live.request.priority
            ),
            key=lambda r: (-r.request.priority, len(r.block_ids), -r.request.arrival),
        )
        staying = len(worker.incoming) + sum(
            1
            for r in worker.residents.values()
            if r.status is not RequestStatus.SAVING and not (r.is_evict_wanted or r.migration)
        )
        need = num_blocks_to_take(live, worker, cached_blocks(live, worker)) + staying
        expected = worker.pool.num_free + worker.num_leaving_blocks()
        victims: list[LiveRequest] = []
        for victim in candidates:
            if expected >= need and staying < config.max_num_seqs:
                break
            victims.append(victim)
            expected += len(victim.block_ids)
            need -= 1
            staying -= 1
        if expected < need or staying >= config.max_num_seqs:
            continue
        if best is None or len(victims) < best[0]:
            best = (len(victims), worker, victims)
    return None if best is None else (best[1], best[2])


# ------------------------------------------------------------------------------- migration

_MIN_TOKENS_TO_GO = 32
"""A request that has less to do than this is not worth moving for the sake of an even load."""


def num_tokens_to_go(live: LiveRequest) -> int:
    """Tokens that the request may still have to compute, at most."""
    return live.request.max_kv_tokens - live.num_kv_tokens


_MAX_FAILED_COPIES = 2
"""Where workers can't reach each other, requests leave through the offload store instead."""


def is_movable(live: LiveRequest) -> bool:
    """Whether a move of the request could begin now."""
    return (
        live.status is RequestStatus.RUNNING and live.migration is None and not live.is_evict_wanted
    )


def is_worth_moving(live: LiveRequest) -> bool:
    """Whether the core should try to move the request of its own accord."""
    return is_movable(live) and live.num_failed_copies < _MAX_FAILED_COPIES


def has_room_for(live: LiveRequest, worker: WorkerView, config: SchedulerConfig) -> bool:
    """Whether a running request could move to the worker now."""
    if worker is live.worker or not is_open_to(live.request, worker):
        return False
    return (
        worker.num_seats_taken < config.max_num_seqs
        and num_blocks_to_take(live, worker, []) <= worker.pool.num_free
    )


def choose_target(
    live: LiveRequest, workers: Iterable[WorkerView], config: SchedulerConfig
) -> WorkerView | None:
    """Return the least busy worker that has room for a running request and for its own growth."""
    open_ones = [
        w
        for w in workers
        if has_room_for(live, w, config)
        and num_blocks_to_take(live, w, []) + w.num_seats_taken <= w.pool.num_free
    ]
    return min(open_ones, key=lambda w: (w.num_seats_taken, -w.pool.num_free), default=None)


def choose_rebalance(
    workers: Iterable[WorkerView], config: SchedulerConfig
) -> tuple[LiveRequest, WorkerView] | None:
    """Return a decoding request on the busiest worker and the least busy one, to go there.

    Only where the one computes at least two requests more than the other: then the move leaves no
    reason to move back.
    """
    staying = [w for w in workers if not w.is_draining]
    if len(staying) < 2:
        return None
    busiest = max(staying, key=lambda w: w.num_seats_taken)
    idlest = min(staying, key=lambda w: w.num_seats_taken)
    if busiest.num_seats_taken - idlest.num_seats_taken < 2:
        return None
    candidates = [
        r
        for r in busiest.residents.values()
        if is_worth_moving(r)
        and r.is_decoding
        and r.has_progressed_here
        and num_tokens_to_go(r) >= _MIN_TOKENS_TO_GO
        and has_room_for(r, idlest, config)
    ]
    best = max(candidates, key=num_tokens_to_go, default=None)
    return (best, idlest) if best is not None else None


# -------------------------------------------------------------------------------- suspects


def choose_suspects(running: Sequence[LiveRequest]) -> list[LiveRequest]:
    """Return whom the next batch tries out: requests of batches that failed as a whole.

    Halves of a failed batch are tried one after the other, and halved again where they fail, so the
    one at fault is found in few failures; empty where there is no suspect.
    """
    chosen: list[LiveRequest] = []
    limit = 0
    for live in running:
        if live.batch_limit is None:
            continue
        limit = min(limit, live.batch_limit) if chosen else live.batch_limit
        if len(chosen) >= limit:
            break
        chosen.append(live)
    return chosen[: max(limit, 1)]


def in_step_order(running: Sequence[LiveRequest]) -> list[LiveRequest]:
    """Return who goes first in a step: those that have to leave, then decodes, then prefills."""
    leaving, decoding, prefilling = [], [], []
    for live in running:
        if live.is_evict_wanted:
            leaving.append(live)
        elif live.is_decoding:
            decoding.append(live)
        else:
            prefilling.append(live)
    return leaving + decoding + prefilling


# ----------------------------------------------------------------------------- progress


def may_be_planned(live: LiveRequest, worker: WorkerView) -> bool:
    """Whether the next chunk of a running request may be sent to its worker now.

    It may continue chunks under way whose success is to be expected, and where more is to be done
    than to find out how they end. A request that comes back to a worker waits until the worker
    has heard that it had left.
    """
    request = live.request
    if not live.is_known_to_worker and any(live.id in s.told_released_ids for s in worker.steps):
        return False
    if not live.in_flight:
        return True
    if live.is_evict_wanted or live.batch_limit is not None or live.in_flight[-1].is_void:
        return False
    is_at_end = live.num_planned_outputs >= request.max_tokens
    return live.planned_position < request.num_prompt_tokens or not is_at_end


def is_worth_sending(
    running: Sequence[LiveRequest], worker: WorkerView, config: SchedulerConfig
) -> bool:
    """Whether a step of these requests should be sent, ahead of the answer to those under way.

    Whoever is in one step goes on in the next. Newcomers alone fill a good part of a step of their
    own, or wait: else two groups would take turns with half the batch each.
    """
    if not any(step.flights for step in worker.steps) or any(r.in_flight for r in running):
        return True
    return 2 * sum(r.num_unplanned_tokens for r in running) >= config.max_num_batched_tokens


def chunk_end(live: LiveRequest, token_budget: int, config: SchedulerConfig) -> int:
    """Position before which the request's next chunk ends, within the budgets of the step."""
    request, start = live.request, live.planned_position
    end = start + min(token_budget, live.num_unplanned_tokens)
    k = request.sampling_params.num_prompt_logprobs
    if k is None or not request.num_rows_missing:
        return end
    max_rows = max(1, config.max_rows_bytes_per_step // row_bytes(k, config))
    return min(end, request.row_position(start) + max_rows)


_MAX_DECODE_AHEAD_S = 0.3
"""Decodes that may be under way on a worker, in seconds: a newcomer waits for them."""


def num_more_tokens(
    num_waiting: int, running: Sequence[LiveRequest], worker: WorkerView, config: SchedulerConfig
) -> int:
    """Return how many tokens a step of decodes should bring per request beyond the first.

    None where anybody waits for a place or a prompt is to be computed, since these would wait for
    them; nor where a request is to leave or under suspicion, or blocks are scarce.
    """
    if config.max_decode_steps <= 1 or num_waiting or worker.decode_s is None or worker.incoming:
        return 0
    if worker.is_draining or len(running) > config.max_num_batched_tokens:
        return 0
    if not all(r.is_decoding for r in running) or any(
        r.status is not RequestStatus.RUNNING
        or r.is_evict_wanted
        or r.migration is not None
        or r.batch_limit is not None
        for r in worker.active()
    ):
        return 0
    allowed_s = _MAX_DECODE_AHEAD_S / config.max_steps_in_flight
    num_steps = min(config.max_decode_steps, int(allowed_s / max(worker.decode_s, 1e-9)))
    num_blocks = len(running) * (1 + blocks_for(num_steps, config.block_size))
    return num_steps - 1 if num_steps > 1 and num_blocks <= worker.pool.num_free else 0


def decode_s(step: Step, compute_s: float) -> float | None:
    """Return the seconds per token that a step of decodes took; None where it held others too."""
    chunks = [flight.chunk for flight in step.flights]
    if not chunks or any(len(c.token_ids) > 1 or not c.sample for c in chunks):
        return None
    return compute_s / (1 + max(c.max_more_tokens for c in chunks))


def end_of(request: Request) -> tuple[FinishReason, int | None] | None:
    """Return why a request is complete and the stop token that ended it; None while it is not.

    Stop conditions count generated tokens only, and none applies before `min_tokens` of them.
    """
    params = request.sampling_params
    output = request.output_token_ids
    if request.is_prefilling:
        return None
    if output and len(output) >= params.min_tokens:
        if output[-1] in request.eos_token_ids and not params.ignore_eos:
            return (FinishReason.STOP, None)
        if output[-1] in params.stop_token_ids:
            return (FinishReason.STOP, output[-1])
    if len(output) >= request.max_tokens:
        return (FinishReason.LENGTH, None)
    return None


def stop_ids(request: Request) -> tuple[int, ...]:
    """Token ids that end the request, so none of them may come before `min_tokens`."""
    params = request.sampling_params
    eos = () if params.ignore_eos else request.eos_token_ids
    return tuple(sorted({*eos, *params.stop_token_ids}))
