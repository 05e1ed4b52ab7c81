"""Real workers on tiny random models under the real core: the same bits whatever happens.

Every answer (prompt rows, tokens, their rows) is compared byte for byte with that of a request
which was alone on one worker, cold, in one chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.actions import RunBatch
from scheduler.config import SchedulerConfig
from scheduler.logprobs import Logprobs
from scheduler.sampling_params import SamplingParams
from tests import tiny_models
from tests.sim.engine import SimEngine
from workers.loader import LoadedModel, load_model
from workers.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16
LENGTH = 145
"""Past a tile of attention, and one token past a block."""
NUM_TOKENS = 5
KINDS = {"llama": tiny_models.tiny_llama, "gemma3": tiny_models.tiny_gemma3}
MODELS = [(kind, dtype) for kind in KINDS for dtype in ("bf16", "fp32")]
PARAMS: dict[str, Any] = {
    "prompt_logprobs": 3,
    "logprobs": 2,
    "max_tokens": NUM_TOKENS,
    "temperature": 0.8,
    "ignore_eos": True,
}

Load = Callable[[str, str], LoadedModel]
slow = pytest.mark.slow
each_model = pytest.mark.parametrize(("kind", "dtype"), MODELS)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @functools.cache
    def cached(kind: str, dtype: str) -> LoadedModel:
        folder: Path = tmp_path_factory.mktemp(kind)
        return load_model(str(KINDS[kind](folder)), dtype=dtype)

    return cached


@pytest.fixture(scope="module")
def right(load: Load) -> Callable[..., bytes]:
    """The answer of a request that nothing happened to."""

    @functools.cache
    def cached(kind: str, dtype: str, length: int = LENGTH, seed: int = 0) -> bytes:
        engine = real_engine(load(kind, dtype), chunk=4096, max_steps_in_flight=1)
        submit(engine, "alone", length, seed)
        engine.run()
        return bits(engine, "alone", length)

    return cached


def real_engine(
    model: LoadedModel, num_workers: int = 1, num_blocks: int = 60, *, chunk: int = 64, **more: Any
) -> SimEngine:
    """Return an engine whose workers run one model, each with a KV cache of its own."""
    runners = [
        ModelRunner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE) for _ in range(num_workers)
    ]
    info = runners[0].info("w0")
    engine = SimEngine(
        SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=chunk,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            cache_namespace=info.model_fingerprint,
            **more,
        ),
        block_bytes=info.block_bytes,
    )
    for index, runner in enumerate(runners):
        engine.join(runner, runner.info(f"w{index}"))
    return engine


def submit(
    engine: SimEngine, name: str, length: int = LENGTH, seed: int = 0, **params: Any
) -> None:
    tokens = np.random.default_rng(seed).integers(0, tiny_models.VOCAB_SIZE, length).tolist()
    own = SamplingParams(**{**PARAMS, **params})
    assert engine.submit(name, tokens, own, seed=seed) is None


def bits(engine: SimEngine, name: str, length: int = LENGTH) -> bytes:
    """Return everything that a request was told, checked to be complete."""
    result = engine.result(name)
    assert result.error is None, result.error
    assert len(result.token_ids) == sum(part.num_rows for part in result.logprobs) == NUM_TOKENS
    assert result.prompt_logprobs.num_rows == length - 1
    stats = engine.state.stats()
    assert stats.num_recomputed_rows == 0
    return result.bits()


def num_chunks(engine: SimEngine, name: str) -> int:
    return sum(
        chunk.request_id == name
        for action in engine.log
        if isinstance(action, RunBatch)
        for chunk in action.output.chunks
    )


@each_model
@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=slow), pytest.param(7, marks=slow), 16, 100, 128, 512]
)
def test_chunk_budgets_change_no_bit(load: Load, right, kind: str, dtype: str, chunk: int) -> None:
    engine = real_engine(load(kind, dtype), chunk=chunk)
    submit(engine, "a")
    engine.run()
    assert bits(engine, "a") == right(kind, dtype)


@each_model
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("chunk", [pytest.param(7, marks=slow), 100, pytest.param(512, marks=slow)])
def test_batch_mates_and_workers_change_no_bit(
    load: Load, right, kind: str, dtype: str, num_workers: int, chunk: int
) -> None:
    engine = real_engine(load(kind, dtype), num_workers, chunk=chunk)
    lengths = {"a": LENGTH, "b": 17, "c": 40, "d": LENGTH}
    for seed, (name, length) in enumerate(lengths.items()):
        submit(engine, name, length, seed)
    engine.run()
    for seed, (name, length) in enumerate(lengths.items()):
        assert bits(engine, name, length) == right(kind, dtype, length, seed)


@each_model
def test_cold_then_worker_hit_then_store_hit_change_no_bit(
    load: Load, right, kind: str, dtype: str
) -> None:
    """With rows, which come from the cache too, and without."""
    for wants_rows in (True, False):
        params: dict[str, Any] = {} if wants_rows else {"prompt_logprobs": None}
        engine = real_engine(load(kind, dtype), num_blocks=24, chunk=100)
        answers = []
        for name in ("cold", "worker", "store"):
            if name == "store":
                submit(engine, "flood", 24 * BLOCK_SIZE, 9, max_tokens=0)
                engine.run()
            submit(engine, name, **params)
            engine.run()
            answers.append(engine.result(name).bits())
        assert answers[0] == answers[1] == answers[2]
        cached = [engine.result(n).stats.num_cached_tokens for n in ("cold", "worker", "store")]
        assert engine.result("store").stats.num_restored_blocks == LENGTH // BLOCK_SIZE
        if wants_rows:
            assert bits(engine, "store") == right(kind, dtype)
            assert cached == [0, LENGTH - 2, LENGTH - 2], "the last row is in no full block"
        else:
            assert cached == [0, LENGTH - 1, LENGTH - 1]


def evicted_after(engine: SimEngine, count: int) -> None:
    submit(engine, "a")
    for _ in range(count):
        engine.step()
    engine.evict("a")
    engine.run()
    stats = engine.result("a").stats
    assert stats.num_recomputed_tokens < BLOCK_SIZE * max(stats.num_evictions, 1)


@each_model
@pytest.mark.parametrize("chunk", [40, pytest.param(17, marks=slow)])
def test_an_eviction_after_every_possible_chunk_changes_no_bit(
    load: Load, right, kind: str, dtype: str, chunk: int
) -> None:
    """In prefill and in decode; the resumed request may land on either worker."""
    total = -(-LENGTH // chunk) + NUM_TOKENS - 1
    for count in range(total):
        engine = real_engine(load(kind, dtype), 2, chunk=chunk)
        evicted_after(engine, count)
        assert bits(engine, "a") == right(kind, dtype)
        under_way = engine.config.max_steps_in_flight
        assert engine.result("a").stats.num_evictions == (count < total - under_way)


ASKED = (7, 0, 299)


@each_model
@pytest.mark.parametrize(
    "start", [1, pytest.param(64, marks=slow), 65, pytest.param(144, marks=slow), 145]
)
def test_rows_where_asked_are_those_of_a_full_run_after_evictions_and_cache_hits(
    load: Load, right, kind: str, dtype: str, start: int
) -> None:
    """The prefix comes from the cache; the rows after it are the same, bit for bit."""
    model = load(kind, dtype)
    full = real_engine(model, chunk=4096)
    submit(full, "k", prompt_logprobs=-1)
    full.run()
    rows = full.result("k").prompt_logprobs
    for asked in ({"prompt_logprobs": 3}, {"prompt_logprob_token_ids": ASKED}):
        engine = real_engine(model, 2, chunk=40, save_segment_tokens=32)
        submit(engine, "warm", max_tokens=1, prompt_logprobs=None)
        engine.run()
        submit(engine, "a", **{"prompt_logprobs": None, "prompt_logprobs_start": start, **asked})
        while engine.live:
            engine.step()
            engine.evict("a")
        result = engine.result("a")
        assert result.stats.num_evictions > 0
        assert result.stats.num_cached_tokens >= (start - 1) // BLOCK_SIZE * BLOCK_SIZE
        found = result.prompt_logprobs
        assert found.num_rows == LENGTH - start
        if start <= 144 and "prompt_logprobs" in asked:
            assert found.same_bits(columns(rows[start - 1 :], range(4)))
        elif start <= 144:
            assert found.same_bits(of_tokens(rows[start - 1 :], ASKED))


CACHED_PREFIXES = (1, 15, 16, 17, 32, 100, 128, 129, 144, 145)


@each_model
@pytest.mark.parametrize("chunk", [pytest.param(7, marks=slow), 64, pytest.param(512, marks=slow)])
def test_rows_from_the_cache_are_those_that_would_be_computed(
    load: Load, right, kind: str, dtype: str, chunk: int
) -> None:
    """After prompts that share more and more of it, each computed in other chunks."""
    tokens = np.random.default_rng(0).integers(0, tiny_models.VOCAB_SIZE, LENGTH).tolist()
    engine = real_engine(load(kind, dtype), num_blocks=200, chunk=chunk)
    own = SamplingParams(**PARAMS)
    for num_shared in CACHED_PREFIXES:
        other = [(token + 1) % tiny_models.VOCAB_SIZE for token in tokens[num_shared:]]
        warm = SamplingParams(prompt_logprobs=5, max_tokens=0)
        engine.submit(f"warm {num_shared}", tokens[:num_shared] + other[:20], warm)
        engine.run()
        engine.submit(f"a {num_shared}", tokens, own)
        engine.run()
        assert bits(engine, f"a {num_shared}") == right(kind, dtype)
    assert engine.result("a 145").stats.num_cached_tokens == LENGTH - 2


@each_model
def test_rows_from_the_cache_beside_kv_from_another_workers_save(
    load: Load, right, kind: str, dtype: str
) -> None:
    engine = real_engine(load(kind, dtype), 2, chunk=40)
    submit(engine, "cold")
    engine.run()
    engine.lose("w0")
    for name in ("again", "asked", "all"):
        more = {"asked": {"prompt_logprobs_start": 70}, "all": {"max_tokens": 0}}.get(name, {})
        submit(engine, name, LENGTH - (name == "all"), **more)
        engine.run()
    assert engine.result("again").stats.num_restored_blocks == LENGTH // BLOCK_SIZE
    assert bits(engine, "again") == right(kind, dtype)
    full = engine.result("again").prompt_logprobs
    assert engine.result("asked").prompt_logprobs.same_bits(full[69:])
    assert engine.result("all").prompt_logprobs.same_bits(full[:-1])
    assert engine.result("all").stats.num_cached_tokens == LENGTH - 1, "no worker was needed"


def columns(rows: Logprobs, which: Iterable[int]) -> Logprobs:
    index = list(which)
    return Logprobs(rows.token_ids[:, index], rows.logprobs[:, index], rows.ranks[:, index])


def of_tokens(rows: Logprobs, token_ids: Sequence[int]) -> Logprobs:
    """What rows over the whole vocabulary say of some tokens, the actual one first."""
    parts = []
    for i in range(rows.num_rows):
        places = {token: place for place, token in enumerate(rows.token_ids[i].tolist())}
        parts.append(columns(rows[i : i + 1], [0, *(places[token] for token in token_ids)]))
    return Logprobs.concat(parts)


@each_model
def test_evictions_by_a_tiny_pool_change_no_bit(load: Load, right, kind: str, dtype: str) -> None:
    engine = real_engine(load(kind, dtype), num_blocks=21, chunk=100)
    for seed, name in enumerate("abc"):
        submit(engine, name, 143, seed)
        engine.step()
        engine.evict(name)
    engine.run()
    assert engine.state.stats().num_evictions > 0
    for seed, name in enumerate("abc"):
        assert bits(engine, name, 143) == right(kind, dtype, 143, seed)


@each_model
def test_a_worker_lost_in_mid_prefill_or_decode_changes_no_bit(
    load: Load, right, kind: str, dtype: str
) -> None:
    for count in (0, 1, 3, 5):
        engine = real_engine(load(kind, dtype), 2, chunk=40)
        submit(engine, "a")
        for _ in range(count):
            engine.step()
        engine.lose("w0")
        engine.run()
        assert engine.result("a").stats.num_workers_lost == 1
        assert bits(engine, "a") == right(kind, dtype)


@each_model
@pytest.mark.parametrize("chunk", [40, pytest.param(17, marks=slow)])
def test_a_move_that_begins_after_any_chunk_changes_no_bit(
    load: Load, right, kind: str, dtype: str, chunk: int
) -> None:
    """The partial block moves as well: nothing is computed again. (Later than that, the request
    has ended before its last blocks are there.)"""
    total = -(-LENGTH // chunk) + NUM_TOKENS - 1
    for count in range(1, total - 3):
        engine = real_engine(load(kind, dtype), 2, chunk=chunk)
        submit(engine, "a")
        for _ in range(count):
            engine.step()
        assert engine.migrate("a", "w1") is None
        engine.run()
        assert bits(engine, "a") == right(kind, dtype)
        stats = engine.result("a").stats
        assert (stats.num_migrations, stats.num_recomputed_tokens) == (1, 0)


@each_model
def test_a_scheduler_lost_after_any_step_changes_no_bit(
    load: Load, right, kind: str, dtype: str
) -> None:
    for count in (1, 3, 5):
        engine = real_engine(load(kind, dtype), 2, chunk=40, enable_journal=True)
        submit(engine, "a")
        for _ in range(count):
            engine.step()
        engine.restart_scheduler()
        engine.run()
        assert bits(engine, "a") == right(kind, dtype)


SAMPLED: dict[str, Any] = {
    "n": 2,
    "max_tokens": 14,
    "temperature": 1.3,
    "top_k": 200,
    "top_p": 0.95,
    "min_p": 0.01,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {5: 2.0, 9: -3.0},
}
"""Each draws on what was generated before, or on the random stream."""


@each_model
def test_random_streams_go_on_through_all_that_can_befall_a_request(
    load: Load, kind: str, dtype: str
) -> None:
    """Evicted, moved, its worker and then the scheduler lost: in prefill, and between any tokens.
    Tokens that were generated on an earlier worker still count for the penalties."""
    model = load(kind, dtype)

    def answers(engine: SimEngine) -> list[bytes]:
        engine.run()
        stats = engine.state.stats()
        assert stats.num_recomputed_rows + engine.past_recomputed_rows == 0
        return [engine.result("a", index).bits() for index in range(2)]

    calm = real_engine(model, chunk=4096, max_steps_in_flight=1)
    submit(calm, "a", seed=3, **SAMPLED)
    expected = answers(calm)
    assert calm.result("a", 0).token_ids != calm.result("a", 1).token_ids
    for num_steps in (1, 4):
        engine = real_engine(model, 3, chunk=64, enable_journal=True, save_segment_tokens=32)
        submit(engine, "a", seed=3, **SAMPLED)

        def go_on(count: int, engine: SimEngine = engine) -> None:
            for _ in range(count):
                engine.step()

        def worker(engine: SimEngine = engine) -> str:
            return next(i.worker_id for i in engine.state.request_infos(0) if i.worker_id)

        go_on(num_steps)
        engine.evict("a")
        go_on(6)
        assert engine.migrate("a", next(w for w in engine.runners if w != worker())) is None
        go_on(5)
        engine.lose(worker())
        go_on(4)
        infos = engine.state.request_infos(0)
        assert [i.num_evictions for i in infos] == [1, 1]
        assert all(
            sum(getattr(i, n) for i in infos) for n in ("num_migrations", "num_workers_lost")
        )
        assert 0 < min(i.num_output_tokens for i in infos) < SAMPLED["max_tokens"]
        engine.restart_scheduler()
        assert len(engine.live) == 2
        go_on(2)
        engine.evict("a")
        assert answers(engine) == expected


@each_model
@pytest.mark.parametrize("length", [1, 2, 41, 81])
def test_a_last_chunk_of_one_token_changes_no_bit(
    load: Load, right, kind: str, dtype: str, length: int
) -> None:
    """The chunk before it ends at N-1, with all the rows."""
    engine = real_engine(load(kind, dtype), chunk=40)
    submit(engine, "a", length)
    engine.run()
    assert bits(engine, "a", length) == right(kind, dtype, length)
    assert num_chunks(engine, "a") == -(-length // 40) + NUM_TOKENS - 1
