"""Every way to err has a status, OpenAI's shape, and a text that names what was wrong."""

from __future__ import annotations

import gzip
import json
import os
import signal
from typing import Any

import httpx
import openai
import pytest

from cluster import Client, SamplingParams
from tests.engine.conftest import DEADLINE_S, ENGINE, wait_for
from tests.http.conftest import LASTING, deployed, ids, settings_of, until
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error object of an answer; its form is checked."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [2**32 - 1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 129}, "n"),
        ({"prompt": "a", "n": "2"}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": -2}, "logprobs"),
        ({"prompt": "a", "logprobs": 101}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": VOCAB_SIZE + 1}, "prompt_logprobs"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "min_tokens": 99}, "min_tokens"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "timeout_s": 0}, "timeout_s"),
        ({"prompt": "a", "request_id": ""}, "request_id"),
        ({"prompt": "a", "priority": 2**40}, "priority"),
        (
            {"prompt": "a", "prompt_logprobs": 0, "prompt_logprobs_start": 2},
            "prompt_logprobs_start",
        ),
        ({"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprob_token_ids": [1]}, "logprobs"),
        ({"prompt": "a" * (MAX_MODEL_LEN + 1), "max_tokens": 0}, "prompt"),
        ({"prompt": "a", "beam": 3}, "beam"),
        ({"prompt": "a", "stream_options": {"x": 3}, "stream": True}, "stream_options.x"),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    # Not by httpx: JSON may hold halves of characters, which httpx refuses to write.
    content, headers = json.dumps(body), {"content-type": "application/json"}
    error = refused(http.post("/v1/completions", content=content, headers=headers), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_an_unknown_field_is_named_with_the_nearest(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_token": 3}
    error = refused(http.post("/v1/completions", json=body), 400)
    assert error["code"] == "unknown_field"
    assert "'max_token'" in error["message"]
    assert "'max_tokens'" in error["message"]


def test_what_is_allowed_beside_it_is_allowed(http: httpx.Client) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 1,
        "n": 2,
        "best_of": 2,
        "user": "me",
        "stop": None,
        "model": "other-name",
        "suffix": None,
        "logit_bias": {},
    }
    assert http.post("/v1/completions", json=body).status_code == 200


def test_a_prompt_that_is_longer_than_the_context_is_refused_with_openais_code(
    http: httpx.Client,
) -> None:
    body = {"prompt": [5] * (MAX_MODEL_LEN + 1), "max_tokens": 0}
    error = refused(http.post("/v1/completions", json=body), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 5000,
        b"[" * 100_000,
        b'"x"',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_none(http: httpx.Client, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    error = refused(http.post("/v1/completions", content=content, headers=headers), 400)
    assert error["code"] == "invalid_json"


def test_a_compressed_body_is_refused_as_such(http: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    content = gzip.compress(b'{"prompt": "a"}')
    error = refused(http.post("/v1/completions", content=content, headers=headers), 415)
    assert error["code"] == "unsupported_encoding"


@pytest.mark.parametrize(
    ("content", "param", "word"),
    [
        (None, "messages.0.content", "string"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages.0.content.0.type", "text"),
        ([{"type": "text", "text": 5}], "messages.0.content.0.text", "string"),
    ],
)
def test_what_is_wrong_in_a_message_is_named_by_its_place(
    http: httpx.Client, content: Any, param: str, word: str
) -> None:
    body = {"messages": [{"role": "user", "content": content}]}
    error = refused(http.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == param
    assert word in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a"] * 1000, "request_id": "x" * 100_000},
        {"prompt": [[["x" * 1_000_000]]]},
        {"prompt": "a", "model": "x" * 1_000_000},
    ],
)
def test_a_refusal_does_not_send_all_back(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = http.post("/v1/completions", json=body | {"max_tokens": 0})
    assert 400 <= answer.status_code < 500
    assert len(answer.content) < 20_000


def test_paths_and_models_that_are_not_there(http: httpx.Client, api: openai.OpenAI) -> None:
    refused(http.get("/v1/nothing"), 404)
    refused(http.get("/v1/completions"), 405)
    with pytest.raises(openai.NotFoundError) as raised:
        api.completions.create(model="nobody", prompt="a")
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"


def test_an_id_is_taken_while_its_request_lives(http: httpx.Client, engine: Client) -> None:
    body = LASTING | {"request_id": "mine"}
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as first:
        lines = first.iter_lines()  # held on to: one that is dropped closes the stream
        next(lines)
        error = refused(http.post("/v1/completions", json=body), 400)
        assert error["code"] == "duplicate_request"
        assert {info.request_id for info in engine.requests()} <= {f"mine#{i}" for i in range(8)}
    again = until(lambda: http.post("/v1/completions", json=body | {"max_tokens": 1}), 200)
    assert again.json()["id"] == "cmpl-mine"


def test_a_deadline_is_kept(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", json=LASTING | {"timeout_s": 0.05}), 503)
    assert error["code"] == "deadline_exceeded"


# ----------------------------------------------------------------------------- keys and limits


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "sesame", "Basic sesame"])
def test_without_a_key_nobody_gets_in(guarded_url: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
        answer = httpx.get(guarded_url + path, headers=headers)
        error = refused(answer, 401)
        assert error["code"] == "invalid_api_key"
        assert "wrong" not in answer.text
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{guarded_url}/health", headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["sesame", "poppy"])
def test_each_key_lets_in(guarded_url: str, key: str) -> None:
    with openai.OpenAI(base_url=f"{guarded_url}/v1", api_key=key) as client:
        assert [model.id for model in client.models.list()] == ["tiny", "other-name"]


@pytest.fixture
def guarded(guarded_url: str) -> httpx.Client:
    return httpx.Client(
        base_url=guarded_url, headers={"authorization": "Bearer sesame"}, timeout=60
    )


def test_a_body_may_be_so_large(guarded: httpx.Client) -> None:
    """Whether it says its length or comes in pieces."""
    content = json.dumps({"prompt": "a" * 3000}).encode()
    headers = {"content-type": "application/json"}
    declared = guarded.post("/v1/completions", content=content, headers=headers)
    assert refused(declared, 413)["code"] == "body_too_large"
    pieces = (content[i : i + 500] for i in range(0, len(content), 500))
    refused(guarded.post("/v1/completions", content=pieces, headers=headers), 413)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a"] * 4}, "prompt"),
        ({"prompt": "a", "n": 3}, "n"),
        ({"prompt": "a", "logprobs": 5}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": 5}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprob_token_ids": [1, 2, 3, 4, 5]}, "prompt_logprobs"),
        ({"prompt": "a" * 30, "prompt_logprobs": 1, "max_tokens": 0}, "logprobs"),
    ],
)
def test_an_endpoint_has_limits_of_its_own(
    guarded: httpx.Client, body: dict[str, Any], param: str
) -> None:
    assert refused(guarded.post("/v1/completions", json=body), 400)["param"] == param


@pytest.mark.slow
def test_an_engine_that_holds_little_says_so(
    local_cluster: None, tiny_model: str, main_url: str
) -> None:
    """A prompt may fill its pool, which is smaller than the context; and its queue is full soon."""
    room = 600
    settings = {"num_workers": 1, "max_num_seqs": 1, "max_queued_requests": 1}
    settings["num_blocks"] = room // ENGINE["block_size"]
    with (
        Client(model=tiny_model, name="narrow", **ENGINE | settings) as engine,
        deployed(settings_of(engine), main_url, "/narrow") as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S) as http,
    ):
        for max_tokens in (0, 1):
            body = {"prompt": [5] * room, "max_tokens": max_tokens, "temperature": 0}
            assert http.post("/v1/completions", json=body).status_code == 200
        body = {"prompt": [5] * room, "max_tokens": 10}
        assert refused(http.post("/v1/completions", json=body), 400)["code"] == "request_too_large"

        one_by_one = SamplingParams(n=100, max_tokens=room, ignore_eos=True, temperature=0.0)
        handle = engine.submit([5], one_by_one)
        wait_for(lambda: engine.stats().scheduler.num_running > 0, "one runs, others wait")
        answer = http.post("/v1/completions", json={"prompt": "a"})
        handle.cancel()
        assert refused(answer, 429)["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.slow
def test_health_tells_when_no_worker_is_left(
    local_cluster: None, tiny_model: str, main_url: str
) -> None:
    settings = ENGINE | {"num_workers": 1, "max_worker_restarts": 0}
    with (
        Client(model=tiny_model, name="orphan", **settings) as engine,
        deployed(settings_of(engine), main_url, "/orphan") as url,
    ):
        assert httpx.get(f"{url}/health").status_code == 200
        (worker,) = engine.workers()
        os.kill(worker.pid, signal.SIGKILL)
        answer = until(lambda: httpx.get(f"{url}/health"), 503)
        assert "worker" in refused(answer, 503)["message"]
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert refused(answer, 503)["code"] == "engine_unavailable"
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.slow
def test_an_engine_that_comes_back_is_served_again(
    local_cluster: None, tiny_model: str, main_url: str
) -> None:
    settings = ENGINE | {"num_workers": 1}
    with Client(model=tiny_model, name="phoenix", **settings) as engine:
        endpoint = deployed(settings_of(engine), main_url, "/phoenix")
        url = endpoint.__enter__()
        assert httpx.get(f"{url}/health").status_code == 200
    try:
        until(lambda: httpx.get(f"{url}/health"), 503)
        with Client(model=tiny_model, name="phoenix", **settings):
            until(lambda: httpx.get(f"{url}/health"), 200)
            body = {"prompt": ids("Hi"), "max_tokens": 1}
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    finally:
        endpoint.__exit__(None, None, None)
