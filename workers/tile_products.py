"""Products with bf16 weights by `workers.tile_kernels`.

On a processor with instructions for bfloat16 they are for few rows, with weights that oneDNN has
laid out, where they have oneDNN's own bits. Whether they do is found out on the machine: which
processor and library there are decides how weights lie and in what chunks a row is summed. Where
anything is not as the kernel takes it, there is no such product, and the caller goes on with
oneDNN.

On a processor without such instructions they are for any number of rows, with weights that are
laid out here, and their bits are the same on each such processor.
"""

from __future__ import annotations

import ctypes
import functools
import sys

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from workers.kernel_calls import NUMBERS_AT_ONCE, as_array, num_threads

_DEPTH = 32
_Numbers = npt.NDArray[np.uint16]


@functools.cache
def is_available() -> bool:
    """Return whether there is code for this processor, and this process may use it."""
    from workers import kernel_tiles

    if not kernel_tiles.HAS_AMX:
        return kernel_tiles.HAS_PAIRS or kernel_tiles.HAS_FMA
    try:
        return bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())
    except AttributeError:
        # Not every build of torch can ask the system for it.
        return False


def widens() -> bool:
    """Return whether products of any number of rows are made here; see `widened`."""
    from workers import kernel_vectors

    return kernel_vectors.WIDENS and is_available()


def few_rows() -> range:
    """Return the row counts of calls that take less time than the library's."""
    from workers import tile_kernels

    multiple = tile_kernels.ROW_MULTIPLE
    return range(multiple, tile_kernels.MAX_ROWS + 1, multiple)


class Product:
    """x W^T + b."""

    def __init__(
        self,
        packed: torch.Tensor,
        weights: _Numbers,
        bias: torch.Tensor | None,
        shape: tuple[int, ...],
        chunk: int,
        row_counts: range,
    ) -> None:
        """Take weights, their memory and shape, and how many inputs are summed by themselves."""
        self.row_counts = row_counts
        """Calls that there may be."""
        self._packed = packed
        """Keeps the memory of the weights."""
        self._weights = weights
        self._chunk = chunk
        self._out_features, self.in_features = shape
        no_bias = np.zeros(self._out_features, np.float32)
        self._bias = no_bias if bias is None else bias.detach().float().contiguous().numpy()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product for bf16 x [rows, in_features]."""
        from workers import tile_kernels

        out = x.new_empty(x.shape[0], self._out_features)
        tile_kernels.multiply(
            self.num_threads(), as_array(x.contiguous()), *self.arguments, as_array(out)
        )
        return out

    @property
    def arguments(self) -> tuple[_Numbers, npt.NDArray[np.float32], int]:
        """What `tile_kernels.multiply` takes of a layer: weights, bias and chunk."""
        return self._weights, self._bias, self._chunk

    def num_threads(self) -> int:
        """Return how many threads the product of a row is worth."""
        return num_threads(self._packed.numel() // NUMBERS_AT_ONCE)


def widened(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Return the product for any number of rows, which adds up each row's products in their order.

    In single precision, as oneDNN does there too, in another order and several times slower.

    Args:
        weight: bf16 [out_features, in_features].
        bias: bf16 [out_features].
    """
    from workers import compiled
    from workers.tile_kernels import COLUMNS

    out_features, in_features = weight.shape
    padded = functional.pad(weight, (0, -in_features % _DEPTH, 0, -out_features % COLUMNS))
    depth = padded.shape[1]
    packed = padded.view(-1, COLUMNS, depth // 2, 2).transpose(1, 2).contiguous()
    memory = as_array(packed).reshape(-1)
    found = Product(packed, memory, bias, weight.shape, depth, range(1, sys.maxsize))
    with compiled.alone(), torch.inference_mode():
        found(weight.new_zeros(1, in_features))
    return found


def memory_of(packed: torch.Tensor) -> _Numbers | None:
    """Return the memory of weights that oneDNN has laid out, uint16, flat; None if none is told."""
    try:
        address = int(torch.ops.mkldnn.data_ptr(packed))
        num_bytes = int(torch.ops.mkldnn._nbytes(packed))
    except (AttributeError, RuntimeError):
        return None
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint16))
    return np.ctypeslib.as_array(pointer, (num_bytes // 2,))


def is_for_tiles(weight: torch.Tensor, memory: _Numbers) -> bool:
    """Return whether weights lie as the kernel takes them, see `workers.tile_kernels`.

    Args:
        weight: bf16 [out_features, in_features], not all alike.
        memory: what oneDNN has made of it.
    """
    from workers.tile_kernels import COLUMNS

    out_features, in_features = weight.shape
    num_blocks = -(-out_features // COLUMNS)
    if memory.size != num_blocks * COLUMNS * in_features or in_features % _DEPTH:
        return False
    plain = np.zeros((num_blocks * COLUMNS, in_features), np.uint16)
    plain[:out_features] = as_array(weight.contiguous())
    blocks = plain.reshape(num_blocks, COLUMNS, in_features // 2, 2)
    return np.array_equal(memory, blocks.transpose(0, 2, 1, 3).reshape(-1))


def find_chunk(
    x: torch.Tensor,
    weight: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    expected: bytes,
) -> int | None:
    """Return the chunk with which a product has some expected bits; None where none has them.

    Args:
        x: bf16 [16, in_features], such that sums in another order are other numbers.
        weight: bf16 [out_features, in_features].
        packed: the same as oneDNN has it.
        bias: bf16 [out_features].
        expected: the result's memory.
    """
    if weight.dtype != torch.bfloat16 or not is_available():
        return None
    memory = memory_of(packed)
    if memory is None or not is_for_tiles(weight, memory):
        return None
    # Not imported with this module: it brings numba, which has no part in what runs on CUDA.
    from workers import compiled

    with compiled.alone():
        for chunk in range(_DEPTH, x.shape[1] + 1, _DEPTH):
            found = Product(packed, memory, bias, weight.shape, chunk, few_rows())(x)
            if found.view(torch.uint8).numpy().tobytes() == expected:
                return chunk
    return None
