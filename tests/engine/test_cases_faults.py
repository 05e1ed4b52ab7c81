"""Real actors: what other engines' users report when processes die, clients leave or calls fail."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from cluster import Client, RequestOutput, SamplingParams
from cluster.config import EngineConfig
from cluster.handle import RequestHandle
from cluster.launch import kill_engine
from scheduler.errors import DeadlineExceeded, RequestFailed
from scheduler.messages import WorkerReport
from tests.engine.conftest import (
    DEADLINE_S,
    ENGINE,
    LASTING,
    assert_equal_bits,
    assert_idle,
    caught,
    engine_with_journal,
    pid_of,
    start_as,
    wait_for,
)
from workers.actor import WorkerActor

pytestmark = pytest.mark.slow

SECONDS = 20.0
"""Within which the engine says how it is, whatever has just died, also on a busy machine."""
PROMPTS = [[40 + (i * j) % 100 for j in range(400)] for i in range(1, 9)]
PARAMS = SamplingParams(max_tokens=40, prompt_logprobs=1, logprobs=1, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(
    local_cluster: None, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    with engine_with_journal(
        tiny_model, "faulty", tmp_path_factory, save_segment_tokens=64
    ) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(engine: Client) -> list[RequestOutput]:
    return engine.generate(PROMPTS, PARAMS)


def soon(ask: Callable[[], Any]) -> Any:
    """Ask the engine, which has to answer within seconds."""
    begin_s = time.monotonic()
    answer = ask()
    assert time.monotonic() - begin_s < SECONDS
    return answer


def in_mid_prefill(client: Client) -> WorkerReport | None:
    """A worker with a request of which a part of the prompt is computed."""
    for info in client.requests():
        if info.worker_id and 0 < info.num_computed_tokens < info.num_prompt_tokens:
            return next(w for w in client.workers() if w.worker_id == info.worker_id)
    return None


def assert_whole(client: Client) -> None:
    assert_idle(client)
    wait_for(lambda: len(client.workers()) == 2, "both workers are there")
    assert client.stats().scheduler.num_recomputed_rows == 0


def test_workers_killed_in_mid_prefill_and_in_turn_and_then_the_scheduler(
    engine: Client, undisturbed: list[RequestOutput]
) -> None:
    """Every request ends with its own bits, and the engine says meanwhile how it is."""
    handles, first = caught(
        lambda: engine.submit_many(PROMPTS, PARAMS),
        lambda: in_mid_prefill(engine),
        "a request is in mid-prefill",
    )
    killed = [first]
    os.kill(first.pid, signal.SIGKILL)
    for num_killed in (1, 2, 3):
        wait_for(
            lambda n=num_killed: soon(engine.stats).scheduler.num_workers_lost >= n,
            "the loss is noticed",
        )
        left = soon(engine.workers)
        assert not {worker.worker_id for worker in killed} & {w.worker_id for w in left}
        wait_for(lambda: bool(soon(engine.workers)), "a worker is there")
        killed.append(max(engine.workers(), key=lambda worker: worker.num_running))
        os.kill(killed[-1].pid, signal.SIGKILL)
    os.kill(pid_of("haversack-faulty-scheduler"), signal.SIGKILL)
    soon(engine.stats)
    soon(engine.workers)
    late = engine.submit_many(PROMPTS[:2], PARAMS)
    assert_equal_bits([*handles, *late], [*undisturbed, *undisturbed[:2]])
    assert_whole(engine)


def test_of_two_clients_one_hangs_up_and_the_other_gets_all_although_a_worker_is_lost(
    engine: Client, undisturbed: list[RequestOutput]
) -> None:
    settings = {"name": "faulty", "namespace": ENGINE["namespace"], "start": False}
    with Client(**settings) as staying:
        with Client(**settings) as leaving:
            alone = leaving.submit(PROMPTS[0], LASTING, request_id="alone")
            attempts = itertools.count()

            def submit_to_both() -> list[RequestHandle]:
                attempt = next(attempts)
                ids = [f"both-{attempt}-{i}" for i in range(len(PROMPTS))]
                leaving.submit_many(PROMPTS, PARAMS, request_ids=ids)
                return staying.submit_many(PROMPTS, PARAMS, request_ids=ids)

            handles, victim = caught(
                submit_to_both, lambda: in_mid_prefill(engine), "a request is in mid-prefill"
            )
            os.kill(victim.pid, signal.SIGKILL)
        assert alone.done()
        wait_for(
            lambda: "alone" not in {info.request_id for info in engine.requests()},
            "what nobody waits for ends",
        )
        assert_equal_bits(handles, undisturbed)
    assert_whole(engine)


def test_a_client_that_runs_out_of_time_and_tries_again_queues_one_request(engine: Client) -> None:
    """Under its id, while the engine is busy with others: dead tries are not computed."""
    busy = engine.submit_many(PROMPTS, LASTING, priority=-1)
    before = engine.stats().scheduler
    for _ in range(10):
        handle = engine.submit(PROMPTS[0], PARAMS, request_id="patient", timeout_s=0.01, priority=1)
        assert sum(i.request_id == "patient" for i in engine.requests()) <= 1
        with pytest.raises(DeadlineExceeded):
            handle.result(timeout=DEADLINE_S)
    after = engine.stats().scheduler
    assert after.num_expired - before.num_expired == 10
    for handle in busy:
        handle.cancel()
    output = engine.submit(PROMPTS[0], PARAMS, request_id="patient").result(timeout=DEADLINE_S)
    assert len(output.outputs[0].token_ids) == PARAMS.max_tokens
    assert_whole(engine)


# ------------------------------------------------------------------------ calls that always fail


class BrokenWorker(WorkerActor):
    """Every step of it raises."""

    def execute(self, epoch: int, data: bytes) -> bytes:
        raise RequestFailed("boom")


def num_objects(_: object) -> int:
    """Count what the garbage collector sees and can't collect, in the process that runs this."""
    gc.collect()
    return len(gc.get_objects())


def test_thousands_of_steps_that_fail_leave_no_object_in_the_scheduler(
    local_cluster: None, tiny_model: str
) -> None:
    """An error or a call that is kept for each of them would be seen."""
    config = EngineConfig(
        model=tiny_model, name="broken", **ENGINE | {"num_workers": 1, "max_num_seqs": 8}
    )
    handles = start_as(config, worker_class=BrokenWorker)
    try:
        with Client(name="broken", namespace=config.namespace, start=False) as client:
            counts = []
            for _ in range(7):
                for handle in client.submit_many([PROMPTS[0][:40]] * 300, PARAMS):
                    with pytest.raises(RequestFailed, match="boom"):
                        handle.result(timeout=DEADLINE_S)
                asked = handles.scheduler.__ray_call__.remote(num_objects)
                counts.append(ray.get(asked, timeout=DEADLINE_S))
            stats = client.stats().scheduler
            assert stats.num_failed == 2100
            # A step that was sent ahead may fail with the one before it.
            assert stats.num_steps < 3 * stats.num_failed, "nothing is tried for ever"
            assert counts[-1] - counts[1] < 500, counts
    finally:
        kill_engine(handles)
