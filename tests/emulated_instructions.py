"""Has kernels made for processors that this machine is none of, their instructions in plain code.

    python -m tests.emulated_instructions amx|pairs

Where numbers lie differs between the kinds of processors, and a mistake there is seen by whoever
has one. What the instructions for bfloat16 compute is simple: here it is done by loops over memory,
and whole kernels are compared with formulas in double precision. In which order a processor sums is
not looked at. Memory is filled with large numbers when it is allocated (by `MALLOC_PERTURB_`), so
that none of what was not written is used.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils

from workers import kernel_tiles as tiles

Array = npt.NDArray[Any]
KINDS = ("amx", "pairs")
NO_WINDOW = 2**62
PARTITION = 256
_ROW_BYTES = 64
_tiles_of: dict[Any, list[Any]] = {}


def emulate(kind: str) -> None:
    """Have kernels that are made from now on be for a kind of processor.

    To be called before any module of kernels but `workers.kernel_tiles` is imported.
    """
    tiles.HAS_AMX, tiles.HAS_PAIRS = kind == "amx", True
    tiles._call = _call
    from workers import kernel_vectors

    kernel_vectors._add_pair = _add_pair


def _call(builder: Any, name: str, *arguments: Any) -> None:
    if name in ("ldtilecfg", "tilerelease"):
        return
    tile = _own_tiles(builder)[int(arguments[0].constant)]
    if name == "tdpbf16ps":
        a, b = (_own_tiles(builder)[int(x.constant)] for x in arguments[1:])
        _multiply(builder, tile, a, b)
        return
    with cgutils.for_range(builder, tiles.i64(tiles.ROWS)) as row:
        kept = _moved(builder, tile, builder.mul(row.index, tiles.i64(_ROW_BYTES)))
        if name == "tilezero":
            tiles.store_vector(builder, tiles.ints(0), kept, 4)
        else:
            place = _moved(builder, arguments[1], builder.mul(row.index, arguments[2]))
            source, target = (place, kept) if name == "tileloadd64" else (kept, place)
            vector = tiles.load_vector(builder, source, tiles.INTS, 1)
            tiles.store_vector(builder, vector, target, 1)


def _own_tiles(builder: Any) -> list[Any]:
    """Return where the tiles of the function that is being made are."""
    if builder.function not in _tiles_of:
        kind = ir.ArrayType(ir.IntType(8), tiles.ROWS * _ROW_BYTES)
        found = [cgutils.alloca_once(builder, kind) for _ in range(tiles.NUM_TILES)]
        _tiles_of[builder.function] = found
    return _tiles_of[builder.function]


def _moved(builder: Any, pointer: Any, offset: Any) -> Any:
    return builder.gep(builder.bitcast(pointer, ir.IntType(8).as_pointer()), [offset])


def _multiply(builder: Any, total: Any, a: Any, b: Any) -> None:
    with cgutils.for_range(builder, tiles.i64(tiles.ROWS)) as row:
        at = builder.mul(row.index, tiles.i64(_ROW_BYTES))
        place = _moved(builder, total, at)
        sums = cgutils.alloca_once_value(
            builder, tiles.load_vector(builder, place, tiles.FLOATS, 4)
        )
        with cgutils.for_range(builder, tiles.i64(tiles.ROWS)) as pair:
            where = _moved(builder, a, builder.add(at, builder.mul(pair.index, tiles.i64(4))))
            there = _moved(builder, b, builder.mul(pair.index, tiles.i64(_ROW_BYTES)))
            columns = [tiles.load_vector(builder, there, tiles.INTS, 4)]
            _add_pair(builder, [where], columns, [[sums]])
        tiles.store_vector(builder, builder.load(sums), place, 4)


def _add_pair(builder: Any, places: list[Any], columns: list[Any], sums: list[list[Any]]) -> None:
    for where, row in zip(places, sums, strict=True):
        one = builder.load(builder.bitcast(where, ir.IntType(32).as_pointer()), align=2)
        same = tiles.spread(builder, one, tiles.INTS)
        for place, column in zip(row, columns, strict=True):
            total = builder.load(place)
            for x, y in zip(_halves(builder, same), _halves(builder, column), strict=True):
                total = tiles.fused_multiply_add(builder, x, y, total)
            builder.store(total, place)


def _halves(builder: Any, pairs: Any) -> list[Any]:
    low, high = builder.shl(pairs, tiles.ints(16)), builder.and_(pairs, tiles.ints(0xFFFF0000))
    return [builder.bitcast(half, tiles.FLOATS) for half in (low, high)]


# --------------------------------------------------------------------------------- what is compared


def bits_of(numbers: Array) -> Array:
    """Return numbers rounded to bf16, as uint16."""
    wide = np.ascontiguousarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def numbers_of(bits: Array) -> Array:
    """Return what bf16 numbers are, in double precision."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(numbers: Array) -> Array:
    """Return numbers rounded to bf16, in double precision."""
    return numbers_of(bits_of(numbers))


