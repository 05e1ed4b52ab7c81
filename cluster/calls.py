"""The scheduler actor as its clients reach it: all that they know of Ray and its errors.

Rules:
- A call ends in an answer, in the typed error that the scheduler raised, or in `Unreachable`.
- Where Ray says that the actor is dead, it is looked up again by name: another one may have come in
  its place. Only a name that nobody has any more makes it absent.
- A call is no part of the Ray task that it is made in. With a task Ray cancels what it has called,
  and Serve cancels the task of a client that hangs up: the word that ends its request, just sent,
  would never come through.
The module knows no method of the scheduler, and retries nothing.
"""

from __future__ import annotations

import contextlib
import logging
from contextvars import Context
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from cluster.patience import Unreachable
from scheduler.errors import EngineUnavailable, HaversackError

logger = logging.getLogger(__name__)


class SchedulerCalls:
    """Calls to the scheduler of one name, whichever actor that is."""

    def __init__(self, scheduler: Any, name: str, namespace: str) -> None:
        """Begin with the handle `scheduler`, an actor that is called `name` in `namespace`."""
        self._scheduler = scheduler
        self._name = name
        self._namespace = namespace

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Return the scheduler's answer.

        Raises:
            HaversackError: what it raised; `EngineUnavailable` for what is not typed.
            Unreachable: it did not answer in time, or is out of reach.
        """
        if not ray.is_initialized():
            raise EngineUnavailable(
                "this process has left Ray: connect again and make a new client"
            )
        try:
            return ray.get(self._send(method, args), timeout=timeout_s)
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, HaversackError):
                raise cause from None
            raise EngineUnavailable(
                f"the engine failed in {method}: {_last_line(error)}"
            ) from error
        except (GetTimeoutError, ActorUnavailableError) as error:
            raise Unreachable(_last_line(error)) from None
        except RayActorError as error:
            self._look_up(_last_line(error))
            raise Unreachable(_last_line(error)) from None
        except (RayError, ConnectionError) as error:  # the latter of `ray://` addresses
            raise Unreachable(_last_line(error)) from None

    def tell(self, method: str, *args: Any) -> None:
        """Call without waiting for an answer; a scheduler out of reach is noticed elsewhere."""
        if ray.is_initialized():
            with contextlib.suppress(RayError, ConnectionError):
                self._send(method, args)

    def _send(self, method: str, args: tuple[Any, ...]) -> Any:
        # Ray finds the task that a coroutine belongs to in its context.
        return Context().run(getattr(self._scheduler, method).remote, *args)

    def _look_up(self, reason: str) -> None:
        try:
            self._scheduler = ray.get_actor(self._name, namespace=self._namespace)
        except ValueError:
            raise Unreachable(reason, is_absent=True) from None
        except Exception as error:  # whatever Ray raises while its head node is away
            logger.warning("%s can't be looked up: %s", self._name, error)


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
