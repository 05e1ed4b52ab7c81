"""What a user gets back reads like vLLM's lists of dicts and keeps flat arrays underneath."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from scheduler.logprobs import Logprobs
from scheduler.outputs import CompletionOutput, Logprob, PromptLogprobsView, SampleLogprobsView


def rows_of(*rows: list[tuple[int, float, int]]) -> Logprobs:
    """Return rows written as (token id, logprob, rank) columns."""
    return Logprobs(
        np.array([[c[0] for c in row] for row in rows], np.int32),
        np.array([[c[1] for c in row] for row in rows], np.float32),
        np.array([[c[2] for c in row] for row in rows], np.int32),
    )


THREE = rows_of(
    [(7, -2.0, 3), (5, -0.5, 1), (6, -1.0, 2)],
    [(5, -0.25, 1), (5, -0.25, 1), (9, -3.0, 2)],
    [(1, -1.5, 2), (2, -0.75, 1), (1, -1.5, 2)],
)


def decode(token_id: int) -> str:
    return f"<{token_id}>"


def test_a_prompt_of_n_tokens_has_n_entries_and_the_first_is_none() -> None:
    view = PromptLogprobsView(THREE, decode)
    assert len(view) == 4
    assert view[0] is None
    assert [entry is None for entry in view] == [True, False, False, False]


def test_a_prompt_of_one_token_has_one_entry_which_is_none() -> None:
    view = PromptLogprobsView(Logprobs.empty(2))
    assert list(view) == [None]


@pytest.mark.parametrize("first", [1, 2, 5])
def test_entries_before_the_first_row_are_none(first: int) -> None:
    view = PromptLogprobsView(THREE, decode, first)
    assert len(view) == first + 3
    assert list(view) == [None] * first + list(PromptLogprobsView(THREE, decode))[1:]
    assert (view == PromptLogprobsView(THREE, decode)) is (first == 1)


def test_an_entry_maps_the_actual_token_first_then_the_likeliest() -> None:
    entry = PromptLogprobsView(THREE, decode)[1]
    assert entry == {
        7: Logprob(-2.0, 3, "<7>"),
        5: Logprob(-0.5, 1, "<5>"),
        6: Logprob(-1.0, 2, "<6>"),
    }
    assert list(entry) == [7, 5, 6]


def test_an_actual_token_among_the_likeliest_appears_once_and_first() -> None:
    """Ranks must not shift and no alternative may go missing because of the merge."""
    view = PromptLogprobsView(THREE, decode)
    assert list(view[2].items()) == [(5, Logprob(-0.25, 1, "<5>")), (9, Logprob(-3.0, 2, "<9>"))]
    assert list(view[3].items()) == [(1, Logprob(-1.5, 2, "<1>")), (2, Logprob(-0.75, 1, "<2>"))]


def test_entries_are_found_by_negative_index_and_by_slice_as_in_a_list() -> None:
    view = PromptLogprobsView(THREE, decode)
    entries = list(view)
    assert view[-1] == entries[3]
    assert view[-4] is None
    for wanted in (slice(None), slice(1, 3), slice(None, None, -1), slice(-2, None), slice(9, 12)):
        assert view[wanted] == entries[wanted]
    for outside in (4, -5):
        with pytest.raises(IndexError):
            view[outside]


def test_an_output_view_has_one_entry_per_token_and_no_none() -> None:
    view = SampleLogprobsView(THREE)
    assert len(view) == 3
    assert view[0][7] == Logprob(-2.0, 3, None)
    assert all(entry is not None for entry in view)


def test_views_are_equal_exactly_when_their_bits_are() -> None:
    same = rows_of(
        *[
            [(int(t), float(p), int(r)) for t, p, r in zip(*columns, strict=True)]
            for columns in zip(THREE.token_ids, THREE.logprobs, THREE.ranks, strict=True)
        ]
    )
    nudged = Logprobs(THREE.token_ids, np.nextafter(THREE.logprobs, np.float32(0)), THREE.ranks)
    assert PromptLogprobsView(THREE) == PromptLogprobsView(same, decode)
    assert PromptLogprobsView(THREE) != PromptLogprobsView(nudged)
    assert PromptLogprobsView(THREE) != SampleLogprobsView(THREE)
    assert PromptLogprobsView(THREE) == list(PromptLogprobsView(THREE))
    assert PromptLogprobsView(THREE) != list(PromptLogprobsView(THREE))[:-1]


def test_the_arrays_are_handed_out_as_they_are() -> None:
    assert PromptLogprobsView(THREE).arrays is THREE


def test_a_long_prompt_makes_no_objects_until_it_is_looked_at() -> None:
    """One object per position and candidate is what made garbage collection dominate elsewhere."""
    n, k = 4000, 20
    shape = (n - 1, k + 1)
    rows = Logprobs(
        np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.ones(shape, np.int32)
    )
    gc.collect()
    before = len(gc.get_objects())
    views = [PromptLogprobsView(rows, decode) for _ in range(32)]
    assert len(gc.get_objects()) - before < 32 * 5
    assert len(views[0]) == n


def test_a_completion_is_finished_once_it_has_a_reason() -> None:
    running = CompletionOutput(0, "a", [1], None, None)
    assert not running.finished()
    assert CompletionOutput(0, "a", [1], None, None, finish_reason="length").finished()
