"""`ray up` with the repository's own file, over SSH, on fresh machines; then what happens to them.

Only the lines that are marked EDIT differ from the file, and the engine is a tiny one. There is no
package index, as in a closed network: the packages lie on the machines, and what is to be installed
is Haversack. An operator's machine, which is no part of the cluster, does everything over the
network: it starts the cluster, submits to it and takes it down. One machine is a spot instance.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sysconfig
import venv
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts.conftest import (
    Console,
    engine_settings,
    in_mid_prefill,
    make_fleet,
    wait_for,
)
from tests.hosts.fleet import SYSTEM_PATH, Fleet, Host
from tests.hosts.ray_on_hosts import ENVIRONMENT, PYTHON, ROOT, ray_address

pytestmark = pytest.mark.slow

MOUNTED = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE")
PACKAGES = ("offload_store", "scheduler", "workers", "cluster")
NUM_COMPUTED_TOKENS = 500
UP_S = 240.0
END_S = 60.0
HOME = Path("/tmp")
"""Of root, on every host."""


class Cluster:
    """Three machines for a cluster and one for its operator."""

    def __init__(self, fleet: Fleet, model: Path) -> None:
        """Give the operator a checkout with the few lines edited, and the machines packages."""
        self.head, *self.machines, self.operator = fleet.hosts
        self.checkout = self.operator.folder / "tmp" / "checkout"
        copy_checkout(self.checkout)
        shutil.copy(fleet.key, self.operator.folder / "tmp" / "key")
        edit_ray_config(self.checkout / "ray_config.yaml", self.head, self.machines)
        write_engine(self.checkout / "cluster" / "deploy" / "engine.yaml", self.head, model)
        for host in [self.head, *self.machines]:
            bake_packages(host)
        # The head has been used for Ray before, which left something that the others do not have.
        (self.head.folder / "tmp" / ".ray").mkdir()
        (self.head.folder / "tmp" / ".ray" / "auth_token").write_text("5ec2e7" * 10)
        # All hosts share the real machine's processors, and a process may take long to start.
        patience = "export RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S=60\n"
        (self.head.folder / "tmp" / ".bashrc").write_text(patience)

    def ray(self, *arguments: str) -> str:
        """Run Ray's command on the operator's machine, in the checkout."""
        command = f'cd {HOME}/checkout && exec "$0" "$@"'
        ray = [PYTHON.parent / "ray", *arguments]
        return self.operator.run(["bash", "-c", command, *ray], ENVIRONMENT, timeout_s=UP_S)


def copy_checkout(target: Path) -> None:
    """Copy what a node needs of the checkout, and the file that says so."""
    target.mkdir(parents=True)
    for name in (*MOUNTED, "ray_config.yaml"):
        shutil.copy(ROOT / name, target / name)
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, target / name, ignore=ignored)


def edit_ray_config(path: Path, head: Host, machines: list[Host]) -> None:
    """Put in addresses, user and key, as the file's head tells its reader to."""
    written = path.read_text()
    for old, new in {
        "192.0.2.10": head.address,
        "192.0.2.11": machines[0].address,
        "192.0.2.12": machines[1].address,
        "ubuntu": "root",
        "~/.ssh/id_ed25519": f"{HOME}/key",
    }.items():
        written, num_found = re.subn(rf"(?<= ){re.escape(old)}\b", new, written)
        assert num_found == 1, old
    path.write_text(written)


def write_engine(path: Path, head: Host, model: Path) -> None:
    """Have workers that each need a whole machine, as those with a GPU do."""
    settings = engine_settings(head, model, 2)
    del settings["ray_address"]
    settings |= {"journal_path": "~/requests.db", "cpus_per_worker": os.cpu_count()}
    path.write_text(yaml.safe_dump(settings))


def bake_packages(host: Host) -> None:
    """Have an environment on a host that sees every package of ours but Haversack itself."""
    folder = host.folder / "tmp" / "haversack" / ".venv"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # Of a folder that a .pth file names no .pth files are read: so the checkout that these tests
    # belong to, which was installed by one, stays out.
    (site / "packages.pth").write_text("\n".join(sorted(paths)) + "\n")
    ray = folder / "bin" / "ray"
    body = (PYTHON.parent / "ray").read_text().partition("\n")[2]
    ray.write_text(f"#!{HOME}/haversack/.venv/bin/python\n{body}")
    ray.chmod(0o755)


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
        yield Cluster(fleet, tiny_model)


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
