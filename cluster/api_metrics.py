"""What Prometheus is told: the engine's counters, and those of the endpoint itself.

Every counter and gauge of `SchedulerStats` is there as `haversack_<name>`, without the `num_` in
front of its name. The module asks nobody: it is given the counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.messages import SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGES = frozenset(
    {
        "num_waiting",
        "num_queued_tokens",
        "num_running",
        "num_workers",
        "num_blocks",
        "num_used_blocks",
        "num_row_cache_blocks",
        "num_row_cache_bytes",
    }
)
"""Of the engine's numbers, those that can fall."""
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ApiMetrics:
    """The counters of one endpoint."""

    def __init__(self, stats: Callable[[], SchedulerStats | None]) -> None:
        """Begin at zero.

        Args:
            stats: the engine's counters; None where they are not known now.
        """
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self._requests = Counter(
            "haversack_http_requests",
            "HTTP requests that were answered, by route and status",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "haversack_http_request_seconds",
            "Seconds from a request to the end of its answer",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.in_progress = Gauge(
            "haversack_http_requests_in_progress",
            "HTTP requests that are being answered",
            registry=self._registry,
        )

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], SchedulerStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for name, value in msgspec.structs.asdict(stats).items():
            short = "haversack_" + name.removeprefix("num_")
            about = f"The engine's {name.removeprefix('num_').replace('_', ' ')}"
            if isinstance(value, dict):
                family = CounterMetricFamily(short, about, labels=["reason"])
                for reason, count in value.items():
                    family.add_metric([reason], count)
                yield family
            elif name in GAUGES:
                yield GaugeMetricFamily(short, about, value=value)
            else:
                yield CounterMetricFamily(short, about, value=value)
