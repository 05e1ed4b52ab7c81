"""Tokens per second of scoring and generation, beside transformers in the same run.

    python -m bench.score [--model NAME] [--repeats 3] [--prompts 8]

Regimes:
- `unique`: prompts of 576 tokens with nothing in common, all prompt logprobs (k=1);
- `shared`: prompts that share their first 512 tokens, all prompt logprobs (k=1);
- `generate`: 16 requests of 128 prompt tokens, 64 generated, greedy.

The peer is transformers as evaluation harnesses run it: padded batches, SDPA attention, a softmax
over all logits in fp32. Both sides have all cores; they take turns, so that a change of the
machine's speed meets both. Figures are medians of the repeats, in tokens per second: prompt tokens
for scoring, generated tokens for generation. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from bench.inputs import Inputs, Prompts
from cluster import Client, SamplingParams
from workers.model_store import DEFAULT_MODEL, resolve_model

_PROMPT_TOKENS = 576
_SHARED_TOKENS = 512
_OWN_TOKENS = _PROMPT_TOKENS - _SHARED_TOKENS
_GENERATE_REQUESTS = 16
_GENERATE_PROMPT_TOKENS = 128
_GENERATED_TOKENS = 64
_PEER_BATCH_SIZE = 8


class TransformersPeer:
    """The library's model, driven in padded batches."""

    def __init__(self, model: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            resolve_model(model), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def score(self, prompts: Prompts) -> None:
        """Compute the logprob of every prompt token and whether greedy decoding would give it."""
        for start in range(0, len(prompts), _PEER_BATCH_SIZE):
            ids = torch.tensor(prompts[start : start + _PEER_BATCH_SIZE])
            logits = self._model(ids, use_cache=False).logits
            logprobs = torch.log_softmax(logits.float(), dim=-1)[:, :-1]
            logprobs.gather(-1, ids[:, 1:, None])
            logprobs.argmax(-1)

    @torch.inference_mode()
    def generate(self, prompts: Prompts) -> None:
        """Continue all prompts as one batch, greedily, with the library's own cache."""
        ids = torch.tensor(prompts)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=_GENERATED_TOKENS,
            max_new_tokens=_GENERATED_TOKENS,
            pad_token_id=0,
        )


def _timed(work: Callable[[Prompts], Any], prompts: Prompts, num_tokens: int) -> float:
    """Return tokens per second."""
    started_s = time.perf_counter()
    work(prompts)
    return num_tokens / (time.perf_counter() - started_s)


def run(model: str, repeats: int, num_prompts: int) -> dict[str, Any]:
    """Run all regimes and return the report."""
    peer = TransformersPeer(model)
    scoring = SamplingParams(prompt_logprobs=1, max_tokens=0)
    generating = SamplingParams(temperature=0.0, max_tokens=_GENERATED_TOKENS, ignore_eos=True)
    console = Console(stderr=True)
    with Client(model=model, num_workers=1, kv_cache_bytes=2**30, name="bench") as client:
        inputs = Inputs(client.info.limits.vocab_size)

        def score(prompts: Prompts) -> None:
            client.generate(prompts, scoring)

        def generate(prompts: Prompts) -> None:
            client.generate(prompts, generating)

        scored = num_prompts * _PROMPT_TOKENS
        generated = _GENERATE_REQUESTS * _GENERATED_TOKENS
        regimes: dict[str, tuple[Callable[[], Prompts], Any, Any, int]] = {
            "unique": (
                lambda: inputs.unique(num_prompts, _PROMPT_TOKENS),
                score,
                peer.score,
                scored,
            ),
            "shared": (
                lambda: inputs.shared(num_prompts, _SHARED_TOKENS, _PROMPT_TOKENS - _SHARED_TOKENS),
                score,
                peer.score,
                scored,
            ),
            "generate": (
                lambda: inputs.unique(_GENERATE_REQUESTS, _GENERATE_PROMPT_TOKENS),
                generate,
                peer.generate,
                generated,
            ),
        }
        results: dict[str, Any] = {}
        for name, (make, ours, theirs, num_tokens) in regimes.items():
            console.print(f"{name}: warming up")
            _timed(ours, make(), num_tokens)
            _timed(theirs, make()[:_PEER_BATCH_SIZE], num_tokens)
            pairs = []
            for turn in range(repeats):
                prompts = make()
                pair = (_timed(ours, prompts, num_tokens), _timed(theirs, prompts, num_tokens))
                console.print(f"{name} {turn + 1}/{repeats}: {pair[0]:.0f} and {pair[1]:.0f}")
                pairs.append(pair)
            results[name] = {
                "haversack": round(statistics.median(p[0] for p in pairs), 1),
                "transformers": round(statistics.median(p[1] for p in pairs), 1),
                "ratio": round(statistics.median(p[0] / p[1] for p in pairs), 2),
            }
    return {
        "bench": "score",
        "model": model,
        "tokens_per_s": results,
        "repeats": repeats,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "ray")},
    }


def main() -> None:
    """Parse arguments, run, and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="prompts per scoring regime")
    arguments = parser.parse_args()
    report = run(arguments.model, arguments.repeats, arguments.prompts)
    table = Table(title="tokens per second (median)")
    for column in ("regime", "haversack", "transformers", "ratio"):
        table.add_column(column, justify="left" if column == "regime" else "right")
    for name, figures in report["tokens_per_s"].items():
        table.add_row(name, *(str(figures[key]) for key in ("haversack", "transformers", "ratio")))
    Console(stderr=True).print(table)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
