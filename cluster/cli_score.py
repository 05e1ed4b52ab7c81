"""`haversack score`: a file of rows into a file of scores."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.batches import STREAM, Batch, BatchOptions, BatchProgress, BatchWatcher
from cluster.block_use import BlockUse
from cluster.cli_common import (
    Config,
    Exit,
    Interruption,
    Json,
    Model,
    Name,
    Trace,
    Workers,
    engine,
    json_text,
    perplexity_of,
    told_errors,
    traced,
    until_interrupted,
)
from cluster.client import Client
from cluster.report import Report
from cluster.scoring import ScoringParams
from scheduler.errors import HaversackError, InvalidRequest, OutputConflict

_MAX_TOLD_ERRORS = 10

Source = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="JSON lines with prompt, or context and continuation, or text; or text, a prompt a "
        "line; - is stdin.",
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        help="JSON lines; a folder of Parquet files if the name ends in .parquet, which takes "
        "pyarrow; - is stdout. Without it FILE.scores.jsonl, or for stdin stdout.",
    ),
]
Format = Annotated[str | None, typer.Option(help="jsonl or text; without it, as FILE's name says.")]
TopLogprobs = Annotated[
    int,
    typer.Option(
        "--top-logprobs", "-k", help="Likeliest alternatives per token; -1 is the vocabulary."
    ),
]
EchoTokens = Annotated[
    bool, typer.Option("--echo-tokens", help="Tell each token; -k does so as well.")
]
Truncate = Annotated[
    bool,
    typer.Option("--truncate", help="Cut the beginning of contexts that are too long."),
]
Unordered = Annotated[
    bool, typer.Option("--unordered", help="Write rows as they end; each has its index.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first bad row.")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Throw away what is in the output, and begin anew.")
]
MaxInFlight = Annotated[
    int | None, typer.Option(help="Requests under way at once; lower takes less memory.")
]
Html = Annotated[
    Path | None,
    typer.Option(
        help="Also write a page: tokens shaded by their logprobs, and what happened to the "
        "requests. -k adds the alternatives."
    ),
]
RowsPerPart = Annotated[
    int,
    typer.Option(
        help="Rows of a Parquet file. An interrupted run begins again at the first part that was "
        "not full."
    ),
]


def score(
    source: Source,
    output: Out = None,
    input_format: Format = None,
    top_logprobs: TopLogprobs = 0,
    echo_tokens: EchoTokens = False,
    truncate: Truncate = False,
    unordered: Unordered = False,
    strict: Strict = False,
    restart: Restart = False,
    max_in_flight: MaxInFlight = None,
    rows_per_part: RowsPerPart = 10_000,
    html: Html = None,
    trace: Trace = None,
    config: Config = None,
    model: Model = None,
    num_workers: Workers = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Score the rows of a file; started again with the same arguments, it goes on where it was.

    A row is a line. Each gets a line of its own in the output: the sum of its logprobs and, where
    asked for, each token's. A bad row gets its error, and the exit code is 3. Beside the output
    stands OUTPUT.progress, without which it can't be gone on with.
    """
    with told_errors():
        target = output or _default_output(source)
        options = BatchOptions(
            input_format=input_format,  # type: ignore[arg-type]  # it is checked there
            params=ScoringParams(logprobs=top_logprobs, truncate=truncate),
            echo_tokens=echo_tokens,
            ordered=not unordered,
            rows_per_part=rows_per_part,
            strict=strict,
            restart=restart,
            max_in_flight=max_in_flight,
        )
        batch = Batch(source, target, options)
        if html is not None:
            _check_report(html, source, target)
    with (
        engine(config, model=model, num_workers=num_workers, name=name) as client,
        traced(client, trace),
        _shown_progress(STREAM not in (source, target)) as shown,
    ):
        if html is None:
            progress = batch.run(client, shown)
        else:
            progress = _run_with_report(batch, client, shown, html, source, target, top_logprobs)
    _tell_end(progress, target, as_json)
    if progress.finished.num_failed:
        raise typer.Exit(Exit.SOME_ROWS_FAILED)


