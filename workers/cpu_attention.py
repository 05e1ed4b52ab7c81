"""Exact paged attention on CPU: the bits of a row depend on its request's tokens alone.

How a matrix product rounds depends on the kernel that the library picks, and it picks by the
shape, the number of threads and the machine. What was found not to depend on them is a product
that sums over at most 256 numbers, for row counts that are multiples of 16. So:
- Queries are taken in tiles that start at absolute positions that are multiples of 128; a tile
  reads the keys up to its own end (masked), so the number of keys is a function of position only.
- A tile's rows (tokens times query heads per KV head) are padded to a multiple of 16. A decode is
  a tile with one token.
- The product with V sums over the keys, so it goes in partitions of 256 keys, each in the model's
  dtype, added up in fp32 in their order. The weights are rounded to the model's dtype first, as
  transformers' eager attention does.
- Keys are copied together in granules, which are whole blocks where 128 positions hold several.
  Granules after the request's end are read from the cache's zero block, and what comes after the
  end in the last one is set to zero, so that nothing stale is summed.
Tiles of equal shape, whosever they are, are computed together; how the batch falls into such
groups changes no bit.

On processors with instructions for bfloat16 `workers.tile_attention` does the same without copies,
in the order in which the library's products sum there. It is used where a probe gets the same bits.
On those without, it sums in an order of its own, and is used for all that it can compute.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers import compiled, tile_products
from workers.kv_cache import KVCache, LayerSpec, Span
from workers.probes import cancelling
from workers.tile_attention import HEAD_DIM_MULTIPLE, Int64Array, TileBatch, softmax_agrees

TILE = 128
"""Positions per query tile."""
ROW_MULTIPLE = 16
KEY_PARTITION = 256
_ERRORS_FACTOR = 2.0**21
"""Brings rounding errors of sums of fp32 to where a softmax tells them apart."""
_GROUP_NUMBERS = 16 * 2**20
"""Numbers (scores, or KV) that one group of tiles may hold at once."""


@dataclass(frozen=True)
class _Tile:
    span: int
    first_row: int
    """Row of the batch of the tile's first token."""
    start: int
    """Position of that token."""
    num_tokens: int
    end: int
    """Position after the last token whose KV is known."""


@dataclass(frozen=True)
class _Copied:
    """Keys (or values) of a group's tiles that are copied together, so many per tile."""

    num_keys: int
    granules: torch.Tensor
    """int64 [tiles * kv_heads * granules]: where they are among the granules of the cache."""
    stale: torch.Tensor
    """int64: rows of the copy, as [tiles * kv_heads * num_keys, head_dim], to be zero."""


@dataclass(frozen=True)
class _Group:
    """Tiles of one shape, computed together."""

    num_tiles: int
    rows: int
    """Rows per tile and KV head, padding included."""
    num_keys: int
    first_padded: int
    """Where the group's rows start among all rows of the plan."""
    keys: _Copied
    values: list[_Copied]
    """By partition: a product with parts of a larger matrix takes longer."""
    bias: torch.Tensor
    """[tiles, 1, rows, biased keys]: 0 or -inf, for the last keys of the tile."""


@dataclass(frozen=True)
class _Plan:
    """What depends on a step's batch, a window and the numbers of heads, but not on the layer."""

    groups: list[_Group]
    query_rows: torch.Tensor
    """int64 [padded rows]: rows of the query seen as [rows * heads, head_dim]."""
    output_rows: torch.Tensor
    """int64 [rows * heads]: where each row of the output is among the padded rows."""


def prepare(layers: Sequence[LayerSpec], dtype: torch.dtype) -> None:
    """Find out and compile beforehand what the first batch would have to wait for."""
    for layer in layers:
        tiles_agree(layer.head_dim, dtype)


