"""What the figures of a run were measured on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import psutil

_CPU_INFO = Path("/proc/cpuinfo")


def machine() -> dict[str, Any]:
    """Return the processor, its cores and what it can do in bf16, the memory and the system."""
    text = _CPU_INFO.read_text()
    names = (line.partition(":")[2] for line in text.splitlines() if line.startswith("model name"))
    return {
        "cpu": next(names, platform.machine()).strip(),
        "cores": psutil.cpu_count(),
        "bf16": _bf16_instructions(text),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def library_dtype() -> str:
    """Return the dtype in which torch's own products of matrices are fast here.

    On a processor without instructions for bf16 they take several times as long in it as in fp32.
    """
    return "bfloat16" if _bf16_instructions(_CPU_INFO.read_text()) else "float32"


def _bf16_instructions(cpu_info: str) -> list[str]:
    return [flag for flag in ("avx512_bf16", "amx_bf16") if flag in cpu_info]
