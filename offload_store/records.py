"""What the offload store answers with, and what it keeps about a segment and about a request.

Plain records: the rules for changing them are in `offload_store.store`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class LookupResult(NamedTuple):
    """What the store promises to supply; a miss is `(0, False)`."""

    num_hit_tokens: int
    """Tokens from position 0, a multiple of the block size."""
    is_load_needed: bool


class Row(NamedTuple):
    """Where a block's bytes are: a row of a segment's array."""

    segment_id: int
    row: int


class SegmentPlan(NamedTuple):
    """Blocks to copy into one segment."""

    segment_id: int
    block_indices: list[int]
    """Row r of the segment holds the block at `block_indices[r]` of the save's list."""


class SavePlan(msgspec.Struct, frozen=True, eq=False):
    """What a save has to copy; each segment ends in one `complete_save`."""

    request_id: str
    block_hashes: list[bytes]
    num_blocks: int
    """Leading blocks that the store holds once every segment is complete."""
    segments: list[SegmentPlan]


class Counters(msgspec.Struct):
    """What has happened since the start; the numbers only grow."""

    num_queries: int = 0
    """Lookups that were allowed to read shared blocks."""
    num_queried_tokens: int = 0
    """Tokens that those lookups would have taken; the hit rate's denominator."""
    num_hit_tokens: int = 0
    """Tokens that those lookups got from shared blocks; the hit rate's numerator."""
    num_bypasses: int = 0
    """Lookups that were allowed to read no shared block."""
    num_own_tokens: int = 0
    """Tokens supplied to requests from blocks that they had saved themselves."""
    num_saved_blocks: int = 0
    """Blocks whose bytes arrived and were kept."""
    num_evicted_blocks: int = 0
    """Blocks that became unreadable to make room for others."""
    num_lost_blocks: int = 0
    """Blocks whose data was found to be gone."""


class OffloadStoreStats(Counters):
    """The counters, and gauges of now."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    """Bytes of all segments, those still being saved included."""
    num_segments: int = 0
    num_saving_segments: int = 0
    num_blocks: int = 0
    """Distinct blocks that any request could be given."""
    num_pins: int = 0
    """Segments held for the promise of a lookup, counted once per request."""
    num_owned_segments: int = 0
    """Segments that some request will come back for."""
    num_requests: int = 0
    """Requests for which the store keeps a pin, an owned segment or a copy of their own."""


class Segment(msgspec.Struct, eq=False):
    """Blocks that were saved together and whose bytes come and go together."""

    segment_id: int
    hashes: list[bytes]
    """Row r holds the block of `hashes[r]`."""
    num_bytes: int
    saver: str | None
    """The request that computed the bytes, until it is forgotten."""
    replace: bool
    """Whether the saver wants these bytes where others have saved the same blocks."""
    node_id: str = ""
    """Where the bytes lie."""
    is_saving: bool = True
    num_uses: int = 0
    """Entries of the indexes that point here; 0 while it is being saved."""
    pinned_by: set[str] = msgspec.field(default_factory=set)
    owned_by: set[str] = msgspec.field(default_factory=set)

    @property
    def is_evictable(self) -> bool:
        return not (self.is_saving or self.pinned_by or self.owned_by)

    @property
    def is_dead(self) -> bool:
        """Whether nobody can read it any more or ever again."""
        return not (self.is_saving or self.pinned_by or self.num_uses)


class Holdings(msgspec.Struct, eq=False):
    """What the store keeps for one request; exists only while some of it is not empty."""

    promised: dict[bytes, Row] = msgspec.field(default_factory=dict)
    """What the latest lookup promised."""
    pinned: set[int] = msgspec.field(default_factory=set)
    owned: set[int] = msgspec.field(default_factory=set)
    saved: set[int] = msgspec.field(default_factory=set)
    """Segments whose `saver` is the request, those still being saved included."""
    own: dict[bytes, Row] = msgspec.field(default_factory=dict)
    """Visible rows of those segments."""

    @property
    def is_empty(self) -> bool:
        return not (self.promised or self.pinned or self.owned or self.saved or self.own)
