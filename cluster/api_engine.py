"""The endpoint's side of the engine: requests that end with their HTTP request, and its health.

Rules:
- Nothing here blocks the event loop: what tokenises or waits for the scheduler runs in threads, and
  what is large in a process of its own; see `cluster.api_work`.
- What was submitted for an HTTP request is cancelled when that one is over, however it ends.
- The health is what a thread of its own found last, so telling it waits for nothing. An engine that
  is gone is looked for again: one that comes back under its name is served again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from cluster import otel
from cluster.api_encoding import encode_pairs, encode_prompts
from cluster.api_errors import UnknownModel
from cluster.api_settings import ApiSettings
from cluster.api_work import AT_ONCE, LARGE, Helper, Texts
from cluster.client import Client
from cluster.handle import RequestHandle
from cluster.live_feed import MAX_ENDED, MAX_LIVE, Look
from cluster.prompts import Prompt, check_request_id
from cluster.scoring import Score, ScoringParams
from scheduler.errors import (
    Cancelled,
    DuplicateRequest,
    EngineUnavailable,
    HaversackError,
    InvalidRequest,
    ModelNotFound,
)
from scheduler.outbox import EngineStats
from scheduler.outputs import RequestOutput
from scheduler.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_STALE_S = 5.0
"""An engine that has not told its counters for so long counts as out of reach."""
_SHORT_THREADS = 32
"""For what takes milliseconds: tokenising, submitting, making answers."""
_LONG_THREADS = 64
"""For scores: each takes one until it is done, and further ones wait."""

Found = TypeVar("Found")
Params = ParamSpec("Params")


class Options(NamedTuple):
    """What goes with the requests of one HTTP request, beside their parameters."""

    request_id: str
    """The request's id, or what the ids of several begin with."""
    priority: int
    cache_salt: str | None
    timeout_s: float | None


