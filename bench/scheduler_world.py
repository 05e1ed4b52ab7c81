"""The surroundings of a scheduling core on virtual time: a trace of requests and workers that
take time but compute nothing.

A request's prompt is a system prompt, drawn from a Zipf distribution, and a tail of its own. Half
of the requests are scored (all prompt rows, nothing generated), half are generated, and every other
one of those wants logprobs. Everything follows from one seed. A step costs a fixed time and a time
per token; the step that ends first is answered first. Only the time spent inside
`SchedulerState.handle` is counted. There is no offload store.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler.actions import CopyBlocks, Emit, Refuse, RunBatch
from scheduler.codec import IntArray, int_array
from scheduler.config import SchedulerConfig
from scheduler.events import AnyEvent, BatchDone, CopyDone, RequestSubmitted, Tick, WorkerJoined
from scheduler.logprobs import Logprobs
from scheduler.messages import (
    Chunk,
    ChunkResult,
    ModelRunnerOutput,
    SchedulerOutput,
    Submission,
    WorkerInfo,
)
from scheduler.sampling_params import SamplingParams
from scheduler.state import SchedulerState

VOCAB_SIZE = 50_000
BLOCK_SIZE = 16
NUM_BLOCKS = 4096
"""Of a worker: about twice what its requests hold, so that its cache fills up and turns over."""
_NUM_SYSTEM_PROMPTS = 1000
_ZIPF_EXPONENT = 1.0
_SYSTEM_TOKENS = (32, 768)
_MEAN_TAIL_TOKENS, _MAX_TAIL_TOKENS = 96, 768
_MEAN_OUTPUT_TOKENS, _MAX_OUTPUT_TOKENS = 48, 256
_STEP_S, _STEP_S_PER_TOKEN = 4e-3, 12e-6
_JITTER = 0.1
"""Steps take so much more or less time, or all workers would answer at once."""
_COPY_S = 5e-3
_TICK_S = 1.0
_CLIENT = "bench"
_SCORING = SamplingParams(prompt_logprobs=1, max_tokens=0)


class Trace:
    """An endless, seeded stream of submissions."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        lengths = self._rng.integers(*_SYSTEM_TOKENS, _NUM_SYSTEM_PROMPTS)
        self._system_prompts = [self._tokens(int(length)) for length in lengths]
        weights = np.arange(1, _NUM_SYSTEM_PROMPTS + 1) ** -_ZIPF_EXPONENT
        self._weights = weights / weights.sum()
        self._computed: set[int] = set()
        self._scored: set[int] = set()
        """System prompts that an earlier request computed, and scored."""
        self._count = 0
        self.num_prompt_tokens = 0
        self.num_repeated_tokens = 0
        """Those of them that an earlier request had in full blocks, scored ones too where rows are
        needed: what one cache of endless size would supply."""

    def __iter__(self) -> Iterator[Submission]:
        while True:
            for kind in self._rng.choice(_NUM_SYSTEM_PROMPTS, 1024, p=self._weights).tolist():
                yield self._submission(kind)

    def _submission(self, kind: int) -> Submission:
        number, self._count = self._count, self._count + 1
        tail = self._tokens(self._length(_MEAN_TAIL_TOKENS, _MAX_TAIL_TOKENS))
        prompt = np.concatenate([self._system_prompts[kind], tail])
        params = _SCORING
        if number % 2:
            params = SamplingParams(
                max_tokens=self._length(_MEAN_OUTPUT_TOKENS, _MAX_OUTPUT_TOKENS),
                logprobs=1 if number % 4 == 1 else None,
            )
        self.num_prompt_tokens += len(prompt)
        if kind in (self._scored if params is _SCORING else self._computed):
            num_blocks = len(self._system_prompts[kind]) // BLOCK_SIZE
            self.num_repeated_tokens += num_blocks * BLOCK_SIZE
        self._computed.add(kind)
        if params is _SCORING:
            self._scored.add(kind)
        return Submission(f"r{number}", prompt, params, seed=number)

    def _tokens(self, count: int) -> IntArray:
        return self._rng.integers(100, VOCAB_SIZE, count, dtype=np.int32)

    def _length(self, mean: int, largest: int) -> int:
        return 1 + min(int(self._rng.exponential(mean)), largest - 1)


