"""Hypothesis strategies for every struct of the engine, and a comparison that overlooks nothing.

Strategies are derived from the declared types, so a message or field that is added is covered by
the round-trip tests without anybody thinking of it.
"""

from __future__ import annotations

import enum
import struct
import types
import typing
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scheduler.codec import FloatArray, IntArray
from scheduler.logprobs import Logprobs
from scheduler.sampling_params import SEED_LIMIT, SamplingParams

INT32 = st.integers(-(2**31), 2**31 - 1)
TOKEN_IDS = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ROW_LOGPROBS = 2
"""k of the rows that `rows_for` makes."""
SHAPES = hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=4)

_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: INT32,
    float: st.floats(),
    str: TEXT,
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    types.NoneType: st.none(),
    IntArray: hnp.arrays(np.int32, SHAPES),
    FloatArray: hnp.arrays(np.float32, SHAPES),
}


def logprobs(num_rows: int, num_logprobs: int, first: int = 0) -> Logprobs:
    """Rows whose every number tells where it belongs, from row `first` on."""
    shape = (num_rows, num_logprobs + 1)
    numbers = np.arange(num_rows * shape[1], dtype=np.int32).reshape(shape) + first * shape[1]
    return Logprobs(numbers, -numbers.astype(np.float32) / 7, numbers + 1)


def rows_for(token_ids: np.ndarray[Any, Any]) -> Logprobs:
    """Rows whose column 0 is the token and whose logprobs tell it as well."""
    ids = np.repeat(token_ids.reshape(-1, 1), ROW_LOGPROBS + 1, axis=1).astype(np.int32)
    return Logprobs(ids, -ids.astype(np.float32), ids + 1)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Any valid parameters, far from their defaults."""
    max_tokens = draw(st.none() | st.integers(0, 100))
    detokenize = draw(st.booleans())
    k = st.none() | st.integers(-1, 5)
    rows: dict[str, Any] = {"prompt_logprobs": draw(k)}
    if draw(st.booleans()):
        ids = st.lists(TOKEN_IDS, min_size=1, max_size=3, unique=True).map(tuple)
        rows = {"prompt_logprob_token_ids": draw(ids)}
    if rows.get("prompt_logprobs", 0) is not None:
        rows["prompt_logprobs_start"] = draw(st.integers(0, 5))
    biases = st.dictionaries(TOKEN_IDS, st.floats(-200, 200), max_size=3)
    return SamplingParams(
        n=draw(st.integers(1, 4)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, 5 if max_tokens is None else max_tokens)),
        temperature=draw(st.floats(0, 100)),
        top_k=draw(st.integers(-1, 50)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.floats(0, 1e6, exclude_min=True)),
        logit_bias=draw(st.none() | biases),
        allowed_token_ids=draw(st.none() | st.lists(TOKEN_IDS, min_size=1, max_size=3).map(tuple)),
        seed=draw(st.none() | st.integers(0, SEED_LIMIT - 1)),
        stop=tuple(draw(st.lists(TEXT.filter(bool), max_size=3))) if detokenize else (),
        include_stop_str_in_output=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(TOKEN_IDS, max_size=3))),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(k),
        **rows,
        skip_reading_prefix_cache=draw(st.none() | st.booleans()),
        detokenize=detokenize,
        skip_special_tokens=draw(st.booleans()),
    )


def of_type(declared: Any) -> st.SearchStrategy[Any]:
    """Values of a declared field type, or of a struct."""
    if declared in _SIMPLE:
        return _SIMPLE[declared]
    if declared is SamplingParams:
        return sampling_params()
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
        return st.sampled_from(declared)
    if isinstance(declared, type) and issubclass(declared, msgspec.Struct):
        hints = typing.get_type_hints(declared)
        fields = {name: of_type(hints[name]) for name in declared.__struct_fields__}
        return st.builds(declared, **fields)
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([of_type(each) for each in arguments])
    if origin is list:
        return st.lists(of_type(arguments[0]), max_size=3)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return st.lists(of_type(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=3)
    raise NotImplementedError(f"no strategy for {declared}")


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Fail unless both are the same: types, every field of every struct, every bit of numbers."""
    assert type(left) is type(right), f"{where}: {type(left)} against {type(right)}"
    if isinstance(left, msgspec.Struct):
        for name in left.__struct_fields__:
            assert_same(getattr(left, name), getattr(right, name), f"{where}.{name}")
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert left.tobytes() == right.tobytes(), where
    elif isinstance(left, float):
        assert struct.pack("<d", left) == struct.pack("<d", right), f"{where}: {left} {right}"
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}[{key!r}]")
    else:
        assert left == right, f"{where}: {left!r} against {right!r}"
