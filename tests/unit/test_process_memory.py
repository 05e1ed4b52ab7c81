"""Memory that is given back: whose pages go, and that no byte is lost."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest

from workers.process_memory import give_back_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PAGES = 64
SIZE = PAGES * mmap.PAGESIZE


def resident_kb(path: Path) -> int:
    """What this process has in memory of a mapped file."""
    total, is_own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-", line):
            is_own = line.endswith(str(path))
        elif is_own and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.weights"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path


def test_pages_of_a_file_go_and_come_back_when_looked_at(file: Path) -> None:
    with file.open("rb") as opened:
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    before = pages[:]
    assert resident_kb(file) == SIZE // 1024
    give_back_pages(".weights")
    assert resident_kb(file) == 0
    assert pages[:] == before


def test_other_files_stay(file: Path) -> None:
    with file.open("rb") as opened:
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    assert len(pages[:]) == SIZE
    give_back_pages(".safetensors")
    assert resident_kb(file) == SIZE // 1024


def test_what_was_written_to_a_private_copy_is_kept(file: Path) -> None:
    with file.open("rb") as opened:
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    pages[5 * mmap.PAGESIZE] = 77
    before = pages[:]
    give_back_pages(".weights")
    assert pages[:] == before
