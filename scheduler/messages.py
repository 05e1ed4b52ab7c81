"""What travels between scheduler and workers in a step, and the core's events and actions.

A step message carries only what is new to its worker: the first chunk of a request brings its
parameters and whole block table (`NewRequest`), later ones only new block ids. A worker's answer
carries only what is new to the request. Events are all that can happen to the scheduler's core,
actions all that it can ask for; every action with an outcome carries an `op_id` that the event
reporting the outcome, good or bad, gives back.
"""

from __future__ import annotations

import msgspec

from scheduler.codec import IntArray
from scheduler.errors import WireError
from scheduler.logprobs import Logprobs
from scheduler.request import FinishReason, RequestStats, RequestStatus
from scheduler.sampling_params import SamplingParams

# ---------------------------------------------------------------- scheduler -> worker -> scheduler


class NewRequest(msgspec.Struct, frozen=True, eq=False):
    """What a worker has to know about a request before its first chunk there."""

    sampling_params: SamplingParams
    seed: int
    num_prompt_tokens: int
    num_prompt_logprobs: int | None
    """k of the prompt rows, -1 for all of the vocabulary, None for no rows."""
    banned_until_min_tokens: tuple[int, ...]
    """Stop ids that can't be sampled before `min_tokens` tokens are generated."""
    num_output_tokens: int
    """Tokens generated so far, on whichever worker."""
    history: IntArray
    """int32: prompt and output tokens so far, or empty where sampling does not look at them."""


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """A run of tokens of one request to compute in a step; a decode is a chunk of one token."""

    request_id: str
    start: int
    """Position of the first token; KV of every earlier position is in the block table."""
    token_ids: IntArray
    """int32 [tokens]"""
    new_block_ids: IntArray
    """int32: block ids to append to the request's block table on this worker."""
    row_target_ids: IntArray
    """int32 [rows]: tokens whose prompt rows are due."""
    first_row_position: int
    """Position whose hidden state gives the first of those rows; the others follow it."""
    sample: bool
    """Whether to sample the token after the chunk's last one."""
    new: NewRequest | None = None
    """Present in the first chunk of a request on this worker."""


class SchedulerOutput(msgspec.Struct, frozen=True, eq=False):
    """One step of one worker."""

    step_id: int
    chunks: list[Chunk]
    released_request_ids: list[str]
    """Requests that have left the worker; forgotten before any chunk is looked at."""


class ChunkResult(msgspec.Struct, frozen=True, eq=False):
    """What one chunk brought."""

    request_id: str
    rows: Logprobs | None = None
    """The prompt rows asked for; None where none were."""
    sampled_token_id: int | None = None
    sampled_logprobs: Logprobs | None = None
    """One row, where output logprobs are asked for."""
    error: WireError | None = None
    """Set alone: this request failed, the rest of the batch is good."""


class ModelRunnerOutput(msgspec.Struct, frozen=True, eq=False):
    """A worker's answer to a `SchedulerOutput`, one result per chunk in its order."""

    step_id: int
    results: list[ChunkResult]
    compute_s: float = 0.0
    """Seconds that the worker spent on the step."""


class WorkerInfo(msgspec.Struct, frozen=True):
    """What a worker tells about itself when it joins."""

    worker_id: str
    device: str
    num_blocks: int
    """KV blocks that the scheduler may hand out."""
    block_size: int
    """Tokens per KV block."""
    block_bytes: int
    """Bytes of KV per block over all layers."""
    vocab_size: int
    max_model_len: int
    """Positions that the model can compute."""
    eos_token_ids: tuple[int, ...]
    model_fingerprint: str
    """Equal for workers whose KV blocks are interchangeable bit for bit."""
    pid: int = 0
    node_id: str = ""


# ---------------------------------------------------------------- client -> scheduler -> client


class Submission(msgspec.Struct, frozen=True, eq=False):
    """A prompt and what is asked of it, as a client sends it."""

    request_id: str
    prompt_token_ids: IntArray
    """int32 [N]"""
    sampling_params: SamplingParams
    seed: int
    """The user's seed, or one that the client drew, so that sending again changes nothing."""
    priority: int = 0
    cache_salt: str | None = None


class OutputDelta(msgspec.Struct, frozen=True, eq=False):
    """What became visible of a request since its previous delta.

    The first delta comes when the prompt is done and carries all its rows at once.
    """

    request_id: str
    """The id the user knows."""
    index: int = 0
    new_token_ids: IntArray | None = None
    new_logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: WireError | None = None
    stats: RequestStats | None = None
    """Set in the last delta."""


