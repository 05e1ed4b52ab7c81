"""Stand-ins for everything around the engine's loop: a scripted core, workers, a store, a journal.

Each call of a fake waits until the test answers it, unless the test said beforehand how it is to be
answered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np

from scheduler.actions import Emit, RunBatch
from scheduler.loop import SchedulerLoop
from scheduler.messages import (
    Chunk,
    OutputDelta,
    RequestInfo,
    SchedulerOutput,
    Submission,
    WorkerInfo,
    WorkerReport,
)
from scheduler.request import FinishReason, Request, RequestStatus
from scheduler.sampling_params import SamplingParams
from scheduler.submissions import make_requests

DEADLINE_S = 60.0


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test on a loop of its own, for `DEADLINE_S` at most."""
    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def turns(count: int = 20) -> None:
    """Let everything that is ready happen."""
    for _ in range(count):
        await asyncio.sleep(0)


class ScriptedState:
    """Stands for the core: notes every call of `handle` and answers by a script."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.script: Callable[[Any], list[Any]] = lambda event: []
        self.infos: list[RequestInfo] = []
        self.live: dict[str, Submission] = {}
        self.is_handling = False

    @property
    def events(self) -> list[Any]:
        return [event for call in self.calls for event in call]

    def of_kind(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def handle(self, *events: Any) -> list[Any]:
        assert not self.is_handling, "handle was entered twice"
        assert events, "handle was called for nothing"
        self.is_handling = True
        self.calls.append(list(events))
        actions = [action for event in events for action in self.script(event)]
        self.is_handling = False
        return actions

    def request_infos(self, now_s: float) -> list[RequestInfo]:
        return self.infos

    def worker_reports(self) -> list[WorkerReport]:
        return []

    def submission(self, request_id: str) -> Submission | None:
        return self.live.get(request_id)


class Answers:
    """Calls under way, by method; each waits for the test."""

    def __init__(self) -> None:
        self.calls: dict[str, list[asyncio.Future[Any]]] = {}
        self.always: dict[str, Any] = {}
        """What a method answers at once: a value, or an exception to raise."""
        self.names: list[str] = []
        """Every call that was made, in order."""

    async def ask(self, method: str) -> Any:
        self.names.append(method)
        answer = self.always.get(method)
        if isinstance(answer, BaseException):
            raise answer
        if method in self.always:
            return answer
        call = asyncio.get_running_loop().create_future()
        self.calls.setdefault(method, []).append(call)
        try:
            return await call
        finally:
            self.calls[method].remove(call)

    def num_waiting(self, method: str) -> int:
        return len(self.calls.get(method, []))

    async def answer(self, method: str, answer: Any) -> None:
        """Answer the oldest call of a method, once there is one."""
        await until(lambda: self.num_waiting(method) > 0)
        call = next(call for call in self.calls[method] if not call.done())
        if isinstance(answer, BaseException):
            call.set_exception(answer)
        else:
            call.set_result(answer)


class FakeWorker(Answers):
    """A worker that answers pings and fences."""

    def __init__(self, execute: Callable[[bytes], Awaitable[bytes]] | None = None) -> None:
        super().__init__()
        self.always.update(ping=None, settle=None)
        self.was_killed = False
        self._execute = execute

    async def execute(self, message: bytes) -> bytes:
        if self._execute is not None:
            return await self._execute(message)
        answer: bytes = await self.ask("execute")
        return answer

    async def copy_blocks(
        self, block_ids: list[int], target: Any, target_block_ids: list[int]
    ) -> int:
        return int(await self.ask("copy_blocks"))

    async def settle(self) -> None:
        await self.ask("settle")

    async def ping(self) -> None:
        await self.ask("ping")

    def kill(self) -> None:
        self.was_killed = True


class FakeStore(Answers):
    """A store of which the test answers every call."""

    async def lookup(self, action: Any) -> int:
        return int(await self.ask("lookup"))

    async def load(self, action: Any, worker: Any) -> int:
        return int(await self.ask("load"))

    async def save(self, action: Any, worker: Any) -> tuple[int, int]:
        num_saved, num_copied = await self.ask("save")
        return num_saved, num_copied

    async def release(self, action: Any) -> None:
        await self.ask("release")

    async def retain(self, request_ids: list[str]) -> None:
        self.retained = request_ids
        await self.ask("retain")

    async def leave_node(self, node_id: str) -> None:
        self.left_node_id = node_id
        await self.ask("leave_node")

    async def restart(self) -> None:
        await self.ask("restart")


class FakeJournal:
    """Keeps the results that the test gives it, and writes when the test says so."""

    def __init__(self) -> None:
        self.appended: list[list[Any]] = []
        self.results: dict[str, list[Request]] = {}
        self.waiters: list[Callable[[bool], None]] = []
        self.writes_at_once = True
        self.reads: list[str] = []
        self.may_read = threading.Event()
        self.may_read.set()

    def append(self, records: Any) -> None:
        self.appended.append(list(records))

    def when_durable(self, callback: Callable[[bool], None]) -> None:
        self.waiters.append(callback)
        if self.writes_at_once:
            self.write(True)

    def write(self, is_written: bool) -> None:
        """Call back on another thread, as a journal does."""
        waiters, self.waiters = self.waiters, []
        thread = threading.Thread(target=lambda: [call(is_written) for call in waiters])
        thread.start()
        thread.join()

    def result(self, parent_id: str) -> list[Request] | None:
        assert threading.current_thread() is not threading.main_thread(), "this blocks the loop"
        self.reads.append(parent_id)
        assert self.may_read.wait(DEADLINE_S)
        return self.results.get(parent_id)

    def stats(self) -> dict[str, int]:
        return {"num_results": len(self.results)}


def info(worker_id: str = "w", **changes: Any) -> WorkerInfo:
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "device": "cpu",
        "num_blocks": 8,
        "block_size": 16,
        "block_bytes": 64,
        "vocab_size": 100,
        "max_model_len": 64,
        "eos_token_ids": (),
        "model_fingerprint": "m",
    }
    return WorkerInfo(**fields | changes)


def submission(request_id: str = "r", seed: int = 0, n: int = 1, **changes: Any) -> Submission:
    prompt = np.array([1, 2], np.int32)
    return Submission(request_id, prompt, SamplingParams(n=n), seed=seed, **changes)


def ended(
    submitted: Submission, reason: FinishReason = FinishReason.LENGTH, **changes: Any
) -> list[Request]:
    """Return the requests of a submission as a journal keeps them: one token each, and an end."""
    requests = make_requests(submitted, client_id="someone")
    for request in requests:
        request.num_computed_tokens = 2
        request.output_token_ids = [40 + request.index]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        for name, value in changes.items():
            setattr(request, name, value)
    return requests


def emit(client_id: str, request_id: str) -> Emit:
    return Emit(client_id, OutputDelta(request_id))


def batch(worker_id: str = "w", step_id: int = 7, num_tokens: int = 0) -> RunBatch:
    tokens = np.zeros(num_tokens, np.int32)
    none = np.zeros(0, np.int32)
    chunks = [Chunk("r", 0, tokens, none, none, 0, False)] if num_tokens else []
    return RunBatch(worker_id, SchedulerOutput(step_id, chunks, []))


def make(state: Any, store: Any = None, **settings: Any) -> SchedulerLoop:
    return SchedulerLoop(state, store, **settings)
