"""A whole decoder layer for few rows in one call, compiled at run time by numba.

It is made of the loops of `workers.kernels`, `workers.tile_kernels` and `workers.attention_kernels`
one after the other, so its numbers are theirs. With a handful of rows these take microseconds each,
and as many calls would take longer than what they compute.

    a = norm(x);  q, k, v = a W;  turn q and k;  store k and v;  x = x + attention(q) W
    a = norm(x);  gate, up = a W;  x + (silu(gate) * up) W

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
from workers.tile_kernels import product

_BYTES = 2
"""Of a number."""


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
def _turned(address: Any, stride_bytes: Any, like: Any, heads: Any, cos: Any, sin: Any) -> Any:
    rows, dim = cos.shape
    out = np.empty((rows, heads, dim), cos.dtype)
    rotate_part(address, stride_bytes, like, cos, sin, out, 0, rows)
    return out


@helper(EXACT)
def _store(places: Any, rows: Any, keys: Any, values: Any, key: Any, value: Any) -> None:
    """Put rows of new keys and values to their places in the cache."""
    kv_heads, size, dim = keys.shape[1:]
    for i in range(rows.shape[0]):
        block, place = divmod(places[i], size)
        for head in range(kv_heads):
            new_key, kept_key = key[rows[i], head], keys[block, head, place]
            new_value, kept_value = value[rows[i]], values[block, head, place]
            for d in range(dim):
                kept_key[d] = new_key[d]
                kept_value[d] = new_value[head * dim + d]


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
    places, new_rows = new
    both = _product(threads, _normed(x, first_norm), qkv)
    heads = both.shape[1] // dim - 2 * kv_heads
    address, stride = both.ctypes.data, both.shape[1] * _BYTES
    query = _turned(address, stride, x[0, 0], heads, cos, sin)
    key = _turned(address + heads * dim * _BYTES, stride, x[0, 0], kv_heads, cos, sin)
    _store(places, new_rows, keys, values, key, both[:, (heads + kv_heads) * dim :])
    if factor != ONE:
        flat = query.reshape(query.size)
        for j in range(flat.shape[0]):
            flat[j] = narrow(widen(flat[j]) * factor, flat[j])
    tile_rows, num_tokens, starts, tables, origins, num_columns, window, scaling, partition = (
        attention
    )
    attended = np.zeros((rows, heads, dim), x.dtype)
    batch = (query, keys, values, tile_rows, num_tokens, starts, tables, origins, num_columns)
    count = tile_rows.shape[0] * kv_heads
    on_team(attend_part, attend_threads, count, (*batch, window, scaling, partition, attended))
    _add(x, _product(threads, attended.reshape(rows, heads * dim), joined), out)
    gates = _product(threads, _normed(out, second_norm), gate_up)
    active = np.empty((rows, gates.shape[1] // 2), x.dtype)
    on_team(gate_silu_part, threads, rows, (gates, active))
    _add(out, _product(threads, active, down), out)
