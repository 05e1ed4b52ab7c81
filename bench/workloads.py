"""The workloads of the throughput benchmark: what is asked for, of whom, and what to reach.

The module knows no engine. A workload makes the same jobs for every side, from seeded random
tokens; each repeat has prompts of its own, so that nothing is found in a cache but what the
workload means to be found there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.inputs import Inputs
from bench.peers.protocol import Job, Prompts

OURS = "haversack"
RATE = "tokens/s"
ANSWERS = "answers/s"
TTFT = "TTFT p99, s"
PEAK = "peak memory, MiB"
GROWTH = "largest growth, MiB"
LOWER_IS_BETTER = frozenset({TTFT, PEAK, GROWTH})
RESULT = "result"
"""Stands among the sides for the bytes of the rows themselves."""


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are."""

    prompt_tokens: int = 576
    shared_tokens: int = 512
    unique_prompts: int = 16
    shared_prompts: int = 32
    rescored_prompts: int = 8
    prefix_tokens: int = 1000
    questions: int = 50
    peer_questions: int = 8
    """The harness's way takes time in proportion to the answers, so a part of them tells its
    speed."""
    question_tokens: tuple[int, int] = (30, 60)
    answer_tokens: tuple[int, int] = (2, 12)
    requests: int = 16
    generate_prompt_tokens: int = 128
    generated_tokens: int = 64
    mixed_scored: int = 12
    mixed_generated: int = 24
    mixed_generated_tokens: int = 32
    long_tokens: int = 8000
    long_k: int = 20
    full_tokens: int = 1000
    lengths: tuple[int, ...] = (64, 256, 1024, 4096)
    length_total: int = 4096
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64)
    batch_prompt_tokens: int = 32
    batch_generated_tokens: int = 32


QUICK = Sizes(
    prompt_tokens=40,
    shared_tokens=32,
    unique_prompts=3,
    shared_prompts=3,
    rescored_prompts=2,
    prefix_tokens=48,
    questions=3,
    peer_questions=1,
    question_tokens=(4, 9),
    answer_tokens=(2, 4),
    requests=3,
    generate_prompt_tokens=16,
    generated_tokens=6,
    mixed_scored=2,
    mixed_generated=3,
    mixed_generated_tokens=4,
    long_tokens=200,
    long_k=5,
    full_tokens=50,
    lengths=(16, 64),
    length_total=64,
    batch_sizes=(1, 2),
    batch_prompt_tokens=8,
    batch_generated_tokens=4,
)


@dataclass(frozen=True)
class Goal:
    """What to reach beside another side: `factor` times its figure, and `plus` on top.

    At least that where more is better, at most that where less is.
    """

    side: str
    figure: str
    factor: float
    plus: float = 0.0

    def is_met(self, ours: float, theirs: float) -> bool:
        """Whether a pair of figures reaches it."""
        bound = self.factor * theirs + self.plus
        return ours <= bound if self.figure in LOWER_IS_BETTER else ours >= bound

    def __str__(self) -> str:
        sign = "<=" if self.figure in LOWER_IS_BETTER else ">="
        return f"{sign} {self.factor:g} x {self.side}{f' + {self.plus:g}' if self.plus else ''}"


@dataclass(frozen=True)
class Workload:
    """One line, or a few, of the result."""

    name: str
    story: str
    make: Callable[[Inputs], Job]
    """The next repeat's job."""
    peers: tuple[str, ...]
    goals: tuple[Goal, ...] = ()
    rate: str = RATE
    peer_prompts: int | None = None
    """Prompts that peers are given, where they need not have all to show their speed."""
    is_primed: bool = False
    """Whether the job runs once untimed before each repeat."""
    is_fresh: bool = False
    """Whether sides start anew, so that their memory is not that of other workloads."""
    is_served: bool = False
    """Whether prompts arrive one by one: peers run as servers."""
    shows_peak: bool = False
    load_share: float | None = None
    """Share of the slowest side's capacity at which TTFT is measured on top."""
    point: tuple[str, int] | None = None
    """Where its rate stands in the chart: which panel, and the x value."""


def workloads(sizes: Sizes, vocab_size: int) -> dict[str, Workload]:
    """Return all workloads by name, in the order in which they run."""
    own = sizes.prompt_tokens - sizes.shared_tokens
    shared = f"{sizes.shared_prompts} prompts of {sizes.shared_tokens} shared and {own} own tokens"
    return {
        workload.name: workload
        for workload in (
            _long(sizes),
            _full(sizes, vocab_size),
            Workload(
                "unique",
                f"{sizes.unique_prompts} prompts of {sizes.prompt_tokens} tokens, all rows, k=1",
                lambda inputs: Job.score(
                    "unique", inputs.unique(sizes.unique_prompts, sizes.prompt_tokens)
                ),
                ("vllm", "transformers", "linear"),
                (Goal("vllm", RATE, 1.2), Goal("linear", RATE, 0.85)),
            ),
            Workload(
                "shared-tail",
                f"{shared}, rows of the own tokens, k=1",
                lambda inputs: _shared("shared-tail", sizes, inputs, sizes.shared_tokens),
                ("vllm",),
                (Goal("vllm", RATE, 6.0),),
            ),
            Workload(
                "shared-full",
                f"{shared}, all rows, k=1",
                lambda inputs: _shared("shared-full", sizes, inputs, 1),
                ("vllm",),
                (Goal("vllm", RATE, 5.0),),
            ),
            Workload(
                "rescore",
                f"{sizes.rescored_prompts} prompts of {sizes.prompt_tokens} tokens that were just "
                f"scored, all rows, k=1",
                lambda inputs: Job.score(
                    "rescore", inputs.unique(sizes.rescored_prompts, sizes.prompt_tokens)
                ),
                ("vllm",),
                (Goal("vllm", RATE, 20.0),),
                is_primed=True,
            ),
            _choices(sizes),
            *(_generate(sizes, count) for count in (sizes.requests, 1)),
            *(_length(sizes, length) for length in sizes.lengths),
            *(_batch(sizes, count) for count in sizes.batch_sizes),
            _mixed(sizes),
        )
    }


