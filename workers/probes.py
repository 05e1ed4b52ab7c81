"""Numbers that show in which order a product of matrices sums."""

from __future__ import annotations

import torch


def cancelling(rows: int, columns: int, seed: int, signs: bool) -> torch.Tensor:
    """Return fp32 [rows, columns] such that the product of two of them (one with signs) cancels.

    Column j of the second half repeats a column of the first, negated where `signs`, and all are
    shuffled alike; so every sum of products is zero but for rounding.
    """
    half = columns // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(1))
    shuffle = torch.randperm(columns, generator=torch.Generator().manual_seed(2))
    first = torch.randn(rows, half, generator=torch.Generator().manual_seed(seed))
    second = first[:, order]
    odd = first.new_zeros(rows, columns - 2 * half)
    return torch.cat([first, -second if signs else second, odd], dim=1)[:, shuffle].contiguous()
