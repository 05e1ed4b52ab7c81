"""Contexts and continuations become tokens as evaluation harnesses make them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pairs import PairEncoder, TokenPair, with_room
from scheduler.errors import InvalidRequest, ModelNotFound

BOS, EOS = 0, 1
VOCABULARY = ["<s>", "</s>", " ", "a", "b", "c", " a", " b", "ab", "bc", "\n"]
ID = {text: token for token, text in enumerate(VOCABULARY)}


class LongestMatch:
    """A tokenizer that takes the longest token it can, and begins a text with <s>."""

    bos_token: str | None = "<s>"
    bos_token_id: int | None = BOS
    eos_token_id: int | None = EOS

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        ids = [BOS] if add_special_tokens else []
        while text:
            longest = max((t for t in VOCABULARY if text.startswith(t)), key=len)
            ids.append(ID[longest])
            text = text[len(longest) :]
        return SimpleNamespace(input_ids=ids)


def no_tokenizer() -> NoReturn:
    raise ModelNotFound("there is none")


def encoder(**options: Any) -> PairEncoder:
    return PairEncoder(LongestMatch, **options)


def ids(*texts: str) -> list[int]:
    return [ID[text] for text in texts]


def test_a_pair_of_texts_is_encoded_as_one() -> None:
    assert encoder().pair("c", " a") == (ids("<s>", "c"), ids(" a"))
    assert encoder().pair("a", "a b") == (ids("<s>", "a"), ids("a", " b"))


def test_a_token_across_the_seam_belongs_to_neither_part_alone() -> None:
    """The context keeps its own tokens; what of the whole goes beyond as many is scored."""
    assert encoder().pair("a", "bc") == (ids("<s>", "a"), ids("c"))
    with pytest.raises(InvalidRequest, match="adds no token"):
        encoder().pair("a", "b")


@pytest.mark.parametrize("space", [" ", "  ", " \n", "\n"])
def test_space_at_the_end_of_the_context_goes_to_the_continuation(space: str) -> None:
    assert encoder().pair(f"c{space}", "a") == encoder().pair("c", f"{space}a")
    assert encoder().pair("c ", "a") == (ids("<s>", "c"), ids(" a"))


@pytest.mark.parametrize("context", ["", [], (), np.array([], np.int32)], ids=repr)
def test_an_empty_context_is_the_token_that_texts_begin_with(context: Any) -> None:
    assert encoder().pair(context, "ab") == ([BOS], ids("ab"))
    assert encoder().pair(context, [4, 5]) == ([BOS], [4, 5])
    assert encoder(add_special_tokens=False).pair(context, "ab") == ([BOS], ids("ab"))
    assert encoder(prefix_token_id=9).pair(context, "ab") == ([9], ids("ab"))


def test_a_context_of_nothing_but_space_is_empty() -> None:
    assert encoder().pair(" ", "a") == ([BOS], ids(" a"))


def test_a_continuation_that_brings_the_prefix_is_conditioned_on_one() -> None:
    assert encoder().pair("", "<s>ab") == ([BOS], ids("ab"))
    assert encoder().pair([], [BOS, 4]) == ([BOS], [4])
    with pytest.raises(InvalidRequest, match="adds no token"):
        encoder().pair([], [BOS])


def test_without_a_token_that_begins_texts_the_one_that_ends_them_is_taken() -> None:
    class NoBos(LongestMatch):
        bos_token = None
        bos_token_id = None

    class Neither(NoBos):
        eos_token_id = None

    assert PairEncoder(NoBos).pair("", [4]) == ([EOS], [4])
    for tokenizer in (Neither, no_tokenizer):
        with pytest.raises(InvalidRequest, match="prefix_token_id") as refusal:
            PairEncoder(tokenizer).pair([], [4])
        assert refusal.value.details["param"] == "context"


def test_special_tokens_come_once_or_not_at_all() -> None:
    assert encoder().pair("<s>c", "a") == (ids("<s>", "c"), ids("a"))
    bare = encoder(add_special_tokens=False)
    assert bare.pair("c", "a") == (ids("c"), ids("a"))
    assert bare.pair("<s>c", "a") == (ids("<s>", "c"), ids("a"))


def test_token_ids_are_taken_as_they_are() -> None:
    assert PairEncoder(no_tokenizer).pair([5, 6], np.array([7, 8])) == ([5, 6], [7, 8])
    assert encoder().pair([5, 6], " a") == ([5, 6], ids(" a"))
    assert encoder().pair("c ", [7]) == (ids("<s>", "c", " "), [7])
    with pytest.raises(ModelNotFound):
        PairEncoder(no_tokenizer).pair("c", [7])


@pytest.mark.parametrize("part", ["context", "continuation"])
@pytest.mark.parametrize(
    "value",
    [None, 7, b"ab", {"prompt": "a"}, {1}, np.zeros((1, 1), int), np.array([0.5]), "\ud800"],
)
def test_another_form_is_refused_by_name(part: str, value: Any) -> None:
    pair = {"context": "c", "continuation": "a", part: value}
    with pytest.raises(InvalidRequest) as refusal:
        encoder().pair(**pair)
    assert refusal.value.details["param"] == part


@pytest.mark.parametrize("continuation", ["", [], np.array([], int)], ids=repr)
@pytest.mark.parametrize("context", ["", "c", [5]])
def test_nothing_to_score_is_refused(context: Any, continuation: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        encoder().pair(context, continuation)
    assert refusal.value.details["param"] == "continuation"


# ------------------------------------------------------------------------------ windows and room


def test_windows_are_those_of_evaluation_harnesses() -> None:
    """Ten tokens and inputs of at most four: the example of lm-evaluation-harness."""
    document = list(range(10, 20))
    assert list(encoder().windows(document, 5)) == [
        ([BOS], [10, 11, 12, 13]),
        ([13], [14, 15, 16, 17]),
        ([15, 16, 17], [18, 19]),
    ]


def test_a_document_may_be_text() -> None:
    assert list(encoder().windows("ab ab", 2)) == [
        ([BOS], ids("ab")),
        (ids("ab"), ids(" a")),
        (ids(" a"), ids("b")),
    ]
    with pytest.raises(InvalidRequest):
        list(encoder().windows("", 5))


@given(num_tokens=st.integers(1, 60), max_tokens=st.integers(2, 30))
def test_windows_score_each_token_once_with_what_stands_before_it(
    num_tokens: int, max_tokens: int
) -> None:
    document = list(range(100, 100 + num_tokens))
    pairs = list(encoder().windows(document, max_tokens))
    assert [token for pair in pairs for token in pair.continuation] == document
    whole = [BOS, *document]
    for pair in pairs:
        joined = pair.context + pair.continuation
        place = whole.index(joined[0])
        assert joined == whole[place : place + len(joined)]
        assert pair.context
        assert len(joined) <= max_tokens
    if len(pairs) > 1:
        assert {len(pair.context + pair.continuation) for pair in pairs} == {max_tokens}


def test_a_context_loses_its_beginning_for_want_of_room() -> None:
    pair = TokenPair([1, 2, 3, 4], [5, 6])
    assert with_room(pair, 6) == pair
    assert with_room(pair, 5) == ([2, 3, 4], [5, 6])
    assert with_room(pair, 3) == ([4], [5, 6])
    assert with_room(pair, 2) == pair, "nothing would be left to condition it on"
