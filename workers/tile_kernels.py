"""Products with bf16 weights, compiled at run time by numba: on AMX tiles, or by vectors.

On a processor with instructions for bfloat16 they are for few rows. oneDNN's kernels go through a
row's numbers in groups of 32 (see `workers.kernel_tiles`) or in pairs (`workers.kernel_vectors`),
and for long rows in some chunks, whose sums they add up. So the kernel here gives the bits that
they give, if it is told the size of a chunk; and for a handful of rows it takes less time, since
less is padded, or nothing, and the weights are read in one stream.

Weights lie as oneDNN lays them out: [out_features / `COLUMNS`, in_features / 2, `COLUMNS`, 2], each
pair of inputs side by side, and zeros for outputs that there are not. Whoever calls must know that
they do, and that the process may use AMX where there is one. On a processor without such
instructions the rows may be many; there are zeros also for inputs up to a multiple of 32, and a
chunk is all of them. The rules of `workers.kernels` hold here too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from workers import kernel_tiles as tiles
from workers import kernel_vectors as vectors
from workers.compiled import helper, kernel
from workers.kernel_arithmetic import EXACT, ZERO, address_of, length_of, widen, width_of
from workers.kernel_team import on_team
from workers.kernel_tiles import DEPTH, ROWS, i64

COLUMNS = 64 if tiles.HAS_PAIRS and not tiles.HAS_AMX else 32
"""Outputs that are computed together: on AMX in two tiles for each 16 rows."""
MAX_ROWS = 32
"""Rows of a call where the library takes no longer for more."""
ROW_MULTIPLE = 16 if tiles.HAS_AMX else 1
_LEAST_BITS = 1 << 23
"""Of the least number that is not subnormal."""
_KEPT_NUMBERS = 2**16
"""Numbers in fp32, of rows that have been widened, which stay in a core's own cache."""
_NUMBERS_FOR_TEAM = 2**16
"""Fewer are widened by one thread sooner than they are shared out."""


