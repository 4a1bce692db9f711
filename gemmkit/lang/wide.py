"""Coordinates of 64 bits: what user code gets of operands with 2^31 elements and more.

Kernels count rows and columns in 32 bits, which is enough: no operand has more than `gemmkit.problem.LIMIT` of either. What
a user's method *computes* from them may be as large as the operand has elements (``i * (i + 1) // 2 + j``). ``widened`` is
called where a kernel hands its coordinates over; nothing that kernels do themselves comes by here.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, cast

from gemmkit.lang.atoms import atom
from gemmkit.lang.component_types import ComponentType
from gemmkit.lang.numba_hooks import signature, types
from gemmkit.lang.scalars import IndexType, index, wide_index

NARROW, WIDE = 32, 64                  # bits of a coordinate
COUNT = 2**31                          # elements from which on a place among them takes more than 32 bits


def wide_type(ty: Any) -> Any:
    """The type of a coordinate, or of a component whose fields are coordinates, with 64 bits for 32; None for another."""
    if isinstance(ty, (IndexType, types.IntegerLiteral)):
        return wide_index
    if isinstance(ty, ComponentType) and ty.runtime and all(isinstance(t, IndexType) for t in ty.runtime.values()):
        return _of_wide_fields(ty)
    return None


@cache
def _of_wide_fields(ty: ComponentType) -> ComponentType:
    made: Any = object.__new__(ComponentType)
    vars(made).update(vars(ty), runtime=dict.fromkeys(ty.runtime, wide_index), name=f"{ty.name}, {WIDE} bits",
                      _key=(WIDE, ty.key))
    return cast(ComponentType, type(made)._intern(made))       # Numba numbers its types; as if its constructor had made it


def _type_widened(context: Any, value: Any) -> Any:
    to = wide_type(value)
    if to is None:
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        from numba.cuda import cgutils

        if isinstance(to, IndexType):
            return c.cast(b, v[0], value, to)
        given, out = (cgutils.create_struct_proxy(t)(c, b, **how) for t, how in ((value, {"value": v[0]}), (to, {})))
        for name, ty in value.runtime.items():
            setattr(out, name, c.cast(b, getattr(given, name), ty, wide_index))
        return out._getvalue()

    return signature(to, value), codegen


_long: type[int] = int                 # a coordinate of 64 bits on the host


def emulate_with(long_coordinate: type[int]) -> None:
    """What a coordinate of 64 bits is in emulated code: the emulator says so."""
    global _long
    _long = long_coordinate


@atom(_type_widened)
def widened(value: Any) -> Any:
    """A coordinate, or the sizes of a problem, as 64-bit ones."""
    if isinstance(value, int):
        return _long(value)
    return type(value)(*(_long(getattr(value, field.name)) for field in dataclasses.fields(value)))


def _type_narrowed(context: Any, value: Any) -> Any:
    if not isinstance(value, types.Integer):
        return None
    return signature(index, value), lambda c, b, s, v: c.cast(b, v[0], value, index)


@atom(_type_narrowed)
def narrowed(value: int) -> int:
    """A coordinate as kernels count, in 32 bits; it fits."""
    return int(value)