def paced(job: Job, span_s: float, seed: int) -> Job:
    """Return a job whose prompts arrive as a Poisson process, the last one after `span_s` s."""
    gaps = np.random.default_rng(seed).exponential(1.0, len(job.prompts))
    times = np.cumsum(gaps)
    return dataclasses.replace(job, at_s=(times * (span_s / times[-1])).tolist())


def _long(sizes: Sizes) -> Workload:
    return Workload(
        "long",
        f"one prompt of {sizes.long_tokens} tokens, all rows, k={sizes.long_k}",
        lambda inputs: Job.score("long", inputs.unique(1, sizes.long_tokens), sizes.long_k),
        ("vllm", "transformers"),
        (Goal("vllm", RATE, 1.2), Goal("vllm", PEAK, 0.5)),
        is_fresh=True,
        shows_peak=True,
    )


def _full(sizes: Sizes, vocab_size: int) -> Workload:
    return Workload(
        "full",
        f"one prompt of {sizes.full_tokens} tokens, all rows, k=-1 (all {vocab_size} tokens)",
        lambda inputs: Job.score("full", inputs.unique(1, sizes.full_tokens), -1),
        (),
        (Goal(RESULT, GROWTH, 1.3, plus=256.0),),
        is_fresh=True,
    )


def _shared(name: str, sizes: Sizes, inputs: Inputs, start: int) -> Job:
    own = sizes.prompt_tokens - sizes.shared_tokens
    prompts = inputs.shared(sizes.shared_prompts, sizes.shared_tokens, own)
    return Job.score(name, prompts, starts=[start] * len(prompts))


def _choices(sizes: Sizes) -> Workload:
    answers = 4

    def make(inputs: Inputs) -> Job:
        rng = inputs.rng
        prefix = inputs.tokens(sizes.prefix_tokens)
        prompts: Prompts = []
        starts: list[int] = []
        for _ in range(sizes.questions):
            context = prefix + inputs.tokens(int(rng.integers(*sizes.question_tokens)))
            for _ in range(answers):
                prompts.append(context + inputs.tokens(int(rng.integers(*sizes.answer_tokens))))
                starts.append(len(context))
        return Job.score("choices", prompts, starts=starts)

    timed = answers * sizes.peer_questions
    return Workload(
        "choices",
        f"{sizes.questions} questions with {answers} answers after a prefix of "
        f"{sizes.prefix_tokens} tokens, loglikelihood of each answer; peers are timed on the first "
        f"{timed} answers, transformers as evaluation harnesses run it",
        make,
        ("vllm", "transformers"),
        (Goal("transformers", ANSWERS, 15.0),),
        rate=ANSWERS,
        peer_prompts=timed,
    )


def _generate(sizes: Sizes, count: int) -> Workload:
    name = f"generate-{count}"
    return Workload(
        name,
        f"{count} request{'s' if count > 1 else ''}, {sizes.generate_prompt_tokens} tokens in, "
        f"{sizes.generated_tokens} out, greedy",
        lambda inputs: Job.generate(
            name, inputs.unique(count, sizes.generate_prompt_tokens), sizes.generated_tokens
        ),
        ("vllm", "transformers"),
        (Goal("vllm", RATE, 1.1 if count > 1 else 1.0),),
    )


def _length(sizes: Sizes, length: int) -> Workload:
    name = f"length-{length}"
    count = max(1, sizes.length_total // length)
    return Workload(
        name,
        f"{count} prompt{'s' if count > 1 else ''} of {length} tokens, all rows, k=1",
        lambda inputs: Job.score(name, inputs.unique(count, length)),
        ("vllm", "transformers"),
        point=("prompt tokens", length),
    )


def _batch(sizes: Sizes, count: int) -> Workload:
    name = f"batch-{count}"
    return Workload(
        name,
        f"{count} request{'s' if count > 1 else ''}, {sizes.batch_prompt_tokens} tokens in, "
        f"{sizes.batch_generated_tokens} out, greedy",
        lambda inputs: Job.generate(
            name, inputs.unique(count, sizes.batch_prompt_tokens), sizes.batch_generated_tokens
        ),
        ("vllm", "transformers"),
        point=("requests in a batch", count),
    )


def _mixed(sizes: Sizes) -> Workload:
    count = sizes.mixed_scored + sizes.mixed_generated
    share = 0.7

    def make(inputs: Inputs) -> Job:
        """Return scoring and generation in random order, all of it there at once."""
        scored = inputs.unique(sizes.mixed_scored, sizes.prompt_tokens)
        generating = inputs.unique(sizes.mixed_generated, sizes.generate_prompt_tokens)
        both = [(prompt, 0) for prompt in scored]
        both += [(prompt, sizes.mixed_generated_tokens) for prompt in generating]
        order = inputs.rng.permutation(count).tolist()
        return Job(
            "mixed",
            "serve",
            [both[i][0] for i in order],
            max_tokens=[both[i][1] for i in order],
            at_s=[0.0] * count,
        )

    return Workload(
        "mixed",
        f"{sizes.mixed_scored} prompts scored and {sizes.mixed_generated} continued: tokens/s "
        f"where all come at once, TTFT of Poisson arrivals at {share:.0%} of the slowest side's "
        f"tokens/s",
        make,
        ("vllm",),
        (Goal("vllm", RATE, 1.0), Goal("vllm", TTFT, 1.0)),
        is_served=True,
        load_share=share,
    )
