"""The offload store actor between real Ray actors: KV bytes go from worker to worker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import ray

from offload_store.actor import OffloadStoreActor

BLOCK_BYTES = 64 * 1024
BLOCK_SIZE = 16
ROWS = 4
WAIT_S = 120
HASTY_S = 5.0
"""For a store that is to give up soon on who hangs, and not on who is only slow."""
EPOCH = 7

pytestmark = pytest.mark.usefixtures("local_cluster")


@ray.remote(num_cpus=0, concurrency_groups={"read": 1, "write": 1})
class FakeWorker:
    """Blocks of random bytes; a read or a write can be told to wait or to fail."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, seed: int, num_blocks: int = 64) -> None:
        """Be like a new one."""
        self.epoch = EPOCH
        rng = np.random.default_rng(seed)
        self.blocks = rng.integers(0, 256, (num_blocks, BLOCK_BYTES), dtype=np.uint8)
        self.reached = {name: threading.Event() for name in ("read", "write")}
        self.gates = {name: threading.Event() for name in ("read", "write")}
        self.open_gates()
        self.calls: list[int] = []
        self.failing_call: int | None = None
        self.held_call: int | None = None

    @ray.method(concurrency_group="read", num_returns=2)
    def read_blocks(self, epoch: int, block_ids: list[int]) -> tuple[np.ndarray, int]:
        self.check(epoch)
        self.calls.append(len(block_ids))
        call = len(self.calls) - 1
        self.reached["read"].set()
        if call == self.held_call:
            self.gates["read"].clear()
        self.gates["read"].wait(WAIT_S)
        if call == self.failing_call:
            raise RuntimeError("this read fails")
        return self.blocks[block_ids], len(block_ids)

    @ray.method(concurrency_group="write")
    def write_blocks(self, epoch: int, block_ids: list[int], segments: list, sources: list) -> int:
        self.check(epoch)
        self.reached["write"].set()
        self.gates["write"].wait(WAIT_S)
        arrays: dict[int, np.ndarray] = {}
        for written, (block_id, (segment, row)) in enumerate(zip(block_ids, sources, strict=True)):
            try:
                if segment not in arrays:
                    arrays[segment] = ray.get(segments[segment], timeout=WAIT_S)
            except ray.exceptions.ObjectLostError:
                return written
            self.blocks[block_id] = arrays[segment][row]
        return len(block_ids)

    def check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise RuntimeError(f"epoch {epoch} is not {self.epoch}")

    def reset(self, epoch: int) -> None:
        self.epoch = epoch

    def bytes_of(self, block_ids: list[int]) -> bytes:
        return self.blocks[block_ids].tobytes()

    def read_sizes(self) -> list[int]:
        return self.calls

    def fail_call(self, call: int) -> None:
        self.failing_call = call

    def hold_call(self, call: int) -> None:
        self.held_call = call

    def close_gate(self, name: str) -> None:
        self.reached[name].clear()
        self.gates[name].clear()

    def open_gates(self) -> None:
        for gate in self.gates.values():
            gate.set()

    def wait_until(self, name: str) -> bool:
        return self.reached[name].wait(WAIT_S)

    @ray.method(concurrency_group="read")
    def finish_reads(self) -> None:
        """Return when all reads that were asked for before have ended."""

    @ray.method(concurrency_group="write")
    def finish_writes(self) -> None:
        """Return when all writes that were asked for before have ended."""

    def pid(self) -> int:
        return os.getpid()


class Store(OffloadStoreActor):
    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def actors():
    """Start actors through what this gives; all of them are gone afterwards."""
    started = []

    def start(actor):
        started.append(actor)
        return actor

    yield start
    for actor in started:
        ray.kill(actor)


@pytest.fixture
def hang():
    """Stop the processes of workers that this is given; they run on after the test."""
    pids = []

    def stop(worker) -> None:
        pids.append(get(worker.pid.remote()))
        os.kill(pids[-1], signal.SIGSTOP)

    yield stop
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def start_store(actors):
    def start(num_blocks: int = 64, timeout_s: float = WAIT_S):
        return actors(
            ray.remote(Store)
            .options(num_cpus=0, max_restarts=-1)
            .remote(
                num_blocks * BLOCK_BYTES, BLOCK_BYTES, BLOCK_SIZE, ROWS * BLOCK_BYTES, timeout_s
            )
        )

    return start


