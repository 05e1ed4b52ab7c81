"""Real actors: two workers of two processes each, beside a model in one process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray

from cluster import Client, RequestOutput, SamplingParams
from scheduler.errors import InvalidRequest
from scheduler.messages import WorkerReport
from scheduler.request import Request
from tests.engine.conftest import (
    DEADLINE_S,
    ENGINE,
    assert_equal_bits,
    assert_idle,
    bits,
    caught,
    engine_with_journal,
    is_running,
    pid_of,
    wait_for,
)
from tests.runner_driver import RunnerDriver
from workers.loader import load_model
from workers.model_runner import ModelRunner

pytestmark = pytest.mark.slow

NAME = "ranks"
PROMPTS = [[40 + (i * j) % 100 for j in range(300)] for i in range(1, 7)]
GREEDY = SamplingParams(
    max_tokens=12, prompt_logprobs=2, logprobs=1, temperature=0.0, ignore_eos=True
)
LONG = SamplingParams(
    max_tokens=200, prompt_logprobs=1, logprobs=1, temperature=0.9, seed=3, ignore_eos=True
)


@pytest.fixture(scope="module")
def engine(
    local_cluster: None, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    settings = {
        "tensor_parallel_size": 2,
        "save_segment_tokens": 64,
        # So that what was evicted comes back from the store.
        "enable_prefix_caching": False,
    }
    with engine_with_journal(tiny_model, NAME, tmp_path_factory, **settings) as client:
        yield client
    assert groups() == []


@pytest.fixture(scope="module")
def undisturbed(engine: Client) -> list[RequestOutput]:
    return engine.generate(PROMPTS, GREEDY)


def groups() -> list[str]:
    """Names of the placement groups that are there."""
    table = ray.util.placement_group_table().values()
    return sorted(group["name"] for group in table if group["state"] != "REMOVED")


def ask(worker: WorkerReport, question: Callable[[Any], Any]) -> Any:
    """Ask a worker's process something that it tells nobody."""
    handle = ray.get_actor(f"haversack-{NAME}-{worker.worker_id}", namespace=ENGINE["namespace"])
    return ray.get(handle.__ray_call__.remote(question), timeout=DEADLINE_S)


def follower_pid(worker: WorkerReport) -> int:
    """Return the process of a worker's second rank."""

    def pid(own: Any) -> int:
        [handle] = own._loaded._followers._handles
        return int(ray.get(handle.__ray_call__.remote(lambda _: os.getpid())))

    return int(ask(worker, pid))


def in_mid_prefill(client: Client) -> WorkerReport | None:
    """A worker with a request of which a part of the prompt is computed."""
    for info in client.requests():
        if info.worker_id and 0 < info.num_computed_tokens < info.num_prompt_tokens:
            return next((w for w in client.workers() if w.worker_id == info.worker_id), None)
    return None


def alone(model: str, prompt: list[int]) -> Request:
    """Compute a request with the whole model in this process."""
    own = RunnerDriver(ModelRunner(load_model(model, dtype="float32"), num_blocks=100))
    return own.finish(own.request(prompt, GREEDY), [len(prompt)])


def test_tokens_are_those_of_one_process_and_rows_are_near(
    engine: Client, undisturbed: list[RequestOutput], tiny_model: str
) -> None:
    for prompt, output in zip(PROMPTS[:2], undisturbed, strict=False):
        whole = alone(tiny_model, prompt)
        assert output.outputs[0].token_ids == whole.output_token_ids
        assert whole.prompt_logprobs is not None
        assert output.prompt_logprobs is not None
        wanted = whole.prompt_logprobs.array().logprobs[:, 0]
        found = output.prompt_logprobs.arrays.logprobs[:, 0]
        assert found.shape == wanted.shape == (len(prompt) - 1,)
        assert np.abs(found - wanted).max() < 1e-3


def test_each_worker_has_its_processes_in_a_group_and_says_so(engine: Client) -> None:
    workers = engine.workers()
    assert [worker.devices for worker in workers] == ["2 x cpu"] * 2
    ids = sorted(worker.worker_id for worker in workers)
    assert groups() == [f"{ENGINE['namespace']}/haversack-{NAME}-{name}" for name in ids]
    table = ray.util.placement_group_table().values()
    assert {group["strategy"] for group in table} == {"STRICT_PACK"}
    pids = {worker.pid for worker in workers} | {follower_pid(worker) for worker in workers}
    assert len(pids) == 4


