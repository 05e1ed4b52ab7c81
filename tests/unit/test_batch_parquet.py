"""Results as Parquet parts: whole or not there, and gone on with where the last whole one ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import intake as intake_module
from cluster.batches import Batch, BatchOptions, BatchProgress, BatchWatcher
from cluster.scoring import ScoringParams
from scheduler.errors import MissingPackage, OutputConflict
from tests.scoring_engine import Engine, ScoringClient, scoring_client
from tests.tiny_models import byte_tokenizer

NUM_ROWS, ROWS_PER_PART = 23, 5
OPTIONS = BatchOptions(params=ScoringParams(logprobs=2), rows_per_part=ROWS_PER_PART)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScoringClient]:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(intake_module, "load_tokenizer", lambda name: byte_tokenizer())
    with scoring_client(Engine()) as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows: list[Any] = [{"prompt": [3, 1 + i % 5, i], "id": i} for i in range(NUM_ROWS)]
    rows[3] = {"text": "abc", "id": "letters"}
    rows[7] = {"prompt": []}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "scores.parquet"


class Stop(BaseException):
    """The process ends here."""


class StopAt(BatchWatcher):
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def advanced(self, progress: BatchProgress) -> None:
        if progress.num_done == self.num_rows:
            raise Stop


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def without_nulls(value: Any) -> Any:
    """What JSON lines would have: there a field that is not there is left out."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def test_parts_hold_what_lines_hold(client: ScoringClient, source: Path, out: Path) -> None:
    from pyarrow import parquet

    progress = Batch(source, out, OPTIONS).run(client)
    assert (progress.num_done, progress.finished.num_failed) == (NUM_ROWS, 1)
    assert sorted(content(out)) == [f"part-{n:05d}.parquet" for n in range(5)]
    lines = out.with_name("scores.jsonl")
    Batch(source, lines, OPTIONS).run(client)
    expected = [json.loads(line) for line in lines.read_text().splitlines()]
    for record in expected:
        if "id" in record:
            record["id"] = str(record["id"])
    parts = [parquet.read_table(out / name) for name in sorted(content(out))]
    assert [part.num_rows for part in parts] == [5, 5, 5, 5, 3]
    assert [without_nulls(row) for part in parts for row in part.to_pylist()] == expected
    whole = parquet.read_table(out)
    assert whole.num_rows == NUM_ROWS


@pytest.mark.parametrize("ordered", [True, False])
def test_a_run_that_ends_after_any_row_is_gone_on_with(
    client: ScoringClient, source: Path, out: Path, ordered: bool
) -> None:
    options = replace(OPTIONS, ordered=ordered)
    undisturbed = out.with_name("undisturbed.parquet")
    Batch(source, undisturbed, options).run(client)
    for num_rows in (1, 4, 5, 6, 9, 10, 20, 22):
        with pytest.raises(Stop):
            Batch(source, out, replace(options, restart=True)).run(client, StopAt(num_rows))
        (out / "part-00099.parquet.unfinished").write_bytes(b"PAR1 and no more")
        progress = Batch(source, out, options).run(client)
        assert progress.num_resumed == num_rows // ROWS_PER_PART * ROWS_PER_PART
        assert progress.num_done == NUM_ROWS
        assert not ordered or content(out) == content(undisturbed)
        assert Batch(source, out, options).run(client).num_resumed == NUM_ROWS


def test_what_somebody_changed_is_refused_and_left_alone(
    client: ScoringClient, source: Path, out: Path
) -> None:
    Batch(source, out, OPTIONS).run(client)
    (out / "part-00001.parquet").rename(out / "part-00007.parquet")
    before = content(out)
    with pytest.raises(OutputConflict, match="part-00001"):
        Batch(source, out, OPTIONS).run(client)
    (out / "part-00007.parquet").rename(out / "part-00001.parquet")
    (out / "part-00000.parquet").write_bytes(before["part-00002.parquet"])
    with pytest.raises(OutputConflict, match="out of its turn"):
        Batch(source, out, OPTIONS).run(client)
    (out / "part-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(OutputConflict, match="no whole Parquet file"):
        Batch(source, out, OPTIONS).run(client)
    with pytest.raises(OutputConflict, match="rows_per_part is 6 and was 5"):
        Batch(source, out, replace(OPTIONS, rows_per_part=6)).run(client)
    Batch(source, out, replace(OPTIONS, restart=True)).run(client)
    (out / "notes").write_text("mine")
    for restart in (True, False):
        with pytest.raises(OutputConflict):
            Batch(source, out, replace(OPTIONS, restart=restart)).run(client)
        assert (out / "notes").read_text() == "mine"
        assert len(content(out)) == 6


def test_only_one_run_at_a_time_writes_a_folder(
    client: ScoringClient, source: Path, out: Path
) -> None:
    class Other(BatchWatcher):
        def advanced(self, progress: BatchProgress) -> None:
            with pytest.raises(OutputConflict, match="another process"):
                Batch(source, out, OPTIONS).run(client)

    Batch(source, out, OPTIONS).run(client, Other())
    assert len(content(out)) == 5


def test_without_pyarrow_it_is_said_how_to_get_it(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match=r"haversack\[parquet\]"):
        Batch(source, out, OPTIONS)
    assert not out.exists()
