"""`make demo`: exact prompt logprobs on the default model, with and without evictions.

The same prompts are scored and continued twice on two workers: once with room for everything, once
with so few KV blocks, and evictions forced in mid-prefill, that requests are saved, moved and
resumed. The table shows that every row is the same bits in both runs.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.client import Client
from cluster.handle import RequestHandle
from scheduler.outputs import RequestOutput
from scheduler.request import RequestStatus
from scheduler.sampling_params import SamplingParams
from workers.model_store import DEFAULT_MODEL, resolve_model

_LIGHTHOUSE = (
    "The keeper of the lighthouse wrote down the weather every evening. On the first of March the "
    "wind came from the west and the sea was calm. On the second it turned to the north, and by "
    "midnight the waves were breaking over the lower gallery. He trimmed the lamp, wound the clock "
    "that turned the lens, and sat down to read by the stove. Nobody had called for nine days. "
)
_BRIDGES = (
    "A bridge carries its own weight before it carries anything else. In a suspension bridge the "
    "deck hangs from cables, the cables pull on the towers, and the towers press on rock below. "
    "Engineers therefore ask first what the bridge weighs, then how the wind moves it, and then "
    "how many lorries will stand on it in a traffic jam. "
)
_PROMPTS = (
    "The capital of France is",
    "Water boils at one hundred degrees Celsius at sea level, and at a lower temperature on a "
    "mountain, because",
    "Once upon a time there was a small robot who wanted to learn how to bake bread.",
    _LIGHTHOUSE,
    _BRIDGES,
    _LIGHTHOUSE + _BRIDGES + "In the morning a ship was seen beyond the reef. " + _LIGHTHOUSE * 2,
    _BRIDGES * 3 + "The longest span that was ever built",
    _LIGHTHOUSE * 3 + "When the storm was over",
)
_PARAMS = SamplingParams(
    prompt_logprobs=2, logprobs=0, max_tokens=12, seed=7, skip_reading_prefix_cache=True
)
"""Every prompt is computed: what is shown is what evictions cost, not what a cache spares."""
_FORCED = (5, 6, 7)
"""Prompts that are evicted between two chunks of their prefill."""
_EVICT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class _Run:
    outputs: list[RequestOutput]
    num_evictions: int
    num_recomputed_tokens: int


def _run(progress: Progress, title: str, *, is_cramped: bool) -> _Run:
    settings: dict[str, Any] = (
        {"max_num_batched_tokens": 64, "num_blocks": 40} if is_cramped else {}
    )
    with Client(
        model=DEFAULT_MODEL,
        num_workers=2,
        name=f"demo-{'cramped' if is_cramped else 'roomy'}",
        **settings,
    ) as client:
        task = progress.add_task(title, total=len(_PROMPTS))
        handles = client.submit_many(list(_PROMPTS), _PARAMS)
        if is_cramped:
            evict_in_mid_prefill(client, [handles[i] for i in _FORCED])
        for handle in handles:
            handle.result(timeout=600)
            progress.advance(task)
        stats = client.stats().scheduler
        return _Run(
            [handle.result() for handle in handles],
            stats.num_evictions,
            stats.num_recomputed_tokens,
        )


def evict_in_mid_prefill(client: Client, handles: list[RequestHandle]) -> int:
    """Evict each request once, when it has some prompt rows and not all.

    Returns:
        how many were evicted; a request that was too fast is left alone.
    """
    wanted = {handle.request_id for handle in handles}
    num_evicted = 0
    deadline_s = time.monotonic() + _EVICT_TIMEOUT_S
    while wanted and time.monotonic() < deadline_s:
        live = {info.request_id: info for info in client.requests()}
        for name in list(wanted):
            info = live.get(name)
            if info is None or info.num_output_tokens:
                wanted.discard(name)
            elif info.status is RequestStatus.RUNNING and info.num_computed_tokens:
                client.evict(name)
                num_evicted += 1
                wanted.discard(name)
    return num_evicted


def _perplexity(output: RequestOutput) -> float:
    assert output.prompt_logprobs is not None
    logprobs = output.prompt_logprobs.arrays.logprobs[:, 0]
    return math.exp(-float(logprobs.mean())) if len(logprobs) else float("nan")


def _least_likely(output: RequestOutput) -> str:
    view = output.prompt_logprobs
    assert view is not None
    if not view.arrays.num_rows:
        return ""
    row = int(view.arrays.logprobs[:, 0].argmin())
    entry = view[row + 1]
    assert entry is not None
    logprob = entry[output.prompt_token_ids[row + 1]]
    return f"{logprob.decoded_token!r} {logprob.logprob:.1f}"


def _is_same(a: RequestOutput, b: RequestOutput) -> bool:
    return (
        a.prompt_logprobs == b.prompt_logprobs
        and a.outputs[0].token_ids == b.outputs[0].token_ids
        and a.outputs[0].logprobs == b.outputs[0].logprobs
    )


def _table(roomy: _Run, cramped: _Run) -> Table:
    table = Table(title="The same prompts, undisturbed and with evictions")
    for name in ("prompt", "continuation"):
        table.add_column(name, no_wrap=True, max_width=30)
    for name in ("tokens", "perplexity", "least likely", "evicted", "blocks restored", "same bits"):
        table.add_column(name, justify="right", no_wrap=name == "least likely")
    for one, two in zip(roomy.outputs, cramped.outputs, strict=True):
        assert two.stats is not None
        table.add_row(
            (one.prompt or "")[:60].replace("\n", " "),
            one.outputs[0].text.strip().replace("\n", " "),
            str(len(one.prompt_token_ids)),
            f"{_perplexity(one):.2f}",
            _least_likely(one),
            str(two.stats.num_evictions),
            str(two.stats.num_restored_blocks),
            "[green]yes" if _is_same(one, two) else "[red]NO",
        )
    return table


def main() -> int:
    """Run the demo; 0 if every row was the same in both runs and requests were evicted."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        fetch = progress.add_task(f"model {DEFAULT_MODEL}", total=1)
        resolve_model(DEFAULT_MODEL)
        progress.advance(fetch)
        roomy = _run(progress, "two workers, room for all", is_cramped=False)
        cramped = _run(progress, "few blocks, forced evictions", is_cramped=True)
    console.print(_table(roomy, cramped))
    pairs = list(zip(roomy.outputs, cramped.outputs, strict=True))
    rows_equal = all(_is_same(one, two) for one, two in pairs)
    report = {
        "prompts": len(pairs),
        "rows": sum(len(one.prompt_token_ids) - 1 for one, _ in pairs),
        "rows_equal": rows_equal,
        "evictions": cramped.num_evictions,
        "tokens_recomputed": cramped.num_recomputed_tokens,
    }
    print(json.dumps(report))
    return 0 if rows_equal and cramped.num_evictions else 1


if __name__ == "__main__":
    sys.exit(main())
