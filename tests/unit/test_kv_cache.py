"""Paged KV: bytes in equal bytes out, and memory that was never written never leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from scheduler.errors import InvalidConfig, InvariantViolation
from workers.kv_cache import KVCache, LayerSpec, Span

LAYERS = (LayerSpec(2, 16), LayerSpec(1, 32), LayerSpec(3, 8, sliding_window=4))
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def cache(dtype: torch.dtype = torch.bfloat16, num_blocks: int = 6, block_size: int = 4) -> KVCache:
    return KVCache(LAYERS, num_blocks=num_blocks, block_size=block_size, dtype=dtype)


def fill(target: KVCache, block_ids: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = target.block_size
    slots = torch.tensor([b * size + i for b in block_ids for i in range(size)])
    for layer, spec in enumerate(target.layers):
        shape = (len(slots), spec.kv_heads, spec.head_dim)
        keys, values = (torch.randn(shape, generator=generator).to(target.dtype) for _ in "kv")
        target.write(layer, target.rows(slots, spec.kv_heads), keys, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_survive_the_way_to_another_worker_and_other_ids(dtype: torch.dtype) -> None:
    source, target = cache(dtype), cache(dtype, num_blocks=9)
    fill(source, [4, 0, 5], seed=1)
    data = source.read_blocks([4, 0, 5])
    assert data.shape == (3, source.block_bytes)
    assert data.flags.c_contiguous
    target.write_blocks([8, 1, 3], data)
    assert target.read_blocks([8, 1, 3]).tobytes() == data.tobytes()
    for layer in range(len(LAYERS)):
        assert torch.equal(target.key(layer)[8], source.key(layer)[4])
        assert torch.equal(target.value(layer)[3], source.value(layer)[5])


def test_a_block_that_was_never_written_reads_as_zeros() -> None:
    target = cache()
    fill(target, [2], seed=1)
    assert target.read_blocks([0, 1, 3, 4, 5]).any() == np.False_
    assert target.read_blocks([2]).any()


def test_what_was_read_stays_when_the_block_is_used_again() -> None:
    target = cache()
    fill(target, [2], seed=1)
    data = target.read_blocks([2])
    before = data.tobytes()
    fill(target, [2], seed=2)
    assert data.tobytes() == before
    assert target.read_blocks([2]).tobytes() != before


def test_writing_touches_no_other_block() -> None:
    target = cache()
    fill(target, [0, 1, 2, 3, 4, 5], seed=1)
    before = target.read_blocks(range(6))
    target.write_blocks([3], np.full((1, target.block_bytes), 7, np.uint8))
    after = target.read_blocks(range(6))
    assert (after[3] == 7).all()
    assert np.delete(after, 3, 0).tobytes() == np.delete(before, 3, 0).tobytes()


def test_read_only_data_from_the_object_store_is_accepted() -> None:
    target = cache()
    data = np.full((2, target.block_bytes), 5, np.uint8)
    data.flags.writeable = False
    target.write_blocks([1, 4], data)
    assert target.read_blocks([1, 4]).tobytes() == data.tobytes()


def test_no_blocks_at_all_is_an_empty_array() -> None:
    target = cache()
    data = target.read_blocks([])
    assert data.shape == (0, target.block_bytes)
    target.write_blocks([], data)


@pytest.mark.parametrize("bad", [[-1], [6], [0, 7]])
def test_ids_of_no_block_are_refused(bad: list[int]) -> None:
    target = cache()
    with pytest.raises(InvariantViolation, match="block ids"):
        target.read_blocks(bad)
    with pytest.raises(InvariantViolation, match="block ids"):
        target.write_blocks(bad, np.zeros((len(bad), target.block_bytes), np.uint8))


@pytest.mark.parametrize("shape", [(1, 8), (2, 0), (1,)])
def test_data_of_another_layout_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvariantViolation, match="uint8"):
        cache().write_blocks([0], np.zeros(shape, np.uint8))


def test_zeroed_slots_are_those_and_no_others() -> None:
    target = cache()
    fill(target, [0, 1], seed=1)
    target.zero_slots(torch.tensor([1, 4]))
    for layer in range(len(LAYERS)):
        zero = (target.key(layer).transpose(1, 2).flatten(0, 1).flatten(1) == 0).all(dim=1)
        assert zero[:8].tolist() == [False, True, False, False, True, False, False, False]


def test_a_budget_counts_every_byte_that_is_allocated() -> None:
    block_bytes = KVCache.bytes_per_block(LAYERS, 4, torch.bfloat16)
    assert block_bytes == 2 * 4 * 2 * (2 * 16 + 32 + 3 * 8)
    assert KVCache.blocks_in(10 * block_bytes, LAYERS, 4, torch.bfloat16) == 9
    target = cache(num_blocks=9)
    allocated = sum(
        t.numel() * t.element_size()
        for layer in range(len(LAYERS))
        for t in (target.key(layer), target.value(layer))
    )
    assert allocated == 10 * block_bytes
    with pytest.raises(InvalidConfig, match="too little"):
        KVCache.blocks_in(2 * block_bytes - 1, LAYERS, 4, torch.bfloat16)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0)])
def test_a_cache_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(InvalidConfig, match="at least one block"):
        cache(num_blocks=num_blocks, block_size=block_size)


def test_slots_follow_the_block_table() -> None:
    span = Span(0, start=3, num_tokens=6, block_table=np.array([5, 0, 2], np.int32))
    assert span.slots(4).tolist() == [23, 0, 1, 2, 3, 8]


def test_rows_are_where_a_layer_keeps_the_slots_of_each_head() -> None:
    slots = torch.tensor([0, 5, 23])
    numbers = torch.arange(6 * 4 * 3)
    heads_first = numbers.view(6, 3, 4).transpose(1, 2).reshape(-1, 3)
    assert cache().rows(slots, 3).tolist() == heads_first[slots].reshape(-1).tolist()
    on_a_gpu = KVCache(LAYERS, num_blocks=6, block_size=4, dtype=torch.bfloat16, device="meta")
    assert on_a_gpu.rows(slots, 3).tolist() == numbers.view(-1, 3)[slots].reshape(-1).tolist()


_COUNTING_THREADS = """
import os, threading
import torch
from workers.kv_cache import KVCache, LayerSpec

