"""Rows and ranks from logits: definitions, ties, infinities, and bits free of batch mates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scheduler.sampling_params import ALL_LOGPROBS
from workers.logprobs import (
    has_nan,
    log_softmax,
    rows_per_slice,
    select_rows,
    select_token_rows,
    top_k,
)

VOCAB = 700


def random_logits(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator) * 4).to(dtype)


def expected_order(row: np.ndarray) -> np.ndarray:
    """Ids by descending logprob, equal ones by ascending id."""
    return np.lexsort((np.arange(len(row)), -row))


@pytest.mark.parametrize("k", [0, 1, 5, 20, VOCAB - 3, VOCAB, ALL_LOGPROBS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_actual_token_then_the_top_k(k: int, dtype: torch.dtype) -> None:
    """Half-precision logits tie all the time, also at the edge of the top k."""
    logprobs = log_softmax(random_logits(16, dtype))
    targets = torch.arange(16) * 40
    rows = select_rows(logprobs, targets, k).to_host()
    width = 1 + (VOCAB if k == ALL_LOGPROBS else k)
    assert rows.token_ids.shape == rows.logprobs.shape == rows.ranks.shape == (16, width)
    assert (rows.token_ids.dtype, rows.logprobs.dtype, rows.ranks.dtype) == (
        np.int32,
        np.float32,
        np.int32,
    )
    full = logprobs.numpy()
    for i in range(16):
        order = expected_order(full[i])[: width - 1]
        assert rows.token_ids[i].tolist() == [40 * i, *order]
        assert rows.logprobs[i].tobytes() == full[i][rows.token_ids[i]].tobytes()
        ranks = [1 + int((full[i] > value).sum()) for value in rows.logprobs[i]]
        assert rows.ranks[i].tolist() == ranks


@pytest.mark.parametrize("num_asked", [1, 4, 200, VOCAB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_given_tokens_are_the_actual_one_then_those_in_their_order(
    num_asked: int, dtype: torch.dtype
) -> None:
    """The same numbers as in rows over the whole vocabulary, ranks among ties included."""
    logprobs = log_softmax(random_logits(16, dtype))
    logprobs[3, 5] = -torch.inf
    targets = torch.arange(16) * 40
    asked = np.random.default_rng(0).permutation(VOCAB)[:num_asked].tolist()
    rows = select_token_rows(logprobs, targets, asked).to_host()
    every = select_rows(logprobs, targets, ALL_LOGPROBS).to_host()
    for i in range(16):
        assert rows.token_ids[i].tolist() == [40 * i, *asked]
        places = [every.token_ids[i].tolist().index(t) for t in [40 * i, *asked]]
        assert rows.logprobs[i].tobytes() == every.logprobs[i][places].tobytes()
        assert rows.ranks[i].tolist() == every.ranks[i][places].tolist()


def test_logprobs_are_the_natural_log_softmax() -> None:
    logits = random_logits(16).double()
    expected = logits - torch.logsumexp(logits, dim=1, keepdim=True)
    assert (log_softmax(logits.float()).double() - expected).abs().max() < 1e-5


def test_ties_far_beyond_the_top_k_are_still_settled_by_id() -> None:
    """Every token but one is equally likely: the lowest ids win, whatever the selection does."""
    logits = torch.zeros(16, VOCAB)
    logits[:, 500] = 1.0
    values, ids = top_k(log_softmax(logits), 4)
    assert ids.tolist() == [[500, 0, 1, 2]] * 16
    rows = select_rows(log_softmax(logits), torch.full((16,), 300), 4).to_host()
    assert rows.ranks.tolist() == [[2, 1, 2, 2, 2]] * 16
    assert values[0, 1] == values[0, 3]


def test_rank_does_not_shift_when_the_actual_token_is_among_the_top() -> None:
    logits = torch.zeros(16, 50)
    logits[:, :3] = torch.tensor([3.0, 2.0, 1.0])
    rows = select_rows(log_softmax(logits), torch.full((16,), 1), 3).to_host()
    assert rows.token_ids[0].tolist() == [1, 0, 1, 2]
    assert rows.ranks[0].tolist() == [2, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_slice_and_for_every_k(dtype: torch.dtype) -> None:
    logits = random_logits(512, dtype)
    whole = log_softmax(logits)
    targets = torch.arange(512) % VOCAB
    for first, count in ((0, 16), (16, 32), (64, 64), (112, 400)):
        part = log_softmax(logits[first : first + count].clone())
        assert part.numpy().tobytes() == whole[first : first + count].numpy().tobytes()
    narrow = select_rows(whole, targets, 0).to_host()
    wide = select_rows(whole, targets, 7).to_host()
    assert narrow.logprobs.tobytes() == wide.logprobs[:, :1].tobytes()
    assert narrow.ranks.tobytes() == wide.ranks[:, :1].tobytes()


def test_minus_infinity_is_a_logprob_and_ranks_behind_all_others() -> None:
    logits = random_logits(16)
    logits[:, 100:] = -torch.inf
    logprobs = log_softmax(logits)
    assert not has_nan(logprobs).any()
    rows = select_rows(logprobs, torch.full((16,), 200), ALL_LOGPROBS).to_host()
    assert np.isneginf(rows.logprobs[:, 0]).all()
    assert (rows.ranks[:, 0] == 101).all()
    assert rows.token_ids[0, 101:].tolist() == list(range(100, VOCAB))
    assert not np.isnan(rows.logprobs).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 333, VOCAB - 1])
def test_a_nan_or_infinite_logit_marks_its_row_and_no_other(value: float, column: int) -> None:
    logits = random_logits(16)
    logits[5, column] = value
    assert has_nan(log_softmax(logits)).tolist() == [i == 5 for i in range(16)]


def test_a_row_without_any_finite_logit_is_marked() -> None:
    logits = random_logits(16)
    logits[3] = -torch.inf
    assert has_nan(log_softmax(logits)).tolist() == [i == 3 for i in range(16)]


@pytest.mark.parametrize(
    ("vocab", "budget", "rows"),
    [(49152, 64 * 2**20, 320), (262144, 64 * 2**20, 64), (300, 64 * 2**20, 55872), (10**6, 1, 16)],
)
def test_slices_fit_their_budget_in_whole_groups_of_rows(
    vocab: int, budget: int, rows: int
) -> None:
    assert rows_per_slice(vocab, budget) == rows


def test_equal_values_in_different_groups_are_ordered_by_id() -> None:
    logprobs = torch.full((2, 1000), -5.0)
    logprobs[:, 5 * 128 + 3] = -1.0
    logprobs[:, [2 * 128 + 1, 5 * 128 + 4]] = -2.0
    values, ids = top_k(logprobs, 3)
    assert ids.tolist() == [[643, 257, 644]] * 2
    assert values.tolist() == [[-1.0, -2.0, -2.0]] * 2


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_last_group_that_is_short_brings_each_token_once(k: int) -> None:
    logprobs = torch.full((2, 1000), -torch.inf)
    logprobs[:, 999] = -1.0
    logprobs[:, 990] = -2.0
    values, ids = top_k(logprobs, k)
    assert ids.tolist() == [[999, 990, 0][:k]] * 2
    assert values.tolist() == [[-1.0, -2.0, -torch.inf][:k]] * 2
