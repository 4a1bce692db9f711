"""Which device type a number has: of a NumPy dtype, of a kind of `gemmkit.lang.number_rules`, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang import number_rules
from gemmkit.lang.numba_hooks import ir, models, register_model, types
from gemmkit.lang.number_rules import BOOL, Weak
from gemmkit.lang.records import TABLE, device_dtype, metadata_of, part_dtypes, record_text
from gemmkit.lang.scalars import (
    IndexType,
    NarrowFloatType,
    WeakFloat64Type,
    WeakFloatLiteral,
    WeakIntLiteral,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    index,
    weak_float64,
    wide_index,
)

# -- numbers of several parts -----------------------------------------------------------------------------------------

class RecordType(types.Type):
    """A struct of parts."""

    def __init__(self, dtype: np.dtype):
        self.dtype, self.names = dtype, dtype.names or ()
        self.parts = tuple(numba_type(kind) for kind in part_dtypes(dtype))
        self.table = metadata_of(dtype).get(TABLE)
        super().__init__(f"record {record_text(dtype)}")


@register_model(RecordType)
class _RecordModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: RecordType):
        super().__init__(dmm, fe_type, [(f"part{n}", ty) for n, ty in enumerate(fe_type.parts)])


class PackedType(RecordType):
    """A record of two 16-bit parts: one 32-bit register, as memory has it; moving it takes nothing apart."""


@register_model(PackedType)
class _PackedModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: PackedType):
        super().__init__(dmm, fe_type, ir.IntType(32))


def record_type(dtype: np.dtype) -> RecordType:
    """The device type of a record dtype."""
    kinds = part_dtypes(dtype)
    return PackedType(dtype) if len(kinds) == 2 and kinds[0].itemsize == 2 else RecordType(dtype)


# -- of a dtype, and back ---------------------------------------------------------------------------------------------

_NUMBA = {np.dtype(dtype): ty for dtype, ty in (
    (np.float16, float16), (ml_dtypes.bfloat16, bfloat16), (ml_dtypes.float8_e4m3fn, float8_e4m3fn),
    (ml_dtypes.float8_e5m2, float8_e5m2))}


def numba_type(dtype: Any) -> types.Type:
    """The device type of a NumPy dtype; raises TypeError where there is none."""
    dtype = device_dtype(dtype)
    if dtype.names is not None:
        return record_type(dtype)         # Numba keeps one of each name; a memory here would be part of every fingerprint
    return _NUMBA.get(dtype) or getattr(types, dtype.name if dtype.kind != "b" else "boolean")


def numpy_dtype(ty: types.Type) -> np.dtype:
    """The NumPy dtype of a device number type."""
    if isinstance(ty, (NarrowFloatType, RecordType)):
        return ty.dtype
    if isinstance(ty, IndexType):
        return np.dtype(f"i{ty.bitwidth // 8}")
    if isinstance(ty, types.Literal):
        ty = types.unliteral(ty)
    return np.dtype(bool) if isinstance(ty, types.Boolean) else np.dtype(ty.name)


# -- of a kind, and back ----------------------------------------------------------------------------------------------

def kind_of_type(t: Any) -> Any:
    """The kind of a device type's numbers (`number_rules`); None for what is no real number."""
    if isinstance(t, types.Boolean):
        return BOOL
    if isinstance(t, (WeakFloatLiteral, types.IntegerLiteral)):
        return t.literal_value
    if isinstance(t, IndexType):
        return Weak(t.bitwidth)
    if isinstance(t, WeakFloat64Type):
        return Weak.FLOAT
    if isinstance(t, NarrowFloatType):
        return t.dtype
    return np.dtype(t.name) if isinstance(t, (types.Integer, types.Float)) else None


def type_of_kind(kind: Any) -> Any:
    """The device type of a kind."""
    if isinstance(kind, np.dtype):
        return numba_type(kind)
    if isinstance(kind, int):
        return WeakIntLiteral(kind)
    if number_rules.is_coordinate(kind):
        return index_of(kind)
    return weak_float64


def index_of(kind: Weak) -> IndexType:
    """The device type of a kind of coordinates."""
    return index if kind is Weak.COORDINATE else wide_index
