"""Settings that every test process and its Ray processes need before they start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

# Machines that run tests are shared: how long an example takes says nothing about the code. All
# else is hypothesis' own choice, which on CI is to draw the same examples every time.
settings.register_profile(
    "haversack", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("haversack")


_ENGINE_FIXTURE, _ENGINE_UNIT = "shared_client", "one engine"
_HOSTS_UNIT = "one set of hosts"
_SHARING = {
    "tests/http/": "one endpoint",
    "tests/hosts/": _HOSTS_UNIT,
    "tests/engine/test_batches.py": _ENGINE_UNIT,
    "tests/engine/test_cli.py": _ENGINE_UNIT,
    "tests/engine/test_client.py": _ENGINE_UNIT,
    "tests/engine/test_ray_data.py": _ENGINE_UNIT,
    "tests/engine/test_report.py": _ENGINE_UNIT,
    "tests/engine/test_scoring.py": _ENGINE_UNIT,
    "tests/engine/test_tracing.py": _ENGINE_UNIT,
}
"""Tests, by how their ids begin, that share what takes long to start, or what a machine has no room
for twice: they stay together."""
_LONGEST = (
    "tests/engine/test_kill_rounds.py",
    "tests/engine/test_lifecycle.py",
    _HOSTS_UNIT,
    "tests/sim/test_state_machine.py",
    "one endpoint",
    _ENGINE_UNIT,
)
"""What begins, so that no process is left alone with it at the end."""


def _unit_of(nodeid: str) -> str:
    """Return what a test is given out with: its file, or what it shares with others."""
    shared = (what for start, what in _SHARING.items() if nodeid.startswith(start))
    return next(shared, nodeid.split("::")[0])


class _WholeUnits(LoadScopeScheduling):
    """Gives out units in the order in which they were collected.

    Each process has a Ray of its own: see `tests.engine.conftest.local_cluster`.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _unit_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Share the tests out among the processes of `pytest -n`."""
    config.option.loadscopereorder = False
    return _WholeUnits(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have the longest units begin, where several processes share the tests out."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if _ENGINE_FIXTURE in fixtures and _unit_of(item.nodeid) != _ENGINE_UNIT:
            raise pytest.UsageError(
                f"{item.nodeid} shares an engine: tests/conftest.py tells of it"
            )
    if hasattr(config, "workerinput"):
        rank = {unit: place for place, unit in enumerate(_LONGEST)}
        items.sort(key=lambda item: rank.get(_unit_of(item.nodeid), len(rank)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why a test was tried once more: `--reruns` itself tells only which."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"first try of {report.nodeid}", sep="_")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Have torch compute on one thread, as a machine that other tests share does best."""
    import torch  # of no use to most tests, and slow to import

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout that the tests belong to."""
    return Path(__file__).resolve().parent.parent
