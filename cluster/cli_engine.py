"""`haversack start` and `stop`: an engine that stays on a cluster, whoever comes and goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import ray
import typer

from cluster.cli_common import Config, Json, Model, Name, Ranks, Workers, engine, show, told_errors
from cluster.config import EngineConfig
from cluster.connecting import connect_to_ray
from cluster.launch import EngineHandles, actor_name, start_engine, stop_engine
from scheduler.errors import EngineUnavailable


def start(
    wait: Annotated[
        bool,
        typer.Option(
            help="Whether to return once the engine can compute; else it comes up by itself, when "
            "nodes with room for its workers have joined."
        ),
    ] = True,
    config: Config = None,
    model: Model = None,
    num_workers: Workers = None,
    tensor_parallel_size: Ranks = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Start an engine on the Ray cluster that this machine is part of.

    It stays until haversack stop. One that is there already is left as it is.
    """
    given = {
        "model": model,
        "num_workers": num_workers,
        "tensor_parallel_size": tensor_parallel_size,
        "name": name,
    }
    with _on_cluster(config, given) as settings:
        is_new = start_engine(settings, wait=wait) is not None
        if wait and not is_new:
            with engine(config, start=False, **given):
                pass  # which waits for it, and checks that it has these settings
    facts = {"engine": settings.name, "namespace": settings.namespace, "started": is_new}
    what = "is there already" if not is_new else "is ready" if wait else "is starting"
    show(facts, as_json, f"engine {settings.name} {what}")


def stop(config: Config = None, name: Name = None, as_json: Json = False) -> None:
    """End an engine, whoever started it; what it has under way ends with an error."""
    with _on_cluster(config, {"name": name}) as settings:
        try:
            scheduler = ray.get_actor(
                actor_name(settings, "scheduler"), namespace=settings.namespace
            )
        except ValueError:
            raise EngineUnavailable(
                f"no engine called {settings.name!r} is running in namespace "
                f"{settings.namespace!r}: there is nothing to end"
            ) from None
        stop_engine(EngineHandles(scheduler, settings.namespace, settings.name))
    show({"ended": settings.name}, as_json, f"engine {settings.name} has ended")


@contextmanager
def _on_cluster(config: Any, given: dict[str, Any]) -> Iterator[EngineConfig]:
    """Connect to the Ray that runs; an engine on one of this process' own would end with it."""
    chosen = {name: value for name, value in given.items() if value is not None}
    with told_errors():
        settings = EngineConfig.load(config, **chosen)
        try:
            owns_ray = connect_to_ray(settings, start=False)
        except EngineUnavailable as error:
            raise EngineUnavailable(f"{error.message} (ray start --head starts one)") from None
        try:
            yield settings
        finally:
            if owns_ray:
                ray.shutdown()