@pytest.fixture(scope="module")
def idle_workers(local_cluster):
    """Those that no test uses now: to start one takes longer than most tests."""
    workers = []
    yield workers
    for worker in workers:
        ray.kill(worker)


@pytest.fixture
def start_worker(idle_workers):
    started = []

    def start(seed: int):
        worker = idle_workers.pop() if idle_workers else FakeWorker.remote()
        started.append(worker)
        get(worker.begin.remote(seed))
        return worker

    yield start
    for worker in started:
        with contextlib.suppress(ray.exceptions.RayActorError):  # the test has killed it
            get(worker.open_gates.remote())
            get([worker.finish_reads.remote(), worker.finish_writes.remote()])
            idle_workers.append(worker)


def chain(name: str, num_blocks: int) -> list[bytes]:
    return [f"{name}{index}".encode().ljust(16, b".") for index in range(num_blocks)]


def get(ref):
    return ray.get(ref, timeout=WAIT_S)


def look(store, request_id: str, hashes: list[bytes], readable=10**6, own=0, skip=False) -> int:
    return get(store.lookup.remote(EPOCH, request_id, hashes, readable, own, skip))


def ids(start: int, num_blocks: int) -> list[int]:
    return list(range(start, start + num_blocks))


A, B = chain("a", 10), chain("b", 10)


def test_blocks_saved_by_one_worker_arrive_in_another_bit_for_bit(start_store, start_worker):
    store, source, target = start_store(), start_worker(1), start_worker(2)
    shuffled = [7, 3, 9, 12, 1, 0, 30, 31, 22, 5]
    assert get(store.save.remote("x", source, EPOCH, A, shuffled, False, False)) == (10, 10)
    assert get(source.read_sizes.remote()) == [4, 4, 2]
    assert look(store, "y", A) == 160
    assert get(store.load.remote("y", target, EPOCH, A[:9], ids(40, 9))) == 9
    assert get(target.bytes_of.remote(ids(40, 9))) == get(source.bytes_of.remote(shuffled[:9]))
    get(store.release.remote("y", True))
    assert get(store.stats.remote())["num_pins"] == 0
    assert get(store.ping.remote())


