"""Token strings, offsets and numbers of the endpoint's answers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cluster.api_text import (
    LOWEST_LOGPROB,
    Offsets,
    TokenStrings,
    as_json,
    completion_logprobs,
    echo_of,
    prompt_entries,
)
from cluster.detokenizer import TokenTable
from scheduler.logprobs import Logprobs
from tests.tiny_models import BOS, EOS, byte_tokenizer

PHRASE = "a你好é!"


@pytest.fixture(scope="module")
def strings() -> TokenStrings:
    return TokenStrings(TokenTable(byte_tokenizer))


def ids(text: str) -> list[int]:
    return list(byte_tokenizer()(text).input_ids)


def rows(*columns: tuple[int, float]) -> Logprobs:
    """One row of tokens with their logprobs."""
    return Logprobs(
        np.array([[token for token, _ in columns]], np.int32),
        np.array([[value for _, value in columns]], np.float32),
        np.arange(1, len(columns) + 1, dtype=np.int32)[None],
    )


def test_a_token_is_its_text_or_its_bytes(strings: TokenStrings) -> None:
    assert [strings.string(token) for token in ids("aé")] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert strings.string(EOS) == "<eos>"
    assert TokenStrings(None).string(5) == "token_id:5"


def test_offsets_add_up_over_characters_of_several_tokens(strings: TokenStrings) -> None:
    """Each offset is the length of the text that the tokens before it make up."""
    tokens = ids(PHRASE)
    found = Offsets(True).take(strings, tokens)
    data = PHRASE.encode()
    assert found == [len(data[:i].decode(errors="ignore")) for i in range(len(data))]


def test_offsets_do_not_depend_on_how_tokens_come(strings: TokenStrings) -> None:
    tokens = ids(PHRASE)
    pieces = Offsets(True, start=4)
    found = [offset for token in tokens for offset in pieces.take(strings, [token])]
    assert found == Offsets(True, start=4).take(strings, tokens)
    assert pieces.num_chars == 4 + len(PHRASE)


@pytest.mark.parametrize(
    ("tokens", "given", "text", "offsets"),
    [
        ([BOS, *ids("ab")], "ab", "ab", [0, 0, 1]),
        ([BOS, *ids("ab")], None, "ab", [0, 0, 1]),
        ([*ids("a"), EOS, *ids("b")], "a<eos>b", "a<eos>b", [0, 1, 6]),
        (ids("ABCD"), "xy", "xy", [0, 1, 2, 2]),
    ],
)
def test_an_echo_is_what_was_given(
    strings: TokenStrings, tokens: list[int], given: str | None, text: str, offsets: list[int]
) -> None:
    """Special tokens put in front take no room, those in the text do; a tokenizer that changes
    texts leaves offsets inside of it."""
    assert echo_of(strings, tokens, given, skip_special=True) == (text, offsets)


def test_an_echo_of_ids_may_keep_special_tokens(strings: TokenStrings) -> None:
    found = echo_of(strings, [BOS, *ids("a")], None, skip_special=False)
    assert found == ("<bos>a", [0, 5])


def test_no_number_is_infinite(strings: TokenStrings) -> None:
    row = rows((65, -np.inf), (66, -1.5), (67, -20000.0))
    found = completion_logprobs(strings, [65], row, -1, [0])
    assert found["token_logprobs"] == [LOWEST_LOGPROB]
    assert sorted((found["top_logprobs"][0] or {}).values()) == [-9999.0, -9999.0, -1.5]
    entry = prompt_entries(strings, 2, row, 1)[1]
    assert entry is not None
    assert entry["65"]["logprob"] == LOWEST_LOGPROB
    assert "67" not in entry
    json.dumps([found, entry], allow_nan=False)


def test_numbers_keep_their_bits() -> None:
    values = np.random.default_rng(0).standard_normal(100).astype(np.float32) - 5
    back = np.array(json.loads(json.dumps(as_json(values))), np.float32)
    assert back.tobytes() == values.tobytes()
