"""One runner, driven by hand: exact rows and tokens whatever the chunks, mates and moves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.codec import decode, encode, int_array
from scheduler.errors import InvalidRequest, NumericalError, RequestFailed, from_wire
from scheduler.logprobs import Logprobs
from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests import tiny_models
from tests.own_products import OwnProducts
from tests.runner_driver import RunnerDriver
from workers import logprobs
from workers.exact_linear import make_exact
from workers.loader import LoadedModel, load_model
from workers.model_runner import ModelRunner

VOCAB = tiny_models.VOCAB_SIZE
LENGTH = 290
"""Past two tiles of attention and past one partition of its sums."""
KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_models.tiny_llama,
    "gemma3": tiny_models.tiny_gemma3,
    "gemma2": tiny_models.tiny_gemma2,
    "qwen2": tiny_models.tiny_qwen2,
}
MAIN = [(kind, dtype) for kind in ("llama", "gemma3") for dtype in ("bf16", "fp32")]
ALL = [(kind, dtype) for kind in KINDS for dtype in ("bf16", "fp32")]

Load = Callable[[str, str], LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @functools.cache
    def cached(kind: str, dtype: str) -> LoadedModel:
        return load_model(str(KINDS[kind](tmp_path_factory.mktemp(kind))), dtype=dtype)

    return cached


def driver(model: LoadedModel, num_blocks: int = 120, seed: int = 0) -> RunnerDriver:
    return RunnerDriver(ModelRunner(model, num_blocks=num_blocks), seed)


def prompt(length: int = LENGTH, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


PARAMS = SamplingParams(
    prompt_logprobs=3, logprobs=2, max_tokens=6, temperature=0.8, seed=5, ignore_eos=True
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Answer:
    """What a request brought, in comparable form."""

    def __init__(self, request: Request) -> None:
        self.tokens = list(request.output_token_ids)
        self.prompt = request.prompt_logprobs and request.prompt_logprobs.array()
        self.output = request.output_logprobs and request.output_logprobs.array()

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        return self.tokens == other.tokens and all(
            (a is None and b is None) or (a is not None and b is not None and a.same_bits(b))
            for a, b in ((self.prompt, other.prompt), (self.output, other.output))
        )


@functools.cache
def whole(model_of: Load, kind: str, dtype: str, length: int = LENGTH, seed: int = 0) -> Answer:
    """The answer of a request computed alone, its prompt in one chunk."""
    own = driver(model_of(kind, dtype))
    return Answer(own.finish(own.request(prompt(length, seed), PARAMS), [length]))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), ALL)
@pytest.mark.parametrize(
    "sizes",
    [[512], [128], [100], [16], [7], [133, 1, 1, 1, 100], [128, 1], [LENGTH - 1, 1]],
    ids=str,
)
def test_chunk_sizes_change_no_bit(load: Load, kind: str, dtype: str, sizes: list[int]) -> None:
    own = driver(load(kind, dtype))
    answer = Answer(own.finish(own.request(prompt(), PARAMS), sizes))
    assert answer == whole(load, kind, dtype)


@pytest.mark.parametrize(("kind", "dtype"), MAIN)
def test_a_prompt_computed_token_by_token_gives_the_same_bits(
    load: Load, kind: str, dtype: str
) -> None:
    own = driver(load(kind, dtype))
    answer = Answer(own.finish(own.request(prompt(140), PARAMS), [1]))
    assert answer == whole(load, kind, dtype, 140)


@pytest.mark.parametrize(("kind", "dtype"), MAIN)
def test_batch_mates_change_no_bit(load: Load, kind: str, dtype: str) -> None:
    """Requests come and go, prefill beside decode, and each gets what it gets alone."""
    own = driver(load(kind, dtype))
    lengths = [1, 2, 17, 130, 260, 40]
    requests = [
        own.request(prompt(length, seed), PARAMS, request_id=str(seed))
        for seed, length in enumerate(lengths)
    ]
    done = dict.fromkeys(range(len(requests)), 0)
    step = 0
    while done:
        parts = []
        for i in list(done)[: 2 + step]:
            size = (23, 64, 7, 90)[(i + step) % 4]
            parts.append((requests[i], done[i], min(done[i] + size, requests[i].num_tokens)))
            done[i] = parts[-1][2]
        own.step(parts)
        finished = [i for i in done if own.is_done(requests[i])]
        own.release(*(requests[i] for i in finished))
        for i in finished:
            del done[i]
        step += 1
    for seed, (length, request) in enumerate(zip(lengths, requests, strict=True)):
        assert Answer(request) == whole(load, kind, dtype, length, seed), length
    assert own.runner.num_tracked_requests == 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), MAIN)
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(load: Load, kind: str, dtype: str, threads: int) -> None:
    expected = whole(load, kind, dtype)
    torch.set_num_threads(threads)
    own = driver(load(kind, dtype))
    assert Answer(own.finish(own.request(prompt(), PARAMS), [200, 1])) == expected


@pytest.mark.parametrize(("kind", "dtype"), MAIN)
@pytest.mark.parametrize("stop_at", [1, 16, 40, 128, 200, LENGTH - 1, LENGTH, LENGTH + 3])
def test_a_request_that_moves_gets_the_same_bits(
    load: Load, kind: str, dtype: str, stop_at: int
) -> None:
    """Evicted in mid-prefill or in decode: full blocks go along, the rest is computed again."""
    first, second = driver(load(kind, dtype)), driver(load(kind, dtype), seed=9)
    request = first.request(prompt(), PARAMS)
    done = 0
    while done < stop_at:
        size = 70 if done < LENGTH else 1
        end = min(done + size, stop_at, request.num_tokens)
        first.step([(request, done, end)])
        done = end
    full = min(stop_at, request.num_tokens - 1) // 16
    data = first.runner.read_blocks(first.tables["r"][:full])
    first.release(request)
    request = Request.decode(request.encode())
    second.tables["r"] = [second.free.pop() for _ in range(full)]
    second.runner.write_blocks(second.tables["r"], data)
    second.finish(request, [50], start=full * 16)
    assert Answer(request) == whole(load, kind, dtype)


@pytest.mark.parametrize(("kind", "dtype"), MAIN)
def test_kv_computed_again_in_chunks_is_the_kv_that_decode_wrote(
    load: Load, kind: str, dtype: str
) -> None:
    """Else a resumed request would go on from other bits than it had."""
    own = driver(load(kind, dtype))
    request = own.request(prompt(20), msgspec.structs.replace(PARAMS, max_tokens=30))
    own.step([(request, 0, 20)])
    while not own.is_done(request):
        own.step([(request, request.num_tokens - 1, request.num_tokens)])
    decoded = own.runner.read_blocks(own.tables["r"][:3])
    tokens = request.token_ids(0, 48).tolist()
    own.release(request)
    scored = own.request(tokens, SamplingParams(max_tokens=0), request_id="again")
    own.step([(scored, 0, 48)])
    assert own.runner.read_blocks(own.tables["again"][:3]).tobytes() == decoded.tobytes()


def test_rows_already_held_are_not_made_again_when_kv_is_recomputed(load: Load) -> None:
    """A lost worker takes the KV along, not the rows: those of the prefix are not asked for."""
    own = driver(load("llama", "bf16"))
    request = own.request(prompt(), PARAMS)
    own.step([(request, 0, 150)])
    own.release(request)
    results = own.step([(request, 0, 100)])
    assert results[0].rows is None
    results = own.step([(request, 100, 200)])
    assert results[0].rows is not None
    assert results[0].rows.num_rows == 50
    own.finish(request, [60], start=200)
    assert Answer(request) == whole(load, "llama", "bf16")


@functools.cache
def reference(model_of: Load, kind: str, dtype: str) -> torch.Tensor:
    """Logprobs [LENGTH, vocab] by transformers itself, eager attention and no cache."""
    model = model_of(kind, dtype)
    other = AutoModelForCausalLM.from_pretrained(
        model.path, dtype=model.dtype, attn_implementation="eager"
    )
    # In half precision a sum in another order is another number, and transformers' own order
    # changes with the length of the prompt. The products are the same; the rest is its own.
    make_exact(other)
    tokens = torch.tensor([prompt() + [0] * (384 - LENGTH)])
    with torch.no_grad(), OwnProducts():
        return torch.log_softmax(other(tokens).logits[0, :LENGTH].float(), dim=-1)


@pytest.mark.parametrize(("kind", "dtype"), ALL)
@pytest.mark.parametrize("k", [0, 1, 5, -1])
def test_rows_are_those_of_transformers(load: Load, kind: str, dtype: str, k: int) -> None:
    """Row t scores token t + 1: shifted by one, nothing would agree."""
    own = driver(load(kind, dtype))
    request = own.request(prompt(), SamplingParams(prompt_logprobs=k, max_tokens=0))
    own.finish(request, [100])
    assert request.prompt_logprobs is not None
    rows = request.prompt_logprobs.array()
    # Beyond 256 keys eager attention in half precision sums in an order of its own.
    count = LENGTH - 1 if dtype == "fp32" else 256
    tolerance = 1e-4 if dtype == "fp32" else 1e-3
    expected = reference(load, kind, dtype)[:-1].numpy()
    assert rows.num_rows == LENGTH - 1
    assert rows.width == 1 + (VOCAB if k == -1 else k)
    assert rows.token_ids[:, 0].tolist() == prompt()[1:]
    for row in range(count):
        want = expected[row][rows.token_ids[row]]
        assert np.abs(rows.logprobs[row] - want).max() < tolerance
        assert_ranks_agree(rows, row, expected[row], tolerance)


def assert_ranks_agree(rows: Logprobs, row: int, expected: np.ndarray, margin: float) -> None:
    """A rank may differ by as many tokens as are within the margin, and by no more."""
    for token, rank in zip(rows.token_ids[row], rows.ranks[row], strict=True):
        above = int((expected > expected[token] + 2 * margin).sum())
        near = int((expected >= expected[token] - 2 * margin).sum())
        assert above < rank <= near


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33])
def test_a_prompt_of_n_tokens_has_n_minus_1_rows(load: Load, length: int) -> None:
    own = driver(load("llama", "bf16"))
    for sizes in ([length], [max(length - 1, 1), 1]):
        request = own.finish(own.request(prompt(length), PARAMS), sizes)
        assert request.prompt_logprobs is not None
        assert request.prompt_logprobs.num_rows == length - 1
        assert len(request.output_token_ids) == PARAMS.max_tokens


def test_the_last_row_belongs_to_the_last_chunk_also_when_that_is_one_token(load: Load) -> None:
    own = driver(load("llama", "bf16"))
    request = own.request(prompt(33), PARAMS)
    (first,) = own.step([(request, 0, 31)])
    (second,) = own.step([(request, 31, 32)])
    assert first.rows is not None
    assert second.rows is not None
    assert (first.rows.num_rows, second.rows.num_rows) == (31, 1)
    assert request.num_rows_missing == 0
    (last,) = own.step([(request, 32, 33)])
    assert last.rows is None, "the last token's hidden state scores no prompt token"
    assert last.sampled_token_id is not None


def test_requests_of_different_k_share_a_step(load: Load) -> None:
    own = driver(load("llama", "bf16"))
    wanted = [0, None, 5, -1, 1, 5]
    requests = [
        own.request(
            prompt(40, seed), SamplingParams(prompt_logprobs=k, logprobs=k, max_tokens=1), str(seed)
        )
        for seed, k in enumerate(wanted)
    ]
    results = own.step([(request, 0, 40) for request in requests])
    for k, result in zip(wanted, results, strict=True):
        if k is None:
            assert result.rows is None
            assert result.sampled_logprobs is None
            continue
        assert result.rows is not None
        assert result.sampled_logprobs is not None
        width = 1 + (VOCAB if k == -1 else k)
        assert (result.rows.num_rows, result.rows.width) == (39, width)
        assert (result.sampled_logprobs.num_rows, result.sampled_logprobs.width) == (1, width)
        assert result.sampled_logprobs.token_ids[0, 0] == result.sampled_token_id


@pytest.mark.parametrize(("made", "selected"), [(16, 16), (32, 16), (5, 16), (1, 16), (64, 64)])
def test_slices_of_logits_change_no_bit(
    load: Load, monkeypatch: pytest.MonkeyPatch, made: int, selected: int
) -> None:
    expected = whole(load, "llama", "bf16")
    own = driver(load("llama", "bf16"))
    monkeypatch.setattr(own.runner, "_rows_per_slice", made)
    monkeypatch.setitem(logprobs.LOGPROBS_BYTES, "cpu", selected * 4 * VOCAB)
    assert Answer(own.finish(own.request(prompt(), PARAMS), [LENGTH])) == expected


def test_sampled_logprobs_are_raw(load: Load) -> None:
    """They are the model's, before temperature, bias or any filter."""
    own = driver(load("llama", "fp32"))
    tokens = prompt(30)
    scored = own.finish(
        own.request([*tokens, 77], SamplingParams(prompt_logprobs=4, max_tokens=0)), [64]
    )
    params = SamplingParams(logprobs=4, max_tokens=1, temperature=3.0, logit_bias={77: 100.0})
    made = own.finish(own.request(tokens, params), [64])
    assert made.output_token_ids == [77]
    assert made.output_logprobs is not None
    assert scored.prompt_logprobs is not None
    assert made.output_logprobs.array().same_bits(scored.prompt_logprobs.array()[29:30])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.0, "repetition_penalty": 1.8},
        {"allowed_token_ids": tuple(range(40, 60)), "logit_bias": {41: 1.5}},
    ],
    ids=str,
)
def test_generation_goes_on_unchanged_after_a_move_at_any_token(
    load: Load, params: dict[str, Any]
) -> None:
    """Neither the random stream nor the penalties' counts start again."""
    own = driver(load("gemma3", "bf16"))
    full = SamplingParams(max_tokens=12, seed=3, logprobs=1, **params)
    expected = Answer(own.finish(own.request(prompt(20), full), [20]))
    for moved_after in range(1, 12):
        request = own.request(prompt(20), full)
        own.step([(request, 0, 20)])
        while len(request.output_token_ids) < moved_after:
            own.step([(request, request.num_tokens - 1, request.num_tokens)])
        own.release(request)
        request = Request.decode(request.encode())
        assert Answer(own.finish(request, [9])) == expected


