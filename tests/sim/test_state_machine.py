"""Random lives of many requests: whatever happens to them, each ends once, with the right bits.

Hypothesis draws submissions, cancellations, evictions, failures, lost workers and the order in
which operations complete. The core's and the store's invariants are checked after every event, and
at the end every result is compared with what the request must come to without any engine.
"""

from __future__ import annotations

import os
from collections import Counter

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler.actions import RunBatch
from scheduler.config import SchedulerConfig
from scheduler.errors import (
    CannotMigrate,
    DeadlineExceeded,
    HaversackError,
    InvalidRequest,
    NumericalError,
    RequestTooLarge,
)
from scheduler.logprobs import Logprobs
from scheduler.request import FinishReason
from scheduler.sampling_params import SamplingParams
from tests.sim.engine import SimEngine
from tests.sim.fake_runner import EOS, POISON, VOCAB_SIZE, FakeRunner, expected_output

BLOCK_SIZE = 4

ROWS = st.sampled_from(
    [
        *[{}] * 4,
        *({"prompt_logprobs": k} for k in (0, 2, 2, -1)),
        {"prompt_logprobs": 2, "prompt_logprobs_start": 5},
        {"prompt_logprobs": 0, "prompt_logprobs_start": 9},
        {"prompt_logprob_token_ids": (3, 1)},
        {"prompt_logprob_token_ids": (3, 1), "prompt_logprobs_start": 4},
    ]
)
params_strategy = st.builds(
    lambda rows, **others: SamplingParams(**rows, **others),
    ROWS,
    n=st.sampled_from([1, 1, 1, 2]),
    max_tokens=st.sampled_from([0, 1, 3, 9]),
    min_tokens=st.just(0),
    logprobs=st.sampled_from([None, 0, 2]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (3, 5)]),
    skip_reading_prefix_cache=st.sampled_from([None, None, False, True]),
)
prompt_strategy = st.builds(
    lambda head, tail: head + tail,
    st.sampled_from([[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 8, 9, 10]]),
    st.lists(st.sampled_from([1, 2, 3, EOS, 20]), min_size=1, max_size=14),
)