def attended(query: Array, keys: Array, values: Array, unseen: int, scaling: float) -> Array:
    """Return the attention of one row over keys [keys, head_dim], of which some are not seen."""
    scores = rounded(keys[unseen:] @ query)
    scores = rounded(scores * np.float32(scaling)) if scaling != 1.0 else scores
    powers = np.exp(scores - scores.max())
    weights = rounded(powers / powers.sum())
    begins = range(unseen - unseen % PARTITION, len(keys), PARTITION)
    total = np.zeros(values.shape[1])
    for begin in begins:
        first, end = max(begin, unseen), begin + PARTITION
        total += rounded(weights[first - unseen : end - unseen] @ values[first:end])
    return total


def check_attention(rng: Any, head_dim: int, window: int, scaling: float) -> None:
    """Compare a batch of decodes and chunks of several requests."""
    from workers import attention_kernels

    kv_heads, per_kv_head, size = int(rng.integers(1, 4)), int(rng.integers(1, 6)), 16
    spans = [(0, 1), (0, 128), (40, 3), (300, 1), (256, 100), (511, 1), (520, 60), (897, 2)]
    rows = np.cumsum([0, *(count for _, count in spans)])
    blocks = [-(-(start + count) // size) for start, count in spans]
    order = rng.permutation(sum(blocks))
    tables = np.zeros((len(spans), max(blocks) + 1), np.int64)
    for i, first in enumerate(np.cumsum([0, *blocks[:-1]])):
        tables[i, : blocks[i]] = order[first : first + blocks[i]]
    shape = (sum(blocks) + 1, kv_heads, size, head_dim)
    keys, values = (bits_of(rng.standard_normal(shape)) for _ in range(2))
    query = bits_of(rng.standard_normal((rows[-1], kv_heads * per_kv_head, head_dim)) / 4)
    starts = np.array([start for start, _ in spans])
    ends = (starts // 128 + 1) * 128
    reach = np.maximum(ends - 128 - window + 1, 0)
    origins = reach - reach % 128
    out = np.zeros_like(query)
    attention_kernels.attend(
        1,
        query,
        keys,
        values,
        rows[:-1].copy(),
        np.array([count for _, count in spans]),
        starts,
        tables,
        origins,
        ends - origins,
        window,
        np.float32(scaling),
        PARTITION,
        out,
    )
    for i, (start, count) in enumerate(spans):
        for token in (0, count // 2, count - 1):
            end = start + token + 1
            table = tables[i, : -(-end // size)]
            for head in range(kv_heads * per_kv_head):
                own = table, head // per_kv_head
                k, v = (
                    numbers_of(x[own].reshape(-1, head_dim)[origins[i] : end])
                    for x in (keys, values)
                )
                row = rows[i] + token
                unseen = max(end - origins[i] - window, 0)
                expected = attended(numbers_of(query[row, head]), k, v, unseen, scaling)
                found = numbers_of(out[row, head])
                error = np.abs(found - expected).max() / np.abs(expected).max()
                assert error < 0.02, (head_dim, window, scaling, i, token, head, error)


def check_product(rng: Any, rows: int, inputs: int, outputs: int, chunk: int) -> None:
    """Compare x W^T + b."""
    from workers import tile_kernels

    columns = tile_kernels.COLUMNS
    x = bits_of(rng.standard_normal((rows, inputs)))
    weights = np.zeros((-(-outputs // columns) * columns, inputs), np.uint16)
    weights[:outputs] = bits_of(rng.standard_normal((outputs, inputs)))
    laid_out = weights.reshape(-1, columns, inputs // 2, 2).transpose(0, 2, 1, 3).copy()
    bias = rng.standard_normal(outputs).astype(np.float32)
    out = np.zeros((rows, outputs), np.uint16)
    tile_kernels.multiply(1, x, laid_out, bias, chunk, out)
    expected = numbers_of(x) @ numbers_of(weights[:outputs]).T + bias
    error = np.abs(numbers_of(out) - expected).max() / np.abs(expected).max()
    assert error < 0.01, (rows, inputs, outputs, chunk, error)


def main() -> None:
    """Compare what kernels of one kind give."""
    emulate(sys.argv[1])
    rng = np.random.default_rng(0)
    for head_dim in (32, 64, 96, 128):
        for window, scaling in ((NO_WINDOW, 1.0), (NO_WINDOW, 0.3), (70, 1.0), (300, 0.3)):
            check_attention(rng, head_dim, window, scaling)
    for rows in (16, 32):
        for inputs, outputs, chunk in ((64, 32, 64), (576, 100, 576), (1536, 130, 512)):
            check_product(rng, rows, inputs, outputs, chunk)


if __name__ == "__main__":
    main()