def test_stop_tokens_are_not_sampled_before_min_tokens(load: Load) -> None:
    own = driver(load("llama", "bf16"))
    always = {"logit_bias": {tiny_models.EOS: 100.0}, "temperature": 0.0, "max_tokens": 5}
    free = own.finish(own.request(prompt(20), SamplingParams(ignore_eos=True, **always)), [20])
    assert free.output_token_ids == [tiny_models.EOS] * 5
    held = own.finish(own.request(prompt(20), SamplingParams(min_tokens=4, **always)), [20])
    assert [token == tiny_models.EOS for token in held.output_token_ids] == [False] * 4 + [True]


@pytest.fixture
def poisoned(tmp_path: Path) -> LoadedModel:
    """A model whose token 13 has an embedding of NaN."""
    model = load_model(str(tiny_models.tiny_llama(tmp_path)), dtype="bf16")
    with torch.no_grad():
        model.model.model.embed_tokens.weight[13] = torch.nan
    return model


CLEAN = msgspec.structs.replace(PARAMS, logit_bias={13: -1000.0})
"""Never draws that token."""


def clean(length: int, seed: int) -> list[int]:
    return [token if token != 13 else 14 for token in prompt(length, seed)]


@pytest.mark.parametrize("place", [0, 20, 49])
def test_nan_fails_its_request_alone(poisoned: LoadedModel, place: int) -> None:
    """The others' bits are untouched, and no KV of the failed chunk is left for anyone."""
    own = driver(poisoned)
    expected = Answer(own.finish(own.request(clean(50, 1), CLEAN), [50]))
    bad = clean(50, 2)
    bad[place] = 13
    requests = [own.request(clean(50, 1), CLEAN, "good"), own.request(bad, CLEAN, "bad")]
    results = own.run([own.chunk(request, 0, 50) for request in requests])
    error = results[1].error
    assert error is not None
    assert isinstance(from_wire(error), NumericalError)
    assert "'bad'" in error.message
    assert (results[1].rows, results[1].sampled_token_id) == (None, None)
    assert not own.runner.read_blocks(own.tables["bad"]).any()
    good = requests[0]
    good.advance(50, results[0].rows, results[0].sampled_token_id, results[0].sampled_logprobs)
    own.release(requests[1])
    own.finish(good, [1], start=50)
    assert Answer(good) == expected


