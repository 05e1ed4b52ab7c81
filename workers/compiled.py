"""How loops over numbers become machine code, and where that is kept.

Numba compiles a function when it is first called with arguments of new types, and keeps the result
on disk. The module knows numba and files; it knows none of the functions. Rules:
- The files are the user's own: in the cache that converted models are in, by numba's version. The
  folder that the package is installed in may be read-only, or others'. `NUMBA_CACHE_DIR` goes
  before both; where neither can be written, every process compiles for itself.
- Numba's files are not made for several processes that write at once: one could be left with
  another function's code. So whoever may have to compile does it `alone`, and those that
  come later find what the first one has made.
- Numba keeps code by what a function's own file holds. Kernels use helpers of other files too, so
  what all files of kernels hold is part of the folder's name.
- A helper is a part of every kernel that uses it, and is not kept by itself: of two copies that
  were optimised in different surroundings, it would be left to the order of loading which one is
  called, and a process that had compiled them gave other bits than one that loaded them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from workers.model_store import cache_dir, locked

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def folder() -> Path:
    """Return the folder that compiled code is kept in where it can be written."""
    own = numba.config.CACHE_DIR
    name = f"numba-{numba.__version__}-{_sources_digest()}"
    return (Path(own) if own else cache_dir() / "kernels") / name


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*kernel*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kernel(function: _Function) -> _Function:
    """Have a function compiled when it is first called, and kept on disk.

    It runs on the thread that calls it, and lets go of the interpreter's lock.
    """
    before = numba.config.CACHE_DIR
    # Looked at while a function is decorated; other users of numba keep their own.
    numba.config.CACHE_DIR = str(folder())
    try:
        return cast(_Function, numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:
        # Nothing can be written, neither there nor where numba would try next.
        return cast(_Function, numba.njit(**_OPTIONS)(function))
    finally:
        numba.config.CACHE_DIR = before


def helper(fastmath: set[str]) -> Callable[[_Function], _Function]:
    """Return a decorator for what kernels call: it becomes a part of each.

    Args:
        fastmath: what the compiler may do to the function's arithmetic, in LLVM's words.
    """

    def decorate(function: _Function) -> _Function:
        options = _OPTIONS | {"fastmath": fastmath, "forceinline": True}
        return cast(_Function, numba.njit(**options)(function))

    return decorate


@contextmanager
def alone() -> Iterator[None]:
    """Let no other process of this user compile or load kernels within the `with` block."""
    with ExitStack() as held:
        # No such folder, or one that knows no locks: then nothing, or nothing shared, is kept.
        with suppress(OSError):
            held.enter_context(locked(folder() / "lock"))
        yield
