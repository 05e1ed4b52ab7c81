"""Rows of logprobs on CPU: the kernels go over logits as the output layer made them.

See `workers.logprobs`, which hands what is on CPU to this module, for what a row is and what rules
it obeys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from workers import kernels, top_k_kernels
from workers.kernel_calls import num_threads
from workers.logprobs import LOGPROBS_BYTES, Logits, rows_per_slice, top_k


class FusedRows:
    """Rows as logits on CPU with the two numbers of each that make logprobs of them."""

    def __init__(
        self,
        logits: Logits,
        largest: torch.Tensor,
        log_sums: torch.Tensor,
        best_ids: torch.Tensor,
    ) -> None:
        """Take logits in fp32 or bf16, and what `kernels.normalise` finds, all [rows]."""
        self._logits = logits
        self._largest = largest
        self._log_sums = log_sums
        self._best_ids = best_ids

    @property
    def num_rows(self) -> int:
        """See `workers.logprobs.Rows`."""
        return self._logits.num_rows

    def __getitem__(self, rows: slice) -> FusedRows:
        """See `workers.logprobs.Rows`."""
        return FusedRows(
            self._logits[rows], self._largest[rows], self._log_sums[rows], self._best_ids[rows]
        )

    def is_nan(self) -> torch.Tensor:
        """See `workers.logprobs.Rows`."""
        return ~torch.isfinite(self._log_sums)

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `workers.logprobs.Rows`."""
        found = torch.empty(token_ids.shape, dtype=torch.float32)
        kernels.logprobs_of(
            *_addresses(self._logits),
            self._largest.numpy(),
            self._log_sums.numpy(),
            token_ids.contiguous().numpy(),
            found.numpy(),
        )
        return found

    def ranks(self, values: torch.Tensor) -> torch.Tensor:
        """See `workers.logprobs.Rows`."""
        counts = torch.empty(values.shape, dtype=torch.int64)
        _over_rows(
            kernels.count_greater,
            self._logits,
            self._largest,
            self._log_sums,
            values.contiguous(),
            counts,
        )
        return counts + 1

    def most_likely(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `workers.logprobs.Rows`."""
        k = min(k, self._logits.vocab_size)
        if k == 1:
            values = (self._largest - self._largest) - self._log_sums
            return values.unsqueeze(1), self._best_ids.unsqueeze(1)
        if k > top_k_kernels.MAX_K:
            found = [top_k(piece, k) for piece in self.pieces()]
            return torch.cat([values for values, _ in found]), torch.cat([ids for _, ids in found])
        values = torch.empty(self.num_rows, k)
        ids = torch.empty(self.num_rows, k, dtype=torch.int64)
        found_by = top_k_kernels.most_likely
        _over_rows(found_by, self._logits, self._largest, self._log_sums, values, ids)
        return values, ids

    def pieces(self) -> Iterator[torch.Tensor]:
        """See `workers.logprobs.Rows`."""
        at_once = rows_per_slice(self._logits.vocab_size, LOGPROBS_BYTES["cpu"])
        for first in range(0, self.num_rows, at_once):
            rows = slice(first, first + at_once)
            logits = self._logits[rows].joined().float()
            yield (logits - self._largest[rows, None]) - self._log_sums[rows, None]


def normalise(logits: Logits) -> FusedRows:
    """See `workers.logprobs.normalise`."""
    logits = _for_kernels(logits)
    largest, log_sums = torch.empty(2, logits.num_rows)
    best_ids = torch.empty(logits.num_rows, dtype=torch.int64)
    _over_rows(kernels.normalise, logits, largest, log_sums, best_ids)
    return FusedRows(logits, largest, log_sums, best_ids)


def top_1(logits: Logits) -> tuple[torch.Tensor, torch.Tensor]:
    """See `workers.logprobs.top_1`."""
    logits = _for_kernels(logits)
    largest = torch.empty(logits.num_rows, 1)
    ids = torch.empty(logits.num_rows, 1, dtype=torch.int64)
    _over_rows(kernels.argmax, logits, largest[:, 0], ids[:, 0])
    return largest, ids


def _for_kernels(logits: Logits) -> Logits:
    """Return logits as the kernels take them: fp16 as fp32, and no columns without a meaning."""
    parts = []
    room = logits.vocab_size
    for part in logits.parts:
        if room > 0:
            meant = part[:, :room] if part.dtype != torch.float16 else part[:, :room].float()
            parts.append(meant if meant.stride(1) == 1 else meant.contiguous())
            room -= part.shape[1]
    return Logits(parts, logits.vocab_size)


def _over_rows(kernel: Callable[..., None], logits: Logits, *others: torch.Tensor) -> None:
    """Call a kernel for all rows of `logits` and of `others`, each [rows] or [rows, some]."""
    threads = num_threads(logits.num_rows * logits.vocab_size)
    kernel(threads, *_addresses(logits), *(other.numpy() for other in others))


def _addresses(logits: Logits) -> tuple[npt.NDArray[np.int64], np.uint16 | np.float32]:
    """Return where the parts are, for kernels, and a number of their type; see `kernels`."""
    table = [
        (part.data_ptr(), part.stride(0) * part.itemsize, part.shape[1]) for part in logits.parts
    ]
    like = np.float32(0) if logits.parts[0].dtype == torch.float32 else np.uint16(0)
    return np.array(table, np.int64), like