class Worker:
    """Answers steps with rows and tokens of the right shapes."""

    def __init__(self) -> None:
        self._wants_logprobs: set[str] = set()
        self.free_s = 0.0
        """When it will have computed all that it was sent."""
        self.num_tokens = 0
        """Tokens computed so far."""
        rows = int_array(np.zeros((1024, 2), np.int32))
        self._rows = Logprobs(rows, rows.astype(np.float32), rows)
        self._row = self._rows[:1]

    def execute(self, output: SchedulerOutput) -> tuple[ModelRunnerOutput, float]:
        """Return the answer and the seconds that it takes."""
        self._wants_logprobs.difference_update(output.released_request_ids)
        num_tokens = sum(len(chunk.token_ids) for chunk in output.chunks)
        self.num_tokens += num_tokens
        cost_s = _STEP_S + _STEP_S_PER_TOKEN * num_tokens
        results = [self._result(chunk) for chunk in output.chunks]
        return ModelRunnerOutput(output.step_id, results, cost_s), cost_s

    def _result(self, chunk: Chunk) -> ChunkResult:
        name = chunk.request_id
        if chunk.new is not None and chunk.new.sampling_params.logprobs is not None:
            self._wants_logprobs.add(name)
        num_rows = len(chunk.row_target_ids)
        rows = self._rows[:num_rows] if num_rows else None
        if not chunk.sample:
            return ChunkResult(name, rows)
        return ChunkResult(name, rows, 7, self._row if name in self._wants_logprobs else None)


@dataclass
class Engine:
    """A core, its workers and the clients that keep a number of requests live."""

    num_workers: int
    seed: int
    state: SchedulerState = field(init=False)
    handle_s: float = 0.0
    """CPU seconds spent in `handle` so far."""
    num_submitted: int = 0
    num_ended: int = 0
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.state = SchedulerState(
            SchedulerConfig(
                block_size=BLOCK_SIZE,
                vocab_size=VOCAB_SIZE,
                enable_offload=False,
                max_queued_requests=10**9,
                max_queued_tokens=10**12,
            )
        )
        self.trace = Trace(self.seed)
        self._submissions = iter(self.trace)
        self._rng = random.Random(self.seed)
        self._coming: list[tuple[float, int, AnyEvent]] = []
        """Heap of what will have happened: when, number, event."""
        self._num_answers = 0
        self._next_tick_s = _TICK_S
        self.workers = {f"w{i}": Worker() for i in range(self.num_workers)}
        for name in self.workers:
            info = WorkerInfo(name, "none", NUM_BLOCKS, BLOCK_SIZE, 1, VOCAB_SIZE, 8192, (), "none")
            self._handle(WorkerJoined(info))

    def submit(self, count: int) -> None:
        """Submit the next requests of the trace, in one message."""
        self.num_submitted += count
        events = [
            RequestSubmitted(next(self._submissions), _CLIENT, time_s=self.now_s)
            for _ in range(count)
        ]
        self._handle(*events)

    def run(self, num_requests: int) -> Iterator[None]:
        """Answer step after step, yielding after each, until nothing is left to do.

        Each request that ends is followed by another one until `num_requests` have come.

        Raises:
            RuntimeError: nothing is under way any more, and requests have not ended.
        """
        while self._coming:
            self.now_s, _, event = heapq.heappop(self._coming)
            if self.now_s >= self._next_tick_s:
                self._next_tick_s = self.now_s + _TICK_S
                self._handle(Tick(time_s=self.now_s))
            num_ended = self._handle(event)
            if num_ended and self.num_submitted < num_requests:
                self.submit(min(num_ended, num_requests - self.num_submitted))
            yield
        if self.num_ended < self.num_submitted:
            raise RuntimeError(f"{self.num_submitted - self.num_ended} requests never end")

    def _answer(self, time_s: float, event: AnyEvent) -> None:
        self._num_answers += 1
        heapq.heappush(self._coming, (time_s, self._num_answers, event))

    def _handle(self, *events: AnyEvent) -> int:
        """Give events to the core and start its steps; return how many requests have ended."""
        started_s = time.process_time()
        actions = self.state.handle(*events)
        self.handle_s += time.process_time() - started_s
        num_ended = 0
        for action in actions:
            match action:
                case RunBatch():
                    worker = self.workers[action.worker_id]
                    output, cost_s = worker.execute(action.output)
                    cost_s *= 1 + _JITTER * self._rng.uniform(-1, 1)
                    end_s = worker.free_s = max(self.now_s, worker.free_s) + cost_s
                    self._answer(end_s, BatchDone(action.worker_id, output, time_s=end_s))
                case CopyBlocks():
                    end_s, num_blocks = self.now_s + _COPY_S, len(action.source_block_ids)
                    self._answer(end_s, CopyDone(action.op_id, num_blocks, time_s=end_s))
                case Emit():
                    num_ended += action.delta.finish_reason is not None
                case Refuse():
                    raise RuntimeError(f"the trace was refused: {action.error.message}")
        self.num_ended += num_ended
        return num_ended
