"""A core that is spoken to by hand: events in, actions out, in short words.

Blocks hold 4 tokens, steps 8; nobody computes anything, so tests say what comes back.
"""

from __future__ import annotations

from typing import Any

from scheduler.actions import (
    AnyAction,
    CopyBlocks,
    Emit,
    LoadBlocks,
    LookupBlocks,
    RecordFinished,
    RecordProgress,
    RecordSubmitted,
    Refuse,
    ReleaseBlocks,
    RunBatch,
    SaveBlocks,
    StopWorker,
)
from scheduler.codec import int_array
from scheduler.config import SchedulerConfig
from scheduler.errors import RequestFailed
from scheduler.events import BatchDone, BatchFailed, RequestSubmitted, WorkerJoined
from scheduler.messages import (
    LAST_SAMPLED,
    ChunkResult,
    ModelRunnerOutput,
    SchedulerOutput,
    Submission,
    WorkerInfo,
)
from scheduler.request import RequestStatus
from scheduler.sampling_params import SamplingParams
from scheduler.state import SchedulerState
from tests.strategies import logprobs

EOS = 99
TOKEN = 7
CLIENT = "client"


class Script:
    """A core, and who answers it: remembers the actions that wait for an answer."""

    def __init__(self, num_workers: int = 1, num_blocks: int = 16, **config: Any) -> None:
        settings: dict[str, Any] = {
            "block_size": 4,
            "max_num_batched_tokens": 8,
            "max_steps_in_flight": 1,
            "vocab_size": 100,
            "eos_token_ids": (EOS,),
            "save_finished": False,
        }
        self.state = SchedulerState(SchedulerConfig(**{**settings, **config}))
        self.actions: list[AnyAction] = []
        self.steps: list[RunBatch] = []
        """Those that have not been answered."""
        for index in range(num_workers):
            self.say(WorkerJoined(worker_info(f"w{index}", num_blocks)))

    def say(self, *events: Any) -> list[str]:
        """Give events to the core and return its actions in short words."""
        for event in events:
            if isinstance(event, BatchDone):
                self._note_answer(event.worker_id, event.output.step_id)
            elif isinstance(event, BatchFailed):
                self._note_answer(event.worker_id, event.step_id)
        actions = self.state.handle(*events)
        self.state.validate()
        self.actions += actions
        self.steps += [action for action in actions if isinstance(action, RunBatch)]
        return [words(action) for action in actions]

    def _note_answer(self, worker_id: str, step_id: int) -> None:
        self.steps = [
            s for s in self.steps if (s.worker_id, s.output.step_id) != (worker_id, step_id)
        ]

    def last(self, kind: type[Any]) -> Any:
        return next(action for action in reversed(self.actions) if isinstance(action, kind))

    def submit(self, name: str, num_tokens: int = 5, **more: Any) -> list[str]:
        return self.say(submitted(name, num_tokens, **more))

    def computed(
        self, worker_id: str = "w0", token: int = TOKEN, compute_s: float = 0.0
    ) -> list[str]:
        """The oldest step under way of a worker is done."""
        return self.say(self.batch_done(worker_id, token, compute_s))

    def batch_done(
        self, worker_id: str = "w0", token: int = TOKEN, compute_s: float = 0.0
    ) -> BatchDone:
        output = self._step(worker_id)
        results = [
            ChunkResult(
                chunk.request_id,
                rows=logprobs(len(chunk.row_target_ids), 1) if len(chunk.row_target_ids) else None,
                sampled_token_id=token if chunk.sample else None,
                sampled_logprobs=(
                    logprobs(1 + chunk.max_more_tokens, 1)
                    if chunk.sample and self._wants_logprobs(chunk.request_id)
                    else None
                ),
                more_token_ids=(
                    int_array([token] * chunk.max_more_tokens) if chunk.max_more_tokens else None
                ),
            )
            for chunk in output.chunks
        ]
        return BatchDone(worker_id, ModelRunnerOutput(output.step_id, results, compute_s))

    def batch_failed(self, worker_id: str = "w0") -> list[str]:
        step_id = self._step(worker_id).step_id
        return self.say(BatchFailed(worker_id, step_id, RequestFailed("boom").to_wire()))

    def _wants_logprobs(self, name: str) -> bool:
        request = self.state.request(name)
        return request is not None and request.output_logprobs is not None

    def _step(self, worker_id: str) -> SchedulerOutput:
        return next(step.output for step in self.steps if step.worker_id == worker_id)

    def status(self, name: str) -> RequestStatus:
        return self.state.request(name).status