def num_threads_begun_by(work):
    def count():
        before = set(os.listdir("/proc/self/task"))
        work()
        begun.update(set(os.listdir("/proc/self/task")) - before)
    begun = set()
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    return len(begun)

cache = KVCache([LayerSpec(4, 64)] * 2, num_blocks=64, block_size=64, dtype=torch.float32)
blocks = range(cache.num_blocks)
data = cache.read_blocks(blocks)
print(
    num_threads_begun_by(lambda: cache.read_blocks(blocks)),
    num_threads_begun_by(lambda: cache.write_blocks(blocks, data)),
    num_threads_begun_by(lambda: torch.ones(2**20).add_(1.0)),
)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_whoever_reads_and_writes_blocks_gets_no_threads_of_torch() -> None:
    """They would make a step's threads stop spinning. What torch does in parallel does get some."""
    ran = subprocess.run(
        [sys.executable, "-c", _COUNTING_THREADS],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.split() == ["0", "0", "1"], ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages there are")
def test_blocks_that_were_never_written_take_no_memory() -> None:
    """A gigabyte of blocks is a promise until requests need it."""
    before = psutil.Process().memory_info().rss
    kept = KVCache([LayerSpec(4, 64)], num_blocks=2**14, block_size=32, dtype=torch.bfloat16)
    assert kept.num_blocks * kept.block_bytes == 2**29
    kept.write_blocks([5], np.ones((1, kept.block_bytes), np.uint8))
    assert kept.read_blocks([5, 6]).any(axis=1).tolist() == [True, False]
    assert psutil.Process().memory_info().rss - before < 2**26
