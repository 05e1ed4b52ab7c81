"""The offload store as an actor: it holds references to KV data, never the data itself.

The store calls `worker.read_blocks`, which makes it the owner of the returned array: the array
lives in the object store of the worker's node and outlives the worker. To load, it hands the
references to `worker.write_blocks`, and Ray shares or moves the memory between the workers.

Rules:
- No array is ever fetched into this process: a reference that is awaited would be.
- A call prepares all that it changes in the index before its first `await`, so calls take effect in
  the order in which they start, and a slow save keeps nobody waiting.
- Ray starts the calls of one caller on an asyncio actor in any order. A caller therefore awaits the
  answer to a call about a request before it makes the next one about the same request; a `release`
  that overtook a save would leave blocks owned for ever.
- A load keeps the references it needs for as long as it runs, so that no eviction or replacement
  can take the data away from under it.

A worker is a handle with two methods. `read_blocks(block_ids)` returns these blocks, uint8
[blocks, block_bytes]. `write_blocks(block_ids, segments, sources)` gets a list of references and,
for each block, a pair (index of a reference, row of its array); it writes that row into the block,
and returns how many leading blocks it wrote before it met an array that is lost.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import ray
from ray.experimental import get_local_object_locations

from offload_store.store import DEFAULT_SEGMENT_BYTES, OffloadStore

logger = logging.getLogger(__name__)

_MAX_WAITING_SAVES = 256


class OffloadStoreActor:
    """Saves workers' KV blocks and writes them into other workers.

    An asyncio actor; `cluster.launch` decorates it, and allows more calls at once than there can be
    requests saving and loading.
    """

    def __init__(
        self,
        capacity_bytes: int,
        block_bytes: int,
        block_size: int,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    ) -> None:
        """Start empty; see `OffloadStore` for the arguments."""
        self._data: dict[int, Any] = {}
        """ObjectRef to each segment's uint8 [rows, block_bytes], from `read_blocks` on."""
        self._store = OffloadStore(
            capacity_bytes,
            block_bytes,
            block_size,
            segment_bytes=segment_bytes,
            on_drop=lambda segment_id: self._data.pop(segment_id, None),
        )
        self._waiters = ThreadPoolExecutor(_MAX_WAITING_SAVES, thread_name_prefix="save")

    async def lookup(
        self,
        request_id: str,
        block_hashes: list[bytes],
        num_readable_tokens: int,
        num_own_tokens: int,
        skip_reading_prefix_cache: bool,
    ) -> int:
        """Return how many leading tokens can be loaded; they stay so until `release`.

        See `OffloadStore.lookup`.
        """
        return self._store.lookup(
            request_id,
            block_hashes,
            num_readable_tokens=num_readable_tokens,
            num_own_tokens=num_own_tokens,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
        ).num_hit_tokens

    async def save(
        self,
        request_id: str,
        worker: Any,
        block_hashes: list[bytes],
        block_ids: list[int],
        owned: bool,
        replace: bool,
    ) -> tuple[int, int]:
        """Copy a worker's blocks to the store, as far as they are not there and there is room.

        The worker must not change the blocks before this returns. A read that fails, also by the
        worker's death, leaves its segment out; nothing is raised for it.

        Args:
            block_hashes: full blocks of the request, in order.
            block_ids: where they are on the worker, one id per hash.
            owned: whether they are kept until the request is forgotten.
            replace: whether to copy also blocks whose stored bytes others saved.

        Returns:
            how many leading blocks the store holds now, and how many were copied.

        Raises:
            ValueError: the two lists differ in length.
        """
        if len(block_hashes) != len(block_ids):
            raise ValueError(f"{len(block_hashes)} hashes were given for {len(block_ids)} blocks")
        plan = self._store.prepare_save(request_id, block_hashes, owned=owned, replace=replace)
        reads: dict[Any, int] = {}
        unended = {segment_id for segment_id, _ in plan.segments}
        try:
            for segment_id, indices in plan.segments:
                data = worker.read_blocks.remote([block_ids[index] for index in indices])
                self._data[segment_id] = data
                reads[data] = segment_id
            failed = await self._complete(request_id, reads, unended)
        finally:
            for segment_id in unended:
                self._store.complete_save(segment_id, ok=False)
        copied = sum(len(indices) for segment, indices in plan.segments if segment not in failed)
        return self._store.num_saved_blocks(plan, failed), copied

    async def load(
        self, request_id: str, worker: Any, block_hashes: list[bytes], block_ids: list[int]
    ) -> int:
        """Write blocks that the latest lookup promised to the request into a worker's blocks.

        Args:
            block_hashes: leading blocks of the request.
            block_ids: where on the worker to write them, one id per hash.

        Returns:
            how many leading blocks were written: fewer than asked for where the lookup promised
            fewer or data turned out to be lost.

        Raises:
            ValueError: the two lists differ in length.
            ray.exceptions.RayError: the worker died or failed to write.
        """
        if len(block_hashes) != len(block_ids):
            raise ValueError(f"{len(block_hashes)} hashes were given for {len(block_ids)} blocks")
        rows = self._store.segments_of(request_id, block_hashes)
        if not rows:
            return 0
        segment_ids = list(dict.fromkeys(row.segment_id for row in rows))
        position = {segment_id: index for index, segment_id in enumerate(segment_ids)}
        sources = [(position[row.segment_id], row.row) for row in rows]
        # Inside a list, references arrive at the worker as references.
        segments = [self._data[segment_id] for segment_id in segment_ids]
        num_written: int = await worker.write_blocks.remote(
            block_ids[: len(rows)], segments, sources
        )
        if num_written < len(rows):
            lost = rows[num_written].segment_id
            logger.warning("the data of segment %d is lost", lost)
            self._store.drop_segment(lost)
        return num_written

    async def release(self, request_id: str, forget: bool) -> None:
        """Drop the request's pins, and with `forget` all that is kept for it by name."""
        self._store.release(request_id, forget=forget)

    async def stats(self) -> dict[str, int]:
        """Return the fields of `OffloadStoreStats`."""
        return msgspec.structs.asdict(self._store.stats)

    async def ping(self) -> bool:
        """Return True: the actor is up and its event loop turns."""
        return True

    async def _complete(
        self, request_id: str, reads: dict[Any, int], unended: set[int]
    ) -> set[int]:
        """End each segment's save as soon as its read has ended; return those that failed.

        Args:
            reads: the segment that each reference is the data of.
            unended: segments whose save has not ended; each is taken out when it has.
        """
        loop = asyncio.get_running_loop()
        pending = list(reads)
        failed = set()
        while pending:
            wait = partial(ray.wait, pending, num_returns=1, fetch_local=False)
            ready, pending = await loop.run_in_executor(self._waiters, wait)
            for data in ready:
                error = await _failure_of(data)
                segment_id = reads[data]
                unended.discard(segment_id)
                self._store.complete_save(segment_id, ok=error is None)
                if error is not None:
                    failed.add(segment_id)
                    logger.warning("a save of request %s failed: %r", request_id, error)
        return failed


async def _failure_of(data: Any) -> Exception | None:
    """Return why a read that has ended brought no array, None where it did.

    An array in some node's object store is a success and is not touched. What is nowhere came
    with the reply, into this process: an exception or a small array, so awaiting it moves nothing.
    """
    if get_local_object_locations([data])[data]["node_ids"]:
        return None
    try:
        await data
    except Exception as error:
        return error
    return None
