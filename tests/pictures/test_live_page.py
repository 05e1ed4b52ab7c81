"""The live page in a browser, in front of an endpoint whose engine is made up."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from cluster.api import create_app
from cluster.api_settings import ApiSettings, key_digests
from cluster.config import EngineConfig
from cluster.live_feed import MAX_ENDED, MAX_LIVE, LiveFeed, Look
from scheduler.errors import EngineUnavailable
from scheduler.life import Span, SpanKind
from scheduler.messages import RequestLife
from tests.browser import Browser, Page
from tests.lives import NASTY, life_of, lives, report_of, stats, waiting

pytestmark = pytest.mark.slow

START_S = 1_700_000_000.0
QUICK_S = 0.05
DEADLINE_S = 30.0


class Engine:
    """What the page's routes need of an engine; tests say what it looks like."""

    def __init__(self) -> None:
        self.live: list[RequestLife] = [life_of(NASTY, START_S), life_of("b", START_S + 1)]
        self.ended: list[RequestLife] = [life_of("c", START_S, is_over=True)]
        self.now_s = START_S + 5
        self.error: Exception | None = None
        self.num_looks = 0

    async def look(self) -> Look:
        self.num_looks += 1
        if self.error is not None:
            raise self.error
        found = lives(
            self.now_s, self.live[:MAX_LIVE], self.ended[-MAX_ENDED:], len(self.live[MAX_LIVE:])
        )
        counters = stats(num_running=2, num_waiting=7, num_computed_tokens=1000)
        return Look("tiny model", found, [report_of("w0"), report_of("w1", 16)], counters)


@contextmanager
def served(engine: Engine, *keys: str) -> Iterator[str]:
    """An endpoint in this process, without Serve and Ray."""
    settings = ApiSettings(EngineConfig(), ("tiny model",), key_digests(keys))
    app = create_app(settings)
    app.state.engine = engine
    app.state.feed = LiveFeed(engine.look, interval_s=QUICK_S)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    with served(engine) as address:
        yield address


@contextmanager
def opened(browser: Browser, url: str, **more: Any) -> Iterator[Page]:
    with browser.page(url, **more) as page:
        page.wait_for("document.querySelectorAll('.life button').length > 0")
        yield page


def names(page: Page, box: str) -> list[str]:
    code = f"[...document.querySelectorAll('#{box} .life .name')].map((n) => n.textContent)"
    found: list[str] = page.js(code)
    return found


