"""Submitting more than the engine's queue, or memory, may hold: in order, as room comes.

The module knows no Ray, and of a request only its handle.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from cluster.handle import RequestHandle
from cluster.patience import pause_before_retry
from scheduler.errors import HaversackError, Overloaded
from scheduler.outputs import RequestOutput

Item = TypeVar("Item")
Submit = Callable[[list[RequestHandle]], "list[RequestHandle | HaversackError]"]
"""Returns for each handle itself, or why it was refused."""
_MAX_BATCH = 1024
_CHECK_EVERY_S = 0.2
_FIRST_TAKE = 8
"""Jobs that are made ready and sent before any other, so that the engine begins while the next ones
are made ready."""


def submit_as_room_comes(
    handles: list[RequestHandle],
    submit: Submit,
    wait: Callable[[float], object] = time.sleep,
    *,
    stops_at_refusal: bool = True,
) -> None:
    """Submit all, the first ones first; wait and try again where the queue is full.

    One that is refused for another reason ends with that.

    Args:
        wait: lets so many seconds pass.
        stops_at_refusal: whether nothing that comes after such a one is sent any more.

    Raises:
        EngineUnavailable: the engine is gone.
    """
    pending, size = handles, _MAX_BATCH
    while pending:
        batch, pending = pending[:size], pending[size:]
        waiting: list[RequestHandle] = []
        pause_s = 0.0
        for handle, outcome in zip(batch, submit(batch), strict=True):
            if isinstance(outcome, Overloaded):
                waiting.append(handle)
                pause_s = max(pause_s, pause_before_retry(outcome))
            elif isinstance(outcome, HaversackError):
                handle.fail(outcome)
                if stops_at_refusal:
                    pending = []
                    break
        size = max(len(batch) - len(waiting), 1) if waiting else min(2 * size, _MAX_BATCH)
        pending = waiting + pending
        if waiting:
            wait(pause_s)


@dataclass(frozen=True)
class Job(Generic[Item]):
    """One of many that are submitted as room comes."""

    item: Item
    """What it is known by."""
    request: RequestHandle | HaversackError
    """What to submit, or why there is nothing to submit."""
    num_result_bytes: int = 0


class Window(NamedTuple):
    """How much may be under way at once, results that nobody has taken yet included."""

    max_requests: int
    max_result_bytes: int
    """No further job is taken where this is reached."""


def results_as_room_comes(
    jobs: Iterable[Job[Item]],
    submit: Submit,
    cancel: Callable[[list[str]], object],
    window: Window,
    *,
    ordered: bool,
    check: Callable[[], object] = lambda: None,
) -> Generator[tuple[Item, RequestOutput | HaversackError], None, None]:
    """Take jobs as the window allows, submit them, and yield what becomes of each.

    One that fails is told like a result, and stops no other. Whoever closes the iterator before its
    end has what is under way cancelled.

    Args:
        cancel: tells the scheduler to cancel what has these ids, without waiting.
        ordered: whether results come in the order of the jobs; else in the order of their ends.
        check: called for each job and, while this waits, a few times a second; what it raises ends
            the iteration.

    Raises:
        EngineUnavailable: the engine is gone, and nothing can be submitted.
    """

    def pause(seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _CHECK_EVERY_S))
            check()

    flight = _Flight(jobs, window, ordered, check)
    try:
        while True:
            new = flight.take()
            submit_as_room_comes(new, submit, pause, stops_at_refusal=False)
            if flight.is_empty:
                return
            if not new or flight.has_result:
                yield flight.next_result()
    finally:
        cancel(flight.live_ids())


class _Flight(Generic[Item]):
    """Jobs that were taken and whose results were not."""

    def __init__(
        self,
        jobs: Iterable[Job[Item]],
        window: Window,
        ordered: bool,
        check: Callable[[], object],
    ) -> None:
        self._jobs = enumerate(jobs)
        self._window = window
        self._ordered = ordered
        self._check = check
        self._under_way: dict[int, Job[Item]] = {}
        """By their places among all jobs, in that order."""
        self._num_result_bytes = 0
        self._max_take = _FIRST_TAKE
        self._is_filling = True
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Places of those that have ended, where the order of the jobs is not kept."""

    @property
    def is_empty(self) -> bool:
        return not self._under_way

    @property
    def has_result(self) -> bool:
        """Whether `next_result` would return at once."""
        if not self._ordered:
            return not self._ended.empty()
        first = next(iter(self._under_way.values())).request
        return isinstance(first, HaversackError) or first.done()

    def take(self) -> list[RequestHandle]:
        """Take the next jobs, more each time, until the window is full; return what to submit.

        Nothing is taken again before a quarter of the window is free: many go in one message.
        """
        new: list[RequestHandle] = []
        self._is_filling |= 4 * len(self._under_way) <= 3 * self._window.max_requests
        while self._is_filling and len(new) < self._max_take:
            place, job = next(self._jobs, (0, None)) if self._has_room() else (0, None)
            self._check()
            if job is None:
                self._is_filling = False
                break
            self._under_way[place] = job
            self._num_result_bytes += job.num_result_bytes
            if isinstance(job.request, RequestHandle):
                new.append(job.request)
            if not self._ordered:
                _when_done(job.request, partial(self._ended.put, place))
        self._max_take = min(2 * self._max_take, _MAX_BATCH)
        return new

    def _has_room(self) -> bool:
        return (
            len(self._under_way) < self._window.max_requests
            and self._num_result_bytes < self._window.max_result_bytes
        )

    def next_result(self) -> tuple[Item, RequestOutput | HaversackError]:
        """Wait for the job that was taken first, or for any; return what has become of it."""
        while True:
            self._check()
            try:
                place = self._next_place(_CHECK_EVERY_S)
                outcome = _outcome(self._under_way[place].request, _CHECK_EVERY_S)
            except (TimeoutError, queue.Empty):
                continue
            job = self._under_way.pop(place)
            self._num_result_bytes -= job.num_result_bytes
            return job.item, outcome

    def _next_place(self, timeout_s: float) -> int:
        if self._ordered:
            return next(iter(self._under_way))
        return self._ended.get(timeout=timeout_s)

    def live_ids(self) -> list[str]:
        """Return the ids of what has not ended."""
        handles = [
            j.request for j in self._under_way.values() if isinstance(j.request, RequestHandle)
        ]
        return [handle.request_id for handle in handles if not handle.done()]


def _when_done(request: RequestHandle | HaversackError, callback: Callable[[], object]) -> None:
    if isinstance(request, RequestHandle):
        request.add_done_callback(callback)
    else:
        callback()


def _outcome(
    request: RequestHandle | HaversackError, timeout_s: float
) -> RequestOutput | HaversackError:
    if isinstance(request, HaversackError):
        return request
    try:
        return request.result(timeout_s)
    except HaversackError as error:
        return error
