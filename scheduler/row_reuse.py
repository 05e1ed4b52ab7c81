"""What requests take from the row cache, and what they leave in it.

Rules:
- Rows reach a request with the KV of their positions, or for all of the prompt at once: one without
  the other is a miss, since the position would have to be computed all the same.
- A block's rows are kept once its last position is computed too, so that a prompt whose model
  produces NaN leaves none.
- A request that skips reading takes none, but leaves its own.
"""

from __future__ import annotations

from scheduler.actions import RecordProgress
from scheduler.core import Core
from scheduler.live import LiveRequest
from scheduler.logprobs import Logprobs
from scheduler.row_cache import Columns


def look_for_rows(core: Core, live: LiveRequest) -> None:
    """Note of how many leading blocks every row that the request needs can be had.

    Goes on from what was found before: rows that have been dropped since are missed when they are
    brought, and computed then.
    """
    if not _may_read(core, live):
        return
    num_held = (live.request.row_position(0) + 1) // live.block_size
    known = max(live.num_row_blocks, num_held)
    hashes = live.block_hashes(live.request.num_prompt_tokens // live.block_size)
    live.num_row_blocks = known + core.row_cache.num_leading(hashes[known:], _columns(live))


def complete_rows(core: Core, live: LiveRequest) -> bool:
    """Complete a request that only wants prompt rows, if all of them are held or can be had.

    Returns:
        Whether it is complete, without its last positions having been computed.
    """
    request = live.request
    if request.prompt_logprobs is None or request.max_tokens > 0:
        return False
    if request.num_rows_missing:
        num_blocks, remainder = divmod(request.num_prompt_tokens, live.block_size)
        if remainder or live.num_row_blocks < num_blocks:
            return False
        is_fresh = not request.num_computed_tokens
        bring_rows(core, live, num_blocks)
        if request.num_rows_missing:
            return False
        if is_fresh:
            request.stats.num_cached_tokens = request.num_prompt_tokens
    _advance(core, live, request.num_prompt_tokens, None)
    core.stats.num_prefilled_tokens += request.num_prompt_tokens
    return True


def bring_rows(core: Core, live: LiveRequest, num_blocks: int) -> None:
    """Hand a request the rows of its first `num_blocks` blocks, as far as they can be had."""
    request, block_size = live.request, live.block_size
    if not _may_read(core, live):
        return
    next_index = request.row_position(0) + 1
    first = next_index // block_size
    end = min(num_blocks, request.num_prompt_tokens // block_size)
    count, rows = core.row_cache.take(live.block_hashes(end)[first:], _columns(live))
    live.num_row_blocks = first + count
    if count:
        core.stats.num_row_cache_hit_rows += count * block_size - next_index % block_size
        _advance(
            core,
            live,
            (first + count) * block_size - 1,
            rows[next_index - max(first * block_size, 1) :],
        )


def keep_rows(core: Core, live: LiveRequest, num_computed_before: int) -> None:
    """Keep the rows of the blocks that a request has completed since it had computed so much."""
    request, block_size, cache = live.request, live.block_size, core.row_cache
    held = request.prompt_logprobs
    if held is None or not cache.is_on:
        return
    first = num_computed_before // block_size
    end = min(request.num_computed_tokens, request.num_prompt_tokens) // block_size
    if first >= end:
        return
    hashes, columns = live.block_hashes(end), _columns(live)
    first_held = request.first_row_index
    missing = [
        block
        for block in range(first, end)
        if max(block * block_size, 1) >= first_held and not cache.has(hashes[block], columns)
    ]
    if not missing:
        return
    first_index = max(missing[0] * block_size, 1)
    rows = held.rows(first_index - first_held, end * block_size - first_held)
    for block in reversed(missing):
        start = max(block * block_size, 1) - first_index
        cache.put(hashes[block], columns, rows[start : (block + 1) * block_size - first_index])


def _may_read(core: Core, live: LiveRequest) -> bool:
    params = live.request.sampling_params
    return (
        core.row_cache.is_on
        and live.request.num_rows_missing > 0
        and not params.skips_reading_prefix_cache
    )


def _columns(live: LiveRequest) -> Columns:
    rows = live.request.prompt_logprobs
    return Columns(
        live.request.sampling_params.prompt_logprob_token_ids or (),
        rows.num_logprobs if rows is not None else 0,
    )


def _advance(core: Core, live: LiveRequest, end: int, rows: Logprobs | None) -> None:
    """Advance a request by what no worker had to compute, and note it for good."""
    live.request.advance(end, rows)
    if core.config.enable_journal:
        core.actions.append(
            RecordProgress(
                request_id=live.id,
                num_computed_tokens=live.request.num_computed_tokens,
                rows=rows,
                sampled_token_id=None,
                sampled_logprobs=None,
            )
        )
