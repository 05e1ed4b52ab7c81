"""Has the parts of a kernel's work done by the threads that torch computes with.

Torch's operators run on a team of OpenMP threads, which wait awake for a moment after each of them.
A kernel that shares its work among the same team neither wakes threads of its own nor competes with
those of torch. Where torch brings no OpenMP that can be asked, kernels run on the calling thread.

Each thread takes some of the work, and more of it when it is done with that: one that the system
has stopped for a while, for other processes of a busy machine, leaves the rest to the others.

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

_SYMBOL, _FUNCTION = "haversack_parallel", "GOMP_parallel"
_TURNS = 4
"""How often each thread takes some of the work, if all are as fast."""
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_DATA = ir.IntType(8).as_pointer()
_TASK = ir.FunctionType(ir.VoidType(), [_DATA])


def _find_team() -> bool:
    """Tell the compiler where torch's OpenMP is; return whether there is one."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        function = getattr(ctypes.CDLL(str(path)), _FUNCTION)
        llvmlite.binding.add_symbol(_SYMBOL, ctypes.cast(function, ctypes.c_void_p).value)
        return True
    # Code that names it is loaded, and never calls it.
    llvmlite.binding.add_symbol(_SYMBOL, 1)
    return False


HAS_TEAM = _find_team()


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
        task_data = ir.LiteralStructType([packed, _I64, _I64, _I64])
        name = builder.module.get_unique_name(f"{builder.function.name}.part")
        task = ir.Function(builder.module, _TASK, name)
        task.linkage = "internal"
        inside = ir.IRBuilder(task.append_basic_block())
        data = inside.bitcast(task.args[0], task_data.as_pointer())
        *places, taken = (
            inside.gep(data, [ir.Constant(_I32, 0), ir.Constant(_I32, i)]) for i in range(4)
        )
        given, size, total = (inside.load(place) for place in places)
        take, do, leave = (task.append_basic_block() for _ in range(3))
        inside.branch(take)
        inside.position_at_end(take)
        first = inside.atomic_rmw("add", taken, size, "monotonic")
        inside.cbranch(inside.icmp_signed("<", first, total), do, leave)
        inside.position_at_end(do)
        after = inside.add(first, size)
        end = inside.select(inside.icmp_signed("<", after, total), after, total)
        context.call_internal_no_propagate(inside, compiled.fndesc, kind, [given, first, end])
        inside.branch(take)
        inside.position_at_end(leave)
        inside.ret_void()

        memory = cgutils.alloca_once(builder, task_data)
        one = ir.Constant(_I64, 1)
        is_parallel = builder.icmp_signed(">", args[1], one)
        turns = builder.mul(args[1], ir.Constant(_I64, _TURNS))
        turns = builder.select(is_parallel, turns, one)
        size = builder.udiv(builder.add(args[2], builder.sub(turns, one)), turns)
        for i, value in enumerate((args[3], size, args[2], ir.Constant(_I64, 0))):
            place = builder.gep(memory, [ir.Constant(_I32, 0), ir.Constant(_I32, i)])
            builder.store(value, place)
        pointer = builder.bitcast(memory, _DATA)
        with builder.if_else(is_parallel) as (then, otherwise):
            with then:
                start = ir.FunctionType(ir.VoidType(), [_TASK.as_pointer(), _DATA, _I32, _I32])
                run = cgutils.get_or_insert_function(builder.module, start, _SYMBOL)
                threads_32 = builder.trunc(args[1], _I32)
                builder.call(run, [task, pointer, threads_32, ir.Constant(_I32, 0)])
            with otherwise:
                builder.call(task, [pointer])
        return context.get_dummy_value()

    return types.void(function, types.int64, types.int64, arguments), generate
