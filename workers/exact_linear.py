"""Linear layers and activations whose rows have the same bits in every batch, on CPU.

How a product of matrices rounds depends on the kernel that the library picks, and it picks by the
number of rows and of threads. Which calls give the same bits is found out at run time on this very
machine: a probe whose sums cancel, so that its results are nothing but rounding error, shows any
other order of summation. On one thread the row counts fall into a few classes of equal bits; the
one with the most members defines a layer's bits, so that batches small and large are few calls.
On more threads the calls that give those bits are used. A batch is cut into such calls, and its
last few rows are padded to one, or computed by `workers.tile_products` where that has those bits.
A processor without instructions for bfloat16 has all rows of it computed there: the library's
products would take several times as long.

In half precision the weights are laid out once for the library's kernels, which a small batch
gains most from. In fp32 a sum over more than 512 numbers is made in pieces of 512, added in order,
after which nearly every call passes.

An activation is computed one way for whole vectors of numbers and another way for the few that
are left over; cutting the work among threads moves those. It is cut here so that none are left.

Norms and what else is between the products are replaced by `workers.fused` where it knows them.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from workers import tile_products
from workers.linear_groups import join
from workers.probes import cancelling

ROW_MULTIPLE = 16
"""Row counts of the library's calls are multiples of this."""
_LADDER = (16, 32, 48, 64, *range(128, 513, 64))
"""Row counts of calls that are tried."""
_SMALL_ROWS = 64
"""The defining class has a call for no more rows than this."""
_FP32_PIECE = 512
_MAX_OUT_FEATURES = 4096
"""A wider layer is several products side by side, so that probes stay small."""
_SERIAL_NUMBERS = 16384
"""Up to so many numbers torch computes any activation on one thread."""
_VECTOR_NUMBERS = 64
"""Numbers that a step of a vectorised loop takes, in the narrowest dtype."""

_Product = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, in_features] -> x W^T + b"""


@dataclass(frozen=True)
class Padding:
    """What row counts batches are padded to."""

    least: int = ROW_MULTIPLE
    """Rows of the smallest batch."""
    step: int = 64
    """Larger batches than 64 rows have a multiple of so many, so that few calls make them up."""

    def rows(self, num_rows: int) -> int:
        """Return the row count that so many rows are padded to, a multiple of 16 if `least` is."""
        multiple = min(ROW_MULTIPLE, self.least) if num_rows <= 64 else self.step
        return max(-(-num_rows // multiple) * multiple, self.least)

    def join(self, other: Padding) -> Padding:
        """Return what suits both."""
        return Padding(max(self.least, other.least), max(self.step, other.step))


def _in_pieces(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    if weight.shape[1] <= _FP32_PIECE:
        return functional.linear(x, weight, bias)
    total = functional.linear(x[:, :_FP32_PIECE], weight[:, :_FP32_PIECE], bias)
    for first in range(_FP32_PIECE, weight.shape[1], _FP32_PIECE):
        numbers = slice(first, first + _FP32_PIECE)
        total += functional.linear(x[:, numbers], weight[:, numbers])
    return total


def _plain(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight, bias)


def _packed(packed: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def _laid_out(weight: torch.Tensor) -> torch.Tensor | None:
    """Return weights in the layout of the library's kernels; None where it has none for them."""
    if weight.dtype == torch.float32:
        return None
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
            weight.contiguous(), _LADDER[-1]
        )
        _packed(packed, None, weight.new_zeros(ROW_MULTIPLE, weight.shape[1]))
    except (RuntimeError, AttributeError):
        # Not every processor and build of torch has these kernels for half precision.
        return None
    return packed


