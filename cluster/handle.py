"""A submitted request as its user holds it: wait for it, stream it, cancel it.

Rules:
- A handle ends in exactly one result or one typed error, and then never changes.
- It is fed by one thread and may be waited for by any number of threads and event loops.
- A stop string ends a completion for the user at once; the handle ends when the scheduler, told to
  cancel it, has confirmed that it is over, so that its id and blocks are free then.
- What comes again (after a reconnection the engine tells everything from the start) is dropped, by
  its number. A gap in what comes is a bug of the engine, and ends the handle with an error.
The module knows no Ray; cancelling is a function that it is given.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import numpy as np

from cluster.detokenizer import Detokenizer, TokenTable
from cluster.prompt_rows import PromptRows
from scheduler.errors import HaversackError, InvariantViolation, from_wire
from scheduler.life import Span
from scheduler.logprobs import LogprobRows, Logprobs
from scheduler.messages import OutputDelta, Submission
from scheduler.outputs import (
    CompletionDelta,
    CompletionOutput,
    DecodeToken,
    PromptLogprobsView,
    RequestOutput,
    SampleLogprobsView,
)
from scheduler.request import FinishReason, RequestStats
from scheduler.sampling_params import SamplingParams
from scheduler.submissions import content_hash

Cancel = Callable[[list[str]], None]


class RequestHandle:
    """One submission: its result, its stream, and the way to cancel it.

    `await handle` is `handle.result()` on an event loop.
    """

    def __init__(
        self,
        submission: Submission,
        prompt: str | None,
        table: TokenTable | None,
        cancel: Cancel,
    ) -> None:
        """Wait for deltas.

        Args:
            prompt: its text, where text was given.
            table: the tokenizer's tokens; None where no text is wanted.
            cancel: tells the scheduler to cancel what has these ids, without waiting.
        """
        self.submission = submission
        """What was sent to the scheduler."""
        self._content_hash = content_hash(submission)
        self._prompt = prompt
        self._table = table
        self._tell_cancel = cancel
        self._changed = threading.Condition()
        self._listeners: set[Callable[[], None]] = set()
        self._done_callbacks: list[Callable[[], object]] = []
        params = submission.sampling_params
        self._completions = [_Completion(i, params, table) for i in range(params.n)]
        start = max(params.prompt_logprobs_start, 1)
        self._prompt_rows = PromptRows(max(len(submission.prompt_token_ids) - start, 0))
        self._stats: RequestStats | None = None
        self._error: HaversackError | None = None
        self._is_done = False
        self.is_cancelled = False
        """Whether its user has asked for its end."""

    @property
    def request_id(self) -> str:
        """The name that it was submitted under, or that was made for it."""
        return self.submission.request_id

    def __repr__(self) -> str:
        return f"<RequestHandle {self.request_id!r}: {'done' if self._is_done else 'running'}>"

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._is_done

    def cancel(self) -> None:
        """Ask for the end of the request, without waiting for it.

        Its result then has what it had produced, with finish_reason "abort". A request that is
        done is left as it is.
        """
        self.is_cancelled = True
        if not self._is_done:
            self._tell_cancel([self.request_id])

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return the result.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.

        Raises:
            TimeoutError: it is not over in time; it goes on, and can be waited for again.
            HaversackError: why there is no result.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done, timeout):
                raise TimeoutError(f"request {self.request_id!r} is not over after {timeout:g} s")
            return self._output()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """Wait, on whichever event loop, and return or raise what `result` does.

        A task that is cancelled while it awaits leaves the request as it is.
        """
        return self._wait_async().__await__()

    async def _wait_async(self) -> RequestOutput:
        async with _Listener(self) as listener:
            while not self._is_done:
                await listener.wait()
        return self.result(0)

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Have something called once when the request is over; at once where it is already.

        Args:
            callback: called by whichever thread ends the handle: it must be quick, and raise and
                wait for nothing.
        """
        with self._changed:
            if not self._is_done:
                self._done_callbacks.append(callback)
                return
        callback()

    def lives(self) -> list[list[Span] | None]:
        """Return what happened to each completion, see `scheduler.life`; also of one that failed.

        None: it is not over, or was told from a journal.
        """
        with self._changed:
            return [completion.life for completion in self._completions]

    def stream(self) -> DeltaStream:
        """Return a new stream of what becomes visible, from the beginning."""
        return DeltaStream(self)

    # ------------------------------------------------------------------------- what comes in

    def feed(self, delta: OutputDelta) -> None:
        """Take in the next delta, or again an earlier one; ignored once the handle is done.

        What is about another submission, that had the id before, is ignored too.
        """
        to_cancel: list[str] = []
        with self._changed:
            if self._is_done or delta.content_hash not in (b"", self._content_hash):
                return
            try:
                if delta.error is not None:
                    self._completions[delta.index].life = delta.life
                    raise from_wire(delta.error)
                to_cancel = self._take(delta)
            except HaversackError as error:
                self._error = error
                self._is_done = True
                is_live = delta.error is None or len(self._completions) > 1
                to_cancel = [self.request_id] if is_live else []
            self._notify()
        if to_cancel:
            self._tell_cancel(to_cancel)

    def fail(self, error: HaversackError) -> None:
        """End with an error; ignored once the handle is done."""
        with self._changed:
            if not self._is_done:
                self._error = error
                self._is_done = True
                self._notify()

    def abandon(self) -> None:
        """End with what there is, as cancelled requests do; ignored once the handle is done."""
        with self._changed:
            if not self._is_done:
                for completion in self._completions:
                    completion.abort()
                self._is_done = True
                self._notify()

    def unwanted_ids(self) -> list[str]:
        """Return what the scheduler should cancel if it does not know yet that it is over."""
        with self._changed:
            ended = [c.index for c in self._completions if c.finish_reason is not None]
        if self.is_cancelled or len(ended) == len(self._completions):
            return [self.request_id]
        return [f"{self.request_id}#{index}" for index in ended]

    def _take(self, delta: OutputDelta) -> list[str]:
        if delta.prompt_logprobs is not None:
            self._prompt_rows.take(delta.prompt_logprobs, delta.num_previous_rows)
        if delta.stats is not None and (delta.index == 0 or self._stats is None):
            self._stats = delta.stats
        completion = self._completions[delta.index]
        was_stopped = completion.finish_reason is not None
        completion.take(delta)
        self._is_done = all(c.is_over for c in self._completions)
        if was_stopped or completion.finish_reason is None or completion.is_over:
            return []
        if len(self._completions) == 1:
            return [self.request_id]
        return [f"{self.request_id}#{delta.index}"]

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in list(self._listeners):
            listener()
        if self._is_done:
            callbacks, self._done_callbacks = self._done_callbacks, []
            for callback in callbacks:
                callback()

    # -------------------------------------------------------------------------- what goes out

    def _output(self) -> RequestOutput:
        if self._error is not None:
            raise from_wire(self._error.to_wire())
        decode = self._table.token_text if self._table is not None else None
        rows = self._prompt_rows.whole
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.submission.prompt_token_ids.tolist(),
            prompt_logprobs=self._prompt_view(rows, decode) if rows is not None else None,
            outputs=[completion.output(decode) for completion in self._completions],
            finished=True,
            num_cached_tokens=self._stats.num_cached_tokens if self._stats else None,
            stats=self._stats,
        )

    def _prompt_view(self, rows: Logprobs, decode: DecodeToken | None) -> PromptLogprobsView:
        start = self.submission.sampling_params.prompt_logprobs_start
        return PromptLogprobsView(rows, decode, max(start, 1))

    def _next_delta(self, cursors: list[_Cursor]) -> CompletionDelta | None:
        """Return what is visible past the cursors, and move them; None where nothing is.

        To be called with the lock held.
        """
        decode = self._table.token_text if self._table is not None else None
        for completion, cursor in zip(self._completions, cursors, strict=True):
            text = completion.text[cursor.num_chars :]
            token_ids = completion.token_ids[cursor.num_tokens :]
            rows = self._prompt_rows.whole if completion.index == 0 else None
            is_end = completion.finish_reason is not None and not cursor.is_ended
            has_rows = rows is not None and not cursor.has_prompt_logprobs
            if not (text or token_ids or is_end or has_rows):
                continue
            logprobs = completion.logprobs_from(cursor.num_tokens)
            cursor.num_chars += len(text)
            cursor.num_tokens += len(token_ids)
            cursor.is_ended = completion.finish_reason is not None
            cursor.has_prompt_logprobs |= has_rows
            return CompletionDelta(
                request_id=self.request_id,
                index=completion.index,
                text=text,
                token_ids=token_ids,
                logprobs=SampleLogprobsView(logprobs, decode) if logprobs is not None else None,
                prompt_logprobs=self._prompt_view(rows, decode) if rows and has_rows else None,
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )
        return None


