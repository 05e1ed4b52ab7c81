"""What evictions, migrations, lost workers and the journal cost.

    python -m bench.resilience [--model NAME] [--repeats 3]

On two workers of one machine:
- `eviction`: a prompt of 2,000 tokens is evicted in mid-prefill; tokens computed again per eviction
  (less than one KV block), rows computed again (none).
- `lost_worker`: a worker is killed (SIGKILL) while it computes prompts of 2,000 tokens; tokens
  computed again per request that it had (at most one save segment).
- `recovery`: a worker is killed while it decodes; seconds from the kill to the next token of a
  request that it had, which another worker computes.
- `migration`: a decoding request moves to the other worker; its longest wait for a token while it
  moves, in decode steps (medians of its waits before), by tokens of context.
- `journal`: throughput of scoring with a journal over that without, in turns on two engines.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.inputs import Inputs
from cluster import Client, SamplingParams
from cluster.handle import RequestHandle
from scheduler.messages import RequestInfo
from workers.model_store import DEFAULT_MODEL

_PROMPT_TOKENS = 2000
_SEGMENT_TOKENS = 512
_CONTEXTS = (500, 1000, 2000, 4000)
_DEADLINE_S = 300.0
_JOURNAL_TURNS = 16
"""One turn says little: two engines beside each other differ by several percent either way."""
_SCORING = SamplingParams(prompt_logprobs=1, max_tokens=0, skip_reading_prefix_cache=True)

Show = Callable[[str], None]


def _until(what: str, found: Callable[[], Any]) -> Any:
    """Return the first true answer of `found`; ask often, since moments pass quickly."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while not (answer := found()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {_DEADLINE_S:g} s for {what}")
        time.sleep(0.005)
    return answer


def _infos(client: Client) -> dict[str, RequestInfo]:
    return {info.request_id: info for info in client.requests()}


def _kill(client: Client, worker_id: str) -> None:
    pid = next(worker.pid for worker in client.workers() if worker.worker_id == worker_id)
    os.kill(pid, signal.SIGKILL)


def _wait_for_workers(client: Client) -> None:
    _until("the replacement", lambda: len(client.workers()) == 2)


