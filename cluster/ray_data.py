"""Scores from Ray Data: a class for `Dataset.map_batches` that uses the running engine.

    dataset.map_batches(
        Scorer,
        fn_constructor_kwargs={"text": "document"},
        batch_size=256,
        concurrency=2,
        num_cpus=0,
    )

Each of Ray Data's actors is a client of the engine of that name, which has to be running on the
same Ray cluster; the actors hold no model, and leave their CPUs to the tasks that read and write.
Rows are what they are in `cluster.batch_rows`, and their columns stay as they are. A bad row has
its error in the `error` column and harms no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cluster.batch_rows import Content, Row, RowResult, RowScorer, content_of
from cluster.client import Client
from cluster.scoring import ScoringParams
from scheduler.errors import HaversackError, InvalidRequest

_FIELDS = ("prompt", "context", "continuation", "text")
_SUMS = ("logprob", "num_tokens", "is_greedy", "error")
_TOKENS = ("token_ids", "token_logprobs", "token_ranks")


class Scorer:
    """Adds scores to batches of rows.

    New columns, each with `prefix` in front of its name:
        logprob: float64; the sum over the scored tokens, NaN for a bad row.
        num_tokens: int64; scored ones, 0 for a bad row.
        is_greedy: bool; whether greedy decoding would give these tokens, False for a bad row.
        error: None, or what is wrong with the row.
    and with `echo_tokens` lists, empty for a bad row:
        token_ids: int64; of the scored tokens.
        token_logprobs: float64.
        token_ranks: int64.
    """

    def __init__(
        self,
        *,
        prompt: str | None = None,
        context: str | None = None,
        continuation: str | None = None,
        text: str | None = None,
        prefix: str = "",
        echo_tokens: bool = False,
        on_error: str = "column",
        params: ScoringParams | None = None,
        name: str = "engine",
        namespace: str = "haversack",
    ) -> None:
        """Join the engine.

        Args:
            prompt: the column with prompts, text or token ids; all but their first token is scored.
            context: the column with contexts, together with `continuation`.
            continuation: the column with what is scored after its context.
            text: the column with texts of any length, all of which is scored.
            prefix: of the names of the new columns.
            echo_tokens: whether there are columns about each token.
            on_error: "column", or "raise" for an exception at the first bad row.
            params: for all rows; `logprobs` changes nothing here.
            name: the engine's.
            namespace: the engine's.

        Raises:
            InvalidRequest: an argument is wrong.
            EngineUnavailable: no such engine is running.
        """
        named = dict(zip(_FIELDS, (prompt, context, continuation, text), strict=True))
        as_row = content_of(prompt, context, continuation, text)
        if isinstance(as_row, InvalidRequest):
            raise InvalidRequest(f"columns: {as_row.message}", **as_row.details)
        if on_error not in ("column", "raise"):
            raise InvalidRequest(
                f'on_error={on_error!r} is not allowed: give "column" or "raise"', param="on_error"
            )
        self._columns = {field: column for field, column in named.items() if column is not None}
        self._prefix = prefix
        self._names = _SUMS + (_TOKENS if echo_tokens else ())
        self._raises = on_error == "raise"
        self._client = Client(start=False, name=name, namespace=namespace)
        self._scorer = RowScorer(self._client, params or ScoringParams())

    def __call__(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Return the batch with the new columns.

        Args:
            batch: columns by name, as Ray Data's "numpy" format has them.

        Raises:
            InvalidRequest: a column is not there, or has a name that a new one is to have; with
                `on_error="raise"`, a row is bad.
            HaversackError: with `on_error="raise"`, what became of a bad row.
            EngineUnavailable: the engine is gone.
        """
        self._check_columns(batch)
        num_rows = len(next(iter(batch.values())))
        rows = [Row(index, self._content(batch, index)) for index in range(num_rows)]
        found = [self._values(result) for result in self._scorer.results(rows)]
        new = {
            self._prefix + name: _column(name, [values[name] for values in found])
            for name in self._names
        }
        return {**batch, **new}

    def close(self) -> None:
        """Leave the engine."""
        self._client.close()

    def _check_columns(self, batch: Mapping[str, Any]) -> None:
        missing = sorted(set(self._columns.values()) - set(batch))
        if missing:
            raise InvalidRequest(
                f"there is no column {missing[0]!r}; there are {', '.join(batch)}", param="columns"
            )
        taken = sorted({self._prefix + name for name in self._names} & set(batch))
        if taken:
            raise InvalidRequest(
                f"there is a column {taken[0]!r} already: give a prefix for the new ones",
                param="prefix",
            )

    def _content(self, batch: Mapping[str, np.ndarray[Any, Any]], index: int) -> Content:
        values = {field: _plain(batch[column][index]) for field, column in self._columns.items()}
        return content_of(*(values.get(field) for field in _FIELDS))

    def _values(self, result: RowResult) -> dict[str, Any]:
        outcome = result.outcome
        if isinstance(outcome, HaversackError):
            if self._raises:
                raise type(outcome)(
                    f"row {result.row.index} of the batch: {outcome.message}", **outcome.details
                )
            error = f"{type(outcome).__name__}: {outcome.message}"
            sums = {"logprob": math.nan, "num_tokens": 0, "is_greedy": False, "error": error}
            return sums | {name: [] for name in _TOKENS}
        arrays = outcome.token_logprobs.arrays
        return {
            "logprob": outcome.logprob,
            "num_tokens": outcome.num_tokens,
            "is_greedy": outcome.is_greedy,
            "error": None,
            "token_ids": outcome.token_ids,
            "token_logprobs": arrays.logprobs[:, 0].tolist(),
            "token_ranks": arrays.ranks[:, 0].tolist(),
        }


def _plain(value: Any) -> Any:
    """Return a cell without numpy's types."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _column(name: str, values: list[Any]) -> np.ndarray[Any, Any]:
    if name in ("error", *_TOKENS):
        column = np.empty(len(values), object)
        for index, value in enumerate(values):
            column[index] = value  # all at once, lists of one length would be taken apart
        return column
    return np.array(values)
