"""Attention of requests with one token each, on CPU.

A decode's product with a few keys is too small for the library's kernels: most of what they
compute is padding, and what they take must be copied together first. `DecodeBatch` reads KV where
it lies and gives the same bits, on machines where `agrees_with_products` finds so.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers import attention_kernels, compiled
from workers.probes import cancelling
from workers.row_threads import NUMBERS_AT_ONCE, as_array, over_rows

Int64Array = npt.NDArray[np.int64]
_MULTIPLE = 32
"""Head sizes must be multiples of this."""


@dataclass(frozen=True)
class DecodeBatch:
    """Requests with one token each, and the keys that they see."""

    rows: Int64Array
    """[requests]: rows of the batch."""
    tables: Int64Array
    """[requests, blocks + 1]: block ids, and one more of any block after those that are used."""
    origins: Int64Array
    """[requests]: position of the key that column 0 stands for."""
    firsts: Int64Array
    """[requests]: the first column that is seen."""
    ends: Int64Array
    """[requests]: the column after the last one that is seen."""
    partitions: Int64Array
    """[requests]: into how many partitions the columns of the request's tile fall."""
    bias: torch.Tensor
    """bf16 [requests, 1, columns]: 0 where one is seen, else -inf; columns are a multiple of 32."""

    def __getitem__(self, part: slice) -> DecodeBatch:
        return DecodeBatch(
            self.rows[part],
            self.tables[part],
            self.origins[part],
            self.firsts[part],
            self.ends[part],
            self.partitions[part],
            self.bias[part],
        )

    def scores(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return q k^T, [requests, heads, columns], with zeros where a column is not seen.

        Args:
            query: bf16 [rows, heads, head_dim].
            keys: bf16 [blocks, kv_heads, block_size, head_dim].
        """
        scores = query.new_zeros(len(self.rows), query.shape[1], self.bias.shape[2])
        q, k, out = (as_array(x) for x in (query.contiguous(), keys, scores))

        def loop(part: slice) -> None:
            own = self[part]
            attention_kernels.decode_scores(
                q, k, own.rows, own.tables, own.origins, own.firsts, own.ends, out[part]
            )

        numbers = scores[0].numel() * query.shape[2]
        over_rows(loop, len(self.rows), numbers // NUMBERS_AT_ONCE)
        return scores

    def weighted_sum(
        self, weights: torch.Tensor, values: torch.Tensor, partition: int, out: torch.Tensor
    ) -> None:
        """Write the weighted sums of values to the requests' rows of `out`.

        Args:
            weights: bf16 [requests, heads, columns], zero where nothing is seen.
            values: bf16 [blocks, kv_heads, block_size, head_dim].
            partition: columns that are summed before they are rounded.
            out: bf16 [rows, heads, head_dim].
        """
        w, v, result = (as_array(x) for x in (weights, values, out))

        def loop(part: slice) -> None:
            own = self[part]
            attention_kernels.decode_outputs(
                w[part],
                v,
                own.rows,
                own.tables,
                own.origins,
                own.firsts,
                own.ends,
                own.partitions,
                partition,
                result,
            )

        numbers = weights[0].numel() * out.shape[2]
        over_rows(loop, len(self.rows), numbers // NUMBERS_AT_ONCE)


@functools.cache
def agrees_with_products(head_dim: int, dtype: torch.dtype, partition: int) -> bool:
    """Return whether decodes get the bits here that the library's matrix products give.

    Numbers whose sums cancel show any other order of summation.

    Args:
        head_dim: numbers that q and k have.
        dtype: of all numbers.
        partition: keys whose values the products sum at most.
    """
    if dtype != torch.bfloat16 or head_dim % _MULTIPLE:
        return False
    with torch.inference_mode(), compiled.alone():
        return all(_agrees(head_dim, keys) for keys in range(128, partition + 1, 128))


_PROBED_ROWS = 48


def _agrees(head_dim: int, num_keys: int) -> bool:
    n, heads = _PROBED_ROWS, 2
    q = cancelling(n * heads, head_dim, 1, True).bfloat16().view(n, heads, head_dim)
    k = cancelling(heads * num_keys, head_dim, 2, False).bfloat16().view(1, heads, num_keys, -1)
    w = cancelling(n * heads, num_keys, 3, True).bfloat16().view(n, heads, num_keys)
    v = cancelling(heads * head_dim, num_keys, 4, False).bfloat16().view(heads, head_dim, -1)
    v = v.transpose(1, 2).contiguous()
    zeros, ones = np.zeros(n, np.int64), np.ones(n, np.int64)
    tables, bias = np.zeros((n, 2), np.int64), q.new_zeros(n, 1, num_keys)
    batch = DecodeBatch(np.arange(n), tables, zeros, zeros, zeros + num_keys, ones, bias)
    out = torch.empty_like(q)
    batch.weighted_sum(w, v[None], num_keys, out)
    scores = torch.bmm(q.transpose(0, 1), k[0].transpose(1, 2)).transpose(0, 1)
    sums = torch.bmm(w.transpose(0, 1), v).transpose(0, 1)
    return torch.equal(batch.scores(q, k), scores) and torch.equal(out, sums)
