"""What viewers of the live page are told: a snapshot of the engine, then what has changed.

Rules:
- The engine is looked at at a bounded rate, once for all viewers, and not at all while there is no
  viewer.
- A message is made once for all viewers. One who reads slowly misses messages, and is told a
  snapshot next: nothing piles up for him.
- So many requests are told at most, however many are live; how many are live is told too.
The module knows no HTTP and no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from cluster.pictures import request_view, worker_view
from scheduler.errors import HaversackError, Overloaded
from scheduler.messages import Lives, SchedulerStats, WorkerReport

logger = logging.getLogger(__name__)

MAX_LIVE = 100
MAX_ENDED = 50
"""Requests that are told of, live ones and those that ended last."""
MAX_VIEWERS = 50
_INTERVAL_S = 1.0
_ALIVE_EVERY = 10
"""Looks without a change after which viewers are told that there was none."""
_COUNTERS = (
    *("running", "waiting", "queued_tokens", "computed_tokens", "finished", "failed", "aborted"),
    *("evictions", "migrations", "workers_lost"),
)

View = dict[str, Any]


class Look(NamedTuple):
    """What an engine looks like at one time."""

    model: str
    lives: Lives
    workers: list[WorkerReport]
    stats: SchedulerStats


class _Seen(NamedTuple):
    """A look as it is told."""

    general: View
    requests: dict[str, View]
    workers: dict[str, View]


class LiveFeed:
    """Messages about one engine, to be used on one event loop."""

    def __init__(
        self, look: Callable[[], Awaitable[Look]], *, interval_s: float = _INTERVAL_S
    ) -> None:
        """Wait for the first viewer.

        Args:
            look: looks at the engine; may raise `HaversackError`.
            interval_s: the least time between two looks.
        """
        self._look = look
        self._interval_s = interval_s
        self._num_viewers = 0
        self._refresher: asyncio.Task[None] | None = None
        self._base_s = 0.0
        """What times are told after."""
        self._seen: _Seen | None = None
        self._trouble: str | None = None
        self._version = 0
        """Counts messages."""
        self._message = msgspec.Raw()
        """The latest one, for those who know the one before."""
        self._snapshot: msgspec.Raw | None = None
        """The same for those who don't, once one of them has asked."""
        self._news = asyncio.Event()
        """Set when there is another message, and then replaced."""

    def check_room(self) -> None:
        """Raise `Overloaded` where there are as many viewers as are let in."""
        if self._num_viewers >= MAX_VIEWERS:
            raise Overloaded(
                f"{MAX_VIEWERS} viewers look at the live page already: close one, or try again",
                retry_after_s=10.0,
            )

    async def messages(self) -> AsyncGenerator[msgspec.Raw, None]:
        """Yield messages, as JSON, until the viewer has enough of them and closes this."""
        self._num_viewers += 1
        if self._refresher is None:
            self._refresher = asyncio.ensure_future(self._refresh())
        known: int | None = None
        try:
            while True:
                if known == self._version or not self._version:
                    await self._news.wait()
                    continue
                message = self._message if known == self._version - 1 else self._whole()
                known = self._version
                yield message
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                await self._rest()

    async def _rest(self) -> None:
        """Look no more, until the next viewer comes."""
        refresher, self._refresher = self._refresher, None
        self._version, self._seen = 0, None
        if refresher is not None:
            refresher.cancel()
            with suppress(asyncio.CancelledError):
                await refresher

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        num_quiet = 0
        while True:
            due_s = loop.time() + self._interval_s
            try:
                message = self._changes(await self._look())
            except HaversackError as error:
                message = self._troubled(error.message)
            except Exception:
                logger.exception("the engine can't be looked at")
                message = self._troubled("the engine can't be looked at: see the endpoint's log")
            num_quiet += 1
            if message is None and num_quiet >= _ALIVE_EVERY:
                message = {"type": "alive", "trouble": self._trouble}
            if message is not None:
                num_quiet = 0
                self._publish(message)
            await asyncio.sleep(max(due_s - loop.time(), self._interval_s / 2))

    def _publish(self, message: View) -> None:
        self._version += 1
        self._message = _encoded(message)
        self._snapshot = None
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _troubled(self, story: str) -> View | None:
        if story == self._trouble:
            return None
        self._trouble = story
        return {"type": "alive", "trouble": story}

    def _changes(self, look: Look) -> View | None:
        """Return what a look tells beyond the one before; None where that is nothing."""
        if self._seen is None:
            self._base_s = math.floor(look.lives.now_s)
        seen, before = self._told(look), self._seen or _Seen({}, {}, {})
        requests = [
            change
            for name, view in seen.requests.items()
            if (change := _change(before.requests.get(name), view)) is not None
        ]
        message = {
            "type": "update",
            **seen.general,
            "requests": requests,
            "gone": [name for name in before.requests if name not in seen.requests],
            "workers": [v for name, v in seen.workers.items() if v != before.workers.get(name)],
            "gone_workers": [name for name in before.workers if name not in seen.workers],
        }
        is_same = (
            self._seen is not None
            and self._trouble is None
            and _timeless(seen.general) == _timeless(before.general)
            and not any(message[key] for key in ("requests", "gone", "workers", "gone_workers"))
        )
        self._seen, self._trouble = seen, None
        return None if is_same else message

    def _told(self, look: Look) -> _Seen:
        lives, stats = look.lives, look.stats
        views = [request_view(life, self._base_s) for life in [*lives.ended, *lives.live]]
        general = {
            "model": look.model,
            "now": round(lives.now_s - self._base_s, 3),
            "num_live": lives.num_live,
            "counters": {name: getattr(stats, f"num_{name}") for name in _COUNTERS},
            "trouble": None,
        }
        # An id that was used again stands for the live request: that comes last.
        return _Seen(
            general,
            {view["id"]: view for view in views},
            {report.worker_id: worker_view(report) for report in look.workers},
        )

    def _whole(self) -> msgspec.Raw:
        if self._snapshot is None:
            message: View = {"type": "alive", "trouble": self._trouble}
            if self._seen is not None:
                message = {
                    "type": "snapshot",
                    **self._seen.general,
                    "trouble": self._trouble,
                    "requests": [_change(None, view) for view in self._seen.requests.values()],
                    "gone": [],
                    "workers": list(self._seen.workers.values()),
                    "gone_workers": [],
                }
            self._snapshot = _encoded(message)
        return self._snapshot


def _timeless(general: View) -> View:
    return {name: value for name, value in general.items() if name not in ("now", "trouble")}


def _change(before: View | None, view: View) -> View | None:
    """Return what is new of a request: fields, and its spans from the first new one on."""
    if before is None:
        return {**view, "keep": 0}
    change = {name: value for name, value in view.items() if value != before[name]}
    if not change:
        return None
    change["id"] = view["id"]
    old, new = before["spans"], view["spans"]
    keep = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    change["keep"] = min(len(old), len(new)) if keep is None else keep
    change["spans"] = new[change["keep"] :]
    return change


def _encoded(message: View) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(message))