def test_blocks_outlive_the_worker_that_saved_them(start_store, start_worker):
    """kill -9 right after the save: the store owns the arrays, not the worker."""
    store, source, target = start_store(), start_worker(1), start_worker(2)
    expected = get(source.bytes_of.remote(ids(0, 10)))
    assert get(store.save.remote("x", source, EPOCH, A, ids(0, 10), True, False)) == (10, 10)
    os.kill(get(source.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        get(source.pid.remote())
    assert look(store, "x", A, readable=0, own=160) == 160
    assert get(store.load.remote("x", target, EPOCH, A, ids(20, 10))) == 10
    assert get(target.bytes_of.remote(ids(20, 10))) == expected


def test_a_worker_that_dies_while_saving_costs_only_the_save(start_store, start_worker):
    store, source = start_store(), start_worker(1)
    get(source.close_gate.remote("read"))
    saving = store.save.remote("x", source, EPOCH, A, ids(0, 10), True, False)
    assert get(source.wait_until.remote("read"))
    assert get(store.stats.remote())["used_bytes"] == 10 * BLOCK_BYTES
    os.kill(get(source.pid.remote()), signal.SIGKILL)
    assert get(saving) == (0, 0)
    stats = get(store.stats.remote())
    assert (stats["used_bytes"], stats["num_segments"], stats["num_requests"]) == (0, 0, 0)
    assert look(store, "y", A) == 0


def test_a_read_that_fails_midway_gives_its_room_back(start_store, start_worker):
    store, source = start_store(10), start_worker(1)
    get(source.fail_call.remote(1))
    assert get(store.save.remote("x", source, EPOCH, A, ids(0, 10), False, False)) == (4, 6)
    assert get(store.stats.remote())["used_bytes"] == 6 * BLOCK_BYTES
    assert look(store, "y", A) == 64
    get(store.release.remote("y", True))
    assert get(store.save.remote("x", source, EPOCH, A, ids(0, 10), False, False)) == (10, 4)


def test_small_arrays_that_come_inside_the_reply_are_saved_too(actors, start_worker):
    """Ray keeps small results in the caller instead of the object store."""
    store = actors(
        ray.remote(OffloadStoreActor)
        .options(num_cpus=0)
        .remote(10 * BLOCK_BYTES, BLOCK_BYTES, BLOCK_SIZE, BLOCK_BYTES)
    )
    source, target = start_worker(1), start_worker(2)
    assert get(store.save.remote("x", source, EPOCH, A[:2], ids(0, 2), False, False)) == (2, 2)
    assert look(store, "y", A) == 32
    assert get(store.load.remote("y", target, EPOCH, A[:2], ids(5, 2))) == 2
    assert get(target.bytes_of.remote(ids(5, 2))) == get(source.bytes_of.remote(ids(0, 2)))


def test_a_slow_save_keeps_no_lookup_and_no_other_save_waiting(start_store, start_worker):
    store, slow, quick = start_store(), start_worker(1), start_worker(2)
    get(slow.close_gate.remote("read"))
    saving = store.save.remote("x", slow, EPOCH, A, ids(0, 10), False, False)
    assert get(slow.wait_until.remote("read"))
    assert look(store, "y", A) == 0
    assert get(store.save.remote("y", quick, EPOCH, B, ids(0, 10), False, False)) == (10, 10)
    assert look(store, "z", B) == 160
    assert not ray.wait([saving], timeout=0)[0]
    get(slow.open_gates.remote())
    assert get(saving) == (10, 10)
    assert look(store, "y", A) == 160


def test_a_request_forgotten_while_its_save_is_under_way_owns_nothing(start_store, start_worker):
    store, source = start_store(10), start_worker(1)
    get(source.close_gate.remote("read"))
    saving = store.save.remote("x", source, EPOCH, A, ids(0, 10), True, True)
    assert get(source.wait_until.remote("read"))
    get(store.release.remote("x", True))
    get(source.open_gates.remote())
    get(saving)
    stats = get(store.stats.remote())
    assert (stats["num_owned_segments"], stats["num_requests"]) == (0, 0)
    assert get(store.save.remote("y", source, EPOCH, B, ids(0, 10), False, False)) == (10, 10)


def test_a_load_under_way_survives_replacement_and_eviction(start_store, start_worker):
    """The request is released, its blocks are replaced and evicted, and the bytes still arrive."""
    store, source, other, target = start_store(20), *(start_worker(seed) for seed in (1, 2, 3))
    expected = get(source.bytes_of.remote(ids(0, 10)))
    get(store.save.remote("x", source, EPOCH, A, ids(0, 10), False, False))
    assert look(store, "r", A) == 160
    get(target.close_gate.remote("write"))
    loading = store.load.remote("r", target, EPOCH, A, ids(20, 10))
    assert get(target.wait_until.remote("write"))
    get(store.release.remote("x", True))
    assert get(store.save.remote("y", other, EPOCH, A, ids(0, 10), False, True)) == (10, 10)
    get(store.release.remote("r", True))
    get(store.release.remote("y", True))
    assert get(store.save.remote("z", other, EPOCH, chain("z", 20), ids(0, 20), False, False)) == (
        20,
        20,
    )
    assert look(store, "s", A) == 0
    get(target.open_gates.remote())
    assert get(loading) == 10
    assert get(target.bytes_of.remote(ids(20, 10))) == expected


def test_a_promise_is_kept_while_others_save(start_store, start_worker):
    """The lookup promised 768 tokens: the load brings them all, though others need the room."""
    store, source, target = start_store(48), start_worker(1), start_worker(2)
    hashes = chain("long", 48)
    get(store.save.remote("x", source, EPOCH, hashes, ids(0, 48), False, False))
    assert look(store, "r", hashes) == 768
    assert get(store.save.remote("y", source, EPOCH, A, ids(50, 10), False, False)) == (0, 0)
    assert get(store.load.remote("r", target, EPOCH, hashes, ids(0, 48))) == 48
    assert get(target.bytes_of.remote(ids(0, 48))) == get(source.bytes_of.remote(ids(0, 48)))


def test_bypass_after_a_hit_loads_nothing(start_store, start_worker):
    store, source, target = start_store(), start_worker(1), start_worker(2)
    get(store.save.remote("x", source, EPOCH, A, ids(0, 10), False, False))
    assert look(store, "r", A) == 160
    before = get(target.bytes_of.remote(ids(0, 10)))
    assert look(store, "r", A, skip=True) == 0
    assert get(store.stats.remote())["num_pins"] == 0
    assert get(store.load.remote("r", target, EPOCH, A, ids(0, 10))) == 0
    assert get(target.bytes_of.remote(ids(0, 10))) == before


def test_data_that_is_lost_shortens_the_load_and_is_a_miss_afterwards(
    start_store, start_worker, actors
):
    store, source = start_store(), start_worker(1)

    @ray.remote(num_cpus=0)
    class Finder:
        """A worker that can't get the second array."""

        def write_blocks(self, epoch: int, block_ids: list, segments: list, sources: list) -> int:
            return next(place for place, (segment, _) in enumerate(sources) if segment == 1)

    get(store.save.remote("x", source, EPOCH, A, ids(0, 10), False, False))
    assert look(store, "r", A) == 160
    assert get(store.load.remote("r", actors(Finder.remote()), EPOCH, A, ids(0, 10))) == 4
    assert get(store.stats.remote())["num_lost_blocks"] == 4
    assert look(store, "r", A) == 64
    assert get(store.save.remote("x", source, EPOCH, A, ids(0, 10), False, False)) == (10, 4)


def test_a_target_that_dies_while_loading_is_reported_and_harms_no_data(start_store, start_worker):
    store, source, target = start_store(), start_worker(1), start_worker(2)
    get(store.save.remote("x", source, EPOCH, A, ids(0, 10), False, False))
    assert look(store, "r", A) == 160
    get(target.close_gate.remote("write"))
    loading = store.load.remote("r", target, EPOCH, A, ids(0, 10))
    assert get(target.wait_until.remote("write"))
    os.kill(get(target.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayError):
        get(loading)
    assert get(store.load.remote("r", source, EPOCH, A, ids(20, 10))) == 10


def test_a_worker_of_another_epoch_is_neither_read_nor_written(start_store, start_worker):
    """A dead scheduler's save and load arrive late, when a new one has given the blocks away."""
    store, source, target = start_store(), start_worker(1), start_worker(2)
    get(store.save.remote("x", source, EPOCH, A, ids(0, 10), False, False))
    assert look(store, "r", A) == 160
    get([worker.reset.remote(EPOCH + 1) for worker in (source, target)])
    assert get(store.save.remote("y", source, EPOCH, B, ids(0, 10), True, False)) == (0, 0)
    with pytest.raises(ray.exceptions.RayTaskError, match=f"epoch {EPOCH} is not {EPOCH + 1}"):
        get(store.load.remote("r", target, EPOCH, A, ids(0, 10)))
    stats = get(store.stats.remote())
    assert stats["used_bytes"] == 10 * BLOCK_BYTES, "only what was there before, all of it"
    assert (stats["num_owned_segments"], stats["num_lost_blocks"]) == (0, 0)
    assert get(store.load.remote("r", target, EPOCH + 1, A, ids(0, 10))) == 10


def test_what_an_earlier_scheduler_still_asks_for_leaves_nothing(start_store, start_worker):
    """Its calls may be on their way when the next one has taken over."""
    store, source = start_store(), start_worker(1)
    first = get(store.serve.remote(EPOCH))
    assert get(store.serve.remote(EPOCH + 1)) == first
    late = [
        store.lookup.remote(EPOCH, "x", A, 160, 0, False),
        store.save.remote("x", source, EPOCH, A, ids(0, 10), True, False),
        store.load.remote("x", source, EPOCH, A, ids(0, 10)),
        store.serve.remote(EPOCH),
    ]
    for call in late:
        with pytest.raises(ray.exceptions.RayTaskError, match="is over"):
            get(call)
    stats = get(store.stats.remote())
    assert (stats["num_requests"], stats["num_queries"], stats["used_bytes"]) == (0, 0, 0)


def test_a_new_scheduler_retains_what_its_requests_own(start_store, start_worker):
    store, source, target = start_store(20), start_worker(1), start_worker(2)
    expected = get(source.bytes_of.remote(ids(0, 10)))
    get(store.save.remote("kept", source, EPOCH, A, ids(0, 10), True, True))
    get(store.save.remote("gone", source, EPOCH, B, ids(10, 10), True, True))
    assert look(store, "kept", A) == look(store, "gone", B) == look(store, "reader", B) == 160
    get(store.retain.remote(["kept", "never seen"]))
    stats = get(store.stats.remote())
    assert (stats["num_requests"], stats["num_pins"], stats["num_owned_segments"]) == (1, 0, 3)
    hashes = chain("new", 10)
    assert get(store.save.remote("new", source, EPOCH, hashes, ids(0, 10), False, False)) == (
        10,
        10,
    ), "what was the others' makes room"
    assert look(store, "kept", A, readable=0, own=160) == 160
    assert get(store.load.remote("kept", target, EPOCH, A, ids(20, 10))) == 10
    assert get(target.bytes_of.remote(ids(20, 10))) == expected


def test_a_node_that_is_left_has_no_data_of_the_store_but_what_requests_own(
    start_store, start_worker
):
    store, source = start_store(20), start_worker(1)
    get(store.save.remote("gone", source, EPOCH, A, ids(0, 10), False, False, "left"))
    get(store.save.remote("kept", source, EPOCH, B, ids(10, 10), True, False, "left"))
    get(store.leave_node.remote("left"))
    assert look(store, "reader", A) == 0
    assert get(store.__ray_call__.remote(lambda store: len(store._data))) == 3, "of B"
    get(store.release.remote("kept", True))
    assert get(store.__ray_call__.remote(lambda store: len(store._data))) == 0


def test_a_worker_that_hangs_costs_a_save_the_segments_it_did_not_read(
    start_store, start_worker, hang
):
    store, source, other = start_store(20, HASTY_S), start_worker(1), start_worker(2)
    hang(source)
    assert get(store.save.remote("x", source, EPOCH, A, ids(0, 10), True, False)) == (0, 0)
    stats = get(store.stats.remote())
    assert (stats["used_bytes"], stats["num_segments"], stats["num_requests"]) == (0, 0, 0)
    assert get(store.save.remote("x", other, EPOCH, A, ids(0, 10), True, False)) == (10, 10)


@pytest.mark.slow
def test_segments_read_before_a_worker_hangs_are_kept(start_store, start_worker):
    store, source, target = start_store(timeout_s=HASTY_S), start_worker(1), start_worker(2)
    get(source.hold_call.remote(1))
    assert get(store.save.remote("x", source, EPOCH, A, ids(0, 10), False, False)) == (4, 4)
    assert get(store.stats.remote())["used_bytes"] == 4 * BLOCK_BYTES
    assert look(store, "y", A) == 64
    assert get(store.load.remote("y", target, EPOCH, A[:4], ids(0, 4))) == 4
    get(source.open_gates.remote())
    assert get(store.save.remote("x", source, EPOCH, A, ids(0, 10), False, False)) == (10, 6)


@pytest.mark.slow
def test_a_worker_that_hangs_in_a_load_is_reported_and_harms_no_data(
    start_store, start_worker, hang
):
    """It may write yet, when it comes to itself: the caller must not take it for a miss."""
    store, source, target = start_store(timeout_s=HASTY_S), start_worker(1), start_worker(2)
    expected = get(source.bytes_of.remote(ids(0, 10)))
    get(store.save.remote("x", source, EPOCH, A, ids(0, 10), False, False))
    assert look(store, "r", A) == 160
    hang(target)
    with pytest.raises(TimeoutError, match="10 blocks of request r were not written in 5 s"):
        get(store.load.remote("r", target, EPOCH, A, ids(20, 10)))
    assert get(store.stats.remote())["num_lost_blocks"] == 0
    assert get(store.load.remote("r", source, EPOCH, A, ids(20, 10))) == 10
    assert get(source.bytes_of.remote(ids(20, 10))) == expected


def test_a_store_that_was_killed_is_empty_and_works_again(start_store, start_worker):
    """Its data is gone with it: all misses, also for a load whose lookup was before."""
    store, source, target = start_store(), start_worker(1), start_worker(2)
    get(store.save.remote("x", source, EPOCH, A, ids(0, 10), True, False))
    assert look(store, "r", A) == 160
    get(target.close_gate.remote("write"))
    loading = store.load.remote("r", target, EPOCH, A, ids(20, 10))
    assert get(target.wait_until.remote("write"))
    before = get(target.bytes_of.remote(ids(20, 10)))
    os.kill(get(store.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        get(loading)
    get(target.open_gates.remote())
    fence = target.write_blocks.remote(EPOCH, [], [], [])
    assert get(fence) == 0
    assert get(store.ping.options(max_task_retries=-1).remote())
    assert get(store.load.remote("r", target, EPOCH, A, ids(20, 10))) == 0
    assert look(store, "x", A, own=160) == 0
    assert get(store.stats.remote())["used_bytes"] == 0
    assert get(target.bytes_of.remote(ids(20, 10))) == before
    assert get(store.save.remote("x", source, EPOCH, A, ids(0, 10), True, False)) == (10, 10)
    assert look(store, "r", A) == 160
    assert get(store.load.remote("r", target, EPOCH, A, ids(20, 10))) == 10


def test_lists_of_different_lengths_are_refused(start_store, start_worker):
    store, worker = start_store(), start_worker(1)
    for call in (
        store.save.remote("x", worker, EPOCH, A, ids(0, 9), False, False),
        store.load.remote("x", worker, EPOCH, A, ids(0, 11)),
    ):
        with pytest.raises(ValueError, match="10 hashes"):
            get(call)


@pytest.mark.slow
def test_a_save_leaves_a_copy_on_both_nodes():
    """The worker's node may be lost; and what is on the store's node is not in its process."""
    script = """
        import numpy as np, ray
        from ray.cluster_utils import Cluster
        from ray.experimental import get_object_locations
        from offload_store.actor import OffloadStoreActor

        class Spying(OffloadStoreActor):
            async def where(self):
                held = get_object_locations(list(self._data.values()))
                return [place["node_ids"] for place in held.values()]

        @ray.remote(num_cpus=0)
        class Worker:
            @ray.method(num_returns=2)
            def read_blocks(self, epoch, block_ids):
                return np.ones((len(block_ids), 2**20), np.uint8), len(block_ids)
            def node(self):
                return ray.get_runtime_context().get_node_id()

        cluster = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 1, "resources": {"store": 1}, "include_dashboard": False})
        try:
            cluster.add_node(num_cpus=1, resources={"worker": 1})
            ray.init(address=cluster.address)
            store = ray.remote(Spying).options(resources={"store": 0.1}, num_cpus=0).remote(
                2**24, 2**20, 16)
            worker = Worker.options(resources={"worker": 0.1}).remote()
            hashes = [bytes([i]) * 16 for i in range(8)]
            saved = ray.get(store.save.remote("x", worker, 1, hashes, list(range(8)), False, False))
            assert saved == (8, 8), saved
            theirs, here = ray.get(worker.node.remote()), ray.get_runtime_context().get_node_id()
            found = [set(nodes) for nodes in ray.get(store.where.remote())]
            assert found == [{theirs, here}] * 2, found
        finally:
            ray.shutdown()
            cluster.shutdown()
        print("twice")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
    )
    assert done.stdout.endswith("twice\n"), done.stderr
