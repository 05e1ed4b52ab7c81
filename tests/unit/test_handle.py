"""A handle takes what comes once, however often it comes, and ends once."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.handle import RequestHandle
from scheduler.codec import int_array
from scheduler.errors import EngineUnavailable, InvariantViolation, RequestFailed
from scheduler.messages import OutputDelta, Submission
from scheduler.outputs import CompletionDelta
from scheduler.request import FinishReason
from scheduler.sampling_params import SamplingParams
from scheduler.submissions import content_hash
from tests.fake_scheduler import ByteTable, Family, delta_of

PROMPT = int_array([3, 1, 4, 1, 5])


def make_handle(
    params: SamplingParams, told: list[list[str]] | None = None
) -> tuple[RequestHandle, Family]:
    """A handle and the requests that it stands for; cancelled ids are put into `told`."""
    submission = Submission("r", PROMPT, params, seed=7)
    cancel = (lambda ids: None) if told is None else told.append
    return RequestHandle(submission, None, ByteTable(), cancel), Family(submission)


def deltas_of(family: Family) -> list[list[OutputDelta]]:
    """What comes after each step when nothing goes wrong."""
    told = [-1] * len(family.requests)
    steps = []
    while not family.is_over:
        family.step()
        step = []
        for request in family.requests:
            delta = delta_of(request, told[request.index])
            if delta is not None and told[request.index] < 10**6:
                step.append(delta)
                told[request.index] = len(request.output_token_ids)
                if delta.finish_reason is not None:
                    told[request.index] = 10**6
        steps.append(step)
    return steps


def replay(family: Family, num_steps: int) -> list[OutputDelta]:
    """What is told anew of a request that has come so far."""
    again = Family(family.submission)
    for _ in range(num_steps):
        again.step()
    found = [delta_of(request, -1) for request in again.requests]
    return [delta for delta in found if delta is not None]


def joined(deltas: list[CompletionDelta], index: int) -> tuple[str, list[int], list[object]]:
    mine = [delta for delta in deltas if delta.index == index]
    return (
        "".join(delta.text for delta in mine),
        [token for delta in mine for token in delta.token_ids],
        [entry for delta in mine for entry in delta.logprobs or ()],
    )


PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 3),
    max_tokens=st.integers(0, 8),
    stop=st.sampled_from([(), ("a",), ("ab", "bc"), (" d", "dd", "c a")]),
    include_stop_str_in_output=st.booleans(),
    stop_token_ids=st.sampled_from([(), (97,), (98, 32)]),
    min_tokens=st.just(0),
    logprobs=st.none() | st.integers(0, 2),
    prompt_logprobs=st.none() | st.integers(0, 2),
)


RESTARTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=4)
"""After which step the scheduler restarts, and how many steps it has lost then."""


@given(params=PARAMS, restarts=RESTARTS)
def test_what_comes_again_is_dropped_and_nothing_is_missed(
    params: SamplingParams, restarts: list[tuple[int, int]]
) -> None:
    """A scheduler that comes back tells everything from the start, and may have lost some steps."""
    undisturbed, family = make_handle(params)
    steps = deltas_of(family)
    for step in steps:
        for delta in step:
            undisturbed.feed(delta)
    expected = undisturbed.result(0) if undisturbed.done() else None

    handle, _ = make_handle(params)
    streamed: list[CompletionDelta] = []

    async def run() -> None:
        async def consume() -> None:
            async for delta in handle.stream():
                streamed.append(delta)

        consumer = asyncio.create_task(consume())
        position, left = 0, list(restarts)
        while position < len(steps):
            for delta in steps[position]:
                handle.feed(delta)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            position += 1
            for restart in [r for r in left if r[0] == position]:
                left.remove(restart)
                position = max(position - restart[1], 0)
                for delta in replay(family, position):
                    handle.feed(delta)
        if handle.done():
            await consumer
        consumer.cancel()

    asyncio.run(run())
    assert handle.done() == undisturbed.done()
    if expected is None:  # a stop string ended it, and nobody told the scheduler
        handle.abandon()
        undisturbed.abandon()
        expected = undisturbed.result(0)
    output = handle.result(0)
    assert output.outputs == expected.outputs
    assert output.prompt_logprobs == expected.prompt_logprobs
    for completion in expected.outputs:
        text, token_ids, logprobs = joined(streamed, completion.index)
        assert (text, token_ids) == (completion.text, completion.token_ids)
        assert logprobs == list(completion.logprobs or ())
    with_rows = [delta for delta in streamed if delta.prompt_logprobs is not None]
    assert len(with_rows) == (params.prompt_logprobs is not None)


def test_what_is_about_an_earlier_submission_of_the_same_id_is_ignored() -> None:
    """Its answer may still be on its way when the id is used for something else."""
    handle, family = make_handle(SamplingParams(max_tokens=2))
    steps = deltas_of(family)
    other = content_hash(Submission("r", PROMPT, SamplingParams(max_tokens=3), seed=7))
    mine = content_hash(handle.submission)
    for step in steps:
        for delta in step:
            handle.feed(msgspec.structs.replace(delta, content_hash=other))
            assert not handle.done()
    for step in steps:
        for delta in step:
            handle.feed(msgspec.structs.replace(delta, content_hash=mine))
    assert len(handle.result(0).outputs[0].token_ids) == 2


def test_a_gap_in_what_comes_ends_the_handle_with_an_error() -> None:
    """Half an answer that looks whole would be worse."""
    told: list[list[str]] = []
    handle, family = make_handle(SamplingParams(max_tokens=5), told)
    steps = deltas_of(family)
    handle.feed(steps[0][0])
    handle.feed(steps[2][0])
    with pytest.raises(InvariantViolation, match="left out 1 token"):
        handle.result(0)
    assert told == [["r"]]


def test_one_of_n_that_is_over_stays_over_when_less_of_it_is_told_again() -> None:
    """A scheduler that lost its last steps; nobody needs it to compute them again."""
    handle, family = make_handle(SamplingParams(n=2, max_tokens=8, stop_token_ids=(97,)))
    steps = deltas_of(family)
    ends = [next(i for i, s in enumerate(steps) if ended_in(s, index)) for index in (0, 1)]
    first = ends.index(min(ends))
    assert 1 <= min(ends) < max(ends)
    for delta in [d for step in steps[: min(ends) + 1] for d in step] + replay(family, 1):
        handle.feed(delta)
    for delta in [d for step in steps[min(ends) + 1 :] for d in step]:
        assert delta.index != first
        handle.feed(delta)
    assert handle.done()


def ended_in(step: list[OutputDelta], index: int) -> bool:
    return any(delta.index == index and delta.finish_reason is not None for delta in step)


def test_an_abandoned_handle_keeps_what_it_had() -> None:
    handle, family = make_handle(SamplingParams(n=2, max_tokens=6, logprobs=0))
    steps = deltas_of(family)
    for delta in [*steps[0], *steps[1]]:
        handle.feed(delta)
    handle.abandon()
    output = handle.result(0)
    assert [c.finish_reason for c in output.outputs] == ["abort", "abort"]
    assert [len(c.token_ids) for c in output.outputs] == [2, 2]
    for delta in steps[2]:
        handle.feed(delta)
    handle.fail(EngineUnavailable("too late"))
    assert handle.result(0) == output


def test_a_handle_says_what_the_scheduler_need_not_compute_any_more() -> None:
    """Told again after a cancel was lost: all of it, or those of n that have ended."""
    one, _ = make_handle(SamplingParams(max_tokens=6))
    assert one.unwanted_ids() == []
    one.cancel()
    assert one.unwanted_ids() == ["r"]

    stopped, family = make_handle(SamplingParams(n=2, max_tokens=8, stop_token_ids=(97,)))
    ended: list[int] = []
    for delta in [delta for step in deltas_of(family) for delta in step]:
        stopped.feed(delta)
        ended += [delta.index] if delta.finish_reason is not None else []
        if len(ended) == 1:
            assert stopped.unwanted_ids() == [f"r#{ended[0]}"]
    assert len(ended) == 2
    assert stopped.unwanted_ids() == ["r"]


@pytest.mark.parametrize("end", ["result", "error", "failed", "abandoned"])
def test_whoever_asks_is_told_once_that_a_handle_is_done(end: str) -> None:
    handle, family = make_handle(SamplingParams(max_tokens=3))
    told: list[str] = []
    handle.add_done_callback(lambda: told.append("first" if handle.done() else "too early"))
    *before, last = [delta for step in deltas_of(family) for delta in step]
    for delta in before:
        handle.feed(delta)
    assert told == []
    error = RequestFailed("no more")
    if end == "result":
        handle.feed(last)
    elif end == "error":
        handle.feed(OutputDelta("r", finish_reason=FinishReason.ERROR, error=error.to_wire()))
    elif end == "failed":
        handle.fail(error)
    else:
        handle.abandon()
    assert told == ["first"]
    handle.feed(last)
    handle.fail(error)
    handle.abandon()
    handle.add_done_callback(lambda: told.append("second"))
    assert told == ["first", "second"]


def test_an_error_of_the_request_ends_it_after_what_came_before() -> None:
    handle, family = make_handle(SamplingParams(max_tokens=6))
    handle.feed(deltas_of(family)[0][0])
    error = RequestFailed("no more", param="x")
    handle.feed(OutputDelta("r", finish_reason=FinishReason.ERROR, error=error.to_wire()))
    stream = iter(handle.stream())
    assert len(next(stream).token_ids) == 1
    with pytest.raises(RequestFailed, match="no more"):
        next(stream)
    with pytest.raises(RequestFailed, match="no more"):
        handle.result(0)
