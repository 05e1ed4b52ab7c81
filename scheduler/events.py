"""All that can happen to the scheduler's core.

Every action with an outcome carries an `op_id` (or a step id) that the event reporting the
outcome, good or bad, gives back. Time comes in on events, in seconds.
"""

from __future__ import annotations

import msgspec

from scheduler.errors import WireError
from scheduler.messages import ModelRunnerOutput, Submission, WorkerInfo
from scheduler.request import Request


class Event(msgspec.Struct, frozen=True, eq=False, kw_only=True, tag=True):
    """Base of what can happen to the core; time comes in with it, in seconds."""

    time_s: float = 0.0


class RequestSubmitted(Event, frozen=True, eq=False):
    """A submission: all its n requests are taken, or `Refuse` answers it and nothing changes.

    The same content under the id of a live submission is no new one: its client is told all that
    is visible of that, and what follows.
    """

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
    """A worker is gone with all that was on it."""

    worker_id: str
    reason: str = ""


class WorkerExpected(Event, frozen=True, eq=False):
    """A worker is being started: what only it could compute waits for it."""

    worker_id: str
    num_blocks: int
    """KV blocks that it will have."""


class WorkerNotComing(Event, frozen=True, eq=False):
    """An expected worker won't join."""

    worker_id: str
    reason: str


class DrainRequested(Event, frozen=True, eq=False):
    """A worker has to be empty by a deadline: its requests move away, then it is stopped."""

    worker_id: str
    deadline_s: float
    """In the events' time; when it has passed, what is still there is evicted."""
    ticket: int = 0
    """Given back by `Refuse`, where no such worker is there."""


class MigrateRequested(Event, frozen=True, eq=False):
    """Move a request to a worker while it goes on."""

    request_id: str
    worker_id: str
    ticket: int = 0
    """Given back by `Refuse`, where that can't be."""


class CopyDone(Event, frozen=True, eq=False):
    """A copy from worker to worker has ended."""

    op_id: int
    num_copied_blocks: int
    """Leading blocks that were written; fewer than asked for where one side failed."""


class StoreLost(Event, frozen=True, eq=False):
    """The offload store has died and come back empty."""


class RequestRestored(Event, frozen=True, eq=False):
    """A request comes back from the journal, with the progress that was written."""

    request: Request


class ReplayRequested(Event, frozen=True, eq=False):
    """Tell a client everything that is visible of a live submission, and all that follows."""

    request_id: str
    client_id: str


class ClientGone(Event, frozen=True, eq=False):
    """A client has gone: what nobody else follows and is not detached is cancelled."""

    client_id: str


class Tick(Event, frozen=True, eq=False):
    """Time has passed."""


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
    Tick
    | ClientGone
    | WorkerExpected
    | WorkerNotComing
    | DrainRequested
    | MigrateRequested
    | CopyDone
    | StoreLost
    | RequestRestored
    | ReplayRequested
    | RequestSubmitted
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
