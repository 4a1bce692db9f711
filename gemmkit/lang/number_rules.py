"""The rules of arithmetic: which kind of number each operator and function gives, on the device and in the emulator.

A **kind** is a NumPy dtype, or one of the weak kinds, which take the type of what they meet (NEP 50): a coordinate (an
integer of 32 bits, or of 64), a plain float (what Python computes as one: ``m / 2``, ``self.alpha``) or complex number
(``2j``, ``complex(m, n)``), a literal of the source, which is given as the Python number that it is.

>>> import numpy as np
>>> result("-", np.dtype("u1"), np.dtype("u1")), result("*", np.dtype("f4"), Weak.COORDINATE)
(dtype('uint8'), dtype('float32'))
>>> result("/", Weak.COORDINATE, 2)
Weak.FLOAT
>>> result("+", np.dtype("u1"), 300)
Traceback (most recent call last):
    ...
TypeError: 300 beside a uint8, which holds 0 to 255; convert one of them
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, cast

import ml_dtypes
import numpy as np


class Weak(enum.Enum):
    """The kinds that are no dtype."""

    COORDINATE = 32                     # 32 bits, signed
    LONG_COORDINATE = 64                # of operands with 2^31 elements or more
    FLOAT = "float"
    COMPLEX = "complex"

    __hash__ = object.__hash__          # an enumeration's own is Python code, and `result` is asked for every element

    def __repr__(self) -> str:
        return str(self)


Kind = Any                              # a dtype, a Weak, an int or a float

BOOL, INT8, INT32, INT64 = (np.dtype(x) for x in ("?", "i1", "i4", "i8"))
FLOAT32, FLOAT64 = np.dtype("f4"), np.dtype("f8")
COMPLEX64, COMPLEX128 = np.dtype("c8"), np.dtype("c16")
OF_ML_DTYPES = tuple(np.dtype(x) for x in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))

ARITHMETIC = ("+", "-", "*", "/", "//", "%", "**")
BITWISE = ("&", "|", "^", "<<", ">>")
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
EXTREMA = ("max", "min")
UNARY = ("neg", "pos", "invert", "abs")
CONVERSIONS = ("int", "float", "bool", "round")

MATH_OF_ONE = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "degrees", "erf", "erfc", "exp", "expm1",
               "fabs", "gamma", "lgamma", "log", "log10", "log1p", "log2", "radians", "sin", "sinh", "sqrt", "tan", "tanh")
MATH_OF_TWO = ("atan2", "copysign", "fmod", "hypot", "pow")
MATH_TO_WHOLE = ("ceil", "floor", "trunc")
MATH_TESTS = ("isfinite", "isinf", "isnan")
CMATH = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "exp", "log", "log10", "phase", "sin", "sinh",
         "sqrt", "tan", "tanh")


def is_weak(kind: Kind) -> bool:
    return not isinstance(kind, np.dtype)


def is_complex(kind: Kind) -> bool:
    return kind is Weak.COMPLEX or (isinstance(kind, np.dtype) and kind.kind == "c")


def is_float(kind: Kind) -> bool:
    if isinstance(kind, np.dtype):
        return not is_integer(kind) and kind != BOOL and kind.kind != "c"
    return kind is Weak.FLOAT or isinstance(kind, float)


def is_integer(kind: Kind) -> bool:
    """Of the dtypes, those of integers alone; coordinates and literal integers."""
    if isinstance(kind, np.dtype):
        return kind.kind in "iu" and kind not in OF_ML_DTYPES
    return isinstance(kind, int) or kind in (Weak.COORDINATE, Weak.LONG_COORDINATE)


def is_coordinate(kind: Kind) -> bool:
    return kind is Weak.COORDINATE or kind is Weak.LONG_COORDINATE


# -- two numbers ------------------------------------------------------------------------------------------------------

@lru_cache(maxsize=None, typed=True)
def result(op: str, a: Kind, b: Kind) -> Kind:
    """The kind of ``a op b`` for an operator (``"+"``), ``"max"`` or ``"min"``; raises TypeError for what is refused.

    Two literals are Python's own affair: their result is a literal.
    """
    if is_complex(a) or is_complex(b):
        return _of_complex(op, a, b)
    if op in COMPARISONS:
        return BOOL
    if op in BITWISE and (is_float(a) or is_float(b)):
        raise TypeError(f"{op} of a float")
    if op == "/":
        return _quotient(a, b)
    if op == "**":
        _check_power(a, b)
    kind = common(a, b)
    if kind == FLOAT64 and op in BITWISE:
        raise TypeError(f"{op} of a uint64 and a signed integer, which no integer type holds; convert one of them")
    if kind == BOOL:
        if op == "-":
            raise TypeError("- of two booleans; use ^")
        if op in ("//", "%", "**", "<<", ">>"):
            return INT8
    return kind


def _of_complex(op: str, a: Kind, b: Kind) -> Kind:
    if op in ("==", "!="):
        return BOOL
    if op not in ("+", "-", "*", "/", "**"):
        raise TypeError(f"{op} of a complex number; use its real, its imag or its abs")
    return common(a, b)


def common(a: Kind, b: Kind) -> Kind:
    """The kind that two numbers are converted to before they are computed with."""
    if is_weak(a):
        return _both_weak(a, b) if is_weak(b) else _beside(b, a)
    return _beside(a, b) if is_weak(b) else _promoted(a, b)


def _promoted(a: Any, b: Any) -> np.dtype:
    try:
        return np.result_type(a, b)
    except TypeError:                   # what ml_dtypes does not know is computed as NumPy computes with float32
        wide = [FLOAT32 if x in OF_ML_DTYPES or x == np.float16 else x for x in (a, b)]
        return np.result_type(*wide)


def _both_weak(a: Kind, b: Kind) -> Kind:
    if is_complex(a) or is_complex(b):
        return Weak.COMPLEX
    if is_float(a) or is_float(b):
        return Weak.FLOAT
    kind = Weak.LONG_COORDINATE if Weak.LONG_COORDINATE in (a, b) else Weak.COORDINATE
    for literal in (a, b):
        if isinstance(literal, int) and not -1 << kind.value - 1 <= literal < 1 << kind.value - 1:
            raise TypeError(f"{literal} beside a coordinate of {kind.value} bits; convert the coordinate, as in np.uint32(m)"
                            )
    return kind


def _beside(strong: Any, weak: Kind) -> Kind:
    """A weak number's kind beside a NumPy scalar."""
    if is_complex(weak):
        return strong if is_complex(strong) else of_parts(strong)
    if is_float(weak):
        if strong in OF_ML_DTYPES:
            return FLOAT32              # as ml_dtypes has it
        return strong if is_float(strong) or strong.kind == "c" else FLOAT64
    if is_float(strong) or strong.kind == "c":
        return strong
    if is_coordinate(weak):
        return strong if strong.itemsize * 8 >= weak.value else weak
    if strong == BOOL:
        return INT64
    check_literal(strong, weak)
    return strong


