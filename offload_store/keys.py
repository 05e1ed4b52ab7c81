"""Names for KV blocks: a chained hash of everything that the KV of a block depends on.

A block's hash covers its tokens, every token before them, the namespace (which model computed it)
and the cache salt (who may share it), so blocks with equal hashes are interchangeable. Hashes are
plain blake2b: the same in every process and every run. The module knows no request and no block id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

BlockHash = NewType("BlockHash", bytes)
"""16 bytes of blake2b."""

TokenSource: TypeAlias = Callable[[int, int], npt.NDArray[np.int32]]
"""Gives the tokens at positions [start, end), int32 [end - start]."""

_HASH_BYTES = 16
_ABSENT = b"\x00"
_PRESENT = b"\x01"


def root_hash(namespace: str, cache_salt: str | None) -> BlockHash:
    """Return the parent of a request's first block.

    Every field is written with its presence and its length, so no value of one field can look like
    another, whatever characters it holds; an empty salt is a salt, and None is not.
    """
    fields = (_tagged(namespace), _tagged(cache_salt))
    return _digest(b"haversack-root", *fields)


def next_hash(parent: BlockHash, token_ids: bytes | bytearray | memoryview) -> BlockHash:
    """Return the hash of a full block.

    Args:
        parent: the hash of the block before it, or the root.
        token_ids: the block's tokens, int32 little-endian.
    """
    return _digest(b"haversack-block", parent, token_ids)


def _tagged(field: str | None) -> bytes:
    if field is None:
        return _ABSENT
    # JSON can carry lone surrogates, which strict UTF-8 refuses to write.
    data = field.encode("utf-8", "surrogatepass")
    return _PRESENT + len(data).to_bytes(8, "little") + data


def _digest(purpose: bytes, *parts: bytes | bytearray | memoryview) -> BlockHash:
    digest = hashlib.blake2b(digest_size=_HASH_BYTES, person=purpose)
    for part in parts:
        digest.update(part)
    return BlockHash(digest.digest())


class HashChain:
    """The hashes of one request's full blocks, computed once each as the request grows.

    Tokens that have been hashed must not change; a request only ever appends tokens.
    """

    def __init__(self, namespace: str, cache_salt: str | None, block_size: int) -> None:
        """Start an empty chain.

        Args:
            block_size: tokens per block, >= 1.
        """
        if block_size < 1:
            raise ValueError(f"block_size={block_size} is not allowed: give an integer >= 1")
        self._block_size = block_size
        self._last = root_hash(namespace, cache_salt)
        self._hashes: list[BlockHash] = []

    def __len__(self) -> int:
        """Blocks hashed so far."""
        return len(self._hashes)

    def extend(self, num_tokens: int, token_ids: TokenSource) -> None:
        """Hash the full blocks among the first `num_tokens` tokens that are not hashed yet.

        Asks `token_ids` for the new blocks' tokens only, in one call, and for nothing where no
        block has become full.

        Raises:
            TypeError: the tokens are not int32.
            ValueError: there are more or fewer of them than asked for.
        """
        start = len(self._hashes) * self._block_size
        end = num_tokens // self._block_size * self._block_size
        if end <= start:
            return
        tokens = token_ids(start, end).astype("<i4", order="C", casting="equiv", copy=False)
        if tokens.shape != (end - start,):
            raise ValueError(f"tokens [{start}, {end}) were given in shape {tokens.shape}")
        data = tokens.tobytes()
        block_bytes = self._block_size * tokens.itemsize
        for offset in range(0, len(data), block_bytes):
            self._last = next_hash(self._last, data[offset : offset + block_bytes])
            self._hashes.append(self._last)

    def hashes(self, num_tokens: int, token_ids: TokenSource) -> list[BlockHash]:
        """Return the hashes of the full blocks among the first `num_tokens` tokens.

        Extends the chain where it is too short; raises what `extend` raises.
        """
        self.extend(num_tokens, token_ids)
        return self._hashes[: num_tokens // self._block_size]
