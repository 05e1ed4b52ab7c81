"""One model over several ranks, each a thread of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM, Qwen2ForCausalLM

from scheduler.codec import decode, int_array
from scheduler.errors import InvalidConfig, InvariantViolation, NumericalError
from scheduler.messages import SchedulerOutput
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests import tiny_models
from tests.runner_driver import RunnerDriver
from workers.kv_cache import ByteArray, KVCache, LayerSpec
from workers.loader import LoadedModel, load_model
from workers.model_runner import ModelRunner
from workers.ranks import group
from workers.ranks.group import Ranks
from workers.ranks.runner import FollowingRunner, LeadingRunner
from workers.ranks.shards import BlockShards
from workers.ranks.split import split_model

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

        def join(model: LoadedModel) -> LoadedModel:
            model.ranks.join("127.0.0.1", port, "127.0.0.1", device)
            return model.agreed()

        joining = [
            pool.submit(join, model)
            for pool, model in zip(self.threads.pools, models[1:], strict=True)
        ]
        models = [join(models[0]), *(each.result(timeout=60) for each in joining)]
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


@pytest.fixture(scope="module", autouse=True)
def impatient() -> Iterator[None]:
    """A rank that waits for one that failed fails too, where else a step's deadline ends it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_TIMEOUT", timedelta(seconds=30))
        yield


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
    for sizes in ([100], [133, 1, 1, 17]):
        assert same_bits(own.finish(own.request(PROMPT, params), sizes), whole), sizes
    mate = own.request(PROMPT[::-1], params, "mate")
    mated = own.request(PROMPT, params)
    own.step([(mate, 0, 130), (mated, 0, 90)])
    assert same_bits(own.finish(mated, [70], start=90), whole)
    own.release(mate)


def test_tokens_that_follow_within_a_step_are_the_same(team: Make) -> None:
    """The other ranks go on from tokens that only the first one has sampled."""
    own = team().driver()
    whole = own.finish(own.request(PROMPT[:40], DRAWN), [40])
    request = own.request(PROMPT[:40], DRAWN)
    chunk = own.chunk(request, 0, 40)
    while len(own.tables["r"]) * 16 < 46:
        own.tables["r"].append(own.free.pop())
    chunk = msgspec.structs.replace(
        chunk, new_block_ids=int_array(own.tables["r"]), max_more_tokens=5
    )
    [result] = own.run([chunk])
    assert result.more_token_ids is not None
    assert [result.sampled_token_id, *result.more_token_ids] == list(whole.output_token_ids)
    own.release(request)


# ---------------------------------------------------------------------------------- KV blocks


def test_blocks_that_are_saved_and_loaded_elsewhere_change_no_bit(team: Make) -> None:
    """As an eviction or a migration does; what is saved are whole blocks."""
    own = team().driver()
    whole = own.finish(own.request(PROMPT, GREEDY), [LENGTH])
    moved = own.request(PROMPT, GREEDY)
    own.step([(moved, 0, 100)])
    saved = own.runner.read_blocks(own.tables["r"])
    assert saved.shape == (7, own.info.block_bytes)
    own.release(moved)
    moved = Request.decode(moved.encode())

    other = team().driver(seed=7)
    other.tables["r"] = [other.free.pop() for _ in range(7)]
    other.runner.write_blocks(other.tables["r"], saved)
    assert same_bits(other.finish(moved, [50], start=100), whole)


def test_a_whole_block_has_the_layout_of_one_process() -> None:
    layers = [LayerSpec(4, 8), LayerSpec(2, 16)]
    whole = KVCache(layers, num_blocks=3, block_size=4, dtype=torch.bfloat16)
    halves = [LayerSpec(2, 8), LayerSpec(1, 16)]
    ranks = [KVCache(halves, num_blocks=3, block_size=4, dtype=torch.bfloat16) for _ in range(2)]
    for layer, spec in enumerate(halves):
        for of in ("key", "value"):
            tensor = getattr(whole, of)(layer)
            tensor.copy_(torch.randn(tensor.shape))
            for rank, cache in enumerate(ranks):
                heads = slice(rank * spec.kv_heads, (rank + 1) * spec.kv_heads)
                getattr(cache, of)(layer).copy_(tensor[:, heads])
    shards = BlockShards(tuple(halves), 4, 2, True, 2)
    merged = shards.merge([cache.read_blocks([2, 0]) for cache in ranks])
    assert merged.tobytes() == whole.read_blocks([2, 0]).tobytes()
    for share, cache in zip(shards.split(merged), ranks, strict=True):
        assert share.tobytes() == cache.read_blocks([2, 0]).tobytes()


def test_where_tokens_come_first_each_tokens_heads_are_shared_out() -> None:
    """On CUDA a block is, for K and for V, [tokens, heads, head size]."""
    whole = np.arange(2 * 2 * 4 * 6 * 8, dtype=np.uint16).reshape(2, 2, 4, 6, 8)
    by_rank = [whole[:, :, :, first : first + 2] for first in (0, 2, 4)]
    shares: list[ByteArray] = [as_bytes(share) for share in by_rank]
    shards = BlockShards((LayerSpec(2, 8),), 4, 2, False, 3)
    assert shards.merge(shares).tobytes() == as_bytes(whole).tobytes()
    for share, expected in zip(shards.split(as_bytes(whole)), shares, strict=True):
        assert share.tobytes() == expected.tobytes()


def as_bytes(blocks: Any) -> ByteArray:
    return np.ascontiguousarray(blocks).reshape(len(blocks), -1).view(np.uint8)


@pytest.mark.parametrize("shape", [(1, 767), (1, 384), (2, 0)])
def test_what_are_no_whole_blocks_is_refused_by_all_ranks(shape: tuple[int, int]) -> None:
    shards = BlockShards((LayerSpec(2, 8),), 4, 2, False, 3)
    with pytest.raises(InvariantViolation, match=r"\[n, 768\]"):
        shards.split(np.zeros(shape, np.uint8))


# ------------------------------------------------------------------------------- what goes wrong


def test_a_chunk_that_cannot_be_computed_leaves_the_ranks_alike(team: Make) -> None:
    own = team().driver()
    whole = own.finish(own.request(PROMPT, DRAWN), [LENGTH])
    bad, good = own.request(PROMPT, DRAWN, "bad"), own.request(PROMPT, DRAWN)
    spoilt = msgspec.structs.replace(own.chunk(bad, 0, 50), token_ids=int_array([-5] * 50))
    chunk = own.chunk(good, 0, 50)
    failed, result = own.run([spoilt, chunk])
    assert failed.error is not None
    good.advance(50, result.rows, result.sampled_token_id, result.sampled_logprobs)
    assert same_bits(own.finish(good, [LENGTH], start=50), whole)
    for runner in [own.runner, *team().threads.runners]:
        assert runner.num_tracked_requests == 0


def test_nan_is_wiped_at_every_rank(tmp_path: Path) -> None:
    """No KV of the chunk is left for whoever is given its blocks."""
    team = Team(tiny_models.tiny_llama(tmp_path), 2, "bf16")
    for runner in [team.first, *team.threads.runners]:
        with torch.no_grad():
            runner._model.model.model.embed_tokens.weight[13] = torch.nan
    own = team.driver()
    bad = own.request([14] * 30 + [13], SamplingParams(max_tokens=1))
    with pytest.raises(NumericalError):
        own.step([(bad, 0, 31)])
    for runner in team.threads.runners:
        assert not runner.read_blocks(own.tables["r"]).any()
        assert runner.num_tracked_requests == 0
    team.close()


def test_what_one_rank_cannot_do_ends_all_of_them(team: Make) -> None:
    own = team().driver()
    ended = []

    def give_up(error: Exception) -> NoReturn:
        ended.append(error)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(team().threads, "give_up", give_up)
        with pytest.raises(InvariantViolation):
            own.runner.read_blocks([10_000])
    assert len(ended) == 1


# ----------------------------------------------------------------------------- what is shared out


def test_each_rank_has_the_kv_of_its_heads_and_the_first_one_the_output_layer(team: Make) -> None:
    runners = [team().first, *team().threads.runners]
    for rank, runner in enumerate(runners):
        model = runner._model
        assert [spec.kv_heads for spec in model.layers] == [1, 1, 1]
        assert model.model.model.embed_tokens.weight.shape == (tiny_models.VOCAB_SIZE, 96)
        assert isinstance(model.model.lm_head, torch.nn.Identity) == (rank > 0)
    assert len({runner._model.fingerprint for runner in runners}) == 2


def test_linear_layers_are_cut_by_outputs_or_by_inputs(tmp_path: Path) -> None:
    folder = tiny_models.tiny_qwen2(tmp_path)
    whole = Qwen2ForCausalLM.from_pretrained(folder)
    for rank in range(2):
        model = Qwen2ForCausalLM.from_pretrained(folder)
        split_model(model, model.config, Ranks(rank, 2))
        mine, theirs = model.model.layers[1], whole.model.layers[1]
        rows, columns = slice(rank * 96, rank * 96 + 96), slice(rank * 80, rank * 80 + 80)
        assert torch.equal(mine.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight[rows])
        assert torch.equal(mine.self_attn.q_proj.bias, theirs.self_attn.q_proj.bias[rows])
        assert torch.equal(mine.mlp.up_proj.weight, theirs.mlp.up_proj.weight[columns])
        assert torch.equal(mine.mlp.down_proj.part.weight, theirs.mlp.down_proj.weight[:, columns])
        assert mine.self_attn.k_proj.weight.shape == (32, 192)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_size_that_does_not_divide_the_kv_heads_is_refused(
    folder: Callable[[str], Path], size: int
) -> None:
    with pytest.raises(InvalidConfig, match=r"2 KV heads .* give 1 or 2") as caught:
        load_model(str(folder("llama")), dtype="fp32", ranks=Ranks(0, size))
    assert caught.value.details["field"] == "tensor_parallel_size"
    assert caught.value.details["allowed"] == "1 or 2"


def test_a_model_whose_plan_shares_out_no_whole_heads_is_refused(tmp_path: Path) -> None:
    """Phi 3 has q, k and v in one layer."""
    config = Phi3Config(num_hidden_layers=1, **tiny_models.COMMON | {"pad_token_id": 0})
    path = tiny_models.save_model(Phi3ForCausalLM, config, tmp_path)
    with pytest.raises(InvalidConfig, match=r"Phi3ForCausalLM.*self_attn.*give 1$"):
        load_model(str(path), dtype="fp32", ranks=Ranks(0, 2))


def test_sums_are_made_in_the_order_of_ranks_at_every_rank() -> None:
    """In another order the small part is not lost in the large one."""
    parts = [torch.tensor(x) for x in ([2.0**26, 1.0], [1.0, -(2.0**26)], [-(2.0**26), 2.0**26])]
    ranks = [Ranks(rank, 3) for rank in range(3)]
    port = ranks[0].open("127.0.0.1")

    def run(own: Ranks) -> tuple[list[float], list[int]]:
        own.join("127.0.0.1", port, "127.0.0.1", torch.device("cpu"))
        total = own.sum(parts[own.rank].bfloat16())
        assert total.dtype == torch.float32
        return total.tolist(), own.from_first(int_array([own.rank, 7 - own.rank])).tolist()

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, ranks))
    assert found == [([0.0, 0.0], [0, 7])] * 3
    assert (parts[0] + parts[2] + parts[1]).tolist() == [1.0, 0.0]
