"""Engines that come up, fail to, lose their parts and end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from cluster import Client, EngineUnavailable, ModelNotFound, SamplingParams, StartupFailed
from cluster.config import EngineConfig
from cluster.launch import EngineHandles, kill_engine, start_engine
from scheduler.actor import SchedulerActor
from scheduler.codec import decode, encode
from scheduler.config import SchedulerConfig
from scheduler.messages import Submission, WorkerInfo
from scheduler.outbox import PollAnswer
from tests.engine.conftest import DEADLINE_S, ENGINE, NUM_CPUS, wait_for

PROMPT = list(range(40, 75))
LONG = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("local_cluster")


def named_actors(name: str) -> list[str]:
    return [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(f"haversack-{name}-")
    ]


@contextlib.contextmanager
def engine(config: EngineConfig, **settings: Any) -> Iterator[EngineHandles]:
    handles = start_engine(config, **settings)
    assert handles is not None
    try:
        yield handles
    finally:
        kill_engine(handles)


def kill_process(worker: WorkerInfo) -> None:
    os.kill(worker.pid, signal.SIGKILL)


def test_asking_for_more_than_there_is_fails_at_once_and_leaves_nothing(tiny_model: str) -> None:
    """Elsewhere such a start hangs for ever and says nothing."""
    begin_s = time.monotonic()
    settings = ENGINE | {"num_workers": 3, "cpus_per_worker": 4.0}
    with pytest.raises(StartupFailed) as caught:
        Client(model=tiny_model, name="greedy", **settings)
    assert time.monotonic() - begin_s < settings["startup_timeout_s"] / 2
    for fact in ("12 CPU", "3 workers", f"{NUM_CPUS} CPU"):
        assert fact in str(caught.value)
    wait_for(lambda: not named_actors("greedy"), "no actor is left")


def test_a_model_that_is_not_there_is_said_as_what_it_is() -> None:
    with pytest.raises(ModelNotFound, match="no-such-folder"):
        Client(model="/no-such-folder", name="empty", **ENGINE)
    wait_for(lambda: not named_actors("empty"), "no actor is left")


def test_a_start_that_takes_too_long_fails_and_leaves_nothing(tiny_model: str) -> None:
    settings = ENGINE | {"startup_timeout_s": 0.2}
    with pytest.raises(StartupFailed, match=r"within 0\.2 s"):
        Client(model=tiny_model, name="slow", **settings)
    wait_for(lambda: not named_actors("slow"), "no actor is left")


@pytest.mark.slow
def test_vanished_clients_and_lost_workers(tiny_model: str) -> None:
    """One engine's life: a client vanishes, a worker is killed, then the last one.

    The client's requests are cancelled; what the first worker computed goes on at the second with
    the same bits; with the last worker everything ends in an error, and nothing waits.
    """
    config = EngineConfig(model=tiny_model, name="mortal", **ENGINE)
    with engine(config, client_grace_s=1.0) as handles:
        ray.get(handles.scheduler.connect.remote("vanishing"))
        abandoned = Submission("abandoned", np.array(PROMPT, np.int32), LONG, seed=0)
        answer = ray.get(handles.scheduler.submit.remote("vanishing", encode([abandoned])))
        assert decode(answer, list[None]) == [None]
        with Client(name="mortal", namespace=config.namespace, start=False) as client:
            wait_for(lambda: not client.requests(), "the vanished client's request ends")
            assert client.stats().scheduler.num_aborted == 1

            params = SamplingParams(
                max_tokens=60, prompt_logprobs=1, logprobs=1, seed=3, ignore_eos=True
            )
            prompts = [[40 + (i * j) % 100 for j in range(90)] for i in range(1, 7)]
            expected = client.generate(prompts, params)
            running = client.submit_many(prompts, params)
            wait_for(
                lambda: any(i.worker_id == "worker-0" for i in client.requests()),
                "worker-0 has something to do",
            )
            kill_process(client.info.workers[0])
            for handle, wanted in zip(running, expected, strict=True):
                output = handle.result(timeout=DEADLINE_S)
                assert output.outputs == wanted.outputs
                assert output.prompt_logprobs == wanted.prompt_logprobs
            assert client.stats().scheduler.num_workers_lost == 1

            last = client.submit(PROMPT, LONG)
            kill_process(client.info.workers[1])
            with pytest.raises(EngineUnavailable, match="last worker"):
                last.result(timeout=DEADLINE_S)
            with pytest.raises(EngineUnavailable):
                client.submit(PROMPT)


def test_when_the_scheduler_dies_every_handle_ends_within_seconds(tiny_model: str) -> None:
    config = EngineConfig(model=tiny_model, name="headless", **ENGINE | {"num_workers": 1})
    with engine(config) as handles:
        client = Client(name="headless", namespace=config.namespace, start=False)
        running = client.submit_many([PROMPT] * 5, LONG)
        ray.kill(handles.scheduler)
        for handle in running:
            with pytest.raises(EngineUnavailable):
                handle.result(timeout=20)
        with pytest.raises(EngineUnavailable):
            client.submit(PROMPT)
        client.close()


def test_waiting_polls_keep_no_control_call_from_starting() -> None:
    """Far more polls wait than Ray starts at once, and the calls that matter still get through."""
    decorate: Any = ray.remote(num_cpus=0, concurrency_groups={"poll": 8, "control": 4})
    scheduler = decorate(SchedulerActor).remote("none", {})
    ray.get(scheduler.start.remote(encode(SchedulerConfig()), None), timeout=DEADLINE_S)
    polls = []
    for index in range(1000):
        if index < 20:
            ray.get(scheduler.connect.remote(f"c{index}"), timeout=DEADLINE_S)
        polls.append(scheduler.poll.remote(f"c{index % 20}", 0, 1000.0))
    try:
        for method, arguments in (
            ("stats", ()),
            ("requests", ()),
            ("cancel", (["nobody"],)),
            ("evict", (["nobody"],)),
            ("connect", ("late",)),
        ):
            ray.get(getattr(scheduler, method).remote(*arguments), timeout=5)
        assert ray.wait(polls, num_returns=1000, timeout=0)[1], "no poll waits any more"
        ray.get(scheduler.shutdown.remote(), timeout=5)
        answers = ray.get(polls, timeout=DEADLINE_S)
        assert decode(answers[-1], PollAnswer).closed is not None
    finally:
        ray.kill(scheduler)


@pytest.mark.slow
def test_a_script_starts_and_ends_its_own_ray(tiny_model: str, tmp_path: Path) -> None:
    """No Ray to join: the client starts one, and nothing of it is left when the script ends."""
    script = f"""
        import ray
        from cluster import Client, SamplingParams, submit
        with Client(model={tiny_model!r}, num_workers=1, device="cpu", cpus_per_worker=0.1,
                    num_blocks=16) as client:
            output = submit([65, 66, 67], SamplingParams(max_tokens=3)).result(timeout=60)
            print(len(output.outputs[0].token_ids))
        print(ray.is_initialized())
    """
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stdout.split() == ["3", "False"], done.stderr
