"""Logprob rows and ranks from logits, and the slices that keep logits within bounded memory.

The module knows logits and token ids; it knows no request and no model. Rules:
- A logprob is the natural-log softmax of the raw logits, in fp32, before anything that sampling
  does to them. The same row has the same bits whatever k is and whoever shares the slice.
- On CPU it is (logit - largest) - log(sum(exp(logit - largest))), whoever computes it: the kernels
  that go over a row as it came from the output layer and keep nothing of it, which is all that is
  needed for a few tokens of each row, or torch, for rows of the whole vocabulary.
- Equal logprobs are ordered by ascending token id, and share the better rank.
- -inf is a legal logprob. NaN is not: such rows are reported by `Rows.is_nan`, and mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from scheduler.logprobs import Logprobs
from scheduler.sampling_params import ALL_LOGPROBS

LOGPROBS_BYTES = {"cpu": 3 * 2**20, "cuda": 256 * 2**20}
"""fp32 logprobs that are in memory at once; on CPU little more than the processor's cache holds."""
_GROUP = 128
"""Neighbours in the vocabulary whose maximum is taken together."""
_TIE_MARGIN = 8
"""Candidates fetched beyond the top k, so that ties at its edge are mostly seen at once."""
_MAX_COUNTED = 64
"""Columns of a row up to which counting what is greater is quicker than sorting the row."""


@dataclass(frozen=True)
class Logits:
    """Rows of logits as the output layer makes them: a wide vocabulary in several products.

    Putting large ones together costs as much as a good part of the products.
    """

    parts: list[torch.Tensor]
    """Each [rows, some of the vocabulary], in its order."""
    vocab_size: int
    """Columns that mean something; the layer may have more."""

    @property
    def num_rows(self) -> int:
        """Rows of every part."""
        return self.parts[0].shape[0]

    def __getitem__(self, rows: slice | torch.Tensor) -> Logits:
        """Return some rows; `rows` may be int64 indices."""
        return Logits([part[rows] for part in self.parts], self.vocab_size)

    def joined(self) -> torch.Tensor:
        """Return [rows, vocab]."""
        whole = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, dim=1)
        return whole[:, : self.vocab_size]


@dataclass(frozen=True)
class RowTensors:
    """`scheduler.logprobs.Logprobs` while still on the device."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    def to_host(self) -> Logprobs:
        """Return the same rows as arrays of the types that travel."""
        return Logprobs(
            self.token_ids.to(torch.int32).cpu().numpy(),
            self.logprobs.cpu().numpy(),
            self.ranks.to(torch.int32).cpu().numpy(),
        )


def rows_per_slice(vocab_size: int, budget_bytes: int) -> int:
    """Return how many rows of fp32 logits fit a budget: a multiple of 64, or of 16 below that."""
    rows = max(budget_bytes // (4 * vocab_size), 16)
    return rows - rows % (64 if rows >= 64 else 16)


class Rows(Protocol):
    """Rows of a distribution over the vocabulary, of which single logprobs can be asked."""

    @property
    def num_rows(self) -> int:
        """How many."""
        ...

    def __getitem__(self, rows: slice) -> Rows:
        """Return some of the rows."""
        ...

    def is_nan(self) -> torch.Tensor:
        """Return bool [rows]: whether a row is spoilt, which one NaN or +inf logit does."""
        ...

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return fp32 logprobs of int64 token ids, both [rows, tokens]."""
        ...

    def ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return int64 ranks of fp32 logprobs, both [rows, values], for a few values."""
        ...

    def most_likely(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the k largest logprobs of each row and their ids, both [rows, k].

        They are descending, equal ones by ascending id; all, where there are fewer than k.
        """
        ...

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield fp32 logprobs [some rows, vocab], in order, as many as there is memory for."""
        ...


class DenseRows:
    """Rows as fp32 logprobs of the whole vocabulary, for devices without the kernels."""

    def __init__(self, logprobs: torch.Tensor) -> None:
        self._logprobs = logprobs

    @property
    def num_rows(self) -> int:
        """See `Rows`."""
        return self._logprobs.shape[0]

    def __getitem__(self, rows: slice) -> DenseRows:
        """See `Rows`."""
        return DenseRows(self._logprobs[rows])

    def is_nan(self) -> torch.Tensor:
        """See `Rows`. One NaN or +inf spoils all of its row."""
        return torch.isnan(self._logprobs[:, 0])

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        return self._logprobs.gather(1, token_ids)

    def ranks(self, values: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        greater = torch.empty_like(self._logprobs)
        # Counting in floats is exact below 2**24 and far quicker than counting bools.
        counts = [
            torch.gt(self._logprobs, column, out=greater).sum(dim=1, keepdim=True)
            for column in torch.split(values, 1, dim=1)
        ]
        return torch.cat(counts, dim=1).to(torch.int64) + 1

    def most_likely(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Rows`."""
        return top_k(self._logprobs, min(k, self._logprobs.shape[1]))

    def pieces(self) -> Iterator[torch.Tensor]:
        """See `Rows`."""
        yield self._logprobs


def normalise(logits: Logits) -> Rows:
    """Return rows of logprobs from raw logits."""
    if logits.parts[0].device.type == "cpu":
        # Not imported with this module: it brings numba, which has no part in what runs on CUDA.
        from workers import cpu_rows

        return cpu_rows.normalise(logits)
    return DenseRows(torch.log_softmax(logits.joined(), dim=-1, dtype=torch.float32))


