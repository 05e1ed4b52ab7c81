"""Tells Ray's metrics, which Prometheus reads on every node, what an engine counts.

Rules:
- What is told stands in `cluster.series_table`, and goes by `ray.util.metrics`.
- A counter is told by what it has grown. One that is smaller than before belongs to something that
  was started again, and has grown by all of it. It is there from the start, as 0 (Ray has no way to
  say so but a number that no sum notices): what appears only with its first event hides that event.
- A histogram is told as its buckets, sum and count, each a gauge under the name that Prometheus
  gives it. Ray's own type takes observations one by one, has its agent repeat each of them, and
  makes the sum from the buckets' middles.
- Gauges are told again each time, since Ray forgets those that are not.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from ray.util.metrics import Counter, Gauge

from cluster.series import ENGINE_LABEL, Kind, Series
from cluster.series_table import ENGINE_SERIES
from scheduler.outbox import EngineStats
from scheduler.timings import BOUNDS_S, Histogram

_NOTHING = 5e-324
"""The smallest number above 0: Ray's counters take no 0, and added to another number it is gone."""
BUCKETS = (*map(str, BOUNDS_S), "+Inf")
"""Values of the label `le`."""


class RayPublisher:
    """Tells the counters of one engine to the Ray that this process belongs to."""

    def __init__(self, engine_name: str) -> None:
        """Register nothing yet; it travels to the scheduler before it is used."""
        self._engine_name = engine_name
        self._registered: dict[str, Any] = {}
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}
        """What each counter was when it was told."""

    def __call__(self, stats: EngineStats) -> None:
        """Tell everything, as it is now."""
        for series in ENGINE_SERIES:
            if series.read is None:
                continue
            for labels, value in series.read(stats):
                self._tell(series, labels, value)

    def _tell(self, series: Series, labels: tuple[str, ...], value: float | Histogram) -> None:
        tags = {ENGINE_LABEL: self._engine_name} | dict(zip(series.labels, labels, strict=True))
        if isinstance(value, Histogram):
            self._tell_histogram(series, tags, value)
        elif series.kind is Kind.COUNTER:
            key = (series.name, labels)
            before = self._told.get(key, 0.0)
            grown = value - before if value >= before else value
            if grown > 0 or key not in self._told:
                self._metric(series, series.name).inc(grown or _NOTHING, tags)
            self._told[key] = value
        else:
            self._metric(series, series.name).set(value, tags)

    def _tell_histogram(self, series: Series, tags: dict[str, str], value: Histogram) -> None:
        buckets, total, count = (self._metric(series, name) for name in series.sample_names)
        below = list(accumulate(value.counts))
        for bound, num_below in zip(BUCKETS, below, strict=True):
            buckets.set(num_below, tags | {"le": bound})
        total.set(value.total_s, tags)
        count.set(below[-1], tags)

    def _metric(self, series: Series, name: str) -> Any:
        """Return a metric of Ray's, registered when it is first asked for."""
        metric = self._registered.get(name)
        if metric is None:
            keys = (ENGINE_LABEL, *series.labels, *(["le"] if name.endswith("_bucket") else ()))
            if series.kind is Kind.COUNTER:
                # Ray puts the ending there by itself.
                metric = Counter(name.removesuffix("_total"), series.help, keys)
            else:
                metric = Gauge(name, series.help, keys)
            self._registered[name] = metric
        return metric
