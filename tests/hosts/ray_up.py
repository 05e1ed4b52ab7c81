"""A cluster that `ray up` makes, over SSH, of fresh machines with the repository's own file.

Only the lines that are marked EDIT differ from the file, and the engine is a tiny one. There is no
package index, as in a closed network: the packages lie on the machines, and what is to be installed
is Haversack. An operator's machine, which is no part of the cluster, does everything over the
network.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.hosts.conftest import engine_settings
from tests.hosts.fleet import Fleet, Host
from tests.hosts.ray_on_hosts import ENVIRONMENT, PYTHON, ROOT

MOUNTED = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE")
PACKAGES = ("offload_store", "scheduler", "workers", "cluster")
UP_S = 240.0
HOME = Path("/tmp")
"""Of root, on every host."""


class Cluster:
    """A head and machines for a cluster, and a machine for its operator."""

    def __init__(
        self,
        fleet: Fleet,
        model: Path,
        num_workers: int,
        *,
        lines: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """Give the operator a checkout with the few lines edited, and the machines packages.

        Workers need a whole machine each, as those with a GPU do.

        Args:
            fleet: the head, the machines and the operator's, in this order.
            model: its folder.
            num_workers: at the start.
            lines: more of `ray_config.yaml` that is replaced, and by what.
            settings: of the engine.
        """
        self.head, *self.machines, self.operator = fleet.hosts
        self.checkout = self.operator.folder / "tmp" / "checkout"
        copy_checkout(self.checkout)
        shutil.copy(fleet.key, self.operator.folder / "tmp" / "key")
        config = self.checkout / "ray_config.yaml"
        edit_ray_config(config, self.head, self.machines, lines or {})
        engine = engine_settings(self.head, model, num_workers) | {
            "journal_path": "~/requests.db",
            "cpus_per_worker": os.cpu_count(),
        }
        del engine["ray_address"]
        written = yaml.safe_dump(engine | settings)
        (self.checkout / "cluster" / "deploy" / "engine.yaml").write_text(written)
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


def edit_ray_config(
    path: Path, head: Host, machines: Sequence[Host], lines: Mapping[str, str]
) -> None:
    """Put in addresses, user and key, as the file's head tells its reader to, and other lines."""
    addresses = "\n".join(f"    - {host.address}" for host in machines)
    written = path.read_text()
    for old, new in {
        "192.0.2.10": head.address,
        "    - 192.0.2.11\n    - 192.0.2.12": addresses,
        "ubuntu": "root",
        "~/.ssh/id_ed25519": f"{HOME}/key",
        **lines,
    }.items():
        written, num_found = re.subn(rf"(?<=[ \n]){re.escape(old)}\b", new, written)
        assert num_found == 1, old
    path.write_text(written)


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
