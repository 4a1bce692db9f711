"""Conversions that clamp to what a dtype holds, and round floats to the nearest integer."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.dtypes import DTypeType
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.number_types import numpy_dtype
from gemmkit.lang.scalars import NarrowFloatType, WeakFloat64Type, WeakFloatLiteral, WeakIntLiteral, index

f32, f64, i32, i64 = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)
REAL = "Saturate takes real numbers; it got {}"


def _type_saturate(context: Any, dtype: Any, value: Any) -> Any:
    if not isinstance(dtype, DTypeType):
        return None
    given, target = _held(value), dtype.target
    wanted = numpy_dtype(target)
    if not isinstance(given, (types.Integer, types.Boolean, types.Float)):
        raise TypeError(REAL.format(value))
    is_float = isinstance(given, types.Float)
    convert = _to_float if wanted.kind not in "iu" else _from_float if is_float else _from_integer

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        return convert(c, b, c.cast(b, v[1], value, given), given, target, wanted)

    return signature(target, dtype, value), codegen


def _held(ty: Any) -> Any:
    """The type that a value is looked at in: float32 for the narrow floats, and that of what a weak number is by itself."""
    if isinstance(ty, NarrowFloatType):
        return types.float32
    if isinstance(ty, (WeakFloatLiteral, WeakFloat64Type)):
        return types.float64
    return index if isinstance(ty, WeakIntLiteral) and ty.bitwidth == 32 else ty


def _from_float(c: Any, b: Any, value: Any, given: Any, target: Any, wanted: np.dtype) -> Any:
    """One instruction: it rounds to nearest even, and clamps to the destination's range. NaN becomes 0."""
    bits = 8 * wanted.itemsize
    source = "f64" if given == types.float64 else "f32"
    kind = "s" if wanted.kind == "i" else "u"
    held = i64 if bits == 64 else i32
    (out,) = assembly(b, f"cvt.rni.sat.{kind}{bits}.{source} $0, $1;", [held], [value], pure=True)
    if bits == 64 or source == "f64":                     # there the instruction makes something else of NaN
        out = b.select(b.fcmp_unordered("uno", value, value), ir.Constant(held, 0), out)
    return out if bits >= 32 else b.trunc(out, ir.IntType(bits))


def _from_integer(c: Any, b: Any, value: Any, given: Any, target: Any, wanted: np.dtype) -> Any:
    """A minimum and a maximum, where they are needed."""
    if isinstance(given, types.Boolean):
        return b.zext(value, ir.IntType(8 * wanted.itemsize))
    limits, own = np.iinfo(wanted), np.iinfo(numpy_dtype(given))
    for limit, is_needed, comparison in ((limits.max, own.max > limits.max, ">"), (limits.min, own.min < limits.min, "<")):
        if is_needed:
            compare = b.icmp_signed if given.signed else b.icmp_unsigned
            constant = ir.Constant(value.type, int(limit))
            value = b.select(compare(comparison, value, constant), constant, value)
    return c.cast(b, value, given, target)


def _to_float(c: Any, b: Any, value: Any, given: Any, target: Any, wanted: np.dtype) -> Any:
    """Beyond the largest finite number there is nothing; NaN, which is neither above nor below, stays."""
    if not isinstance(given, types.Float):
        wide = types.float64 if given.bitwidth == 64 else types.float32
        value, given = c.cast(b, value, given, wide), wide
    limit = float(ml_dtypes.finfo(wanted).max)
    if given == types.float64 or wanted.itemsize < 8:
        for end, comparison in ((limit, ">"), (-limit, "<")):
            constant = ir.Constant(value.type, end)
            value = b.select(b.fcmp_ordered(comparison, value, constant), constant, value)
    return c.cast(b, value, given, target)


@atom(_type_saturate)
def saturate(dtype: np.dtype, value: Any) -> Any:
    """``value`` as ``dtype``, clamped to what it holds. Floats become the nearest integers (ties to even), and NaN 0.

    >>> [int(saturate(np.dtype("int8"), x)) for x in (2.5, 3.5, -1e9, math.inf, math.nan, 200)]
    [2, 4, -128, 127, 0, 127]
    """
    kind = np.asarray(value).dtype
    if kind.kind == "c" or kind.names is not None or kind.kind == "O":
        raise TypeError(REAL.format(kind))
    is_float = kind.kind not in "iub"
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        x = float(value) if is_float else int(value)
        if math.isnan(x):
            return dtype.type(0)
        return dtype.type(min(max(round(x) if math.isfinite(x) else x, int(limits.min)), int(limits.max)))
    wide = np.float64 if kind.itemsize == 8 else np.float32
    limit, given = float(ml_dtypes.finfo(dtype).max), wide(value)
    with np.errstate(all="ignore"):
        clamped = wide(limit) if given > limit else wide(-limit) if given < -limit else given
        return np.asarray(clamped).astype(dtype)[()]
