"""How long, and how often, to go on trying to reach a scheduler that does not answer.

Pauses grow and are jittered, so that the clients of an engine that restarts do not come all at
once. The module knows no Ray and no clock of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from scheduler.errors import EngineUnavailable, Overloaded

UNREACHABLE_S = 60.0
"""How long a scheduler may be out of reach before it counts as gone, beside the time that it may
need to bring its engine up again."""
GONE_S = 10.0
"""How long there may be no actor of the scheduler's name before it counts as gone."""
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0


class Unreachable(Exception):
    """A call was not answered: it may or may not have been carried out."""

    def __init__(self, reason: str, *, is_absent: bool = False) -> None:
        """Take note.

        Args:
            is_absent: no actor has the scheduler's name any more.
        """
        super().__init__(reason)
        self.is_absent = is_absent


class NotConnected(Unreachable):
    """The scheduler does not know this client."""


class Patience:
    """How long, and how often, to go on trying."""

    def __init__(self, clock: Callable[[], float], unreachable_s: float = UNREACHABLE_S) -> None:
        """Begin.

        Args:
            clock: seconds that only grow.
            unreachable_s: how long to go on.
        """
        self._clock = clock
        self.unreachable_s = unreachable_s
        self._since_s: float | None = None
        self._absent_since_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def answered(self) -> None:
        """Begin anew: the scheduler is there."""
        self._since_s = self._absent_since_s = None
        self._pause_s = _FIRST_PAUSE_S

    def pause_after(self, failure: Unreachable) -> float:
        """Return seconds to wait before the next try.

        Raises:
            EngineUnavailable: it has been tried for long enough.
        """
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        if not failure.is_absent:
            self._absent_since_s = None
        elif self._absent_since_s is None:
            self._absent_since_s = now_s
        if self._absent_since_s is not None and now_s - self._absent_since_s >= GONE_S:
            raise EngineUnavailable(f"the engine is gone: {failure}")
        if now_s - self._since_s >= self.unreachable_s:
            raise EngineUnavailable(
                f"the engine did not answer for {now_s - self._since_s:.0f} s: {failure}"
            )
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        return pause_s


def pause_before_retry(refusal: Overloaded) -> float:
    """Return the seconds to wait, jittered, before what was refused is submitted again."""
    asked = refusal.details.get("retry_after_s")
    asked_s = float(asked) if isinstance(asked, (int, float)) else 1.0
    return max(asked_s, _FIRST_PAUSE_S) * random.uniform(0.5, 1.0)
