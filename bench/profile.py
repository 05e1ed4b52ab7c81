"""Where the time of a worker's steps goes, beside the floor of plain matrix products.

    python -m bench.profile [--model NAME] [--prefill 512] [--behind 0] [--decode 1,16]
                            [--context 256] [--k 1]

One process runs `ModelRunner` on batches of its own, without Ray, with the environment and the
threads that the launcher gives a worker:
- `prefill-N`: a prompt of N tokens in one step, all its rows with k alternatives; with `--behind`
  the last N of a longer prompt, whose other tokens are in the cache;
- `decode-M`: one token for each of M requests with some context behind them.

Time is taken between the step's public seams: around the model's modules, by what they are; around
the attention that the model calls through transformers' interface; around functions of the modules
for rows and for sampling that the runner uses. Each moment counts for the innermost of them. What
has none of these seams is `rest`. The floor runs the same products on the same number of rows with
`torch.nn.functional.linear`, for bf16 in fp32 where the processor has no instructions for it. The
most expensive operators of one step, by torch's profiler, follow in the JSON line, which is the
last one.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AttentionInterface

from bench.inputs import Inputs
from bench.machine import library_dtype
from bench.peers.linear_peer import PlainLayers
from cluster.launch import worker_variables
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests.runner_driver import RunnerDriver
from workers import attention, model_runner
from workers.loader import load_model
from workers.model_runner import ModelRunner
from workers.model_store import DEFAULT_MODEL

REST = "rest"
LINEAR = "linear layers"
HEAD = "lm_head"
WHOLE_LAYERS = "decoder layers, whole"
"""Computed in one call each, see `workers.decoder_layers`."""
_ELEMENTWISE = "norms, rotary, activation"
_FUNCTIONS = {"workers.logprobs": "row selection, argmax", "workers.sampler": "sampling"}
_BLOCK_SIZE = 16
_WARM_UP_STEPS = 2
_TOP_OPERATORS = 15


class Stopwatch:
    """Seconds by part; a part that is entered within another one stops that one's time."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since_s = 0.0

    def enter(self, part: str) -> None:
        """Let time count for `part` from now on."""
        self._book()
        self._open.append(part)

    def leave(self) -> None:
        """Go back to the part that was entered before."""
        self._book()
        self._open.pop()

    def take(self) -> dict[str, float]:
        """Return what was booked, and start anew."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its time counted for `part`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return timed

    def _book(self) -> None:
        now_s = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s


def part_of(module: nn.Module, head: nn.Module) -> str | None:
    """Return what a module's own time counts for; None where it only calls others."""
    kind = type(module).__name__
    if module is head:
        return HEAD
    if isinstance(module, nn.Embedding):
        return "embedding"
    if "Linear" in kind or any(p.dim() > 1 for p in module.parameters(recurse=False)):
        return LINEAR
    is_activation = type(module).__module__ in (
        "transformers.activations",
        "torch.nn.modules.activation",
    )
    if "Norm" in kind or "Rotary" in kind or "Activation" in kind or is_activation:
        return _ELEMENTWISE
    return None


@contextmanager
def watched(runner: ModelRunner, model: Any, watch: Stopwatch) -> Iterator[None]:
    """Have `watch` see the steps of a runner; all of it is undone at the end."""
    undo: list[Callable[[], Any]] = []

    def patch(owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)
        is_own = name in vars(owner)
        undo.append(lambda: setattr(owner, name, function) if is_own else delattr(owner, name))
        setattr(owner, name, watch.around(part, function))

    head = model.get_output_embeddings()
    if hasattr(head, "parts"):
        patch(head, "parts", HEAD)
    for module in model.modules():
        part = part_of(module, head)
        if part is not None:
            undo.append(
                module.register_forward_pre_hook(lambda *_, part=part: watch.enter(part)).remove
            )
            undo.append(
                module.register_forward_hook(lambda *_: watch.leave(), always_call=True).remove
            )
    for home in {type(module).__module__ for module in model.modules()}:
        if hasattr(sys.modules[home], "apply_rotary_pos_emb"):
            patch(sys.modules[home], "apply_rotary_pos_emb", _ELEMENTWISE)
    for name, found in list(vars(model_runner).items()):
        if inspect.isfunction(found) and found.__module__ in _FUNCTIONS:
            patch(model_runner, name, _FUNCTIONS[found.__module__])
    interface: Any = AttentionInterface
    attend = interface()[attention.IMPLEMENTATION]
    undo.append(lambda: interface.register(attention.IMPLEMENTATION, attend))
    interface.register(attention.IMPLEMENTATION, watch.around("attention", attend))
    if next(model.parameters()).device.type == "cpu":
        # Not imported with this module: it brings numba, which has no part in what runs on CUDA.
        from workers.decoder_layers import FusedLayer

        patch(FusedLayer, "compute", WHOLE_LAYERS)
    patch(runner, "execute", REST)
    try:
        yield
    finally:
        for step in reversed(undo):
            step()


