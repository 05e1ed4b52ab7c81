"""`ray up` with the repository's own file, over SSH, on fresh machines; then what happens to them.

The operator's machine, which is no part of the cluster, starts it, submits to it and takes it down;
see `tests.hosts.ray_up`. One machine is a spot instance.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import (
    Console,
    in_mid_prefill,
    make_fleet,
    wait_for,
)
from tests.hosts.fleet import SYSTEM_PATH, Host
from tests.hosts.ray_on_hosts import ENVIRONMENT, PYTHON, ray_address
from tests.hosts.ray_up import HOME, Cluster

pytestmark = pytest.mark.slow

NUM_COMPUTED_TOKENS = 500
END_S = 60.0


class SpotInstance:
    """A machine that its cloud may take away, and that listens for it as those on AWS do."""

    def __init__(self, host: Host, head: Host) -> None:
        """Begin to listen."""
        self._told = host.folder / "tmp" / "notice"
        server = host.start([PYTHON, "-m", "tests.hosts.metadata", HOME / "notice"], ENVIRONMENT)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        script = HOME / "haversack" / "cluster" / "deploy" / "watch_notice.sh"
        environment = ENVIRONMENT | {"PATH": f"{HOME}/haversack/.venv/bin:{SYSTEM_PATH}"}
        host.start([script, "aws", ray_address(head)], environment)

    def tell(self, left_s: float) -> None:
        """Have the cloud say when it ends the machine."""
        end = datetime.now(timezone.utc) + timedelta(seconds=left_s)
        self._told.with_suffix(".new").write_text(end.strftime("%Y-%m-%dT%H:%M:%SZ"))
        self._told.with_suffix(".new").rename(self._told)


class Operator:
    """Who submits from outside of the cluster, and compares."""

    def __init__(self, cluster: Cluster) -> None:
        """Join the engine, and note what requests look like that nothing happens to."""
        address = {"ray_address": f"ray://{cluster.head.address}:10001", "start": False}
        self.console = Console(cluster.operator, address, num_requests=4)
        self._machines = sorted(host.address for host in cluster.machines)
        self._undisturbed = self.console.run("calm")

    def submit(self, name: str) -> list[str]:
        """Submit all requests, and return their ids."""
        request_ids: list[str] = self.console.ask("submit", name=name)["request_ids"]
        return request_ids

    def num_workers_on(self, host: Host) -> int:
        """Return how many of the engine's workers are on a host."""
        workers = self.console.ask("look")["workers"].values()
        return sum(worker["address"] == host.address for worker in workers)

    def begin(self, name: str, host: Host) -> list[str]:
        """Submit, and return when a request is in the middle of its prompt on a host."""
        return in_mid_prefill(self.console, name, host, NUM_COMPUTED_TOKENS)[0]

    def num_lost(self, request_ids: list[str]) -> int:
        """Wait for results, which are as if nothing had happened; return how many lost a worker."""
        found: dict[str, Any] = self.console.ask("results", request_ids=request_ids)
        assert found["bits"] == self._undisturbed
        return sum(each["num_workers_lost"] > 0 for each in found["stats"])

    def wait_until_whole(self) -> dict[str, Any]:
        """Wait until nothing is left of any request and each machine has a worker."""
        found = self.console.ask("wait_until_idle", num_workers=2)
        where = sorted(worker["address"] for worker in found["workers"].values())
        assert where == self._machines
        assert found["scheduler"]["num_recomputed_rows"] == 0
        return found


def listening(host: Host) -> dict[int, set[str]]:
    """Who may reach which ports of a host: "all", or "self"."""
    found: dict[int, set[str]] = {}
    for line in host.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).splitlines():
        _, local, _, state, *_ = line.split()
        if state == "0A":
            address, port = local.split(":")
            is_loopback = address in ("0100007F", "00000000000000000000000001000000")
            found.setdefault(int(port, 16), set()).add("self" if is_loopback else "all")
    return found


def is_clean(host: Host) -> bool:
    """Whether no process of what `ray up` installed is left on a host, but Ray's log monitor.

    That one outlives its Ray on machines other than the head, until `ray stop` or the next start.
    """
    # The pattern is one that the command itself does not match.
    commands = "for file in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $file; echo; done 2>/dev/null"
    return not host.says(f"{commands} | grep 'haversack/[.]venv' | grep -qv log_monitor")


@pytest.fixture
def cluster(tmp_path: Path, tiny_model: Path) -> Iterator[Cluster]:
    with make_fleet(tmp_path, 4, tiny_model, ssh=True) as fleet:
        yield Cluster(fleet, tiny_model, 2)


def test_a_cluster_comes_up_outlives_its_machines_and_goes(cluster: Cluster) -> None:
    """One machine is to go and is left in time, one is cut off and comes back, one loses power."""
    first, second = cluster.machines
    cluster.ray("up", "-y", "ray_config.yaml")
    operator = Operator(cluster)
    operator.wait_until_whole()
    parts = operator.console.ask("parts")
    assert parts["scheduler"]["host"] == parts["store"]["host"] == cluster.head.name
    ports = listening(cluster.head)
    assert (ports[6379], ports[10001], ports[8265]) == ({"all"}, {"all"}, {"self"})
    assert 8000 not in ports, "no HTTP unless it was asked for"

    spot = SpotInstance(first, cluster.head)
    spot.tell(left_s=60.0)
    for number in itertools.count():
        request_ids = operator.submit(f"drained-{number}")
        assert operator.num_lost(request_ids) == 0
        if operator.num_workers_on(first) == 0:
            break
    first.power_off()
    first.power_on()

    # Nobody else is there yet, so that these wait for a machine on which Ray is started again.
    request_ids = operator.begin("cut", second)
    second.cut()
    wait_for(lambda: operator.num_workers_on(second) == 0, END_S, "the worker is missed")
    second.restore()
    assert operator.num_lost(request_ids) > 0

    assert operator.wait_until_whole()["scheduler"]["num_workers_drained"] == 1
    request_ids = operator.begin("power", first)
    first.power_off()
    assert operator.num_lost(request_ids) > 0

    cluster.ray("down", "-y", "ray_config.yaml")
    for host in (cluster.head, second):
        wait_for(lambda host=host: is_clean(host), END_S, "all has ended")  # type: ignore[misc]
