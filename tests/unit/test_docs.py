"""The documentation says what the code says: links, commands, names, numbers of statuses."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from cluster import api_errors
from cluster.api_errors import answer_to
from cluster.api_settings import Limits
from cluster.cli import app
from cluster.config import ENV_PREFIX, OTHER_VARIABLES, RULES
from docs.generator import DOCS
from docs.generator import PAGES as GENERATED
from scheduler import errors
from scheduler.errors import HaversackError
from tests.pages import (
    PAGES,
    ROOT,
    Command,
    anchors,
    commands,
    inline_code,
    links,
    python_examples,
    words_of,
)

CLI: Any = typer.main.get_command(app)
TOOL = "haversack"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name)
SHOWN = [command for page in PAGES for command in commands(page)]


@pytest.mark.parametrize("generated", GENERATED)
def test_what_comes_from_the_code_is_up_to_date(generated: str) -> None:
    written = (DOCS / generated).read_text(encoding="utf-8")
    assert written == GENERATED[generated](), "run `make docs`, and commit what it writes"


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.is_relative_to(ROOT), link
        assert path.exists(), f"{link}: there is no such file"
        if anchor:
            assert anchor in anchors(path), f"{link}: there is no such heading"


def test_the_index_lists_every_page() -> None:
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "README.md")}
    assert set(PAGES[1:]) - {DOCS / "README.md"} <= listed


@pytest.mark.parametrize(
    "command", [c for c in SHOWN if Path(c.words[0]).name == TOOL], ids=lambda c: c.place
)
def test_a_command_that_is_shown_can_be_run(command: Command) -> None:
    assert complaint(command.words) is None


@pytest.mark.parametrize("command", CLI.commands)
def test_the_example_in_the_help_of_a_command_can_be_run(command: str) -> None:
    (example,) = re.findall(r"Example: `(.*?)`", CLI.commands[command].epilog)
    words = words_of(example)
    assert words[:2] == [TOOL, command]
    assert complaint(words) is None


@each_page
def test_commands_in_the_text_exist(page: Path) -> None:
    """In running text they may lack arguments, and have names in capitals in place of values."""
    for text in inline_code(page):
        words = words_of(text)
        if words[:1] == [TOOL] and len(words) > 1:
            found = complaint(["1" if word.isupper() else word for word in words])
            assert found is None or found.startswith("MissingParameter"), f"`{text}`: {found}"


def complaint(words: list[str]) -> str | None:
    """Parse a command line, without running it, and return what is wrong with it."""
    first, rest = words[1], words[2:]
    if first.startswith("-"):
        known = {"--help"} | {option for parameter in CLI.params for option in parameter.opts}
        return None if first in known else f"there is no option {first}"
    if first not in CLI.commands:
        return f"there is no command {first}"
    if first == "bench" and rest and not (ROOT / "bench" / f"{rest[0]}.py").exists():
        return f"there is no benchmark {rest[0]}"
    try:
        CLI.commands[first].make_context(first, [word for word in rest if word != "--help"])
    except Exception as error:  # typer's own kinds are not public
        is_fine = "--help" in rest and type(error).__name__ == "MissingParameter"
        return None if is_fine else f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("haversack scores FILE", "no command scores"),
        ("haversack --oops", "no option --oops"),
        ("haversack bench nothing", "no benchmark nothing"),
        ("haversack score rows.jsonl --oops", "NoSuchOption"),
        ("haversack top --count many", "BadParameter"),
        ("haversack migrate job-17  # to where?", "MissingParameter"),
    ],
)
def test_what_is_wrong_with_a_command_is_noticed(line: str, found: str) -> None:
    """The checks above can fail."""
    assert found in (complaint(words_of(line)) or "")


def test_the_page_about_commands_has_all_of_them() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    told = [word for word in re.findall(r"^\| `([\w-]+)[^|]*` \|", text, re.M) if word.isalpha()]
    assert sorted(told) == sorted(CLI.commands)


def test_make_and_python_find_what_they_are_asked_for() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = 0
    for command in SHOWN:
        tool, *rest = command.words
        if tool == "make":
            seen += 1
            assert rest[0] in targets, command
        elif Path(tool).name.startswith("python") and rest[:1] == ["-m"]:
            seen += 1
            place = ROOT.joinpath(*rest[1].split("."))
            assert place.is_dir() or place.with_suffix(".py").exists(), command
    assert seen


@each_page
def test_variables_exist(page: Path) -> None:
    known = {ENV_PREFIX + field.upper() for field in RULES} | OTHER_VARIABLES
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]*[A-Z]\b", text)) <= known


@each_page
def test_examples_are_python(page: Path) -> None:
    for example in python_examples(page):
        example.compiled({})


def test_statuses_of_the_endpoint_are_those_of_the_code() -> None:
    """Errors that have a status of their own, and the two kinds of too long a request."""
    told = set()
    for line in (DOCS / "http.md").read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| (\d{3}) \| (.*?) \|", line)
        if row:
            told |= {(int(row[1]), code) for code in re.findall(r"`(\w+)`", row[2])}
    kinds = [*vars(errors).values(), *vars(api_errors).values()]
    answers = [
        answer_to(kind(""))
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, HaversackError)
    ]
    assert {(answer.status, answer.error["code"]) for answer in answers} <= told


def test_limits_of_the_endpoint_are_those_of_the_code() -> None:
    text = (DOCS / "http.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(Limits):
        option = "--" + field.name.replace("_", "-")
        (told,) = re.findall(rf"\| `{option}` \| ([\d,]+)( MiB)? \|", text)
        assert int(told[0].replace(",", "")) * (2**20 if told[1] else 1) == field.default, option
