"""AMX instructions and vectors of 16 numbers, as parts of kernels while their code is made.

On a processor without AMX the kernels have `workers.kernel_vectors` instead, and no tiles. Which
one code is made for is numba's to say: the machine's own, or what `NUMBA_CPU_NAME` and
`NUMBA_CPU_FEATURES` name.

A tile is 16 rows of 64 bytes. The product of two tiles of bfloat16 adds to 16 x 16 fp32 sums the
products of 32 numbers, in one order (`TDPBF16PS` in Intel's Software Developer's Manual, volume 2):
those at even places one after the other, those at odd places, both together, then onto the sum.
A kernel that uses tiles calls `begin` before and `end` after; whoever calls that kernel must know
that the process may use AMX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from workers.kernel_arithmetic import address_of


def _find_features() -> set[str]:
    """Return what the processor that code is made for can do, in LLVM's words."""
    named = numba.config.CPU_FEATURES
    if named is None and numba.config.CPU_NAME is None:
        return {name for name, has in llvmlite.binding.get_host_cpu_features().items() if has}
    return {name[1:] for name in (named or "").split(",") if name.startswith("+")}


_FEATURES = _find_features()
HAS_AMX = {"amx-tile", "amx-bf16"} <= _FEATURES
HAS_PAIRS = "avx512bf16" in _FEATURES
"""Whether there is an instruction for pairs of bfloat16."""
HAS_FMA = "fma" in _FEATURES
HAS_LONG_VECTORS = "avx512f" in _FEATURES
"""Whether 16 numbers of fp32 are one register; else they are several."""
ROWS = 16
"""Rows of a tile, and columns of one that holds sums."""
DEPTH = 32
"""Numbers of a row that one product of tiles sums over."""
TILE_NUMBERS = ROWS * DEPTH
NUM_TILES = 8
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES = _I8.as_pointer()
FLOATS = ir.VectorType(ir.FloatType(), 16)
INTS = ir.VectorType(_I32, 16)
_WORDS = ir.VectorType(ir.IntType(16), 16)


def i64(number: int) -> Any:
    """Return a constant."""
    return ir.Constant(_I64, number)


def _call(builder: Any, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, arguments)


def _tile(number: int) -> Any:
    return ir.Constant(_I8, number)


def zero(builder: Any, tile: int) -> None:
    """Set a tile to zeros."""
    _call(builder, "tilezero", _tile(tile))


def load(builder: Any, tile: int, pointer: Any, stride_bytes: Any) -> None:
    """Fill a tile with 16 rows of memory."""
    where = builder.bitcast(pointer, _BYTES)
    _call(builder, "tileloadd64", _tile(tile), where, stride_bytes)


def store(builder: Any, tile: int, pointer: Any, stride_bytes: Any) -> None:
    """Write a tile to 16 rows of memory."""
    where = builder.bitcast(pointer, _BYTES)
    _call(builder, "tilestored64", _tile(tile), where, stride_bytes)


def multiply(builder: Any, total: int, a: int, b: int) -> None:
    """Add to the sums in a tile what the rows of `a` and the columns of `b` sum to."""
    _call(builder, "tdpbf16ps", _tile(total), _tile(a), _tile(b))


@intrinsic  # type: ignore[untyped-decorator]
def begin(_: Any) -> Any:
    """Have this thread's tiles be of 16 rows of 64 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not HAS_AMX:
            return context.get_dummy_value()
        size = 64
        settings = [0] * size
        settings[0] = 1
        for tile in range(NUM_TILES):
            settings[16 + 2 * tile] = 64
            settings[48 + tile] = ROWS
        kind = ir.ArrayType(_I8, size)
        memory = cgutils.alloca_once_value(builder, ir.Constant(kind, settings))
        _call(builder, "ldtilecfg", builder.bitcast(memory, _BYTES))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def end(_: Any) -> Any:
    """Give this thread's tiles back."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if HAS_AMX:
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def floats(number: float) -> Any:
    """Return a vector of one constant, fp32."""
    return ir.Constant(FLOATS, [number] * 16)


def ints(number: int) -> Any:
    """Return a vector of one constant, int32."""
    return ir.Constant(INTS, [number] * 16)


def spread(builder: Any, number: Any, kind: Any) -> Any:
    """Return a vector of one number, which is known when the kernel runs."""
    empty = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(empty, number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, empty, ir.Constant(INTS, [0] * 16))


def shuffled(builder: Any, a: Any, b: Any, indices: Sequence[int]) -> Any:
    """Return the numbers of two vectors at some places, of which b's begin at 16."""
    return builder.shuffle_vector(a, b, ir.Constant(INTS, list(indices)))


def fused_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of vectors of fp32 with one rounding."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
    return builder.call(function, [a, b, c])


def rounded(builder: Any, a: Any) -> Any:
    """Return a vector of fp32 rounded to integers, ties to even."""
    kind = ir.FunctionType(FLOATS, [FLOATS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.v16f32")
    return builder.call(function, [a])


def load_vector(builder: Any, pointer: Any, kind: Any, align: int) -> Any:
    """Return 16 numbers from memory."""
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=align)


def store_vector(builder: Any, vector: Any, pointer: Any, align: int) -> None:
    """Write 16 numbers to memory."""
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=align)


def rounded_to_bf16(builder: Any, numbers: Any, *, any_nan: bool = True) -> Any:
    """Return fp32 numbers as bf16, ties to even, in the upper halves of a vector of int32.

    Args:
        builder: of the code.
        numbers: a vector.
        any_nan: False if one that is no number has nothing in the bits that are rounded off.
    """
    bits = builder.bitcast(numbers, INTS)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    kept = builder.add(builder.add(bits, ints(0x7FFF)), odd)
    if any_nan:
        is_nan = builder.fcmp_unordered("uno", numbers, numbers)
        kept = builder.select(is_nan, ints(0x7FC00000), kept)
    return builder.and_(kept, ints(0xFFFF0000))


def upper_halves(builder: Any, numbers: Any) -> Any:
    """Return fp32 numbers that bf16 has, or their bits, in a vector of int16."""
    bits = builder.lshr(builder.bitcast(numbers, INTS), ints(16))
    return builder.trunc(bits, _WORDS)


def narrowed(builder: Any, numbers: Any) -> Any:
    """Return fp32 numbers as bf16, ties to even, in a vector of int16."""
    return upper_halves(builder, rounded_to_bf16(builder, numbers))


def load_widened(builder: Any, pointer: Any) -> Any:
    """Return 16 numbers of bf16 from memory, in fp32."""
    bits = builder.zext(load_vector(builder, pointer, _WORDS, 2), INTS)
    return builder.bitcast(builder.shl(bits, ints(16)), FLOATS)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line that holds number `offset` of a contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        place = builder.bitcast(
            address_of(context, builder, signature.args[0], args[0], args[1]), _BYTES
        )
        read, keep, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
        builder.call(function, [place, read, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


def transposed(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Return the columns of 16 vectors of 16 numbers."""
    found = list(rows)
    step = 1
    while step < 16:
        for i in range(16):
            if i & step:
                continue
            low = [j - step + 16 if j & step else j for j in range(16)]
            high = [j + 16 if j & step else j + step for j in range(16)]
            x, y = found[i], found[i + step]
            found[i] = shuffled(builder, x, y, low)
            found[i + step] = shuffled(builder, x, y, high)
        step *= 2
    return found
