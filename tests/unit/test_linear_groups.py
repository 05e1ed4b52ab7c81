"""Layers of one input that are computed as one."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from workers.linear_groups import join, side_by_side


class Attention(nn.Module):
    """Calls its layers in some order, each with an input of its own choice."""

    def __init__(self, bias: bool = False, widths: tuple[int, int, int] = (24, 8, 16)) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q_proj = nn.Linear(12, widths[0], bias=bias)
        self.k_proj = nn.Linear(12, widths[1], bias=bias)
        self.v_proj = nn.Linear(12, widths[2], bias=bias)


class Counted(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.calls = 0
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        product: torch.Tensor = self.linear(x)
        self.last = weakref.ref(product)
        return product


NAMES = ("q_proj", "k_proj", "v_proj")


def joined(module: nn.Module) -> list[Counted]:
    made: list[Counted] = []

    def replace(linear: nn.Linear) -> nn.Module:
        made.append(Counted(linear))
        return made[-1]

    join(module, replace)
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)))
def test_each_layer_gives_what_it_gave_and_all_are_computed_once(
    order: tuple[str, ...], bias: bool
) -> None:
    plain, together = Attention(bias), Attention(bias)
    (layer,) = joined(together)
    for step in (1, 2):
        x = torch.randn(2, 5, 12)
        for name in order:
            found, expected = getattr(together, name)(x), getattr(plain, name)(x)
            assert torch.allclose(found, expected, atol=1e-6)
        assert layer.calls == step
        del found
        assert layer.last() is None, "what nobody needs any more takes no memory"


def test_inputs_that_differ_are_not_mistaken_for_each_other() -> None:
    """Nor is one that was changed in place after its product had been taken whole."""
    plain, together = Attention(), Attention()
    joined(together)
    inputs = [torch.randn(3, 12) for _ in range(3)]
    for name, x in zip(NAMES, inputs, strict=True):
        assert torch.allclose(getattr(together, name)(x), getattr(plain, name)(x), atol=1e-6)
    x = inputs[0]
    for _ in range(3):
        x += 1
        for name in NAMES:
            assert torch.allclose(getattr(together, name)(x), getattr(plain, name)(x), atol=1e-6)
    for _ in range(2):
        assert torch.allclose(together.q_proj(x), plain.q_proj(x), atol=1e-6)
        x += 1


def test_layers_that_do_not_fit_together_stay() -> None:
    other = Attention()
    other.k_proj = nn.Linear(13, 8)
    mixed = Attention()
    mixed.k_proj = nn.Linear(12, 8, bias=True)
    own_kind = Attention()
    own_kind.k_proj = type("Own", (nn.Linear,), {})(12, 8, bias=False)
    missing = Attention()
    del missing.v_proj
    for module in (other, mixed, own_kind, missing):
        before = dict(module.named_children())
        assert joined(module) == []
        assert dict(module.named_children()) == before


def test_weights_and_biases_are_put_side_by_side() -> None:
    layers = [nn.Linear(4, 3), nn.Linear(4, 2)]
    joint = side_by_side(layers)
    assert joint is not None
    assert torch.equal(joint.weight, torch.cat([x.weight for x in layers]))
    assert torch.equal(joint.bias, torch.cat([x.bias for x in layers]))
    assert (joint.in_features, joint.out_features) == (4, 5)
