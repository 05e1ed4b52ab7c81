"""What the core keeps about requests, workers and outstanding operations while they live.

`LiveRequest` is a request's place in the engine (worker, blocks, operation), not its progress:
throwing it away and making a new one from the `Request` loses time but no result. The module
holds state and its bookkeeping, no decision.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from offload_store.keys import HashChain
from scheduler.block_pool import BlockPool
from scheduler.life import Life, SpanKind
from scheduler.messages import Chunk, WorkerInfo
from scheduler.request import Request, RequestStatus
from scheduler.timings import RequestTimes, WorkTimes
from scheduler.transitions import change_status

_rank = attrgetter("rank")
_SPAN_KINDS = {
    RequestStatus.WAITING: SpanKind.QUEUED,
    RequestStatus.LOADING: SpanKind.LOADING,
    RequestStatus.RUNNING: SpanKind.READY,
    RequestStatus.SAVING: SpanKind.SAVING,
}


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between submission and end, and where it is."""

    request: Request
    submitted_s: float
    hashes: HashChain
    """Hashes of the full blocks of its known tokens."""
    block_size: int
    is_restored: bool = False
    """Whether it comes from an earlier scheduler."""
    life: Life = field(init=False)
    """What has happened to it, and when."""
    rank: tuple[int, int] = field(init=False)
    """`Request.rank`, which never changes while it lives."""
    times: RequestTimes = field(init=False)
    """For the latencies."""
    worker: WorkerView | None = None
    """Set exactly while it is LOADING, RUNNING or SAVING."""
    block_ids: list[int] = field(default_factory=list)
    """Its block table there; each id is one hold in the worker's pool."""
    num_kv_tokens: int = 0
    """Leading tokens whose KV is in those blocks."""
    num_row_blocks: int = 0
    """Leading blocks whose rows it holds, does not need, or can have from the row cache, as far as
    was seen; they limit what it reads of others' KV."""
    num_registered_blocks: int = 0
    """Leading blocks that were offered to the worker's prefix cache."""
    num_sent_blocks: int = 0
    """Leading block ids that the worker has been told."""
    is_known_to_worker: bool = False
    """Whether the worker has its parameters."""
    in_flight: list[InFlight] = field(default_factory=list)
    """Its chunks under way, in the order in which they are computed."""
    op_id: int | None = None
    """The store operation it waits for while LOADING or SAVING."""
    has_progressed_here: bool = False
    """Whether its progress has grown since it came to this worker."""
    is_evict_wanted: bool = False
    """Evict as soon as a chunk has brought progress, or the one under way has."""
    batch_limit: int | None = None
    """Its last batch failed as a whole: until it gets further than before it shares a batch with
    other suspects only, so many at most; None where it is under no suspicion."""
    num_lone_deaths: int = 0
    """Workers in a row that died while they computed nothing but this request."""
    num_saved_blocks: int = 0
    """Leading blocks that the offload store is known to keep for it."""
    num_tried_blocks: int = 0
    """Leading blocks that were there when the latest save from this worker began."""
    save_op_id: int | None = None
    """A save that goes on while it runs."""
    migration: Migration | None = None
    """Its move to another worker, while that is under way."""
    num_failed_copies: int = 0
    """Copies of its blocks from this worker to others that have failed."""
    migrate_to: str | None = None
    """The worker that an operator wants it on, once it has a place anywhere."""
    num_queued_tokens: int = 0
    """What it adds to the queue's length while it waits."""
    followers: list[str] = field(default_factory=list)
    """Clients to tell about it."""
    num_emitted_tokens: int = 0
    is_prompt_emitted: bool = False

    def __post_init__(self) -> None:
        self.rank = self.request.rank
        why = "restored from the journal" if self.is_restored else "submitted"
        self.life = Life(self.submitted_s, why, has_had_place=self.is_restored)
        self.times = RequestTimes(None if self.is_restored else self.submitted_s)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def status(self) -> RequestStatus:
        return self.request.status

    @property
    def next_position(self) -> int:
        """Where its next chunk starts.

        That is before the end of its KV where another's block supplied KV, but not all that is
        needed of its last positions.
        """
        return min(self.num_kv_tokens, self.request.first_due_position())

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that its worker still has to compute."""
        return self.request.num_tokens - self.next_position

    @property
    def planned_position(self) -> int:
        """Where the chunk starts that follows those under way."""
        return self.in_flight[-1].end if self.in_flight else self.next_position

    @property
    def num_planned_outputs(self) -> int:
        """Tokens generated once all that is under way is computed, unless one ends the request."""
        num_outputs = len(self.request.output_token_ids)
        for flight in self.in_flight:
            num_outputs += flight.num_samples
        return num_outputs

    @property
    def num_unplanned_tokens(self) -> int:
        """Tokens to compute next, those included that what is under way will bring."""
        num_tokens = self.request.num_prompt_tokens + self.num_planned_outputs
        return num_tokens - self.planned_position

    @property
    def is_decoding(self) -> bool:
        """Whether the next chunk is one token after the prompt."""
        position, num_prompt_tokens = self.planned_position, self.request.num_prompt_tokens
        num_tokens = num_prompt_tokens + self.num_planned_outputs
        return num_prompt_tokens <= position == num_tokens - 1

    def move_to(self, status: RequestStatus, time_s: float, why: str) -> None:
        """Change the status and remember why.

        Raises:
            InvalidTransition: with the story so far.
        """
        before = self.request.status
        change_status(self.request, status, self.life.story())
        if self.worker is not None:
            saving = RequestStatus.SAVING
            self.worker.num_saving += (status is saving) - (before is saving)
        num_computed, worker = self.request.num_computed_tokens, self.worker
        if status is RequestStatus.FINISHED:
            self.life.finish(time_s, num_computed, why)
        elif status is RequestStatus.WAITING or worker is None:
            self.life.enter(_SPAN_KINDS[status], time_s, None, num_computed, why)
        else:
            self.life.enter(_SPAN_KINDS[status], time_s, worker.id, self.num_kv_tokens, why)

    def block_hashes(self, num_blocks: int) -> list[bytes]:
        """Return the hashes of the first `num_blocks` blocks, all full of known tokens."""
        num_tokens = num_blocks * self.block_size
        return list(self.hashes.hashes(num_tokens, self.request.token_ids))


@dataclass(slots=True, eq=False)
class Migration:
    """A move to another worker: blocks are copied there while the request goes on here."""

    target: WorkerView
    block_ids: list[int]
    """Its block table there, held for it."""
    reason: str
    num_copied_blocks: int = 0
    """Leading blocks that are there, full and complete."""
    num_rounds: int = 0
    op_id: int | None = None
    """The copy under way."""
    paused_s: float | None = None
    """When it stopped computing for the last copy; None before that."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A chunk under way, and the blocks to free after it if its request has left meanwhile."""

    live: LiveRequest
    chunk: Chunk
    is_void: bool = False
    """What it continues has failed, so that nothing it brings is of use."""
    orphaned_block_ids: list[int] = field(default_factory=list)
    end: int = field(init=False)
    """Position before which it ends, unless a token before ends the request."""
    num_samples: int = field(init=False)
    """Tokens that it brings, unless one before ends the request."""

    def __post_init__(self) -> None:
        chunk = self.chunk
        self.end = chunk.start + len(chunk.token_ids) + chunk.max_more_tokens
        self.num_samples = int(chunk.sample) + chunk.max_more_tokens


