"""All that the scheduler's core can ask for."""

from __future__ import annotations

import msgspec

from scheduler.errors import WireError
from scheduler.logprobs import Logprobs
from scheduler.messages import OutputDelta, SchedulerOutput
from scheduler.request import FinishReason, RequestStats


class Action(msgspec.Struct, frozen=True, eq=False, kw_only=True, tag=True):
    """Base of what the core can ask for."""


class RunBatch(Action, frozen=True, eq=False):
    """Run a step; answered by `BatchDone`, `BatchFailed` or `WorkerLost`."""

    worker_id: str
    output: SchedulerOutput


class LookupBlocks(Action, frozen=True, eq=False):
    """Ask the store what it can supply, and pin that; answered by `LookupDone`."""

    op_id: int
    request_id: str
    block_hashes: list[bytes]
    num_readable_tokens: int
    """Limit on shared blocks."""
    num_own_tokens: int
    """Limit on blocks that this request saved itself."""
    skip_reading_prefix_cache: bool


class LoadBlocks(Action, frozen=True, eq=False):
    """Write stored blocks into a worker's blocks; answered by `LoadDone` or `LoadFailed`."""

    op_id: int
    request_id: str
    worker_id: str
    block_hashes: list[bytes]
    block_ids: list[int]


class SaveBlocks(Action, frozen=True, eq=False):
    """Copy a worker's blocks to the store; answered by `SaveDone` or `SaveFailed`."""

    op_id: int
    request_id: str
    worker_id: str
    block_hashes: list[bytes]
    block_ids: list[int]
    owned: bool
    """Whether the request will come back for them (eviction), so that they are kept for it."""
    replace: bool
    """Whether the own blocks replace those that others stored (it may read no others)."""


class ReleaseBlocks(Action, frozen=True, eq=False):
    """Drop the request's pins, and with `forget` its ownership of saved blocks; no answer."""

    request_id: str
    forget: bool


class Refuse(Action, frozen=True, eq=False):
    """A submission was refused and left no trace."""

    ticket: int
    error: WireError


class Emit(Action, frozen=True, eq=False):
    """Tell the client what became visible."""

    client_id: str
    delta: OutputDelta


class CopyBlocks(Action, frozen=True, eq=False):
    """Copy blocks from worker to worker; answered by `CopyDone`, or one of them is lost."""

    op_id: int
    request_id: str
    source_id: str
    source_block_ids: list[int]
    target_id: str
    target_block_ids: list[int]


class StopWorker(Action, frozen=True, eq=False):
    """End a drained worker; the core has forgotten it already, so there is no answer."""

    worker_id: str


class RecordSubmitted(Action, frozen=True, eq=False):
    """Write a new request to the journal; whatever is there under its id goes."""

    request: bytes
    """The encoded `Request`."""
    request_id: str
    parent_id: str


class RecordProgress(Action, frozen=True, eq=False):
    """Append to the journal what a chunk, or the row cache, brought."""

    request_id: str
    num_computed_tokens: int
    """The request's count after that."""
    rows: Logprobs | None
    sampled_token_id: int | None
    sampled_logprobs: Logprobs | None


class RecordFinished(Action, frozen=True, eq=False):
    """Note in the journal how a request ended; from then on it is a result."""

    request_id: str
    parent_id: str
    finish_reason: FinishReason
    stop_reason: int | None
    error: WireError | None
    stats: RequestStats


Record = RecordSubmitted | RecordProgress | RecordFinished

AnyAction = (
    RunBatch
    | LookupBlocks
    | LoadBlocks
    | SaveBlocks
    | ReleaseBlocks
    | CopyBlocks
    | StopWorker
    | Refuse
    | Emit
    | Record
)
