"""Puts the dashboard where Ray's Grafana looks for it, and the alert rules beside Prometheus' file.

Ray's dashboard writes configurations for both when it starts, on the head node and nowhere else; it
reads the same variables as this module. Grafana looks into its folder every few seconds.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import ray

from cluster.dashboards.making import ALERTS_FILE, DASHBOARD_FILE, FOLDER

logger = logging.getLogger(__name__)


def place_dashboard() -> list[Path]:
    """Copy both files to where this node's Ray has its own ones.

    Returns:
        what was written: nothing on a node without Ray's dashboard. That it can't be written is no
        reason to stop, and only logged.
    """
    written = []
    for folder, name in _folders():
        if not folder.is_dir():
            continue
        try:
            content = (FOLDER / name).read_bytes()
            (folder / name).write_bytes(content)
        except OSError as error:
            logger.warning("%s is not put into %s: %s", name, folder, error)
        else:
            written.append(folder / name)
    return written


def _folders() -> list[tuple[Path, str]]:
    node = ray._private.worker._global_node
    if node is None:
        return []
    session = node.get_session_dir_path()
    root = Path(os.environ.get("RAY_METRICS_OUTPUT_ROOT") or Path(session) / "metrics")
    dashboards = os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR")
    return [
        (Path(dashboards) if dashboards else root / "grafana" / "dashboards", DASHBOARD_FILE),
        (root / "prometheus", ALERTS_FILE),
    ]
