"""What viewers of the live page are told: nothing twice, nothing too often, always the truth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from cluster.live_feed import MAX_VIEWERS, LiveFeed, Look
from cluster.pictures import request_view
from scheduler.errors import EngineUnavailable, Overloaded
from scheduler.life import SpanKind
from scheduler.messages import RequestLife
from tests.lives import life_of, lives, report_of, span, stats, waiting

DEADLINE_S = 30.0
Messages = AsyncGenerator[msgspec.Raw, None]


class Engine:
    """Looks are given one by one, and each waits until it is there."""

    def __init__(self) -> None:
        self.looks: asyncio.Queue[Look | Exception] = asyncio.Queue()
        self.num_looks = 0

    async def look(self) -> Look:
        self.num_looks += 1
        found = await self.looks.get()
        if isinstance(found, Exception):
            raise found
        return found

    def see(
        self,
        live: list[RequestLife],
        ended: list[RequestLife] | None = None,
        *,
        now_s: float = 1000.0,
        used: int = 3,
        more: int = 0,
        **counters: Any,
    ) -> None:
        found = lives(now_s, live, ended or [], more)
        self.looks.put_nowait(Look("tiny", found, [report_of("w0", used)], stats(**counters)))


async def told(messages: Messages) -> dict[str, Any]:
    found = await asyncio.wait_for(anext(messages), DEADLINE_S)
    message: dict[str, Any] = json.loads(msgspec.json.encode(found))
    return message


class Viewer:
    """Takes messages in as the page does."""

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        self.requests: dict[str, dict[str, Any]] = {}
        self.last: dict[str, Any] = {}

    async def look(self) -> None:
        message = self.last = await told(self.messages)
        if message["type"] == "alive":
            return
        if message["type"] == "snapshot":
            self.requests = {}
        for change in message["requests"]:
            known = self.requests.setdefault(change["id"], {"spans": []})
            keep, spans = change.pop("keep"), change.pop("spans")
            known.update(change, spans=[*known["spans"][:keep], *spans])
        for name in message["gone"]:
            del self.requests[name]

    def sees(self, expected: list[RequestLife]) -> bool:
        views = {life.info.request_id: request_view(life, 1000.0) for life in expected}
        return self.requests == json.loads(json.dumps(views))


def play(story: Callable[[Engine, LiveFeed], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        engine = Engine()
        await story(engine, LiveFeed(engine.look, interval_s=0.0))

    asyncio.run(run())


def grown(life: RequestLife) -> RequestLife:
    """The same request, half a second and a chunk later."""
    last = life.spans[-1]
    assert last.end_s is not None
    more = span(
        SpanKind.PREFILL,
        last.end_s,
        last.end_s + 0.5,
        worker_id=last.worker_id,
        first=last.end,
        end=last.end + 64,
        num_steps=1,
    )
    return RequestLife(life.info, [*life.spans, more])


def test_a_viewer_is_told_a_snapshot_and_then_only_what_changes() -> None:
    async def story(engine: Engine, feed: LiveFeed) -> None:
        first, second = life_of("a", 1000.0), life_of("b", 1000.0)
        engine.see([first, second])
        viewer = Viewer(feed.messages())
        await viewer.look()
        assert viewer.last["type"] == "snapshot"
        assert viewer.sees([first, second])

        engine.see([grown(first), second], now_s=1001.0)
        await viewer.look()
        assert viewer.last["type"] == "update"
        assert [change["id"] for change in viewer.last["requests"]] == ["a"]
        assert viewer.last["workers"] == []
        assert viewer.sees([grown(first), second])

        ended = life_of("b", 1000.0, is_over=True)
        engine.see([grown(first)], [ended], now_s=1002.0)
        await viewer.look()
        assert viewer.sees([grown(first), ended])

        engine.see([ended], now_s=1003.0)
        await viewer.look()
        assert viewer.last["gone"] == ["a"]
        assert viewer.sees([ended])
        await viewer.messages.aclose()

    play(story)


def test_of_a_long_life_only_the_new_spans_are_told() -> None:
    async def story(engine: Engine, feed: LiveFeed) -> None:
        long = life_of("a", 1000.0, num_chunks=100)
        engine.see([long])
        messages = feed.messages()
        whole = len(json.dumps(await told(messages)))
        engine.see([grown(long)], now_s=1001.0)
        message = await told(messages)
        [change] = message["requests"]
        assert (change["keep"], len(change["spans"])) == (102, 1)
        assert set(change) == {"id", "keep", "spans"}
        assert len(json.dumps(message)) < whole / 10
        await messages.aclose()

    play(story)


def test_spans_that_change_or_become_fewer_are_told() -> None:
    async def story(engine: Engine, feed: LiveFeed) -> None:
        life = life_of("a", 1000.0)
        decode = span(SpanKind.DECODE, 1002.6, 1003.0, worker_id="w0", first=192, end=200)
        longer = span(SpanKind.DECODE, 1002.6, 1004.0, worker_id="w0", first=192, end=210)
        viewer = Viewer(feed.messages())
        for spans in (
            [*life.spans, decode],
            [*life.spans, longer],
            life.spans,
            life.spans[:1],
            [span(SpanKind.QUEUED, 1000.0, 1001.5)],
        ):
            seen = RequestLife(life.info, spans)
            engine.see([seen])
            await viewer.look()
            assert viewer.sees([seen])
        await viewer.messages.aclose()

    play(story)


def test_where_nothing_changes_a_sign_of_life_comes_now_and_then() -> None:
    async def story(engine: Engine, feed: LiveFeed) -> None:
        messages = feed.messages()
        for second in range(20):
            engine.see([life_of("a", 1000.0)], now_s=1000.0 + second)
        await told(messages)
        assert (await told(messages))["type"] == "alive"
        assert engine.num_looks >= 10
        engine.see([life_of("a", 1000.0)], used=4)
        message = await told(messages)
        while message["type"] == "alive":
            message = await told(messages)
        assert message["workers"][0]["used"] == 4
        await messages.aclose()

    play(story)


def test_a_viewer_that_was_away_is_told_a_snapshot() -> None:
    async def story(engine: Engine, feed: LiveFeed) -> None:
        life = life_of("a", 1000.0)
        engine.see([life])
        slow, quick = Viewer(feed.messages()), Viewer(feed.messages())
        await slow.look()
        await quick.look()
        for second in range(5):
            life = grown(life)
            engine.see([life], now_s=1001.0 + second)
            await quick.look()
            assert quick.last["type"] == "update"
        await slow.look()
        assert slow.last["type"] == "snapshot"
        assert slow.sees([life])
        assert quick.sees([life])
        await slow.messages.aclose()
        await quick.messages.aclose()

    play(story)


def test_all_viewers_share_one_look_and_nobody_looks_when_they_have_gone() -> None:
    async def story(engine: Engine, feed: LiveFeed) -> None:
        viewers = [feed.messages() for _ in range(10)]
        waits = [asyncio.ensure_future(told(viewer)) for viewer in viewers]
        engine.see([life_of("a", 1000.0)])
        assert len({json.dumps(found) for found in await asyncio.gather(*waits)}) == 1
        assert engine.num_looks <= 2
        for viewer in viewers:
            await viewer.aclose()
        num_looks = engine.num_looks
        engine.see([])
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.num_looks == num_looks

        engine.looks = asyncio.Queue()
        engine.see([life_of("b", 2000.0)], now_s=2000.0)
        again = Viewer(feed.messages())
        await again.look()
        assert list(again.requests) == ["b"]
        assert again.requests["b"]["spans"][0][1] == 0.0, "times are told anew"
        await again.messages.aclose()

    play(story)


def test_trouble_is_told_once_and_its_end_too() -> None:
    async def story(engine: Engine, feed: LiveFeed) -> None:
        for _ in range(3):
            engine.looks.put_nowait(EngineUnavailable("the engine is gone"))
        engine.looks.put_nowait(ValueError("a bug"))
        viewer = Viewer(feed.messages())
        await viewer.look()
        assert viewer.last == {"type": "alive", "trouble": "the engine is gone"}
        await viewer.look()
        assert "log" in viewer.last["trouble"]
        engine.see([life_of("a", 1000.0)])
        await viewer.look()
        assert viewer.last["trouble"] is None
        assert viewer.sees([life_of("a", 1000.0)])
        await viewer.messages.aclose()

    play(story)


def test_what_is_hidden_is_counted() -> None:
    async def story(engine: Engine, feed: LiveFeed) -> None:
        engine.see([waiting("a", 1000.0)], more=899, num_waiting=900)
        messages = feed.messages()
        message = await told(messages)
        assert (message["num_live"], len(message["requests"])) == (900, 1)
        assert message["counters"]["waiting"] == 900
        await messages.aclose()

    play(story)


def test_only_so_many_viewers_are_let_in() -> None:
    async def story(engine: Engine, feed: LiveFeed) -> None:
        engine.see([])
        viewers = [feed.messages() for _ in range(MAX_VIEWERS)]
        feed.check_room()
        for viewer in viewers:
            await told(viewer)
        with pytest.raises(Overloaded):
            feed.check_room()
        await viewers.pop().aclose()
        feed.check_room()
        for viewer in viewers:
            await viewer.aclose()

    play(story)
