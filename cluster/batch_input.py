"""Rows from files and streams, line by line, in bounded memory.

Rules:
- A row's index is the number of its line, from 0 on; blank lines are no rows.
- Lines end with LF or CRLF. A byte order mark at the beginning is no part of the first line.
- A line that is too long is a bad row; it is not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from cluster.batch_rows import Row, row_of_json, row_of_text
from scheduler.errors import InvalidRequest

InputFormat: TypeAlias = Literal["jsonl", "text"]
_FORMATS: dict[str, InputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
}
_MAX_LINE_BYTES = 64 * 2**20
_BOM = b"\xef\xbb\xbf"


class LineSet:
    """Numbers of lines: a bit for each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, number: int) -> bool:
        byte, bit = divmod(number, 8)
        return 0 <= byte < len(self._bits) and bool(self._bits[byte] >> bit & 1)

    def add(self, number: int) -> None:
        """Add a number >= 0 that is not there."""
        byte, bit = divmod(number, 8)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << bit
        self._len += 1

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers in ascending order."""
        return (n for n in range(8 * len(self._bits)) if n in self)


@dataclass
class InputFacts:
    """What a file is, as a whole."""

    rows: LineSet = field(default_factory=LineSet)
    """The lines that are rows."""
    num_bytes: int = 0
    digest: str = ""
    """BLAKE2b of the content, 16 bytes in hexadecimal."""


def format_of(path: Path) -> InputFormat:
    """Return the format that a file's name stands for.

    Raises:
        InvalidRequest: it stands for none.
    """
    found = _FORMATS.get(path.suffix.lower())
    if found is None:
        raise InvalidRequest(
            f"the name of {path} does not say what is in it: let it end in {', '.join(_FORMATS)}, "
            "or give the input format, jsonl or text",
            param="input_format",
        )
    return found


def measure(path: Path) -> InputFacts:
    """Read a file once.

    Raises:
        OSError: it can't be read.
    """
    facts = InputFacts()
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for index, line in enumerate(_lines(file, digest.update)):
            if line is None or line.strip():
                facts.rows.add(index)
        facts.num_bytes = file.tell()
    facts.digest = digest.hexdigest()
    return facts


def rows_of(stream: BinaryIO, input_format: InputFormat, done: LineSet) -> Iterator[Row]:
    """Yield the rows of a stream that are not done; what is wrong with one is its content."""
    row_of = row_of_json if input_format == "jsonl" else row_of_text
    for index, line in enumerate(_lines(stream)):
        if index in done:
            continue
        if line is None:
            limit = f"a line has less than {_MAX_LINE_BYTES} bytes"
            yield Row(index, InvalidRequest(f"the line is too long: {limit}", param="row"))
        elif line.strip():
            yield row_of(index, line)


def _lines(
    stream: BinaryIO, see: Callable[[bytes], object] = lambda piece: None
) -> Iterator[bytes | None]:
    """Yield the lines without their ends, None for one that is too long; show `see` all bytes."""
    is_first = True
    while piece := stream.readline(_MAX_LINE_BYTES):
        see(piece)
        is_too_long = False
        while len(piece) == _MAX_LINE_BYTES and not piece.endswith(b"\n"):
            is_too_long = True
            piece = stream.readline(_MAX_LINE_BYTES)
            see(piece)
        if is_first:
            piece = piece.removeprefix(_BOM)
            is_first = False
        yield None if is_too_long else piece.removesuffix(b"\n").removesuffix(b"\r")
