"""Starts or finds an engine's actors, hands their handles to each other, and ends them.

Rules:
- The scheduler is made first: its name in the namespace is the lock that keeps two starters apart.
- A start either comes up within its deadline or leaves nothing behind, and says why.
- Nothing imports its caller: the scheduler and the store get handles from here.
An engine lives as long as whoever started it, unless it was started `detached`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.config import EngineConfig
from offload_store.actor import OffloadStoreActor
from scheduler import actor as scheduler_actor
from scheduler.codec import decode, encode
from scheduler.errors import EngineUnavailable, HaversackError, StartupFailed
from scheduler.loop import CLIENT_GRACE_S
from scheduler.messages import WorkerInfo
from workers import actor as worker_actor

logger = logging.getLogger(__name__)

_MALLOC = (
    "glibc.malloc.mmap_threshold=4294967296"
    ":glibc.malloc.trim_threshold=17179869184"
    ":glibc.malloc.hugetlb=1"
)
"""Keeps large buffers in the process: giving them back costs more than the arithmetic on them."""
_MAX_STORE_CALLS = 100_000
_JOIN_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 5.0
_WAIT_SLICE_S = 0.5


@dataclass
class EngineHandles:
    """The actors of an engine that was started here."""

    scheduler: Any
    store: Any = None
    workers: list[Any] = field(default_factory=list)


def actor_name(config: EngineConfig, part: str) -> str:
    """Return the name of an engine's actor in its namespace."""
    return f"haversack-{config.name}-{part}"


def connect_to_ray(config: EngineConfig, *, start: bool = True) -> bool:
    """Make sure that this process is connected to Ray.

    Ray that is initialised already is used as it is; else `ray_address` or RAY_ADDRESS, else a
    cluster that `ray start` started on this machine, else a private one is started. With
    `start=False` none is started, and any that runs on this machine will do.

    Returns:
        whether this call connected, so that the caller has to disconnect.

    Raises:
        EngineUnavailable: the address can't be reached.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's own default gives way to everything else on the machine, its user's other work first.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(
            address=config.ray_address or (None if start else "auto"),
            namespace=config.namespace,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = config.ray_address or os.environ.get("RAY_ADDRESS") or "this machine"
        raise EngineUnavailable(f"Ray at {where} can't be reached: {error}") from error
    return True


def find_engine(config: EngineConfig) -> Any | None:
    """Return the scheduler of the running engine of that name, None where there is none.

    Waits while the engine is still starting.

    Raises:
        EngineUnavailable: it is there but does not answer in time.
    """
    try:
        scheduler = ray.get_actor(actor_name(config, "scheduler"), namespace=config.namespace)
    except ValueError:
        return None
    try:
        ray.get(scheduler.ready.remote(), timeout=max(_JOIN_TIMEOUT_S, config.startup_timeout_s))
    except RayActorError:
        return None
    except GetTimeoutError as error:
        raise EngineUnavailable(
            f"engine {config.name!r} in namespace {config.namespace!r} is there but not ready "
            f"after {config.startup_timeout_s:g} s"
        ) from error
    return scheduler


def start_engine(
    config: EngineConfig, *, detached: bool = False, client_grace_s: float = CLIENT_GRACE_S
) -> EngineHandles | None:
    """Start an engine on the Ray that this process is connected to, and wait until it is ready.

    Args:
        detached: whether it outlives this process.
        client_grace_s: a client that has not polled for so long is given up.

    Returns:
        its actors, or None where an engine of that name is there already.

    Raises:
        StartupFailed: it did not come up in time, or a part of it died.
        ModelNotFound, UnsupportedModel, InvalidConfig: as a worker found.
    """
    deadline_s = time.monotonic() + config.startup_timeout_s
    scheduler_class = _actor_class(
        scheduler_actor.SchedulerActor,
        num_cpus=0,
        concurrency_groups=scheduler_actor.CONCURRENCY_GROUPS,
    )
    options = _options(config, "scheduler", detached)
    try:
        scheduler = scheduler_class.options(**options).remote(
            config.model, msgspec.structs.asdict(config)
        )
    except ValueError:
        return None
    handles = EngineHandles(scheduler)
    try:
        _start_parts(config, handles, detached, deadline_s, client_grace_s)
    except BaseException:
        kill_engine(handles)
        raise
    return handles


def _start_parts(
    config: EngineConfig,
    handles: EngineHandles,
    detached: bool,
    deadline_s: float,
    client_grace_s: float,
) -> None:
    num_gpus = _gpus_per_worker(config)
    num_threads = config.num_threads or _threads_per_worker(config.num_workers)
    worker_class = _actor_class(
        worker_actor.WorkerActor, concurrency_groups=worker_actor.CONCURRENCY_GROUPS
    )
    for index in range(config.num_workers):
        options = _options(config, f"worker-{index}", detached) | {
            "num_cpus": config.cpus_per_worker,
            "num_gpus": num_gpus,
            "runtime_env": {
                "env_vars": {"GLIBC_TUNABLES": _MALLOC, "OMP_NUM_THREADS": str(num_threads)}
            },
        }
        handles.workers.append(
            worker_class.options(**options).remote(
                f"worker-{index}",
                config.model,
                device="cuda" if num_gpus else "cpu",
                dtype=config.dtype,
                num_blocks=config.num_blocks,
                kv_bytes=config.kv_cache_bytes,
                block_size=config.block_size,
                num_threads=num_threads,
            )
        )
    infos = _wait_for_workers(config, handles.workers, num_gpus, deadline_s)
    first = decode(infos[0], WorkerInfo)
    if config.offload_bytes > 0:
        store_class = _actor_class(OffloadStoreActor, num_cpus=0, max_concurrency=_MAX_STORE_CALLS)
        handles.store = store_class.options(**_options(config, "store", detached)).remote(
            config.offload_bytes, first.block_bytes, first.block_size
        )
        _get_part("the offload store", handles.store.ping.remote(), deadline_s)
    limits = encode(config.scheduler_config(first))
    started = handles.scheduler.start.remote(limits, handles.store, client_grace_s)
    _get_part("the scheduler", started, deadline_s)
    for worker, info in zip(handles.workers, infos, strict=True):
        _get_part("the scheduler", handles.scheduler.add_worker.remote(worker, info), deadline_s)


def stop_engine(handles: EngineHandles) -> None:
    """Tell every client that the engine ends, then end its actors."""
    with contextlib.suppress(RayError):
        ray.get(handles.scheduler.shutdown.remote(), timeout=_CLOSE_TIMEOUT_S)
    kill_engine(handles)


def kill_engine(handles: EngineHandles) -> None:
    """End an engine's actors, whatever they are doing."""
    for handle in (handles.scheduler, *handles.workers, handles.store):
        if handle is not None:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(handle)


