"""The live page of a real endpoint: it opens without a key, what it shows needs one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cluster import Client
from tests.browser import Browser
from tests.engine.conftest import DEADLINE_S, LASTING
from tests.pictures.conftest import browser

__all__ = ["browser"]


def test_the_page_is_there_without_a_key_and_the_events_are_not(guarded_url: str) -> None:
    with httpx.Client(follow_redirects=True, timeout=DEADLINE_S) as http:
        for url in (guarded_url, f"{guarded_url}/"):
            page = http.get(url)
            assert page.status_code == 200
            assert page.headers["content-type"].startswith("text/html")
            assert "script-src 'sha256-" in page.headers["content-security-policy"]
            assert page.headers["x-content-type-options"] == "nosniff"
        refused = http.get(f"{guarded_url}/events")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"


def test_events_tell_a_request_from_the_queue_to_its_end(
    http: httpx.Client, engine: Client
) -> None:
    seen: dict[str, dict[str, Any]] = {}

    def follow(lines: Iterator[str], until: Callable[[], bool]) -> None:
        for line in lines:
            if not line:
                continue
            message = json.loads(line.removeprefix("data: "))
            for change in message.get("requests", []):
                known = seen.setdefault(change["id"], {"spans": []})
                spans = known["spans"][: change["keep"]] + change["spans"]
                known.update(change, spans=spans)
            if until():
                return

    with http.stream("GET", "/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        handle = engine.submit([5] * 150, LASTING, request_id="watched")

        def has_decoded() -> bool:
            return seen.get("watched", {}).get("output", 0) > 0

        follow(lines, has_decoded)
        kinds = [span[0] for span in seen["watched"]["spans"]]
        assert kinds[0] == "queued"
        assert kinds.count("prefill") == 3, "150 tokens in steps of 64"
        assert kinds[-1] == "decode"
        handle.cancel()
        follow(lines, lambda: seen["watched"].get("reason") is not None)
    assert seen["watched"]["reason"] == "abort"
    assert seen["watched"]["spans"][-1][0] == "finished"
    assert handle.result(DEADLINE_S).outputs[0].life is not None


def test_the_api_page_does_not_list_them(http: httpx.Client) -> None:
    """What reads it calls each of its routes, and events do not end."""
    paths = http.get("/openapi.json").json()["paths"]
    assert "/events" not in paths
    assert "/" not in paths


@pytest.mark.slow
def test_the_page_scores_a_text_and_shows_where_its_chunks_began(
    browser: Browser, main_url: str, engine: Client
) -> None:
    with browser.page(f"{main_url}/") as page:
        page.js("document.querySelector('#text').value = 'a word ' + 'x'.repeat(120)")
        page.click("#score")
        page.wait_for("document.querySelectorAll('#scored .t').length === 127")
        page.wait_for("document.querySelectorAll('#scored .chunk').length > 0")
        chunks = page.js(
            "[...document.querySelectorAll('#scored .t')]"
            ".flatMap((t, i) => t.matches('.chunk') ? [i] : [])"
        )
        assert chunks == [63], "token 63 of the text is at position 64, after the first one's"
        page.hover("#scored .t:nth-child(70)")
        told = page.text("#tip")
        assert "chunk of tokens 64 to 127 on worker-" in told
        assert "Likeliest here" in told