class Batch:
    """A batch that can be run step after step."""

    def __init__(self, name: str, num_rows: int, num_logits: int) -> None:
        self.name = name
        self.num_rows = num_rows
        """Tokens per step."""
        self.num_logits = num_logits
        """Rows per step of the output layer."""

    def prepare(self) -> None:
        """Get ready for the next step; not timed."""

    def step(self) -> None:
        """Run one step."""
        raise NotImplementedError


class Prefill(Batch):
    """A new prompt in every step, or the end of one, which always begins alike."""

    def __init__(
        self, driver: RunnerDriver, inputs: Inputs, num_tokens: int, k: int, behind: int = 0
    ) -> None:
        """Get ready to compute prompts.

        Args:
            driver: of the worker.
            inputs: where tokens come from.
            num_tokens: tokens of a step.
            k: alternatives per row.
            behind: tokens before them, whose KV is there; whole blocks.
        """
        name = f"prefill-{num_tokens}" + (f" behind {behind}" if behind else "")
        super().__init__(name, num_tokens, num_tokens - 1)
        self._driver, self._inputs, self._behind = driver, inputs, behind
        self._params = SamplingParams(
            prompt_logprobs=k, prompt_logprobs_start=behind + 1 if behind else 0, max_tokens=0
        )
        self._request: Request | None = None
        self._blocks: list[int] = []
        if behind:
            before = driver.request(inputs.tokens(behind + 1), SamplingParams(), f"before {name}")
            for start in range(0, behind, num_tokens):
                driver.step([(before, start, min(start + num_tokens, behind))])
            self._blocks = driver.tables[before.request_id]

    def prepare(self) -> None:
        """Let the last prompt go, and take another one."""
        tables = self._driver.tables
        if self._request is not None:
            own = tables[self._request.request_id]
            tables[self._request.request_id] = own[len(self._blocks) :]
            self._driver.release(self._request)
        prompt = self._inputs.tokens(self._behind + self.num_rows)
        self._request = self._driver.request(prompt, self._params, self.name)
        tables[self._request.request_id] = list(self._blocks)

    def step(self) -> None:
        """Compute the prompt, from what is there on."""
        if self._request is not None:
            end = self._behind + self.num_rows
            self._driver.step([(self._request, self._behind, end)])


class Decode(Batch):
    """The same requests in every step, each a token longer."""

    def __init__(self, driver: RunnerDriver, inputs: Inputs, count: int, context: int) -> None:
        super().__init__(f"decode-{count}", count, count)
        self._driver = driver
        params = SamplingParams(temperature=0.0, max_tokens=2**20, ignore_eos=True)
        self._requests = [
            driver.request(inputs.tokens(context), params, f"decode-{count}-{i}")
            for i in range(count)
        ]
        for request in self._requests:
            driver.step([(request, 0, context)])

    def step(self) -> None:
        """Generate one token of each request."""
        self._driver.step([(r, r.num_tokens - 1, r.num_tokens) for r in self._requests])


def measure(batch: Batch, watch: Stopwatch, layers: PlainLayers, repeats: int) -> dict[str, Any]:
    """Run a batch and return its report; times are medians, in milliseconds.

    Args:
        batch: what to run.
        watch: sees the runner's steps.
        layers: the model's weights, for the floor.
        repeats: timed steps.
    """
    steps: list[dict[str, float]] = []
    for step in range(_WARM_UP_STEPS + repeats):
        batch.prepare()
        watch.take()
        batch.step()
        if step >= _WARM_UP_STEPS:
            steps.append(watch.take())
    parts = {part: _ms([step.get(part, 0.0) for step in steps]) for part in _all_parts(steps)}
    total = _ms([sum(step.values()) for step in steps])
    floors = {
        LINEAR: _floor(layers.body, batch.num_rows, repeats),
        HEAD: _floor(layers.head, batch.num_logits, repeats),
    }
    return {
        "batch": batch.name,
        "tokens": batch.num_rows,
        "ms": total,
        "parts_ms": dict(sorted(parts.items(), key=lambda item: -item[1])),
        "floors_ms": floors,
        "floor_share": round(sum(floors.values()) / total, 3),
    }