def test_kv_of_workers_is_interchangeable_where_they_have_as_many_processes(
    engine: Client, tiny_model: str
) -> None:
    """With another number its bits are others: no cache or journal may mix them."""

    def fingerprint(own: Any) -> str:
        return str(own._loaded.info("").model_fingerprint)

    found = {ask(worker, fingerprint) for worker in engine.workers()}
    assert len(found) == 1
    model = load_model(tiny_model, dtype="float32")
    runner = ModelRunner(model, num_blocks=1, block_size=ENGINE["block_size"])
    assert runner.info("").model_fingerprint not in found


def test_evicted_and_migrated_requests_keep_their_bits(
    engine: Client, undisturbed: list[RequestOutput]
) -> None:
    handles, _ = caught(
        lambda: engine.submit_many(PROMPTS, GREEDY),
        lambda: in_mid_prefill(engine),
        "a request is in mid-prefill",
    )
    for handle in handles[::2]:
        engine.evict(handle.request_id)
    assert_equal_bits(handles, undisturbed)

    whole = engine.submit(PROMPTS[0], LONG).result(timeout=DEADLINE_S)

    def migrated() -> bool | None:
        """Move what decodes from worker to worker, until one request has been moved."""
        ids = [worker.worker_id for worker in engine.workers()]
        for info in engine.requests():
            if info.num_migrations > 0:
                return True
            if info.worker_id and info.num_output_tokens > 0:
                with contextlib.suppress(InvalidRequest):
                    engine.migrate(info.request_id, ids[info.worker_id == ids[0]])
        return None

    moved, _ = caught(lambda: [engine.submit(PROMPTS[0], LONG)], migrated, "a request has moved")
    assert_equal_bits(moved, [whole])
    assert_idle(engine)
    stats = engine.stats().scheduler
    assert stats.num_evictions > 0
    assert stats.num_loaded_blocks > 0
    assert stats.num_migrated_bytes > 0
    assert stats.num_recomputed_rows == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_when_one_process_is_lost_its_worker_is_replaced_and_no_request_sees_it(
    engine: Client, undisturbed: list[RequestOutput], rank: int, sign: int
) -> None:
    wait_for(lambda: len(engine.workers()) == 2, "both workers are there")
    pids = {worker.worker_id: (worker.pid, follower_pid(worker)) for worker in engine.workers()}
    num_lost = engine.stats().scheduler.num_workers_lost
    handles, worker = caught(
        lambda: engine.submit_many(PROMPTS, GREEDY),
        lambda: in_mid_prefill(engine),
        "a request is in mid-prefill",
    )
    victims = pids[worker.worker_id]
    os.kill(victims[rank], sign)
    assert_equal_bits(handles, undisturbed)
    wait_for(lambda: engine.stats().scheduler.num_workers_lost > num_lost, "the loss is noticed")
    wait_for(lambda: not any(map(is_running, victims)), "the other process ends as well")
    wait_for(lambda: len(engine.workers()) == 2, "another worker is there")
    wait_for(lambda: len(groups()) == 2, "the lost worker's room is given back")
    assert bits(engine.submit(PROMPTS[0], GREEDY).result(timeout=DEADLINE_S)) == bits(
        undisturbed[0]
    )
    assert_idle(engine)


def test_a_process_that_is_lost_while_nothing_is_computed_is_noticed(engine: Client) -> None:
    wait_for(lambda: len(engine.workers()) == 2, "both workers are there")
    victim = engine.workers()[0]
    os.kill(follower_pid(victim), signal.SIGKILL)
    wait_for(lambda: not is_running(victim.pid), "the first process ends as well")
    wait_for(
        lambda: victim.worker_id not in [worker.worker_id for worker in engine.workers()],
        "the loss is noticed",
    )
    wait_for(lambda: len(engine.workers()) == 2, "another worker is there")


def test_a_restarted_scheduler_takes_workers_of_several_processes_over(
    engine: Client, undisturbed: list[RequestOutput]
) -> None:
    """One worker ends meanwhile: its room is given back."""
    wait_for(lambda: len(engine.workers()) == 2, "both workers are there")
    gone, stays = engine.workers()
    handles = engine.submit_many(PROMPTS, GREEDY)
    os.kill(pid_of(f"haversack-{NAME}-scheduler"), signal.SIGKILL)
    os.kill(gone.pid, signal.SIGKILL)
    assert_equal_bits(handles, undisturbed)
    wait_for(lambda: len(engine.workers()) == 2, "both workers are there")
    assert stays.pid in [worker.pid for worker in engine.workers()]
    wait_for(lambda: len(groups()) == 2, "the lost worker's room is given back")
    assert_idle(engine)
