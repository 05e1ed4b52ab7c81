"""Plays the scheduler for one `ModelRunner`: block ids, chunks, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.codec import int_array
from scheduler.errors import from_wire
from scheduler.logprobs import LogprobRows
from scheduler.messages import Chunk, ChunkResult, NewRequest, SchedulerOutput
from scheduler.policy import end_of
from scheduler.request import Request
from scheduler.sampling_params import ALL_LOGPROBS, SamplingParams
from workers.model_runner import ModelRunner


class RunnerDriver:
    """Drives requests through one runner by hand; nothing is decided here."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        """Hand out blocks in an order drawn from `seed`, so that tables are never in a row."""
        self.runner = runner
        self.info = runner.info("w0")
        self.free = np.random.default_rng(seed).permutation(self.info.num_blocks).tolist()
        self.tables: dict[str, list[int]] = {}
        self._known: set[str] = set()
        self._step_id = 0

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str = "r",
        seed: int = 0,
    ) -> Request:
        """Return a request as admission would make it."""
        own = Request(
            request_id=request_id,
            prompt_token_ids=int_array(prompt),
            sampling_params=params,
            seed=params.seed if params.seed is not None else seed,
            max_tokens=params.max_tokens or 0,
            eos_token_ids=self.info.eos_token_ids,
        )
        if params.num_prompt_logprobs is not None:
            own.prompt_logprobs = LogprobRows(self._k(params.num_prompt_logprobs))
        if params.logprobs is not None:
            own.output_logprobs = LogprobRows(self._k(params.logprobs))
        return own

    def _k(self, asked: int) -> int:
        return self.info.vocab_size if asked == ALL_LOGPROBS else asked

    def chunk(self, request: Request, start: int, end: int) -> Chunk:
        """Return the chunk [start, end) of a request, with blocks for it."""
        table = self.tables.setdefault(request.request_id, [])
        new_blocks: list[int] = []
        while (len(table) + len(new_blocks)) * self.info.block_size < end:
            new_blocks.append(self.free.pop())
        new = None
        if request.request_id not in self._known:
            new_blocks = table + new_blocks
            new = self._new(request)
        self.tables[request.request_id] = new_blocks if new else table + new_blocks
        self._known.add(request.request_id)
        samples = end == request.num_tokens and len(request.output_token_ids) < request.max_tokens
        return Chunk(
            request_id=request.request_id,
            start=start,
            token_ids=int_array(request.token_ids(start, end)),
            new_block_ids=int_array(new_blocks),
            row_target_ids=int_array(request.row_target_ids(start, end)),
            first_row_position=request.row_position(start),
            sample=samples,
            new=new,
        )

    def _new(self, request: Request) -> NewRequest:
        params = request.sampling_params
        wants_history = params.needs_token_history
        return NewRequest(
            sampling_params=params,
            seed=request.seed,
            num_prompt_tokens=request.num_prompt_tokens,
            num_prompt_logprobs=params.num_prompt_logprobs,
            stop_ids=(
                *(() if params.ignore_eos else request.eos_token_ids),
                *params.stop_token_ids,
            ),
            num_output_tokens=len(request.output_token_ids),
            history=int_array(request.token_ids(0, request.num_tokens) if wants_history else []),
        )

    def step(
        self, parts: Sequence[tuple[Request, int, int]], released: Sequence[str] = ()
    ) -> list[ChunkResult]:
        """Run one step of chunks (request, start, end) and let the requests take in the results.

        Raises:
            HaversackError: the first error of a chunk, after the others were taken in.
        """
        results = self.run([self.chunk(*part) for part in parts], released)
        errors = []
        for (request, _, end), result in zip(parts, results, strict=True):
            if result.error is not None:
                errors.append(from_wire(result.error))
                continue
            request.advance(end, result.rows, result.sampled_token_id, result.sampled_logprobs)
            request.validate()
        if errors:
            raise errors[0]
        return results

    def run(self, chunks: Sequence[Chunk], released: Sequence[str] = ()) -> list[ChunkResult]:
        """Run one step of ready chunks."""
        self._step_id += 1
        output = self.runner.execute(SchedulerOutput(self._step_id, list(chunks), list(released)))
        assert output.step_id == self._step_id
        assert [r.request_id for r in output.results] == [c.request_id for c in chunks]
        return output.results

    def release(self, *requests: Request) -> None:
        """Take requests off the worker and give their blocks back."""
        ids = [request.request_id for request in requests]
        for request_id in ids:
            self.free.extend(self.tables.pop(request_id, []))
            self._known.discard(request_id)
        self.run([], released=ids)

    def finish(self, request: Request, sizes: Sequence[int], start: int = 0) -> Request:
        """Compute a request alone from position `start` to its end and release it.

        Args:
            request: the request; what it holds already is not computed twice.
            sizes: sizes of the prompt's chunks, the last one repeated as long as need be.
            start: position up to which KV is in the blocks already.
        """
        pending = list(sizes)
        while start < request.num_tokens and not self.is_done(request):
            size = pending.pop(0) if len(pending) > 1 else pending[0]
            end = min(start + size, request.num_tokens)
            self.step([(request, start, end)])
            start = end
        self.release(request)
        return request

    @staticmethod
    def is_done(request: Request) -> bool:
        """Whether all of the prompt is computed and the request has come to its end."""
        return end_of(request) is not None
