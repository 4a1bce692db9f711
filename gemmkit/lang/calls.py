"""How one device function calls another: without a status.

Numba hands over every number of every tuple by itself, and returns a status, which each caller compares and hands on. Device
code raises nothing, so here a function returns nothing but its result, and large arrays are handed over as they are. NVVM
inlines all calls, and statuses were half of the time that it took.

A result has a place on the stack that its caller gives, as Numba's have: of results that are values NVVM makes other code,
in a third less time (tools.sass_gate: 17 % slower where A lies across K in registers, 29 % with tiles staged for clusters).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, itanium_mangler, types
from numba.cuda.core.callconv import CUDACallConv, Status

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
        given: list = [self._result_type(restype).as_pointer()]
        for ty in argtypes:
            packer = self._packer(ty)
            given += [self.context.get_value_type(ty)] if packer is None else packer.argument_types
        return ir.FunctionType(ir.VoidType(), given)

    def _result_type(self, ty: Any) -> Any:
        return self.context.get_value_type(ty) if isinstance(ty, types.Optional) else self.get_return_type(ty).pointee

    def decorate_function(self, fn: Any, args: Any, fe_argtypes: Any, noalias: bool = False) -> None:
        pass                                                  # names for a debugger

    def decode_arguments(self, builder: Any, argtypes: tuple, func: Any) -> tuple:
        given = iter(self.get_arguments(func))
        return tuple(value for ty in argtypes for value in self._decoded(builder, self._packer(ty), given))

    def _decoded(self, builder: Any, packer: Any, given: Iterator) -> Any:
        if packer is None:
            return (next(given),)
        return packer.from_arguments(builder, tuple(next(given) for _ in packer.argument_types))

    # -- results ------------------------------------------------------------------------------------------------------

    def return_value(self, builder: Any, retval: Any) -> None:
        builder.store(retval, builder.function.args[0])
        builder.ret_void()

    def return_optional_value(self, builder: Any, retty: Any, valty: Any, value: Any) -> None:
        self.return_value(builder, self.context.cast(builder, value, valty, retty))

    def return_user_exc(self, builder: Any, *_given: Any, **_keywords: Any) -> None:
        """For an index beyond a tuple's end, which the emulator reports: what comes back says nothing."""
        builder.ret_void()

    def return_status_propagate(self, builder: Any, status: Any) -> None:
        """Of one of Numba's own functions: there is nothing to be handed on."""

    def call_function(self, builder: Any, callee: Any, resty: Any, argtys: Any, args: Any) -> tuple[Any, Any]:
        given: list = []
        for ty, value in zip(argtys, args):
            packer = self._packer(ty)
            given += [value] if packer is None else packer.as_arguments(builder, [value])
        place = cgutils.alloca_once(builder, callee.args[0].type.pointee)
        builder.call(callee, [place, *given])
        result = builder.load(place)
        if isinstance(resty, types.Optional):                 # Numba puts it together again
            made = self.context.make_helper(builder, resty, value=result)
            is_none = builder.not_(cgutils.as_bool_bit(builder, made.valid))
            return Status(code=None, is_error=cgutils.false_bit, is_ok=None, is_none=is_none, is_stop_iteration=None,
                          is_python_exc=None, is_user_exc=None, excinfoptr=None), made.data
        return None, self.context.get_returned_value(builder, resty, result)
