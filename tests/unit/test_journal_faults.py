"""The journal when the process dies, the disk is full, or the file is not what it should be.

A process is killed, or its disk filled, in a process of its own: this file, run as a program.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import select
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler import journal_schema
from scheduler.actions import Record, RecordProgress
from scheduler.codec import int_array
from scheduler.errors import HaversackError, InvalidConfig
from scheduler.journal import Journal
from scheduler.logprobs import LogprobRows
from scheduler.request import Request
from tests.journals import (
    DEADLINE_S,
    advanced,
    finished,
    is_durable,
    new_request,
    same_bits,
    submitted,
    wait_until,
)

CLOCK = "clock"
"""A request that gets one token in every turn, so that a journal tells how many it holds."""
MAX_AHEAD = 4
"""Turns that a writer appends before the first of them is written."""


class Life:
    """A seeded course of many requests, turn by turn; a journal is to hold it up to some turn."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.num_turns = 0
        self.live: dict[str, Request] = {}
        self.results: dict[str, list[Request]] = {}
        """Ended requests of each submission."""
        self._num_families = 0

    def turn(self) -> list[Record]:
        """Go on by a turn and return what is appended at once."""
        rng = self._rng
        records: list[Record] = []
        if self.num_turns == 0:
            clock = new_request(CLOCK, prompt_token_ids=int_array([7]), max_tokens=10**6)
            records += self._submit([clock])
        if len(self.live) < 12:
            records += self._submit(self._new_family())
        for request in list(self.live.values()):
            is_clock = request.request_id == CLOCK
            if not is_clock and rng.random() < 0.05:
                self.live.pop(request.request_id)
                self.results[request.parent_id].append(request)
                records.append(finished(request))
            elif is_clock or (rng.random() < 0.8 and not self._is_done(request)):
                end = rng.randint(request.num_computed_tokens + 1, request.num_tokens)
                records.append(advanced(request, end))
        self.num_turns += 1
        return records

    def assert_held_by(self, journal: Journal) -> None:
        """Fail unless the journal holds exactly what there is after this turn."""
        by_arrival = sorted(self.live.values(), key=lambda request: request.arrival)
        same_bits(journal.load(), by_arrival)
        for parent_id, ended in self.results.items():
            if ended:
                ended.sort(key=lambda request: request.index)
                same_bits(journal.result(parent_id), ended)
            else:
                assert journal.result(parent_id) is None

    def _submit(self, family: list[Request]) -> list[Record]:
        self.results[family[0].parent_id] = []
        for request in family:
            request.arrival = len(self.live) + 100 * self.num_turns
            self.live[request.request_id] = request
        return [submitted(request) for request in family]

    def _new_family(self) -> list[Request]:
        """A submission, sometimes under the id of one that has ended."""
        rng = self._rng
        self._num_families += 1
        over = {name for name, ended in self.results.items() if ended}
        over -= {request.parent_id for request in self.live.values()}
        name = f"s{self._num_families}"
        if over and rng.random() < 0.3:
            name = rng.choice(sorted(over))
        n = rng.randint(1, 3)
        prompt = int_array(range(rng.choice([3, 40, 3000])))
        return [
            new_request(
                name if n == 1 else f"{name}#{index}",
                name,
                index=index,
                prompt_token_ids=prompt,
                prompt_logprobs=LogprobRows(2) if index == 0 else None,
            )
            for index in range(n)
        ]

    @staticmethod
    def _is_done(request: Request) -> bool:
        return not request.is_prefilling and len(request.output_token_ids) >= request.max_tokens


def check_prefix(path: Path, seed: int, num_durable: int) -> int:
    """Fail unless the file holds a life up to a turn not before `num_durable`; return which."""
    with closing(Journal(path, result_ttl_s=3600)) as journal:
        clocks = [request for request in journal.load() if request.request_id == CLOCK]
        num_turns = len(clocks[0].output_token_ids) if clocks else 0
        assert num_turns >= num_durable, "what was acknowledged is there"
        life = Life(seed)
        for _ in range(num_turns):
            life.turn()
        life.assert_held_by(journal)
    return num_turns


# ------------------------------------------------------------------------------------- deaths


