"""The benchmark's workloads: what they share, what they do not, and what counts as reached."""

from __future__ import annotations

import itertools

import pytest

from bench.inputs import Inputs
from bench.measuring import Measured
from bench.peers.catalogue import PEERS
from bench.peers.protocol import Job
from bench.throughput_report import has_chart
from bench.workloads import QUICK, RATE, RESULT, TTFT, Goal, Sizes, paced, workloads

VOCAB = 5000


def job(name: str, sizes: Sizes = QUICK, inputs: Inputs | None = None) -> Job:
    return workloads(sizes, VOCAB)[name].make(inputs or Inputs(VOCAB))


@pytest.mark.parametrize("name", workloads(QUICK, VOCAB))
def test_jobs_come_again_in_every_run_but_not_in_every_repeat(name: str) -> None:
    """Were a repeat's prompts those of the one before, caches would answer instead of engines."""
    first, second = Inputs(VOCAB), Inputs(VOCAB)
    jobs = [job(name, inputs=first) for _ in range(2)]
    assert jobs == [job(name, inputs=second) for _ in range(2)]
    assert not {tuple(p[:4]) for p in jobs[0].prompts} & {tuple(p[:4]) for p in jobs[1].prompts}
    assert jobs[0].workload == name


def test_shared_prompts_share_their_beginning_and_nothing_else() -> None:
    for name, start in (("shared-tail", QUICK.shared_tokens), ("shared-full", 1)):
        made = job(name)
        beginnings = {tuple(p[: QUICK.shared_tokens]) for p in made.prompts}
        ends = {tuple(p[QUICK.shared_tokens :]) for p in made.prompts}
        assert len(beginnings) == 1
        assert len(ends) == QUICK.shared_prompts
        assert {len(p) for p in made.prompts} == {QUICK.prompt_tokens}
        assert set(made.starts) == {start}


def test_answers_follow_their_question_which_follows_one_prefix() -> None:
    made = job("choices")
    assert len(made.prompts) == 4 * QUICK.questions
    assert len({tuple(p[: QUICK.prefix_tokens]) for p in made.prompts}) == 1
    contexts = [p[:start] for p, start in zip(made.prompts, made.starts, strict=True)]
    for first in range(0, len(contexts), 4):
        assert contexts[first : first + 4] == [contexts[first]] * 4
    assert len({tuple(c) for c in contexts}) == QUICK.questions
    assert all(len(p) > s > 0 for p, s in zip(made.prompts, made.starts, strict=True))
    part = made.first(4)
    assert (part.prompts, part.starts) == (made.prompts[:4], made.starts[:4])


def test_arrivals_are_random_and_in_order_and_fill_the_time() -> None:
    mixed = job("mixed")
    assert set(mixed.at_s) == {0.0}
    spread = paced(mixed, 10.0, seed=1)
    assert spread == paced(mixed, 10.0, seed=1)
    assert spread.at_s != paced(mixed, 10.0, seed=2).at_s
    assert all(a < b for a, b in itertools.pairwise(spread.at_s))
    assert spread.at_s[-1] == pytest.approx(10.0)
    assert (spread.prompts, spread.max_tokens) == (mixed.prompts, mixed.max_tokens)


def test_tokens_are_counted_alike_for_all_sides() -> None:
    assert job("unique").num_tokens == QUICK.unique_prompts * QUICK.prompt_tokens
    assert job("generate-1").num_tokens == QUICK.generated_tokens
    prompts = QUICK.mixed_scored * QUICK.prompt_tokens
    prompts += QUICK.mixed_generated * QUICK.generate_prompt_tokens
    generated = QUICK.mixed_generated * QUICK.mixed_generated_tokens
    assert job("mixed").num_tokens == prompts + generated


def test_goals_know_which_way_is_better() -> None:
    assert Goal("vllm", RATE, 1.2).is_met(1200.0, 1000.0)
    assert not Goal("vllm", RATE, 1.2).is_met(1199.0, 1000.0)
    assert Goal("vllm", TTFT, 1.0).is_met(0.1, 0.1)
    assert not Goal("vllm", TTFT, 1.0).is_met(0.2, 0.1)
    assert Goal(RESULT, "largest growth, MiB", 1.3, plus=256.0).is_met(1000.0, 600.0)
    assert not Goal(RESULT, "largest growth, MiB", 1.3, plus=256.0).is_met(1100.0, 600.0)


def test_every_goal_is_about_a_side_that_takes_part() -> None:
    for workload in workloads(Sizes(), VOCAB).values():
        assert set(workload.peers) <= set(PEERS)
        assert {goal.side for goal in workload.goals} <= {*workload.peers, RESULT}


def test_there_is_a_chart_where_there_are_points_for_it() -> None:
    found = {name: Measured(workload) for name, workload in workloads(QUICK, VOCAB).items()}
    assert not has_chart([found["unique"], found["full"]])
    assert has_chart([found["unique"], found["batch-2"]])
