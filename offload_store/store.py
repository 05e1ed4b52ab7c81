"""The index of the offload store: which blocks it holds, for whom, and what has to go.

Rules:
- The unit of room is the segment: a few MB of blocks saved together. Its bytes count from the
  moment they are planned until the whole segment is dropped.
- A block is visible only while its bytes are really there: after `complete_save`, until the
  segment is dropped. A hash stands for at most one shared copy; a request may have a copy of its
  own beside it, which nobody else reads.
- What a request may read is checked here, not by the caller: shared copies up to one limit and
  never with `skip_reading_prefix_cache`, copies that it saved itself up to another.
- A segment that a lookup promised (pinned), that a request will come back for (owned) or that is
  being saved is never evicted. The others go least recently used first; since every use touches
  the tail of a chain before its head, the head outlives the tail, which is useless without it.

- Once nobody works on a node any more, what lies there and is not kept for somebody is dropped.

The module knows no Ray, no clock and no data: where the bytes are is its caller's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from offload_store.consistency import InconsistentStore, contradictions
from offload_store.records import (
    Counters,
    Holdings,
    LookupResult,
    OffloadStoreStats,
    Row,
    SavePlan,
    Segment,
    SegmentPlan,
)

DEFAULT_SEGMENT_BYTES = 4 * 2**20


class OffloadStore:
    """Index of saved KV blocks, LRU by bytes."""

    def __init__(
        self,
        capacity_bytes: int,
        block_bytes: int,
        block_size: int,
        *,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        on_drop: Callable[[int], None] | None = None,
    ) -> None:
        """Start empty.

        Args:
            capacity_bytes: room for all segments together, >= 0.
            block_bytes: bytes of one block's KV over all layers, >= 1.
            block_size: tokens per block, >= 1.
            segment_bytes: size that segments stay within, unless a single block is larger.
            on_drop: told the id of each segment that is dropped, so that its data can go too.
        """
        if capacity_bytes < 0 or block_bytes < 1 or block_size < 1 or segment_bytes < 1:
            raise ValueError(
                f"capacity_bytes={capacity_bytes}, block_bytes={block_bytes}, "
                f"block_size={block_size}, segment_bytes={segment_bytes} are not allowed: give "
                f"a capacity >= 0 and sizes >= 1"
            )
        self._capacity_bytes = capacity_bytes
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._max_rows = max(1, segment_bytes // block_bytes)
        self._on_drop = on_drop
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        """Least recently used first; ids are never used again."""
        self._shared: dict[bytes, Row] = {}
        self._holdings: dict[str, Holdings] = {}
        self._used_bytes = 0
        self._left_node_ids: set[str] = set()
        """Nodes where nobody works any more, and what lies there is kept for somebody."""
        self._next_segment_id = 0
        self._counters = Counters()

    # ------------------------------------------------------------------------------- reading

    def lookup(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        *,
        num_readable_tokens: int,
        num_own_tokens: int,
        skip_reading_prefix_cache: bool,
    ) -> LookupResult:
        """Return how many leading tokens the store can supply, and pin what it promises.

        An earlier promise to the same request ends first, whatever this lookup finds.

        Args:
            block_hashes: the request's full blocks from position 0.
            num_readable_tokens: limit on blocks that any request saved.
            num_own_tokens: limit on blocks that this request saved itself.
            skip_reading_prefix_cache: whether to read no block that it did not save itself.
        """
        self._unpin(request_id)
        shared_tokens = 0 if skip_reading_prefix_cache else max(num_readable_tokens, 0)
        num_shared_blocks = min(shared_tokens // self._block_size, len(block_hashes))
        num_own_blocks = max(num_own_tokens, 0) // self._block_size
        own = self._own_rows(request_id)
        promised: dict[bytes, Row] = {}
        num_own_hits = 0
        for index, block_hash in enumerate(block_hashes):
            row = own.get(block_hash) if index < num_own_blocks else None
            if row is not None:
                num_own_hits += 1
            elif index < num_shared_blocks:
                row = self._shared.get(block_hash)
            if row is None:
                break
            promised[block_hash] = row
        self._count_lookup(num_shared_blocks, len(promised) - num_own_hits, num_own_hits)
        self._pin(request_id, promised)
        return LookupResult(len(promised) * self._block_size, bool(promised))

    def segments_of(self, request_id: str, block_hashes: Sequence[bytes]) -> list[Row]:
        """Return where the leading blocks are that the latest lookup promised to the request.

        Shorter than `block_hashes` where the promise was, or where data has been lost since.
        """
        holdings = self._holdings.get(request_id, Holdings())
        rows: list[Row] = []
        for block_hash in block_hashes:
            row = holdings.promised.get(block_hash)
            if row is None or row.segment_id not in self._segments:
                break
            rows.append(row)
        return rows

    # -------------------------------------------------------------------------------- saving

    def prepare_save(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        *,
        owned: bool,
        replace: bool,
        node_id: str = "",
    ) -> SavePlan:
        """Plan which blocks have to be copied, and take the room for them.

        Segments that are neither pinned nor owned nor being saved are evicted where room is
        needed. Where it does not suffice, the plan covers only the leading blocks that fit.

        Args:
            block_hashes: full blocks of the request, in order.
            owned: whether the request will come back for them: they stay until it is forgotten.
            replace: whether to copy also blocks whose stored bytes others saved.
            node_id: where the copies will lie; somebody works there.
        """
        self._left_node_ids.discard(node_id)
        missing = []
        present: dict[int, int] = {}
        for index, block_hash in enumerate(block_hashes):
            row = self._row_for_save(request_id, block_hash, replace)
            if row is None:
                missing.append(index)
            else:
                present[index] = row.segment_id
        free = self._make_room(len(missing) * self._block_bytes, set(present.values()))
        num_copied = min(len(missing), free // self._block_bytes)
        num_blocks = len(block_hashes)
        if num_copied < len(missing):
            num_blocks = missing[num_copied]
        segments = [
            self._add_segment(
                request_id,
                block_hashes,
                missing[start : min(start + self._max_rows, num_copied)],
                replace,
                node_id,
            )
            for start in range(0, num_copied, self._max_rows)
        ]
        used = {index: segment_id for index, segment_id in present.items() if index < num_blocks}
        for plan in segments:
            used.update(dict.fromkeys(plan.block_indices, plan.segment_id))
        self._touch(used[index] for index in sorted(used, reverse=True))
        if owned:
            for segment_id in set(used.values()):
                self._own(request_id, segment_id)
        return SavePlan(request_id, list(block_hashes), num_blocks, segments)

    def complete_save(self, segment_id: int, *, ok: bool) -> None:
        """End the save of one planned segment: its bytes are there, or will never be.

        Blocks that someone else saved meanwhile are kept once. A segment that was dropped
        meanwhile is ignored.

        Raises:
            ValueError: the segment's save has ended already.
        """
        segment = self._segments.get(segment_id)
        if segment is None:
            return
        if not segment.is_saving:
            raise ValueError(f"the save of segment {segment_id} has ended already")
        if not ok:
            self._drop(segment)
            return
        segment.is_saving = False
        touched = [segment_id]
        for index, block_hash in enumerate(segment.hashes):
            present = self._row_for_save(segment.saver, block_hash, segment.replace)
            if present is None:
                replaced = self._publish(segment, block_hash, Row(segment_id, index))
                if replaced is not None:
                    touched.append(replaced)
            else:
                for request_id in segment.owned_by:
                    self._own(request_id, present.segment_id)
        self._drop_unneeded(touched)

    def num_saved_blocks(self, plan: SavePlan, failed_segment_ids: Collection[int] = ()) -> int:
        """Return how many leading blocks of a save the store holds, once all its segments ended.

        Args:
            failed_segment_ids: segments of the plan whose save failed.
        """
        failed = {
            index
            for segment_id, indices in plan.segments
            if segment_id in failed_segment_ids
            for index in indices
        }
        own = self._own_rows(plan.request_id)
        for index in range(plan.num_blocks):
            block_hash = plan.block_hashes[index]
            if index in failed or not (block_hash in own or block_hash in self._shared):
                return index
        return plan.num_blocks

    # ------------------------------------------------------------------------------- letting go

    def release(self, request_id: str, *, forget: bool) -> None:
        """Drop the request's pins; with `forget` all that is kept for it by name.

        What a forgotten request saved, also what is still on its way, becomes ordinary shared
        cache. Unknown requests are ignored.
        """
        self._unpin(request_id)
        holdings = self._holdings.pop(request_id, None) if forget else None
        if holdings is None:
            return
        for segment_id in holdings.owned:
            self._segments[segment_id].owned_by.discard(request_id)
        for segment_id in holdings.saved:
            self._segments[segment_id].saver = None
        for block_hash, row in holdings.own.items():
            if block_hash in self._shared:
                self._segments[row.segment_id].num_uses -= 1
            else:
                self._shared[block_hash] = row
        self._drop_unneeded({*holdings.saved, *holdings.owned})

    def retain(self, request_ids: Iterable[str]) -> None:
        """Drop the pins of all requests, and forget every request but these."""
        kept = set(request_ids)
        for request_id in list(self._holdings):
            self.release(request_id, forget=request_id not in kept)

    def leave(self, node_id: str) -> None:
        """Drop what lies on a node where nobody works any more, so that the node can go.

        What is kept for a request is dropped when that lets go of it. A save on the node says that
        somebody works there again.
        """
        self._left_node_ids.add(node_id)
        self._drop_unneeded(self._segments)
        self._forget_empty_nodes()

    def drop_segment(self, segment_id: int) -> None:
        """Forget a segment whose data is gone: its blocks are misses from now on."""
        segment = self._segments.get(segment_id)
        if segment is not None:
            self._counters.num_lost_blocks += self._drop(segment)

    # ------------------------------------------------------------------------------- watching

    @property
    def stats(self) -> OffloadStoreStats:
        """Counters since the start and gauges of now."""
        segments = self._segments.values()
        return OffloadStoreStats(
            **msgspec.structs.asdict(self._counters),
            capacity_bytes=self._capacity_bytes,
            used_bytes=self._used_bytes,
            num_segments=len(segments),
            num_saving_segments=sum(segment.is_saving for segment in segments),
            num_blocks=len(self._shared),
            num_pins=sum(len(segment.pinned_by) for segment in segments),
            num_owned_segments=sum(bool(segment.owned_by) for segment in segments),
            num_requests=len(self._holdings),
        )

    def validate(self) -> None:
        """Raise `InconsistentStore` where the indexes, the segments and the sums disagree."""
        broken = contradictions(
            self._segments, self._shared, self._holdings, self._block_bytes, self._used_bytes
        )
        if self._used_bytes > self._capacity_bytes:
            broken.append(f"{self._used_bytes} bytes used of {self._capacity_bytes}")
        broken += [
            f"segment {segment.segment_id} lies needlessly on {segment.node_id}, which was left"
            for segment in self._segments.values()
            if segment.is_evictable and segment.node_id in self._left_node_ids
        ]
        occupied = {segment.node_id for segment in self._segments.values()}
        broken += [f"{node} is remembered for nothing" for node in self._left_node_ids - occupied]
        if broken:
            raise InconsistentStore(f"the offload store is inconsistent: {'; '.join(broken)}")

    # ------------------------------------------------------------------------------ internals

    def _own_rows(self, request_id: str) -> Mapping[bytes, Row]:
        holdings = self._holdings.get(request_id)
        return holdings.own if holdings is not None else {}

    def _held_by(self, request_id: str) -> Holdings:
        return self._holdings.setdefault(request_id, Holdings())

    def _row_for_save(self, saver: str | None, block_hash: bytes, replace: bool) -> Row | None:
        """Return the row that makes saving this block again pointless, if there is one."""
        own = self._own_rows(saver).get(block_hash) if saver is not None else None
        if own is not None or (replace and saver is not None):
            return own
        return self._shared.get(block_hash)

    def _pin(self, request_id: str, promised: dict[bytes, Row]) -> None:
        if not promised:
            return
        holdings = self._held_by(request_id)
        holdings.promised = promised
        self._touch(row.segment_id for row in reversed(promised.values()))
        for segment_id in {row.segment_id for row in promised.values()}:
            holdings.pinned.add(segment_id)
            self._segments[segment_id].pinned_by.add(request_id)

    def _unpin(self, request_id: str) -> None:
        holdings = self._holdings.get(request_id)
        if holdings is None:
            return
        unpinned, holdings.pinned, holdings.promised = holdings.pinned, set(), {}
        for segment_id in unpinned:
            self._segments[segment_id].pinned_by.discard(request_id)
        self._drop_unneeded(unpinned)
        self._tidy(request_id)

    def _own(self, request_id: str, segment_id: int) -> None:
        self._held_by(request_id).owned.add(segment_id)
        self._segments[segment_id].owned_by.add(request_id)

    def _touch(self, segment_ids: Iterable[int]) -> None:
        """Make these segments the most recently used, the last one most of all."""
        previous = None
        for segment_id in segment_ids:
            if segment_id != previous:
                self._segments.move_to_end(segment_id)
            previous = segment_id

    def _count_lookup(self, num_shared_blocks: int, num_hits: int, num_own_hits: int) -> None:
        counters = self._counters
        if num_shared_blocks:
            counters.num_queries += 1
            counters.num_queried_tokens += num_shared_blocks * self._block_size
        else:
            counters.num_bypasses += 1
        counters.num_hit_tokens += num_hits * self._block_size
        counters.num_own_tokens += num_own_hits * self._block_size

    def _make_room(self, num_bytes: int, spared: Collection[int]) -> int:
        """Evict until `num_bytes` are free or nothing is left to evict; return the free bytes."""
        free = self._capacity_bytes - self._used_bytes
        victims = []
        for segment in self._segments.values():
            if free >= num_bytes:
                break
            if segment.is_evictable and segment.segment_id not in spared:
                victims.append(segment)
                free += segment.num_bytes
        for segment in victims:
            self._counters.num_evicted_blocks += self._drop(segment)
        return free

    def _add_segment(
        self,
        saver: str,
        block_hashes: Sequence[bytes],
        indices: list[int],
        replace: bool,
        node_id: str,
    ) -> SegmentPlan:
        segment = Segment(
            segment_id=self._next_segment_id,
            hashes=[block_hashes[index] for index in indices],
            num_bytes=len(indices) * self._block_bytes,
            saver=saver,
            replace=replace,
            node_id=node_id,
        )
        self._next_segment_id += 1
        self._segments[segment.segment_id] = segment
        self._held_by(saver).saved.add(segment.segment_id)
        self._used_bytes += segment.num_bytes
        return SegmentPlan(segment.segment_id, indices)

    def _publish(self, segment: Segment, block_hash: bytes, row: Row) -> int | None:
        """Make a row visible; return the segment whose shared copy it has replaced."""
        self._counters.num_saved_blocks += 1
        replaced = self._shared.get(block_hash)
        self._shared[block_hash] = row
        segment.num_uses += 1
        if segment.saver is not None:
            self._holdings[segment.saver].own[block_hash] = row
            segment.num_uses += 1
        if replaced is None:
            return None
        old = self._segments[replaced.segment_id]
        old.num_uses -= 1
        # Whoever counts on the block, but can't go on reading the old copy, counts on this one.
        for request_id in old.owned_by:
            if block_hash not in self._own_rows(request_id):
                self._own(request_id, segment.segment_id)
        return old.segment_id

    def _drop_unneeded(self, segment_ids: Iterable[int]) -> None:
        """Drop those that nobody can read, or that lie in the way of a node that may go."""
        for segment_id in list(segment_ids):
            segment = self._segments.get(segment_id)
            if segment is None:
                continue
            if segment.is_dead:
                self._drop(segment)
            elif segment.is_evictable and segment.node_id in self._left_node_ids:
                self._counters.num_evicted_blocks += self._drop(segment)

    def _forget_empty_nodes(self) -> None:
        """Remember nodes that were left only as long as something lies there."""
        if self._left_node_ids:
            self._left_node_ids &= {segment.node_id for segment in self._segments.values()}

    def _drop(self, segment: Segment) -> int:
        """Drop a segment from every index; return how many blocks nobody new can read now."""
        del self._segments[segment.segment_id]
        self._used_bytes -= segment.num_bytes
        num_unshared = 0
        own = self._holdings[segment.saver].own if segment.saver is not None else {}
        for index, block_hash in enumerate(segment.hashes):
            row = Row(segment.segment_id, index)
            if self._shared.get(block_hash) == row:
                del self._shared[block_hash]
                num_unshared += 1
            if own.get(block_hash) == row:
                del own[block_hash]
        for request_id in segment.pinned_by:
            self._holdings[request_id].pinned.discard(segment.segment_id)
        for request_id in segment.owned_by:
            self._holdings[request_id].owned.discard(segment.segment_id)
        holders = {*segment.pinned_by, *segment.owned_by}
        if segment.saver is not None:
            holders.add(segment.saver)
            self._holdings[segment.saver].saved.discard(segment.segment_id)
        for request_id in holders:
            self._tidy(request_id)
        if segment.node_id in self._left_node_ids:
            self._forget_empty_nodes()
        if self._on_drop is not None:
            self._on_drop(segment.segment_id)
        return num_unshared

    def _tidy(self, request_id: str) -> None:
        holdings = self._holdings.get(request_id)
        if holdings is not None and holdings.is_empty:
            del self._holdings[request_id]
