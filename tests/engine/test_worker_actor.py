"""A worker in its own process: messages as bytes, KV by the object store, errors by type."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from cluster.launch import worker_variables
from scheduler.codec import decode, encode
from scheduler.errors import (
    InvalidConfig,
    InvalidRequest,
    InvariantViolation,
    ModelNotFound,
    StaleEpoch,
    from_wire,
)
from scheduler.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests.runner_driver import RunnerDriver
from tests.tiny_models import VOCAB_SIZE, tiny_llama
from workers.actor import CONCURRENCY_GROUPS, WorkerActor

TIMEOUT_S = 120
EPOCH = 1_700_000_000_000_000_000
LATER_EPOCHS = itertools.count(EPOCH + 2, 2)
"""For a worker that several tests share; each begins a new one."""
PROMPT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 200).tolist()
PARAMS = SamplingParams(prompt_logprobs=2, logprobs=1, max_tokens=3, seed=1)
EMPTY_STEP = encode(SchedulerOutput(1, [], []))


pytestmark = pytest.mark.usefixtures("local_cluster")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def launch(
    model: Path | str,
    cls: type[WorkerActor] = WorkerActor,
    variables: dict[str, str] | None = None,
    **settings: Any,
) -> Any:
    settings.setdefault("num_blocks", 40)
    actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(cls)
    environment = {"env_vars": variables} if variables else None
    options = actor_class.options(num_cpus=0, runtime_env=environment)
    return options.remote("w", str(model), **settings)


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Start workers through what this gives; all of them are gone afterwards."""
    started = []

    def start(*args: Any, **settings: Any) -> Any:
        started.append(launch(*args, **settings))
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


@pytest.fixture(scope="module")
def worker(local_cluster: None, folder: Path) -> Iterator[Any]:
    """A worker that several tests share; each resets it."""
    actor = launch(folder, num_threads=1)
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def other_worker(local_cluster: None, folder: Path) -> Iterator[Any]:
    """Another one, with another number of threads."""
    actor = launch(folder, num_threads=2)
    yield actor
    ray.kill(actor)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=TIMEOUT_S)


def is_done(*refs: Any) -> bool:
    return len(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0]) == len(refs)


class RemoteRunner:
    """Lets a `RunnerDriver` drive an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.epoch = next(LATER_EPOCHS)

    def info(self, worker_id: str) -> WorkerInfo:
        return decode(get(self.actor.reset.remote(self.epoch)), WorkerInfo)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return decode(get(self.actor.execute.remote(self.epoch, encode(step))), ModelRunnerOutput)


def drive(actor: Any, seed: int = 0) -> RunnerDriver:
    runner: Any = RemoteRunner(actor)
    return RunnerDriver(runner, seed)


def copy_kv(source: RunnerDriver, target: RunnerDriver, table: list[int]) -> list[int]:
    """Copy blocks as a migration does, and return where they are now."""
    data, count = source.runner.actor.read_blocks.remote(source.runner.epoch, table)
    assert get(count) == len(table)
    moved = [target.free.pop() for _ in table]
    sources = [(0, row) for row in range(len(table))]
    write = target.runner.actor.write_blocks.remote(target.runner.epoch, moved, [data], sources)
    assert get(write) == len(table)
    return moved


def assert_same_bits(moved: Request, alone: Request) -> None:
    assert moved.output_token_ids == alone.output_token_ids
    for mine, theirs in (
        (moved.prompt_logprobs, alone.prompt_logprobs),
        (moved.output_logprobs, alone.output_logprobs),
    ):
        assert mine is not None
        assert theirs is not None
        assert mine.array().same_bits(theirs.array())


def allocate_and_free(_: WorkerActor) -> None:
    import torch

    kept = [torch.ones(2**20) for _ in range(100)]
    kept.clear()


def expect_large_answers(_: WorkerActor) -> None:
    from workers import actor

    actor._LARGE_ANSWER_BYTES = 0


def resident_mb(worker: Any) -> float:
    pid = get(worker.__ray_call__.remote(lambda _: os.getpid()))
    return psutil.Process(pid).memory_info().rss / 2**20


@pytest.mark.slow
def test_memory_of_a_step_with_a_large_answer_is_given_back(
    start: Callable[..., Any], folder: Path
) -> None:
    """A worker's allocator is told to keep what is freed, and most steps want it so."""
    worker = start(folder, num_threads=1, variables=worker_variables(1))
    get(worker.reset.remote(EPOCH))
    before = resident_mb(worker)
    get(worker.__ray_call__.remote(allocate_and_free))
    get(worker.execute.remote(EPOCH, EMPTY_STEP))
    assert resident_mb(worker) > before + 300
    get(worker.__ray_call__.remote(expect_large_answers))
    get(worker.execute.remote(EPOCH, encode(SchedulerOutput(2, [], []))))
    assert resident_mb(worker) < before + 100


