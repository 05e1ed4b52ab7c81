"""The whole scheduler under faults: the real loop, core, store index and journal, without Ray.

Workers die and freeze, the store dies, freezes and comes back empty, the scheduler restarts from
its journal, requests are moved, evicted and cancelled, and clients reconnect. Every request ends
once with the bits that it must come to, and nothing is left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path
from typing import Any

import pytest

from scheduler.codec import int_array
from scheduler.config import SchedulerConfig
from scheduler.errors import EngineUnavailable, InvalidRequest
from scheduler.messages import Submission
from scheduler.request import FinishReason
from scheduler.sampling_params import SamplingParams
from tests.sim.fake_runner import EOS, VOCAB_SIZE, expected_output
from tests.sim.world import Client, World
from tests.sizes import sizes

NUM_REQUESTS = 60
NUM_FAULTS = 25
DEADLINE_S = 60.0
SETTLE_S = 60.0


def config() -> SchedulerConfig:
    return SchedulerConfig(
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=6,
        max_decode_steps=3,
        max_model_len=200,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        save_segment_tokens=8,
        enable_journal=True,
    )


def a_submission(rng: random.Random, request_id: str) -> Submission:
    head = [1, 2, 3, 4, 5, 6, 8, 9] if rng.random() < 0.4 else []
    tokens = [rng.choice([1, 2, 3, 20, 21]) for _ in range(rng.randrange(1, 40))]
    params = SamplingParams(
        n=2 if rng.random() < 0.15 else 1,
        max_tokens=rng.choice([1, 4, 12]),
        min_tokens=0,
        prompt_logprobs=rng.choice([None, 0, 2]),
        logprobs=rng.choice([None, 1]),
        ignore_eos=rng.random() < 0.5,
    )
    return Submission(request_id, int_array(head + tokens), params, seed=rng.randrange(1000))


async def harm(world: World, client: Client, rng: random.Random) -> None:
    """Do one bad thing."""
    live = list(client.live)
    workers = [worker for worker in world.workers.values() if not worker.is_dead]
    worker = rng.choice(workers) if workers else None
    match rng.randrange(10):
        case 0 if worker is not None:
            worker.is_dead = True
        case 1 if worker is not None:
            worker.is_frozen = True
        case 2:
            world.store.is_dead = True
        case 3:
            world.store.is_frozen = True
        case 4:
            await world.restart_scheduler()
        case 5 if live:
            await world.loop.evict([rng.choice(live)])
        case 6 if live and worker is not None:
            with contextlib.suppress(InvalidRequest):
                await world.loop.migrate(rng.choice(live), worker.runner.worker_id)
        case 7 if worker is not None and len(workers) > 1:
            with contextlib.suppress(InvalidRequest):  # it was lost before anybody noticed
                await world.loop.drain(worker.runner.worker_id, 0.2)
                world.loop.leave_node(worker.runner.worker_id)  # each is on a node of its own
        case 8:
            await client.reconnect()
        case 9 if live:
            await world.loop.attach(client.client_id, rng.choice(live))


async def live_through(seed: int, path: Path) -> None:
    rng = random.Random(seed)
    world = World(config(), path / "journal", rng)
    await world.start()
    client = Client(world, "c")
    submitted = [a_submission(rng, f"r{i}") for i in range(NUM_REQUESTS)]
    waiting, cancelled = list(submitted), set()
    num_faults = 0
    while waiting or client.live:
        if waiting and rng.random() < 0.5:
            await client.submit([waiting.pop() for _ in range(min(len(waiting), 5))])
        if num_faults < NUM_FAULTS and rng.random() < 0.2:
            num_faults += 1
            await harm(world, client, rng)
        if client.live and rng.random() < 0.02:
            name = rng.choice(list(client.live))
            cancelled.add(name)
            await world.loop.cancel([name])
        await client.poll()
    check_results(client, submitted, cancelled)
    await check_nothing_left(world, client)


def check_results(client: Client, submitted: list[Submission], cancelled: set[str]) -> None:
    num_poisonous = 0
    for submission in submitted:
        params = submission.sampling_params
        for index in range(params.n):
            result = client.results[submission.request_id, index]
            if result.finish_reason is FinishReason.ABORT:
                assert submission.request_id in cancelled
                continue
            if result.error is not None and "workers in a row died" in str(result.error):
                num_poisonous += 1  # chance killed whoever computed it, again and again
                continue
            assert result.error is None, result.error
            own = params if index == 0 else SamplingParams(**_without_rows(params))
            expected = expected_output(
                submission.prompt_token_ids, own, submission.seed + index, params.max_tokens or 0
            )
            assert result.token_ids == expected.token_ids
            assert result.finish_reason is expected.finish_reason
            if expected.rows is not None:
                assert result.prompt_logprobs is not None
                assert result.prompt_logprobs.same_bits(expected.rows)
    assert num_poisonous <= 3


def _without_rows(params: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "logprobs": params.logprobs,
        "ignore_eos": params.ignore_eos,
    }


PER_WORKER = {"WorkerCalls._members", "Core.workers", "Core._touched"}
"""Containers with an item for each worker that is there, at most."""


async def check_nothing_left(world: World, client: Client) -> None:
    """Wait until all that was under way has ended, and see that nothing holds anything."""
    await client.poll()
    await world.loop.disconnect(client.client_id)

    def left() -> dict[str, Any]:
        held = {name: size for name, size in sizes(world.loop).items() if size}
        held["Tasks._tasks"] -= 1  # the watch goes on
        held = {n: size for n, size in held.items() if n not in PER_WORKER}
        stats, stored = world.state.stats(), world.store.index.stats
        held["blocks"] = stats.num_used_blocks
        held["requests"] = stats.num_running + stats.num_waiting
        held["recomputed rows"] = stats.num_recomputed_rows
        held["pins"] = stored.num_pins
        held["owned segments"] = stored.num_owned_segments
        held["requests in the store"] = stored.num_requests
        held["journal"] = world.journal.stats().num_live
        held["missing workers"] = world.num_workers - len(world.workers)
        return {name: size for name, size in held.items() if size}

    world.heal()
    held, deadline_s = left(), time.monotonic() + SETTLE_S
    while held and time.monotonic() < deadline_s:
        await asyncio.sleep(0.001)
        held = left()
    assert held == {}
    world.state.validate()
    world.store.index.validate()
    world.loop.close(EngineUnavailable("the test is over"))
    world.journal.close()


@pytest.mark.parametrize("seed", range(3))
def test_every_request_lives_through_everything_and_leaves_nothing(
    seed: int, tmp_path: Path
) -> None:
    asyncio.run(asyncio.wait_for(live_through(seed, tmp_path), DEADLINE_S))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_every_request_lives_through_everything_many_times(seed: int, tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(live_through(seed, tmp_path), DEADLINE_S))
