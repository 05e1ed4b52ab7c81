"""Connects this process to Ray: to one that runs, or to a new one."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import ray
import ray._private.services
import ray._private.worker

from cluster.config import EngineConfig
from scheduler.errors import EngineUnavailable

logger = logging.getLogger(__name__)

_NUM_TRIES = 3
_NO_SERVER = "Initialization failure from server"
"""In what Ray raises where its head was reached, and could not do what it takes."""


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
    # It says at every start how its ports are guarded, which docs/security.md does once.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    try:
        warn_on_stderr()
        _init_ray(config.ray_address or (None if start else "auto"), config.namespace)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = config.ray_address or os.environ.get("RAY_ADDRESS") or "this machine"
        raise EngineUnavailable(f"Ray at {where} can't be reached: {error}") from error
    return True


def warn_on_stderr() -> None:
    """Have Ray print its cluster's warnings on stderr: on stdout, where it would, are results."""
    module: Any = ray._private.worker
    print_anywhere = module.print_to_stdstream
    if hasattr(print_anywhere, "__wrapped__"):
        return

    @functools.wraps(print_anywhere)
    def print_on_stderr(data: dict[str, Any], *args: Any, **keywords: Any) -> None:
        is_warning = data.get("pid") == "raylet"
        print_anywhere(data | {"is_err": True} if is_warning else data, *args, **keywords)

    module.print_to_stdstream = print_on_stderr


def where_else() -> str:
    """Return a sentence about other Rays of this machine, where an engine might be as well.

    It is empty where there are none.
    """
    services: Any = ray._private.services
    here = ray.get_runtime_context().gcs_address
    others = sorted(services.find_gcs_addresses() - {here})
    if not others:
        return ""
    return (
        f". That is so at the Ray at {here}; this machine runs others, at {', '.join(others)}: "
        "set HAVERSACK_RAY_ADDRESS to the one that is meant"
    )


def _init_ray(address: str | None, namespace: str) -> None:
    """Connect to Ray, or start it where there is no address.

    For a client from outside the head starts a process, which now and then does not come up where
    the machine is busy: then it is asked for another one.
    """
    for num_left in reversed(range(_NUM_TRIES)):
        try:
            ray.init(
                address=address,
                namespace=namespace,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
            return
        except ConnectionError as error:
            if num_left == 0 or _NO_SERVER not in str(error):
                raise
            logger.warning("the head could not serve this client, which tries again: %s", error)
