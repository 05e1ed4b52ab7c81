"""The evaluation beside lm-evaluation-harness, without it: the rows, and what is compared."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bench.evaluation.__main__ import failures, table
from bench.evaluation.harness import (
    CHOICES,
    CONTINUED,
    DOCUMENTS,
    TASKS_FOLDER,
    Found,
    Harness,
    found_in,
)

TEXT = """# A heading that is no sentence of any kind and is left out of the rows

The first sentence of this text has a good number of words in it. So has the second one, which goes
on for a while before it ends.

    code that is long enough to be a sentence but is none and must not be asked about

| a table | that is left out as well | because nobody writes prose in the cells of tables |

- An item of a list is prose, and its sentences count as the others do. Short ones do not.
"""


@pytest.fixture(scope="module")
def rows() -> Any:
    """The module as the harness loads it: from its file, with nothing else of the project."""
    spec = importlib.util.spec_from_file_location("rows", TASKS_FOLDER / "rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sentences_of_prose_are_cut_in_two(rows: Any) -> None:
    found = rows.halves([TEXT])
    assert found == [
        ("The first sentence of this text has", "a good number of words in it."),
        ("So has the second one, which goes", "on for a while before it ends."),
        ("An item of a list is prose, and", "its sentences count as the others do."),
    ]


def test_questions_have_one_right_answer_of_four(rows: Any) -> None:
    questions = rows.choice_rows(rows.texts())
    assert len(questions) == 50
    halves = set(rows.halves(rows.texts()))
    for question in questions:
        assert len(set(question["endings"])) == 4
        assert (question["context"], question["endings"][question["label"]]) in halves
    assert {question["label"] for question in questions} == {0, 1, 2, 3}
    assert len({question["context"] for question in questions}) == 50
    assert questions == rows.choice_rows(rows.texts())


def test_documents_are_those_of_the_repository(rows: Any, repo_root: Path) -> None:
    documents = rows.document_rows(rows.texts())
    readme = (repo_root / "README.md").read_text()
    assert documents[0]["text"] == readme[:4000]
    assert all(0 < len(row["text"]) <= 4000 for row in documents)
    assert len(rows.continued_rows(rows.texts())) == 12


def test_too_few_sentences_are_said_so(rows: Any) -> None:
    with pytest.raises(ValueError, match="3 sentences where 50"):
        rows.choice_rows([TEXT])


def test_the_command_is_what_a_user_would_type() -> None:
    args = {"model": "m", "base_url": "http://x/v1/completions", "num_concurrent": 8}
    command = Harness.command("local-completions", args, [CHOICES, DOCUMENTS], 1)
    assert command == [
        *("lm_eval", "run", "--model", "local-completions", "--model_args"),
        "model=m,base_url=http://x/v1/completions,num_concurrent=8",
        *("--include_path", str(TASKS_FOLDER), "--tasks", f"{CHOICES},{DOCUMENTS}"),
        *("--batch_size", "1"),
    ]


def test_what_the_harness_wrote_is_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    metrics = {"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 2}
    results = dict.fromkeys((CHOICES, DOCUMENTS, CONTINUED), metrics)
    (folder / "results_2026.json").write_text(json.dumps({"results": results}))
    samples = {
        CHOICES: [[[["-1.5", "True"]], [["-2.25", "False"]]], [[["-3.0", "False"]]]],
        DOCUMENTS: [[["-100.5"]], [["-7.25"]]],
        CONTINUED: [[["one"]], [["two"]]],
    }
    for task, resps in samples.items():
        lines = [json.dumps({"doc_id": i, "resps": r}) for i, r in enumerate(resps)]
        (folder / f"samples_{task}_2026.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    found = found_in(tmp_path, [CHOICES, DOCUMENTS, CONTINUED])
    assert found == Found(
        metrics={task: {"acc": 0.5} for task in (CHOICES, DOCUMENTS, CONTINUED)},
        loglikelihoods={CHOICES: [[-1.5, -2.25], [-3.0]], DOCUMENTS: [[-100.5], [-7.25]]},
        is_greedy={CHOICES: [[True, False], [False]]},
        texts={CONTINUED: ["one", "two"]},
    )


GOOD: dict[str, Any] = {
    "tasks": {
        CHOICES: {
            "rows": 50,
            "metrics": {"acc": {"hf": 0.5, "haversack": 0.5}},
            "max_difference": 1e-4,
            "equal_is_greedy": True,
        },
        DOCUMENTS: {
            "rows": 7,
            "metrics": {"byte_perplexity": {"hf": 2.0, "haversack": 2.1}},
            "max_difference": 9e-4,
        },
        CONTINUED: {
            "rows": 12,
            "metrics": {"exact_match": {"hf": 0.0, "haversack": 0.0}},
            "equal_texts": 12,
        },
    },
    "ways": {"batches": True},
}


def test_what_is_reached_is_no_failure() -> None:
    assert list(failures(GOOD)) == []
    assert table(GOOD).row_count == 7


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ((CHOICES, "metrics", "acc", "haversack"), 0.52, "acc differs"),
        ((CHOICES, "equal_is_greedy"), False, "what the model would say"),
        ((CHOICES, "max_difference"), 2e-3, "apart"),
        ((DOCUMENTS, "max_difference"), float("nan"), "apart"),
        ((CONTINUED, "equal_texts"), 11, "1 continuations differ"),
    ],
)
def test_what_is_not_reached_is_said(path: tuple[str, ...], value: Any, match: str) -> None:
    report = copy.deepcopy(GOOD)
    place = report["tasks"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (missed,) = failures(report)
    assert match in missed


def test_ways_that_differ_are_said() -> None:
    (missed,) = failures(GOOD | {"ways": {"batches": False}})
    assert "batches" in missed
