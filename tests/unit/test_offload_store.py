"""The offload store's index: what it promises, to whom, and what it gives up for room.

Blocks are 16 tokens and 10 bytes, segments 3 blocks, unless a test says otherwise.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest

from offload_store.consistency import InconsistentStore
from offload_store.keys import HashChain
from offload_store.records import LookupResult, SavePlan
from offload_store.store import OffloadStore

BLOCK_SIZE = 16
BLOCK_BYTES = 10
MISS = LookupResult(0, False)


class Store(OffloadStore):
    """A store with the test's short words; it checks itself after each of them."""

    def __init__(self, num_blocks: int, *, blocks_per_segment: int = 3) -> None:
        self.dropped: list[int] = []
        super().__init__(
            num_blocks * BLOCK_BYTES,
            BLOCK_BYTES,
            BLOCK_SIZE,
            segment_bytes=blocks_per_segment * BLOCK_BYTES + BLOCK_BYTES - 1,
            on_drop=self.dropped.append,
        )

    def begin(
        self, request_id: str, hashes: Sequence[bytes], owned=False, replace=False, node_id=""
    ):
        plan = self.prepare_save(request_id, hashes, owned=owned, replace=replace, node_id=node_id)
        self.validate()
        return plan

    def end(self, plan: SavePlan, failed: Sequence[int] = ()) -> int:
        """End all segments; `failed` are those to fail, by their place in the plan."""
        for place, (segment_id, _) in enumerate(plan.segments):
            self.complete_save(segment_id, ok=place not in failed)
            self.validate()
        return self.num_saved_blocks(plan, {plan.segments[place].segment_id for place in failed})

    def save(self, request_id: str, hashes: Sequence[bytes], **how) -> int:
        return self.end(self.begin(request_id, hashes, **how))

    def look(self, request_id: str, hashes: Sequence[bytes], readable=10**6, own=0, skip=False):
        result = self.lookup(
            request_id,
            hashes,
            num_readable_tokens=readable,
            num_own_tokens=own,
            skip_reading_prefix_cache=skip,
        )
        self.validate()
        return result

    def hit_blocks(self, request_id: str, hashes: Sequence[bytes], **limits) -> int:
        """Look up and let go at once: how many blocks could be read."""
        result = self.look(request_id, hashes, **limits)
        assert result.is_load_needed == (result.num_hit_tokens > 0)
        assert len(self.segments_of(request_id, hashes)) * BLOCK_SIZE == result.num_hit_tokens
        self.let_go(request_id)
        return result.num_hit_tokens // BLOCK_SIZE

    def let_go(self, request_id: str, forget: bool = False) -> None:
        self.release(request_id, forget=forget)
        self.validate()


def chain(name: str, num_blocks: int) -> list[bytes]:
    """Stand-in hashes of a request's blocks, different for each name."""
    return [f"{name}{index}".encode().ljust(16, b".") for index in range(num_blocks)]


A, B, C = chain("a", 12), chain("b", 12), chain("c", 12)


# ------------------------------------------------------------------------ what may be read


def test_a_saved_prefix_is_found_block_by_block():
    store = Store(20)
    assert store.look("x", A) == MISS
    assert store.save("x", A[:7]) == 7
    assert store.look("y", A) == LookupResult(7 * BLOCK_SIZE, True)
    assert store.look("y", A[:2] + B[:1] + A[3:]) == LookupResult(2 * BLOCK_SIZE, True)
    assert store.look("y", B) == MISS
    assert store.look("y", []) == MISS


@pytest.mark.parametrize(
    ("readable", "num_blocks"),
    [(0, 0), (15, 0), (16, 1), (17, 1), (63, 3), (64, 4), (65, 4), (-5, 0)],
)
def test_a_shared_block_is_supplied_only_where_it_ends_within_the_limit(readable, num_blocks):
    store = Store(20)
    store.save("x", A[:4])
    assert store.hit_blocks("y", A, readable=readable) == num_blocks


def test_a_request_that_may_read_nothing_gets_nothing_however_much_is_there():
    """The store could serve 25, 50, 100 % of the prompt, or all of it but one token."""
    prompt = A[:8]
    for num_stored in (2, 4, 7, 8):
        store = Store(20)
        store.save("other", prompt[:num_stored])
        assert store.look("rows", prompt, readable=0, own=0) == MISS
        assert store.look("rows", prompt, readable=10**6, own=0, skip=True) == MISS
        assert store.look("free", prompt).num_hit_tokens == num_stored * BLOCK_SIZE


