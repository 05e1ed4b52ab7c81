"""What has happened to a request and when: the one record that pictures and traces are drawn from.

Rules:
- Times are those of the core's events, in seconds since the epoch; nothing here reads a clock.
- A record is bounded: a run of decode steps is one span, and where a request has too many spans
  chunks are joined, then the oldest spans are left out, which a span says.
- It is none of the request's progress: losing it loses no result. The scheduler keeps it while the
  request lives, the request's last message takes it to its client, and no journal holds it.
The module knows no request and decides nothing.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator

import msgspec

MAX_SPANS = 128
"""Spans that are kept of a request, about 100 bytes each."""
_MAX_GAP_S = 1.0
"""A request that was left out of its worker's steps for longer begins another span of decodes."""
_STORY_LENGTH = 32


class SpanKind(enum.Enum):
    """What a span is about. Between spans a request had its blocks and was not computed."""

    QUEUED = "queued"
    """Waits for a place on a worker."""
    LOADING = "loading"
    """Has blocks on a worker, and asks the offload store for what it may read into them."""
    READY = "ready"
    """Has blocks on a worker, and nothing of it has been computed since it got them."""
    PREFILL = "prefill"
    """A chunk of known tokens was computed: of its prompt, or again after an eviction or loss."""
    DECODE = "decode"
    """Steps that computed a token each to sample the next one."""
    SAVING = "saving"
    """Evicted; its blocks are on their way to the offload store."""
    PAUSED = "paused"
    """Stood still while its last blocks were copied to the worker that it moved to."""
    SAVED = "saved"
    """Blocks went to the offload store while it was computed: overlaps other spans."""
    COPIED = "copied"
    """Blocks went to the worker that it is moving to: overlaps other spans."""
    RESUMED = "resumed"
    """A moment: it has a place again, after it had lost one."""
    MOVED = "moved"
    """A moment: it goes on on another worker, that of the span."""
    OMITTED = "omitted"
    """Stands for spans that were left out; how many, its `num_steps` says."""
    FINISHED = "finished"
    """A moment: it has ended; `why` says how."""


class Span(msgspec.Struct, array_like=True, kw_only=True):
    """A time in a request's life, or a moment, which ends when it starts."""

    kind: SpanKind
    start_s: float
    """Seconds since the epoch."""
    end_s: float | None = None
    """None while it goes on."""
    worker_id: str | None = None
    """Where; None while it is on no worker."""
    first: int = 0
    """Position of the first token that it is about."""
    end: int = 0
    """Position before which it ends: what was computed, saved or copied up to here; of the other
    kinds, the tokens whose results (QUEUED, FINISHED) or KV (else) it had."""
    num_steps: int = 0
    """Steps that it took: 1 for a chunk, more where several were joined."""
    why: str = ""
    """What led to it, in words."""


# Looking a member up takes longer than all else that is done for a token.
_PREFILL, _DECODE = SpanKind.PREFILL, SpanKind.DECODE
_CHUNKS = (_PREFILL, _DECODE)
_ON_A_WORKER_AGAIN = (SpanKind.LOADING, SpanKind.READY)


