"""The routes beside generation: scores, tokenizing, what Prometheus reads, what is served."""

from __future__ import annotations

import httpx
import openai
import pytest

from cluster import Client, ScoringParams
from cluster.client import Client as EngineClient
from tests.engine.conftest import wait_for
from tests.http.conftest import ids
from tests.tiny_models import MAX_MODEL_LEN

PHRASE = "naïve 你好 <eos>"


def test_continuations_are_scored(http: httpx.Client, engine: Client) -> None:
    choices = [" there", " you", " 你"]
    body = {"context": "Hi", "continuations": choices, "logprobs": 2}
    found = http.post("/score", json=body).json()
    wanted = list(engine.score_many((("Hi", c) for c in choices), ScoringParams(logprobs=2)))
    assert [entry["index"] for entry in found["data"]] == [0, 1, 2]
    for entry, score in zip(found["data"], wanted, strict=True):
        assert entry["logprob"] == score.logprob
        assert entry["is_greedy"] == score.is_greedy
        assert entry["token_ids"] == score.token_ids
        assert entry["token_logprobs"] == score.token_logprobs.arrays.logprobs[:, 0].tolist()
        assert entry["num_context_tokens"] == 2
        assert [len(tops) for tops in entry["top_logprobs"]] == [2] * score.num_tokens
    assert found["usage"]["completion_tokens"] == 0
    as_ids = {"context": ids("Hi"), "continuations": [ids(c) for c in choices], "logprobs": 2}
    assert http.post("/score", json=as_ids).json()["data"] == found["data"]


def test_one_continuation_and_no_context(http: httpx.Client, engine: Client) -> None:
    found = http.post("/score", json={"context": "", "continuations": "Hi"}).json()
    assert found["data"][0]["logprob"] == engine.score("", "Hi").logprob


@pytest.mark.parametrize(
    "body",
    [
        {"context": "a", "continuations": []},
        {"context": "a", "continuations": ["b", ""]},
        {"context": 5, "continuations": "b"},
        {"context": "a"},
        {"context": "a", "continuations": "b", "logprobs": 101},
        {"context": "a", "continuations": "b" * (MAX_MODEL_LEN + 1)},
    ],
)
def test_what_can_not_be_scored(http: httpx.Client, body: dict[str, object]) -> None:
    answer = http.post("/score", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_text_goes_there_and_back(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"prompt": PHRASE, "return_token_strs": True}).json()
    assert found["tokens"] == ids(PHRASE)
    assert found["count"] == len(ids(PHRASE)) == len(found["token_strs"])
    assert found["token_strs"][-1] == "<eos>"
    back = http.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": PHRASE}


def test_a_conversation_is_tokenized_as_the_chat_does(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert http.post("/tokenize", json=body).json()["tokens"] == ids("<user>Hi<a>")
    assert http.post("/tokenize", json={}).status_code == 400
    assert http.post("/detokenize", json={"tokens": [300]}).status_code == 400


def test_each_name_of_the_model_is_described_by_itself(
    http: httpx.Client, api: openai.OpenAI
) -> None:
    listed = http.get("/v1/models").json()["data"]
    assert [http.get(f"/v1/models/{each['id']}").json() for each in listed] == listed
    assert api.models.retrieve(listed[0]["id"]).id == listed[0]["id"]
    with pytest.raises(openai.NotFoundError) as raised:
        api.models.retrieve("no/body")
    assert raised.value.code == "model_not_found"


def test_the_tokenizer_and_the_model_are_described(http: httpx.Client, api: openai.OpenAI) -> None:
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token_id"], info["vocab_size"]) == ("<eos>", 256, 300)
    assert "<{{ m.role }}>" in info["chat_template"]
    assert [model.id for model in api.models.list()] == ["tiny", "other-name"]
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/score", "/health"} <= set(paths)


def test_prometheus_reads_the_engines_counters(http: httpx.Client, engine: EngineClient) -> None:
    http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
    finished = engine.stats().scheduler.finished_by_reason["length"]
    wanted = f'haversack_requests_finished_total{{engine="http",reason="length"}} {finished:.1f}'

    def lines() -> list[str]:
        answer = http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return answer.text.splitlines()

    wait_for(lambda: wanted in lines(), "counters are told")
    text = lines()
    assert "# TYPE haversack_workers gauge" in text
    assert 'haversack_workers{engine="http"} 2.0' in text
    wanted = 'haversack_http_requests_total{route="/v1/completions",status="200"}'
    assert any(line.startswith(wanted) for line in text)
