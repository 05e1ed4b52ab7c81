"""Fused loops on CPU over rows of numbers, compiled at run time by numba.

The module knows arrays and formulas; it knows no torch, model or request. Numbers are fp32, or
bfloat16 as its bits in uint16; all arithmetic is fp32. Rules:
- A row (or an element) is computed by a loop of its own, so its bits do not depend on the rest of
  the batch, on alignment or on threads: each kernel runs on the thread that calls it, and lets go
  of the interpreter's lock, so that several can share the rows (`workers.row_threads`).
- Elementwise formulas allow the compiler no freedom, so that numbers in whole vectors and those
  left over are rounded alike. Sums may be put into vectors, in an order that depends on the row's
  length (and on the machine: see `workers.fused.signature`).
- Arrays are C-contiguous: a loop over strided numbers would be another loop.
- A kernel uses helpers of this file only: see `workers.compiled`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from workers.compiled import helper, kernel

_EXACT: set[str] = set()
_SUMS = {"reassoc", "nsz", "contract"}
"""What the compiler may do to a sum."""
_F32, _I32 = ir.FloatType(), ir.IntType(32)


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
def _fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c with one rounding."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _widen(_: Any, x: Any) -> Any:
    """Return an array's number as fp32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if x == types.float32:
            return args[0]
        shifted = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(shifted, _F32)

    return types.float32(x), generate


@intrinsic  # type: ignore[untyped-decorator]
def _narrow(_: Any, x: Any, like: Any) -> Any:
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
def _place(_: Any, x: Any) -> Any:
    """Return a signed integer that orders an array's numbers; NaN is beyond an infinity."""
    size = 32 if x == types.float32 else 16
    integer = ir.IntType(size)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], integer)
        sign = builder.ashr(bits, ir.Constant(integer, size - 1))
        return builder.xor(bits, builder.and_(sign, ir.Constant(integer, (1 << (size - 1)) - 1)))

    return (types.int32 if size == 32 else types.int16)(x), generate


@intrinsic  # type: ignore[untyped-decorator]
def _number_at(_: Any, place: Any, like: Any) -> Any:
    """Return the array's number that has such a `_place`."""
    size = 32 if like == types.float32 else 16
    integer = ir.IntType(size)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sign = builder.ashr(args[0], ir.Constant(integer, size - 1))
        mask = builder.and_(sign, ir.Constant(integer, (1 << (size - 1)) - 1))
        return builder.bitcast(builder.xor(args[0], mask), _F32 if size == 32 else integer)

    return like(types.int32 if size == 32 else types.int16, like), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_: Any, address: Any, like: Any) -> Any:
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
_LOWEST, _HIGHEST = np.float32(-87.33), np.float32(88.37)
_ZERO, _ONE, _INF = np.float32(0), np.float32(1), np.float32(np.inf)


@helper(_EXACT)
def _exp(x: Any) -> Any:
    """Return e^x as Cephes' expf does, within 1 ulp; beyond -87.33 and 88.37 what it is there."""
    low = _LOWEST if x < _LOWEST else x
    within = _HIGHEST if low > _HIGHEST else low
    rounded = _fma(within, _LOG2_E, _ROUNDER)
    power = _bits(rounded)
    n = rounded - _ROUNDER
    r = _fma(-n, _LN2_HIGH, within)
    r = _fma(-n, _LN2_LOW, r)
    y = _fma(_P5, r, _P4)
    y = _fma(y, r, _P3)
    y = _fma(y, r, _P2)
    y = _fma(y, r, _P1)
    y = _fma(y, r, _P0)
    y = _fma(y, r * r, r) + _ONE
    return y * _from_bits(np.uint32((power << np.uint32(23)) + np.uint32(0x3F800000)))


@helper(_EXACT)
def _max(numbers: Any) -> Any:
    """Return the largest number, or NaN where there is one without a sign bit."""
    best = _place(numbers[0])
    for j in range(1, numbers.shape[0]):
        place = _place(numbers[j])
        best = place if place > best else best
    return _widen(_number_at(best, numbers[0]))


@helper(_SUMS)
def _sum_of_exp(numbers: Any, largest: Any) -> Any:
    total = _ZERO
    for j in range(numbers.shape[0]):
        total += _exp(_widen(numbers[j]) - largest)
    return total


