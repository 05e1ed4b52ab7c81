"""Requests as OpenTelemetry's spans, below whatever the caller was doing when it sent them.

Rules:
- A request carries its caller's trace context as W3C's `traceparent`, in its submission, through
  the scheduler and the journal: whoever has a handle of it, in whichever process, can tell its
  spans.
- Spans are told where this process has a tracer provider, its own one or that of
  `start_exporting`; else nothing is done. OpenTelemetry is imported only where it is in use.
- A request is one span, from its submission to its end, with a span in it for each part of its
  life (`scheduler.life`) and an event for each moment.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from cluster.handle import RequestHandle
from scheduler.errors import HaversackError, MissingPackage
from scheduler.life import Span
from scheduler.outputs import RequestOutput

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_NS = 1_000_000_000

_incoming: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""What came with the HTTP request that is being answered."""


def is_traceparent(value: object) -> bool:
    """Whether that is a trace context as W3C writes it, with a version, two ids and flags."""
    return isinstance(value, str) and _TRACEPARENT.fullmatch(value) is not None


@contextmanager
def coming_from(traceparent: str | None) -> Iterator[None]:
    """Have what is submitted inside belong to a caller elsewhere; what is malformed is ignored."""
    token = _incoming.set(traceparent if is_traceparent(traceparent) else None)
    try:
        yield
    finally:
        _incoming.reset(token)


def current_traceparent() -> str | None:
    """Return the trace context of what this thread or task is doing; None where there is none.

    That is OpenTelemetry's current span, or else what `coming_from` was given.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return _incoming.get()


def tell(handle: RequestHandle) -> None:
    """Tell the spans of a request that is over, where this process has a tracer provider."""
    if not _has_provider():
        return
    outcome: RequestOutput | HaversackError
    try:
        outcome = handle.result(0)
    except HaversackError as error:
        outcome = error
    for index, life in enumerate(handle.lives()):
        if life:
            _tell_life(handle, index, life, outcome)


def start_exporting() -> None:
    """Export spans over OTLP where OTEL_EXPORTER_OTLP_ENDPOINT, or its _TRACES_ form, says to.

    A tracer provider that this process has already is left as it is.

    Raises:
        MissingPackage: the exporter is not installed.
    """
    if not any(os.environ.get(name) for name in _ENDPOINTS) or _has_provider():
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingPackage(
            f"{' or '.join(_ENDPOINTS)} is set, but {error.name} is not installed: "
            "pip install 'haversack[tracing]', or clear the variable"
        ) from None
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over what is given here.
    given = os.environ.get("OTEL_SERVICE_NAME")
    provider = TracerProvider(resource=Resource.create({"service.name": given or "haversack"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def flush() -> None:
    """Have what has been told sent, where this process has a tracer provider that can."""
    if _has_provider():
        send_all = getattr(_trace().get_tracer_provider(), "force_flush", None)
        if send_all is not None:
            send_all()


def environment() -> dict[str, str]:
    """Return the variables that a process needs to export as this one does."""
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}


def _trace() -> Any:
    return sys.modules["opentelemetry.trace"]


def _has_provider() -> bool:
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return False
    provider = trace.get_tracer_provider()
    return not isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


def _parent(traceparent: str | None) -> Any:
    """Return the context that a request's span belongs to; an empty one begins a trace."""
    trace = _trace()
    if not is_traceparent(traceparent):
        return trace.set_span_in_context(trace.INVALID_SPAN)
    _, trace_id, span_id, flags = str(traceparent).split("-")
    caller = trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16))
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(caller))


def _tell_life(
    handle: RequestHandle, index: int, life: list[Span], outcome: RequestOutput | HaversackError
) -> None:
    trace = _trace()
    tracer = trace.get_tracer("haversack")
    parent = _parent(handle.submission.traceparent)
    end_s = max(span.end_s or span.start_s for span in life)
    whole = tracer.start_span(
        "haversack.request", parent, start_time=_ns(life[0].start_s), attributes={"index": index}
    )
    if whole.is_recording():
        whole.set_attributes(_attributes(handle, index, outcome))
        inside = trace.set_span_in_context(whole)
        for part in life:
            if part.end_s is None or part.end_s > part.start_s:
                child = tracer.start_span(
                    part.kind.value,
                    inside,
                    start_time=_ns(part.start_s),
                    attributes=_facts(part),
                )
                child.end(_ns(part.end_s if part.end_s is not None else end_s))
            else:
                whole.add_event(part.kind.value, _facts(part), _ns(part.start_s))
        if isinstance(outcome, HaversackError):
            whole.set_status(trace.StatusCode.ERROR, outcome.message)
    whole.end(_ns(end_s))


def _attributes(
    handle: RequestHandle, index: int, outcome: RequestOutput | HaversackError
) -> dict[str, Any]:
    """Return what is known of a completion, by the names of the conventions for generative AI."""
    found: dict[str, Any] = {
        "gen_ai.response.id": handle.request_id,
        "gen_ai.usage.input_tokens": len(handle.submission.prompt_token_ids),
    }
    if isinstance(outcome, HaversackError):
        return found | {"error.type": type(outcome).__name__}
    completion = outcome.outputs[index]
    found["gen_ai.usage.output_tokens"] = len(completion.token_ids)
    if completion.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = [completion.finish_reason]
    return found


def _facts(span: Span) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "haversack.worker": span.worker_id,
        "haversack.first_token": span.first,
        "haversack.end_token": span.end,
        "haversack.num_steps": span.num_steps,
        "haversack.why": span.why,
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _ns(seconds: float) -> int:
    return int(seconds * _NS)
