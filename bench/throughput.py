"""Throughput beside vLLM and transformers, in one run on one machine.

    python -m bench.throughput [--model NAME] [--peers vllm,transformers,linear]
                               [--workloads unique,...] [--repeats 3] [--workers 2] [--quick]
                               [--peer-dtype float32] [--results DIR]

Workload by workload, the engine and the peers take turns, and medians are compared; see
`bench.workloads` for what is run and what is to be reached, `bench.peers` for how peers run. Every
side has the same number of threads and 1 GiB for KV. The engine's workers share both; by default
each has one thread, which keeps cores busier than threads that wait for each other do. Weights are
bf16, but those of peers fp32 on a processor without instructions for bf16, where they are several
times slower in it.

Each workload is told as a JSON line, and all of it in the last one. A whole run also writes
`throughput.json`, `throughput.md` and the chart `throughput.png` to `bench/results/`; one of some
workloads, or of quick sizes, only where `--results` says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.machine import library_dtype, machine
from bench.measuring import Arena, Measured
from bench.peers.catalogue import PEERS
from bench.throughput_report import draw, has_chart, markdown, table
from bench.workloads import QUICK, Sizes, workloads
from workers.model_store import DEFAULT_MODEL, resolve_model

_WIDTH = 160
"""Of what is printed where there is no terminal to say."""
_RESULTS = Path(__file__).parent / "results"


def run(
    model: str,
    peers: list[str],
    chosen: list[str] | None,
    repeats: int,
    sizes: Sizes,
    threads: int,
    workers: int,
    peer_dtype: str,
    console: Console,
) -> tuple[dict[str, Any], list[Measured]]:
    """Run workloads and return the report, and what it was made of.

    Args:
        model: see `workers.model_store`.
        peers: names of `bench.peers.catalogue.PEERS`.
        chosen: names of workloads; None is all.
        repeats: of each workload.
        sizes: of the workloads.
        threads: of each side.
        workers: of the engine, which share its threads.
        peer_dtype: of the peers' weights.
        console: where progress goes.
    """
    resolve_model(model, console.print)
    arena = Arena(model, peers, repeats, sizes, threads, workers, peer_dtype, console.print)
    try:
        about = arena.engine.about
        every = workloads(sizes, arena.engine.vocab_size)
        found = []
        for name, workload in every.items():
            if chosen is None or name in chosen:
                found.append(arena.measure(workload))
                print(json.dumps({"bench": "throughput", **found[-1].report()}), flush=True)
    finally:
        arena.close()
    report = {
        "bench": "throughput",
        "repeats": repeats,
        "threads": threads,
        "machine": machine(),
        "versions": {name: version(name) for name in ("haversack", "torch", "transformers", "ray")},
        "engine": about,
        "peers": arena.abouts,
        "absent": arena.missing,
        "workloads": [measured.report() for measured in found],
    }
    return report, found


def write(report: dict[str, Any], measured: list[Measured], folder: Path) -> None:
    """Write the report, its table and its chart."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "throughput.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "throughput.md").write_text(markdown(report, measured))
    if has_chart(measured):
        draw(measured, folder / "throughput.png")


def _names(allowed: list[str], what: str) -> Any:
    """Return a parser of lists of names, separated by commas or spaces."""

    def parse(text: str) -> list[str]:
        names = text.replace(",", " ").split()
        unknown = sorted(set(names) - set(allowed))
        if unknown:
            raise argparse.ArgumentTypeError(
                f"no {what} called {', '.join(unknown)}; there are {', '.join(allowed)}"
            )
        return names

    return parse


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument(
        "--peers", type=_names(list(PEERS), "peer"), default=list(PEERS), help=", ".join(PEERS)
    )
    parser.add_argument("--workloads", help="names, separated by commas; all by default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of each side")
    parser.add_argument("--workers", type=int, help="of the engine; by default as many as threads")
    parser.add_argument(
        "--peer-dtype",
        choices=["bfloat16", "float32"],
        default=library_dtype(),
        help="what peers compute in; by default what is fast on this processor",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--results", type=Path, help="the folder to write to")
    arguments = parser.parse_args()
    arguments.sizes = QUICK if arguments.quick else Sizes()
    if arguments.workloads is not None:
        allowed = list(workloads(arguments.sizes, 0))
        try:
            arguments.workloads = _names(allowed, "workload")(arguments.workloads)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    return arguments


def main() -> None:
    """Parse arguments, run, and print a table and JSON lines."""
    arguments = _arguments()
    console = Console(stderr=True, width=None if sys.stderr.isatty() else _WIDTH)
    report, measured = run(
        arguments.model,
        arguments.peers,
        arguments.workloads,
        arguments.repeats,
        arguments.sizes,
        arguments.threads,
        arguments.workers or arguments.threads,
        arguments.peer_dtype,
        console,
    )
    console.print(table(measured))
    is_whole = arguments.workloads is None and not arguments.quick
    folder = arguments.results or (_RESULTS if is_whole else None)
    if folder is not None:
        write(report, measured, folder)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
