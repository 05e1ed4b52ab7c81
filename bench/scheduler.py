"""The scheduling core by itself: chunks per second on one core, and what they depend on.

    python -m bench.scheduler [--workers 1 16 256 1000] [--requests 100000] [--waiting 1000 ...]

Regimes, all on virtual time with simulated workers (`bench.scheduler_world`):
- `workers`: so many workers, 40 requests live for each, a new one for each that ends, until all of
  the trace have ended (at most 6,250 a worker). Beside the speed: which part of the prompt tokens
  came from a cache, and which part one endless cache could have supplied; how many tokens the
  busiest worker computed for one of the average one.
- `waiting`: 16 workers, and so many requests that always wait.

Chunks per second are of CPU time inside `SchedulerState.handle`, everything included from
submissions to ends, so that other processes on the machine change it little. A picture is written
to `bench/results/scheduler.png`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.scheduler_world import Engine

matplotlib.use("Agg")

_LIVE_PER_WORKER = 40
_MAX_REQUESTS_PER_WORKER = 6_250
_WAITING_WORKERS = 16
_SEATS = 64
"""The core's default `max_num_seqs`."""
_WAITING_CHUNKS = 200_000
"""Chunks scheduled while so many requests wait."""
_STEPS_PER_REPORT = 50
_PICTURE = Path(__file__).parent / "results" / "scheduler.png"

Figures = dict[str, Any]


def run_workers(num_workers: int, num_requests: int, seed: int, progress: Progress) -> Figures:
    """Run a trace to its end."""
    num_requests = min(num_requests, num_workers * _MAX_REQUESTS_PER_WORKER)
    task = progress.add_task(f"{num_workers:,} workers", total=num_requests)
    engine = Engine(num_workers, seed)
    engine.submit(min(num_requests, num_workers * _LIVE_PER_WORKER))
    for step, _ in enumerate(engine.run(num_requests)):
        if step % _STEPS_PER_REPORT == 0:
            progress.update(task, completed=engine.num_ended)
    progress.update(task, completed=engine.num_ended)
    stats = engine.state.stats()
    tokens = [worker.num_tokens for worker in engine.workers.values()]
    num_prompt_tokens = engine.trace.num_prompt_tokens
    return {
        "workers": num_workers,
        "requests": engine.num_ended,
        "chunks": stats.num_chunks,
        "chunks_per_step": round(stats.num_chunks / stats.num_steps, 1),
        "chunks_per_s": round(stats.num_chunks / engine.handle_s),
        "us_per_chunk": round(1e6 * engine.handle_s / stats.num_chunks, 1),
        "prefix_hit_rate": round(stats.num_worker_cache_hit_tokens / num_prompt_tokens, 3),
        "prefix_hit_rate_possible": round(engine.trace.num_repeated_tokens / num_prompt_tokens, 3),
        "tokens_max_over_mean": round(max(tokens) / statistics.mean(tokens), 3),
        "evictions": stats.num_evictions,
        "migrations": stats.num_migrations,
        "virtual_s": round(engine.now_s, 1),
    }


def run_waiting(num_waiting: int, seed: int, progress: Progress) -> Figures:
    """Schedule chunks while so many requests wait."""
    task = progress.add_task(f"{num_waiting:,} waiting", total=_WAITING_CHUNKS)
    engine = Engine(_WAITING_WORKERS, seed)
    engine.submit(num_waiting + _WAITING_WORKERS * _SEATS)
    submit_s = engine.handle_s
    us_per_submission = 1e6 * submit_s / engine.num_submitted
    for step, _ in enumerate(engine.run(2**62)):
        if step % _STEPS_PER_REPORT == 0:
            num_chunks = engine.state.stats().num_chunks
            progress.update(task, completed=num_chunks)
            if num_chunks >= _WAITING_CHUNKS:
                break
    stats = engine.state.stats()
    return {
        "waiting": num_waiting,
        "waiting_at_end": stats.num_waiting,
        "us_per_chunk": round(1e6 * (engine.handle_s - submit_s) / stats.num_chunks, 1),
        "us_per_submission": round(us_per_submission, 1),
    }


def plot(report: Figures, path: Path) -> None:
    """Draw chunks per second over workers, and the cost of a chunk over waiting requests."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    runs, waiting = report["runs"], report["waiting"]
    left.plot([r["workers"] for r in runs], [r["chunks_per_s"] for r in runs], "o-")
    left.set(xscale="log", xlabel="workers", ylabel="chunks/s on one core", ylim=(0, None))
    right.plot([r["waiting"] for r in waiting], [r["us_per_chunk"] for r in waiting], "o-")
    right.set(xscale="log", xlabel="waiting requests", ylabel="µs per chunk", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle("the scheduling core by itself")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def print_table(title: str, rows: list[Figures], console: Console) -> None:
    """Print figures that all have the same names."""
    if not rows:
        return
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" for value in row.values()))
    console.print(table)


def main() -> None:
    """Parse arguments, run, draw, and print tables and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 16, 256, 1000])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--waiting", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        runs, waiting = [], []
        for count in arguments.workers:
            runs.append(run_workers(count, arguments.requests, arguments.seed, progress))
            console.print(runs[-1])
        for count in arguments.waiting:
            waiting.append(run_waiting(count, arguments.seed, progress))
            console.print(waiting[-1])
    report = {
        "bench": "scheduler",
        "runs": runs,
        "waiting": waiting,
        "seed": arguments.seed,
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "msgspec": version("msgspec")},
    }
    print_table("by workers", runs, console)
    print_table("by waiting requests, 16 workers", waiting, console)
    if runs and waiting:
        plot(report, _PICTURE)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
