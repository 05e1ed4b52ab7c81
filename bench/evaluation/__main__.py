"""lm-evaluation-harness through the HTTP endpoint, beside its own transformers backend.

    python -m bench.evaluation [--model NAME] [--dtype float32] [--results FILE]

Three tasks made from this repository's texts (see `tasks/rows.py`) are run by the harness's own
command: 50 questions of four choices, log-likelihoods of whole documents, and continuations. Once
with `--model hf`, then with `--model local-completions` against `haversack serve`, in several ways:
requests at once, batches, token ids or text, the server's tokenizer or a local one. To be reached:

- equal accuracies, and the same answers to "is it what the model would say";
- log-likelihoods of choices, and of whole documents, within 1e-3 (the harness's own backend takes
  the logarithm of a softmax in float64, as its option `softmax_dtype` has it);
- equal continuations;
- every way over HTTP gives the same numbers, bit for bit.

The first run installs the harness into `.bench-venvs/` (elsewhere with `HAVERSACK_BENCH_VENVS`),
where it sees this environment's torch and transformers. The last line is JSON; the exit code is 1
where something was not reached.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.evaluation.harness import CHOICES, CONTINUED, DOCUMENTS, Found, Harness
from bench.evaluation.server import served
from bench.machine import machine
from bench.peers.catalogue import Show
from workers.model_store import DEFAULT_MODEL, resolve_model

TOLERANCE = 1e-3
"""Of a log-likelihood, as the harness adds it up for one request."""
_MAX_LENGTH = 512
"""Tokens of a window: short, so that documents have several."""
_HTTP_MAX_LENGTH = _MAX_LENGTH + 2
"""Of the same windows over HTTP: the harness counts the token that it has the server make, and one
that a window is conditioned on."""
_HF_SOFTMAX_DTYPE = "float64"
"""An option of the harness. In fp32 torch adds up the exponentials of a whole vocabulary with an
error that has a sign, which over a document is more than the tolerance."""
_BATCH_SIZE = 8
_ALL = (CHOICES, DOCUMENTS, CONTINUED)


@dataclass(frozen=True)
class Way:
    """One way in which the harness asks the endpoint."""

    name: str
    tasks: tuple[str, ...]
    batch_size: int
    model_args: dict[str, Any] = field(default_factory=dict)
    has_own_tokenizer: bool = False
    """Whether the harness tokenises by itself, and does not have the server do it."""


WAYS = (
    Way("8 requests at once, the server's tokenizer", _ALL, 1, {"num_concurrent": 8}),
    Way("batches of 8, a local tokenizer", _ALL, 8, has_own_tokenizer=True),
    Way(
        "4 batches of 4 at once, as text",
        # Windows of a document begin inside of words, which text can't say.
        (CHOICES, CONTINUED),
        4,
        {"num_concurrent": 4, "tokenized_requests": False},
        has_own_tokenizer=True,
    ),
)


def run(model: str, dtype: str, show: Show) -> dict[str, Any]:
    """Run everything and return the report."""
    harness = Harness(show)
    folder = str(resolve_model(model, show))
    show("transformers, by the harness itself")
    hf_args = {
        "pretrained": folder,
        "dtype": dtype,
        "max_length": _MAX_LENGTH,
        "softmax_dtype": _HF_SOFTMAX_DTYPE,
    }
    reference = harness.run("hf", hf_args, _ALL, _BATCH_SIZE, "--device", "cpu")
    found: list[Found] = []
    with served(model=model, dtype=dtype, name="bench-evaluation") as url:
        for way in WAYS:
            show(f"over HTTP: {way.name}")
            args: dict[str, Any] = {"model": model, "base_url": f"{url}/v1/completions"}
            args |= {"max_length": _HTTP_MAX_LENGTH, **way.model_args}
            if way.has_own_tokenizer:
                args |= {"tokenizer_backend": "huggingface", "tokenizer": folder}
            found.append(harness.run("local-completions", args, way.tasks, way.batch_size))
    return {
        "bench": "evaluation",
        "model": model,
        "dtype": dtype,
        "tasks": {task: _compared(task, reference, found[0]) for task in _ALL},
        "ways": {way.name: _is_same(each, found[0]) for way, each in zip(WAYS, found, strict=True)},
        "max_window_tokens": _MAX_LENGTH,
        "tolerance": TOLERANCE,
        "machine": machine(),
        "versions": {name: version(name) for name in ("haversack", "torch", "transformers", "ray")},
    }


def _compared(task: str, reference: Found, ours: Found) -> dict[str, Any]:
    """Return a task's figures from both sides, and how far apart they are."""
    figures: dict[str, Any] = {
        "rows": len(reference.texts.get(task) or reference.loglikelihoods[task]),
        "metrics": {
            name: {"hf": value, "haversack": ours.metrics[task][name]}
            for name, value in reference.metrics[task].items()
        },
    }
    if task == CONTINUED:
        pairs = zip(reference.texts[task], ours.texts[task], strict=True)
        figures["equal_texts"] = sum(a == b for a, b in pairs)
        return figures
    pairs_of_rows = zip(reference.loglikelihoods[task], ours.loglikelihoods[task], strict=True)
    apart = [abs(a - b) for rows in pairs_of_rows for a, b in zip(*rows, strict=True)]
    figures["loglikelihoods"] = len(apart)
    figures["max_difference"] = float(f"{max(apart):.3g}")
    if task == CHOICES:
        figures["equal_is_greedy"] = ours.is_greedy[task] == reference.is_greedy[task]
    return figures


