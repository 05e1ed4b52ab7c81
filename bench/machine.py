"""What the figures of a run were measured on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import psutil


def machine() -> dict[str, Any]:
    """Return the processor, its cores and what it can do in bf16, the memory and the system."""
    text = Path("/proc/cpuinfo").read_text()
    names = (line.partition(":")[2] for line in text.splitlines() if line.startswith("model name"))
    return {
        "cpu": next(names, platform.machine()).strip(),
        "cores": psutil.cpu_count(),
        "bf16": [flag for flag in ("avx512_bf16", "amx_bf16") if flag in text],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }
