"""One model over several ranks, each a thread of this process: what is shared out, and what comes
of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from scheduler.codec import decode
from scheduler.errors import InvalidConfig, InvariantViolation, NumericalError
from scheduler.messages import SchedulerOutput
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests import tiny_models
from tests.runner_driver import RunnerDriver
from workers.kv_cache import ByteArray, KVCache, LayerSpec
from workers.loader import load_model
from workers.model_runner import ModelRunner
from workers.ranks.group import Ranks
from workers.ranks.runner import FollowingRunner, LeadingRunner
from workers.ranks.shards import BlockShards

LENGTH = 290
PROMPT = np.random.default_rng(0).integers(0, tiny_models.VOCAB_SIZE, LENGTH).tolist()
GREEDY = SamplingParams(prompt_logprobs=3, logprobs=2, max_tokens=6, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(
    prompt_logprobs=1, max_tokens=6, temperature=0.8, seed=5, presence_penalty=0.5, ignore_eos=True
)
KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_models.tiny_llama,
    "gemma3": tiny_models.tiny_gemma3,
    "gemma2": tiny_models.tiny_gemma2,
    "qwen2": tiny_models.tiny_qwen2,
}

pytestmark = pytest.mark.usefixtures("one_thread")


class Threads:
    """Followers in threads of this process."""

    def __init__(self, size: int) -> None:
        self.pools = [ThreadPoolExecutor(1) for _ in range(1, size)]
        self.runners: list[FollowingRunner] = []

    def call(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        return self.call_each(method, [args] * len(self.pools))

    def call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        answers = [
            pool.submit(self._run, runner, method, own)
            for pool, runner, own in zip(self.pools, self.runners, args, strict=True)
        ]
        return lambda: [answer.result(timeout=60) for answer in answers]

    @staticmethod
    def _run(runner: FollowingRunner, method: str, args: tuple[Any, ...]) -> Any:
        if method == "execute":
            args = (decode(args[0], SchedulerOutput),)
        return getattr(runner, method)(*args)

    def give_up(self, error: Exception) -> NoReturn:
        raise error


class Team:
    """A model over `size` ranks that are joined."""

    def __init__(self, folder: Path, size: int, dtype: str) -> None:
        self.threads = Threads(size)
        ranks = [Ranks(rank, size) for rank in range(size)]
        models = [load_model(str(folder), dtype=dtype, ranks=own) for own in ranks]
        port = ranks[0].open("127.0.0.1")
        device = torch.device("cpu")
        joining = [
            pool.submit(own.join, "127.0.0.1", port, "127.0.0.1", device)
            for pool, own in zip(self.threads.pools, ranks[1:], strict=True)
        ]
        ranks[0].join("127.0.0.1", port, "127.0.0.1", device)
        for each in joining:
            each.result(timeout=60)
        sizes = {"num_blocks": 120, "block_size": 16}
        self.threads.runners = [FollowingRunner(model, **sizes) for model in models[1:]]
        self.first = LeadingRunner(models[0], self.threads, **sizes)

    def driver(self, seed: int = 0) -> RunnerDriver:
        self.first.forget_all()
        return RunnerDriver(self.first, seed)

    def close(self) -> None:
        for pool in self.threads.pools:
            pool.shutdown()


Make = Callable[..., Team]


@pytest.fixture(scope="module")
def team(folder: Callable[[str], Path]) -> Iterator[Make]:
    made: list[Team] = []

    @functools.cache
    def make(kind: str = "llama", size: int = 2, dtype: str = "fp32") -> Team:
        made.append(Team(folder(kind), size, dtype))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda kind: KINDS[kind](tmp_path_factory.mktemp(kind)))


def same_bits(one: Request, other: Request) -> bool:
    mine, theirs = one.prompt_logprobs, other.prompt_logprobs
    assert mine is not None
    assert theirs is not None
    tokens_are_same = list(one.output_token_ids) == list(other.output_token_ids)
    return tokens_are_same and mine.array().same_bits(theirs.array())


# ------------------------------------------------------------------------- beside one process


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_tokens_of_one_and_nearly_its_rows(
    team: Make, folder: Callable[[str], Path], kind: str
) -> None:
    one = RunnerDriver(ModelRunner(load_model(str(folder(kind)), dtype="fp32"), num_blocks=120))
    alone = one.finish(one.request(PROMPT, GREEDY), [LENGTH])
    two = team(kind).driver()
    shared = two.finish(two.request(PROMPT, GREEDY), [LENGTH])

    assert shared.output_token_ids == alone.output_token_ids
    assert shared.prompt_logprobs is not None
    assert alone.prompt_logprobs is not None
    rows = shared.prompt_logprobs.array().logprobs, alone.prompt_logprobs.array().logprobs
    assert np.abs(rows[0][:, 0] - rows[1][:, 0]).max() < 1e-3
    assert two.info.block_bytes == one.info.block_bytes
    assert two.info.tensor_parallel_size == 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_chunks_and_batch_mates_change_no_bit(
    team: Make, dtype: str, params: SamplingParams
) -> None:
    own = team("llama", 2, dtype).driver()
    whole = own.finish(own.request(PROMPT, params), [LENGTH])
    for sizes in ([100], [17], [128, 1]):
        assert same_bits(own.finish(own.request(PROMPT, params), sizes), whole), sizes
    mate = own.request(PROMPT[::-1], params, "mate")
    mated = own.request(PROMPT, params)
    own.step([(mate, 0, 130), (mated, 0, 90)])
    assert same_bits(own.finish(mated, [70], start=90), whole)
    own.release(mate)
