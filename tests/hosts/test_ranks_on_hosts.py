"""One worker computes its model over two hosts, a rank on each, and loses either of them.

Both ranks are of use only together. So the worker goes with any of its hosts, and its requests go
on elsewhere with the bits of an undisturbed run, whether the next one is spread over hosts or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import (
    SEGMENT_TOKENS,
    Console,
    engine_settings,
    in_mid_prefill,
    make_fleet,
    wait_for,
)
from tests.hosts.fleet import Host
from tests.hosts.ray_on_hosts import drain_node, has_ray, join, start_head

pytestmark = pytest.mark.slow

NUM_COMPUTED_TOKENS = 3 * SEGMENT_TOKENS
END_S = 120.0
DRAIN_S = 60


class Stage:
    """Hosts with a CPU each but the first, and one worker of two ranks."""

    def __init__(self, hosts: list[Host], model: Path) -> None:
        """Start it on the first three hosts, of which the head has no CPU to give."""
        self.head, first, second, self.small, self.large = hosts
        self._host_at = {host.address: host for host in hosts}
        start_head(self.head)
        join(self.head, [first, second])
        settings = {**engine_settings(self.head, model, 1), "tensor_parallel_size": 2}
        self.console = Console(self.head, settings, num_requests=2)
        self.undisturbed = self.console.run("calm")

    def ranks(self) -> list[Host]:
        """Return the hosts of the worker's ranks, in their order."""
        [addresses] = self.console.ask("ranks")["addresses"]
        return [self._host_at[address] for address in addresses]

    def begin(self, name: str) -> tuple[list[str], str]:
        """Submit requests; return their ids and the worker's when one is in mid-prompt."""
        return in_mid_prefill(self.console, name, self.ranks()[0], NUM_COMPUTED_TOKENS)

    def assert_same_bits(self, request_ids: list[str]) -> None:
        """Wait for results: they are as if nothing had happened."""
        assert self.console.ask("results", request_ids=request_ids)["bits"] == self.undisturbed

    def assert_idle(self) -> Mapping[str, Any]:
        """Wait until nothing is left of any request; return what is known of all."""
        found = self.console.ask("wait_until_idle", num_workers=1)
        assert found["scheduler"]["num_recomputed_rows"] == 0
        return found


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stage]:
    with make_fleet(tmp_path_factory.mktemp("ranks"), 5, tiny_model) as fleet:
        yield Stage(list(fleet.hosts), tiny_model)


def test_a_worker_over_hosts_goes_with_any_of_them_and_its_requests_go_on(stage: Stage) -> None:
    first, second = stage.ranks()
    assert len({stage.head.name, first.name, second.name}) == 3, "no host has room for both"

    join(stage.head, [stage.small])
    request_ids, worker_id = stage.begin("cut")
    second.cut()
    stage.assert_same_bits(request_ids)
    found = stage.assert_idle()
    assert worker_id not in found["workers"]
    assert found["scheduler"]["num_workers_lost"] == 1
    assert found["scheduler"]["num_loaded_blocks"] > 0, "what the ranks had saved came back"
    assert {host.name for host in stage.ranks()} == {first.name, stage.small.name}
    second.restore()
    wait_for(lambda: not has_ray(second), END_S, "Ray on the host that was cut off has ended")

    join(stage.head, [second])
    request_ids, worker_id = stage.begin("power")
    leader, other = stage.ranks()
    leader.power_off()
    stage.assert_same_bits(request_ids)
    found = stage.assert_idle()
    assert worker_id not in found["workers"]
    assert found["scheduler"]["num_workers_lost"] == 2
    assert {host.name for host in stage.ranks()} == {other.name, second.name}

    join(stage.head, [stage.large], num_cpus=2)
    request_ids, worker_id = stage.begin("drain")
    node_id = stage.console.ask("nodes")[stage.ranks()[1].address]
    drain_node(stage.head, node_id, DRAIN_S)
    stage.assert_same_bits(request_ids)
    wait_for(
        lambda: worker_id not in stage.console.ask("look")["workers"], END_S, "the worker has left"
    )
    found = stage.assert_idle()
    assert found["scheduler"]["num_workers_lost"] == 2
    assert found["scheduler"]["num_workers_drained"] == 1
    assert stage.ranks() == [stage.large] * 2, "where one host has room for both"
    assert stage.console.run("on one host") == stage.undisturbed
