"""What the benchmark and its peers say to each other: JSON lines on stdin and stdout.

A peer is a process. It reads one line of settings, loads its model, and answers with what it is:
`{"about": {...}}`. Then it answers each `Job` with an `Outcome`, or with `{"error": text}`, until
its input ends. Peers live in environments that have nothing of the engine's, so the module uses
the standard library alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

Prompts = list[list[int]]
_PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that a process gets when its parent ends."""


@dataclass(frozen=True)
class Job:
    """Prompts and what to do with them; lists have one item per prompt."""

    workload: str
    kind: str
    """"score": make rows of prompt logprobs. "generate": continue greedily, to full length.
    "serve": both, each prompt at its own time."""
    prompts: Prompts
    """Token ids."""
    num_logprobs: int = 1
    """k: likeliest tokens per row besides the actual one; -1 is the vocabulary."""
    starts: list[int] = field(default_factory=list)
    """Of "score": the first prompt index whose row is wanted, >= 1; there are rows to the end."""
    max_tokens: list[int] = field(default_factory=list)
    """Tokens to generate; of "serve", 0 stands for a prompt that wants all its rows instead."""
    at_s: list[float] = field(default_factory=list)
    """Of "serve": when each prompt arrives, in seconds from the start."""

    @classmethod
    def score(
        cls, workload: str, prompts: Prompts, k: int = 1, starts: list[int] | None = None
    ) -> Job:
        """Return a job of scoring, by default of all rows."""
        return cls(workload, "score", prompts, k, starts or [1] * len(prompts))

    @classmethod
    def generate(cls, workload: str, prompts: Prompts, max_tokens: int) -> Job:
        """Return a job of generation."""
        return cls(workload, "generate", prompts, max_tokens=[max_tokens] * len(prompts))

    @property
    def num_tokens(self) -> int:
        """Tokens that the job counts for: those of prompts that are scored or served, whether or
        not they had to be computed, and those that are generated.
        """
        prompted = 0 if self.kind == "generate" else sum(map(len, self.prompts))
        return prompted + sum(self.max_tokens)

    def first(self, count: int | None) -> Job:
        """Return the job with its first prompts only; None is all of them."""
        lists = ("prompts", "starts", "max_tokens", "at_s")
        return dataclasses.replace(self, **{name: getattr(self, name)[:count] for name in lists})


@dataclass(frozen=True)
class Outcome:
    """What came of a job."""

    seconds: float
    """From the first submission until the last result was there."""
    num_rows: list[int] = field(default_factory=list)
    """Of "score": rows that came, per prompt."""
    logprob_sums: list[float] = field(default_factory=list)
    """Of "score": the sum of the actual tokens' logprobs over those rows, per prompt."""
    first_token_ids: list[int] = field(default_factory=list)
    """Of "generate": the first token of each continuation."""
    num_generated: int = 0
    ttft_s: list[float] = field(default_factory=list)
    """Of "serve": from a generating prompt's arrival to its first token."""
    result_bytes: int = 0
    """Size of the rows as the caller has them, where they are flat arrays."""
    num_cached: int = 0
    """Prompt tokens that caches supplied, where the engine says so."""


class Peer(Protocol):
    """What a peer's script has to offer.

    A job's kind is the name of the method that does it, given the job and returning its outcome;
    a peer has those that its workloads need. Only making the rows is timed, not adding them up.
    """

    about: dict[str, Any]
    """What is told of it beside its figures."""


async def serve_on_time(
    job: Job, answer: Callable[[float, list[int], int, float], Awaitable[float | None]]
) -> Outcome:
    """Have each prompt of a job answered when it arrives.

    Args:
        answer: given the start's `perf_counter`, a prompt, the tokens to generate and the arrival
            in seconds from the start, waits for that, and returns the seconds from there to the
            first token; None for a prompt that was scored.
    """
    started_s = time.perf_counter()
    requests = zip(job.prompts, job.max_tokens, job.at_s, strict=True)
    waits = await asyncio.gather(*(answer(started_s, *each) for each in requests))
    seconds = time.perf_counter() - started_s
    return Outcome(seconds, ttft_s=[wait for wait in waits if wait is not None])


def run_peer(load: Callable[[dict[str, Any]], Peer]) -> None:
    """Serve jobs from stdin until it ends.

    Whatever else is printed in this process or its children goes to stderr.
    """
    # Even a suspended peer ends with the benchmark, and what it has started is then hung up.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    started_s = time.perf_counter()
    try:
        peer = load(json.loads(sys.stdin.readline()))
    except Exception as error:
        traceback.print_exc()
        answer({"error": describe(error)})
        return
    answer({"about": peer.about | {"load_s": round(time.perf_counter() - started_s, 1)}})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        try:
            outcome = getattr(peer, job.kind)(job)
        except Exception as error:
            traceback.print_exc()
            answer({"error": describe(error)})
            continue
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer({"outcome": dataclasses.asdict(outcome), "peak_rss_bytes": 1024 * peak_kb})


def describe(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
