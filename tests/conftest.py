"""Settings that every test process and its Ray processes need before they start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout that the tests belong to."""
    return Path(__file__).resolve().parent.parent
