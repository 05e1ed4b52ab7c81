"""An engine in one process: the real core and the real store index, without Ray.

Actions wait in a list until the test completes one, in any order it likes, or lets one fail.
Blocks are read and written when an operation completes, as late as can be, so that a block that
is reused too early is seen.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from offload_store.store import OffloadStore
from scheduler.codec import decode, encode, int_array
from scheduler.config import SchedulerConfig
from scheduler.errors import HaversackError, RequestFailed, from_wire
from scheduler.logprobs import Logprobs
from scheduler.messages import (
    AnyAction,
    AnyEvent,
    BatchDone,
    BatchFailed,
    Emit,
    EvictRequested,
    LoadBlocks,
    LoadDone,
    LoadFailed,
    LookupBlocks,
    LookupDone,
    ModelRunnerOutput,
    OutputDelta,
    Refuse,
    ReleaseBlocks,
    RequestCancelled,
    RequestSubmitted,
    RunBatch,
    SaveBlocks,
    SaveDone,
    SaveFailed,
    SchedulerOutput,
    Submission,
    WorkerInfo,
    WorkerJoined,
    WorkerLost,
)
from scheduler.request import FinishReason, RequestStats
from scheduler.sampling_params import SamplingParams
from scheduler.state import SchedulerState


class Runner(Protocol):
    """What the engine needs of a worker; `FakeRunner` and `ModelRunner` both fit."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...

    def read_blocks(self, block_ids: Sequence[int]) -> np.ndarray: ...

    def write_blocks(self, block_ids: Sequence[int], data: np.ndarray) -> None: ...