class Life:
    """The spans of one request, in the order in which they ended, and the one that goes on."""

    __slots__ = ("_current", "_has_had_place", "_spans")

    def __init__(self, time_s: float, why: str, *, has_had_place: bool = False) -> None:
        """Begin in the queue.

        Args:
            has_had_place: whether it was on a worker before this record began.
        """
        self._spans: list[Span] = []
        """Those that are over, and never change any more."""
        self._current: Span | None = Span(kind=SpanKind.QUEUED, start_s=time_s, why=why)
        """The last one, which may get longer."""
        self._has_had_place = has_had_place

    @property
    def current_kind(self) -> SpanKind | None:
        """What goes on now; None between chunks and at the end."""
        return self._current.kind if self._current is not None else None

    def enter(
        self, kind: SpanKind, time_s: float, worker_id: str | None, num_tokens: int, why: str
    ) -> None:
        """Note that a time begins, and that the one so far is over."""
        was_queued = self.current_kind is SpanKind.QUEUED
        self._close(time_s)
        if was_queued and kind in _ON_A_WORKER_AGAIN:
            if self._has_had_place:
                self.note(SpanKind.RESUMED, time_s, time_s, worker_id, 0, num_tokens)
            self._has_had_place = True
        self._current = Span(
            kind=kind, start_s=time_s, worker_id=worker_id, end=num_tokens, why=why
        )

    def move(
        self,
        time_s: float,
        source_id: str,
        target_id: str,
        num_tokens: int,
        why: str,
        *,
        paused_s: float | None,
    ) -> None:
        """Note that it goes on on another worker.

        Args:
            paused_s: since when it was not to be computed any more; None where it never stopped.
        """
        if paused_s is not None:
            stopped_s = max(paused_s, self._latest_s())
            self._close(stopped_s)
            self.note(SpanKind.PAUSED, stopped_s, time_s, source_id)
        self._close(time_s)
        self.note(SpanKind.MOVED, time_s, time_s, target_id, end=num_tokens, why=why)
        self.enter(SpanKind.READY, time_s, target_id, num_tokens, why)

    def finish(self, time_s: float, num_tokens: int, why: str) -> None:
        """Note the end."""
        self._close(time_s)
        self.note(SpanKind.FINISHED, time_s, time_s, None, 0, num_tokens, why=why)

    def computed(
        self,
        worker_id: str,
        first: int,
        end: int,
        began_s: float,
        ended_s: float,
        is_decode: bool,
    ) -> None:
        """Note that positions [first, end) were computed, one step each if they were decoded."""
        current = self._current
        if (
            is_decode
            and current is not None
            and current.kind is _DECODE
            and current.end_s is not None
            and began_s - current.end_s < _MAX_GAP_S
        ):
            current.end_s = ended_s
            current.num_steps += end - first
            current.end = end
            return
        # A worker's clock runs on its own: its step can't have begun before the request was there.
        began_s = max(began_s, self._latest_s())
        self._close(began_s)
        span = Span(
            kind=_DECODE if is_decode else _PREFILL,
            start_s=min(began_s, ended_s),
            end_s=ended_s,
            worker_id=worker_id,
            first=first,
            end=end,
            num_steps=end - first if is_decode else 1,
        )
        if is_decode:
            self._current = span
        else:
            self._add(span)

    def note(
        self,
        kind: SpanKind,
        start_s: float,
        end_s: float,
        worker_id: str | None,
        first: int = 0,
        end: int = 0,
        *,
        why: str = "",
    ) -> None:
        """Add a time that is over, or a moment, beside what goes on."""
        self._add(
            Span(
                kind=kind,
                start_s=start_s,
                end_s=end_s,
                worker_id=worker_id,
                first=first,
                end=end,
                why=why,
            )
        )

    def spans(self) -> list[Span]:
        """Return all spans as they are now, oldest first; what goes on is last."""
        if self._current is None:
            return list(self._spans)
        return [*self._spans, copy.copy(self._current)]

    def story(self) -> Iterator[str]:
        """Tell what has happened last, oldest first, for error messages."""
        for span in self.spans()[-_STORY_LENGTH:]:
            place = f" on {span.worker_id}" if span.worker_id else ""
            what = span.why or f"tokens {span.first} to {span.end}"
            yield f"{span.start_s:.3f}s {span.kind.value}{place} ({what})"

    def _latest_s(self) -> float:
        """Since when it has been doing what it does now."""
        if self._current is not None:
            current = self._current
            return current.start_s if current.end_s is None else current.end_s
        for span in reversed(self._spans):
            if span.kind in _CHUNKS and span.end_s is not None:
                return span.end_s
        return 0.0

    def _close(self, time_s: float) -> None:
        current, self._current = self._current, None
        if current is None:
            return
        if current.end_s is None:
            current.end_s = max(time_s, current.start_s)
        self._add(current)

    def _add(self, span: Span) -> None:
        self._spans.append(span)
        if len(self._spans) > MAX_SPANS:
            self._spans = _shortened(self._spans)


def _shortened(spans: list[Span]) -> list[Span]:
    """Return at most three quarters of `MAX_SPANS`, which tell the same less exactly."""
    kept: list[Span] = []
    is_pair = True
    for span in spans:
        if not is_pair and _continues(kept[-1], span):
            kept[-1] = msgspec.structs.replace(
                kept[-1],
                end_s=span.end_s,
                end=span.end,
                num_steps=kept[-1].num_steps + span.num_steps,
            )
            is_pair = True
        else:
            kept.append(span)
            is_pair = False
    num_too_many = len(kept) - MAX_SPANS * 3 // 4
    if num_too_many <= 0:
        return kept
    # The first one says when all began; the one that stands for others takes a place too.
    left_out, rest = kept[1 : num_too_many + 2], kept[num_too_many + 2 :]
    omitted = Span(
        kind=SpanKind.OMITTED,
        start_s=left_out[0].start_s,
        end_s=max(span.end_s or span.start_s for span in left_out),
        num_steps=sum(s.num_steps if s.kind is SpanKind.OMITTED else 1 for s in left_out),
        why="too many to keep",
    )
    return [kept[0], omitted, *rest]


def _continues(last: Span, span: Span) -> bool:
    return (
        span.kind is last.kind
        and span.kind in _CHUNKS
        and span.worker_id == last.worker_id
        and span.first == last.end
        and last.end_s is not None
        and span.start_s - last.end_s < _MAX_GAP_S
    )
