"""The report of a batch: each row is there as it was scored, and the page stays openable."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import intake as intake_module
from cluster import report as report_module
from cluster import scorer as scorer_module
from cluster.batches import Batch, BatchOptions, BatchProgress
from cluster.block_use import BlockUse
from cluster.report import Report, row_view
from cluster.scoring import Score, ScoringParams
from scheduler.errors import EngineUnavailable, OutputConflict, RequestTooLarge
from scheduler.life import Span, SpanKind
from scheduler.logprobs import Logprobs
from scheduler.messages import WorkerReport
from scheduler.outputs import SampleLogprobsView
from tests.lives import NASTY, report_of
from tests.scoring_engine import Engine, ScoringClient, scoring_client
from tests.tiny_models import byte_tokenizer
from tests.unit.test_pictures import Elements

TOO_LARGE = 77
ROWS: list[dict[str, Any]] = [
    {"prompt": "abc", "id": NASTY},
    {"context": "ab ", "continuation": "c"},
    {"text": "a text that takes several windows"},
    {"prompt": [3, TOO_LARGE]},
    {"prompt": "a"},
    {"prompt": NASTY},
]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScoringClient]:
    monkeypatch.setattr(intake_module, "load_tokenizer", lambda name: byte_tokenizer())
    monkeypatch.setattr(scorer_module, "_MIN_WINDOW", 8)
    engine = Engine()
    engine.refused_tokens[TOO_LARGE] = RequestTooLarge(f"too large: {NASTY}", limit=7)
    with scoring_client(engine) as made:
        yield made


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def report_at(path: Path, client: ScoringClient, **more: Any) -> Report:
    return Report(
        path,
        source=NASTY,
        output="scores.jsonl",
        model="tiny",
        decode=client.token_text(),
        num_logprobs=2,
        **more,
    )


def scored(
    folder: Path, client: ScoringClient, rows: list[dict[str, Any]], **changes: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Score rows and return the sum and the rows that the report holds."""
    options = BatchOptions(params=ScoringParams(logprobs=2), **changes)
    report = report_at(folder / "report.html", client)
    progress = Batch(write_rows(folder, rows), folder / "scores.jsonl", options).run(client, report)
    report.finish(progress)
    assert sorted(path.name for path in folder.glob("report*")) == ["report.html"]
    return read(folder / "report.html")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    scripts = Elements(path.read_text()).named("script")
    assert "type" not in scripts[-1][0], "the page's own script is the only one that runs"
    rows = []
    for attributes, text in scripts[:-1]:
        assert attributes["type"] == "application/json"
        if attributes.get("class") == "row-data":
            row = json.loads(text)
            head = json.loads(str(attributes["data-head"]))
            assert head == [row["index"], row["id"], row["logprob"], row["num"]]
            rows.append(row)
    [total] = [json.loads(text) for attributes, text in scripts if attributes.get("id") == "sum"]
    return total, rows


def test_each_row_is_there_as_it_is_in_the_output(tmp_path: Path, client: ScoringClient) -> None:
    total, rows = scored(tmp_path, client, ROWS)
    written = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_bytes().splitlines()]
    assert (total["num_rows"], total["num_failed"], total["source"]) == (6, 1, NASTY)
    for row, record in zip(rows, written, strict=True):
        assert (row["index"], row["id"]) == (record["index"], record.get("id"))
        if "error" in record:
            assert row["error"] == record["error"]
            continue
        assert row["logprob"] == record["logprob"]
        assert row["ids"] == record["token_ids"]
        assert row["texts"] == record["tokens"]
        assert row["logprobs"] == record["token_logprobs"]
        assert row["ranks"] == record["token_ranks"]
        tops = [top and [list(each.values()) for each in top] for top in record["top_logprobs"]]
        assert row["tops"] == tops
    as_bytes = NASTY.replace("\u2028", "\ufffd" * 3)
    assert "".join(rows[5]["texts"]) == as_bytes, "each token is a byte"


def test_tokens_are_told_where_the_output_does_not_tell_them(
    tmp_path: Path, client: ScoringClient
) -> None:
    options = BatchOptions()
    report = report_at(tmp_path / "report.html", client)
    out = tmp_path / "scores.jsonl"
    report.finish(Batch(write_rows(tmp_path, ROWS[:1]), out, options).run(client, report))
    assert "token_ids" not in out.read_text()
    _, [row] = read(tmp_path / "report.html")
    assert row["texts"] == ["a", "b", "c"]


def test_rows_of_an_earlier_run_are_taken_from_the_output(
    tmp_path: Path, client: ScoringClient
) -> None:
    _, first = scored(tmp_path, client, ROWS)
    _, again = scored(tmp_path, client, ROWS)
    for row, before in zip(again, first, strict=True):
        assert row.get("ids") == before.get("ids")
        assert row.get("tops") == before.get("tops")
        assert not row.get("parts")