def check_literal(dtype: np.dtype, value: Any) -> None:
    """Raise TypeError unless an integer type holds a literal."""
    limits = np.iinfo(dtype)
    if not limits.min <= value <= limits.max:
        raise TypeError(f"{value} beside a {dtype}, which holds {limits.min} to {limits.max}; convert one of them")


def _quotient(a: Kind, b: Kind) -> Kind:
    if is_weak(a) and is_weak(b):
        return Weak.FLOAT
    strong, other = (b, a) if is_weak(a) else (a, b)
    if is_float(strong) or is_float(other) or strong.kind == "c":
        return common(a, b)
    return FLOAT64


def _check_power(a: Kind, b: Kind) -> None:
    if is_float(a) or is_float(b):
        return
    if isinstance(b, int):
        if b < 0:
            raise TypeError(f"an integer to the power {b}; write a float, as in 2.0 ** n")
    elif is_coordinate(common(a, b)):
        raise TypeError("a coordinate as exponent, or to a run-time integer's power; convert it, as in np.int32(m) ** n")


# -- one number -------------------------------------------------------------------------------------------------------

def unary(op: str, a: Kind) -> Kind:
    """The kind of ``-a`` ("neg"), ``+a`` ("pos"), ``~a`` ("invert") or ``abs(a)``."""
    if a == BOOL and op in ("neg", "pos"):
        raise TypeError(f"{'-' if op == 'neg' else '+'} of a boolean; use ~, or convert it")
    if op == "invert" and is_float(a):
        raise TypeError("~ of a float")
    return a


def converted(name: str, a: Kind) -> Kind:
    """The kind of ``int(a)``, ``float(a)``, ``bool(a)`` or ``round(a)``: coordinates and literals stay what they are, else
    int64 and float64."""
    if name == "bool":
        return BOOL
    if name == "float":
        return FLOAT64
    if is_complex(a):
        raise TypeError(f"{name} of a complex number; use its real, its imag or its abs")
    if name == "round" and a == BOOL:
        raise TypeError("round of a boolean")
    if is_integer(a) and (is_weak(a) or name == "round"):
        return a
    return INT64


def of_math(name: str, *kinds: Kind) -> Kind:
    """The kind of ``math.name``: float32 of narrow floats and float32, float64 of float64 and NumPy's integers and booleans;
    weak numbers alone give a plain float. What rounds to a whole number leaves integers as they are."""
    if any(map(is_complex, kinds)):
        raise TypeError(f"math.{name} of a complex number; use its real, its imag or its abs, or cmath")
    if name in MATH_TESTS:
        return BOOL
    if name in MATH_TO_WHOLE and is_integer(kinds[0]):
        return kinds[0]
    strong = [kind for kind in kinds if not is_weak(kind)]
    if not strong:
        return Weak.FLOAT
    return FLOAT32 if all(is_float(kind) and kind != FLOAT64 for kind in strong) else FLOAT64


