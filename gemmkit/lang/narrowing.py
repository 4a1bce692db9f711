"""Results that their array cannot hold: refused, unless they are converted by name.

Stricter than NumPy's ``same_kind``: a float result does not go into an integer array, a wide integer not into a narrow
one, and signed and unsigned ones only where every value has room. A float may go into a narrower float, which is what a
product in float16 with float32 sums does, and any number into a float. ``np.int8(x)`` in a function, or
``epilogues.Saturate("int8")``, asks for what is refused here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from gemmkit.lang.atoms import atom
from gemmkit.lang.dtypes import DTypeType
from gemmkit.lang.errors import ConfigError, refused_at
from gemmkit.lang.numba_hooks import signature, types
from gemmkit.lang.number_types import numpy_dtype
from gemmkit.lang.records import Record, part_dtypes
from gemmkit.lang.scalars import IndexType, WeakFloat64Type, WeakFloatLiteral, WeakIntLiteral

_FLOAT = np.dtype(np.float64)


@cache
def narrows(given: np.dtype, wanted: np.dtype) -> bool:
    """Whether numbers of ``given`` do not fit an array of ``wanted``.

    >>> [narrows(np.dtype(x), np.dtype(y)) for x, y in (("f4", "i4"), ("i4", "i1"), ("u1", "i1"))]
    [True, True, True]
    >>> [narrows(np.dtype(x), np.dtype(y)) for x, y in (("f4", "f2"), ("i8", "f2"), ("u1", "i2"))]
    [False, False, False]
    """
    if given.names is not None and wanted.names is not None:
        return any(map(narrows, part_dtypes(given), part_dtypes(wanted)))
    if given.names is not None or wanted.names is not None or wanted.kind not in "iub":
        return given.kind == "c" and wanted.kind != "c" and wanted.names is None
    return given.kind not in "iub" or not np.can_cast(given, wanted, "safe")


def misfit_of_type(ty: Any, wanted: np.dtype) -> str | None:
    """What a value of a device type is that does not fit, or None if it does."""
    if isinstance(ty, WeakIntLiteral):
        return misfit(int(ty.literal_value), wanted)
    if isinstance(ty, IndexType):                          # a coordinate, or a function's literal: it takes the array's type
        return "int" if wanted.kind == "b" else None
    if isinstance(ty, (WeakFloatLiteral, WeakFloat64Type)):
        return "float" if narrows(_FLOAT, wanted) else None
    if isinstance(ty, types.BaseTuple) or not (isinstance(ty, (types.Number, types.Boolean)) or hasattr(ty, "dtype")):
        return None                                        # no number: the conversion itself says what is wrong
    given = numpy_dtype(ty)
    return str(given) if narrows(given, wanted) else None


def misfit(value: Any, wanted: np.dtype) -> str | None:
    """The same of a value in the emulator."""
    if isinstance(value, np.generic):
        return str(value.dtype) if narrows(value.dtype, wanted) else None
    if isinstance(value, int) and not isinstance(value, bool) and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        return None if limits.min <= value <= limits.max else str(value)
    if isinstance(value, (bool, Record, tuple)):
        return "bool" if isinstance(value, bool) and narrows(np.dtype(bool), wanted) else None
    given = np.dtype(np.int32) if isinstance(value, int) else _FLOAT if isinstance(value, float) else None
    return type(value).__name__ if given is not None and narrows(given, wanted) else None


def refusal(what: str, got: str, wanted: np.dtype) -> str:
    """What would do, too."""
    name = wanted.name
    return (f"{what} holds {name} and would get {got} values, which it cannot hold; nothing is narrowed silently: take "
            f"epilogues.Saturate({name!r}), which rounds and clamps, convert by name where the value is made "
            f"(np.{name}(x)), or give an array that holds {got}")


def _type_fitting(context: Any, what: Any, dtype: Any, values: Any) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(values, types.BaseTuple):
        return None
    wanted = numpy_dtype(dtype.target)
    for ty in dict.fromkeys(values.types):
        got = misfit_of_type(ty, wanted)
        if got is not None:
            raise ConfigError(refusal(what.literal_value, got, wanted))
    return signature(values, what, dtype, values), lambda c, b, s, v: v[2]


@atom(_type_fitting)
def fitting(what: str, dtype: np.dtype, values: tuple) -> tuple:
    """The values, unchanged; raises ConfigError where an array of ``dtype``, called ``what``, cannot hold them."""
    if {*map(type, values)} != {dtype.type}:
        for value in values:
            got = misfit(value, dtype)
            if got is not None:
                raise ConfigError(refusal(what, got, dtype))
    return values


def check_stored(value: Any, dtype: np.dtype) -> None:
    """In the emulator: raise ComponentError, with the line that stores it, for a value that an array does not hold."""
    got = misfit(value, dtype)
    if got is not None:
        from gemmkit.lang.sites import here, kernel_line

        site = here()
        line = kernel_line(site)
        raise refused_at(site[0].co_name, line.file, line.number, refusal("this array", got, dtype))
