"""Streams: their pieces put together are the answer in one piece, and a hang-up ends the work."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from cluster import Client
from tests.engine.conftest import wait_for
from tests.http.conftest import LASTING, hung_up, ids

CHINESE = "你好, wörld"


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, up to its end, which is checked."""
    with http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        yield json.loads(line.removeprefix("data: "))


def joined(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Put the pieces of every choice of a completion together."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for piece in event["choices"]:
            if piece["index"] not in choices:
                choices[piece["index"]] = piece
                continue
            whole = choices[piece["index"]]
            whole["text"] += piece["text"]
            for name, values in (piece["logprobs"] or {}).items():
                whole["logprobs"][name] += values
            whole["token_ids"] += piece["token_ids"]
            whole["finish_reason"] = piece["finish_reason"]
            whole["stop_reason"] = piece["stop_reason"]
    return choices


@pytest.mark.parametrize(
    "extra",
    [
        {"prompt": "Hi", "max_tokens": 12},
        {"prompt": CHINESE, "max_tokens": 9, "echo": True, "logprobs": 2},
        {
            "prompt": ["a", CHINESE],
            "n": 2,
            "max_tokens": 7,
            "echo": True,
            "logprobs": 1,
            "prompt_logprobs": 1,
        },
        {"prompt": [ids("ab"), ids("abc")], "max_tokens": 0, "echo": True, "logprobs": 0},
        {"prompt": "x", "max_tokens": 20, "stop": ["a", "Z"], "logprobs": 1},
    ],
)
def test_a_streams_pieces_are_the_whole_answer(http: httpx.Client, extra: dict[str, Any]) -> None:
    body = {"model": "tiny", "seed": 5, "return_token_ids": True, **extra}
    whole = http.post("/v1/completions", json=body).json()
    options = {"stream_options": {"include_usage": True}}
    events = list(chunks(http, "/v1/completions", body | options))
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({event["id"] for event in events}) == 1
    assert joined(events) == {choice["index"]: choice for choice in whole["choices"]}
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert {k: events[-1]["usage"][k] for k in counted} == {k: whole["usage"][k] for k in counted}


def test_no_usage_where_nobody_asked(http: httpx.Client) -> None:
    events = list(chunks(http, "/v1/completions", {"prompt": "x", "max_tokens": 2}))
    assert all("usage" not in event and event["choices"] for event in events)


def test_openais_client_reads_streams(api: openai.OpenAI) -> None:
    whole = api.completions.create(model="tiny", prompt="Hi", max_tokens=8, temperature=0)
    stream = api.completions.create(
        model="tiny", prompt="Hi", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(part.choices[0].text for part in stream) == whole.choices[0].text


def test_a_chat_is_streamed(api: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": CHINESE}],
        "max_tokens": 9,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = api.chat.completions.create(**asked)
    parts = list(api.chat.completions.create(stream=True, **asked))
    assert {part.object for part in parts} == {"chat.completion.chunk"}
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    rows = [
        row
        for part in parts
        for row in (part.choices[0].logprobs.content or [])
        if part.choices[0].logprobs
    ]
    assert whole.choices[0].logprobs is not None
    assert rows == whole.choices[0].logprobs.content


def num_aborted(engine: Client) -> int:
    return engine.stats().scheduler.num_aborted


def test_a_client_that_leaves_its_stream_ends_the_request(
    http: httpx.Client, engine: Client
) -> None:
    before = num_aborted(engine)
    with http.stream("POST", "/v1/completions", json=LASTING | {"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert engine.requests()
    wait_for(lambda: not engine.requests(), "nothing goes on")
    assert num_aborted(engine) > before


def test_clients_that_leave_at_any_moment_end_their_requests(
    main_url: str, http: httpx.Client, engine: Client
) -> None:
    """Also those who leave before their stream has begun, or while it is being made."""
    body = LASTING | {"stream": True, "echo": True, "logprobs": 1}

    def leave(num_lines: int) -> None:
        with hung_up(main_url, "/v1/completions", body) as caller:
            answer = caller.getresponse() if num_lines else None
            for _ in range(num_lines):
                assert answer is not None
                answer.readline()

    leaving = [threading.Thread(target=leave, args=(i // 4,)) for i in range(24)]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()
    wait_for(lambda: not engine.requests(), "nothing goes on")
    assert http.get("/health").status_code == 200


def test_a_client_that_does_not_wait_ends_the_request(main_url: str, engine: Client) -> None:
    """It waits for an answer in one piece and hangs up: nothing goes on in its name."""
    before = num_aborted(engine)
    with hung_up(main_url, "/v1/completions", LASTING | {"prompt": ["a", "b"]}):
        wait_for(lambda: len(engine.requests()) > 8, "both prompts are under way")
    wait_for(lambda: not engine.requests(), "nothing goes on")
    assert num_aborted(engine) > before


def test_a_score_ends_with_its_client(main_url: str, engine: Client) -> None:
    before = engine.stats().scheduler.num_finished
    body = {
        "context": "a" * 2000,
        "continuations": [" b" * i for i in range(1, 200)],
        "skip_reading_prefix_cache": True,
    }
    with hung_up(main_url, "/score", body):
        wait_for(lambda: bool(engine.requests()), "it is under way")
    wait_for(lambda: not engine.requests(), "nothing is under way any more")
    assert engine.stats().scheduler.num_finished < before + 199


def test_an_operator_cancels_a_score(http: httpx.Client, engine: Client) -> None:
    def cancel() -> None:
        wait_for(lambda: bool(engine.requests()), "it is under way")
        for info in engine.requests():
            engine.cancel(info.request_id)

    thread = threading.Thread(target=cancel)
    thread.start()
    body = {
        "context": "a" * 400,
        "continuations": [" b" * i for i in range(1, 200)],
        "skip_reading_prefix_cache": True,
        "request_id": "doomed-score",
    }
    answer = http.post("/score", json=body)
    thread.join()
    assert answer.status_code == 499
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("request_cancelled", "request_cancelled")
    assert "cancelled" in error["message"]


def test_an_operator_who_cancels_is_named(http: httpx.Client, engine: Client) -> None:
    """A stream that has begun can't take back its status: the error is an event."""
    body = LASTING | {"stream": True, "request_id": "doomed"}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        engine.cancel("doomed")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert error["code"] == "request_cancelled"
    assert "doomed" in error["message"]


def test_an_operator_cancels_what_waits_for_an_answer(http: httpx.Client, engine: Client) -> None:
    def cancel() -> None:
        wait_for(lambda: bool(engine.requests()), "it is under way")
        engine.cancel("doomed-too")

    thread = threading.Thread(target=cancel)
    thread.start()
    answer = http.post("/v1/completions", json=LASTING | {"request_id": "doomed-too"})
    thread.join()
    assert answer.status_code == 499
    assert answer.json()["error"]["code"] == "request_cancelled"
