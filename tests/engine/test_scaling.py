"""Workers come with a burst and go when it is over, and no request is lost on the way."""

from __future__ import annotations

import pytest

from cluster import Client, SamplingParams
from tests.engine.conftest import ENGINE, LASTING, assert_equal_bits, wait_for

pytestmark = [pytest.mark.usefixtures("local_cluster"), pytest.mark.slow]

PROMPTS = [[40 + (i * j) % 100 for j in range(90)] for i in range(1, 7)]
PARAMS = SamplingParams(max_tokens=60, prompt_logprobs=1, logprobs=1, seed=3, ignore_eos=True)
NUM_ROUNDS = 5


def test_one_worker_becomes_three_under_a_burst_and_one_again(tiny_model: str) -> None:
    elastic = {"num_workers": 1, "max_workers": 3, "target_queue_s": 0.5, "worker_idle_s": 1.0}
    with Client(model=tiny_model, name="elastic", **ENGINE | elastic) as client:
        expected = client.generate(PROMPTS, PARAMS)
        burst = client.submit_many(PROMPTS * NUM_ROUNDS, PARAMS)
        crowd = client.submit_many([PROMPTS[0]] * 200, LASTING)
        wait_for(lambda: len(client.workers()) == 3, "two more workers have joined")
        for handle in crowd:
            handle.cancel()
        assert_equal_bits(burst, expected * NUM_ROUNDS)
        wait_for(lambda: len(client.workers()) == 1, "the idle ones have left")
        stats = client.stats().scheduler
        assert (stats.num_workers_drained, stats.num_workers_lost) == (2, 0)
        assert stats.num_recomputed_rows == 0
        assert_equal_bits(client.submit_many(PROMPTS, PARAMS), expected)
