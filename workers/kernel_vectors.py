"""Products of bfloat16 by vectors of 16 sums in fp32, while a kernel's code is made.

One matrix lies with each pair of a column's numbers side by side. With AVX-512's own instruction
for them (`VDPBF16PS` in Intel's Software Developer's Manual, volume 2; AMD has it since Zen 4) a
pair of the other one is taken 16 times, and two products are added to each sum, one after the
other. A processor without it widens pairs to fp32 and adds the products by fused multiply-adds;
there the other matrix is in fp32 already. Sums are made in the order of the pairs, whatever is
computed beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from workers import kernel_tiles as tiles
from workers.kernel_tiles import FLOATS, INTS, floats, i64, load_vector, spread, store_vector

WIDENS = not tiles.HAS_AMX and not tiles.HAS_PAIRS
"""Whether numbers of the one matrix are in fp32."""
NUMBER: Any = np.float32 if WIDENS else np.uint16
"""The type of its numbers in arrays."""
NUMBER_BYTES = np.dtype(NUMBER).itemsize
GROUP_PAIRS = 16
"""Pairs of a group: a row of a tile."""
MAX_ROWS = 6 if not tiles.HAS_LONG_VECTORS else 12 if WIDENS else 8
"""Rows that are computed together at most: with their sums the registers are nearly full."""
_SUMS = 16
"""Vectors of sums that keep the processor busy: one sum's additions wait for each other."""
_I8, _I32 = ir.IntType(8), ir.IntType(32)
_BYTES = _I8.as_pointer()
_VECTOR_BYTES = 64


@dataclass(frozen=True)
class Rows:
    """Where rows of numbers are: a pointer to the first one, and bytes from one to the next.

    Where a kernel can know the bytes while its code is made, registers for addresses are saved,
    and with 12 rows there are none to spare.
    """

    pointer: Any
    stride_bytes: Any
    pair_bytes: int = 2 * NUMBER_BYTES
    """From a pair of a row to the next one of it."""


@dataclass(frozen=True)
class Pairs:
    """Where pairs of 16 columns are: vectors of 16 pairs, and the bytes between them."""

    pointer: Any
    pair_bytes: Any
    """From a pair to the next one of its group."""
    group_bytes: Any
    """From a group of 16 pairs to the next one."""
    vector_bytes: Any
    """From 16 columns to the next 16."""


def multiply(
    builder: Any,
    count: Any,
    a: Rows,
    b: Pairs,
    num_groups: Any,
    vectors: int,
    out: Rows,
) -> None:
    """Write the products of some rows of `a` and 16 * `vectors` columns of `b`.

    Args:
        builder: of the code.
        count: rows, known when the kernel runs.
        a: of type `NUMBER`, 16 times `num_groups` pairs of each row.
        b: bf16.
        num_groups: how many times 16 pairs are summed.
        vectors: how many times 16 columns, known now.
        out: fp32.
    """
    done = cgutils.alloca_once_value(builder, i64(0))

    def some(rows: int) -> None:
        first_row = builder.load(done)
        own_a = _moved(builder, a.pointer, first_row, a.stride_bytes)
        own_out = _moved(builder, out.pointer, first_row, out.stride_bytes)
        at_once = max(_SUMS // rows // 2, 1) * 2 if tiles.HAS_LONG_VECTORS else 1
        for vector in range(0, vectors, at_once):
            own_b = _moved(builder, b.pointer, i64(vector), b.vector_bytes)
            to = _moved(builder, own_out, i64(vector), i64(_VECTOR_BYTES))
            _multiply(
                builder,
                rows,
                replace(a, pointer=own_a),
                replace(b, pointer=own_b),
                num_groups,
                min(at_once, vectors - vector),
                replace(out, pointer=to),
            )
        builder.store(builder.add(first_row, i64(rows)), done)

    with cgutils.for_range(builder, builder.udiv(count, i64(MAX_ROWS))):
        some(MAX_ROWS)
    left = builder.urem(count, i64(MAX_ROWS))
    after = builder.append_basic_block()
    ways = builder.switch(left, after)
    for rows in range(1, MAX_ROWS):
        way = builder.append_basic_block()
        ways.add_case(i64(rows), way)
        builder.position_at_end(way)
        some(rows)
        builder.branch(after)
    builder.position_at_end(after)


def _moved(builder: Any, pointer: Any, count: Any, step_bytes: Any) -> Any:
    return builder.gep(builder.bitcast(pointer, _BYTES), [builder.mul(count, step_bytes)])


def _multiply(
    builder: Any, rows: int, a: Rows, b: Pairs, num_groups: Any, vectors: int, out: Rows
) -> None:
    """Do it for a number of rows that is known now, with all sums in registers."""
    sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(vectors)] for _ in range(rows)]
    for row in sums:
        for place in row:
            builder.store(floats(0.0), place)
    add_pair = _add_widened if WIDENS else _add_pair
    with cgutils.for_range(builder, num_groups) as group:
        first_pair = builder.mul(group.index, i64(GROUP_PAIRS))
        b_at = _moved(builder, b.pointer, group.index, b.group_bytes)
        with cgutils.for_range(builder, i64(GROUP_PAIRS)) as pair:
            own_b = _moved(builder, b_at, pair.index, b.pair_bytes)
            columns = [
                load_vector(builder, _moved(builder, own_b, i64(v), b.vector_bytes), INTS, 2)
                for v in range(vectors)
            ]
            own_pair = builder.add(first_pair, pair.index)
            own_a = _moved(builder, a.pointer, own_pair, i64(a.pair_bytes))
            places = [_moved(builder, own_a, i64(i), a.stride_bytes) for i in range(rows)]
            add_pair(builder, places, columns, sums)
    for i, row in enumerate(sums):
        own_out = _moved(builder, out.pointer, i64(i), out.stride_bytes)
        for v, place in enumerate(row):
            where = _moved(builder, own_out, i64(v), i64(_VECTOR_BYTES))
            store_vector(builder, builder.load(place), where, 4)


def _add_pair(builder: Any, places: list[Any], columns: list[Any], sums: list[list[Any]]) -> None:
    dot = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(FLOATS, [FLOATS, INTS, INTS]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    for where, row in zip(places, sums, strict=True):
        one = builder.load(builder.bitcast(where, _I32.as_pointer()), align=2)
        same = spread(builder, one, INTS)
        for place, column in zip(row, columns, strict=True):
            builder.store(builder.call(dot, [builder.load(place), same, column]), place)


def _add_widened(
    builder: Any, places: list[Any], columns: list[Any], sums: list[list[Any]]
) -> None:
    firsts = [builder.shl(column, tiles.ints(16)) for column in columns]
    seconds = [builder.and_(column, tiles.ints(0xFFFF0000)) for column in columns]
    for which, numbers in enumerate((firsts, seconds)):
        for where, row in zip(places, sums, strict=True):
            own = _moved(builder, where, i64(which), i64(NUMBER_BYTES))
            one = builder.load(builder.bitcast(own, ir.FloatType().as_pointer()), align=4)
            same = spread(builder, one, FLOATS)
            for place, column in zip(row, numbers, strict=True):
                product = tiles.fused_multiply_add(
                    builder, same, builder.bitcast(column, FLOATS), builder.load(place)
                )
                builder.store(product, place)
