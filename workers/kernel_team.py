"""Has the parts of a kernel's work done by the threads that torch computes with.

Torch's operators run on a team of OpenMP threads, which wait awake for a moment after each of them.
A kernel that shares its work among the same team neither wakes threads of its own nor competes with
those of torch. Where torch brings no OpenMP that can be asked, kernels run on the calling thread.

The code of a part is the same whoever runs it and however many there are, so bits do not depend on
threads.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llvmlite.binding
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_SYMBOLS = {
    "haversack_parallel": "GOMP_parallel",
    "haversack_thread": "omp_get_thread_num",
    "haversack_threads": "omp_get_num_threads",
}
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_DATA = ir.IntType(8).as_pointer()
_TASK = ir.FunctionType(ir.VoidType(), [_DATA])


def _find_symbols() -> bool:
    """Tell the compiler where torch's OpenMP is; return whether there is one."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        library = ctypes.CDLL(str(path))
        for name, function in _SYMBOLS.items():
            address = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(name, address)
        return True
    for name in _SYMBOLS:
        # Code that names them is loaded, and never calls them.
        llvmlite.binding.add_symbol(name, 1)
    return False


HAS_TEAM = _find_symbols()


@intrinsic  # type: ignore[untyped-decorator]
def on_team(_: Any, function: Any, threads: Any, count: Any, arguments: Any) -> Any:
    """Call `function(*arguments, first, end)` for parts that make up `count`.

    Args:
        function: a helper; it must not fail.
        threads: how many to use; 1, where there is no team.
        count: parts of the work, of which each call gets some that follow each other.
        arguments: a tuple.
    """
    own_function = function.dispatcher

    def part(arguments: Any, first: Any, end: Any) -> None:
        own_function(*arguments, first, end)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = types.void(arguments, types.int64, types.int64)
        compiled = context.compile_subroutine(builder, part, kind, caching=False)
        packed = context.get_value_type(arguments)
        task_data = ir.LiteralStructType([packed, _I64, _I64])
        name = builder.module.get_unique_name(f"{builder.function.name}.part")
        task = ir.Function(builder.module, _TASK, name)
        task.linkage = "internal"
        inside = ir.IRBuilder(task.append_basic_block())
        data = inside.bitcast(task.args[0], task_data.as_pointer())
        values = [
            inside.load(inside.gep(data, [ir.Constant(_I32, 0), ir.Constant(_I32, i)]))
            for i in range(3)
        ]
        number = cgutils.alloca_once_value(inside, ir.Constant(_I64, 0))
        size = cgutils.alloca_once_value(inside, ir.Constant(_I64, 1))
        is_shared = inside.icmp_signed(">", values[2], ir.Constant(_I64, 1))
        with inside.if_then(is_shared):
            for place, name in ((number, "haversack_thread"), (size, "haversack_threads")):
                ask = cgutils.get_or_insert_function(inside.module, ir.FunctionType(_I32, []), name)
                inside.store(inside.zext(inside.call(ask, []), _I64), place)
        own, all_of_them = inside.load(number), inside.load(size)
        first = inside.udiv(inside.mul(values[1], own), all_of_them)
        after = inside.add(own, ir.Constant(_I64, 1))
        end = inside.udiv(inside.mul(values[1], after), all_of_them)
        context.call_internal_no_propagate(inside, compiled.fndesc, kind, [values[0], first, end])
        inside.ret_void()

        memory = cgutils.alloca_once(builder, task_data)
        for i, value in enumerate((args[3], args[2], args[1])):
            place = builder.gep(memory, [ir.Constant(_I32, 0), ir.Constant(_I32, i)])
            builder.store(value, place)
        pointer = builder.bitcast(memory, _DATA)
        is_parallel = builder.icmp_signed(">", args[1], ir.Constant(_I64, 1))
        with builder.if_else(is_parallel) as (then, otherwise):
            with then:
                start = ir.FunctionType(ir.VoidType(), [_TASK.as_pointer(), _DATA, _I32, _I32])
                run = cgutils.get_or_insert_function(builder.module, start, "haversack_parallel")
                threads_32 = builder.trunc(args[1], _I32)
                builder.call(run, [task, pointer, threads_32, ir.Constant(_I32, 0)])
            with otherwise:
                builder.call(task, [pointer])
        return context.get_dummy_value()

    return types.void(function, types.int64, types.int64, arguments), generate
