"""A local Ray and one small engine that most tests share."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray

from cluster import Client, RequestOutput, SamplingParams
from cluster.config import EngineConfig
from cluster.connecting import warn_on_stderr
from cluster.handle import RequestHandle
from cluster.launch import EngineHandles, engine_spec, kill_engine
from scheduler.actor import CONCURRENCY_GROUPS, SchedulerActor
from scheduler.calls import Timeouts
from scheduler.codec import encode
from tests.tiny_models import MAX_MODEL_LEN, tiny_llama
from workers.actor import WorkerActor

T = TypeVar("T")

DEADLINE_S = 120.0
"""For what has to happen, on the busiest machine: no test that passes waits so long."""
NUM_CPUS = 8
"""Logical ones: what Ray may hand out, however many the machine has."""
ENGINE: dict[str, Any] = {
    "num_workers": 2,
    "device": "cpu",
    "dtype": "float32",
    "block_size": 8,
    "num_blocks": MAX_MODEL_LEN // 8,
    "max_num_batched_tokens": 64,
    "offload_bytes": 2**24,
    "num_threads": 1,
    "startup_timeout_s": 300.0,
    "namespace": "haversack-tests",
}
"""Settings of the engines under test, but for their model and name."""
HASTY = Timeouts(step_s=3.0, step_s_per_token=0.05, store_s=10.0, ping_s=6.0)
"""For engines whose processes are frozen by a test: which one hangs is found within seconds. One
that is only slow may be taken for hung, and replaced, which costs time and nothing else."""


def lasting(**params: Any) -> SamplingParams:
    """Parameters of a request that has minutes to go, on any machine, unless a test ends it."""
    whole_context = {"max_tokens": MAX_MODEL_LEN, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(**whole_context | params)


LASTING = lasting()


def wait_for(
    condition: Callable[[], bool], what: str, found: Callable[[], Any] = lambda: ""
) -> None:
    """Return once `condition` holds; fail, and say what is `found`, where the deadline passes."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {DEADLINE_S:g} s: {what} {found()}")
        time.sleep(0.02)


def in_time(call: Callable[[], T]) -> T:
    """Return what a call that may wait for ever returns; fail where it does not in time."""
    end: Future[T] = Future()

    def run() -> None:
        try:
            end.set_result(call())
        except BaseException as error:
            end.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return end.result(2 * DEADLINE_S)
    except NotInTime:
        if end.done():
            raise
        pytest.fail(f"not within {2 * DEADLINE_S:g} s; of Ray are free {ray.available_resources()}")


def caught(
    submit: Callable[[], list[RequestHandle]], look: Callable[[], T | None], what: str
) -> tuple[list[RequestHandle], T]:
    """Submit requests and look at them until something is found; return them, and it.

    Requests that come to an end may do so before a busy machine looks: then others are submitted.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        handles = submit()
        while not all(handle.done() for handle in handles):
            found = look()
            if found is not None:
                return handles, found
            if time.monotonic() > deadline_s:
                pytest.fail(f"not within {DEADLINE_S:g} s: {what}")


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Have processes stand still meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


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


def start_as(
    config: EngineConfig, *, worker_class: type = WorkerActor, timeouts: Timeouts | None = None
) -> EngineHandles:
    """Start an engine, to stay, with workers of a class or deadlines that no setting gives."""
    spec, fleet = engine_spec(config)
    timeouts = timeouts or spec.timeouts
    fleet = dataclasses.replace(
        fleet,
        worker_class=worker_class,
        takeover_timeout_s=config.max_steps_in_flight
        * timeouts.for_step(config.max_num_batched_tokens),
    )
    spec = dataclasses.replace(spec, fleet=fleet, timeouts=timeouts)
    scheduler = fleet.start_scheduler(SchedulerActor, CONCURRENCY_GROUPS, spec)
    try:
        ray.get(scheduler.ready.remote(), timeout=config.startup_timeout_s + DEADLINE_S)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    return EngineHandles(scheduler, config.namespace, config.name)


@contextmanager
def engine_with_journal(
    model: str, name: str, factory: pytest.TempPathFactory, **settings: Any
) -> Iterator[Client]:
    """An engine whose parts may be killed or frozen: they come back by themselves, and soon."""
    journal = factory.mktemp("journal") / "requests.db"
    all_settings = ENGINE | {"journal_path": str(journal)} | settings
    config = EngineConfig(model=model, name=name, **all_settings)
    handles = start_as(config, timeouts=HASTY)
    try:
        with Client(name=name, namespace=config.namespace, start=False) as client:
            yield client
    finally:
        kill_engine(handles)


def assert_idle(client: Client) -> None:
    """Check that nothing is left of any request; what is left ends, for the next test."""
    try:
        wait_for(lambda: not client.requests(), "every request of the test ends")
        wait_for(lambda: client.stats().scheduler.num_used_blocks == 0, "every block is given back")
    finally:
        for info in client.requests():
            client.cancel(info.request_id.split("#")[0])


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="session")
def local_cluster() -> Iterator[None]:
    """Ray, started for this process alone, whichever others there are on the machine."""
    if ray.is_initialized():
        yield
        return
    _start_ray()
    yield
    ray.shutdown()


def _start_ray() -> None:
    """Start Ray. It gives up when it is not up within 30 s, which a busy machine may take."""
    warn_on_stderr()
    for is_last in (False, False, True):
        try:
            ray.init(
                address="local",
                num_cpus=NUM_CPUS,
                namespace=ENGINE["namespace"],
                include_dashboard=False,
                log_to_driver=False,
            )
            return
        except Exception:
            ray.shutdown()
            if is_last:
                raise


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
    assert_idle(shared_client)
