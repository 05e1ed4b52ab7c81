"""A model's parts between its products, on CPU, as one pass over memory each.

The kernels are in `workers.kernels`; here is what calls them with tensors and what puts them in
the place of a model's own modules. A module is replaced where it has the parts that a formula
needs and gives what the formula gives on random numbers, whatever its name is: in half precision
the same bits but for few roundings, in single precision the same numbers but for the last places.
All others stay as they are, as does everything in fp16, which the kernels don't know.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from workers import compiled, kernels
from workers.kernel_calls import as_array, num_threads
from workers.linear_groups import side_by_side
from workers.logprobs import Logits, normalise, select_rows, top_1

_DTYPES = (torch.bfloat16, torch.float32)
_GATED_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ROTARY = "apply_rotary_pos_emb"
_PROBE_ROWS = 64


class FusedNorm(nn.Module):
    """Stands in for an RMS norm, in inference: x / sqrt(mean(x^2) + eps) * scale."""

    def __init__(self, scale: torch.Tensor, eps: float, rounds_first: bool) -> None:
        """Take the scale, [width], and whether the quotient is rounded before it is scaled."""
        super().__init__()
        self._scale = scale.float().contiguous().numpy()
        self._eps = np.float32(eps)
        self._rounds_first = rounds_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm over the last dimension of x, any shape."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        kernels.rms_norm(num_threads(rows.numel()), as_array(rows), *self.arguments, as_array(out))
        return out.view(x.shape)

    @property
    def arguments(self) -> tuple[npt.NDArray[np.float32], np.float32, bool]:
        """What `kernels.rms_norm` takes of a norm: scale, eps and rounds_first."""
        return self._scale, self._eps, self._rounds_first


def fused_norm(module: nn.Module) -> FusedNorm | None:
    """Return what can stand in for a module, or None."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float):
        return None
    own = [*module.parameters(), *module.buffers(), *module.children()]
    if len(own) != 1 or weight.dim() != 1 or weight.dtype not in _DTYPES:
        return None
    scale = weight.detach().float()
    # Numbers with a mean, some of them as small as eps.
    x = (_random(_PROBE_ROWS, len(weight), 1) + 0.5) * torch.logspace(-4, 2, _PROBE_ROWS)[:, None]
    x = x.to(weight.dtype)
    expected = module(x)
    for factor in (scale, 1.0 + scale):
        for rounds_first in (True, False):
            norm = FusedNorm(factor, eps, rounds_first)
            if _agree(norm(x), expected):
                return norm
    return None