class RequestInfo(msgspec.Struct, frozen=True):
    """One live request as operators see it."""

    request_id: str
    client_id: str
    status: RequestStatus
    worker_id: str | None
    priority: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_evictions: int
    waited_s: float
    """Seconds since submission."""


class SchedulerStats(msgspec.Struct):
    """Counters since the start (they only grow) and gauges of now."""

    num_waiting: int = 0
    num_running: int = 0
    """Requests in any status between waiting and finished."""
    num_finished: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_refused: int = 0
    num_evictions: int = 0
    num_workers: int = 0
    num_workers_lost: int = 0
    num_steps: int = 0
    num_chunks: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of accepted requests."""
    num_computed_tokens: int = 0
    """Tokens that workers computed, repetitions included."""
    num_generated_tokens: int = 0
    num_prompt_rows: int = 0
    num_recomputed_tokens: int = 0
    """Tokens computed again after an eviction or a loss."""
    num_recomputed_rows: int = 0
    """Prompt rows brought again for positions that had one; 0 by construction."""
    num_worker_cache_queries: int = 0
    """Admissions that asked a worker's prefix cache; bypasses don't count."""
    num_worker_cache_hit_tokens: int = 0
    num_store_queries: int = 0
    """Lookups in the offload store; bypasses don't count."""
    num_store_hit_tokens: int = 0
    num_cache_bypasses: int = 0
    """Admissions that could read no shared block."""
    num_saved_blocks: int = 0
    """Blocks that the store holds after saves, already present ones included."""
    num_copied_blocks: int = 0
    """Blocks whose bytes travelled to the store."""
    num_loaded_blocks: int = 0
    """Blocks written into workers from the store."""
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks that requests or saves hold now; cached ones that could be reused don't count."""
    compute_s: float = 0.0
    """Seconds that workers spent on steps."""


# ------------------------------------------------------------------------------------- events


class Event(msgspec.Struct, frozen=True, eq=False, kw_only=True, tag=True):
    """Base of what can happen to the core; time comes in with it, in seconds."""

    time_s: float = 0.0


class RequestSubmitted(Event, frozen=True, eq=False):
    """A submission: all its n requests are taken, or `Refuse` answers it and nothing changes."""

    submission: Submission
    client_id: str = ""
    ticket: int = 0
    """Given back by `Refuse`."""


class RequestCancelled(Event, frozen=True, eq=False):
    """Cancel what was submitted under this id; unknown ids are ignored."""

    request_id: str


class EvictRequested(Event, frozen=True, eq=False):
    """An operator or a test asks to evict a request now; unknown or idle ones are ignored."""

    request_id: str


class WorkerJoined(Event, frozen=True, eq=False):
    info: WorkerInfo


class WorkerLost(Event, frozen=True, eq=False):
    worker_id: str
    reason: str = ""


class BatchDone(Event, frozen=True, eq=False):
    worker_id: str
    output: ModelRunnerOutput


class BatchFailed(Event, frozen=True, eq=False):
    """The step raised; the worker lives on."""

    worker_id: str
    step_id: int
    error: WireError


class LookupDone(Event, frozen=True, eq=False):
    op_id: int
    num_hit_tokens: int
    """Tokens from position 0 that the store can supply; pinned there until released."""


class LoadDone(Event, frozen=True, eq=False):
    op_id: int
    num_loaded_blocks: int
    """Leading blocks that were written; fewer than asked for when data vanished."""


class LoadFailed(Event, frozen=True, eq=False):
    op_id: int
    reason: str


class SaveDone(Event, frozen=True, eq=False):
    op_id: int
    num_saved_blocks: int
    """Leading blocks that the store now holds."""
    num_copied_blocks: int = 0
    """Blocks whose bytes had to travel."""


class SaveFailed(Event, frozen=True, eq=False):
    op_id: int
    reason: str


AnyEvent = (
    RequestSubmitted
    | RequestCancelled
    | EvictRequested
    | WorkerJoined
    | WorkerLost
    | BatchDone
    | BatchFailed
    | LookupDone
    | LoadDone
    | LoadFailed
    | SaveDone
    | SaveFailed
)


# ------------------------------------------------------------------------------------ actions


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


AnyAction = RunBatch | LookupBlocks | LoadBlocks | SaveBlocks | ReleaseBlocks | Refuse | Emit