def select_rows(rows: Rows, targets: torch.Tensor, num_logprobs: int) -> RowTensors:
    """Return rows of width k + 1: the actual token, then the k most likely ones.

    Args:
        rows: the distributions.
        targets: int64 [rows], the actual tokens.
        num_logprobs: k, or -1 for the whole vocabulary.
    """
    ids = targets.unsqueeze(1)
    actual = rows.of(ids)
    if num_logprobs == 0:
        return RowTensors(ids, actual, rows.ranks(actual))
    k = torch.iinfo(torch.int64).max if num_logprobs == ALL_LOGPROBS else num_logprobs
    values, best_ids = rows.most_likely(k)
    return RowTensors(
        torch.cat([ids, best_ids], dim=1),
        torch.cat([actual, values], dim=1),
        torch.cat([rows.ranks(actual), _ranks_of_sorted(values)], dim=1),
    )


def select_token_rows(rows: Rows, targets: torch.Tensor, token_ids: Sequence[int]) -> RowTensors:
    """Return rows of width len(token_ids) + 1: the actual token, then `token_ids` in their order.

    Args:
        rows: the distributions.
        targets: int64 [rows], the actual tokens.
        token_ids: what every row holds.
    """
    asked = torch.tensor(token_ids, dtype=torch.int64, device=targets.device)
    ids = torch.cat([targets.unsqueeze(1), asked.expand(len(targets), -1)], dim=1)
    values = rows.of(ids)
    ranks = (
        rows.ranks(values) if values.shape[1] <= _MAX_COUNTED else _ranks_by_sorting(rows, values)
    )
    return RowTensors(ids, values, ranks)


def _ranks_by_sorting(rows: Rows, values: torch.Tensor) -> torch.Tensor:
    """Return what `Rows.ranks` does, quicker for many values."""
    ranks = []
    first = 0
    for piece in rows.pieces():
        ascending = torch.sort(piece, dim=1).values
        own = values[first : first + len(piece)]
        ranks.append(piece.shape[1] - torch.searchsorted(ascending, own, right=True) + 1)
        first += len(piece)
    return torch.cat(ranks)


def top_1(logits: Logits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit of each row and its id, the lowest of equal ones, both [rows, 1].

    The largest of a row with a NaN is NaN.
    """
    if logits.parts[0].device.type == "cpu":
        from workers import cpu_rows

        return cpu_rows.top_1(logits)
    return _top_1(logits.joined())


def top_k(logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of each row and their ids, descending, equal ones by ascending id.

    They are all in the k groups of neighbours with the largest maxima (equal ones by ascending id),
    so nearly all of a large vocabulary is only looked at once.
    """
    vocab = logprobs.shape[1]
    if k == 1:
        return _top_1(logprobs)
    if 2 * k * _GROUP >= vocab:
        return _top_k_of_all(logprobs, k)
    groups = _top_k_of_all(_group_maxima(logprobs), k)[1].sort(dim=1).values
    ids = (groups.unsqueeze(2) * _GROUP + torch.arange(_GROUP, device=groups.device)).flatten(1)
    values = logprobs.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, -torch.inf)
    values, places = _top_k_of_all(values, k)
    return values, ids.gather(1, places)


def _top_1(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest of each row and its id, the lowest of equal ones, both [rows, 1]."""
    groups = _group_maxima(logits).max(dim=1, keepdim=True).indices
    ids = groups * _GROUP + torch.arange(_GROUP, device=groups.device)
    # The last group may be short: its last member stands in for those that are not there.
    ids.clamp_(max=logits.shape[1] - 1)
    values, places = logits.gather(1, ids).max(dim=1, keepdim=True)
    return values, ids.gather(1, places)


def _group_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Return the maximum of every `_GROUP` neighbours, [rows, groups]; the last may be fewer."""
    vocab = logits.shape[1]
    whole = vocab - vocab % _GROUP
    maxima = [logits[:, :whole].view(-1, whole // _GROUP, _GROUP).amax(dim=2)] if whole else []
    if whole < vocab:
        maxima.append(logits[:, whole:].amax(dim=1, keepdim=True))
    return torch.cat(maxima, dim=1) if len(maxima) > 1 else maxima[0]


def _top_k_of_all(logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `top_k` does.

    `torch.topk` itself picks any of those that tie at the edge and orders ties as it likes.
    """
    vocab = logprobs.shape[1]
    if k == 0:
        return logprobs[:, :0], torch.empty_like(logprobs[:, :0], dtype=torch.int64)
    candidates = k + _TIE_MARGIN
    if candidates >= vocab:
        values, ids = torch.sort(logprobs, dim=1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    values, ids = torch.topk(logprobs, candidates, dim=1)
    ids, order = torch.sort(ids, dim=1)
    values, order = torch.sort(values.gather(1, order), dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    unsettled = torch.nonzero(values[:, k - 1] == values[:, -1]).squeeze(1)
    values, ids = values[:, :k].contiguous(), ids[:, :k].contiguous()
    if unsettled.numel():
        exact, exact_ids = torch.sort(logprobs[unsettled], dim=1, descending=True, stable=True)
        values[unsettled] = exact[:, :k]
        ids[unsettled] = exact_ids[:, :k]
    return values, ids


def _ranks_of_sorted(values: torch.Tensor) -> torch.Tensor:
    """Return ranks of rows sorted in descending order: 1 + the place of the first equal value."""
    if values.shape[1] == 0:
        return torch.empty_like(values, dtype=torch.int64)
    places = torch.arange(1, values.shape[1] + 1, device=values.device).expand(values.shape)
    repeats = torch.zeros_like(values, dtype=torch.bool)
    repeats[:, 1:] = values[:, 1:] == values[:, :-1]
    return torch.where(repeats, 0, places).cummax(dim=1).values
