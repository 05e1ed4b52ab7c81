"""Starts or finds an engine, and ends it.

Rules:
- The scheduler is all that is started here; it starts the rest. Its name in the namespace is the
  lock that keeps two starters apart.
- A start either comes up within its deadline or leaves nothing behind, and says why.
- Nothing imports its caller: what the scheduler has to start, and how, it gets from here as an
  argument (`engine_spec`).
An engine ends with the client that started it, unless it was started without one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.config import EngineConfig
from cluster.dashboards.placing import place_dashboard
from cluster.fleet import (
    RayFleet,
    end_parts,
    find_parts,
    part_name,
    resources,
    resources_of_nodes,
)
from cluster.metrics import RayPublisher
from scheduler.actor import CONCURRENCY_GROUPS, EngineSpec, SchedulerActor
from scheduler.calls import Timeouts
from scheduler.errors import EngineUnavailable, HaversackError, StartupFailed
from scheduler.restarts import RestartLimits
from scheduler.scaling import ScalingLimits

logger = logging.getLogger(__name__)

_MALLOC = (
    "glibc.malloc.mmap_threshold=4294967296"
    ":glibc.malloc.trim_threshold=17179869184"
    ":glibc.malloc.hugetlb=1"
    ":glibc.malloc.arena_max=1"
)
"""Keeps large buffers in the process: giving them back costs more than the arithmetic on them.

One arena, because only that of a process's first thread can keep them, and steps have another."""
_JOIN_TIMEOUT_S = 30.0
_ANSWER_TIMEOUT_S = 30.0
"""How much longer than the scheduler gives its workers to wait for what it says of them."""
_SHUTDOWN_TIMEOUT_S = 20.0
_FAREWELL_TIMEOUT_S = 5.0
_RETRY_S = 0.05
_MIN_STORE_S = 60.0
"""However short steps are: in that time a store that hangs is found, ended and replaced."""
_MIN_PING_S = 10.0
"""However short steps are: a machine may be busy with other things."""


@dataclass(frozen=True)
class EngineHandles:
    """An engine that was started here."""

    scheduler: Any
    namespace: str
    name: str


def actor_name(config: EngineConfig, part: str) -> str:
    """Return the name of an engine's actor in its namespace."""
    return part_name(config.name, part)


def find_engine(config: EngineConfig) -> Any | None:
    """Return the scheduler of the running engine of that name, None where there is none.

    Waits while the engine is still starting, or while its scheduler is being restarted.

    Raises:
        EngineUnavailable: it is there but does not answer in time.
    """
    deadline_s = time.monotonic() + max(_JOIN_TIMEOUT_S, config.startup_timeout_s)
    while True:
        try:
            scheduler = ray.get_actor(actor_name(config, "scheduler"), namespace=config.namespace)
            ray.get(scheduler.ready.remote(), timeout=max(0.0, deadline_s - time.monotonic()))
            return scheduler
        except (ValueError, RayTaskError):
            return None  # nobody has the name, or its engine did not come up
        except (RayActorError, GetTimeoutError) as error:
            # An actor that is restarted keeps its name; that of one that has ended is free soon.
            if time.monotonic() > deadline_s:
                raise EngineUnavailable(
                    f"engine {config.name!r} in namespace {config.namespace!r} is there but not "
                    f"ready after {config.startup_timeout_s:g} s"
                ) from error
        time.sleep(_RETRY_S)


def start_engine(
    config: EngineConfig, *, owner_client_id: str | None = None, wait: bool = True
) -> EngineHandles | None:
    """Start an engine on the Ray that this process is connected to, and wait until it is ready.

    Args:
        owner_client_id: the engine ends when this client has gone; None: it outlives this process.
        wait: False returns once its scheduler runs, which from then on waits for the workers: those
            may have room on nodes only that join later.

    Returns:
        its handles, or None where an engine of that name is there already.

    Raises:
        StartupFailed: it did not come up in time, or a part of it died.
        ModelNotFound, UnsupportedModel, InvalidConfig: as a worker found.
    """
    spec, fleet = engine_spec(config, owner_client_id)
    lacking = fleet.lacking()
    if lacking and _is_private_ray():
        raise StartupFailed(f"the engine can't start: {lacking}. {fleet.describe_shortage()}")
    try:
        scheduler = fleet.start_scheduler(SchedulerActor, CONCURRENCY_GROUPS, spec)
    except ValueError:
        return None
    handles = EngineHandles(scheduler, config.namespace, config.name)
    try:
        if wait:
            _wait_until_ready(config, scheduler)
        else:
            _wait_until_running(scheduler)
    except BaseException:
        kill_engine(handles)
        raise
    place_dashboard()
    return handles


