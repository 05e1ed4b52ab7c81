"""A whole decoder layer in one call, compiled at run time by numba.

It is made of the loops of `workers.kernels`, `workers.tile_kernels` and `workers.attention_kernels`
one after the other, so its numbers are theirs:

    a = norm(x);  q, k, v = a W;  turn q and k;  store k and v;  x = x + attention(q) W
    a = norm(x);  gate, up = a W;  x + (silu(gate) * up) W

With a handful of rows these take microseconds each, and as many calls would take longer than what
they compute; there threads share the columns of each product. Of many rows each thread takes some,
from the norm to the attention and from there to the end: it waits for the others only twice, and
what it has just made is still in its core's cache when it goes on.

The rules of `workers.kernels` hold here too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workers.attention_kernels import attend_part
from workers.compiled import helper, kernel
from workers.kernel_arithmetic import EXACT, ONE, narrow, widen
from workers.kernel_team import on_team
from workers.kernels import gate_silu_part, rms_norm_part, rotate_part
from workers.tile_kernels import MAX_ROWS, product

_BYTES = 2
"""Of a number."""
_ROWS = 48
"""Rows that a thread goes on with together, of many: so many read weights once."""


@helper(EXACT)
def _normed(x: Any, norm: Any) -> Any:
    scale, eps, rounds_first = norm
    out = np.empty_like(x)
    rms_norm_part(x, scale, eps, rounds_first, out, 0, x.shape[0])
    return out


@helper(EXACT)
def _product(threads: Any, x: Any, layer: Any) -> Any:
    weights, bias, chunk = layer
    out = np.empty((x.shape[0], bias.shape[0]), x.dtype)
    product(threads, x, weights, bias, chunk, out)
    return out


@helper(EXACT)
def _add(x: Any, y: Any, out: Any) -> None:
    """Write x + y to `out`, which may be one of them."""
    for i in range(x.shape[0]):
        own_x, own_y, result = x[i], y[i], out[i]
        for j in range(own_x.shape[0]):
            result[j] = narrow(widen(own_x[j]) + widen(own_y[j]), own_x[j])


@helper(EXACT)
def _slots(new: Any, rows: Any) -> Any:
    """Return the slot of the cache for each row, -1 where it is not new."""
    places, new_rows = new
    slots = np.full(rows, -1, np.int64)
    for i in range(new_rows.shape[0]):
        slots[new_rows[i]] = places[i]
    return slots


@helper(EXACT)
def _store(slots: Any, keys: Any, values: Any, key: Any, value: Any) -> None:
    """Put new keys and values of rows to their slots in the cache."""
    kv_heads, size, dim = keys.shape[1:]
    for i in range(slots.shape[0]):
        if slots[i] < 0:
            continue
        block, place = divmod(slots[i], size)
        for head in range(kv_heads):
            new_key, kept_key = key[i, head], keys[block, head, place]
            new_value, kept_value = value[i], values[block, head, place]
            for d in range(dim):
                kept_key[d] = new_key[d]
                kept_value[d] = new_value[head * dim + d]


@helper(EXACT)
def _begin(
    threads: Any,
    x: Any,
    norm: Any,
    qkv: Any,
    turn: Any,
    slots: Any,
    keys: Any,
    values: Any,
    factor: Any,
    query: Any,
) -> None:
    """Do what comes before the attention, for some rows."""
    rows, heads, dim = query.shape
    cos, sin = turn
    kv_heads = keys.shape[1]
    both = _product(threads, _normed(x, norm), qkv)
    address, stride = both.ctypes.data, both.shape[1] * _BYTES
    rotate_part(address, stride, x[0, 0], cos, sin, query, 0, rows)
    key = np.empty((rows, kv_heads, dim), x.dtype)
    rotate_part(address + heads * dim * _BYTES, stride, x[0, 0], cos, sin, key, 0, rows)
    _store(slots, keys, values, key, both[:, (heads + kv_heads) * dim :])
    if factor != ONE:
        flat = query.reshape(query.size)
        for j in range(flat.shape[0]):
            flat[j] = narrow(widen(flat[j]) * factor, flat[j])


@helper(EXACT)
def _attended(threads: Any, query: Any, keys: Any, values: Any, attention: Any) -> Any:
    tile_rows, num_tokens, starts, tables, origins, num_columns, window, scaling, partition = (
        attention
    )
    out = np.zeros(query.shape, query.dtype)
    batch = (query, keys, values, tile_rows, num_tokens, starts, tables, origins, num_columns)
    count = tile_rows.shape[0] * keys.shape[1]
    on_team(attend_part, threads, count, (*batch, window, scaling, partition, out))
    return out.reshape(query.shape[0], query.shape[1] * query.shape[2])


@helper(EXACT)
def _end(
    threads: Any,
    x: Any,
    attended: Any,
    joined: Any,
    norm: Any,
    gate_up: Any,
    down: Any,
    out: Any,
) -> None:
    """Do what comes after the attention, for some rows."""
    _add(x, _product(threads, attended, joined), out)
    gates = _product(threads, _normed(out, norm), gate_up)
    active = np.empty((x.shape[0], gates.shape[1] // 2), x.dtype)
    on_team(gate_silu_part, threads, x.shape[0], (gates, active))
    _add(out, _product(threads, active, down), out)


@helper(EXACT)
def _begin_part(
    threads: Any,
    at_once: Any,
    x: Any,
    norm: Any,
    qkv: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    keys: Any,
    values: Any,
    factor: Any,
    query: Any,
    first: Any,
    end: Any,
) -> None:
    for part in range(first, end):
        a, b = part * at_once, (part + 1) * at_once
        own = query[a:b]
        turn = cos[a:b], sin[a:b]
        _begin(threads, x[a:b], norm, qkv, turn, slots[a:b], keys, values, factor, own)


@helper(EXACT)
def _end_part(
    threads: Any,
    at_once: Any,
    x: Any,
    attended: Any,
    joined: Any,
    norm: Any,
    gate_up: Any,
    down: Any,
    out: Any,
    first: Any,
    end: Any,
) -> None:
    for part in range(first, end):
        a, b = part * at_once, (part + 1) * at_once
        _end(threads, x[a:b], attended[a:b], joined, norm, gate_up, down, out[a:b])


@kernel
def decoder_layer(
    threads: Any,
    attend_threads: Any,
    x: Any,
    first_norm: Any,
    qkv: Any,
    turn: Any,
    new: Any,
    keys: Any,
    values: Any,
    factor: Any,
    attention: Any,
    joined: Any,
    second_norm: Any,
    gate_up: Any,
    down: Any,
    out: Any,
) -> None:
    """Write what a layer makes of some rows to `out`, and their keys and values to the cache.

    Args:
        threads: how many to use for the products; `attend_threads` for the attention.
        x: [rows, width], as many rows as `tile_kernels.multiply` takes.
        first_norm: scale, eps and rounds_first of `kernels.rms_norm`; `second_norm` likewise.
        qkv: weights, bias and chunk of `tile_kernels.multiply`, for queries, keys and values side
            by side; `joined`, `gate_up` and `down` likewise.
        turn: cos and sin of `kernels.rotate`.
        new: int64 [tokens] twice: slots of the cache for new keys, and rows that they are of.
        keys: of the cache, see `workers.attention_kernels`; `values` likewise.
        factor: fp32, a power of two that queries are multiplied by.
        attention: tile_rows, num_tokens, starts, tables, origins, num_columns, window, scaling and
            partition of `attention_kernels.attend`.
        out: [rows, width], another array than x.
    """
    rows, kv_heads, dim = x.shape[0], keys.shape[1], keys.shape[3]
    cos, sin = turn
    query = np.empty((rows, qkv[1].shape[0] // dim - 2 * kv_heads, dim), x.dtype)
    slots = _slots(new, rows)
    is_small = rows <= MAX_ROWS
    at_once = rows if is_small else _ROWS
    of_columns, of_rows = (threads, 1) if is_small else (1, threads)
    parts = (rows + at_once - 1) // at_once
    own = (of_columns, at_once, x)
    before = (first_norm, qkv, cos, sin, slots, keys, values, factor, query)
    on_team(_begin_part, of_rows, parts, (*own, *before))
    attended = _attended(attend_threads, query, keys, values, attention)
    after = (attended, joined, second_norm, gate_up, down, out)
    on_team(_end_part, of_rows, parts, (*own, *after))
