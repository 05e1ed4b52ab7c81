"""What waits for the journal: merged, replaced, bounded, and never lost by a failed write."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.actions import Record, RecordFinished, RecordProgress, RecordSubmitted
from scheduler.journal_queue import Batch, UnwrittenQueue
from scheduler.request import FinishReason, RequestStats
from tests.strategies import logprobs

PARENTS = ["a", "b"]


def submit(name: str, parent: str, size: int = 3) -> RecordSubmitted:
    return RecordSubmitted(request=b"x" * size, request_id=name, parent_id=parent)


def progress(name: str, count: int, num_rows: int = 1) -> RecordProgress:
    return RecordProgress(
        request_id=name,
        num_computed_tokens=count,
        rows=logprobs(num_rows, 1),
        sampled_token_id=None,
        sampled_logprobs=None,
    )


def finish(name: str, parent: str) -> RecordFinished:
    return RecordFinished(
        request_id=name,
        parent_id=parent,
        finish_reason=FinishReason.STOP,
        stop_reason=None,
        error=None,
        stats=RequestStats(),
    )


def contents(batch: Batch) -> dict[str, object]:
    """A batch in a form that compares; the order of submissions does not matter."""
    return {
        parent: (
            family.replaces,
            {
                name: (r.submitted, [p.num_computed_tokens for p in r.progress], r.finished)
                for name, r in family.requests.items()
            },
            family.num_records,
            family.num_bytes,
        )
        for parent, family in batch.items()
    }


@st.composite
def courses(draw: st.DrawFn) -> list[Record]:
    """Records of two submissions, in any order that can be."""
    live: set[tuple[str, str]] = set()
    steps: list[Record] = []
    for count in range(draw(st.integers(0, 20))):
        parent = draw(st.sampled_from(PARENTS))
        own = sorted(each for each in live if each[1] == parent)
        kind = draw(st.sampled_from(["go on", "end"]))
        if not own:
            family = [f"{parent}{index}" for index in range(draw(st.integers(1, 2)))]
            live |= {(name, parent) for name in family}
            steps += [submit(name, parent) for name in family]
        elif kind == "go on":
            steps.append(progress(draw(st.sampled_from(own))[0], count))
        else:
            ended = draw(st.sampled_from(own))
            live.remove(ended)
            steps.append(finish(*ended))
    return steps


def feed(queue: UnwrittenQueue, steps: list[Record]) -> None:
    for step in steps:
        queue.add(step, 0.0)


@given(courses(), st.data())
def test_a_failed_write_leaves_the_queue_as_if_it_had_not_been_tried(
    steps: list[Record], data: st.DataObject
) -> None:
    """Whatever was added while the write was under way."""
    first = data.draw(st.integers(0, len(steps)))
    second = data.draw(st.integers(first, len(steps)))
    tried, left_alone = UnwrittenQueue(10**9), UnwrittenQueue(10**9)
    feed(tried, steps[:first])
    batch = tried.take()
    assert not tried
    feed(tried, steps[first:second])
    tried.put_back(batch)
    feed(tried, steps[second:])
    feed(left_alone, steps)
    assert (tried.num_records, tried.num_bytes) == (left_alone.num_records, left_alone.num_bytes)
    assert tried.num_live == left_alone.num_live
    taken = left_alone.take()
    assert tried.num_records == sum(family.num_records for family in taken.values())
    assert contents(tried.take()) == contents(taken)
    assert (tried.num_records, tried.num_bytes) == (0, 0)


def test_beyond_its_size_the_oldest_results_are_given_up_and_nothing_of_the_live() -> None:
    queue = UnwrittenQueue(10_000)
    queue.add(submit("live", "live"), 0.0)
    queue.add(progress("live", 1, num_rows=5000), 0.0)
    for index in range(10):
        name = f"done-{index}"
        queue.add(submit(name, name, size=100), 0.0)
        queue.add(finish(name, name), 0.0)
    assert queue.num_dropped == 10
    assert list(queue.take()) == ["live"]
    for index in range(20):
        name = f"more-{index}"
        queue.add(submit(name, name, size=100), 0.0)
        queue.add(finish(name, name), 0.0)
    batch = queue.take()
    assert list(batch) == [f"more-{index}" for index in range(20 - len(batch), 20)]
    assert 5 < len(batch) < 20


def test_a_result_that_is_given_up_leaves_no_half_of_it_in_the_file() -> None:
    """Its beginning is written: a restart would go on with it, for nobody."""
    queue = UnwrittenQueue(1000)
    queue.add(submit("r", "r"), 0.0)
    queue.take()
    queue.add(progress("r", 1, num_rows=500), 0.0)
    queue.add(finish("r", "r"), 0.0)
    assert queue.num_dropped == 1
    assert contents(queue.take()) == {"r": (True, {}, 0, 0)}


def test_a_batch_that_comes_back_is_bounded_too() -> None:
    queue = UnwrittenQueue(3000)
    for index in range(2):
        queue.add(submit(f"a{index}", f"a{index}", size=500), 0.0)
        queue.add(finish(f"a{index}", f"a{index}"), 0.0)
    batch = queue.take()
    queue.add(submit("b", "b", size=500), 0.0)
    queue.add(finish("b", "b"), 0.0)
    queue.put_back(batch)
    assert queue.num_dropped == 2
    assert list(queue.take()) == ["b"]
