"""When a client needs the model's tokenizer, which takes seconds and hundreds of MB to import."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import intake as intake_module
from cluster.connection import Connection
from cluster.handle import RequestHandle
from cluster.intake import Intake, Options
from scheduler.errors import ModelNotFound
from scheduler.sampling_params import SamplingParams
from tests.scoring_engine import DEADLINE_S, Engine
from tests.tiny_models import byte_tokenizer

PROMPT = [72, 105, 33]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models whose tokenizers were loaded."""
    loaded: list[str] = []

    def load(name: str) -> Any:
        loaded.append(name)
        return byte_tokenizer()

    monkeypatch.setattr(intake_module, "load_tokenizer", load)
    return loaded


@pytest.fixture
def connection() -> Iterator[Connection]:
    made = Connection(Engine(), "c")
    made.start()
    yield made
    made.close()


def handle_of(intake: Intake, params: SamplingParams) -> RequestHandle:
    return intake.handle(PROMPT, params, None, Options())


def test_rows_of_a_prompt_need_it_only_for_their_text(
    connection: Connection, loads: list[str]
) -> None:
    intake = Intake(connection)
    handle = handle_of(intake, SamplingParams(prompt_logprobs=1, max_tokens=0))
    connection.submit([handle])
    found = handle.result(DEADLINE_S).prompt_logprobs
    assert found is not None
    assert found.arrays.num_rows == 2
    assert not loads
    entry = found[1]
    assert entry is not None
    assert entry[PROMPT[1]].decoded_token == byte_tokenizer().decode([PROMPT[1]])
    assert len(loads) == 1


@pytest.mark.parametrize("max_tokens", [1, None])
def test_what_is_generated_needs_it_before_it_is_submitted(
    connection: Connection, loads: list[str], max_tokens: int | None
) -> None:
    handle_of(Intake(connection), SamplingParams(max_tokens=max_tokens))
    assert len(loads) == 1


def test_a_model_without_one_scores_and_says_so_where_text_is_asked_for(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> Any:
        raise ModelNotFound("no tokenizer")

    monkeypatch.setattr(intake_module, "load_tokenizer", fail)
    intake = Intake(connection)
    with pytest.raises(ModelNotFound):
        handle_of(intake, SamplingParams(max_tokens=1))
    handle = handle_of(intake, SamplingParams(prompt_logprobs=1, max_tokens=0))
    connection.submit([handle])
    rows = handle.result(DEADLINE_S).prompt_logprobs
    assert rows is not None
    with pytest.raises(ModelNotFound):
        rows[1]


def test_a_result_can_go_to_another_process_before_its_text_was_looked_at(
    connection: Connection, loads: list[str]
) -> None:
    intake = Intake(connection)
    handle = handle_of(intake, SamplingParams(prompt_logprobs=1, max_tokens=0))
    connection.submit([handle])
    sent = pickle.loads(pickle.dumps(handle.result(DEADLINE_S)))
    assert not loads
    assert sent.prompt_logprobs[1][PROMPT[1]].decoded_token
