"""Clients over restarts of a real scheduler: results come as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import Client, SamplingParams
from cluster.config import EngineConfig
from cluster.launch import kill_engine, start_engine
from scheduler.errors import DuplicateRequest, EngineUnavailable, Overloaded, UnknownRequest
from tests.engine.conftest import (
    DEADLINE_S,
    ENGINE,
    LASTING,
    assert_idle,
    pid_of,
    stopped,
    wait_for,
)

PROMPTS = [[40 + (i * j) % 100 for j in range(90)] for i in range(1, 7)]
PARAMS = SamplingParams(max_tokens=60, prompt_logprobs=1, logprobs=1, seed=3, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=["with a journal", pytest.param("without a journal", marks=pytest.mark.slow)],
)
def config(
    request: Any, local_cluster: None, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineConfig]:
    """Settings of a running engine that outlives its clients."""
    journal = tmp_path_factory.mktemp("journal") / "requests.db"
    settings = ENGINE | {"num_workers": 1, "client_grace_s": 8.0, "max_queued_requests": 30}
    if request.param == "with a journal":
        settings["journal_path"] = str(journal)
    found = EngineConfig(model=tiny_model, name="restarting", **settings)
    handles = start_engine(found)
    assert handles is not None
    yield found
    kill_engine(handles)


def join(config: EngineConfig) -> Client:
    return Client(name=config.name, namespace=config.namespace, start=False)


@pytest.fixture
def client(config: EngineConfig) -> Iterator[Client]:
    with join(config) as client:
        yield client
        assert_idle(client)


def kill_scheduler(config: EngineConfig) -> None:
    os.kill(pid_of(f"haversack-{config.name}-scheduler"), signal.SIGKILL)


def decoding(client: Client) -> bool:
    return any(info.num_output_tokens for info in client.requests())


def test_handles_go_on_over_a_restart_of_the_scheduler(
    config: EngineConfig, client: Client
) -> None:
    """Streamed or waited for: each token and row once, and the bits of an undisturbed run."""
    expected = client.generate(PROMPTS, PARAMS)
    handles = client.submit_many(PROMPTS, PARAMS)
    streamed: list[int] = []
    reader = threading.Thread(
        target=lambda: streamed.extend(t for d in handles[0].stream() for t in d.token_ids)
    )
    reader.start()
    wait_for(lambda: bool(streamed), "the first one streams")
    kill_scheduler(config)
    for handle, wanted in zip(handles, expected, strict=True):
        output = handle.result(timeout=DEADLINE_S)
        assert output.outputs == wanted.outputs
        assert output.prompt_logprobs == wanted.prompt_logprobs
    reader.join(DEADLINE_S)
    assert streamed == expected[0].outputs[0].token_ids


def test_calls_that_meet_a_restart_get_through(config: EngineConfig, client: Client) -> None:
    """Submissions, a cancel and questions, made while there is no scheduler."""
    doomed = client.submit(PROMPTS[0], LASTING)
    wait_for(lambda: decoding(client), "it is decoded")
    expected = client.submit(PROMPTS[1], PARAMS).result(timeout=DEADLINE_S)
    kill_scheduler(config)
    doomed.cancel()
    handle = client.submit(PROMPTS[1], PARAMS)
    assert client.stats().scheduler.num_workers <= 1
    assert handle.result(timeout=DEADLINE_S).outputs == expected.outputs
    assert doomed.result(timeout=DEADLINE_S).outputs[0].finish_reason == "abort"


def test_a_client_that_closes_in_a_restart_leaves_nothing_running(
    config: EngineConfig, client: Client
) -> None:
    """Its goodbye is lost; it is given up like any client that vanishes."""
    with join(config) as leaving:
        handle = leaving.submit(PROMPTS[0], LASTING)
        wait_for(lambda: decoding(client), "it is decoded")
        kill_scheduler(config)
    assert handle.done()
    wait_for(lambda: not client.requests(), "the closed client's request ends")


def test_detached_requests_outlive_their_client_and_the_scheduler(
    config: EngineConfig, client: Client
) -> None:
    """Submitted, left, restarted; the result is to be had from any client by its id alone."""
    if config.journal_path is None:
        pytest.skip("detached requests take a journal")
    expected = client.submit(PROMPTS[2], PARAMS).result(timeout=DEADLINE_S)
    with stopped(*(worker.pid for worker in client.workers())), join(config) as leaving:
        left = leaving.submit(PROMPTS[2], PARAMS, request_id="job", detached=True)
        same = leaving.submit(PROMPTS[2], PARAMS, request_id="job", detached=True)
        assert same is left
    with pytest.raises(EngineUnavailable, match="goes on"):
        left.result(timeout=0)
    kill_scheduler(config)
    output = client.result("job", timeout=DEADLINE_S)
    assert output.outputs == expected.outputs
    assert output.prompt_logprobs == expected.prompt_logprobs
    kill_scheduler(config)
    num_steps = client.stats().scheduler.num_steps
    again = client.submit(PROMPTS[2], PARAMS, request_id="job").result(timeout=DEADLINE_S)
    assert again.outputs == expected.outputs
    assert client.stats().scheduler.num_steps == num_steps
    with pytest.raises(UnknownRequest):
        client.result("another", timeout=DEADLINE_S)


def test_an_id_keeps_its_content_over_a_restart(config: EngineConfig, client: Client) -> None:
    handle = client.submit(PROMPTS[0], LASTING, request_id="kept")
    wait_for(lambda: decoding(client), "it is decoded")
    kill_scheduler(config)
    wait_for(lambda: decoding(client), "it goes on")
    with join(config) as other:
        with pytest.raises(DuplicateRequest):
            other.submit(PROMPTS[1], LASTING, request_id="kept")
        attached = other.attach("kept")
        assert attached.submission.prompt_token_ids.tolist() == PROMPTS[0]
    handle.cancel()
    assert handle.result(timeout=DEADLINE_S).outputs[0].finish_reason == "abort"


def test_a_full_queue_says_when_to_come_again_and_generate_does(client: Client) -> None:
    """Ten times what the queue holds."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    prompts = [[40 + i % 90, 41] for i in range(300)]
    handles = client.submit_many(prompts, params)
    refusals = []
    for handle in handles:
        try:
            handle.result(timeout=DEADLINE_S)
        except Overloaded as error:
            refusals.append(error)
    assert 0 < len(refusals) < len(prompts)
    assert all(float(error.details["retry_after_s"] or 0) > 0 for error in refusals)
    outputs = client.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_a_journal_is_where_the_user_said(config: EngineConfig) -> None:
    if config.journal_path is not None:
        assert Path(config.journal_path).exists()