def write_for_ever(path: str, seed: str) -> None:
    """Append turn after turn and print the number of every one that is durable."""
    journal = Journal(path, result_ttl_s=3600, min_interval_s=0)
    life = Life(int(seed))
    room = threading.Semaphore(MAX_AHEAD)
    while True:
        room.acquire()
        journal.append(life.turn())

        def tell(is_written: bool, number: int = life.num_turns) -> None:
            if is_written:
                os.write(1, f"{number}\n".encode())
                room.release()

        journal.when_durable(tell)


@contextmanager
def process(function: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a function of this file in a process of its own; kill it at the end."""
    command = [sys.executable, "-m", "tests.unit.test_journal_faults", function, *arguments]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def read_acknowledgement(child: subprocess.Popen[bytes]) -> int:
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], DEADLINE_S)
    assert ready, "the writer is silent"
    line = child.stdout.readline()
    assert line, "the writer has died by itself"
    return int(line)


def kill_a_writer(path: Path, seed: int, max_turns: int) -> tuple[int, int]:
    """Let a writer write, kill it at a random moment; return the turns (acknowledged, held)."""
    rng = random.Random(seed)
    with process("write_for_ever", str(path), str(seed)) as child:
        for _ in range(rng.randint(1, max_turns)):
            num_durable = read_acknowledgement(child)
        threading.Event().wait(rng.random() * 0.02)
        child.kill()
        assert child.stdout is not None
        rest = child.stdout.read().split()
        num_durable = int(rest[-1]) if rest else num_durable
        child.wait()
        return num_durable, check_prefix(path, seed, num_durable)


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_process_leaves_all_that_was_acknowledged_and_no_half_of_anything(
    tmp_path: Path, seed: int
) -> None:
    kill_a_writer(tmp_path / "journal.db", seed, max_turns=40)


@pytest.mark.slow
def test_no_moment_of_death_is_a_bad_one(tmp_path: Path) -> None:
    """Nor where the log is just being brought into the file, which is every few hundred turns."""
    found = [
        kill_a_writer(tmp_path / str(seed) / "journal.db", seed, max_turns=600)
        for seed in range(100, 140)
    ]
    assert len(set(found)) > 10, "the deaths are spread out"


def test_a_file_that_a_living_process_has_open_is_refused_until_that_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it opens at once: a restarted scheduler does not wait for anything."""
    monkeypatch.setattr(journal_schema, "_BUSY_TIMEOUT_S", 0.05)
    path = tmp_path / "journal.db"
    with process("write_for_ever", str(path), "3") as child:
        num_durable = read_acknowledgement(child)
        with pytest.raises(InvalidConfig, match="another process has it open"):
            Journal(path, result_ttl_s=3600)
        child.kill()
        child.wait()
        check_prefix(path, 3, num_durable)


@pytest.mark.parametrize("is_flipped", [False, True], ids=["cut", "flipped"])
def test_a_torn_log_leaves_a_prefix(tmp_path: Path, is_flipped: bool) -> None:
    """The write-ahead log after a power cut ends anywhere, or holds a page of garbage."""
    seed, source = 11, tmp_path / "source" / "journal.db"
    log = source.with_name("journal.db-wal")
    with closing(Journal(source, result_ttl_s=3600, min_interval_s=0)) as journal:
        life = Life(seed)
        for _ in range(12):
            journal.append(life.turn())
            assert is_durable(journal)
        data, written = source.read_bytes(), log.read_bytes()
    rng = random.Random(seed)
    held = set()
    for index in range(12):
        copy = tmp_path / str(index) / "journal.db"
        copy.parent.mkdir()
        copy.write_bytes(data)
        torn = bytearray(written)
        at = rng.randrange(len(torn) // 4, len(torn))
        if is_flipped:
            torn[at] ^= 1 << rng.randrange(8)
        else:
            del torn[at:]
        copy.with_name("journal.db-wal").write_bytes(torn)
        held.add(check_prefix(copy, seed, 0))
        shutil.rmtree(copy.parent)
    assert len(held) > 3, "the cuts are spread out"


# ----------------------------------------------------------------------------------- the disk


def fill_the_disk(path: str) -> None:
    """No file may grow for a while, as on a full disk; then there is room again."""
    errors: list[logging.LogRecord] = []
    logging.getLogger("scheduler.journal").addFilter(lambda record: not errors.append(record))
    journal = Journal(path, result_ttl_s=3600, max_queued_bytes=10**6, min_interval_s=0)
    log = Path(path + "-wal")
    written, going, short = new_request("written"), new_request("going"), new_request("short")
    journal.append([submitted(written), submitted(going), advanced(going, 4)])
    assert is_durable(journal)
    before = going.encode()

    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size, hard))
    journal.append([advanced(going, 6), submitted(short), finished(short), finished(written)])
    assert not is_durable(journal), "those who wait are told"
    assert not is_durable(journal), "at once, each time"
    stats = journal.stats()
    assert stats.last_error
    assert stats.num_failed_writes >= 1
    assert stats.num_queued_records == 4
    assert stats.lag_s > 0
    assert len(errors) == 1, errors
    same_bits(journal.result("short"), [short])
    same_bits(journal.result("written"), [written])
    assert [r.request_id for r in journal.load()] == ["written", "going"]
    assert going.encode() != before

    wait_until(lambda: journal.stats().num_failed_writes >= 3)
    for index in range(100):
        request = new_request(f"late-{index}", prompt_token_ids=int_array(range(10_000)))
        journal.append([submitted(request), finished(request)])
    journal.append([advanced(going, going.num_tokens)])
    assert not is_durable(journal)
    stats = journal.stats()
    assert stats.queued_bytes < 2.5 * 10**6, "results are given up rather than memory"
    assert stats.num_dropped_results > 60
    assert len(errors) == 1, "one report each time that it stops working"
    assert journal.result("late-0") is None
    assert journal.result("late-99") is not None

    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    wait_until(lambda: is_durable(journal))
    stats = journal.stats()
    assert stats.last_error is None
    assert stats.num_queued_records == 0
    assert journal.close()
    with closing(Journal(path, result_ttl_s=3600)) as journal:
        same_bits(journal.load(), [going])
        assert journal.result("written") is None, "given up, and not left to be computed again"
        assert journal.result("late-99") is not None