class ApiEngine:
    """One endpoint's connection to the engine that it serves."""

    def __init__(self, settings: ApiSettings) -> None:
        """Join the engine, and load its tokenizer.

        Raises:
            EngineUnavailable: it is not there.
            ModelNotFound: the model itself is not to be had here.
        """
        otel.start_exporting()
        self.settings = settings
        self._client = Client(settings.engine, start=False)
        info = self._client.info
        self.texts = Texts(_tokenizer_of(self._client), info.limits)
        """The model's."""
        self._helper = Helper(info.model, info.limits)
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "haversack-api")
        self._long = ThreadPoolExecutor(_LONG_THREADS, "haversack-api-score")
        self._large = ThreadPoolExecutor(AT_ONCE, "haversack-api-large")
        self._live_ids: set[str] = set()
        self._closing = threading.Event()
        self._stats: EngineStats | None = None
        self._stats_s = time.monotonic()
        self._trouble: str | None = None
        self._look()
        self._watcher = threading.Thread(target=self._watch, name="haversack-watch", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Leave the engine; what is under way is cancelled."""
        self._closing.set()
        self._helper.close()
        self._client.close()
        otel.flush()
        for threads in (self._short, self._long, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------- what it is

    @property
    def served_name(self) -> str:
        """The model's name in answers."""
        return self.settings.served_names[0]

    def check_model(self, name: str | None) -> None:
        """Raise `UnknownModel` where a request names another model; None names none."""
        names = self.settings.served_names
        if name is not None and name not in names:
            raise UnknownModel(
                f"the model {name!r} is not served here: give {' or '.join(map(repr, names))}, or "
                "leave it out",
                param="model",
            )

    def check_entries(self, num_entries: int) -> None:
        """Raise `InvalidRequest` where an answer would have that many logprobs."""
        limit = self.settings.limits.max_logprob_entries
        if num_entries > limit:
            raise InvalidRequest(
                f"the answer would hold {num_entries:,} logprobs; this endpoint allows {limit:,} "
                "in one: ask for fewer alternatives, or send fewer prompts at once",
                param="logprobs",
            )

    # -------------------------------------------------------------------------------- its health

    @property
    def stats(self) -> EngineStats | None:
        """The engine's counters of a moment ago; None where they are not known."""
        return self._stats

    def trouble(self) -> str | None:
        """Return why the engine can't compute now; None where it can."""
        if self._trouble is not None:
            return self._trouble
        age_s = time.monotonic() - self._stats_s
        if age_s > _STALE_S:
            return f"the engine has not answered for {age_s:.0f} s"
        if self._stats is not None and self._stats.scheduler.num_workers == 0:
            return "no worker is there to compute requests"
        return None

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        try:
            self._stats = self._client.stats()
            self._stats_s = time.monotonic()
            self._trouble = None
        except HaversackError as error:
            self._trouble = error.message
            if isinstance(error, EngineUnavailable) and not self._closing.is_set():
                self._join_again()

    def _join_again(self) -> None:
        try:
            client = Client(self.settings.engine, start=False)
        except HaversackError as error:
            self._trouble = error.message
            return
        self._client, gone = client, self._client
        gone.close()
        logger.warning("joined the engine again")

    async def look(self) -> Look:
        """Look at the engine for those who watch it.

        Raises:
            EngineUnavailable: it does not answer.
        """
        return await self.run(self._look_closely)

    def _look_closely(self) -> Look:
        client = self._client
        return Look(
            self.served_name,
            client.lives(MAX_LIVE, MAX_ENDED),
            client.workers(),
            client.stats().scheduler,
        )

    # ----------------------------------------------------------------------------------- requests

    async def run(self, work: Callable[..., Found], *args: Any, **keywords: Any) -> Found:
        """Have something quick done in a thread, and return or raise what it does."""
        loop, inside = asyncio.get_running_loop(), copy_context()
        return await loop.run_in_executor(self._short, partial(inside.run, work, *args, **keywords))

    async def work(
        self,
        size: int,
        work: Callable[Concatenate[Texts, Params], Found],
        *args: Params.args,
        **keywords: Params.kwargs,
    ) -> Found:
        """Have something done with the model's texts, and return or raise what it does.

        Args:
            size: characters, bytes, tokens or logprobs that it has to do with. Where these are
                many it is done in another process: arguments and result are copies then, and bytes
                come as an array of them.
            work: a function of a module.
            args: of the function, after the texts.
            keywords: of the function.
        """
        if size <= LARGE:
            return await self.run(work, self.texts, *args, **keywords)
        loop = asyncio.get_running_loop()
        job: Callable[..., Any] = partial(work, **keywords) if keywords else work
        return await loop.run_in_executor(self._large, self._helper.run, job, *args)

    @asynccontextmanager
    async def requests(
        self, prompts: Sequence[Prompt], params: SamplingParams, options: Options
    ) -> AsyncIterator[list[RequestHandle]]:
        """Submit prompts; inside are their handles, and behind it they are over or cancelled.

        Raises:
            InvalidRequest: a prompt or a parameter is wrong, or an id is taken.
            Overloaded: the queue has no room for all of them.
            EngineUnavailable: the engine is gone.
        """
        check_request_id(options.request_id)
        num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        if num_chars > LARGE:
            prompts = await self.work(num_chars, encode_prompts, prompts)
        ids = [options.request_id]
        if len(prompts) > 1:
            ids = [f"{options.request_id}-{index}" for index in range(len(prompts))]
        with self._claimed(ids):
            handles: list[RequestHandle] = []
            submission = asyncio.ensure_future(
                self.run(
                    self._client.submit_many,
                    prompts,
                    params,
                    request_ids=ids,
                    priority=options.priority,
                    cache_salt=options.cache_salt,
                    timeout_s=options.timeout_s,
                )
            )
            try:
                handles = await asyncio.shield(submission)
                for handle in handles:
                    if handle.done():
                        handle.result()
                yield handles
            except asyncio.CancelledError:
                # A thread can't be stopped: what it submits in the end, or has just submitted, has
                # to be cancelled too.
                submission.add_done_callback(_cancel_submitted)
                raise
            finally:
                for handle in handles:
                    handle.cancel()

    async def results(self, handles: Sequence[RequestHandle]) -> list[RequestOutput]:
        """Wait for all, and return their results in order.

        Raises:
            Cancelled: one was cancelled.
            HaversackError: why there is no result; the first such error in time.
        """
        outputs = await asyncio.gather(*map(_result, handles))
        for output in outputs:
            if any(completion.finish_reason == "abort" for completion in output.outputs):
                raise cancelled(output.request_id)
        return outputs

    async def scores(
        self, pairs: Sequence[tuple[Any, Any]], params: ScoringParams, options: Options
    ) -> list[Score]:
        """Score pairs, and return the scores in order.

        Raises:
            HaversackError: the first one that a pair has.
        """
        check_request_id(options.request_id)
        num_chars = sum(len(part) for pair in pairs for part in pair if isinstance(part, str))
        if num_chars > LARGE:
            pairs = await self.work(num_chars, encode_pairs, pairs, params)
        stopped = threading.Event()
        with self._claimed([options.request_id]):
            inside = copy_context()
            future = self._long.submit(inside.run, self._score, pairs, params, options, stopped)
            try:
                return await asyncio.shield(asyncio.wrap_future(future))
            finally:
                stopped.set()
                if not future.done() and not future.cancel():
                    self._short.submit(self._cancel_scores, options.request_id, len(pairs))

    def _score(
        self,
        pairs: Sequence[tuple[Any, Any]],
        params: ScoringParams,
        options: Options,
        stopped: threading.Event,
    ) -> list[Score]:
        scores = self._client.score_many(
            pairs,
            params,
            request_id=options.request_id,
            priority=options.priority,
            cache_salt=options.cache_salt,
            timeout_s=options.timeout_s,
        )
        found: list[Score] = []
        num_entries = 0
        with closing(scores):
            for score in scores:
                if stopped.is_set():
                    break
                found.append(score)
                rows = score.token_logprobs.arrays
                num_entries += rows.num_rows * rows.width
                self.check_entries(num_entries)
        return found

    def _cancel_scores(self, request_id: str, num_pairs: int) -> None:
        """Cancel what is under way; what is not submitted yet never will be."""
        with suppress(HaversackError):
            for index in range(num_pairs):
                self._client.cancel(f"{request_id}-{index}")

    @contextmanager
    def _claimed(self, ids: Sequence[str]) -> Iterator[None]:
        """Keep ids from being used twice at once: a second request would follow the first one."""
        taken = next((name for name in ids if name in self._live_ids), None)
        if taken is not None:
            raise DuplicateRequest(
                f"a live request is called {taken!r}: give another request_id, or wait until it "
                "has ended",
                param="request_id",
            )
        self._live_ids.update(ids)
        try:
            yield
        finally:
            self._live_ids.difference_update(ids)


def cancelled(request_id: str) -> Cancelled:
    """Return the error of a request that was cancelled before it was done."""
    return Cancelled(f"request {request_id!r} was cancelled before it was done")


def _tokenizer_of(client: Client) -> Any:
    """Return the model's tokenizer; None where it has none."""
    try:
        return client.tokenizer
    except ModelNotFound:
        return None


async def _result(handle: RequestHandle) -> RequestOutput:
    return await handle


def _cancel_submitted(submission: asyncio.Future[list[RequestHandle]]) -> None:
    if not submission.cancelled() and submission.exception() is None:
        for handle in submission.result():
            handle.cancel()