@functools.cache
def tiles_agree(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether `workers.tile_attention` gives this machine's bits of attention.

    Where it says what these are, it only is compiled.
    """
    if dtype != torch.bfloat16 or head_dim % HEAD_DIM_MULTIPLE or not tile_products.is_available():
        return False
    with torch.inference_mode(), compiled.alone():
        if tile_products.widens():
            _probe(head_dim, 1.0, use_tiles=True)
            return True
        return all(
            softmax_agrees(scaling)
            and torch.equal(*(_probe(head_dim, scaling, use_tiles=x) for x in (True, False)))
            for scaling in (1.0, 0.3)
        )


def _probe(head_dim: int, scaling: float, *, use_tiles: bool) -> torch.Tensor:
    """Return attention of a tile with all its tokens, of others with some, and of decodes.

    Scores are nothing but rounding errors, made large: sums in another order are other scores.
    """
    heads, kv_heads, block_size = 6, 2, 16
    ends = [TILE, 5 * TILE, 2 * TILE + 7, 3 * TILE + 1]
    starts = [0, 4 * TILE, 2 * TILE, 3 * TILE]
    spans, row, block = [], 0, 0
    for start, end in zip(starts, ends, strict=True):
        count = -(-end // block_size)
        table = np.arange(block, block + count, dtype=np.int32)
        spans.append(Span(row, start, end - start, table))
        row, block = row + end - start, block + count
    cache = KVCache(
        [LayerSpec(kv_heads, head_dim)],
        num_blocks=block,
        block_size=block_size,
        dtype=torch.bfloat16,
    )
    keys, values = cache.key(0), cache.value(0)
    keys.copy_(cancelling(keys.numel() // head_dim, head_dim, 1, False).view(keys.shape))
    values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(2)))
    query = _ERRORS_FACTOR * cancelling(row * heads, head_dim, 3, True).to(torch.bfloat16)
    return BlockedKernel(spans, cache, use_tiles=use_tiles).attend(
        0, query.view(row, heads, head_dim), scaling, None, None
    )


def split_scaling(scaling: float) -> tuple[float, float]:
    """Return what queries and what scores are to be multiplied by.

    A power of two rounds nothing, so it may go to the operand that has fewer numbers.
    """
    return (scaling, 1.0) if math.frexp(scaling)[0] == 0.5 else (1.0, scaling)


class BlockedKernel:
    """Attention of one step's batch; see the module's rules."""

    def __init__(
        self, spans: Sequence[Span], cache: KVCache, *, use_tiles: bool | None = None
    ) -> None:
        """Take a batch's spans.

        `workers.tile_attention` computes them if so said, and by default if it agrees.
        """
        self._cache = cache
        self._use_tiles = use_tiles
        self._granule = math.gcd(cache.block_size, TILE)
        self._tables = np.full(
            (len(spans), max(len(span.block_table) for span in spans) + 1),
            cache.num_blocks,
            np.int64,
        )
        self._tiles: list[_Tile] = []
        for i, span in enumerate(spans):
            self._tables[i, : len(span.block_table)] = span.block_table
            for first in range(span.start - span.start % TILE, span.end, TILE):
                start = max(first, span.start)
                end = min(first + TILE, span.end)
                row = span.first_row + start - span.start
                self._tiles.append(_Tile(i, row, start, end - start, end))
        self._plans: dict[tuple[int | None, int, int, int], _Plan] = {}
        self._tile_batches: dict[int | None, TileBatch] = {}

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float, window: int | None, cap: float | None
    ) -> torch.Tensor:
        """See `workers.attention.Kernel.attend`."""
        keys, values = self._cache.key(layer), self._cache.value(layer)
        factor, scaling = split_scaling(scaling)
        if factor != 1.0:
            query = query * factor
        use_tiles = self._use_tiles
        if use_tiles is None:
            use_tiles = cap is None and tiles_agree(query.shape[2], query.dtype)
        if use_tiles:
            batch = self.tile_batch(window)
            return batch.attend(
                query, keys, values, scaling=scaling, window=window, partition=KEY_PARTITION
            )
        return self._products(query, keys, values, scaling, window, cap)

    def tile_batch(self, window: int | None) -> TileBatch:
        """Return the batch as the kernels of `workers.tile_attention` take it."""
        if window not in self._tile_batches:
            origins = np.array([_first_key(tile, window) for tile in self._tiles])
            num_columns = np.array([_tile_end(tile) for tile in self._tiles]) - origins
            num_tokens = np.array([tile.num_tokens for tile in self._tiles])
            order = _evenly(num_tokens * num_columns)
            tiles = [self._tiles[i] for i in order]
            self._tile_batches[window] = TileBatch(
                rows=np.array([tile.first_row for tile in tiles]),
                num_tokens=num_tokens[order],
                starts=np.array([tile.start for tile in tiles]),
                tables=self._tables[[tile.span for tile in tiles]],
                origins=origins[order],
                num_columns=num_columns[order],
            )
        return self._tile_batches[window]

    def _products(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
    ) -> torch.Tensor:
        """Return what `attend` does, made of the library's products."""
        rows, heads, head_dim = query.shape
        plan = self._plan(window, rows, heads, keys.shape[1])
        padded = query.reshape(-1, head_dim).index_select(0, plan.query_rows)
        out = torch.empty_like(padded)
        for group in plan.groups:
            part = slice(
                group.first_padded,
                group.first_padded + group.num_tiles * keys.shape[1] * group.rows,
            )
            q = padded[part].view(-1, group.rows, head_dim)
            k = _gather(keys, group.keys, self._granule)
            weights = _weights(q, k, group, scaling, cap)
            v = (_gather(values, copied, self._granule) for copied in group.values)
            out[part] = _weighted_sum(weights, v).view(-1, head_dim)
        return out.index_select(0, plan.output_rows).view(rows, heads, head_dim)

    def _plan(self, window: int | None, rows: int, heads: int, kv_heads: int) -> _Plan:
        key = (window, rows, heads, kv_heads)
        if key not in self._plans:
            self._plans[key] = self._make_plan(window, rows, heads, kv_heads)
        return self._plans[key]

    def _make_plan(self, window: int | None, rows: int, heads: int, kv_heads: int) -> _Plan:
        per_kv_head = heads // kv_heads
        shapes: dict[tuple[int, int], list[_Tile]] = defaultdict(list)
        for tile in self._tiles:
            num_rows = _round_up(tile.num_tokens * per_kv_head, ROW_MULTIPLE)
            shapes[num_rows, _tile_end(tile) - _first_key(tile, window)].append(tile)
        groups: list[_Group] = []
        query_rows: list[Int64Array] = []
        output_rows = np.zeros(rows * heads, np.int64)
        first_padded = 0
        for (num_rows, num_keys), tiles in shapes.items():
            numbers = kv_heads * num_keys * max(num_rows, self._cache.layers[0].head_dim)
            at_once = max(1, _GROUP_NUMBERS // numbers)
            for i in range(0, len(tiles), at_once):
                part = tiles[i : i + at_once]
                source, is_real = _query_rows(part, num_rows, heads, kv_heads)
                places = first_padded + np.arange(source.size, dtype=np.int64)
                output_rows[source[is_real]] = places.reshape(source.shape)[is_real]
                query_rows.append(source.reshape(-1))
                groups.append(
                    _Group(
                        len(part),
                        num_rows,
                        num_keys,
                        first_padded,
                        *self._keys(part, num_keys, window, kv_heads),
                        self._bias(part, num_rows, num_keys, window, per_kv_head),
                    )
                )
                first_padded += source.size
        return _Plan(
            groups,
            torch.from_numpy(np.concatenate(query_rows)),
            torch.from_numpy(output_rows),
        )

    def _keys(
        self, tiles: list[_Tile], num_keys: int, window: int | None, kv_heads: int
    ) -> tuple[_Copied, list[_Copied]]:
        """Return what is copied of a group's keys, and of its values."""
        size, granule = self._cache.block_size, self._granule
        first = np.array([_first_key(tile, window) for tile in tiles])
        ends = np.array([tile.end for tile in tiles])
        positions = first[:, None] + np.arange(0, num_keys, granule)
        known = positions < ends[:, None]
        blocks = self._tables[
            np.array([tile.span for tile in tiles])[:, None], np.where(known, positions // size, 0)
        ]
        blocks = np.where(known, blocks, self._cache.num_blocks)
        heads = np.arange(kv_heads)[:, None]
        per_block = size // granule
        places: Int64Array = (blocks[:, None, :] * kv_heads + heads) * per_block + (
            positions % size // granule
        )[:, None, :]
        all_positions = first[:, None] + np.arange(num_keys)
        after = all_positions >= ends[:, None]
        after &= all_positions // granule == ends[:, None] // granule
        stale = np.broadcast_to(after[:, None, :], (len(tiles), kv_heads, num_keys))

        def copied(first_key: int, end: int) -> _Copied:
            some = places[:, :, first_key // granule : end // granule]
            return _Copied(
                end - first_key,
                torch.from_numpy(some.reshape(-1)),
                torch.from_numpy(np.flatnonzero(stale[:, :, first_key:end])),
            )

        starts = range(0, num_keys, KEY_PARTITION)
        values = [copied(start, min(start + KEY_PARTITION, num_keys)) for start in starts]
        return copied(0, num_keys), values

    def _bias(
        self,
        tiles: list[_Tile],
        num_rows: int,
        num_keys: int,
        window: int | None,
        per_kv_head: int,
    ) -> torch.Tensor:
        """Return what masks a tile's scores; without a window only its own 128 keys need it."""
        biased = num_keys if window is not None else TILE
        tokens = np.minimum(
            np.arange(num_rows) // per_kv_head, np.array([[t.num_tokens - 1] for t in tiles])
        )
        queries = np.array([[tile.start] for tile in tiles]) + tokens
        ends = np.array([_tile_end(tile) for tile in tiles])
        keys = ends[:, None] - biased + np.arange(biased)
        distance = queries[:, :, None] - keys[:, None, :]
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        bias = torch.zeros((len(tiles), 1, num_rows, biased), dtype=self._cache.dtype)
        return bias.masked_fill_(torch.from_numpy(hidden).unsqueeze(1), -torch.inf)


def _gather(cache: torch.Tensor, copied: _Copied, granule: int) -> torch.Tensor:
    """Return keys (or values) of a group's tiles, [tiles * kv_heads, keys, head_dim]."""
    head_dim = cache.shape[-1]
    found = cache.view(-1, granule * head_dim).index_select(0, copied.granules)
    if len(copied.stale):
        found.view(-1, head_dim).index_fill_(0, copied.stale, 0)
    return found.view(-1, copied.num_keys, head_dim)


def _weights(
    q: torch.Tensor, k: torch.Tensor, group: _Group, scaling: float, cap: float | None
) -> torch.Tensor:
    """Return softmax(q k^T * scaling), computed in fp32, in the dtype of q: [batch, rows, keys]."""
    scores = torch.bmm(q, k.transpose(1, 2))
    if scaling != 1.0:
        scores.mul_(scaling)
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    by_tile = scores.view(group.num_tiles, -1, group.rows, group.num_keys)
    by_tile[..., group.num_keys - group.bias.shape[-1] :].add_(group.bias)
    return torch.softmax(scores, dim=-1)


def _weighted_sum(weights: torch.Tensor, v: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return weights @ v, where v comes in partitions: products added up in fp32 in their order."""
    if weights.shape[2] <= KEY_PARTITION:
        return torch.bmm(weights, next(v))
    products = (
        torch.bmm(some_weights.contiguous(), some_v)
        for some_weights, some_v in zip(torch.split(weights, KEY_PARTITION, dim=2), v, strict=True)
    )
    total = next(products).float()
    for product in products:
        total += product
    return total.to(weights.dtype)


def _query_rows(
    tiles: list[_Tile], num_rows: int, heads: int, kv_heads: int
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Return the query's row for each padded row, [tiles, kv_heads, rows], and which are real."""
    per_kv_head = heads // kv_heads
    row = np.arange(num_rows)
    token = row // per_kv_head
    real = token < np.array([[tile.num_tokens] for tile in tiles])
    batch_rows = np.array([[tile.first_row] for tile in tiles]) + np.where(real, token, 0)
    head = np.arange(kv_heads)[:, None] * per_kv_head + row % per_kv_head
    source: Int64Array = batch_rows[:, None, :] * heads + head
    return source, np.broadcast_to(real[:, None, :], source.shape)


def _evenly(work: Int64Array) -> Int64Array:
    """Return an order of which each half, and each half of these, is about as much work."""

    def spread(by_work: Int64Array) -> Int64Array:
        if len(by_work) < 2:
            return by_work
        return np.concatenate([spread(by_work[::2]), spread(by_work[1::2])])

    return spread(np.argsort(-work, kind="stable"))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _tile_end(tile: _Tile) -> int:
    return _round_up(tile.start + 1, TILE)


def _first_key(tile: _Tile, window: int | None) -> int:
    """Return the first key a tile reads, a function of the tile's place only."""
    if window is None:
        return 0
    reach = max(_tile_end(tile) - TILE - window + 1, 0)
    return reach - reach % TILE
