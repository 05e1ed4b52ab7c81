"""Real actors: a cramped engine, whose requests are evicted and moved, gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cluster import Client, RequestTooLarge, SamplingParams, ScoringParams
from cluster.demo import evict_in_mid_prefill
from tests.engine.conftest import DEADLINE_S, ENGINE, bits
from tests.tiny_models import MAX_MODEL_LEN
from workers.model_store import DEFAULT_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_cluster")]

POOL_TOKENS = 160
"""That a worker of the cramped engine has room for."""


@pytest.fixture(scope="module")
def cramped(local_cluster: None, tiny_model: str) -> Iterator[Client]:
    num_blocks = POOL_TOKENS // ENGINE["block_size"]
    settings = ENGINE | {"num_blocks": num_blocks, "max_num_batched_tokens": 7}
    with Client(model=tiny_model, name="cramped", **settings) as client:
        yield client


def test_a_tiny_pool_and_tiny_chunks_change_no_bit(cramped: Client, tiny_model: str) -> None:
    """Elsewhere an eviction between chunks loses rows, doubles them, or spins for ever."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 250, int(rng.integers(1, 90))).tolist() for _ in range(34)]
    params = [
        SamplingParams(prompt_logprobs=2, logprobs=1, max_tokens=40, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with Client(model=tiny_model, name="roomy", **ENGINE | {"num_workers": 1}) as client:
        undisturbed = [bits(output) for output in client.generate(prompts, params)]
        assert client.stats().scheduler.num_evictions == 0
    outputs = cramped.generate(prompts, params)
    stats = cramped.stats()
    assert [bits(output) for output in outputs] == undisturbed
    assert all(len(o.prompt_logprobs or ()) == len(o.prompt_token_ids) for o in outputs)
    assert all(len(o.outputs[0].logprobs or ()) == 40 for o in outputs)
    assert stats.scheduler.num_evictions > 0
    assert stats.scheduler.num_loaded_blocks > 0
    assert stats.scheduler.num_recomputed_rows == 0
    assert stats.scheduler.num_recomputed_tokens < stats.scheduler.num_evictions * 8
    assert stats.scheduler.num_used_blocks == 0
    assert stats.store is not None
    assert (stats.store["num_pins"], stats.store["num_requests"]) == (0, 0)


def test_what_the_pool_can_not_hold_is_refused_and_all_of_it_may_be_used(cramped: Client) -> None:
    """It holds less than the context: what is cut to the context is refused by the pool."""
    long = [40 + i % 90 for i in range(MAX_MODEL_LEN)]
    with pytest.raises(RequestTooLarge, match="shorten it"):
        cramped.score(long, [1])
    with pytest.raises(RequestTooLarge, match="num_blocks"):
        cramped.score(long, [1], ScoringParams(truncate=True))
    with pytest.raises(RequestTooLarge, match="num_blocks"):
        cramped.submit(long[: POOL_TOKENS - 9], SamplingParams(max_tokens=11))
    fits = cramped.score(long[: POOL_TOKENS - 1], [1])
    assert (fits.num_context_tokens, fits.num_truncated_tokens) == (POOL_TOKENS - 1, 0)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    output = cramped.submit(long[: POOL_TOKENS - 9], params).result(timeout=DEADLINE_S)
    assert len(output.outputs[0].token_ids) == 10


def test_the_default_model_keeps_its_bits_through_forced_evictions() -> None:
    text = (
        "The river rose for three days. On the fourth the miller opened the gates, and the wheel, "
        "which had stood still since autumn, began to turn. "
    )
    prompts = [text * 3 + "He said", text * 5, text[:40], text * 2 + "Then the rain stopped."]
    params = SamplingParams(
        prompt_logprobs=5, logprobs=2, max_tokens=8, seed=1, skip_reading_prefix_cache=True
    )
    settings = {"model": DEFAULT_MODEL, "device": "cpu", "namespace": "haversack-tests"}
    with Client(name="default-roomy", num_workers=1, num_blocks=200, **settings) as client:
        undisturbed = [bits(output) for output in client.generate(prompts, params)]
    with Client(
        name="default-cramped",
        num_workers=2,
        num_blocks=24,
        max_num_batched_tokens=32,
        **settings,
    ) as client:
        handles = client.submit_many(prompts, params)
        evicted = evict_in_mid_prefill(client, [handles[0], handles[1], handles[3]])
        assert [bits(handle.result(timeout=300)) for handle in handles] == undisturbed
        assert client.stats().scheduler.num_evictions >= evicted > 0
