"""Paged attention on CPU: right against a plain formula, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from scheduler.errors import UnsupportedModel
from workers import attention
from workers.attention import AttentionBatch
from workers.kv_cache import KVCache, LayerSpec, Span

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 32, 16
SCALING = 0.17
CASES = [(None, None), (24, None), (None, 4.0), (130, 4.0)]


class Sequence1:
    """One request's q, k and v at every position."""

    def __init__(self, length: int, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.q = torch.randn(length, HEADS, HEAD_DIM, generator=generator).to(dtype)
        self.k = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
        self.v = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)

    def expected(self, window: int | None, cap: float | None) -> torch.Tensor:
        """The formula, in fp64."""
        q, k, v = self.q.double(), self.k.double(), self.v.double()
        group = HEADS // KV_HEADS
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * SCALING
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        at = torch.arange(self.length)
        distance = at[:, None] - at[None, :]
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


class Pool:
    """A cache with its blocks handed out in random order, full of NaN from earlier tenants."""

    def __init__(self, dtype: torch.dtype, num_blocks: int = 160) -> None:
        self.cache = KVCache(
            [LayerSpec(KV_HEADS, HEAD_DIM)], num_blocks=num_blocks, block_size=BLOCK, dtype=dtype
        )
        self.cache.key(0)[:num_blocks] = torch.nan
        self.cache.value(0)[:num_blocks] = torch.nan
        self.free = np.random.default_rng(3).permutation(num_blocks).astype(np.int32)

    def table(self, length: int) -> np.ndarray:
        count = -(-length // BLOCK)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def step(
        self,
        parts: Sequence[tuple[Sequence1, np.ndarray, int, int]],
        window: int | None = None,
        cap: float | None = None,
        padding: int = 0,
    ) -> list[torch.Tensor]:
        """Attend for chunks (sequence, table, start, end); return each one's output."""
        spans, row = [], 0
        for _, table, start, end in parts:
            spans.append(Span(row, start, end - start, table))
            row += end - start
        tail = [torch.zeros(padding, *x.shape[1:], dtype=x.dtype) for x in _qkv(parts[0])]
        q, k, v = (
            torch.cat([*chunks, rest])
            for chunks, rest in zip(zip(*(_qkv(p) for p in parts), strict=True), tail, strict=True)
        )
        out = AttentionBatch(spans, self.cache).attend(0, q, k, v, SCALING, window, cap)
        assert out.shape == q.shape
        assert torch.isfinite(out).all()
        return [out[s.first_row : s.first_row + s.num_tokens] for s in spans]


def _qkv(part: tuple[Sequence1, np.ndarray, int, int]) -> tuple[torch.Tensor, ...]:
    sequence, _, start, end = part
    return sequence.q[start:end], sequence.k[start:end], sequence.v[start:end]


