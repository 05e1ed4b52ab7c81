"""The actors of one engine on a Ray cluster: found by name, started, watched and ended.

Rules:
- Every actor of an engine is detached and has a name that says what it is: whoever knows the
  engine's name and namespace finds them all, also when whoever started them has gone.
- The scheduler and the store stay on Ray's head node, where the journal is; workers are spread over
  the nodes that have room.
- A worker is never restarted by Ray, which would do so under its old name: the supervisor starts
  another one.
The module decides nothing: what is started when is up to the scheduler, which is given a `RayFleet`
when it is made, and again by Ray whenever it is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from cluster.bundles import give_back, in_new_group
from cluster.remote import RemoteStore, RemoteWorker, in_thread
from offload_store.actor import OffloadStoreActor
from scheduler.calls import ActorLost, CallFailed, within
from scheduler.codec import decode
from scheduler.errors import HaversackError, RequestFailed, StartupFailed
from scheduler.fleet import WorkerDied
from scheduler.messages import WorkerInfo
from workers import actor as worker_actor

logger = logging.getLogger(__name__)

_PART = re.compile(r"scheduler|store|worker-\d+")
_MAX_STORE_CALLS = 100_000
_MEMORY_NAMESPACE = b"haversack"
_PLACING_S = 10.0
"""How long a worker waits for room before the log says so; doubles each time."""
_PING_TIMEOUT_S = 10.0
"""For a worker of an earlier scheduler: one that takes longer hangs."""
_END_TIMEOUT_S = 10.0
_UNTIMED_DRAIN_S = 300.0
"""Time that is left to a node that is to go at no said time."""
_SPREAD: dict[str, Any] = {"max_restarts": 0, "scheduling_strategy": "SPREAD"}
"""Of workers: so that the loss of a node takes as few of them as possible."""
_ON_HEAD: dict[str, Any] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
"""Keeps an actor on the head node, whichever node that is: where it has gone, the actor waits for
it to come back. Without it there is no Ray either."""


@dataclass(frozen=True)
class RayFleet:
    """How to start the parts of one engine; fulfils `scheduler.actor.EngineFleet`."""

    namespace: str
    name: str
    """Of the engine."""
    model: str
    num_workers: int
    worker_options: dict[str, Any]
    """For Ray: what each process of a worker reserves, and its environment."""
    worker_settings: dict[str, Any]
    """Keyword arguments of each worker."""
    offload_bytes: int
    """Capacity of the store; 0: there is none."""
    startup_timeout_s: float
    """Longest time from when a worker has a place to when it is ready."""
    takeover_timeout_s: float
    """In which a worker of an earlier scheduler ends its step."""
    transfer_timeout_s: float
    """Longest wait of the store for a worker that reads or writes a segment."""
    tensor_parallel_size: int = 1
    """Processes of each worker; several are in a placement group, a bundle each."""
    worker_class: type = worker_actor.WorkerActor

    # ---------------------------------------------------------------------------------- workers

    async def start(self, worker_id: str, epoch: int) -> tuple[RemoteWorker, WorkerInfo]:
        """See `scheduler.fleet.Fleet`."""
        creation = asyncio.ensure_future(in_thread(self._create_worker, worker_id))
        try:
            worker = self._remote(worker_id, await asyncio.shield(creation), epoch)
        except asyncio.CancelledError:
            self._remote(worker_id, await creation, epoch).kill()
            raise
        except Exception as error:  # whatever Ray raises while its head node is away
            raise WorkerDied(f"{worker_id} can't be made: {error}") from None
        try:
            await self._until_placed(worker_id, worker)
            return worker, await _reset(worker_id, worker, self.startup_timeout_s)
        except BaseException:
            worker.kill()
            raise

    async def take_over(self, worker_id: str, epoch: int) -> tuple[RemoteWorker, WorkerInfo]:
        """See `scheduler.fleet.Fleet`."""
        try:
            worker = self._remote(worker_id, await in_thread(self._get, worker_id), epoch)
        except ValueError:
            await in_thread(self._give_back, worker_id)
            raise WorkerDied(f"{worker_id} has ended") from None
        try:
            try:
                await within(_PING_TIMEOUT_S, worker.ping(), worker_id)
            except (ActorLost, CallFailed) as error:
                raise WorkerDied(str(error)) from None
            return worker, await _reset(worker_id, worker, self.takeover_timeout_s)
        except BaseException:
            worker.kill()
            raise

    async def find(self) -> list[str]:
        """See `scheduler.fleet.Fleet`."""
        parts = await in_thread(find_parts, self.namespace, self.name)
        found = [part for part in parts if part.startswith("worker-")]
        if self.tensor_parallel_size > 1:
            await in_thread(give_back_groups, self.namespace, self.name, found)
        return sorted(found, key=lambda part: int(part.removeprefix("worker-")))

    async def shortage(self) -> str:
        """See `scheduler.fleet.Fleet`."""
        try:
            return await in_thread(self.describe_shortage)
        except Exception as error:  # whatever Ray raises while its head node is away
            return f"Ray does not say what there is: {error}"

    async def draining_nodes(self) -> dict[str, float]:
        """See `scheduler.fleet.Fleet`."""
        try:
            deadlines = await in_thread(_draining_nodes)
        except Exception as error:  # whatever Ray raises while its head node is away
            logger.warning("it can't be seen which nodes are to go: %s", error)
            return {}
        return {
            node_id: deadline_ms / 1000 - time.time() if deadline_ms else _UNTIMED_DRAIN_S
            for node_id, deadline_ms in deadlines.items()
        }

    async def _until_placed(self, worker_id: str, worker: RemoteWorker) -> None:
        """Return when a worker's process is there; say in the log what it waits for.

        Raises:
            WorkerDied: it ended at once.
        """
        pong = asyncio.ensure_future(worker.ping())
        patience_s = _PLACING_S
        try:
            while not (await asyncio.wait([pong], timeout=patience_s))[0]:
                patience_s *= 2
                logger.warning("%s waits for room: %s", worker_id, await self.shortage())
            pong.result()
        except (ActorLost, CallFailed) as error:
            raise WorkerDied(str(error)) from None
        finally:
            pong.cancel()

    def _remote(self, worker_id: str, handle: Any, epoch: int) -> RemoteWorker:
        return RemoteWorker(worker_id, handle, epoch, lambda: self._give_back(worker_id))

    def _create_worker(self, worker_id: str) -> Any:
        """Ask Ray for a worker. It may wait for room; ValueError: the name is taken."""
        kind = _actor_class(self.worker_class, concurrency_groups=worker_actor.CONCURRENCY_GROUPS)
        options = self._options(worker_id) | _SPREAD | self.worker_options
        if self.tensor_parallel_size > 1:
            options["scheduling_strategy"] = in_new_group(
                _group_name(self.namespace, self.name, worker_id),
                self.tensor_parallel_size,
                {kind: amount for kind, amount in self._each().items() if amount},
                resources_of_nodes(),
            )
        try:
            return kind.options(**options).remote(
                worker_id,
                self.model,
                **self.worker_settings,
                tensor_parallel_size=self.tensor_parallel_size,
                rank_options=self.worker_options,
            )
        except BaseException:
            self._give_back(worker_id)
            raise

    def _give_back(self, worker_id: str) -> None:
        """Give back the room of a worker of several processes. Blocks."""
        if self.tensor_parallel_size > 1:
            own = _group_name(self.namespace, self.name, worker_id)
            give_back(lambda name: name == own)

    # ------------------------------------------------------------------------ the other actors

    def store(self, info: WorkerInfo, epoch: int) -> RemoteStore | None:
        """Return the engine's store, not opened, for blocks as `info` says; None: it has none."""
        if self.offload_bytes == 0:
            return None

        def find_or_start() -> tuple[Any, bool]:
            with contextlib.suppress(ValueError):
                return self._get("store"), False
            kind = _actor_class(OffloadStoreActor, max_concurrency=_MAX_STORE_CALLS)
            options = self._options("store") | {"max_restarts": -1} | _ON_HEAD
            handle = kind.options(**options).remote(
                self.offload_bytes,
                info.block_bytes,
                info.block_size,
                transfer_timeout_s=self.transfer_timeout_s,
            )
            return handle, True

        return RemoteStore(epoch, find_or_start)

    def start_scheduler(self, kind: type, concurrency_groups: dict[str, int], *args: Any) -> Any:
        """Start the engine's scheduler; ValueError: there is one. Blocks."""
        options = self._options("scheduler") | {"max_restarts": -1} | _ON_HEAD
        actor_class = _actor_class(kind, concurrency_groups=concurrency_groups)
        return actor_class.options(**options).remote(*args)

    async def clear(self) -> None:
        """End every part of the engine but the scheduler, and forget what was remembered."""
        await in_thread(end_parts, self.namespace, self.name, True)

    def end_this_scheduler(self) -> None:
        """End the scheduler that this is called in, for good."""
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    # ------------------------------------------------------------------------------- the memory

    async def remember(self, memory: bytes) -> None:
        """See `scheduler.fleet.Fleet`."""
        try:
            await in_thread(_write_memory, self.namespace, self.name, _this_actor() + memory)
        except Exception as error:  # whatever Ray raises while its head node is away
            logger.warning("a restart of the scheduler will not know its workers: %s", error)

    async def recall(self) -> bytes | None:
        """See `scheduler.fleet.Fleet`.

        A restart by Ray leaves an actor its id, so what another one wrote is of an earlier engine.
        """
        found = await in_thread(_read_memory, self.namespace, self.name)
        mine = _this_actor()
        return found[len(mine) :] if found is not None and found.startswith(mine) else None

    # --------------------------------------------------------------------------------- resources

    def lacking(self) -> str:
        """Say what the whole cluster has too little of; empty where it has enough. Blocks."""
        total = resources("cluster_resources")
        num_processes = self.num_workers * self.tensor_parallel_size
        missing = [
            f"{each * num_processes:g} {name} for {self._asked(f'{each:g}')}"
            for name, each in self._each().items()
            if each * num_processes > total.get(name, 0)
        ]
        return f"asked for {' and '.join(missing)}" if missing else ""

    def describe_shortage(self) -> str:
        """Say in sentences what is asked for, what there is, and what to do. Blocks."""
        bundle = " and ".join(f"{each:g} {name}" for name, each in self._each().items())
        return (
            f"{self._asked(bundle)} are asked for. The cluster has "
            f"{_describe(resources('cluster_resources'))},"
            f" of which {_describe(resources('available_resources'))} are free; no node has more "
            f"than {_describe(_largest_node())}. Ask for fewer or smaller workers, add nodes, or "
            "raise startup_timeout_s"
        )

    def _each(self) -> dict[str, float]:
        """Return what each process of a worker reserves."""
        return {"CPU": self.worker_options["num_cpus"], "GPU": self.worker_options["num_gpus"]}

    def _asked(self, each: str) -> str:
        """Say how many workers there are to be, with so much for each process of them."""
        size = self.tensor_parallel_size
        if size == 1:
            return f"{self.num_workers} workers with {each} each"
        return f"{self.num_workers} workers of {size} bundles with {each} each"

    def _options(self, part: str) -> dict[str, Any]:
        return {
            "name": part_name(self.name, part),
            "namespace": self.namespace,
            "lifetime": "detached",
        }

    def _get(self, part: str) -> Any:
        return ray.get_actor(part_name(self.name, part), namespace=self.namespace)


