"""Settings that every test process and its Ray processes need before they start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

# Machines that run tests are shared: how long an example takes says nothing about the code. All
# else is hypothesis' own choice, which on CI is to draw the same examples every time.
settings.register_profile(
    "haversack", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("haversack")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout that the tests belong to."""
    return Path(__file__).resolve().parent.parent
