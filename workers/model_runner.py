"""Runs one step of one worker: a batch of chunks in, new tokens and rows out.

The runner knows of a request only what it was sent: its block table, its parameters, its token
counts where penalties need them. It takes no decision and holds nothing that the scheduler could
not send again. Rules:
- Released requests are forgotten before any chunk is looked at.
- All chunks of a step are one flattened batch; the output layer runs only on rows that need it.
- A chunk that can't be computed, or that meets NaN, fails alone: the others' bits are the same.
- A request that failed is forgotten, so that what was sent for it meanwhile fails too. What was
  sent for one that has ended meanwhile is not computed.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from scheduler.codec import FloatArray, IntArray, int_array
from scheduler.errors import HaversackError, InvalidRequest, NumericalError
from scheduler.logprobs import Logprobs
from scheduler.messages import (
    LAST_SAMPLED,
    Chunk,
    ChunkResult,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    WorkerInfo,
)
from scheduler.sampling_params import ALL_LOGPROBS
from workers.attention import AttentionBatch, use_batch
from workers.kv_cache import ByteArray, KVCache, Span
from workers.loader import LoadedModel
from workers.logprobs import (
    LOGPROBS_BYTES,
    Logits,
    Rows,
    normalise,
    rows_per_slice,
    select_rows,
    select_token_rows,
    top_1,
)
from workers.sampler import Draw, TokenCounts, sample

_LOGITS_BYTES = 48 * 2**20
"""Logits that the output layer makes at once on CPU, counted in fp32; few rows make it slow."""


class _Tracked:
    """What the runner keeps of a request between steps."""

    def __init__(self, new: NewRequest) -> None:
        self.new = new
        self.block_table: IntArray = np.empty(0, np.int32)
        self.num_output_tokens = new.num_output_tokens
        self.last_token: int | None = None
        """Sampled here last."""
        self.has_ended = False
        """Whether that token ends the request."""
        self.counts = (
            TokenCounts(new.history, new.num_prompt_tokens)
            if new.sampling_params.needs_token_history
            else None
        )

    def draw(self) -> Draw:
        """Return what the next draw depends on."""
        return Draw(
            self.new.sampling_params,
            self.new.seed,
            self.num_output_tokens,
            self.new.stop_ids,
            self.counts,
        )

    def last(self) -> IntArray:
        """Return the token that was sampled here last, [1]."""
        return int_array([self.last_token])

    def take(self, token: int) -> None:
        """Note a token that was sampled here."""
        self.num_output_tokens += 1
        self.last_token = token
        has_min = self.num_output_tokens >= self.new.sampling_params.min_tokens
        self.has_ended = has_min and token in self.new.stop_ids
        if self.counts is not None:
            self.counts.append([token])


@dataclass
class Work:
    """A chunk on its way through a step."""

    chunk: Chunk
    tracked: _Tracked
    span: Span
    token_ids: IntArray
    error: HaversackError | None = None
    parts: list[Logprobs] = field(default_factory=list)
    sampled_token_id: int | None = None
    sampled_logprobs: Logprobs | None = None
    more: list[Work] = field(default_factory=list)
    """The decodes that followed, one after the other."""

    def result(self) -> ChunkResult:
        """Return what the chunk brought, with all that followed."""
        request_id = self.chunk.request_id
        works = [self, *self.more]
        if (error := works[-1].error) is not None:
            return ChunkResult(request_id, error=error.to_wire())
        rows = [work.sampled_logprobs for work in works if work.sampled_logprobs is not None]
        more = [work.sampled_token_id for work in self.more]
        return ChunkResult(
            request_id,
            rows=Logprobs.concat(self.parts) if self.parts else None,
            sampled_token_id=self.sampled_token_id,
            sampled_logprobs=Logprobs.concat(rows) if rows else None,
            more_token_ids=int_array(more) if self.chunk.max_more_tokens else None,
        )

    def next(self, first_row: int) -> Work | None:
        """Return the decode that follows as row `first_row` of a batch; None where none does."""
        last = self.more[-1] if self.more else self
        if (
            len(self.more) == self.chunk.max_more_tokens
            or last.error is not None
            or self.tracked.has_ended
        ):
            return None
        span = Span(first_row, last.span.end, 1, last.span.block_table)
        work = Work(_decode_of(self.chunk, span.start), self.tracked, span, self.tracked.last())
        self.more.append(work)
        return work


@dataclass(frozen=True)
class _RowsDue:
    """Rows that one chunk needs from the output layer."""

    work: Work
    num_logprobs: int
    """Columns beside the actual token's."""
    token_ids: tuple[int, ...] | None
    """What those columns hold; None for the most likely tokens."""
    hidden_rows: IntArray
    """Rows of the flattened batch."""
    targets: IntArray
    """The actual tokens."""


