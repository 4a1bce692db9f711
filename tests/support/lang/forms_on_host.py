"""Forms of Python in both worlds: what the emulator gives for some operands, and what the device's code gives on this
machine's processor, with the types of both."""

from __future__ import annotations

import cmath
import ctypes
import enum
import functools
import math
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba.cuda import types

from gemmkit.emulator.functions import kind_of
from gemmkit.lang import complex as complex_scalars
from gemmkit.lang.functions import device
from gemmkit.lang.numba_hooks import atom, signature
from gemmkit.lang.scalars import IndexType, NarrowFloatType, WeakFloatLiteral, WeakIntLiteral, float16, index, weak_float64
from tests.lang.test_dialect import written as written_in
from tests.support.lang import on_host

#: The operands of every form: values, their types, and how they are handed to compiled code.
OPERANDS: dict[str, tuple[Any, Any, Any]] = {
    "x": (np.float32(1.5), types.float32, ctypes.c_float), "y": (np.float32(2), types.float32, ctypes.c_float),
    "z": (np.float32(3), types.float32, ctypes.c_float), "w": (np.float32(4), types.float32, ctypes.c_float),
    "i": (2, index, ctypes.c_int32), "k": (np.int32(-3), types.int32, ctypes.c_int32),
    "u": (np.uint32(5), types.uint32, ctypes.c_uint32), "re": (np.float32(1), types.float32, ctypes.c_float),
    "im": (np.float32(2), types.float32, ctypes.c_float), "flag": (np.True_, types.boolean, ctypes.c_int8),
    "h": (np.float16(1.5), float16, ctypes.c_uint16), "d": (np.float64(0.3), types.float64, ctypes.c_double),
    "b": (np.uint8(200), types.uint8, ctypes.c_uint8)}
PARAMETERS = "values, i, k, u, c, flag, h, d, b"
GIVEN = (tuple(OPERANDS[name][0] for name in "xyzw"), *(OPERANDS[name][0] for name in "iku"), np.complex64(1 + 2j),
         *(OPERANDS[name][0] for name in ("flag", "h", "d", "b")))
TYPES = (types.UniTuple(types.float32, 4), index, types.int32, types.uint32, types.complex64, types.boolean, float16,
         types.float64, types.uint8)


class Mode(enum.Enum):
    A = 1
    B = 2


class IMode(enum.IntEnum):
    A = 1
    B = 2


class Color:
    RED = 1


def halved(x: Any) -> Any:
    return x * 0.5


#: Names that forms refer to, beside those of `test_dialect`.
SCOPE: dict[str, Any] = dict(
    halved=halved, Mode=Mode, IMode=IMode, Color=Color, functools=functools, reduce=functools.reduce,
    partial=functools.partial, cmath=cmath, TABLE=(1.0, 2.0, 3.0), ITABLE=(1, 2, 3), MIXED=(1, 2.5), NESTED=((1, 2), (3, 4)),
    NOTHING=None, FLAG=True, N=3, NEG=-1, S="relu", CONST=np.float32(2))


def written(body: str, name: str) -> FunctionType:
    function: Any = written_in(body, name, PARAMETERS)
    function.__globals__.update(SCOPE)
    return function                                            # type: ignore[no-any-return]


# -- types ------------------------------------------------------------------------------------------------------------

def type_here(value: Any) -> Any:
    """The type of what the emulator computed; of plain numbers "int", "float" and "complex", literals or not."""
    if isinstance(value, tuple):
        return tuple(map(type_here, value))
    if isinstance(value, np.complexfloating):
        return getattr(types, value.dtype.name)
    kind = kind_of(value)
    assert kind is not None, f"{value!r} is no number"
    return type_there(complex_scalars.type_of(kind))


def type_there(ty: Any) -> Any:
    if isinstance(ty, types.BaseTuple):
        return tuple(map(type_there, ty.types))
    if isinstance(ty, (WeakIntLiteral, IndexType)):
        return "int"
    if isinstance(ty, WeakFloatLiteral) or ty == weak_float64:
        return "float"
    if isinstance(ty, complex_scalars.WEAK_COMPLEX):
        return "complex"
    return types.boolean if isinstance(ty, types.BooleanLiteral) else ty


def compiled(function: Callable[..., Any]) -> Any:
    """The device's type of what a form gives."""
    taken = device(function)
    bound, _ = taken.bind(TYPES, {})
    return taken.compile(bound).signature.return_type


# -- values -----------------------------------------------------------------------------------------------------------

