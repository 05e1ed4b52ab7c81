"""What the source says of classes, functions and aliases: signatures, fields, texts.

Everything is read off the syntax tree and not off live objects, so that types and defaults look as
they were written. The module knows nothing of what it reads.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_WIDTH = 88
_SECTION = re.compile(r"(Args|Raises|Returns|Yields):")
_INTRODUCTION = re.compile(r"\S.*:")
_ENTRY = re.compile(r"([A-Za-z_][\w, ]*): (.*)")


class Field(NamedTuple):
    """A field of a class."""

    name: str
    type: str
    default: str | None
    """As it was written; None where one has to be given."""
    text: str


def parsed_class(cls: type) -> ast.ClassDef:
    """Return a class's syntax tree."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return node


def fields_of(cls: type) -> list[Field]:
    """Return the annotated fields of a class's body, with the texts below them."""
    body = parsed_class(cls).body
    found = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = None if node.value is None else _default(node.value)
            text = _text_of(after)
            found.append(Field(node.target.id, ast.unparse(node.annotation), default, text))
    return found


def members_of(cls: type) -> list[tuple[str, str]]:
    """Return the values of an enum's members as they were written, with the texts below them."""
    body = parsed_class(cls).body
    return [
        (ast.unparse(node.value), _text_of(after))
        for node, after in zip(body, [*body[1:], None], strict=True)
        if isinstance(node, ast.Assign)
    ]


def alias_text(module: Any, name: str) -> str:
    """Return the text below a module's assignment to a name."""
    body = ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8")).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return _text_of(after)
    raise LookupError(f"{module.__name__} assigns no {name}")


def methods_of(cls: type) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the public methods of a class's body, __init__ included, without overloads."""
    for node in parsed_class(cls).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = [ast.unparse(d) for d in node.decorator_list]
            is_public = not node.name.startswith("_") or node.name == "__init__"
            if is_public and "overload" not in decorators:
                yield node.name, node


def signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a call of a function as documentation shows it, without `self` and `cls`."""
    args = node.args
    if args.args and args.args[0].arg in ("self", "cls"):
        args = ast.arguments(
            args.posonlyargs,
            args.args[1:],
            args.vararg,
            args.kwonlyargs,
            args.kw_defaults,
            args.kwarg,
            args.defaults,
        )
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    parts = _arguments(args)
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a method is read like a field."""
    return any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)


def markdown(text: str | None) -> str:
    """Return a docstring as Markdown: its sections and listings as lists, other code as it is.

    A listing is what is indented right below a line that ends in a colon.
    """
    out: list[str] = []
    is_listing = False
    for line in inspect.cleandoc(text or "").splitlines():
        is_indented = line.startswith("    ")
        if is_indented and not is_listing and out and _INTRODUCTION.fullmatch(out[-1]):
            is_listing = True
            if _SECTION.fullmatch(out[-1]):
                out[-1] = f"**{out[-1][:-1]}**"
            out.append("")
        elif is_listing and line and not is_indented:
            is_listing = False
            out.append("")
        out.append(_listed(line[4:]) if is_listing and line else line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def _listed(line: str) -> str:
    """Return a line of a listing: the beginning of an entry, or what goes on with one."""
    entry = _ENTRY.fullmatch(line)
    if entry is None:
        return f"  {line.strip()}"
    names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
    return f"- {names}: {entry[2]}"


def _arguments(args: ast.arguments) -> list[str]:
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    parts = [_argument(*pair) for pair in zip(positional, [*defaults, *args.defaults], strict=True)]
    if args.vararg:
        parts.append("*" + ast.unparse(args.vararg))
    elif args.kwonlyargs:
        parts.append("*")
    parts += [_argument(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        parts.append("**" + ast.unparse(args.kwarg))
    return parts


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    written = ast.unparse(arg)
    return written if default is None else f"{written} = {ast.unparse(default)}"


def _default(value: ast.expr) -> str:
    """Return a default as its user would write it."""
    if isinstance(value, ast.Call):
        factory = next((k.value for k in value.keywords if k.arg == "default_factory"), None)
        if factory is not None:
            return f"{ast.unparse(factory)}()"
    return ast.unparse(value)


def _text_of(node: ast.stmt | None) -> str:
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return " ".join(inspect.cleandoc(node.value.value).split())
    return ""
