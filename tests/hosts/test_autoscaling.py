"""Ray's autoscaler adds machines to a cluster when the engine wants more workers, and removes them.

The engine says how many workers there are to be, and a machine joins when one of them waits for
room. So the cluster grows from one machine to three under a burst, and is back at one when that is
over.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.conftest import Console, make_fleet, wait_for
from tests.hosts.fleet import Host
from tests.hosts.ray_on_hosts import has_ray
from tests.hosts.ray_up import Cluster

pytestmark = pytest.mark.slow

LINES = {
    "min_workers: 2": "min_workers: 1",
    "max_workers: 2": "max_workers: 3",
    "idle_timeout_minutes: 30": "idle_timeout_minutes: 0.1",
}
ELASTIC = {
    "min_workers": 1,
    "max_workers": 3,
    "target_queue_s": 0.5,
    "worker_idle_s": 2.0,
    "save_finished": True,
}
"""Workers keep no KV when they go, but the store would."""
NUM_WAITING = 2
"""Rounds of requests that are under way during the burst: more than a worker is to have."""
GROWN_S = 420.0
"""Ray gives up a machine of one's own where it could not be set up, as on one that is too busy."""
GONE_S = 90.0


@pytest.fixture
def cluster(tmp_path: Path, tiny_model: Path) -> Iterator[Cluster]:
    with make_fleet(tmp_path, 5, tiny_model, ssh=True) as fleet:
        yield Cluster(fleet, tiny_model, 1, lines=LINES, **ELASTIC)


def with_ray(machines: list[Host]) -> list[str]:
    """Return the addresses of machines that are part of the cluster."""
    return sorted(host.address for host in machines if has_ray(host))


def test_machines_come_with_a_burst_and_go_after_it(cluster: Cluster) -> None:
    """Each machine has room for one worker; nobody but the engine asks for anything."""
    cluster.ray("up", "-y", "ray_config.yaml")
    address = {"ray_address": f"ray://{cluster.head.address}:10001", "start": False}
    console = Console(cluster.operator, address, num_requests=4)
    undisturbed = console.run("calm")
    assert len(with_ray(cluster.machines)) == 1

    def submit() -> list[str]:
        name = f"burst-{next(numbers)}"
        request_ids: list[str] = console.ask("submit", name=name)["request_ids"]
        return request_ids

    def check(request_ids: list[str]) -> None:
        assert console.ask("results", request_ids=request_ids)["bits"] == undisturbed

    numbers = itertools.count()
    burst = deque(submit() for _ in range(NUM_WAITING))

    def is_grown() -> bool:
        if len(console.ask("look")["workers"]) == 3:
            return True
        burst.append(submit())
        check(burst.popleft())
        return False

    wait_for(is_grown, GROWN_S, "a worker on each of three machines")
    assert len(with_ray(cluster.machines)) == 3
    for request_ids in burst:
        check(request_ids)

    workers = console.ask("wait_until_idle", num_workers=1)["workers"]
    [left] = [worker["address"] for worker in workers.values()]
    wait_for(lambda: with_ray(cluster.machines) == [left], GONE_S, "the others are removed")
    assert set(console.ask("nodes")) == {cluster.head.address, left}
    counters = console.ask("look")["scheduler"]
    assert counters["num_workers_drained"] >= 2
    assert (counters["num_failed"], counters["num_recomputed_rows"]) == (0, 0)
    assert console.run("after") == undisturbed
