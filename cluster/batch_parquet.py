"""Results as a folder of Parquet files, which can be gone on with after any interruption.

Rules:
- A part of so many rows is written under another name, synced and renamed: what has a part's name
  is whole. Rows of a part that was not full when the process ended are computed again.
- The last part, which may be smaller, is written when all results are there.
- Only one process at a time has the folder.
Needs pyarrow, which only this module imports, when it is used.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from cluster.batch_output import Expected, Finished, lock
from scheduler.errors import MissingPackage, OutputConflict

_SUFFIX = ".parquet"
_UNFINISHED = ".unfinished"
_ROWS_AT_ONCE = 64


class ParquetOutput:
    """A folder of `part-00000.parquet` and so on; see `Output`."""

    def __init__(
        self, folder: Path, rows_per_part: int, *, with_tokens: bool, num_logprobs: int
    ) -> None:
        """Take hold of the folder, which is made where it is not there.

        Args:
            folder: of this output alone.
            rows_per_part: rows of each part but the last.
            with_tokens: whether results have columns about each token.
            num_logprobs: whether (not 0) they have a column of alternatives.

        Raises:
            MissingPackage: pyarrow is not installed.
            OutputConflict: another process has the folder.
            OSError: it can't be made or opened.
        """
        check_pyarrow()
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._rows_per_part = rows_per_part
        self._schema = _schema(with_tokens=with_tokens, num_logprobs=num_logprobs)
        self._rows: list[dict[str, Any]] = []
        """Of the part that is not full."""
        self._num_parts = 0
        self._descriptor = os.open(folder, os.O_RDONLY)
        try:
            lock(self._descriptor, folder)
        except BaseException:
            os.close(self._descriptor)
            raise

    def is_empty(self) -> bool:
        return not any(self._folder.iterdir())

    def clear(self) -> None:
        parts = list(self._folder.glob("part-*"))
        if len(parts) != len(list(self._folder.iterdir())):
            raise OutputConflict(
                f"{self._folder} holds files that are no parts of an output: give another folder",
                path=str(self._folder),
            )
        for path in parts:
            path.unlink()

    def recover(self, expected: Expected) -> Finished:
        import pyarrow
        from pyarrow import parquet

        for path in self._folder.glob(f"*{_UNFINISHED}"):
            path.unlink()
        finished = Finished()
        names = sorted(path.name for path in self._folder.iterdir())
        for name in names:
            path = self._part(self._num_parts)
            if name != path.name:
                raise self._conflict(f"{name} is there where {path.name} was to come")
            columns = ["index", "num_tokens", "logprob", "error"]
            try:
                table = parquet.ParquetFile(path).read(columns=columns)
            except pyarrow.ArrowException as error:
                raise self._conflict(f"{name} is no whole Parquet file: {error}") from error
            for row in table.to_pylist():
                if not expected.may_follow(row["index"], finished):
                    raise self._conflict(f"{name} holds row {row['index']} out of its turn")
                finished.add(row)
            self._num_parts += 1
        return finished

    def records(self) -> Generator[dict[str, Any], None, None]:
        from pyarrow import parquet

        for number in range(self._num_parts):
            with parquet.ParquetFile(self._part(number)) as part:
                for batch in part.iter_batches(_ROWS_AT_ONCE):
                    yield from batch.to_pylist()

    def write(self, record: dict[str, Any]) -> None:
        self._rows.append(record)
        if len(self._rows) == self._rows_per_part:
            self._write_part()

    def complete(self) -> None:
        if self._rows:
            self._write_part()

    def close(self) -> None:
        os.close(self._descriptor)

    def _write_part(self) -> None:
        import pyarrow
        from pyarrow import parquet

        path = self._part(self._num_parts)
        unfinished = path.with_name(path.name + _UNFINISHED)
        rows = [r | {"id": str(r["id"])} if "id" in r else r for r in self._rows]
        with unfinished.open("wb") as file:
            parquet.write_table(pyarrow.Table.from_pylist(rows, self._schema), file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        os.fsync(self._descriptor)
        self._num_parts += 1
        self._rows = []

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05d}{_SUFFIX}"

    def _conflict(self, story: str) -> OutputConflict:
        return OutputConflict(
            f"{self._folder} was changed by somebody else: {story}. Give another folder, or begin "
            "anew with --restart",
            path=str(self._folder),
        )


def check_pyarrow() -> None:
    """Raise `MissingPackage` where pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        raise MissingPackage(
            "Parquet needs pyarrow, which is not installed: pip install 'haversack[parquet]', or "
            "give an output whose name ends in .jsonl",
            package="pyarrow",
        ) from None


def _schema(*, with_tokens: bool, num_logprobs: int) -> Any:
    import pyarrow as pa

    fields = [
        ("index", pa.int64()),
        ("id", pa.string()),
        ("logprob", pa.float64()),
        ("num_tokens", pa.int64()),
        ("is_greedy", pa.bool_()),
        ("error", pa.struct([("type", pa.string()), ("message", pa.string())])),
    ]
    if with_tokens:
        fields += [
            ("token_ids", pa.list_(pa.int32())),
            ("tokens", pa.list_(pa.string())),
            ("token_logprobs", pa.list_(pa.float32())),
            ("token_ranks", pa.list_(pa.int32())),
        ]
    if with_tokens and num_logprobs:
        alternative = [
            ("token_id", pa.int32()),
            ("token", pa.string()),
            ("logprob", pa.float32()),
            ("rank", pa.int32()),
        ]
        fields.append(("top_logprobs", pa.list_(pa.list_(pa.struct(alternative)))))
    return pa.schema(fields)