def of_parts(*kinds: Kind) -> Kind:
    """The kind of ``complex(x, y)``, of ``complex(x)`` and of a real number beside ``2j``: the parts are what `math` gives
    of them, so complex64 of float32 and narrower, complex128 of float64 and integers, a plain one of plain numbers."""
    if len(kinds) == 1 and is_complex(kinds[0]):
        return kinds[0]
    if any(map(is_complex, kinds)):
        raise TypeError("complex(x, y) of a complex number; write x + 1j * y")
    part = of_math("fabs", *kinds)
    return Weak.COMPLEX if part is Weak.FLOAT else COMPLEX64 if part == FLOAT32 else COMPLEX128


def of_cmath(name: str, kind: Kind) -> Kind:
    """The kind of ``cmath.name``: that of ``complex(x)``, and of the angle its parts'."""
    made = of_parts(kind)
    if name != "phase":
        return made
    return Weak.FLOAT if made is Weak.COMPLEX else FLOAT32 if made == COMPLEX64 else FLOAT64


def of_range(*kinds: Kind) -> Kind:
    """The kind of the variable of ``range``: a coordinate, unless a NumPy integer says otherwise."""
    for kind in kinds:
        if not is_integer(kind):
            raise TypeError(f"range of {kind}; it takes integers, as in range(int(x))")
    strong = [kind for kind in kinds if not is_weak(kind)]
    if not strong:
        return Weak.LONG_COORDINATE if Weak.LONG_COORDINATE in kinds else Weak.COORDINATE
    return INT32 if all(np.can_cast(kind, INT32) for kind in strong) else INT64


# -- what is computed -------------------------------------------------------------------------------------------------

_ARRAY = {"acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atan2": "arctan2",
          "atanh": "arctanh", "pow": "power"}


def _without_errors(function: Callable[[float], float], pole: float) -> Callable[[Any], Any]:
    def f(x: Any) -> Any:
        try:
            return function(float(x))
        except OverflowError:
            return math.inf
        except ValueError:                                      # a pole, or minus infinity
            return pole

    return f


_gamma = _without_errors(math.gamma, math.nan)
_OWN: dict[str, Any] = {"erf": math.erf, "erfc": math.erfc, "lgamma": _without_errors(math.lgamma, math.inf),
                        "pow": operator.pow,             # np.power is sqrt for 0.5: NaN of -inf
                        "gamma": lambda x: math.copysign(math.inf, x) if x == 0 else _gamma(x)}


def computed(name: str) -> Callable[..., Any]:
    """A function of `math` or `cmath` on NumPy's float64 or complex128, with infinities and NaN where Python raises."""
    made: Any = _OWN.get(name) or getattr(np, _ARRAY.get(name, name))
    return made


# -- how exact it is --------------------------------------------------------------------------------------------------

#: How far the device's result of one operation may be from NumPy's, in units of the last place of the result: what NVIDIA
#: states for the device's (float32, float64; of two numbers the larger), and one more where NumPy's own is not rounded
#: correctly. Integers, conversions, +, -, *, /, sqrt, fmod, % and what rounds to a whole number are equal to the bit.
ULPS = {
    "**": (9, 3), "acos": (3, 3), "acosh": (5, 4), "asin": (3, 3), "asinh": (4, 4), "atan": (3, 3), "atan2": (4, 3),
    "atanh": (4, 3), "cos": (3, 3), "cosh": (3, 3), "degrees": (2, 2), "erf": (3, 3), "erfc": (5, 6), "exp": (3, 2),
    "expm1": (3, 2), "gamma": (6, 11), "hypot": (4, 3), "lgamma": (7, 5), "log": (2, 2), "log10": (3, 3), "log1p": (2, 2),
    "log2": (3, 3), "pow": (9, 3), "radians": (2, 2), "sin": (3, 3), "sinh": (4, 3), "tan": (5, 3), "tanh": (3, 3),
}


# --------------------------------------------------------------------------------------------------
# Records: scalars of several parts, such as a dual number or a (value, index) pair.
#
# Their dtype is a NumPy structured dtype whose fields are parts of one size. In device code a record is a struct that
# lives in registers; in Python, and so in the emulator, it is a `Record`. Parts are read by number or by name, ``x[0]``
# or ``x.value``; wherever a record is wanted, a tuple of parts will do, and a plain number x stands for (x, 0, ...).
#
# A dtype of `number_dtype` carries an algebra's multiplication table, and its records compute: ``+ - *`` among each other
# and with numbers, ``/`` by numbers, `conjugate`. Complex numbers of float32 or float64 are NumPy's (and Numba's) own.

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
                    "float32, float64, complex64 and complex128 have"
                    + (" (NumPy counts bytes: 'f2' is float16, and 'f16' float128)" if dtype == np.longdouble else ""))


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


def is_of_one_type(values: tuple) -> bool:
    """Whether all are NumPy's numbers of one type, which an array of them keeps."""
    kinds = {*map(type, values)}
    return len(kinds) == 1 and issubclass(kinds.pop(), np.generic)


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
