"""Attention, compiled at run time by numba: scores, softmax and outputs in one pass.

Of a handful of rows of queries nothing but their scores is held, in bfloat16, and keys that no row
of them sees are not looked at. All numbers are what transformers' eager attention makes of bfloat16
on the CPU: scores rounded to bfloat16, torch's softmax of them in fp32, weights rounded to
bfloat16, and sums over partitions of the values, each rounded, which are added up in fp32. Whether
they are so on a machine, to the bit, is for the caller to find out; on one without instructions for
bfloat16 they are not, since the library's products sum in another order there.

KV is read where it lies: [blocks, kv_heads, block_size, head_dim], bfloat16 as its bits in uint16.
The rules of `workers.kernels` hold here too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workers import kernel_tiles as tiles
from workers.compiled import helper, kernel
from workers.kernel_arithmetic import EXACT, ZERO, widen
from workers.kernel_attention import (
    HEAD_TILES,
    QUERY_ROWS,
    add_rounded,
    make_outputs,
    make_scores,
    pack_keys,
    pack_values,
    write_rounded,
)
from workers.kernel_softmax import make_weights, round_scores, widen_weights
from workers.kernel_team import on_team
from workers.kernel_tiles import DEPTH, ROWS, TILE_NUMBERS
from workers.kernel_vectors import NUMBER, WIDENS

_LINE = 32
"""Numbers of a cache line."""
_BLOCKS_AT_ONCE = 16
"""Times 16 keys whose scores are rounded while they are in the core's nearest cache."""
_APART = 32
"""Numbers by which a row in memory is longer, so that rows do not compete for cache lines."""


@helper(EXACT)
def _kept(x: Any) -> Any:
    return x


_as_number = widen if WIDENS else _kept


@helper(EXACT)
def _put_row(queries: Any, row: Any, own: Any) -> None:
    dim = own.shape[0]
    for d in range(dim):
        queries[row * dim + d] = _as_number(own[d])


