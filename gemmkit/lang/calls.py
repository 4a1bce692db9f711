"""How one device function calls another: Numba's convention, in fewer words.

Numba hands over every number of every tuple by itself, so that 128 accumulators are taken apart by each caller and put
together by each callee, and compares the status that comes back with five codes where one question is asked. NVVM inlines
the calls, and nothing of that is left in the machine code; of a kernel's LLVM IR it was two fifths. Here large arrays are
handed over as they are, and a status is compared once.

More could be left out, and changes the machine code of some kernels (tools.sass_gate): the status, the places of results
that are nothing, the pointers to results, the taking apart of structs and small arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, itanium_mangler, types
from numba.cuda.core.callconv import CUDACallConv, Status

__all__ = ["Calls", "is_empty"]

_MANY = 32                             # numbers of an array


def is_empty(ty: Any) -> bool:
    """Whether values of an LLVM type hold nothing."""
    return isinstance(ty, ir.LiteralStructType) and all(map(is_empty, ty.elements))


def _is_whole(ty: Any) -> bool:
    """Whether an argument is handed over as it is: a number, a pointer, or an array of many."""
    is_array, count = isinstance(ty, ir.ArrayType), 1
    while isinstance(ty, ir.ArrayType):
        count, ty = count * ty.count, ty.element
    return not isinstance(ty, ir.LiteralStructType) and (count >= _MANY or not is_array)


class Calls(CUDACallConv):
    """The calling convention of device functions. A name needs no types of arguments: its number in this process tells two
    forms of one function apart."""

    needs_env = False

    def __init__(self, context: Any):
        super().__init__(context)
        self._packers: dict[Any, Any] = {}

    def mangler(self, name: str, argtypes: Any, *, abi_tags: Any = (), uid: Any = None) -> str:
        return str(itanium_mangler.mangle(name, (), uid=uid))

    def _packer(self, ty: Any) -> Any:
        """What takes an argument apart, or None where it is whole."""
        if ty not in self._packers:
            whole = _is_whole(self.context.get_value_type(ty))
            self._packers[ty] = None if whole else self._get_arg_packer((ty,))
        return self._packers[ty]

    def get_function_type(self, restype: Any, argtypes: tuple) -> Any:
        given: list = [self.get_return_type(restype)]         # the result's place, also where that is nothing
        for ty in argtypes:
            packer = self._packer(ty)
            given += [self.context.get_value_type(ty)] if packer is None else packer.argument_types
        return ir.FunctionType(ir.IntType(32), given)

    def decorate_function(self, fn: Any, args: Any, fe_argtypes: Any, noalias: bool = False) -> None:
        pass                                                  # names for a debugger

    def decode_arguments(self, builder: Any, argtypes: tuple, func: Any) -> tuple:
        given = iter(self.get_arguments(func))
        return tuple(value for ty in argtypes for value in self._decoded(builder, self._packer(ty), given))

    def _decoded(self, builder: Any, packer: Any, given: Iterator) -> Any:
        if packer is None:
            return (next(given),)
        return packer.from_arguments(builder, tuple(next(given) for _ in packer.argument_types))

    def call_function(self, builder: Any, callee: Any, resty: Any, argtys: Any, args: Any) -> tuple[Any, Any]:
        given: list = []
        for ty, value in zip(argtys, args):
            packer = self._packer(ty)
            given += [value] if packer is None else packer.as_arguments(builder, [value])
        place = cgutils.alloca_once(builder, callee.args[0].type.pointee)
        status = self._status(builder, builder.call(callee, [place, *given]), resty)
        return status, self.context.get_returned_value(builder, resty, builder.load(place))

    def _status(self, builder: Any, code: Any, resty: Any) -> Any:
        if isinstance(resty, types.Optional):
            return self._get_return_status(builder, code)
        fails = builder.icmp_unsigned("!=", code, code.type(0))
        return Status(code=code, is_error=fails, is_ok=None, is_none=None, is_stop_iteration=None, is_python_exc=None,
                      is_user_exc=None, excinfoptr=None)
