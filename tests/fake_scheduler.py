"""The scheduler's side of the client protocol, in one process, with faults on demand.

Tokens and rows follow from seed and position alone, as the engine's do, so a request that starts
again brings the same bits. Time passes where clients look: a poll that finds nothing new computes a
token of every request, and pauses move the clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cluster.detokenizer import TokenTable
from cluster.patience import Unreachable
from scheduler import policy
from scheduler.codec import decode, encode, int_array
from scheduler.config import SchedulerConfig
from scheduler.errors import (
    DuplicateRequest,
    HaversackError,
    UnknownClient,
    UnknownRequest,
)
from scheduler.logprobs import LogprobRows, Logprobs
from scheduler.messages import OutputDelta, SchedulerStats, Submission
from scheduler.outbox import EngineInfo, EngineStats, Outbox, PollAnswer
from scheduler.request import FinishReason, Request, RequestStats, RequestStatus
from scheduler.submissions import content_hash, make_requests

ALPHABET = b"abcd "
"""Token ids are bytes, few of them, so that stop strings are met."""


def rows(seed: int, start: int, token_ids: np.ndarray[Any, Any], k: int) -> Logprobs:
    """Rows of the tokens at positions from `start` on, that depend on nothing else."""
    found = np.zeros((len(token_ids), k + 1), np.int32)
    found[:, 0] = token_ids
    found[:, 1:] = np.arange(k)
    scale = np.arange(start, start + len(token_ids), dtype=np.float32).reshape(-1, 1)
    return Logprobs(found, -np.sqrt(found + scale + seed % 97).astype(np.float32), found + 1)


class Family:
    """The requests of one submission."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.requests = make_requests(submission)
        self.num_steps = 0
        self.followers: dict[str, list[int]] = {}
        """Tokens of each completion that a client was told, -1 where it knows not even the prompt;
        by client."""
        for request in self.requests:
            params = request.sampling_params
            if params.prompt_logprobs is not None:
                request.prompt_logprobs = LogprobRows(params.prompt_logprobs)
            if params.logprobs is not None:
                request.output_logprobs = LogprobRows(params.logprobs)

    @property
    def is_over(self) -> bool:
        return all(request.finish_reason is not None for request in self.requests)

    @property
    def is_aborted(self) -> bool:
        return any(r.finish_reason is FinishReason.ABORT for r in self.requests)

    def step(self) -> None:
        """Compute the prompt, or one more token, of each completion."""
        self.num_steps += 1
        for request in self.requests:
            if request.finish_reason is None:
                self._advance(request)
                ended = policy.end_of(request)
                if ended is not None:
                    self.finish(request, *ended)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | None) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason

    def _advance(self, request: Request) -> None:
        targets = request.row_target_ids(0, request.num_tokens)
        wants_rows = request.prompt_logprobs is not None and len(targets)
        position, params = request.num_tokens, request.sampling_params
        samples = len(request.output_token_ids) < request.max_tokens
        key = f"{request.seed} {position}".encode()
        token = ALPHABET[hashlib.blake2b(key).digest()[0] % len(ALPHABET)]
        request.advance(
            request.num_tokens,
            rows(0, request.first_row_index, targets, params.prompt_logprobs or 0)
            if wants_rows
            else None,
            token if samples else None,
            rows(request.seed, position, np.array([token]), params.logprobs)
            if samples and params.logprobs is not None
            else None,
        )


def delta_of(request: Request, num_told: int) -> OutputDelta | None:
    """What is visible of a request beyond `num_told` tokens; None if nothing is."""
    is_last = request.finish_reason is not None
    num_tokens = len(request.output_token_ids)
    if request.is_prefilling and not is_last:
        return None
    first = max(num_told, 0)
    is_prompt_new = num_told < 0 and not request.is_prefilling
    if num_tokens <= first and not is_prompt_new and not is_last:
        return None
    prompt, own = request.prompt_logprobs, request.output_logprobs
    return OutputDelta(
        request_id=request.parent_id,
        index=request.index,
        num_previous_tokens=first,
        new_token_ids=int_array(request.output_token_ids[first:]),
        new_logprobs=own.array()[first:] if own is not None else None,
        prompt_logprobs=prompt.array() if prompt is not None and is_prompt_new else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        stats=RequestStats() if is_last else None,
    )


