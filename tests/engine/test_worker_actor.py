"""A worker in its own process: messages as bytes, KV by the object store, errors by type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from scheduler.codec import decode, encode
from scheduler.errors import InvalidConfig, ModelNotFound
from scheduler.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests.runner_driver import RunnerDriver
from tests.tiny_models import VOCAB_SIZE, tiny_llama
from workers.actor import CONCURRENCY_GROUPS, WorkerActor

TIMEOUT_S = 120
PROMPT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 200).tolist()
PARAMS = SamplingParams(prompt_logprobs=2, logprobs=1, max_tokens=3, seed=1)


pytestmark = pytest.mark.usefixtures("local_cluster")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def start(folder: Path | str, **settings: Any) -> Any:
    settings.setdefault("num_blocks", 40)
    cls = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerActor)
    return cls.options(num_cpus=1).remote("w", str(folder), **settings)


class RemoteRunner:
    """Lets a `RunnerDriver` drive an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def info(self, worker_id: str) -> WorkerInfo:
        return decode(ray.get(self.actor.info.remote(), timeout=TIMEOUT_S), WorkerInfo)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        answer = ray.get(self.actor.execute.remote(encode(step)), timeout=TIMEOUT_S)
        return decode(answer, ModelRunnerOutput)


def drive(actor: Any, seed: int = 0) -> RunnerDriver:
    runner: Any = RemoteRunner(actor)
    return RunnerDriver(runner, seed)


@pytest.mark.slow
def test_workers_are_interchangeable_and_kv_moves_between_them(folder: Path) -> None:
    """Other processes, other numbers of threads: the same fingerprint and the same bits."""
    first, second = drive(start(folder, num_threads=1)), drive(start(folder, num_threads=2), seed=7)
    assert first.info.model_fingerprint == second.info.model_fingerprint
    assert first.info.pid != second.info.pid
    alone = first.finish(first.request(PROMPT, PARAMS), [200])

    moved = first.request(PROMPT, PARAMS)
    first.step([(moved, 0, 100)])
    table = first.tables["r"]
    segments = [
        first.runner.actor.read_blocks.remote(table[:4]),
        first.runner.actor.read_blocks.remote(table[4:6]),
    ]
    first.release(moved)
    moved = Request.decode(moved.encode())
    second.tables["r"] = [second.free.pop() for _ in range(6)]
    sources = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    write = second.runner.actor.write_blocks.remote(second.tables["r"], segments, sources)
    assert ray.get(write, timeout=TIMEOUT_S) == 6
    second.finish(moved, [33], start=96)
    assert moved.output_token_ids == alone.output_token_ids
    for mine, theirs in (
        (moved.prompt_logprobs, alone.prompt_logprobs),
        (moved.output_logprobs, alone.output_logprobs),
    ):
        assert mine is not None
        assert theirs is not None
        assert mine.array().same_bits(theirs.array())


def test_a_lost_segment_ends_the_writing_and_the_rest_is_not_touched(folder: Path) -> None:
    own = drive(start(folder))
    actor = own.runner.actor
    size = own.info.block_bytes
    good = ray.put(np.full((2, size), 3, np.uint8))
    misfit = ray.put(np.full((2, size + 1), 4, np.uint8))
    write = actor.write_blocks.remote(
        [5, 6, 7, 8], [good, misfit], [(0, 1), (0, 0), (1, 0), (0, 1)]
    )
    assert ray.get(write, timeout=TIMEOUT_S) == 2
    blocks = ray.get(actor.read_blocks.remote([5, 6, 7, 8]), timeout=TIMEOUT_S)
    assert [set(np.unique(block)) for block in blocks] == [{3}, {3}, {0}, {0}]


@pytest.mark.slow
def test_ping_answers_while_the_model_is_loading_or_a_step_runs(folder: Path) -> None:
    actor = start(folder)
    loading = actor.info.remote()
    assert ray.get(actor.ping.remote(), timeout=TIMEOUT_S) == "w"
    ray.get(loading, timeout=TIMEOUT_S)


@pytest.mark.slow
def test_what_goes_wrong_at_the_start_comes_back_as_what_it_is(folder: Path) -> None:
    """Not as the death of an actor, whose cause is only text."""
    with pytest.raises(ModelNotFound, match="not a folder"):
        ray.get(start("/no/such/model").info.remote(), timeout=TIMEOUT_S)
    with pytest.raises(InvalidConfig, match="num_blocks or kv_bytes"):
        ray.get(start(folder, num_blocks=None).info.remote(), timeout=TIMEOUT_S)


def test_a_budget_in_bytes_becomes_blocks(folder: Path) -> None:
    own = drive(start(folder, num_blocks=None, kv_bytes=10**6))
    assert own.info.num_blocks == 10**6 // own.info.block_bytes - 1
    assert own.info.node_id == ray.get_runtime_context().get_node_id()
