"""Whether there is an engine to join, and whether it is the one that was asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.config import RULES, EngineConfig
from cluster.connecting import where_else
from cluster.launch import EngineHandles, find_engine, start_engine
from scheduler.errors import EngineUnavailable, InvalidConfig, StartupFailed
from scheduler.outbox import EngineInfo

_RETRY_S = 0.1
_WHERE_IT_IS = frozenset({"namespace", "name", "ray_address", "startup_timeout_s"})
"""Settings that say where the engine is and how long to wait for it, not what it is like."""


def chosen_settings(
    config: EngineConfig | str | Path | None, settings: dict[str, Any]
) -> tuple[EngineConfig, set[str]]:
    """Return the settings, and the names of those that somebody chose.

    Raises:
        InvalidConfig: a setting is unknown or impossible, or is given twice.
    """
    if isinstance(config, EngineConfig):
        if settings:
            raise InvalidConfig("give an EngineConfig or single settings, not both")
        return config, set(RULES)
    loaded = EngineConfig.load(config, **settings)
    defaults = EngineConfig()
    changed = {name for name in RULES if getattr(loaded, name) != getattr(defaults, name)}
    return loaded, changed | set(settings)


def find_or_start(
    config: EngineConfig, *, start: bool, owner_client_id: str | None = None
) -> tuple[Any, EngineHandles | None]:
    """Return the scheduler of the engine of that name, and its handles where this started it.

    Args:
        start: whether to start an engine where none is running.
        owner_client_id: with whom an engine that is started here ends; None: it stays.

    Raises:
        EngineUnavailable: none is running and none may be started.
        StartupFailed, ModelNotFound, UnsupportedModel: see `start_engine`.
    """
    deadline_s = time.monotonic() + config.startup_timeout_s
    while True:
        found = find_engine(config)
        if found is not None:
            return found, None
        if not start:
            raise EngineUnavailable(
                f"no engine called {config.name!r} is running in namespace {config.namespace!r}: "
                f"start one with cluster.Client(model=...){where_else()}"
            )
        started = start_engine(config, owner_client_id=owner_client_id)
        if started is not None:
            return started.scheduler, started
        if time.monotonic() > deadline_s:
            raise StartupFailed(
                f"actors of an engine called {config.name!r} are there, but it does not come up: "
                "end them, or give another name"
            )
        time.sleep(_RETRY_S)


def check_agreement(config: EngineConfig, chosen: Iterable[str], info: EngineInfo) -> None:
    """Compare what was chosen with what the running engine has.

    A `num_workers` of None agrees with whichever number the engine found for itself.

    Raises:
        InvalidConfig: it differs; says in what.
    """
    wanted = {name: getattr(config, name) for name in chosen if name not in _WHERE_IT_IS}
    if config.num_workers is None:
        wanted.pop("num_workers", None)
    differing = {name: value for name, value in wanted.items() if info.settings[name] != value}
    if differing:
        story = ", ".join(
            f"{name}={value!r} was asked for and it has {info.settings[name]!r}"
            for name, value in sorted(differing.items())
        )
        raise InvalidConfig(
            f"an engine called {config.name!r} is running with other settings: {story}. Leave them "
            "out to join it, or start another with name=...",
            field=min(differing),
        )