class ModelRunner:
    """One model and its KV cache on one device."""

    def __init__(self, model: LoadedModel, *, num_blocks: int, block_size: int = 16) -> None:
        """Take a loaded model and make room for `num_blocks` KV blocks of `block_size` tokens."""
        self._model = model
        self._cache = KVCache(
            model.layers,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._tracked: dict[str, _Tracked] = {}
        logprobs_bytes = LOGPROBS_BYTES[model.device.type]
        self._rows_per_slice = rows_per_slice(model.vocab_size, max(_LOGITS_BYTES, logprobs_bytes))

    @property
    def num_tracked_requests(self) -> int:
        """Requests that something is kept of."""
        return len(self._tracked)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Keep nothing of some requests, known or not."""
        for request_id in request_ids:
            self._tracked.pop(request_id, None)

    def forget_all(self) -> None:
        """Keep nothing of any request: each is as unknown as before its first chunk."""
        self._tracked.clear()

    def info(self, worker_id: str, node_id: str = "") -> WorkerInfo:
        """Return what the scheduler has to know about this worker."""
        return WorkerInfo(
            worker_id=worker_id,
            device=str(self._model.device),
            num_blocks=self._cache.num_blocks,
            block_size=self._cache.block_size,
            block_bytes=self._cache.block_bytes * self._model.ranks.size,
            vocab_size=self._model.vocab_size,
            max_model_len=self._model.max_model_len,
            eos_token_ids=self._model.eos_token_ids,
            model_fingerprint=f"{self._model.fingerprint}-{self._cache.block_size}",
            pid=os.getpid(),
            node_id=node_id,
            tensor_parallel_size=self._model.ranks.size,
        )

    def read_blocks(self, block_ids: Sequence[int]) -> ByteArray:
        """See `KVCache.read_blocks`."""
        return self._cache.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: ByteArray) -> None:
        """See `KVCache.write_blocks`."""
        self._cache.write_blocks(block_ids, data)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step; return one result per chunk, in their order.

        A result with an error is that of its request alone. An exception from here means that
        the whole step failed.
        """
        started = time.perf_counter()
        self.forget(step.released_request_ids)
        try:
            results = self._results(step.chunks)
        except BaseException:
            self.forget(chunk.request_id for chunk in step.chunks)
            raise
        self.forget(result.request_id for result in results if result.error is not None)
        return ModelRunnerOutput(step.step_id, results, time.perf_counter() - started)

    def _results(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        works: list[Work] = []
        outcomes: list[Work | ChunkResult] = []
        first_row = 0
        for chunk in chunks:
            known = self._tracked.get(chunk.request_id)
            if known is not None and known.has_ended and chunk.new is None:
                outcomes.append(ChunkResult(chunk.request_id))
                continue
            try:
                work = self._admit(chunk, first_row, taken={w.chunk.request_id for w in works})
            except HaversackError as error:
                outcomes.append(ChunkResult(chunk.request_id, error=error.to_wire()))
                continue
            works.append(work)
            outcomes.append(work)
            first_row += work.span.num_tokens
        if works:
            self._compute(works)
        while followers := _followers(works):
            self._compute(followers)
        return [item.result() if isinstance(item, Work) else item for item in outcomes]

    def _admit(self, chunk: Chunk, first_row: int, taken: set[str]) -> Work:
        """Take in what is new of a request, and check that its chunk can be computed."""
        tracked = _Tracked(chunk.new) if chunk.new else self._tracked.get(chunk.request_id)
        if tracked is None:
            raise InvalidRequest(f"request {chunk.request_id!r} is not known to this worker")
        table = np.concatenate([tracked.block_table, chunk.new_block_ids])
        token_ids = chunk.token_ids
        if tracked.last_token is not None and token_ids.tolist() == [LAST_SAMPLED]:
            token_ids = tracked.last()
        span = Span(first_row, chunk.start, len(token_ids), table, chunk.first_new_position)
        end = span.end + chunk.max_more_tokens
        vocab, cache = self._model.vocab_size, self._cache
        rows = range(chunk.first_row_position, chunk.first_row_position + len(chunk.row_target_ids))
        checks = {
            "one chunk of a request at a time": chunk.request_id not in taken,
            "at least one token": span.num_tokens > 0,
            f"positions in 0..{self._model.max_model_len - 1}": chunk.start >= 0
            and end <= self._model.max_model_len,
            f"token ids in 0..{vocab - 1}": _within(token_ids, vocab)
            and _within(chunk.row_target_ids, vocab),
            f"block ids in 0..{cache.num_blocks - 1}": _within(table, cache.num_blocks),
            "blocks for every token": len(table) * cache.block_size >= end,
            "a sampled token before further ones": chunk.sample or not chunk.max_more_tokens,
            "rows at positions of the chunk": not rows
            or (chunk.start <= rows.start and rows.stop <= span.end),
            "rows only where they are asked for": not rows
            or tracked.new.num_prompt_logprobs is not None,
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise InvalidRequest(
                f"a chunk of request {chunk.request_id!r} can't be computed; it needs "
                f"{', '.join(broken)}",
                request_id=chunk.request_id,
            )
        tracked.block_table = table
        self._tracked[chunk.request_id] = tracked
        return Work(chunk, tracked, span, token_ids)

    def _compute(self, works: list[Work]) -> None:
        """Run the model over all chunks and fill in what each brought."""
        device = self._model.device
        num_tokens = sum(work.span.num_tokens for work in works)
        token_ids = np.zeros(self._model.padding.rows(num_tokens), np.int64)
        positions = np.zeros_like(token_ids)
        for work in works:
            rows = slice(work.span.first_row, work.span.first_row + work.span.num_tokens)
            token_ids[rows] = work.token_ids
            positions[rows] = np.arange(work.span.start, work.span.end)
        batch = AttentionBatch([work.span for work in works], self._cache)
        with use_batch(batch):
            hidden = self._model.hidden_states(
                torch.from_numpy(token_ids).to(device), torch.from_numpy(positions).to(device)
            )
        self._finish(works, hidden)

    def _finish(self, works: list[Work], hidden: torch.Tensor) -> None:
        """Make of a batch's hidden states [rows, hidden] what each chunk asks for."""
        num_tokens = sum(work.span.num_tokens for work in works)
        finite = torch.isfinite(hidden[:num_tokens]).all(dim=1).cpu().numpy()
        starts = [work.span.first_row for work in works]
        for work, good in zip(works, np.logical_and.reduceat(finite, starts), strict=True):
            if not good:
                self._fail(work, "its hidden states")
        self._prompt_rows(works, hidden)
        self._sample(works, hidden)

    def _fail(self, work: Work, where: str) -> None:
        """Fail one request for NaN or infinity, and wipe the KV that its chunk wrote."""
        work.error = NumericalError(
            f"request {work.chunk.request_id!r}: the model produced NaN or infinity in {where} "
            f"at positions {work.span.start}..{work.span.end - 1}",
            request_id=work.chunk.request_id,
        )
        slots = torch.from_numpy(work.span.slots(self._cache.block_size))
        self._cache.zero_slots(slots.to(self._model.device))

    def _logits(self, hidden: torch.Tensor, rows: IntArray) -> Logits:
        """Return logits of some rows, and of a few more where those are what keeps bits exact."""
        index = np.zeros(self._model.padding.rows(len(rows)), np.int64)
        index[: len(rows)] = rows
        picked = hidden.index_select(0, torch.from_numpy(index).to(hidden.device))
        return self._model.logits(picked)

    def _prompt_rows(self, works: list[Work], hidden: torch.Tensor) -> None:
        """Make the prompt rows of all chunks, a slice of bounded size at a time."""
        due = []
        for work in works:
            k = work.tracked.new.num_prompt_logprobs
            if work.error is None and k is not None and len(work.chunk.row_target_ids):
                first = work.span.first_row + work.chunk.first_row_position - work.span.start
                targets = work.chunk.row_target_ids
                hidden_rows = first + np.arange(len(targets), dtype=np.int32)
                token_ids = work.tracked.new.sampling_params.prompt_logprob_token_ids
                due.append(_RowsDue(work, k, token_ids, hidden_rows, targets))
        # Rows with the same columns are then neighbours, and are selected together.
        due.sort(key=_columns)
        for piece in _slices(due, self._rows_per_slice):
            needed = np.concatenate([rows.hidden_rows for rows in piece])
            logits = self._logits(hidden, needed)[: len(needed)]
            for rows, found in self._select(piece, normalise(logits)):
                rows.work.parts.append(found)

    def _select(self, piece: list[_RowsDue], made: Rows) -> Iterator[tuple[_RowsDue, Logprobs]]:
        """Yield the rows of each request in a slice, failing those that met NaN."""
        first = 0
        spoilt = made.is_nan().cpu().numpy()
        for _, group in itertools.groupby(piece, key=_columns):
            members = list(group)
            targets = np.concatenate([rows.targets for rows in members]).astype(np.int64)
            end = first + len(targets)
            actual = torch.from_numpy(targets).to(self._model.device)
            k, token_ids = members[0].num_logprobs, members[0].token_ids
            found = self._selected(made[first:end], actual, k, token_ids)
            offset = 0
            for rows in members:
                own = slice(offset, offset + len(rows.targets))
                offset = own.stop
                if rows.work.error is None and spoilt[first:end][own].any():
                    self._fail(rows.work, "its logits")
                yield rows, found[own]
            first = end

    def _selected(
        self, made: Rows, targets: torch.Tensor, k: int, token_ids: tuple[int, ...] | None
    ) -> Logprobs:
        """Return rows on the host, made so many at a time that wide ones take little memory."""
        width = self._model.vocab_size if k == ALL_LOGPROBS else k + 1
        at_once = rows_per_slice(width, LOGPROBS_BYTES[self._model.device.type])
        parts = []
        for first in range(0, len(targets), at_once):
            rows = slice(first, first + at_once)
            if token_ids is None:
                parts.append(select_rows(made[rows], targets[rows], k).to_host())
            else:
                parts.append(select_token_rows(made[rows], targets[rows], token_ids).to_host())
        return Logprobs.concat(parts)

    def _sample(self, works: list[Work], hidden: torch.Tensor) -> None:
        """Sample the next token of each chunk that asks for it, with its row where asked for."""
        asking = [work for work in works if work.chunk.sample and work.error is None]
        for first in range(0, len(asking), self._rows_per_slice):
            part = asking[first : first + self._rows_per_slice]
            last = np.array([w.span.first_row + w.span.num_tokens - 1 for w in part])
            logits = self._logits(hidden, last)
            best, best_ids = top_1(logits)
            finite = torch.isfinite(best[:, 0]).tolist()
            greedy = best_ids[:, 0].tolist()
            for row, work in enumerate(part):
                if not finite[row]:
                    self._fail(work, "its logits")
                    continue
                draw = work.tracked.draw()
                try:
                    plain = draw.is_greedy and draw.uses_raw_logits
                    token = greedy[row] if plain else sample(_on_host(logits, row), draw)
                except HaversackError as error:
                    work.error = error
                    continue
                work.sampled_token_id = token
                work.tracked.take(token)
            self._sampled_rows(part, logits)

    def _sampled_rows(self, works: list[Work], logits: Logits) -> None:
        """Make the rows of sampled tokens; `works` has the first rows of `logits`."""
        asking = [
            (row, work, k)
            for row, work in enumerate(works)
            if work.sampled_token_id is not None
            and (k := work.tracked.new.sampling_params.logprobs) is not None
        ]
        asking.sort(key=lambda item: item[2])
        for k, group in itertools.groupby(asking, key=lambda item: item[2]):
            members = list(group)
            device = self._model.device
            index = torch.tensor([row for row, _, _ in members], device=device)
            targets = torch.tensor([work.sampled_token_id for _, work, _ in members], device=device)
            found = select_rows(normalise(logits[index]), targets, k).to_host()
            for i, (_, work, _) in enumerate(members):
                work.sampled_logprobs = found[i : i + 1]


def _decode_of(chunk: Chunk, start: int) -> Chunk:
    """Return the chunk that asks for the token after the one at `start`."""
    none = chunk.new_block_ids[:0]
    return Chunk(chunk.request_id, start, none, none, none, start, sample=True)


def _followers(works: Sequence[Work]) -> list[Work]:
    """Return the next decode of each chunk that goes on by itself, as one batch."""
    followers: list[Work] = []
    for work in works:
        follower = work.next(len(followers))
        if follower is not None:
            followers.append(follower)
    return followers


def _on_host(logits: Logits, row: int) -> FloatArray:
    """Return one row, fp32 [vocab]."""
    numbers: FloatArray = logits[row : row + 1].joined()[0].float().cpu().numpy()
    return numbers


def _columns(rows: _RowsDue) -> tuple[int, tuple[int, ...]]:
    return (rows.num_logprobs, rows.token_ids or ())


def _within(ids: IntArray, limit: int) -> bool:
    return not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < limit)


def _slices(due: list[_RowsDue], rows_per_slice: int) -> Iterator[list[_RowsDue]]:
    """Cut what is due into lists of at most `rows_per_slice` rows."""
    piece: list[_RowsDue] = []
    room = rows_per_slice
    for rows in due:
        first = 0
        while first < len(rows.targets):
            part = slice(first, first + room)
            taken = dataclasses.replace(
                rows, hidden_rows=rows.hidden_rows[part], targets=rows.targets[part]
            )
            piece.append(taken)
            first += len(taken.targets)
            room -= len(taken.targets)
            if room == 0:
                yield piece
                piece, room = [], rows_per_slice
    if piece:
        yield piece