@dataclass
class Result:
    """Everything a client was told about one completion."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: HaversackError | None = None
    stats: RequestStats | None = None
    num_prompt_deltas: int = 0

    def take(self, delta: OutputDelta) -> None:
        if self.finish_reason is not None:
            raise AssertionError("told something after its end")
        if delta.new_token_ids is not None:
            self.token_ids += delta.new_token_ids.tolist()
        if delta.new_logprobs is not None and delta.new_logprobs.num_rows:
            self.logprobs.append(delta.new_logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
            self.num_prompt_deltas += 1
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.error = from_wire(delta.error) if delta.error is not None else None
        self.stats = delta.stats

    def bits(self) -> bytes:
        """Return everything that must not depend on what the request went through."""
        rows = self.prompt_logprobs
        own = Logprobs.concat(self.logprobs) if self.logprobs else None
        return encode([rows, self.token_ids, own, self.finish_reason, self.stop_reason])


class SimEngine:
    """The core with simulated surroundings; `validate()` runs after every event."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        block_bytes: int,
        store_bytes: int = 2**30,
        segment_blocks: int = 3,
        validate: bool = True,
    ) -> None:
        self.config = config
        self.state = SchedulerState(config)
        self.store = OffloadStore(
            store_bytes,
            block_bytes,
            config.block_size,
            segment_bytes=segment_blocks * block_bytes,
            on_drop=lambda segment_id: self.data.pop(segment_id, None),
        )
        self.data: dict[int, np.ndarray] = {}
        self.runners: dict[str, Runner] = {}
        self.pending: list[AnyAction] = []
        self.log: list[AnyAction] = []
        """Every action so far."""
        self.results: dict[tuple[str, int], Result] = {}
        self.refused: dict[int, HaversackError] = {}
        self.submissions: dict[str, Submission] = {}
        self._validate = validate
        self._store_queues: dict[str, deque[AnyAction]] = {}
        self._now_s = 0.0
        self._tickets = 0

    # -------------------------------------------------------------------------- what happens

    def handle(self, *events: AnyEvent) -> list[AnyAction]:
        """Give events to the core, take its actions in, and check every invariant."""
        self._now_s += 0.01
        actions = self.state.handle(*events)
        if self._validate:
            self.state.validate()
            self.store.validate()
        self.log += actions
        for action in actions:
            self._take(action)
        return actions

    def join(self, runner: Runner, info: WorkerInfo) -> None:
        self.runners[info.worker_id] = runner
        self.handle(WorkerJoined(info, time_s=self._now_s))

    def lose(self, worker_id: str) -> None:
        """A worker dies: its step never answers; the store finds out when it calls the worker."""
        del self.runners[worker_id]
        self.pending = [
            a for a in self.pending if not (isinstance(a, RunBatch) and a.worker_id == worker_id)
        ]
        self.handle(WorkerLost(worker_id, "killed", time_s=self._now_s))

    def submit(
        self,
        request_id: str,
        prompt: Iterable[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> HaversackError | None:
        """Submit, and return why it was refused, if it was."""
        return self.submit_all(
            Submission(request_id, int_array(list(prompt)), params, seed, priority, cache_salt)
        )[0]

    def submit_all(self, *submissions: Submission) -> list[HaversackError | None]:
        """Submit in one message."""
        events = []
        for submission in submissions:
            self._tickets += 1
            events.append(RequestSubmitted(submission, "client", self._tickets, time_s=self._now_s))
        self.handle(*events)
        answers = [self.refused.get(event.ticket) for event in events]
        for submission, refused in zip(submissions, answers, strict=True):
            if refused is None:
                self.submissions[submission.request_id] = submission
                for index in range(submission.sampling_params.n):
                    self.results.setdefault((submission.request_id, index), Result())
        return answers

    def cancel(self, request_id: str) -> None:
        self.handle(RequestCancelled(request_id, time_s=self._now_s))

    def evict(self, request_id: str) -> None:
        self.handle(EvictRequested(request_id, time_s=self._now_s))

    def result(self, request_id: str, index: int = 0) -> Result:
        return self.results[request_id, index]

    @property
    def live(self) -> list[str]:
        return [info.request_id for info in self.state.request_infos(self._now_s)]

    # ------------------------------------------------------------------------ what completes

    def run(self, rng: random.Random | None = None, max_steps: int = 100_000) -> None:
        """Complete everything, oldest first or in the order that `rng` draws."""
        for _ in range(max_steps):
            if not self.pending:
                break
            self.complete(rng.randrange(len(self.pending)) if rng else 0)
        else:
            raise AssertionError(f"still busy after {max_steps} steps: {self.live}")
        if self.live:
            raise AssertionError(f"nothing is under way, but these wait for ever: {self.live}")

    def index_of(self, *kinds: type[AnyAction]) -> int | None:
        """Return where the first pending action of these kinds is; None if there is none."""
        return next((i for i, a in enumerate(self.pending) if isinstance(a, kinds)), None)

    def settle(self) -> None:
        """Complete store operations until only steps are pending."""
        store_kinds = (LookupBlocks, LoadBlocks, SaveBlocks, ReleaseBlocks)
        while (index := self.index_of(*store_kinds)) is not None:
            self.complete(index)

    def step(self) -> bool:
        """Complete store operations and then one step; False if there is nothing to do."""
        self.settle()
        if not self.pending:
            return False
        self.complete(0)
        return True

    def complete(self, index: int = 0) -> None:
        """Let a pending action succeed; a load or save on a worker that is gone fails."""
        if getattr(self.pending[index], "worker_id", None) not in {None, *self.runners}:
            self.fail(index)
            return
        action = self.pending.pop(index)
        match action:
            case RunBatch():
                runner = self.runners[action.worker_id]
                output = decode(encode(action.output), SchedulerOutput)
                answer = decode(encode(runner.execute(output)), ModelRunnerOutput)
                self.handle(BatchDone(action.worker_id, answer, time_s=self._now_s))
            case LookupBlocks():
                hit = self.store.lookup(
                    action.request_id,
                    action.block_hashes,
                    num_readable_tokens=action.num_readable_tokens,
                    num_own_tokens=action.num_own_tokens,
                    skip_reading_prefix_cache=action.skip_reading_prefix_cache,
                )
                self._answer(
                    action, LookupDone(action.op_id, hit.num_hit_tokens, time_s=self._now_s)
                )
            case LoadBlocks():
                rows = self.store.segments_of(action.request_id, action.block_hashes)
                if len(rows) < len(action.block_ids):
                    raise AssertionError("a promised block is gone")
                self._load(action, len(rows))
            case SaveBlocks():
                self._save(action)
            case ReleaseBlocks():
                self.store.release(action.request_id, forget=action.forget)
                self._next_for_store(action)

    def fail(self, index: int = 0, *, num_done: int = 0) -> None:
        """Let a pending action fail, or a load stop after `num_done` blocks."""
        action = self.pending.pop(index)
        match action:
            case RunBatch():
                error = RequestFailed("boom").to_wire()
                self.handle(
                    BatchFailed(action.worker_id, action.output.step_id, error, time_s=self._now_s)
                )
            case LookupBlocks():
                self._answer(action, LookupDone(action.op_id, 0, time_s=self._now_s))
            case LoadBlocks():
                if num_done and action.worker_id in self.runners:
                    self._load(action, min(num_done, len(action.block_ids)))
                else:
                    self._answer(action, LoadFailed(action.op_id, "boom", time_s=self._now_s))
            case SaveBlocks():
                plan = self.store.prepare_save(
                    action.request_id,
                    action.block_hashes,
                    owned=action.owned,
                    replace=action.replace,
                )
                for segment in plan.segments:
                    self.store.complete_save(segment.segment_id, ok=False)
                self._answer(action, SaveFailed(action.op_id, "boom", time_s=self._now_s))
            case _:
                self.pending.insert(index, action)
                self.complete(index)

    def _load(self, action: LoadBlocks, count: int) -> None:
        rows = self.store.segments_of(action.request_id, action.block_hashes)[:count]
        runner = self.runners[action.worker_id]
        for row, block_id in zip(rows, action.block_ids, strict=False):
            data = self.data[row.segment_id][row.row : row.row + 1]
            runner.write_blocks([block_id], data)
        self._answer(action, LoadDone(action.op_id, len(rows), time_s=self._now_s))

    def _save(self, action: SaveBlocks) -> None:
        plan = self.store.prepare_save(
            action.request_id, action.block_hashes, owned=action.owned, replace=action.replace
        )
        runner = self.runners[action.worker_id]
        copied = 0
        for segment in plan.segments:
            ids = [action.block_ids[i] for i in segment.block_indices]
            self.data[segment.segment_id] = np.array(runner.read_blocks(ids))
            self.store.complete_save(segment.segment_id, ok=True)
            copied += len(ids)
        saved = self.store.num_saved_blocks(plan)
        self._answer(action, SaveDone(action.op_id, saved, copied, time_s=self._now_s))

    # ------------------------------------------------------------------------------- plumbing

    def _take(self, action: AnyAction) -> None:
        match action:
            case Emit(delta=delta):
                self.results.setdefault((delta.request_id, delta.index), Result()).take(delta)
            case Refuse(ticket=ticket, error=error):
                self.refused[ticket] = from_wire(error)
            case RunBatch():
                self.pending.append(action)
            case LookupBlocks() | LoadBlocks() | SaveBlocks() | ReleaseBlocks():
                # The store sees the calls about one request in order, one at a time.
                queue = self._store_queues.setdefault(action.request_id, deque())
                queue.append(action)
                if len(queue) == 1:
                    self.pending.append(action)

    def _answer(self, action: AnyAction, event: AnyEvent) -> None:
        self._next_for_store(action)
        self.handle(event)

    def _next_for_store(self, action: AnyAction) -> None:
        queue = self._store_queues[action.request_id]
        queue.remove(action)
        if not queue:
            del self._store_queues[action.request_id]
        elif queue[0] not in self.pending:
            self.pending.append(queue[0])
