"""The products of attention over some rows of queries, while a kernel's code is made.

They are on AMX tiles or by vectors, whichever the processor has; both are told of the same memory.
Queries and weights are in the type that `workers.kernel_vectors` takes of rows. What becomes of
scores is in `workers.kernel_softmax`, and what the steps make up in `workers.attention_kernels`.
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

HEAD_TILES = 4
"""Tiles of 16 outputs whose sums are held at once."""
QUERY_ROWS = ROWS if tiles.HAS_AMX else 2 * vectors.MAX_ROWS
"""Rows of queries whose scores are held at once."""


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
    _: Any,
    query: Any,
    row: Any,
    count: Any,
    packed: Any,
    first: Any,
    after: Any,
    depth: Any,
    out: Any,
) -> Any:
    """Write the products of some rows of queries and some keys to `out`.

    Args:
        query: `NUMBER` [rows * depth], `QUERY_ROWS` rows from `row` on, in the order
            that `attend` gives them.
        row: the first of the rows, a multiple of `QUERY_ROWS`.
        count: how many are needed, at most `QUERY_ROWS`.
        packed: keys as `pack_keys` writes them, [blocks, depth / 32, 16, 32].
        first: the first 16 keys; `after` are the ones after the last, an even number of times 16.
        depth: a multiple of 32.
        out: fp32 [QUERY_ROWS, columns], at least as many as keys.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        query_type, _, _, packed_type, _, _, _, out_type = signature.args
        out_stride = builder.mul(width_of(context, builder, out_type, args[7]), i64(4))
        row_at = builder.mul(args[1], args[6])
        groups = builder.udiv(args[6], i64(DEPTH))

        def query_at(offset: Any) -> Any:
            place = builder.add(row_at, offset)
            return address_of(context, builder, query_type, args[0], place)

        def packed_at(tile: Any) -> Any:
            place = builder.mul(tile, i64(TILE_NUMBERS))
            return address_of(context, builder, packed_type, args[3], place)

        def out_at(block: Any) -> Any:
            place = builder.mul(builder.sub(block, args[4]), i64(ROWS))
            return address_of(context, builder, out_type, args[7], place)

        if tiles.HAS_AMX:
            stride = builder.mul(args[6], i64(vectors.NUMBER_BYTES))
            with cgutils.for_range_slice(builder, args[4], args[5], i64(1), inc=True) as (block, _):
                tiles.zero(builder, 0)
                with cgutils.for_range(builder, groups) as group:
                    tiles.load(builder, 1, query_at(builder.mul(group.index, i64(DEPTH))), stride)
                    tile = builder.add(builder.mul(block, groups), group.index)
                    tiles.load(builder, 2, packed_at(tile), i64(2 * DEPTH))
                    tiles.multiply(builder, 0, 1, 2)
                tiles.store(builder, 0, out_at(block), out_stride)
        else:
            tile_bytes = i64(2 * TILE_NUMBERS)

            def some(block: Any, number: int) -> None:
                keys = vectors.Pairs(
                    packed_at(builder.mul(block, groups)),
                    pair_bytes=i64(2 * DEPTH),
                    group_bytes=tile_bytes,
                    vector_bytes=builder.mul(groups, tile_bytes),
                )
                own_rows = vectors.Rows(
                    query_at(i64(0)),
                    stride_bytes=i64(2 * vectors.NUMBER_BYTES),
                    pair_bytes=2 * vectors.NUMBER_BYTES * QUERY_ROWS,
                )
                own_out = vectors.Rows(out_at(block), out_stride)
                vectors.multiply(builder, args[2], own_rows, keys, groups, number, own_out)

            whole = builder.and_(builder.sub(args[5], args[4]), i64(-4))
            whole = builder.add(args[4], whole)
            with cgutils.for_range_slice(builder, args[4], whole, i64(4), inc=True) as (block, _):
                some(block, 4)
            with builder.if_then(builder.icmp_signed("<", whole, args[5])):
                some(whole, 2)
        return context.get_dummy_value()

    counts = (types.int64,) * 3
    return types.void(query, types.int64, types.int64, packed, *counts, out), generate


@intrinsic  # type: ignore[untyped-decorator]
def make_outputs(
    _: Any,
    weights: Any,
    column: Any,
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
        weights: `NUMBER` [QUERY_ROWS, columns].
        column: where the weight of the first value is in each row.
        count: how many of the rows are needed, at most `QUERY_ROWS`.
        packed: values as `attend` packs them, [groups, per_group, 16, 32].
        first: the first 32 values to sum; `after` are the ones after the last.
        per_group: tiles of 16 outputs that there are.
        tile: the first tile of outputs to sum; there are four, whatever is in those that are not.
        sums: fp32 [QUERY_ROWS, 64].
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights_type, _, _, packed_type, _, _, _, _, sums_type = signature.args
        width = width_of(context, builder, weights_type, args[0])
        stride = builder.mul(width, i64(vectors.NUMBER_BYTES))
        sums_stride = i64(4 * 16 * HEAD_TILES)

        def weights_at(group: Any) -> Any:
            place = builder.mul(builder.sub(group, args[4]), i64(DEPTH))
            place = builder.add(args[1], place)
            return address_of(context, builder, weights_type, args[0], place)

        def packed_at(group: Any, number: int) -> Any:
            at = builder.add(builder.mul(group, args[6]), args[7])
            place = builder.mul(builder.add(at, i64(number)), i64(TILE_NUMBERS))
            return address_of(context, builder, packed_type, args[3], place)

        def sums_at(number: int) -> Any:
            return address_of(context, builder, sums_type, args[8], i64(16 * number))

        if tiles.HAS_AMX:
            for number in range(HEAD_TILES):
                tiles.zero(builder, number)
            with cgutils.for_range_slice(builder, args[4], args[5], i64(1), inc=True) as (group, _):
                tiles.load(builder, 4, weights_at(group), stride)
                for number in range(HEAD_TILES):
                    tiles.load(builder, 5 + number % 3, packed_at(group, number), i64(2 * DEPTH))
                    tiles.multiply(builder, number, 4, 5 + number % 3)
            for number in range(HEAD_TILES):
                tiles.store(builder, number, sums_at(number), sums_stride)
        else:
            tile_bytes = i64(2 * TILE_NUMBERS)
            num_groups = builder.sub(args[5], args[4])
            values = vectors.Pairs(
                packed_at(args[4], 0),
                pair_bytes=i64(2 * DEPTH),
                group_bytes=builder.mul(args[6], tile_bytes),
                vector_bytes=tile_bytes,
            )
            own_rows = vectors.Rows(weights_at(args[4]), stride)
            own_sums = vectors.Rows(sums_at(0), sums_stride)
            vectors.multiply(builder, args[2], own_rows, values, num_groups, HEAD_TILES, own_sums)
        return context.get_dummy_value()

    counts = (types.int64,) * 4
    given = (weights, types.int64, types.int64, packed, *counts, sums)
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
