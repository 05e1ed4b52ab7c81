"""Linear layers of the same input, computed as one: fewer and larger products.

Layers of one module by the names that they have in transformers. A module calls them one after the
other with the same tensor, so the first call computes the product and the others take their part
of it. What a module does with the parts is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

_NAMES = ("q_proj", "k_proj", "v_proj")


def side_by_side(layers: Sequence[nn.Module]) -> nn.Linear | None:
    """Return one layer whose outputs are those of some layers in order; None where none can be."""
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if (
        len(linears) < len(layers)
        or len(biases) not in (0, len(linears))
        or len({(linear.in_features, linear.weight.dtype) for linear in linears}) != 1
    ):
        return None
    weight = torch.cat([linear.weight.detach() for linear in linears])
    joint = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    joint.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joint.bias = nn.Parameter(torch.cat([x.detach() for x in biases]), requires_grad=False)
    return joint


class _Joint(nn.Module):
    """One product for several layers, of which each takes its part once."""

    def __init__(self, layer: nn.Module, num_parts: int) -> None:
        super().__init__()
        self.layer = layer
        self._num_parts = num_parts
        self._x: torch.Tensor | None = None
        self._product: torch.Tensor | None = None
        self._taken: set[int] = set()

    def take(self, part: int, x: torch.Tensor) -> torch.Tensor:
        """Return the product for x, and keep it while a part of it is still to be taken."""
        if self._product is None or self._x is not x or part in self._taken:
            self._x, self._product = x, self.layer(x)
            self._taken.clear()
        product = self._product
        assert product is not None
        self._taken.add(part)
        if len(self._taken) == self._num_parts:
            self._x = self._product = None
        return product


class JointPart(nn.Module):
    """Stands in for one of the layers."""

    def __init__(self, joint: _Joint, part: int, columns: slice) -> None:
        super().__init__()
        self._joint = joint
        self._part = part
        self._columns = columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this layer's outputs for x [..., in_features], a view."""
        return self._joint.take(self._part, x)[..., self._columns]

    @property
    def whole(self) -> nn.Module:
        """The layer that this is a part of."""
        return self._joint.layer


def join(module: nn.Module, replace: Callable[[nn.Linear], nn.Module]) -> None:
    """Compute layers of a module's own as one where their names say that they have one input.

    Args:
        module: changed in place.
        replace: makes what computes the joint layer.
    """
    children = dict(module.named_children())
    linears = [x for name in _NAMES if isinstance(x := children.get(name), nn.Linear)]
    joint_layer = side_by_side(linears) if len(linears) == len(_NAMES) else None
    if joint_layer is None:
        return
    joint = _Joint(replace(joint_layer), len(linears))
    first = 0
    for part, (name, linear) in enumerate(zip(_NAMES, linears, strict=True)):
        columns = slice(first, first + linear.out_features)
        setattr(module, name, JointPart(joint, part, columns))
        first = columns.stop