def _sums(count: int) -> Any:
    """Return what computes `count` times 16 rows and 32 outputs in the code that is made."""

    def compute(_: Any, x: Any, weights: Any, block: Any, first: Any, end: Any, sums: Any) -> Any:
        """Write the products of rows and outputs, summed over some inputs, to `sums`.

        Args:
            x: contiguous bf16 [16 * count, in_features].
            weights: see the module.
            block: which 32 outputs.
            first: the first input; `end` is the one after the last.
            sums: fp32 [16 * count, 32], written.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_type, weights_type, _, _, _, sums_type = signature.args
            depth = width_of(context, builder, x_type, args[0])
            stride = builder.mul(depth, i64(2))
            weights_at = builder.mul(args[2], builder.mul(depth, i64(COLUMNS)))
            a, b = 2 * count, 2 * count + 1
            for tile in range(2 * count):
                tiles.zero(builder, tile)
            step = i64(DEPTH)
            with cgutils.for_range_slice(builder, args[3], args[4], step, inc=True) as (at, _):
                for tile in range(count):
                    place = builder.add(builder.mul(depth, i64(ROWS * tile)), at)
                    pointer = address_of(context, builder, x_type, args[0], place)
                    tiles.load(builder, a, pointer, stride)
                    for half in range(2):
                        place = builder.add(weights_at, builder.mul(at, i64(COLUMNS)))
                        place = builder.add(place, i64(DEPTH * half))
                        pointer = address_of(context, builder, weights_type, args[1], place)
                        tiles.load(builder, b, pointer, i64(4 * COLUMNS))
                        tiles.multiply(builder, 2 * tile + half, a, b)
            for tile in range(count):
                for half in range(2):
                    place = i64(ROWS * COLUMNS * tile + 16 * half)
                    pointer = address_of(context, builder, sums_type, args[5], place)
                    tiles.store(builder, 2 * tile + half, pointer, i64(4 * COLUMNS))
            return context.get_dummy_value()

        given = (x, weights, types.int64, types.int64, types.int64, sums)
        return types.void(*given), generate

    return intrinsic(compute)


_sums_of_16, _sums_of_32 = _sums(1), _sums(2)


@helper(EXACT)
def _tile_sums(x: Any, weights: Any, block: Any, first: Any, end: Any, sums: Any) -> None:
    if x.shape[0] == ROWS:
        _sums_of_16(x, weights, block, first, end, sums)
    else:
        _sums_of_32(x, weights, block, first, end, sums)


@intrinsic  # type: ignore[untyped-decorator]
def _vector_sums(_: Any, x: Any, weights: Any, block: Any, first: Any, end: Any, sums: Any) -> Any:
    """Write the products of all rows of x and some outputs, summed over some inputs, to `sums`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_type, weights_type, _, _, _, sums_type = signature.args
        depth = width_of(context, builder, x_type, args[0])
        num_rows = length_of(context, builder, x_type, args[0])
        place = builder.mul(builder.add(builder.mul(args[2], depth), args[3]), i64(COLUMNS))
        pair_bytes = 4 * COLUMNS
        num_groups = builder.udiv(builder.sub(args[4], args[3]), i64(DEPTH))
        own_x = address_of(context, builder, x_type, args[0], args[3])
        for vector in range(0, COLUMNS // 16, 2):
            own_weights = builder.add(place, i64(32 * vector))
            own_sums = address_of(context, builder, sums_type, args[5], i64(16 * vector))
            vectors.multiply(
                builder,
                num_rows,
                vectors.Rows(own_x, builder.mul(depth, i64(vectors.NUMBER_BYTES))),
                vectors.Pairs(
                    address_of(context, builder, weights_type, args[1], own_weights),
                    pair_bytes=i64(pair_bytes),
                    group_bytes=i64(pair_bytes * vectors.GROUP_PAIRS),
                    vector_bytes=i64(64),
                ),
                num_groups,
                2,
                vectors.Rows(own_sums, i64(4 * COLUMNS)),
            )
        return context.get_dummy_value()

    given = (x, weights, types.int64, types.int64, types.int64, sums)
    return types.void(*given), generate


_block_sums = _tile_sums if tiles.HAS_AMX else _vector_sums


@kernel
def multiply(threads: Any, x: Any, weights: Any, bias: Any, chunk: Any, out: Any) -> None:
    """Write x W^T + b to `out`.

    Args:
        threads: how many to use.
        x: bf16 [rows, in_features]: a multiple of `ROW_MULTIPLE` rows; see the module.
        weights: uint16, see the module.
        bias: fp32 [out_features].
        chunk: inputs that are summed by themselves, a multiple of 32.
        out: bf16 [rows, out_features].
    """
    product(threads, x, weights, bias, chunk, out)


@helper(EXACT)
def product(threads: Any, x: Any, weights: Any, bias: Any, chunk: Any, out: Any) -> None:
    """Do it as a part of another kernel."""
    count = (out.shape[1] + COLUMNS - 1) // COLUMNS
    rows = _as_numbers(threads, x, chunk)
    on_team(_columns, threads, count, (rows, weights, bias, chunk, out))


@helper(EXACT)
def _widened(threads: Any, x: Any, width: Any) -> Any:
    """Return x in fp32 with zeros up to a width."""
    wide = np.empty((x.shape[0], width), np.float32)
    on_team(_widen, threads if x.size > _NUMBERS_FOR_TEAM else 1, x.shape[0], (x, wide))
    return wide


@helper(EXACT)
def _widen(x: Any, wide: Any, first: Any, end: Any) -> None:
    for i in range(first, end):
        row, result = x[i], wide[i]
        for j in range(row.shape[0]):
            result[j] = widen(row[j])
        result[row.shape[0] :] = ZERO


@helper(EXACT)
def _kept(threads: Any, x: Any, width: Any) -> Any:
    return x


_as_numbers = _widened if vectors.WIDENS else _kept


@helper(EXACT)
def _few_rows(
    x: Any, weights: Any, bias: Any, chunk: Any, out: Any, first_block: Any, end_block: Any
) -> None:
    rows, depth = x.shape
    sums = np.empty((MAX_ROWS, COLUMNS), np.float32)
    totals = np.empty((MAX_ROWS, COLUMNS), np.float32)
    tiles.begin()
    for block in range(first_block, end_block):
        for first in range(0, depth, chunk):
            end = min(first + chunk, depth)
            _block_sums(x, weights, block, first, end, sums)
            for i in range(rows):
                if first == 0:
                    for j in range(COLUMNS):
                        totals[i, j] = sums[i, j]
                else:
                    for j in range(COLUMNS):
                        totals[i, j] += sums[i, j]
        _write(totals, bias, block, out)
    tiles.end()


@helper(EXACT)
def _write(totals: Any, bias: Any, block: Any, out: Any) -> None:
    """Write totals of some times `COLUMNS` outputs, and their bias, to rows of `out`."""
    rows, width = out.shape
    start = block * COLUMNS
    if start + COLUMNS <= width:
        for i in range(rows):
            for j in range(0, COLUMNS, 16):
                _write_vector(totals, i * COLUMNS + j, bias, start + j, out, i * width + start + j)
        return
    own_bias, result = np.zeros(COLUMNS, bias.dtype), np.empty(COLUMNS, out.dtype)
    own_bias[: width - start] = bias[start:]
    for i in range(rows):
        for j in range(0, COLUMNS, 16):
            _write_vector(totals, i * COLUMNS + j, own_bias, j, result, j)
        out[i, start:] = result[: width - start]


@intrinsic  # type: ignore[untyped-decorator]
def _write_vector(
    _: Any, totals: Any, total: Any, bias: Any, column: Any, out: Any, place: Any
) -> Any:
    """Do it for 16 totals, given where each array's first number of them is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args

        def vector(array: int) -> Any:
            pointer = address_of(context, builder, kinds[array], args[array], args[array + 1])
            return tiles.load_vector(builder, pointer, tiles.FLOATS, 4)

        number = builder.fadd(vector(0), vector(2))
        bits = builder.bitcast(number, tiles.INTS)
        # As the processor's own conversion has it, a subnormal number is zero.
        size = builder.and_(bits, tiles.ints(0x7FFFFFFF))
        is_tiny = builder.icmp_unsigned("<", size, tiles.ints(_LEAST_BITS))
        kept = builder.select(is_tiny, builder.and_(bits, tiles.ints(0x80000000)), bits)
        narrowed = tiles.narrowed(builder, builder.bitcast(kept, tiles.FLOATS))
        pointer = address_of(context, builder, kinds[4], args[4], args[5])
        tiles.store_vector(builder, narrowed, pointer, 2)
        return context.get_dummy_value()

    given = (totals, types.int64, bias, types.int64, out, types.int64)
    return types.void(*given), generate


@helper(EXACT)
def _many_rows(
    x: Any, weights: Any, bias: Any, chunk: Any, out: Any, first_block: Any, end_block: Any
) -> None:
    at_once = max(_KEPT_NUMBERS // chunk // vectors.MAX_ROWS, 1) * vectors.MAX_ROWS
    sums = np.empty((min(at_once, x.shape[0]), COLUMNS), np.float32)
    for first in range(0, x.shape[0], at_once):
        rows = x[first : first + at_once]
        for block in range(first_block, end_block):
            _vector_sums(rows, weights, block, 0, chunk, sums)
            _write(sums, bias, block, out[first : first + at_once])


_columns = _many_rows if vectors.WIDENS else _few_rows
"""Does what `product` does for some times `COLUMNS` columns, of numbers of the vectors' type."""
