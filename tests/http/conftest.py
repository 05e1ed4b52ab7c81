"""One endpoint in front of one small engine, that most tests share, and the official client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest

from cluster import Client
from cluster.api_settings import ApiSettings, Limits, key_digests
from cluster.config import EngineConfig
from cluster.serving import Endpoint
from tests.engine.conftest import DEADLINE_S, ENGINE, assert_idle, local_cluster
from tests.tiny_models import MAX_MODEL_LEN, byte_tokenizer, tiny_llama

__all__ = ["local_cluster"]

MODEL = "tiny"
LASTING = {
    "prompt": "Hi",
    "n": 8,
    "max_tokens": MAX_MODEL_LEN,
    "ignore_eos": True,
    "temperature": 0,
}
"""A body of which each choice has minutes to go, on any machine, unless a test ends it."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def ids(text: str) -> list[int]:
    """Return a text's tokens: one for each of its bytes."""
    return list(byte_tokenizer()(text).input_ids)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random Llama with one token per byte and a chat template."""
    folder = tiny_llama(tmp_path_factory.mktemp("models") / "tiny-chat")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.fixture(scope="session")
def shared_engine(local_cluster: None, tiny_model: str) -> Iterator[Client]:
    with Client(model=tiny_model, name="http", **ENGINE) as client:
        yield client


def settings_of(client: Client, **limits: Any) -> ApiSettings:
    """Return the settings of an open endpoint of a running engine."""
    return ApiSettings(
        EngineConfig(**client.info.settings), (MODEL, "other-name"), (), Limits(**limits)
    )


@pytest.fixture(scope="session")
def main_url(shared_engine: Client) -> Iterator[str]:
    """The endpoint that starts Serve, and ends it after all others."""
    endpoint = Endpoint(settings_of(shared_engine), port=0)
    yield endpoint.url
    endpoint.stop()


@pytest.fixture(scope="session")
def guarded_url(shared_engine: Client, main_url: str) -> Iterator[str]:
    """An endpoint that wants keys and takes little at once."""
    base = settings_of(
        shared_engine,
        max_body_bytes=3000,
        max_prompts=3,
        max_n=2,
        max_logprobs=4,
        max_logprob_entries=40,
    )
    digests = key_digests(["sesame", "poppy"])
    settings = ApiSettings(base.engine, base.served_names, digests, base.limits)
    with deployed(settings, main_url, "/guarded") as url:
        yield url


@contextmanager
def deployed(settings: ApiSettings, main_url: str, prefix: str) -> Iterator[str]:
    """An endpoint of its own behind the address of the main one."""
    endpoint = Endpoint(settings, port=httpx.URL(main_url).port or 0, route_prefix=prefix)
    try:
        yield main_url + prefix
    finally:
        endpoint.stop()


@pytest.fixture
def engine(shared_engine: Client) -> Iterator[Client]:
    """The engine behind the endpoint, idle before the test and, which is checked, after it."""
    yield shared_engine
    assert_idle(shared_engine)


@pytest.fixture
def api(main_url: str, engine: Client) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, which tries nothing twice."""
    url = f"{main_url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def http(main_url: str, engine: Client) -> Iterator[httpx.Client]:
    """Plain HTTP, for what OpenAI's client would not send."""
    with httpx.Client(base_url=main_url, timeout=DEADLINE_S) as client:
        yield client


@contextmanager
def hung_up(url: str, path: str, body: dict[str, Any]) -> Iterator[HTTPConnection]:
    """Send a request, and hang up at the end instead of waiting for its answer."""
    address = httpx.URL(url)
    caller = HTTPConnection(address.host, address.port, timeout=DEADLINE_S)
    caller.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    yield caller
    caller.close()


def until(answer: Callable[[], httpx.Response], status: int) -> httpx.Response:
    """Ask until the answer has a status; fail where it has not in time."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        found = answer()
        if found.status_code == status:
            return found
        if time.monotonic() > deadline_s:
            pytest.fail(f"{found.status_code} instead of {status} after {DEADLINE_S:g} s")
        time.sleep(0.05)