def _product(
    weight: torch.Tensor, packed: torch.Tensor | None, bias: torch.Tensor | None
) -> _Product:
    """Return the way to multiply with these weights, which it keeps in the layout that it needs."""
    if packed is not None:
        return functools.partial(_packed, packed, bias)
    if weight.dtype == torch.float32:
        return functools.partial(_in_pieces, weight, bias)
    return functools.partial(_plain, weight, bias)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Calls:
    """The row counts of calls that give the defined bits for one shape of layer, by threads."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, bias: bool) -> None:
        self._shape = (out_features, in_features)
        self._dtype = dtype
        self._has_bias = bias
        with _threads(1):
            results = self._try()
        classes: dict[bytes, list[int]] = defaultdict(list)
        for rows, result in results.items():
            classes[result].append(rows)
        usable = {bits: rows for bits, rows in classes.items() if rows[0] <= _SMALL_ROWS}
        self._defining = max(usable, key=lambda bits: (len(usable[bits]), -usable[bits][0]))
        self._good = {1: usable[self._defining]}
        self.signature = hashlib.sha256(self._defining).hexdigest()

    def good(self, threads: int) -> list[int]:
        """Return the row counts, in ascending order, that give the defined bits on the threads.

        `torch` must be set to use so many. On one thread there always is one; on more there may
        be none.
        """
        if threads not in self._good:
            found = self._try()
            self._good[threads] = [r for r, bits in found.items() if bits == self._defining]
        return self._good[threads]

    def _probe(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return x [16, inputs], weights and bias whose product is nothing but rounding error."""
        out_features, in_features = self._shape
        x = cancelling(ROW_MULTIPLE, in_features, 3, True).to(self._dtype)
        weight = cancelling(out_features, in_features, 4, False).to(self._dtype)
        return x, weight, torch.zeros(out_features, dtype=self._dtype) if self._has_bias else None

    def _try(self) -> dict[int, bytes]:
        """Return the bits of the probe's rows by the row count of the call.

        A call that does not give the same bits to each copy of the probe's rows is left out. The
        smallest one has only one copy.
        """
        x, weight, bias = self._probe()
        product = _product(weight, _laid_out(weight), bias)
        found: dict[int, bytes] = {}
        for rows in _LADDER:
            result = product(x.repeat(rows // ROW_MULTIPLE, 1))
            one = result[:ROW_MULTIPLE]
            if torch.equal(result, one.repeat(rows // ROW_MULTIPLE, 1)):
                found[rows] = one.contiguous().view(torch.uint8).numpy().tobytes()
        return found

    @functools.cached_property
    def chunk(self) -> int | None:
        """The chunk with which `tile_products` has the defined bits; None where it has not."""
        x, weight, bias = self._probe()
        packed = _laid_out(weight)
        if packed is None:
            return None
        return tile_products.find_chunk(x, weight, packed, bias, self._defining)


@functools.cache
def _calls(out_features: int, in_features: int, dtype: torch.dtype, bias: bool) -> _Calls:
    with torch.inference_mode():
        return _Calls(out_features, in_features, dtype, bias)


class _Part:
    """Some of a layer's output features."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.calls = _calls(*weight.shape, weight.dtype, bias is not None)
        packed = _laid_out(weight)
        self._product = _product(weight, packed, bias)
        self.few_rows: tile_products.Product | None = None
        """What computes few rows; None where the library does."""
        chunk = self.calls.chunk
        if packed is not None and chunk is not None:
            # How weights lie depends on their shape, for which it has been looked at.
            memory = tile_products.memory_of(packed)
            if memory is not None:
                self.few_rows = tile_products.Product(
                    packed, memory, bias, weight.shape, chunk, tile_products.few_rows()
                )

    @property
    def signature(self) -> str:
        """Equal where the bits of all results are."""
        return self.calls.signature

    @property
    def padding(self) -> Padding:
        """What suits the calls that make up a batch."""
        return Padding(self._with_few(self.calls.good(1))[0])

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b for x [rows, in_features]."""
        if self.few_rows is not None and x.shape[0] in self.few_rows.row_counts:
            return self.few_rows(x)
        good = self.calls.good(torch.get_num_threads())
        if good:
            return self._multiply(x, good)
        with _threads(1):
            return self._multiply(x, self.calls.good(1))

    def _multiply(self, x: torch.Tensor, good: list[int]) -> torch.Tensor:
        if x.shape[0] in good:
            return self._product(x)
        parts = []
        for first, rows in _cut(x.shape[0], self._with_few(good)):
            part = x[first : first + rows]
            missing = rows - part.shape[0]
            if missing:
                part = functional.pad(part, (0, 0, 0, missing))
            few = self.few_rows
            product = few if few is not None and rows in few.row_counts else self._product
            parts.append(product(part)[: rows - missing])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _with_few(self, good: list[int]) -> list[int]:
        """Return the row counts of calls, in ascending order."""
        if self.few_rows is None:
            return good
        few = self.few_rows.row_counts
        return [*few, *(rows for rows in good if rows > few[-1])]


class _WidenedPart:
    """Some of a layer's output features, whatever the rows; see `tile_products.widened`."""

    signature = "widened"
    padding = Padding(1, 1)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.few_rows = tile_products.widened(weight, bias)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b for x [rows, in_features]."""
        return self.few_rows(x)


def _part(weight: torch.Tensor, bias: torch.Tensor | None) -> _Part | _WidenedPart:
    if weight.dtype == torch.bfloat16 and tile_products.widens():
        return _WidenedPart(weight, bias)
    return _Part(weight, bias)


class ExactLinear(nn.Module):
    """Stands in for an `nn.Linear`, in inference; see the module's text."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        bias = None if linear.bias is None else linear.bias.detach()
        width = _MAX_OUT_FEATURES
        self._parts = [
            _part(
                weight[first : first + width], None if bias is None else bias[first : first + width]
            )
            for first in range(0, weight.shape[0], width)
        ]

    @property
    def signature(self) -> str:
        """What this layer's arithmetic gives on this machine, in short."""
        return " ".join(part.signature for part in self._parts)

    @property
    def padding(self) -> Padding:
        """What batches are best padded to: a smaller one takes as long."""
        return functools.reduce(Padding.join, (part.padding for part in self._parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b.

        Args:
            x: [..., in_features].
        """
        parts = self.parts(x.reshape(-1, x.shape[-1]))
        result = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return result.view(*x.shape[:-1], -1)

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return what `forward` does for x [rows, in_features], cut into columns."""
        return [part.multiply(x) for part in self._parts]

    @property
    def few_rows(self) -> tile_products.Product | None:
        """What computes few rows; None where that is not one product by a kernel of ours."""
        return self._parts[0].few_rows if len(self._parts) == 1 else None


def _cut(num_rows: int, good: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first row, rows) of calls that make up `num_rows`, large ones first.

    Where the rest is less than the smallest call, that one is yielded for it.
    """
    first = 0
    for rows in reversed(good):
        while num_rows - first >= rows:
            yield first, rows
            first += rows
    if first < num_rows:
        yield first, good[0]


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


@dataclass(frozen=True)
class Arithmetic:
    """How a model's layers compute on this machine."""

    signature: str
    """Equal where the bits of all results are."""
    padding: Padding
    """What batches are best padded to."""


@torch.inference_mode()
def make_exact(model: nn.Module) -> Arithmetic:
    """Replace the linear layers, norms, gated layers and activations of `model` in place."""
    # Not imported with this module: it brings numba, which has no part in what runs on CUDA.
    from workers import fused

    signatures = {fused.signature(p.dtype) for p in model.parameters()}
    padding = Padding(1, 1)

    def exact(linear: nn.Linear) -> ExactLinear:
        nonlocal padding
        found = ExactLinear(linear)
        signatures.add(found.signature)
        padding = padding.join(found.padding)
        return found

    # Gated layers first: they take the layers that they are made of as they are by then.
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            gated = fused.gated_mlp(child)
            if gated is not None:
                setattr(module, name, gated)
    for module in list(model.modules()):
        join(module, exact)
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, exact(child))
            elif _is_activation(child):
                setattr(module, name, AlignedActivation(child))
            elif (norm := fused.fused_norm(child)) is not None:
                setattr(module, name, norm)
    fused.fuse_rotary(model)
    digest = hashlib.sha256("".join(sorted(signatures)).encode()).hexdigest()
    return Arithmetic(digest, padding)


def _is_activation(module: nn.Module) -> bool:
    home = type(module).__module__
    return home in ("transformers.activations", "torch.nn.modules.activation") and not list(
        module.parameters()
    )
