"""Random use of the offload store's index beside a model that is simple because it may be slow.

The model counts everything anew each time: no reference counts, no running sums. It knows who
computed each stored row, so it sees when a request is given bytes that it may not read, bytes of
another block, or bytes that are no longer there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload_store.records import LookupResult
from offload_store.store import OffloadStore

BLOCK_SIZE, BLOCK_BYTES, ROWS, CAPACITY = 4, 10, 2, 11
CHAINS = [
    [prefix.encode() for prefix in ("a", "ab", "abc", "abcd", "abcde", "abcdef")],
    [prefix.encode() for prefix in ("a", "ab", "abx", "abxy", "abxyz")],
    [prefix.encode() for prefix in ("q", "qr", "qrs", "qrst")],
]
REQUESTS = ["one", "two", "three"]

requests = st.sampled_from(REQUESTS)
chains = st.sampled_from(CHAINS).flatmap(
    lambda chain: st.integers(1, len(chain)).map(lambda length: chain[:length])
)
limits = st.integers(0, 26)
nodes = st.sampled_from(["near", "far"])
rarely = st.sampled_from([False, False, False, True])


@dataclass
class Segment:
    hashes: list[bytes]
    author: tuple[str, int]
    """The request, and how many requests of that name were forgotten before it."""
    replace: bool
    node: str
    is_saving: bool = True
    owners: set[str] = field(default_factory=set)


class Model:
    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.least_recently_used: list[int] = []
        self.shared: dict[bytes, int] = {}
        self.own: dict[tuple[tuple[str, int], bytes], int] = {}
        self.promises: dict[str, list[int]] = {}
        self.num_forgotten = dict.fromkeys(REQUESTS, 0)
        self.left: set[str] = set()

    def author(self, request: str) -> tuple[str, int]:
        return (request, self.num_forgotten[request])

    def is_forgotten(self, author: tuple[str, int]) -> bool:
        return author != self.author(author[0])

    @property
    def used_blocks(self) -> int:
        return sum(len(segment.hashes) for segment in self.segments.values())

    def pins(self, segment_id: int) -> set[str]:
        return {name for name, promise in self.promises.items() if segment_id in promise}

    def use(self, segment_ids: list[int]) -> None:
        for segment_id in reversed(segment_ids):
            self.least_recently_used.remove(segment_id)
            self.least_recently_used.append(segment_id)

    def present(self, author: tuple[str, int], block_hash: bytes, replace: bool) -> int | None:
        if self.is_forgotten(author):
            return self.shared.get(block_hash)
        own = self.own.get((author, block_hash))
        return own if own is not None or replace else self.shared.get(block_hash)

    def victims(self, num_blocks: int, spared: set[int | None]) -> list[int]:
        victims: list[int] = []
        free = CAPACITY - self.used_blocks
        for segment_id in self.least_recently_used:
            segment = self.segments[segment_id]
            kept = segment.is_saving or segment.owners or self.pins(segment_id)
            if free < num_blocks and not kept and segment_id not in spared:
                victims.append(segment_id)
                free += len(segment.hashes)
        return victims

    def drop(self, segment_id: int) -> None:
        del self.segments[segment_id]
        self.least_recently_used.remove(segment_id)
        self.shared = {key: at for key, at in self.shared.items() if at != segment_id}
        self.own = {key: at for key, at in self.own.items() if at != segment_id}

    def dead(self) -> set[int]:
        read = {*self.shared.values(), *self.own.values()}
        return {
            segment_id
            for segment_id, segment in self.segments.items()
            if not (segment.is_saving or self.pins(segment_id))
            and (segment_id not in read or (segment.node in self.left and not segment.owners))
        }

    def arrive(self, segment_id: int) -> None:
        segment = self.segments[segment_id]
        segment.is_saving = False
        for block_hash in segment.hashes:
            present = self.present(segment.author, block_hash, segment.replace)
            if present is not None:
                self.segments[present].owners |= segment.owners
                continue
            replaced = self.shared.get(block_hash)
            self.shared[block_hash] = segment_id
            if not self.is_forgotten(segment.author):
                self.own[segment.author, block_hash] = segment_id
            if replaced is not None:
                segment.owners |= {
                    owner
                    for owner in self.segments[replaced].owners
                    if (self.author(owner), block_hash) not in self.own
                }

    def forget(self, request: str) -> None:
        author = self.author(request)
        self.num_forgotten[request] += 1
        for segment in self.segments.values():
            segment.owners.discard(request)
        for (whose, block_hash), segment_id in list(self.own.items()):
            if whose == author:
                del self.own[whose, block_hash]
                self.shared.setdefault(block_hash, segment_id)


class StoreBesideModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.dropped: list[int] = []
        self.store = OffloadStore(
            CAPACITY * BLOCK_BYTES,
            BLOCK_BYTES,
            BLOCK_SIZE,
            segment_bytes=ROWS * BLOCK_BYTES,
            on_drop=self.dropped.append,
        )

    def expect_drops(self, expected: list[int] | set[int]) -> None:
        assert sorted(self.dropped) == sorted(expected)
        self.dropped.clear()
        for segment_id in list(expected):
            self.model.drop(segment_id)

    @rule(request=requests, chain=chains, owned=st.booleans(), replace=st.booleans(), node=nodes)
    def start_save(self, request, chain, owned, replace, node):
        self.begin_save(request, chain, owned, replace, node)

    def begin_save(self, request, chain, owned, replace, node="near"):
        model = self.model
        model.left.discard(node)
        at = [model.present(model.author(request), block, replace) for block in chain]
        missing = [index for index, segment_id in enumerate(at) if segment_id is None]
        victims = model.victims(len(missing), set(at))
        plan = self.store.prepare_save(request, chain, owned=owned, replace=replace, node_id=node)
        self.expect_drops(victims)
        fits = missing[: CAPACITY - model.used_blocks]
        assert plan.num_blocks == (len(chain) if fits == missing else missing[len(fits)])
        assert [index for _, indices in plan.segments for index in indices] == fits
        assert all(1 <= len(indices) <= ROWS for _, indices in plan.segments)
        for segment_id, indices in plan.segments:
            hashes = [chain[index] for index in indices]
            model.segments[segment_id] = Segment(hashes, model.author(request), replace, node)
            model.least_recently_used.append(segment_id)
            for index in indices:
                at[index] = segment_id
        model.use([segment_id for segment_id in at[: plan.num_blocks] if segment_id is not None])
        if owned:
            for segment_id in at[: plan.num_blocks]:
                model.segments[segment_id].owners.add(request)
        return plan

    @rule(request=requests, chain=chains, owned=rarely, replace=rarely, node=nodes)
    def save(self, request, chain, owned, replace, node):
        plan = self.begin_save(request, chain, owned, replace, node)
        for segment_id, _ in plan.segments:
            self.end(segment_id, ok=True)
        assert self.store.num_saved_blocks(plan) == plan.num_blocks

    @rule(one=requests, other=requests, chain=chains, owned=st.booleans(), replace=rarely)
    def save_at_once(self, one, other, chain, owned, replace):
        plans = [
            self.begin_save(one, chain, owned, replace),
            self.begin_save(other, chain, False, False),
        ]
        for plan in reversed(plans):
            for segment_id, _ in plan.segments:
                self.end(segment_id, ok=True)

    @precondition(lambda self: any(s.is_saving for s in self.model.segments.values()))
    @rule(data=st.data(), ok=st.booleans())
    def end_save(self, data, ok):
        saving = sorted(key for key, value in self.model.segments.items() if value.is_saving)
        self.end(data.draw(st.sampled_from(saving)), ok)

    def end(self, segment_id, ok):
        self.store.complete_save(segment_id, ok=ok)
        if ok:
            self.model.arrive(segment_id)
            self.expect_drops(self.model.dead())
        else:
            self.expect_drops([segment_id])

    @rule(request=requests, chain=chains, readable=limits, own=limits, skip=rarely)
    def lookup(self, request, chain, readable, own, skip):
        model = self.model
        model.promises.pop(request, None)
        dead = model.dead()
        result = self.store.lookup(
            request,
            chain,
            num_readable_tokens=readable,
            num_own_tokens=own,
            skip_reading_prefix_cache=skip,
        )
        self.expect_drops(dead)
        expected: list[int] = []
        for index, block in enumerate(chain):
            end = (index + 1) * BLOCK_SIZE
            found = model.own.get((model.author(request), block)) if end <= own else None
            if found is None and end <= readable and not skip:
                found = model.shared.get(block)
            if found is None:
                break
            expected.append(found)
        assert result == LookupResult(len(expected) * BLOCK_SIZE, bool(expected))
        rows = self.store.segments_of(request, chain)
        assert [segment_id for segment_id, _ in rows] == expected
        for index, (segment_id, row) in enumerate(rows):
            segment = model.segments[segment_id]
            assert not segment.is_saving
            assert segment.hashes[row] == chain[index]
            if skip or readable < (index + 1) * BLOCK_SIZE:
                assert segment.author == model.author(request)
        if expected:
            model.promises[request] = expected
            model.use(expected)

    @rule(request=requests, forget=rarely)
    def release(self, request, forget):
        self.store.release(request, forget=forget)
        self.model.promises.pop(request, None)
        if forget:
            self.model.forget(request)
        self.expect_drops(self.model.dead())

    @rule(forgotten=st.sampled_from([None, None, None, *REQUESTS]))
    def retain(self, forgotten):
        self.store.retain(name for name in REQUESTS if name != forgotten)
        self.model.promises.clear()
        if forgotten is not None:
            self.model.forget(forgotten)
        self.expect_drops(self.model.dead())

    @rule(node=nodes, really=rarely)
    def leave(self, node, really):
        if not really:
            return
        self.model.left.add(node)
        dropped = self.model.dead()
        self.store.leave(node)
        self.expect_drops(dropped)

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data(), really=rarely)
    def lose(self, data, really):
        if not really:
            return
        segment_id = data.draw(st.sampled_from(sorted(self.model.segments)))
        self.store.drop_segment(segment_id)
        self.expect_drops([segment_id])
        for request, promise in self.model.promises.items():
            self.model.promises[request] = [at for at in promise if at != segment_id]

    @invariant()
    def agrees(self):
        self.store.validate()
        stats, segments = self.store.stats, self.model.segments
        assert stats.used_bytes == self.model.used_blocks * BLOCK_BYTES <= CAPACITY * BLOCK_BYTES
        assert stats.num_segments == len(segments)
        assert stats.num_blocks == len(self.model.shared)
        assert stats.num_owned_segments == sum(bool(s.owners) for s in segments.values())
        assert stats.num_pins == sum(len(self.model.pins(segment_id)) for segment_id in segments)
        assert not self.model.dead()

    def teardown(self):
        for request in REQUESTS:
            self.store.release(request, forget=True)
        for segment_id, segment in self.model.segments.items():
            if segment.is_saving:
                self.store.complete_save(segment_id, ok=segment_id % 2 == 0)
        self.store.validate()
        stats = self.store.stats
        assert (stats.num_pins, stats.num_owned_segments, stats.num_requests) == (0, 0, 0)
        assert stats.used_bytes <= (stats.num_blocks + stats.num_segments) * BLOCK_BYTES


StoreBesideModel.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, print_blob=True
)
TestStoreBesideModel = StoreBesideModel.TestCase
