"""What an endpoint is told when it is deployed: which engine it serves, under which rules.

API keys come in as digests, so nothing that is stored or shown about an endpoint holds a key. The
module knows no web framework and no Ray.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.config import EngineConfig
from scheduler.errors import InvalidConfig

MAX_PORT = 65535


def key_digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    """Return what an endpoint needs in order to recognise these API keys.

    Raises:
        InvalidConfig: one of them is empty or can't stand in a header.
    """
    digests = []
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidConfig(
                "an API key is not allowed: give visible ASCII characters, at least one",
                field="api_key",
            )
        digests.append(digest(key))
    return tuple(digests)


def digest(key: str) -> bytes:
    """Return 32 bytes that stand for a key."""
    return hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True)
class Limits:
    """What one HTTP request may ask for, beside what the engine itself allows."""

    max_body_bytes: int = 32 * 2**20
    """Larger bodies are refused with 413."""
    max_prompts: int = 1024
    """Prompts of a completion, continuations of a score."""
    max_n: int = 128
    """Choices per prompt."""
    max_logprobs: int = 100
    """Alternatives per token; -1 is what the engine allows."""
    max_logprob_entries: int = 10_000_000
    """Logprobs in one answer: tokens times the alternatives of each, itself included. An answer is
    held in memory as a whole, at some 100 bytes for each of them."""

    def __post_init__(self) -> None:
        lowest = {"max_logprobs": -1}
        for name in self.__dataclass_fields__:
            value, low = getattr(self, name), lowest.get(name, 1)
            if type(value) is not int or value < low:
                raise InvalidConfig(
                    f"{name}={value!r} is not allowed: give a whole number >= {low}", field=name
                )


@dataclass(frozen=True)
class ApiSettings:
    """One endpoint of one engine."""

    engine: EngineConfig
    """All settings of the running engine, name and namespace included."""
    served_names: tuple[str, ...]
    """What `model` in a request may be; the first is what answers say."""
    key_digests: tuple[bytes, ...] = ()
    """Of the keys that are let in (see `key_digests`); none lets everybody in."""
    limits: Limits = Limits()
