"""vLLM's CPU build as its users run it; started by the benchmark in an environment of its own.

Offline jobs go through `LLM`, arrivals through the asynchronous engine of vLLM's server, each with
the batch sizes that vLLM itself chooses for it on CPU; compiled, prefix caching on as by default.
vLLM always generates at least one token: of a scored prompt that token is asked for and ignored.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import vllm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from bench.peers.protocol import Job, Outcome, run_peer, serve_on_time


def _arguments(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": settings["model"],
        "dtype": settings["dtype"],
        "max_model_len": settings["max_model_len"],
        "max_logprobs": settings["max_logprobs"],
    }


def _scoring(job: Job) -> SamplingParams:
    return SamplingParams(
        prompt_logprobs=job.num_logprobs, max_tokens=1, temperature=0.0, detokenize=False
    )


def _generating(max_tokens: int, kind: RequestOutputKind) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=kind,
    )


class OfflinePeer:
    """`LLM.generate` over whole lists."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm = LLM(**_arguments(settings), disable_log_stats=True)
        scheduling = self._llm.llm_engine.vllm_config.scheduler_config
        self.about: dict[str, Any] = {
            "version": vllm.__version__,
            "dtype": settings["dtype"],
            "max_num_batched_tokens": scheduling.max_num_batched_tokens,
        }

    def score(self, job: Job) -> Outcome:
        """Make the rows asked for."""
        outputs, seconds = self._run(job, _scoring(job))
        num_rows, sums = [], []
        for output, prompt, start in zip(outputs, job.prompts, job.starts, strict=True):
            rows = output.prompt_logprobs[start:]
            num_rows.append(sum(row is not None for row in rows))
            actual = zip(rows, prompt[start:], strict=True)
            sums.append(sum(row[token].logprob for row, token in actual))
        return Outcome(seconds, num_rows, sums)

    def generate(self, job: Job) -> Outcome:
        """Continue all prompts."""
        params = [_generating(count, RequestOutputKind.FINAL_ONLY) for count in job.max_tokens]
        outputs, seconds = self._run(job, params)
        tokens = [output.outputs[0].token_ids for output in outputs]
        return Outcome(
            seconds, first_token_ids=[ids[0] for ids in tokens], num_generated=sum(map(len, tokens))
        )

    def _run(self, job: Job, params: Any) -> tuple[list[Any], float]:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in job.prompts]
        started_s = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return outputs, time.perf_counter() - started_s


class ServingPeer:
    """The engine behind vLLM's server, without HTTP."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = self._loop.run_until_complete(self._start(_arguments(settings)))
        scheduling = self._engine.vllm_config.scheduler_config
        self._num_requests = 0
        self.about: dict[str, Any] = {
            "version": vllm.__version__,
            "dtype": settings["dtype"],
            "max_num_batched_tokens": scheduling.max_num_batched_tokens,
        }

    @staticmethod
    async def _start(arguments: dict[str, Any]) -> AsyncLLM:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments, disable_log_stats=True),
            usage_context=UsageContext.OPENAI_API_SERVER,
        )

    def serve(self, job: Job) -> Outcome:
        """Take each prompt when it arrives."""
        return self._loop.run_until_complete(serve_on_time(job, partial(self._one, job)))

    async def _one(
        self, job: Job, started_s: float, prompt: list[int], max_tokens: int, at_s: float
    ) -> float | None:
        """Return the seconds until the first token, None for a prompt that was scored."""
        self._num_requests += 1
        request_id = str(self._num_requests)
        await asyncio.sleep(started_s + at_s - time.perf_counter())
        params = _generating(max_tokens, RequestOutputKind.DELTA) if max_tokens else _scoring(job)
        first_s = None
        async for _ in self._engine.generate(
            TokensPrompt(prompt_token_ids=prompt), params, request_id
        ):
            first_s = first_s or time.perf_counter()
        if first_s is None:
            raise RuntimeError(f"request {request_id} brought nothing")
        return first_s - started_s - at_s if max_tokens else None


def _load(settings: dict[str, Any]) -> Any:
    return ServingPeer(settings) if settings["serving"] else OfflinePeer(settings)


if __name__ == "__main__":
    run_peer(_load)
