"""`haversack score --html` on an engine: the page knows what happened to each row's request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster import Client
from cluster.cli import app
from tests.engine.conftest import ENGINE
from tests.unit.test_report import read


@pytest.fixture
def shell(client: Client, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("HAVERSACK_NAMESPACE", ENGINE["namespace"])
    monkeypatch.setenv("HAVERSACK_NAME", "shared")
    return CliRunner()


def score(shell: CliRunner, source: Path, page: Path, *more: str) -> Any:
    arguments = ["score", str(source), "--html", str(page), "--json", *more]
    return shell.invoke(app, arguments)


def test_a_page_tells_tokens_chunks_and_workers(shell: CliRunner, tmp_path: Path) -> None:
    source, page = tmp_path / "rows.jsonl", tmp_path / "report.html"
    rows = [
        {"prompt": list(range(1, 151))},
        {"context": [7] * 40, "continuation": [8, 9]},
        {"prompt": [5, 6], "context": "x"},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = score(shell, source, page, "-k", "2")
    assert done.exit_code == 3, done.output
    facts = json.loads(done.stdout)
    total, (whole, pair, bad) = read(page)
    assert total["logprob"] == facts["logprob"]
    assert {worker["id"] for worker in total["workers"]} == {"worker-0", "worker-1"}
    assert all(worker["samples"] for worker in total["workers"])
    assert bad["error"]["type"] == "InvalidRequest"

    [part] = whole["parts"]
    chunks = [span for span in part["spans"] if span[0] == "prefill"]
    assert [(chunk[4], chunk[5]) for chunk in chunks] == [(0, 64), (64, 128), (128, 150)]
    assert (part["start"], part["offset"], len(whole["ids"])) == (0, 0, 150)
    assert part["spans"][-1][0] == "finished"
    times = [chunk[1] for chunk in chunks] + [chunk[2] for chunk in chunks]
    assert all(0.0 <= time < 600.0 for time in times), "after the report was begun"

    [part] = pair["parts"]
    assert (pair["context"], part["offset"], pair["ids"]) == (40, 40, [8, 9])
    assert len(pair["tops"][0]) == 2

    again = score(shell, source, page, "-k", "2")
    assert again.exit_code == 3
    _, (whole_again, _, _) = read(page)
    assert whole_again["ids"] == whole["ids"]
    assert whole_again["parts"] == [], "an earlier run computed it"


def test_a_page_that_would_replace_the_input_is_refused(shell: CliRunner, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": [1, 2]}\n')
    refused = score(shell, source, source)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("OutputConflict: ")
    refused = score(shell, source, tmp_path / "nowhere" / "page.html")
    assert "there is no folder" in refused.stderr
    assert source.read_text() == '{"prompt": [1, 2]}\n'