def evictions(client: Client, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Evict prompts in mid-prefill."""
    recomputed = []
    for _ in range(repeats):
        handle = client.submit(inputs.tokens(_PROMPT_TOKENS), _SCORING)

        def in_mid_prefill(request_id: str = handle.request_id) -> bool:
            info = _infos(client).get(request_id)
            return info is not None and 0 < info.num_computed_tokens < _PROMPT_TOKENS

        _until("the prefill", in_mid_prefill)
        client.evict(handle.request_id)
        stats = handle.result(_DEADLINE_S).stats
        if stats is not None and stats.num_evictions:
            recomputed.append(stats.num_recomputed_tokens / stats.num_evictions)
    return {"evicted": len(recomputed), "tokens_recomputed_max": max(recomputed, default=None)}


def lost_workers(client: Client, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Kill a worker in mid-prefill."""
    recomputed: list[int] = []
    for _ in range(repeats):
        handles = [client.submit(p, _SCORING) for p in inputs.unique(4, _PROMPT_TOKENS)]

        def deep_in_prefill() -> str | None:
            deep = [
                info.worker_id
                for info in _infos(client).values()
                if info.worker_id and 2 * _SEGMENT_TOKENS < info.num_computed_tokens < 1900
            ]
            return deep[0] if deep else None

        _kill(client, _until("a long prefill", deep_in_prefill))
        for handle in handles:
            stats = handle.result(_DEADLINE_S).stats
            if stats is not None and stats.num_workers_lost:
                recomputed.append(stats.num_recomputed_tokens)
        _wait_for_workers(client)
    return {
        "requests_hit": len(recomputed),
        "tokens_recomputed_max": max(recomputed, default=None),
        "segment_tokens": _SEGMENT_TOKENS,
    }


class _Arrivals:
    """When each token of a request came, noted on a thread of its own."""

    def __init__(self, handle: RequestHandle) -> None:
        self.times_s: list[float] = []
        self._handle = handle
        self._thread = threading.Thread(target=self._note, daemon=True)
        self._thread.start()

    def _note(self) -> None:
        for delta in self._handle.stream():
            self.times_s += [time.monotonic()] * len(delta.token_ids)

    def wait_for(self, count: int) -> None:
        _until(f"token {count}", lambda: len(self.times_s) >= count)

    def join(self) -> None:
        self._handle.result(_DEADLINE_S)
        self._thread.join()


def _generating(count: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=count,
        ignore_eos=True,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        skip_reading_prefix_cache=True,
    )


def recovery(client: Client, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Kill a worker that decodes, and wait for the next token of what it had."""
    waits_s = []
    for _ in range(repeats):
        handles = [client.submit(p, _generating(200)) for p in inputs.unique(4, 300)]
        arrivals = {handle.request_id: _Arrivals(handle) for handle in handles}
        for arrival in arrivals.values():
            arrival.wait_for(20)
        infos = _infos(client)
        worker_id = next(i.worker_id for i in infos.values() if i.worker_id)
        hit = [name for name, info in infos.items() if info.worker_id == worker_id]
        killed_s = time.monotonic()
        _kill(client, worker_id)
        for arrival in arrivals.values():
            arrival.join()
        for name in hit:
            # A token that was on its way at the kill comes at once: the wait after it counts.
            times_s = [killed_s, *(t for t in arrivals[name].times_s if t > killed_s)]
            waits_s.append(max(b - a for a, b in itertools.pairwise(times_s)))
        _wait_for_workers(client)
    return {
        "seconds_to_next_token_median": round(statistics.median(waits_s), 2),
        "seconds_to_next_token_max": round(max(waits_s), 2),
    }


def migration(client: Client, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Move a decoding request, at several lengths of context."""
    pauses: dict[str, float] = {}
    for context in _CONTEXTS:
        steps = []
        for _ in range(repeats):
            handle = client.submit(inputs.tokens(context), _generating(120))
            arrivals = _Arrivals(handle)
            arrivals.wait_for(30)
            before_s = arrivals.times_s[-25:]
            step_s = statistics.median(b - a for a, b in itertools.pairwise(before_s))
            here = _infos(client)[handle.request_id].worker_id
            there = next(w.worker_id for w in client.workers() if w.worker_id != here)
            asked_s = time.monotonic()
            client.migrate(handle.request_id, there)
            arrivals.join()
            stats = handle.result().stats
            if stats is None or stats.num_migrations != 1:
                raise RuntimeError(f"the request did not move: {stats}")
            after_s = [t for t in arrivals.times_s if t > asked_s]
            wait_s = max(b - a for a, b in itertools.pairwise(after_s))
            steps.append(wait_s / step_s)
        pauses[str(context)] = round(statistics.median(steps), 2)
    return {"pause_in_decode_steps": pauses}


def journal_cost(model: str, inputs: Inputs, folder: Path) -> dict[str, Any]:
    """Score the same load with and without a journal, in turns."""
    ratios = []
    with _engine(model, "plain", None) as plain, _engine(model, "kept", folder / "j") as kept:
        for client in (plain, kept):
            client.generate(inputs.unique(2, 500), _SCORING)
        for turn in range(_JOURNAL_TURNS):
            rates: dict[str, float] = {}
            sides = [("plain", plain), ("kept", kept)]
            for name, client in sides if turn % 2 else reversed(sides):
                prompts = inputs.unique(8, 500)
                started_s = time.monotonic()
                client.generate(prompts, _SCORING)
                rates[name] = 8 * 500 / (time.monotonic() - started_s)
            ratios.append(rates["kept"] / rates["plain"])
    return {
        "throughput_with_over_without": round(statistics.median(ratios), 3),
        "turns": [round(ratio, 3) for ratio in ratios],
    }


@contextlib.contextmanager
def _engine(model: str, name: str, journal: Path | None, num_workers: int = 1) -> Iterator[Client]:
    with Client(
        model=model,
        name=f"bench-{name}",
        num_workers=num_workers,
        cpus_per_worker=0.5,
        kv_cache_bytes=2**29,
        journal_path=str(journal) if journal else None,
        save_segment_tokens=_SEGMENT_TOKENS if num_workers > 1 else None,
    ) as client:
        yield client


def run(model: str, repeats: int, show: Show) -> dict[str, Any]:
    """Run all parts and return the report."""
    results: dict[str, Any] = {}
    parts = {
        "eviction": evictions,
        "migration": migration,
        "recovery": recovery,
        "lost_worker": lost_workers,
    }
    with tempfile.TemporaryDirectory() as folder:
        with _engine(model, "resilience", Path(folder) / "journal", 2) as client:
            inputs = Inputs(client.info.limits.vocab_size)
            client.generate(inputs.unique(4, 200), _generating(8))
            for name, measure in parts.items():
                show(name)
                results[name] = measure(client, inputs, repeats)
                show(f"{name}: {results[name]}")
            stats = client.stats().scheduler
            results["rows_recomputed"] = stats.num_recomputed_rows
        show("journal")
        results["journal"] = journal_cost(model, inputs, Path(folder))
    return {"bench": "resilience", "model": model, "repeats": repeats, **results}


def main() -> None:
    """Parse arguments, run, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    print(json.dumps(run(arguments.model, arguments.repeats, console.print)))


if __name__ == "__main__":
    main()