def test_nan_is_seen_in_a_chunk_of_which_nothing_is_asked(poisoned: LoadedModel) -> None:
    """In mid-prefill and without rows: its KV would be cached, and the answer be noise."""
    own = driver(poisoned)
    bad = clean(50, 2)
    bad[20] = 13
    request = own.request(bad, SamplingParams(max_tokens=1))
    with pytest.raises(NumericalError, match=r"0\.\.29"):
        own.step([(request, 0, 30)])


def test_nan_in_a_decode_fails_that_request_and_its_blocks_serve_the_next(
    poisoned: LoadedModel,
) -> None:
    own = driver(poisoned, num_blocks=4)
    forced = SamplingParams(allowed_token_ids=(13,), max_tokens=3)
    bad = own.request(clean(20, 1), forced, "bad")
    own.step([(bad, 0, 20)])
    with pytest.raises(NumericalError):
        own.step([(bad, 20, 21)])
    own.release(bad)
    after = Answer(own.finish(own.request(clean(50, 1), CLEAN), [50]))
    fresh = driver(poisoned, seed=4)
    assert after == Answer(fresh.finish(fresh.request(clean(50, 1), CLEAN), [50]))


@pytest.mark.parametrize("is_poisonous", [False, True])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_positions_in_shared_blocks_are_computed_without_touching_them(
    poisoned: LoadedModel, size: int, is_poisonous: bool
) -> None:
    """Their rows are those that were computed before, and a failure wipes only what is new."""
    own = driver(poisoned)
    tokens = clean(64, 1)
    warm = own.request(tokens, msgspec.structs.replace(CLEAN, max_tokens=0), "warm")
    own.step([(warm, 0, 64)])
    assert warm.prompt_logprobs is not None
    expected = warm.prompt_logprobs.array()
    shared = own.tables["warm"][:2]
    before = own.runner.read_blocks(shared)
    if is_poisonous:
        tokens[31 + size - 1 : 31 + size] = [13]
    request = own.request(tokens, CLEAN, "next")
    request.advance(31, expected[:31])
    own.tables["next"] = list(shared)
    mate = own.request(clean(50, 2), CLEAN, "mate")
    chunk = msgspec.structs.replace(own.chunk(request, 31, 31 + size), first_new_position=32)
    chunks = [chunk, own.chunk(mate, 0, 20)]
    together = own.run(chunks) if size > 1 else [*own.run(chunks[:1]), *own.run(chunks[1:])]
    result, other = together
    assert own.runner.read_blocks(shared).tobytes() == before.tobytes()
    assert other.error is None
    if is_poisonous:
        assert result.error is not None
        assert not own.runner.read_blocks(own.tables["next"][2:]).any()
        return
    assert result.rows is not None
    assert result.rows.same_bits(expected[31 : 31 + size])
    request.advance(31 + size, result.rows)
    own.finish(request, [20], start=31 + size)
    fresh = driver(poisoned, seed=4)
    assert Answer(request) == Answer(fresh.finish(fresh.request(tokens, CLEAN), [64]))


