"""From products of queries and keys to weights, as parts of kernels while their code is made.

The formulas are torch's, whose softmax in fp32 takes 16 numbers at a time. Between the steps
numbers are in bf16, to which transformers' eager attention rounds them there: half the memory, of
which a long context needs more than a core's cache has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from workers import kernel_tiles as tiles
from workers.kernel_arithmetic import address_of, width_of
from workers.kernel_tiles import FLOATS, INTS, i64

_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.428606765330187e-06
_LOWEST = -104.0
"""Below it torch's exponential is 0."""
_POWERS = (
    0.00019852761761285365,
    0.0013930435525253415,
    0.008333360776305199,
    0.041666485369205475,
    0.1666666716337204,
    0.5,
)
"""What torch's exponential multiplies the powers of a remainder by, the highest one first."""


def _rounded(builder: Any, numbers: Any) -> Any:
    """Return fp32 numbers rounded to bf16, as fp32.

    A number that is none stays so: it comes of bf16, so it has no bits that could carry over.
    """
    bits = tiles.rounded_to_bf16(builder, numbers, any_nan=False)
    return builder.bitcast(bits, FLOATS)


def _powers_of_two_times(builder: Any, y: Any, n: Any) -> Any:
    """Return y * 2^n for integers n from -150 to 0, rounded once."""
    if tiles.HAS_LONG_VECTORS:
        i16, i32 = ir.IntType(16), ir.IntType(32)
        kind = ir.FunctionType(FLOATS, [FLOATS, FLOATS, FLOATS, i16, i32])
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        scale = cgutils.get_or_insert_function(builder.module, kind, name)
        all_lanes, current_rounding = ir.Constant(i16, 0xFFFF), ir.Constant(i32, 4)
        return builder.call(scale, [y, n, y, all_lanes, current_rounding])
    exponent = builder.fptosi(n, INTS)
    half = builder.ashr(exponent, tiles.ints(1))
    for part in (half, builder.sub(exponent, half)):
        power = builder.shl(builder.add(part, tiles.ints(127)), tiles.ints(23))
        y = builder.fmul(y, builder.bitcast(power, FLOATS))
    return y


def _exponentials(builder: Any, x: Any) -> Any:
    """Return e^x of 16 numbers up to 0, as torch's vectors have it by SLEEF (expf, 1.0 ULP)."""
    is_low = builder.fcmp_ordered("<", x, tiles.floats(_LOWEST))
    within = builder.select(is_low, tiles.floats(_LOWEST), x)
    n = tiles.rounded(builder, builder.fmul(within, tiles.floats(_LOG2_E)))
    rest = tiles.fused_multiply_add(builder, n, tiles.floats(-_LN2_HIGH), within)
    rest = tiles.fused_multiply_add(builder, n, tiles.floats(-_LN2_LOW), rest)
    y = tiles.floats(_POWERS[0])
    for power in _POWERS[1:]:
        y = tiles.fused_multiply_add(builder, y, rest, tiles.floats(power))
    y = tiles.fused_multiply_add(builder, builder.fmul(rest, rest), y, rest)
    y = _powers_of_two_times(builder, builder.fadd(y, tiles.floats(1.0)), n)
    return builder.select(is_low, tiles.floats(0.0), y)


def _over_lanes(builder: Any, vector: Any, join: Any) -> Any:
    """Return a vector whose numbers all are what 16 numbers come to, halves first."""
    for distance in (8, 4, 2, 1):
        moved = tiles.shuffled(builder, vector, vector, [i ^ distance for i in range(16)])
        vector = join(builder, vector, moved)
    return vector


