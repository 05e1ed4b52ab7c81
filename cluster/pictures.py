"""What pages of pictures are made of: their files, put together, and data that can't break out.

Rules:
- A page is one file: it fetches no font, script or image, and its content security policy lets
  nothing run but the script that was put in here.
- Data stands in a page as JSON in which no character can end the element around it; the page's
  script makes text of it, never markup.
The module knows spans and requests, and nothing of files that are scored or of HTTP.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from scheduler.life import Span
from scheduler.messages import RequestLife, WorkerReport

SpanView = tuple[str, float, float | None, str | None, int, int, int, str]
"""Kind, start and end in seconds after some base, worker, first and end position, steps, why."""


class Page(NamedTuple):
    """A page, whole or up to the place of its data."""

    html: str
    policy: str
    """Its content security policy."""


@cache
def live_page() -> Page:
    """Return the page that follows a running engine; it holds no data."""
    return _page("live", {}, "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; ")


def report_page(title: str) -> tuple[str, str]:
    """Return what comes before and after the data of a report.

    Args:
        title: any text.
    """
    before, _, after = _page("report", {"title": title}, "").html.partition("{data}")
    return before, after


def _page(name: str, texts: dict[str, str], more_policy: str) -> Page:
    script = f"{_file('pictures.js')}\n{_file(f'{name}.js')}"
    style = _file("pictures.css")
    policy = (
        "default-src 'none'; base-uri 'none'; img-src data:; "
        f"{more_policy}script-src {_digest(script)}; style-src {_digest(style)}"
    )
    values = {"style": style, "script": script, "csp": html.escape(policy)}
    values |= {key: html.escape(text) for key, text in texts.items()}
    # In one pass, so that a value that looks like a place for another one stays what it is.
    filled = re.sub(
        r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), _file(f"{name}.html")
    )
    return Page(filled, policy)


@cache
def _file(name: str) -> str:
    return resources.files("cluster").joinpath("pages").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def data_block(data: Any, **attributes: str) -> str:
    """Return an element that holds data for the page's script.

    Args:
        data: anything that JSON knows; numbers that it does not know are null.
        attributes: of the element; "class_" is its class.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for name, value in attributes.items()
    )
    return f'<script type="application/json"{written}>{safe_json(data)}</script>\n'


def safe_json(data: Any) -> str:
    """Return JSON in which no character means anything to HTML or ends a line of a script."""
    text = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def span_views(spans: Sequence[Span], base_s: float) -> list[SpanView]:
    """Return spans as pages draw them, their times in seconds after `base_s`."""
    return [
        (
            span.kind.value,
            round(span.start_s - base_s, 4),
            None if span.end_s is None else round(span.end_s - base_s, 4),
            span.worker_id,
            span.first,
            span.end,
            span.num_steps,
            span.why,
        )
        for span in spans
    ]


def request_view(life: RequestLife, base_s: float) -> dict[str, Any]:
    """Return what the live page shows of a request."""
    info = life.info
    return {
        "id": info.request_id,
        "client": info.client_id,
        "state": info.status.value,
        "worker": info.worker_id,
        "priority": info.priority,
        "arrival": info.arrival,
        "prompt": info.num_prompt_tokens,
        "computed": info.num_computed_tokens,
        "output": info.num_output_tokens,
        "blocks": info.num_blocks,
        "evictions": info.num_evictions,
        "moves": info.num_migrations,
        "losses": info.num_workers_lost,
        "reason": life.finish_reason.value if life.finish_reason is not None else None,
        "error": life.error.message if life.error is not None else None,
        "spans": span_views(life.spans, base_s),
    }


def worker_view(report: WorkerReport) -> dict[str, Any]:
    """Return what pages show of a worker, beside its past."""
    return {
        "id": report.worker_id,
        "device": report.devices,
        "node": f"node {report.node_id[:8]}" if report.node_id else "",
        "state": "draining" if report.is_draining else "",
        "running": report.num_running,
        "used": report.num_used_blocks,
        "blocks": report.num_blocks,
    }


def finite(value: float | None) -> float | None:
    """Return a number that JSON knows; None for one that it does not."""
    return value if value is not None and math.isfinite(value) else None
