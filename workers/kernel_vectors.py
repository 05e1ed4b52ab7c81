"""Products of bfloat16 with AVX-512's own instruction for them, while a kernel's code is made.

`VDPBF16PS` (Intel's Software Developer's Manual, volume 2; AMD has it since Zen 4) adds to 16 sums
in fp32 two products each, one after the other. So one matrix lies with each pair of a column's
numbers side by side, and of the other a pair is taken 16 times. Sums are made in the order of the
pairs, whatever is computed beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from workers.kernel_tiles import FLOATS, INTS, floats, i64, load_vector, spread, store_vector

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_BYTES = _I8.as_pointer()
_VECTOR_BYTES = 64
_PAIR_BYTES = 4
GROUP_PAIRS = 16
"""Pairs of a group: a row of a tile."""
_MAX_ROWS = 8
"""Rows that are computed together at most."""


@dataclass(frozen=True)
class Rows:
    """Where rows of numbers are: a pointer to the first one, and bytes from one to the next."""

    pointer: Any
    stride_bytes: Any


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
    builder: Any, count: Any, a: Rows, b: Pairs, num_groups: Any, vectors: int, out: Rows
) -> None:
    """Write the products of some rows of `a` and 16 * `vectors` columns of `b`.

    Args:
        builder: of the code.
        count: rows, known when the kernel runs.
        a: bf16, 32 times `num_groups` numbers of each row.
        b: bf16.
        num_groups: how many times 16 pairs are summed.
        vectors: how many times 16 columns, known now.
        out: fp32.
    """
    done = cgutils.alloca_once_value(builder, i64(0))

    def some(rows: int) -> None:
        first = builder.load(done)
        own_a, own_out = (
            Rows(_moved(builder, x.pointer, first, x.stride_bytes), x.stride_bytes)
            for x in (a, out)
        )
        _multiply(builder, rows, own_a, b, num_groups, vectors, own_out)
        builder.store(builder.add(first, i64(rows)), done)

    with cgutils.for_range(builder, builder.udiv(count, i64(_MAX_ROWS))):
        some(_MAX_ROWS)
    rows = _MAX_ROWS // 2
    while rows:
        is_left = builder.icmp_signed("!=", builder.and_(count, i64(rows)), i64(0))
        with builder.if_then(is_left):
            some(rows)
        rows //= 2


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
    dot = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(FLOATS, [FLOATS, INTS, INTS]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    with cgutils.for_range(builder, num_groups) as group:
        a_at = _moved(builder, a.pointer, group.index, i64(GROUP_PAIRS * _PAIR_BYTES))
        b_at = _moved(builder, b.pointer, group.index, b.group_bytes)
        with cgutils.for_range(builder, i64(GROUP_PAIRS)) as pair:
            own_b = _moved(builder, b_at, pair.index, b.pair_bytes)
            columns = [
                load_vector(builder, _moved(builder, own_b, i64(v), b.vector_bytes), INTS, 2)
                for v in range(vectors)
            ]
            own_a = _moved(builder, a_at, pair.index, i64(_PAIR_BYTES))
            for i, row in enumerate(sums):
                where = _moved(builder, own_a, i64(i), a.stride_bytes)
                one = builder.load(builder.bitcast(where, _I32.as_pointer()), align=2)
                same = spread(builder, one, INTS)
                for place, column in zip(row, columns, strict=True):
                    builder.store(builder.call(dot, [builder.load(place), same, column]), place)
    for i, row in enumerate(sums):
        own_out = _moved(builder, out.pointer, i64(i), out.stride_bytes)
        for v, place in enumerate(row):
            where = _moved(builder, own_out, i64(v), i64(_VECTOR_BYTES))
            store_vector(builder, builder.load(place), where, 4)