@helper(_SUMS)
def _sum_of_squares(numbers: Any) -> Any:
    total = _ZERO
    for j in range(numbers.shape[0]):
        x = _widen(numbers[j])
        total += x * x
    return total


@kernel
def rms_norm(x: Any, scale: Any, eps: Any, rounds_first: Any, out: Any) -> None:
    """Write x / sqrt(mean(x^2) + eps) * scale to `out`.

    Args:
        x: [rows, width]; `out` likewise, of the same type.
        scale: fp32 [width].
        eps: fp32.
        rounds_first: whether the quotient is rounded to the array's type before it is scaled.
        out: another array than x.
    """
    width = np.float32(x.shape[1])
    for i in range(x.shape[0]):
        row, result = x[i], out[i]
        factor = _ONE / np.sqrt(_sum_of_squares(row) / width + eps)
        if rounds_first:
            for j in range(row.shape[0]):
                quotient = _narrow(_widen(row[j]) * factor, row[j])
                result[j] = _narrow(_widen(quotient) * scale[j], row[j])
        else:
            for j in range(row.shape[0]):
                result[j] = _narrow(_widen(row[j]) * factor * scale[j], row[j])


@kernel
def gate_silu(gate: Any, up: Any, out: Any) -> None:
    """Write silu(gate) * up to `out`, all [numbers]; silu is rounded to the arrays' type first."""
    for j in range(gate.shape[0]):
        x = _widen(gate[j])
        power = _INF if -x > _HIGHEST else _exp(-x)
        active = _narrow(x / (_ONE + power), gate[j])
        out[j] = _narrow(_widen(active) * _widen(up[j]), gate[j])


@kernel
def rotate(x: Any, cos: Any, sin: Any, out: Any) -> None:
    """Write x * cos + (-second half of x, first half of x) * sin to `out`.

    Args:
        x: [tokens, heads, width]; `out` likewise.
        cos: [tokens, width]; `sin` likewise. Each product is rounded to the arrays' type.
        out: another array than x.
    """
    tokens, heads, width = x.shape
    half = width // 2
    crossed = np.empty(width, np.float32)
    for token in range(tokens):
        cosines, sines = cos[token], sin[token]
        for head in range(heads):
            row, result = x[token, head], out[token, head]
            for j in range(half):
                crossed[j] = -_widen(row[half + j])
            for j in range(half):
                crossed[half + j] = _widen(row[j])
            for j in range(width):
                straight = _narrow(_widen(row[j]) * _widen(cosines[j]), row[j])
                across = _narrow(crossed[j] * _widen(sines[j]), row[j])
                result[j] = _narrow(_widen(straight) + _widen(across), row[j])


@helper(_EXACT)
def _part_of_row(parts: Any, part: Any, i: Any, like: Any) -> Any:
    address, stride_bytes, width = parts[part]
    return numba.carray(_pointer(address + i * stride_bytes, like), (width,))


@helper(_EXACT)
def _logprob(x: Any, largest: Any, log_sum: Any) -> Any:
    return (_widen(x) - largest) - log_sum


@kernel
def normalise(parts: Any, like: Any, largest: Any, log_sums: Any, best_ids: Any) -> None:
    """Find what makes logprobs of rows of logits: logprob = (logit - largest) - log_sum.

    Args:
        parts: int64 [parts, 3]: address, bytes from row to row and width of each matrix of
            logits; side by side these are the vocabulary.
        like: a number of the matrices' type.
        largest: fp32 [rows], written.
        log_sums: fp32 [rows], written: log(sum(exp(logit - largest))), NaN where the row is spoilt.
        best_ids: int64 [rows], written: the lowest id of those with the largest logprob.
    """
    count = parts.shape[0]
    maxima, sums = np.empty(count, np.float32), np.empty(count, np.float32)
    for i in range(largest.shape[0]):
        top = -_INF
        for part in range(count):
            numbers = _part_of_row(parts, part, i, like)
            maximum = _max(numbers)
            maxima[part] = maximum
            sums[part] = _ZERO if maximum == -_INF else _sum_of_exp(numbers, maximum)
            top = maximum if maximum > top else top
        total = _ZERO
        for part in range(count):
            share = _ZERO if sums[part] == _ZERO else sums[part] * _exp(maxima[part] - top)
            total += share
        # A logarithm in double precision is the same number on every machine once rounded.
        log_sum = np.float32(np.log(np.float64(total)))
        largest[i], log_sums[i] = top, log_sum
        best_ids[i] = _first_of(parts, i, like, maxima, top, log_sum)


