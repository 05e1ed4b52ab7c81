"""Products of few rows on AMX tiles, compiled at run time by numba.

A tile is 16 rows of 64 bytes. A product of bfloat16 tiles adds to 16 x 16 fp32 sums the products of
32 numbers, in one order (`TDPBF16PS` in Intel's Software Developer's Manual, volume 2). The kernels
of oneDNN go through a row's numbers in groups of 32, and for long rows in some chunks, whose sums
they add up. So the kernel here gives the bits that they give, if it is told the size of a chunk;
and for a handful of rows it takes half the time, since nothing is padded and the weights are read
in one stream.

Weights lie as oneDNN lays them out for AMX: [out_features / 32, in_features / 32, 16, 32, 2], which
is 32 outputs, of 32 inputs, each pair of inputs side by side. Whoever calls must know that they do,
and that the process may use AMX. The rules of `workers.kernels` hold here too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from workers.compiled import kernel
from workers.kernel_arithmetic import ZERO, address_of, narrow

ROWS = 16
"""Rows of a tile."""
DEPTH = 32
"""Numbers of a row that one product of tiles sums over."""
COLUMNS = 32
"""Outputs that are computed together, in two tiles for each 16 rows."""
MAX_ROWS = 48
"""Rows that the eight tiles can hold the sums of."""
_LEAST = np.float32(2.0**-126)
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES = _I8.as_pointer()


def _call(builder: Any, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, arguments)


def _tile(number: int) -> Any:
    return ir.Constant(_I8, number)


def _i64(number: int) -> Any:
    return ir.Constant(_I64, number)


def _zero(builder: Any, tile: int) -> None:
    _call(builder, "tilezero", _tile(tile))


def _load(builder: Any, tile: int, pointer: Any, stride_bytes: Any) -> None:
    where = builder.bitcast(pointer, _BYTES)
    _call(builder, "tileloadd64", _tile(tile), where, stride_bytes)


def _store(builder: Any, tile: int, pointer: Any, stride_bytes: Any) -> None:
    where = builder.bitcast(pointer, _BYTES)
    _call(builder, "tilestored64", _tile(tile), where, stride_bytes)


def _multiply(builder: Any, total: int, a: int, b: int) -> None:
    _call(builder, "tdpbf16ps", _tile(total), _tile(a), _tile(b))


@intrinsic  # type: ignore[untyped-decorator]
def _begin(_: Any) -> Any:
    """Have this thread's tiles be of 16 rows of 64 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = 64
        settings = [0] * size
        settings[0] = 1
        for tile in range(8):
            settings[16 + 2 * tile] = 64
            settings[48 + tile] = ROWS
        kind = ir.ArrayType(_I8, size)
        memory = cgutils.alloca_once_value(builder, ir.Constant(kind, settings))
        _call(builder, "ldtilecfg", builder.bitcast(memory, _BYTES))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _end(_: Any) -> Any:
    """Give this thread's tiles back."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _sums(tiles: int) -> Any:
    """Return what computes `tiles` times 16 rows and 32 outputs in the code that is made."""

    def compute(
        _: Any, x: Any, row: Any, weights: Any, block: Any, first: Any, end: Any, sums: Any
    ) -> Any:
        """Write the products of rows and outputs, summed over some inputs, to `sums`.

        Args:
            x: contiguous bf16 [rows, in_features].
            row: the first of the rows.
            weights: see the module.
            block: which 32 outputs.
            first: the first input; `end` is the one after the last.
            sums: fp32 [16 * tiles, 32], written.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_type, _, weights_type, _, _, _, sums_type = signature.args
            depth = builder.extract_value(make_array(x_type)(context, builder, args[0]).shape, 1)
            stride = builder.mul(depth, _i64(2))
            x_at = builder.mul(args[1], depth)
            weights_at = builder.mul(args[3], builder.mul(depth, _i64(COLUMNS)))
            a, b = 2 * tiles, 2 * tiles + 1
            for tile in range(2 * tiles):
                _zero(builder, tile)
            step = _i64(DEPTH)
            with cgutils.for_range_slice(builder, args[4], args[5], step, inc=True) as (at, _):
                for tile in range(tiles):
                    row_at = builder.add(x_at, builder.mul(depth, _i64(ROWS * tile)))
                    pointer = address_of(context, builder, x_type, args[0], builder.add(row_at, at))
                    _load(builder, a, pointer, stride)
                    for half in range(2):
                        place = builder.add(weights_at, builder.mul(at, _i64(COLUMNS)))
                        place = builder.add(place, _i64(DEPTH * half))
                        pointer = address_of(context, builder, weights_type, args[2], place)
                        _load(builder, b, pointer, _i64(4 * COLUMNS))
                        _multiply(builder, 2 * tile + half, a, b)
            for tile in range(tiles):
                for half in range(2):
                    place = _i64(ROWS * COLUMNS * tile + 16 * half)
                    pointer = address_of(context, builder, sums_type, args[6], place)
                    _store(builder, 2 * tile + half, pointer, _i64(4 * COLUMNS))
            return context.get_dummy_value()

        given = (x, types.int64, weights, types.int64, types.int64, types.int64, sums)
        return types.void(*given), generate

    return intrinsic(compute)


_sums_of_16, _sums_of_32, _sums_of_48 = _sums(1), _sums(2), _sums(3)


@kernel
def few_rows(
    x: Any, weights: Any, bias: Any, chunk: Any, out: Any, first_block: Any, end_block: Any
) -> None:
    """Write x W^T + b to some columns of `out`.

    Args:
        x: bf16 [rows, in_features]: 16, 32 or 48 rows, a multiple of 32 features.
        weights: uint16, see the module.
        bias: fp32 [out_features].
        chunk: inputs that are summed by themselves, a multiple of 32.
        out: bf16 [rows, out_features], a multiple of 32 features.
        first_block: the first 32 columns to compute; `end_block` is after the last ones.
    """
    rows, depth = x.shape
    sums = np.empty((MAX_ROWS, COLUMNS), np.float32)
    totals = np.empty((MAX_ROWS, COLUMNS), np.float32)
    _begin()
    for block in range(first_block, end_block):
        for first in range(0, depth, chunk):
            end = min(first + chunk, depth)
            if rows == 16:
                _sums_of_16(x, 0, weights, block, first, end, sums)
            elif rows == 32:
                _sums_of_32(x, 0, weights, block, first, end, sums)
            else:
                _sums_of_48(x, 0, weights, block, first, end, sums)
            for i in range(rows):
                if first == 0:
                    for j in range(COLUMNS):
                        totals[i, j] = sums[i, j]
                else:
                    for j in range(COLUMNS):
                        totals[i, j] += sums[i, j]
        own_bias = bias[block * COLUMNS : (block + 1) * COLUMNS]
        for i in range(rows):
            result = out[i, block * COLUMNS : (block + 1) * COLUMNS]
            for j in range(COLUMNS):
                number = totals[i, j] + own_bias[j]
                # As the processor's own conversion has it, a subnormal number is zero.
                number = ZERO * number if abs(number) < _LEAST else number
                result[j] = narrow(number, x[0, 0])
    _end()
