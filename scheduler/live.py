"""What the core keeps about requests, workers and outstanding operations while they live.

`LiveRequest` is a request's place in the engine (worker, blocks, operation), not its progress:
throwing it away and making a new one from the `Request` loses time but no result. The module
holds state and its bookkeeping, no decision.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from offload_store.keys import HashChain
from scheduler.block_pool import BlockPool
from scheduler.messages import Chunk, WorkerInfo
from scheduler.request import Request, RequestStatus
from scheduler.transitions import change_status

_STORY_LENGTH = 32


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between submission and end, and where it is."""

    request: Request
    submitted_s: float
    hashes: HashChain
    """Hashes of the full blocks of its known tokens."""
    block_size: int
    worker: WorkerView | None = None
    """Set exactly while it is LOADING, RUNNING or SAVING."""
    block_ids: list[int] = field(default_factory=list)
    """Its block table there; each id is one hold in the worker's pool."""
    num_kv_tokens: int = 0
    """Leading tokens whose KV is in those blocks."""
    num_registered_blocks: int = 0
    """Leading blocks that were offered to the worker's prefix cache."""
    num_sent_blocks: int = 0
    """Leading block ids that the worker has been told."""
    is_known_to_worker: bool = False
    """Whether the worker has its parameters."""
    in_flight: Chunk | None = None
    """The chunk that is being computed."""
    op_id: int | None = None
    """The store operation it waits for while LOADING or SAVING."""
    has_progressed_here: bool = False
    """Whether its progress has grown since it came to this worker."""
    is_evict_wanted: bool = False
    """Evict as soon as a chunk has brought progress, or the one under way has."""
    runs_alone: bool = False
    """Its last batch failed as a whole: until a chunk succeeds it gets a batch to itself."""
    num_emitted_tokens: int = 0
    is_prompt_emitted: bool = False
    _story: deque[str] = field(default_factory=lambda: deque(maxlen=_STORY_LENGTH))

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def status(self) -> RequestStatus:
        return self.request.status

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that its worker still has to compute."""
        return self.request.num_tokens - self.num_kv_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the next chunk is one token after the prompt."""
        return not self.request.is_prefilling and self.num_pending_tokens == 1

    def move_to(self, status: RequestStatus, time_s: float, why: str) -> None:
        """Change the status and remember why.

        Raises:
            InvalidTransition: with the story so far.
        """
        change_status(self.request, status, self._story)
        place = f" on {self.worker.id}" if self.worker else ""
        self._story.append(f"{time_s:.3f}s {status.value}{place} ({why})")

    def block_hashes(self, num_blocks: int) -> list[bytes]:
        """Return the hashes of the first `num_blocks` blocks, all full of known tokens."""
        num_tokens = num_blocks * self.block_size
        return list(self.hashes.hashes(num_tokens, self.request.token_ids))


@dataclass(slots=True, eq=False)
class InFlight:
    """A chunk under way, and the blocks to free after it if its request has left meanwhile."""

    live: LiveRequest
    chunk: Chunk
    orphaned_block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class WorkerView:
    """The scheduler's picture of one worker."""

    info: WorkerInfo
    pool: BlockPool
    residents: dict[str, LiveRequest] = field(default_factory=dict)
    """Requests that hold blocks here: LOADING, RUNNING or SAVING."""
    step_id: int | None = None
    """The step under way; None while idle."""
    in_flight: list[InFlight] = field(default_factory=list)
    released_request_ids: list[str] = field(default_factory=list)
    """Requests that left since the last step, to be told with the next one."""
    told_released_ids: list[str] = field(default_factory=list)
    """Those told with the step under way: told again if it fails."""

    @property
    def id(self) -> str:
        return self.info.worker_id

    @property
    def is_idle(self) -> bool:
        return self.step_id is None

    def active(self) -> list[LiveRequest]:
        """Return the residents that compute or will, in order of service."""
        found = [r for r in self.residents.values() if r.status is not RequestStatus.SAVING]
        return sorted(found, key=lambda r: r.request.rank)

    def num_leaving_blocks(self) -> int:
        """Blocks that come free without a further decision."""
        return sum(
            len(r.block_ids)
            for r in self.residents.values()
            if r.status is RequestStatus.SAVING or r.is_evict_wanted
        )


@dataclass(slots=True, eq=False)
class StoreOp:
    """A lookup, load or save that the store has not answered yet."""

    op_id: int
    worker: WorkerView
    live: LiveRequest | None
    """Who waits for it; None once that request has left."""
    held_block_ids: list[int] = field(default_factory=list)
    """Blocks that only this operation holds; freed when it is over."""
    num_blocks: int = 0
    """Blocks asked for."""