def _least(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _within(builder: Any, a: Any, low: Any, high: Any) -> Any:
    """Return the number from `low` to `high` that is nearest to a."""
    raised = builder.select(builder.icmp_signed("<", a, low), low, a)
    return builder.select(builder.icmp_signed("<", low, high), _least(builder, raised, high), low)


def _in_16(builder: Any, count: Any) -> Any:
    """Return how many times 16 hold so many."""
    return builder.udiv(builder.add(count, i64(15)), i64(16))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


@intrinsic  # type: ignore[untyped-decorator]
def round_scores(
    _: Any,
    scores: Any,
    row: Any,
    begin: Any,
    end: Any,
    first: Any,
    after: Any,
    scaling: Any,
    largest: Any,
    rounded: Any,
) -> Any:
    """Round and scale some of a row's products, and hide what the row does not see.

    Args:
        scores: fp32 [rows, columns]: products, from number 16 * `begin` of a row on.
        row: which row, of all arrays.
        begin: the first 16 numbers; `end` are the ones after the last.
        first: the first number that the row sees.
        after: the number after the last one that it sees; none is written after its 16.
        scaling: fp32, a factor of the rounded products, which are rounded again.
        largest: fp32 [rows, 16]: the largest score of each 16th number, brought up to date.
        rounded: bf16 [rows, columns], written.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores_type, largest_type, rounded_type = (signature.args[i] for i in (0, 7, 8))
        at = builder.mul(args[1], width_of(context, builder, scores_type, args[0]))
        at = builder.sub(at, builder.mul(args[2], i64(16)))
        out_at = builder.mul(args[1], width_of(context, builder, rounded_type, args[8]))
        end = _least(builder, args[3], _in_16(builder, args[5]))
        seen = _within(builder, _in_16(builder, args[4]), args[2], end)
        whole = _within(builder, builder.udiv(args[5], i64(16)), seen, end)
        scaling = tiles.spread(builder, args[6], FLOATS)
        is_scaled = builder.fcmp_ordered("!=", args[6], ir.Constant(ir.FloatType(), 1.0))
        i32 = ir.IntType(32)
        low, high = (tiles.spread(builder, builder.trunc(x, i32), INTS) for x in args[4:6])
        lanes = ir.Constant(INTS, list(range(16)))
        place = builder.mul(args[1], i64(16))
        largest_at = address_of(context, builder, largest_type, args[7], place)
        kept = tiles.load_vector(builder, largest_at, FLOATS, 4)
        largest = cgutils.alloca_once_value(builder, kept)

        def some(begin: Any, end: Any, scales: bool, hides: bool) -> None:
            with cgutils.for_range_slice(builder, begin, end, i64(1), inc=True) as (block, _):
                column = builder.mul(block, i64(16))
                place = builder.add(at, column)
                pointer = address_of(context, builder, scores_type, args[0], place)
                x = _rounded(builder, tiles.load_vector(builder, pointer, FLOATS, 4))
                if scales:
                    x = _rounded(builder, builder.fmul(x, scaling))
                if hides:
                    columns = tiles.spread(builder, builder.trunc(column, i32), INTS)
                    columns = builder.add(columns, lanes)
                    is_seen = builder.and_(
                        builder.icmp_signed(">=", columns, low),
                        builder.icmp_signed("<", columns, high),
                    )
                    x = builder.select(is_seen, x, tiles.floats(float("-inf")))
                builder.store(_larger(builder, builder.load(largest), x), largest)
                place = builder.add(out_at, column)
                pointer = address_of(context, builder, rounded_type, args[8], place)
                tiles.store_vector(builder, tiles.upper_halves(builder, x), pointer, 2)

        def all_of_them(scales: bool) -> None:
            some(args[2], seen, scales, hides=True)
            some(seen, whole, scales, hides=False)
            some(whole, end, scales, hides=True)

        with builder.if_else(is_scaled) as (then, otherwise):
            with then:
                all_of_them(scales=True)
            with otherwise:
                all_of_them(scales=False)
        tiles.store_vector(builder, builder.load(largest), largest_at, 4)
        return context.get_dummy_value()

    counts = (types.int64,) * 5
    return types.void(scores, *counts, types.float32, largest, rounded), generate


@intrinsic  # type: ignore[untyped-decorator]
def make_weights(
    _: Any, scores: Any, row: Any, after: Any, blocks: Any, largest: Any, numbers: Any
) -> Any:
    """Overwrite a row's scores with its weights.

    Args:
        scores: bf16 [rows, columns], as `round_scores` leaves them.
        row: which row, of both arrays.
        after: the number after the last one that the row sees.
        blocks: how many times 32 numbers are written, at least up to `after`.
        largest: fp32 [rows, 16], see `round_scores`.
        numbers: fp32 [columns], overwritten.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores_type, _, _, _, largest_type, numbers_type = signature.args
        at = builder.mul(args[1], width_of(context, builder, scores_type, args[0]))
        halves = _in_16(builder, args[2])
        place = builder.mul(args[1], i64(16))
        pointer = address_of(context, builder, largest_type, args[4], place)
        largest = tiles.load_vector(builder, pointer, FLOATS, 4)
        most = _over_lanes(builder, largest, _larger)
        total = cgutils.alloca_once_value(builder, tiles.floats(0.0))

        def score_at(block: Any) -> Any:
            offset = builder.add(at, builder.mul(block, i64(16)))
            return address_of(context, builder, scores_type, args[0], offset)

        def number_at(block: Any) -> Any:
            offset = builder.mul(block, i64(16))
            return address_of(context, builder, numbers_type, args[5], offset)

        with cgutils.for_range(builder, halves) as loop:
            x = tiles.load_widened(builder, score_at(loop.index))
            x = _exponentials(builder, builder.fsub(x, most))
            builder.store(builder.fadd(builder.load(total), x), total)
            tiles.store_vector(builder, x, number_at(loop.index), 4)
        sums = _over_lanes(builder, builder.load(total), lambda b, x, y: b.fadd(x, y))
        factor = builder.fdiv(tiles.floats(1.0), sums)
        with cgutils.for_range(builder, halves) as loop:
            x = tiles.load_vector(builder, number_at(loop.index), FLOATS, 4)
            x = _rounded(builder, builder.fmul(x, factor))
            tiles.store_vector(builder, tiles.upper_halves(builder, x), score_at(loop.index), 2)
        end = builder.mul(args[3], i64(2))
        with cgutils.for_range_slice(builder, halves, end, i64(1), inc=True) as (block, _):
            nothing = tiles.upper_halves(builder, tiles.floats(0.0))
            tiles.store_vector(builder, nothing, score_at(block), 2)
        return context.get_dummy_value()

    counts = (types.int64,) * 3
    return types.void(scores, *counts, largest, numbers), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen_weights(_: Any, weights: Any, row: Any, first: Any, blocks: Any, numbers: Any) -> Any:
    """Write some weights of a row to the beginning of its row of `numbers`.

    Args:
        weights: bf16 [rows, columns].
        row: which row, of both arrays.
        first: the first weight.
        blocks: how many times 32 weights.
        numbers: fp32 [rows, columns].
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights_type, _, _, _, numbers_type = signature.args
        at = builder.mul(args[1], width_of(context, builder, weights_type, args[0]))
        at = builder.add(at, args[2])
        out_at = builder.mul(args[1], width_of(context, builder, numbers_type, args[4]))
        with cgutils.for_range(builder, builder.mul(args[3], i64(2))) as loop:
            offset = builder.mul(loop.index, i64(16))
            place = builder.add(at, offset)
            pointer = address_of(context, builder, weights_type, args[0], place)
            x = tiles.load_widened(builder, pointer)
            place = builder.add(out_at, offset)
            pointer = address_of(context, builder, numbers_type, args[4], place)
            tiles.store_vector(builder, x, pointer, 4)
        return context.get_dummy_value()

    counts = (types.int64,) * 3
    return types.void(weights, *counts, numbers), generate