# ------------------------------------------------------------------------------- KV that moves


@pytest.mark.slow
def test_workers_are_interchangeable_and_kv_moves_between_them(
    worker: Any, other_worker: Any
) -> None:
    """Other processes, other numbers of threads: the same fingerprint and the same bits."""
    first, second = drive(worker), drive(other_worker, seed=7)
    assert first.info.model_fingerprint == second.info.model_fingerprint
    assert first.info.pid != second.info.pid
    alone = first.finish(first.request(PROMPT, PARAMS), [200])

    moved = first.request(PROMPT, PARAMS)
    first.step([(moved, 0, 100)])
    table = first.tables["r"]
    segments = [
        first.runner.actor.read_blocks.remote(first.runner.epoch, table[:4])[0],
        first.runner.actor.read_blocks.remote(first.runner.epoch, table[4:6])[0],
    ]
    first.release(moved)
    moved = Request.decode(moved.encode())
    second.tables["r"] = [second.free.pop() for _ in range(6)]
    sources = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    write = second.runner.actor.write_blocks.remote(
        second.runner.epoch, second.tables["r"], segments, sources
    )
    assert get(write) == 6
    second.finish(moved, [33], start=96)
    assert_same_bits(moved, alone)


@pytest.mark.slow
def test_a_migrated_request_goes_on_from_its_last_token_in_a_block_that_is_not_full(
    worker: Any, other_worker: Any
) -> None:
    """100 tokens in blocks of 16: the last four are in the seventh block, which moves as it is."""
    first, second = drive(worker), drive(other_worker, seed=7)
    alone = first.finish(first.request(PROMPT, PARAMS), [200])
    moved = first.request(PROMPT, PARAMS)
    first.step([(moved, 0, 100)])
    table = copy_kv(first, second, first.tables["r"])
    assert len(table) == 7
    first.release(moved)
    moved = Request.decode(moved.encode())
    second.tables["r"] = table
    second.step([(moved, 100, 200)])

    back = copy_kv(second, first, second.tables["r"])
    second.release(moved)
    moved = Request.decode(moved.encode())
    first.tables["r"] = back
    first.finish(moved, [1], start=200)
    assert_same_bits(moved, alone)


@pytest.mark.slow
def test_a_lost_segment_ends_the_writing_and_the_rest_is_not_touched(worker: Any) -> None:
    own = drive(worker)
    size, epoch = own.info.block_bytes, own.runner.epoch
    zeros = ray.put(np.zeros((4, size), np.uint8))
    get(worker.write_blocks.remote(epoch, [5, 6, 7, 8], [zeros], [(0, i) for i in range(4)]))
    good = ray.put(np.full((2, size), 3, np.uint8))
    misfit = ray.put(np.full((2, size + 1), 4, np.uint8))
    write = worker.write_blocks.remote(
        epoch, [5, 6, 7, 8], [good, misfit], [(0, 1), (0, 0), (1, 0), (0, 1)]
    )
    assert get(write) == 2
    blocks, count = get(worker.read_blocks.remote(epoch, [5, 6, 7, 8]))
    assert count == 4
    assert [set(np.unique(block)) for block in blocks] == [{3}, {3}, {0}, {0}]


def test_a_read_that_fails_says_so_with_both_its_answers(worker: Any) -> None:
    epoch = drive(worker).runner.epoch
    for answer in worker.read_blocks.remote(epoch, [40]):
        with pytest.raises(ray.exceptions.RayTaskError, match=r"0\.\.39"):
            get(answer)


# -------------------------------------------------------------------------------------- epochs


def test_a_dead_scheduler_s_late_calls_do_nothing(worker: Any) -> None:
    """The next scheduler has given the same blocks to others by the time they arrive."""
    own = drive(worker)
    epoch, late = own.runner.epoch, ray.put(np.full((1, own.info.block_bytes), 3, np.uint8))
    zeros = ray.put(np.zeros((1, own.info.block_bytes), np.uint8))
    get(worker.write_blocks.remote(epoch, [6], [zeros], [(0, 0)]))
    assert get(worker.write_blocks.remote(epoch, [5], [late], [(0, 0)])) == 1
    get(worker.reset.remote(epoch + 1))
    calls = [
        worker.execute.remote(epoch, EMPTY_STEP),
        *worker.read_blocks.remote(epoch, [5]),
        worker.write_blocks.remote(epoch, [6], [late], [(0, 0)]),
        worker.reset.remote(epoch),
    ]
    for call in calls:
        with pytest.raises(StaleEpoch) as caught:
            get(call)
        assert caught.value.cause.details == {"epoch": epoch, "current_epoch": epoch + 1}
    blocks, _ = get(worker.read_blocks.remote(epoch + 1, [5, 6]))
    assert [set(np.unique(block)) for block in blocks] == [{3}, {0}]
    assert decode(get(worker.execute.remote(epoch + 1, EMPTY_STEP)), ModelRunnerOutput).step_id == 1


