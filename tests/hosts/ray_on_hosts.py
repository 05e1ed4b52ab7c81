"""Ray over the hosts of a fleet, set so that a silent host is noticed within seconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.hosts.fleet import SYSTEM_PATH, Host

ROOT = Path(__file__).resolve().parents[2]
SHARED = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
"""What programs on a host need of the real machine."""
PYTHON = Path(sys.executable)

# Ray's processes each read these by themselves, so every one of them needs them. The head takes a
# host for dead that has been silent for about 8 s (by default: one minute), a connection that has
# been silent for 10 s counts as broken (by default: never), and an object that a host does not send
# is asked for elsewhere after 2 s (by default: 10 s).
ENVIRONMENT = {
    "PATH": f"{PYTHON.parent}:{SYSTEM_PATH}",
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
    "RAY_object_manager_pull_timeout_ms": "2000",
}

_PORT = 6379
_OBJECT_STORE_BYTES = 120_000_000
_START_TIMEOUT_S = 120.0


def ray_address(head: Host) -> str:
    """Return what `ray.init` on any host of the cluster takes as its address."""
    return f"{head.address}:{_PORT}"


def start_head(head: Host, env: Mapping[str, str] | None = None) -> None:
    """Start a cluster on a host that has no CPU to give: actors that need one go elsewhere.

    Args:
        env: more variables for Ray's processes.
    """
    command = [*_ray_start(head, 0), "--head", f"--port={_PORT}", "--include-dashboard=false"]
    for is_last in (False, False, True):
        try:
            head.run(command, {**ENVIRONMENT, **(env or {})}, timeout_s=_START_TIMEOUT_S)
            return
        except RuntimeError:
            if is_last:
                raise
            _clear(head)


def join(head: Host, hosts: Sequence[Host], num_cpus: int = 1) -> None:
    """Make hosts with so many CPUs each part of the cluster, all at once."""
    command = [f"--address={ray_address(head)}"]
    left = list(hosts)
    for is_last in (False, False, True):
        starting = [
            (host, host.start([*_ray_start(host, num_cpus), *command], ENVIRONMENT))
            for host in left
        ]
        left = []
        for host, process in starting:
            written, _ = process.communicate(timeout=_START_TIMEOUT_S)
            if process.returncode != 0:
                if is_last:
                    raise RuntimeError(f"{host.name} could not join: {written}\n{host.log}")
                _clear(host)
                left.append(host)


def has_ray(host: Host) -> bool:
    """Whether the process that makes a host part of a cluster is there."""
    return host.says("grep -qsx raylet /proc/[0-9]*/comm")


def drain_node(head: Host, node_id: str, deadline_s: int) -> None:
    """Tell the cluster that a node is to go in so many seconds, as a cloud's notice does."""
    command = ["drain-node", f"--address={ray_address(head)}", f"--node-id={node_id}"]
    reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=the price has risen"]
    deadline = f"--deadline-remaining-seconds={deadline_s}"
    head.run([PYTHON.parent / "ray", *command, *reason, deadline], ENVIRONMENT)


def _clear(host: Host) -> None:
    """End what is there of Ray, which gave up: it does that after 30 s, on a busy machine too."""
    host.run([PYTHON.parent / "ray", "stop", "--force"], ENVIRONMENT)


def _ray_start(host: Host, num_cpus: int) -> list[str | Path]:
    return [
        PYTHON.parent / "ray",
        "start",
        f"--node-ip-address={host.address}",
        f"--num-cpus={num_cpus}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
    ]