@helper(EXACT)
def _put_pairs(queries: Any, row: Any, own: Any) -> None:
    dim = own.shape[0]
    tile, place = divmod(row, QUERY_ROWS)
    at = tile * QUERY_ROWS * dim + 2 * place
    for pair in range(dim // 2):
        queries[at] = _as_number(own[2 * pair])
        queries[at + 1] = _as_number(own[2 * pair + 1])
        at += 2 * QUERY_ROWS


_put_query = _put_row if tiles.HAS_AMX else _put_pairs
"""Puts a row of queries where `make_scores` looks for it: a row's numbers side by side, or by
pairs those of all rows whose scores are made at once."""


@helper(EXACT)
def _outputs_of_bf16(
    weights: Any,
    widened: Any,
    count: Any,
    packed: Any,
    first: Any,
    after: Any,
    per_group: Any,
    tile: Any,
    sums: Any,
) -> None:
    make_outputs(weights, first * DEPTH, count, packed, first, after, per_group, tile, sums)


@helper(EXACT)
def _outputs_of_widened(
    weights: Any,
    widened: Any,
    count: Any,
    packed: Any,
    first: Any,
    after: Any,
    per_group: Any,
    tile: Any,
    sums: Any,
) -> None:
    make_outputs(widened, 0, count, packed, first, after, per_group, tile, sums)


_make_outputs = _outputs_of_widened if WIDENS else _outputs_of_bf16


@kernel
def attend(
    threads: Any,
    query: Any,
    keys: Any,
    values: Any,
    tile_rows: Any,
    num_tokens: Any,
    starts: Any,
    tables: Any,
    origins: Any,
    num_columns: Any,
    window: Any,
    scaling: Any,
    partition: Any,
    out: Any,
) -> None:
    """Write the attention of some tokens that follow each other in requests.

    Args:
        threads: how many to use.
        query: [rows, heads, head_dim], whose last size is a multiple of 32.
        keys: see the module; `values` likewise.
        tile_rows: int64 [tiles]: rows of the query of each tile's first token.
        num_tokens: int64 [tiles]: tokens of each, at least one.
        starts: int64 [tiles]: position of each one's first token.
        tables: int64 [tiles, blocks + 1]: block ids of each one's request, and any other one.
        origins: int64 [tiles]: the first position whose key each looks at.
        num_columns: int64 [tiles]: keys that a tile in this place may look at, a multiple of 32:
            they fall into partitions from its origin on.
        window: keys that a token sees, itself included.
        scaling: fp32, a factor of the rounded scores, which are rounded again.
        partition: keys whose values are summed before the sum is rounded.
        out: [rows, heads, head_dim], written where a tile's rows are.
    """
    own = (query, keys, values, tile_rows, num_tokens, starts, tables, origins, num_columns)
    count = tile_rows.shape[0] * keys.shape[1]
    on_team(attend_part, threads, count, (*own, window, scaling, partition, out))


@helper(EXACT)
def attend_part(
    query: Any,
    keys: Any,
    values: Any,
    tile_rows: Any,
    num_tokens: Any,
    starts: Any,
    tables: Any,
    origins: Any,
    num_columns: Any,
    window: Any,
    scaling: Any,
    partition: Any,
    out: Any,
    first_part: Any,
    end_part: Any,
) -> None:
    """Do it for some parts, of which each is a tile for one of the KV heads."""
    heads, dim = query.shape[1], query.shape[2]
    kv_heads, size = keys.shape[1], keys.shape[2]
    per_kv_head = heads // kv_heads
    most_rows = (num_tokens.max() * per_kv_head + QUERY_ROWS - 1) // QUERY_ROWS * QUERY_ROWS
    most_columns = num_columns.max()
    key_groups, value_tiles = dim // DEPTH, dim // ROWS
    queries = np.zeros(most_rows * dim, NUMBER)
    packed_keys = np.empty(most_columns * dim, np.uint16)
    # Where a head has no multiple of 64 numbers, the last tiles are read and not used.
    packed_values = np.zeros(most_columns * dim + HEAD_TILES * TILE_NUMBERS, np.uint16)
    scores = np.empty((QUERY_ROWS, 16 * _BLOCKS_AT_ONCE + _APART), np.float32)
    weights = np.empty((QUERY_ROWS, most_columns + _APART), np.uint16)
    largest = np.empty((QUERY_ROWS, ROWS), np.float32)
    numbers = np.empty(most_columns, np.float32)
    # Some weights, where they are multiplied in fp32.
    widened = np.empty((QUERY_ROWS, min(partition, most_columns) + _APART), np.float32)
    offsets, pair = np.empty(ROWS, np.int64), np.empty(2, np.int64)
    sums = np.empty((QUERY_ROWS, 16 * HEAD_TILES), np.float32)
    totals = np.empty((QUERY_ROWS, (dim + 63) // 64 * 64), np.float32)
    tiles.begin()
    for part in range(first_part, end_part):
        i, kv_head = part // kv_heads, part % kv_heads
        table, origin, tokens = tables[i], origins[i], num_tokens[i]
        rows = tokens * per_kv_head
        known = starts[i] + tokens - origin
        for token in range(tokens):
            for g in range(per_kv_head):
                own = query[tile_rows[i] + token, kv_head * per_kv_head + g]
                _put_query(queries, token * per_kv_head + g, own)
        block, place = divmod(origin, size)
        at = (table[block] * kv_heads + kv_head) * size * dim
        ahead = (table[block + 1] * kv_heads + kv_head) * size * dim
        for first in range(0, known, DEPTH):
            for half in range(0, DEPTH, ROWS):
                for j in range(ROWS):
                    offsets[j] = at + place * dim
                    for d in range(0, dim, _LINE):
                        tiles.prefetch(keys, ahead + place * dim + d)
                    if first + half + j + 1 < known:
                        place += 1
                        if place == size:
                            block, place = block + 1, 0
                            at = ahead
                            ahead = (table[block + 1] * kv_heads + kv_head) * size * dim
                for d in range(0, dim, DEPTH):
                    to = ((first + half) // ROWS * key_groups + d // DEPTH) * TILE_NUMBERS
                    pack_keys(keys, offsets, d, packed_keys, to)
        block, place = divmod(origin, size)
        at = (table[block] * kv_heads + kv_head) * size * dim
        ahead = (table[block + 1] * kv_heads + kv_head) * size * dim
        for first in range(0, (known + DEPTH - 1) // DEPTH * DEPTH, 2):
            # Where there is no second value, the first one stands for it, without a weight.
            pair[0] = pair[1] = at + place * dim
            for which in range(2):
                if first + which < known:
                    pair[which] = at + place * dim
                    for d in range(0, dim, _LINE):
                        tiles.prefetch(values, ahead + place * dim + d)
                    if first + which + 1 < known:
                        place += 1
                        if place == size:
                            block, place = block + 1, 0
                            at = ahead
                            ahead = (table[block + 1] * kv_heads + kv_head) * size * dim
            to = first // DEPTH * value_tiles * TILE_NUMBERS + first % DEPTH * ROWS
            if first < known:
                pack_values(values, pair[0], pair[1], dim, packed_values, to)
            else:
                for tile in range(value_tiles):
                    begin = to + tile * TILE_NUMBERS
                    packed_values[begin : begin + DEPTH] = np.uint16(0)
        for row in range(0, rows, QUERY_ROWS):
            last_token = min((row + QUERY_ROWS - 1) // per_kv_head, tokens - 1)
            columns = starts[i] + last_token + 1 - origin
            groups = (columns + DEPTH - 1) // DEPTH
            count = min(QUERY_ROWS, rows - row)
            largest[:count, :] = -np.inf
            for begins in range(0, 2 * groups, _BLOCKS_AT_ONCE):
                ends = min(begins + _BLOCKS_AT_ONCE, 2 * groups)
                make_scores(queries, row, count, packed_keys, begins, ends, dim, scores)
                for r in range(count):
                    after = starts[i] + (row + r) // per_kv_head + 1 - origin
                    unseen = max(after - window, 0)
                    round_scores(scores, r, begins, ends, unseen, after, scaling, largest, weights)
            for r in range(count):
                after = starts[i] + (row + r) // per_kv_head + 1 - origin
                make_weights(weights, r, after, groups, largest, numbers)
            totals[:count, :] = ZERO
            for begins in range(0, num_columns[i], partition):
                first = min(begins // DEPTH, groups)
                ends = min((begins + partition) // DEPTH, groups)
                if WIDENS:
                    for r in range(count):
                        widen_weights(weights, r, first * DEPTH, ends - first, widened)
                for tile in range(0, value_tiles, HEAD_TILES):
                    _make_outputs(
                        weights, widened, count, packed_values, first, ends, value_tiles, tile, sums
                    )
                    add_rounded(sums, count, totals, 16 * tile)
            for r in range(count):
                token, g = divmod(row + r, per_kv_head)
                head = kv_head * per_kv_head + g
                at = ((tile_rows[i] + token) * heads + head) * dim
                write_rounded(totals, r, dim, out, at)
    tiles.end()


@kernel
def softmax(scores: Any, scaling: Any, weights: Any) -> None:
    """Write the weights that `attend` makes of rows which see all their keys.

    Args:
        scores: fp32 [rows, keys], a multiple of 32 keys.
        scaling: fp32.
        weights: bf16 [rows, keys].
    """
    rows, keys = scores.shape
    groups = keys // DEPTH
    largest = np.full((rows, ROWS), np.float32(-np.inf))
    numbers = np.empty(keys, np.float32)
    for row in range(rows):
        round_scores(scores, row, 0, 2 * groups, 0, keys, scaling, largest, weights)
        make_weights(weights, row, keys, groups, largest, numbers)
