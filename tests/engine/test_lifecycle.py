"""Engines that come up, fail to, lose their parts, get them back, and end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import ray

from cluster import (
    Client,
    EngineUnavailable,
    ModelNotFound,
    RequestOutput,
    SamplingParams,
    StartupFailed,
)
from cluster.config import EngineConfig
from cluster.launch import EngineHandles, engine_spec, kill_engine, start_engine
from scheduler.actor import SchedulerActor
from scheduler.codec import decode, encode
from scheduler.messages import Submission, WorkerReport
from scheduler.outbox import PollAnswer
from tests.engine.conftest import (
    DEADLINE_S,
    ENGINE,
    LASTING,
    NUM_CPUS,
    actors_of,
    assert_equal_bits,
    engine_with_journal,
    is_running,
    pid_of,
    start_as,
    wait_for,
)
from tests.engine.faults import num_parts
from workers.actor import WorkerActor

PROMPT = list(range(40, 75))
PROMPTS = [[40 + (i * j) % 100 for j in range(90)] for i in range(1, 7)]
PARAMS = SamplingParams(max_tokens=60, prompt_logprobs=1, logprobs=1, seed=3, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("local_cluster")


@contextlib.contextmanager
def engine(config: EngineConfig, **settings: Any) -> Iterator[EngineHandles]:
    handles = start_engine(config, **settings)
    assert handles is not None
    try:
        yield handles
    finally:
        kill_engine(handles)


def pids_of(client: Client, name: str) -> list[int]:
    """The processes of an engine."""
    parts = [pid_of(f"haversack-{name}-scheduler"), pid_of(f"haversack-{name}-store")]
    return parts + [worker.pid for worker in client.workers()]


@contextlib.contextmanager
def busy_worker(client: Client) -> Iterator[WorkerReport]:
    """A worker that has requests, with one among them that lasts until this is left."""
    company = client.submit(PROMPT, LASTING)
    wait_for(lambda: any(w.num_running for w in client.workers()), "a worker has requests")
    try:
        yield max(client.workers(), key=lambda worker: worker.num_running)
    finally:
        company.cancel()
    assert company.result(timeout=DEADLINE_S).outputs[0].finish_reason == "abort"


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process and a folder of its own, which know of no Ray on this machine."""
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as ray_folder:  # its path is short
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=env | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_TMPDIR": ray_folder},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=5 * DEADLINE_S,
        )


# ------------------------------------------------------------------------------------- starting


def test_asking_for_more_than_there_is_fails_at_once_and_leaves_nothing(tiny_model: str) -> None:
    """Elsewhere such a start hangs for ever and says nothing."""
    begin_s = time.monotonic()
    settings = ENGINE | {"num_workers": 3, "cpus_per_worker": 4.0}
    with pytest.raises(StartupFailed) as caught:
        Client(model=tiny_model, name="greedy", **settings)
    assert time.monotonic() - begin_s < settings["startup_timeout_s"] / 2
    for fact in ("12 CPU", "3 workers", f"no node has more than {NUM_CPUS} CPU"):
        assert fact in str(caught.value)
    wait_for(lambda: not actors_of("greedy"), "no actor is left")


def test_a_model_that_is_not_there_is_said_as_what_it_is() -> None:
    with pytest.raises(ModelNotFound, match="no-such-folder"):
        Client(model="/no-such-folder", name="empty", **ENGINE)
    wait_for(lambda: not actors_of("empty"), "no actor is left")


def test_a_start_that_takes_too_long_fails_and_leaves_nothing(tiny_model: str) -> None:
    settings = ENGINE | {"startup_timeout_s": 0.2}
    with pytest.raises(StartupFailed, match=r"within 0\.2 s"):
        Client(model=tiny_model, name="slow", **settings)
    wait_for(lambda: not actors_of("slow"), "no actor is left")


@pytest.mark.slow
def test_a_worker_that_dies_at_every_start_is_not_started_for_ever(tiny_model: str) -> None:
    config = EngineConfig(
        model=tiny_model, name="stillborn", **ENGINE | {"num_workers": 1, "max_worker_restarts": 1}
    )
    with pytest.raises(StartupFailed, match="max_worker_restarts=1"):
        start_as(config, worker_class=StillbornWorker)
    wait_for(lambda: not actors_of("stillborn"), "no actor is left")


class StillbornWorker(WorkerActor):
    """Dies while it loads its model."""

    def reset(self, epoch: int) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(epoch)


class LastOfItsKind(WorkerActor):
    """Only the first worker of an engine comes up; those after it die."""

    def reset(self, epoch: int) -> bytes:
        if self._worker_id != "worker-0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(epoch)


