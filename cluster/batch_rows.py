"""What a batch is made of: rows, each of which asks for one thing to be scored, and their results.

A row is one of
- a prompt: all of its tokens but the first, which has nothing before it, as `prompt_logprobs` does;
- a context and a continuation: the continuation's tokens, by the rules of `cluster.pairs`;
- a text of any length: all of its tokens, window by window, as `Client.score_rolling` does.

Rules:
- Whatever is wrong with a row is told in its place and harms no other.
- A result depends on the row, the model and the parameters alone, never on what was scored before.
- No more rows are read, and no more results held, than keeps the engine busy.
The module knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from cluster.intake import Options
from cluster.pairs import Scorable
from cluster.prompts import parse_prompt
from cluster.scorer import pair_encoder
from cluster.scoring import Score, ScoringParams, joined
from scheduler.errors import EngineUnavailable, HaversackError, InvalidRequest
from scheduler.logprobs import Logprobs
from scheduler.outbox import EngineInfo
from scheduler.outputs import DecodeToken, SampleLogprobsView

ROW_FORMS = '"prompt", or "context" and "continuation", or "text"'


class ScoringEngine(Protocol):
    """What of a client a batch needs."""

    @property
    def info(self) -> EngineInfo:
        """See `Client.info`."""

    @property
    def tokenizer(self) -> Any:
        """See `Client.tokenizer`."""

    def token_text(self) -> DecodeToken | None:
        """See `Scorer.token_text`."""

    def outcomes(
        self,
        pairs: Iterable[Any],
        params: ScoringParams,
        options: Options,
        *,
        ordered: bool = True,
        max_in_flight: int | None = None,
        check: Callable[[], object] = ...,
    ) -> Generator[tuple[int, Score | HaversackError], None, None]:
        """See `Scorer.outcomes`."""


class WholePrompt(NamedTuple):
    """All tokens but the first are scored."""

    prompt: Scorable


class Continuation(NamedTuple):
    """The second part is scored."""

    context: Scorable
    continuation: Scorable


class Document(NamedTuple):
    """All tokens are scored, however many there are."""

    text: Scorable


Content: TypeAlias = "WholePrompt | Continuation | Document | InvalidRequest"
"""What is to be scored, or why nothing can be."""


@dataclass(frozen=True)
class Row:
    """One row of a batch."""

    index: int
    """Its place in the batch; in a file the number of its line, from 0 on."""
    content: Content
    id: str | int | None = None
    """What its owner calls it."""


class _JsonRow(msgspec.Struct):
    """The fields of a row that are looked at; others are its owner's business."""

    id: str | int | None = None
    prompt: str | list[int] | None = None
    context: str | list[int] | None = None
    continuation: str | list[int] | None = None
    text: str | list[int] | None = None


_json_row = msgspec.json.Decoder(_JsonRow)


def row_of_json(index: int, line: bytes) -> Row:
    """Return the row that a line of JSON stands for; what is wrong with it is its content."""
    try:
        found = _json_row.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Row(index, InvalidRequest(f"the line is no row: {error}", param="row"))
    content = content_of(found.prompt, found.context, found.continuation, found.text)
    return Row(index, content, found.id)


def row_of_text(index: int, line: bytes) -> Row:
    """Return the row whose prompt is a line of text."""
    try:
        return Row(index, WholePrompt(line.decode()))
    except UnicodeDecodeError as error:
        return Row(index, InvalidRequest(f"the line is no UTF-8: {error}", param="row"))


def content_of(
    prompt: Scorable | None,
    context: Scorable | None,
    continuation: Scorable | None,
    text: Scorable | None,
) -> Content:
    """Return what fields ask for; None stands for a field that is not there."""
    has_pair = context is not None or continuation is not None
    if (prompt is not None) + has_pair + (text is not None) != 1:
        return InvalidRequest(f"a row has exactly one of {ROW_FORMS}", param="row")
    if prompt is not None:
        return WholePrompt(prompt)
    if text is not None:
        return Document(text)
    if context is None or continuation is None:
        missing = "context" if context is None else "continuation"
        return InvalidRequest(f"the row has no {missing!r}", param=missing)
    return Continuation(context, continuation)


class RowResult(NamedTuple):
    """What has become of a row."""

    row: Row
    outcome: Score | HaversackError
    """The score of its scored tokens; or why there is none."""
    first_token_ids: list[int]
    """Tokens in front of the scored ones that are the row's own: the first one of a prompt."""
    num_tokens: int
    """Tokens that the engine was given for it."""
    parts: tuple[Score, ...] = ()
    """The scores of its requests, in order: one, or one for each window."""