def run_alone(
    sequence: Sequence1, sizes: Sequence[int], window: int | None = None, cap: float | None = None
) -> torch.Tensor:
    """The whole sequence in chunks, the last size repeated."""
    pool = Pool(sequence.q.dtype)
    table, done, out = pool.table(sequence.length), 0, []
    for i in range(sequence.length):
        end = min(done + sizes[min(i, len(sizes) - 1)], sequence.length)
        out += pool.step([(sequence, table, done, end)], window, cap)
        done = end
        if done == sequence.length:
            break
    return torch.cat(out)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(
        (a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all()
    )


@pytest.mark.parametrize(("window", "cap"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 5, 128, 129, 400])
def test_attention_is_what_the_formula_says(
    length: int, dtype: torch.dtype, window: int | None, cap: float | None
) -> None:
    sequence = Sequence1(length, 1, dtype)
    error = (run_alone(sequence, [512], window, cap) - sequence.expected(window, cap)).abs().max()
    assert error < (2e-6 if dtype == torch.float32 else 0.04)


@pytest.mark.parametrize(("window", "cap"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunking_changes_no_bit(dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    """Also token by token: what a decode gives is what a prefill of the same tokens gives."""
    sequence = Sequence1(610, 1, dtype)
    whole = run_alone(sequence, [610], window, cap)
    for sizes in ([512], [128], [100], [37], [333, 1, 1, 1], [609, 1], [512, 1]):
        assert same_bits(run_alone(sequence, sizes, window, cap), whole), sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 24])
def test_batch_mates_and_padding_change_no_bit(dtype: torch.dtype, window: int | None) -> None:
    lengths = [1, 17, 130, 131, 260, 300, 520]
    sequences = [Sequence1(n, seed, dtype) for seed, n in enumerate(lengths)]
    alone = [run_alone(s, [512], window) for s in sequences]
    pool = Pool(dtype)
    tables = [pool.table(s.length) for s in sequences]
    prefilled = pool.step(
        [(s, t, 0, s.length - 1) for s, t in zip(sequences, tables, strict=True) if s.length > 1],
        window,
        padding=13,
    )
    decoded = pool.step(
        [(s, t, s.length - 1, s.length) for s, t in zip(sequences, tables, strict=True)],
        window,
        padding=9,
    )
    for i, last in enumerate(decoded):
        assert same_bits(last, alone[i][-1:])
    for out, expected in zip(prefilled, alone[1:], strict=True):
        assert same_bits(out, expected[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, threads: int) -> None:
    sequence = Sequence1(610, 1, dtype)
    whole = run_alone(sequence, [610])
    torch.set_num_threads(threads)
    for sizes in ([610], [128], [600, 1]):
        assert same_bits(run_alone(sequence, sizes), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_sums_over_many_keys_have_one_order(dtype: torch.dtype, kv_heads: int) -> None:
    """Equal weights on values that cancel: what is left is rounding, another order another number.

    The products that libraries pick for few rows, many rows, one head or two threads all differ.
    """
    length, heads, head_dim = 1536, 3, 64
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(length // 2, kv_heads, head_dim, generator=generator).to(dtype)
    q = torch.zeros(length, heads, head_dim, dtype=dtype)
    k = torch.zeros(length, kv_heads, head_dim, dtype=dtype)
    v = torch.cat([half, -half[torch.randperm(length // 2, generator=generator)]])

    def run(cuts: Sequence[int]) -> torch.Tensor:
        spec = LayerSpec(kv_heads, head_dim)
        cache = KVCache([spec], num_blocks=96, block_size=BLOCK, dtype=dtype)
        table, out = np.arange(96, dtype=np.int32), []
        for start, end in zip([0, *cuts], [*cuts, length], strict=True):
            batch = AttentionBatch([Span(0, start, end - start, table)], cache)
            part = slice(start, end)
            out.append(batch.attend(0, q[part], k[part], v[part], SCALING, None, None))
        return torch.cat(out)

    whole = run([])
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert same_bits(run([length - 1]), whole)
        assert same_bits(run([700, 1020, 1408, 1439, 1455, 1500]), whole)


def test_many_tiles_of_one_shape_are_cut_into_groups_without_changing_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workers import cpu_attention

    sequences = [Sequence1(40, seed, torch.bfloat16) for seed in range(9)]

    def run() -> torch.Tensor:
        pool = Pool(torch.bfloat16)
        return torch.cat(pool.step([(s, pool.table(40), 0, 40) for s in sequences]))

    together = run()
    monkeypatch.setattr(cpu_attention, "_GROUP_NUMBERS", 1)
    assert same_bits(run(), together)


def test_a_nan_in_one_request_reaches_no_other() -> None:
    good, bad = Sequence1(150, 1, torch.bfloat16), Sequence1(150, 2, torch.bfloat16)
    expected = run_alone(good, [150])
    bad.k[3] = torch.nan
    pool = Pool(torch.bfloat16)
    tables = [pool.table(150), pool.table(150)]
    spans = [Span(0, 0, 150, tables[0]), Span(150, 0, 150, tables[1])]
    q, k, v = (torch.cat([getattr(good, x), getattr(bad, x)]) for x in "qkv")
    out = AttentionBatch(spans, pool.cache).attend(0, q, k, v, SCALING, None, None)
    assert same_bits(out[:150], expected)
    assert torch.isnan(out[150 + 3 :]).any()


def test_two_requests_read_one_shared_block() -> None:
    """A prefix that both share is in one block; each attends to it as if it were its own."""
    first = Sequence1(40, 1, torch.bfloat16)
    second = Sequence1(40, 2, torch.bfloat16)
    for name in "kv":
        getattr(second, name)[:BLOCK] = getattr(first, name)[:BLOCK]
    pool = Pool(torch.bfloat16)
    table = pool.table(40)
    pool.step([(first, table, 0, 40)])
    shared = np.concatenate([table[:1], pool.table(24)])
    (out,) = pool.step([(second, shared, BLOCK, 40)])
    assert same_bits(out, run_alone(second, [40])[BLOCK:])


@pytest.mark.parametrize(
    "asked", [{"s_aux": torch.zeros(6)}, {"attention_mask": torch.zeros(1, 1, 4, 4)}]
)
def test_what_the_kernels_do_not_do_is_refused_by_name(asked: dict[str, torch.Tensor]) -> None:
    """Attention sinks, masks of the model's own: silence would be a wrong answer."""
    attention.register()
    from transformers import AttentionInterface

    function = AttentionInterface._global_mapping[attention.IMPLEMENTATION]
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(UnsupportedModel, match=next(iter(asked))):
        function(torch.nn.Module(), q, q, q, asked.pop("attention_mask", None), **asked)


def test_transformers_knows_the_implementation_once_it_is_registered() -> None:
    attention.register()
    config = LlamaConfig(attn_implementation=attention.IMPLEMENTATION)
    assert config._attn_implementation == attention.IMPLEMENTATION
