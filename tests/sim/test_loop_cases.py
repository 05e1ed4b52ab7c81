"""Users' failures that only the whole loop can show: clients that hang up, and calls that all fail.

The loop, the core, the store's index and the journal are the real ones; see `tests.sim.world`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest

from offload_store.store import OffloadStore
from scheduler.actions import RecordFinished, RecordSubmitted
from scheduler.calls import CallFailed
from scheduler.codec import int_array
from scheduler.config import SchedulerConfig
from scheduler.errors import EngineUnavailable, RequestFailed
from scheduler.journal_queue import UnwrittenQueue
from scheduler.messages import Submission
from scheduler.request import FinishReason
from scheduler.sampling_params import SamplingParams
from scheduler.submissions import make_requests
from tests.sim.cases import generating, prompt, scoring
from tests.sim.fake_runner import EOS, VOCAB_SIZE, expected_output
from tests.sim.world import Client, Store, Worker, World
from tests.sizes import sizes

DEADLINE_S = 60.0
RELEASED = "WorkerView.released_request_ids"


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


def world(path: Path, num_blocks: int = 200, **settings: Any) -> World:
    own = {
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 400,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (EOS,),
        "save_segment_tokens": 8,
        "enable_journal": True,
    }
    rng = random.Random(1)
    return World(
        SchedulerConfig(**{**own, **settings}), path / "journal", rng, num_blocks=num_blocks
    )


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def close(ended: World) -> None:
    ended.loop.close(EngineUnavailable("the test is over"))
    ended.journal.close()


# -------------------------------------------------------------------------- clients that hang up


def check(client: Client, submission: Submission) -> None:
    params = submission.sampling_params
    for index in range(params.n):
        right = expected_output(
            submission.prompt_token_ids, params, submission.seed + index, params.max_tokens or 0
        )
        result = client.results[submission.request_id, index]
        assert result.error is None, result.error
        assert result.finish_reason is right.finish_reason
        assert result.token_ids == right.token_ids


@pytest.mark.parametrize("fault", ["none", "worker", "scheduler", "store"])
def test_a_client_that_hangs_up_ends_what_it_alone_has_asked_for(
    fault: str, tmp_path: Path
) -> None:
    """What another one follows too goes on for that one, all of its n completions, also where some
    have ended before the other one came. A worker, or the scheduler, is lost meanwhile."""

    async def test() -> None:
        # What must not end by itself has more to do than any machine does meanwhile.
        engine = world(tmp_path, num_blocks=4000, max_model_len=12000)
        await engine.start()
        leaving, staying = Client(engine, "leaving"), Client(engine, "staying")
        stops = {"n": 3, "ignore_eos": False, "stop_token_ids": (3, 5, 8, 11)}
        both = [
            Submission("both", int_array(prompt(20)), generating(150), 1),
            Submission("both too", int_array(prompt(9, seed=1)), generating(90, **stops), 2),
        ]
        alone = Submission("alone", int_array(prompt(20, seed=2)), generating(11000), 3)
        await leaving.submit([*both, alone])
        while not any(
            leaving.results["both too", index].finish_reason is not None for index in range(3)
        ):
            await leaving.poll()
        await staying.submit(both)
        if fault == "worker":
            next(iter(engine.workers.values())).is_dead = True
        elif fault == "store":
            engine.store.is_dead = True
        elif fault == "scheduler":
            await engine.restart_scheduler()
            await staying.poll()
        await engine.loop.disconnect(leaving.client_id)
        if fault == "scheduler":
            await leaving.reconnect()  # the old scheduler's word to the new one came too late
            await engine.loop.disconnect(leaving.client_id)
        assert engine.state.request("alone") is None
        assert "alone" not in engine.state.live_ids()
        while staying.live:
            await staying.poll()
        for submission in both:
            check(staying, submission)
        engine.heal()
        await eventually(lambda: engine.state.stats().num_used_blocks == 0)
        await eventually(lambda: engine.journal.stats().num_live == 0)
        await eventually(lambda: engine.store.index.stats.num_requests == 0)
        assert engine.state.stats().num_aborted > 0
        close(engine)

    run(test)


# ------------------------------------------------------------------------ calls that always fail


class FailingWorker(Worker):
    """Every step, read and write of it raises."""

    num_failed = 0

    async def alive(self, epoch: int | None = None) -> None:
        await super().alive(epoch)
        if epoch is not None:
            type(self).num_failed += 1
            raise CallFailed(RequestFailed("boom"))


class FailingStore(Store):
    """Every lookup, save and load of it raises; it takes releases."""

    num_failed = 0

    async def _fail(self) -> Any:
        type(self).num_failed += 1
        raise CallFailed(RequestFailed("boom"))

    async def lookup(self, epoch: int, action: Any) -> int:
        return int(await self._fail())

    async def save(self, action: Any, worker: Any) -> tuple[int, int]:
        raise await self._fail()


@pytest.mark.parametrize("who", ["worker", "store"])
def test_thousands_of_calls_that_fail_leave_nothing_in_the_scheduler(
    who: str, tmp_path: Path
) -> None:
    """A list of errors, of calls or of waiting requests that is never cleared grows for ever. Nor
    is any call tried again and again when nobody waits for it any more."""

    async def test() -> None:
        engine = world(tmp_path)
        engine.store = FailingStore(engine, 10**6) if who == "store" else Store(engine, 10**6)
        await engine._start_scheduler()
        await eventually(lambda: len(engine.workers) == 2)
        if who == "worker":
            for worker in engine.workers.values():
                worker.__class__ = FailingWorker
        client = Client(engine, "c")
        idle = None
        for wave in range(10):
            await one_wave(client, wave)
            if who == "worker":
                errors = {type(result.error) for result in client.results.values()}
                assert errors == {RequestFailed}
            client.results.clear()
            await eventually(lambda: is_idle(engine))
            now = (sizes(engine.loop), sizes(engine.state), sizes(engine.journal))
            del now[0][RELEASED]  # the core is a part of the loop
            num_tasks = len(asyncio.all_tasks())
            # Whom such a worker has to forget is told with the first step that it takes.
            assert now[1].pop(RELEASED) <= 100 * (wave + 1), "each one once"
            idle = idle or (now, num_tasks)
            assert (now, num_tasks) == idle, wave
            assert max(sizes(engine.store.index).values()) == 0
        for worker in engine.workers.values():
            worker.__class__ = Worker
        await one_wave(client, 10)
        await eventually(lambda: is_idle(engine))
        assert sizes(engine.state)[RELEASED] == 0
        num_failed = (FailingWorker if who == "worker" else FailingStore).num_failed
        assert 1000 <= num_failed < 10_000
        close(engine)

    run(test)


async def one_wave(client: Client, wave: int) -> None:
    """Submit a hundred requests, evict them, and wait for their ends."""
    submissions = [
        Submission(f"r{wave}-{i}", int_array(prompt(9 + i % 9, i)), scoring(max_tokens=3), i)
        for i in range(100)
    ]
    await client.submit(submissions)
    await client.world.loop.evict([s.request_id for s in submissions])
    while client.live:
        await client.poll()
    await client.poll()


def is_idle(engine: World) -> bool:
    written = engine.journal.stats()
    return (
        not engine.state.stats().num_used_blocks
        and len(engine.loop._tasks._tasks) == 1
        and written.num_queued_records == 0
        and written.num_live == 0
    )


def test_thousands_of_saves_and_loads_that_fail_leave_nothing_in_the_index() -> None:
    """Large ones too, of hundreds of blocks: half written, lost on the way, never loaded."""
    store = OffloadStore(300 * 64, 64, 4, segment_bytes=8 * 64)
    rng = random.Random(0)
    for i in range(10_000):
        name = f"r{i % 50}"
        large = i % 25 == 0
        hashes = [f"{i}-{j}".encode() for j in range(200 if large else rng.randrange(1, 9))]
        plan = store.prepare_save(name, hashes, owned=i % 3 == 0, replace=i % 2 == 0)
        for number, segment in enumerate(plan.segments):
            if rng.random() < 0.2:
                store.drop_segment(segment.segment_id)
            store.complete_save(segment.segment_id, ok=number < 2 and i % 4 == 0)
        store.lookup(
            name,
            hashes,
            num_readable_tokens=10**6,
            num_own_tokens=10**6,
            skip_reading_prefix_cache=False,
        )
        for row in store.segments_of(name, hashes)[:1]:
            store.drop_segment(row.segment_id)
        if i % 5 == 0:
            store.release(name, forget=i % 10 == 0)
        assert store.stats.used_bytes <= 300 * 64
        if i % 1000 == 999:
            store.validate()
            assert max(sizes(store).values()) <= 50 + 2 * 300
    store.retain([])
    for segment_id in list(store._segments):
        store.drop_segment(segment_id)
    store.validate()
    assert set(sizes(store).values()) == {0}


# ------------------------------------------------------------------------------------ dead work


def records(name: str, attempt: int) -> Iterable[Any]:
    """A submission that its client has given up: taken in, and aborted."""
    submission = Submission(name, int_array(prompt(9)), SamplingParams(), attempt)
    for request in make_requests(submission, client_id="c"):
        yield RecordSubmitted(request.encode(), request.request_id, request.parent_id)
        yield RecordFinished(
            request.request_id,
            request.parent_id,
            FinishReason.ABORT,
            None,
            None,
            request.stats,
        )


def test_clients_that_try_again_while_the_disk_hangs_do_not_fill_the_journal() -> None:
    """Under the same ids: only the last try is kept. Under new ones: no more than its bound."""
    queue = UnwrittenQueue(max_bytes=100_000)
    for attempt in range(500):
        for name in ("a", "b", "c"):
            for record in records(name, attempt):
                queue.add(record, float(attempt))
    assert queue.num_records == 6
    assert queue.num_dropped == 0
    assert sum(sizes(queue).values()) < 30
    for attempt in range(2000):
        for record in records(f"new{attempt}", attempt):
            queue.add(record, float(attempt))
    assert queue.num_bytes <= 100_000
    assert sum(sizes(queue).values()) < 1000
    assert queue.num_live == 0
