"""Model runners that compute together, each on its share of the model and of the KV.

The first rank's is the worker's: it has every other one do what it does, in the same order. Those
take in and compute the same batches, and are told what the first one finds out with the output
layer: which token each chunk brought, or that it failed. So they stay alike without logits, rows or
sampling. Rules:
- A method returns when all ranks have done it, so that what follows finds nothing half done.
- Ranks that are no longer alike are of no use: what fails at one of them ends the whole worker.
  Chunks that can't be computed, and data that is no block's, are refused by all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch

from scheduler.codec import encode, int_array
from scheduler.errors import NumericalError, RequestFailed
from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from workers.kv_cache import ByteArray
from workers.loader import LoadedModel
from workers.model_runner import ModelRunner, Work
from workers.ranks.shards import BlockShards

_NO_TOKEN = -1
_SPOILT = -2
"""A chunk met NaN or infinity; what it wrote is wiped."""
_FAILED = -3
"""A chunk's request failed in another way."""


class Followers(Protocol):
    """The runners of all ranks but the first."""

    def call(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Have each of them run a method; return what waits for their answers."""
        ...

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Do the same with arguments for each."""
        ...

    def give_up(self, error: Exception) -> NoReturn:
        """End the worker: its ranks are no longer alike."""
        ...


class LeadingRunner(ModelRunner):
    """The runner of rank 0, which is the worker's; its blocks are whole ones."""

    def __init__(
        self, model: LoadedModel, followers: Followers, *, num_blocks: int, block_size: int = 16
    ) -> None:
        super().__init__(model, num_blocks=num_blocks, block_size=block_size)
        self._followers = followers
        self._shards = BlockShards(
            layers=self._cache.layers,
            block_size=block_size,
            itemsize=model.dtype.itemsize,
            is_heads_first=self._cache.is_heads_first,
            size=model.ranks.size,
        )

    def forget_all(self) -> None:
        """See `ModelRunner.forget_all`."""
        with self._together():
            done = self._followers.call("forget_all")
            super().forget_all()
            done()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """See `ModelRunner.execute`; what fails here fails the worker."""
        with self._together():
            done = self._followers.call("execute", encode(step))
            output = super().execute(step)
            done()
            return output

    def read_blocks(self, block_ids: Sequence[int]) -> ByteArray:
        """Return the bytes of whole blocks; see `KVCache.read_blocks`."""
        with self._together():
            others = self._followers.call("read_blocks", list(block_ids))
            own = super().read_blocks(block_ids)
            return self._shards.merge([own, *others()])

    def write_blocks(self, block_ids: Sequence[int], data: ByteArray) -> None:
        """Store whole blocks; see `KVCache.write_blocks`."""
        own, *others = self._shards.split(data)
        with self._together():
            calls = [(list(block_ids), share) for share in others]
            done = self._followers.call_each("write_blocks", calls)
            super().write_blocks(block_ids, own)
            done()

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._followers.give_up(error)

    def _finish(self, works: list[Work], hidden: torch.Tensor) -> None:
        super()._finish(works, hidden)
        self._model.ranks.from_first(int_array([_outcome(work) for work in works]))


class FollowingRunner(ModelRunner):
    """The runner of any other rank."""

    def _finish(self, works: list[Work], hidden: torch.Tensor) -> None:
        unknown = int_array([_NO_TOKEN] * len(works))
        for work, found in zip(works, self._model.ranks.from_first(unknown), strict=True):
            if found == _SPOILT:
                self._fail(work, "its hidden states or logits")
            elif found == _FAILED:
                work.error = RequestFailed("it failed at the first rank")
            elif found != _NO_TOKEN:
                work.sampled_token_id = int(found)
                work.tracked.take(int(found))


def _outcome(work: Work) -> int:
    """Return what the other ranks have to know of a chunk."""
    if isinstance(work.error, NumericalError):
        return _SPOILT
    if work.error is not None:
        return _FAILED
    return _NO_TOKEN if work.sampled_token_id is None else work.sampled_token_id
