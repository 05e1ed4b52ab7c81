"""The sides of the throughput benchmark: the engine, and its peers in processes of their own.

A side can start and end, do a job, and name its processes. The engine runs with the settings that a
user gets; beside what is said in `Engine` nothing is tuned.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import Any, Protocol

import numpy as np

from bench.peers.catalogue import PEERS, Show
from bench.peers.process import PeerProcess, command_of
from bench.peers.protocol import Job, Outcome, serve_on_time
from bench.processes import engine_pids
from bench.workloads import OURS
from cluster import Client, RequestOutput, SamplingParams
from cluster.launch import worker_variables
from workers.model_store import resolve_model

_KV_BYTES = 2**30
_START_TIMEOUT_S = 600.0
_JOB_TIMEOUT_S = 600.0


class Side(Protocol):
    """What does the jobs."""

    name: str
    about: dict[str, Any]

    def run(self, job: Job) -> Outcome:
        """Do a job; a peer may raise `PeerUnavailable`."""

    def pids(self) -> dict[str, int]:
        """Return the processes that hold its memory, by what they are."""

    def close(self) -> None:
        """End it."""


class Engine:
    """Haversack, through its client."""

    name = OURS

    def __init__(self, model: str, threads: int, workers: int) -> None:
        """Start an engine whose workers share the threads and the memory for KV."""
        settings: dict[str, Any] = {
            "model": model,
            "num_workers": workers,
            "num_threads": max(1, threads // workers),
            "kv_cache_bytes": _KV_BYTES // workers,
        }
        self._client = Client(name="bench-throughput", **settings)
        self._pids = engine_pids(self._client)
        self.vocab_size = self._client.info.limits.vocab_size
        self.max_model_len = self._client.info.limits.max_model_len
        self.about = settings | {
            key: self._client.info.settings[key]
            for key in ("dtype", "max_num_batched_tokens", "block_size")
        }

    def run(self, job: Job) -> Outcome:
        """See `Side`."""
        outcome: Outcome = getattr(self, f"_{job.kind}")(job)
        return outcome

    def pids(self) -> dict[str, int]:
        """See `Side`; this process is the client."""
        return self._pids | {"client": os.getpid()}

    def close(self) -> None:
        """See `Side`."""
        self._client.close()

    def _score(self, job: Job) -> Outcome:
        params = [_scoring(job.num_logprobs, start) for start in job.starts]
        started_s = time.perf_counter()
        outputs = self._client.generate(job.prompts, params)
        seconds = time.perf_counter() - started_s
        num_rows, sums, num_bytes = [], [], 0
        for output, prompt, start in zip(outputs, job.prompts, job.starts, strict=True):
            if output.prompt_logprobs is None:
                raise RuntimeError(f"{job.workload}: a scored prompt came back without rows")
            rows = output.prompt_logprobs.arrays
            actual = rows.logprobs[max(0, rows.num_rows - (len(prompt) - start)) :, 0]
            num_rows.append(len(actual))
            sums.append(float(actual.sum(dtype=np.float64)))
            num_bytes += rows.num_bytes
        return Outcome(
            seconds, num_rows, sums, result_bytes=num_bytes, num_cached=_num_cached(outputs)
        )

    def _generate(self, job: Job) -> Outcome:
        params = [_generating(count) for count in job.max_tokens]
        started_s = time.perf_counter()
        outputs = self._client.generate(job.prompts, params)
        seconds = time.perf_counter() - started_s
        tokens = [output.outputs[0].token_ids for output in outputs]
        return Outcome(
            seconds,
            first_token_ids=[ids[0] for ids in tokens],
            num_generated=sum(map(len, tokens)),
            num_cached=_num_cached(outputs),
        )

    def _serve(self, job: Job) -> Outcome:
        return asyncio.run(serve_on_time(job, partial(self._one, job)))

    async def _one(
        self, job: Job, started_s: float, prompt: list[int], max_tokens: int, at_s: float
    ) -> float | None:
        """Return the seconds until the first token, None for a prompt that was scored."""
        await asyncio.sleep(started_s + at_s - time.perf_counter())
        params = _generating(max_tokens) if max_tokens else _scoring(job.num_logprobs, 1)
        handle = await asyncio.to_thread(self._client.submit, prompt, params)
        first_s = None
        async for delta in handle.stream():
            if first_s is None and delta.token_ids:
                first_s = time.perf_counter()
        if not max_tokens:
            return None
        if first_s is None:
            raise RuntimeError(f"{job.workload}: a request ended without a token")
        return first_s - started_s - at_s


def _num_cached(outputs: list[RequestOutput]) -> int:
    return sum(output.num_cached_tokens or 0 for output in outputs)


def _scoring(num_logprobs: int, start: int) -> SamplingParams:
    wanted: dict[str, Any] = {"prompt_logprobs_start": start} if start > 1 else {}
    return SamplingParams(prompt_logprobs=num_logprobs, max_tokens=0, **wanted)


def _generating(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)


class PeerSide:
    """A peer, in a process of its own."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        model: str,
        threads: int,
        dtype: str,
        *,
        is_serving: bool,
        max_logprobs: int,
        show: Show,
    ) -> None:
        """Start the peer, and install it where it is not there.

        Args:
            name: of `bench.peers.catalogue.PEERS`.
            engine: whose limits it gets.
            model: see `workers.model_store`.
            threads: to compute with.
            dtype: of its weights.
            is_serving: whether it is to take prompts one by one.
            max_logprobs: the largest k that it will be asked for.
            show: told what takes long.

        Raises:
            PeerUnavailable: it can't be installed or does not start.
        """
        self.name = name
        self.is_serving = is_serving
        spec = PEERS[name]
        python = spec.python(show)
        variables, self._notes = spec.variables(python, threads)
        if name == "linear":
            variables |= worker_variables(threads)
        self._process = PeerProcess(
            command_of(python, spec.module),
            variables,
            {
                "model": str(resolve_model(model)),
                "threads": threads,
                "dtype": dtype,
                "serving": is_serving,
                "max_model_len": engine.max_model_len,
                "max_logprobs": max_logprobs,
            },
            start_timeout_s=_START_TIMEOUT_S,
            job_timeout_s=_JOB_TIMEOUT_S,
        )
        self.about = self._process.about | ({"notes": self._notes} if self._notes else {})

    def run(self, job: Job) -> Outcome:
        """See `Side`."""
        return self._process.run(job)

    def pids(self) -> dict[str, int]:
        """See `Side`."""
        return self._process.pids()

    def close(self) -> None:
        """See `Side`."""
        self._process.close()