def test_a_step_that_comes_after_a_later_one_is_refused(worker: Any) -> None:
    """It continues what the worker has not computed yet; a new scheduler counts anew."""
    epoch = drive(worker).runner.epoch
    get(worker.execute.remote(epoch, EMPTY_STEP))
    earlier = encode(SchedulerOutput(0, [], []))
    with pytest.raises(InvariantViolation, match="order"):
        get(worker.execute.remote(epoch, earlier))
    get(worker.reset.remote(epoch + 1))
    assert decode(get(worker.execute.remote(epoch + 1, earlier)), ModelRunnerOutput).step_id == 0


def test_a_worker_that_nobody_has_reset_serves_nobody(
    folder: Path, start: Callable[..., Any]
) -> None:
    actor = start(folder)
    for call in (
        actor.execute.remote(EPOCH, EMPTY_STEP),
        actor.read_blocks.remote(EPOCH, [0])[1],
        actor.write_blocks.remote(EPOCH, [], [], []),
    ):
        with pytest.raises(StaleEpoch):
            get(call)


def test_a_reset_forgets_every_request_and_keeps_the_model(worker: Any) -> None:
    """Also one by the same scheduler, which asks again where it got no answer."""
    own = drive(worker)
    request = own.request(PROMPT, PARAMS)
    own.step([(request, 0, 100)])
    again = decode(get(worker.reset.remote(own.runner.epoch)), WorkerInfo)
    assert again == own.info
    (result,) = own.run([own.chunk(request, 100, 200)])
    assert result.error is not None
    error = from_wire(result.error)
    assert isinstance(error, InvalidRequest)
    assert "not known" in error.message


# --------------------------------------------------------------------------------- overlapping


class GatedRunner:
    """Stands for a model runner, of which each method waits while its gate is closed."""

    def __init__(self) -> None:
        names = ("execute", "read", "write")
        self.gates = {name: threading.Event() for name in names}
        self.reached = {name: threading.Event() for name in names}
        for gate in self.gates.values():
            gate.set()
        self.blocks = np.zeros((8, 4), np.uint8)
        self.story: list[str] = []

    def pass_gate(self, name: str) -> None:
        self.story.append(f"{name} begins")
        self.reached[name].set()
        assert self.gates[name].wait(TIMEOUT_S)
        self.story.append(f"{name} ends")

    def info(self, worker_id: str, node_id: str) -> WorkerInfo:
        return WorkerInfo(worker_id, "cpu", 8, 16, 4, 8, 8, (), "gated", 0, node_id)

    def forget_all(self) -> None:
        self.story.append("reset")

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.pass_gate("execute")
        return ModelRunnerOutput(step.step_id, [], 0.0)

    def read_blocks(self, block_ids: list[int]) -> np.ndarray:
        self.pass_gate("read")
        return self.blocks[block_ids]

    def write_blocks(self, block_ids: list[int], data: np.ndarray) -> None:
        self.pass_gate("write")
        self.blocks[block_ids] = data


