"""A prompt's rows in parts: from the core's deltas to the handle, however they are cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.handle import RequestHandle
from cluster.prompt_rows import PromptRows
from scheduler import reports
from scheduler.actions import Emit
from scheduler.codec import decode, encode, int_array
from scheduler.errors import InvariantViolation
from scheduler.logprobs import LogprobRows, Logprobs
from scheduler.messages import OutputDelta, Submission
from scheduler.sampling_params import SamplingParams
from tests.sim.script import Script, submitted


def rows(num_rows: int, width: int = 3) -> Logprobs:
    numbers = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
    return Logprobs(numbers, -numbers.astype(np.float32), numbers + 1)


@given(
    sizes=st.lists(st.integers(0, 5), max_size=6),
    max_bytes=st.integers(1, 400),
)
def test_parts_hold_each_row_once_and_keep_to_the_limit(sizes: list[int], max_bytes: int) -> None:
    held, whole, first = LogprobRows(2), rows(sum(sizes)), 0
    for size in sizes:
        held.append(whole[first : first + size])
        first += size
    parts = held.parts(max_bytes)
    assert Logprobs.concat(parts).same_bits(whole)
    assert all(part.num_bytes <= max_bytes or part.num_rows == 1 for part in parts)


@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8))
def test_rows_come_together_whatever_comes_again(
    num_rows: int, spans: list[tuple[int, int]]
) -> None:
    whole = rows(num_rows)
    held, known = PromptRows(num_rows), 0
    for some, other in [*spans, (num_rows, num_rows)]:
        if held.whole is None:
            first = min(some, known)
            end = max(first, min(other, num_rows))
            held.take(whole[first:end], first)
            known = max(known, end)
            assert (held.whole is not None) == (known == num_rows)
    held.take(whole[:1], 0)
    assert held.whole is not None
    assert held.whole.same_bits(whole)


@pytest.mark.parametrize(("first", "end"), [(3, 4), (0, 6), (2, 7)])
def test_rows_that_do_not_follow_are_refused_and_change_nothing(first: int, end: int) -> None:
    held = PromptRows(5)
    held.take(rows(5)[:2], 0)
    with pytest.raises(InvariantViolation, match="that has 5, after the first 2"):
        held.take(rows(8)[first:end], first)
    held.take(rows(5)[2:], 2)
    assert held.whole is not None
    assert held.whole.same_bits(rows(5))


@pytest.mark.parametrize("max_bytes", [1, 100, 2**20])
def test_a_client_gets_the_same_rows_however_they_are_cut(
    monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    """Also one that is told everything again in the middle of it, and once more at the end."""
    monkeypatch.setattr(reports, "_MAX_ROWS_BYTES", max_bytes)
    script = Script(enable_offload=False)
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    script.submit("a", 7, max_tokens=2, prompt_logprobs=1)
    request = script.state.request("a")
    script.computed(token=21)
    halfway = reports.whole_deltas(request)
    script.computed(token=22)
    deltas = [a.delta for a in script.actions if isinstance(a, Emit)]
    assert len(deltas) == {1: 7, 100: 3, 2**20: 2}[max_bytes]
    expected = request.prompt_logprobs.array()
    again = reports.whole_deltas(request)
    submission = submitted("a", 7, max_tokens=2, prompt_logprobs=1).submission
    assert submission.sampling_params == params
    for told in (deltas, [*deltas[:2], *halfway, *deltas[2:]], [*halfway[:1], *again], again):
        handle = RequestHandle(submission, None, None, lambda ids: None)
        for delta in told:
            handle.feed(decode(encode(delta), OutputDelta))
        output = handle.result(timeout=0)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs.arrays.same_bits(expected)
        assert output.outputs[0].token_ids == [21, 22]


def test_a_stream_shows_rows_when_all_are_there() -> None:
    submission = Submission("r", int_array([1, 2, 3]), SamplingParams(prompt_logprobs=2), seed=1)
    handle = RequestHandle(submission, None, None, lambda ids: None)
    stream = handle.stream()
    handle.feed(OutputDelta("r", prompt_logprobs=rows(2)[:1]))
    assert stream._poll() == (None, False)
    handle.feed(OutputDelta("r", prompt_logprobs=rows(2)[1:], num_previous_rows=1))
    delta, _ = stream._poll()
    assert delta is not None
    assert delta.prompt_logprobs is not None
    assert delta.prompt_logprobs.arrays.same_bits(rows(2))