def test_a_full_disk_stops_nobody_and_loses_no_live_request(tmp_path: Path) -> None:
    with process("fill_the_disk", str(tmp_path / "journal.db")) as child:
        assert child.wait(DEADLINE_S) == 0


def test_a_batch_that_fails_half_way_leaves_nothing_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    sound, broken = new_request("sound"), new_request("broken")
    cannot_be_encoded: Any = object()
    with closing(Journal(path, result_ttl_s=60)) as journal:
        journal.append([submitted(sound)])
        assert is_durable(journal)
        record = advanced(broken, 6)
        bad = msgspec.structs.replace(record, sampled_token_id=cannot_be_encoded)
        journal.append([submitted(new_request("broken")), finished(sound), bad])
        assert not is_durable(journal)
        assert "can't encode" in str(journal.stats().last_error)
        assert not journal.close()
    with closing(Journal(path, result_ttl_s=60)) as journal:
        same_bits(journal.load(), [new_request("sound")])


def test_a_slow_disk_merges_what_waits(tmp_path: Path) -> None:
    """A thousand tokens that wait together are one write and come back as they were."""
    request = new_request(max_tokens=2000)
    with closing(Journal(tmp_path / "j", result_ttl_s=60, min_interval_s=3600)) as journal:
        journal.append([submitted(request)])
        assert is_durable(journal)
        before = journal.stats()
        for _ in range(1000):
            journal.append([advanced(request, request.num_tokens)])
        assert is_durable(journal)
        assert journal.stats().num_commits == before.num_commits + 1
        same_bits(journal.load(), [request])


# ------------------------------------------------------------------------------- unusable files


def test_folders_are_made_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with closing(Journal("~/a/b/journal.db", result_ttl_s=60)):
        assert (tmp_path / "a" / "b" / "journal.db").is_file()


def make_folder(path: Path) -> None:
    path.mkdir()


def make_garbage(path: Path) -> None:
    path.write_bytes(random.Random(5).randbytes(20_000))


def make_other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE precious (data)")


def make_other_format(path: Path) -> None:
    Journal(path, result_ttl_s=60).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 7")


def make_without_tables(path: Path) -> None:
    Journal(path, result_ttl_s=60).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE requests")