class GatedWorker(WorkerActor):
    """A worker whose steps, reads and writes last as long as the test likes."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.arrived = {name: threading.Event() for name in ("reset", "write")}

    def start_again(self) -> None:
        self._loaded, self._epoch = GatedRunner(), None
        super().reset(EPOCH)

    def reset(self, epoch: int) -> bytes:
        self.arrived["reset"].set()
        return super().reset(epoch)

    @ray.method(concurrency_group="write")
    def write_blocks(self, *args: Any) -> int:
        self.arrived["write"].set()
        return super().write_blocks(*args)

    @ray.method(concurrency_group="control")
    def close(self, name: str) -> None:
        """Close a gate, and look only at what arrives from now on."""
        self._loaded.gates[name].clear()
        for event in (self._loaded.reached[name], *self.arrived.values()):
            event.clear()

    @ray.method(concurrency_group="control")
    def open(self, name: str) -> None:
        self._loaded.gates[name].set()

    @ray.method(concurrency_group="control")
    def reach(self, name: str) -> bool:
        return self._loaded.reached[name].wait(TIMEOUT_S)

    @ray.method(concurrency_group="control")
    def arrive(self, name: str) -> bool:
        return self.arrived[name].wait(TIMEOUT_S)

    @ray.method(concurrency_group="control")
    def story(self) -> list[str]:
        return self._loaded.story


@pytest.fixture(scope="module")
def gated_pair(local_cluster: None) -> Iterator[list[Any]]:
    actors = [launch("no model", GatedWorker) for _ in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def gated(gated_pair: list[Any]) -> Any:
    """A worker with open gates that nothing has passed, reset to `EPOCH`."""
    get([actor.start_again.remote() for actor in gated_pair])
    return gated_pair[0]


@pytest.fixture
def source(gated: Any, gated_pair: list[Any]) -> Any:
    """Another one."""
    return gated_pair[1]


ONES = np.ones((1, 4), np.uint8)


def call(actor: Any, name: str, epoch: int = EPOCH) -> Any:
    """Begin one step, read or write; return what tells how it ended."""
    if name == "execute":
        return actor.execute.remote(epoch, EMPTY_STEP)
    if name == "read":
        return actor.read_blocks.remote(epoch, [3])[1]
    return actor.write_blocks.remote(epoch, [3], [ray.put(ONES)], [(0, 0)])


@pytest.mark.parametrize("waiting", ["execute", "read", "write"])
def test_steps_reads_and_writes_do_not_wait_for_each_other(gated: Any, waiting: str) -> None:
    get(gated.close.remote(waiting))
    first = call(gated, waiting)
    assert get(gated.reach.remote(waiting))
    assert get(gated.ping.remote()) == "w"
    for other in {"execute", "read", "write"} - {waiting}:
        get(call(gated, other))
    second = call(gated, waiting)
    assert not is_done(first)
    get(gated.open.remote(waiting))
    get([first, second])
    story = [event for event in get(gated.story.remote()) if event.startswith(waiting)]
    assert story == [f"{waiting} begins", f"{waiting} ends"] * 2, "one at a time, in order"


@pytest.mark.parametrize("running", ["execute", "read", "write"])
def test_a_reset_waits_for_what_runs(gated: Any, running: str) -> None:
    get(gated.close.remote(running))
    first = call(gated, running)
    assert get(gated.reach.remote(running))
    reset = gated.reset.remote(EPOCH + 1)
    if running != "execute":
        assert get(gated.arrive.remote("reset"))
    assert get(gated.story.remote())[1:] == [f"{running} begins"]
    assert not is_done(reset)
    get(gated.open.remote(running))
    get([first, reset])
    assert get(gated.story.remote())[1:] == [f"{running} begins", f"{running} ends", "reset"]


def test_a_write_that_waits_for_its_data_delays_no_reset_and_writes_nothing_after_it(
    gated: Any, source: Any
) -> None:
    get(source.close.remote("read"))
    data, _ = source.read_blocks.remote(EPOCH, [0])
    write = gated.write_blocks.remote(EPOCH, [3], [data], [(0, 0)])
    assert get(gated.arrive.remote("write"))
    get(gated.reset.remote(EPOCH + 1))
    get(source.open.remote("read"))
    with pytest.raises(StaleEpoch):
        get(write)
    assert "write begins" not in get(gated.story.remote())


def test_an_empty_write_returns_when_earlier_writes_have_ended(gated: Any) -> None:
    """Whoever gave a write up learns in this way that its blocks are safe to give away."""
    get(gated.close.remote("write"))
    write = call(gated, "write")
    assert get(gated.reach.remote("write"))
    fence = gated.write_blocks.remote(EPOCH, [], [], [])
    assert get(gated.ping.remote()) == "w"
    assert not is_done(fence)
    get(gated.open.remote("write"))
    assert get(fence) == 0
    assert is_done(write)


# ---------------------------------------------------------------------------------- life signs


@pytest.mark.slow
def test_ping_answers_while_the_model_is_loading_or_a_step_runs(
    folder: Path, start: Callable[..., Any]
) -> None:
    actor = start(folder)
    loading = actor.reset.remote(EPOCH)
    assert get(actor.ping.remote()) == "w"
    get(loading)


@pytest.mark.slow
def test_what_goes_wrong_at_the_start_comes_back_as_what_it_is(
    folder: Path, start: Callable[..., Any]
) -> None:
    """Not as the death of an actor, whose cause is only text."""
    with pytest.raises(ModelNotFound, match="not a folder"):
        get(start("/no/such/model").reset.remote(EPOCH))
    with pytest.raises(InvalidConfig, match="num_blocks or kv_bytes"):
        get(start(folder, num_blocks=None).reset.remote(EPOCH))


@pytest.mark.slow
def test_a_budget_in_bytes_becomes_blocks(folder: Path, start: Callable[..., Any]) -> None:
    own = drive(start(folder, num_blocks=None, kv_bytes=10**6))
    assert own.info.num_blocks == 10**6 // own.info.block_bytes - 1
    assert own.info.node_id == ray.get_runtime_context().get_node_id()
