"""A file of rows is scored into a file of results, and a run that was interrupted goes on.

Rules:
- Beside an output stands OUT.progress, which says what the output is of: the input's content, the
  model, and whatever else decides what is written. It is there before the first result, and what
  differs from it is refused. Which rows are done is told by the output itself, so that the two
  can't disagree.
- A row that is in the output is not computed again. In the order of the input, an output that was
  interrupted any number of times is byte for byte that of a run that was not.
- A bad row is a result: its error. `strict` ends with the first one instead, before it is written.
- Streams can be read and written too; they can't be gone on with.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from cluster.batch_identity import BatchIdentity
from cluster.batch_input import InputFacts, InputFormat, format_of, measure, rows_of
from cluster.batch_output import (
    Expected,
    Finished,
    JsonlOutput,
    Output,
    StreamOutput,
    record_of,
)
from cluster.batch_parquet import ParquetOutput, check_pyarrow
from cluster.batch_rows import RowResult, RowScorer, ScoringEngine
from cluster.scoring import ScoringParams, refuse
from scheduler.acceptance import most_logprobs, num_logprobs
from scheduler.errors import HaversackError, InvalidRequest, OutputConflict

STREAM = "-"
"""Instead of a path: stdin, or stdout."""
_OUTPUT_SUFFIXES = frozenset({"", ".jsonl", ".ndjson", ".json", ".parquet"})


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How to score a file.

    Raises:
        InvalidRequest: a value is not allowed; `details["param"]` names it.
    """

    input_format: InputFormat | None = None
    """"jsonl", "text" (a line is a prompt), or None: by the input's name, "jsonl" for stdin."""
    params: ScoringParams = field(default_factory=ScoringParams)
    """For all rows; with `logprobs` the results tell each token."""
    echo_tokens: bool = False
    """Whether results tell each token; else what they sum up to."""
    ordered: bool = True
    """Whether results come in the order of the input; else as rows end."""
    rows_per_part: int = 10_000
    """Rows of a Parquet file."""
    strict: bool = False
    """Whether the first bad row is raised."""
    restart: bool = False
    """Whether what is in the output is thrown away first."""
    max_in_flight: int | None = None
    """Requests under way at once; None: what keeps the engine busy."""

    def __post_init__(self) -> None:
        if self.input_format not in (None, "jsonl", "text"):
            refuse("input_format", self.input_format, '"jsonl", "text" or None')
        for name in ("rows_per_part", "max_in_flight"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                refuse(name, value, "an integer of at least 1")

    @property
    def tells_tokens(self) -> bool:
        """Whether results tell each token."""
        return self.echo_tokens or self.params.logprobs != 0


@dataclass
class BatchProgress:
    """How far a batch is."""

    finished: Finished
    """Sums over the output: `num_failed`, `num_tokens`, `logprob`; `rows` are those in it."""
    num_rows: int | None
    """Of the input; None where that is a stream."""
    num_resumed: int
    """Rows that were done before this run."""
    num_engine_tokens: int = 0
    """Tokens of this run's rows, those that they are conditioned on included."""
    elapsed_s: float = 0.0
    """Of this run, from the first row on."""

    @property
    def num_done(self) -> int:
        """Rows whose results are in the output, bad ones included."""
        return len(self.finished.rows)

    @property
    def tokens_per_s(self) -> float:
        """Of this run."""
        return self.num_engine_tokens / self.elapsed_s if self.elapsed_s else 0.0


class BatchWatcher:
    """Is told how a batch goes on; one who wants to know overrides what it is interested in.

    The progress that it is shown is always the same object.
    """

    def began(self, progress: BatchProgress) -> None:
        """See what is done before the first row."""

    def advanced(self, progress: BatchProgress) -> None:
        """See that another row is written."""

    def found(self, records: Iterator[dict[str, Any]]) -> None:
        """See the results of an earlier run, as far as one reads them."""

    def wrote(self, result: RowResult) -> None:
        """See a result that is written."""

    def failed(self, index: int, error: HaversackError) -> None:
        """See that a row is bad, before it is written."""

    def goes_on(self) -> None:
        """See that it goes on: told for each row that is read and, while results are waited for, a
        few times a second; never between a result's being written and its being counted.
        """


class Batch:
    """An input, an output, and how to get from one to the other."""

    def __init__(
        self,
        source: str | Path,
        output: str | Path,
        options: BatchOptions | None = None,
    ) -> None:
        """Look at what there is, before an engine is asked for.

        Args:
            source: a file of JSON lines or of text, or "-" for stdin.
            output: a file for JSON lines, a folder for Parquet if the name ends in .parquet, or
                "-" for stdout.
            options: defaults to `BatchOptions()`.

        Raises:
            InvalidRequest: the input is not there, its format is not known, or the output's name
                is that of another format.
            OutputConflict: the output can't be where it is to be.
            MissingPackage: Parquet is asked for and pyarrow is not installed.
        """
        self._options = options or BatchOptions()
        self._source = None if source == STREAM else Path(source)
        self._output = None if output == STREAM else Path(output)
        self._format: InputFormat = self._options.input_format or (
            "jsonl" if self._source is None else format_of(self._source)
        )
        if self._source is not None and not self._source.is_file():
            raise InvalidRequest(f"there is no file {self._source}", param="source")
        if self._output is None:
            return
        if self._output.suffix.lower() not in _OUTPUT_SUFFIXES:
            raise InvalidRequest(
                f"the output {self._output} would not be what its name says: scores are written as "
                "JSON lines, to a name that ends in .jsonl (or in nothing), or as Parquet, to one "
                "that ends in .parquet",
                param="output",
            )
        if not self._output.parent.is_dir():
            raise OutputConflict(f"there is no folder {self._output.parent}: make it first")
        if self._source is not None and self._output.resolve() == self._source.resolve():
            raise OutputConflict(f"{self._output} is the input: give another output")
        if self._is_parquet:
            check_pyarrow()

    @property
    def _is_parquet(self) -> bool:
        return self._output is not None and self._output.suffix.lower() == ".parquet"

    @property
    def _sidecar(self) -> Path:
        return Path(f"{self._output}.progress")

    def run(
        self,
        engine: ScoringEngine,
        *watchers: BatchWatcher,
    ) -> BatchProgress:
        """Score the rows that are not done, and return how the batch stands then.

        However this ends, what is under way is cancelled and the output is left so that the same
        call goes on.

        Args:
            engine: a client.
            watchers: are told how it goes on; what one raises ends the run.

        Raises:
            OutputConflict: the output is of something else, another process writes it, or it
                can't be written.
            InvalidRequest: the input can't be read; more alternatives are asked for than the engine
                gives; with `strict`, a row is bad.
            HaversackError: with `strict`, what became of a bad row.
            EngineUnavailable: the engine is gone.
        """
        self._check_alternatives(engine)
        with contextlib.ExitStack() as stack:
            facts = self._facts()
            with _written_to(self._output):
                output = self._open_output()
                stack.callback(output.close)
                finished = self._begin(engine, output, facts)
            progress = BatchProgress(
                finished, len(facts.rows) if facts is not None else None, len(finished.rows)
            )
            if self._options.strict and finished.num_failed:
                raise InvalidRequest(
                    f"{finished.num_failed} rows in {self._output} failed in an earlier run: leave "
                    "out --strict, or begin anew with --restart"
                )
            for watcher in watchers:
                watcher.began(progress)
                with closing(output.records()) as records:
                    watcher.found(records)
            stream = stack.enter_context(self._open_input())
            self._score(engine, stream, output, progress, watchers)
            with _written_to(self._output):
                output.complete()
        return progress

    def _check_alternatives(self, engine: ScoringEngine) -> None:
        """Refuse what would make every row a bad one."""
        limits, k = engine.info.limits, self._options.params.logprobs
        most = most_logprobs(limits)
        if num_logprobs(k, limits) > most:
            raise InvalidRequest(
                f"logprobs={k} is not allowed: this engine gives at most {most} per token",
                param="logprobs",
            )

    def _facts(self) -> InputFacts | None:
        if self._source is None:
            return None
        with _read_from(self._source):
            return measure(self._source)

    @contextlib.contextmanager
    def _open_input(self) -> Iterator[BinaryIO]:
        if self._source is None:
            yield sys.stdin.buffer
            return
        with _read_from(self._source):
            file = self._source.open("rb")
        with file:
            yield file

    def _open_output(self) -> Output:
        options = self._options
        if self._output is None:
            return StreamOutput(sys.stdout.buffer)
        if self._is_parquet:
            return ParquetOutput(
                self._output,
                options.rows_per_part,
                with_tokens=options.tells_tokens,
                num_logprobs=options.params.logprobs,
            )
        return JsonlOutput(self._output)

    def _begin(self, engine: ScoringEngine, output: Output, facts: InputFacts | None) -> Finished:
        """Make sure that the output is this batch's, and return which rows are in it."""
        if self._output is None:
            return Finished()
        if self._options.restart:
            output.clear()
        if facts is None:
            self._check_empty(output, "what comes from stdin can't be gone on with")
            self._sidecar.unlink(missing_ok=True)
            return Finished()
        identity = self._identity(engine, facts)
        if output.is_empty():
            identity.write(self._sidecar)
        else:
            self._check_same(output, identity)
        return output.recover(Expected(facts.rows, ordered=self._options.ordered))

    def _identity(self, engine: ScoringEngine, facts: InputFacts) -> BatchIdentity:
        return BatchIdentity(
            input_digest=facts.digest,
            input_bytes=facts.num_bytes,
            input_format=self._format,
            model=engine.info.model,
            model_fingerprint=engine.info.limits.cache_namespace,
            params=self._options.params,
            echo_tokens=self._options.tells_tokens,
            ordered=self._options.ordered,
            rows_per_part=self._options.rows_per_part if self._is_parquet else None,
        )

    def _check_same(self, output: Output, identity: BatchIdentity) -> None:
        known = BatchIdentity.read(self._sidecar)
        if known is None:
            self._check_empty(output, f"no {self._sidecar.name} says what it is of")
            return
        differing = identity.differences(known)
        if differing:
            raise OutputConflict(
                f"{self._output} is the output of another run: {'; '.join(differing)}. Give "
                "another output, or begin anew with --restart",
                path=str(self._output),
            )

    def _check_empty(self, output: Output, story: str) -> None:
        if not output.is_empty():
            raise OutputConflict(
                f"{self._output} is not empty, and {story}: give another output, or begin anew "
                "with --restart",
                path=str(self._output),
            )

    def _score(
        self,
        engine: ScoringEngine,
        stream: BinaryIO,
        output: Output,
        progress: BatchProgress,
        watchers: Sequence[BatchWatcher],
    ) -> None:
        options, finished = self._options, progress.finished
        if progress.num_done == progress.num_rows:
            return
        decode = engine.token_text()
        begin_s = time.monotonic()

        def check() -> None:
            for watcher in watchers:
                watcher.goes_on()

        results = RowScorer(engine, options.params).results(
            rows_of(stream, self._format, finished.rows),
            ordered=options.ordered,
            max_in_flight=options.max_in_flight,
            check=check,
        )
        with closing(results):
            for result in results:
                if isinstance(result.outcome, HaversackError):
                    if options.strict:
                        raise _of_row(result.outcome, result.row.index)
                    for watcher in watchers:
                        watcher.failed(result.row.index, result.outcome)
                record = record_of(
                    result,
                    decode,
                    with_tokens=options.tells_tokens,
                    num_logprobs=options.params.logprobs,
                )
                with _written_to(self._output):
                    output.write(record)
                finished.add(record)
                progress.num_engine_tokens += result.num_tokens
                progress.elapsed_s = time.monotonic() - begin_s
                for watcher in watchers:
                    watcher.wrote(result)
                    watcher.advanced(progress)


def _of_row(error: HaversackError, index: int) -> HaversackError:
    story = f"row {index} (line {index + 1}): {error.message}"
    return type(error)(story, **error.details, row_index=index)


@contextlib.contextmanager
def _read_from(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error}", param="source") from error


@contextlib.contextmanager
def _written_to(path: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if path is None:
            raise OutputConflict(f"stdout can't be written: {error}") from error
        raise OutputConflict(
            f"{path} can't be written: {error}. What is written stays, and the same call goes on",
            path=str(path),
        ) from error
