"""Loops of decodes' attention on CPU, compiled at run time by numba, which copy no KV.

They do for one token of a request what the library's matrix products do for many, with the same
bits, on processors whose products of bfloat16 matrices sum in the order of AMX: of each 32 numbers
the sum of those at even places and the sum of those at odd places, one multiply-add after the
other, then both together, then onto the total (`TDPBF16PS` in Intel's Software Developer's Manual,
volume 2). Whether a machine's products do so is for the caller to find out. AMX takes subnormal
numbers for zeros and these loops don't, which no sum above 2**-100 can show.

KV is read where it lies: [blocks, kv_heads, block_size, head_dim], bfloat16 as its bits in uint16.
The rules of `workers.kernels` hold here too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from workers.compiled import kernel
from workers.kernel_arithmetic import ZERO, address_of, narrow, widen

_GROUP = 32
"""Numbers whose products AMX sums before they meet the total."""
_LANES = 64
"""Keys, or numbers of a head, whose sums are made together."""
_LINE = 32
"""Numbers that a cache line holds."""
_I64 = ir.IntType(64)
_LANES_I64 = ir.Constant(_I64, _LANES)


@intrinsic  # type: ignore[untyped-decorator]
def _turn(_: Any, keys: Any, offsets: Any, first: Any, turned: Any, column: Any) -> Any:
    """Widen 32 numbers of 16 keys and write them to 16 columns of 32 rows.

    Args:
        keys: the array of all keys.
        offsets: int64 [16]: which of its numbers each of the keys begins at.
        first: which 32 numbers of a key, from 0 in steps of 32.
        turned: fp32 [head_dim, _LANES]; rows from `first` on and columns from `column` on.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        keys_type, offsets_type, _, turned_type, _ = signature.args
        wide = ir.VectorType(ir.IntType(32), 16)
        rows = []
        for i in range(16):
            place = address_of(context, builder, offsets_type, args[1], ir.Constant(_I64, i))
            offset = builder.add(builder.load(place), args[2])
            pointer = address_of(context, builder, keys_type, args[0], offset)
            rows.append(builder.load(builder.bitcast(pointer, wide.as_pointer()), align=2))
        step = 1
        while step < 16:
            for i in range(16):
                if i & step:
                    continue
                low = [j - step + 16 if j & step else j for j in range(16)]
                high = [j + 16 if j & step else j + step for j in range(16)]
                x, y = rows[i], rows[i + step]
                rows[i] = builder.shuffle_vector(x, y, _indices(low))
                rows[i + step] = builder.shuffle_vector(x, y, _indices(high))
            step *= 2
        for i, pair in enumerate(rows):
            even = builder.shl(pair, ir.Constant(wide, [16] * 16))
            odd = builder.and_(pair, ir.Constant(wide, [0xFFFF0000] * 16))
            for j, numbers in enumerate((even, odd)):
                row = builder.add(args[2], ir.Constant(_I64, 2 * i + j))
                offset = builder.add(builder.mul(row, _LANES_I64), args[4])
                pointer = address_of(context, builder, turned_type, args[3], offset)
                builder.store(numbers, builder.bitcast(pointer, wide.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(keys, offsets, types.int64, turned, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line that holds an array's number `offset`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        prefetch = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32]),
            "llvm.prefetch.p0i8",
        )
        place = address_of(context, builder, signature.args[0], args[0], args[1])
        read, keep, data = ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)
        builder.call(prefetch, [builder.bitcast(place, byte), read, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


def _indices(numbers: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), 16), numbers)


@intrinsic  # type: ignore[untyped-decorator]
def _add_group(_: Any, factors: Any, factor: Any, rows: Any, row: Any, total: Any) -> Any:
    """Add to `total` [_LANES] what 32 factors times 32 rows of numbers sum to, as AMX does.

    Args:
        factors: an array of fp32; those from number `factor` on.
        rows: fp32 [rows, _LANES]; those from `row` on.
        total: fp32 [_LANES].
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        factors_type, _, rows_type, _, total_type = signature.args
        vector = ir.VectorType(ir.FloatType(), 16)
        pieces = _LANES // 16
        fma_of = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), "llvm.fma.v16f32"
        )
        zero = ir.Constant(vector, [0.0] * 16)
        sums = [[zero] * pieces, [zero] * pieces]
        first = builder.mul(args[3], _LANES_I64)
        for j in range(_GROUP):
            place = builder.add(args[1], ir.Constant(_I64, j))
            number = builder.load(address_of(context, builder, factors_type, args[0], place))
            one = builder.insert_element(zero, number, ir.Constant(ir.IntType(32), 0))
            spread = builder.shuffle_vector(one, zero, _indices([0] * 16))
            for piece in range(pieces):
                offset = builder.add(first, ir.Constant(_I64, j * _LANES + 16 * piece))
                pointer = address_of(context, builder, rows_type, args[2], offset)
                numbers = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4)
                own = sums[j % 2]
                own[piece] = builder.call(fma_of, [spread, numbers, own[piece]])
        for piece in range(pieces):
            pointer = address_of(
                context, builder, total_type, args[4], ir.Constant(_I64, 16 * piece)
            )
            pointer = builder.bitcast(pointer, vector.as_pointer())
            both = builder.fadd(sums[0][piece], sums[1][piece])
            builder.store(builder.fadd(builder.load(pointer, align=4), both), pointer, align=4)
        return context.get_dummy_value()

    return types.void(factors, types.int64, rows, types.int64, total), generate


@kernel
def decode_scores(
    query: Any, keys: Any, rows: Any, tables: Any, origins: Any, firsts: Any, ends: Any, scores: Any
) -> None:
    """Write the products of q and k of requests with one token each.

    Args:
        query: [rows, heads, head_dim], whose last size is a multiple of 32.
        keys: see the module.
        rows: int64 [requests]: rows of the query.
        tables: int64 [requests, blocks + 1]: block ids, the last one never read.
        origins: int64 [requests]: position of the key that column 0 stands for.
        firsts: int64 [requests]: the first column that is wanted; `ends` the one after the last.
        scores: [requests, heads, columns], written where it is wanted.
    """
    heads, head_dim = query.shape[1], query.shape[2]
    kv_heads, size = keys.shape[1], keys.shape[2]
    per_kv_head = heads // kv_heads
    turned = np.empty((head_dim, _LANES), np.float32)
    offsets = np.empty(16, np.int64)
    q = np.empty((per_kv_head, head_dim), np.float32)
    total = np.empty(_LANES, np.float32)
    for i in range(rows.shape[0]):
        table = tables[i]
        for kv_head in range(kv_heads):
            for g in range(per_kv_head):
                own = query[rows[i], kv_head * per_kv_head + g]
                for d in range(head_dim):
                    q[g, d] = widen(own[d])
            block, place = divmod(origins[i] + firsts[i], size)
            for first in range(firsts[i], ends[i], _LANES):
                count = min(_LANES, ends[i] - first)
                for column in range(0, count, 16):
                    for j in range(16):
                        offsets[j] = ((table[block] * kv_heads + kv_head) * size + place) * head_dim
                        ahead = ((table[block + 1] * kv_heads + kv_head) * size + place) * head_dim
                        for d in range(0, head_dim, _LINE):
                            _prefetch(keys, ahead + d)
                        if first + column + j + 1 < ends[i]:
                            place += 1
                            if place == size:
                                block, place = block + 1, 0
                    for d in range(0, head_dim, _GROUP):
                        _turn(keys, offsets, d, turned, column)
                for g in range(per_kv_head):
                    total[:] = ZERO
                    for d in range(0, head_dim, _GROUP):
                        _add_group(q, g * head_dim + d, turned, d, total)
                    out = scores[i, kv_head * per_kv_head + g, first : first + count]
                    for j in range(count):
                        out[j] = narrow(total[j], query[0, 0, 0])


@kernel
def decode_outputs(
    weights: Any,
    values: Any,
    rows: Any,
    tables: Any,
    origins: Any,
    firsts: Any,
    ends: Any,
    partitions: Any,
    partition: Any,
    out: Any,
) -> None:
    """Write the sums of values by weight of requests with one token each.

    Args:
        weights: [requests, heads, columns], a multiple of 32 columns, zero where nothing is seen.
        values: see the module.
        rows: int64 [requests]: rows of the output.
        tables: see `decode_scores`, as are `origins`, `firsts` and `ends`.
        partitions: int64 [requests]: into how many partitions a request's columns fall.
        partition: columns of one. Each is summed and rounded, and then all of them are.
        out: [rows, heads, head_dim], written where a request's row is.
    """
    heads, head_dim = out.shape[1], out.shape[2]
    kv_heads, size = values.shape[1], values.shape[2]
    per_kv_head = heads // kv_heads
    like = weights[0, 0, 0]
    pieces = (head_dim + _LANES - 1) // _LANES
    wide = np.zeros((pieces * _GROUP, _LANES), np.float32)
    factors = np.empty(_GROUP, np.float32)
    totals = np.empty((per_kv_head, pieces, _LANES), np.float32)
    results = np.empty((per_kv_head, pieces, _LANES), np.float32)
    for i in range(rows.shape[0]):
        table = tables[i]
        for kv_head in range(kv_heads):
            results[:, :, :] = ZERO
            for part in range(partitions[i]):
                totals[:, :, :] = ZERO
                for group in range(part * partition, (part + 1) * partition, _GROUP):
                    low, high = max(group, firsts[i]), min(group + _GROUP, ends[i])
                    if low >= high:
                        continue
                    if high - low < _GROUP:
                        wide[:, :] = ZERO
                    block, place = divmod(origins[i] + low, size)
                    for column in range(low, high):
                        value = values[table[block], kv_head, place]
                        ahead = ((table[block + 1] * kv_heads + kv_head) * size + place) * head_dim
                        for d in range(0, head_dim, _LINE):
                            _prefetch(values, ahead + d)
                        place += 1
                        if place == size:
                            block, place = block + 1, 0
                        for piece in range(pieces):
                            numbers = value[piece * _LANES : (piece + 1) * _LANES]
                            row = wide[piece * _GROUP + column - group]
                            for d in range(numbers.shape[0]):
                                row[d] = widen(numbers[d])
                    for g in range(per_kv_head):
                        weight = weights[i, kv_head * per_kv_head + g, group : group + _GROUP]
                        for j in range(_GROUP):
                            factors[j] = widen(weight[j])
                        for piece in range(pieces):
                            _add_group(factors, 0, wide, piece * _GROUP, totals[g, piece])
                for g in range(per_kv_head):
                    for piece in range(pieces):
                        for lane in range(_LANES):
                            rounded = widen(narrow(totals[g, piece, lane], like))
                            results[g, piece, lane] += rounded
            for g in range(per_kv_head):
                result = out[rows[i], kv_head * per_kv_head + g]
                for d in range(head_dim):
                    result[d] = narrow(results[g, d // _LANES, d % _LANES], like)
