"""What is between a model's products on CPU: right by the formulas, and each row on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from workers import fused, kernel_arithmetic, kernels
from workers.fused import FusedNorm, GatedMLP, fused_norm, gated_mlp

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 7, 64, 100, 576, 2049]
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.inference_mode():
        yield


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def with_weight(norm: nn.Module) -> nn.Module:
    weight = norm.weight
    assert isinstance(weight, nn.Parameter)
    weight.data = numbers(*weight.shape, dtype=weight.dtype, seed=9)
    return norm


def llama_mlp(dtype: torch.dtype, width: int = 48, activation: str = "silu") -> LlamaMLP:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=80, num_attention_heads=4, hidden_act=activation
    )
    return LlamaMLP(config).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rounds_first", [True, False])
def test_a_norm_is_what_the_formula_says(
    width: int, dtype: torch.dtype, rounds_first: bool
) -> None:
    x, scale = numbers(33, width, dtype=dtype), numbers(width, seed=1)
    found = FusedNorm(scale, 1e-5, rounds_first)(x).double()
    root = (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = x.double() / root * scale.double()
    assert ((found - expected).abs() <= 2 * EPS[dtype] * expected.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_of_a_norm_has_the_same_bits_in_every_batch(width: int, dtype: torch.dtype) -> None:
    """Whatever its neighbours hold, and wherever in memory it is."""
    norm = FusedNorm(numbers(width, seed=1), 1e-6, True)
    x = numbers(40, width, dtype=dtype)
    whole = norm(x)
    for first, count in ((0, 1), (5, 3), (17, 16), (39, 1)):
        assert bits(norm(x[first : first + count])) == bits(whole[first : first + count])
    for shift in (1, 3, 15):
        moved = torch.empty(40 * width + shift, dtype=dtype)[shift:].view(40, width).copy_(x)
        assert bits(norm(moved)) == bits(whole)
    assert bits(norm(x.t().contiguous().t())) == bits(whole)
    x[7], x[9] = torch.nan, torch.inf
    spoilt = norm(x)
    assert torch.isnan(spoilt[7]).all()
    assert torch.isnan(spoilt[9]).all()
    good = [i for i in range(40) if i not in (7, 9)]
    assert bits(spoilt[good]) == bits(whole[good])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm, Olmo2RMSNorm])
def test_a_norm_of_a_known_kind_is_replaced(kind: Callable[..., Any], dtype: torch.dtype) -> None:
    """Three ways to round and to scale; on other numbers than those it was recognised by."""
    norm = with_weight(kind(96, eps=1e-5).to(dtype))
    found = fused_norm(norm)
    assert found is not None
    x = numbers(2, 200, 96, dtype=dtype, seed=5)
    expected = norm(x)
    differing = found(x) != expected
    places = 4 if dtype == torch.float32 else 1
    assert ((found(x) - expected).abs() <= places * 2 * EPS[dtype] * expected.abs()).all()
    if dtype == torch.bfloat16:
        assert differing.sum() <= 10


class _OffByLittle(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x) * 1.01
        return result


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(64, bias=False),
        nn.LayerNorm(64),
        _OffByLittle(64),
        LlamaRMSNorm(64).half(),
        nn.Linear(64, 64),
        nn.Identity(),
    ],
)
def test_what_is_no_such_norm_stays(norm: nn.Module) -> None:
    assert fused_norm(norm) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 37, 64])
def test_a_gated_layer_is_what_the_formula_says(width: int, dtype: torch.dtype) -> None:
    gate, up = 4 * numbers(30, width), numbers(30, width, seed=1)
    gate, up = gate.to(dtype), up.to(dtype)
    expected = functional.silu(gate.double()) * up.double()
    assert ((gated(gate, up).double() - expected).abs() <= 2 * EPS[dtype] * expected.abs()).all()


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What a gated layer makes of what its first layers gave."""
    both = torch.cat([gate, up], dim=-1)
    result: torch.Tensor = GatedMLP(nn.Identity(), nn.Identity())(both)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_numbers_pass_a_gate_as_they_do_in_torch(dtype: torch.dtype) -> None:
    edges = [0.0, -0.0, 87.0, -87.0, 88.5, -88.5, 89.0, -89.0, 1e4, -1e4, np.inf, -np.inf, np.nan]
    gate = torch.tensor(edges, dtype=dtype)
    found = gated(gate, torch.ones_like(gate))
    expected = functional.silu(gate)
    assert torch.equal(torch.isnan(found), torch.isnan(expected))
    same = torch.isclose(found, expected, rtol=EPS[dtype], atol=1e-35, equal_nan=True)
    assert same.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_layer_is_replaced_and_its_rows_are_their_own(dtype: torch.dtype) -> None:
    mlp = llama_mlp(dtype)
    found = gated_mlp(mlp)
    assert found is not None
    x = numbers(48, 48, dtype=dtype)
    expected = mlp(x)
    assert ((found(x) - expected).abs() <= 4 * EPS[dtype] * expected.abs().max()).all()
    gate, up = numbers(40, 37, dtype=dtype), numbers(40, 37, dtype=dtype, seed=1)
    whole = gated(gate, up)
    for rows in (slice(0, 1), slice(7, 8), slice(13, 39)):
        alone = gated(gate[rows], up[rows])
        assert bits(alone) == bits(whole[rows])


