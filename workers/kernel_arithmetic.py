"""The arithmetic that compiled loops are made of.

Numbers are fp32, or bfloat16 as its bits in uint16; all arithmetic is fp32. What is here becomes a
part of each kernel that uses it, so it is told exactly what the compiler may do to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from workers.compiled import helper

EXACT: set[str] = set()
SUMS = {"reassoc", "nsz", "contract"}
"""What the compiler may do to a sum."""
_F32, _I32 = ir.FloatType(), ir.IntType(32)


def address_of(context: Any, builder: Any, array: Any, value: Any, offset: Any) -> Any:
    """Return, while code is made, where number `offset` of a contiguous array is."""
    data = make_array(array)(context, builder, value).data
    return builder.gep(data, [offset])


def width_of(context: Any, builder: Any, array: Any, value: Any) -> Any:
    """Return, while code is made, the last size of an array."""
    shape = make_array(array)(context, builder, value).shape
    return builder.extract_value(shape, array.ndim - 1)


def length_of(context: Any, builder: Any, array: Any, value: Any) -> Any:
    """Return, while code is made, the first size of an array."""
    shape = make_array(array)(context, builder, value).shape
    return builder.extract_value(shape, 0)


@intrinsic  # type: ignore[untyped-decorator]
def _bits(_: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _from_bits(_: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c with one rounding."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen(_: Any, x: Any) -> Any:
    """Return an array's number as fp32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if x == types.float32:
            return args[0]
        shifted = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(shifted, _F32)

    return types.float32(x), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrow(_: Any, x: Any, like: Any) -> Any:
    """Return fp32 rounded to the type of `like`, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], _I32)
        sixteen, one = ir.Constant(_I32, 16), ir.Constant(_I32, 1)
        odd = builder.and_(builder.lshr(bits, sixteen), one)
        rounded = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), odd)
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        kept = builder.select(is_nan, ir.Constant(_I32, 0x7FC00000), rounded)
        return builder.trunc(builder.lshr(kept, sixteen), ir.IntType(16))

    return like(types.float32, like), generate


@intrinsic  # type: ignore[untyped-decorator]
def place_of(_: Any, x: Any) -> Any:
    """Return a signed integer that orders an array's numbers; NaN is beyond an infinity."""
    size = 32 if x == types.float32 else 16
    integer = ir.IntType(size)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], integer)
        sign = builder.ashr(bits, ir.Constant(integer, size - 1))
        return builder.xor(bits, builder.and_(sign, ir.Constant(integer, (1 << (size - 1)) - 1)))

    return (types.int32 if size == 32 else types.int16)(x), generate


@intrinsic  # type: ignore[untyped-decorator]
def number_at(_: Any, place: Any, like: Any) -> Any:
    """Return the array's number that has such a `place_of`."""
    size = 32 if like == types.float32 else 16
    integer = ir.IntType(size)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sign = builder.ashr(args[0], ir.Constant(integer, size - 1))
        mask = builder.and_(sign, ir.Constant(integer, (1 << (size - 1)) - 1))
        return builder.bitcast(builder.xor(args[0], mask), _F32 if size == 32 else integer)

    return like(types.int32 if size == 32 else types.int16, like), generate


@intrinsic  # type: ignore[untyped-decorator]
def pointer_to(_: Any, address: Any, like: Any) -> Any:
    """Return an address as a pointer to numbers of the type of `like`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = context.get_value_type(types.CPointer(like))
        return builder.inttoptr(args[0], pointer)

    return types.CPointer(like)(types.int64, like), generate


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693145751953125)
_LN2_LOW = np.float32(1.42860682030941723212e-6)
_ROUNDER = np.float32(12582912.0)
"""1.5 * 2**23: adding it rounds to an integer, which is then in the low bits."""
_P5, _P4, _P3 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
)
_P2, _P1, _P0 = (
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)
_LOWEST, HIGHEST = np.float32(-87.33), np.float32(88.37)
ZERO, ONE, INF = np.float32(0), np.float32(1), np.float32(np.inf)


@helper(EXACT)
def exp(x: Any) -> Any:
    """Return e^x as Cephes' expf does, within 1 ulp; beyond -87.33 and 88.37 what it is there."""
    low = _LOWEST if x < _LOWEST else x
    within = HIGHEST if low > HIGHEST else low
    rounded = fma(within, _LOG2_E, _ROUNDER)
    power = _bits(rounded)
    n = rounded - _ROUNDER
    r = fma(-n, _LN2_HIGH, within)
    r = fma(-n, _LN2_LOW, r)
    y = fma(_P5, r, _P4)
    y = fma(y, r, _P3)
    y = fma(y, r, _P2)
    y = fma(y, r, _P1)
    y = fma(y, r, _P0)
    y = fma(y, r * r, r) + ONE
    return y * _from_bits(np.uint32((power << np.uint32(23)) + np.uint32(0x3F800000)))


@helper(EXACT)
def max_of(numbers: Any) -> Any:
    """Return the largest number, or NaN where there is one without a sign bit."""
    best = place_of(numbers[0])
    for j in range(1, numbers.shape[0]):
        place = place_of(numbers[j])
        best = place if place > best else best
    return widen(number_at(best, numbers[0]))


@helper(SUMS)
def sum_of_exp(numbers: Any, largest: Any) -> Any:
    total = ZERO
    for j in range(numbers.shape[0]):
        total += exp(widen(numbers[j]) - largest)
    return total


@helper(SUMS)
def sum_of_squares(numbers: Any) -> Any:
    total = ZERO
    for j in range(numbers.shape[0]):
        x = widen(numbers[j])
        total += x * x
    return total
