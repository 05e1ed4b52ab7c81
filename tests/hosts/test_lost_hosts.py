"""A request is in mid-prefill on a host that dies, falls silent or is to go, or its scheduler dies.

It ends with the bits of an undisturbed run. What its host had saved is on the head's host as well,
so that no more is computed again than what came after that.
"""

from __future__ import annotations

import time

import pytest

from tests.hosts.conftest import BLOCK_SIZE, SEGMENT_TOKENS, Stage, wait_for
from tests.hosts.ray_on_hosts import drain_node, has_ray, join

pytestmark = pytest.mark.slow

NUM_COMPUTED_TOKENS = 4 * SEGMENT_TOKENS - 24
"""Of the request in mid-prefill: three segments are saved by then, most of a fourth is computed."""
MOST_RECOMPUTED_TOKENS = 3 * SEGMENT_TOKENS
"""One segment that was not full yet, and what was computed while it was under way to the store:
steps of a tiny model are so short that on a busy machine this can be more than a segment."""
SHORT_CUT_S = 3.0
END_S = 120.0
DRAIN_S = 60


def assert_resumed_from_saved_blocks(stats: list[dict[str, int]]) -> None:
    """One request at least came back from the store, and none computed more than its last part."""
    lost = [each for each in stats if each["num_workers_lost"]]
    assert lost
    assert max(each["num_restored_blocks"] for each in lost) * BLOCK_SIZE >= 2 * SEGMENT_TOKENS
    assert all(each["num_recomputed_tokens"] <= MOST_RECOMPUTED_TOKENS for each in stats)


def test_a_host_that_loses_power_costs_no_more_than_was_not_saved(stage: Stage) -> None:
    before = stage.console.ask("look")["scheduler"]
    request_ids, worker_id = stage.begin("power", NUM_COMPUTED_TOKENS)
    stage.victim.power_off()
    assert_resumed_from_saved_blocks(stage.assert_same_bits(request_ids))

    alone = stage.console.ask("wait_until_idle", num_workers=1)
    assert alone["scheduler"]["num_loaded_blocks"] > before["num_loaded_blocks"]
    assert alone["scheduler"]["num_workers_lost"] == before["num_workers_lost"] + 1
    assert alone["scheduler"]["num_recomputed_rows"] == 0

    stage.victim.power_on()
    join(stage.head, [stage.victim])
    assert worker_id not in stage.assert_whole()["workers"]


def test_a_host_whose_link_is_cut_and_restored_takes_no_part_any_more(stage: Stage) -> None:
    """Its worker still runs, and hears nothing of having been replaced until the link is back."""
    before = stage.console.ask("look")["scheduler"]
    request_ids, worker_id = stage.begin("cut", NUM_COMPUTED_TOKENS)
    pid = stage.console.ask("look")["workers"][worker_id]["pid"]
    stage.victim.cut()
    assert_resumed_from_saved_blocks(stage.assert_same_bits(request_ids))
    alone = stage.console.ask("wait_until_idle", num_workers=1)
    wait_for(
        lambda: stage.victim.address not in stage.console.ask("nodes"), END_S, "the node is dead"
    )
    assert stage.victim.is_running(pid)

    stage.victim.restore()
    wait_for(lambda: not stage.victim.is_running(pid), END_S, "the old worker has ended")
    wait_for(lambda: not has_ray(stage.victim), END_S, "Ray on the host has ended")
    assert stage.console.ask("look")["workers"] == alone["workers"]

    join(stage.head, [stage.victim])
    after = stage.assert_whole()
    assert worker_id not in after["workers"]
    assert after["scheduler"]["num_workers_lost"] == before["num_workers_lost"] + 1
    stage.is_whole = False
    assert stage.console.run("after the cut") == stage.undisturbed
    stage.assert_whole()


def test_a_silence_of_seconds_costs_nothing(stage: Stage) -> None:
    before = stage.console.ask("look")
    request_ids, _ = stage.begin("short", NUM_COMPUTED_TOKENS)
    stage.victim.cut()
    time.sleep(SHORT_CUT_S)  # how long it lasts is what this is about
    stage.victim.restore()
    stats = stage.assert_same_bits(request_ids)
    assert not any(each["num_recomputed_tokens"] for each in stats)
    assert stage.assert_whole()["workers"] == before["workers"]


def test_a_scheduler_that_is_killed_goes_on_from_its_journal(stage: Stage) -> None:
    parts = stage.console.ask("parts")
    assert parts["scheduler"]["host"] == parts["store"]["host"] == stage.head.name
    request_ids, _ = stage.begin("kill", NUM_COMPUTED_TOKENS)
    stage.head.run(["kill", "-KILL", str(parts["scheduler"]["pid"])])
    stats = stage.assert_same_bits(request_ids)
    assert all(each["num_recomputed_tokens"] <= MOST_RECOMPUTED_TOKENS for each in stats)
    after = stage.assert_whole()
    assert after["scheduler"]["num_requests_restored"] > 0
    assert after["scheduler"]["num_workers_lost"] == 0
    is_back = stage.console.ask("parts")
    assert is_back["scheduler"]["host"] == stage.head.name
    assert is_back["scheduler"]["pid"] != parts["scheduler"]["pid"]


def test_a_node_that_is_to_go_is_left_in_time_for_another(stage: Stage) -> None:
    """Nobody but Ray is told; the spare host has joined by then, and gets the new worker."""
    stage.is_whole = False
    join(stage.head, [stage.spare])
    before = stage.console.ask("look")["scheduler"]
    request_ids, worker_id = stage.begin("drain", SEGMENT_TOKENS)
    node_id = stage.console.ask("nodes")[stage.victim.address]
    drain_node(stage.head, node_id, DRAIN_S)
    stats = stage.assert_same_bits(request_ids)
    assert not any(each["num_workers_lost"] for each in stats)
    wait_for(
        lambda: worker_id not in stage.console.ask("look")["workers"], END_S, "the worker has left"
    )
    after = stage.console.ask("wait_until_idle", num_workers=2)
    where = sorted(worker["address"] for worker in after["workers"].values())
    assert where == [stage.survivor.address, stage.spare.address]
    assert after["scheduler"]["num_workers_drained"] == before["num_workers_drained"] + 1
    assert after["scheduler"]["num_workers_lost"] == before["num_workers_lost"]
    assert after["scheduler"]["num_recomputed_rows"] == 0
