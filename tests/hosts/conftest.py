"""Hosts for a test, and an engine on them. Where no hosts can be made, the tests are skipped."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.fleet import Fleet, Host, why_no_hosts
from tests.hosts.ray_on_hosts import ENVIRONMENT, PYTHON, SHARED, join, ray_address, start_head
from tests.tiny_models import tiny_llama

BLOCK_SIZE = 8
SEGMENT_TOKENS = 256
NUM_PROMPT_TOKENS = 1500
START_S = 240.0
ANSWER_S = 240.0
MOST_ATTEMPTS = 10
_SHM_BYTES = 2**28
_LOOK_S = 0.1


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Return once `condition` holds; the test fails where it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(_LOOK_S)


class Console:
    """A client on a host that does as the test says; see `tests.hosts.console`."""

    def __init__(self, host: Host, engine: dict[str, Any], num_requests: int) -> None:
        """Start or join an engine from a host, and return when it is there."""
        self._host = host
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        settings = {
            "engine": engine,
            "num_requests": num_requests,
            "num_tokens": NUM_PROMPT_TOKENS,
        }
        self._process = host.start(
            [PYTHON, "-m", "tests.hosts.console", json.dumps(settings)], ENVIRONMENT
        )
        threading.Thread(target=self._listen, daemon=True).start()
        self._answer(START_S)

    def ask(self, order: str, **arguments: Any) -> dict[str, Any]:
        """Give an order and return its answer; the test fails where that is an error."""
        assert self._process.stdin is not None
        print(json.dumps({"order": order, **arguments}), file=self._process.stdin, flush=True)
        return self._answer(ANSWER_S)

    def run(self, name: str) -> list[str]:
        """Run all requests to their end, and return the bits of each."""
        found: list[str] = self.ask("results", **self.ask("submit", name=name))["bits"]
        return found

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            pytest.fail(f"no answer within {timeout_s:g} s: {self._host.log}")
        if answer is None or "error" in answer:
            pytest.fail(f"{answer}: {self._host.log}")
        return answer

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(json.loads(line))
        self._answers.put(None)


def engine_settings(head: Host, model: Path, num_workers: int) -> dict[str, Any]:
    """Workers need a CPU each, so there is one on each host with a CPU; the rest is on the head."""
    return {
        "model": str(model),
        "num_workers": num_workers,
        "device": "cpu",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_blocks": 1000,
        "max_num_batched_tokens": 16,
        "num_threads": 1,
        "offload_bytes": 2**25,
        "save_finished": False,
        "save_segment_tokens": SEGMENT_TOKENS,
        "enable_prefix_caching": False,
        "journal_path": "/tmp/requests.db",
        "ray_address": ray_address(head),
    }


def in_mid_prefill(
    console: Console, name: str, host: Host, num_computed_tokens: int, **how: Any
) -> tuple[list[str], str]:
    """Submit requests until one is so far on a host; return their ids, and its worker's.

    A busy machine may look too late: then others are submitted.
    """
    for attempt in range(MOST_ATTEMPTS):
        request_ids = console.ask("submit", name=f"{name}-{attempt}", **how)["request_ids"]
        found = console.ask(
            "wait_for_prefill", address=host.address, num_computed_tokens=num_computed_tokens
        )
        if found["worker_id"] is not None:
            return request_ids, found["worker_id"]
    pytest.fail(f"none of {MOST_ATTEMPTS} looks came in time")


class Stage:
    """Hosts h1 to h4, with Ray on all but the last, and an engine with workers on h2 and h3."""

    def __init__(self, folder: Path, model: Path) -> None:
        """Build it up."""
        self._fleet = make_fleet(folder, 4, model)
        try:
            self.head, self.victim, self.survivor, self.spare = self._fleet.hosts
            start_head(self.head)
            join(self.head, [self.victim, self.survivor])
            self.console = Console(self.head, engine_settings(self.head, model, 2), num_requests=4)
            self.undisturbed = self.console.run("calm")
        except BaseException:
            self.destroy()
            raise
        self.is_whole = True
        """Whether another test can use it."""

    def destroy(self) -> None:
        """Take all hosts away."""
        self._fleet.destroy()

    def begin(self, name: str, num_computed_tokens: int) -> tuple[list[str], str]:
        """Submit requests; return their ids, and of the worker on the victim, when one is so far.

        That one is in the middle of its prompt. What the test does next leaves the stage unfit for
        others until `assert_whole`.
        """
        self.is_whole = False
        return in_mid_prefill(self.console, name, self.victim, num_computed_tokens)

    def assert_same_bits(self, request_ids: list[str]) -> list[dict[str, int]]:
        """Wait for results, which are as if nothing had happened; return what did, per request."""
        found = self.console.ask("results", request_ids=request_ids)
        assert found["bits"] == self.undisturbed
        stats: list[dict[str, int]] = found["stats"]
        return stats

    def assert_whole(self) -> Mapping[str, Any]:
        """Wait until nothing is left of any request and both workers are there, one on each host.

        Returns:
            the counters.
        """
        found = self.console.ask("wait_until_idle", num_workers=2)
        where = sorted(worker["address"] for worker in found["workers"].values())
        assert where == [self.victim.address, self.survivor.address]
        assert found["scheduler"]["num_recomputed_rows"] == 0
        self.is_whole = True
        return found


def make_fleet(folder: Path, num_hosts: int, model: Path, *, ssh: bool = False) -> Fleet:
    """Make hosts that see the checkout, its Python and the model, or skip the test."""
    reason = why_no_hosts(ssh=ssh)
    if reason is not None:
        pytest.skip(reason)
    return Fleet(folder, num_hosts, shared=[*SHARED, model], shm_bytes=_SHM_BYTES, ssh=ssh)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with one token per byte."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def hosts(tmp_path: Path, tiny_model: Path) -> Iterator[Sequence[Host]]:
    """Three hosts that see the checkout, its Python and the tiny model."""
    with make_fleet(tmp_path, 3, tiny_model) as fleet:
        yield fleet.hosts


@pytest.fixture(scope="module")
def _stages() -> Iterator[list[Stage]]:
    """The stage that was used last, if any: to build it up takes longer than a test."""
    stages: list[Stage] = []
    yield stages
    for stage in stages:
        stage.destroy()


@pytest.fixture
def stage(
    _stages: list[Stage], tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Stage:
    """An engine over several hosts, idle and whole; the one of the test before where it is that."""
    if _stages and not _stages[-1].is_whole:
        _stages.pop().destroy()
    if not _stages:
        _stages.append(Stage(tmp_path_factory.mktemp("stage"), tiny_model))
    return _stages[-1]
