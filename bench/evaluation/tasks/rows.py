"""Rows of the evaluation tasks, made from this repository's own prose, the same every time.

Sentences of the README and of the docs are cut in two. What is asked is which of four endings is
the right one, how a model continues the beginning, and how probable the texts are as a whole. The
module is loaded by lm-evaluation-harness, from the YAML files beside it, and imports nothing of
this project.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
_FILES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("batches", "caching", "cli", "http", "resilience")),
    "LICENSE",
)
NUM_CHOICES = 50
NUM_CONTINUED = 12
_NUM_ENDINGS = 4
_MIN_WORDS = 10
_DOCUMENT_CHARS = 4000
_NOT_PROSE = re.compile(r"```[^`]*```|^(?:    |[|#>]).*$", re.MULTILINE)
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")


def texts(root: Path = _ROOT) -> list[str]:
    """Return the texts that rows are made from."""
    return [(root / name).read_text(encoding="utf-8") for name in _FILES]


def halves(documents: Sequence[str]) -> list[tuple[str, str]]:
    """Return every sentence of some length as its two halves; the second has no space in front."""
    found = []
    for document in documents:
        prose = _ITEM.sub("\n", _NOT_PROSE.sub("", document))
        for paragraph in re.split(r"\n\s*\n", prose):
            for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
                words = sentence.split(" ")
                if len(words) >= _MIN_WORDS:
                    cut = (len(words) + 1) // 2
                    found.append((" ".join(words[:cut]), " ".join(words[cut:])))
    return found


def choice_rows(documents: Sequence[str]) -> list[dict[str, Any]]:
    """Return questions of four endings, of which `label` is the right one."""
    sentences = halves(documents)
    rows = []
    for number, place in enumerate(_spread(len(sentences), NUM_CHOICES)):
        context, ending = sentences[place]
        following = sentences[place + 1 :] + sentences[:place]
        wrong = dict.fromkeys(other for _, other in following if other != ending)
        endings = list(wrong)[: _NUM_ENDINGS - 1]
        label = number % _NUM_ENDINGS
        endings.insert(label, ending)
        rows.append({"context": context, "endings": endings, "label": label})
    return rows


def document_rows(documents: Sequence[str]) -> list[dict[str, Any]]:
    """Return the beginnings of the documents."""
    return [{"text": document[:_DOCUMENT_CHARS]} for document in documents]


def continued_rows(documents: Sequence[str]) -> list[dict[str, Any]]:
    """Return beginnings of sentences, and how they really go on."""
    sentences = halves(documents)
    return [
        {"context": sentences[place][0], "ending": sentences[place][1]}
        for place in _spread(len(sentences), NUM_CONTINUED)
    ]


def _spread(count: int, wanted: int) -> list[int]:
    """Return places of `count`, evenly apart."""
    if count < wanted:
        raise ValueError(f"there are {count} sentences where {wanted} are needed")
    return [number * count // wanted for number in range(wanted)]


# What the YAML files name; the harness hands over metadata that nobody here needs.


def choices(**_: Any) -> dict[str, Any]:
    """Return the data set of the task haversack_choices."""
    return _dataset(choice_rows(texts()))


def documents(**_: Any) -> dict[str, Any]:
    """Return the data set of the task haversack_documents."""
    return _dataset(document_rows(texts()))


def continued(**_: Any) -> dict[str, Any]:
    """Return the data set of the task haversack_continued."""
    return _dataset(continued_rows(texts()))


def _dataset(rows: list[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset  # there only beside the harness

    return {"test": Dataset.from_list(rows)}
