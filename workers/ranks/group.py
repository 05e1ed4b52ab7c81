"""The processes that compute one model together, as one of them sees them.

Each has a rank. Rank 0 decides and answers; the others do as it does. The module moves numbers
between them and knows nothing of what they mean. Rules:
- A sum is made by every rank from everybody's part, in the order of ranks and in fp32, so that its
  bits depend neither on how the parts travelled nor on who adds them up.
- Every rank makes the same calls in the same order. A rank that can't has to end its process: the
  others' calls then fail, or their processes are ended by whoever watches them.
- Parts travel by NCCL between GPUs; all else, and parts between CPUs, by gloo.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch

from scheduler.codec import IntArray

_TIMEOUT = timedelta(hours=1)
"""Of one call, so that none lasts for ever; a step's own deadline comes long before it."""


class Ranks:
    """A process's place among those that compute one model."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """Be one of `size`; unless that is 1, `join` has to follow before numbers mean anything."""
        self.rank = rank
        self.size = size
        self._store: Any = None
        self._messages: Any = None
        self._parts: Any = None

    def open(self, address: str) -> int:
        """Have others meet this process at `address`; return the port, which the system picks."""
        self._store = _distributed().TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def join(self, address: str, port: int, own_address: str, device: torch.device) -> None:
        """Return when all ranks have joined.

        Args:
            address: of rank 0, which has called `open`; `port` is what that returned.
            own_address: of this process, where the others reach it.
            device: whose numbers are to be summed.
        """
        distributed = _distributed()
        if self._store is None:
            self._store = distributed.TCPStore(address, port, is_master=False)
        messages = distributed.PrefixStore("messages", self._store)
        self._messages = self._parts = _gloo(messages, self.rank, self.size, own_address)
        if device.type == "cuda":
            self._parts = _nccl(distributed.PrefixStore("parts", self._store), self.rank, self.size)
        self.sum(torch.zeros(1, device=device))
        self.from_first(np.zeros(1, np.int32))

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's `part` in fp32; before `join` that is this one's own."""
        if self._parts is None:
            return part.float()
        parts = part.new_empty((self.size, part.numel()))
        options = _distributed().distributed_c10d.AllgatherOptions()
        self._parts._allgather_base(parts.view(-1), part.reshape(-1), options).wait()
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return total.view(part.shape)

    def from_first(self, values: IntArray) -> IntArray:
        """Return the values of rank 0, int32 [n], to a rank that gives as many of any kind."""
        if self.size == 1:
            return values
        sent = torch.from_numpy(np.array(values, np.int32))
        options = _distributed().distributed_c10d.BroadcastOptions()
        options.rootRank = 0
        self._messages.broadcast([sent], options).wait()
        received: IntArray = sent.numpy()
        return received


def _distributed() -> Any:
    """Return what torch has of this; a process that computes alone does without."""
    from torch import distributed

    return distributed


def _gloo(store: Any, rank: int, size: int, own_address: str) -> Any:
    """Return a gloo group whose sockets are bound to an address.

    Left to itself gloo binds to what the machine's name resolves to, which other machines may not
    reach.
    """
    kind = _distributed().ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=own_address)]
    options._timeout = _TIMEOUT
    return kind(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    kind = _distributed().ProcessGroupNCCL
    options = kind.Options()
    options._timeout = _TIMEOUT
    return kind(store, rank, size, options)