# --------------------------------------------------------------------------------------- losses


@pytest.fixture(scope="module")
def mortal(
    local_cluster: None, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    with engine_with_journal(tiny_model, "mortal", tmp_path_factory) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(mortal: Client) -> list[RequestOutput]:
    return mortal.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_killed_or_frozen_worker_is_replaced_and_no_request_sees_it(
    mortal: Client, undisturbed: list[RequestOutput], sign: int
) -> None:
    running = mortal.submit_many(PROMPTS, PARAMS)
    with busy_worker(mortal) as victim:
        os.kill(victim.pid, sign)
        assert_equal_bits(running, undisturbed)
        wait_for(lambda: not is_running(victim.pid), "the process has ended")
    wait_for(lambda: len(mortal.workers()) == 2, "another worker has joined")
    assert victim.worker_id not in {worker.worker_id for worker in mortal.workers()}


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_store_comes_back_empty_and_is_used_again(
    mortal: Client, undisturbed: list[RequestOutput], sign: int
) -> None:
    victim = pid_of("haversack-mortal-store")
    num_lost = mortal.stats().scheduler.num_stores_lost
    os.kill(victim, sign)
    running = mortal.submit_many(PROMPTS, PARAMS)
    for handle in running:
        mortal.evict(handle.request_id)
    assert_equal_bits(running, undisturbed)
    wait_for(lambda: not is_running(victim), "the old process has ended")
    wait_for(
        lambda: mortal.stats().scheduler.num_stores_lost > num_lost,
        "the scheduler has heard of it",
    )
    handle = mortal.submit(PROMPTS[0], PARAMS)
    mortal.evict(handle.request_id)
    assert_equal_bits([handle], undisturbed[:1])
    wait_for(lambda: (mortal.stats().store or {}).get("num_saved_blocks", 0) > 0, "it is used")


def test_a_killed_scheduler_comes_back_with_its_workers_and_requests(
    mortal: Client, undisturbed: list[RequestOutput]
) -> None:
    """The engine needs nobody for that: here its client only waits."""
    running = mortal.submit_many(PROMPTS, PARAMS)
    before = {worker.worker_id: worker.pid for worker in mortal.workers()}
    with busy_worker(mortal):
        os.kill(pid_of("haversack-mortal-scheduler"), signal.SIGKILL)
        assert_equal_bits(running, undisturbed)
    assert {worker.worker_id: worker.pid for worker in mortal.workers()} == before
    assert mortal.stats().scheduler.num_requests_restored > 0


@pytest.mark.slow
def test_the_names_of_lost_workers_are_not_used_again_after_a_restart(
    mortal: Client, undisturbed: list[RequestOutput]
) -> None:
    """A worker dies while there is no scheduler that could see it."""
    running = mortal.submit_many(PROMPTS, PARAMS)
    with busy_worker(mortal) as victim:
        others = {worker.worker_id for worker in mortal.workers()} - {victim.worker_id}
        os.kill(pid_of("haversack-mortal-scheduler"), signal.SIGKILL)
        os.kill(victim.pid, signal.SIGKILL)
        assert_equal_bits(running, undisturbed)
    wait_for(lambda: len(mortal.workers()) == 2, "another worker has joined")
    [new_id] = {worker.worker_id for worker in mortal.workers()} - others
    number, old = (int(name.removeprefix("worker-")) for name in (new_id, victim.worker_id))
    assert number > old


@pytest.mark.slow
def test_when_no_worker_comes_up_any_more_what_waits_ends_with_the_reason(tiny_model: str) -> None:
    config = EngineConfig(
        model=tiny_model, name="lastborn", **ENGINE | {"num_workers": 1, "max_worker_restarts": 2}
    )
    handles = start_as(config, worker_class=LastOfItsKind)
    try:
        with Client(name="lastborn", namespace=config.namespace, start=False) as client:
            running = client.submit(PROMPT, LASTING)
            wait_for(lambda: client.workers()[0].num_running == 1, "it runs")
            os.kill(client.workers()[0].pid, signal.SIGKILL)
            with pytest.raises(EngineUnavailable, match="max_worker_restarts=2"):
                running.result(timeout=DEADLINE_S)
            with pytest.raises(EngineUnavailable):
                client.submit(PROMPT)
    finally:
        kill_engine(handles)


@pytest.mark.slow
def test_a_drained_worker_ends_and_is_not_replaced(tiny_model: str) -> None:
    with Client(model=tiny_model, name="shrinking", **ENGINE) as client:
        expected = client.generate(PROMPTS, PARAMS)
        running = client.submit_many(PROMPTS, PARAMS)
        with busy_worker(client) as leaving:
            client.drain(leaving.worker_id, 30.0)
            assert_equal_bits(running, expected)
            wait_for(lambda: not is_running(leaving.pid), "its process has ended")
        assert len(client.workers()) == 1
        left = Counter(scheduler=1, store=1, worker=1)
        wait_for(lambda: num_parts(client) == left, "no other has taken its place")


@pytest.mark.slow
def test_the_worker_of_a_node_that_is_to_go_moves_to_another_node(
    tiny_model: str, tmp_path: Path
) -> None:
    """A spot notice: nobody asks for a drain, and yet nothing runs there when the node goes."""
    said = run_script(
        f"""
        import subprocess, sys, time
        from pathlib import Path
        import ray
        from ray.cluster_utils import Cluster
        from cluster import Client, SamplingParams
        from tests.engine.conftest import ENGINE, wait_for

        nodes = Cluster(initialize_head=True, head_node_args={{"num_cpus": 0}})
        ray.init(address=nodes.address, namespace="haversack-tests", log_to_driver=False)
        spot = nodes.add_node(num_cpus=1)
        params = SamplingParams(max_tokens=400, prompt_logprobs=1, seed=3, ignore_eos=True)
        prompts = [[40 + (i * j) % 100 for j in range(90)] for i in range(1, 5)]
        settings = ENGINE | {{"num_workers": 1, "cpus_per_worker": 1.0}}
        with Client(model={tiny_model!r}, name="spot", **settings) as client:
            expected = client.generate(prompts, params)
            [leaving] = client.workers()
            nodes.add_node(num_cpus=1)
            running = client.submit_many(prompts, params)
            subprocess.run(
                [Path(sys.executable).parent / "ray", "drain-node", "--address", nodes.address,
                 "--node-id", leaving.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
                 "--reason-message", "spot notice", "--deadline-remaining-seconds", "60"],
                check=True, capture_output=True,
            )
            for handle, wanted in zip(running, expected):
                output = handle.result(timeout=120)
                assert output.outputs == wanted.outputs
                assert output.prompt_logprobs == wanted.prompt_logprobs
            wait_for(lambda: [w.worker_id for w in client.workers()] == ["worker-1"], "it moved")
            [there] = client.workers()
            assert there.node_id != leaving.node_id
            stats = client.stats().scheduler
            assert stats.num_workers_drained == 1 and stats.num_workers_lost == 0, stats
        ray.shutdown()
        nodes.shutdown()
        print("moved")
        """,
        tmp_path,
    )
    assert said.stdout.split() == ["moved"], said.stderr


# ---------------------------------------------------------------------------------------- ending


@pytest.mark.slow
def test_when_an_engine_ends_no_actor_and_no_process_of_it_is_left(tiny_model: str) -> None:
    with Client(model=tiny_model, name="passing", **ENGINE | {"num_workers": 1}) as client:
        pids = pids_of(client, "passing")
        assert len(pids) == 3
        assert all(is_running(pid) for pid in pids)
        client.submit(PROMPT, LASTING)
    assert not actors_of("passing")
    wait_for(lambda: not any(is_running(pid) for pid in pids), "every process has ended")


@pytest.mark.slow
def test_an_engine_ends_when_the_client_that_started_it_has_gone(tiny_model: str) -> None:
    """Its process was killed: nobody says that it leaves. Another client is told why."""
    config = EngineConfig(
        model=tiny_model, name="orphan", **ENGINE | {"num_workers": 1, "client_grace_s": 8.0}
    )
    with engine(config, owner_client_id="killed"):
        with Client(name="orphan", namespace=config.namespace, start=False) as client:
            running = client.submit_many([PROMPT] * 100, LASTING)
            with pytest.raises(EngineUnavailable, match="client that had started it"):
                running[-1].result(timeout=DEADLINE_S)
        wait_for(lambda: not actors_of("orphan"), "no actor is left")


@pytest.mark.slow
def test_an_engine_that_was_started_to_stay_needs_its_starter_for_nothing(
    tiny_model: str, tmp_path: Path
) -> None:
    """The process that started it has ended, and still each part of it comes back."""
    config = EngineConfig(
        model=tiny_model,
        name="staying",
        journal_path=str(tmp_path / "requests.db"),
        ray_address=ray.get_runtime_context().gcs_address,
        **ENGINE | {"num_workers": 1},
    )
    said = run_script(
        f"""
        from cluster.config import EngineConfig
        from cluster.connecting import connect_to_ray
        from cluster.launch import start_engine
        config = EngineConfig(**{msgspec.structs.asdict(config)!r})
        connect_to_ray(config)
        print(start_engine(config) is not None)
        """,
        tmp_path,
    )
    assert said.stdout.split() == ["True"], said.stderr
    scheduler = ray.get_actor("haversack-staying-scheduler", namespace=config.namespace)
    try:
        with Client(name="staying", namespace=config.namespace, start=False) as client:
            expected = client.generate(PROMPTS, PARAMS)
            running = client.submit_many(PROMPTS, PARAMS)
            os.kill(pid_of("haversack-staying-scheduler"), signal.SIGKILL)
            assert_equal_bits(running, expected)
            running = client.submit_many(PROMPTS, PARAMS)
            with busy_worker(client) as victim:
                os.kill(victim.pid, signal.SIGKILL)
                assert_equal_bits(running, expected)
            wait_for(lambda: len(client.workers()) == 1, "another worker has joined")
        assert actors_of("staying"), "it stays when its clients leave"
    finally:
        kill_engine(EngineHandles(scheduler, config.namespace, config.name))


@pytest.mark.slow
def test_a_client_that_vanishes_leaves_no_request_behind(tiny_model: str) -> None:
    config = EngineConfig(
        model=tiny_model, name="left", **ENGINE | {"num_workers": 1, "client_grace_s": 5.0}
    )
    with engine(config) as handles:
        ray.get(handles.scheduler.connect.remote("vanishing"))
        abandoned = Submission("abandoned", np.array(PROMPT, np.int32), LASTING, seed=0)
        answer = ray.get(handles.scheduler.submit.remote("vanishing", encode([abandoned])))
        assert decode(answer, list[None]) == [None]
        with Client(name="left", namespace=config.namespace, start=False) as client:
            wait_for(lambda: not client.requests(), "the vanished client's request ends")
            assert client.stats().scheduler.num_aborted == 1


@pytest.mark.slow
def test_when_the_scheduler_is_ended_every_handle_ends(tiny_model: str) -> None:
    config = EngineConfig(model=tiny_model, name="headless", **ENGINE | {"num_workers": 1})
    with engine(config) as handles:
        client = Client(name="headless", namespace=config.namespace, start=False)
        running = client.submit_many([PROMPT] * 5, LASTING)
        ray.kill(handles.scheduler)
        for handle in running:
            with pytest.raises(EngineUnavailable):
                handle.result(timeout=DEADLINE_S)
        with pytest.raises(EngineUnavailable):
            client.submit(PROMPT)
        client.close()


@pytest.mark.slow
def test_waiting_polls_keep_no_control_call_from_starting(tiny_model: str) -> None:
    """Far more polls wait than Ray starts at once, and the calls that matter still get through."""
    config = EngineConfig(
        model=tiny_model,
        name="crowded",
        **ENGINE | {"num_workers": 1, "client_grace_s": 100 * DEADLINE_S},
    )
    spec, fleet = engine_spec(config)
    scheduler = fleet.start_scheduler(SchedulerActor, {"poll": 8, "control": 4}, spec)
    ray.get(scheduler.ready.remote(), timeout=DEADLINE_S)
    polls = []
    for index in range(1000):
        if index < 20:
            ray.get(scheduler.connect.remote(f"c{index}"), timeout=DEADLINE_S)
        polls.append(scheduler.poll.remote(f"c{index % 20}", 0, 100 * DEADLINE_S))
    try:
        for method, arguments in (
            ("stats", ()),
            ("requests", ()),
            ("cancel", (["nobody"],)),
            ("evict", (["nobody"],)),
            ("workers", ()),
            ("connect", ("late",)),
        ):
            ray.get(getattr(scheduler, method).remote(*arguments), timeout=DEADLINE_S)
        assert ray.wait(polls, num_returns=1000, timeout=0)[1], "no poll waits any more"
        ray.get(scheduler.shutdown.remote(), timeout=DEADLINE_S)
        answers = ray.get(polls, timeout=DEADLINE_S)
        assert decode(answers[-1], PollAnswer).closed is not None
    finally:
        kill_engine(EngineHandles(scheduler, config.namespace, config.name))


@pytest.mark.slow
def test_a_script_starts_and_ends_its_own_ray(tiny_model: str, tmp_path: Path) -> None:
    """No Ray to join: the client starts one, and nothing of it is left when the script ends."""
    done = run_script(
        f"""
        import ray
        from cluster import Client, SamplingParams, submit
        with Client(model={tiny_model!r}, num_workers=1, device="cpu", cpus_per_worker=0.1,
                    num_blocks=16) as client:
            output = submit([65, 66, 67], SamplingParams(max_tokens=3)).result(timeout=60)
            print(len(output.outputs[0].token_ids))
        print(ray.is_initialized())
        """,
        tmp_path,
    )
    assert done.stdout.split() == ["3", "False"], done.stderr
