"""The blocks of one worker: nothing is lost, freed twice, or found where it must not be."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.block_pool import BlockPool
from scheduler.errors import InvariantViolation

BLOCK_SIZE = 4
HASHES = [bytes([i]) * 16 for i in range(12)]


def find(pool: BlockPool, hashes: list[bytes], tokens: int = 1000, skip: bool = False) -> list[int]:
    return pool.lookup(hashes, num_readable_tokens=tokens, skip_reading_prefix_cache=skip)


def cached_chain(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Blocks that were computed by a request that has left."""
    blocks = pool.allocate(len(hashes))
    for block_id, block_hash in zip(blocks, hashes, strict=True):
        pool.register(block_id, block_hash)
    pool.free(blocks)
    return blocks


def test_blocks_handed_out_are_distinct_and_come_back() -> None:
    pool = BlockPool(5, BLOCK_SIZE)
    blocks = pool.allocate(5)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    pool.free(blocks[:2])
    assert (pool.num_free, pool.num_used) == (2, 3)
    assert sorted(pool.allocate(2)) == sorted(blocks[:2])


def test_more_blocks_than_are_free_are_refused_and_nothing_changes() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    held = pool.allocate(1)
    with pytest.raises(InvariantViolation, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.validate(held)


def test_a_block_listed_twice_is_not_freed_twice() -> None:
    """The second owner's data would be overwritten by whoever is handed the block next."""
    pool = BlockPool(3, BLOCK_SIZE)
    block_id = pool.allocate(1)[0]
    with pytest.raises(InvariantViolation, match="nobody holds it"):
        pool.free([block_id, block_id])
    assert pool.num_free == 3
    pool.validate([])


def test_a_shared_block_is_free_when_its_last_holder_has_left() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    block_id = pool.allocate(1)[0]
    pool.take([block_id])
    pool.free([block_id])
    assert (pool.ref_count(block_id), pool.num_used) == (1, 1)
    pool.free([block_id])
    assert (pool.ref_count(block_id), pool.num_used) == (0, 0)


def test_a_blank_block_can_not_be_shared() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    with pytest.raises(InvariantViolation, match="blank"):
        pool.take([1])


def test_a_block_that_nobody_holds_can_not_become_findable() -> None:
    """Its content may be anybody's by now."""
    pool = BlockPool(3, BLOCK_SIZE)
    with pytest.raises(InvariantViolation, match="nobody holds it"):
        pool.register(0, HASHES[0])


def test_only_the_leading_blocks_that_are_there_are_found() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    first, second = cached_chain(pool, HASHES[:2])
    cached_chain(pool, HASHES[3:4])
    assert find(pool, HASHES[:5]) == [first, second]
    assert find(pool, HASHES[1:5]) == [second]
    assert find(pool, HASHES[2:5]) == []


@pytest.mark.parametrize(
    ("tokens", "num_blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (99, 3)]
)
def test_a_block_is_found_only_where_it_ends_within_the_limit(tokens: int, num_blocks: int) -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    blocks = cached_chain(pool, HASHES[:3])
    assert find(pool, HASHES[:3], tokens) == blocks[:num_blocks]


def test_the_bypass_is_enforced_here_whatever_the_limit_says() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    cached_chain(pool, HASHES[:3])
    assert find(pool, HASHES[:3], skip=True) == []


def test_without_prefix_caching_nothing_is_ever_found() -> None:
    pool = BlockPool(8, BLOCK_SIZE, enable_prefix_caching=False)
    cached_chain(pool, HASHES[:3])
    assert find(pool, HASHES[:3]) == []


def test_a_free_block_is_found_until_it_is_handed_out_again() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    cached_chain(pool, HASHES[:1])
    held = pool.allocate(1)
    assert len(find(pool, HASHES[:1])) == 1, "a blank block goes before a cached one"
    held += pool.allocate(1)
    assert find(pool, HASHES[:1]) == []
    pool.validate(held)


def test_the_least_recently_used_block_is_reused_first() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    for block_hash in HASHES[:3]:
        cached_chain(pool, [block_hash])
    used = find(pool, HASHES[:1])
    pool.take(used)
    pool.free(used)
    pool.allocate(2)
    assert find(pool, HASHES[:1]) == used
    assert find(pool, HASHES[1:2]) == find(pool, HASHES[2:3]) == []


def test_a_chains_tail_is_reused_before_its_head() -> None:
    """A tail is of no use without its head."""
    pool = BlockPool(4, BLOCK_SIZE)
    blocks = cached_chain(pool, HASHES[:4])
    pool.allocate(3)
    assert find(pool, HASHES[:4]) == blocks[:1]


def test_the_first_block_with_a_hash_stays_the_one_that_is_found() -> None:
    """Two requests compute the same prefix at once: both keep their own blocks."""
    pool = BlockPool(4, BLOCK_SIZE)
    first, second = pool.allocate(2)
    pool.register(first, HASHES[0])
    pool.register(second, HASHES[0])
    assert find(pool, HASHES[:1]) == [first]
    pool.free([first, second])
    assert find(pool, HASHES[:1]) == [first]
    pool.validate([])


def test_cached_blocks_that_nobody_holds_count_as_free() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    blocks = cached_chain(pool, HASHES[:2])
    pool.take(blocks[:1])
    assert pool.num_free_among(blocks) == 1
    assert pool.num_free == 3


@pytest.mark.parametrize("holds", [[], [0, 0], [1]])
def test_holds_that_do_not_add_up_are_found(holds: list[int]) -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    assert pool.allocate(1) == [0]
    pool.validate([0])
    with pytest.raises(InvariantViolation, match="holds"):
        pool.validate(holds)


class PoolMachine(RuleBasedStateMachine):
    """Random lives of tables: the pool against a plain list of holds."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.num_blocks = num_blocks
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        """What each block was said to hold, until it was handed out again."""

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        blocks = self.pool.allocate(count)
        assert not {b for table in self.tables for b in table} & set(blocks)
        for block_id in blocks:
            self.content.pop(block_id, None)
        self.tables.append(blocks)

    @rule(data=st.data(), hashes=st.permutations(HASHES[:4]))
    @precondition(lambda self: any(self.tables))
    def register(self, data: st.DataObject, hashes: list[bytes]) -> None:
        table = data.draw(st.sampled_from([t for t in self.tables if t]))
        for block_id, block_hash in zip(table, hashes, strict=False):
            self.pool.register(block_id, self.content.setdefault(block_id, block_hash))

    @rule(hashes=st.permutations(HASHES[:4]), tokens=st.integers(0, 20))
    def share(self, hashes: list[bytes], tokens: int) -> None:
        found = find(self.pool, hashes, tokens)
        assert [self.content[b] for b in found] == hashes[: len(found)]
        self.pool.take(found)
        self.tables.append(found)

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.free(self.tables.pop(index))

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "pool"):
            holds = [b for table in self.tables for b in table]
            self.pool.validate(holds)
            assert self.pool.num_used == len(set(holds))
            assert self.pool.num_free + self.pool.num_used == self.num_blocks


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
