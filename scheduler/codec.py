"""msgpack for every struct of the engine; arrays travel as raw little-endian bytes.

An array is written as (dtype, shape, bytes) and read back as a read-only array over its own bytes:
copied once, never element by element, and no array keeps the rest of its message in memory. One
whose dtype is not its field's is refused.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]

T = TypeVar("T")

_INT32 = np.dtype(np.int32)
_NO_IDS: IntArray = np.frombuffer(b"", _INT32)


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
    """Return ids that are known to fit as int32; of a few much faster than `int_array`."""
    return np.array(ids, _INT32) if ids else _NO_IDS


def int_array(values: Any) -> IntArray:
    """Return `values` as a contiguous int32 array, themselves where they are one.

    Raises:
        OverflowError: a value does not fit; it is never wrapped around into another one.
    """
    array = np.asarray(values)
    if array.dtype == np.int32 and array.flags.c_contiguous:
        return array
    if array.dtype != np.int32 and array.size:
        bounds = np.iinfo(np.int32)
        if array.dtype.kind not in "iu" or array.min() < bounds.min or array.max() > bounds.max:
            raise OverflowError(f"can't hold values of {array.dtype} as int32 without loss")
    return np.ascontiguousarray(array, dtype=np.int32)
