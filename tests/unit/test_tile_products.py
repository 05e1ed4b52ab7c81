"""Products of few rows by kernels of ours: the library's own bits, or none at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from workers import exact_linear, tile_kernels, tile_products
from workers.exact_linear import ExactLinear

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(960, 576), (576, 1536), (3072, 576), (96, 192), (100, 64), (32, 32), (4128, 96)]


@pytest.fixture(autouse=True)
def _probed_anew() -> Any:
    exact_linear._calls.cache_clear()
    with torch.inference_mode():
        yield
    exact_linear._calls.cache_clear()


def linear(out_features: int, in_features: int, bias: bool = False) -> nn.Linear:
    torch.manual_seed(out_features + in_features)
    return nn.Linear(in_features, out_features, bias=bias).bfloat16()


def uses_tiles(layer: ExactLinear) -> bool:
    return all(part.few_rows is not None for part in layer._parts)


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_have_the_bits_of_many(shape: tuple[int, int], bias: bool) -> None:
    layer = ExactLinear(linear(*shape, bias=bias))
    if not uses_tiles(layer):
        pytest.skip("the library's products have other bits, or weights lie otherwise")
    x = torch.randn(512, shape[1]).bfloat16()
    x[5] *= 1e30
    x[9] *= 1e-30
    whole = layer(x)
    for rows in (1, 3, 8, 16, 21, 32, 33, 48, 80, 112):
        assert bits(layer(x[:rows])) == bits(whole[:rows])
        assert bits(layer(x[100 : 100 + rows])) == bits(whole[100 : 100 + rows])


def test_this_machine_uses_tiles_where_it_has_them() -> None:
    """Were they refused by a fault of ours, nothing else would show it but the clock."""
    if not tile_products.is_available():
        pytest.skip("no such instructions here")
    for shape in SHAPES:
        assert uses_tiles(ExactLinear(linear(*shape)))


def test_two_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ExactLinear(linear(960, 576))
    x = torch.randn(32, 576).bfloat16()
    alone = bits(layer(x))
    torch.set_num_threads(2)
    monkeypatch.setattr("workers.kernel_calls._NUMBERS_PER_THREAD", 1)
    assert bits(layer(x)) == alone


def test_a_row_that_is_spoilt_spoils_no_other() -> None:
    layer = ExactLinear(linear(96, 192))
    x = torch.randn(16, 192).bfloat16()
    good = layer(x)
    x[3], x[7, 0] = torch.nan, torch.inf
    found = layer(x)
    assert torch.isnan(found[3]).all()
    assert not torch.isfinite(found[7]).any()
    kept = [i for i in range(16) if i not in (3, 7)]
    assert bits(found[kept]) == bits(good[kept])


def test_where_no_chunk_gives_the_bits_the_library_computes_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tile_products.widens():
        pytest.skip("the library computes nothing here")
    expected = ExactLinear(linear(96, 192))(torch.ones(16, 192).bfloat16())
    exact_linear._calls.cache_clear()
    original = tile_kernels.multiply

    def other(*arguments: Any) -> None:
        original(*arguments)
        arguments[-1][0, 0] ^= 1

    monkeypatch.setattr(tile_kernels, "multiply", other)
    layer = ExactLinear(linear(96, 192))
    assert not uses_tiles(layer)
    assert bits(layer(torch.ones(16, 192).bfloat16())) == bits(expected)


def test_weights_that_lie_otherwise_are_not_read() -> None:
    if not tile_products.is_available() or tile_products.widens():
        pytest.skip("no such instructions here")
    weight = linear(96, 192).weight.detach()
    packed = exact_linear._laid_out(weight)
    assert packed is not None
    memory = tile_products.memory_of(packed)
    assert memory is not None
    assert tile_products.is_for_tiles(weight, memory)
    assert not tile_products.is_for_tiles(weight.flip(0), memory)
    assert not uses_tiles(ExactLinear(linear(96, 200)))


def test_without_the_instructions_the_library_computes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_products, "is_available", lambda: False)
    layer = ExactLinear(linear(96, 192))
    assert not uses_tiles(layer)
    assert layer(torch.ones(16, 192).bfloat16()).shape == (16, 96)