class GatedMLP(nn.Module):
    """Stands in for down(silu(gate(x)) * up(x)), in inference."""

    def __init__(self, gate_up_proj: nn.Module, down_proj: nn.Module) -> None:
        """Take a layer that gives gate and up side by side, and the one after both."""
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result for x [..., width]."""
        result: torch.Tensor = self.down_proj(_gated(self.gate_up_proj(x)))
        return result


def _gated(both: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [..., width] of both, side by side, [..., 2 * width]."""
    rows = both.reshape(-1, both.shape[-1]).contiguous()
    out = rows.new_empty(len(rows), rows.shape[1] // 2)
    kernels.gate_silu(num_threads(rows.numel()), as_array(rows), as_array(out))
    return out.view(*both.shape[:-1], -1)


def gated_mlp(module: nn.Module) -> GatedMLP | None:
    """Return what can stand in for a module, or None."""
    parts: dict[str, Any] = dict(module.named_children())
    if set(parts) != _GATED_PARTS or [*module.parameters(recurse=False)]:
        return None
    gate, up = parts["gate_proj"], parts["up_proj"]
    gate_up = side_by_side([gate, up])
    if gate_up is None or gate.weight.shape != up.weight.shape or gate.weight.dtype not in _DTYPES:
        return None
    x = _random(_PROBE_ROWS, gate.in_features, 2).to(gate.weight.dtype)
    product = parts["act_fn"](gate(x)) * up(x)
    wide = (3 * _random(_PROBE_ROWS, 64, 3)).to(x.dtype)
    if not torch.equal(module(x), parts["down_proj"](product)) or not _agree(
        _gated(torch.cat([wide, wide], dim=1)), parts["act_fn"](wide) * wide
    ):
        return None
    return GatedMLP(gate_up, parts["down_proj"])


def fuse_rotary(model: nn.Module) -> None:
    """Have the modules that a model is made of turn q and k in one pass.

    They call a function that they find in their Python module. The one that is put in its place
    gives the same bits, and hands what it was not made for to the one that was there.
    """
    for home in {type(module).__module__ for module in model.modules()}:
        found = sys.modules.get(home)
        if isinstance(found, ModuleType) and _turns_halves(getattr(found, _ROTARY, None)):
            setattr(found, _ROTARY, _fused_rotary(getattr(found, _ROTARY)))


def _turns_halves(function: Any) -> bool:
    """Return whether a function does what `kernels.rotate` does, and not yet by it."""
    if function is None or hasattr(function, "__wrapped__"):
        return False
    x = _random(24, 16, 4).view(1, 6, 4, 16).transpose(1, 2)
    cos, sin = _random(6, 16, 5)[None], _random(6, 16, 6)[None]
    try:
        turned = function(x, x[:, :2], cos, sin)
    except Exception:
        # A function of that name that takes other arguments turns otherwise.
        return False
    return all(
        torch.equal(a, _rotated(b, cos, sin)) for a, b in zip(turned, (x, x[:, :2]), strict=True)
    )


def _fused_rotary(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def turn(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *others: Any,
        **named: Any,
    ) -> Any:
        same = all(x.dtype == q.dtype and x.device.type == "cpu" for x in (q, k, cos, sin))
        plain = cos.shape == sin.shape == (1, q.shape[2], q.shape[3]) and not (others or named)
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
        if not (same and plain and q.shape[0] == 1 and q.dtype in _DTYPES) or needs_grad:
            return original(q, k, cos, sin, *others, **named)
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    return turn


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [1, heads, tokens, width] turned by cos and sin [1, tokens, width]."""
    rows = x[0].transpose(0, 1)
    if rows[0].stride() != rows[0].contiguous().stride():
        rows = rows.contiguous()
    out = rows.new_empty(rows.shape)
    cosines, sines, out_rows = (
        as_array(y) for y in (cos[0].contiguous(), sin[0].contiguous(), out)
    )
    stride_bytes = rows.stride(0) * rows.element_size()
    like = out_rows.dtype.type(0)
    threads = num_threads(rows.numel())
    kernels.rotate(threads, rows.data_ptr(), stride_bytes, like, cosines, sines, out_rows)
    return out.transpose(0, 1).unsqueeze(0)


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether numbers are the same but for roundings."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    error = (found.float() - expected.float()).abs()
    places = 4 if found.dtype == torch.float32 else 1
    if not bool((error <= places * torch.finfo(found.dtype).eps * expected.float().abs()).all()):
        return False
    return found.dtype == torch.float32 or int((error > 0).sum()) <= 1 + error.numel() // 1000


def _random(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@functools.cache
def signature(dtype: torch.dtype) -> str:
    """Return a digest of what the kernels give on this machine, where they are compiled for it.

    Many numbers are taken, since in half precision few show in which order a sum was made. Every
    kernel is called, so that all of them are compiled while nobody else does it.
    """
    dtype = dtype if dtype in _DTYPES else torch.float32
    digest = hashlib.sha256()

    def take(*results: npt.NDArray[Any]) -> None:
        for result in results:
            digest.update(result.tobytes())

    with compiled.alone(), torch.inference_mode():
        for width in (64, 100, 576, 2048):
            x = _random(1024, width, width).to(dtype)
            for rounds_first in (True, False):
                take(as_array(FusedNorm(_random(1, width, 1)[0], 1e-5, rounds_first)(x)))
        x = (9 * _random(64, 4096, 7)).to(dtype)
        take(as_array(_gated(x)))
        angles = x[:, :128].view(1, 64, 128)
        take(as_array(_rotated(x.view(1, 64, 64, 64), angles[..., :64], angles[..., 64:])))
        logits = Logits([x[:, :2500], x[:, 2500:]], x.shape[1])
        rows = normalise(logits)
        take(*(piece.numpy() for piece in rows.pieces()))
        targets = top_1(logits)[1][:, 0]
        take(*(select_rows(rows, targets, k).logprobs.numpy() for k in (1, 2)))
    return digest.hexdigest()
