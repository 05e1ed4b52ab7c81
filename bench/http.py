"""What the HTTP endpoint costs beside `Client`, and how it answers under load.

    python -m bench.http [--model NAME] [--repeats 3] [--results FILE]

One engine with one worker; in the same run:

- `overhead`: prompts alike through `Client` and through the endpoint, in turns, one at a time and
  many at once; requests/s, and seconds that the endpoint adds to a request (medians).
- `streams`: 200 open streams at once; when each has its first event, and when all are done.
- `health`: seconds until `/health` answers, while nothing else goes on and while a prompt of 5 MB
  is tokenised (which is then refused, as it is longer than the model's context).

The client of both is this process. A whole run writes `bench/results/http.json`. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from rich.console import Console

from bench.inputs import Inputs
from bench.machine import machine
from cluster import Client, SamplingParams
from cluster.api_settings import ApiSettings
from cluster.config import EngineConfig
from cluster.serving import Endpoint
from workers.model_store import DEFAULT_MODEL

_RESULTS = Path(__file__).parent / "results" / "http.json"
_AT_ONCE = 32
_NUM_PROMPTS = {1: 24, _AT_ONCE: 128}
"""By how many are under way at once."""
_PROMPT_TOKENS = 32
_STREAMS = 200
_STREAM_TOKENS = 16
_LONG_TEXT = "".join(f"Line {i} of a prompt of five megabytes. " for i in range(131_072))[
    : 5 * 2**20
]
_HEALTH_LIMIT_S = 0.1

Show = Callable[[str], None]
Prompt = list[int]


class Kind(NamedTuple):
    """What is asked for each prompt, through either door."""

    params: SamplingParams
    body: dict[str, Any]


KINDS = {
    "score": Kind(
        SamplingParams(prompt_logprobs=1, max_tokens=0),
        {"echo": True, "logprobs": 1, "max_tokens": 0},
    ),
    "generate": Kind(
        SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
        {"max_tokens": 8, "temperature": 0, "ignore_eos": True},
    ),
}


class StreamTimes(NamedTuple):
    """When something came of a stream, in seconds of `time.perf_counter`."""

    opened_s: float
    first_s: float
    end_s: float


class Bench:
    """A running engine, its endpoint, and a client of each."""

    def __init__(self, client: Client, url: str, session: aiohttp.ClientSession) -> None:
        self.inputs = Inputs(client.info.limits.vocab_size)
        self._client = client
        self._url = url
        self._session = session

    async def through_client(self, kind: Kind, prompt: Prompt) -> None:
        """Do one request without HTTP."""
        handle = await asyncio.to_thread(self._client.submit, prompt, kind.params)
        await handle

    async def through_http(self, kind: Kind, prompt: Prompt) -> None:
        """Do one request over HTTP."""
        body = {"prompt": prompt, **kind.body}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.json()

    async def stream(self, prompt: Prompt) -> StreamTimes:
        """Read a stream, and return when what came."""
        body = {"prompt": prompt, "max_tokens": _STREAM_TOKENS, "ignore_eos": True, "stream": True}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            opened_s = time.perf_counter()
            await answer.content.readline()
            first_s = time.perf_counter()
            rest = await answer.content.read()
        if not rest.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"a stream ended with {rest[-80:]!r}")
        return StreamTimes(opened_s, first_s, time.perf_counter())

    async def health(self) -> float:
        """Return the seconds until `/health` answers."""
        started_s = time.perf_counter()
        async with self._session.get(f"{self._url}/health") as answer:
            answer.raise_for_status()
            await answer.read()
        return time.perf_counter() - started_s

    async def long_prompt(self) -> float:
        """Send the long prompt; return the seconds until it is refused."""
        data = json.dumps({"prompt": _LONG_TEXT}).encode()
        headers = {"content-type": "application/json"}
        started_s = time.perf_counter()
        url = f"{self._url}/v1/completions"
        async with self._session.post(url, data=data, headers=headers) as answer:
            error = (await answer.json())["error"]
        if error["code"] != "context_length_exceeded":
            raise RuntimeError(f"the long prompt was not refused for its length: {error}")
        return time.perf_counter() - started_s


async def timed(
    work: Callable[[Prompt], Awaitable[None]], prompts: Sequence[Prompt], at_once: int
) -> tuple[float, list[float]]:
    """Do some work for each prompt; return the seconds of all, and of each."""
    seats = asyncio.Semaphore(at_once)

    async def one(prompt: Prompt) -> float:
        async with seats:
            started_s = time.perf_counter()
            await work(prompt)
            return time.perf_counter() - started_s

    started_s = time.perf_counter()
    each_s = await asyncio.gather(*map(one, prompts))
    return time.perf_counter() - started_s, list(each_s)


async def overhead(bench: Bench, repeats: int, show: Show) -> dict[str, Any]:
    """Measure both doors, for each kind of request and number at once."""
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        for at_once, count in _NUM_PROMPTS.items():
            label = f"{name}, {at_once} at once"
            found[label] = await _in_turns(bench, kind, at_once, count, repeats)
            show(f"{label}: {found[label]}")
    return found


async def _in_turns(
    bench: Bench, kind: Kind, at_once: int, count: int, repeats: int
) -> dict[str, Any]:
    doors = {"client": bench.through_client, "http": bench.through_http}
    rates: dict[str, list[float]] = {door: [] for door in doors}
    medians: dict[str, list[float]] = {door: [] for door in doors}
    for turn in range(repeats + 1):
        for door in doors if turn % 2 else reversed(doors):
            prompts = bench.inputs.unique(count, _PROMPT_TOKENS)
            all_s, each_s = await timed(partial(doors[door], kind), prompts, at_once)
            if turn:  # the first one warms up
                rates[door].append(count / all_s)
                medians[door].append(statistics.median(each_s))
    pairs = zip(medians["http"], medians["client"], strict=True)
    return {
        "requests_per_s": {door: _median(values) for door, values in rates.items()},
        "median_s": {door: _median(values) for door, values in medians.items()},
        "added_s": _median([http - client for http, client in pairs]),
    }


async def streams(bench: Bench) -> dict[str, Any]:
    """Open many streams at once, and ask for the health meanwhile."""
    prompts = bench.inputs.unique(_STREAMS, _PROMPT_TOKENS)
    started_s = time.perf_counter()
    tasks = [asyncio.ensure_future(bench.stream(prompt)) for prompt in prompts]
    health_s = await _health_while(bench, asyncio.gather(*tasks))
    times = [task.result() for task in tasks]
    return {
        "streams": _STREAMS,
        "tokens_each": _STREAM_TOKENS,
        "open_at_once": _most_open(times),
        "first_event_s": _spread([each.first_s - started_s for each in times]),
        "all_done_s": _rounded(max(each.end_s for each in times) - started_s),
        "health_s": _spread(health_s),
    }


def _most_open(times: Sequence[StreamTimes]) -> int:
    """Return how many streams were open at the moment when most of them were."""
    changes = [(each.opened_s, 1) for each in times] + [(each.end_s, -1) for each in times]
    return max(accumulate(change for _, change in sorted(changes)))


async def health(bench: Bench, repeats: int) -> dict[str, Any]:
    """Ask for the health, alone and beside the long prompt."""
    await bench.long_prompt()  # starts the process for large work
    idle_s = [await bench.health() for _ in range(200)]
    busy_s: list[float] = []
    took_s = []
    for _ in range(repeats):
        task = asyncio.ensure_future(bench.long_prompt())
        busy_s += await _health_while(bench, task)
        took_s.append(task.result())
    return {
        "prompt_bytes": len(_LONG_TEXT),
        "long_prompt_s": _median(took_s),
        "idle_s": _spread(idle_s),
        "while_tokenised_s": _spread(busy_s),
        "within_limit": max(busy_s) < _HEALTH_LIMIT_S,
    }


async def _health_while(bench: Bench, work: Awaitable[Any]) -> list[float]:
    """Ask one time after the other until some work is done."""
    future = asyncio.ensure_future(work)
    seconds = []
    while not future.done():
        seconds.append(await bench.health())
    await future
    return seconds


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    values = np.asarray(seconds)
    return {
        "count": len(seconds),
        "median": _rounded(float(np.median(values))),
        "p99": _rounded(float(np.percentile(values, 99))),
        "max": _rounded(float(values.max())),
    }


def _median(values: Sequence[float]) -> float:
    return _rounded(statistics.median(values))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


async def measure(client: Client, url: str, repeats: int, show: Show) -> dict[str, Any]:
    """Run all parts."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        bench = Bench(client, url, session)
        found: dict[str, Any] = {"overhead": await overhead(bench, repeats, show)}
        for name, part in (("streams", streams(bench)), ("health", health(bench, repeats))):
            found[name] = await part
            show(f"{name}: {found[name]}")
    return found


def run(model: str, repeats: int, show: Show) -> dict[str, Any]:
    """Start an engine and an endpoint, and return the report."""
    with Client(model=model, name="bench-http", num_workers=1) as client:
        settings = ApiSettings(EngineConfig(**client.info.settings), (client.info.model,))  # type: ignore[arg-type]
        endpoint = Endpoint(settings, port=0)
        try:
            found = asyncio.run(measure(client, endpoint.url, repeats, show))
        finally:
            endpoint.stop()
    packages = ("haversack", "ray", "fastapi", "aiohttp", "tokenizers", "torch")
    return {
        "bench": "http",
        "model": model,
        "repeats": repeats,
        "prompt_tokens": _PROMPT_TOKENS,
        **found,
        "machine": machine(),
        "versions": {name: version(name) for name in packages},
    }


def main() -> None:
    """Parse arguments, run, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=_RESULTS, help="the file to write")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    report = run(arguments.model, arguments.repeats, console.print)
    arguments.results.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