class FakeScheduler:
    """`Calls` of a scheduler that can be restarted, frozen, killed, and made to lose answers."""

    def __init__(self, *, has_journal: bool = True) -> None:
        self.has_journal = has_journal
        self.now_s = 0.0
        self.families: dict[str, Family] = {}
        """By id; those that are over are kept while there is a journal."""
        self.outboxes: dict[str, Outbox] = {}
        self.closed: HaversackError | None = None
        self.is_absent = False
        self.is_frozen = False
        self.refusals: dict[str, HaversackError] = {}
        """Ids that are refused, and why."""
        self.before: dict[str, Iterator[Callable[[], None]]] = {}
        """What happens before the next calls of a method."""
        self.after: dict[str, Iterator[Callable[[], None]]] = {}
        """What happens after the next calls of a method were carried out, before they return."""
        self.calls: list[tuple[str, Any]] = []
        self.num_tokens_computed = 0
        self.epoch_step = 1000
        """How far apart the numbers of two outboxes begin."""
        self._epoch = 0

    # --------------------------------------------------------------------------------- Calls

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append((method, args))
        for action in _next(self.before, method):
            action()
        if self.is_absent or self.is_frozen:
            self.now_s += timeout_s if self.is_frozen else 0.0
            raise Unreachable("out of reach", is_absent=self.is_absent)
        answer = getattr(self, method)(*args)
        for action in _next(self.after, method):
            action()
        return answer

    def tell(self, method: str, *args: Any) -> None:
        self.calls.append((method, args))
        if not self.is_absent and not self.is_frozen:
            getattr(self, method)(*args)

    def num_calls(self, method: str) -> int:
        return sum(called == method for called, _ in self.calls)

    # --------------------------------------------------------------------------------- faults

    def lose_answer(self) -> None:
        raise Unreachable("the answer is lost")

    def restart(self, num_lost_steps: int = 0) -> None:
        """Start anew: with the journal, but for its last steps, or with nothing."""
        self.outboxes = {}
        old, self.families = self.families, {}
        if not self.has_journal:
            return
        for request_id, family in old.items():
            again = self.families[request_id] = Family(family.submission)
            for _ in range(family.num_steps - (0 if family.is_over else num_lost_steps)):
                again.step()
            for request, known in zip(again.requests, family.requests, strict=True):
                if known.finish_reason is FinishReason.ABORT:
                    again.finish(request, FinishReason.ABORT, None)

    def forget(self) -> None:
        """Give every client up."""
        self.outboxes = {}
        for request_id in list(self.families):
            self._abort(request_id)

    # -------------------------------------------------------------------------------- methods

    def connect(self, client_id: str) -> bytes:
        self._check_open()
        if client_id not in self.outboxes:
            self._epoch += self.epoch_step
            self.outboxes[client_id] = Outbox(self._epoch)
        return encode(
            EngineInfo("fake", {}, SchedulerConfig(), [], epoch=self.outboxes[client_id].epoch)
        )

    def disconnect(self, client_id: str) -> None:
        self.outboxes.pop(client_id, None)

    def submit(self, client_id: str, data: bytes) -> bytes:
        self._check_connected(client_id)
        answers = []
        for submission in decode(data, list[Submission]):
            error = self._submit(client_id, submission)
            answers.append(error.to_wire() if error is not None else None)
        return encode(answers)

    def attach(self, client_id: str, request_id: str) -> bytes:
        self._check_connected(client_id)
        family = self.families.get(request_id)
        if family is None:
            raise UnknownRequest(f"nothing is known of {request_id!r}")
        self._follow(client_id, family)
        return encode(family.submission)

    def poll(self, client_id: str, acked: int, timeout_s: float) -> bytes:
        outbox = self.outboxes.get(client_id)
        if outbox is None:
            return encode(PollAnswer(is_forgotten=True))
        outbox.acknowledge(acked)
        if not outbox and self.closed is None:
            self.step()
        if not outbox and self.closed is None:
            self.now_s += timeout_s
        closed = self.closed.to_wire() if self.closed is not None else None
        return encode(PollAnswer(outbox.ready(), closed))

    def cancel(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._abort(request_id)

    def stats(self) -> bytes:
        return encode(EngineStats(SchedulerStats()))

    def drain(self, worker_id: str, deadline_s: float, replace: bool) -> None:
        self._check_open()

    # --------------------------------------------------------------------------------- inside

    def step(self) -> None:
        """Compute what is next of every live request, and tell who follows."""
        for family in list(self.families.values()):
            if not family.is_over:
                self.num_tokens_computed += 1
                family.step()
                self._tell(family)

    def _submit(self, client_id: str, submission: Submission) -> HaversackError | None:
        if submission.request_id in self.refusals:
            return self.refusals[submission.request_id]
        family = self.families.get(submission.request_id)
        same = family is not None and content_hash(family.submission) == content_hash(submission)
        if family is not None and not same and not family.is_over:
            return DuplicateRequest("a live request has this id")
        if family is None or not same or family.is_aborted:
            family = self.families[submission.request_id] = Family(submission)
        self._follow(client_id, family)
        return None

    def _follow(self, client_id: str, family: Family) -> None:
        family.followers[client_id] = [-1] * len(family.requests)
        self._tell(family)

    def _abort(self, request_id: str) -> None:
        for family in list(self.families.values()):
            for request in family.requests:
                if request_id in (request.request_id, request.parent_id) and (
                    request.finish_reason is None
                ):
                    family.finish(request, FinishReason.ABORT, None)
            self._tell(family)

    def _tell(self, family: Family) -> None:
        for client_id, told in family.followers.items():
            for request in family.requests:
                num_told = told[request.index]
                delta = delta_of(request, num_told) if num_told < _TOLD_THE_END else None
                if delta is None:
                    continue
                told[request.index] = len(request.output_token_ids)
                if request.finish_reason is not None:
                    told[request.index] = _TOLD_THE_END
                if client_id in self.outboxes:
                    self.outboxes[client_id].put(delta)
        if family.is_over and not self.has_journal:
            self.families.pop(family.submission.request_id, None)

    def _check_open(self) -> None:
        if self.closed is not None:
            raise self.closed

    def _check_connected(self, client_id: str) -> None:
        self._check_open()
        if client_id not in self.outboxes:
            raise UnknownClient("no such client is connected: connect first")


_TOLD_THE_END = 2**31


def _next(
    planned: dict[str, Iterator[Callable[[], None]]], method: str
) -> Iterator[Callable[[], None]]:
    action = next(planned.get(method, iter(())), None)
    if action is not None:
        yield action


class ByteTable(TokenTable):
    """Token ids are bytes."""

    def __init__(self) -> None:
        """There is no tokenizer."""

    def is_special(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])