def _field(ty: Any) -> Any:
    if isinstance(ty, types.BaseTuple):
        return type("Values", (ctypes.Structure,), {"_fields_": [(f"r{n}", _field(t)) for n, t in enumerate(ty.types)]})
    if isinstance(ty, (types.Complex, complex_scalars.WeakComplex128Type)):
        part = ctypes.c_float if ty == types.complex64 else ctypes.c_double
        return type("Parts", (ctypes.Structure,), {"_fields_": [("re", part), ("im", part)]})
    if isinstance(ty, types.Boolean):
        return ctypes.c_int8
    if isinstance(ty, NarrowFloatType):
        return ctypes.c_uint16 if ty.bitwidth == 16 else ctypes.c_uint8
    if isinstance(ty, types.Integer):
        return getattr(ctypes, f"c_{'' if ty.signed else 'u'}int{ty.bitwidth}")
    return ctypes.c_float if ty == types.float32 else ctypes.c_double


def _value(raw: Any, ty: Any) -> Any:
    if isinstance(ty, types.BaseTuple):
        return tuple(_value(getattr(raw, f"r{n}"), t) for n, t in enumerate(ty.types))
    if isinstance(ty, NarrowFloatType):
        return np.array(raw, f"u{ty.dtype.itemsize}").view(ty.dtype)[()]
    return complex(raw.re, raw.im) if hasattr(raw, "re") else bool(raw) if isinstance(ty, types.Boolean) else raw


def _type_complex(context: Any, re: Any, im: Any) -> Any:
    return signature(types.complex64, re, im), lambda c, b, s, v: complex_scalars.of_parts(c, b, types.complex64, v)


@atom(_type_complex)
def of_parts(re: Any, im: Any) -> Any:
    """The operand ``c``, which is handed over as two."""
    return np.complex64(complex(re, im))


def _spoken(ty: Any) -> Any:
    """The type of a result in memory: of literals, whose values are in their types, that of run-time numbers."""
    if isinstance(ty, types.BaseTuple):
        parts = tuple(map(_spoken, ty.types))
        return ty if parts == tuple(ty.types) else types.BaseTuple.from_types(parts)
    return types.boolean if isinstance(ty, types.BooleanLiteral) else types.unliteral(ty)


def _type_stored(context: Any, value: Any) -> Any:
    to = _spoken(value)
    return signature(to, value), lambda c, b, s, v: c.cast(b, v[0], value, to)


@atom(_type_stored)
def stored(value: Any) -> Any:
    """The value itself, no literal."""
    return value


def value_there(function: Callable[..., Any]) -> Any:
    """What the device's code gives for the operands, on this machine's processor."""
    scope: dict[str, Any] = {"f": function, "of_parts": of_parts, "stored": stored, "__name__": "__main__"}
    exec(f"def wrapped({', '.join(OPERANDS)}):\n"
         "    return (stored(f((x, y, z, w), i, k, u, of_parts(re, im), flag, h, d, b)),)\n", scope)
    made = device(scope["wrapped"]).compile(tuple(ty for _, ty, _ in OPERANDS.values()))
    address = _loaded(made)
    kind = _field(made.signature.return_type)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *(field for _, _, field in OPERANDS.values()))(address)
    given = [int(v.view(np.uint16)) if field is ctypes.c_uint16 else v.item() if isinstance(v, np.generic) else v
             for v, _, field in OPERANDS.values()]
    out = kind()
    call(ctypes.addressof(out), *given)
    return _value(out, made.signature.return_type)[0]


_DEBUGGING = re.compile(r"^.*llvm\.dbg\.(value|declare).*$", re.MULTILINE)


def _loaded(made: Any) -> int:
    """The address of a compiled function, with all that it calls beside it."""
    engine, module, left, seen = on_host._engine(), None, [made.library], set()
    while left:
        library = left.pop()
        if id(library) in seen:
            continue
        seen.add(id(library))
        left += library._linking_libraries
        if library._module is None:
            continue
        text = _DEBUGGING.sub("", str(library._module))
        other = llvm.parse_assembly(on_host._portable(text) + on_host._missing(on_host._PRELUDE))
        if module is None:
            module = other
        else:
            module.link_in(other)
    assert module is not None
    module.verify()
    unknown = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")
               and llvm.address_of_symbol(f.name) is None]
    assert not unknown, f"{', '.join(unknown)} on this machine"
    engine.add_module(module)
    engine.finalize_object()
    return int(engine.get_function_address(made.fndesc.llvm_func_name))


def same(a: Any, b: Any) -> bool:
    """Equal to within the last places of float32 (float16 where one is), with the sign of zero."""
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    x, y = complex(a), complex(b)
    if x != x or y != y:
        return x != x and y != y
    if x == y:
        return math.copysign(1, x.real) == math.copysign(1, y.real) or x != 0 or isinstance(a, (complex, np.complexfloating))
    return abs(x - y) <= (1e-3 if isinstance(a, np.float16) else 1e-6) * abs(x)


__all__ = ["GIVEN", "compiled", "same", "type_here", "type_there", "value_there", "written"]
