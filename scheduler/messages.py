"""What travels between scheduler, workers and clients.

A step message carries only what is new to its worker: the first chunk of a request brings its
parameters and whole block table (`NewRequest`), later ones only new block ids. A worker's answer
carries only what is new to the request.
"""

from __future__ import annotations

import msgspec

from scheduler.codec import IntArray
from scheduler.errors import WireError
from scheduler.life import Span
from scheduler.logprobs import Logprobs
from scheduler.request import FinishReason, RequestStats, RequestStatus
from scheduler.sampling_params import SamplingParams

# ---------------------------------------------------------------- scheduler -> worker -> scheduler

LAST_SAMPLED = -1
"""As a chunk's only token id: the token that this worker sampled last for the request."""


class NewRequest(msgspec.Struct, frozen=True, eq=False):
    """What a worker has to know about a request before its first chunk there."""

    sampling_params: SamplingParams
    seed: int
    num_prompt_tokens: int
    num_prompt_logprobs: int | None
    """Columns of a prompt row beside the actual token's, -1 for all of the vocabulary, None for no
    rows; `sampling_params` say which ones."""
    stop_ids: tuple[int, ...]
    """Token ids that end the request once `min_tokens` tokens are generated, and can't be sampled
    before."""
    num_output_tokens: int
    """Tokens generated so far, on whichever worker."""
    history: IntArray
    """int32: prompt and output tokens so far, or empty where sampling does not look at them."""


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """A run of tokens of one request to compute in a step; a decode is a chunk of one token."""

    request_id: str
    start: int
    """Position of the first token; KV of every earlier position is in the blocks."""
    token_ids: IntArray
    """int32 [tokens], or [LAST_SAMPLED] while an earlier step that brings the token is under way"""
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
    first_new_position: int = 0
    """KV of earlier positions is in the blocks, which others may share: tokens of the chunk before
    it are computed for their rows and samples only, and their KV is not touched."""
    max_more_tokens: int = 0
    """Tokens to sample beyond that one, each computed in its turn as if it had been sent, unless
    one ends the request; there are blocks for them."""


class SchedulerOutput(msgspec.Struct, frozen=True, eq=False):
    """One step of one worker; the next one may be sent before it is answered.

    A worker computes and answers steps in the order in which they were sent.
    """

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
    """One row per sampled token, where output logprobs are asked for."""
    more_token_ids: IntArray | None = None
    """int32: the tokens sampled after that one; None where no more were asked for."""
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
    tensor_parallel_size: int = 1
    """Processes that compute the model together."""
    other_node_ids: tuple[str, ...] = ()
    """Where those are, but for the first, which is the worker."""

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Nodes without which the worker is lost."""
        return (self.node_id, *self.other_node_ids)


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
    timeout_s: float | None = None
    """Seconds from its arrival at the scheduler, after which it ends with `DeadlineExceeded`."""
    detached: bool = False
    """Whether it goes on when its client has gone; the result waits in the journal."""
    traceparent: str | None = None
    """The trace context, as W3C writes it, of whoever sent it; of no meaning to the engine."""


class OutputDelta(msgspec.Struct, frozen=True, eq=False):
    """What became visible of a request since its previous delta.

    The first delta comes when the prompt is done and carries all its rows. Where these are many
    bytes, it is preceded by deltas that carry the leading ones and nothing else. After a
    reconnection everything comes again from the start.
    """

    request_id: str
    """The id the user knows."""
    index: int = 0
    num_previous_tokens: int = 0
    """Tokens of this completion before the new ones: who has more than that drops what he has."""
    new_token_ids: IntArray | None = None
    new_logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    num_previous_rows: int = 0
    """The prompt's rows before those in `prompt_logprobs`."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: WireError | None = None
    stats: RequestStats | None = None
    """Set in the last delta."""
    life: list[Span] | None = None
    """What has happened to it; set in the last delta, unless that is told from a journal."""
    content_hash: bytes = b""
    """Of the submission that it is about: one with other content may have had the id before."""


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
    num_migrations: int
    num_workers_lost: int
    waited_s: float
    """Seconds since submission."""
    arrival: int = 0
    """Order of submission, which settles ties of priority."""


class RequestLife(msgspec.Struct, frozen=True, eq=False):
    """What has happened to a request, live or ended lately."""

    info: RequestInfo
    spans: list[Span]
    """Oldest first; see `scheduler.life`."""
    finish_reason: FinishReason | None = None
    """None while it lives."""
    error: WireError | None = None


