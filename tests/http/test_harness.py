"""What lm-evaluation-harness sends and reads through `local-completions`, request by request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster import Client
from tests.http.conftest import MODEL, ids
from tests.tiny_models import EOS

PAIRS = [("The cat sat on the", " mat"), ("Hi", " there, you"), ("naïve ", "好"), ("1, 2,", " 3")]


def echoed(http: httpx.Client, prompts: Any, **more: Any) -> list[dict[str, Any]]:
    """Return the logprobs of prompts and of the one token that the harness has made for each."""
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    answer = http.post("/v1/completions", json=body | {"seed": 1234, "echo": True} | more)
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    return [choice["logprobs"] for choice in choices]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihoods_are_the_scores(
    http: httpx.Client, engine: Client, batch_size: int, as_text: bool
) -> None:
    """It takes the tokens behind the context, less the one that it had made."""
    found = []
    for start in range(0, len(PAIRS), batch_size):
        texts = [context + rest for context, rest in PAIRS[start : start + batch_size]]
        prompts: Any = texts if as_text else [ids(text) for text in texts]
        found += echoed(http, prompts[0] if as_text and batch_size == 1 else prompts)
    for (context, rest), logprobs in zip(PAIRS, found, strict=True):
        score = engine.score(ids(context), ids(rest))
        own = logprobs["token_logprobs"][len(ids(context)) : -1]
        tops = logprobs["top_logprobs"][len(ids(context)) : -1]
        assert own == score.token_logprobs.arrays.logprobs[:, 0].tolist()
        is_greedy = all(value == max(top.values()) for value, top in zip(own, tops, strict=True))
        assert is_greedy == score.is_greedy


def test_the_token_that_it_has_made_is_there_also_where_it_ends_the_text(
    http: httpx.Client,
) -> None:
    """Else the last token of the continuation would be taken for it."""
    (logprobs,) = echoed(http, [ids("Hi there")], logit_bias={str(EOS): 100})
    assert len(logprobs["token_logprobs"]) == len(ids("Hi there")) + 1
    assert logprobs["tokens"][-1] == "<eos>"


def test_texts_end_at_its_stop_strings(http: httpx.Client) -> None:
    prompts = ["Hi", "there", "you"]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 30, "temperature": 0, "seed": 1234}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    stop = [whole[0]["text"][2:4], "<eos>"]
    cut = http.post("/v1/completions", json=body | {"stop": stop}).json()["choices"]
    for before, after in zip(whole, cut, strict=True):
        assert after["text"] == before["text"].partition(stop[0])[0]
    assert cut[0]["finish_reason"] == "stop"


def test_it_finds_the_servers_tokenizer(http: httpx.Client) -> None:
    assert http.get("/tokenizer_info").json()["eos_token"] == "<eos>"
    body = {"prompt": "<eos>", "add_special_tokens": False}
    assert http.post("/tokenize", json=body).json()["tokens"] == [EOS]
    assert http.post("/detokenize", json={"tokens": ids("naïve")}).json() == {"prompt": "naïve"}
