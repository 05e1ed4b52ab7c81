"""PromQL over the series that Ray exports, by their names in the table of series.

A name that the table does not have raises `KeyError` as soon as a query is made, so a dashboard or
a rule that is there asks for nothing that is not.

Rules:
- A restarted scheduler is another process, whose series stand beside those of the one before it for
  a moment: counters are added up, and of gauges the largest is taken.
- A query is for every engine by itself; `chosen` limits it to those that a dashboard shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.series import ENGINE_LABEL, PREFIX, RAY_PREFIX, Kind
from cluster.series_table import SERIES


@dataclass(frozen=True)
class Queries:
    """Makes queries that share a window and a choice of engines."""

    window: str
    """Over which rates are taken, as PromQL writes durations."""
    chosen: str = ""
    """A label matcher, or nothing."""

    def now(self, name: str, *by: str) -> str:
        """Return a gauge's present value, for each value of the labels in `by`."""
        return f"max by ({_labels(by)}) ({self._named(name, Kind.GAUGE)})"

    def rate(self, name: str, *by: str, **only: str) -> str:
        """Return by how much a counter grows a second, limited to values of labels by `only`."""
        found = self._named(name, Kind.COUNTER, **only)
        return f"sum by ({_labels(by)}) (rate({found}[{self.window}]))"

    def increase(self, name: str, *by: str) -> str:
        """Return by how much a counter has grown in the window."""
        found = self._named(name, Kind.COUNTER)
        return f"sum by ({_labels(by)}) (increase({found}[{self.window}]))"

    def quantile(self, share: float, name: str) -> str:
        """Return below what that share of a histogram's observations in the window lie."""
        found = self._named(name, Kind.HISTOGRAM, "_bucket")
        rates = f"sum by ({_labels(('le',))}) (rate({found}[{self.window}]))"
        return f"histogram_quantile({share}, {rates})"

    def mean(self, name: str) -> str:
        """Return the mean of a histogram's observations in the window."""
        total, count = (
            f"sum by ({ENGINE_LABEL}) (rate({found}[{self.window}]))"
            for found in (
                self._named(name, Kind.HISTOGRAM, "_sum"),
                self._named(name, Kind.HISTOGRAM, "_count"),
            )
        )
        return f"{total} / {count}"

    def gone(self, name: str) -> str:
        """Return 1 for an engine that told a gauge in the window, and does not tell it now."""
        found = self._named(name, Kind.GAUGE)
        before = f"group by ({ENGINE_LABEL}) (count_over_time({found}[{self.window}]))"
        return f"{before} unless on ({ENGINE_LABEL}) {found}"

    def earliest(self, name: str) -> str:
        """Return the smallest value that a gauge had in the window."""
        found = self._named(name, Kind.GAUGE)
        return f"min by ({ENGINE_LABEL}) (min_over_time({found}[{self.window}]))"

    def _named(self, name: str, kind: Kind, ending: str = "", **only: str) -> str:
        series = SERIES[PREFIX + name]
        if series.kind is not kind:
            raise KeyError(f"{name} is a {series.kind.value}, no {kind.value}")
        limits = (f'{key}=~"{value}"' for key, value in only.items())
        matchers = ",".join(filter(None, (self.chosen, *limits)))
        return RAY_PREFIX + series.name + ending + (f"{{{matchers}}}" if matchers else "")


def _labels(by: tuple[str, ...]) -> str:
    return ", ".join((ENGINE_LABEL, *by))