@pytest.mark.parametrize("start", [0, 1, 16, 17, 200, LENGTH - 1, LENGTH])
def test_rows_of_given_tokens_from_an_index_on(load: Load, start: int) -> None:
    """Columns of those over the whole vocabulary, in a batch with rows of other columns."""
    own = driver(load("llama", "bf16"))
    asked = (7, VOCAB - 1, 0)
    params = [
        SamplingParams(prompt_logprobs=-1, max_tokens=0),
        SamplingParams(prompt_logprob_token_ids=asked, prompt_logprobs_start=start, max_tokens=0),
        SamplingParams(prompt_logprobs=3, prompt_logprobs_start=start, max_tokens=0),
    ]
    requests = [own.request(prompt(), each, str(i)) for i, each in enumerate(params)]
    for first in range(0, LENGTH, 100):
        own.step([(request, first, min(first + 100, LENGTH)) for request in requests])
    every, some, top = (
        r.prompt_logprobs.array() for r in requests if r.prompt_logprobs is not None
    )
    first_index = max(start, 1)
    assert some.num_rows == top.num_rows == LENGTH - first_index
    assert top.same_bits(whole_rows(load)[first_index - 1 :])
    for row in range(some.num_rows):
        of = every[first_index - 1 + row : first_index + row]
        places = [of.token_ids[0].tolist().index(t) for t in some.token_ids[row].tolist()]
        assert some.token_ids[row].tolist() == [prompt()[first_index + row], *asked]
        assert some.logprobs[row].tobytes() == of.logprobs[0][places].tobytes()
        assert some.ranks[row].tolist() == of.ranks[0][places].tolist()


