"""Opening the journal's SQLite file: its tables, its settings, and why it can't be used.

    submissions   one row per submission; once all its requests have ended, when, and its size
    requests      one row per request, with the `RecordFinished` that ended it
    parts         the encoded `Request` as it was submitted, then its encoded `Progress`

Large values are in `parts` alone, which are written once: a result is nothing but the submission,
its progress and its end. The file is held in SQLite's exclusive mode, and the kernel lets go of it
however the process ends. No other code of that process may open it: POSIX drops a process's locks
on a file with any close of it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import stat
from pathlib import Path

from scheduler.errors import InvalidConfig

FORMAT = 1
"""Of the tables and of what is encoded in them; kept in the file as `user_version`."""
_APPLICATION_ID = 0x48565259
"""Tells a journal from any other SQLite file."""
_BUSY_TIMEOUT_S = 2.0
"""How long to wait for a process that is still dying to let go of the file."""
_SCHEMA = (
    """CREATE TABLE submissions (
        key INTEGER PRIMARY KEY,
        parent_id TEXT NOT NULL UNIQUE,
        num_bytes INTEGER,
        finished_s REAL
    )""",
    "CREATE INDEX results ON submissions (finished_s, num_bytes) WHERE finished_s IS NOT NULL",
    """CREATE TABLE requests (
        key INTEGER PRIMARY KEY,
        submission_key INTEGER NOT NULL,
        request_id TEXT NOT NULL,
        finished BLOB
    )""",
    "CREATE INDEX requests_of ON requests (submission_key)",
    "CREATE INDEX live ON requests (submission_key) WHERE finished IS NULL",
    "CREATE TABLE parts (key INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE owner (model_fingerprint TEXT NOT NULL)",
    f"PRAGMA application_id = {_APPLICATION_ID}",
)
_SETTINGS = (
    "PRAGMA synchronous = NORMAL",
    "PRAGMA secure_delete = OFF",
    "PRAGMA wal_autocheckpoint = 4096",
    "PRAGMA journal_size_limit = 16777216",
    "PRAGMA cache_size = -8192",
)


def open_database(path: Path) -> sqlite3.Connection:
    """Open or create a journal's file, and its folders; it is locked for others then.

    Raises:
        InvalidConfig: it can't be used; the text says why and what to do.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.stat().st_mode):
                raise unusable(path, "it is not a file: give the path of a file")
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = f"it can't be created ({error}): give a path in a folder that this user can write to"
        raise unusable(path, why) from error
    with contextlib.ExitStack() as on_error:
        try:
            db = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            on_error.callback(db.close)
            _prepare(db, path)
        except sqlite3.Error as error:
            raise unusable(path, _explanation(str(error))) from error
        on_error.pop_all()
    return db


def unusable(path: Path, why: str) -> InvalidConfig:
    """Return the error that says so; `why` also tells what to do."""
    return InvalidConfig(f"the journal {str(path)!r} can't be used: {why}", path=str(path))


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Lock the file, check whose it is, make the tables where it is new, and write to it."""
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (num_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    is_new = not (application_id or version or num_tables)
    if not is_new and application_id != _APPLICATION_ID:
        raise unusable(path, "it is another program's SQLite file: give another path")
    if not is_new and version != FORMAT:
        raise unusable(
            path,
            f"it has format {version} and this engine writes format {FORMAT}: let the engine that "
            "made it finish its requests, or give another path",
        )
    if is_new:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise unusable(path, "its file system can't hold a write-ahead log: give a local path")
    for setting in _SETTINGS:
        db.execute(setting).fetchall()
    db.execute("BEGIN IMMEDIATE")
    if is_new:
        for statement in _SCHEMA:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {FORMAT}")
    db.execute("COMMIT")


def _explanation(error: str) -> str:
    """Return what an error of SQLite's means for who gave the path, and what to do."""
    if "locked" in error:
        return (
            "another process has it open: stop the engine that runs on it, or give every engine "
            "a journal of its own"
        )
    if "not a database" in error:
        return "it is not a SQLite file: give another path, or move it away"
    if "readonly" in error or "unable to open" in error:
        return f"it can't be written ({error}): give a path where this user can write"
    if "full" in error:
        return f"there is no room ({error}): free some, or give a path on another disk"
    return f"it is damaged, or its disk is ({error}): move it away, or give another path"
