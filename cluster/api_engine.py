"""The endpoint's side of the engine: requests that end with their HTTP request, and its health.

Rules:
- Nothing here blocks the event loop: what tokenises or waits for the scheduler runs in threads.
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
from functools import partial
from typing import Any, NamedTuple, TypeVar

from cluster.api_errors import RequestCancelled, UnknownModel
from cluster.api_settings import ApiSettings
from cluster.api_text import TokenStrings
from cluster.client import Client
from cluster.detokenizer import TokenTable
from cluster.handle import RequestHandle
from cluster.prompts import Prompt
from cluster.scoring import Score, ScoringParams
from scheduler.errors import (
    DuplicateRequest,
    EngineUnavailable,
    HaversackError,
    InvalidRequest,
    ModelNotFound,
)
from scheduler.messages import SchedulerStats
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
        self.settings = settings
        self._client = Client(settings.engine, start=False)
        self._table = _table_of(self._client)
        self.strings = TokenStrings(self._table)
        """Of the model's tokens."""
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "haversack-api")
        self._long = ThreadPoolExecutor(_LONG_THREADS, "haversack-api-score")
        self._live_ids: set[str] = set()
        self._closing = threading.Event()
        self._stats: SchedulerStats | None = None
        self._stats_s = time.monotonic()
        self._trouble: str | None = None
        self._look()
        self._watcher = threading.Thread(target=self._watch, name="haversack-watch", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Leave the engine; what is under way is cancelled."""
        self._closing.set()
        self._client.close()
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------- what it is

    @property
    def has_tokenizer(self) -> bool:
        return self._table is not None

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer.

        Raises:
            ModelNotFound: it has none.
        """
        return self._client.tokenizer

    def check_tokenizer(self) -> None:
        """Raise `ModelNotFound` where the model has no tokenizer."""
        if self._table is None:
            raise ModelNotFound("the model served here has no tokenizer: give token ids")

    @property
    def max_model_len(self) -> int:
        """Tokens that a request may have."""
        return self._client.info.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._client.info.limits.vocab_size

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
    def stats(self) -> SchedulerStats | None:
        """The engine's counters of a moment ago; None where they are not known."""
        return self._stats

    def trouble(self) -> str | None:
        """Return why the engine can't compute now; None where it can."""
        if self._trouble is not None:
            return self._trouble
        age_s = time.monotonic() - self._stats_s
        if age_s > _STALE_S:
            return f"the engine has not answered for {age_s:.0f} s"
        if self._stats is not None and self._stats.num_workers == 0:
            return "no worker is there to compute requests"
        return None

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        try:
            self._stats = self._client.stats().scheduler
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

    # ----------------------------------------------------------------------------------- requests

    async def run(self, work: Callable[..., Found], *args: Any, **keywords: Any) -> Found:
        """Have something quick done in a thread, and return or raise what it does."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._short, partial(work, *args, **keywords))

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
            RequestCancelled: one was cancelled.
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
        stopped = threading.Event()
        with self._claimed([options.request_id]):
            future = self._long.submit(self._score, pairs, params, options, stopped)
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


def cancelled(request_id: str) -> RequestCancelled:
    """Return the error of a request that was cancelled before it was done."""
    return RequestCancelled(f"request {request_id!r} was cancelled before it was done")


def _table_of(client: Client) -> TokenTable | None:
    try:
        return TokenTable(client.tokenizer)
    except ModelNotFound:
        return None


async def _result(handle: RequestHandle) -> RequestOutput:
    return await handle


def _cancel_submitted(submission: asyncio.Future[list[RequestHandle]]) -> None:
    if not submission.cancelled() and submission.exception() is None:
        for handle in submission.result():
            handle.cancel()