@helper(_EXACT)
def _first_of(parts: Any, i: Any, like: Any, maxima: Any, largest: Any, log_sum: Any) -> Any:
    """Return the lowest id whose logprob is the largest one; 0 in a spoilt row."""
    best = (largest - largest) - log_sum
    first_id = 0
    for part in range(parts.shape[0]):
        if (maxima[part] - largest) - log_sum == best:
            numbers = _part_of_row(parts, part, i, like)
            for j in range(numbers.shape[0]):
                if _logprob(numbers[j], largest, log_sum) == best:
                    return first_id + j
        first_id += parts[part, 2]
    return 0


@kernel
def count_greater(
    parts: Any, like: Any, largest: Any, log_sums: Any, values: Any, counts: Any
) -> None:
    """Count in each row the logprobs that are greater than some.

    Args:
        parts: see `normalise`, as are `like`, `largest` and `log_sums`.
        values: fp32 [rows, values]: logprobs.
        counts: int64 [rows, values], written.
    """
    for i in range(values.shape[0]):
        for column in range(values.shape[1]):
            total = 0
            for part in range(parts.shape[0]):
                numbers = _part_of_row(parts, part, i, like)
                total += _count(numbers, largest[i], log_sums[i], values[i, column])
            counts[i, column] = total


@helper(_EXACT)
def _count(numbers: Any, largest: Any, log_sum: Any, value: Any) -> Any:
    count = np.int32(0)
    for j in range(numbers.shape[0]):
        count = np.int32(count + (_logprob(numbers[j], largest, log_sum) > value))
    return count


@kernel
def logprobs_of(
    parts: Any, like: Any, largest: Any, log_sums: Any, token_ids: Any, found: Any
) -> None:
    """Write the logprobs of some tokens of each row.

    Args:
        parts: see `normalise`, as are `like`, `largest` and `log_sums`.
        token_ids: int64 [rows, tokens], within the vocabulary.
        found: fp32 [rows, tokens], written.
    """
    for i in range(found.shape[0]):
        for column in range(found.shape[1]):
            part, place = 0, token_ids[i, column]
            while place >= parts[part, 2]:
                place -= parts[part, 2]
                part += 1
            number = _part_of_row(parts, part, i, like)[place]
            found[i, column] = _logprob(number, largest[i], log_sums[i])


@kernel
def argmax(parts: Any, like: Any, largest: Any, ids: Any) -> None:
    """Find the largest logit of each row and the lowest id that has it.

    Args:
        parts: see `normalise`, as is `like`.
        largest: fp32 [rows], written; NaN where the row has one.
        ids: int64 [rows], written.
    """
    nan = np.float32(np.nan)
    least = _place(_narrow(-_INF, like))
    for i in range(ids.shape[0]):
        first_id, top_part, top_first_id = 0, 0, 0
        top = least
        spoilt = False
        for part in range(parts.shape[0]):
            lowest, highest = _lowest_and_highest_place(_part_of_row(parts, part, i, like))
            # A NaN's place is above an infinity's or, with its sign bit set, below.
            spoilt = spoilt or lowest < least
            if highest > top:
                top, top_part, top_first_id = highest, part, first_id
            first_id += parts[part, 2]
        ids[i] = 0
        numbers = _part_of_row(parts, top_part, i, like)
        for j in range(numbers.shape[0]):
            if _place(numbers[j]) == top:
                ids[i] = top_first_id + j
                break
        largest[i] = nan if spoilt else _widen(_number_at(top, like))


@helper(_EXACT)
def _lowest_and_highest_place(numbers: Any) -> Any:
    lowest = highest = _place(numbers[0])
    for j in range(1, numbers.shape[0]):
        place = _place(numbers[j])
        lowest = place if place < lowest else lowest
        highest = place if place > highest else highest
    return lowest, highest
