"""Hosts for a test, and scenarios on them. Where no hosts can be made, the tests are skipped."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.fleet import Fleet, Host, why_no_hosts
from tests.hosts.ray_on_hosts import ENVIRONMENT, PYTHON, SHARED, join, start_head
from tests.tiny_models import tiny_llama

_SHM_BYTES = 2**28


class Scenario:
    """A scenario that runs on a host, and what it has said so far."""

    def __init__(self, host: Host, name: str, settings: dict[str, Any]) -> None:
        """Start it."""
        self._host = host
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._process = host.start(
            [PYTHON, "-m", "tests.hosts.scenarios", name, json.dumps(settings)], ENVIRONMENT
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_for(self, event: str, timeout_s: float) -> dict[str, Any]:
        """Return the next thing that it says; the test fails where that is another event."""
        deadline_s = time.monotonic() + timeout_s
        try:
            said = self._said.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            pytest.fail(f"no {event!r} within {timeout_s:g} s: {self._host.log}")
        if said is None or said["event"] != event:
            pytest.fail(f"{said} came where {event!r} was due: {self._host.log}")
        return said

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"event"'):
                self._said.put(json.loads(line))
        self._said.put(None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with one token per byte."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def hosts(tmp_path: Path, tiny_model: Path) -> Iterator[Sequence[Host]]:
    """Three hosts that see the checkout, its Python and the tiny model."""
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    with Fleet(tmp_path, 3, shared=[*SHARED, tiny_model], shm_bytes=_SHM_BYTES) as fleet:
        yield fleet.hosts


@pytest.fixture
def ray_hosts(hosts: Sequence[Host]) -> Sequence[Host]:
    """The hosts as a Ray cluster: a head without CPUs, and two hosts with one CPU each."""
    head, *others = hosts
    start_head(head)
    join(head, others)
    return hosts


@pytest.fixture
def start_scenario() -> Callable[[Host, str, dict[str, Any]], Scenario]:
    """Start a scenario on a host; it ends with the host."""
    return Scenario
