"""Whether and when a worker that died is replaced.

A death says something about the worker only where the worker never did any work: such replacements
are started at growing intervals, and after so many in a row no more. The module knows no worker,
no clock and no reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Death(Enum):
    """How a worker ended."""

    HAD_WORKED = "had worked"
    """It had finished a step, or had been ready for long with nothing to do."""
    IN_FIRST_STEP = "in its first step"
    FRUITLESS = "fruitless"
    """It never came up, or died soon after."""


@dataclass(frozen=True)
class RestartLimits:
    """How often and how soon a worker is replaced."""

    max_restarts: int = 5
    """Replacements in a row without one that worked; 0: nobody is replaced."""
    max_in_first_step: int = 7
    """Deaths in a first step that don't count as such. A request that ends its worker is found by
    halving its batch, which takes as many as the batch's size has binary digits."""
    first_delay_s: float = 1.0
    """Before the second replacement; the first one starts at once."""
    max_delay_s: float = 60.0
    proving_s: float = 60.0
    """A worker that is ready so long, and idle, counts as one that worked."""


@dataclass
class RestartPolicy:
    """Decides for one of the wanted workers whether and when its next replacement starts."""

    limits: RestartLimits
    num_restarts: int = 0
    """Replacements since the last worker that worked."""
    num_in_first_step: int = 0
    """Deaths in a first step since then."""

    def next_delay_s(self, death: Death) -> float | None:
        """Return how long to wait before the replacement starts, None where none is to start."""
        if self.limits.max_restarts == 0:
            return None
        if death is Death.HAD_WORKED:
            self.num_restarts = self.num_in_first_step = 0
        elif death is Death.IN_FIRST_STEP:
            self.num_in_first_step += 1
            if self.num_in_first_step <= self.limits.max_in_first_step:
                return 0.0
        if self.num_restarts >= self.limits.max_restarts:
            return None
        self.num_restarts += 1
        if self.num_restarts == 1:
            return 0.0
        growing_s: float = self.limits.first_delay_s * 2 ** (self.num_restarts - 2)
        return min(growing_s, self.limits.max_delay_s)
