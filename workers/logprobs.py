"""Logprob rows and ranks from logits, and the slices that keep logits within bounded memory.

The module knows logits and token ids; it knows no request and no model. Rules:
- A logprob is the natural-log softmax of the raw logits, in fp32, before anything that sampling
  does to them. The same row has the same bits whatever k is and whoever shares the slice.
- Equal logprobs are ordered by ascending token id, and share the better rank.
- -inf is a legal logprob. NaN is not: such rows are reported by `has_nan`, and mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scheduler.logprobs import Logprobs
from scheduler.sampling_params import ALL_LOGPROBS

_GROUP = 128
"""Neighbours in the vocabulary whose maximum is taken together."""
_TIE_MARGIN = 8
"""Candidates fetched beyond the top k, so that ties at its edge are mostly seen at once."""
_MAX_COUNTED = 64
"""Columns of a row up to which counting what is greater is quicker than sorting the row."""


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


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return fp32 logprobs of logits [rows, vocab] in the model's dtype, at least two rows."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def has_nan(logprobs: torch.Tensor) -> torch.Tensor:
    """Return bool [rows]: whether a row is spoilt. One NaN or +inf logit spoils all of its row."""
    return torch.isnan(logprobs[:, 0])


def select_rows(logprobs: torch.Tensor, targets: torch.Tensor, num_logprobs: int) -> RowTensors:
    """Return rows of width k + 1: the actual token, then the k most likely ones.

    Args:
        logprobs: fp32 [rows, vocab].
        targets: int64 [rows], the actual tokens.
        num_logprobs: k, or -1 for the whole vocabulary.
    """
    actual = logprobs.gather(1, targets.unsqueeze(1))
    # Counting in floats is exact below 2**24 and far quicker than counting bools.
    greater = torch.gt(logprobs, actual, out=torch.empty_like(logprobs))
    actual_rank = greater.sum(dim=1, keepdim=True).to(torch.int64) + 1
    k = logprobs.shape[1] if num_logprobs == ALL_LOGPROBS else min(num_logprobs, logprobs.shape[1])
    values, ids = top_k(logprobs, k)
    return RowTensors(
        torch.cat([targets.unsqueeze(1), ids], dim=1),
        torch.cat([actual, values], dim=1),
        torch.cat([actual_rank, _ranks_of_sorted(values)], dim=1),
    )


def select_token_rows(
    logprobs: torch.Tensor, targets: torch.Tensor, token_ids: Sequence[int]
) -> RowTensors:
    """Return rows of width len(token_ids) + 1: the actual token, then `token_ids` in their order.

    Args:
        logprobs: fp32 [rows, vocab].
        targets: int64 [rows], the actual tokens.
        token_ids: what every row holds.
    """
    asked = torch.tensor(token_ids, dtype=torch.int64, device=logprobs.device)
    ids = torch.cat([targets.unsqueeze(1), asked.expand(len(targets), -1)], dim=1)
    values = logprobs.gather(1, ids)
    return RowTensors(ids, values, _ranks_among(logprobs, values))


def _ranks_among(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the ranks of `values` [rows, columns] of their own rows, whichever way is quicker."""
    if values.shape[1] <= _MAX_COUNTED:
        greater = torch.empty_like(logprobs)
        counts = [
            torch.gt(logprobs, column, out=greater).sum(dim=1, keepdim=True)
            for column in torch.split(values, 1, dim=1)
        ]
        return torch.cat(counts, dim=1).to(torch.int64) + 1
    ascending = torch.sort(logprobs, dim=1).values
    not_greater = torch.searchsorted(ascending, values, right=True)
    return logprobs.shape[1] - not_greater + 1


def top_k(logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of each row and their ids, descending, equal ones by ascending id.

    They are all in the k groups of neighbours with the largest maxima (equal ones by ascending id),
    so nearly all of a large vocabulary is only looked at once.
    """
    vocab = logprobs.shape[1]
    if k == 1:
        return top_1(logprobs)
    if 2 * k * _GROUP >= vocab:
        return _top_k_of_all(logprobs, k)
    groups = _top_k_of_all(_group_maxima(logprobs), k)[1].sort(dim=1).values
    ids = (groups.unsqueeze(2) * _GROUP + torch.arange(_GROUP, device=groups.device)).flatten(1)
    values = logprobs.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, -torch.inf)
    values, places = _top_k_of_all(values, k)
    return values, ids.gather(1, places)


def top_1(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
