"""The engine's event loop: performs the core's actions and turns every outcome into an event.

Rules:
- A `SchedulerLoop` and the core inside it are used on one asyncio loop only.
- `SchedulerState.handle` is called from one place, `scheduler.inbox`.
- Every action that has an outcome brings exactly one event, also where an actor is dead or hangs.
- A fault in the core or in here is a bug of the engine, never of a request: it closes the engine,
  and every client is told, rather than leaving anybody waiting.
- The records of a turn go to the journal together, so that a crash leaves whole turns.
The module decides nothing, and knows no Ray: workers, store and journal are behind the protocols of
`scheduler.calls`. How each of them is dealt with is in `worker_calls`, `store_calls` and
`journal_calls`, how clients are in `clients` and `intake`.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

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
    ReleaseBlocks,
    RunBatch,
    SaveBlocks,
    StopWorker,
)
from scheduler.calls import Journal, Store, Timeouts, Worker
from scheduler.clients import Clients
from scheduler.errors import (
    EngineUnavailable,
    HaversackError,
    InvariantViolation,
    WireError,
    from_wire,
)
from scheduler.events import (
    AnyEvent,
    ClientGone,
    DrainRequested,
    EvictRequested,
    MigrateRequested,
    RequestCancelled,
    RequestRestored,
    Tick,
    WorkerJoined,
)
from scheduler.inbox import Inbox
from scheduler.intake import Intake
from scheduler.journal_calls import JournalCalls
from scheduler.lifetime import Clock, Lifetime, Tasks, first_of, unix_clock
from scheduler.messages import (
    Lives,
    RequestInfo,
    SchedulerStats,
    Submission,
    WorkerInfo,
    WorkerReport,
    WorkerUse,
)
from scheduler.outbox import PollAnswer
from scheduler.request import Request
from scheduler.scaling import Load
from scheduler.state import SchedulerState
from scheduler.store_calls import StoreCalls
from scheduler.timings import Timings
from scheduler.worker_calls import OnLost, OnStopped, WorkerCalls

logger = logging.getLogger(__name__)

CLIENT_GRACE_S = 60.0
WATCH_INTERVAL_S = 5.0


class SchedulerLoop:
    """The core, those who act for it, and those who wait for it."""

    def __init__(
        self,
        state: SchedulerState,
        store: Store | None = None,
        *,
        journal: Journal | None = None,
        clock: Clock | None = None,
        client_grace_s: float = CLIENT_GRACE_S,
        watch_interval_s: float | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 (frozen)
        on_worker_lost: OnLost | None = None,
        on_worker_stopped: OnStopped | None = None,
        on_client_gone: Callable[[str], None] | None = None,
    ) -> None:
        """Start on the running event loop.

        Args:
            store: the offload store; None where there is none.
            journal: where requests survive this process; None where they don't.
            clock: the time of events; None is one that starts right and never jumps.
            client_grace_s: a client that has not polled for so long is given up.
            watch_interval_s: how often workers are pinged, clients looked at and the core is told
                that time has passed; None is `WATCH_INTERVAL_S`, or less where the grace is short.
            timeouts: when an actor that does not answer counts as lost.
            on_worker_lost: called with a lost worker's id and the reason; returns events that the
                core has to know before the loss, such as what will replace the worker.
            on_worker_stopped: called with the id of a drained worker that has been ended.
            on_client_gone: called with the id of a client that left or was given up.
        """
        self._state = state
        self._clock = clock if clock is not None else unix_clock()
        self._on_client_gone = on_client_gone
        self._tasks = Tasks(self._fail)
        spawn = self._tasks.spawn
        self._records: list[Record] = []
        """What the core has for the journal in this turn."""
        self._lifetime = lifetime = Lifetime()
        self._inbox = Inbox(
            state, self._clock, lifetime, self._perform, self._end_turn, on_bug=self._fail
        )
        self._clients = Clients(lifetime, client_grace_s)
        self._workers = WorkerCalls(
            self.post, spawn, timeouts, lifetime, on_worker_lost, on_worker_stopped
        )
        self._store = StoreCalls(store, self._workers, self.post, spawn, timeouts, lifetime)
        self._journal = (
            JournalCalls(journal, lifetime, self._inbox.catch_up) if journal is not None else None
        )
        self._intake = Intake(state, self._inbox, self._clients, self._journal, lifetime)
        if watch_interval_s is None:
            watch_interval_s = min(WATCH_INTERVAL_S, client_grace_s / 2)
        spawn(self._watch(watch_interval_s))

    # ------------------------------------------------------------------------ what clients ask

    def connect(self, client_id: str) -> int:
        """Open an outbox, or keep the one that is there; return its epoch."""
        self._lifetime.check()
        return self._clients.connect(client_id)

    async def disconnect(self, client_id: str) -> None:
        """Forget a client; what nobody else follows and is not detached is cancelled."""
        if not self._clients.forget(client_id):
            return
        await self.handle(ClientGone(client_id))
        if self._on_client_gone is not None:
            try:
                self._on_client_gone(client_id)
            except Exception as error:
                self._fail(error)

    async def submit(self, client_id: str, submissions: list[Submission]) -> list[WireError | None]:
        """Return for each submission why it was refused, or None.

        What is live under its id with the same content is not computed twice: the client is told
        all of it from the start. So is what has ended, if the journal keeps how.

        Raises:
            UnknownClient: it is not connected.
            EngineUnavailable: the engine is closed.
        """
        return await self._intake.submit(client_id, submissions)

    async def attach(self, client_id: str, request_id: str) -> Submission:
        """Tell a client all of a submission from the start, live or ended; return what it was.

        Raises:
            UnknownClient: it is not connected.
            UnknownRequest: there is no such request, and the journal keeps no such result.
            EngineUnavailable: the engine is closed.
        """
        return await self._intake.attach(client_id, request_id)

    async def poll(self, client_id: str, acked: int, timeout_s: float) -> PollAnswer:
        """Return deltas numbered above `acked`; wait for one at most `timeout_s`."""
        return await self._clients.poll(client_id, acked, timeout_s)

    async def cancel(self, request_ids: list[str]) -> None:
        await self.handle(*(RequestCancelled(request_id) for request_id in request_ids))

    # ---------------------------------------------------------------------- what operators ask

    async def evict(self, request_ids: list[str]) -> None:
        await self.handle(*(EvictRequested(request_id) for request_id in request_ids))

    async def migrate(self, request_id: str, worker_id: str) -> None:
        """Begin to move a request to a worker.

        Raises:
            UnknownRequest, UnknownWorker, CannotMigrate: as the core says; nothing has changed.
            EngineUnavailable: the engine is closed.
        """
        self._lifetime.check()
        [refusal] = await self._inbox.ask(MigrateRequested(request_id, worker_id))
        if refusal is not None:
            raise from_wire(refusal)

    async def drain(self, worker_id: str, deadline_s: float) -> None:
        """Have a worker emptied and ended; return when it has ended, whoever asked for it.

        Args:
            deadline_s: seconds from now after which what is still there is evicted.

        Raises:
            UnknownWorker: there is none of this name.
            EngineUnavailable: the engine is closed.
        """
        self._lifetime.check()
        ended = self._workers.get(worker_id).ended
        [refusal] = await self._inbox.ask(DrainRequested(worker_id, self._clock() + deadline_s))
        if refusal is not None and not ended.done():
            raise from_wire(refusal)
        await self._lifetime.until(ended)

    def leave_node(self, node_id: str) -> None:
        """Have nothing kept on a node where no worker is any more, unless a request needs it."""
        self._store.leave_node(node_id)

    def worker_infos(self) -> list[WorkerInfo]:
        """Return the workers that have joined and not ended."""
        return self._workers.infos()

    def worker_reports(self) -> list[WorkerReport]:
        self._lifetime.check()
        return self._state.worker_reports()

    def stats(self) -> SchedulerStats:
        self._lifetime.check()
        return self._state.stats()

    def timings(self) -> Timings:
        """Return the latencies of requests so far."""
        return self._state.timings()

    def worker_uses(self) -> list[WorkerUse]:
        """Return what each worker is used for."""
        return self._state.worker_uses()

    def load(self) -> Load:
        """Return what there is to do and was done, for all workers but those that are drained."""
        return self._state.load(self._clock())

    def journal_stats(self) -> dict[str, Any] | None:
        """Return what the journal says of itself; None where there is none."""
        if self._journal is None:
            return None
        said: dict[str, Any] = msgspec.to_builtins(self._journal.stats())
        return said

    def request_infos(self) -> list[RequestInfo]:
        self._lifetime.check()
        return self._state.request_infos(self._clock())

    def lives(self, max_live: int, max_ended: int) -> Lives:
        """Return what has happened to requests; see `SchedulerState.lives`."""
        self._lifetime.check()
        return self._state.lives(self._clock(), max_live, max_ended)

    # ------------------------------------------------------------------------- what the host asks

    def expect(self, client_id: str) -> None:
        """Give a client the grace to connect, after which it counts as gone."""
        self._clients.expect(client_id)

    def restore(self, requests: list[Request]) -> None:
        """Go on with the live requests of an earlier scheduler; called before anything else.

        Their clients have the grace to come back. The offload store forgets every other request.
        """
        for request in requests:
            if request.client_id:
                self._clients.expect(request.client_id)
        self._store.retain([request.request_id for request in requests])
        self.post(*(RequestRestored(request) for request in requests))

    async def add_worker(self, worker: Worker, info: WorkerInfo) -> None:
        """Take in a worker.

        Raises:
            InvalidConfig: its name is taken, or its KV blocks are not interchangeable with the
                others'.
            EngineUnavailable: the engine is closed.
        """
        self._lifetime.check()
        self._workers.add(worker, info)
        await self.handle(WorkerJoined(info))
        self._lifetime.check()

    def close(self, reason: HaversackError) -> None:
        """Take nothing more in and tell everybody who waits why; the first reason stays."""
        self._lifetime.end(reason)

    @property
    def is_closed(self) -> bool:
        return self._lifetime.reason is not None

    async def closed(self) -> None:
        """Return once the engine is closed, whoever closed it."""
        await first_of(self._lifetime.over)

    # --------------------------------------------------------------------- events and actions

    def post(self, *events: AnyEvent) -> None:
        """Give events to the core in the loop's next turn, with the time as it is now."""
        self._inbox.post(*events)

    async def handle(self, *events: AnyEvent) -> None:
        """Give events to the core and return when it has handled them."""
        await self._inbox.handle(*events)

    def _perform(self, action: AnyAction) -> None:
        match action:
            case RunBatch():
                self._workers.run_batch(action)
            case Emit(client_id=client_id, delta=delta):
                self._clients.deliver(client_id, delta)
            case LookupBlocks() | LoadBlocks() | SaveBlocks() | ReleaseBlocks():
                self._store.perform(action)
            case CopyBlocks():
                self._workers.copy_blocks(action)
            case StopWorker(worker_id=worker_id):
                self._workers.stop(worker_id)
            case RecordSubmitted() | RecordProgress() | RecordFinished():
                self._records.append(action)

    def _end_turn(self) -> None:
        records, self._records = self._records, []
        if records:
            if self._journal is None:
                raise InvariantViolation("the core writes to a journal, and there is none")
            self._journal.append(records)

    # ------------------------------------------------------------------------------ what fails

    def _fail(self, error: BaseException) -> None:
        story = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        logger.error("the scheduler stops because of a bug: %s", story)
        self.close(
            EngineUnavailable(
                f"the engine stopped because of a bug in it: {type(error).__name__}: {error}; "
                f"start it again, and report this:\n{story}"
            )
        )

    async def _watch(self, interval_s: float) -> None:
        """Let time pass, find workers that died while idle and clients that have gone."""
        while True:
            await first_of(self._lifetime.over, timeout_s=interval_s)
            if self._lifetime.reason is not None:
                return
            self.post(Tick())
            self._workers.ping_all()
            for client_id in self._clients.silent(interval_s):
                logger.warning("client %s has not polled for long: given up", client_id)
                await self.disconnect(client_id)
