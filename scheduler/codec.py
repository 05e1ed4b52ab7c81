"""msgpack for every struct of the engine; arrays travel as raw little-endian bytes.

An array is written as (dtype, shape, bytes) and read back as a read-only array over its own bytes:
copied once, never element by element, and no array keeps the rest of its message in memory. One
whose dtype is not its field's is refused.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]

T = TypeVar("T")


def _array_to_wire(obj: Any) -> Any:
    if isinstance(obj, np.ndarray):
        little = obj.astype(obj.dtype.newbyteorder("<"), copy=False)
        return (
            little.dtype.str,
            little.shape,
            np.ascontiguousarray(little).reshape(-1).view(np.uint8).data,
        )
    raise NotImplementedError(f"can't encode {type(obj).__name__}")


def _array_from_wire(expected: Any, obj: Any) -> Any:
    dtype, shape, data = obj
    declared = np.dtype(get_args(get_args(expected)[1])[0])
    if np.dtype(dtype) != declared:
        raise ValueError(f"expected an array of {declared}, got one of {dtype}")
    return np.frombuffer(data, dtype=declared).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_to_wire)
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(obj: Any) -> bytes:
    """Return `obj` (a struct, or a list or dict of structs) as msgpack."""
    return _ENCODER.encode(obj)


def decode(data: bytes, as_type: type[T]) -> T:
    """Return the `as_type` that `data` holds.

    Raises:
        msgspec.DecodeError: the bytes are no msgpack, or (ValidationError) describe no `as_type`,
            for instance since an array has another dtype than its field.
    """
    decoder = _DECODERS.get(as_type)
    if decoder is None:
        decoder = msgspec.msgpack.Decoder(as_type, dec_hook=_array_from_wire)
        _DECODERS[as_type] = decoder
    result: T = decoder.decode(data)
    return result


def id_array(ids: list[int]) -> IntArray:
    """Return ids that the engine itself made as int32; for a few much faster than `int_array`.

    Raises:
        OverflowError: one does not fit.
    """
    if not ids:
        return _NO_IDS
    return np.frombuffer(array("i", ids), dtype=np.intc).view(np.int32)


_NO_IDS: IntArray = np.empty(0, dtype=np.int32)


def int_array(values: Any) -> IntArray:
    """Return `values` as a contiguous int32 array, themselves where they are one.

    Raises:
        OverflowError: a value does not fit; it is never wrapped around into another one.
    """
    found = np.asarray(values)
    if found.dtype == np.int32 and found.flags.c_contiguous:
        return found
    if found.dtype != np.int32 and found.size:
        bounds = np.iinfo(np.int32)
        if found.dtype.kind not in "iu" or found.min() < bounds.min or found.max() > bounds.max:
            raise OverflowError(f"can't hold values of {found.dtype} as int32 without loss")
    return np.ascontiguousarray(found, dtype=np.int32)
