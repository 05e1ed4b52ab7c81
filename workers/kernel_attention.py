"""The steps of attention over 16 rows of queries, as parts of kernels while their code is made.

Products are on AMX tiles or by vectors, whichever the processor has; both are told of the same
memory. Queries and weights are in the type that `workers.kernel_vectors` takes of rows. What they
make up is in `workers.attention_kernels`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from workers import kernel_tiles as tiles
from workers import kernel_vectors as vectors
from workers.kernel_arithmetic import address_of, width_of
from workers.kernel_tiles import DEPTH, FLOATS, INTS, ROWS, TILE_NUMBERS, i64

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
HEAD_TILES = 4
"""Tiles of 16 outputs whose sums are held at once."""


def rounded_number(builder: Any, numbers: Any) -> Any:
    """Return fp32 numbers rounded to bf16, in the type of queries and weights."""
    if vectors.WIDENS:
        return builder.bitcast(tiles.rounded_to_bf16(builder, numbers), FLOATS)
    return tiles.narrowed(builder, numbers)


@intrinsic  # type: ignore[untyped-decorator]
def pack_keys(_: Any, keys: Any, offsets: Any, first: Any, packed: Any, at: Any) -> Any:
    """Write 32 numbers of 16 keys as a tile: each pair of numbers of all keys side by side.

    Args:
        keys: the array of all keys.
        offsets: int64 [16]: which of its numbers each of the keys begins at.
        first: the first of the 32 numbers.
        packed: uint16; the tile goes to number `at`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        keys_type, offsets_type, _, packed_type, _ = signature.args
        rows = []
        for i in range(16):
            place = address_of(context, builder, offsets_type, args[1], i64(i))
            offset = builder.add(builder.load(place), args[2])
            pointer = address_of(context, builder, keys_type, args[0], offset)
            rows.append(tiles.load_vector(builder, pointer, INTS, 2))
        for i, pairs in enumerate(tiles.transposed(builder, rows)):
            place = builder.add(args[4], i64(DEPTH * i))
            pointer = address_of(context, builder, packed_type, args[3], place)
            tiles.store_vector(builder, pairs, pointer, 2)
        return context.get_dummy_value()

    return types.void(keys, offsets, types.int64, packed, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def make_scores(
    _: Any, query: Any, row: Any, count: Any, packed: Any, blocks: Any, depth: Any, out: Any
) -> Any:
    """Write the products of some rows of queries and some keys to `out`.

    Args:
        query: contiguous `NUMBER` [rows, depth], 16 from `row` on.
        row: the first of the rows.
        count: how many are needed, at most 16.
        packed: keys as `pack_keys` writes them, [blocks, depth / 32, 16, 32].
        blocks: how many times 16 keys, an even number.
        depth: a multiple of 32.
        out: fp32 [16, columns], at least 16 times `blocks`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        query_type, _, _, packed_type, _, _, out_type = signature.args
        stride = builder.mul(args[5], i64(vectors.NUMBER_BYTES))
        out_stride = builder.mul(width_of(context, builder, out_type, args[6]), i64(4))
        row_at = builder.mul(args[1], args[5])
        groups = builder.udiv(args[5], i64(DEPTH))

        def query_at(offset: Any) -> Any:
            place = builder.add(row_at, offset)
            return address_of(context, builder, query_type, args[0], place)

        def packed_at(tile: Any) -> Any:
            place = builder.mul(tile, i64(TILE_NUMBERS))
            return address_of(context, builder, packed_type, args[3], place)

        def out_at(block: Any) -> Any:
            place = builder.mul(block, i64(ROWS))
            return address_of(context, builder, out_type, args[6], place)

        if tiles.HAS_AMX:
            with cgutils.for_range(builder, args[4]) as block:
                tiles.zero(builder, 0)
                with cgutils.for_range(builder, groups) as group:
                    tiles.load(builder, 1, query_at(builder.mul(group.index, i64(DEPTH))), stride)
                    tile = builder.add(builder.mul(block.index, groups), group.index)
                    tiles.load(builder, 2, packed_at(tile), i64(2 * DEPTH))
                    tiles.multiply(builder, 0, 1, 2)
                tiles.store(builder, 0, out_at(block.index), out_stride)
        else:
            tile_bytes = i64(2 * TILE_NUMBERS)

            def some(block: Any, number: int) -> None:
                keys = vectors.Pairs(
                    packed_at(builder.mul(block, groups)),
                    pair_bytes=i64(2 * DEPTH),
                    group_bytes=tile_bytes,
                    vector_bytes=builder.mul(groups, tile_bytes),
                )
                own_rows = vectors.Rows(query_at(i64(0)), stride)
                own_out = vectors.Rows(out_at(block), out_stride)
                vectors.multiply(
                    builder, args[2], own_rows, keys, groups, number, own_out, vectors.HALF_ROWS
                )

            whole = builder.and_(args[4], i64(-4))
            with cgutils.for_range_slice(builder, i64(0), whole, i64(4), inc=True) as (block, _):
                some(block, 4)
            with builder.if_then(builder.icmp_signed("<", whole, args[4])):
                some(whole, 2)
        return context.get_dummy_value()

    given = (query, types.int64, types.int64, packed, types.int64, types.int64, out)
    return types.void(*given), generate


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
    y = builder.fadd(y, tiles.floats(1.0))
    exponent = builder.fptosi(n, INTS)
    half = builder.ashr(exponent, tiles.ints(1))
    for part in (half, builder.sub(exponent, half)):
        power = builder.shl(builder.add(part, tiles.ints(127)), tiles.ints(23))
        y = builder.fmul(y, builder.bitcast(power, FLOATS))
    return builder.select(is_low, tiles.floats(0.0), y)


def _over_lanes(builder: Any, vector: Any, join: Any) -> Any:
    """Return a vector whose numbers all are what 16 numbers come to, halves first."""
    for distance in (8, 4, 2, 1):
        moved = tiles.shuffled(builder, vector, vector, [i ^ distance for i in range(16)])
        vector = join(builder, vector, moved)
    return vector


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


@intrinsic  # type: ignore[untyped-decorator]
def make_weights(
    _: Any, scores: Any, row: Any, first: Any, after: Any, scaling: Any, weights: Any, blocks: Any
) -> Any:
    """Write the weights of a row to `weights`, from its products, which are overwritten.

    Args:
        scores: fp32 [rows, columns].
        row: which row, of both arrays.
        first: the first column that the row sees.
        after: the column after the last one that it sees.
        scaling: fp32.
        weights: `NUMBER` [rows, columns], rounded to bf16.
        blocks: how many times 32 columns of `weights` are written, at least up to `after`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores_type, _, _, _, _, weights_type, _ = signature.args
        at = builder.mul(args[1], width_of(context, builder, scores_type, args[0]))
        out_at = builder.mul(args[1], width_of(context, builder, weights_type, args[5]))
        halves = builder.udiv(builder.add(args[3], i64(15)), i64(16))
        scaling = tiles.spread(builder, args[4], FLOATS)
        is_scaled = builder.fcmp_ordered("!=", args[4], ir.Constant(ir.FloatType(), 1.0))
        i32 = ir.IntType(32)
        low, high = (tiles.spread(builder, builder.trunc(x, i32), INTS) for x in args[2:4])
        lanes = ir.Constant(INTS, list(range(16)))
        largest = cgutils.alloca_once_value(builder, tiles.floats(float("-inf")))
        total = cgutils.alloca_once_value(builder, tiles.floats(0.0))

        def place(block: Any) -> Any:
            offset = builder.add(at, builder.mul(block, i64(16)))
            return address_of(context, builder, scores_type, args[0], offset)

        with cgutils.for_range(builder, halves) as loop:
            pointer = place(loop.index)
            x = tiles.load_vector(builder, pointer, FLOATS, 4)
            x = builder.bitcast(tiles.rounded_to_bf16(builder, x), FLOATS)
            rounded = tiles.rounded_to_bf16(builder, builder.fmul(x, scaling))
            x = builder.select(is_scaled, builder.bitcast(rounded, FLOATS), x)
            first = builder.trunc(builder.mul(loop.index, i64(16)), i32)
            columns = builder.add(tiles.spread(builder, first, INTS), lanes)
            is_seen = builder.and_(
                builder.icmp_signed(">=", columns, low), builder.icmp_signed("<", columns, high)
            )
            x = builder.select(is_seen, x, tiles.floats(float("-inf")))
            builder.store(_larger(builder, builder.load(largest), x), largest)
            tiles.store_vector(builder, x, pointer, 4)
        most = _over_lanes(builder, builder.load(largest), _larger)
        with cgutils.for_range(builder, halves) as loop:
            pointer = place(loop.index)
            x = tiles.load_vector(builder, pointer, FLOATS, 4)
            x = _exponentials(builder, builder.fsub(x, most))
            builder.store(builder.fadd(builder.load(total), x), total)
            tiles.store_vector(builder, x, pointer, 4)
        whole = _over_lanes(builder, builder.load(total), lambda b, x, y: b.fadd(x, y))
        factor = builder.fdiv(tiles.floats(1.0), whole)
        with cgutils.for_range(builder, builder.mul(args[6], i64(2))) as loop:
            offset = builder.add(out_at, builder.mul(loop.index, i64(16)))
            pointer = address_of(context, builder, weights_type, args[5], offset)
            is_any = builder.icmp_signed("<", loop.index, halves)
            with builder.if_else(is_any) as (then, otherwise):
                with then:
                    x = tiles.load_vector(builder, place(loop.index), FLOATS, 4)
                    weight = rounded_number(builder, builder.fmul(x, factor))
                    tiles.store_vector(builder, weight, pointer, vectors.NUMBER_BYTES)
                with otherwise:
                    nothing = rounded_number(builder, tiles.floats(0.0))
                    tiles.store_vector(builder, nothing, pointer, vectors.NUMBER_BYTES)
        return context.get_dummy_value()

    given = (scores, types.int64, types.int64, types.int64, types.float32, weights, types.int64)
    return types.void(*given), generate


@intrinsic  # type: ignore[untyped-decorator]
def make_outputs(
    _: Any,
    weights: Any,
    count: Any,
    packed: Any,
    first: Any,
    after: Any,
    per_group: Any,
    tile: Any,
    sums: Any,
) -> Any:
    """Write the sums of values by weight of some rows to `sums`.

    Args:
        weights: `NUMBER` [16, columns].
        count: how many of the rows are needed, at most 16.
        packed: values as `attend` packs them, [groups, per_group, 16, 32].
        first: the first 32 columns to sum; `after` are the ones after the last.
        per_group: tiles of 16 outputs that there are.
        tile: the first tile of outputs to sum; there are four, whatever is in those that are not.
        sums: fp32 [16, 64].
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights_type, _, packed_type, _, _, _, _, sums_type = signature.args
        width = width_of(context, builder, weights_type, args[0])
        stride = builder.mul(width, i64(vectors.NUMBER_BYTES))
        sums_stride = i64(4 * 16 * HEAD_TILES)

        def weights_at(group: Any) -> Any:
            place = builder.mul(group, i64(DEPTH))
            return address_of(context, builder, weights_type, args[0], place)

        def packed_at(group: Any, number: int) -> Any:
            at = builder.add(builder.mul(group, args[5]), args[6])
            place = builder.mul(builder.add(at, i64(number)), i64(TILE_NUMBERS))
            return address_of(context, builder, packed_type, args[2], place)

        def sums_at(number: int) -> Any:
            return address_of(context, builder, sums_type, args[7], i64(16 * number))

        if tiles.HAS_AMX:
            for number in range(HEAD_TILES):
                tiles.zero(builder, number)
            with cgutils.for_range_slice(builder, args[3], args[4], i64(1), inc=True) as (group, _):
                tiles.load(builder, 4, weights_at(group), stride)
                for number in range(HEAD_TILES):
                    tiles.load(builder, 5 + number % 3, packed_at(group, number), i64(2 * DEPTH))
                    tiles.multiply(builder, number, 4, 5 + number % 3)
            for number in range(HEAD_TILES):
                tiles.store(builder, number, sums_at(number), sums_stride)
        else:
            tile_bytes = i64(2 * TILE_NUMBERS)
            num_groups = builder.sub(args[4], args[3])
            values = vectors.Pairs(
                packed_at(args[3], 0),
                pair_bytes=i64(2 * DEPTH),
                group_bytes=builder.mul(args[5], tile_bytes),
                vector_bytes=tile_bytes,
            )
            own_rows = vectors.Rows(weights_at(args[3]), stride)
            own_sums = vectors.Rows(sums_at(0), sums_stride)
            vectors.multiply(
                builder,
                args[1],
                own_rows,
                values,
                num_groups,
                HEAD_TILES,
                own_sums,
                vectors.HALF_ROWS,
            )
        return context.get_dummy_value()

    counts = (types.int64,) * 4
    given = (weights, types.int64, packed, *counts, sums)
    return types.void(*given), generate


@intrinsic  # type: ignore[untyped-decorator]
def pack_values(_: Any, values: Any, even: Any, odd: Any, dim: Any, packed: Any, at: Any) -> Any:
    """Write two values as a row of each of their tiles, number by number side by side.

    Args:
        values: the array of all values.
        even: which of its numbers the first of the two begins at; `odd` likewise for the other.
        dim: numbers of a value, a multiple of 16.
        packed: uint16; the row of the first tile goes to number `at`, tiles follow each other.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values_type, _, _, _, packed_type, _ = signature.args
        words = ir.VectorType(ir.IntType(16), 16)
        with cgutils.for_range(builder, builder.udiv(args[3], i64(16))) as loop:
            first = builder.mul(loop.index, i64(16))
            pair = []
            for begins in args[1:3]:
                place = builder.add(begins, first)
                pointer = address_of(context, builder, values_type, args[0], place)
                pair.append(builder.zext(tiles.load_vector(builder, pointer, words, 2), INTS))
            high = builder.shl(pair[1], tiles.ints(16))
            place = builder.add(args[5], builder.mul(loop.index, i64(TILE_NUMBERS)))
            pointer = address_of(context, builder, packed_type, args[4], place)
            tiles.store_vector(builder, builder.or_(pair[0], high), pointer, 2)
        return context.get_dummy_value()

    given = (values, types.int64, types.int64, types.int64, packed, types.int64)
    return types.void(*given), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_rounded(_: Any, sums: Any, count: Any, totals: Any, column: Any) -> Any:
    """Round the first `count` rows of sums to bf16 and add them to `totals`, from a column on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums_type, _, totals_type, _ = signature.args
        width = width_of(context, builder, totals_type, args[2])
        with cgutils.for_range(builder, args[1]) as row:
            sums_at = builder.mul(row.index, i64(16 * HEAD_TILES))
            totals_at = builder.add(builder.mul(row.index, width), args[3])
            for number in range(HEAD_TILES):
                place = builder.add(sums_at, i64(16 * number))
                pointer = address_of(context, builder, sums_type, args[0], place)
                bits = tiles.rounded_to_bf16(
                    builder, tiles.load_vector(builder, pointer, FLOATS, 4)
                )
                place = builder.add(totals_at, i64(16 * number))
                pointer = address_of(context, builder, totals_type, args[2], place)
                total = tiles.load_vector(builder, pointer, FLOATS, 4)
                total = builder.fadd(total, builder.bitcast(bits, FLOATS))
                tiles.store_vector(builder, total, pointer, 4)
        return context.get_dummy_value()

    return types.void(sums, types.int64, totals, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def write_rounded(_: Any, totals: Any, row: Any, dim: Any, out: Any, at: Any) -> Any:
    """Write `dim` numbers of a row of totals as bf16, from number `at` of `out` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals_type, _, _, out_type, _ = signature.args
        row_at = builder.mul(args[1], width_of(context, builder, totals_type, args[0]))
        with cgutils.for_range(builder, builder.udiv(args[2], i64(16))) as loop:
            first = builder.mul(loop.index, i64(16))
            place = builder.add(row_at, first)
            pointer = address_of(context, builder, totals_type, args[0], place)
            total = tiles.load_vector(builder, pointer, FLOATS, 4)
            place = builder.add(args[4], first)
            pointer = address_of(context, builder, out_type, args[3], place)
            tiles.store_vector(builder, tiles.narrowed(builder, total), pointer, 2)
        return context.get_dummy_value()

    return types.void(totals, types.int64, types.int64, out, types.int64), generate
