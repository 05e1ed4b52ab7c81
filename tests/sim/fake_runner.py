"""A worker without a model, whose every result depends on every KV slot before it.

The KV of position p is a 64-bit mix of the KV of p-1 and the token, so it names its whole prefix,
as real KV does. A row or a sampled token is a function of the sum of all KV from position 0 to p,
read through the block table. A block that was reused too early, restored into the wrong place, or
never written changes that sum and with it every later result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.codec import IntArray, int_array
from scheduler.errors import InvalidRequest, NumericalError
from scheduler.logprobs import Logprobs
from scheduler.messages import (
    LAST_SAMPLED,
    Chunk,
    ChunkResult,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    WorkerInfo,
)
from scheduler.request import FinishReason
from scheduler.sampling_params import ALL_LOGPROBS, SamplingParams

VOCAB_SIZE = 40
EOS = 7
POISON = 13
"""A prompt that holds this token comes out as NaN."""
MASK = 2**64 - 1


def _mix(parent: int, token: int) -> int:
    value = (parent * 6364136223846793005 + (token + 1) * 1442695040888963407) & MASK
    return value ^ (value >> 29)


def _row(
    total: int, actual: int, k: int, asked: Sequence[int] | None
) -> tuple[list[int], list[float], list[int]]:
    """Return (token ids, logprobs, ranks) of a made-up but honest distribution."""
    shift = total % VOCAB_SIZE
    likely = [(place - shift) % VOCAB_SIZE for place in range(k)]
    tokens = [actual, *(likely if asked is None else asked)]
    places = [(token + shift) % VOCAB_SIZE for token in tokens]
    logprobs = [float(np.float32(-0.25 * p - (total % 997) / 1000)) for p in places]
    return tokens, logprobs, [p + 1 for p in places]


def _rows(
    totals: Sequence[int], actuals: Sequence[int], k: int, asked: Sequence[int] | None = None
) -> Logprobs:
    rows = [_row(total, actual, k, asked) for total, actual in zip(totals, actuals, strict=True)]
    return Logprobs(
        int_array([r[0] for r in rows]).reshape(len(rows), k + 1),
        np.asarray([r[1] for r in rows], np.float32).reshape(len(rows), k + 1),
        int_array([r[2] for r in rows]).reshape(len(rows), k + 1),
    )


def _sample(total: int, seed: int, position: int, banned: Sequence[int]) -> int:
    token = (total ^ (seed * 31 + position * 17)) % VOCAB_SIZE
    while token in banned or token == POISON:
        token = (token + 1) % VOCAB_SIZE
    return token


def _width(k: int) -> int:
    return VOCAB_SIZE if k == ALL_LOGPROBS else k


@dataclass
class _Tracked:
    new: NewRequest
    table: list[int]
    num_output_tokens: int
    last_token: int | None = None
    has_ended: bool = False


@dataclass
class FakeRunner:
    """Executes step messages like a `ModelRunner`."""

    worker_id: str
    num_blocks: int
    block_size: int
    tracked: dict[str, _Tracked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv = np.zeros((self.num_blocks, self.block_size), np.uint64)

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.worker_id,
            device="fake",
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            block_bytes=self.block_size * 8,
            vocab_size=VOCAB_SIZE,
            max_model_len=10_000,
            eos_token_ids=(EOS,),
            model_fingerprint="fake",
        )

    def read_blocks(self, block_ids: Sequence[int]) -> np.ndarray:
        return self.kv[list(block_ids)].view(np.uint8).copy()

    def write_blocks(self, block_ids: Sequence[int], data: np.ndarray) -> None:
        self.kv[list(block_ids)] = np.ascontiguousarray(data).view(np.uint64)

    def forget_all(self) -> None:
        self.tracked.clear()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in output.released_request_ids:
            self.tracked.pop(request_id, None)
        results = []
        for chunk in output.chunks:
            if chunk.new is not None:
                if chunk.request_id in self.tracked:
                    raise RuntimeError(f"{chunk.request_id} is new twice")
                self.tracked[chunk.request_id] = _Tracked(
                    chunk.new, [], chunk.new.num_output_tokens
                )
            result = self._run(chunk)
            if result.error is not None:
                self.forget([chunk.request_id])
            results.append(result)
        return ModelRunnerOutput(output.step_id, results, 0.001)

    def _run(self, chunk) -> ChunkResult:
        """Compute a chunk and the decodes that follow it."""
        results = [self._compute(chunk)]
        tracked = self.tracked.get(chunk.request_id)
        none = int_array([])
        while (
            len(results) <= chunk.max_more_tokens
            and results[-1].error is None
            and not tracked.has_ended
        ):
            start = chunk.start + len(chunk.token_ids) + len(results) - 1
            last = int_array([LAST_SAMPLED])
            results.append(
                self._compute(Chunk(chunk.request_id, start, last, none, none, start, True))
            )
        if len(results) == 1:
            return results[0]
        rows = [r.sampled_logprobs for r in results if r.sampled_logprobs is not None]
        return ChunkResult(
            chunk.request_id,
            results[0].rows,
            results[0].sampled_token_id,
            Logprobs.concat(rows) if rows else None,
            int_array([r.sampled_token_id for r in results[1:]]),
        )

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.tracked.pop(request_id, None)

    def _compute(self, chunk) -> ChunkResult:
        tracked = self.tracked.get(chunk.request_id)
        if tracked is None:
            return ChunkResult(chunk.request_id, error=InvalidRequest("not known").to_wire())
        tracked.table += chunk.new_block_ids.tolist()
        tokens = chunk.token_ids.tolist()
        if tokens == [LAST_SAMPLED]:
            tokens = [tracked.last_token]
        end = chunk.start + len(chunk.token_ids)
        table = np.asarray(tracked.table)
        if end > len(table) * self.block_size:
            raise RuntimeError(f"{chunk.request_id}: {end} tokens in {len(table)} blocks")
        positions = np.arange(end)
        where = (table[positions // self.block_size], positions % self.block_size)
        if POISON in tokens:
            new = max(chunk.start, chunk.first_new_position)
            self.kv[where[0][new:], where[1][new:]] = 0
            return ChunkResult(chunk.request_id, error=NumericalError("NaN").to_wire())
        parent = (
            int(self.kv[where[0][chunk.start - 1], where[1][chunk.start - 1]]) if chunk.start else 0
        )
        for i, token in enumerate(tokens):
            parent = _mix(parent, token)
            if chunk.start + i < chunk.first_new_position:
                found = int(self.kv[where[0][chunk.start + i], where[1][chunk.start + i]])
                if found != parent:
                    raise RuntimeError(f"{chunk.request_id}: {chunk.start + i} is not there yet")
                continue
            self.kv[where[0][chunk.start + i], where[1][chunk.start + i]] = parent
        totals = np.cumsum(self.kv[where], dtype=np.uint64)
        rows = sampled = sampled_logprobs = None
        params = tracked.new.sampling_params
        if len(chunk.row_target_ids):
            at = range(
                chunk.first_row_position, chunk.first_row_position + len(chunk.row_target_ids)
            )
            k = _width(tracked.new.num_prompt_logprobs)
            asked = params.prompt_logprob_token_ids
            rows = _rows([int(totals[p]) for p in at], chunk.row_target_ids.tolist(), k, asked)
        if chunk.sample:
            total = int(totals[end - 1])
            young = tracked.num_output_tokens < params.min_tokens
            banned = tracked.new.stop_ids if young else ()
            sampled = _sample(total, tracked.new.seed, end, banned)
            tracked.num_output_tokens += 1
            tracked.last_token = sampled
            is_old = tracked.num_output_tokens >= params.min_tokens
            tracked.has_ended = is_old and sampled in tracked.new.stop_ids
            if params.logprobs is not None:
                sampled_logprobs = _rows([total], [sampled], _width(params.logprobs))
        return ChunkResult(chunk.request_id, rows, sampled, sampled_logprobs)


@dataclass
class Expected:
    """What a request must come to, computed without any engine."""

    rows: Logprobs | None
    token_ids: list[int]
    logprobs: Logprobs | None
    finish_reason: FinishReason


def expected_output(
    prompt: IntArray, params: SamplingParams, seed: int, max_tokens: int, *, fails: bool = True
) -> Expected:
    """Return the one right answer for a request, if `fails` that of a prompt with NaN too."""
    if POISON in prompt and fails:
        return Expected(None, [], None, FinishReason.ERROR)
    tokens = prompt.tolist()
    totals: list[int] = []
    parent = total = 0
    for token in tokens:
        parent = _mix(parent, token)
        total = (total + parent) & MASK
        totals.append(total)
    rows = None
    if params.num_prompt_logprobs is not None:
        first = max(params.prompt_logprobs_start, 1)
        k, asked = _width(params.num_prompt_logprobs), params.prompt_logprob_token_ids
        rows = _rows(totals[first - 1 : -1], tokens[first:], k, asked)
    output: list[int] = []
    output_totals = []
    reason = FinishReason.LENGTH
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    while len(output) < max_tokens:
        banned = sorted(stops) if len(output) < params.min_tokens else ()
        token = _sample(total, seed, len(tokens) + len(output), banned)
        output.append(token)
        output_totals.append(total)
        if token in stops and len(output) >= params.min_tokens:
            reason = FinishReason.STOP
            break
        parent = _mix(parent, token)
        total = (total + parent) & MASK
    logprobs = None
    if params.logprobs is not None:
        logprobs = _rows(output_totals, output, _width(params.logprobs))
    return Expected(rows, output, logprobs, reason)