def operators(batch: Batch) -> list[dict[str, Any]]:
    """Return the operators of one step that take longest by themselves."""
    batch.prepare()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        batch.step()
    found = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    return [
        {"name": e.key, "calls": e.count, "ms": round(e.self_cpu_time_total / 1000, 3)}
        for e in found[:_TOP_OPERATORS]
    ]


def _all_parts(steps: list[dict[str, float]]) -> set[str]:
    return {part for step in steps for part in step}


def _floor(layers: list[nn.Linear], num_rows: int, repeats: int) -> float:
    PlainLayers.seconds(layers, num_rows)
    return _ms([PlainLayers.seconds(layers, num_rows) for _ in range(repeats)])


def _ms(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)


def run(
    model: str,
    prefills: list[int],
    decodes: list[int],
    context: int,
    k: int,
    repeats: int,
    behind: int = 0,
) -> dict[str, Any]:
    """Profile all batches and return the report.

    Args:
        model: see `workers.model_store`.
        prefills: tokens of each prefill batch.
        decodes: requests of each decode batch.
        context: tokens that each of these has behind it at the start.
        k: alternatives per prompt row.
        repeats: timed steps of each batch.
        behind: tokens before those of each prefill batch, rounded up to whole blocks.
    """
    loaded = load_model(model)
    steps = _WARM_UP_STEPS + repeats + 1
    behind = -(-behind // _BLOCK_SIZE) * _BLOCK_SIZE
    tokens = sum(behind + count + _BLOCK_SIZE for count in prefills)
    tokens += sum(decodes) * (context + steps + _BLOCK_SIZE)
    runner = ModelRunner(loaded, num_blocks=tokens // _BLOCK_SIZE + 2, block_size=_BLOCK_SIZE)
    driver, inputs, watch = RunnerDriver(runner), Inputs(loaded.vocab_size), Stopwatch()
    batches: list[Batch] = [Prefill(driver, inputs, count, k, behind) for count in prefills]
    batches += [Decode(driver, inputs, count, context) for count in decodes]
    is_half = loaded.dtype == torch.bfloat16
    layers = PlainLayers(str(loaded.path), library_dtype() if is_half else loaded.dtype)
    found = []
    for batch in batches:
        with watched(runner, loaded.model, watch):
            report = measure(batch, watch, layers, repeats)
        found.append(report | {"operators": operators(batch)})
    return {
        "bench": "profile",
        "model": model,
        "threads": torch.get_num_threads(),
        "context": context,
        "behind": behind,
        "k": k,
        "repeats": repeats,
        "batches": found,
    }


def table(report: dict[str, Any]) -> Table:
    """Return the report as a table: milliseconds, share of the step, and the floor."""
    shown = Table(title=f"a step's time, {report['threads']} threads (medians)")
    for heading in ("batch", "part", "ms", "%", "floor, ms"):
        shown.add_column(heading, justify="left" if heading in ("batch", "part") else "right")
    for batch in report["batches"]:
        floors = batch["floors_ms"]
        shown.add_section()
        whole = sum(floors.values())
        shown.add_row(batch["batch"], "all", f"{batch['ms']:.2f}", "100", f"{whole:.2f}")
        for part, ms in batch["parts_ms"].items():
            floor = f"{floors[part]:.2f}" if part in floors else ""
            shown.add_row("", part, f"{ms:.2f}", f"{100 * ms / batch['ms']:.1f}", floor)
    return shown


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.replace(",", " ").split()]


def main() -> None:
    """Parse arguments, run, and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prefill", type=_sizes, default=[512], help="tokens: 64,512")
    parser.add_argument("--behind", type=int, default=0, help="tokens before each prefill's")
    parser.add_argument("--decode", type=_sizes, default=[1, 16], help="requests: 1,16")
    parser.add_argument("--context", type=int, default=256, help="tokens behind each decode")
    parser.add_argument("--k", type=int, default=1, help="alternatives per prompt row")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    variables = worker_variables(arguments.threads)
    if any(os.environ.get(name) != value for name, value in variables.items()):
        # An allocator reads its settings once, when the process starts.
        os.execve(sys.executable, sys.orig_argv, os.environ | variables)
    torch.set_num_threads(arguments.threads)
    report = run(
        arguments.model,
        arguments.prefill,
        arguments.decode,
        arguments.context,
        arguments.k,
        arguments.repeats,
        arguments.behind,
    )
    Console(stderr=True).print(table(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
