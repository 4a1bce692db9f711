"""Records: scalars of several parts, such as a dual number or a (value, index) pair.

Their dtype is a NumPy structured dtype whose fields are parts of one size. In device code a record is a struct that lives
in registers; in Python, and so in the emulator, it is a `Record`. Parts are read by number or by name, ``x[0]`` or
``x.value``; wherever a record is wanted, a tuple of parts will do, and a plain number x stands for (x, 0, ...).

A dtype of `number_dtype` carries an algebra's multiplication table, and its records compute: ``+ - *`` among each other
and with numbers, ``/`` by numbers, `conjugate`. Complex numbers of float32 or float64 are NumPy's (and Numba's) own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import numpy as np

from gemmkit.lang.number_rules import OF_ML_DTYPES

TABLE, SIGNS = "gemmkit.table", "gemmkit.conjugate"            # in a dtype's metadata
REAL_IMAG = "real", "imag"
_COMPLEX = {np.dtype(np.float32): np.dtype(np.complex64), np.dtype(np.float64): np.dtype(np.complex128)}


# -- dtypes -----------------------------------------------------------------------------------------------------------

@cache
def number_dtype(names: tuple[str, ...], part: np.dtype, table: Any, signs: tuple[int, ...]) -> np.dtype:
    """The dtype of an algebra's numbers: ``table[i][j][k]`` of e_k in e_i e_j, ``signs`` those of a conjugate's parts."""
    if names == REAL_IMAG and part in _COMPLEX:
        return cast(np.dtype, _COMPLEX[part])
    return np.dtype(np.dtype([(name, part) for name in names]), metadata={TABLE: table, SIGNS: signs})


def metadata_of(dtype: np.dtype) -> dict[str, Any]:
    return dict(dtype.metadata or {})


@cache
def part_dtypes(dtype: np.dtype) -> tuple[np.dtype, ...]:
    """The dtypes of a scalar's parts: of a complex number two, of a real one itself."""
    if dtype.names is not None:
        return tuple(dtype[name] for name in dtype.names)
    if dtype.kind == "c":
        return (np.dtype(f"f{dtype.itemsize // 2}"),) * 2
    return (dtype,)


@cache
def _part_classes(dtype: np.dtype) -> tuple[type, ...]:
    return tuple(part.type for part in part_dtypes(dtype))


def part_size(dtype: np.dtype) -> int:
    """Bytes of one part; an access is never narrower."""
    return part_dtypes(dtype)[0].itemsize if dtype.names is not None else dtype.itemsize


def device_dtype(dtype: Any) -> np.dtype:
    """The dtype of numbers that device code has; raises TypeError for another."""
    dtype = np.dtype(dtype)
    if dtype.names is not None:
        kinds = [device_dtype(kind) for kind in part_dtypes(dtype)]
        if len({kind.itemsize for kind in kinds}) != 1 or dtype.itemsize != sum(kind.itemsize for kind in kinds):
            raise TypeError(f"dtype {dtype} has no device type: the fields of a record must be packed numbers of one size")
        return dtype
    if dtype in OF_ML_DTYPES or (dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)):
        return dtype
    raise TypeError(f"dtype {dtype} has no device type; bool, integers, float8_e4m3fn, float8_e5m2, float16, bfloat16, "
                    "float32, float64, complex64 and complex128 have")


def record_text(dtype: np.dtype) -> str:
    """What tells one record dtype from another (NumPy's equality does not look at the table)."""
    metadata = metadata_of(dtype)
    return f"{[(name, dtype[name].name) for name in dtype.names or ()]}:{metadata.get(TABLE)}:{metadata.get(SIGNS)}"


# -- in Python --------------------------------------------------------------------------------------------------------

