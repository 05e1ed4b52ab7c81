"""Requests as OpenTelemetry's spans: below their caller's, in every process that has a handle."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster import otel
from cluster.handle import RequestHandle
from cluster.watchers import Watchers
from scheduler.codec import int_array
from scheduler.errors import MissingPackage, RequestFailed
from scheduler.life import Span, SpanKind
from scheduler.messages import OutputDelta, Submission
from scheduler.request import FinishReason
from scheduler.sampling_params import SamplingParams
from scheduler.submissions import content_hash, make_requests, submission_of

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CALLER[:-2] + "00"
LIFE = [
    Span(kind=SpanKind.QUEUED, start_s=100.0, end_s=101.0),
    Span(kind=SpanKind.PREFILL, start_s=101.0, end_s=103.0, worker_id="w0", end=3, num_steps=1),
    Span(kind=SpanKind.RESUMED, start_s=103.0, end_s=103.0, worker_id="w1"),
    Span(kind=SpanKind.FINISHED, start_s=104.0, end_s=104.0, why="length"),
]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What a process with a tracer provider exports."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def ended_handle(traceparent: str | None, **delta: object) -> RequestHandle:
    params = SamplingParams(max_tokens=2)
    submission = Submission("r", int_array([1, 2, 3]), params, 0, traceparent=traceparent)
    handle = RequestHandle(submission, None, None, lambda ids: None)
    told = {"new_token_ids": int_array([5, 6]), "finish_reason": FinishReason.LENGTH, **delta}
    handle.feed(OutputDelta("r", life=LIFE, **told))  # type: ignore[arg-type]
    return handle


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_of_its_callers_trace_with_its_life_in_it(
    spans: InMemorySpanExporter,
) -> None:
    otel.tell(ended_handle(CALLER))
    found = by_name(spans)
    assert set(found) == {"haversack.request", "queued", "prefill"}
    whole, chunk = found["haversack.request"], found["prefill"]
    assert whole.parent is not None
    assert f"{whole.context.trace_id:032x}-{whole.parent.span_id:016x}" == CALLER[3:-3]
    assert (whole.start_time, whole.end_time) == (100_000_000_000, 104_000_000_000)
    assert whole.attributes is not None
    assert dict(whole.attributes) == {
        "index": 0,
        "gen_ai.response.id": "r",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert chunk.parent == whole.context
    assert (chunk.start_time, chunk.end_time) == (101_000_000_000, 103_000_000_000)
    assert (chunk.attributes or {})["haversack.worker"] == "w0"
    assert [(event.name, event.timestamp) for event in whole.events] == [
        ("resumed", 103_000_000_000),
        ("finished", 104_000_000_000),
    ]


def test_a_request_without_a_caller_begins_a_trace(spans: InMemorySpanExporter) -> None:
    otel.tell(ended_handle(None))
    assert by_name(spans)["haversack.request"].parent is None


def test_a_caller_that_is_not_sampled_is_told_nothing(spans: InMemorySpanExporter) -> None:
    otel.tell(ended_handle(UNSAMPLED))
    assert not by_name(spans)


def test_a_request_that_failed_is_a_span_with_the_error(spans: InMemorySpanExporter) -> None:
    error = RequestFailed("it broke").to_wire()
    otel.tell(ended_handle(CALLER, finish_reason=FinishReason.ERROR, error=error))
    whole = by_name(spans)["haversack.request"]
    assert (whole.status.status_code, whole.status.description) == (
        trace.StatusCode.ERROR,
        "it broke",
    )
    assert (whole.attributes or {})["error.type"] == "RequestFailed"


def test_a_process_that_traces_nothing_does_nothing() -> None:
    """It neither looks at what is over nor imports OpenTelemetry."""
    code = (
        "import sys, cluster.client, cluster.otel as otel\n"
        "otel.start_exporting()\n"
        "otel.tell(None)\n"
        "otel.flush()\n"
        "print(otel.current_traceparent(), 'opentelemetry.trace' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "None False"


# ------------------------------------------------------------------------------ the context


@pytest.mark.parametrize(
    ("value", "is_good"),
    [
        (CALLER, True),
        (UNSAMPLED, True),
        (CALLER.upper(), False),
        ("ff" + CALLER[2:], False),
        (CALLER[:-1], False),
        (CALLER + "-x", False),
        ("00-" + "0" * 32 + CALLER[35:], False),
        (CALLER[:36] + "0" * 16 + "-01", False),
        (b"00", False),
        (None, False),
    ],
)
def test_a_trace_context_is_what_w3c_says(value: object, is_good: bool) -> None:
    assert otel.is_traceparent(value) == is_good


def test_what_is_submitted_inside_belongs_to_the_caller() -> None:
    assert otel.current_traceparent() is None
    with otel.coming_from(CALLER):
        assert otel.current_traceparent() == CALLER
        with otel.coming_from("nonsense"):
            assert otel.current_traceparent() is None
        assert otel.current_traceparent() == CALLER
    assert otel.current_traceparent() is None


def test_callers_of_different_tasks_are_not_mixed_up() -> None:
    async def ask(traceparent: str) -> str | None:
        with otel.coming_from(traceparent):
            await asyncio.sleep(0)
            return await asyncio.to_thread(otel.current_traceparent)

    async def both() -> list[str | None]:
        return await asyncio.gather(ask(CALLER), ask(UNSAMPLED))

    assert asyncio.run(both()) == [CALLER, UNSAMPLED]


def test_the_current_span_of_opentelemetry_comes_first(spans: InMemorySpanExporter) -> None:
    with otel.coming_from(UNSAMPLED), trace.get_tracer("t").start_as_current_span("mine") as mine:
        found = otel.current_traceparent()
    assert found is not None
    assert found.split("-")[1:3] == [
        f"{mine.get_span_context().trace_id:032x}",
        f"{mine.get_span_context().span_id:016x}",
    ]


def test_the_context_is_carried_but_is_no_part_of_what_is_asked() -> None:
    plain = Submission("r", int_array([1, 2]), SamplingParams(n=2), seed=3)
    traced = Submission("r", int_array([1, 2]), SamplingParams(n=2), seed=3, traceparent=CALLER)
    assert content_hash(plain) == content_hash(traced)
    assert [submission_of(each).traceparent for each in make_requests(traced)] == [CALLER] * 2


# ---------------------------------------------------------------------------------- watchers


def test_what_is_over_is_looked_at_on_another_thread_and_before_the_look_is_taken_off() -> None:
    watchers, seen = Watchers(), []

    def look(handle: RequestHandle) -> None:
        seen.append((handle.request_id, threading.current_thread().name))

    def break_down(handle: RequestHandle) -> None:
        raise RuntimeError("a look that fails harms nobody else")

    watchers.add(break_down)
    watchers.add(look)
    for _ in range(3):
        watchers.follow(ended_handle(None))
    watchers.remove(look)
    assert seen == [("r", "haversack-watchers")] * 3
    watchers.follow(ended_handle(None))
    watchers.close()
    assert len(seen) == 3


# --------------------------------------------------------------------------------- exporting


def test_spans_are_exported_to_where_the_environment_says() -> None:
    """A collector that speaks OTLP over HTTP, and a process that knows nothing but a variable."""
    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "import cluster.otel as otel\n"
        "from tests.unit.test_otel import CALLER, ended_handle\n"
        "otel.start_exporting()\n"
        "otel.tell(ended_handle(CALLER))\n"
        "otel.flush()\n"
    )
    url = f"http://127.0.0.1:{server.server_port}"
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    subprocess.run([sys.executable, "-c", code], env=os.environ | env, check=True, timeout=60)
    server.shutdown()
    server.server_close()
    assert {path for path, _ in bodies} == {"/v1/traces"}
    whole = b"".join(body for _, body in bodies)
    for part in (b"haversack.request", b"prefill", bytes.fromhex(CALLER[3:35])):
        assert part in whole


def test_an_exporter_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingPackage, match=r"haversack\[tracing\]"):
        otel.start_exporting()
