"""A local Ray and one small engine that most tests share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster import Client, RequestOutput
from cluster.handle import RequestHandle
from scheduler.codec import encode
from tests.tiny_models import tiny_llama

DEADLINE_S = 60.0
NUM_CPUS = 8
"""Logical ones: what Ray may hand out, however many the machine has."""
ENGINE: dict[str, Any] = {
    "num_workers": 2,
    "device": "cpu",
    "dtype": "float32",
    "block_size": 8,
    "num_blocks": 80,
    "max_num_batched_tokens": 64,
    "offload_bytes": 2**24,
    "num_threads": 1,
    "startup_timeout_s": 90.0,
    "namespace": "haversack-tests",
}
"""Settings of the engines under test, but for their model and name."""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Return once `condition` holds; fail where it does not within the deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {DEADLINE_S:g} s: {what}")
        time.sleep(0.02)


def actors_of(engine_name: str) -> list[str]:
    """Return the names of an engine's actors that have not ended."""
    return [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(f"haversack-{engine_name}-")
    ]


def pid_of(actor_name: str, timeout_s: float = DEADLINE_S) -> int:
    """Return the process of an actor of the engines under test."""
    handle = ray.get_actor(actor_name, namespace=ENGINE["namespace"])
    return int(ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=timeout_s))


def bits(output: RequestOutput) -> bytes:
    """Everything about a result that must not depend on what the request went through."""
    views = [output.prompt_logprobs, *(completion.logprobs for completion in output.outputs)]
    arrays = [view.arrays if view is not None else None for view in views]
    ends = [(c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]
    return encode([output.prompt_token_ids, arrays, ends])


def assert_equal_bits(handles: list[RequestHandle], expected: list[RequestOutput]) -> None:
    for handle, wanted in zip(handles, expected, strict=True):
        assert bits(handle.result(timeout=DEADLINE_S)) == bits(wanted), handle


@contextmanager
def engine_with_journal(
    model: str, name: str, factory: pytest.TempPathFactory, **settings: Any
) -> Iterator[Client]:
    """An engine whose parts may be killed: they come back by themselves."""
    journal = factory.mktemp("journal") / "requests.db"
    all_settings = ENGINE | {"journal_path": str(journal)} | settings
    with Client(model=model, name=name, **all_settings) as client:
        yield client


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="session")
def local_cluster() -> Iterator[None]:
    """Ray, started for this test run alone."""
    if ray.is_initialized():
        yield
        return
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        namespace="haversack-tests",
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random Llama with one token per byte."""
    return str(tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama"))


@pytest.fixture(scope="session")
def shared_client(local_cluster: None, tiny_model: str) -> Iterator[Client]:
    """The client that started the shared engine."""
    with Client(model=tiny_model, name="shared", **ENGINE) as client:
        yield client


@pytest.fixture
def client(shared_client: Client) -> Iterator[Client]:
    """The shared engine, idle before the test and, which is checked, after it."""
    yield shared_client
    wait_for(lambda: not shared_client.requests(), "every request of the test ends")
    wait_for(
        lambda: shared_client.stats().scheduler.num_used_blocks == 0,
        "every block is given back",
    )
