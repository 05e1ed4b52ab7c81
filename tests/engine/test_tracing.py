"""Traces of a real engine: what was submitted is in the file, below its caller, with its life."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster import Client, EngineUnavailable, InvalidRequest, SamplingParams
from tests.engine.conftest import DEADLINE_S, ENGINE, LASTING
from tests.unit.test_otel import CALLER

SHORT = SamplingParams(max_tokens=3, prompt_logprobs=1, temperature=0.0, ignore_eos=True)


def slices(path: Path) -> Counter[str]:
    """How often each slice is in a trace, or moment: what took no time is one."""
    return Counter(event["name"] for event in json.loads(path.read_text()) if event["ph"] in "Xi")


def test_a_trace_has_ones_own_requests_and_what_they_did(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with client.trace(path) as written:
        outputs = client.generate([[40, 41, 42]] * 3, SHORT, cache_salt="traced")
        cancelled = client.submit([7] * 9, LASTING, request_id="cancelled")
        cancelled.cancel()
        cancelled.result(timeout=DEADLINE_S)
    client.submit([40], SHORT, request_id="later").result(timeout=DEADLINE_S)
    found = slices(path)
    assert written.num_requests == 4
    for output in outputs:
        assert found[output.request_id] >= 2, "in its own row and on a worker"
    assert found["cancelled"] >= 1
    assert found["queued"] >= 4
    assert found["prefill"] >= 2 * len(outputs)
    assert found["decode"] >= 2
    assert not found["later"]


def test_a_trace_of_everybody_has_other_clients_requests(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    client.submit([40], SHORT, request_id="before").result(timeout=DEADLINE_S)
    with Client(name="shared", start=False, namespace=ENGINE["namespace"]) as other:
        with client.trace(path, everybody=True):
            other.submit([40, 41], SHORT, request_id="others").result(timeout=DEADLINE_S)
        found = slices(path)
    assert found["others"] == 2
    assert not found["before"]


def test_a_trace_that_can_not_be_written_is_refused(client: Client, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be written"), client.trace(tmp_path):
        raise EngineUnavailable("not reached")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What this process exports."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def test_the_callers_trace_context_goes_all_the_way_and_back(
    client: Client, spans: InMemorySpanExporter
) -> None:
    """Another client that only knows the id tells spans of the first one's caller."""
    handle = client.submit([40, 41], LASTING, request_id="far", traceparent=CALLER)
    with Client(name="shared", start=False, namespace=ENGINE["namespace"]) as other:
        followed = other.attach("far")
        assert followed.submission.traceparent == CALLER
        handle.cancel()
        followed.result(timeout=DEADLINE_S)
        handle.result(timeout=DEADLINE_S)
    client._watchers.settle()
    whole = [span for span in spans.get_finished_spans() if span.name == "haversack.request"]
    assert len(whole) == 2
    for span in whole:
        assert f"{span.context.trace_id:032x}" == CALLER[3:35]
        assert (span.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)


def test_what_is_scored_inside_a_span_belongs_to_it(
    client: Client, spans: InMemorySpanExporter
) -> None:
    with trace.get_tracer("a program").start_as_current_span("evaluation") as mine:
        client.score("Hi", " there")
        list(client.score_many([("Hi", " you"), ("Hi", " all")]))
    client._watchers.settle()
    found = [span for span in spans.get_finished_spans() if span.name == "haversack.request"]
    parents = [span.parent for span in found if span.parent is not None]
    caller = mine.get_span_context()
    assert [(p.trace_id, p.span_id) for p in parents] == [(caller.trace_id, caller.span_id)] * 3


def test_a_trace_context_that_is_none_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.submit([40], SHORT, traceparent="my-trace")
    assert caught.value.details["param"] == "traceparent"
