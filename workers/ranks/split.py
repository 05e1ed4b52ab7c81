"""Cuts a model's layers into the shares of several ranks, by the plan that transformers has of it.

The plan (`base_model_tp_plan` of the model's config) says of each linear layer whether its outputs
or its inputs are shared out. Of layers cut by outputs (q, k, v, gate, up) each rank computes whole
outputs: no number of them differs from the uncut layer's but by how its kernel rounds. Of layers
cut by inputs (o, down) each rank computes a part of every output, rounded to the model's dtype; the
parts are added up in fp32 and rounded once more. These two sums a layer are all that a model over
several ranks computes in another way. Everything else is whole at each rank, but for the output
layer, which only rank 0 has.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import nn

from scheduler.errors import InvalidConfig
from workers.ranks.group import Ranks

_BY_OUTPUTS = "colwise"
_BY_INPUTS = "rowwise"


class SummedLinear(nn.Module):
    """Stands in for an `nn.Linear` whose inputs are shared out: its outputs are sums of parts."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self.part = _cut(linear.weight, None, 1, ranks)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b for this rank's share of the inputs, x [..., inputs / ranks]."""
        total = self._ranks.sum(self.part(x))
        if self.bias is not None:
            total += self.bias
        return total.to(x.dtype)


def split_model(model: Any, config: Any, ranks: Ranks) -> None:
    """Leave a transformers model, in place, with the share of one rank.

    Raises:
        InvalidConfig: it can't be cut into so many shares, or not at all.
    """
    base = model.model
    linears = {n: m for n, m in base.named_modules() if isinstance(m, nn.Linear)}
    styles = _styles(config, linears, ranks.size)
    _check_size(config, linears, styles, ranks.size)
    for name in list(linears):
        linear = linears.pop(name)  # the whole layer is freed when its share is there
        home, _, own_name = name.rpartition(".")
        share: nn.Module
        if styles[name] == _BY_OUTPUTS:
            share = _cut(linear.weight, linear.bias, 0, ranks)
        else:
            share = SummedLinear(linear, ranks)
        setattr(base.get_submodule(home), own_name, share)


def drop_output_layer(model: Any) -> None:
    """Free the layer that rank 0 alone needs, where it is not the embedding as well."""
    model.lm_head = nn.Identity()


def _styles(config: Any, linears: dict[str, nn.Linear], size: int) -> dict[str, str]:
    """Return how each linear layer is cut.

    Raises:
        InvalidConfig: the plan does not say it, or has it done in a way that is none of the two.
    """
    plan = getattr(config, "base_model_tp_plan", None) or {}
    styles = {name: plan.get(re.sub(r"\d+", "*", name), "no part") for name in linears}
    for name, style in styles.items():
        if style not in (_BY_OUTPUTS, _BY_INPUTS):
            raise _refusal(
                config,
                size,
                [1],
                f"transformers' plan has {style} of {name}, where outputs or inputs of every "
                f"linear layer have to be shared out ({_BY_OUTPUTS}, {_BY_INPUTS})",
            )
    return styles


def _check_size(
    config: Any, linears: dict[str, nn.Linear], styles: dict[str, str], size: int
) -> None:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    shared = math.gcd(
        heads,
        *(
            linear.out_features if styles[name] == _BY_OUTPUTS else linear.in_features
            for name, linear in linears.items()
        ),
    )
    if shared % size:
        allowed = [n for n in range(1, shared + 1) if shared % n == 0]
        raise _refusal(config, size, allowed, f"each of its {heads} KV heads is one rank's")


def _refusal(config: Any, size: int, allowed: list[int], why: str) -> InvalidConfig:
    names = getattr(config, "architectures", None) or [config.model_type]
    sizes = " or ".join(str(n) for n in allowed)
    return InvalidConfig(
        f"tensor_parallel_size={size} is not allowed for this {names[0]}: {why}; give {sizes}",
        field="tensor_parallel_size",
        value=repr(size),
        allowed=sizes,
    )


def _cut(weight: torch.Tensor, bias: torch.Tensor | None, dim: int, ranks: Ranks) -> nn.Linear:
    """Return one rank's share of a layer [outputs, inputs] that is cut along `dim`."""
    share = weight.detach().chunk(ranks.size, dim)[ranks.rank].clone()
    linear = nn.Linear(share.shape[1], share.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(share, requires_grad=False)
    if bias is not None:
        own = bias.detach().chunk(ranks.size)[ranks.rank].clone()
        linear.bias = nn.Parameter(own, requires_grad=False)
    return linear
