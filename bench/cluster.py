"""What a second worker brings, and what the scheduler spends on keeping workers busy.

    python -m bench.cluster [--model NAME] [--repeats 5] [--results FILE]

Two engines on one machine, one with one worker and one with two, whose workers compute on one
thread each. They do the same work in turns, prompts to score (`score`) and then prompts to continue
(`generate`), enough of it that every worker's batches are full:

- `ratio`: tokens/s of two workers over that of one.
- `bytes_per_token`: of the encoded steps and answers between scheduler and workers, by direction,
  over the tokens that were scheduled. KV goes other ways and is not in it.
- `scheduler_cpu_s_per_1000_chunks`: user and system time of the scheduler's process, all that it
  does for clients included.

What two cores can do differs: some are two threads of one, and some of a machine's neighbours'. So
`floor` has, in the same turns, the same ratio of two processes that do nothing but plain matrix
products, and know nothing of each other; `of_floor` is ours over that. `memory_mib` has what each
of the two workers keeps for itself, KV blocks included, and what it shares with others, such as the
pages of the model's file: "pss" counts a page that several processes have in parts. A whole run
writes `bench/results/cluster.json`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import operator
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from rich.console import Console

from bench.inputs import Inputs
from bench.machine import library_dtype, machine
from bench.peers.process import PeerProcess, command_of
from bench.peers.protocol import Job
from bench.processes import engine_pids, memory_shares
from cluster import Client, SamplingParams
from cluster.config import EngineConfig
from cluster.connecting import connect_to_ray
from cluster.fleet import part_name
from cluster.launch import (
    EngineHandles,
    engine_spec,
    kill_engine,
    worker_variables,
)
from scheduler.actor import CONCURRENCY_GROUPS, SchedulerActor
from workers.actor import WorkerActor
from workers.model_store import DEFAULT_MODEL, resolve_model

_RESULTS = Path(__file__).parent / "results" / "cluster.json"
_GOAL = 1.8
_SIDES = {"one": 1, "two": 2}
"""Workers of each engine."""
_FLOOR = "floor"
_TIMEOUT_S = 600.0

Show = Callable[[str], None]


class Work(NamedTuple):
    """Prompts of one length, and what is asked for each."""

    num_prompts: int
    prompt_tokens: int
    params: SamplingParams

    @property
    def num_tokens(self) -> int:
        """Tokens that count: of prompts that are scored, and those that are generated."""
        return self.num_prompts * (self.params.max_tokens or self.prompt_tokens)


def scoring(num_prompts: int, prompt_tokens: int) -> Work:
    """Return prompts that want all their rows."""
    return Work(num_prompts, prompt_tokens, SamplingParams(prompt_logprobs=1, max_tokens=0))


def generating(num_prompts: int, prompt_tokens: int, max_tokens: int) -> Work:
    """Return prompts to continue to full length."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    return Work(num_prompts, prompt_tokens, params)


WORKS = {"score": scoring(16, 500), "generate": generating(128, 32, 32)}


class CountedWorker(WorkerActor):
    """A worker that counts the bytes of its steps and of its answers."""

    num_bytes = (0, 0)

    def execute(self, epoch: int, data: bytes) -> bytes:
        """Run a step as any worker does."""
        answer = super().execute(epoch, data)
        to_here, from_here = self.num_bytes
        self.num_bytes = (to_here + len(data), from_here + len(answer))
        return answer


@dataclasses.dataclass(frozen=True)
class Reading:
    """What an engine has done since it started."""

    num_tokens: int
    """Scheduled, repetitions included."""
    num_chunks: int
    num_bytes_to_workers: int
    num_bytes_from_workers: int
    scheduler_cpu_s: float

    def __add__(self, other: Reading) -> Reading:
        return self._with(other, 1)

    def __sub__(self, other: Reading) -> Reading:
        return self._with(other, -1)

    def _with(self, other: Reading, sign: int) -> Reading:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Reading(*(mine + sign * theirs for mine, theirs in pairs))