class EngineMachine(RuleBasedStateMachine):
    """Drives a `SimEngine`."""

    @initialize(
        num_workers=st.integers(1, 3),
        num_blocks=st.integers(7, 16),
        budget=st.sampled_from([1, 3, 7, 16, 64]),
        max_num_seqs=st.integers(1, 4),
        store_blocks=st.sampled_from([0, 6, 40]),
        save_finished=st.booleans(),
        enable_prefix_caching=st.booleans(),
        enable_migration=st.booleans(),
        enable_journal=st.booleans(),
        save_segment_tokens=st.sampled_from([0, 4, 9]),
        max_steps_in_flight=st.integers(1, 3),
        max_decode_steps=st.sampled_from([1, 2, 5]),
        row_cache_bytes=st.sampled_from([0, 1500, 2**20]),
    )
    def start(
        self,
        num_workers: int,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        store_blocks: int,
        save_finished: bool,
        enable_prefix_caching: bool,
        enable_migration: bool,
        enable_journal: bool,
        save_segment_tokens: int,
        max_steps_in_flight: int,
        max_decode_steps: int,
        row_cache_bytes: int,
    ) -> None:
        self.num_blocks = num_blocks
        self.engine = SimEngine(
            SchedulerConfig(
                block_size=BLOCK_SIZE,
                max_num_batched_tokens=budget,
                max_num_seqs=max_num_seqs,
                max_model_len=30,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(EOS,),
                enable_offload=store_blocks > 0,
                save_finished=save_finished,
                enable_prefix_caching=enable_prefix_caching,
                enable_migration=enable_migration,
                enable_journal=enable_journal,
                save_segment_tokens=save_segment_tokens,
                max_steps_in_flight=max_steps_in_flight,
                max_decode_steps=max_decode_steps,
                row_cache_bytes=row_cache_bytes,
            ),
            block_bytes=BLOCK_SIZE * 8,
            store_bytes=store_blocks * BLOCK_SIZE * 8,
        )
        self.num_joined = 0
        self.num_submitted = 0
        self.unhappy: set[str] = set()
        """Requests that failed alone in a batch, or died with one worker after the other."""
        self.lone_deaths: Counter[str] = Counter()
        """Request -> workers that were lost while they computed it alone, since it got on."""
        self.cancelled: set[str] = set()
        for _ in range(num_workers):
            self.join()

    @rule()
    @precondition(lambda self: len(self.engine.runners) + len(self.engine.expected) < 3)
    def join(self) -> None:
        runner = FakeRunner(f"w{self.num_joined}", self.num_blocks, BLOCK_SIZE)
        self.num_joined += 1
        self.engine.join(runner, runner.info())

    @rule(
        prompt=prompt_strategy,
        params=params_strategy,
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from([None, None, ""]),
        is_poisonous=st.sampled_from([False] * 9 + [True]),
        timeout_s=st.sampled_from([None, None, None, 1.5]),
    )
    def submit(self, prompt, params, priority, salt, is_poisonous, timeout_s) -> None:
        if is_poisonous:
            prompt = [*prompt, POISON]
        name = f"r{self.num_submitted}"
        self.num_submitted += 1
        refused = self.engine.submit(
            name,
            prompt,
            params,
            seed=self.num_submitted,
            priority=priority,
            cache_salt=salt,
            timeout_s=timeout_s,
        )
        num_kv_tokens = len(prompt) + max(min(params.max_tokens, 31 - len(prompt)) - 1, 0)
        if params.prompt_logprobs_start > len(prompt):
            assert isinstance(refused, InvalidRequest)
        elif len(prompt) > 30 or num_kv_tokens > self.num_blocks * BLOCK_SIZE:
            assert isinstance(refused, RequestTooLarge)
        else:
            assert refused is None

    @rule(data=st.data())
    @precondition(lambda self: self.engine.live)
    def submit_again(self, data) -> None:
        """A client connects again and sends what has not ended for it."""
        name = data.draw(st.sampled_from(self.engine.live)).split("#")[0]
        submission = self.engine.submissions[name]
        for index in range(submission.sampling_params.n):
            self.engine.result(name, index).may_repeat = True
        assert self.engine.submit_all(submission) == [None]

    @rule(data=st.data())
    @precondition(lambda self: self.engine.live)
    def evict(self, data) -> None:
        self.engine.evict(data.draw(st.sampled_from(self.engine.live)))

    @rule(data=st.data())
    @precondition(lambda self: self.engine.live)
    def cancel(self, data) -> None:
        name = data.draw(st.sampled_from(self.engine.live)).split("#")[0]
        self.cancelled.add(name)
        self.engine.cancel(name)

    @rule(data=st.data(), count=st.integers(1, 6))
    @precondition(lambda self: self.engine.pending)
    def complete(self, data, count) -> None:
        for _ in range(count):
            if self.engine.pending:
                index = data.draw(st.integers(0, len(self.engine.pending) - 1))
                self.complete_one(index)

    def complete_one(self, index: int) -> None:
        action = self.engine.pending[index]
        before = self.computed()
        self.engine.complete(index)
        if isinstance(action, RunBatch):
            after = self.computed()
            for chunk in action.output.chunks:
                name = chunk.request_id
                if after.get(name, 0) > before.get(name, 0):
                    del self.lone_deaths[name]

    def computed(self) -> dict[str, int]:
        infos = self.engine.state.request_infos(0.0)
        return {info.request_id: info.num_computed_tokens for info in infos}

    @rule(data=st.data(), num_done=st.integers(0, 2))
    @precondition(lambda self: self.engine.pending)
    def fail(self, data, num_done) -> None:
        index = data.draw(st.integers(0, len(self.engine.pending) - 1))
        action = self.engine.pending[index]
        if isinstance(action, RunBatch) and len(action.output.chunks) == 1:
            self.unhappy.add(action.output.chunks[0].request_id)
        self.engine.fail(index, num_done=num_done)

    @rule(data=st.data())
    @precondition(lambda self: len(self.engine.runners) - len(self.draining) > 1)
    def lose(self, data) -> None:
        self.lose_one(data.draw(st.sampled_from(sorted(self.engine.runners))))

    @rule(data=st.data())
    @precondition(lambda self: self.engine.runners)
    def lose_and_replace(self, data) -> None:
        """The replacement takes its time, and may be the only worker then."""
        self.engine.expect(f"w{self.num_joined}", self.num_blocks)
        self.num_joined += 1
        self.lose_one(data.draw(st.sampled_from(sorted(self.engine.runners))))

    def lose_one(self, worker_id: str) -> None:
        steps = self.engine.steps.get(worker_id, ())
        names = {chunk.request_id for step in steps for chunk in step.output.chunks}
        if len(names) == 1:
            [name] = names
            self.lone_deaths[name] += 1
            if self.lone_deaths[name] >= 5:
                self.unhappy.add(name)
        self.engine.lose(worker_id)

    @rule()
    @precondition(lambda self: self.engine.expected)
    def join_as_expected(self) -> None:
        runner = FakeRunner(min(self.engine.expected), self.num_blocks, BLOCK_SIZE)
        self.engine.join(runner, runner.info())

    @rule(data=st.data())
    @precondition(lambda self: self.engine.live and self.engine.runners)
    def migrate(self, data) -> None:
        name = data.draw(st.sampled_from(self.engine.live))
        target = data.draw(st.sampled_from(sorted(self.engine.runners)))
        refused = self.engine.migrate(name, target)
        assert refused is None or isinstance(refused, CannotMigrate)

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 3.0]))
    @precondition(lambda self: len(self.engine.runners) - len(self.draining) > 1)
    def drain(self, data, seconds) -> None:
        worker_id = data.draw(st.sampled_from(sorted({*self.engine.runners} - self.draining)))
        self.engine.drain(worker_id, seconds)

    @property
    def draining(self) -> set[str]:
        reports = self.engine.state.worker_reports()
        return {report.worker_id for report in reports if report.is_draining}

    @rule()
    def tick(self) -> None:
        self.engine.tick()

    @rule()
    def lose_the_store(self) -> None:
        self.engine.lose_store()

    @rule()
    @precondition(lambda self: self.engine.config.enable_journal and not self.draining)
    def lose_the_scheduler(self) -> None:
        self.lone_deaths.clear()
        self.engine.restart_scheduler()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.expected:
            self.join_as_expected()
        self.engine.tick(10.0)
        self.engine.run()
        for (name, index), result in self.engine.results.items():
            self.check(name, index, result)
        stats = self.engine.state.stats()
        assert stats.num_used_blocks == 0
        assert stats.num_recomputed_rows + self.engine.past_recomputed_rows == 0
        assert not self.engine.journal
        store = self.engine.store.stats
        assert (store.num_pins, store.num_owned_segments, store.num_requests) == (0, 0, 0)
        for runner in self.engine.runners.values():
            assert not runner.tracked

    def check(self, name: str, index: int, result) -> None:
        submission = self.engine.submissions[name]
        params = submission.sampling_params
        assert result.finish_reason is not None
        if name in self.cancelled and result.finish_reason is FinishReason.ABORT:
            return
        if result.finish_reason is FinishReason.ERROR:
            assert isinstance(result.error, HaversackError)
            full_name = name if params.n == 1 else f"{name}#{index}"
            assert (
                full_name in self.unhappy
                or (isinstance(result.error, DeadlineExceeded) and submission.timeout_s)
                or (
                    isinstance(result.error, NumericalError)
                    and POISON in submission.prompt_token_ids
                )
            )
            return
        prompt = submission.prompt_token_ids
        own = params if index == 0 else params.without_prompt_logprobs()
        max_tokens = min(params.max_tokens, 31 - len(prompt))
        # Whoever generates nothing may get by without the last token, which is the one with NaN.
        may_complete = POISON in prompt and not max_tokens and own.prompt_logprobs is not None
        expected = expected_output(
            prompt, own, submission.seed + index, max_tokens, fails=not may_complete
        )
        assert result.token_ids == expected.token_ids
        assert result.finish_reason is expected.finish_reason
        assert result.num_prompt_deltas == (expected.rows is not None)
        if expected.rows is not None:
            first = max(params.prompt_logprobs_start, 1)
            assert result.prompt_logprobs.num_rows == len(prompt) - first
            assert result.prompt_logprobs.same_bits(expected.rows)
        if expected.logprobs is not None:
            assert sum(part.num_rows for part in result.logprobs) == len(result.token_ids)
            assert not result.token_ids or Logprobs.concat(result.logprobs).same_bits(
                expected.logprobs
            )


EngineMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("SIM_EXAMPLES", "40")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestEngineMachine = EngineMachine.TestCase
