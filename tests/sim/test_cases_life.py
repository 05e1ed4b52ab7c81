"""Requests that come, wait, are cancelled and end: nothing leaks and nobody waits for ever."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest

from scheduler.actions import Emit, RunBatch
from scheduler.codec import int_array
from scheduler.errors import DuplicateRequest, InvalidRequest, RequestTooLarge
from scheduler.messages import Submission
from scheduler.request import FinishReason, RequestStatus
from scheduler.sampling_params import SamplingParams
from tests.sim.cases import (
    BLOCK_SIZE,
    CHUNK,
    add_worker,
    check_idle,
    fake_engine,
    finish,
    generating,
    prompt,
    scoring,
)
from tests.sim.engine import SimEngine
from tests.sim.fake_runner import VOCAB_SIZE, expected_output

# ------------------------------------------------------------------------ cancelling and leaks


def test_an_abort_in_every_phase_gives_back_all_blocks() -> None:
    """Queued, looking up, loading, in each chunk, in decode, saving, and just before the end."""
    statuses = set()
    for num_events in range(60):
        engine = fake_engine(enable_prefix_caching=False)
        engine.submit("warm", prompt(9), generating(1))
        finish(engine, "warm")
        engine.submit("a", prompt(30), generating(6))
        for i in range(num_events):
            if i == 8 and engine.live:
                engine.evict("a")
            if engine.pending:
                engine.complete()
        if engine.live:
            statuses.add(engine.state.request("a").status)
        engine.cancel("a")
        engine.run()
        check_idle(engine)
        assert engine.result("a").finish_reason is not None
    assert statuses >= {RequestStatus.LOADING, RequestStatus.RUNNING, RequestStatus.SAVING}


def test_an_abort_of_a_queued_request_leaves_those_around_it_alone() -> None:
    engine = fake_engine(max_num_seqs=1)
    for name in "abc":
        engine.submit(name, prompt(9, seed=ord(name)), scoring())
    engine.cancel("b")
    finish(engine, "a", "c")
    assert engine.result("b").finish_reason is FinishReason.ABORT
    assert engine.result("b").prompt_logprobs is None


def test_an_abort_reaches_all_completions_and_they_may_end_at_different_times() -> None:
    engine = fake_engine(chunk=64)
    params = SamplingParams(n=4, max_tokens=60, stop_token_ids=(3, 5, 8, 11), logprobs=0)
    engine.submit("a", prompt(9), params, seed=2)
    engine.submit("b", prompt(9), params, seed=40)
    for _ in range(5):
        engine.step()
    engine.cancel("b")
    finish(engine, "a")
    assert len({len(engine.result("a", i).token_ids) for i in range(4)}) > 1
    reasons = [engine.result("b", i).finish_reason for i in range(4)]
    assert FinishReason.ABORT in reasons
    assert None not in reasons


def test_a_client_that_hangs_up_stops_the_computing() -> None:
    engine = fake_engine()
    engine.submit("a", prompt(9), generating(500))
    for _ in range(10):
        engine.step()
    engine.cancel("a")
    engine.run()
    check_idle(engine)
    assert engine.state.stats().num_computed_tokens < 40


def test_two_thousand_requests_leave_idle_usage_flat_and_nothing_behind() -> None:
    """Exactly one block lost per request is seen only at idle; a list never drained, only late."""
    engine = fake_engine(2, num_blocks=32, chunk=32, store_blocks=40, validate=False)
    rng = random.Random(0)
    sizes = []
    for batch in range(100):
        for i in range(20):
            name = f"r{batch}-{i}"
            params = scoring(k=0, max_tokens=1) if i % 3 else generating(2, n=1 + i % 2)
            seed = rng.randrange(50)
            engine.submit(name, prompt(3 + i, seed), params, priority=i % 2, timeout_s=1e6)
            if i % 7 == 0:
                engine.cancel(name)
            if i % 5 == 0:
                engine.evict(name)
            if i % 4 == 1:
                engine.migrate(name, f"w{i % 2}")
        engine.run(rng)
        engine.state.validate()
        check_idle(engine)
        engine.log.clear()
        engine.results.clear()
        engine.submissions.clear()
        sizes.append(containers_of(engine))
    assert len({str(size) for size in sizes[20:]}) == 1, (sizes[20], sizes[-1])


def containers_of(engine: SimEngine) -> dict[str, int]:
    """Sizes of everything in core and store that could grow, the store's bounded index aside."""
    core, store = engine.state._core, engine.store
    names = (
        "requests",
        "families",
        "ended_siblings",
        "ops",
        "actions",
        "expected",
        "wanted_elsewhere",
        "draining",
        "_touched",
        "_to_step",
    )
    sizes = {f"core.{name}": len(getattr(core, name)) for name in names}
    sizes["core._waiting"] = max(len(core._waiting) - 64, 0)
    sizes["core._deadlines"] = max(len(core._deadlines) - 128, 0)
    for worker in core.workers.values():
        for name in ("residents", "incoming", "steps", "released_request_ids"):
            sizes[f"{worker.id}.{name}"] = len(getattr(worker, name))
        sizes[f"{worker.id}.pool"] = max(len(worker.pool._hash_of) - worker.pool.num_blocks, 0)
    sizes["store.holdings"] = len(store._holdings)
    sizes["store.index"] = max(len(store._shared) - 40, 0)
    sizes["store.segments"] = max(len(store._segments) - 40, 0)
    return sizes