class Lives(msgspec.Struct, frozen=True, eq=False):
    """What has happened to those requests that an operator looks at."""

    now_s: float
    """The time of the scheduler's clock, which the spans' times are of."""
    live: list[RequestLife]
    """In order of service."""
    ended: list[RequestLife]
    """As they ended."""
    num_live: int
    """Live requests, those included that are not told."""


class WorkerReport(msgspec.Struct, frozen=True):
    """One worker as operators see it."""

    worker_id: str
    node_id: str
    pid: int
    device: str
    is_draining: bool
    num_running: int
    """Requests that have blocks there."""
    num_pending_tokens: int
    """Known tokens that it still has to compute."""
    num_blocks: int
    num_used_blocks: int
    tensor_parallel_size: int = 1
    """Processes that compute its model together, each on a device like `device`."""

    @property
    def devices(self) -> str:
        """What it computes on, in words."""
        size = self.tensor_parallel_size
        return self.device if size == 1 else f"{size} x {self.device}"


class WorkerUse(msgspec.Struct, frozen=True):
    """What a worker is used for now, and what it has done with its time since it joined."""

    worker_id: str
    num_running: int
    """Requests that have blocks there."""
    num_blocks: int
    num_used_blocks: int
    compute_s: float
    """Seconds that it spent on the steps that it has answered."""
    dispatch_s: float
    """Other seconds with a step under way: messages on their way, waiting for their turn."""
    idle_s: float
    """Seconds without a step."""


class SchedulerStats(msgspec.Struct):
    """Counters since the start (they only grow) and gauges of now."""

    num_waiting: int = 0
    num_queued_tokens: int = 0
    """Known tokens that waiting requests still need computed."""
    num_running: int = 0
    """Requests in any status between waiting and finished."""
    num_finished: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    finished_by_reason: dict[str, int] = {}
    """"stop", "length", "abort" or "error" -> requests that have ended so."""
    num_refused: int = 0
    num_evictions: int = 0
    num_workers: int = 0
    num_workers_lost: int = 0
    num_workers_drained: int = 0
    """Workers that ended on request, with nothing left on them."""
    num_migrations: int = 0
    migrations_by_reason: dict[str, int] = {}
    """"asked", "drain", "load" or "blocks" -> migrations."""
    num_migrations_failed: int = 0
    """Migrations that were given up, because a copy failed or the request left meanwhile."""
    migration_pause_s: float = 0.0
    """Seconds that migrated requests stood still for their last blocks, all together."""
    num_stores_lost: int = 0
    num_requests_restored: int = 0
    """Requests that came back from the journal after the scheduler was lost."""
    num_expired: int = 0
    """Requests that ran past their deadline; counted as failed too."""
    num_steps: int = 0
    num_chunks: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of accepted requests."""
    num_prefilled_tokens: int = 0
    """Prompt tokens of requests whose whole prompt is computed, or was had from caches."""
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
    num_queried_tokens: int = 0
    """Tokens that admitted requests had not computed before and could read shared blocks of."""
    num_worker_cache_hit_tokens: int = 0
    """Those of them whose KV was there already on the worker."""
    num_store_queries: int = 0
    """Lookups in the offload store; bypasses don't count."""
    num_store_hit_tokens: int = 0
    """Those of them whose KV came from the offload store."""
    num_own_hit_tokens: int = 0
    """Tokens that requests had computed before, and whose KV they found again, wherever."""
    num_cache_bypasses: int = 0
    """Admissions that could read no shared block."""
    num_row_cache_hit_rows: int = 0
    """Prompt rows that the row cache supplied."""
    num_row_cache_blocks: int = 0
    """Blocks whose rows it holds now, once for each kind of rows."""
    num_row_cache_bytes: int = 0
    num_saved_blocks: int = 0
    """Blocks that the store holds after saves, already present ones included."""
    num_copied_blocks: int = 0
    """Blocks whose bytes travelled to the store."""
    num_loaded_blocks: int = 0
    """Blocks written into workers from the store."""
    num_migrated_blocks: int = 0
    """Blocks copied from worker to worker."""
    num_saved_bytes: int = 0
    """Bytes that travelled to the store."""
    num_loaded_bytes: int = 0
    num_migrated_bytes: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks that requests or saves hold now; cached ones that could be reused don't count."""
    compute_s: float = 0.0
    """Seconds that workers spent on steps."""
