"""The other processes of a worker that computes its model over several ranks, as Ray actors.

The worker makes them, one each for the further bundles of the placement group that it is in itself,
and nobody else calls them. Rules:
- They belong to the worker, so Ray ends them when it ends, however it ends and whatever they do.
- When one of them ends, or fails in what it was to do with the others, the worker's process ends at
  once: its other threads may be in a call that waits for that one, and would stay in it.
- They take steps, reads and writes in the order in which the worker sends them, each kind in a
  thread of its own as in the worker.
- They serve no epoch: the worker calls them only for a call that it was right to take.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from scheduler.codec import decode
from scheduler.errors import HaversackError
from scheduler.messages import SchedulerOutput

if TYPE_CHECKING:
    from workers.kv_cache import ByteArray
    from workers.loader import LoadedModel
    from workers.ranks.runner import FollowingRunner
    from workers.runner_settings import RunnerSettings

logger = logging.getLogger(__name__)

_CONCURRENCY_GROUPS = {"read": 1, "write": 1, "control": 1}


def node_address() -> str:
    """Return the address at which Ray reaches this node."""
    ask: Any = ray.nodes
    own_id = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ask() if node["NodeID"] == own_id)


def end_process(who: str, why: object) -> NoReturn:
    """End this process, in the middle of whatever its threads do."""
    logger.error("%s ends: %s", who, why)
    logging.shutdown()
    os._exit(1)


class FollowerActor:
    """One rank's share of the model on one device."""

    def __init__(self, worker_id: str, rank: int, size: int, settings: RunnerSettings) -> None:
        """Keep what says how to `load`, as rank `rank` of `size`."""
        self._worker_id = worker_id
        self._rank = rank
        self._size = size
        self._settings = settings
        self._model: LoadedModel | None = None
        self._loaded: FollowingRunner | None = None

    def __repr__(self) -> str:
        """Say who this is, in Ray's dashboard and logs."""
        return f"{self._worker_id} rank {self._rank}: {self._settings}"

    def load(self) -> tuple[str, str]:
        """Load the share; return its fingerprint and this node's id.

        Raises:
            HaversackError: see `workers.loader.load_model`.
        """
        from workers.ranks.group import Ranks

        self._settings.use_threads()
        self._model = self._settings.load_model(repr(self), Ranks(self._rank, self._size))
        return self._model.fingerprint, ray.get_runtime_context().get_node_id()

    def join(self, address: str, port: int) -> None:
        """Meet the other ranks, see `Ranks.join`, and make room for KV."""
        from workers.ranks.runner import FollowingRunner

        assert self._model is not None
        with self._or_end():
            self._model.ranks.join(address, port, node_address(), self._model.device)
            model = self._model.agreed()
            self._loaded = FollowingRunner(model, **self._settings.cache_size(model))

    def execute(self, data: bytes) -> None:
        """Compute this share of an encoded `SchedulerOutput`."""
        with self._or_end():
            self._runner().execute(decode(data, SchedulerOutput))

    def forget_all(self) -> None:
        """See `ModelRunner.forget_all`."""
        self._runner().forget_all()

    @ray.method(concurrency_group="read")
    def read_blocks(self, block_ids: list[int]) -> ByteArray:
        """Return this share of some blocks; see `KVCache.read_blocks`."""
        return self._runner().read_blocks(block_ids)

    @ray.method(concurrency_group="write")
    def write_blocks(self, block_ids: list[int], data: ByteArray) -> None:
        """Store this share of some blocks; see `KVCache.write_blocks`."""
        self._runner().write_blocks(block_ids, data)

    @ray.method(concurrency_group="control")
    def live(self) -> None:
        """Never return, so that whoever calls this hears when the process has ended."""
        threading.Event().wait()

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """End the process where something fails in which the other ranks wait for this one.

        They would not hear of an answer.
        """
        try:
            yield
        except Exception as error:
            end_process(repr(self), repr(error))

    def _runner(self) -> FollowingRunner:
        assert self._loaded is not None
        self._settings.use_threads()
        return self._loaded


class RemoteFollowers:
    """All ranks but the first as actors; fulfils `workers.ranks.runner.Followers`."""

    def __init__(
        self, worker_id: str, size: int, settings: RunnerSettings, options: dict[str, Any]
    ) -> None:
        """Start them, in this process's placement group where it is in one, and have them load.

        Args:
            worker_id: the worker's name in messages.
            size: all ranks, the first one included.
            settings: of every rank.
            options: for Ray: what each of them reserves, and its environment.
        """
        self._worker_id = worker_id
        group = ray.util.get_current_placement_group()
        decorate: Any = ray.remote
        kind = decorate(concurrency_groups=_CONCURRENCY_GROUPS)(FollowerActor)
        self._handles = [
            kind.options(
                **options,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank)
                if group is not None
                else "DEFAULT",
            ).remote(worker_id, rank, size, settings)
            for rank in range(1, size)
        ]
        self._loads = self.call("load")
        threading.Thread(target=self._watch, name="followers", daemon=True).start()

    def loaded(self) -> list[tuple[str, str]]:
        """Return each one's fingerprint and node id, once all have loaded.

        Raises:
            HaversackError: one can't load the model, for a reason that stays.
        """
        return self._loads()

    def call(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """See `Followers`."""
        return self.call_each(method, [args] * len(self._handles))

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """See `Followers`."""
        answers = [
            getattr(handle, method).remote(*own)
            for handle, own in zip(self._handles, args, strict=True)
        ]

        def wait() -> list[Any]:
            try:
                found: list[Any] = ray.get(answers)
            except RayTaskError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, HaversackError):
                    raise cause from None
                raise
            except RayError as error:
                self.give_up(error)
            return found

        return wait

    def give_up(self, error: Exception) -> NoReturn:
        """See `Followers`."""
        end_process(self._worker_id, f"its ranks are not alike any more: {error!r}")

    def _watch(self) -> None:
        lives = [handle.live.remote() for handle in self._handles]
        ray.wait(lives, num_returns=1)
        end_process(self._worker_id, "one of its ranks is lost")