def whole_rows(load: Load) -> Logprobs:
    rows = whole(load, "llama", "bf16").prompt
    assert rows is not None
    return rows


def test_stale_nan_in_blocks_handed_out_again_reaches_nobody(load: Load) -> None:
    expected = whole(load, "llama", "bf16")
    own = driver(load("llama", "bf16"))
    noise = np.full((own.info.num_blocks, own.info.block_bytes), 255, np.uint8)
    own.runner.write_blocks(range(own.info.num_blocks), noise)
    assert Answer(own.finish(own.request(prompt(), PARAMS), [100])) == expected


class PlusOffset(torch.nn.Module):
    """An output layer whose logits are shifted."""

    def __init__(self, inner: torch.nn.Module, offset: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.offset = offset

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) + self.offset


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_output_layer_that_overflows_fails_the_requests_that_see_it(
    tmp_path: Path, value: float
) -> None:
    model = load_model(str(tiny_models.tiny_llama(tmp_path)), dtype="fp32")
    offset = torch.zeros(VOCAB)
    offset[7] = value
    model.model.lm_head = PlusOffset(model.model.lm_head, offset)
    own = driver(model)
    for params in (
        PARAMS,
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, temperature=0),
    ):
        (result,) = own.run([own.chunk(own.request(prompt(20), params), 0, 20)])
        own.release(own.request(prompt(20), params))
        assert result.error is not None
        assert result.error.kind == "NumericalError"
    (result,) = own.run(
        [own.chunk(own.request(prompt(20), msgspec.structs.replace(PARAMS, max_tokens=0)), 0, 20)]
    )
    assert result.error is not None


