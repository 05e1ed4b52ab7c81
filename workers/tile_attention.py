"""Attention over a batch by `workers.attention_kernels`, for tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workers.kernel_calls import NUMBERS_AT_ONCE, as_array, num_threads

HEAD_DIM_MULTIPLE = 32
Int64Array = npt.NDArray[np.int64]
_NO_WINDOW = 2**62


@dataclass(frozen=True)
class TileBatch:
    """Tokens of requests that are computed together, and where their keys are."""

    rows: Int64Array
    """[tiles]: row of the batch of each tile's first token."""
    num_tokens: Int64Array
    """[tiles]: tokens of each, at least one."""
    starts: Int64Array
    """[tiles]: position of each one's first token."""
    tables: Int64Array
    """[tiles, blocks + 1]: block ids, and one more of any block."""
    origins: Int64Array
    """[tiles]: the first position whose key each looks at."""
    num_columns: Int64Array
    """[tiles]: keys, from there on, that a tile in its place may look at."""

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        partition: int,
    ) -> torch.Tensor:
        """Return the attention of all rows, zeros where a row is of no tile.

        Args:
            query: bf16 [rows, heads, head_dim].
            keys: bf16 [blocks, kv_heads, block_size, head_dim]; `values` likewise.
            scaling: factor of the scores.
            window: keys that a token sees, itself included; None is all before it.
            partition: keys whose values are summed before the sum is rounded.
        """
        from workers import attention_kernels

        out = torch.zeros(query.shape, dtype=query.dtype)
        q, k, v, result = (as_array(x) for x in (query.contiguous(), keys, values, out))
        threads = self.num_threads(query.shape[1] * query.shape[2])
        kernel: Any = attention_kernels.attend
        kernel(threads, q, k, v, *self.arguments(scaling, window, partition), result)
        return out

    def arguments(self, scaling: float, window: int | None, partition: int) -> tuple[Any, ...]:
        """Return what `attention_kernels.attend` takes of a batch, from its tiles on."""
        return (
            self.rows,
            self.num_tokens,
            self.starts,
            self.tables,
            self.origins,
            self.num_columns,
            _NO_WINDOW if window is None else window,
            np.float32(scaling),
            partition,
        )

    def num_threads(self, numbers: int) -> int:
        """Return how many threads the batch is worth, with so many numbers in a query."""
        return num_threads(self._num_products * numbers // NUMBERS_AT_ONCE)

    @functools.cached_property
    def _num_products(self) -> int:
        return int((self.num_tokens * self.num_columns).sum())


def softmax_agrees(scaling: float) -> bool:
    """Return whether weights are torch's, with so many that one unit in fp32 shows in some."""
    from workers import attention_kernels

    scores = 3 * torch.randn(4096, 512, generator=torch.Generator().manual_seed(1))
    scores = scores.to(torch.bfloat16)
    weights = torch.empty_like(scores)
    attention_kernels.softmax(scores.float().numpy(), np.float32(scaling), as_array(weights))
    return torch.equal(weights, torch.softmax(scores.mul_(scaling), dim=-1))
