"""Unit tests run without a cluster: a test that reaches for one fails at once, and says so."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid `ray.init`, which every other call of Ray's goes through first."""
    try:
        import ray
    except ModuleNotFoundError:
        return

    def forbidden(*args: Any, **kwargs: Any) -> NoReturn:
        pytest.fail("a unit test tried to start Ray: move it to tests/engine")

    monkeypatch.setattr(ray, "init", forbidden)
