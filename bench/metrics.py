"""What it costs to be watched: telling the counters, and having them read.

    python -m bench.metrics [--workers 1 16 256 1000] [--repeats 50] [--results FILE]

For an engine of so many workers, each with 40 requests (`bench.scheduler_world`, virtual time):
- `copy_us`: what the scheduler's loop stands still for, once a second, to copy its counters;
- `publish_us`: what another thread then takes to tell them to Ray's metrics, with the real Ray;
- `percent_of_time`: both together, of the second after which they are told again, and so of any
  step in it;
- `ray_page_ms`, `ray_page_bytes`: reading the page of this node's Ray, as Prometheus does;
- `endpoint_page_ms`, `endpoint_page_bytes`: making the page of the HTTP endpoint.
All but `ray_page_ms`, which other processes have a part in, is CPU time of the thread that does it.
Besides, `hooks_us_per_chunk`: what the core takes to time a chunk that brings one token, of the
`us_per_chunk` that it takes altogether.

A whole run writes `bench/results/metrics.json`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from bench.scheduler_world import Engine
from cluster.api_metrics import ApiMetrics
from cluster.metrics import RayPublisher
from cluster.series import ENGINE_LABEL
from scheduler.codec import decode, encode
from scheduler.outbox import EngineStats
from scheduler.timings import RequestTimes, Timings

_RESULTS = Path(__file__).parent / "results" / "metrics.json"
_LIVE_PER_WORKER = 40
_STEPS_PER_WORKER = 20
_NUM_CALLS = 100_000
_APPEARS_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.2
_PUBLISHED_EVERY_S = 1.0

Figures = dict[str, Any]


def median_s(
    call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.thread_time
) -> float:
    """Return the median seconds of a call: this thread's CPU time, or what else a clock tells."""
    found = []
    for _ in range(repeats):
        started_s = clock()
        call()
        found.append(clock() - started_s)
    return statistics.median(found)


def busy_engine(num_workers: int) -> Engine:
    """Return an engine in the middle of its work."""
    engine = Engine(num_workers, seed=0)
    engine.submit(num_workers * _LIVE_PER_WORKER)
    for number, _ in enumerate(engine.run(2**62)):
        if number >= num_workers * _STEPS_PER_WORKER:
            break
    return engine


def measure(num_workers: int, page_url: str, repeats: int) -> Figures:
    """Return what one update of an engine of so many workers costs, and what reading it does."""
    engine = busy_engine(num_workers)
    state, name = engine.state, f"bench-{num_workers}"

    def copy() -> bytes:
        return encode(
            EngineStats(
                state.stats(), timings=state.timings(), workers=state.worker_uses(), started_s=1.0
            )
        )

    publisher, data = RayPublisher(name), copy()

    def publish() -> None:
        publisher(decode(data, EngineStats))

    copy_s, publish_s = median_s(copy, repeats), median_s(publish, repeats)
    page = _appeared(page_url, name, publish)
    endpoint = ApiMetrics(name, lambda: decode(data, EngineStats))
    chunks = state.stats().num_chunks
    return {
        "workers": num_workers,
        "copy_us": round(1e6 * copy_s, 1),
        "publish_us": round(1e6 * publish_s, 1),
        "percent_of_time": round(100 * (copy_s + publish_s) / _PUBLISHED_EVERY_S, 3),
        "ray_page_ms": round(1e3 * median_s(lambda: _read(page_url), 5, time.perf_counter), 1),
        "ray_page_bytes": len(page),
        "endpoint_page_ms": round(1e3 * median_s(endpoint.text, 5), 1),
        "endpoint_page_bytes": len(endpoint.text()),
        "us_per_chunk": round(1e6 * engine.handle_s / chunks, 1),
    }


def hooks_us() -> float:
    """Return the microseconds that timing one token of a request takes."""
    timings, times = Timings(), RequestTimes(0.0)
    timings.generated(times, 1.0, 1)
    started_s = time.thread_time()
    for number in range(_NUM_CALLS):
        timings.generated(times, 1.0 + 0.03 * number, 1)
    return 1e6 * (time.thread_time() - started_s) / _NUM_CALLS


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        found: bytes = answer.read()
    return found


def _appeared(url: str, name: str, publish: Callable[[], None]) -> bytes:
    """Return Ray's page once it shows an engine, which goes on telling its counters meanwhile.

    Raises:
        RuntimeError: it does not in time.
    """
    deadline_s = time.monotonic() + _APPEARS_WITHIN_S
    while time.monotonic() < deadline_s:
        publish()
        page = _read(url)
        if f'{ENGINE_LABEL}="{name}"'.encode() in page:
            return page
        time.sleep(_LOOK_EVERY_S)
    raise RuntimeError(f"{url} does not show {name} within {_APPEARS_WITHIN_S:g} s")


def main() -> None:
    """Parse arguments, run, and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 16, 256, 1000])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--results", type=Path, default=_RESULTS, help="the file to write")
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    ask_nodes: Any = ray.nodes
    url = f"http://127.0.0.1:{ask_nodes()[0]['MetricsExportPort']}/metrics"
    runs = [measure(count, url, arguments.repeats) for count in arguments.workers]
    ray.shutdown()
    table = Table(*(["workers"] + [str(figures["workers"]) for figures in runs]))
    for name in list(runs[0])[1:]:
        table.add_row(name, *(f"{figures[name]:,}" for figures in runs))
    Console(stderr=True).print(table)
    report = {
        "bench": "metrics",
        "runs": runs,
        "hooks_us_per_chunk": round(hooks_us(), 2),
        "repeats": arguments.repeats,
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("ray", "prometheus_client")},
    }
    arguments.results.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
