"""Rounds of 200 requests under kills, freezes, moves and restarts: every one returns, once, right.

A round draws its faults and their moments from its seed; a moment is the number of requests that
have ended, so that a round can be played again. Answers are compared with those of an undisturbed
round, byte for byte, and after each round the engine is as it was before.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from cluster import Client, SamplingParams
from cluster.handle import RequestHandle
from tests.engine.conftest import ENGINE, bits, engine_with_journal, wait_for
from tests.engine.faults import Faults, num_parts
from tests.tiny_models import VOCAB_SIZE

NUM_REQUESTS = 200
FAULTS_PER_ROUND = 4
TIMEOUT_S = 180.0


@pytest.fixture(scope="module")
def engine(
    local_cluster: None, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """An engine that evicts, and that may lose many workers."""
    settings = {
        "num_blocks": 160,
        "save_segment_tokens": 64,
        "result_ttl_s": 2.0,
        "max_worker_restarts": 50,
    }
    with engine_with_journal(tiny_model, "rounds", tmp_path_factory, **settings) as client:
        yield client


def load() -> list[tuple[list[int], SamplingParams]]:
    """Return prompts and parameters: scoring, generation and both; some prompts start alike."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB_SIZE, 60).tolist()
    made = []
    for index in range(NUM_REQUESTS):
        own = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 240))).tolist()
        params = SamplingParams(
            prompt_logprobs=(1, None, 0)[index % 3],
            skip_reading_prefix_cache=(True, False, False)[index % 3],
            logprobs=(None, 2)[index % 2],
            max_tokens=(0, 8, 30)[index % 3] if index % 3 else 6,
            temperature=0.9,
            seed=index,
            ignore_eos=True,
            detokenize=False,
        )
        made.append((shared + own if index % 4 == 0 else own, params))
    return made


def submit(client: Client, name: str) -> list[RequestHandle]:
    prompts, params = zip(*load(), strict=True)
    ids = [f"{name}-{index}" for index in range(NUM_REQUESTS)]
    return client.submit_many(list(prompts), list(params), request_ids=ids)


@pytest.fixture(scope="module")
def undisturbed(engine: Client) -> list[bytes]:
    answers = [bits(handle.result(TIMEOUT_S)) for handle in submit(engine, "calm")]
    assert_baseline(engine)
    return answers


def assert_baseline(client: Client) -> None:
    """Nothing is left of the requests, and every part of the engine is there once."""
    whole = Counter(worker=ENGINE["num_workers"], store=1, scheduler=1)
    wait_for(lambda: num_parts(client) == whole, "every actor is there once")
    wait_for(lambda: len(client.workers()) == whole["worker"], "every worker has joined")
    assert not client.requests()

    def left() -> dict[str, int | None]:
        stats = client.stats()
        store, journal = stats.store or {}, stats.journal or {}
        held = {"num_used_blocks": stats.scheduler.num_used_blocks}
        held |= {
            name: store.get(name) for name in ("num_pins", "num_owned_segments", "num_requests")
        }
        held |= {
            name: journal.get(name) for name in ("num_live", "num_queued_records", "num_results")
        }
        return {name: count for name, count in held.items() if count != 0}

    wait_for(lambda: not left(), "blocks, pins and journal rows are given back", left)
    stats = client.stats()
    assert stats.scheduler.num_recomputed_rows == 0
    assert (stats.store or {})["used_bytes"] <= ENGINE["offload_bytes"]


def play(client: Client, seed: int, undisturbed: list[bytes], kinds: list[str]) -> None:
    """Run a round with these faults, at moments drawn from the seed."""
    rng = random.Random(seed)
    moments = sorted(rng.sample(range(NUM_REQUESTS * 3 // 4), len(kinds)))
    faults = Faults(client, rng)
    handles = submit(client, f"round{seed}")
    for moment, kind in zip(moments, kinds, strict=True):
        wait_for(
            lambda moment=moment: sum(h.done() for h in handles) >= moment,
            f"{moment} requests have ended (seed {seed}, {kinds} at {moments})",
        )
        faults.kinds[kind]()
    for index, handle in enumerate(handles):
        assert bits(handle.result(TIMEOUT_S)) == undisturbed[index], (seed, kinds, moments, index)
    assert_baseline(client)


QUICK = [
    ["kill worker", "migrate", "kill scheduler"],
    ["drain worker", "freeze worker", "kill store"],
    ["evict", "pause scheduler", "kill worker", "migrate"],
]


@pytest.mark.parametrize("seed", range(len(QUICK)))
def test_a_round_of_kills(engine: Client, undisturbed: list[bytes], seed: int) -> None:
    play(engine, seed, undisturbed, QUICK[seed])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_round_of_random_kills(engine: Client, undisturbed: list[bytes], seed: int) -> None:
    rng = random.Random(seed)
    kinds = rng.choices(sorted(Faults(engine, rng).kinds), k=FAULTS_PER_ROUND)
    play(engine, seed, undisturbed, kinds)
