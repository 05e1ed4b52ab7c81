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


_STARTS_RAY = ("tests/engine/", "tests/hosts/", "tests/http/")


class _OneRayAtATime(LoadScopeScheduling):
    """Gives out whole files, and all of those that start Ray to one process.

    Engines of two processes would find each other's Ray on this machine.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if nodeid.startswith(_STARTS_RAY) else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Share the tests out among the processes of `pytest -n`; those with Ray begin."""
    config.option.loadscopereorder = False
    return _OneRayAtATime(config, log)


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