def _check_report(html: Path, source: str, target: str) -> None:
    if html.is_dir():
        raise OutputConflict(f"{html} is a folder: give --html a file", path=str(html))
    if not html.parent.is_dir():
        raise OutputConflict(f"there is no folder {html.parent}: make it first", path=str(html))
    if html.resolve() in [Path(name).resolve() for name in (source, target) if name != STREAM]:
        raise OutputConflict(
            f"{html} is the input or the output: give --html another file", path=str(html)
        )


def _run_with_report(
    batch: Batch,
    client: Client,
    shown: BatchWatcher,
    html: Path,
    source: str,
    target: str,
    num_logprobs: int,
) -> BatchProgress:
    decode = client.token_text()
    use = BlockUse(client.workers)
    with contextlib.ExitStack() as stack:
        stack.callback(use.stop)
        report = Report(
            html,
            source="stdin" if source == STREAM else Path(source).name,
            output="stdout" if target == STREAM else Path(target).name,
            model=client.info.model,
            decode=decode,
            num_logprobs=num_logprobs,
            use=use,
        )
        stack.callback(report.close)
        progress = batch.run(client, shown, report)
        report.finish(progress)
    return progress


def _default_output(source: str) -> str:
    if source == STREAM:
        return STREAM
    if not Path(source).is_file():
        raise InvalidRequest(f"there is no file {source or repr(source)}", param="source")
    return str(Path(source).with_suffix(".scores.jsonl"))


class _Shown(BatchWatcher):
    """Shows a bar on a terminal, and the first bad rows anywhere; ends an interrupted run."""

    def __init__(self, bar: Progress, interruption: Interruption) -> None:
        self._bar = bar
        self._interruption = interruption
        self._task = bar.add_task("rows", total=None, rate="", failed="")
        self._num_told = 0
        self.last: BatchProgress | None = None

    def began(self, progress: BatchProgress) -> None:
        self.last = progress
        self._bar.update(self._task, total=progress.num_rows, completed=progress.num_done)
        if progress.num_resumed:
            self.say(f"{progress.num_resumed} rows are done already")

    def advanced(self, progress: BatchProgress) -> None:
        failed = progress.finished.num_failed
        self._bar.update(
            self._task,
            completed=progress.num_done,
            rate=f"{progress.tokens_per_s:.0f} tokens/s",
            failed=f"{failed} bad" if failed else "",
        )

    def failed(self, index: int, error: HaversackError) -> None:
        self._num_told += 1
        if self._num_told <= _MAX_TOLD_ERRORS:
            self.say(f"row {index} (line {index + 1}): {type(error).__name__}: {error.message}")
        elif self._num_told == _MAX_TOLD_ERRORS + 1:
            self.say("further bad rows are told in the output only")

    def goes_on(self) -> None:
        self._interruption.check()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _shown_progress(can_go_on: bool) -> Iterator[_Shown]:
    """Show how far it is, on stderr; what is interrupted meanwhile ends in order.

    Args:
        can_go_on: whether a run that is interrupted can be gone on with.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[failed]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar, until_interrupted() as interruption:
        shown = _Shown(bar, interruption)
        try:
            yield shown
        except BaseException:
            if can_go_on and shown.last is not None:
                done, whole = shown.last.num_done, shown.last.num_rows
                shown.say(f"{done} of {whole} rows are done; the same command goes on")
            raise


def _tell_end(progress: BatchProgress, target: str, as_json: bool) -> None:
    """Print the sum of it; on stderr where the results themselves go to stdout."""
    finished = progress.finished
    facts: dict[str, Any] = {
        "output": target,
        "num_rows": progress.num_done,
        "num_resumed": progress.num_resumed,
        "num_failed": finished.num_failed,
        "num_tokens": finished.num_tokens,
        "logprob": finished.logprob,
        "perplexity": perplexity_of(finished.logprob, finished.num_tokens),
        "elapsed_s": progress.elapsed_s,
        "tokens_per_s": progress.tokens_per_s,
    }
    text = json_text(facts)
    if not as_json:
        text = (
            f"{target}: {progress.num_done} rows, of which {progress.num_resumed} were done and "
            f"{finished.num_failed} are bad; {finished.num_tokens} tokens scored, sum of logprobs "
            f"{finished.logprob:.4f}; {progress.tokens_per_s:.0f} tokens/s"
        )
    print(text, file=sys.stderr if target == STREAM else sys.stdout)
