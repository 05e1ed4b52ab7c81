"""How long things take: histograms of requests' latencies, and how workers spend their time.

Rules:
- Times are those of events, so what is measured ends where the scheduler heard of it.
- Latencies have vLLM's meanings. What a request waited for is in them, whatever it was: an eviction
  or a lost worker in the middle counts as prefill or decode time.
- A request that came back from a journal is in none of them: when it began is not known any more.
The module knows no request, no worker and no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import msgspec

BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0),
)
"""Upper bounds of every histogram's buckets but the last, which has none."""


class Histogram(msgspec.Struct):
    """How often something took how long; the numbers only grow."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """Observations by the smallest bound that is not below them."""
    total_s: float = 0.0
    """Seconds of all observations together."""

    @property
    def num_observations(self) -> int:
        return sum(self.counts)

    def observe(self, seconds: float, count: int = 1) -> None:
        """Add `count` observations of so long."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += count
        self.total_s += seconds * count


@dataclass(slots=True, eq=False)
class RequestTimes:
    """When a request got how far, as far as it has."""

    submitted_s: float | None
    """None: it came back from a journal."""
    sent_s: float | None = None
    """When its first chunk was sent to a worker."""
    first_token_s: float | None = None
    last_token_s: float | None = None


class Timings(msgspec.Struct):
    """The latencies of an engine's requests."""

    time_to_first_token: Histogram = msgspec.field(default_factory=Histogram)
    """From submission to the first generated token."""
    inter_token: Histogram = msgspec.field(default_factory=Histogram)
    """From one token to the next. Tokens that come together share the time equally."""
    end_to_end: Histogram = msgspec.field(default_factory=Histogram)
    """From submission to the end, of requests that were not aborted and have not failed."""
    queue: Histogram = msgspec.field(default_factory=Histogram)
    """From submission to the first chunk."""
    prefill: Histogram = msgspec.field(default_factory=Histogram)
    """From the first chunk to the end of the prompt, when its rows are there too."""
    decode: Histogram = msgspec.field(default_factory=Histogram)
    """From the first generated token to the last one."""
    migration_pause: Histogram = msgspec.field(default_factory=Histogram)
    """For how long requests stood still while their last blocks moved."""

    def sent(self, times: RequestTimes, now_s: float) -> None:
        """Note that a request's first chunk is sent."""
        times.sent_s = now_s
        if times.submitted_s is not None:
            self.queue.observe(now_s - times.submitted_s)

    def prefilled(self, times: RequestTimes, now_s: float) -> None:
        """Note that a request's prompt is computed."""
        if times.submitted_s is not None and times.sent_s is not None:
            self.prefill.observe(now_s - times.sent_s)

    def generated(self, times: RequestTimes, now_s: float, num_tokens: int) -> None:
        """Note that a request has so many new tokens, at least one."""
        if times.last_token_s is not None:
            self.inter_token.observe((now_s - times.last_token_s) / num_tokens, num_tokens)
        elif times.submitted_s is not None:
            times.first_token_s = now_s
            self.time_to_first_token.observe(now_s - times.submitted_s)
        times.last_token_s = now_s

    def ended(self, times: RequestTimes, now_s: float) -> None:
        """Note that a request has come to a good end."""
        if times.submitted_s is None:
            return
        self.end_to_end.observe(now_s - times.submitted_s)
        if times.first_token_s is not None and times.last_token_s is not None:
            self.decode.observe(times.last_token_s - times.first_token_s)


@dataclass(slots=True, eq=False)
class WorkTimes:
    """What a worker has done with its time since it joined; a step counts once it is answered."""

    since_s: float
    """Up to when the time is accounted for."""
    is_busy: bool = False
    """Whether a step is under way."""
    busy_s: float = 0.0
    """Seconds with a step under way."""
    idle_s: float = 0.0
    """Seconds without."""
    compute_s: float = 0.0
    """Seconds that the worker computed, as it says."""
    dispatch_s: float = 0.0
    """The rest of the busy seconds: messages on their way and waiting for their turn. Never goes
    back, although an answer that is heard of late makes the rest look smaller for a while."""

    def sent(self, now_s: float) -> None:
        """Note that a step is sent."""
        self.settle(now_s)
        self.is_busy = True

    def answered(self, now_s: float, compute_s: float, *, is_last: bool) -> None:
        """Note that a step, maybe the last one under way, is answered and took so long."""
        self.settle(now_s)
        self.is_busy = not is_last
        self.compute_s += compute_s
        self.dispatch_s = max(self.dispatch_s, self.busy_s - self.compute_s)

    def settle(self, now_s: float) -> None:
        """Account for the time up to now."""
        if self.is_busy:
            self.busy_s += now_s - self.since_s
        else:
            self.idle_s += now_s - self.since_s
        self.since_s = now_s