def worker_info(name: str, num_blocks: int = 16, block_size: int = 4) -> WorkerInfo:
    return WorkerInfo(name, "cpu", num_blocks, block_size, 64, 100, 1000, (EOS,), "model")


def submitted(
    name: str,
    num_tokens: int,
    *,
    priority: int = 0,
    ticket: int = 1,
    client_id: str = CLIENT,
    timeout_s: float | None = None,
    detached: bool = False,
    seed: int = 0,
    time_s: float = 0.0,
    **params: Any,
) -> RequestSubmitted:
    own = SamplingParams(**{"max_tokens": 0, **params})
    prompt = int_array([10 + i % 80 for i in range(num_tokens)])
    submission = Submission(name, prompt, own, seed, priority, None, timeout_s, detached)
    return RequestSubmitted(submission, client_id, ticket, time_s=time_s)


def words(action: AnyAction) -> str:
    """An action as a line that a test can state."""
    match action:
        case RunBatch(worker_id=worker_id, output=output):
            chunks = [
                f"{c.request_id}[{c.start}:{c.start + len(c.token_ids)}]"
                + (" last" if c.token_ids.tolist() == [LAST_SAMPLED] else "")
                + (f" rows={len(c.row_target_ids)}" if len(c.row_target_ids) else "")
                + (f" keeps {c.first_new_position}" if c.first_new_position > c.start else "")
                + (" sample" if c.sample else "")
                + (f"+{c.max_more_tokens}" if c.max_more_tokens else "")
                + (" new" if c.new else "")
                for c in output.chunks
            ]
            gone = [f"forget {name}" for name in output.released_request_ids]
            return f"{worker_id} runs " + ", ".join(gone + chunks)
        case LookupBlocks():
            return (
                f"look up {len(action.block_hashes)} for {action.request_id}: "
                f"shared {action.num_readable_tokens}, own {action.num_own_tokens}"
                + (", skip" if action.skip_reading_prefix_cache else "")
            )
        case LoadBlocks():
            return f"load {len(action.block_ids)} for {action.request_id} on {action.worker_id}"
        case SaveBlocks():
            marks = [m for m in ("owned", "replace") if getattr(action, m)]
            return " ".join([f"save {len(action.block_ids)} of {action.request_id}", *marks])
        case ReleaseBlocks():
            return f"release {action.request_id}" + (" for ever" if action.forget else "")
        case Refuse():
            return f"refuse {action.ticket}: {action.error.kind}"
        case Emit(delta=delta):
            rows = delta.prompt_logprobs
            told = [f"rows={rows.num_rows}"] if rows is not None else []
            told += [f"tokens={delta.new_token_ids.tolist()}"] if len(delta.new_token_ids) else []
            told += [delta.finish_reason.value] if delta.finish_reason else []
            told += [delta.error.kind] if delta.error else []
            told += [f"({action.client_id})"] if action.client_id != CLIENT else []
            return f"tell {delta.request_id}.{delta.index} " + " ".join(told)
        case CopyBlocks():
            return (
                f"copy {len(action.source_block_ids)} of {action.request_id} "
                f"from {action.source_id} to {action.target_id}"
            )
        case StopWorker():
            return f"stop {action.worker_id}"
        case RecordSubmitted() | RecordProgress() | RecordFinished():
            return f"write {type(action).__name__[6:].lower()} {action.request_id}"
    raise NotImplementedError(action)
