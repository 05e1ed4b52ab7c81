"""Rows and ranks from logits: definitions, ties, infinities, and bits free of batch mates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scheduler.sampling_params import ALL_LOGPROBS
from workers import logprobs as workers_logprobs
from workers.logprobs import (
    DenseRows,
    Logits,
    Rows,
    normalise,
    rows_per_slice,
    select_rows,
    select_token_rows,
    top_1,
    top_k,
)

VOCAB = 700
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows_of(logits: torch.Tensor) -> Rows:
    """As from an output layer of three products, the last of which is wider than the vocabulary."""
    last = torch.nn.functional.pad(logits[:, 600:], (0, 9), value=torch.inf)
    return normalise(Logits([logits[:, :256], logits[:, 256:600], last], logits.shape[1]))


def every(rows: Rows) -> torch.Tensor:
    """All logprobs, [rows, vocab]."""
    return torch.cat(list(rows.pieces()))


def random_logits(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator) * 4).to(dtype)


def expected_order(row: np.ndarray) -> np.ndarray:
    """Ids by descending logprob, equal ones by ascending id."""
    return np.lexsort((np.arange(len(row)), -row))


@pytest.mark.parametrize("k", [0, 1, 2, 20, 256, 257, VOCAB - 3, VOCAB, ALL_LOGPROBS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_actual_token_then_the_top_k(k: int, dtype: torch.dtype) -> None:
    """Half-precision logits tie all the time, also at the edge of the top k."""
    made = rows_of(random_logits(16, dtype))
    targets = torch.arange(16) * 40
    rows = select_rows(made, targets, k).to_host()
    width = 1 + (VOCAB if k == ALL_LOGPROBS else k)
    assert rows.token_ids.shape == rows.logprobs.shape == rows.ranks.shape == (16, width)
    assert (rows.token_ids.dtype, rows.logprobs.dtype, rows.ranks.dtype) == (
        np.int32,
        np.float32,
        np.int32,
    )
    full = every(made).numpy()
    for i in range(16):
        order = expected_order(full[i])[: width - 1]
        assert rows.token_ids[i].tolist() == [40 * i, *order]
        assert rows.logprobs[i].tobytes() == full[i][rows.token_ids[i]].tobytes()
        ranks = [1 + int((full[i] > value).sum()) for value in rows.logprobs[i]]
        assert rows.ranks[i].tolist() == ranks


@pytest.mark.parametrize("num_asked", [1, 4, 200, VOCAB])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_given_tokens_are_the_actual_one_then_those_in_their_order(
    num_asked: int, dtype: torch.dtype
) -> None:
    """The same numbers as in rows over the whole vocabulary, ranks among ties included."""
    logits = random_logits(16, dtype)
    logits[3, 5] = -torch.inf
    made = rows_of(logits)
    targets = torch.arange(16) * 40
    asked = np.random.default_rng(0).permutation(VOCAB)[:num_asked].tolist()
    rows = select_token_rows(made, targets, asked).to_host()
    whole = select_rows(made, targets, ALL_LOGPROBS).to_host()
    for i in range(16):
        assert rows.token_ids[i].tolist() == [40 * i, *asked]
        places = [whole.token_ids[i].tolist().index(t) for t in [40 * i, *asked]]
        assert rows.logprobs[i].tobytes() == whole.logprobs[i][places].tobytes()
        assert rows.ranks[i].tolist() == whole.ranks[i][places].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.1, 4.0, 90.0])
def test_logprobs_are_the_natural_log_softmax(dtype: torch.dtype, scale: float) -> None:
    logits = (random_logits(64).double() * scale / 4).to(dtype)
    expected = logits.double().log_softmax(dim=1)
    error = (every(rows_of(logits)).double() - expected).abs()
    assert (error / expected.abs().clamp(min=1.0)).max() < 4e-7


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_the_kernels_mean_the_same(dtype: torch.dtype) -> None:
    """What a device gives that has none of them."""
    logits = random_logits(32, dtype)
    dense = DenseRows(torch.log_softmax(logits, dim=1, dtype=torch.float32))
    targets = torch.arange(32) * 20
    for k in (0, 1, 5):
        theirs = select_rows(dense, targets, k).to_host()
        own = select_rows(rows_of(logits), targets, k).to_host()
        assert own.token_ids.tolist() == theirs.token_ids.tolist()
        assert np.abs(own.logprobs - theirs.logprobs).max() < 1e-5
    theirs = select_token_rows(dense, targets, [5, 600]).to_host()
    own = select_token_rows(rows_of(logits), targets, [5, 600]).to_host()
    assert np.abs(own.ranks - theirs.ranks).max() <= (1 if dtype == torch.float32 else 0)


def test_ties_far_beyond_the_top_k_are_still_settled_by_id() -> None:
    """Every token but one is equally likely: the lowest ids win, whatever the selection does."""
    logits = torch.zeros(16, VOCAB)
    logits[:, 500] = 1.0
    values, ids = top_k(every(rows_of(logits)), 4)
    assert ids.tolist() == [[500, 0, 1, 2]] * 16
    rows = select_rows(rows_of(logits), torch.full((16,), 300), 4).to_host()
    assert rows.ranks.tolist() == [[2, 1, 2, 2, 2]] * 16
    assert values[0, 1] == values[0, 3]


def test_rank_does_not_shift_when_the_actual_token_is_among_the_top() -> None:
    logits = torch.zeros(16, 50)
    logits[:, :3] = torch.tensor([3.0, 2.0, 1.0])
    made = normalise(Logits([logits], 50))
    rows = select_rows(made, torch.full((16,), 1), 3).to_host()
    assert rows.token_ids[0].tolist() == [1, 0, 1, 2]
    assert rows.ranks[0].tolist() == [2, 1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_slice_and_for_every_k(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    logits = random_logits(512, dtype)
    whole = rows_of(logits)
    targets = torch.arange(512) % VOCAB
    wide = select_rows(whole, targets, 7).to_host()
    for first, count in ((0, 16), (16, 32), (64, 64), (112, 400), (7, 1), (511, 1)):
        rows = slice(first, first + count)
        alone = rows_of(logits[rows].clone())
        assert every(alone).numpy().tobytes() == every(whole)[rows].numpy().tobytes()
        for made in (alone, whole[rows]):
            assert select_rows(made, targets[rows], 7).to_host().same_bits(wide[rows])
    monkeypatch.setitem(workers_logprobs.LOGPROBS_BYTES, "cpu", 1)
    assert select_rows(whole, targets, 7).to_host().same_bits(wide)
    full = select_rows(whole, targets, ALL_LOGPROBS).to_host()
    for k in (0, 1, 2):
        narrow = select_rows(whole, targets, k).to_host()
        for name in ("token_ids", "logprobs", "ranks"):
            columns = getattr(narrow, name)
            assert columns.tobytes() == getattr(wide, name)[:, : k + 1].tobytes()
            assert columns.tobytes() == getattr(full, name)[:, : k + 1].tobytes()
    asked = select_token_rows(whole, targets, [3, 699]).to_host()
    assert (
        asked.logprobs.tobytes()
        == every(whole)
        .gather(1, torch.cat([targets[:, None], torch.tensor([[3, 699]]).expand(512, 2)], 1))
        .numpy()
        .tobytes()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_logits_lie_in_memory_changes_no_bit(dtype: torch.dtype) -> None:
    """Neither alignment nor how many columns of each product there are beyond the vocabulary."""
    logits = random_logits(5, dtype)
    expected = every(normalise(Logits([logits], VOCAB)))
    for shift in (1, 3, 17, 31):
        room = torch.zeros(5 * (VOCAB + 40) + shift, dtype=dtype)
        moved = room[shift:].view(5, VOCAB + 40)[:, :VOCAB]
        moved.copy_(logits)
        found = every(normalise(Logits([moved], VOCAB)))
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    turned = logits.t().contiguous().t()
    assert every(normalise(Logits([turned], VOCAB))).numpy().tobytes() == expected.numpy().tobytes()


def test_minus_infinity_is_a_logprob_and_ranks_behind_all_others() -> None:
    logits = random_logits(16)
    logits[:, 100:] = -torch.inf
    made = rows_of(logits)
    assert not made.is_nan().any()
    rows = select_rows(made, torch.full((16,), 200), ALL_LOGPROBS).to_host()
    assert np.isneginf(rows.logprobs[:, 0]).all()
    assert (rows.ranks[:, 0] == 101).all()
    assert rows.token_ids[0, 101:].tolist() == list(range(100, VOCAB))
    assert not np.isnan(rows.logprobs).any()


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 333, VOCAB - 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_or_infinite_logit_marks_its_row_and_no_other(
    value: float, column: int, dtype: torch.dtype
) -> None:
    logits = random_logits(16, dtype)
    logits[5, column] = value
    made = rows_of(logits)
    assert made.is_nan().tolist() == [i == 5 for i in range(16)]
    largest, _ = top_1(Logits([logits[:, :256], logits[:, 256:]], VOCAB))
    assert torch.isfinite(largest[:, 0]).tolist() == [i != 5 for i in range(16)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_logit_is_the_first_of_its_equals(dtype: torch.dtype) -> None:
    logits = random_logits(64, dtype)
    logits[:8, [300, 301, 650]] = 50.0
    logits[8:16] = -torch.inf
    logits[16:24] = -1.0
    logits[24:32, 699] = 60.0
    parts = [logits[:, :256], logits[:, 256:600], logits[:, 600:]]
    largest, ids = top_1(Logits(parts, VOCAB))
    expected = logits.float().numpy()
    assert ids[:, 0].tolist() == expected.argmax(axis=1).tolist()
    assert largest[:, 0].tolist() == expected.max(axis=1).tolist()
    values, best = rows_of(logits[16:]).most_likely(1)
    assert best[:, 0].tolist() == every(rows_of(logits[16:])).numpy().argmax(axis=1).tolist()
    assert values.tolist() == every(rows_of(logits[16:])).amax(dim=1, keepdim=True).tolist()


def test_a_row_without_any_finite_logit_is_marked() -> None:
    logits = random_logits(16)
    logits[3] = -torch.inf
    assert rows_of(logits).is_nan().tolist() == [i == 3 for i in range(16)]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_values", [1, 2, 5, 300])
def test_the_most_likely_of_rows_full_of_equals_are_in_order(
    num_values: int, dtype: torch.dtype
) -> None:
    """A few values, minus infinity among them, in rows that rise, fall or do neither."""
    generator = torch.Generator().manual_seed(num_values)
    logits = torch.randint(num_values, (24, VOCAB), generator=generator).to(dtype)
    logits[:, 1::7] = -torch.inf
    logits[8:16] = logits[8:16].sort(dim=1).values
    logits[16:] = logits[16:].sort(dim=1, descending=True).values
    rows = rows_of(logits)
    full = every(rows).numpy()
    for k in (2, 3, 50, VOCAB - 60):
        values, ids = rows.most_likely(k)
        for i in range(24):
            assert ids[i].tolist() == expected_order(full[i])[:k].tolist()
            assert values[i].numpy().tobytes() == full[i][ids[i]].tobytes()


def test_logits_apart_whose_logprobs_are_equal_tie() -> None:
    """The smaller ones differ by less than what is left of them beside the largest one."""
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, 650] = 2.0**20
    logits[0, 300:310] = torch.arange(10) * 2.0**-10
    rows = rows_of(logits)
    assert rows.most_likely(4)[1].tolist() == [[650, 300, 301, 302]]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_last_group_that_is_short_brings_each_token_once(k: int) -> None:
    logprobs = torch.full((2, 1000), -torch.inf)
    logprobs[:, 999] = -1.0
    logprobs[:, 990] = -2.0
    values, ids = top_k(logprobs, k)
    assert ids.tolist() == [[999, 990, 0][:k]] * 2
    assert values.tolist() == [[-1.0, -2.0, -torch.inf][:k]] * 2
