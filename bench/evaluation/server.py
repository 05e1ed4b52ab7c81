"""`haversack serve`, run as a user would, for as long as it is needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_END_S = 60.0


@contextmanager
def served(**settings: Any) -> Iterator[str]:
    """Start an engine and its endpoint on a Ray of their own, and end them after.

    Args:
        settings: of the engine; see `EngineConfig`.

    Yields:
        where the endpoint answers, without a slash at the end.

    Raises:
        RuntimeError: it did not come up; the text says why.
    """
    settings = {"ray_address": "local", **settings}
    variables = {f"HAVERSACK_{name.upper()}": str(value) for name, value in settings.items()}
    command = [sys.executable, "-c", "from cluster.cli import app; app()"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "serve", "--port", "0", "--json"],
            env=os.environ | {"PYTHONPATH": str(_ROOT)} | variables,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                log.seek(0)
                raise RuntimeError(f"haversack serve did not come up: {log.read().strip()}")
            yield str(json.loads(line)["url"])
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_END_S)
            finally:
                process.kill()
