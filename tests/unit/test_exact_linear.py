"""Linear layers and activations on CPU: a row's bits do not depend on the batch or the threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from workers.exact_linear import AlignedActivation, ExactLinear, Padding, _cut, make_exact

ROWS = 640
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    (96, 96, False),
    (64, 160, True),
    (576, 1536, False),
    (300, 576, True),
    (640, 2048, False),
]


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def cancelling_input(rows: int, columns: int, weight: torch.Tensor) -> torch.Tensor:
    """Inputs and weights whose sums nearly cancel: any other order of summation shows at once."""
    half = columns // 2
    with torch.no_grad():
        weight[:, half : 2 * half] = weight[:, :half]
    x = torch.randn(rows, columns)
    x[:, half : 2 * half] = -x[:, :half]
    return x.to(weight.dtype)


def bits(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features", "bias"), SHAPES)
def test_a_row_has_the_same_bits_in_every_batch_and_on_any_threads(
    out_features: int, in_features: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    linear = nn.Linear(in_features, out_features, bias=bias).to(dtype)
    x = cancelling_input(ROWS, in_features, linear.weight)
    layer = ExactLinear(linear)
    with torch.inference_mode():
        whole = layer(x)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for first, count in ((0, 16), (16, 16), (32, 48), (64, 64), (0, 112), (128, 384)):
                part = layer(x[first : first + count].clone())
                assert bits(part) == bits(whole[first : first + count]), (threads, first, count)
            assert bits(layer(x)) == bits(whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_the_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(1536, 64).to(dtype)
    x = torch.randn(2, 32, 1536).to(dtype)
    expected = x.double() @ linear.weight.double().t() + linear.bias.double()
    result = ExactLinear(linear)(x)
    assert result.shape == (2, 32, 64)
    assert (result.double() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)


def test_where_no_call_on_two_threads_passes_one_thread_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layer = ExactLinear(nn.Linear(48, 32))
    x = torch.randn(64, 48)
    with torch.inference_mode():
        expected = layer(x)
        torch.set_num_threads(2)
        monkeypatch.setitem(layer._parts[0].calls._good, 2, [])
        assert bits(layer(x)) == bits(expected)


def test_a_batch_is_cut_into_large_calls_and_padded_to_the_smallest() -> None:
    assert list(_cut(576, [16, 64, 448])) == [(0, 448), (448, 64), (512, 64)]
    assert list(_cut(16, [48, 64])) == [(0, 48)]
    assert list(_cut(80, [48, 64])) == [(0, 64), (64, 48)]


def test_a_layer_wider_than_a_call_gives_all_its_outputs() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(32, 4096 + 80).to(torch.bfloat16)
    x = torch.randn(48, 32).to(torch.bfloat16)
    with torch.inference_mode():
        result = ExactLinear(linear)(x)
        expected = x.double() @ linear.weight.double().t() + linear.bias.double()
    assert result.shape == (48, 4096 + 80)
    assert (result.double() - expected).abs().max() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "gelu"])
def test_an_activation_has_the_same_bits_in_every_batch_and_on_any_threads(
    name: str, dtype: torch.dtype
) -> None:
    """Left-over numbers take another path than whole vectors; threads move where those are."""
    torch.manual_seed(0)
    layer = AlignedActivation(ACT2FN[name])
    for width in (160, 37):
        x = (torch.randn(16 * 400, width) * 3).to(dtype)
        torch.set_num_threads(1)
        whole = layer(x)
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            assert bits(layer(x)) == bits(whole), threads
            for first, count in ((0, 16), (160, 48), (3200, 1600)):
                part = layer(x[first : first + count].clone())
                assert bits(part) == bits(whole[first : first + count]), (threads, count)


def test_all_layers_of_a_model_are_replaced() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Sequential(nn.Linear(48, 16)))
    x = torch.randn(16, 32)
    expected = model(x)
    first = make_exact(model)
    assert isinstance(model[0], ExactLinear)
    assert isinstance(model[2][0], ExactLinear)
    assert isinstance(model[1], AlignedActivation)
    assert torch.allclose(model(x), expected, atol=1e-6)
    again = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Sequential(nn.Linear(48, 16)))
    assert make_exact(again) == first, "the digest is of the arithmetic, not of the weights"


@pytest.mark.parametrize(
    ("rows", "least", "step", "padded"),
    [
        (1, 1, 64, 1),
        (33, 1, 64, 33),
        (65, 1, 64, 128),
        (65, 1, 1, 65),
        (1, 16, 64, 16),
        (16, 16, 64, 16),
        (17, 16, 64, 32),
        (17, 48, 64, 48),
        (49, 48, 64, 64),
        (65, 16, 64, 128),
        (512, 64, 64, 512),
        (513, 64, 64, 576),
    ],
)
def test_batches_are_padded_to_row_counts_that_are_tried(
    rows: int, least: int, step: int, padded: int
) -> None:
    assert Padding(least, step).rows(rows) == padded