def test_bypass_after_a_real_hit_reads_nothing_and_leaves_no_pin():
    """A request hits, is retried under the same id with bypass: (0, False) and ref counts of 0."""
    store = Store(4)
    store.save("x", A[:4])
    assert store.look("r", A[:4]) == LookupResult(64, True)
    assert store.stats.num_pins == 2
    assert store.look("r", A[:4], skip=True) == (0, False)
    assert store.stats.num_pins == 0
    assert store.segments_of("r", A[:4]) == []
    assert store.save("y", B[:4]) == 4, "what was pinned can be evicted again"


def test_a_new_lookup_takes_the_place_of_the_earlier_promise():
    store = Store(20)
    store.save("x", A[:6])
    store.save("x", B[:3])
    store.look("r", A)
    store.look("r", B)
    assert store.stats.num_pins == 1
    assert store.segments_of("r", A[:1]) == []
    assert len(store.segments_of("r", B[:3])) == 3
    assert store.look("r", C) == MISS
    assert store.stats.num_pins == 0


def test_own_progress_is_readable_up_to_its_own_limit_and_others_bytes_are_not():
    """A prompt-logprobs request resumes: shared limit 0, own limit where it was evicted."""
    store = Store(40)
    store.save("other", A[:2])
    store.save("rows", A[:8], owned=True, replace=True)
    store.save("other", A[:12])
    assert store.hit_blocks("rows", A, readable=0, own=8 * 16) == 8
    assert store.hit_blocks("rows", A, readable=0, own=8 * 16 - 1) == 7
    assert store.hit_blocks("rows", A, readable=0, own=12 * 16, skip=True) == 8
    assert store.hit_blocks("third", A, readable=0, own=12 * 16) == 0


def test_others_bytes_in_the_middle_end_what_a_request_may_read_of_its_own():
    store = Store(40)
    store.save("other", A[2:4])
    store.save("rows", A[:6], owned=True)
    assert store.hit_blocks("rows", A, readable=0, own=10**6) == 2
    assert store.hit_blocks("rows", A, readable=4 * 16, own=10**6) == 6


def test_two_requests_with_equal_blocks_each_read_their_own_copy_back():
    """Both bypass, both are evicted in turn: replacing the first one's bytes must not lose them."""
    store = Store(40)
    store.save("one", A[:6], owned=True, replace=True)
    store.save("two", A[:6], owned=True, replace=True)
    assert store.hit_blocks("one", A, readable=0, own=96) == 6
    assert store.hit_blocks("two", A, readable=0, own=96) == 6
    store.look("one", A, readable=0, own=96)
    one = store.segments_of("one", A[:6])
    store.look("two", A, readable=0, own=96)
    assert not set(one) & set(store.segments_of("two", A[:6]))
    store.let_go("one", forget=True)
    store.let_go("two", forget=True)
    assert store.stats.used_bytes == 6 * BLOCK_BYTES, "one shared copy is left"


def test_no_hit_across_salts():
    def tokens_of(start: int, end: int) -> np.ndarray:
        return np.arange(start, end, dtype=np.int32)

    salts = (None, "", "a", "model", "a|model")
    chains = [HashChain("model", salt, BLOCK_SIZE).hashes(64, tokens_of) for salt in salts]
    for saved in range(len(salts)):
        store = Store(20)
        store.save("x", chains[saved])
        hits = [store.hit_blocks("y", hashes) for hashes in chains]
        assert hits == [4 if salt == saved else 0 for salt in range(len(salts))]


# --------------------------------------------------------------------------------- promises


def test_a_promise_is_kept_while_others_need_the_room():
    """The lookup promised 768 tokens; the load must find all of them, whoever saves meanwhile."""
    store = Store(48)
    hashes = chain("long", 48)
    store.save("x", hashes)
    assert store.look("r", hashes).num_hit_tokens == 768
    assert store.save("y", A) == 0
    assert len(store.segments_of("r", hashes)) == 48
    store.let_go("r")
    assert store.save("y", A) == 12