def make_with_a_row_that_only_an_index_names(path: Path) -> None:
    with closing(Journal(path, result_ttl_s=60)) as journal:
        journal.append([submitted(new_request(name, parent="both")) for name in ("a", "b")])
    index = "FROM sqlite_master WHERE name = 'requests_of'"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA writable_schema = ON")
        rows = db.execute("SELECT * " + index).fetchall()
        db.execute("DELETE " + index)
        db.commit()
    with closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM requests WHERE request_id = 'b'")
        db.commit()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.executemany("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", rows)
        db.commit()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (make_folder, "not a file"),
        (make_garbage, "not a SQLite file"),
        (make_other_database, "another program's"),
        (make_other_format, "format 7 and this engine writes format 1"),
        (make_without_tables, "damaged"),
        (make_with_a_row_that_only_an_index_names, "damaged"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_left_alone(
    tmp_path: Path, make: object, says: str
) -> None:
    assert callable(make)
    path = tmp_path / "journal.db"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    for _ in range(2):
        with pytest.raises(InvalidConfig, match=says) as raised:
            Journal(path, result_ttl_s=60)
        assert str(path) in raised.value.message
        assert raised.value.details["path"] == str(path)
    if before is not None and says != "damaged":
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    "path",
    ["{}/file/journal.db", "/proc/nowhere/journal.db", "/dev/full", "~nobody-here/j", "a\0b"],
)
def test_a_path_that_cannot_be_used_says_so(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match="give"):
        Journal(path.format(tmp_path), result_ttl_s=60)


def test_an_empty_file_becomes_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.touch()
    with closing(Journal(path, result_ttl_s=60)) as journal:
        assert journal.load() == []


def test_requests_of_another_model_are_not_gone_on_with(tmp_path: Path) -> None:
    """Half of the rows would be of the one model and half of the other."""
    path = tmp_path / "journal.db"
    request = new_request()
    for _ in range(2):
        with closing(Journal(path, result_ttl_s=60)) as journal:
            journal.claim("model-a")
            journal.append([submitted(request)])
    with closing(Journal(path, result_ttl_s=60)) as journal:
        with pytest.raises(InvalidConfig, match=r"model-a.*model-b.*another path"):
            journal.claim("model-b")
        same_bits(journal.load(), [request])


def test_a_log_of_garbage_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    request = new_request()
    with closing(Journal(path, result_ttl_s=60)) as journal:
        journal.append([submitted(request)])
    path.with_name("journal.db-wal").write_bytes(random.Random(5).randbytes(50_000))
    with closing(Journal(path, result_ttl_s=60)) as journal:
        same_bits(journal.load(), [request])


def test_any_damage_to_the_file_is_a_typed_error_or_none(tmp_path: Path) -> None:
    """Pages of garbage anywhere in the file never raise anything that nobody expects."""
    seed, source = 12, tmp_path / "source.db"
    with closing(Journal(source, result_ttl_s=3600)) as journal:
        life = Life(seed)
        for _ in range(30):
            journal.append(life.turn())
    sound = source.read_bytes()
    rng = random.Random(seed)
    outcomes = set()
    for index in range(14):
        path = tmp_path / f"{index}.db"
        data = bytearray(sound)
        start = rng.randrange(100, len(data))
        length = rng.choice([1, 16, 4096])
        data[start : start + length] = rng.randbytes(len(data[start : start + length]))
        path.write_bytes(data)
        try:
            with closing(Journal(path, result_ttl_s=3600)) as journal:
                journal.load()
                for parent_id in life.results:
                    journal.result(parent_id)
                journal.append([submitted(new_request("new"))])
                is_durable(journal)
            outcomes.add("went on")
        except HaversackError as error:
            outcomes.add(type(error).__name__)
    assert len(outcomes) > 1, "the damage is felt"


def test_progress_is_told_from_the_record_alone() -> None:
    """What the journal keeps of a chunk is all that a request takes from it."""
    assert set(RecordProgress.__struct_fields__) == {
        "request_id",
        "num_computed_tokens",
        "rows",
        "sampled_token_id",
        "sampled_logprobs",
    }


if __name__ == "__main__":
    {"write_for_ever": write_for_ever, "fill_the_disk": fill_the_disk}[sys.argv[1]](*sys.argv[2:])
