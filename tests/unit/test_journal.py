"""The journal gives back what it was given, bit for bit; what is odd in it harms nobody else.

Results are in `test_journal_results`, crashes and full disks in `test_journal_faults`.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
import tempfile
import typing
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import journal as journal_module
from scheduler.actions import Record, RecordProgress
from scheduler.codec import int_array
from scheduler.errors import EngineUnavailable, RequestFailed, WireError
from scheduler.journal import Journal
from scheduler.logprobs import LogprobRows, Logprobs
from scheduler.request import FinishReason, Request, RequestStats, RequestStatus
from scheduler.sampling_params import SamplingParams
from tests.journals import (
    advanced,
    finished,
    is_durable,
    new_request,
    same_bits,
    submitted,
    wait_until,
)
from tests.strategies import ROW_LOGPROBS as K
from tests.strategies import logprobs, of_type


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with closing(Journal(path, result_ttl_s=60)) as journal:
        yield journal


# -------------------------------------------------------------------------------- round trips


@st.composite
def requests_at_their_start(draw: st.DrawFn, name: str) -> Request:
    """Any fields whatever, but for what the rest of a life needs to fit together."""
    hints = typing.get_type_hints(Request)
    params = draw(of_type(SamplingParams))
    fixed = {
        "request_id": name,
        "prompt_token_ids": int_array(range(1, draw(st.integers(1, 6)) + 1)),
        "sampling_params": params,
        "max_tokens": draw(st.integers(0, 5)),
        "status": RequestStatus.WAITING,
        "num_computed_tokens": 0,
        "prompt_logprobs": None if params.prompt_logprobs is None else LogprobRows(K),
        "output_token_ids": [],
        "output_logprobs": None if params.logprobs is None else LogprobRows(K),
        "finish_reason": None,
    }
    others = {f: draw(of_type(hints[f])) for f in Request.__struct_fields__ if f not in fixed}
    return Request(**fixed, **others)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[list[Record]], list[Request]]:
    """Records of two requests, cut into appends, and the requests at the end."""
    names = draw(st.lists(of_type(str), min_size=2, max_size=2, unique=True))
    requests = [draw(requests_at_their_start(name)) for name in names]
    requests[1].parent_id = requests[0].parent_id
    records: list[Record] = []
    for request in requests:
        request.status = draw(st.sampled_from([RequestStatus.WAITING, RequestStatus.RUNNING]))
        records.append(submitted(request))
        request.status = RequestStatus.WAITING
    for _ in range(draw(st.integers(0, 12))):
        request = draw(st.sampled_from(requests))
        if request.is_prefilling or len(request.output_token_ids) < request.max_tokens:
            start = request.num_computed_tokens
            records.append(advanced(request, draw(st.integers(start + 1, request.num_tokens))))
    for request in requests:
        if draw(st.booleans()):
            ends = (FinishReason, int | None, WireError | None, RequestStats)
            records.append(finished(request, *(draw(of_type(each)) for each in ends)))
    cuts = sorted(draw(st.sets(st.integers(2, max(len(records) - 1, 2)))))
    bounds = itertools.pairwise([0, *cuts, len(records)])
    return [records[a:b] for a, b in bounds], requests


@settings(max_examples=15)
@given(histories(), st.data())
def test_every_field_of_every_request_comes_back_bit_for_bit(
    history: tuple[list[list[Record]], list[Request]], data: st.DataObject
) -> None:
    """However the records are cut into appends and writes, and over any number of restarts."""
    appends, requests = history
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        journal = Journal(path, result_ttl_s=60)
        for records in appends:
            journal.append(records)
            if data.draw(st.booleans()):
                assert is_durable(journal)
            if data.draw(st.booleans()):
                assert journal.close()
                journal = Journal(path, result_ttl_s=60)
        ended = [r for r in requests if r.status is RequestStatus.FINISHED]
        ended.sort(key=lambda request: request.index)
        before = journal.result(requests[0].parent_id)
        assert journal.close()
        with closing(Journal(path, result_ttl_s=60)) as journal:
            after = journal.result(requests[0].parent_id)
            live = [r for r in requests if r.status is not RequestStatus.FINISHED]
            same_bits(journal.load(), sorted(live, key=lambda request: request.arrival))
        for found in (before, after):
            if ended:
                same_bits(found, ended)
            else:
                assert found is None


def test_rows_of_a_long_prompt_come_back_whatever_their_size(path: Path) -> None:
    """Chunks of many sizes, one of them larger than a part of the journal may be."""
    n, k = 20_001, 20
    request = new_request(
        prompt_token_ids=int_array(range(n)), prompt_logprobs=LogprobRows(k), output_logprobs=None
    )
    records: list[Record] = [submitted(request)]
    start = 0
    for end in (1, 700, 701, 15_000, 15_400, 20_000):
        rows = logprobs(end - start, k, first=start)
        request.advance(end, rows)
        records.append(
            RecordProgress(
                request_id="r",
                num_computed_tokens=end,
                rows=rows,
                sampled_token_id=None,
                sampled_logprobs=None,
            )
        )
        start = end
    with closing(Journal(path, result_ttl_s=60)) as journal:
        journal.append(records)
    with closing(sqlite3.connect(path)) as db:
        (largest,) = db.execute("SELECT max(length(data)) FROM parts").fetchone()
    assert largest < 2 * 2**20, "SQLite limits the size of a value"
    with closing(Journal(path, result_ttl_s=60)) as journal:
        same_bits(journal.load(), [request])


def test_progress_continues_across_a_restart_without_a_gap(path: Path) -> None:
    """The second life of a request writes behind the first, and not over it."""
    request = new_request()
    with closing(Journal(path, result_ttl_s=60)) as journal:
        journal.append([submitted(request), advanced(request, 6)])
    with closing(Journal(path, result_ttl_s=60)) as journal:
        (restored,) = journal.load()
        for _ in range(3):
            journal.append([advanced(restored, restored.num_tokens)])
            assert is_durable(journal)
    with closing(Journal(path, result_ttl_s=60)) as journal:
        same_bits(journal.load(), [restored])


def test_requests_come_back_in_the_order_of_their_arrival(path: Path) -> None:
    with closing(Journal(path, result_ttl_s=60)) as journal:
        for name, arrival in (("b", 11), ("c", 2), ("a", 10)):
            journal.append([submitted(new_request(name, arrival=arrival))])
            assert is_durable(journal)
        assert [request.request_id for request in journal.load()] == ["c", "a", "b"]


# -------------------------------------------------------------------- damage, and what is odd


def edited(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM parts WHERE key % 16777216 = 1 AND key < 33554432",
        "DELETE FROM parts WHERE key < 33554432",
        "UPDATE parts SET data = x'00' WHERE key < 33554432",
        "UPDATE parts SET data = 'text' WHERE key < 33554432",
        "UPDATE requests SET request_id = 'other' WHERE key = 1",
    ],
)
def test_a_request_whose_records_make_no_sense_keeps_nobody_from_starting(
    path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """It is named in the log, goes for good, and its id can be used again."""
    bad, good = new_request("bad"), new_request("good")
    with closing(Journal(path, result_ttl_s=60)) as journal:
        journal.append([submitted(bad), submitted(good)])
        assert is_durable(journal)
        for _ in range(2):
            journal.append([advanced(each, max(6, each.num_tokens)) for each in (bad, good)])
            assert is_durable(journal)
    edited(path, damage)
    with caplog.at_level(logging.ERROR), closing(Journal(path, result_ttl_s=60)) as journal:
        same_bits(journal.load(), [good])
        assert journal.stats().num_live == 1
    assert "makes no sense" in caplog.text
    again = new_request("bad", seed=5)
    with closing(Journal(path, result_ttl_s=60)) as journal:
        same_bits(journal.load(), [good])
        journal.append([submitted(again), finished(again)])
        assert is_durable(journal)
        same_bits(journal.result("bad"), [again])


def test_the_siblings_of_a_damaged_request_stay(path: Path) -> None:
    family = [new_request(f"f#{index}", "f", index=index) for index in range(2)]
    with closing(Journal(path, result_ttl_s=60)) as journal:
        journal.append([*map(submitted, family), finished(family[1])])
    edited(path, "UPDATE parts SET data = x'00' WHERE key < 33554432")
    with closing(Journal(path, result_ttl_s=60)) as journal:
        assert journal.load() == []
        same_bits(journal.result("f"), [family[1]])
        assert (journal.stats().num_live, journal.stats().num_results) == (0, 1)


def test_a_damaged_result_is_a_typed_error(path: Path) -> None:
    request = new_request()
    with closing(Journal(path, result_ttl_s=60)) as journal:
        journal.append([submitted(request), finished(request)])
    edited(path, "UPDATE parts SET data = x'00'")
    damaged = Journal(path, result_ttl_s=60)
    with closing(damaged) as journal, pytest.raises(RequestFailed, match="can't be read"):
        journal.result("r")


def test_rows_that_lie_apart_in_memory_are_written_as_they_read(path: Path) -> None:
    wide = logprobs(5, 2 * K + 1)
    rows = Logprobs(wide.token_ids[:, ::2], wide.logprobs[:, ::2], wide.ranks[:, ::2])
    request = new_request(output_logprobs=None)
    record = submitted(request)
    request.advance(6, rows, 3)
    progress = RecordProgress(
        request_id="r", num_computed_tokens=6, rows=rows, sampled_token_id=3, sampled_logprobs=None
    )
    with closing(Journal(path, result_ttl_s=60)) as journal:
        journal.append([record, progress])
        assert is_durable(journal)
        same_bits(journal.load(), [request])


def test_who_waits_for_the_disk_does_not_wait_for_the_next_round(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission is acknowledged as fast as the disk is, however rarely progress is written."""
    monkeypatch.setattr(journal_module, "_HOUSEKEEPING_S", 3600)
    with closing(Journal(path, result_ttl_s=60, min_interval_s=3600)) as journal:
        for index in range(3):
            journal.append([submitted(new_request(str(index)))])
            assert is_durable(journal)
        assert len(journal.load()) == 3