def test_every_container_of_the_core_is_looked_at_for_growth() -> None:
    """A list added to the core later must be added to the test above as well.

    What has ended lately is as long as it may get.
    """
    engine = fake_engine()
    core = engine.state._core
    worker = core.workers["w0"]
    growing = (list, dict, set, deque)
    assert core.lately_ended.maxlen is not None
    found = {f for f in core.__slots__ if isinstance(getattr(core, f), growing)}
    found.remove("lately_ended")
    assert found == {
        "workers",
        "requests",
        "families",
        "ended_siblings",
        "ops",
        "actions",
        "expected",
        "wanted_elsewhere",
        "draining",
        "_touched",
        "_to_step",
        "_waiting",
        "_deadlines",
    }
    found = {f for f in worker.__slots__ if isinstance(getattr(worker, f), growing)}
    assert found == {
        "residents",
        "incoming",
        "steps",
        "released_request_ids",
    }


def test_a_request_refused_with_its_prefix_in_the_cache_keeps_no_reference() -> None:
    engine = fake_engine(num_blocks=8)
    engine.submit("warm", prompt(21), generating(1))
    finish(engine, "warm")
    assert isinstance(engine.submit("big", prompt(33), generating(1)), RequestTooLarge)
    assert isinstance(engine.submit("k", prompt(21), generating(1, logprobs=99)), InvalidRequest)
    check_idle(engine)
    engine.submit("whole", prompt(32, seed=1), generating(1))
    finish(engine, "whole")


# ----------------------------------------------------------------------------------- scheduling


def test_what_can_never_fit_is_refused_at_once_and_what_fits_exactly_is_served() -> None:
    """One formula for admission and validation: nothing waits for a room that never comes."""
    engine = fake_engine(num_blocks=6)
    pool = 6 * BLOCK_SIZE
    for n in range(1, pool + 3):
        for max_tokens in (0, 1, 2, 9):
            name = f"{n}-{max_tokens}"
            refused = engine.submit(name, prompt(n), generating(max_tokens))
            assert isinstance(refused, RequestTooLarge) == (n + max(max_tokens - 1, 0) > pool)
            if refused is None:
                finish(engine, name)


def test_two_requests_of_sixty_percent_of_the_pool_both_finish() -> None:
    engine = fake_engine(num_blocks=20)
    for name in "ab":
        engine.submit(name, prompt(12, seed=ord(name)), scoring(max_tokens=36))
    finish(engine, "a", "b")
    evictions = [engine.result(name).stats.num_evictions for name in "ab"]
    assert evictions[0] == 0
    assert evictions[1] <= 2


def test_many_growing_requests_are_evicted_a_bounded_number_of_times() -> None:
    engine = fake_engine(num_blocks=20, chunk=16)
    names = [f"r{i}" for i in range(10)]
    for i, name in enumerate(names):
        engine.submit(name, prompt(8, seed=i), scoring(max_tokens=40), seed=i)
    finish(engine, *names)
    assert max(engine.result(name).stats.num_evictions for name in names) <= len(names)


def test_two_requests_that_load_their_prefixes_at_once_both_get_the_rest() -> None:
    """All blocks are taken at admission, so nobody holds a part and waits for the other."""
    engine = fake_engine(num_blocks=10, enable_prefix_caching=False)
    for name in "ab":
        engine.submit(f"warm-{name}", prompt(30, seed=ord(name)), generating(1))
        finish(engine, f"warm-{name}")
    for name in "ab":
        engine.submit(name, prompt(32, seed=ord(name)), generating(6))
    finish(engine, "a", "b")


