"""One runner that is sent more than it has answered: tokens it knows itself, and what fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from scheduler.codec import int_array
from scheduler.errors import InvalidRequest, from_wire
from scheduler.messages import LAST_SAMPLED, ChunkResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests import tiny_models
from tests.runner_driver import RunnerDriver
from workers.loader import LoadedModel, load_model
from workers.model_runner import ModelRunner

PARAMS: dict[str, Any] = {
    "prompt_logprobs": 2,
    "logprobs": 1,
    "max_tokens": 7,
    "ignore_eos": True,
    "temperature": 0.9,
    "repetition_penalty": 1.2,
    "min_tokens": 3,
    "seed": 5,
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    @functools.cache
    def cached(dtype: str) -> LoadedModel:
        folder: Path = tmp_path_factory.mktemp("llama")
        return load_model(str(tiny_models.tiny_llama(folder)), dtype=dtype)

    return cached


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def driver(model: LoadedModel) -> RunnerDriver:
    return RunnerDriver(ModelRunner(model, num_blocks=60))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, tiny_models.VOCAB_SIZE, length).tolist()


def bits(request: Request) -> list[Any]:
    assert request.prompt_logprobs is not None
    assert request.output_logprobs is not None
    both = (request.prompt_logprobs.array(), request.output_logprobs.array())
    return [
        request.output_token_ids,
        *(part.tobytes() for rows in both for part in (rows.token_ids, rows.logprobs, rows.ranks)),
    ]


def ahead(own: RunnerDriver, request: Request, position: int, **changes: Any) -> Any:
    """A decode of the token at `position`, which the scheduler does not know yet."""
    chunk = own.chunk(request, 0, position + 1)
    return msgspec.structs.replace(
        chunk,
        start=position,
        token_ids=int_array([LAST_SAMPLED]),
        row_target_ids=int_array([]),
        first_row_position=position,
        sample=True,
        **changes,
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_token_that_only_the_worker_knows_changes_no_bit(load: Any, dtype: str) -> None:
    """Two requests, every decode sent before the one before it is answered."""
    expected = []
    for seed in range(2):
        own = driver(load(dtype))
        alone = own.request(prompt(40, seed), SamplingParams(**PARAMS), f"r{seed}")
        expected.append(bits(own.finish(alone, [40])))
    own = driver(load(dtype))
    requests = [own.request(prompt(40, i), SamplingParams(**PARAMS), f"r{i}") for i in range(2)]
    answers = [own.run([own.chunk(request, 0, 40) for request in requests])]
    for position in range(40, 46):
        answers.append(own.run([ahead(own, request, position) for request in requests]))
    for step, results in enumerate(answers):
        for request, result in zip(requests, results, strict=True):
            request.advance(
                40 + step, result.rows, result.sampled_token_id, result.sampled_logprobs
            )
    assert [bits(request) for request in requests] == expected


def test_what_continues_a_request_that_failed_fails_too_and_the_others_do_not(load: Any) -> None:
    own = driver(load("bf16"))
    good, bad = (own.request(prompt(20, i), SamplingParams(**PARAMS), f"r{i}") for i in range(2))
    first, second = own.chunk(good, 0, 20), own.chunk(bad, 0, 20)
    spoilt = msgspec.structs.replace(second, token_ids=int_array([-5] * 20))
    results = own.run([first, spoilt])
    assert [result.error is not None for result in results] == [False, True]
    results = own.run([ahead(own, good, 20), ahead(own, bad, 20)])
    assert [result.error is not None for result in results] == [False, True]
    assert "not known" in failure(results[1])


def test_after_a_step_that_raised_nothing_that_continues_it_is_computed(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = driver(load("bf16"))
    request = own.request(prompt(40), SamplingParams(**PARAMS))
    own.step([(request, 0, 20)])
    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "_compute", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            own.run([own.chunk(request, 20, 40)])
    before = own.runner.read_blocks(range(60)).tobytes()
    [result] = own.run([ahead(own, request, 40)])
    assert "not known" in failure(result)
    assert own.runner.read_blocks(range(60)).tobytes() == before


def test_a_last_token_is_refused_where_none_was_sampled(load: Any) -> None:
    own = driver(load("bf16"))
    request = own.request(prompt(20), SamplingParams(**PARAMS))
    own.step([(request, 0, 10)])
    [result] = own.run([ahead(own, request, 10)])
    assert "token ids" in failure(result)


def broken(self: ModelRunner, works: Any) -> None:
    raise RuntimeError("out of memory")


def failure(result: ChunkResult) -> str:
    assert result.error is not None
    error = from_wire(result.error)
    assert isinstance(error, InvalidRequest)
    return error.message
