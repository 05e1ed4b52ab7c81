"""A worker as a Ray actor: one model runner behind messages.

The module knows Ray, messages as bytes and KV as arrays; it knows no request and takes no decision.
Rules:
- A worker serves one epoch, the number of one incarnation of the scheduler, which `reset` begins.
  Calls of any other epoch are refused with `StaleEpoch` and change nothing, so that what a dead
  scheduler (or the offload store on its behalf) still has under way can't touch blocks that the
  next one has given away.
- `reset` returns when no step, read or write of an earlier epoch is running, or will run.
- Steps, reads and writes each go in their order of arrival, in a thread of their own. The scheduler
  has only blocks read whose steps were answered, and only blocks written that no step uses; on CUDA
  all three threads work on the device's default stream, which keeps this order.
- A step may continue the one sent before it, so one that comes after a later one is refused.
- So an empty write is a fence: when it returns, every write that had arrived before it has ended.
- `ping` has a thread of its own too, and answers in the middle of everything else.
- Where several processes compute the model, this is the first of them, and all of the above holds
  for all: see `workers.ranks`.
- KV data never waits in this process: a read returns a copy that belongs to the caller, and a write
  takes one segment at a time out of the object store.
- torch is imported where it is used: this module is also imported by every process that is handed
  a worker's handle, and those compute nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import ray

from scheduler.codec import decode, encode
from scheduler.errors import InvariantViolation, StaleEpoch
from scheduler.messages import SchedulerOutput
from workers.process_memory import give_back_free
from workers.ranks.actor import RemoteFollowers, node_address
from workers.runner_settings import RunnerSettings

if TYPE_CHECKING:
    from workers.kv_cache import ByteArray
    from workers.model_runner import ModelRunner

logger = logging.getLogger(__name__)

CONCURRENCY_GROUPS = {"read": 1, "write": 1, "control": 1}
"""For `ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerActor)`."""
_LARGE_ANSWER_BYTES = 2**26
_SEGMENT_TIMEOUT_S = 30.0
"""Longest wait for a segment of KV data; past it the data counts as lost."""


class WorkerActor:
    """One model on one device; whoever starts it decorates the class and calls `reset` first."""

    def __init__(
        self,
        worker_id: str,
        model_name: str,
        *,
        device: str = "cpu",
        dtype: str = "bfloat16",
        num_blocks: int | None = None,
        kv_bytes: int | None = None,
        block_size: int = 16,
        num_threads: int | None = None,
        tensor_parallel_size: int = 1,
        rank_options: dict[str, Any] | None = None,
    ) -> None:
        """Keep the settings; the model is loaded by the first `reset`.

        Args:
            worker_id: the worker's name in messages.
            model_name: see `workers.model_store`.
            device: "cpu", "cuda" or "cuda:N".
            dtype: "bfloat16", "float16" or "float32".
            num_blocks: KV blocks to have; or else
            kv_bytes: bytes that KV may take, at all ranks together.
            block_size: tokens per KV block.
            num_threads: CPU threads to compute with; None leaves what torch finds.
            tensor_parallel_size: processes that compute the model together, of which this is the
                first; it makes the others, each on a device and with threads like its own.
            rank_options: Ray's options for each of those.
        """
        self._worker_id = worker_id
        self._settings = RunnerSettings(
            model_name, device, dtype, num_blocks, kv_bytes, block_size, num_threads
        )
        self._num_ranks = tensor_parallel_size
        self._rank_options = rank_options or {}
        self._other_node_ids: tuple[str, ...] = ()
        self._loaded: ModelRunner | None = None
        self._epoch: int | None = None
        """Changes only with both locks held, and in the thread that runs steps."""
        self._last_step_id = -1
        """Of this epoch; the thread that runs steps uses it."""
        self._reading = threading.Lock()
        """Held while KV is copied out."""
        self._writing = threading.Lock()
        """Held while KV is copied in."""

    def __repr__(self) -> str:
        """Say who this is, in Ray's dashboard and logs."""
        return f"{self._worker_id}: {self._settings}"

    def reset(self, epoch: int) -> bytes:
        """Serve `epoch` from now on, knowing no request; return an encoded `WorkerInfo`.

        The first call loads the model and makes room for KV. What goes wrong with that is raised
        here and not where the actor is made: from there Ray would bring it back as the text of an
        `ActorDiedError`. A later call waits for the step, read or write that is running.

        Args:
            epoch: of the calling scheduler. Epochs only grow; the current one may come again.

        Raises:
            ModelNotFound: nothing has that name, or it can't be fetched.
            UnsupportedModel: the model is not of a kind that the engine can run.
            InvalidConfig: a setting has an impossible value.
            StaleEpoch: the worker serves a newer epoch.
        """
        runner = self._runner()
        with self._reading, self._writing:
            if self._epoch is not None and epoch < self._epoch:
                raise self._stale(epoch)
            self._epoch = epoch
            self._last_step_id = -1
            runner.forget_all()
        node_id = ray.get_runtime_context().get_node_id()
        info = runner.info(self._worker_id, node_id)
        return encode(msgspec.structs.replace(info, other_node_ids=self._other_node_ids))

    def execute(self, epoch: int, data: bytes) -> bytes:
        """Run an encoded `SchedulerOutput`; return an encoded `ModelRunnerOutput`.

        Raises:
            StaleEpoch: the worker serves another epoch.
            InvariantViolation: a step that was sent later has been run.
        """
        self._check(epoch)
        step = decode(data, SchedulerOutput)
        if step.step_id < self._last_step_id:
            raise InvariantViolation(
                f"worker {self._worker_id} was given step {step.step_id} after step "
                f"{self._last_step_id}: steps have to come in the order of their numbers"
            )
        self._last_step_id = step.step_id
        answer = encode(self._runner().execute(step))
        if len(answer) > _LARGE_ANSWER_BYTES:
            # Rows of the whole vocabulary: several times as much was taken on the way.
            give_back_free()
        return answer

    @ray.method(concurrency_group="read", num_returns=2)
    def read_blocks(self, epoch: int, block_ids: list[int]) -> tuple[ByteArray, int]:
        """Return the KV of some blocks, uint8 [n, block_bytes], and n.

        These are two objects: awaiting the number tells that the array is in the object store,
        or why there is none, and fetches no KV.

        Raises:
            StaleEpoch: the worker serves another epoch.
        """
        with self._reading:
            data = self._runner_of(epoch).read_blocks(block_ids)
        return data, len(data)

    @ray.method(concurrency_group="write")
    def write_blocks(
        self, epoch: int, block_ids: list[int], segments: list[Any], sources: list[tuple[int, int]]
    ) -> int:
        """Store KV that `read_blocks` gave, on whichever worker.

        Args:
            epoch: of the scheduler that gave the blocks away.
            block_ids: where to write, distinct.
            segments: ObjectRefs of uint8 [n, block_bytes] arrays.
            sources: for each block id, (index of a segment, row in its array).

        Returns:
            how many leading blocks were written: a segment that is lost, can't be fetched in time
            or does not fit this cache ends the writing, and raises nothing.

        Raises:
            StaleEpoch: the worker serves another epoch, maybe only since the writing began.
        """
        self._check(epoch)
        written = 0
        pairs = zip(block_ids, sources, strict=True)
        for index, group in itertools.groupby(pairs, key=lambda pair: pair[1][0]):
            members = list(group)
            try:
                data: ByteArray = ray.get(segments[index], timeout=_SEGMENT_TIMEOUT_S)
                rows = np.ascontiguousarray(data[[row for _, (_, row) in members]])
                # Not around the wait for data, which a reset need not wait for.
                with self._writing:
                    self._runner_of(epoch).write_blocks([block for block, _ in members], rows)
            except StaleEpoch:
                raise
            except Exception as error:
                logger.warning(
                    "%s: KV for %d of %d blocks is lost: %r",
                    self._worker_id,
                    len(block_ids) - written,
                    len(block_ids),
                    error,
                )
                break
            written += len(members)
        return written

    @ray.method(concurrency_group="control")
    def ping(self) -> str:
        """Return the worker's id, also in the middle of a step."""
        return self._worker_id

    def _check(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise self._stale(epoch)

    def _stale(self, epoch: int) -> StaleEpoch:
        return StaleEpoch(
            f"worker {self._worker_id} serves epoch {self._epoch} and refuses a call of epoch "
            f"{epoch}: only the scheduler that reset it last may call it",
            epoch=epoch,
            current_epoch=self._epoch,
        )

    def _runner_of(self, epoch: int) -> ModelRunner:
        """Return the runner for a copy of KV, to be used with the copy's lock held."""
        self._check(epoch)
        return self._runner()

    def _runner(self) -> ModelRunner:
        """Return the runner, with the calling thread set up to compute."""
        self._settings.use_threads()
        if self._loaded is None:
            self._loaded = self._load() if self._num_ranks == 1 else self._load_with_others()
        return self._loaded

    def _load(self) -> ModelRunner:
        from workers.model_runner import ModelRunner
        from workers.ranks.group import Ranks

        model = self._settings.load_model(self._worker_id, Ranks())
        return ModelRunner(model, **self._settings.cache_size(model))

    def _load_with_others(self) -> ModelRunner:
        """Start the other ranks, load this one's share while they load theirs, and meet them."""
        from workers.loader import joint_fingerprint
        from workers.ranks.group import Ranks
        from workers.ranks.runner import LeadingRunner

        settings = self._settings
        others = RemoteFollowers(self._worker_id, self._num_ranks, settings, self._rank_options)
        ranks = Ranks(0, self._num_ranks)
        model = settings.load_model(self._worker_id, ranks)
        cache_size = settings.cache_size(model)
        fingerprints, self._other_node_ids = zip(*others.loaded(), strict=True)
        fingerprint = joint_fingerprint([model.fingerprint, *fingerprints])
        model = dataclasses.replace(model, fingerprint=fingerprint)
        address = node_address()
        port = ranks.open(address)
        joined = others.call("join", address, port)
        ranks.join(address, port, address, model.device)
        model = model.agreed()
        joined()
        return LeadingRunner(model, others, **cache_size)