def test_logits_of_minus_infinity_are_legal(tmp_path: Path) -> None:
    """Models mask parts of their vocabulary that way; -inf is then the true logprob."""
    model = load_model(str(tiny_models.tiny_llama(tmp_path)), dtype="fp32")
    masked = torch.zeros(VOCAB)
    masked[200:] = -torch.inf
    model.model.lm_head = PlusOffset(model.model.lm_head, masked)
    own = driver(model)
    request = own.finish(
        own.request([1, 250, 2], SamplingParams(prompt_logprobs=-1, max_tokens=4)), [8]
    )
    assert request.prompt_logprobs is not None
    rows = request.prompt_logprobs.array()
    assert np.isneginf(rows.logprobs[0, 0])
    assert rows.ranks[0, 0] == 201
    assert not np.isnan(rows.logprobs).any()
    assert max(request.output_token_ids) < 200


def test_nothing_left_to_sample_fails_its_request_alone(load: Load) -> None:
    own = driver(load("llama", "bf16"))
    stuck = SamplingParams(
        allowed_token_ids=(tiny_models.EOS,), min_tokens=2, max_tokens=4, prompt_logprobs=1
    )
    requests = [own.request(prompt(20), stuck, "stuck"), own.request(prompt(20), PARAMS, "good")]
    results = own.run([own.chunk(request, 0, 20) for request in requests])
    assert results[0].error is not None
    assert isinstance(from_wire(results[0].error), RequestFailed)
    assert results[0].rows is None
    assert results[1].error is None