@dataclass(slots=True, eq=False)
class Step:
    """A step that a worker was sent and has not answered."""

    step_id: int
    flights: list[InFlight]
    told_released_ids: list[str]
    """Requests that it says have left: told again if it fails."""


@dataclass(slots=True, eq=False)
class WorkerView:
    """The scheduler's picture of one worker."""

    info: WorkerInfo
    pool: BlockPool
    number: int = 0
    """How many workers joined before it; settles ties."""
    residents: dict[str, LiveRequest] = field(default_factory=dict)
    """Requests that hold blocks here: LOADING, RUNNING or SAVING."""
    num_saving: int = 0
    """Those of them that are SAVING."""
    steps: deque[Step] = field(default_factory=deque)
    """Those under way, in the order in which they were sent, are computed and answered."""
    decode_s: float | None = None
    """Seconds that it took per token of each request in its latest step of nothing but decodes."""
    released_request_ids: list[str] = field(default_factory=list)
    """Requests that left since the last step, to be told with the next one."""
    has_refused_releases: bool = False
    """Its latest step held nothing but those and failed: they wait for the next chunk."""
    incoming: dict[str, LiveRequest] = field(default_factory=dict)
    """Requests that are moving here; their places are kept for them."""
    drain_deadline_s: float | None = None
    """When it has to be empty; None where it may take requests."""
    drain_started_s: float = 0.0
    work: WorkTimes = field(default_factory=lambda: WorkTimes(0.0))
    """What it does with its time."""

    @property
    def id(self) -> str:
        return self.info.worker_id

    @property
    def is_idle(self) -> bool:
        return not self.steps

    @property
    def is_draining(self) -> bool:
        return self.drain_deadline_s is not None

    @property
    def num_seats_taken(self) -> int:
        """Requests that compute here, will, or are on their way."""
        return len(self.residents) - self.num_saving + len(self.incoming)

    def active(self) -> list[LiveRequest]:
        """Return the residents that compute or will, in order of service."""
        saving = RequestStatus.SAVING
        found = [r for r in self.residents.values() if r.request.status is not saving]
        return sorted(found, key=_rank)

    def num_leaving_blocks(self) -> int:
        """Blocks that come free without a further decision."""
        return sum(
            len(r.block_ids)
            for r in self.residents.values()
            if r.status is RequestStatus.SAVING or r.is_evict_wanted or r.migration
        )


@dataclass(slots=True, eq=False)
class StoreOp:
    """A lookup, load, save or copy that has not been answered yet."""

    op_id: int
    worker: WorkerView
    """Whose blocks it uses; of a copy, the target."""
    live: LiveRequest | None
    """Who waits for it; None once that request has left."""
    started_s: float
    held_block_ids: list[int] = field(default_factory=list)
    """Blocks of the worker that only this operation holds; freed when it is over."""
    first_block: int = 0
    """Index of the first block asked for in the request's table."""
    num_blocks: int = 0
    """Blocks asked for."""
    beneficiary: LiveRequest | None = None
    """Whose save or copy it is while that request goes on computing."""