class _Swapped(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        return result


def test_what_is_no_such_gated_layer_stays() -> None:
    config = LlamaConfig(hidden_size=48, intermediate_size=80, num_attention_heads=4)
    gemma = Gemma3MLP(Gemma3TextConfig(hidden_size=48, intermediate_size=80))
    others = (
        _Swapped(config),
        gemma,
        llama_mlp(torch.float16),
        llama_mlp(torch.float32, 48, "relu"),
    )
    for mlp in others:
        assert gated_mlp(mlp) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(9, 64), (1, 10), (2, 128)])
def test_q_and_k_are_turned_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, heads: int, width: int, dtype: torch.dtype
) -> None:
    original = getattr(
        modeling_llama.apply_rotary_pos_emb, "__wrapped__", modeling_llama.apply_rotary_pos_emb
    )
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", original)
    fused.fuse_rotary(llama_mlp(dtype))
    turn = modeling_llama.apply_rotary_pos_emb
    assert turn is not original
    fused.fuse_rotary(llama_mlp(dtype))
    assert modeling_llama.apply_rotary_pos_emb is turn, "once is enough"
    angles = numbers(1, 21, width)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q = numbers(1, 21, heads, width, dtype=dtype).transpose(1, 2)
    k = numbers(1, 21, 1, width, dtype=dtype, seed=1).transpose(1, 2)
    # As parts of one product, a token's q and k lie side by side.
    both = torch.cat([q, k], dim=1).transpose(1, 2).contiguous().transpose(1, 2)
    parts = both[:, :heads], both[:, heads:]
    scattered = tuple(x.contiguous() for x in (q, k))
    for given in ((q, k), parts, scattered):
        for found, expected in zip(turn(*given, cos, sin), original(q, k, cos, sin), strict=True):
            assert found.shape == expected.shape
            assert bits(found) == bits(expected)


def test_what_the_turning_was_not_made_for_goes_to_transformers() -> None:
    def untouched(*args: Any, **named: Any) -> str:
        return "transformers"

    turn = fused._fused_rotary(untouched)
    q, cos = numbers(1, 2, 5, 8), numbers(1, 5, 8)
    assert turn(q, q, cos, cos) != "transformers"
    half = numbers(1, 5, 4)
    assert turn(q, q, half, half) == "transformers"
    assert turn(q, q, cos, cos, unsqueeze_dim=1) == "transformers"
    assert turn(q.half(), q.half(), cos.half(), cos.half()) == "transformers"
    assert turn(q.bfloat16(), q.bfloat16(), cos, cos) == "transformers"
    twice = torch.cat([q, q])
    assert turn(twice, twice, cos, cos) == "transformers"


def test_an_exponential_is_within_two_units_in_the_last_place() -> None:
    for x in np.random.default_rng(0).uniform(-87.3, 88.3, 4000).astype(np.float32):
        expected = np.exp(np.float64(x))
        assert abs(np.float64(kernel_arithmetic.exp(x)) - expected) <= 2.0**-22 * expected
    assert np.isnan(kernel_arithmetic.exp(np.float32(np.nan)))


def test_the_signature_tells_another_order_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in half precision, where most of what differs is rounded away."""
    plain = fused.signature.__wrapped__
    before = plain(torch.bfloat16)
    assert plain(torch.bfloat16) == before
    assert plain(torch.float32) != before
    original = kernels.rms_norm

    def other(threads: int, x: Any, scale: Any, eps: Any, rounds_first: Any, out: Any) -> None:
        turned = np.ascontiguousarray(x[:, ::-1])
        result = np.empty_like(turned)
        scale = np.ascontiguousarray(scale[::-1])
        original(threads, turned, scale, eps, rounds_first, result)
        out[:] = result[:, ::-1]

    monkeypatch.setattr(kernels, "rms_norm", other)
    assert plain(torch.bfloat16) != before
