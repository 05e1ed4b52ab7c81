"""A trace context comes with an HTTP request, and the endpoint exports spans below it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cluster import Client
from tests.engine.conftest import wait_for
from tests.http.conftest import deployed, settings_of

CALLER = "00-{}-b7ad6b7169203331-01"
BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 4},
    "/v1/chat/completions": lambda text: {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 2,
    },
    "/score": lambda text: {"context": text, "continuations": [" there", " you"]},
}


class Collector:
    """Takes spans over OTLP, which may bring one again where an answer was late."""

    def __init__(self) -> None:
        self._spans: dict[bytes, Span] = {}
        spans = self._spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        spans.update((span.span_id, span) for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[Span]:
        """All spans, in the order in which they came."""
        return list(self._spans.values())

    def root_of(self, span: Span) -> str:
        """The id above the uppermost span that is known: Serve may tell spans of its own."""
        parents = {each.span_id: each.parent_span_id for each in self.spans}
        above = span.span_id
        while above in parents:
            above = parents[above]
        return above.hex()

    def parts(self, span: Span) -> list[str]:
        """The names of the spans right below one."""
        return [each.name for each in self.spans if each.parent_span_id == span.span_id]

    def requests(self, trace_id: str) -> list[Span]:
        """The spans of requests that belong to a trace."""
        return [
            span
            for span in self.spans
            if span.name == "haversack.request" and span.trace_id.hex() == trace_id
        ]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(scope="module")
def traced_url(shared_engine: Client, main_url: str, collector: Collector) -> Iterator[str]:
    """An endpoint that was started where the environment names the collector."""
    with pytest.MonkeyPatch.context() as patch:
        address = f"http://127.0.0.1:{collector.server.server_port}"
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with deployed(settings_of(shared_engine), main_url, "/traced") as url:
            yield url


@pytest.mark.parametrize("path", BODIES)
def test_what_an_http_request_asks_for_is_told_below_its_caller(
    traced_url: str, engine: Client, collector: Collector, path: str
) -> None:
    trace_id = uuid.uuid4().hex
    headers = {"traceparent": CALLER.format(trace_id)}
    body = BODIES[path](trace_id)  # nobody has asked for this: where a cache has all, no part is
    answer = httpx.post(traced_url + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    count = len(body.get("continuations", "1"))
    wait_for(lambda: len(collector.requests(trace_id)) == count, "its spans are told")
    for span in collector.requests(trace_id):
        wait_for(lambda: collector.root_of(span) == "b7ad6b7169203331", "it is below its caller")  # noqa: B023
        wait_for(lambda: "prefill" in collector.parts(span), "its parts are told")  # noqa: B023


def test_a_trace_context_that_is_malformed_is_ignored(
    traced_url: str, engine: Client, collector: Collector
) -> None:
    before = len(collector.spans)
    body, headers = BODIES["/v1/completions"]("Hi"), {"traceparent": "nonsense"}
    assert httpx.post(f"{traced_url}/v1/completions", json=body, headers=headers).is_success

    def found() -> list[str]:
        spans = [span for span in collector.spans[before:] if span.name == "haversack.request"]
        return [collector.root_of(span) for span in spans]

    wait_for(lambda: found() == [""], "it begins a trace")
