"""Small engines on `FakeRunner`, requests for them, and what every one of them must come to."""

from __future__ import annotations

from typing import Any

import numpy as np

from scheduler.actions import AnyAction, SaveBlocks
from scheduler.config import SchedulerConfig
from scheduler.logprobs import Logprobs
from scheduler.sampling_params import SamplingParams
from tests.sim.engine import Result, SimEngine
from tests.sim.fake_runner import EOS, POISON, VOCAB_SIZE, FakeRunner, _mix, expected_output

BLOCK_SIZE = 4
CHUNK = 8
BLOCK_BYTES = BLOCK_SIZE * 8
MAX_MODEL_LEN = 1000


def fake_engine(
    num_workers: int = 1,
    num_blocks: int = 64,
    *,
    chunk: int = CHUNK,
    store_blocks: int = 4000,
    validate: bool = True,
    **config: Any,
) -> SimEngine:
    """Return an engine whose workers have joined; `store_blocks=0` is one without a store."""
    settings: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": chunk,
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (EOS,),
        "enable_offload": store_blocks > 0,
    }
    engine = SimEngine(
        SchedulerConfig(**{**settings, **config}),
        block_bytes=BLOCK_BYTES,
        store_bytes=store_blocks * BLOCK_BYTES,
        validate=validate,
    )
    for index in range(num_workers):
        add_worker(engine, f"w{index}", num_blocks)
    return engine


def add_worker(engine: SimEngine, worker_id: str, num_blocks: int = 64) -> FakeRunner:
    runner = FakeRunner(worker_id, num_blocks, BLOCK_SIZE)
    engine.join(runner, runner.info())
    return runner


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Return a prompt that shares nothing with those of other seeds, and holds no NaN."""
    rng = np.random.default_rng(seed)
    tokens = [t for t in range(VOCAB_SIZE) if t not in (EOS, POISON)]
    return rng.choice(tokens, num_tokens).tolist()


def scoring(k: int = 2, max_tokens: int = 0, **params: Any) -> SamplingParams:
    """Ask for prompt logprobs, and for `max_tokens` tokens whatever they are."""
    own = {"prompt_logprobs": k, "max_tokens": max_tokens, "ignore_eos": True, **params}
    return SamplingParams(**own)


def generating(max_tokens: int = 4, **params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **params})


def check(engine: SimEngine, name: str) -> None:
    """Compare all completions of a submission with what they must be, bit for bit."""
    submission = engine.submissions[name]
    params, tokens = submission.sampling_params, submission.prompt_token_ids
    room = engine.config.max_model_len - len(tokens) + 1
    for index in range(params.n):
        own = params if not index else params.without_prompt_logprobs()
        expected = expected_output(
            tokens, own, submission.seed + index, min(params.max_tokens, room)
        )
        result = engine.result(name, index)
        assert result.error is None, result.error
        assert result.finish_reason is expected.finish_reason
        assert result.token_ids == expected.token_ids
        assert result.num_prompt_deltas == (expected.rows is not None)
        assert_same_rows(result.prompt_logprobs, expected.rows)
        assert_same_rows(output_rows(result), expected.logprobs)


def assert_same_rows(rows: Logprobs | None, expected: Logprobs | None) -> None:
    if rows is None or expected is None:
        assert rows is expected
    else:
        assert rows.num_rows == expected.num_rows
        assert rows.same_bits(expected)


def output_rows(result: Result) -> Logprobs | None:
    return Logprobs.concat(result.logprobs) if result.logprobs else None


def check_idle(engine: SimEngine) -> None:
    """Nothing is held for anybody: not by the core, the workers or the store."""
    assert not engine.live
    assert not engine.pending
    assert engine.state.stats().num_used_blocks == 0
    store = engine.store.stats
    assert (store.num_pins, store.num_owned_segments, store.num_requests) == (0, 0, 0)
    assert store.num_saving_segments == 0
    assert len(engine.data) == store.num_segments
    for runner in engine.runners.values():
        assert not runner.tracked


def finish(engine: SimEngine, *names: str) -> None:
    """Run everything to its end and check results and what is left behind."""
    engine.run()
    for name in names:
        check(engine, name)
    check_idle(engine)


def computed_kv(tokens: list[int]) -> np.ndarray:
    """The KV of a prompt's full blocks, [blocks, block size]."""
    values, parent = [], 0
    for token in tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE]:
        parent = _mix(parent, token)
        values.append(parent)
    return np.asarray(values, np.uint64).reshape(-1, BLOCK_SIZE)


def stored_kv(engine: SimEngine, save: SaveBlocks) -> np.ndarray:
    """What the store holds of a save, [leading blocks, block size]."""
    hit = engine.store.lookup(
        "reader",
        save.block_hashes,
        num_readable_tokens=10**6,
        num_own_tokens=0,
        skip_reading_prefix_cache=False,
    )
    rows = engine.store.segments_of("reader", save.block_hashes)
    assert len(rows) * BLOCK_SIZE == hit.num_hit_tokens
    data = [engine.data[row.segment_id][row.row] for row in rows]
    engine.store.release("reader", forget=True)
    return np.array(data).view(np.uint64)


def hold_back(engine: SimEngine, kind: type[AnyAction]) -> list[AnyAction]:
    """Complete everything but actions of one kind; return those that wait."""
    while True:
        index = next((i for i, a in enumerate(engine.pending) if not isinstance(a, kind)), None)
        if index is None:
            return list(engine.pending)
        engine.complete(index)
