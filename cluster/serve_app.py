"""The endpoint of a running engine as Ray Serve's own tools deploy it: `serve deploy`, RayService.

In Serve's file: `import_path: cluster.serve_app:build`, and `args` with the `name` and `namespace`
of the engine, and `served_model_name` where requests call the model something else. Keys that are
let in come from the variable HAVERSACK_API_KEY, with commas between them: Serve shows its files to
whoever asks.
"""

from __future__ import annotations

import os
from typing import Any

from cluster.api_settings import ApiSettings, key_digests
from cluster.client import Client
from cluster.config import EngineConfig
from cluster.serving import deployment
from scheduler.errors import InvalidConfig

_ARGUMENTS = ("name", "namespace", "served_model_name")


def build(args: dict[str, str]) -> Any:
    """Return the application, for an engine that is there or is starting.

    Raises:
        InvalidConfig: an argument is unknown or impossible.
        EngineUnavailable: there is no such engine.
    """
    for name in args:
        if name not in _ARGUMENTS:
            raise InvalidConfig(
                f"unknown argument {name!r}: give {', '.join(_ARGUMENTS)}", field=name
            )
    where = {name: args[name] for name in ("name", "namespace") if name in args}
    with Client(start=False, **where) as client:
        running: dict[str, Any] = {**client.info.settings}
        served = args.get("served_model_name", client.info.model)
    keys = os.environ.get("HAVERSACK_API_KEY", "")
    return deployment(
        ApiSettings(
            engine=EngineConfig(**running),
            served_names=(served,),
            key_digests=key_digests(keys.split(",") if keys else []),
        )
    ).bind()
