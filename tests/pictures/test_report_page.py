"""A report in a browser: it draws, answers to mouse and keyboard, and fits on a telephone."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.batch_output import Finished
from cluster.batch_rows import Row, RowResult, WholePrompt
from cluster.batches import BatchProgress
from cluster.block_use import BlockUse
from cluster.report import Report
from cluster.scoring import Score, ScoringParams, score_of
from scheduler.errors import RequestTooLarge
from scheduler.life import Span, SpanKind
from scheduler.logprobs import Logprobs
from tests.browser import Browser, Page
from tests.lives import NASTY, report_of
from tests.strategies import logprobs

pytestmark = pytest.mark.slow

NUM_ROWS = 45
CHUNK = 8
START_S = time.time()
WORDS = ["Once", " upon", " a", " time", NASTY, "\n", " ", ""]


def decode(token_id: int) -> str:
    return WORDS[token_id % len(WORDS)]


def rows_of(num_tokens: int) -> Logprobs:
    """Rows that get less likely from token to token, with ranks that differ."""
    rows = logprobs(num_tokens, 3)
    for i in range(num_tokens):
        rows.token_ids[i] = [i, 1, 2, 3]
        rows.logprobs[i] = [-0.05 - 0.4 * i, -0.1, -1.5, -2.5]
        rows.ranks[i] = [1 + i % 7, 1, 2, 3]
    return rows


def life(start_s: float, num_tokens: int) -> list[Span]:
    spans = [Span(kind=SpanKind.QUEUED, start_s=start_s, end_s=start_s + 0.5, why="submitted")]
    for first in range(0, num_tokens, CHUNK):
        worker = f"w{first // CHUNK % 2}"
        began_s = start_s + 0.5 + first / 100
        spans.append(
            Span(
                kind=SpanKind.PREFILL,
                start_s=began_s,
                end_s=began_s + 0.08,
                worker_id=worker,
                first=first,
                end=min(first + CHUNK, num_tokens),
                num_steps=1,
            )
        )
    spans.append(Span(kind=SpanKind.FINISHED, start_s=start_s + 2, end_s=start_s + 2, why="length"))
    return spans


def result_of(index: int) -> RowResult:
    row = Row(index, WholePrompt("x"), NASTY if index == 0 else None)
    if index == 3:
        return RowResult(row, RequestTooLarge(f"too large {NASTY}"), [], 0)
    num_scored = 2500 if index == NUM_ROWS - 1 else 24 + index
    score: Score = score_of(
        rows_of(num_scored),
        ScoringParams(logprobs=3),
        decode,
        num_context_tokens=1,
        lives=(life(START_S + index, num_scored + 1),),
    )
    return RowResult(row, score, [0], num_scored + 1, (score,))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    use = BlockUse(list)
    use.stop()
    for second in range(30):
        use.add([report_of("w0", second % 16), report_of("w1", 5)], START_S + second)
    report = Report(
        path,
        source=f"rows {NASTY}.jsonl",
        output="scores.jsonl",
        model="tiny",
        decode=decode,
        num_logprobs=3,
        use=use,
    )
    finished = Finished()
    for index in range(NUM_ROWS):
        result = result_of(index)
        report.wrote(result)
        record: dict[str, Any] = {"index": index, "logprob": -10.0, "num_tokens": 24}
        finished.add({"index": index, "error": {}} if index == 3 else record)
    report.finish(BatchProgress(finished, NUM_ROWS, 0, 2000, 4.0))
    return path.as_uri()


def tip(page: Page) -> str:
    return page.text("#tip") if page.js("!!document.querySelector('#tip:not([hidden])')") else ""


def test_tokens_are_shaded_and_tell_rank_and_alternatives(browser: Browser, url: str) -> None:
    with browser.page(url) as page:
        assert page.js("window.boom") is None
        title = page.js("document.querySelector('h1').textContent")
        assert title == f"Scores of rows {NASTY}.jsonl"
        shades = page.js(
            "[...document.querySelectorAll('.row:first-child .t')].map((t) => t.className)"
        )
        assert shades[0].startswith("t none"), "the first token has no logprob"
        assert shades[1] == "t p0"
        assert "p7" in shades[-1]
        assert "not-first" in shades[2]
        assert [i for i, name in enumerate(shades) if "chunk" in name] == [0, 8, 16, 24]

        page.hover(".row:first-child .t:nth-child(3)")
        told = tip(page)
        assert "rank 2" in told
        assert "\u22120.4500" in told
        assert "Likeliest here" in told
        assert "chunk of tokens 0 to 7 on w0" in told
        page.hover("h1")
        assert tip(page) == ""


def test_tokens_are_reached_with_the_keyboard(browser: Browser, url: str) -> None:
    with browser.page(url) as page:
        page.js("document.querySelector('.row:first-child .t').focus()")
        assert "no logprob" in tip(page)
        page.press("ArrowRight")
        assert "rank 1" in tip(page)
        described = page.js("document.activeElement.getAttribute('aria-describedby')")
        assert described == "tip"
        page.press("End")
        assert page.js("document.activeElement.nextSibling") is None
        page.press("Escape")
        assert tip(page) == ""
        stops = page.js(
            "document.querySelectorAll('.row:first-child .tokens [tabindex=\"0\"]').length"
        )
        assert stops == 1, "one stop of the tab key for each row"


def test_text_from_outside_is_shown_as_it_is(browser: Browser, url: str) -> None:
    with browser.page(url) as page:
        texts = page.js(
            "[...document.querySelectorAll('.row:first-child .t')].map((t) => t.textContent)"
        )
        assert texts[5] == NASTY
        assert texts[6] == "\u21b5\n"
        assert texts[8] == "\u27e87\u27e9", "an empty text is shown by its id"
        assert page.js("document.querySelectorAll('main img, main script').length") == 0
        assert NASTY in page.js("document.querySelector('.bad').textContent")


def test_rows_come_in_pages_in_the_order_that_is_asked_for(browser: Browser, url: str) -> None:
    with browser.page(url) as page:
        assert page.text("#place") == "1 to 20 of 45"
        assert "All 45 rows" in page.text("#hidden-rows")
        assert page.js("document.querySelectorAll('.row').length") == 20
        page.click("#after")
        page.click("#after")
        assert page.text("#place") == "41 to 45 of 45"
        assert page.js("document.querySelector('#after').disabled")
        page.js(
            "(() => { const order = document.querySelector('#order'); order.value = 'tokens'; "
            "order.dispatchEvent(new Event('change')); })()"
        )
        assert page.text(".row:first-child h3") == "row 44"
        tokens = "document.querySelectorAll('.row:first-child .t').length"
        assert page.js(tokens) == 2000, "a long row is drawn as a whole when that is asked for"
        page.click(".row:first-child > button")
        assert page.js(tokens) == 2501
        page.js(
            "(() => { const find = document.querySelector('#find'); find.value = '7'; "
            "find.dispatchEvent(new Event('input')); })()"
        )
        assert page.text("#place") == "1 to 1 of 1"


def test_lives_are_bars_that_tell_what_happened_where(browser: Browser, url: str) -> None:
    with browser.page(url) as page:
        bars = page.js(
            "[...document.querySelectorAll('.life .track')][0].querySelectorAll('[role=option]')"
            ".length"
        )
        assert bars == 6, "queued, four chunks, the end"
        page.hover(".life:nth-child(2) .span.prefill")
        assert "tokens 0 to 7" in tip(page)
        boxes = page.js(
            "[...document.querySelectorAll('.life:nth-child(2) .span.prefill')]"
            ".map((bar) => { const r = bar.getBoundingClientRect(); return [r.left, r.width]; })"
        )
        assert all(left[0] < right[0] for left, right in itertools.pairwise(boxes))
        page.js("document.querySelector('.life:nth-child(2) > button').focus()")
        page.press("Enter")
        page.wait_for("document.querySelector('dialog[open]') !== null")
        assert "submitted" in page.text("dialog")
        page.press("Escape")
        page.wait_for("document.querySelector('dialog') === null")


def test_workers_are_shown_with_their_blocks(browser: Browser, url: str) -> None:
    with browser.page(url) as page:
        assert "13 of 16 blocks in use" in page.text(".worker:first-child")
        assert page.js("document.querySelector('.worker [role=meter]').ariaValueNow") == "13"
        assert page.js("document.querySelector('.worker path').getBBox().width") > 90


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1000])
def test_it_can_be_read_on_narrow_and_wide_screens_by_day_and_by_night(
    browser: Browser, url: str, width: int, dark: bool, tmp_path: Path
) -> None:
    with browser.page(url, width=width, dark=dark) as page:
        assert not page.scrolls_sideways()
        page.hover(".row:first-child .t:nth-child(6)")
        assert not page.scrolls_sideways()
        assert page.poor_contrasts() == []
