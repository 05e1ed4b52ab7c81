"""What pages are made of: nothing that comes from outside can become more than text."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser

import pytest

from cluster.pictures import data_block, live_page, report_page, request_view, safe_json, span_views
from scheduler.errors import WireError
from scheduler.life import Span, SpanKind
from scheduler.messages import RequestLife
from tests.lives import NASTY, life_of


class Elements(HTMLParser):
    """The elements of a page as a browser finds them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        """Name, attributes and the text in front of the next element or the end of this one."""
        self._is_open = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))
        self._is_open = True

    def handle_endtag(self, tag: str) -> None:
        self._is_open = False

    def handle_data(self, data: str) -> None:
        if self._is_open:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)

    def named(self, name: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for tag, attributes, text in self.found if tag == name]


def test_data_comes_back_as_it_was_and_can_not_end_its_element() -> None:
    data = {"text": NASTY, NASTY: [NASTY, -0.5, None]}
    written = safe_json(data)
    assert json.loads(written) == data
    assert not set("<>&\u2028\u2029") & set(written)

    [(attributes, text)] = Elements(data_block(data, id="sum", data_head=NASTY)).named("script")
    assert attributes == {"type": "application/json", "id": "sum", "data-head": NASTY}
    assert json.loads(text) == data


def test_numbers_that_json_does_not_know_are_null() -> None:
    assert json.loads(safe_json([float("inf"), float("-inf"), float("nan")])) == [None] * 3


@pytest.mark.parametrize(
    "page", [live_page().html, "".join(report_page(NASTY))], ids=["live", "report"]
)
def test_a_page_fetches_nothing_and_holds_one_script(page: str) -> None:
    elements = Elements(page)
    assert len(elements.named("script")) == 1
    assert len(elements.named("style")) == 1
    assert not elements.named("img")
    links = [attributes["href"] for attributes, _ in elements.named("link")]
    assert links == ["data:,"]
    for _, attributes, _ in elements.found:
        assert "src" not in attributes
        assert "style" not in attributes, "the policy refuses it"
        assert not [name for name in attributes if name.startswith("on")]


def test_a_title_is_text() -> None:
    elements = Elements("".join(report_page(NASTY)))
    assert [text for _, text in elements.named("title")] == [NASTY]
    assert [text for _, text in elements.named("h1")] == [NASTY]


def test_the_policy_lets_run_what_the_page_holds_and_nothing_else() -> None:
    page = live_page()
    elements = Elements(page.html)
    for name in ("script", "style"):
        [(_, text)] = elements.named(name)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in page.policy
    assert "default-src 'none'" in page.policy
    assert "unsafe" not in page.policy
    metas = Elements("".join(report_page("x"))).named("meta")
    [policy] = [m["content"] for m, _ in metas if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy


def test_spans_are_told_after_a_base() -> None:
    spans = [
        Span(kind=SpanKind.QUEUED, start_s=1000.0, end_s=1000.25, why="submitted"),
        Span(kind=SpanKind.LOADING, start_s=1000.25, worker_id="w0", end=16),
    ]
    assert span_views(spans, 1000.0) == [
        ("queued", 0.0, 0.25, None, 0, 0, 0, "submitted"),
        ("loading", 0.25, None, "w0", 0, 16, 0, ""),
    ]


def test_a_request_tells_how_it_ended() -> None:
    ended = life_of("a", 1000.0, is_over=True)
    view = request_view(ended, 1000.0)
    assert (view["reason"], view["error"], view["spans"][-1][0]) == ("length", None, "finished")
    failed = RequestLife(ended.info, ended.spans, ended.finish_reason, WireError("X", NASTY))
    assert request_view(failed, 1000.0)["error"] == NASTY
    assert request_view(life_of("a", 1000.0), 1000.0)["reason"] is None
