"""A worker as a Ray actor: one model runner behind messages.

The module knows Ray, messages as bytes and KV as arrays; it knows no request and takes no decision.
Rules:
- `execute`, `read_blocks` and `write_blocks` run in one thread in the order of arrival, so a read
  sees all that earlier steps computed, and a step all that earlier writes brought.
- `ping` has a concurrency group of its own and answers in the middle of a step.
- KV data never waits in this process: a read returns a copy that belongs to the caller, and a write
  takes one segment at a time out of the object store.
- torch is imported where it is used: this module is also imported by every process that is handed
  a worker's handle, and those compute nothing.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from scheduler.codec import decode, encode
from scheduler.errors import InvalidConfig
from scheduler.messages import SchedulerOutput

if TYPE_CHECKING:
    from workers.kv_cache import ByteArray
    from workers.model_runner import ModelRunner

logger = logging.getLogger(__name__)

CONCURRENCY_GROUPS = {"control": 1}
"""For `ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerActor)`."""
_SEGMENT_TIMEOUT_S = 30.0
"""Longest wait for a segment of KV data; past it the data counts as lost."""


class WorkerActor:
    """One model on one device; `cluster.launch` decorates the class and starts it."""

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
    ) -> None:
        """Keep the settings; the model is loaded by the first call of `info`.

        Args:
            worker_id: the worker's name in messages.
            model_name: see `workers.model_store`.
            device: "cpu", "cuda" or "cuda:N".
            dtype: "bfloat16", "float16" or "float32".
            num_blocks: KV blocks to have; or else
            kv_bytes: bytes that KV may take.
            block_size: tokens per KV block.
            num_threads: CPU threads to compute with; None leaves what torch finds.
        """
        self._worker_id = worker_id
        self._model_name = model_name
        self._device = device
        self._dtype = dtype
        self._num_blocks = num_blocks
        self._kv_bytes = kv_bytes
        self._block_size = block_size
        self._num_threads = num_threads
        self._loaded: ModelRunner | None = None

    def info(self) -> bytes:
        """Load the model and make room for KV, once; return an encoded `WorkerInfo`.

        What goes wrong is raised here and not where the actor is made: from there Ray would bring
        it back as the text of an `ActorDiedError`.

        Raises:
            ModelNotFound: nothing has that name, or it can't be fetched.
            UnsupportedModel: the model is not of a kind that the engine can run.
            InvalidConfig: a setting has an impossible value.
        """
        node_id = ray.get_runtime_context().get_node_id()
        return encode(self._runner().info(self._worker_id, node_id))

    def _runner(self) -> ModelRunner:
        """Return the runner, with the calling thread set up to compute."""
        import torch

        if self._num_threads is not None and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> ModelRunner:
        from workers.kv_cache import KVCache
        from workers.loader import load_model
        from workers.model_runner import ModelRunner

        model = load_model(
            self._model_name,
            device=self._device,
            dtype=self._dtype,
            progress=lambda text: logger.info("%s: %s", self._worker_id, text),
        )
        num_blocks = self._num_blocks
        if num_blocks is None:
            if self._kv_bytes is None:
                raise InvalidConfig("a worker needs num_blocks or kv_bytes", param="num_blocks")
            num_blocks = KVCache.blocks_in(
                self._kv_bytes, model.layers, self._block_size, model.dtype
            )
        return ModelRunner(model, num_blocks=num_blocks, block_size=self._block_size)

    def execute(self, data: bytes) -> bytes:
        """Run an encoded `SchedulerOutput`; return an encoded `ModelRunnerOutput`."""
        return encode(self._runner().execute(decode(data, SchedulerOutput)))

    def read_blocks(self, block_ids: list[int]) -> ByteArray:
        """Return the KV of some blocks, uint8 [n, block_bytes]."""
        return self._runner().read_blocks(block_ids)

    def write_blocks(
        self, block_ids: list[int], segments: list[Any], sources: list[tuple[int, int]]
    ) -> int:
        """Store KV that `read_blocks` gave, on whichever worker.

        Args:
            block_ids: where to write, distinct.
            segments: ObjectRefs of uint8 [n, block_bytes] arrays.
            sources: for each block id, (index of a segment, row in its array).

        Returns:
            how many leading blocks were written: a segment that is lost, can't be fetched in time
            or does not fit this cache ends the writing, and raises nothing.
        """
        written = 0
        pairs = zip(block_ids, sources, strict=True)
        for index, group in itertools.groupby(pairs, key=lambda pair: pair[1][0]):
            members = list(group)
            try:
                data: ByteArray = ray.get(segments[index], timeout=_SEGMENT_TIMEOUT_S)
                rows = np.ascontiguousarray(data[[row for _, (_, row) in members]])
                self._runner().write_blocks([block_id for block_id, _ in members], rows)
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
