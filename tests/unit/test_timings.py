"""How long things take: what is in each histogram, and how a worker's time is shared out."""

from __future__ import annotations

import pytest

from scheduler.codec import decode, encode
from scheduler.timings import BOUNDS_S, Histogram, RequestTimes, Timings, WorkTimes


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.0, 0), (0.001, 0), (0.0011, 1), (1.0, BOUNDS_S.index(1.0)), (1e9, len(BOUNDS_S))],
)
def test_an_observation_is_in_the_first_bucket_whose_bound_is_not_below_it(
    seconds: float, bucket: int
) -> None:
    histogram = Histogram()
    histogram.observe(seconds, 3)
    assert [i for i, count in enumerate(histogram.counts) if count] == [bucket]
    assert (histogram.num_observations, histogram.total_s) == (3, 3 * seconds)


def test_histograms_travel() -> None:
    timings = Timings()
    timings.queue.observe(0.3)
    assert decode(encode(timings), Timings) == timings


def totals(timings: Timings) -> dict[str, tuple[int, float]]:
    """Count and seconds of each histogram that has any."""
    found = {name: getattr(timings, name) for name in timings.__struct_fields__}
    return {n: (h.num_observations, h.total_s) for n, h in found.items() if h.num_observations}


def test_each_part_of_a_requests_life_is_timed() -> None:
    """Queued 1 s, prefilled for 2 s, then tokens after 0.5 s and, four together, after 2 s."""
    timings, times = Timings(), RequestTimes(10.0)
    timings.sent(times, 11.0)
    timings.prefilled(times, 13.0)
    timings.generated(times, 13.0, 1)
    timings.generated(times, 13.5, 1)
    timings.generated(times, 15.5, 4)
    timings.ended(times, 15.5)
    assert totals(timings) == {
        "queue": (1, 1.0),
        "prefill": (1, 2.0),
        "time_to_first_token": (1, 3.0),
        "inter_token": (5, 2.5),
        "decode": (1, 2.5),
        "end_to_end": (1, 5.5),
    }


def test_a_prompt_that_was_only_scored_has_no_tokens_to_time() -> None:
    timings, times = Timings(), RequestTimes(0.0)
    timings.sent(times, 1.0)
    timings.prefilled(times, 2.0)
    timings.ended(times, 2.0)
    assert totals(timings) == {"queue": (1, 1.0), "prefill": (1, 1.0), "end_to_end": (1, 2.0)}


def test_a_restored_request_is_in_no_latency_but_those_that_are_whole() -> None:
    """When it was submitted is not known any more; from token to token nothing is missing."""
    timings, times = Timings(), RequestTimes(None)
    timings.sent(times, 1.0)
    timings.prefilled(times, 2.0)
    timings.generated(times, 2.0, 1)
    timings.generated(times, 3.0, 1)
    timings.ended(times, 3.0)
    assert totals(timings) == {"inter_token": (1, 1.0)}


def test_a_workers_time_is_computing_dispatch_or_idle() -> None:
    work = WorkTimes(100.0)
    work.sent(101.0)
    work.sent(101.5)
    work.answered(103.0, 1.5, is_last=False)
    work.answered(104.0, 1.0, is_last=True)
    work.settle(110.0)
    assert (work.idle_s, work.compute_s, work.dispatch_s) == (7.0, 2.5, 0.5)


def test_dispatch_never_goes_back() -> None:
    """An answer that was heard of late: the next step seems to have taken less than it computed."""
    work = WorkTimes(0.0)
    work.sent(0.0)
    work.sent(0.0)
    work.answered(3.0, 1.0, is_last=False)
    assert work.dispatch_s == 2.0
    work.answered(3.1, 1.5, is_last=True)
    assert work.dispatch_s == 2.0