def test_an_entry_replaced_while_a_load_is_under_way_stays_until_it_ends():
    store = Store(40)
    store.save("x", A[:3])
    store.look("r", A[:3])
    promised = store.segments_of("r", A[:3])
    store.let_go("x", forget=True)
    store.save("y", A[:3], replace=True)
    assert store.segments_of("r", A[:3]) == promised
    assert store.stats.used_bytes == 6 * BLOCK_BYTES
    store.look("z", A[:3])
    assert not set(store.segments_of("z", A[:3])) & set(promised)
    store.let_go("r")
    assert store.stats.used_bytes == 3 * BLOCK_BYTES
    assert store.dropped == [promised[0].segment_id]


def test_lost_data_is_a_miss_from_then_on():
    store = Store(40)
    store.save("x", A[:9], owned=True)
    store.look("r", A)
    lost = store.segments_of("r", A[:9])[3].segment_id
    store.drop_segment(lost)
    store.validate()
    assert len(store.segments_of("r", A[:9])) == 3
    assert store.hit_blocks("s", A) == 3
    assert store.stats.num_lost_blocks == 3
    assert store.stats.used_bytes == 6 * BLOCK_BYTES
    store.drop_segment(lost)
    store.drop_segment(10**9)
    assert store.save("x", A[:9], owned=True) == 9
    assert store.hit_blocks("s", A) == 9


def test_pins_of_several_requests_count_each():
    store = Store(3)
    store.save("x", A[:3])
    store.look("r", A[:3])
    store.look("s", A[:3])
    assert store.stats.num_pins == 2
    store.let_go("r")
    assert store.save("y", B[:3]) == 0
    store.let_go("s")
    assert store.save("y", B[:3]) == 3


# ----------------------------------------------------------------------------------- saving


def test_a_block_is_invisible_until_its_bytes_are_there():
    store = Store(20)
    plan = store.begin("x", A[:6], owned=True)
    assert store.look("y", A) == MISS
    assert store.look("x", A, readable=0, own=10**6) == MISS
    store.complete_save(plan.segments[0].segment_id, ok=True)
    assert store.hit_blocks("y", A) == 3
    store.complete_save(plan.segments[1].segment_id, ok=True)
    assert store.hit_blocks("y", A) == 6


def test_a_plan_covers_each_missing_block_once_in_segments_of_bounded_size():
    store = Store(40)
    store.save("x", A[2:4])
    plan = store.begin("y", A[:10])
    assert [indices for _, indices in plan.segments] == [[0, 1, 4], [5, 6, 7], [8, 9]]
    assert plan.num_blocks == 10
    assert store.end(plan) == 10


def test_a_block_larger_than_a_segment_gets_one_of_its_own():
    store = OffloadStore(100, 50, 16, segment_bytes=1)
    plan = store.prepare_save("x", A[:2], owned=False, replace=False)
    assert [indices for _, indices in plan.segments] == [[0], [1]]


def test_room_is_taken_when_the_save_begins():
    store = Store(5)
    first = store.begin("x", A[:3])
    assert store.stats.used_bytes == 3 * BLOCK_BYTES
    second = store.begin("y", B[:3])
    assert second.num_blocks == 2
    assert store.end(first) == 3
    assert store.end(second) == 2


def test_a_save_that_fails_midway_gives_its_room_back():
    store = Store(9)
    plan = store.begin("x", A[:9], owned=True)
    assert store.end(plan, failed=[1]) == 3
    assert store.stats.used_bytes == 6 * BLOCK_BYTES
    assert store.hit_blocks("y", A) == 3
    assert store.save("x", A[:9], owned=True) == 9
    assert store.stats.num_segments == 3


def test_a_save_that_fails_wholly_leaves_no_trace():
    store = Store(9)
    plan = store.begin("x", A[:9], owned=True, replace=True)
    assert store.end(plan, failed=[0, 1, 2]) == 0
    stats = store.stats
    assert (stats.used_bytes, stats.num_segments, stats.num_requests) == (0, 0, 0)
    assert sorted(store.dropped) == [segment_id for segment_id, _ in plan.segments]


def test_a_failed_replacement_leaves_the_old_bytes():
    store = Store(40)
    store.save("x", A[:3])
    plan = store.begin("y", A[:3], replace=True, owned=True)
    assert store.end(plan, failed=[0]) == 0
    assert store.hit_blocks("z", A) == 3


def test_a_save_cannot_end_twice():
    store = Store(9)
    plan = store.begin("x", A[:3])
    store.end(plan)
    with pytest.raises(ValueError, match="ended already"):
        store.complete_save(plan.segments[0].segment_id, ok=True)
    store.drop_segment(plan.segments[0].segment_id)
    store.complete_save(plan.segments[0].segment_id, ok=False)


