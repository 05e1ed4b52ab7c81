"""The engine's processes, and how much memory a process has had.

Peaks are the kernel's own (VmHWM of /proc/PID/status), so that none is missed between two looks.
They count pages shared with others, such as those of Ray's object store, in every process that has
touched them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import ray

from cluster import Client
from cluster.fleet import part_name


def engine_pids(client: Client) -> dict[str, int]:
    """Return the process of each part of the engine that is there."""
    found = {worker.worker_id: worker.pid for worker in client.workers()}
    settings = client.info.settings
    parts = ["scheduler", *(["store"] if settings["offload_bytes"] else [])]
    for part in parts:
        actor = ray.get_actor(
            part_name(str(settings["name"]), part), namespace=str(settings["namespace"])
        )
        found[part] = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return found


def reset_peaks(pids: Iterable[int]) -> None:
    """Let the peaks of some processes begin at what they have now."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had since its peak was reset."""
    return _status(pid, "VmHWM")


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has now."""
    return _status(pid, "VmRSS")


def memory_shares(pid: int) -> dict[str, int]:
    """Return the bytes that a process has now, by whose they are.

    "rss" is all of them, "pss" counts a page that several processes have in equal parts, and
    "private" only those that nobody else has.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = {name: 1024 * int(size.split()[0]) for name, size in (x.split(":") for x in lines)}
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {"rss": found["Rss"], "pss": found["Pss"], "private": private}


def _status(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise ProcessLookupError(f"process {pid} has no {key}: it has ended")
