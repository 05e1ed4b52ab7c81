"""Prompts for benchmarks: random tokens that never come twice, so that no cache helps by chance."""

from __future__ import annotations

import numpy as np

from bench.peers.protocol import Prompts


class Inputs:
    """A seeded source of prompts."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        """For what else is drawn at random."""
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> list[int]:
        """Return random token ids above the special ones."""
        drawn: list[int] = self.rng.integers(100, self._vocab_size, count).tolist()
        return drawn

    def unique(self, count: int, num_tokens: int) -> Prompts:
        """Return prompts with nothing in common."""
        return [self.tokens(num_tokens) for _ in range(count)]

    def shared(self, count: int, num_shared: int, num_own: int) -> Prompts:
        """Return prompts that start alike."""
        prefix = self.tokens(num_shared)
        return [prefix + self.tokens(num_own) for _ in range(count)]
