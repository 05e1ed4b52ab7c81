"""`ray up` with the repository's own file, over SSH, on fresh machines; then what happens to them.

Only the lines that are marked EDIT differ from the file, and the engine is a tiny one. There is no
package index, as in a closed network: the packages lie on the machines, and what is to be installed
is Haversack. An operator's machine, which is no part of the cluster, does everything over the
network: it starts the cluster, submits to it and takes it down.
"""

from __future__ import annotations

import re
import shutil
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts.conftest import Console, engine_settings, make_fleet, wait_for
from tests.hosts.fleet import Fleet, Host
from tests.hosts.ray_on_hosts import ENVIRONMENT, PYTHON, ROOT, drain_node, has_ray

pytestmark = pytest.mark.slow

MOUNTED = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE")
PACKAGES = ("offload_store", "scheduler", "workers", "cluster")
NUM_COMPUTED_TOKENS = 500
UP_S = 120.0
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

    def ray(self, *arguments: str) -> str:
        """Run Ray's command on the operator's machine, in the checkout."""
        command = f'cd {HOME}/checkout && exec "$0" "$@"'
        ray = [PYTHON.parent / "ray", *arguments]
        return self.operator.run(["bash", "-c", command, *ray], ENVIRONMENT, timeout_s=UP_S)

    def on_head(self, command: str) -> str:
        """Run a command as an operator does on the head."""
        return self.ray("exec", "ray_config.yaml", command)


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
    settings = engine_settings(head, model, 2)
    del settings["ray_address"]
    path.write_text(yaml.safe_dump(settings | {"journal_path": "~/requests.db"}))


def bake_packages(host: Host) -> None:
    """Have an environment on a host that sees every package of ours but Haversack itself."""
    folder = host.folder / "tmp" / "haversack" / ".venv"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # As a file name is added and not its folder, that folder's own .pth files, and with them the
    # checkout that the tests run in, stay out.
    (site / "packages.pth").write_text("\n".join(sorted(paths)) + "\n")
    ray = folder / "bin" / "ray"
    body = (PYTHON.parent / "ray").read_text().partition("\n")[2]
    ray.write_text(f"#!{HOME}/haversack/.venv/bin/python\n{body}")
    ray.chmod(0o755)


@pytest.fixture
def cluster(tmp_path: Path, tiny_model: Path) -> Iterator[Cluster]:
    with make_fleet(tmp_path, 4, tiny_model, ssh=True) as fleet:
        yield Cluster(fleet, tiny_model)


def test_a_cluster_comes_up_outlives_its_machines_and_goes(
    cluster: Cluster,
) -> None:
    first, second = cluster.machines
    cluster.ray("up", "-y", "ray_config.yaml")
    address = {"ray_address": f"ray://{cluster.head.address}:10001", "start": False}
    client = Console(cluster.operator, address, num_requests=4)
    undisturbed = client.run("calm")

    def begin(name: str, host: Host) -> list[str]:
        """Submit, and return when a request is in the middle of its prompt on a host."""
        request_ids: list[str] = client.ask("submit", name=name)["request_ids"]
        client.ask(
            "wait_for_prefill", address=host.address, num_computed_tokens=NUM_COMPUTED_TOKENS
        )
        return request_ids

    def assert_same_bits(request_ids: list[str]) -> list[dict[str, int]]:
        found: dict[str, Any] = client.ask("results", request_ids=request_ids)
        assert found["bits"] == undisturbed
        return found["stats"]

    def wait_for_both() -> None:
        found = client.ask("wait_until_idle", num_workers=2)
        where = sorted(worker["address"] for worker in found["workers"].values())
        assert where == sorted(host.address for host in cluster.machines), "one each"
        assert found["scheduler"]["num_recomputed_rows"] == 0

    wait_for_both()
    parts = client.ask("parts")
    assert parts["scheduler"]["host"] == parts["store"]["host"] == cluster.head.name

    request_ids = begin("drained", first)
    drain_node(cluster.head, client.ask("nodes")[first.address], 60)
    assert not any(each["num_workers_lost"] for each in assert_same_bits(request_ids))

    wait_for_both()
    request_ids = begin("cut", second)
    second.cut()
    assert any(each["num_workers_lost"] for each in assert_same_bits(request_ids))
    second.restore()

    wait_for_both()
    request_ids = begin("power", first)
    first.power_off()
    assert any(each["num_workers_lost"] for each in assert_same_bits(request_ids))

    cluster.ray("down", "-y", "ray_config.yaml")
    for host in (cluster.head, second):
        wait_for(lambda host=host: not has_ray(host), END_S, "Ray has ended")  # type: ignore[misc]