def test_records_about_requests_that_are_not_live_change_nothing(journal: Journal) -> None:
    request = new_request()
    journal.append([submitted(request), finished(request)])
    before = request.encode()
    stranger = new_request("stranger")
    late = RecordProgress(
        request_id="r",
        num_computed_tokens=1,
        rows=None,
        sampled_token_id=9,
        sampled_logprobs=None,
    )
    journal.append([late, finished(request), advanced(stranger, 3), finished(stranger)])
    assert is_durable(journal)
    found = journal.result("r")
    assert found is not None
    assert found[0].encode() == before
    assert journal.result("stranger") is None


def test_a_closed_journal_answers_at_once(path: Path) -> None:
    journal = Journal(path, result_ttl_s=60)
    request = new_request()
    journal.append([submitted(request)])
    assert journal.close()
    assert journal.close()
    assert not is_durable(journal)
    journal.append([finished(request)])
    for call in (journal.load, lambda: journal.result("r")):
        with pytest.raises(EngineUnavailable, match="closed"):
            call()
    with closing(Journal(path, result_ttl_s=60)) as journal:
        same_bits(journal.load(), [new_request()])


def test_a_callback_that_raises_keeps_the_journal_going(journal: Journal) -> None:
    def fail(_: bool) -> None:
        raise ValueError("the callback's own fault")

    journal.when_durable(fail)
    journal.append([submitted(new_request())])
    assert is_durable(journal)


def test_the_counters_say_what_waits_and_what_is_written(path: Path) -> None:
    request = new_request()
    with closing(Journal(path, result_ttl_s=60, min_interval_s=3600)) as journal:
        journal.append([submitted(request)])
        assert is_durable(journal)
        empty = journal.stats()
        assert (empty.num_queued_records, empty.queued_bytes, empty.lag_s) == (0, 0, 0.0)
        journal.append([advanced(request, 6)])
        waiting = journal.stats()
        assert waiting.num_queued_records == 1
        assert waiting.queued_bytes > 5 * 3 * 4 * (K + 1)
        wait_until(lambda: journal.stats().lag_s > waiting.lag_s >= 0)
        assert is_durable(journal)
        written = journal.stats()
        assert written.num_queued_records == 0
        assert written.num_commits > empty.num_commits
        assert written.written_bytes - empty.written_bytes > 5 * 3 * 4 * (K + 1)
        assert (written.num_live, written.num_results) == (1, 0)
        assert written.last_error is None
        assert msgspec.to_builtins(written)["num_live"] == 1