class Engine:
    """An engine whose workers compute on one thread each, and its client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.pids = engine_pids(client)
        self._scheduler = psutil.Process(self.pids["scheduler"])

    def rate(self, work: Work, inputs: Inputs) -> float:
        """Do some work; return the tokens/s."""
        prompts = inputs.unique(work.num_prompts, work.prompt_tokens)
        started_s = time.perf_counter()
        self.client.generate(prompts, work.params)
        return work.num_tokens / (time.perf_counter() - started_s)

    def read(self) -> Reading:
        """Return the counters of all its parts."""
        stats = self.client.stats().scheduler
        settings = self.client.info.settings
        workers = [
            ray.get_actor(
                part_name(str(settings["name"]), worker.worker_id),
                namespace=str(settings["namespace"]),
            )
            for worker in self.client.workers()
        ]
        asked = [worker.__ray_call__.remote(lambda self: self.num_bytes) for worker in workers]
        moved = ray.get(asked, timeout=_TIMEOUT_S)
        times = self._scheduler.cpu_times()
        return Reading(
            stats.num_computed_tokens,
            stats.num_chunks,
            sum(to for to, _ in moved),
            sum(back for _, back in moved),
            times.user + times.system,
        )

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the MiB that each worker has, and how many of them are its alone."""
        return {
            name: {kind: size // 2**20 for kind, size in memory_shares(pid).items()}
            for name, pid in self.pids.items()
            if name.startswith("worker")
        }


@contextlib.contextmanager
def engine(model: str, name: str, num_workers: int) -> Iterator[Engine]:
    """Start an engine with workers that count, and end it."""
    config = EngineConfig.load(
        model=model,
        name=f"bench-cluster-{name}",
        num_workers=num_workers,
        cpus_per_worker=0.5,
        num_threads=1,
        device="cpu",
    )
    is_mine = connect_to_ray(config)
    spec, fleet = engine_spec(config)
    fleet = dataclasses.replace(fleet, worker_class=CountedWorker)
    spec = dataclasses.replace(spec, fleet=fleet)
    scheduler = fleet.start_scheduler(SchedulerActor, CONCURRENCY_GROUPS, spec)
    try:
        with Client(name=config.name, namespace=config.namespace, start=False) as client:
            yield Engine(client)
    finally:
        kill_engine(EngineHandles(scheduler, config.namespace, config.name))
        if is_mine:
            ray.shutdown()


class Floor:
    """Two processes that each do a model's matrix products on one thread, and nothing else."""

    def __init__(self, model: str) -> None:
        settings = {"model": str(resolve_model(model)), "threads": 1, "dtype": library_dtype()}
        command = command_of(Path(sys.executable), "bench.peers.linear_peer")
        self._peers = [
            PeerProcess(
                command,
                worker_variables(1),
                settings,
                start_timeout_s=_TIMEOUT_S,
                job_timeout_s=_TIMEOUT_S,
            )
            for _ in range(max(_SIDES.values()))
        ]

    def rate(self, num_processes: int, prompts: list[list[int]]) -> float:
        """Have so many processes do the same work each, at once; return the tokens/s of all."""
        job = Job.score(_FLOOR, prompts)
        with ThreadPoolExecutor(num_processes) as threads:
            outcomes = list(threads.map(lambda peer: peer.run(job), self._peers[:num_processes]))
        return float(sum(job.num_tokens / outcome.seconds for outcome in outcomes))

    def close(self) -> None:
        """End the processes."""
        for peer in self._peers:
            peer.close()


def measure(
    engines: Mapping[str, Engine],
    floor: Floor,
    works: Mapping[str, Work],
    repeats: int,
    inputs: Inputs,
) -> dict[str, Any]:
    """Have both engines do all work in turns, and the floor in between."""
    rates: dict[str, dict[str, list[float]]] = {
        what: {side: [] for side in _SIDES} for what in (_FLOOR, *works)
    }
    done: dict[str, dict[str, list[Reading]]] = {
        what: {side: [] for side in _SIDES} for what in works
    }
    floor_prompts = inputs.unique(works["score"].num_prompts // 2, works["score"].prompt_tokens)
    for turn in range(repeats + 1):
        sides = list(_SIDES) if turn % 2 else list(reversed(_SIDES))
        found: list[tuple[str, str, float]] = []
        for what, work in works.items():
            for side in sides:
                before = engines[side].read()
                found.append((what, side, engines[side].rate(work, inputs)))
                if turn:
                    done[what][side].append(engines[side].read() - before)
        found += [(_FLOOR, side, floor.rate(_SIDES[side], floor_prompts)) for side in sides]
        for what, side, rate in found if turn else ():  # the first one warms up
            rates[what][side].append(rate)
    floors = _ratios(rates[_FLOOR])
    report: dict[str, Any] = {_FLOOR: _speed(rates[_FLOOR], floors)}
    for what in works:
        ratios = _ratios(rates[what])
        shares = [ours / theirs for ours, theirs in zip(ratios, floors, strict=True)]
        of_floor = _rounded(statistics.median(shares))
        speed = _speed(rates[what], ratios) | {"of_floor": of_floor}
        report[what] = speed | {side: _costs(done[what][side]) for side in _SIDES}
    return report


def _ratios(rates: Mapping[str, Sequence[float]]) -> list[float]:
    return [two / one for one, two in zip(rates["one"], rates["two"], strict=True)]


def _speed(rates: Mapping[str, Sequence[float]], ratios: Sequence[float]) -> dict[str, Any]:
    return {
        "tokens_per_s": {side: _rounded(statistics.median(each)) for side, each in rates.items()},
        "ratio": _rounded(statistics.median(ratios)),
        "ratios": [_rounded(ratio) for ratio in ratios],
    }


def _costs(readings: Sequence[Reading]) -> dict[str, Any]:
    """Return what the scheduler's work came to, over all turns."""
    total = functools.reduce(operator.add, readings)
    return {
        "chunks": total.num_chunks,
        "bytes_per_token": {
            "to_workers": _rounded(total.num_bytes_to_workers / total.num_tokens),
            "from_workers": _rounded(total.num_bytes_from_workers / total.num_tokens),
        },
        "scheduler_cpu_s_per_1000_chunks": _rounded(
            1000 * total.scheduler_cpu_s / total.num_chunks
        ),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def run(model: str, repeats: int, works: Mapping[str, Work], show: Show) -> dict[str, Any]:
    """Start both engines and the floor's processes, and return the report."""
    with contextlib.ExitStack() as stack:
        # The one whose memory is looked at comes first, while nobody else has the model's file.
        two = stack.enter_context(engine(model, "two", _SIDES["two"]))
        inputs = Inputs(two.client.info.limits.vocab_size)
        for work in works.values():
            two.rate(work, inputs)
        memory = two.memory()
        show(f"memory: {memory}")
        engines = {"two": two, "one": stack.enter_context(engine(model, "one", _SIDES["one"]))}
        floor = Floor(model)
        stack.callback(floor.close)
        found = measure(engines, floor, works, repeats, inputs)
    for what, figures in found.items():
        show(f"{what}: {figures}")
    return {
        "bench": "cluster",
        "model": model,
        "repeats": repeats,
        **found,
        "memory_mib": memory,
        "goals": {f"{what} >= {_GOAL} x": found[what]["ratio"] >= _GOAL for what in works},
        "machine": machine(),
        "versions": {name: version(name) for name in ("haversack", "ray", "torch")},
    }


def main() -> None:
    """Parse arguments, run, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=_RESULTS, help="the file to write")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    report = run(arguments.model, arguments.repeats, WORKS, console.print)
    arguments.results.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