def change(field: str, value: Any) -> dict[str, Any]:
    return {field: value}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (change("token_ids", int_array([VOCAB] * 20)), "token ids"),
        (change("token_ids", int_array([-1] * 20)), "token ids"),
        (change("token_ids", int_array([])), "at least one token"),
        (change("start", -1), "positions"),
        (change("start", 2040), "positions"),
        (change("start", 40), "blocks for every token"),
        (change("new_block_ids", int_array([500, 501])), "block ids"),
        (change("new_block_ids", int_array([3])), "blocks for every token"),
        (change("first_row_position", 10), "rows at positions"),
        (change("row_target_ids", int_array([VOCAB] * 19)), "token ids"),
        (change("new", None), "not known"),
    ],
    ids=str,
)
def test_a_chunk_that_makes_no_sense_fails_alone(
    load: Load, changes: dict[str, Any], why: str
) -> None:
    own = driver(load("llama", "bf16"))
    bad = msgspec.structs.replace(
        own.chunk(own.request(prompt(20), PARAMS, "bad"), 0, 20), **changes
    )
    good = own.chunk(own.request(prompt(20), PARAMS, "good"), 0, 20)
    results = own.run([bad, good])
    assert results[0].error is not None
    assert isinstance(from_wire(results[0].error), InvalidRequest)
    assert why in results[0].error.message
    assert results[1].error is None
    assert own.runner.num_tracked_requests == 1


def test_rows_are_refused_to_a_request_that_asked_for_none(load: Load) -> None:
    own = driver(load("llama", "bf16"))
    chunk = own.chunk(own.request(prompt(20), SamplingParams(max_tokens=1)), 0, 20)
    (result,) = own.run([msgspec.structs.replace(chunk, row_target_ids=int_array([1, 2]))])
    assert result.error is not None
    assert "rows only where" in result.error.message


def test_a_second_chunk_of_a_request_in_one_step_is_refused_and_the_first_one_stands(
    load: Load,
) -> None:
    own = driver(load("llama", "bf16"))
    request = own.request(prompt(40), PARAMS)
    results = own.run([own.chunk(request, 0, 20), own.chunk(request, 20, 40)])
    assert results[0].error is None
    assert results[0].rows is not None
    assert results[1].error is not None


