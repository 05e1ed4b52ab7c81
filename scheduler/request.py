"""One request and everything it has achieved, in one object that can be encoded and moved.

Rules:
- Nothing about a request's progress lives anywhere else: not on a worker, not in the scheduler.
- `num_computed_tokens` and the rows held change together, in `advance`, and never go back.
- What a cache may supply is computed in one place, `num_readable_tokens`.
The module knows no worker, no block and no clock.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec
import numpy as np

from scheduler.codec import IntArray, decode, encode, id_array
from scheduler.errors import InvariantViolation, WireError
from scheduler.logprobs import LogprobRows, Logprobs
from scheduler.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands; `scheduler.transitions` holds the legal changes."""

    WAITING = "waiting"
    """Queued: holds no block anywhere."""
    LOADING = "loading"
    """Has blocks on a worker, and asks the offload store for what it may read into them."""
    RUNNING = "running"
    """Has blocks on a worker and is computed, chunk by chunk."""
    SAVING = "saving"
    """Evicted; its full blocks are on their way to the offload store."""
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended (vLLM's words)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ReadLimits(NamedTuple):
    """How many tokens, from position 0, a cache may supply to a request."""

    shared: int
    """From blocks that any request computed."""
    own: int
    """From blocks that this request itself computed and saved."""


class RequestStats(msgspec.Struct):
    """What happened to a request on its way; counts only grow."""

    num_evictions: int = 0
    num_migrations: int = 0
    num_workers_lost: int = 0
    num_cached_tokens: int = 0
    """Tokens that a cache supplied before anything was computed."""
    num_restored_blocks: int = 0
    """Blocks that came back from the offload store."""
    num_recomputed_tokens: int = 0
    """Tokens whose KV was computed again after an eviction or a loss."""


class Request(msgspec.Struct, kw_only=True, eq=False):
    """A prompt, what is asked of it and how far it has come."""

    request_id: str
    """Unique among live requests."""
    prompt_token_ids: IntArray
    """int32 [N], N >= 1."""
    sampling_params: SamplingParams
    seed: int
    """The seed in force: the user's, or one drawn at submission."""
    max_tokens: int
    """Tokens to generate at most, after the context limit is taken into account."""
    client_id: str = ""
    """Whom to tell about it."""
    parent_id: str = ""
    """The id the user knows; differs from `request_id` where n > 1."""
    index: int = 0
    """Which of the n completions this is."""
    priority: int = 0
    """Lower is served first (vLLM's convention)."""
    arrival: int = 0
    """Submission order; settles ties of priority and is kept through evictions."""
    cache_salt: str | None = None
    """Requests share cached blocks only with requests of the same salt; "" is a salt too."""
    eos_token_ids: tuple[int, ...] = ()
    deadline_s: float | None = None
    """When it ends with `DeadlineExceeded`, in the events' time (seconds since the epoch)."""
    detached: bool = False
    """Whether it goes on when its client has gone."""
    submitted_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    """As the user gave them, for all n; `sampling_params` are this one's own."""
    content_hash: bytes = b""
    """Of the submission, so that sending it again is told from another under the same id."""
    traceparent: str | None = None
    """See `Submission.traceparent`."""

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose results the request holds; only `advance` changes it."""
    prompt_logprobs: LogprobRows | None = None
    """Rows for prompt indices from `first_row_index` on; None where none are asked for."""
    output_token_ids: list[int] = msgspec.field(default_factory=list)
    output_logprobs: LogprobRows | None = None
    """One row per output token; None where they are not asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token id that ended it, if one did."""
    error: WireError | None = None
    stats: RequestStats = msgspec.field(default_factory=RequestStats)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt has not been computed yet."""
        return self.num_computed_tokens < len(self.prompt_token_ids)

    @property
    def max_kv_tokens(self) -> int:
        """KV slots the request needs at most: the last sampled token's KV is never used."""
        return self.num_prompt_tokens + max(self.max_tokens - 1, 0)

    @property
    def rank(self) -> tuple[int, int]:
        """Total order of service: the smaller one goes first and is evicted last."""
        return (self.priority, self.arrival)

    @property
    def first_row_index(self) -> int:
        """First prompt index whose row is asked for; index 0 has none."""
        return max(self.sampling_params.prompt_logprobs_start, 1)

    def first_due_position(self, num_row_tokens: int = 0) -> int:
        """First position that has to be computed, for a missing row or else for its logits.

        Args:
            num_row_tokens: leading prompt indices whose rows can be had without computing them.
        """
        if self.num_rows_missing:
            position = max(self.row_position(0), num_row_tokens - 1)
            if position < self.num_prompt_tokens - 1:
                return position
        return self.num_tokens - 1

    def num_readable_tokens(self, block_size: int, num_row_tokens: int = 0) -> ReadLimits:
        """How much KV a cache may supply: a hit must supply all that is needed of its positions.

        The request can always read its own progress back. Another's KV serves it up to the first
        position that is due, and to the end of the block that this position lies in: the due ones
        in there are computed again without touching their KV. It serves none at all where the
        request skips reading.

        Args:
            block_size: tokens per block; the limit on others' KV is a multiple of it.
            num_row_tokens: leading prompt indices whose rows come with the KV.
        """
        own = min(self.num_computed_tokens, self.num_tokens - 1)
        if self.sampling_params.skips_reading_prefix_cache:
            return ReadLimits(0, own)
        num_blocks = -(-self.first_due_position(num_row_tokens) // block_size)
        return ReadLimits(min(num_blocks, self.num_tokens // block_size) * block_size, own)

    def num_prompt_rows_at(self, num_computed_tokens: int) -> int:
        """Prompt rows that are held once so many tokens are computed.

        The hidden state at position p gives the row of prompt index p + 1; the last prompt token
        gives none.
        """
        if self.prompt_logprobs is None:
            return 0
        last_index = min(num_computed_tokens, self.num_prompt_tokens - 1)
        return max(last_index - self.first_row_index + 1, 0)

    @property
    def num_rows_missing(self) -> int:
        if self.prompt_logprobs is None or not self.is_prefilling:
            return 0
        return self.num_prompt_rows_at(self.num_prompt_tokens) - self.num_prompt_rows_at(
            self.num_computed_tokens
        )

    def token_ids(self, start: int, end: int) -> IntArray:
        """Return the known tokens at positions [start, end), int32."""
        n = self.num_prompt_tokens
        if end <= n:
            return self.prompt_token_ids[start:end]
        output = id_array(self.output_token_ids[max(start - n, 0) : end - n])
        return output if start >= n else np.concatenate([self.prompt_token_ids[start:], output])

    def row_target_ids(self, start: int, end: int) -> IntArray:
        """Return the tokens whose rows a chunk [start, end) must bring, int32 [rows].

        Row j of the result belongs to position `row_position(start) + j`.
        """
        first = self.num_prompt_rows_at(max(start, self.num_computed_tokens))
        last = self.num_prompt_rows_at(end)
        return self.prompt_token_ids[self.first_row_index :][first:last]

    def row_position(self, start: int) -> int:
        """First position from `start` on whose hidden state gives a row that is still missing.

        Means something only where rows are missing.
        """
        return max(start, self.num_computed_tokens, self.first_row_index - 1)

    def advance(
        self,
        end: int,
        rows: Logprobs | None,
        sampled_token_id: int | None = None,
        sampled_logprobs: Logprobs | None = None,
    ) -> None:
        """Take in a computed chunk that ended before position `end`.

        Args:
            end: the position after the chunk's last token.
            rows: the prompt rows that `row_target_ids` asked for; None where it asked for none.
            sampled_token_id: the token sampled after the last known one, if the chunk reached it.
            sampled_logprobs: its row, where output logprobs are asked for.

        Raises:
            InvariantViolation: rows or tokens are missing, or too many; nothing has changed then.
        """
        computed = max(self.num_computed_tokens, end)
        expected = self.num_prompt_rows_at(computed) - self.num_prompt_rows_at(
            self.num_computed_tokens
        )
        brought = rows.num_rows if rows is not None else 0
        if brought != expected or end > self.num_tokens:
            raise InvariantViolation(
                f"request {self.request_id!r}: a chunk up to {end} of {self.num_tokens} tokens "
                f"brought {brought} rows where {expected} were due"
            )
        samples = end == self.num_tokens and len(self.output_token_ids) < self.max_tokens
        wants_logprobs = samples and self.output_logprobs is not None
        if samples != (sampled_token_id is not None) or wants_logprobs != (
            sampled_logprobs is not None
        ):
            raise InvariantViolation(
                f"request {self.request_id!r}: the chunk up to {end} of {self.num_tokens} tokens "
                f"has the wrong sampled token or logprobs"
            )
        if sampled_logprobs is not None and self.output_logprobs is not None:
            self.output_logprobs.check(sampled_logprobs)
            if sampled_logprobs.num_rows != 1:
                raise InvariantViolation(
                    f"request {self.request_id!r}: {sampled_logprobs.num_rows} rows for one token"
                )
        if rows is not None and self.prompt_logprobs is not None:
            self.prompt_logprobs.append(rows)
        self.num_computed_tokens = computed
        if sampled_token_id is not None:
            self.output_token_ids.append(sampled_token_id)
        if sampled_logprobs is not None and self.output_logprobs is not None:
            self.output_logprobs.append(sampled_logprobs)

    def validate(self) -> None:
        """Raise `InvariantViolation` where progress, rows and tokens do not fit together."""
        checks = {
            "rows held == rows implied by num_computed_tokens": self.prompt_logprobs is None
            or self.prompt_logprobs.num_rows == self.num_prompt_rows_at(self.num_computed_tokens),
            "one output row per output token": self.output_logprobs is None
            or self.output_logprobs.num_rows == len(self.output_token_ids),
            "num_computed_tokens <= num_tokens": 0 <= self.num_computed_tokens <= self.num_tokens,
            "no output before the prompt is done": not self.output_token_ids
            or not self.is_prefilling,
            "at most max_tokens": len(self.output_token_ids) <= self.max_tokens,
            "a finish reason exactly when finished": (self.finish_reason is not None)
            == (self.status is RequestStatus.FINISHED),
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise InvariantViolation(f"request {self.request_id!r}: {'; '.join(broken)}")

    def encode(self) -> bytes:
        """Return the whole request, rows included, as msgpack."""
        for rows in (self.prompt_logprobs, self.output_logprobs):
            if rows is not None:
                rows.array()
        return encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """Return the request that `encode` wrote, every field equal."""
        return decode(data, cls)