@dataclass
class _Plan:
    """A row whose parts are under way."""

    row: Row
    pairs: Iterable[Any]
    """What goes to the engine; at least one, or an error that stands for the row."""
    num_parts: int
    first_token_ids: list[int] = field(default_factory=list)
    known: Score | None = None
    """The row's score, where the engine need not be asked."""
    parts: dict[int, Score | HaversackError] = field(default_factory=dict)
    """By their places in the row."""

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.num_parts

    def result(self, decode: DecodeToken | None) -> RowResult:
        parts = [self.parts[part] for part in range(self.num_parts)]
        scores = [part for part in parts if isinstance(part, Score)]
        num_tokens = sum(score.num_context_tokens + score.num_tokens for score in scores)
        error = next((part for part in parts if isinstance(part, HaversackError)), None)
        outcome = error or (scores[0] if len(scores) == 1 else joined(scores, decode))
        return RowResult(self.row, outcome, self.first_token_ids, num_tokens, tuple(scores))


class RowScorer:
    """Scores rows on one engine with the same parameters for all."""

    def __init__(
        self, engine: ScoringEngine, params: ScoringParams, options: Options | None = None
    ) -> None:
        self._engine = engine
        self._params = params
        self._options = options or Options()
        self._limits = engine.info.limits
        self._encoder = pair_encoder(params, lambda: engine.tokenizer)

    def results(
        self,
        rows: Iterable[Row],
        *,
        ordered: bool = True,
        max_in_flight: int | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> Generator[RowResult, None, None]:
        """Yield the result of each row: in their order, or as each row ends.

        Closing the iterator cancels what is under way.

        Args:
            rows: read no further ahead than results are held.
            ordered: whether they come in the order of the rows.
            max_in_flight: requests under way at once; None: what keeps the engine busy.
            check: called for each row and, while this waits, a few times a second; what it raises
                ends the iteration.

        Raises:
            EngineUnavailable: the engine is gone.
        """
        under_way: dict[int, tuple[_Plan, int]] = {}
        outcomes = self._engine.outcomes(
            self._pairs(rows, under_way),
            self._params,
            self._options,
            ordered=ordered,
            max_in_flight=max_in_flight,
            check=check,
        )
        decode = self._engine.token_text()
        with closing(outcomes):
            for place, outcome in outcomes:
                if isinstance(outcome, EngineUnavailable):
                    raise outcome
                plan, part = under_way.pop(place)
                plan.parts[part] = plan.known or outcome
                if plan.is_complete:
                    yield plan.result(decode)

    def _pairs(self, rows: Iterable[Row], under_way: dict[int, tuple[_Plan, int]]) -> Iterator[Any]:
        place = 0
        for row in rows:
            plan = self._plan(row)
            for part, pair in enumerate(plan.pairs):
                under_way[place] = (plan, part)
                place += 1
                yield pair

    def _plan(self, row: Row) -> _Plan:
        try:
            match row.content:
                case WholePrompt(prompt):
                    return self._plan_of_prompt(row, prompt)
                case Document(text):
                    windows = list(self._encoder.windows(text, self._limits.max_model_len))
                    return _Plan(row, windows, len(windows))
                case Continuation():
                    return _Plan(row, [row.content], 1)
                case InvalidRequest():
                    return _Plan(row, [row.content], 1)
        except HaversackError as error:
            return _Plan(row, [error], 1)

    def _plan_of_prompt(self, row: Row, prompt: Scorable) -> _Plan:
        token_ids, _ = parse_prompt(prompt, self._limits.vocab_size, self._tokenize)
        first, others = token_ids[:1].tolist(), token_ids[1:].tolist()
        if others:
            return _Plan(row, [(first, others)], 1, first)
        # Nothing is scored, and yet the row has its turn.
        turn = InvalidRequest("the prompt has one token", param="prompt")
        return _Plan(row, [turn], 1, first, known=_score_of_nothing(self._engine.token_text()))

    def _tokenize(self, text: str) -> list[int]:
        return list(self._engine.tokenizer(text).input_ids)


def _score_of_nothing(decode: DecodeToken | None) -> Score:
    return Score(
        logprob=0.0,
        is_greedy=True,
        num_tokens=0,
        token_ids=[],
        token_logprobs=SampleLogprobsView(Logprobs.empty(0), decode),
        tokens=None if decode is None else [],
        num_context_tokens=1,
    )
