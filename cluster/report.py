"""The report of a batch as a page: its rows' tokens, their requests' lives, and the workers.

Rules:
- Rows go into the file as they come; nothing grows with their number.
- A page that a browser is to open holds only so many rows, the first ones that were written, and
  says how many it leaves out.
- The report appears under its name when it is whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from cluster.batch_output import record_of
from cluster.batch_rows import RowResult
from cluster.batches import BatchProgress, BatchWatcher
from cluster.block_use import BlockUse
from cluster.pictures import SpanView, data_block, finite, report_page, safe_json, span_views
from cluster.scoring import Score
from scheduler.errors import OutputConflict
from scheduler.outputs import DecodeToken

MAX_ROWS = 1000
MAX_BYTES = 16 * 2**20
MAX_ROW_BYTES = 4 * 2**20
"""A row that takes more is there without its tokens."""


class Report(BatchWatcher):
    """A report that is being written; leave it with `finish`, or with `close` where it is void."""

    def __init__(
        self,
        path: Path,
        *,
        source: str,
        output: str,
        model: str,
        decode: DecodeToken | None,
        num_logprobs: int,
        use: BlockUse | None = None,
    ) -> None:
        """Begin to write.

        Args:
            path: of the page.
            source: what the page calls the input.
            output: what it calls the output.
            model: its name.
            decode: gives a token's own text; None where there is no tokenizer.
            num_logprobs: alternatives per token that the rows have.
            use: of the workers' blocks meanwhile.

        Raises:
            OutputConflict: the file can't be written.
        """
        self._path = path
        self._unfinished = path.with_name(path.name + ".unfinished")
        self._source, self._output, self._model = source, output, model
        self._decode = decode
        self._num_logprobs = num_logprobs
        self._use = use
        self._base_s = float(int(time.time()))
        """What the times in the page are after."""
        self._first_s: float | None = None
        """When the first of the requests was submitted, after that."""
        self._num_rows = 0
        self._num_bytes = 0
        before, self._after = report_page(f"Scores of {source}")
        try:
            self._file: TextIO = self._unfinished.open("w", encoding="utf-8")
        except OSError as error:
            raise self._conflict(error) from error
        self._write(before)

    # ------------------------------------------------------------------------- as a watcher

    def found(self, records: Iterator[dict[str, Any]]) -> None:
        """Take in what an earlier run has written, of whose requests no life is known."""
        for record in records:
            if self._is_full:
                return
            self._add(record, (), 0)

    def wrote(self, result: RowResult) -> None:
        """Take in a row of this run."""
        if self._is_full:
            return
        record = record_of(result, self._decode, with_tokens=True, num_logprobs=self._num_logprobs)
        self._add(record, result.parts, len(result.first_token_ids))

    # --------------------------------------------------------------------------- and its end

    def finish(self, progress: BatchProgress) -> None:
        """Write what is known at the end, and give the page its name.

        Raises:
            OutputConflict: the file can't be written.
        """
        finished = progress.finished
        workers = self._use.views(self._base_s) if self._use is not None else []
        facts = {
            "model": self._model,
            "source": self._source,
            "output": self._output,
            "made": time.strftime("%Y-%m-%d %H:%M"),
            "start_s": self._first_s,
            "num_rows": progress.num_done,
            "num_failed": finished.num_failed,
            "num_tokens": finished.num_tokens,
            "logprob": finite(finished.logprob),
            "elapsed_s": progress.elapsed_s,
            "tokens_per_s": progress.tokens_per_s,
            "workers": workers,
        }
        self._write(data_block(facts, id="sum") + self._after)
        try:
            self._file.close()
            self._unfinished.replace(self._path)
        except OSError as error:
            raise self._conflict(error) from error

    def close(self) -> None:
        """Leave no file behind, unless the report is finished."""
        if not self._file.closed:
            self._file.close()
            self._unfinished.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------- inside

    @property
    def _is_full(self) -> bool:
        return self._num_rows >= MAX_ROWS or self._num_bytes >= MAX_BYTES

    def _add(self, record: dict[str, Any], parts: Sequence[Score], num_first: int) -> None:
        view = row_view(record, parts, num_first, self._base_s)
        starts = [each["spans"][0][1] for each in view.get("parts", ()) if each["spans"]]
        if starts:
            self._first_s = min([*starts, *([] if self._first_s is None else [self._first_s])])
        block = _row_block(view)
        if len(block) > MAX_ROW_BYTES:
            block = _row_block({**view, **_NO_TOKENS, "why": "long"})
        self._num_rows += 1
        self._num_bytes += len(block)
        self._write(block)

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
        except OSError as error:
            raise self._conflict(error) from error

    def _conflict(self, error: OSError) -> OutputConflict:
        return OutputConflict(
            f"the report {self._path} can't be written: {error}; give --html another file",
            path=str(self._path),
        )


_NO_TOKENS: dict[str, Any] = dict.fromkeys(("ids", "texts", "logprobs", "ranks", "tops"))


def row_view(
    record: dict[str, Any], parts: Sequence[Score], num_first: int, base_s: float
) -> dict[str, Any]:
    """Return what a report holds of a row.

    Args:
        record: as it is written, or would be if tokens were told.
        parts: the scores of its requests; none where they are not known.
        num_first: tokens in front of the scored ones.
        base_s: what times are told after.
    """
    view: dict[str, Any] = {"index": record["index"], "id": record.get("id")}
    if record.get("error") is not None:
        return view | {"error": record["error"], "num": 0, "logprob": 0.0}
    view |= {
        "logprob": finite(record["logprob"]),
        "num": record["num_tokens"],
        "greedy": record["is_greedy"],
        "context": parts[0].num_context_tokens - num_first if parts else 0,
        "parts": _part_views(parts, num_first, base_s),
    }
    if record.get("token_ids") is None:
        return view | _NO_TOKENS
    tops = record.get("top_logprobs")
    return view | {
        "ids": record["token_ids"],
        "texts": record.get("tokens"),
        "logprobs": record["token_logprobs"],
        "ranks": record["token_ranks"],
        "tops": None if tops is None else [_tops_view(each) for each in tops],
    }


def _tops_view(tops: Sequence[dict[str, Any]] | None) -> list[tuple[Any, ...]] | None:
    if tops is None:
        return None
    return [(t["token_id"], t.get("token"), t["logprob"], t["rank"]) for t in tops]


def _part_views(
    parts: Sequence[Score], num_first: int, base_s: float
) -> list[dict[str, int | list[SpanView]]]:
    """Return of each request which tokens it brought: token j is at position j + offset in it."""
    views: list[dict[str, int | list[SpanView]]] = []
    start = 0
    for part in parts:
        spans = span_views(part.lives[0], base_s) if part.lives else []
        first = num_first if not views else start
        views.append({"start": start, "offset": part.num_context_tokens - first, "spans": spans})
        start = first + part.num_tokens
    return views


def _row_block(view: dict[str, Any]) -> str:
    head = [view["index"], view["id"], view["logprob"], view["num"]]
    return data_block(view, class_="row-data", data_head=safe_json(head))
