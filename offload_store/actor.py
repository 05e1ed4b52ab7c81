"""The offload store as an actor: it holds references to KV data, never the data itself.

The store calls `worker.read_blocks`, which makes it the owner of the returned array: the array
lives in the object store of the worker's node and outlives the worker. A copy in the object store
of this node lets it outlive the worker's node too. To load, the store hands the references to
`worker.write_blocks`, and Ray shares or moves the memory between the workers.

Rules:
- No array is ever fetched into this process: a reference that is awaited would be. That an array
  is there is known from the small number that comes with it.
- A segment counts as saved once a copy is on this node, which costs nothing where the worker is on
  it too. That is as good as it gets, not a promise: Ray drops copies where memory is short.
- A call prepares all that it changes in the index before its first `await`, so calls take effect in
  the order in which they start, and a slow save keeps nobody waiting.
- Ray starts the calls of one caller on an asyncio actor in any order. A caller therefore awaits the
  answer to a call about a request before it makes the next one about the same request; a `release`
  that overtook a save would leave blocks owned for ever.
- A load keeps the references it needs for as long as it runs, so that no eviction or replacement
  can take the data away from under it.
- Nobody waits for ever for a worker that hangs. A read that was given up harms nobody; a write that
  was given up may still happen, which only the worker can tell: an empty write to it is a fence.
- All that is known is in this process. Restarted, the store is empty, and every lookup a miss.
- The store serves one scheduler at a time. What an earlier one still asks for is refused: nobody
  would ever give back what it pinned or owned.

A worker is a handle with two methods; both refuse an epoch that is not the worker's, which is
that of the scheduler that reset it. `read_blocks(epoch, block_ids)` returns two objects: these
blocks, uint8 [blocks, block_bytes], and their number. `write_blocks(epoch, block_ids, segments,
sources)` gets a list of references and, for each block, a pair (index of a reference, row of its
array); it writes that row into the block, and returns how many leading blocks it wrote before it
met an array that is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from offload_store.records import SavePlan
from offload_store.store import DEFAULT_SEGMENT_BYTES, OffloadStore

logger = logging.getLogger(__name__)

DEFAULT_TRANSFER_TIMEOUT_S = 60.0
_PULL_TIMEOUT_S = 10.0
_MAX_PULLS = 64


class StaleCaller(RuntimeError):
    """The caller is a scheduler in whose place another one has come."""


class OffloadStoreActor:
    """Saves workers' KV blocks and writes them into other workers.

    An asyncio actor; whoever starts it decorates it, and allows more calls at once than there can
    be requests saving and loading.
    """

    def __init__(
        self,
        capacity_bytes: int,
        block_bytes: int,
        block_size: int,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        transfer_timeout_s: float = DEFAULT_TRANSFER_TIMEOUT_S,
    ) -> None:
        """Start empty; see `OffloadStore` for the other arguments.

        Args:
            transfer_timeout_s: longest wait for the next segment that a worker reads, and for each
                GiB (the last one may be smaller) that a worker writes.
        """
        self._data: dict[int, Any] = {}
        """ObjectRef to each segment's uint8 [rows, block_bytes], from `read_blocks` on."""
        self._block_bytes = block_bytes
        self._timeout_s = transfer_timeout_s
        self._epoch = 0
        self._incarnation = secrets.token_hex(8)
        self._pulls = ThreadPoolExecutor(_MAX_PULLS, thread_name_prefix="pull")
        self._store = OffloadStore(
            capacity_bytes,
            block_bytes,
            block_size,
            segment_bytes=segment_bytes,
            on_drop=lambda segment_id: self._data.pop(segment_id, None),
        )

    def __repr__(self) -> str:
        """Say who this is, in Ray's dashboard and logs."""
        return f"offload store of {self._store.stats.capacity_bytes / 2**30:.1f} GiB"

    async def serve(self, epoch: int) -> str:
        """Serve the scheduler of this epoch, and no earlier one.

        Returns:
            a name that no other process of this actor has: a store that was restarted has another.

        Raises:
            StaleCaller: a later one is served already.
        """
        self._check(epoch)
        self._epoch = epoch
        return self._incarnation

    async def lookup(
        self,
        epoch: int,
        request_id: str,
        block_hashes: list[bytes],
        num_readable_tokens: int,
        num_own_tokens: int,
        skip_reading_prefix_cache: bool,
    ) -> int:
        """Return how many leading tokens can be loaded; they stay so until `release`.

        See `OffloadStore.lookup`.

        Raises:
            StaleCaller: `epoch` is not that of the scheduler that is served.
        """
        self._check(epoch)
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
        epoch: int,
        block_hashes: list[bytes],
        block_ids: list[int],
        owned: bool,
        replace: bool,
        node_id: str = "",
    ) -> tuple[int, int]:
        """Copy a worker's blocks to the store, as far as they are not there and there is room.

        The worker must not change the blocks before this returns. A read that fails leaves its
        segment out, and one that takes too long leaves out the later ones also. Nothing is raised
        for it, whether the worker died, hangs or serves another epoch.

        Args:
            epoch: of the calling scheduler.
            block_hashes: full blocks of the request, in order.
            block_ids: where they are on the worker, one id per hash.
            owned: whether they are kept until the request is forgotten.
            replace: whether to copy also blocks whose stored bytes others saved.
            node_id: of the worker.

        Returns:
            how many leading blocks the store holds now, and how many were copied.

        Raises:
            ValueError: the two lists differ in length.
            StaleCaller: `epoch` is not that of the scheduler that is served.
        """
        self._check(epoch)
        _check_lengths(block_hashes, block_ids)
        plan = self._store.prepare_save(
            request_id, block_hashes, owned=owned, replace=replace, node_id=node_id
        )
        unended = {segment_id for segment_id, _ in plan.segments}
        try:
            await self._read(worker, epoch, block_ids, plan, unended)
        finally:
            for segment_id in unended:
                self._store.complete_save(segment_id, ok=False)
        copied = sum(len(indices) for segment, indices in plan.segments if segment not in unended)
        return self._store.num_saved_blocks(plan, unended), copied

    async def load(
        self,
        request_id: str,
        worker: Any,
        epoch: int,
        block_hashes: list[bytes],
        block_ids: list[int],
    ) -> int:
        """Write blocks that the latest lookup promised to the request into a worker's blocks.

        Args:
            epoch: of the calling scheduler.
            block_hashes: leading blocks of the request.
            block_ids: where on the worker to write them, one id per hash.

        Returns:
            how many leading blocks were written: fewer than asked for where the lookup promised
            fewer or data turned out to be lost.

        Raises:
            ValueError: the two lists differ in length.
            StaleCaller: `epoch` is not that of the scheduler that is served.
            TimeoutError: the worker takes too long, and may still write into the blocks.
            ray.exceptions.RayError: the worker died, serves another epoch or failed to write.
        """
        self._check(epoch)
        _check_lengths(block_hashes, block_ids)
        rows = self._store.segments_of(request_id, block_hashes)
        if not rows:
            return 0
        segment_ids = list(dict.fromkeys(row.segment_id for row in rows))
        position = {segment_id: index for index, segment_id in enumerate(segment_ids)}
        sources = [(position[row.segment_id], row.row) for row in rows]
        # Inside a list, references arrive at the worker as references.
        segments = [self._data[segment_id] for segment_id in segment_ids]
        write = worker.write_blocks.remote(epoch, block_ids[: len(rows)], segments, sources)
        timeout_s = self._timeout_s * (1 + len(rows) * self._block_bytes // 2**30)
        try:
            num_written: int = await asyncio.wait_for(write, timeout_s)
        except asyncio.TimeoutError:
            raise TimeoutError(
                f"{len(rows)} blocks of request {request_id} were not written in {timeout_s:g} s; "
                f"the worker may hang, or may write them yet"
            ) from None
        if num_written < len(rows):
            lost = rows[num_written].segment_id
            logger.warning("the data of segment %d is lost", lost)
            self._store.drop_segment(lost)
        return num_written

    async def release(self, request_id: str, forget: bool) -> None:
        """Drop the request's pins, and with `forget` all that is kept for it by name."""
        self._store.release(request_id, forget=forget)

    async def retain(self, request_ids: list[str]) -> None:
        """Drop all pins, and forget every request but these.

        For a scheduler that starts: no promise was made to it, and it knows no other request.
        """
        self._store.retain(request_ids)

    async def leave_node(self, node_id: str) -> None:
        """Drop what workers of a node saved and nobody counts on: none of them is there any more.

        The arrays lie there until they are dropped, and Ray takes a node for idle that has none.
        """
        self._store.leave(node_id)

    async def stats(self) -> dict[str, int]:
        """Return the fields of `OffloadStoreStats`."""
        return msgspec.structs.asdict(self._store.stats)

    async def ping(self) -> bool:
        """Return True: the actor is up and its event loop turns."""
        return True

    def _check(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleCaller(f"epoch {epoch} is over: the store serves {self._epoch}")

    async def _read(
        self, worker: Any, epoch: int, block_ids: list[int], plan: SavePlan, unended: set[int]
    ) -> None:
        """Have a plan's segments read, and complete the save of each that arrives.

        Args:
            unended: segments whose save has not ended; each that arrives is taken out.
        """
        reads = {}
        for segment_id, indices in plan.segments:
            reads[segment_id] = worker.read_blocks.remote(
                epoch, [block_ids[index] for index in indices]
            )
            self._data[segment_id] = reads[segment_id][0]
        for segment_id, (data, count) in reads.items():
            try:
                await asyncio.wait_for(count, self._timeout_s)
            except RayError as error:
                logger.warning("a save of request %s failed: %r", plan.request_id, error)
                # The array's reference has the same error; Ray complains of errors nobody sees.
                with contextlib.suppress(RayError):
                    await data
                continue
            except asyncio.TimeoutError:
                logger.warning("a save of request %s: the worker hangs", plan.request_id)
                return
            await self._bring_here(data)
            unended.discard(segment_id)
            self._store.complete_save(segment_id, ok=True)

    async def _bring_here(self, data: Any) -> None:
        """Have a copy of an array made on this node, if it can be done in time."""
        pull = partial(ray.wait, [data], timeout=_PULL_TIMEOUT_S, fetch_local=True)
        await asyncio.get_running_loop().run_in_executor(self._pulls, pull)


def _check_lengths(block_hashes: list[bytes], block_ids: list[int]) -> None:
    if len(block_hashes) != len(block_ids):
        raise ValueError(f"{len(block_hashes)} hashes were given for {len(block_ids)} blocks")