async def _reset(worker_id: str, worker: RemoteWorker, timeout_s: float) -> WorkerInfo:
    """Have a worker serve its handle's epoch.

    Raises:
        WorkerDied: it ended, or did not answer in time.
        HaversackError: what it raised.
    """
    try:
        info = decode(await within(timeout_s, worker.reset(), worker_id), WorkerInfo)
    except ActorLost as error:
        raise WorkerDied(str(error)) from None
    except CallFailed as error:
        cause: HaversackError = error.error
        if isinstance(cause, RequestFailed):
            cause = StartupFailed(f"{worker_id} can't be started: {cause.message}")
        raise cause from None
    worker.node_id = info.node_id
    return info


# ------------------------------------------------------------------------------ an engine's names


def part_name(engine_name: str, part: str) -> str:
    """Return the name of an engine's actor in its namespace."""
    return f"haversack-{engine_name}-{part}"


def _group_name(namespace: str, engine_name: str, worker_id: str) -> str:
    return f"{namespace}/{part_name(engine_name, worker_id)}"


def give_back_groups(namespace: str, engine_name: str, keep: list[str]) -> None:
    """Give back the room of an engine's workers, but for those in `keep`. Blocks."""
    prefix = _group_name(namespace, engine_name, "")

    def is_theirs(name: str) -> bool:
        part = name.removeprefix(prefix)
        return name.startswith(prefix) and bool(_PART.fullmatch(part)) and part not in keep

    give_back(is_theirs)