def test_a_page_holds_only_so_many_rows_and_says_how_many_there_are(
    tmp_path: Path, client: ScoringClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "MAX_ROWS", 3)
    total, rows = scored(tmp_path, client, [{"prompt": "abc"}] * 10)
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert total["num_rows"] == 10
    _, rows = scored(tmp_path, client, [{"prompt": "abc"}] * 10)
    assert len(rows) == 3, "those of an earlier run count too"


def test_a_page_holds_only_so_many_bytes(
    tmp_path: Path, client: ScoringClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "MAX_BYTES", 4000)
    monkeypatch.setattr(report_module, "MAX_ROW_BYTES", 2000)
    _, rows = scored(tmp_path, client, [{"prompt": "ab"}, {"prompt": "x" * 400}, *ROWS[:1] * 20])
    assert rows[0]["ids"] is not None
    assert (rows[1]["ids"], rows[1]["why"], rows[1]["num"]) == (None, "long", 399)
    assert 2 < len(rows) < 20


def test_a_report_that_is_void_leaves_nothing(tmp_path: Path, client: ScoringClient) -> None:
    report = report_at(tmp_path / "report.html", client)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html.unfinished"]
    report.close()
    report.close()
    assert not list(tmp_path.iterdir())


def test_a_report_that_can_not_be_written_is_a_typed_error(
    tmp_path: Path, client: ScoringClient
) -> None:
    (tmp_path / "report.html.unfinished").mkdir()
    with pytest.raises(OutputConflict, match=r"report\.html can't be written"):
        report_at(tmp_path / "report.html", client)


def part(num_context_tokens: int, num_tokens: int, *lives: list[Span]) -> Score:
    return Score(
        logprob=-1.0,
        is_greedy=False,
        num_tokens=num_tokens,
        token_ids=[1] * num_tokens,
        token_logprobs=SampleLogprobsView(Logprobs.empty(0), None),
        tokens=None,
        num_context_tokens=num_context_tokens,
        lives=lives,
    )


@pytest.mark.parametrize(
    ("parts", "num_first", "expected"),
    [
        ([part(1, 5)], 1, [(0, 0)]),
        ([part(7, 3)], 0, [(0, 7)]),
        ([part(1, 8), part(4, 5), part(6, 2)], 0, [(0, 1), (8, -4), (13, -7)]),
    ],
    ids=["a prompt", "a continuation", "windows"],
)
def test_each_token_has_its_position_in_its_request(
    parts: list[Score], num_first: int, expected: list[tuple[int, int]]
) -> None:
    """Token j of a part is at position j + offset: the first one follows that part's context."""
    record = {"index": 0, "logprob": -1.0, "num_tokens": 5, "is_greedy": False}
    views = row_view(record, parts, num_first, 0.0)["parts"]
    assert [(view["start"], view["offset"]) for view in views] == expected


def test_lives_go_with_their_rows() -> None:
    life = [
        Span(kind=SpanKind.PREFILL, start_s=12.0, end_s=13.5, worker_id="w1", end=6, num_steps=1)
    ]
    record = {"index": 0, "logprob": -math.inf, "num_tokens": 5, "is_greedy": False}
    view = row_view(record, [part(1, 5, life)], 1, 10.0)
    assert view["logprob"] is None
    assert view["parts"][0]["spans"] == [("prefill", 2.0, 3.5, "w1", 0, 6, 1, "")]


def test_a_score_knows_the_lives_of_its_requests(tmp_path: Path, client: ScoringClient) -> None:
    score = client.score("ab", "c")
    assert score.lives == (), "this scheduler tells none"


# --------------------------------------------------------------------------------- blocks in use


def test_samples_of_blocks_are_bounded_and_cover_all_of_the_time() -> None:
    def unreachable() -> list[WorkerReport]:
        raise EngineUnavailable("not now")

    use = BlockUse(unreachable)
    use.stop()
    for second in range(5000):
        use.add([report_of("w0", second), report_of("w1", 7)], 1000.0 + second)
    first, second_view = use.views(1000.0)
    assert (first["id"], first["used"], second_view["used"]) == ("w0", 4999, 7)
    assert 100 < len(first["samples"]) <= 400
    assert first["samples"][0] == (0.0, 0)
    assert first["samples"][-1][0] > 4900


def test_progress_is_shown_beside_a_report(tmp_path: Path, client: ScoringClient) -> None:
    """Every watcher of a run is told everything."""
    seen: list[int] = []

    class Watch(Report):
        def advanced(self, progress: BatchProgress) -> None:
            seen.append(progress.num_done)

    watches = [
        Watch(
            tmp_path / f"{i}.html",
            source="x",
            output="y",
            model="tiny",
            decode=None,
            num_logprobs=0,
        )
        for i in range(2)
    ]
    out = tmp_path / "scores.jsonl"
    Batch(write_rows(tmp_path, ROWS[:3]), out).run(client, *watches)
    assert seen == [1, 1, 2, 2, 3, 3]
