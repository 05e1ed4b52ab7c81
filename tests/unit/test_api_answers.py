"""Answers as bytes: what a piece of a stream needs survives its way to another process and back."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest

from cluster.api_answers import Form, PromptStream, Result, take, whole_answer
from cluster.api_bodies import Unreadable, read_body
from cluster.api_choices import Answer, Asked, Piece
from cluster.api_encoding import encode_pairs, encode_prompts
from cluster.api_models import CompletionRequest, DetokenizeRequest, ScoreRequest
from cluster.api_work import Texts
from cluster.scoring import ScoringParams
from scheduler.codec import IntArray, int_array
from scheduler.config import SchedulerConfig
from scheduler.errors import InvalidRequest
from tests.fake_scheduler import rows
from tests.tiny_models import VOCAB_SIZE, byte_tokenizer

PROMPT = "naïve 你好"
ANSWER: Answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny"}


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(byte_tokenizer(), SchedulerConfig(vocab_size=VOCAB_SIZE, max_model_len=100))


def ids(text: str) -> IntArray:
    return int_array(byte_tokenizer()(text).input_ids)


def pieces(text: str) -> list[Piece]:
    """Return a text token by token, each with a row; the text itself comes last."""
    tokens = ids(text)
    found = [
        Piece("", [int(t)], rows(0, i, tokens[i : i + 1], 1), None, None)
        for i, t in enumerate(tokens)
    ]
    found[-1] = found[-1]._replace(text=text, finish_reason="length")
    return found


def _as_lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_as_lists(each) for each in value] if isinstance(value, list) else value


def form(**asked: Any) -> Form:
    return Form(ANSWER, Asked(**asked), num_choices=2, is_chat=False, streams=True)


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line]


@pytest.mark.parametrize("asked", [{"echo": True, "num_logprobs": 1}, {"num_prompt_logprobs": 1}])
def test_a_stream_goes_on_in_another_process_and_back(texts: Texts, asked: dict[str, Any]) -> None:
    """Halves of characters, offsets and what was held back go along."""
    prompt, prompt_rows = ids(PROMPT), rows(0, 1, ids(PROMPT)[1:], 1)
    here, there = (PromptStream(form(**asked), 0, prompt, PROMPT) for _ in range(2))
    told: list[bytes] = []
    moved: list[bytes] = []
    # Choice 1 begins before the prompt's rows are there, which come with choice 0.
    order = [(1, None), (0, prompt_rows), (1, None), (0, None)]
    for step, piece in enumerate(pieces("é好")):
        index, came = order[step] if step < len(order) else (0, None)
        told.append(here.take(texts, index, piece, came))
        there, data = take(texts, pickle.loads(pickle.dumps(there)), index, piece, came)
        moved.append(data)
    assert moved == told
    assert told[0] == b""
    assert len(events(told[1])) == 2
    assert all(event["choices"][0]["index"] in (0, 1) for event in events(b"".join(told)))


def test_a_whole_answer_is_json_of_plain_numbers(texts: Texts) -> None:
    prompt = ids(PROMPT)
    piece = Piece("x", [5], None, "length", None)
    prompt_rows = rows(0, 1, prompt[1:], 2)
    result = Result(prompt, PROMPT, prompt_rows, [piece, piece], 3)
    assert result.size == len(prompt) + 3 * (len(prompt) - 1) + 2
    answer = json.loads(
        whole_answer(texts, form(num_prompt_logprobs=2, token_ids=True), [result] * 2)
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][3]["prompt_token_ids"] == prompt.tolist()
    assert answer["usage"]["prompt_tokens"] == 2 * len(prompt)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6


def test_prompts_and_pairs_become_the_tokenizers_ids(texts: Texts) -> None:
    found = encode_prompts(texts, [PROMPT, [1, 2], np.array([3, 4])])
    assert [each.tolist() for each in found] == [ids(PROMPT).tolist(), [1, 2], [3, 4]]
    with pytest.raises(InvalidRequest, match="prompt 1: the prompt is empty") as raised:
        encode_prompts(texts, ["a", ""])
    assert raised.value.details["prompt_index"] == 1
    (pair,) = encode_pairs(texts, [("a b", " c")], ScoringParams())
    assert pair == (ids("a b").tolist(), ids(" c").tolist())
    with pytest.raises(InvalidRequest, match="pair 1: ") as raised:
        encode_pairs(texts, [("a", "b"), ("a", "")], ScoringParams())
    assert raised.value.details["pair_index"] == 1


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ([1, 2], "array"),
        ([[1], [2, 3]], ["array", "array"]),
        ([[1], [True]], ["array", "list"]),
        (["a", [1]], ["str", "array"]),
        ("a", "str"),
        ([True], "list"),
        ([1.0], "list"),
        ([10**30], "list"),
        ([], "list"),
    ],
)
def test_a_body_is_read_with_its_ids_as_arrays(texts: Texts, value: Any, wanted: Any) -> None:
    def kind(found: Any) -> str:
        return "array" if isinstance(found, np.ndarray) else type(found).__name__

    bodies = [
        (CompletionRequest, {"prompt": value}, "prompt"),
        (ScoreRequest, {"context": value, "continuations": "b"}, "context"),
        (ScoreRequest, {"context": "a", "continuations": value}, "continuations"),
        (DetokenizeRequest, {"tokens": value}, "tokens"),
    ]
    for cls, body, field in bodies:
        found = read_body(texts, cls, json.dumps(body).encode())
        assert isinstance(found, cls)
        assert found.model_fields_set == set(body)
        read = getattr(found, field)
        assert ([kind(each) for each in read] if isinstance(wanted, list) else kind(read)) == wanted
        assert _as_lists(read) == value


@pytest.mark.parametrize(
    ("data", "type_", "place"),
    [
        (b'{"prompt": "a", "n": "2"}', "int_type", ("body", "n")),
        (b'{"prompt": "a", "x": 1}', "extra_forbidden", ("body", "x")),
        (b'{"prompt": "a", "stop": 5}', "string_type", ("body", "stop", "str")),
        (b'{"prompt": "a", "stop": [5]}', "string_type", ("body", "stop", "list[str]", 0)),
        (b"{", "json_invalid", ("body",)),
        (b"\xff", "json_invalid", ("body",)),
        (b"[" * 100_000, "json_invalid", ("body",)),
        (b"[]", "model_type", ("body",)),
    ],
)
def test_what_is_wrong_with_a_body_is_told(
    texts: Texts, data: bytes, type_: str, place: tuple[str, ...]
) -> None:
    found = read_body(texts, CompletionRequest, data)
    assert isinstance(found, Unreadable)
    assert (found.error["type"], found.error["loc"]) == (type_, place)
