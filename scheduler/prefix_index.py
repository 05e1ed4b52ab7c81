"""Which workers' prefix caches can find a block of a given hash.

Each worker's `BlockPool` enters what becomes findable there and takes out what no longer is, so
the index is right after every change. It knows names and hashes, no request: what a worker can
supply to one is for its pool to say.
"""

from __future__ import annotations

from collections.abc import Collection


class PrefixIndex:
    """Hash of a full block -> names of the workers that can find it."""

    def __init__(self) -> None:
        self._holders: dict[bytes, str | dict[str, None]] = {}
        """One name where there is one holder, as for most blocks; else names in order of entry."""

    def __len__(self) -> int:
        """Different hashes that are findable somewhere."""
        return len(self._holders)

    def add(self, block_hash: bytes, name: str) -> None:
        """Enter a block that has become findable on a worker."""
        known = self._holders.setdefault(block_hash, name)
        if isinstance(known, dict):
            known[name] = None
        elif known != name:
            self._holders[block_hash] = {known: None, name: None}

    def remove(self, block_hash: bytes, name: str) -> None:
        """Take out a block that its worker can no longer find."""
        known = self._holders[block_hash]
        if isinstance(known, dict):
            del known[name]
            if len(known) == 1:
                self._holders[block_hash] = next(iter(known))
        else:
            del self._holders[block_hash]

    def holders(self, block_hash: bytes) -> Collection[str]:
        """Names of the workers that can find the block."""
        known = self._holders.get(block_hash)
        if known is None:
            return ()
        return known.keys() if isinstance(known, dict) else (known,)