class Record:
    """A scalar of several parts."""

    __slots__ = ("dtype", "parts")

    def __init__(self, dtype: np.dtype, parts: Sequence[Any]):
        self.dtype, self.parts = dtype, tuple(parts)

    def __getitem__(self, n: int) -> Any:
        return self.parts[n]

    def __len__(self) -> int:
        return len(self.parts)

    def __getattr__(self, name: str) -> Any:
        names = self.dtype.names or ()
        if name not in names:
            raise AttributeError(f"a number of parts {', '.join(names)} has no {name!r}")
        return self.parts[names.index(name)]

    def __repr__(self) -> str:
        return "(" + ", ".join(f"{name}={part}" for name, part in zip(self.dtype.names or (), self.parts)) + ")"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Record, tuple)) and self.parts == tuple(other)

    def __hash__(self) -> int:
        return hash(self.parts)

    def __iter__(self) -> Any:
        return iter(self.parts)

    def __add__(self, other: Any) -> Any:
        return _combined(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _combined(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _combined(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _combined(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        if is_scalar(other):
            return like(self.dtype, [x * other for x in self.parts])
        return _product(self, other)

    def __rmul__(self, other: Any) -> Any:
        if is_scalar(other):
            return like(self.dtype, [other * x for x in self.parts])
        return _product(other, self)

    def __truediv__(self, other: Any) -> Any:
        return like(self.dtype, [x / other for x in self.parts]) if is_scalar(other) else NotImplemented

    def __neg__(self) -> Record:
        return Record(self.dtype, [-x for x in self.parts])


def is_scalar(x: Any) -> bool:
    return not isinstance(x, (Record, tuple, complex, np.complexfloating))


def parts(x: Any) -> tuple:
    """A scalar's parts; of a real one, itself."""
    if isinstance(x, (Record, tuple)):
        return tuple(x)
    if isinstance(x, (complex, np.complexfloating)):
        return x.real, x.imag
    return (x,)


def like(dtype: np.dtype, values: Sequence[Any]) -> Any:
    """Parts as a number of the same algebra, with the part type that they have."""
    metadata, names = metadata_of(dtype), dtype.names
    kind = np.result_type(*(np.asarray(v).dtype for v in values))
    if names is None or dtype[names[0]] != dtype[names[-1]]:
        return to_dtype(dtype, tuple(values))
    return to_dtype(number_dtype(names, kind, metadata.get(TABLE), metadata.get(SIGNS)), tuple(values))


def _combined(op: Any, a: Any, b: Any) -> Any:
    dtype = a.dtype if isinstance(a, Record) else b.dtype
    count = len(dtype.names or ())
    x, y = (parts(v) + (None,) * (count - len(parts(v))) for v in (a, b))
    return like(dtype, [p if q is None else (q if op is operator.add else -q) if p is None else op(p, q)
                        for p, q in zip(x, y)])


def _product(a: Any, b: Any) -> Any:
    dtype = a.dtype if isinstance(a, Record) else b.dtype
    table, x, y = metadata_of(dtype)[TABLE], parts(a), parts(b)
    out: list[Any] = [None] * len(x)
    for i, j, k, factor in terms(table):
        term = scaled(x[i] * y[j], factor)
        out[k] = term if out[k] is None else out[k] + term
    return like(dtype, [x[0] * y[0] * 0 if v is None else v for v in out])


def scaled(value: Any, factor: Any) -> Any:
    return value if factor == 1 else -value if factor == -1 else value * factor


@cache
def terms(table: Any) -> tuple[tuple[int, int, int, Any], ...]:
    """(i, j, k, factor) of every product that the table asks for."""
    return tuple((i, j, k, factor) for i, row in enumerate(table) for j, sums in enumerate(row)
                 for k, factor in enumerate(sums) if factor != 0)


def to_dtype(dtype: np.dtype, value: Any) -> Any:
    """A number, record or tuple of parts as a scalar of a record or complex dtype."""
    if isinstance(value, Record) and value.dtype is dtype:
        return value
    made = parts(value)
    if tuple(map(type, made)) != _part_classes(dtype):
        kinds, made = part_dtypes(dtype), made + (0,) * (len(part_dtypes(dtype)) - len(made))
        if len(made) != len(kinds):
            raise TypeError(f"{value!r} has {len(made)} parts, and {len(kinds)} are needed")
        with np.errstate(all="ignore"):
            made = tuple(v if type(v) is kind.type else np.asarray(v).astype(kind)[()] for kind, v in zip(kinds, made))
    return Record(dtype, made) if dtype.names is not None else dtype.type(complex(*map(float, made)))


def scalars(data: np.ndarray, dtype: np.dtype) -> tuple:
    """Bytes as scalars of a dtype."""
    values = data.view(dtype)
    if dtype.names is None:
        return tuple(values)
    return tuple(Record(dtype, row) for row in zip(*(values[name] for name in dtype.names)))
