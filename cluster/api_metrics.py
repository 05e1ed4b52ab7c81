"""What Prometheus is told at the endpoint: the engine's series, and those of the endpoint itself.

Both stand in `cluster.series_table`. The module asks nobody: it is given the engine's counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cluster.metrics import BUCKETS
from cluster.series import ENGINE_LABEL, Kind, Series
from cluster.series_table import (
    ENGINE_SERIES,
    HTTP_IN_PROGRESS,
    HTTP_REQUEST_SECONDS,
    HTTP_REQUESTS,
)
from scheduler import timings
from scheduler.outbox import EngineStats

_FAMILIES: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ApiMetrics:
    """The counters of one endpoint, and of the engine behind it."""

    def __init__(self, engine_name: str, stats: Callable[[], EngineStats | None]) -> None:
        """Begin at zero.

        Args:
            engine_name: of the engine that is served.
            stats: its counters; None where they are not known now.
        """
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine_name, stats))
        requests, seconds, in_progress = HTTP_REQUESTS, HTTP_REQUEST_SECONDS, HTTP_IN_PROGRESS
        self._requests = Counter(
            requests.name, requests.help, requests.labels, registry=self._registry
        )
        self._seconds = Histogram(
            *(seconds.name, seconds.help, seconds.labels),
            registry=self._registry,
            buckets=timings.BOUNDS_S,
        )
        self.in_progress = Gauge(in_progress.name, in_progress.help, registry=self._registry)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine_name: str, stats: Callable[[], EngineStats | None]) -> None:
        self._engine_name = engine_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for series in ENGINE_SERIES:
            yield self._family(series, stats)

    def _family(self, series: Series, stats: EngineStats) -> Any:
        family = _FAMILIES[series.kind](
            series.name, series.help, labels=(ENGINE_LABEL, *series.labels)
        )
        for labels, value in series.read(stats) if series.read is not None else ():
            values = (self._engine_name, *labels)
            if isinstance(value, timings.Histogram):
                buckets = list(zip(BUCKETS, accumulate(value.counts), strict=True))
                family.add_metric(values, buckets, value.total_s)
            else:
                family.add_metric(values, value)
        return family