def _actor_class(kind: type, **options: Any) -> Any:
    decorate: Any = ray.remote(**options)
    return decorate(kind)


def _options(config: EngineConfig, part: str, detached: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "name": actor_name(config, part),
        "namespace": config.namespace,
        "max_restarts": 0,
    }
    return options | ({"lifetime": "detached"} if detached else {})


def _gpus_per_worker(config: EngineConfig) -> float:
    """Return the GPUs to reserve per worker; more than 0 means that workers run on cuda."""
    has_gpu = _resources("cluster_resources").get("GPU", 0) > 0
    if config.device == "cpu" or (config.device == "auto" and not has_gpu):
        return 0.0
    asked = config.num_gpus_per_worker
    return 1.0 if asked is None else asked


def _threads_per_worker(num_workers: int) -> int:
    """Return a worker's fair share of the cluster's cores, at most one node's."""
    cores = [node["Resources"].get("CPU", 0.0) for node in _nodes() if node["Alive"]]
    return max(1, int(min(sum(cores) / num_workers, max(cores, default=1.0))))


def _wait_for_workers(
    config: EngineConfig, workers: list[Any], num_gpus: float, deadline_s: float
) -> list[bytes]:
    """Return what every worker says about itself, in order.

    Raises:
        StartupFailed: a worker died or did not answer in time.
        HaversackError: the typed error that a worker raised.
    """
    pending = [worker.info.remote() for worker in workers]
    answers = list(pending)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=_WAIT_SLICE_S)
        for answer in ready:
            _get_part(f"worker-{answers.index(answer)}", answer, deadline_s)
        lacking = _lacking(config, num_gpus)
        if pending and (time.monotonic() > deadline_s or (lacking and _is_private_ray())):
            raise StartupFailed(
                f"{len(pending)} of {config.num_workers} workers did not start"
                + (f": {lacking}" if lacking else f" within {config.startup_timeout_s:g} s")
                + f". The cluster has {_describe(_resources('cluster_resources'))}, of which "
                f"{_describe(_resources('available_resources'))} are free. Ask for fewer or "
                "smaller workers, add nodes, or raise startup_timeout_s",
                num_workers=config.num_workers,
                cpus_per_worker=config.cpus_per_worker,
                num_gpus_per_worker=num_gpus,
            )
    return [bytes(ray.get(answer)) for answer in answers]


def _lacking(config: EngineConfig, num_gpus: float) -> str:
    """Say what the whole cluster has too little of; empty where it has enough."""
    total = _resources("cluster_resources")
    asked = {"CPU": config.cpus_per_worker, "GPU": num_gpus}
    missing = [
        f"{each * config.num_workers:g} {name} for {config.num_workers} workers with {each:g} each"
        for name, each in asked.items()
        if each * config.num_workers > total.get(name, 0)
    ]
    return f"asked for {' and '.join(missing)}" if missing else ""


def _is_private_ray() -> bool:
    """Whether this process started its Ray: then nobody is going to add a node."""
    node = ray._private.worker._global_node
    return node is not None and bool(node.is_head())


def _resources(which: str) -> dict[str, float]:
    """Return what the cluster has ("cluster_resources") or has free ("available_resources")."""
    found: dict[str, float] = getattr(ray, which)()
    return found


def _nodes() -> list[dict[str, Any]]:
    ask: Any = ray.nodes
    found: list[dict[str, Any]] = ask()
    return found


def _describe(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


def _get_part(what: str, answer: Any, deadline_s: float) -> Any:
    """Return a starting part's answer.

    Raises:
        StartupFailed: it died, raised something untyped, or ran out of time.
        HaversackError: what it raised.
    """
    try:
        return ray.get(answer, timeout=max(0.0, deadline_s - time.monotonic()))
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HaversackError):
            raise cause from None
        raise StartupFailed(f"{what} failed while starting: {error}") from error
    except GetTimeoutError as error:
        raise StartupFailed(f"{what} did not answer in time") from error
    except RayError as error:
        raise StartupFailed(f"{what} died while starting: {error}") from error
