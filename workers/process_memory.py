"""Memory that this process holds and does not need, given back to the system.

Loading a model frees as much as it keeps, and a worker's allocator is told to hold on to what is
freed, since the steps take it again and again. What no step takes would stay for good. On another
system than Linux nothing is done.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s+(/.*)$")
_ANONYMOUS = re.compile(r"^Anonymous:\s+(\d+) kB$")


def give_back_free() -> None:
    """Give back what the allocator holds free, where it is glibc's."""
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def give_back_pages(suffix: str) -> None:
    """Give back pages of files that can be read again.

    Args:
        suffix: of the names of the files. Their mappings stay valid; a page comes back when it is
            next looked at.
    """
    if sys.platform != "linux":
        return
    for start, end in _unchanged_mappings(suffix):
        size = ctypes.c_size_t(end - start)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, ctypes.c_int(mmap.MADV_DONTNEED))


def _unchanged_mappings(suffix: str) -> Iterator[tuple[int, int]]:
    """Yield where files with such a name are mapped as they are on disk."""
    where: tuple[int, int] | None = None
    for line in _MAPS.read_text().splitlines():
        if mapping := _MAPPING.match(line):
            is_asked = mapping[3].endswith(suffix)
            where = (int(mapping[1], 16), int(mapping[2], 16)) if is_asked else None
        elif where and (anonymous := _ANONYMOUS.match(line)):
            # A page that was written to is this process's own, and would be lost.
            if int(anonymous[1]) == 0:
                yield where
            where = None
