"""How a process of a worker is to load a model and make room for its KV.

torch is imported where it is used: this module is also imported by every process that is handed a
worker's handle, and those compute nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from scheduler.errors import InvalidConfig

if TYPE_CHECKING:
    from workers.loader import LoadedModel
    from workers.ranks.group import Ranks

logger = logging.getLogger(__name__)


class CacheSize(TypedDict):
    """Keyword arguments of a `ModelRunner`."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True)
class RunnerSettings:
    """What all processes of a worker have in common; see `workers.actor.WorkerActor`."""

    model_name: str
    device: str
    dtype: str
    num_blocks: int | None
    kv_bytes: int | None
    block_size: int
    num_threads: int | None

    def __str__(self) -> str:
        return f"{self.model_name} on {self.device}"

    def use_threads(self) -> None:
        """Have the calling thread compute with as many threads as it is to."""
        import torch

        if self.num_threads is not None and torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)

    def load_model(self, who: str, ranks: Ranks) -> LoadedModel:
        """Load the share of one rank; the log says what takes long, and for whom."""
        from workers.loader import load_model

        return load_model(
            self.model_name,
            device=self.device,
            dtype=self.dtype,
            ranks=ranks,
            progress=lambda text: logger.info("%s: %s", who, text),
        )

    def cache_size(self, model: LoadedModel) -> CacheSize:
        """Return how many blocks to have, the same at every rank.

        Raises:
            InvalidConfig: none are asked for, or no block fits.
        """
        from workers.kv_cache import KVCache

        num_blocks = self.num_blocks
        if num_blocks is None:
            if self.kv_bytes is None:
                raise InvalidConfig("a worker needs num_blocks or kv_bytes", param="num_blocks")
            share = self.kv_bytes // model.ranks.size
            num_blocks = KVCache.blocks_in(share, model.layers, self.block_size, model.dtype)
        return {"num_blocks": num_blocks, "block_size": self.block_size}
