"""Compile-time values: how a Python object that does not change becomes a constant of device code.

``static_type(value)`` is the Numba type that carries the value itself: numbers become weak constants, dtypes become
conversions (``self.dtype(x)``), and any object with ``__device_type__()`` says its own (tiles, components, device
functions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.lang import arithmetic as _arithmetic  # noqa: F401  (registers + and its like)
from gemmkit.lang import builtin_functions as _builtin_functions  # noqa: F401  (and `max`, `int`, `math.exp`)
from gemmkit.lang import integer_methods as _integer_methods  # noqa: F401  (registers `n.bit_count()`)
from gemmkit.lang import ranges as _ranges  # noqa: F401  (registers `range` over coordinates)
from gemmkit.lang import record_types as _record_types  # noqa: F401  (registers the arithmetic of records)
from gemmkit.lang import tuples as _tuples  # noqa: F401  (and what tuples have: `t[0]`, `len(t)`, `t.index(x)`)
from gemmkit.lang import unary as _unary  # noqa: F401  (registers - and abs of one number)
from gemmkit.lang.atoms import Atom, atom
from gemmkit.lang.dtypes import DTypeType, dtype_type
from gemmkit.lang.numba_hooks import (
    global_callable,
    signature,
    types,
)
from gemmkit.lang.number_types import numba_type
from gemmkit.lang.records import Record, device_dtype, to_dtype
from gemmkit.lang.scalars import WeakFloatLiteral, WeakIntLiteral
from gemmkit.lang.weak import weaken


def static_type(value: Any) -> types.Type:
    """The type that carries a compile-time value; raises TypeError for what has none."""
    made: types.Type = static_maker(value)()
    return made


def static_maker(value: Any) -> Callable[[], types.Type]:
    """What makes the type that carries a compile-time value; raises TypeError for what has none."""
    own = getattr(value, "__device_type__", None)
    if own is not None and not isinstance(value, type):
        return own
    if isinstance(value, bool):
        return lambda: types.literal(value)
    if isinstance(value, (int, float, complex)) and not isinstance(value, np.generic):
        return lambda: types.literal(weaken(value))
    if isinstance(value, np.dtype):
        return _dtype_maker(value)
    if isinstance(value, Atom):
        return lambda: value.device_type
    if isinstance(value, str):
        return lambda: types.literal(value)
    if value is None:
        return lambda: types.none
    if isinstance(value, np.generic):
        dtype = device_dtype(value.dtype)
        return lambda: numba_type(dtype)
    if isinstance(value, tuple):
        makers = [static_maker(v) for v in value]
        return lambda: types.BaseTuple.from_types([make() for make in makers])
    if isinstance(value, type) and issubclass(value, np.generic):
        return _dtype_maker(np.dtype(value))
    raise TypeError(f"{value!r} ({type(value).__name__}) cannot be a compile-time value of device code")


def _dtype_maker(dtype: np.dtype) -> Callable[[], types.Type]:
    found = device_dtype(dtype)
    return lambda: DTypeType(numba_type(found))


def static_value(context: Any, builder: Any, ty: types.Type, value: Any) -> Any:
    """The LLVM constant of a compile-time value."""
    if isinstance(value, type) and issubclass(value, np.generic):
        value = np.dtype(value)
    if isinstance(ty, types.BaseTuple):
        return context.make_tuple(builder, ty, [static_value(context, builder, t, v) for t, v in zip(ty, value)])
    if isinstance(ty, (types.BooleanLiteral, types.NoneType)):
        return context.get_dummy_value() if value is None else context.get_constant(types.boolean, value)
    return context.get_constant_generic(builder, ty, value)


def _type_convert(context: Any, dtype: Any, value: Any) -> Any:
    if not isinstance(dtype, DTypeType):
        return None
    return signature(dtype.target, dtype, value), lambda c, b, s, v: c.cast(b, v[1], value, dtype.target)


@atom(_type_convert)
def convert(dtype: np.dtype, value: Any) -> Any:
    """``value`` as a scalar of ``dtype``: what ``dtype.type(value)`` is in NumPy."""
    if type(value) is dtype.type or (type(value) is Record and value.dtype is dtype):
        return value
    if dtype.names is not None or type(value) in (Record, tuple):
        return to_dtype(dtype, value)
    if isinstance(value, _FLOATS) and dtype.char in "efd" and (
            1e-4 < abs(value) < 6e4 or value == 0 or abs(value) == np.inf or value != value):
        return dtype.type(value)
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(dtype)[()]


#: No conversion warns of what float16 holds, too, nor of infinities and NaN. NumPy need not be told to be silent there: that
#: takes longer than to convert.
_FLOATS: Any = (np.float32, float, np.float16)


def _type_convert_all(context: Any, dtype: Any, values: Any) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(values, types.BaseTuple):
        return None
    result = types.UniTuple(dtype.target, len(values.types))

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        parts = [c.cast(b, b.extract_value(v[1], n), t, dtype.target) for n, t in enumerate(values.types)]
        return c.make_tuple(b, result, parts)

    return signature(result, dtype, values), codegen


@atom(_type_convert_all)
def convert_all(dtype: np.dtype, values: tuple) -> tuple:
    """Every element of a tuple as a scalar of ``dtype``."""
    kind = dtype.type
    for value in values:
        if type(value) is not kind:
            return tuple(convert(dtype, value) for value in values)
    return values


def _type_fill(context: Any, dtype: Any, count: Any, value: Any) -> Any:
    named = dtype_type(dtype)
    if named is None or not isinstance(count, types.IntegerLiteral):
        return None
    result = types.UniTuple(named.target, int(count.literal_value))

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        return c.make_tuple(b, result, [c.cast(b, v[2], value, named.target)] * result.count)

    return signature(result, dtype, count, value), codegen


@atom(_type_fill)
def fill(dtype: np.dtype, count: int, value: Any) -> tuple:
    """``count`` times one value, as ``dtype``."""
    return (convert(np.dtype(dtype), value),) * count


__all__ = ["DTypeType", "WeakFloatLiteral", "WeakIntLiteral", "global_callable", "static_type", "static_value"]
