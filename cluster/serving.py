"""Puts an endpoint in front of a running engine: a Ray Serve application of its own.

Rules:
- The endpoint joins the engine as one more client; it neither starts nor ends it.
- Serve that is there already is used as it is, with its own address, and left running.
- An endpoint ends with the process that deployed it, also where that was killed: it looks for that
  process itself, since applications of Serve outlive everybody.
The module knows Serve, and nothing of what the endpoint answers.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.schema import LoggingConfig

from cluster.api import create_app
from cluster.api_settings import MAX_PORT, ApiSettings
from cluster.otel import environment
from scheduler.errors import InvalidConfig, StartupFailed

_MAX_ONGOING = 10_000
"""HTTP requests at once: the engine's queue is what says that there are too many."""
_LOOK_EVERY_S = 1.0
_NAME_TIMEOUT_S = 10.0 + 10 * _LOOK_EVERY_S
"""How long an endpoint may take to end whose process was killed."""
_ANSWER_S = 5.0
"""How long an endpoint that is taken down may finish what it is answering."""


class Endpoint:
    """A deployed endpoint."""

    def __init__(
        self,
        settings: ApiSettings,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        route_prefix: str = "/",
    ) -> None:
        """Deploy it and return when it answers.

        Args:
            settings: the running engine, and the rules.
            host: where to listen, for a Serve that is started for this; 0.0.0.0 is everywhere.
            port: the same; 0 takes a free one, or that of a Serve that runs already.
            route_prefix: what the paths begin with, for several engines behind one address.

        Raises:
            InvalidConfig: Serve can't listen there, or listens elsewhere already, or has such an
                application already, of a process that lives.
            StartupFailed: it does not come up.
        """
        self._name = f"haversack-{settings.engine.name}-{route_prefix.strip('/') or 'root'}"
        # Its steps on the way up are nobody's business; what goes wrong is raised.
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        listening = _serve_address()
        self._owns_serve = listening is None
        if listening is None:
            port = port or _free_port(host)
            _check_free(host, port)
        else:
            host, port = _agreed(listening, port)
            self._wait_for_name()
        logging_config = LoggingConfig(enable_access_log=False, log_level="WARNING")
        try:
            if self._owns_serve:
                serve.start(
                    proxy_location="HeadOnly",
                    http_options={"host": host, "port": port},
                    logging_config=logging_config,
                )
            serve.run(
                deployment(settings, _Owner(_job_id(), self._name)).bind(),
                name=self._name,
                route_prefix=route_prefix,
                logging_config=logging_config,
            )
        except (RuntimeError, TimeoutError, RayError, ValueError) as error:
            self.stop()
            raise StartupFailed(f"the endpoint did not come up: {error}") from error
        shown = host if host not in ("0.0.0.0", "::") else "127.0.0.1"
        self.url = f"http://{shown}:{port}{route_prefix.rstrip('/')}"
        """Where it answers, without a slash at the end."""

    def _wait_for_name(self) -> None:
        """Let an endpoint whose process was killed end, which it does by itself."""
        deadline_s = time.monotonic() + _NAME_TIMEOUT_S
        while self._name in serve.status().applications:
            if time.monotonic() > deadline_s:
                raise InvalidConfig(
                    f"Serve has an application {self._name!r} already: give another "
                    "--route-prefix, or end it where it was started",
                    field="route_prefix",
                )
            time.sleep(_LOOK_EVERY_S)

    def stop(self) -> None:
        """Take it down, and Serve too where that was started for it and has nothing else."""
        with contextlib.suppress(RayError, RuntimeError):
            if self._owns_serve and not set(serve.status().applications) - {self._name}:
                end: Any = serve.shutdown
                end()
            else:
                serve.delete(self._name)


class _Owner(NamedTuple):
    """Whom an application ends with."""

    job_id: str
    """Of the process, which is a driver of Ray's."""
    application: str
    """The application's name."""


def deployment(settings: ApiSettings, owner: _Owner | None = None) -> Any:
    """Return Serve's deployment of an endpoint, to be bound.

    Args:
        settings: see `Endpoint`.
        owner: whom it ends with; None: it stays until it is taken down.
    """

    def app() -> Any:
        return create_app(settings)

    @serve.deployment(
        name="api",
        ray_actor_options={"num_cpus": 0} | _exporting(),
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=_ANSWER_S,
    )
    @serve.ingress(app)
    class HaversackApi:
        """The endpoint's replica; all that it answers is the application's."""

        def __init__(self) -> None:
            if owner is not None:
                threading.Thread(target=_end_with, args=(owner,), daemon=True).start()

    return HaversackApi


def _exporting() -> dict[str, Any]:
    """Return options by which the replica exports spans as this process does."""
    variables = environment()
    return {"runtime_env": {"env_vars": variables}} if variables else {}


def _end_with(owner: _Owner) -> None:
    """Take the application down when its owner is no more."""
    while True:
        with contextlib.suppress(RayError):  # Ray's head may be away for a while
            if any(job["JobID"] == owner.job_id and job["IsDead"] for job in _jobs()):
                serve.delete(owner.application, _blocking=False)
                return
        time.sleep(_LOOK_EVERY_S)


def _job_id() -> str:
    return str(ray.get_runtime_context().get_job_id())


def _jobs() -> list[dict[str, Any]]:
    """Return what Ray knows of its drivers, those that have ended included."""
    state: Any = ray._private.state.state
    found: list[dict[str, Any]] = state.job_table()
    return found


def _serve_address() -> tuple[str, int] | None:
    """Return where Serve listens; None where it does not run."""
    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else (client.http_config.host, client.http_config.port)


def _agreed(listening: tuple[str, int], port: int) -> tuple[str, int]:
    if port not in (0, listening[1]):
        raise InvalidConfig(
            f"Serve runs already and listens at {listening[0]}:{listening[1]}: give that --port, "
            "or 0",
            field="port",
        )
    return listening


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _check_free(host: str, port: int) -> None:
    if not 0 < port <= MAX_PORT:
        raise InvalidConfig(
            f"port={port} is not allowed: give a number from 0 to {MAX_PORT}", field="port"
        )
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise InvalidConfig(
            f"nothing can listen at {host}:{port} ({error.strerror or error}): give another --port "
            "or --host",
            field="port",
        ) from None