def test_a_segment_lost_while_it_is_saved_never_becomes_visible():
    store = Store(9)
    plan = store.begin("x", A[:3], owned=True)
    store.drop_segment(plan.segments[0].segment_id)
    assert store.end(plan) == 0
    assert store.look("y", A) == MISS


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("first_done", [0, 1])
def test_two_requests_that_save_the_same_blocks_at_once_leak_nothing(replace, first_done):
    store = Store(12)
    plans = [store.begin(name, A[:6], replace=replace) for name in ("one", "two")]
    assert store.end(plans[first_done]) == 6
    assert store.end(plans[1 - first_done]) == 6
    assert store.hit_blocks("y", A) == 6
    store.let_go("one", forget=True)
    store.let_go("two", forget=True)
    assert store.stats.used_bytes == 6 * BLOCK_BYTES
    assert store.hit_blocks("y", A) == 6


def test_the_save_that_comes_second_owns_the_bytes_of_the_first():
    store = Store(12)
    one, two = store.begin("one", A[:6]), store.begin("two", A[:6], owned=True)
    store.end(one)
    store.end(two)
    assert store.stats.used_bytes == 6 * BLOCK_BYTES
    store.let_go("one", forget=True)
    store.save("x", B)
    assert store.hit_blocks("two", A) == 6, "two will come back for them"


def test_blocks_saved_already_are_copied_again_only_to_replace_others_bytes():
    store = Store(40)
    store.save("x", A[:4])
    assert store.begin("x", A[:4], replace=True).segments == []
    assert store.begin("y", A[:4]).segments == []
    plan = store.begin("y", A[:4], replace=True)
    assert [indices for _, indices in plan.segments] == [[0, 1, 2], [3]]


def test_when_room_is_short_only_leading_blocks_are_saved():
    store = Store(10)
    store.save("x", A[:4], owned=True)
    plan = store.begin("y", B[:9])
    assert plan.num_blocks == 6
    assert store.end(plan) == 6
    assert store.hit_blocks("z", B) == 6
    assert store.save("y", C[:2] + A[:2] + C[4:12], owned=True) == 8


def test_a_store_without_room_saves_nothing_and_does_no_harm():
    store = Store(0)
    assert store.save("x", A, owned=True) == 0
    assert store.look("x", A, own=10**6) == MISS
    assert store.stats.num_requests == 0


# --------------------------------------------------------------------------------- eviction


@pytest.mark.parametrize("is_used_again", [False, True])
@pytest.mark.parametrize("num_others", [1, 4, 8])
def test_the_head_of_a_chain_outlives_its_tail(num_others, is_used_again):
    store = Store(9, blocks_per_segment=1)
    store.save("x", A[:9])
    if is_used_again:
        store.hit_blocks("y", A)
    for other in C[:num_others]:
        store.save("y", [other])
    assert store.hit_blocks("z", A) == 9 - num_others


def test_the_least_recently_used_chain_goes_first():
    store = Store(9)
    for hashes in (A, B, C):
        store.save("x", hashes[:3])
    store.hit_blocks("y", A)
    store.save("x", chain("d", 3))
    assert [store.hit_blocks("y", hashes) for hashes in (A, B, C)] == [3, 0, 3]


def test_saving_what_is_there_already_counts_as_a_use():
    store = Store(6)
    store.save("x", A[:3])
    store.save("x", B[:3])
    store.save("y", A[:3])
    store.save("x", C[:3])
    assert [store.hit_blocks("y", hashes) for hashes in (A, B, C)] == [3, 0, 3]


def test_a_save_does_not_evict_its_own_head_to_make_room_for_its_tail():
    store = Store(6)
    store.save("x", A[:3])
    assert store.save("y", A[:12]) == 6


def test_room_comes_back_by_whole_segments():
    store = Store(9)
    store.save("x", A[:9])
    store.save("y", B[:1])
    stats = store.stats
    assert stats.used_bytes == 7 * BLOCK_BYTES, "three blocks went for the one that needed room"
    assert stats.num_evicted_blocks == 3
    assert store.hit_blocks("z", A) == 6


