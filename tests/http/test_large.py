"""What is large is worked on elsewhere: answers are the same, and nobody else waits for them."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress
from typing import Any

import httpx
import pytest
import ray

from cluster import Client, EngineUnavailable, SamplingParams, ScoringParams
from cluster.api_work import LARGE, Helper, HelperActor, Texts
from tests.engine.conftest import DEADLINE_S, wait_for
from tests.http.conftest import ids
from tests.http.test_errors import refused
from tests.http.test_streaming import chunks, joined
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE

TOO_LONG = max(LARGE, MAX_MODEL_LEN) + 1
"""For a prompt; and work on it is large."""
PADDING = "x" * TOO_LONG
"""Of a field that is not used: it makes a body large and changes nothing else."""
TEXT = "naïve 你好 <eos> and so on. " * 2000
JSON = {"content-type": "application/json"}


def post(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    """Send a body that may hold halves of characters, which httpx would not write."""
    return http.post(path, content=json.dumps(body), headers=JSON)


@pytest.mark.parametrize("prompt", ["Hi there", ids("Hi there"), ["a", "bc"], [[1], ids("bc")]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_large_body_is_answered_as_a_small_one(
    http: httpx.Client, prompt: Any, stream: bool
) -> None:
    body = {"prompt": prompt, "max_tokens": 4, "seed": 3, "echo": True, "logprobs": 2}
    body |= {"return_token_ids": True}
    small = http.post("/v1/completions", json=body).json()["choices"]
    large = body | {"user": PADDING}
    if stream:
        found = joined(list(chunks(http, "/v1/completions", large)))
        assert found == {choice["index"]: choice for choice in small}
    else:
        assert http.post("/v1/completions", json=large).json()["choices"] == small


def test_a_large_conversation_is_answered_as_a_small_one(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "logprobs": True}
    small = http.post("/v1/chat/completions", json=body).json()["choices"]
    found = http.post("/v1/chat/completions", json=body | {"user": PADDING}).json()["choices"]
    assert found == small


def test_a_long_text_goes_there_and_back(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert found["tokens"] == ids(TEXT)
    assert found["count"] == len(found["token_strs"]) > LARGE
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": TEXT}
    messages = {"messages": [{"role": "user", "content": TEXT}]}
    assert http.post("/tokenize", json=messages).json()["tokens"] == ids(f"<user>{TEXT}<a>")


def test_large_answers_hold_the_engines_rows(http: httpx.Client, engine: Client) -> None:
    """More logprobs than one piece of work may have; streamed they are the same, piece by piece."""
    prompt = ids("All work and no play. " * 24)
    body = {"prompt": [prompt] * 2, "prompt_logprobs": 100, "max_tokens": 3, "temperature": 0}
    body |= {"return_token_ids": True}
    whole = http.post("/v1/completions", json=body).json()
    assert 2 * len(prompt) * 101 > 2 * LARGE
    params = SamplingParams(prompt_logprobs=100, max_tokens=3, temperature=0.0)
    wanted = engine.submit(prompt, params).result()
    assert wanted.prompt_logprobs is not None
    for choice in whole["choices"]:
        assert choice["token_ids"] == wanted.outputs[0].token_ids
        rows = choice["prompt_logprobs"]
        assert rows[0] is None
        for told, row in zip(rows[1:], wanted.prompt_logprobs[1:], strict=True):
            assert row is not None
            assert {int(t): (e["logprob"], e["rank"]) for t, e in told.items()} == {
                t: (e.logprob, e.rank) for t, e in row.items()
            }
    streamed = joined(list(chunks(http, "/v1/completions", body)))
    assert streamed == {choice["index"]: choice for choice in whole["choices"]}


def test_many_long_pairs_are_scored(http: httpx.Client, engine: Client) -> None:
    context, choices = "Once upon a time " * 33, [f" there was no {i}" for i in range(100)]
    assert len(context) * len(choices) > LARGE
    body = {"context": context, "continuations": choices}
    found = http.post("/score", json=body).json()["data"]
    wanted = list(engine.score_many(((context, choice) for choice in choices), ScoringParams()))
    assert [entry["logprob"] for entry in found] == [score.logprob for score in wanted]
    assert [entry["token_ids"] for entry in found] == [score.token_ids for score in wanted]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "user": PADDING, "max_token": 3}, "max_token"),
        ("/v1/completions", {"prompt": "a", "user": PADDING, "n": "2"}, "n"),
        ("/v1/completions", {"user": PADDING}, "prompt"),
        ("/v1/completions", {"prompt": PADDING, "max_tokens": 0}, "prompt"),
        ("/v1/completions", {"prompt": ["a", PADDING + "\ud800"]}, "prompt"),
        ("/v1/completions", {"prompt": [5] * TOO_LONG}, "prompt"),
        ("/v1/completions", {"prompt": [[5], [5] * TOO_LONG + [VOCAB_SIZE]]}, "prompt"),
        ("/v1/completions", {"prompt": [[5] * TOO_LONG + [10**30]]}, "prompt"),
        ("/v1/completions", {"prompt": [5] * TOO_LONG + [True]}, "prompt"),
        ("/v1/completions", {"prompt": [5] * TOO_LONG + ["a"]}, "prompt"),
        ("/v1/chat/completions", {"messages": [], "user": PADDING}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "robot", "content": PADDING}]}, "messages"),
        ("/score", {"context": PADDING, "continuations": ["b", ""]}, "continuation"),
        ("/score", {"context": [5] * TOO_LONG, "continuations": "b"}, "prompt"),
        ("/tokenize", {"prompt": PADDING + "\ud800"}, "prompt"),
        ("/detokenize", {"tokens": [5] * TOO_LONG + [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": {"a": PADDING}}, "tokens"),
    ],
)
def test_what_is_wrong_with_a_large_body_is_named(
    http: httpx.Client, path: str, body: Any, param: str
) -> None:
    assert refused(post(http, path, body), 400)["param"] == param


@pytest.mark.parametrize("content", [b"{" + b" " * LARGE, b"[" * 2 * LARGE, b"\xff" * 2 * LARGE])
def test_a_large_body_that_is_no_json(http: httpx.Client, content: bytes) -> None:
    answer = http.post("/v1/completions", content=content, headers=JSON)
    assert refused(answer, 400)["code"] == "invalid_json"


def helper_pids() -> list[int]:
    """Return the processes for large work, of all endpoints here."""
    state: Any = ray._private.state.state
    return [
        actor["Pid"]
        for actor in state.actor_table(None).values()
        if actor["ActorClassName"] == HelperActor.__name__ and actor["State"] == "ALIVE"
    ]


def test_everybody_else_is_answered_while_a_long_prompt_is_tokenised(
    http: httpx.Client, main_url: str
) -> None:
    """For however long that takes: the processes that it is done in stand still."""
    body = {"prompt": "word " * 12_000}
    assert post(http, "/tokenize", body).status_code == 200  # the process is there
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{main_url}/tokenize", json=body, timeout=None))
    )
    pids = helper_pids()
    assert pids
    for each in pids:
        os.kill(each, signal.SIGSTOP)
    try:
        thread.start()
        for _ in range(30):
            assert http.get("/health").status_code == 200
            assert http.get("/v1/models").status_code == 200
            small = {"prompt": "Hi", "max_tokens": 1}
            assert http.post("/v1/completions", json=small).status_code == 200
            assert http.post("/tokenize", json={"prompt": "Hi"}).status_code == 200
        assert not answers, "it is not done in those processes"
    finally:
        for each in pids:
            os.kill(each, signal.SIGCONT)
    thread.join(DEADLINE_S)
    assert [answer.status_code for answer in answers] == [200]


def pid(texts: Texts) -> int:
    return os.getpid()


def fail(texts: Texts) -> None:
    raise ZeroDivisionError("a bug")


@pytest.mark.slow
def test_the_process_for_large_work_is_started_again(engine: Client, tiny_model: str) -> None:
    helper = Helper(tiny_model, engine.info.limits)
    first = helper.run(pid)
    assert first != os.getpid()
    with pytest.raises(ZeroDivisionError):
        helper.run(fail)
    os.kill(first, signal.SIGKILL)

    def runs_again() -> bool:
        with suppress(EngineUnavailable):
            return helper.run(pid) not in (first, os.getpid())
        return False

    wait_for(runs_again, "it runs again")
    helper.close()
