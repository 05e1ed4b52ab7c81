"""The default model's real weights on real English, against transformers and against itself."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.logprobs import Logprobs
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests.own_products import OwnProducts
from tests.runner_driver import RunnerDriver
from workers.exact_linear import make_exact
from workers.loader import DEFAULT_MODEL, LoadedModel, load_model, load_tokenizer
from workers.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = """Alice was beginning to get very tired of sitting by her sister on the bank, and of having
nothing to do: once or twice she had peeped into the book her sister was reading, but it had no
pictures or conversations in it, "and what is the use of a book," thought Alice "without pictures or
conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very
sleepy and stupid), whether the pleasure of making a daisy-chain would be worth the trouble of
getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to
hear the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over
afterwards, it occurred to her that she ought to have wondered at this, but at the time it all
seemed quite natural); but when the Rabbit actually took a watch out of its waistcoat-pocket, and
looked at it, and then hurried on, Alice started to her feet, for it flashed across her mind that
she had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and
burning with curiosity, she ran across the field after it, and fortunately was just in time to see
it pop down a large rabbit-hole under the hedge.
"""

TOLERANCE = {"bf16": 1e-3, "fp32": 1e-4}


@functools.cache
def model(dtype: str) -> LoadedModel:
    return load_model(DEFAULT_MODEL, dtype=dtype)


@functools.cache
def tokens() -> list[int]:
    ids: list[int] = load_tokenizer(DEFAULT_MODEL)(TEXT)["input_ids"]
    assert len(ids) > 300
    return ids


def driver(dtype: str, seed: int = 0) -> RunnerDriver:
    return RunnerDriver(ModelRunner(model(dtype), num_blocks=100), seed)


def prompt_rows(request: Request) -> Logprobs:
    assert request.prompt_logprobs is not None
    return request.prompt_logprobs.array()


@functools.cache
def transformers_logprobs(dtype: str, length: int, exact_products: bool) -> np.ndarray:
    """Logprobs [length, vocab] of the first tokens, by transformers itself in one forward."""
    other = AutoModelForCausalLM.from_pretrained(
        model(dtype).path, dtype=model(dtype).dtype, attn_implementation="eager"
    )
    ids = tokens()[:length]
    if exact_products:
        make_exact(other)
        ids = ids + [0] * (-length % 128)
    with torch.no_grad(), OwnProducts() if exact_products else nullcontext():
        logits = other(torch.tensor([ids])).logits[0, :length]
    return torch.log_softmax(logits.float(), dim=-1).numpy()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("k", "length"),
    [
        (1, 256),
        pytest.param(0, 256, marks=pytest.mark.slow),
        pytest.param(5, 256, marks=pytest.mark.slow),
        pytest.param(-1, 60, marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_transformers(dtype: str, k: int, length: int) -> None:
    """In half precision with equal products: the order of a sum changes with the prompt's length
    in transformers, and with it the numbers, by up to half a nat from one length to another.
    """
    own = driver(dtype)
    params = SamplingParams(prompt_logprobs=k, max_tokens=0)
    rows = prompt_rows(own.finish(own.request(tokens()[:length], params), [100]))
    expected = transformers_logprobs(dtype, 256, dtype == "bf16")
    tolerance = TOLERANCE[dtype]
    assert rows.num_rows == length - 1
    assert rows.token_ids[:, 0].tolist() == tokens()[1:length]
    for row in range(length - 1):
        want = expected[row]
        assert np.abs(rows.logprobs[row] - want[rows.token_ids[row]]).max() < tolerance
        columns = slice(0, 8)
        for token, rank in zip(rows.token_ids[row][columns], rows.ranks[row][columns], strict=True):
            assert (want > want[token] + 2 * tolerance).sum() < rank
            assert rank <= (want >= want[token] - 2 * tolerance).sum()


def test_single_precision_agrees_over_the_whole_text() -> None:
    own = driver("fp32")
    params = SamplingParams(prompt_logprobs=0, max_tokens=0)
    rows = prompt_rows(own.finish(own.request(tokens(), params), [512]))
    expected = transformers_logprobs("fp32", len(tokens()), False)
    want = expected[np.arange(len(tokens()) - 1), tokens()[1:]]
    assert np.abs(rows.logprobs[:, 0] - want).max() < 1e-4


def test_half_precision_is_as_near_the_truth_as_transformers_own() -> None:
    """Measured by single precision, over a text longer than the products can be made equal for."""
    own = driver("bf16")
    params = SamplingParams(prompt_logprobs=0, max_tokens=0)
    mine = prompt_rows(own.finish(own.request(tokens(), params), [512])).logprobs[:, 0]
    place = (np.arange(len(tokens()) - 1), tokens()[1:])
    truth = transformers_logprobs("fp32", len(tokens()), False)[place]
    theirs = transformers_logprobs("bf16", len(tokens()), False)[place]
    assert np.abs(mine - truth).mean() < 1.25 * np.abs(theirs - truth).mean()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_chunks_mates_moves_and_threads_change_no_bit(dtype: str) -> None:
    params = SamplingParams(prompt_logprobs=2, logprobs=1, max_tokens=8, seed=11)
    own = driver(dtype)
    first = own.finish(own.request(tokens(), params), [512])
    rows = prompt_rows(first)
    assert first.output_logprobs is not None

    def assert_equal(other: Request) -> None:
        assert prompt_rows(other).same_bits(rows)
        assert other.output_token_ids == first.output_token_ids
        assert first.output_logprobs is not None
        assert other.output_logprobs is not None
        assert other.output_logprobs.array().same_bits(first.output_logprobs.array())

    for sizes in ([100], [16], [200, 1, 1, 100, 7]):
        assert_equal(own.finish(own.request(tokens(), params), sizes))
    torch.set_num_threads(2)
    assert_equal(own.finish(own.request(tokens(), params), [300]))
    torch.set_num_threads(1)

    request = own.request(tokens(), params)
    mates = [own.request(tokens()[i : i + 40], params, f"mate{i}") for i in range(3)]
    own.step([(mate, 0, 40) for mate in mates])
    own.step([(request, 0, 170), *((mate, 40, 41) for mate in mates)])
    full = own.runner.read_blocks(own.tables["r"][:10])
    own.release(request, *mates)
    request = Request.decode(request.encode())
    second = driver(dtype, seed=5)
    second.tables["r"] = [second.free.pop() for _ in range(10)]
    second.runner.write_blocks(second.tables["r"], full)
    assert_equal(second.finish(request, [90], start=160))


def test_it_speaks_english() -> None:
    own = driver("fp32")
    tokenizer = model("fp32").tokenizer
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    params = SamplingParams(max_tokens=12, temperature=0.0)
    request = own.finish(own.request(tokenizer(text)["input_ids"], params), [64])
    assert "Paris" in tokenizer.decode(request.output_token_ids)


def test_english_is_likelier_than_the_same_words_in_disorder() -> None:
    own = driver("bf16")
    params = SamplingParams(prompt_logprobs=0, max_tokens=0)
    shuffled = np.random.default_rng(0).permutation(tokens()).tolist()
    sums = [
        prompt_rows(own.finish(own.request(ids, params), [512])).logprobs[:, 0].mean()
        for ids in (tokens(), shuffled)
    ]
    assert sums[0] > -3.5
    assert sums[1] < sums[0] - 3.0


def test_the_default_model_tells_what_it_is() -> None:
    loaded = model("bf16")
    assert (loaded.vocab_size, loaded.max_model_len, len(loaded.layers)) == (49152, 8192, 30)
    assert loaded.tokenizer.eos_token_id in loaded.eos_token_ids
