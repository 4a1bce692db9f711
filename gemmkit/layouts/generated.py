"""Matrices that are nowhere in memory: a function of the row and the column."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from gemmkit.lang.atoms import atom
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.dtypes import DTypeType
from gemmkit.lang.given import function_given, required
from gemmkit.lang.numba_hooks import TypingError, signature, types
from gemmkit.lang.returned import told
from gemmkit.lang.scalars import IndexType, WeakFloat64Type, WeakFloatLiteral, WeakIntLiteral
from gemmkit.layouts.base import Layout
from gemmkit.runtime.arrays import is_array

MOST = 4                               # run-time arguments


@dataclass(frozen=True)
class Generated(Layout):
    """The matrix of ``f(i, j)``, or of ``f(i, j, first, second, ...)`` with up to four run-time arguments. One argument more
    is the number of the product in a stack.

    Arguments are arrays, NumPy scalars or Python numbers (taken in the layout's dtype if they are floats, else as int32);
    another value compiles nothing. Arrays and NumPy scalars that ``f`` captured are run-time arguments too. ``f`` returns
    the declared dtype, or a number as Python itself has it (a coordinate, a literal, what `math` makes of them: int64 and
    float64); any other dtype raises, so that nothing is narrowed silently. The operand's own array is not read; any array
    will do.

    >>> import numpy as np, gemmkit as gk
    >>> hilbert = Generated("float32", lambda i, j: np.float32(1) / (i + j + 1))
    >>> with gk.emulate():
    ...     b = np.float32([[12], [12]])
    ...     gk.matmul(b, b, global_a_layout=hilbert, gemm_shape=dict(M=2, N=1, K=2)).tolist()
    [[18.0], [10.0]]
    """

    f: Any
    first: Any = None
    second: Any = None
    third: Any = None
    fourth: Any = None
    transposed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [getattr(self, name) for name in _NAMES]
        if any(x is None and y is not None for x, y in pairwise(given)):
            raise TypeError("Generated: an argument is None and one after it is not; leave none out")
        for name, value in zip(_NAMES, given):
            object.__setattr__(self, name, _argument(value, name, self.dtype))
        count = 2 + sum(value is not None for value in given)
        wanted = f"a function of {count} arguments, i, j and those given,"
        object.__setattr__(self, "f", function_given(self.f, "Generated", "f", (count, count + 1), wanted))

    @property
    def count(self) -> int:
        """How many run-time arguments there are."""
        return sum(getattr(self, name) is not None for name in _NAMES)

    @property
    def with_batch(self) -> bool:
        """Whether f wants the number of the product, too."""
        return required(self.f) == self.count + 3

    @property
    def caller(self) -> Any:
        """How f is called with as many arguments as there are."""
        return (_BATCH_CALLERS if self.with_batch else _CALLERS)[self.count]

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        i, j = (j, i) if self.transposed else (i, j)
        if self.with_batch:
            return declared(self.dtype, self.caller(self, i, j, shape.batch), self.f)
        return declared(self.dtype, self.caller(self, i, j), self.f)


_NAMES = ("first", "second", "third", "fourth")


def _argument(value: Any, name: str, dtype: np.dtype) -> Any:
    if value is None or is_array(value) or isinstance(value, np.generic):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and -2**31 <= value < 2**31:
        return np.int32(value)
    if isinstance(value, float) and dtype.names is None and (dtype.kind not in "iu" or math.isnan(value)):
        return dtype.type(value)
    raise TypeError(f"Generated({name}={value!r}): an array, a NumPy scalar or a number is needed")


# -- device code ------------------------------------------------------------------------------------------------------

def _call0(layout: Any, i: int, j: int) -> Any:
    return layout.f(i, j)


def _call1(layout: Any, i: int, j: int) -> Any:
    return layout.f(i, j, layout.first)


def _call2(layout: Any, i: int, j: int) -> Any:
    return layout.f(i, j, layout.first, layout.second)


def _call3(layout: Any, i: int, j: int) -> Any:
    return layout.f(i, j, layout.first, layout.second, layout.third)


def _call4(layout: Any, i: int, j: int) -> Any:
    return layout.f(i, j, layout.first, layout.second, layout.third, layout.fourth)


_CALLERS = (_call0, _call1, _call2, _call3, _call4)


def _batch0(layout: Any, i: int, j: int, batch: int) -> Any:
    return layout.f(i, j, batch)


def _batch1(layout: Any, i: int, j: int, batch: int) -> Any:
    return layout.f(i, j, layout.first, batch)


def _batch2(layout: Any, i: int, j: int, batch: int) -> Any:
    return layout.f(i, j, layout.first, layout.second, batch)


def _batch3(layout: Any, i: int, j: int, batch: int) -> Any:
    return layout.f(i, j, layout.first, layout.second, layout.third, batch)


def _batch4(layout: Any, i: int, j: int, batch: int) -> Any:
    return layout.f(i, j, layout.first, layout.second, layout.third, layout.fourth, batch)


_BATCH_CALLERS = (_batch0, _batch1, _batch2, _batch3, _batch4)


def _type_declared(context: Any, dtype: Any, value: Any, f: Any) -> Any:
    if not isinstance(dtype, DTypeType):
        return None
    given, target = types.unliteral(value), dtype.target
    is_integer = given == types.int64 or isinstance(value, (IndexType, WeakIntLiteral))
    is_float = given == types.float64 or isinstance(value, (WeakFloatLiteral, WeakFloat64Type))
    if given != target and not is_integer and not (is_float and not isinstance(target, types.Integer)):
        raise TypingError(_mismatch(f.function, value, target))
    return signature(target, dtype, value, f), lambda c, b, s, v: c.cast(b, v[1], value, target)


@atom(_type_declared)
def declared(dtype: np.dtype, value: Any, f: Any) -> Any:
    """A value that ``f`` returned, which must be of the dtype already or a number as Python has it."""
    if type(value) is dtype.type:
        return value
    is_integer = isinstance(value, (int, np.int64)) and not isinstance(value, bool)
    if not is_integer and not (isinstance(value, float) and dtype.kind not in "iu"):         # np.float64 is a float, too
        is_number = isinstance(value, (np.generic, bool, complex))
        raise TypeError(_mismatch(f, np.asarray(value).dtype if is_number else told(value), dtype))
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(dtype)[()]


def _mismatch(f: Any, got: Any, wanted: Any) -> str:
    code = getattr(f, "function", f).__code__
    return (f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name} ({code.co_filename}, line "
            f"{code.co_firstlineno}) returns {got}, and its Generated layout declares dtype {wanted}; convert what it "
            f"returns{f', or declare {got}' if isinstance(got, np.dtype) else ''}")


__all__ = ["Generated"]