def find_parts(namespace: str, engine_name: str) -> list[str]:
    """Return an engine's parts that have not ended: "scheduler", "store", "worker-N". Blocks."""
    prefix = part_name(engine_name, "")
    names = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == namespace and actor["name"].startswith(prefix)
    ]
    return [p for name in names if _PART.fullmatch(p := name.removeprefix(prefix))]


def end_parts(namespace: str, engine_name: str, keep_scheduler: bool = False) -> None:
    """End an engine's actors, whatever they are doing, and return when none is left. Blocks."""
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline_s:
        parts = find_parts(namespace, engine_name)
        if keep_scheduler:
            parts = [part for part in parts if part != "scheduler"]
        if not parts:
            break
        # The scheduler goes first, so that it replaces nobody.
        for part in sorted(parts, key=lambda part: part != "scheduler"):
            try:
                ray.kill(ray.get_actor(part_name(engine_name, part), namespace=namespace))
            except (RayError, ValueError) as error:
                logger.debug("%s of engine %s has ended already: %s", part, engine_name, error)
    give_back_groups(namespace, engine_name, [])
    internal_kv._internal_kv_del(_memory_key(namespace, engine_name), namespace=_MEMORY_NAMESPACE)


def _this_actor() -> bytes:
    return bytes.fromhex(ray.get_runtime_context().get_actor_id() or "")