def _is_same(found: Found, first: Found) -> bool:
    """Whether one way's numbers and texts are those of the first, bit for bit."""
    kinds = ("loglikelihoods", "is_greedy", "texts")
    return all(
        value == getattr(first, kind)[task]
        for kind in kinds
        for task, value in getattr(found, kind).items()
    )


def failures(report: dict[str, Any]) -> Iterator[str]:
    """Yield what was not reached."""
    choices, documents, continued = (report["tasks"][task] for task in _ALL)
    for name, values in choices["metrics"].items():
        if values["hf"] != values["haversack"]:
            yield f"{name} differs: {values}"
    if not choices["equal_is_greedy"]:
        yield "the sides differ in what the model would say"
    for task in (choices, documents):
        if not task["max_difference"] <= TOLERANCE:
            yield f"log-likelihoods are {task['max_difference']} apart"
    if continued["equal_texts"] != continued["rows"]:
        yield f"{continued['rows'] - continued['equal_texts']} continuations differ"
    for name, is_same in report["ways"].items():
        if not is_same:
            yield f"other numbers than in the first way: {name}"


def table(report: dict[str, Any]) -> Table:
    """Return the figures for people."""
    shown = Table("task", "rows", "figure", "hf", "haversack")
    for task, figures in report["tasks"].items():
        for name, values in figures["metrics"].items():
            cells = [_number(values[side]) for side in ("hf", "haversack")]
            shown.add_row(task, str(figures["rows"]), name, *cells)
        if task == CONTINUED:
            count = f"{figures['equal_texts']} of {figures['rows']}"
            shown.add_row(task, str(figures["rows"]), "equal continuations", "", count)
        else:
            apart = _number(figures["max_difference"])
            shown.add_row(task, str(figures["rows"]), "log-likelihoods apart, at most", "", apart)
    for name, is_same in report["ways"].items():
        shown.add_row("all", "", name, "", "same bits" if is_same else "other bits")
    return shown


def _number(value: float) -> str:
    return f"{value:.2g}" if 0 < abs(value) < math.sqrt(TOLERANCE) else f"{value:.4f}"


def main() -> None:
    """Parse arguments, run, and print a table and one JSON line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.evaluation", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32", help="of both sides")
    parser.add_argument("--results", type=Path, help="a file for the report")
    arguments = parser.parse_args()
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    report = run(arguments.model, arguments.dtype, console.print)
    console.print(table(report))
    missed = list(failures(report))
    for each in missed:
        console.print(f"not reached: {each}")
    if arguments.results is not None:
        arguments.results.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
