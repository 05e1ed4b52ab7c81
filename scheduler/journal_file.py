"""Batches into the journal's SQLite file, one transaction each, and requests out of it again.

Rules:
- A batch is written whole or not at all, so what a crash of the process leaves is whole batches, up
  to one of them. After a power cut the last ones can be missing, since a commit does not wait for
  the disk.
- What is kept in memory (the index of live requests, the counts) changes only after a commit.
- A submission stays as long as one of its requests is live; then it is a result, whole.
One thread at a time may use a `JournalFile`. It knows no queue, no thread and no clock.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler.codec import encode
from scheduler.errors import InvalidConfig
from scheduler.journal_queue import Batch, UnwrittenFamily
from scheduler.journal_records import StoredRequest
from scheduler.journal_schema import open_database, unusable

_SEQ_BITS = 24
"""A part's key is its request's key and, in so many bits, a running number."""
_DELETE_BATCH = 64
_DELETE_BATCH_BYTES = 16 * 2**20
"""Results to delete in one transaction, at least one."""
_VACUUM_PAGES = 1024
"""Free pages to give back to the file system at a time."""


@dataclass(slots=True)
class _LiveRow:
    """Where a live request is in the file."""

    key: int
    next_seq: int = 0


@dataclass(slots=True)
class _Family:
    """A submission in the file of which a request is live."""

    key: int
    num_bytes: int = 0
    """Of all that the file holds of it."""
    live: dict[str, _LiveRow] = field(default_factory=dict)
    """By request id."""

    def copy(self) -> _Family:
        live = {name: _LiveRow(row.key, row.next_seq) for name, row in self.live.items()}
        return _Family(self.key, self.num_bytes, live)


@dataclass(slots=True)
class _Changes:
    """What a transaction changes in memory, once it is committed."""

    families: dict[str, _Family | None] = field(default_factory=dict)
    """None where no request is live any more."""
    num_results: int = 0
    result_bytes: int = 0
    written_bytes: int = 0


class JournalFile:
    """An open journal, with an index of what is live and the size of what is kept."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, and its folders.

        Raises:
            InvalidConfig: it can't be used; the text says why and what to do.
        """
        self._path = path
        self._families: dict[str, _Family] = {}
        self.num_results = 0
        """Submissions of which every request has ended, and that are kept."""
        self.result_bytes = 0
        self.written_bytes = 0
        """Since the file was opened; so is `num_commits`."""
        self.num_commits = 0
        self.file_bytes = 0
        """Size of the main file, free pages included, once the log is brought into it."""
        self._db = open_database(path)
        try:
            self._read_index()
            self._measure()
        except sqlite3.Error as error:
            self._db.close()
            raise self.damaged(error) from error

    def close(self) -> None:
        """Bring everything into the main file and let go of it."""
        self._db.close()

    def damaged(self, error: Exception) -> InvalidConfig:
        """Return what to raise where the file's own structure is broken."""
        return unusable(self._path, f"it is damaged ({error}): move it away to start with none")

    def claim(self, model_fingerprint: str) -> None:
        """See `Journal.claim`."""
        found = self._db.execute("SELECT model_fingerprint FROM owner").fetchone()
        if found is None:
            self._db.execute("INSERT INTO owner VALUES (?)", (model_fingerprint,))
        elif found[0] != model_fingerprint:
            raise unusable(
                self._path,
                f"it keeps requests of another model, dtype or kind of machine ({found[0]}; this "
                f"engine computes {model_fingerprint}): give another path, or move it away",
            )

    def live_ids(self) -> list[tuple[str, str]]:
        """Return (request id, submission id) of every live request."""
        return [(name, parent) for parent, family in self._families.items() for name in family.live]

    def write(self, batch: Batch) -> None:
        """Write a batch: all of it, or nothing where this raises."""
        with self._transaction() as changes:
            for parent_id, unwritten in batch.items():
                if unwritten.replaces:
                    self._delete(parent_id, changes)
                if unwritten.requests:
                    self._add_requests(parent_id, unwritten, changes)
            self._db.executemany(
                "INSERT INTO parts (key, data) VALUES (?, ?)", self._parts(batch, changes)
            )
            for parent_id, unwritten in batch.items():
                self._end_requests(parent_id, unwritten, changes)

    def read(self, parent_id: str) -> tuple[list[StoredRequest], float | None]:
        """Return a submission's requests, and when the last one ended (None while one lives)."""
        found = self._find(parent_id)
        if found is None:
            return [], None
        key, _, finished_s = found
        return [self._read_request(key) for key in self._request_keys(key)], finished_s

    def read_live(self, request_id: str, parent_id: str) -> StoredRequest:
        """Return one of `live_ids`."""
        return self._read_request(self._families[parent_id].live[request_id].key)

    def drop_live(self, request_id: str, parent_id: str, now_s: float) -> None:
        """Delete a live request whose records make no sense. Its siblings stay."""
        with self._transaction() as changes:
            family = self._changing(parent_id, changes)
            row = family.live.pop(request_id)
            family.num_bytes -= self._num_bytes(row.key)
            self._delete_request(row.key)
            if not self._request_keys(family.key):
                self._db.execute("DELETE FROM submissions WHERE key = ?", (family.key,))
                changes.families[parent_id] = None
            elif not family.live:
                self._end_family(parent_id, family, now_s, changes)

    def delete_results(self, ended_by_s: float, max_bytes: int) -> bool:
        """Delete some of the results that are too old, or too much, the oldest first.

        Returns:
            Whether there is more to do.
        """
        oldest = self._db.execute(
            "SELECT parent_id, finished_s, num_bytes FROM submissions "
            "WHERE finished_s IS NOT NULL ORDER BY finished_s LIMIT ?",
            (_DELETE_BATCH,),
        ).fetchall()
        excess = self.result_bytes - max_bytes
        doomed: list[str] = []
        doomed_bytes = 0
        for parent_id, finished_s, num_bytes in oldest:
            is_due = finished_s <= ended_by_s or doomed_bytes < excess
            if not is_due or doomed_bytes > _DELETE_BATCH_BYTES:
                break
            doomed_bytes += num_bytes
            doomed.append(parent_id)
        if doomed:
            with self._transaction() as changes:
                for parent_id in doomed:
                    self._delete(parent_id, changes)
        return self._give_back_space() or bool(doomed)

    # ------------------------------------------------------------------------------ writing

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[_Changes]:
        changes = _Changes()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield changes
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        for parent_id, family in changes.families.items():
            if family is None:
                self._families.pop(parent_id, None)
            else:
                self._families[parent_id] = family
        self.num_results += changes.num_results
        self.result_bytes += changes.result_bytes
        self.written_bytes += changes.written_bytes
        self.num_commits += 1
        self._measure()

    def _changing(self, parent_id: str, changes: _Changes) -> _Family:
        """Return the transaction's own copy of a submission that has live requests."""
        family = changes.families.get(parent_id)
        if family is None:
            family = changes.families[parent_id] = self._families[parent_id].copy()
        return family

    def _add_requests(self, parent_id: str, unwritten: UnwrittenFamily, changes: _Changes) -> None:
        if unwritten.replaces:
            key = self._insert("INSERT INTO submissions (parent_id) VALUES (?)", parent_id)
            changes.families[parent_id] = _Family(key)
        for request_id, request in unwritten.requests.items():
            if request.submitted is not None:
                family = self._changing(parent_id, changes)
                sql = "INSERT INTO requests (submission_key, request_id) VALUES (?, ?)"
                family.live[request_id] = _LiveRow(self._insert(sql, family.key, request_id))

    def _parts(self, batch: Batch, changes: _Changes) -> Iterator[tuple[int, bytes]]:
        """Yield (key, data) of all parts of a batch, encoding one at a time."""
        for parent_id, unwritten in batch.items():
            for request_id, request in unwritten.requests.items():
                if request.submitted is None and not request.progress:
                    continue
                family = self._changing(parent_id, changes)
                row = family.live[request_id]
                for data in request.parts():
                    family.num_bytes += len(data)
                    changes.written_bytes += len(data)
                    yield row.key << _SEQ_BITS | row.next_seq, data
                    row.next_seq += 1

    def _end_requests(self, parent_id: str, unwritten: UnwrittenFamily, changes: _Changes) -> None:
        finished_s = 0.0
        for request_id, request in unwritten.requests.items():
            if request.finished is None:
                continue
            family = self._changing(parent_id, changes)
            data = encode(request.finished)
            key = family.live.pop(request_id).key
            self._db.execute("UPDATE requests SET finished = ? WHERE key = ?", (data, key))
            family.num_bytes += len(data)
            changes.written_bytes += len(data)
            finished_s = max(finished_s, request.finished_s)
            if not family.live:
                self._end_family(parent_id, family, finished_s, changes)

    def _insert(self, sql: str, *values: str | int) -> int:
        """Insert a row and return its key."""
        return int(self._db.execute(sql, values).lastrowid or 0)

    def _end_family(
        self, parent_id: str, family: _Family, finished_s: float, changes: _Changes
    ) -> None:
        self._db.execute(
            "UPDATE submissions SET finished_s = ?, num_bytes = ? WHERE key = ?",
            (finished_s, family.num_bytes, family.key),
        )
        changes.families[parent_id] = None
        changes.num_results += 1
        changes.result_bytes += family.num_bytes

    def _delete(self, parent_id: str, changes: _Changes) -> None:
        """Delete all that the file has under a submission's id."""
        found = self._find(parent_id)
        if found is None:
            return
        key, num_bytes, finished_s = found
        for request_key in self._request_keys(key):
            self._delete_request(request_key)
        self._db.execute("DELETE FROM submissions WHERE key = ?", (key,))
        if finished_s is None:
            changes.families[parent_id] = None
        else:
            changes.num_results -= 1
            changes.result_bytes -= num_bytes

    def _delete_request(self, key: int) -> None:
        self._db.execute("DELETE FROM parts WHERE key BETWEEN ? AND ?", _part_keys(key))
        self._db.execute("DELETE FROM requests WHERE key = ?", (key,))

    def _give_back_space(self) -> bool:
        """Shrink the file a little where much of it is free; return whether much still is."""
        (num_free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        (num_pages,) = self._db.execute("PRAGMA page_count").fetchone()
        if num_free <= max(2 * _VACUUM_PAGES, num_pages // 4):
            return False
        self._db.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
        self._measure()
        return True

    def _measure(self) -> None:
        (num_pages,) = self._db.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = self._db.execute("PRAGMA page_size").fetchone()
        self.file_bytes = num_pages * page_bytes

    # ------------------------------------------------------------------------------ reading

    def _find(self, parent_id: str) -> tuple[int, int, float | None] | None:
        """Return (key, num_bytes, finished_s) of a submission."""
        found: tuple[int, int, float | None] | None = self._db.execute(
            "SELECT key, num_bytes, finished_s FROM submissions WHERE parent_id = ?", (parent_id,)
        ).fetchone()
        return found

    def _request_keys(self, submission_key: int) -> list[int]:
        keys = self._db.execute(
            "SELECT key FROM requests WHERE submission_key = ? ORDER BY key", (submission_key,)
        )
        return [key for (key,) in keys]

    def _read_request(self, key: int) -> StoredRequest:
        request_id, finished = self._row_of(key, "request_id, finished")
        parts = self._db.execute(
            "SELECT data FROM parts WHERE key BETWEEN ? AND ? ORDER BY key", _part_keys(key)
        )
        return StoredRequest(request_id, [data for (data,) in parts], finished)

    def _row_of(self, key: int, columns: str) -> Any:
        """Return what the file holds of a request that another table says is there."""
        found = self._db.execute(f"SELECT {columns} FROM requests WHERE key = ?", (key,)).fetchone()
        if found is None:
            raise sqlite3.DatabaseError("the file is damaged: its index names what is not in it")
        return found

    def _num_bytes(self, key: int) -> int:
        """Return the size of what the file holds of a request."""
        (end,) = self._row_of(key, "coalesce(length(finished), 0)")
        (parts,) = self._db.execute(
            "SELECT sum(length(data)) FROM parts WHERE key BETWEEN ? AND ?", _part_keys(key)
        ).fetchone()
        return int(end) + int(parts or 0)

    def _read_index(self) -> None:
        """Take note of what is live and how much is kept."""
        live = self._db.execute(
            "SELECT parent_id, s.key, r.key, request_id "
            "FROM requests r JOIN submissions s ON s.key = submission_key WHERE finished IS NULL"
        ).fetchall()
        for parent_id, family_key, key, request_id in live:
            family = self._families.get(parent_id)
            if family is None:
                family = self._families[parent_id] = _Family(family_key)
                family.num_bytes = sum(map(self._num_bytes, self._request_keys(family_key)))
            (last,) = self._db.execute(
                "SELECT max(key) FROM parts WHERE key BETWEEN ? AND ?", _part_keys(key)
            ).fetchone()
            next_seq = 0 if last is None else last % (1 << _SEQ_BITS) + 1
            family.live[request_id] = _LiveRow(key, next_seq)
        self.num_results, size = self._db.execute(
            "SELECT count(*), sum(num_bytes) FROM submissions WHERE finished_s IS NOT NULL"
        ).fetchone()
        self.result_bytes = size or 0


def _part_keys(key: int) -> tuple[int, int]:
    """Return the first and the last key that a part of a request can have."""
    return key << _SEQ_BITS, (key + 1 << _SEQ_BITS) - 1