def test_it_shows_requests_workers_and_queues(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        assert page.text("#connection") == "Live"
        assert page.text("h1") == "tiny model"
        assert names(page, "life-rows") == [NASTY, "b"]
        assert names(page, "ended-rows") == ["c"]
        assert "7\nwaiting" in page.text("#sums")
        assert "16 of 16 blocks in use (100 %)" in page.text("#worker-cards")
        assert page.text("#hidden-requests") == "2 live requests."
        page.hover("#life-rows .span.prefill")
        assert "tokens 0 to 63" in page.text("#tip")
        assert page.js("window.boom") is None


def test_it_follows_what_happens(browser: Browser, url: str, engine: Engine) -> None:
    with opened(browser, url) as page:
        moved = engine.live[1]
        spans = [
            *moved.spans,
            Span(kind=SpanKind.MOVED, start_s=START_S + 5, end_s=START_S + 5, worker_id="w1"),
            Span(kind=SpanKind.READY, start_s=START_S + 5, worker_id="w1", why="from w0: asked"),
        ]
        engine.live = [with_spans(moved, spans), waiting("d", START_S + 6)]
        page.wait_for("document.querySelector('#life-rows .span.moved') !== null")
        page.wait_for("document.querySelectorAll('#life-rows .life .name').length === 2")
        assert names(page, "life-rows") == ["b", "d"]
        engine.ended = []
        page.wait_for("document.querySelector('#ended-title').hidden")


def with_spans(life: RequestLife, spans: list[Span]) -> RequestLife:
    return RequestLife(life.info, spans, life.finish_reason, life.error)


def test_a_request_is_opened_with_the_keyboard_and_stays_up_to_date(
    browser: Browser, url: str, engine: Engine
) -> None:
    with opened(browser, url) as page:
        page.js("document.querySelector('#life-rows .life:nth-child(3) button').focus()")
        page.press("Enter")
        page.wait_for("document.querySelector('dialog[open]') !== null")
        assert "running" in page.text("dialog .facts")
        assert "nothing to load" in page.text("dialog table")
        engine.live, engine.ended = [engine.live[0]], [life_of("b", START_S, is_over=True)]
        page.wait_for("document.querySelector('dialog table').innerText.includes('finished')")
        page.press("Escape")
        page.wait_for("document.querySelector('dialog') === null")


def test_the_keyboard_stays_where_it_was_when_a_row_is_drawn_anew(
    browser: Browser, url: str, engine: Engine
) -> None:
    with opened(browser, url) as page:
        page.js("document.querySelector('#life-rows .life:nth-child(3) .span.prefill').focus()")
        engine.live[1] = life_of("b", START_S + 1, num_chunks=6)
        chunks = "'#life-rows .life:nth-child(3) .span.prefill'"
        page.wait_for(f"document.querySelectorAll({chunks}).length === 6")
        assert page.js("document.activeElement.className") == "span prefill"


def test_a_thousand_requests_are_capped_and_counted(
    browser: Browser, url: str, engine: Engine
) -> None:
    engine.live = [waiting(f"r{i}", START_S, arrival=i) for i in range(1000)]
    with opened(browser, url) as page:
        assert len(names(page, "life-rows")) == MAX_LIVE
        told = page.text("#hidden-requests")
        assert told == (
            "1,000 live requests; the first 100 in order of service are shown, 900 are hidden."
        )
        assert page.js("document.querySelectorAll('*').length") < 3000
        engine.live = engine.live[50:]
        page.wait_for("document.querySelector('#life-rows .name').textContent === 'r50'")
        assert "850 are hidden" in page.text("#hidden-requests")


def test_messages_about_a_thousand_requests_are_small(url: str, engine: Engine) -> None:
    engine.live = [waiting(f"r{i}", START_S, arrival=i) for i in range(1000)]
    with httpx.stream("GET", f"{url}/events", timeout=DEADLINE_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line)
        first = next(lines)
        assert first.startswith("data: ")
        assert len(json.loads(first[6:])["requests"]) == MAX_LIVE + 1
        assert len(first) < 64_000
        engine.live = [life_of("r0", START_S), *engine.live[1:]]
        change = next(line for line in lines if '"alive"' not in line)
        assert len(change) < 2000


def test_it_can_be_paused(browser: Browser, url: str, engine: Engine) -> None:
    with opened(browser, url) as page:
        page.click("#pause")
        assert page.js("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
        engine.live = [waiting("d", START_S)]
        looks = engine.num_looks + 4
        page.wait_for("true")
        while engine.num_looks < looks:
            page.js("0")
        assert names(page, "life-rows") == [NASTY, "b"]
        page.click("#pause")
        assert names(page, "life-rows") == ["d"]


def test_trouble_is_shown_and_goes_away(browser: Browser, url: str, engine: Engine) -> None:
    with opened(browser, url) as page:
        engine.error = EngineUnavailable("the engine is away")
        page.wait_for("document.querySelector('#connection').innerText === 'the engine is away'")
        assert page.js("document.querySelector('#connection').className") == "bad"
        engine.error = None
        page.wait_for("document.querySelector('#connection').innerText === 'Live'")


def test_an_endpoint_with_keys_tells_nothing_without_one(browser: Browser, engine: Engine) -> None:
    with served(engine, "sesame") as url:
        shell = httpx.get(url)
        assert shell.status_code == 200
        assert httpx.get(f"{url}/events").status_code == 401
        assert "default-src 'none'" in shell.headers["content-security-policy"]
        with browser.page(url) as page:
            page.wait_for("!document.querySelector('#key-form').hidden")
            assert names(page, "life-rows") == []
            for key in ("wrong", "sesame"):
                page.js(f"document.querySelector('#key').value = '{key}'")
                page.click("#key-form button")
                page.wait_for(
                    "document.querySelector('#key-form').hidden === false"
                    if key == "wrong"
                    else "document.querySelectorAll('.life .name').length > 0"
                )
            page.forget_errors()  # the browser itself complains about each 401


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1000])
def test_it_can_be_read_on_narrow_and_wide_screens_by_day_and_by_night(
    browser: Browser, url: str, width: int, dark: bool
) -> None:
    with opened(browser, url, width=width, dark=dark) as page:
        assert not page.scrolls_sideways()
        assert page.poor_contrasts() == []
        page.click("#life-rows .life:nth-child(2) button")
        page.wait_for("document.querySelector('dialog[open]') !== null")
        assert not page.scrolls_sideways()
        assert page.poor_contrasts() == []
