"""A prompt's logprob rows as they come in, a part at a time."""

from __future__ import annotations

import numpy as np

from scheduler.errors import InvariantViolation
from scheduler.logprobs import Logprobs


class PromptRows:
    """Rows that are seen when all of them are there; they are in memory once."""

    def __init__(self, num_rows: int) -> None:
        """Wait for so many rows."""
        self.whole: Logprobs | None = None
        """All of them; None until the last has come."""
        self._num_rows = num_rows
        self._num_known = 0
        self._room: Logprobs | None = None

    def take(self, part: Logprobs, num_previous: int) -> None:
        """Take in the rows that follow the first `num_previous` ones; known ones are ignored.

        Raises:
            InvariantViolation: rows between them and those known are missing, or there are more
                than there should be; nothing has changed then.
        """
        end = num_previous + part.num_rows
        if num_previous > self._num_known or end > self._num_rows:
            raise InvariantViolation(
                f"the engine sent the rows {num_previous} to {end} of a prompt that has "
                f"{self._num_rows}, after the first {self._num_known}: report this"
            )
        if self.whole is not None or (end <= self._num_known and end < self._num_rows):
            return
        if part.num_rows == self._num_rows:
            self.whole = part
            return
        if self._room is None:
            shape = (self._num_rows, part.width)
            self._room = Logprobs(
                np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(shape, np.int32)
            )
        for room, new in (
            (self._room.token_ids, part.token_ids),
            (self._room.logprobs, part.logprobs),
            (self._room.ranks, part.ranks),
        ):
            room[num_previous:end] = new
        self._num_known = end
        if end == self._num_rows:
            self.whole = self._room
