"""Requests, the records of what happens to them, and waiting for a journal: for its tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.actions import RecordFinished, RecordProgress, RecordSubmitted
from scheduler.codec import int_array
from scheduler.errors import WireError
from scheduler.journal import Journal
from scheduler.logprobs import LogprobRows
from scheduler.request import FinishReason, Request, RequestStats, RequestStatus
from scheduler.sampling_params import SamplingParams
from tests.strategies import ROW_LOGPROBS as K
from tests.strategies import assert_same, rows_for

DEADLINE_S = 60.0
STATS = RequestStats(num_evictions=3, num_recomputed_tokens=7)


def is_durable(journal: Journal) -> bool:
    """Wait until all that was appended is written, or can't be; return which."""
    answers: list[bool] = []
    answered = threading.Event()

    def answer(is_written: bool) -> None:
        answers.append(is_written)
        answered.set()

    journal.when_durable(answer)
    assert answered.wait(DEADLINE_S), "nobody waits for ever"
    return answers[0]


def wait_until(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if is_so():
            return
        pause.wait(0.01)
    pytest.fail("it did not come to be so in time")


def new_request(name: str = "r", parent: str | None = None, **fields: Any) -> Request:
    """A request for 5 prompt rows and 100 tokens with logprobs."""
    fields = {
        "prompt_token_ids": int_array(range(6)),
        "sampling_params": SamplingParams(prompt_logprobs=K, logprobs=K, max_tokens=100),
        "prompt_logprobs": LogprobRows(K),
        "output_logprobs": LogprobRows(K),
        "seed": 1,
        "max_tokens": 100,
    } | fields
    return Request(request_id=name, parent_id=name if parent is None else parent, **fields)


def submitted(request: Request) -> RecordSubmitted:
    return RecordSubmitted(
        request=request.encode(), request_id=request.request_id, parent_id=request.parent_id
    )


def advanced(request: Request, end: int, token: int | None = None) -> RecordProgress:
    """Advance a request by a chunk up to `end`, as the core does, and return the record of it."""
    targets = request.row_target_ids(request.num_computed_tokens, end)
    samples = end == request.num_tokens and len(request.output_token_ids) < request.max_tokens
    token = (end if token is None else token) if samples else None
    rows = rows_for(targets) if len(targets) else None
    wants_row = samples and request.output_logprobs is not None
    row = rows_for(int_array([token])) if wants_row else None
    request.advance(end, rows, token, row)
    return RecordProgress(
        request_id=request.request_id,
        num_computed_tokens=request.num_computed_tokens,
        rows=rows,
        sampled_token_id=token,
        sampled_logprobs=row,
    )


def finished(
    request: Request,
    reason: FinishReason = FinishReason.STOP,
    stop_reason: int | None = 2,
    error: WireError | None = None,
    stats: RequestStats = STATS,
) -> RecordFinished:
    """End a request, as the core does, and return the record of it."""
    request.status = RequestStatus.FINISHED
    request.finish_reason, request.stop_reason = reason, stop_reason
    request.error, request.stats = error, stats
    return RecordFinished(
        request_id=request.request_id,
        parent_id=request.parent_id,
        finish_reason=reason,
        stop_reason=stop_reason,
        error=error,
        stats=stats,
    )


def same_bits(found: list[Request] | None, expected: list[Request]) -> None:
    """Fail unless both are the same requests, however their rows are cut into segments."""
    assert found is not None
    assert [each.encode() for each in found] == [each.encode() for each in expected]
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s
