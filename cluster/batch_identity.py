"""OUT.progress: what an output is of, so that only the same batch goes on with it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cluster.scoring import ScoringParams


class BatchIdentity(msgspec.Struct, frozen=True):
    """All that decides what an output holds."""

    input_digest: str
    input_bytes: int
    input_format: str
    model: str
    model_fingerprint: str
    """Of the weights, and of the arithmetic that they are computed with."""
    params: ScoringParams
    echo_tokens: bool
    ordered: bool
    rows_per_part: int | None
    """None where there are no parts."""
    version: int = 1
    """Of this form and of the output's."""

    def differences(self, known: BatchIdentity) -> list[str]:
        """Return what is other here than in `known`, in words."""
        own = msgspec.to_builtins(self)
        own |= own.pop("params")
        other = msgspec.to_builtins(known)
        other |= other.pop("params")
        return [
            f"{name} is {_short(value)} and was {_short(other[name])}"
            for name, value in own.items()
            if value != other[name]
        ]

    def write(self, path: Path) -> None:
        """Put this in a file, at once or not at all; it is on the disk when this returns.

        Raises:
            OSError: it can't be written.
        """
        unfinished = path.with_name(path.name + ".unfinished")
        with unfinished.open("wb") as file:
            file.write(msgspec.json.encode(self) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @classmethod
    def read(cls, path: Path) -> BatchIdentity | None:
        """Return what a file holds; None where it is not there, or is no such file.

        Raises:
            OSError: it can't be read.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:20]}...{text[-20:]}"