class _Completion:
    """What has come of one of the n continuations."""

    def __init__(self, index: int, params: SamplingParams, table: TokenTable | None) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.is_over = False
        """Whether the scheduler has confirmed the end."""
        self.life: list[Span] | None = None
        """What has happened to it, once that has come."""
        self._num_received = 0
        """Tokens that came; `token_ids` has fewer where a stop string ended it before the last."""
        self._detokenizer = Detokenizer(table, params) if table is not None else None
        self._logprobs: LogprobRows | None = None

    @property
    def text(self) -> str:
        return self._detokenizer.text if self._detokenizer is not None else ""

    def take(self, delta: OutputDelta) -> None:
        """Add what is new in a delta, up to the token that ends the completion.

        Raises:
            InvariantViolation: tokens before it are missing; nothing has changed then.
        """
        num_known = self._num_received - delta.num_previous_tokens
        if self.finish_reason is None and num_known < 0:
            raise InvariantViolation(
                f"the engine left out {-num_known} tokens of a request after its first "
                f"{self._num_received}: report this"
            )
        self.is_over |= delta.finish_reason is not None
        self.life = self.life or delta.life
        if self.finish_reason is not None:
            return
        new_ids = [] if delta.new_token_ids is None else delta.new_token_ids[num_known:].tolist()
        self._num_received += len(new_ids)
        kept = len(new_ids)
        if self._detokenizer is not None:
            before = self._detokenizer.num_tokens
            self._detokenizer.append(
                new_ids, ends_with_stop_token=delta.finish_reason is FinishReason.STOP
            )
            kept = self._detokenizer.num_tokens - before
            if self.is_over:
                self._detokenizer.finish()
        self.token_ids += new_ids[:kept]
        if delta.new_logprobs is not None:
            if self._logprobs is None:
                self._logprobs = LogprobRows(delta.new_logprobs.width - 1)
            self._logprobs.append(delta.new_logprobs[num_known : num_known + kept])
        if self._detokenizer is not None and self._detokenizer.stop_string is not None:
            self.finish_reason = FinishReason.STOP.value
            self.stop_reason = self._detokenizer.stop_string
        elif delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason

    def abort(self) -> None:
        """End here, unless it has ended."""
        if self.finish_reason is None:
            self.take(
                OutputDelta(
                    "",
                    self.index,
                    num_previous_tokens=self._num_received,
                    finish_reason=FinishReason.ABORT,
                )
            )

    def logprobs_from(self, start: int) -> Logprobs | None:
        """Return the rows of the tokens from number `start` on; None where none were asked for."""
        return self._logprobs.array()[start:] if self._logprobs is not None else None

    def output(self, decode: Callable[[int], str] | None) -> CompletionOutput:
        rows = self.logprobs_from(0)
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=None
            if rows is None
            else float(rows.logprobs[:, 0].sum(dtype=np.float64)),
            logprobs=None if rows is None else SampleLogprobsView(rows, decode),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            life=self.life,
        )


