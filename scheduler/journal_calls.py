"""The journal as the loop sees it: looked up in a thread, exact about what ends meanwhile.

A submission that is neither live nor among the journal's results is a new one. The results are
read in another thread, and what was live when the reading began may have ended when it is over; so
ids that end in between are looked up again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from scheduler.actions import Record, RecordFinished
from scheduler.calls import Journal
from scheduler.errors import RequestFailed
from scheduler.lifetime import Lifetime
from scheduler.request import Request

logger = logging.getLogger(__name__)


class JournalCalls:
    """What is asked of a journal."""

    def __init__(self, journal: Journal, lifetime: Lifetime, catch_up: Callable[[], None]) -> None:
        """Keep who is asked.

        Args:
            catch_up: has the core handle all that came in so far.
        """
        self._journal = journal
        self._lifetime = lifetime
        self._catch_up = catch_up
        self._loop = asyncio.get_running_loop()
        self._readings: list[set[str]] = []
        """For each reading under way, the submissions that have had an end meanwhile."""

    def append(self, records: list[Record]) -> None:
        """Have the records of one turn written."""
        self._journal.append(records)
        ended = {r.parent_id for r in records if isinstance(r, RecordFinished)}
        for reading in self._readings:
            reading |= ended

    async def is_durable(self) -> bool:
        """Return whether all that was appended so far is written, when that is known.

        Raises:
            HaversackError: the engine was closed first.
        """
        written: asyncio.Future[bool] = self._loop.create_future()

        def call_back(is_written: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                self._loop.call_soon_threadsafe(written.set_result, is_written)

        self._journal.when_durable(call_back)
        await self._lifetime.until(written)
        return written.result()

    async def results(self, request_ids: Iterable[str]) -> dict[str, list[Request]]:
        """Return the ended requests of those submissions that have any.

        When this returns, the core has handled all that came in, and none of the others has ended
        since it was looked up: what is not live then has no result either.
        """
        found: dict[str, list[Request]] = {}
        unknown = set(request_ids)
        while unknown:
            for request_id in unknown:
                found.pop(request_id, None)
            ended: set[str] = set()
            self._readings.append(ended)
            try:
                found |= await asyncio.to_thread(self._read, sorted(unknown))
                self._catch_up()
            finally:
                self._readings = [each for each in self._readings if each is not ended]
            unknown &= ended
        return found

    def _read(self, request_ids: list[str]) -> dict[str, list[Request]]:
        found = {}
        for request_id in request_ids:
            try:
                ended = self._journal.result(request_id)
            except RequestFailed as error:
                logger.error("a kept result is treated as if it was not there: %s", error)
                continue
            if ended:
                found[request_id] = ended
        return found

    def stats(self) -> object:
        """Return a struct of counters."""
        return self._journal.stats()
