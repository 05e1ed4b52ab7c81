"""What must always hold in the offload store's index, whatever has happened to it.

Everything is counted again from the two indexes and compared with what is kept. The module changes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from offload_store.records import Holdings, Row, Segment


class InconsistentStore(RuntimeError):
    """An invariant of the index does not hold: a bug in the store, never its caller's fault."""


def contradictions(
    segments: Mapping[int, Segment],
    shared: Mapping[bytes, Row],
    holdings: Mapping[str, Holdings],
    block_bytes: int,
    used_bytes: int,
) -> list[str]:
    """Return the rules that the index breaks, in words; none where it is sound.

    Args:
        segments: by their ids.
        shared: the row that everybody reads, by block hash.
        holdings: what is kept for each request, by its id.
        block_bytes: bytes of a block.
        used_bytes: what the store believes its segments take.
    """
    indexes = {"everybody": shared, **{repr(name): held.own for name, held in holdings.items()}}
    uses = dict.fromkeys(segments, 0)
    broken = []
    for name, rows in indexes.items():
        for block_hash, row in rows.items():
            segment = segments.get(row.segment_id)
            if segment is None or segment.is_saving or segment.hashes[row.row] != block_hash:
                broken.append(f"{name} reads block {block_hash.hex()} where it is not: {row}")
            else:
                uses[row.segment_id] += 1
    if used_bytes != sum(segment.num_bytes for segment in segments.values()):
        broken.append(f"the segments do not add up to {used_bytes} bytes")
    for segment in segments.values():
        broken += _of_segment(segment, uses[segment.segment_id], block_bytes)
    return broken + _of_holders(segments, holdings)


def _of_segment(segment: Segment, uses: int, block_bytes: int) -> list[str]:
    rules = {
        "its bytes are its blocks'": segment.num_bytes == len(segment.hashes) * block_bytes > 0,
        "its uses are counted": segment.num_uses == uses,
        "somebody can read it, now or later": not segment.is_dead,
        "it is not promised while it is being saved": not (segment.is_saving and segment.pinned_by),
    }
    return [
        f"segment {segment.segment_id}: not true that {rule}"
        for rule, holds in rules.items()
        if not holds
    ]


def _of_holders(segments: Mapping[int, Segment], holdings: Mapping[str, Holdings]) -> list[str]:
    """Check that segments and requests agree on who pinned, owns and saved what."""
    by_segment = {
        *((name, s.segment_id, "pinned") for s in segments.values() for name in s.pinned_by),
        *((name, s.segment_id, "owned") for s in segments.values() for name in s.owned_by),
        *((s.saver, s.segment_id, "saved") for s in segments.values() if s.saver is not None),
    }
    by_request = {
        *((name, segment_id, "pinned") for name, h in holdings.items() for segment_id in h.pinned),
        *((name, segment_id, "owned") for name, h in holdings.items() for segment_id in h.owned),
        *((name, segment_id, "saved") for name, h in holdings.items() for segment_id in h.saved),
    }
    broken = [
        f"{name!r} and segment {segment_id} disagree on whether it is {what}"
        for name, segment_id, what in sorted(by_segment ^ by_request)
    ]
    for name, held in holdings.items():
        if held.is_empty:
            broken.append(f"nothing is kept for {name!r}, and still it is known")
        if not {row.segment_id for row in held.own.values()} <= held.saved:
            broken.append(f"{name!r} calls blocks its own that it did not save")
    return broken