def test_high_priority_overtakes_and_only_strictly_higher_priority_evicts_at_admission() -> None:
    engine = fake_engine(num_blocks=8, max_num_seqs=1)
    engine.submit("low", prompt(20), scoring(max_tokens=4), priority=1)
    engine.submit("equal", prompt(20, seed=1), scoring(), priority=1)
    engine.submit("high", prompt(20, seed=2), scoring(), priority=0)
    finish(engine, "low", "equal", "high")
    ends = [a.delta.request_id for a in engine.log if isinstance(a, Emit) and a.delta.finish_reason]
    assert ends == ["high", "low", "equal"], "the evicted one keeps its place"
    assert engine.result("low").stats.num_evictions == 1
    assert engine.result("equal").stats.num_evictions == 0


def test_a_large_request_is_not_starved_by_a_stream_of_small_ones() -> None:
    engine = fake_engine(num_blocks=8)
    engine.submit("first", prompt(8, seed=1), scoring(max_tokens=6))
    engine.submit("large", prompt(30), scoring())
    for i in range(30):
        engine.submit(f"small{i}", prompt(2, seed=i), scoring())
    ended = []
    while "large" in engine.live:
        engine.step()
        ended = [f"small{i}" for i in range(30) if f"small{i}" not in engine.live]
    assert not ended
    finish(engine, "first", "large", *(f"small{i}" for i in range(30)))


def test_a_worker_that_joins_later_takes_work() -> None:
    engine = fake_engine(1, max_num_seqs=1)
    for name in "ab":
        engine.submit(name, prompt(20, seed=ord(name)), scoring(max_tokens=3))
    add_worker(engine, "late")
    assert {info.worker_id for info in engine.state.request_infos(0)} == {"w0", "late"}
    finish(engine, "a", "b")


# ---------------------------------------------------------------------------------------- input


def test_an_empty_prompt_is_refused_and_its_neighbours_are_served() -> None:
    engine = fake_engine()
    answers = engine.submit_all(
        *(
            Submission(name, int_array(tokens), scoring(), 0)
            for name, tokens in (("a", prompt(5)), ("empty", []), ("b", prompt(6)))
        )
    )
    assert [type(answer) for answer in answers] == [type(None), InvalidRequest, type(None)]
    finish(engine, "a", "b")


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("max_tokens", [0, 1, 10])
def test_prompts_around_the_context_limit_follow_the_stated_rule(extra, max_tokens) -> None:
    """Evaluation tools send exactly as many tokens as fit; one more is refused, with the limit."""
    limit = 40
    engine = fake_engine(max_model_len=limit)
    refused = engine.submit("a", prompt(limit + extra), scoring(max_tokens=max_tokens))
    if extra == 1:
        assert isinstance(refused, RequestTooLarge)
        assert refused.details["max_model_len"] == limit
        engine.submit("after", prompt(limit), scoring())
        finish(engine, "after")
        return
    finish(engine, "a")
    assert len(engine.result("a").token_ids) == min(max_tokens, 1 - extra)
    assert engine.result("a").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31 - 1])
def test_token_ids_outside_of_the_vocabulary_are_refused(token: int) -> None:
    engine = fake_engine()
    refused = engine.submit("a", [1, token, 2], scoring())
    assert type(refused) is InvalidRequest
    assert str(token) in str(refused)


def test_a_token_id_that_does_not_fit_its_type_is_never_another_token() -> None:
    with pytest.raises(OverflowError):
        int_array([1, 2**32 - 1])


def test_an_id_used_twice_at_once_after_an_abort_and_after_the_end() -> None:
    engine = fake_engine()
    first, second = (Submission("a", int_array(prompt(n)), scoring(), 0) for n in (20, 9))
    assert [type(a) for a in engine.submit_all(first, second)] == [type(None), DuplicateRequest]
    assert isinstance(engine.submit("a", prompt(5), scoring()), DuplicateRequest)
    finish(engine, "a")
    assert engine.result("a").prompt_logprobs.num_rows == 19
    for _ in range(2):
        engine.results.clear()
        assert engine.submit("a", prompt(9, seed=1), scoring(max_tokens=30)) is None
        engine.step()
        engine.cancel("a")
    engine.results.clear()
    assert engine.submit("a", prompt(12, seed=2), scoring()) is None
    finish(engine, "a")


