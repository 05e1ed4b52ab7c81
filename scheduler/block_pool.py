"""The KV blocks of one worker: who holds which, and which full blocks can be found by hash.

A block is held (reference count > 0) or free. A free block may still be cached: its content stays
findable until the block is handed out again, least recently used first. The pool knows ids, counts
and hashes; it never sees a request or the data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from scheduler.errors import InvariantViolation
from scheduler.prefix_index import PrefixIndex


class BlockPool:
    """Reference counts, free lists and prefix cache over `num_blocks` block ids."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        name: str = "",
        index: PrefixIndex | None = None,
    ):
        """Start with all blocks blank.

        Args:
            num_blocks: ids are from 0 to `num_blocks` - 1.
            block_size: tokens per block.
            enable_prefix_caching: whether anything is ever found.
            name: the worker's, for the index.
            index: is told what can be found here.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.is_caching = enable_prefix_caching
        self._name = name
        self._index = index
        self._refs = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        """Free blocks without findable content, handed out from the end."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks with findable content, least recently used first."""

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        return self._refs[block_id]

    def is_findable(self, block_id: int) -> bool:
        """Whether others may be given the block, so that nothing may be written to it."""
        return block_id in self._hash_of

    def lookup(
        self,
        block_hashes: Sequence[bytes],
        *,
        num_readable_tokens: int,
        skip_reading_prefix_cache: bool,
    ) -> list[int]:
        """Return the ids of the leading blocks that the cache can supply, without taking them.

        Both the limit and the bypass are enforced here, whatever the caller checked before.
        """
        found: list[int] = []
        if skip_reading_prefix_cache or not self.is_caching:
            return found
        for block_hash in block_hashes[: num_readable_tokens // self.block_size]:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks are free, so that taking them uses up free blocks."""
        return sum(1 for block_id in block_ids if self._refs[block_id] == 0)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks of undefined content, each held once.

        Raises:
            InvariantViolation: fewer are free; callers check `num_free` first.
        """
        if count > self.num_free:
            raise InvariantViolation(f"{count} blocks wanted, {self.num_free} free")
        block_ids = []
        for _ in range(count):
            if self._blank:
                block_id = self._blank.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                self._forget(block_id)
            self._refs[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def take(self, block_ids: Sequence[int]) -> None:
        """Hold blocks once more, in use or cached ones alike."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                if block_id not in self._cached:
                    raise InvariantViolation(f"block {block_id} is blank: nobody can share it")
                del self._cached[block_id]
            self._refs[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give blocks back, one hold each; a chain's tail is reused before its head.

        Raises:
            InvariantViolation: a block is not held.
        """
        for block_id in reversed(block_ids):
            if self._refs[block_id] <= 0:
                raise InvariantViolation(f"block {block_id} is freed but nobody holds it")
            self._refs[block_id] -= 1
            if self._refs[block_id]:
                continue
            if block_id in self._hash_of:
                self._cached[block_id] = None
            else:
                self._blank.append(block_id)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a held block findable: it is full, and its content is computed.

        The first block with a hash stays the one that is found.
        """
        if self._refs[block_id] <= 0:
            raise InvariantViolation(f"block {block_id} is registered but nobody holds it")
        if self.is_caching and block_hash not in self._block_of and block_id not in self._hash_of:
            self._hash_of[block_id] = block_hash
            self._block_of[block_hash] = block_id
            if self._index is not None:
                self._index.add(block_hash, self._name)

    def close(self) -> None:
        """Let nothing be found here any more: the worker is gone."""
        for block_id in list(self._hash_of):
            self._forget(block_id)
        self._blank += self._cached
        self._cached.clear()
        self.is_caching = False

    @property
    def findable_hashes(self) -> Collection[bytes]:
        return self._block_of.keys()

    def validate(self, holds: Iterable[int]) -> None:
        """Check every invariant, given each hold that exists (a block id per hold).

        Raises:
            InvariantViolation: counts, free lists and cache do not fit together.
        """
        counted = [0] * self.num_blocks
        for block_id in holds:
            counted[block_id] += 1
        wrong = [b for b in range(self.num_blocks) if counted[b] != self._refs[b]]
        if wrong:
            raise InvariantViolation(f"blocks {wrong[:8]} have holds that nobody has, or too few")
        free = set(self._blank) | set(self._cached)
        if len(free) != self.num_free or free != {
            b for b in range(self.num_blocks) if self._refs[b] == 0
        }:
            raise InvariantViolation("free and held blocks do not add up to the pool")
        if {h: b for b, h in self._hash_of.items()} != self._block_of or set(
            self._cached
        ) - self._hash_of.keys():
            raise InvariantViolation("the prefix cache's two maps disagree")
        if set(self._blank) & self._hash_of.keys():
            raise InvariantViolation("a blank block is findable")

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        if self._index is not None:
            self._index.remove(block_hash, self._name)