def engine_spec(
    config: EngineConfig, owner_client_id: str | None = None
) -> tuple[EngineSpec, RayFleet]:
    """Return what the scheduler is to be given, and the fleet in it, for the cluster as it is."""
    num_gpus = _gpus_per_worker(config)
    num_workers = config.num_workers or _workers_at_start(config, num_gpus)
    config = msgspec.structs.replace(config, num_workers=num_workers)
    num_threads = config.num_threads or _threads_per_worker(config)
    patience_s = config.step_timeout_s
    timeouts = Timeouts(
        step_s=patience_s,
        store_s=max(_MIN_STORE_S, 1.5 * patience_s),
        ping_s=max(_MIN_PING_S, 0.5 * patience_s),
    )
    fleet = RayFleet(
        namespace=config.namespace,
        name=config.name,
        model=config.model,
        num_workers=num_workers,
        worker_options={
            "num_cpus": config.cpus_per_worker,
            "num_gpus": num_gpus,
            "runtime_env": {"env_vars": worker_variables(num_threads)},
        },
        worker_settings={
            "device": "cuda" if num_gpus else "cpu",
            "dtype": config.dtype,
            "num_blocks": config.num_blocks,
            "kv_bytes": config.kv_cache_bytes,
            "block_size": config.block_size,
            "num_threads": num_threads,
        },
        tensor_parallel_size=config.tensor_parallel_size,
        offload_bytes=config.offload_bytes,
        startup_timeout_s=config.startup_timeout_s,
        takeover_timeout_s=config.max_steps_in_flight
        * timeouts.for_step(config.max_num_batched_tokens),
        transfer_timeout_s=patience_s,
    )
    journal = config.journal_path
    spec = EngineSpec(
        model=config.model,
        settings=msgspec.structs.asdict(config),
        fleet=fleet,
        limits=config.scheduler_config,
        num_workers=num_workers,
        startup_timeout_s=config.startup_timeout_s,
        owner_client_id=owner_client_id,
        client_grace_s=config.client_grace_s,
        # Relative to where the user is, not to where the scheduler is.
        journal_path=str(Path(journal).expanduser().absolute()) if journal is not None else None,
        result_ttl_s=config.result_ttl_s,
        timeouts=timeouts,
        restarts=RestartLimits(
            max_restarts=config.max_worker_restarts,
            max_in_first_step=config.max_num_seqs.bit_length(),
        ),
        publish=RayPublisher(config.name),
        scaling=_scaling(config, num_workers),
    )
    return spec, fleet


def worker_variables(num_threads: int) -> dict[str, str]:
    """Return the environment variables that a worker with so many threads has to start with.

    Threads that wait for each other spin for a little while only: Ray's own processes need the
    cores now and then, and where threads spin until another has got its core back, a step takes
    many times as long. Not to spin at all makes steps longer on an idle machine.
    """
    return {
        "GLIBC_TUNABLES": _MALLOC,
        "OMP_NUM_THREADS": str(num_threads),
        "GOMP_SPINCOUNT": "10000",
    }


def _wait_until_ready(config: EngineConfig, scheduler: Any) -> None:
    """Return when the engine is there.

    Raises:
        StartupFailed: the scheduler died, or did not answer in time.
        HaversackError: why the engine did not come up.
    """
    timeout_s = config.startup_timeout_s + _ANSWER_TIMEOUT_S
    try:
        ray.get(scheduler.ready.remote(), timeout=timeout_s)
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HaversackError):
            raise cause from None
        raise StartupFailed(f"the scheduler failed while starting: {error}") from error
    except GetTimeoutError as error:
        raise StartupFailed(f"the scheduler did not answer within {timeout_s:g} s") from error
    except RayError as error:
        raise StartupFailed(f"the scheduler died while starting: {error}") from error


def _wait_until_running(scheduler: Any) -> None:
    """Return when the scheduler's process is there.

    Raises:
        StartupFailed: it is not, in time.
    """
    try:
        ray.get(scheduler.__ray_ready__.remote(), timeout=_ANSWER_TIMEOUT_S)
    except RayError as error:
        raise StartupFailed(f"the scheduler does not run on Ray's head node: {error}") from error


def stop_engine(handles: EngineHandles) -> None:
    """Tell every client that the engine ends, and return when nothing of it is left."""
    with contextlib.suppress(RayError, HaversackError):
        ray.get(handles.scheduler.shutdown.remote(), timeout=_SHUTDOWN_TIMEOUT_S)
        deadline_s = time.monotonic() + _FAREWELL_TIMEOUT_S
        while find_parts(handles.namespace, handles.name) and time.monotonic() < deadline_s:
            time.sleep(_RETRY_S)
    kill_engine(handles)


def kill_engine(handles: EngineHandles) -> None:
    """End an engine's actors, whatever they are doing."""
    with contextlib.suppress(RayError):
        end_parts(handles.namespace, handles.name)


def _gpus_per_worker(config: EngineConfig) -> float:
    """Return the GPUs for each process of a worker; more than 0: workers run on cuda."""
    has_gpu = resources("cluster_resources").get("GPU", 0) > 0
    if config.device == "cpu" or (config.device == "auto" and not has_gpu):
        return 0.0
    asked = config.num_gpus_per_worker
    return 1.0 if asked is None else asked


def _workers_at_start(config: EngineConfig, num_gpus: float) -> int:
    """Return as many workers as the cluster's GPUs allow now, or else one, within the limits."""
    gpus = resources("cluster_resources").get("GPU", 0)
    has = int(gpus / num_gpus / config.tensor_parallel_size) if num_gpus else 1
    least = config.min_workers or 1
    return max(least, min(has, config.max_workers or has))


def _scaling(config: EngineConfig, num_workers: int) -> ScalingLimits | None:
    """Return between how many workers the engine follows its load, None where it does not."""
    least, most = config.min_workers or num_workers, config.max_workers or num_workers
    if least == most:
        return None
    return ScalingLimits(least, most, config.target_queue_s, config.worker_idle_s)


def _threads_per_worker(config: EngineConfig) -> int:
    """Return the fair share of the cluster's cores, at most one node's, of a worker's process.

    Where there are none yet, because the nodes for workers are still to come, it is what such a
    process reserves.
    """
    cores = [node.get("CPU", 0.0) for node in resources_of_nodes()]
    if not any(cores):
        return max(1, int(config.cpus_per_worker))
    num_processes = config.most_workers * config.tensor_parallel_size
    return max(1, int(min(sum(cores) / num_processes, max(cores))))


def _is_private_ray() -> bool:
    """Whether this process started its Ray: then nobody is going to add a node."""
    node = ray._private.worker._global_node
    return node is not None and bool(node.is_head())
