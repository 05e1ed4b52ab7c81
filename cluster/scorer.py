"""The methods of a client that score pairs of a context and a continuation.

Rules:
- Of many pairs each is scored by itself: a bad one harms no other, and the error says which it was.
- Only so many are under way at once, however many there are.
How texts become tokens is the business of `cluster.pairs`, how many requests find room that of
`cluster.generating`, and what a score is that of `cluster.scoring`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, overload

from cluster.connection import Connection
from cluster.generating import Job, Window, results_as_room_comes
from cluster.handle import RequestHandle
from cluster.intake import Intake, Options
from cluster.pairs import PairEncoder, Scorable, TokenPair, with_room
from cluster.prompts import check_arguments
from cluster.scoring import Score, ScoringParams, joined, refuse, score_of
from scheduler.acceptance import row_bytes
from scheduler.errors import Cancelled, EngineUnavailable, HaversackError, InvalidRequest
from scheduler.outputs import DecodeToken, RequestOutput

_MAX_RESULT_BYTES = 256 * 2**20
_MIN_WINDOW = 512
_STEPS_AHEAD = 2
"""Full batches of every worker that the window holds: what runs, and what may follow at once."""


@dataclass(frozen=True)
class _Place:
    """Which pair a request is about, and what became of it on the way in."""

    index: int
    num_tokens: int = 0
    num_context_tokens: int = 0
    num_truncated_tokens: int = 0


class Scorer(ABC):
    """The methods of a client that score."""

    _intake: Intake
    _connection: Connection

    @abstractmethod
    def _send(self, handles: list[RequestHandle]) -> list[RequestHandle | HaversackError]:
        """Submit; return for each the handle to use, or why it was refused."""

    def score(
        self,
        context: Scorable,
        continuation: Scorable,
        params: ScoringParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> Score:
        """Score one continuation and wait for the result.

        Texts become tokens by the rules of evaluation harnesses; see `cluster.pairs`.

        Args:
            context: text or token ids; an empty one stands for the token that texts begin with.
            continuation: text, with the space in front of its first word, or token ids.
            params: defaults to `ScoringParams()`.
            priority: see `submit`.
            cache_salt: see `submit`.
            timeout_s: see `submit`.

        Raises:
            InvalidRequest: the pair or something that goes with it is wrong, or it is too long.
            ModelNotFound: there is text, and the model comes without a tokenizer.
            RequestFailed: it could not be computed.
            Cancelled: it was cancelled before it was scored.
            EngineUnavailable: the engine is gone.
        """
        params, options = _checked_params(params), Options(priority, cache_salt, timeout_s)
        with closing(self.outcomes([(context, continuation)], params, options)) as scores:
            (_, score) = next(scores)
        return _or_raise(score)

    @overload
    def score_many(
        self,
        pairs: Iterable[tuple[Scorable, Scorable]],
        params: ScoringParams | None = None,
        *,
        ordered: bool = True,
        on_error: Literal["raise"] = "raise",
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> Generator[Score, None, None]: ...
    @overload
    def score_many(
        self,
        pairs: Iterable[tuple[Scorable, Scorable]],
        params: ScoringParams | None = None,
        *,
        ordered: bool = True,
        on_error: Literal["yield"],
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> Generator[Score | HaversackError, None, None]: ...
    def score_many(
        self,
        pairs: Iterable[tuple[Scorable, Scorable]],
        params: ScoringParams | None = None,
        *,
        ordered: bool = True,
        on_error: Literal["raise", "yield"] = "raise",
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> Generator[Any, None, None]:
        """Score any number of continuations, and yield the results as they come.

        Pairs are read, and results held, no further ahead than keeps the engine busy, so both may
        be more than memory holds. Where the engine's queue is full, this waits for room. Closing
        the iterator, or an error from it, cancels what is under way.

        Args:
            pairs: of context and continuation; see `score`.
            params: for all of them.
            ordered: whether results come in the order of the pairs; else each comes when it is
                ready, and its `index` says which pair it is about.
            on_error: whether an error that is about one pair is raised, and ends the iteration, or
                is yielded in the place of its score. `details["pair_index"]` says which pair.
            request_id: what the requests' ids begin with: pair i is `<request_id>-<i>`; None makes
                ids.
            priority: see `submit`.
            cache_salt: see `submit`.
            timeout_s: see `submit`; for each pair, from when it is sent.

        Raises:
            InvalidRequest: an argument is wrong; from the iterator: a pair is.
            HaversackError: from the iterator; see `score`.
        """
        if on_error not in ("raise", "yield"):
            refuse("on_error", on_error, '"raise" or "yield"')
        params, options = _checked_params(params), Options(priority, cache_salt, timeout_s)
        check_arguments(params.sampling_params(1), request_id, *options)
        scores = self.outcomes(pairs, params, options, ordered=ordered, request_id=request_id)
        return self._each(scores, on_error)

    def score_rolling(
        self,
        document: Scorable,
        params: ScoringParams | None = None,
        *,
        max_window_tokens: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> Score:
        """Score all tokens of a document of any length, for perplexities, and wait for the result.

        It is cut into windows, in which each token is scored once, with as much before it as there
        is; see `PairEncoder.windows`. The first token is conditioned on what an empty context
        stands for.

        Args:
            document: text, which is encoded without special tokens, or token ids.
            params: as of `score`; nothing is truncated.
            max_window_tokens: tokens of a window, those that it is conditioned on included; at
                least 2, and at most the model's context, which is the default.
            priority: see `submit`.
            cache_salt: see `submit`.
            timeout_s: see `submit`; for each window, from when it is sent.

        Raises:
            InvalidRequest: an argument is wrong.
            HaversackError: see `score`.
        """
        limit = self._connection.info.limits.max_model_len
        size = limit if max_window_tokens is None else max_window_tokens
        if type(size) is not int or not 2 <= size <= limit:
            refuse("max_window_tokens", size, f"an integer from 2 to {limit}")
        params, options = _checked_params(params), Options(priority, cache_salt, timeout_s)
        windows = self._encoder(params).windows(document, size)
        with closing(self.outcomes(windows, params, options)) as scores:
            parts = [_or_raise(score) for _, score in scores]
        return joined(parts, self._intake.token_text())

    def _each(
        self, scores: Generator[tuple[int, Score | HaversackError], None, None], on_error: str
    ) -> Generator[Score | HaversackError, None, None]:
        with closing(scores):
            for index, score in scores:
                if isinstance(score, EngineUnavailable):
                    raise score
                if not isinstance(score, HaversackError):
                    yield score
                    continue
                error = type(score)(
                    f"pair {index}: {score.message}", **score.details, pair_index=index
                )
                if on_error == "raise":
                    raise error
                yield error

    def token_text(self) -> DecodeToken | None:
        """Return what gives a token's own text; None where the model comes without a tokenizer."""
        return self._intake.token_text()

    def outcomes(
        self,
        pairs: Iterable[Any],
        params: ScoringParams,
        options: Options,
        *,
        ordered: bool = True,
        max_in_flight: int | None = None,
        request_id: str | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> Generator[tuple[int, Score | HaversackError], None, None]:
        """Yield what has become of each pair, with its place: what `score_many` is made of.

        Args:
            pairs: see `score_many`. An error in the place of a pair is what has become of it.
            params: checked ones.
            options: checked ones.
            ordered: see `score_many`.
            max_in_flight: pairs that are under way at once; None: what keeps the engine busy.
            request_id: see `score_many`.
            check: called for each pair and, while this waits, a few times a second; what it raises
                ends the iteration.

        Raises:
            EngineUnavailable: nothing can be submitted any more.
        """
        info = self._connection.info
        num_seats = len(info.workers) * info.limits.max_num_seqs
        size = max_in_flight or max(_STEPS_AHEAD * num_seats, _MIN_WINDOW)
        window = Window(min(size, info.limits.max_queued_requests), _MAX_RESULT_BYTES)
        results = results_as_room_comes(
            self._jobs(pairs, params, options, request_id),
            self._send,
            self._connection.tell_cancel,
            window,
            ordered=ordered,
            check=check,
        )
        decode = self._intake.token_text()
        with closing(results):
            for place, output in results:
                yield place.index, _score(place, output, params, decode)

    def _jobs(
        self,
        pairs: Iterable[Any],
        params: ScoringParams,
        options: Options,
        request_id: str | None,
    ) -> Iterator[Job[_Place]]:
        encoder, limits = self._encoder(params), self._connection.info.limits
        bytes_per_token = row_bytes(params.num_logprobs, limits)
        for index, pair in enumerate(pairs):
            try:
                whole = encoder.pair(*_checked_pair(pair))
                used = with_room(whole, limits.max_model_len) if params.truncate else whole
                name = None if request_id is None else f"{request_id}-{index}"
                handle = self._handle(used, params, options, name)
            except HaversackError as error:
                yield Job(_Place(index), error)
                continue
            num_tokens, num_context = len(used.continuation), len(used.context)
            place = _Place(index, num_tokens, num_context, len(whole.context) - num_context)
            yield Job(place, handle, num_tokens * bytes_per_token)

    def _handle(
        self, pair: TokenPair, params: ScoringParams, options: Options, request_id: str | None
    ) -> RequestHandle:
        return self._intake.handle(
            pair.context + pair.continuation,
            params.sampling_params(len(pair.context)),
            request_id,
            options,
        )

    def _encoder(self, params: ScoringParams) -> PairEncoder:
        return pair_encoder(params, lambda: self._intake.tokenizer)


def pair_encoder(params: ScoringParams, tokenizer: Callable[[], Any]) -> PairEncoder:
    """Return what turns pairs into token ids as the parameters say; see `PairEncoder`."""
    return PairEncoder(
        tokenizer,
        add_special_tokens=params.add_special_tokens,
        prefix_token_id=params.prefix_token_id,
    )


def _score(
    place: _Place,
    output: RequestOutput | HaversackError,
    params: ScoringParams,
    decode: DecodeToken | None,
) -> Score | HaversackError:
    if isinstance(output, HaversackError):
        return output
    if output.prompt_logprobs is None:
        return Cancelled("it was cancelled before it was scored")
    return score_of(
        output.prompt_logprobs.arrays,
        params,
        decode,
        num_context_tokens=place.num_context_tokens,
        num_truncated_tokens=place.num_truncated_tokens,
        num_cached_tokens=output.num_cached_tokens or 0,
        index=place.index,
        lives=tuple(each.life for each in output.outputs if each.life is not None),
    )


def _or_raise(score: Score | HaversackError) -> Score:
    if isinstance(score, HaversackError):
        raise score
    return score


def _checked_params(params: ScoringParams | None) -> ScoringParams:
    if params is None:
        return ScoringParams()
    if type(params) is not ScoringParams:
        raise InvalidRequest(
            f"params is a {type(params).__name__}: give ScoringParams", param="params"
        )
    return params


def _checked_pair(pair: Any) -> tuple[Any, Any]:
    if isinstance(pair, HaversackError):
        raise pair
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        return pair[0], pair[1]
    raise InvalidRequest(
        f"a pair is not {pair!r:.80}: give a tuple of a context and a continuation", param="pairs"
    )