class _Cursor:
    """How much of one completion a stream has delivered."""

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_tokens = 0
        self.has_prompt_logprobs = False
        self.is_ended = False


class DeltaStream:
    """Iterates, also asynchronously, over a request's deltas until it is over.

    A consumer that is slow gets larger deltas, not later ones. An error of the request is raised
    after what came before it.
    """

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._cursors = [_Cursor() for _ in handle._completions]

    def __iter__(self) -> Iterator[CompletionDelta]:
        while True:
            with self._handle._changed:
                delta, is_over = self._poll()
                if delta is None and not is_over:
                    self._handle._changed.wait()
                    continue
            if delta is None:
                return
            yield delta

    async def __aiter__(self) -> AsyncIterator[CompletionDelta]:
        async with _Listener(self._handle) as listener:
            while True:
                with self._handle._changed:
                    delta, is_over = self._poll()
                if delta is not None:
                    yield delta
                elif is_over:
                    return
                else:
                    await listener.wait()

    def _poll(self) -> tuple[CompletionDelta | None, bool]:
        delta = self._handle._next_delta(self._cursors)
        if delta is None and self._handle._error is not None:
            raise from_wire(self._handle._error.to_wire())
        return delta, self._handle._is_done


class _Listener:
    """Wakes a coroutine when a handle has changed."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> _Listener:
        with self._handle._changed:
            self._handle._listeners.add(self._wake)
        return self

    async def __aexit__(self, *exc: object) -> None:
        with self._handle._changed:
            self._handle._listeners.discard(self._wake)

    async def wait(self) -> None:
        """Return when something has changed since the last call."""
        await self._event.wait()
        self._event.clear()

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)
