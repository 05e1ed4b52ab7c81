"""The dashboard goes to where this node's Ray keeps its own, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from cluster.dashboards.making import ALERTS_FILE, DASHBOARD_FILE, alerts, dashboard
from cluster.dashboards.placing import place_dashboard


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a Ray session whose node this process is on."""

    class Node:
        def get_session_dir_path(self) -> str:
            return str(tmp_path)

    monkeypatch.setattr(ray._private.worker, "_global_node", Node())
    for name in ("RAY_METRICS_OUTPUT_ROOT", "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def folders_of(root: Path) -> tuple[Path, Path]:
    """Make the folders that Ray's dashboard makes."""
    dashboards, prometheus = root / "grafana" / "dashboards", root / "prometheus"
    for folder in (dashboards, prometheus):
        folder.mkdir(parents=True)
    return dashboards, prometheus


def test_both_files_go_beside_rays_own(session: Path) -> None:
    dashboards, prometheus = folders_of(session / "metrics")
    assert place_dashboard() == [dashboards / DASHBOARD_FILE, prometheus / ALERTS_FILE]
    assert (dashboards / DASHBOARD_FILE).read_text() == dashboard()
    assert (prometheus / ALERTS_FILE).read_text() == alerts()
    (dashboards / DASHBOARD_FILE).write_text("of an earlier version")
    place_dashboard()
    assert (dashboards / DASHBOARD_FILE).read_text() == dashboard()


def test_rays_own_variables_say_where(
    session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_METRICS_OUTPUT_ROOT", str(tmp_path / "root"))
    dashboards, prometheus = folders_of(tmp_path / "root")
    assert [path.parent for path in place_dashboard()] == [dashboards, prometheus]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", str(elsewhere))
    assert [path.parent for path in place_dashboard()] == [elsewhere, prometheus]


def test_a_node_without_rays_dashboard_gets_nothing(session: Path) -> None:
    assert place_dashboard() == []
    assert list(session.iterdir()) == []


def test_a_folder_that_can_not_be_written_stops_nothing(
    session: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dashboards, prometheus = folders_of(session / "metrics")
    (dashboards / DASHBOARD_FILE).mkdir()
    assert place_dashboard() == [prometheus / ALERTS_FILE]
    assert "is not put into" in caplog.text


def test_a_process_without_ray_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray._private.worker, "_global_node", None)
    assert place_dashboard() == []
