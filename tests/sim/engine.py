"""An engine in one process: the real core and the real store index, without Ray.

Actions wait in a list until the test completes one, in any order it likes, or lets one fail.
Blocks are written when an operation completes, as late as can be, and read both then and when it
was asked for: what has changed in between arrives as garbage. So a block that is reused too early,
or copied before it is complete, is seen.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from offload_store.store import OffloadStore
from scheduler.actions import (
    AnyAction,
    CopyBlocks,
    Emit,
    LoadBlocks,
    LookupBlocks,
    Record,
    RecordFinished,
    RecordProgress,
    RecordSubmitted,
    Refuse,
    ReleaseBlocks,
    RunBatch,
    SaveBlocks,
    StopWorker,
)
from scheduler.codec import decode, encode, int_array
from scheduler.config import SchedulerConfig
from scheduler.errors import HaversackError, RequestFailed, from_wire
from scheduler.events import (
    AnyEvent,
    BatchDone,
    BatchFailed,
    CopyDone,
    DrainRequested,
    EvictRequested,
    LoadDone,
    LoadFailed,
    LookupDone,
    MigrateRequested,
    RequestCancelled,
    RequestRestored,
    RequestSubmitted,
    SaveDone,
    SaveFailed,
    StoreLost,
    Tick,
    WorkerExpected,
    WorkerJoined,
    WorkerLost,
    WorkerNotComing,
)
from scheduler.logprobs import Logprobs
from scheduler.messages import (
    ModelRunnerOutput,
    OutputDelta,
    SchedulerOutput,
    Submission,
    WorkerInfo,
)
from scheduler.request import FinishReason, Request, RequestStats
from scheduler.sampling_params import SamplingParams
from scheduler.state import SchedulerState


class Runner(Protocol):
    """What the engine needs of a worker; `FakeRunner` and `ModelRunner` both fit."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...

    def read_blocks(self, block_ids: Sequence[int]) -> np.ndarray: ...

    def write_blocks(self, block_ids: Sequence[int], data: np.ndarray) -> None: ...

    def forget(self, request_ids: Iterable[str]) -> None: ...

    def forget_all(self) -> None: ...


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
    may_repeat: bool = False
    """Whether the client has connected again, so that it is told things twice."""

    def take(self, delta: OutputDelta) -> None:
        if self.finish_reason is not None and not self.may_repeat:
            raise AssertionError("told something after its end")
        known = len(self.token_ids) - delta.num_previous_tokens
        if known < 0 or (known and not self.may_repeat):
            raise AssertionError(f"{delta.num_previous_tokens} tokens before, {known} too many")
        if delta.new_token_ids is not None:
            self._compare(self.token_ids[delta.num_previous_tokens :], delta.new_token_ids)
            self.token_ids += delta.new_token_ids[known:].tolist()
        if delta.new_logprobs is not None and delta.new_logprobs.num_rows > known:
            self.logprobs.append(delta.new_logprobs[known:])
        if delta.prompt_logprobs is not None:
            if self.prompt_logprobs is not None and self.may_repeat:
                if not self.prompt_logprobs.same_bits(delta.prompt_logprobs):
                    raise AssertionError("prompt rows came again with other bits")
                self.num_prompt_deltas -= 1
            self.prompt_logprobs = delta.prompt_logprobs
            self.num_prompt_deltas += 1
        if self.finish_reason is not None and delta.finish_reason is None:
            return
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.error = from_wire(delta.error) if delta.error is not None else None
        self.stats = delta.stats

    @staticmethod
    def _compare(known: list[int], again: np.ndarray) -> None:
        common = min(len(known), len(again))
        if known[:common] != again[:common].tolist():
            raise AssertionError("tokens came again and were others")

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
        self._store_arguments = (store_bytes, block_bytes, config.block_size)
        self._segment_bytes = segment_blocks * block_bytes
        self._start_store()
        self.infos: dict[str, WorkerInfo] = {}
        self.expected: dict[str, int] = {}
        """Workers that are being started -> their blocks."""
        self.past_recomputed_rows = 0
        """Rows that schedulers before the present one had computed again."""
        self.runners: dict[str, Runner] = {}
        self.pending: list[AnyAction] = []
        self.log: list[AnyAction] = []
        """Every action so far."""
        self.results: dict[tuple[str, int], Result] = {}
        self.refused: dict[int, HaversackError] = {}
        self.submissions: dict[str, Submission] = {}
        self.journal: dict[str, Request] = {}
        """What a restarted scheduler finds of the requests that had not ended."""
        self.written_results: dict[str, Request] = {}
        self.journal_lag = 0
        """Turns whose records are still to be written at any time, and are lost with the
        scheduler."""
        self._unwritten: deque[list[Record]] = deque()
        self._first_reads: dict[int, np.ndarray] = {}
        """Operation -> what its blocks held when it was asked for."""
        self.stopped: list[str] = []
        """Workers that were stopped after a drain."""
        self._validate = validate
        self._store_queues: dict[str, deque[AnyAction]] = {}
        self.steps: dict[str, deque[RunBatch]] = {}
        """Worker -> the steps that it was sent; it computes them in this order."""
        self._now_s = 0.0
        self._tickets = 0

    def _start_store(self) -> None:
        self.data: dict[int, np.ndarray] = {}
        self.store = OffloadStore(
            *self._store_arguments,
            segment_bytes=self._segment_bytes,
            on_drop=lambda segment_id: self.data.pop(segment_id, None),
        )

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
        self._unwritten.append([action for action in actions if isinstance(action, Record)])
        while len(self._unwritten) > self.journal_lag:
            self._write(self._unwritten.popleft())
        return actions

    def join(self, runner: Runner, info: WorkerInfo) -> None:
        self.runners[info.worker_id] = runner
        self.infos[info.worker_id] = info
        self.expected.pop(info.worker_id, None)
        self.handle(WorkerJoined(info, time_s=self._now_s))

    def expect(self, worker_id: str, num_blocks: int) -> None:
        """A worker is being started."""
        self.expected[worker_id] = num_blocks
        self.handle(WorkerExpected(worker_id, num_blocks, time_s=self._now_s))

    def give_up(self, worker_id: str) -> None:
        """A worker that was being started won't come."""
        del self.expected[worker_id]
        self.handle(WorkerNotComing(worker_id, "no node has room", time_s=self._now_s))

    def lose(self, worker_id: str) -> None:
        """A worker dies: its steps never answer; the store finds out when it calls the worker."""
        del self.runners[worker_id]
        self.steps.pop(worker_id, None)
        self.pending = [
            a for a in self.pending if not (isinstance(a, RunBatch) and a.worker_id == worker_id)
        ]
        # A copy to it is not answered; one from it is, when the target has given it up.
        self.pending = [
            a for a in self.pending if not (isinstance(a, CopyBlocks) and a.target_id == worker_id)
        ]
        self.handle(WorkerLost(worker_id, "killed", time_s=self._now_s))

    def tick(self, seconds: float = 1.0) -> None:
        """Let time pass."""
        self._now_s += seconds
        self.handle(Tick(time_s=self._now_s))

    def migrate(self, request_id: str, worker_id: str) -> HaversackError | None:
        """Ask for a move, and return why it was refused, if it was."""
        self._tickets += 1
        self.handle(MigrateRequested(request_id, worker_id, self._tickets, time_s=self._now_s))
        return self.refused.get(self._tickets)

    def drain(self, worker_id: str, seconds: float = 10.0) -> None:
        self._tickets += 1
        deadline_s = self._now_s + seconds
        self.handle(DrainRequested(worker_id, deadline_s, self._tickets, time_s=self._now_s))

    def lose_store(self) -> None:
        """The store dies and comes back empty: whatever was asked of it has failed."""
        self._start_store()
        kinds = (LookupBlocks, LoadBlocks, SaveBlocks, ReleaseBlocks)
        asked = [a for a in self.pending if isinstance(a, kinds)]
        asked += [a for queue in self._store_queues.values() for a in queue if a not in asked]
        self.pending = [a for a in self.pending if not isinstance(a, kinds)]
        self._store_queues.clear()
        events: list[AnyEvent] = []
        for action in asked:
            match action:
                case LookupBlocks():
                    events.append(LookupDone(action.op_id, 0, time_s=self._now_s))
                case LoadBlocks():
                    events.append(LoadFailed(action.op_id, "store lost", time_s=self._now_s))
                case SaveBlocks():
                    events.append(SaveFailed(action.op_id, "store lost", time_s=self._now_s))
        self.handle(*events, StoreLost(time_s=self._now_s))

    def restart_scheduler(self) -> None:
        """The scheduler dies and starts again from the journal; workers and store live on.

        What was under way is refused by the workers, which serve the new scheduler only.
        """
        stats = self.state.stats()
        self.past_recomputed_rows += stats.num_recomputed_rows
        self.state = SchedulerState(self.config)
        self.pending.clear()
        self._store_queues.clear()
        self.steps.clear()
        self._unwritten.clear()
        self._first_reads.clear()
        self.store.retain(self.journal)
        for result in self.results.values():
            result.may_repeat = True
        infos = {worker_id: self.infos[worker_id] for worker_id in self.runners}
        sizes = {**{i.worker_id: i.num_blocks for i in infos.values()}, **self.expected}
        expected = [WorkerExpected(n, size, time_s=self._now_s) for n, size in sizes.items()]
        requests = sorted(self.journal.values(), key=lambda r: r.arrival)
        restored = [
            RequestRestored(Request.decode(r.encode()), time_s=self._now_s) for r in requests
        ]
        self.handle(*expected, *restored)
        for worker_id, runner in self.runners.items():
            runner.forget_all()
            self.handle(WorkerJoined(infos[worker_id], time_s=self._now_s))

    def submit(
        self,
        request_id: str,
        prompt: Iterable[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> HaversackError | None:
        """Submit, and return why it was refused, if it was."""
        tokens = int_array(list(prompt))
        return self.submit_all(
            Submission(request_id, tokens, params, seed, priority, cache_salt, timeout_s)
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
        store_kinds = (LookupBlocks, LoadBlocks, SaveBlocks, ReleaseBlocks, CopyBlocks)
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
                self._next_step(action)
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
            case CopyBlocks():
                self._copy(action, len(action.source_block_ids))

    def _copy(self, action: CopyBlocks, count: int) -> None:
        source, target = self.runners.get(action.source_id), self.runners[action.target_id]
        if source is None:
            count = 0
        else:
            data = self._read(action.op_id, source, action.source_block_ids)
            target.write_blocks(action.target_block_ids[:count], data[:count])
        self.handle(CopyDone(action.op_id, count, time_s=self._now_s))

    def fail(self, index: int = 0, *, num_done: int = 0) -> None:
        """Let a pending action fail, or a load stop after `num_done` blocks."""
        action = self.pending.pop(index)
        match action:
            case RunBatch():
                self._next_step(action)
                # The worker may have begun: it knows the requests of the step no longer.
                if (runner := self.runners.get(action.worker_id)) is not None:
                    runner.forget([chunk.request_id for chunk in action.output.chunks])
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
            case CopyBlocks():
                self._copy(action, min(num_done, len(action.source_block_ids) - 1))
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
        data = self._read(action.op_id, self.runners[action.worker_id], action.block_ids)
        copied = 0
        for segment in plan.segments:
            self.data[segment.segment_id] = data[list(segment.block_indices)]
            self.store.complete_save(segment.segment_id, ok=True)
            copied += len(segment.block_indices)
        saved = self.store.num_saved_blocks(plan)
        self._answer(action, SaveDone(action.op_id, saved, copied, time_s=self._now_s))

    # ------------------------------------------------------------------------------- plumbing

    def _read(self, op_id: int, runner: Runner, block_ids: Sequence[int]) -> np.ndarray:
        """Return what the blocks hold, with other bytes wherever that was not there all along."""
        data = np.array(runner.read_blocks(block_ids))
        changed = data != self._first_reads.pop(op_id)
        data[changed] ^= 0xA5
        return data

    def _take(self, action: AnyAction) -> None:
        match action:
            case (
                CopyBlocks(source_id=worker_id, source_block_ids=block_ids)
                | SaveBlocks(worker_id=worker_id, block_ids=block_ids)
            ):
                data = np.array(self.runners[worker_id].read_blocks(block_ids))
                self._first_reads[action.op_id] = data
        match action:
            case Emit(delta=delta):
                self.results.setdefault((delta.request_id, delta.index), Result()).take(delta)
            case Refuse(ticket=ticket, error=error):
                self.refused[ticket] = from_wire(error)
            case RunBatch(worker_id=worker_id):
                steps = self.steps.setdefault(worker_id, deque())
                steps.append(action)
                if len(steps) == 1:
                    self.pending.append(action)
            case CopyBlocks():
                self.pending.append(action)
            case StopWorker(worker_id=worker_id):
                del self.runners[worker_id]
                self.stopped.append(worker_id)
            case LookupBlocks() | LoadBlocks() | SaveBlocks() | ReleaseBlocks():
                # The store sees the calls about one request in order, one at a time.
                queue = self._store_queues.setdefault(action.request_id, deque())
                queue.append(action)
                if len(queue) == 1:
                    self.pending.append(action)

    def _next_step(self, action: RunBatch) -> None:
        steps = self.steps[action.worker_id]
        steps.popleft()
        if steps:
            self.pending.append(steps[0])

    def _write(self, records: list[Record]) -> None:
        for record in records:
            match record:
                case RecordSubmitted():
                    self.journal[record.request_id] = Request.decode(record.request)
                case RecordProgress():
                    self.journal[record.request_id].advance(
                        record.num_computed_tokens,
                        record.rows,
                        record.sampled_token_id,
                        record.sampled_logprobs,
                    )
                case RecordFinished():
                    request = self.journal.pop(record.request_id)
                    request.finish_reason = record.finish_reason
                    request.stop_reason, request.error = record.stop_reason, record.error
                    request.stats = record.stats
                    self.written_results[record.request_id] = request

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