def test_a_name_of_one_of_n_completions_is_taken_too() -> None:
    engine = fake_engine()
    engine.submit("a", prompt(9), generating(2, n=2))
    assert isinstance(engine.submit("a#1", prompt(9), generating(2)), DuplicateRequest)
    finish(engine, "a")


def refusal(engine: SimEngine, name: str, k: int) -> InvalidRequest:
    """Why so many logprobs are refused, by the parameters themselves or at submission."""
    try:
        refused = engine.submit("refused", prompt(9), generating(2, **{name: k}))
    except InvalidRequest as error:
        return error
    assert isinstance(refused, InvalidRequest)
    return refused


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_one_rule_for_how_many_logprobs_may_be_asked_for(name: str) -> None:
    for k in (None, 0, 1, 20, VOCAB_SIZE, -1):
        engine = fake_engine()
        params = generating(2, **{name: k})
        assert engine.submit("a", prompt(9), params) is None
        finish(engine, "a")
    for k in (VOCAB_SIZE + 1, -2, True):
        assert name in str(refusal(fake_engine(), name, k))
    capped = fake_engine(max_logprobs=20)
    assert capped.submit("a", prompt(9), generating(2, **{name: 20})) is None
    for k in (21, -1):
        assert name in str(refusal(capped, name, k))


def test_no_parameter_loses_a_field_on_its_way_to_a_worker_and_through_an_eviction() -> None:
    params = SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={3: 1.0, 4: -2.0},
        allowed_token_ids=tuple(range(30)),
        stop=("x",),
        stop_token_ids=(38, 39),
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=2,
    )
    engine = fake_engine()
    engine.submit("a", prompt(20), params)
    engine.complete()
    engine.evict("a")
    finish(engine, "a")
    told = [c.new for a in engine.log if isinstance(a, RunBatch) for c in a.output.chunks if c.new]
    assert len(told) == 2
    for new in told:
        assert msgspec.structs.asdict(new.sampling_params) == msgspec.structs.asdict(params)
        assert new.stop_ids == (38, 39)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_counts_generated_tokens_and_ignore_eos_bans_nothing(ignore_eos: bool) -> None:
    num_stopped = 0
    for seed in range(25):
        engine = fake_engine()
        params = SamplingParams(
            max_tokens=30, min_tokens=6, ignore_eos=ignore_eos, stop_token_ids=(5, 9)
        )
        engine.submit("a", prompt(20), params, seed=seed)
        for _ in range(seed % 6):
            engine.step()
        engine.evict("a")
        finish(engine, "a")
        tokens = engine.result("a").token_ids
        assert len(tokens) >= 6
        assert not {5, 9} & set(tokens[:5])
        num_stopped += engine.result("a").finish_reason is FinishReason.STOP
    assert num_stopped > 5


def test_a_random_stream_goes_on_where_it_was_after_any_eviction_or_loss() -> None:
    n, num_tokens = 11, 10
    right = expected_output(int_array(prompt(n)), generating(num_tokens), 77, num_tokens).token_ids
    for steps in range(12):
        engine = fake_engine(2)
        engine.submit("a", prompt(n), generating(num_tokens), seed=77)
        for _ in range(steps):
            engine.step()
        if steps % 2 and engine.live:
            engine.lose(engine.state.request_infos(0)[0].worker_id)
        else:
            engine.evict("a")
        finish(engine, "a")
        assert engine.result("a").token_ids == right


def test_completions_of_one_prompt_have_streams_of_their_own() -> None:
    engine = fake_engine(chunk=4 * CHUNK)
    engine.submit("a", prompt(9), generating(12, n=3), seed=5)
    finish(engine, "a")
    assert len({tuple(engine.result("a", i).token_ids) for i in range(3)}) == 3


def test_a_queue_that_is_stuck_forgets_those_who_have_left_it() -> None:
    """Clients time out and try again while the head waits: dead entries must not pile up."""
    engine = fake_engine(num_blocks=8, max_num_seqs=1)
    engine.submit("runs", prompt(9), generating(10))
    engine.submit("head", prompt(9), generating(1))
    for i in range(2000):
        engine.submit(f"r{i}", prompt(3), generating(1))
        engine.cancel(f"r{i}")
    assert len(engine.state._core._waiting) < 100
    finish(engine, "runs", "head")
