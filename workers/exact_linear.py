"""Linear layers and activations whose rows have the same bits in every batch, on CPU.

How a product of matrices rounds depends on the kernel that the library picks, and it picks by the
number of rows and of threads. Here the bits of a row are defined by one call, that of 16 rows on
one thread. Which other calls give the same bits is found out at run time on this very machine: a
probe whose sums cancel, so that its results are nothing but rounding error, shows any other order
of summation. A batch is then cut into calls that passed.

In fp32 a sum over more than 512 numbers is made in pieces of 512, added in order, after which
nearly every call passes. In half precision that would round the pieces, so there the whole sum is
one call, in the library's layout or with both operands transposed.

An activation is computed one way for whole vectors of numbers and another way for the few that
are left over; cutting the work among threads moves those. It is cut here so that none are left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

ROW_MULTIPLE = 16
"""Row counts of a batch must be multiples of this."""
_LADDER = (512, 384, 256, 192, 128, 64, 32, 16)
"""Row counts of calls that are tried."""
_FP32_PIECE = 512
_PROBE_NUMBERS = 2**25
"""Calls with larger results are not tried."""
_SERIAL_NUMBERS = 16384
"""Up to so many numbers torch computes any activation on one thread."""
_VECTOR_NUMBERS = 64
"""Numbers that a step of a vectorised loop takes, in the narrowest dtype."""

_Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def padded_rows(num_rows: int) -> int:
    """Return the row count that a batch of so many rows is padded to.

    A multiple of 16; above 64 a multiple of 64, so that few calls make up the batch.
    """
    multiple = ROW_MULTIPLE if num_rows <= 64 else 64
    return -(-num_rows // multiple) * multiple


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x, weight, bias)


def _in_pieces(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.shape[1] <= _FP32_PIECE:
        return functional.linear(x, weight, bias)
    total = functional.linear(x[:, :_FP32_PIECE], weight[:, :_FP32_PIECE], bias)
    for first in range(_FP32_PIECE, weight.shape[1], _FP32_PIECE):
        numbers = slice(first, first + _FP32_PIECE)
        total += functional.linear(x[:, numbers], weight[:, numbers])
    return total


def _transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(weight, x.t()).t().contiguous()


def _products(dtype: torch.dtype, has_bias: bool) -> tuple[_Product, ...]:
    """Return the ways to multiply that are tried; the first defines the bits."""
    if dtype == torch.float32:
        return (_in_pieces,)
    return (_plain,) if has_bias else (_plain, _transposed)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cancelling(rows: int, columns: int, seed: int, signs: bool) -> torch.Tensor:
    """Return fp32 [rows, columns] such that the product of two of them (one with signs) cancels.

    Column j of the second half repeats a column of the first, negated where `signs`, and all are
    shuffled alike; so every sum of products is zero but for rounding.
    """
    half = columns // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(1))
    shuffle = torch.randperm(columns, generator=torch.Generator().manual_seed(2))
    first = torch.randn(rows, half, generator=torch.Generator().manual_seed(seed))
    second = first[:, order]
    odd = first.new_zeros(rows, columns - 2 * half)
    return torch.cat([first, -second if signs else second, odd], dim=1)[:, shuffle].contiguous()


class _Calls:
    """The calls that give the defined bits for one shape of layer, by number of threads."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, bias: bool) -> None:
        self._shape = (out_features, in_features)
        self._dtype = dtype
        self._has_bias = bias
        self._good: dict[int, dict[int, _Product]] = {}
        x, weight, offset = self._probe()
        with _threads(1):
            reference = _products(dtype, bias)[0](x, weight, offset)
        self.signature = hashlib.sha256(reference.view(torch.uint8).numpy().tobytes()).hexdigest()

    def good(self) -> dict[int, _Product]:
        """Return the way to multiply by row count, largest first, for the threads now set.

        Empty where not even 16 rows give the defined bits; one thread then does.
        """
        threads = torch.get_num_threads()
        if threads not in self._good:
            self._good[threads] = self._try()
        return self._good[threads]

    def defining(self) -> _Product:
        """Return the product whose result for 16 rows on one thread defines the bits."""
        return _products(self._dtype, self._has_bias)[0]

    def _probe(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        out_features, in_features = self._shape
        x = _cancelling(ROW_MULTIPLE, in_features, 3, True).to(self._dtype)
        weight = _cancelling(out_features, in_features, 4, False).to(self._dtype)
        return x, weight, torch.zeros(out_features, dtype=self._dtype) if self._has_bias else None

    def _try(self) -> dict[int, _Product]:
        x, weight, bias = self._probe()
        ways = _products(self._dtype, self._has_bias)
        with _threads(1):
            reference = ways[0](x, weight, bias)
        found: dict[int, _Product] = {}
        for rows in _LADDER:
            if rows > ROW_MULTIPLE and rows * self._shape[0] > _PROBE_NUMBERS:
                continue
            copies = rows // ROW_MULTIPLE
            # Few rows are memory bound, and there the transposed product is the faster one.
            for way in ways if rows > 256 else reversed(ways):
                if torch.equal(way(x.repeat(copies, 1), weight, bias), reference.repeat(copies, 1)):
                    found[rows] = way
                    break
        return found if ROW_MULTIPLE in found else {}


_CALLS: dict[tuple[int, int, torch.dtype, bool], _Calls] = {}


class ExactLinear(nn.Module):
    """Stands in for an `nn.Linear`, whose weights it shares; see the module's text."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        key = (*linear.weight.shape, linear.weight.dtype, linear.bias is not None)
        if key not in _CALLS:
            _CALLS[key] = _Calls(*key)
        self._calls = _CALLS[key]

    @property
    def signature(self) -> str:
        """What this layer's arithmetic gives on this machine, in short."""
        return self._calls.signature

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b.

        Args:
            x: [..., in_features], whose leading sizes multiply to a multiple of 16.
        """
        flat = x.reshape(-1, x.shape[-1])
        good = self._calls.good()
        if good:
            parts = [
                way(flat[first : first + rows], self.weight, self.bias)
                for first, rows, way in _cut(flat.shape[0], good)
            ]
        else:
            with _threads(1):
                parts = [
                    self._calls.defining()(rows, self.weight, self.bias)
                    for rows in torch.split(flat, ROW_MULTIPLE)
                ]
        result = parts[0] if len(parts) == 1 else torch.cat(parts)
        return result.view(*x.shape[:-1], -1)


def _cut(num_rows: int, good: dict[int, _Product]) -> Iterator[tuple[int, int, _Product]]:
    """Yield (first row, rows, way) of calls that make up `num_rows`, the largest ones first."""
    first = 0
    for rows, way in good.items():
        while num_rows - first >= rows:
            yield first, rows, way
            first += rows


class AlignedActivation(nn.Module):
    """Stands in for an elementwise activation; see the module's text."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of x, any shape."""
        numbers = x.numel()
        # With two threads the cut is in the middle, which is a whole number of steps then.
        few = torch.get_num_threads() <= 2 and numbers % (2 * _VECTOR_NUMBERS) == 0
        serial = numbers <= _SERIAL_NUMBERS and numbers % _VECTOR_NUMBERS == 0
        if few or serial:
            result: torch.Tensor = self.activation(x.contiguous())
            return result
        flat = functional.pad(x.reshape(-1), (0, -numbers % _VECTOR_NUMBERS))
        parts = [self.activation(part) for part in torch.split(flat, _SERIAL_NUMBERS)]
        return torch.cat(parts)[:numbers].view(x.shape)


def make_exact(model: nn.Module) -> str:
    """Replace the linear layers and activations of `model` in place.

    Returns:
        A digest of this machine's arithmetic for the model's layers: equal digests, equal bits.
    """
    signatures: set[str] = set()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                exact = ExactLinear(child)
                signatures.add(exact.signature)
                setattr(module, name, exact)
            elif _is_activation(child):
                setattr(module, name, AlignedActivation(child))
    return hashlib.sha256("".join(sorted(signatures)).encode()).hexdigest()


def _is_activation(module: nn.Module) -> bool:
    home = type(module).__module__
    return home in ("transformers.activations", "torch.nn.modules.activation") and not list(
        module.parameters()
    )
