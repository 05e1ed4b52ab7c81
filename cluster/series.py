"""What a series is, as Prometheus knows it, and how its values are read off an `EngineStats`.

The module asks nobody; which series there are stands in `cluster.series_table`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduler.messages import WorkerUse
from scheduler.outbox import EngineStats
from scheduler.timings import Histogram

PREFIX = "haversack_"
RAY_PREFIX = "ray_"
"""What Ray puts before the name of everything that it exports."""
ENGINE_LABEL = "engine"

Sample = tuple[tuple[str, ...], float | Histogram]
"""A value, and those of the series' labels, in their order."""
Read = Callable[[EngineStats], Iterable[Sample]]


class Kind(enum.Enum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Series:
    """One series, or family of them."""

    name: str
    """As Prometheus shows it at the endpoint; behind `RAY_PREFIX` where Ray exports it."""
    kind: Kind
    unit: str
    """What it counts, or a base unit."""
    help: str
    read: Read | None
    """Returns its samples; None where the endpoint keeps it itself."""
    labels: tuple[str, ...] = ()
    """Beside `engine`; the endpoint's own series have these alone."""
    vllm: str = ""
    """vLLM's counterpart."""

    @property
    def sample_names(self) -> list[str]:
        """The names that its samples have."""
        if self.kind is Kind.HISTOGRAM:
            return [f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count"]
        return [self.name]


# ----------------------------------------------------------------------- one of each type


def counter(
    name: str, unit: str, help_text: str, read: Read, *labels: str, vllm: str = ""
) -> Series:
    """Return a series that only grows; the name is without prefix and `_total`."""
    return Series(f"{PREFIX}{name}_total", Kind.COUNTER, unit, help_text, read, labels, vllm)


def gauge(name: str, unit: str, help_text: str, read: Read, *labels: str, vllm: str = "") -> Series:
    """Return a series of values as of now; the name is without prefix."""
    return Series(f"{PREFIX}{name}", Kind.GAUGE, unit, help_text, read, labels, vllm)


def histogram(name: str, help_text: str, read: Read, *, vllm: str = "") -> Series:
    """Return a series of seconds, in the buckets of `scheduler.timings`."""
    full_name = f"{PREFIX}{name}_seconds"
    return Series(full_name, Kind.HISTOGRAM, "seconds", help_text, read, (), vllm)


# ----------------------------------------------------------------- where the numbers come from


def scheduler_field(field: str) -> Read:
    """Read a field of `SchedulerStats`."""
    return lambda stats: [((), getattr(stats.scheduler, field))]


def scheduler_reasons(field: str, reasons: Iterable[str]) -> Read:
    """Read counts by reason off `SchedulerStats`; what never happened is told as 0."""
    zeros = dict.fromkeys(reasons, 0)
    return lambda stats: [
        ((reason,), count) for reason, count in (zeros | getattr(stats.scheduler, field)).items()
    ]


def store_field(field: str) -> Read:
    """Read a counter of the offload store; none where there is no store."""
    return lambda stats: [((), stats.store[field])] if stats.store is not None else []


def journal_field(field: str) -> Read:
    """Read a number that the journal tells; none where there is no journal."""

    def read(stats: EngineStats) -> list[Sample]:
        if stats.journal is None:
            return []
        return [((), float(stats.journal[field] or 0))]

    return read


def timing(field: str) -> Read:
    """Read a histogram of `Timings`."""
    return lambda stats: [((), getattr(stats.timings, field))]


def each_worker(read: Callable[[WorkerUse], float]) -> Read:
    """Read something of each worker; the label is its id."""
    return lambda stats: [((worker.worker_id,), read(worker)) for worker in stats.workers]


def hit_tokens(stats: EngineStats) -> list[Sample]:
    """Return the tokens that caches supplied, by source."""
    found = stats.scheduler
    return [
        (("worker",), found.num_worker_cache_hit_tokens),
        (("store",), found.num_store_hit_tokens),
        (("own",), found.num_own_hit_tokens),
    ]


def worker_seconds(stats: EngineStats) -> list[Sample]:
    """Return each worker's time, by what it did."""
    return [
        ((worker.worker_id, state), seconds)
        for worker in stats.workers
        for state, seconds in (
            ("compute", worker.compute_s),
            ("dispatch", worker.dispatch_s),
            ("idle", worker.idle_s),
        )
    ]
