"""Memory of the engine's processes over thousands of short requests.

    python -m bench.memory [--model NAME] [--requests 10000]

Short prompts are scored and continued by one engine with two workers, in waves. After each wave the
resident memory of the scheduler, the store and the workers is read, less what they share with
others (the object store is mapped into all of them). It has to be flat once caches are full: the
report gives the growth after the first tenth of the requests. A plot of it is written beside the
report, to `bench/results/memory.png`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import psutil
from rich.progress import track

from bench.inputs import Inputs
from bench.processes import engine_pids
from cluster import Client, SamplingParams
from workers.model_store import DEFAULT_MODEL

matplotlib.use("Agg")

_WAVE = 250
_MB = 2**20
_PICTURE = Path(__file__).parent / "results" / "memory.png"


def _private_mb(pid: int) -> float:
    memory = psutil.Process(pid).memory_full_info()
    return float(memory.uss) / _MB


def run(model: str, num_requests: int) -> dict[str, Any]:
    """Run the waves and return the report with all readings."""
    params = [
        SamplingParams(prompt_logprobs=1, max_tokens=2, ignore_eos=True),
        SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2),
    ]
    readings: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Client(
            model=model,
            name="bench-memory",
            num_workers=2,
            kv_cache_bytes=2**27,
            offload_bytes=2**27,
            row_cache_bytes=2**24,
            journal_path=str(Path(folder) / "journal"),
            result_ttl_s=10.0,
        ) as client,
    ):
        inputs = Inputs(client.info.limits.vocab_size)
        pids = engine_pids(client)
        for _ in track(range(num_requests // _WAVE), "waves"):
            prompts = inputs.unique(_WAVE, 12)
            client.generate(prompts, [params[i % 2] for i in range(_WAVE)])
            for name, pid in pids.items():
                readings.setdefault(name, []).append(round(_private_mb(pid), 1))
    first = max(1, len(next(iter(readings.values()))) // 10)
    return {
        "bench": "memory",
        "model": model,
        "requests": num_requests,
        "wave": _WAVE,
        "growth_mb_after_first_tenth": {
            name: round(values[-1] - values[first - 1], 1) for name, values in readings.items()
        },
        "private_mb": readings,
    }


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw memory over requests."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, values in sorted(report["private_mb"].items()):
        done = [(i + 1) * report["wave"] for i in range(len(values))]
        axes.plot(done, values, label=name)
    axes.set(xlabel="requests", ylabel="private memory (MiB)", ylim=(0, None))
    axes.set_title(f"memory of an engine over {report['requests']:,} short requests")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse arguments, run, draw, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--requests", type=int, default=10_000)
    arguments = parser.parse_args()
    report = run(arguments.model, arguments.requests)
    plot(report, _PICTURE)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
