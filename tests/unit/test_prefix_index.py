"""The index of who can find a block says what the pools would say, whatever happens to them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.block_pool import BlockPool
from scheduler.prefix_index import PrefixIndex

HASHES = [bytes([i]) * 16 for i in range(6)]
NAMES = ["a", "b", "c"]


def pool(name: str, index: PrefixIndex, num_blocks: int = 3) -> BlockPool:
    return BlockPool(num_blocks, 4, name=name, index=index)


def cache(blocks: BlockPool, block_hash: bytes) -> None:
    """A request computes a block and leaves."""
    block_ids = blocks.allocate(1)
    blocks.register(block_ids[0], block_hash)
    blocks.free(block_ids)


def can_find(blocks: BlockPool, block_hash: bytes) -> bool:
    found = blocks.lookup([block_hash], num_readable_tokens=4, skip_reading_prefix_cache=False)
    return bool(found)


def test_a_block_is_known_to_be_with_all_that_have_computed_it() -> None:
    index = PrefixIndex()
    for name in NAMES:
        cache(pool(name, index), HASHES[0])
    assert list(index.holders(HASHES[0])) == NAMES
    assert list(index.holders(HASHES[1])) == []


def test_a_block_that_is_handed_out_again_is_no_longer_known() -> None:
    index = PrefixIndex()
    blocks = pool("a", index, num_blocks=1)
    cache(blocks, HASHES[0])
    blocks.allocate(1)
    assert len(index) == 0


def test_a_worker_that_is_gone_leaves_nothing() -> None:
    index = PrefixIndex()
    pools = [pool(name, index) for name in NAMES]
    for blocks in pools:
        cache(blocks, HASHES[0])
        cache(blocks, HASHES[1])
    pools[1].close()
    assert list(index.holders(HASHES[1])) == ["a", "c"]
    assert not can_find(pools[1], HASHES[1])
    pools[0].close()
    pools[2].close()
    assert len(index) == 0


def test_what_is_still_given_back_to_a_pool_that_was_closed_is_not_found_there() -> None:
    """A step that was under way when its worker was lost frees its blocks afterwards."""
    index = PrefixIndex()
    blocks = pool("a", index)
    held = blocks.allocate(2)
    blocks.register(held[0], HASHES[0])
    blocks.close()
    blocks.register(held[1], HASHES[1])
    blocks.free(held)
    assert len(index) == 0
    blocks.validate([])


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(HASHES)), max_size=60))
def test_the_index_agrees_with_every_pool_while_caches_turn_over(story) -> None:
    index = PrefixIndex()
    pools = {name: pool(name, index) for name in NAMES}
    for name, block_hash in story:
        cache(pools[name], block_hash)
        for each in HASHES:
            holders = {n for n, blocks in pools.items() if can_find(blocks, each)}
            assert set(index.holders(each)) == holders