def test_a_segment_that_is_replaced_in_part_keeps_all_its_room():
    store = Store(40)
    store.save("x", A[:3])
    store.let_go("x", forget=True)
    store.save("y", A[:2], replace=True)
    assert store.stats.used_bytes == 5 * BLOCK_BYTES
    assert store.hit_blocks("z", A) == 3
    store.save("y", A[:3], replace=True)
    assert store.stats.used_bytes == 3 * BLOCK_BYTES


def test_what_a_request_will_come_back_for_is_not_evicted():
    store = Store(12)
    store.save("x", A[:6], owned=True)
    assert store.save("y", B[:12]) == 6
    assert store.hit_blocks("x", A, readable=0, own=96) == 6
    store.let_go("x", forget=True)
    assert store.save("y", C[:12]) == 12
    assert store.hit_blocks("x", A) == 0


def test_blocks_of_others_that_a_save_found_are_kept_for_it_too():
    store = Store(12)
    store.save("other", A[:3])
    store.save("x", A[:6], owned=True)
    store.let_go("other", forget=True)
    store.save("y", B[:12])
    assert store.hit_blocks("x", A) == 6


def test_who_counts_on_a_block_that_is_replaced_counts_on_the_new_one():
    store = Store(12)
    store.save("other", A[:3])
    store.save("x", A[:3], owned=True)
    store.let_go("other", forget=True)
    store.save("third", A[:3], replace=True)
    store.let_go("third", forget=True)
    store.save("y", B[:12])
    assert store.hit_blocks("x", A) == 3


# -------------------------------------------------------------------------------- letting go


def test_release_and_forget_leave_nothing_by_name_and_may_be_repeated():
    store = Store(40)
    store.save("x", A[:6], owned=True)
    store.look("x", A, own=96)
    store.let_go("x")
    assert (store.stats.num_pins, store.stats.num_owned_segments) == (0, 2)
    store.let_go("x")
    store.let_go("x", forget=True)
    assert (store.stats.num_owned_segments, store.stats.num_requests) == (0, 0)
    store.let_go("x", forget=True)
    store.let_go("never seen", forget=True)
    assert store.hit_blocks("y", A) == 6, "what it saved is ordinary cache now"
    assert store.hit_blocks("x", A, readable=0, own=96) == 0


@pytest.mark.parametrize("ok", [True, False])
def test_a_save_that_ends_after_forget_brings_no_ownership_back(ok):
    """The request is cancelled while its blocks are on their way."""
    store = Store(12)
    plan = store.begin("x", A[:6], owned=True, replace=True)
    store.let_go("x", forget=True)
    store.end(plan, failed=[] if ok else [0, 1])
    assert (store.stats.num_owned_segments, store.stats.num_requests) == (0, 0)
    assert store.hit_blocks("y", A) == (6 if ok else 0)
    assert store.save("y", B[:12]) == 12


def test_an_id_that_is_used_again_does_not_inherit_a_save_of_its_first_owner():
    store = Store(40)
    plan = store.begin("x", A[:3], owned=True)
    store.let_go("x", forget=True)
    store.save("x", B[:3], owned=True)
    store.end(plan)
    assert store.hit_blocks("x", A, readable=0, own=48) == 0
    assert store.hit_blocks("x", B, readable=0, own=48) == 3


def test_a_new_scheduler_keeps_what_its_requests_own_and_no_promise():
    """The old one died with requests that the new one knows, and with others that it does not."""
    store = Store(20)
    a, b = chain("a", 4), chain("b", 4)
    store.save("known", a, owned=True, replace=True)
    store.save("unknown", b, owned=True, replace=True)
    unended = store.begin("unknown", chain("c", 4), owned=True)
    for name in ("known", "unknown", "reader"):
        assert store.look(name, a).num_hit_tokens == 4 * BLOCK_SIZE
    store.retain(["known", "waiting"])
    store.validate()
    assert (store.stats.num_pins, store.stats.num_owned_segments) == (0, 2)
    assert store.end(unended) == 4
    assert store.stats.num_requests == 1
    assert store.hit_blocks("known", a, readable=0, own=10**6) == 4
    assert store.hit_blocks("unknown", b, readable=0, own=10**6) == 0
    assert store.hit_blocks("unknown", b) == 4, "now it is everybody's, and may be evicted"
    store.retain([])
    store.validate()
    assert (store.stats.num_owned_segments, store.stats.num_requests) == (0, 0)


