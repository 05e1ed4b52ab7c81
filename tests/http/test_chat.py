"""Chat completions: the model's own template, and logprobs with the bytes of each token."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from cluster import Client, SamplingParams
from tests.http.conftest import ids

TURNS: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TEXT = "<system>Be brief.<user>Hi<a>"


def test_messages_go_through_the_models_template(api: openai.OpenAI, engine: Client) -> None:
    found = api.chat.completions.create(
        model="tiny",
        messages=TURNS,
        max_completion_tokens=5,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    wanted = engine.submit(ids(TEXT), SamplingParams(max_tokens=5, temperature=0.0)).result()
    (choice,) = found.choices
    assert choice.model_extra is not None
    assert choice.model_extra["prompt_token_ids"] == ids(TEXT)
    assert choice.message.role == "assistant"
    assert choice.message.content == wanted.outputs[0].text
    assert found.object == "chat.completion"
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(ids(TEXT))


def test_content_may_come_in_parts(api: openai.OpenAI) -> None:
    parts: Any = [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    ]
    found = api.chat.completions.create(
        model="tiny", messages=parts, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert found.choices[0].model_extra is not None
    assert found.choices[0].model_extra["prompt_token_ids"] == ids("<user>Hi<a>")


def test_logprobs_hold_the_bytes_of_partial_characters(api: openai.OpenAI, engine: Client) -> None:
    """A character of three tokens: no one of them is text, and the bytes together are it."""
    wanted = ids("好")
    first = api.chat.completions.create(
        model="tiny",
        messages=TURNS,
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=1,
        extra_body={"allowed_token_ids": [wanted[0]]},
    )
    logprobs = first.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [row.token for row in logprobs.content] == ["bytes:\\xe5"] * 3
    assert [row.bytes for row in logprobs.content] == [[0xE5]] * 3
    assert all(len(row.top_logprobs) == 1 for row in logprobs.content)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "no robots"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"top_logprobs": 2}, "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 101}, "top_logprobs=101"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs=-2"),
        ({"max_completion_tokens": -1}, "max_completion_tokens=-1"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "differ"),
    ],
)
def test_what_a_chat_can_not_be(api: openai.OpenAI, body: dict[str, Any], match: str) -> None:
    asked = {"model": "tiny", "messages": TURNS, "max_tokens": 1} | body
    if "max_completion_tokens" in body and "max_tokens" not in body:
        del asked["max_tokens"]
    with pytest.raises(openai.BadRequestError, match=match):
        api.chat.completions.create(**asked)