def test_a_step_without_chunks_only_releases(load: Load) -> None:
    own = driver(load("llama", "bf16"))
    requests = [own.request(prompt(20), PARAMS, str(i)) for i in range(3)]
    own.step([(request, 0, 20) for request in requests])
    assert own.runner.num_tracked_requests == 3
    assert own.run([], released=["0", "2", "unheard-of"]) == []
    assert own.runner.num_tracked_requests == 1


def test_nothing_is_known_of_a_request_once_all_are_forgotten(load: Load) -> None:
    """A new scheduler sends requests anew; what an old one sent must not complete its messages."""
    own = driver(load("llama", "bf16"))
    requests = [own.request(prompt(20), PARAMS, str(i)) for i in range(2)]
    own.step([(request, 0, 10) for request in requests])
    own.runner.forget_all()
    assert own.runner.num_tracked_requests == 0
    with pytest.raises(InvalidRequest, match="not known"):
        own.step([(requests[0], 10, 20)])


def test_an_id_released_and_used_again_in_one_step_is_the_new_request(load: Load) -> None:
    own = driver(load("llama", "bf16"))
    own.step([(own.request(prompt(20, 3), PARAMS), 0, 20)])
    old_blocks = own.tables.pop("r")
    own._known.discard("r")
    request = own.request(prompt(), PARAMS)
    own.step([(request, 0, LENGTH)], released=["r"])
    own.free += old_blocks
    own.finish(request, [1], start=LENGTH)
    assert Answer(request) == whole(load, "llama", "bf16")


def test_thousands_of_requests_leave_nothing_behind(load: Load) -> None:
    own = driver(load("llama", "bf16"), num_blocks=8)
    params = SamplingParams(max_tokens=1, repetition_penalty=1.1)
    for i in range(300):
        request = own.request([i % VOCAB, 5], params, str(i))
        own.step([(request, 0, 2)])
        own.release(request)
    assert own.runner.num_tracked_requests == 0
    assert len(own.free) == 8


def test_messages_go_through_the_codec(load: Load) -> None:
    """What a worker answers in another process is what it answers in this one, bit for bit."""
    own = driver(load("llama", "bf16"))
    chunk = own.chunk(own.request(prompt(20), PARAMS), 0, 20)
    step = decode(encode(SchedulerOutput(9, [chunk], [])), SchedulerOutput)
    output = own.runner.execute(step)
    again = decode(encode(output), ModelRunnerOutput)
    assert again.step_id == 9
    assert again.compute_s > 0
    first, second = output.results[0], again.results[0]
    assert first.rows is not None
    assert second.rows is not None
    assert second.rows.same_bits(first.rows)
    assert second.sampled_token_id == first.sampled_token_id


def test_a_worker_tells_what_it_has(load: Load) -> None:
    model = load("gemma3", "bf16")
    info = ModelRunner(model, num_blocks=7, block_size=8).info("w3", "node")
    assert (info.worker_id, info.node_id, info.device) == ("w3", "node", "cpu")
    assert (info.num_blocks, info.block_size, info.vocab_size) == (7, 8, VOCAB)
    assert info.block_bytes == 3 * 2 * 8 * 2 * 32 * 2
    assert info.max_model_len == tiny_models.MAX_MODEL_LEN
    other = ModelRunner(model, num_blocks=9, block_size=16).info("w4")
    assert other.model_fingerprint != info.model_fingerprint, "blocks of other sizes don't fit"
    same = ModelRunner(replace(model), num_blocks=2, block_size=8).info("w5")
    assert same.model_fingerprint == info.model_fingerprint


def test_block_sizes_change_no_bit(load: Load) -> None:
    expected = whole(load, "gemma3", "bf16")
    for block_size in (1, 5, 64):
        own = RunnerDriver(
            ModelRunner(load("gemma3", "bf16"), num_blocks=400, block_size=block_size)
        )
        assert Answer(own.finish(own.request(prompt(), PARAMS), [130])) == expected