def test_a_node_that_was_left_keeps_only_what_somebody_counts_on():
    store = Store(40)
    a, b, c, d = (chain(name, 3) for name in "abcd")
    store.save("cached", a, node_id="left")
    store.save("owner", b, owned=True, node_id="left")
    store.save("second", b, owned=True, node_id="stays")
    store.save("elsewhere", c, node_id="stays")
    unended = store.begin("late", d, node_id="left")
    store.look("reader", a[:1])
    store.leave("left")
    store.validate()
    assert len(store.dropped) == 0, "one is promised, one owned, one on its way, one elsewhere"
    store.let_go("reader")
    assert store.hit_blocks("reader", a) == 0
    assert store.end(unended) == 0, "nobody would come back for it"
    store.let_go("owner", forget=True)
    assert store.hit_blocks("reader", b) == 3, "another one has found it there and counts on it"
    store.let_go("second", forget=True)
    assert store.hit_blocks("reader", b) == 0
    assert store.hit_blocks("reader", c) == 3
    assert store.stats.num_evicted_blocks == 9
    store.let_go("reader", forget=True)
    assert store.stats.num_segments == 1


def test_a_node_where_somebody_works_again_holds_cache_again():
    store = Store(40)
    store.leave("node")
    store.save("x", A[:3], node_id="node")
    assert store.hit_blocks("y", A) == 3


def test_a_forgotten_copy_serves_everybody_where_the_shared_one_is_gone():
    store = Store(40)
    store.save("one", A[:3], owned=True)
    store.save("two", A[:3], owned=True, replace=True)
    store.look("y", A)
    store.drop_segment(store.segments_of("y", A[:1])[0].segment_id)
    assert store.hit_blocks("y", A) == 0
    store.let_go("one", forget=True)
    assert store.hit_blocks("y", A) == 3


def test_two_thousand_requests_leave_the_store_as_they_found_it():
    store = OffloadStore(200, BLOCK_BYTES, BLOCK_SIZE, segment_bytes=30)
    for number in range(2000):
        name, hashes = f"r{number}", chain(f"{number}-", 5)
        plan = store.prepare_save(name, hashes, owned=True, replace=bool(number % 2))
        if number % 3 == 0:
            store.release(name, forget=True)
        for segment_id, _ in plan.segments:
            store.complete_save(segment_id, ok=number % 5 != 0)
        store.lookup(
            name, hashes, num_readable_tokens=80, num_own_tokens=80, skip_reading_prefix_cache=False
        )
        store.release(name, forget=True)
    store.validate()
    stats = store.stats
    assert (stats.num_pins, stats.num_owned_segments, stats.num_requests) == (0, 0, 0)
    assert stats.used_bytes <= 200


# --------------------------------------------------------------------------------- watching


def test_the_hit_rate_counts_what_others_could_supply_and_no_bypass():
    store = Store(40)
    store.save("x", A[:4], owned=True)
    store.hit_blocks("y", A[:6])
    store.hit_blocks("y", A[:6], skip=True)
    store.hit_blocks("y", A[:6], readable=15)
    store.hit_blocks("x", A[:6], own=32, readable=48)
    stats = store.stats
    assert (stats.num_queries, stats.num_bypasses) == (2, 2)
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == ((6 + 3) * 16, (4 + 1) * 16)
    assert stats.num_own_tokens == 2 * 16


def test_stats_count_bytes_segments_and_blocks():
    store = Store(40)
    store.begin("w", C[:2])
    store.save("x", A[:4])
    stats = store.stats
    assert (stats.capacity_bytes, stats.used_bytes) == (400, 60)
    assert (stats.num_segments, stats.num_saving_segments) == (3, 1)
    assert (stats.num_blocks, stats.num_saved_blocks) == (4, 4)


def test_impossible_sizes_are_refused():
    for sizes in ((-1, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)):
        with pytest.raises(ValueError, match="not allowed"):
            OffloadStore(*sizes[:3], segment_bytes=sizes[3])


def test_validate_finds_what_does_not_add_up():
    def lose_bytes(store: Store) -> None:
        store._used_bytes -= 1

    def lose_a_pin(store: Store) -> None:
        store._holdings["r"].pinned.pop()

    def point_nowhere(store: Store) -> None:
        store._shared[C[0]] = store._shared[A[0]]

    for damage in (lose_bytes, lose_a_pin, point_nowhere):
        store = Store(40)
        store.save("x", A[:4], owned=True)
        store.look("r", A[:4])
        damage(store)
        with pytest.raises(InconsistentStore) as caught:
            store.validate()
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
