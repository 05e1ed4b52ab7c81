"""The examples of the documentation run, as a reader would run them, on a small engine.

The engine has the name that examples join by default, and a tiny model in place of the default one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Client, client
from tests.engine.conftest import ENGINE, engine_with_journal, in_time, wait_for
from tests.pages import ENDPOINT, MODEL, PAGES, ROOT, Block, python_examples

SHARED = "/data"
"""A folder that all machines of a cluster see."""
QUESTIONS = [(f"{a} + {b} =", f" {a + b}") for a in range(4) for b in range(4)]


def needs_an_endpoint(example: Block) -> bool:
    return ENDPOINT in example.text


def needs_ray_data(example: Block) -> bool:
    return "ray.data" in example.text


def told_apart(page: Path) -> tuple[list[Block], list[Block]]:
    """Return a page's examples for an engine, and those for Ray Data on top of it."""
    examples = [e for e in python_examples(page) if not needs_an_endpoint(e)]
    with_data = [e for e in examples if needs_ray_data(e)]
    return [e for e in examples if e not in with_data], with_data


PLAIN = [page for page in PAGES if told_apart(page)[0]]
WITH_DATA = [example for page in PAGES for example in told_apart(page)[1]]


@pytest.fixture(scope="module")
def engine(
    local_cluster: None, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    # Other modules' engines may be there, and Ray Data's tasks need a CPU that nobody has reserved.
    own = {"name": "engine", "namespace": "haversack", "cpus_per_worker": 0.1}
    with engine_with_journal(tiny_model, factory=tmp_path_factory, **ENGINE | own) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where examples find what they read."""
    rows = [{"context": question, "continuation": answer} for question, answer in QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_examples() -> None:
    assert len(PLAIN) >= 4
    assert WITH_DATA


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run(
    page: Path, engine: Client, tiny_model: str, folder: Path
) -> None:
    """One after the other: later ones go on with what earlier ones have made."""
    names, before = {"__name__": "example"}, list(client._open_clients)
    for example in told_apart(page)[0]:
        exec(example.compiled({MODEL: tiny_model}), names)
    assert client._open_clients == before, "examples close the clients that they open"
    wait_for(lambda: not engine.requests(), "every request of the examples ends")


@pytest.mark.slow
@pytest.mark.parametrize("example", WITH_DATA, ids=str)
def test_an_example_for_ray_data_runs(example: Block, engine: Client, folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (folder / "questions").mkdir()
    columns = {
        "question": [question for question, _ in QUESTIONS],
        "answer": [answer for _, answer in QUESTIONS],
    }
    parquet.write_table(pyarrow.table(columns), folder / "questions" / "0.parquet")
    code = example.compiled({SHARED: str(folder)})
    in_time(lambda: exec(code, {"__name__": "example"}))
    table = parquet.read_table(folder / "scored")
    assert table.num_rows == len(QUESTIONS)
    (logprobs,) = [name for name in table.column_names if name.endswith("logprob")]
    expected = {q: engine.score(q, answer).logprob for q, answer in QUESTIONS}
    found = dict(zip(table["question"].to_pylist(), table[logprobs].to_pylist(), strict=True))
    assert found == expected