def _write_memory(namespace: str, engine_name: str, memory: bytes) -> None:
    key = _memory_key(namespace, engine_name)
    internal_kv._internal_kv_put(key, memory, namespace=_MEMORY_NAMESPACE)


def _read_memory(namespace: str, engine_name: str) -> bytes | None:
    key = _memory_key(namespace, engine_name)
    found: bytes | None = internal_kv._internal_kv_get(key, namespace=_MEMORY_NAMESPACE)
    return found


def _memory_key(namespace: str, engine_name: str) -> bytes:
    return f"{namespace}/{engine_name}".encode()


# ------------------------------------------------------------------------------- what Ray tells


def _actor_class(kind: type, **options: Any) -> Any:
    decorate: Any = ray.remote(**options)
    return decorate(kind)


def _draining_nodes() -> dict[str, int]:
    found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return found


def resources(which: str) -> dict[str, float]:
    """Return what the cluster has ("cluster_resources") or has free ("available_resources")."""
    found: dict[str, float] = getattr(ray, which)()
    return found


def resources_of_nodes() -> list[dict[str, float]]:
    """Return what each node has."""
    ask: Any = ray.nodes
    return [node["Resources"] for node in ask() if node["Alive"]]


def _largest_node() -> dict[str, float]:
    """Return the most that any node has of each resource."""
    nodes = resources_of_nodes()
    return {name: max((has.get(name, 0) for has in nodes), default=0) for name in ("CPU", "GPU")}


def _describe(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"
