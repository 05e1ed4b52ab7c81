"""What Ray and scheduling cost: the engine's wall time beside a bare loop over the same batches.

    python -m bench.overhead [--model NAME] [--repeats 3] [--workloads score,decode,decode1]

An engine with one worker serves a workload. The bare loop is a `ModelRunner` in a process of its
own that is given the same chunks, put together beforehand: no Ray, no messages, no decisions. Both
take turns, so that a change of the machine's speed meets both. Regimes:
- `score`: prompts of 576 tokens with nothing in common, all prompt logprobs (k=1), steps of 512;
- `decode`: 16 requests of 128 prompt tokens, 64 generated, greedy;
- `decode1`: one such request, the least work there is to hide behind.

Figures are medians of the repeats, in seconds. `engine_compute_s` is what the engine's worker spent
in steps: the rest of its time is what was not hidden behind them. The overhead is the engine's time
over the bare loop's, less one, in percent. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from bench.inputs import Inputs
from bench.peers.protocol import Prompts
from cluster import Client, SamplingParams
from cluster.config import EngineConfig
from cluster.launch import worker_variables
from scheduler.codec import int_array
from scheduler.messages import LAST_SAMPLED, Chunk, NewRequest, SchedulerOutput
from workers.model_store import DEFAULT_MODEL

_STEP_TOKENS = EngineConfig().max_num_batched_tokens
_KV_BYTES = 2**30


class Workload(NamedTuple):
    """Requests that come all at once."""

    num_requests: int
    num_prompt_tokens: int
    params: SamplingParams


WORKLOADS = {
    "score": Workload(8, 576, SamplingParams(prompt_logprobs=1, max_tokens=0)),
    "decode": Workload(16, 128, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)),
    "decode1": Workload(1, 128, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)),
}


class _Progress:
    """How far a request of the bare loop is."""

    def __init__(self, name: str, prompt: list[int], params: SamplingParams, first_block: int):
        self.name = name
        self.prompt = int_array(prompt)
        self.params = params
        self.first_block = first_block
        self.num_planned = 0
        self.num_outputs = 0

    @property
    def is_done(self) -> bool:
        max_tokens = self.params.max_tokens or 0
        return self.num_planned >= len(self.prompt) and self.num_outputs >= max_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_planned >= len(self.prompt)

    def chunk(self, budget: int, num_blocks: int) -> Chunk:
        """Plan the next chunk, of at most `budget` tokens."""
        start, num_prompt = self.num_planned, len(self.prompt)
        end = start + 1 if self.is_decoding else min(start + budget, num_prompt)
        wants_rows = self.params.prompt_logprobs is not None
        targets = self.prompt[start + 1 : end + 1] if wants_rows else self.prompt[:0]
        samples = end >= num_prompt and bool(self.params.max_tokens)
        blocks = np.arange(self.first_block, self.first_block + num_blocks)
        chunk = Chunk(
            request_id=self.name,
            start=start,
            token_ids=int_array([LAST_SAMPLED]) if self.is_decoding else self.prompt[start:end],
            new_block_ids=int_array([] if start else blocks),
            row_target_ids=targets,
            first_row_position=start,
            sample=samples,
            new=None if start else self._new(),
        )
        self.num_planned = end
        self.num_outputs += samples
        return chunk

    def _new(self) -> NewRequest:
        return NewRequest(
            sampling_params=self.params,
            seed=0,
            num_prompt_tokens=len(self.prompt),
            num_prompt_logprobs=self.params.prompt_logprobs,
            stop_ids=(),
            num_output_tokens=0,
            history=int_array([]),
        )


def steps(prompts: Prompts, params: SamplingParams, block_size: int) -> Iterator[SchedulerOutput]:
    """Yield the steps of a workload as the engine sends them: decodes first, then prefill."""
    longest = max(len(prompt) for prompt in prompts) + (params.max_tokens or 0)
    num_blocks = -(-longest // block_size)
    live = [_Progress(f"r{i}", prompt, params, i * num_blocks) for i, prompt in enumerate(prompts)]
    step_id = 0
    while live:
        budget, chunks = _STEP_TOKENS, []
        for request in sorted(live, key=lambda r: not r.is_decoding):
            if budget > 0:
                chunks.append(request.chunk(budget, num_blocks))
                budget -= len(chunks[-1].token_ids)
        yield SchedulerOutput(step_id, chunks, [])
        step_id += 1
        live = [request for request in live if not request.is_done]
    yield SchedulerOutput(step_id, [], [f"r{i}" for i in range(len(prompts))])


def _serve_bare(model: str, num_threads: int, line: Connection) -> None:
    """Run workloads that come over `line` without an engine; answer with seconds for each."""
    import torch

    from workers.kv_cache import KVCache
    from workers.loader import load_model
    from workers.model_runner import ModelRunner

    torch.set_num_threads(num_threads)
    loaded = load_model(model)
    block_size = EngineConfig().block_size
    num_blocks = KVCache.blocks_in(_KV_BYTES, loaded.layers, block_size, loaded.dtype)
    runner = ModelRunner(loaded, num_blocks=num_blocks, block_size=block_size)
    line.send(None)
    while (work := line.recv()) is not None:
        prompts, params = work
        planned = list(steps(prompts, params, block_size))
        started_s = time.perf_counter()
        for step in planned:
            for result in runner.execute(step).results:
                if result.error is not None:
                    raise RuntimeError(result.error.message)
        line.send(time.perf_counter() - started_s)


class BareLoop:
    """A model runner in a process of its own, with the environment that workers get."""

    def __init__(self, model: str, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        before = dict(os.environ)
        os.environ.update(worker_variables(num_threads))
        try:
            self._process = context.Process(
                target=_serve_bare, args=(model, num_threads, theirs), daemon=True
            )
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()
        self._line.recv()

    def run(self, prompts: Prompts, params: SamplingParams) -> float:
        """Return the seconds that a workload took."""
        self._line.send((prompts, params))
        return float(self._line.recv())

    def close(self) -> None:
        """End the process."""
        self._line.send(None)
        self._process.join()


def run(
    model: str, repeats: int, names: list[str], num_threads: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Run workloads on both sides and return the report."""
    console = Console(stderr=True)
    results: dict[str, Any] = {}
    bare = BareLoop(model, num_threads)
    with Client(
        model=model,
        num_workers=1,
        num_threads=num_threads,
        kv_cache_bytes=_KV_BYTES,
        offload_bytes=0,
        name="bench-overhead",
        **settings,
    ) as client:
        inputs = Inputs(client.info.limits.vocab_size)
        for name in names:
            workload = WORKLOADS[name]
            pairs = []
            inside = []
            for turn in range(repeats + 1):
                prompts = inputs.unique(workload.num_requests, workload.num_prompt_tokens)
                before = client.stats().scheduler
                started_s = time.perf_counter()
                client.generate(prompts, workload.params)
                engine_s = time.perf_counter() - started_s
                after = client.stats().scheduler
                pair = (engine_s, bare.run(prompts, workload.params))
                if turn:  # the first one warms up
                    console.print(f"{name} {turn}/{repeats}: {pair[0]:.3f} and {pair[1]:.3f} s")
                    pairs.append(pair)
                    inside.append(after.compute_s - before.compute_s)
            results[name] = {
                "engine_s": round(statistics.median(p[0] for p in pairs), 4),
                "engine_compute_s": round(statistics.median(inside), 4),
                "num_steps": after.num_steps - before.num_steps,
                "bare_s": round(statistics.median(p[1] for p in pairs), 4),
                "overhead_percent": round(
                    100 * (statistics.median(p[0] / p[1] for p in pairs) - 1), 2
                ),
            }
    bare.close()
    return {
        "bench": "overhead",
        "model": model,
        "workloads": results,
        "repeats": repeats,
        "threads": num_threads,
        "settings": settings,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "ray")},
    }


def main() -> None:
    """Parse arguments, run, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, by commas")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="on both sides")
    parser.add_argument("--max-steps-in-flight", type=int, default=None)
    parser.add_argument("--max-decode-steps", type=int, default=None)
    arguments = parser.parse_args()
    asked = {
        name: getattr(arguments, name)
        for name in ("max_steps_in_flight", "max_decode_steps")
        if getattr(arguments, name) is not None
    }
    names = arguments.workloads.split(",")
    report = run(arguments.model, arguments.repeats, names, arguments.threads, asked)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
