"""One runner that is sent more than it has answered: tokens it knows itself, and what fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from scheduler.codec import int_array
from scheduler.errors import InvalidRequest, from_wire
from scheduler.messages import LAST_SAMPLED, ChunkResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests import tiny_models
from tests.runner_driver import RunnerDriver
from workers.loader import LoadedModel, load_model
from workers.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

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


# ------------------------------------------------------------------ several tokens in a step


def grouped(chunk: Any, num_more: int) -> Any:
    return msgspec.structs.replace(chunk, max_more_tokens=num_more)


def take(request: Request, end: int, result: ChunkResult) -> None:
    """Let a request take in what a chunk up to `end` and the decodes after it brought."""
    assert result.error is None
    rows = result.sampled_logprobs
    tokens = [result.sampled_token_id, *result.more_token_ids.tolist()]
    for i, token in enumerate(tokens):
        request.advance(end + i, None if i else result.rows, token, rows[i : i + 1])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_tokens_that_a_worker_feeds_back_itself_change_no_bit(load: Any, dtype: str) -> None:
    """After a prompt, and after a group that is not answered yet; beside one that takes fewer."""
    expected = []
    for seed in range(2):
        own = driver(load(dtype))
        alone = own.request(prompt(40, seed), SamplingParams(**PARAMS), f"r{seed}")
        expected.append(bits(own.finish(alone, [40])))
    own = driver(load(dtype))
    a, b = (own.request(prompt(40, i), SamplingParams(**PARAMS), f"r{i}") for i in range(2))
    for request in (a, b):
        own.tables[request.request_id] = []
    first = own.run([grouped(long_chunk(own, a, 43), 3), grouped(long_chunk(own, b, 40), 0)])
    second = own.run([grouped(ahead(own, a, 43), 2), grouped(ahead(own, b, 40), 5)])
    take(a, 40, first[0])
    assert first[1].more_token_ids is None
    b.advance(40, first[1].rows, first[1].sampled_token_id, first[1].sampled_logprobs)
    take(a, 44, second[0])
    take(b, 41, second[1])
    assert [bits(a), bits(b)] == expected


def long_chunk(own: RunnerDriver, request: Request, end: int) -> Any:
    """The whole prompt, with blocks up to `end`."""
    whole = own.chunk(request, 0, 40)
    while len(own.tables[request.request_id]) * own.info.block_size < 48:
        own.tables[request.request_id].append(own.free.pop())
    table = own.tables[request.request_id]
    return msgspec.structs.replace(whole, new_block_ids=int_array(table))


@pytest.mark.parametrize("min_tokens", [0, 4])
def test_a_group_ends_at_a_stop_token_and_what_was_sent_after_it_is_not_computed(
    load: Any, min_tokens: int
) -> None:
    free = {**PARAMS, "max_tokens": 7, "min_tokens": 0}
    own = driver(load("bf16"))
    calm = own.finish(own.request(prompt(40), SamplingParams(**free)), [40])
    stop = calm.output_token_ids[2]
    params = SamplingParams(**{**free, "min_tokens": min_tokens, "stop_token_ids": (stop,)})
    expected = RunnerDriver(ModelRunner(load("bf16"), num_blocks=60))
    alone = expected.request(prompt(40), params)
    start = 0
    while not alone.output_token_ids or alone.output_token_ids[-1] != stop:
        if len(alone.output_token_ids) == 7:
            break
        expected.step([(alone, start, alone.num_tokens)])
        start = alone.num_tokens - 1
    request = own.request(prompt(40), params)
    own.tables[request.request_id] = []
    [result] = own.run([grouped(long_chunk(own, request, 46), 6)])
    take(request, 40, result)
    assert request.output_token_ids == alone.output_token_ids
    if min_tokens == 0:
        assert len(request.output_token_ids) == 3
        before = own.runner.read_blocks(range(60)).tobytes()
        [late] = own.run([ahead(own, request, 43)])
        assert (late.error, late.sampled_token_id) == (None, None)
        assert own.runner.read_blocks(range(60)).tobytes() == before


def test_more_tokens_than_there_are_blocks_for_are_refused(load: Any) -> None:
    own = driver(load("bf16"))
    request = own.request(prompt(15), SamplingParams(**PARAMS))
    [result] = own.run([grouped(own.chunk(request, 0, 15), 2)])
    assert "blocks for every token" in failure(result)
