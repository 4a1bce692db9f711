"""Semirings: products in which other operations stand for addition and multiplication.

``D_ij = C_ij + A_i0 * B_0j + A_i1 * B_1j + ...`` with ``+`` and ``*`` two plain Python functions, on the ordinary units. The
shipped ones:

| | + | * | zero | solves |
|---|---|---|---|---|
| `MIN_PLUS` | min | + | infinity | shortest paths |
| `MAX_PLUS` | max | + | -infinity | longest paths, schedules, Viterbi in logarithms |
| `MAX_TIMES` | max | * | 0 | most probable paths (of numbers >= 0: with others it is no semiring) |
| `LOG_SUM_EXP` | log(e^x + e^y) | + | -infinity | sums of probabilities that are kept as logarithms |
| `OR_AND` | or | and | 0 | reachability: of booleans, or of every bit of integers at once |

**Integers have no infinity**: the largest number of the accumulator's type stands for it (the smallest for -infinity), in
A and B as in D: what it is added to stays it. Sums of other numbers wrap when they overflow, as integers do. The accumulator
holds what the result is asked to hold, so that of int8 into int32 no number of A or B is infinite.

**NaN**: ``min`` and ``max`` pass it on, as everywhere in device code: what meets a NaN becomes NaN. (From compute capability
8.0 on that costs nothing, but for float64.)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from functools import cached_property
from types import FunctionType
from typing import Any

import numpy as np

from gemmkit.lang.checks import required
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric
from gemmkit.operators.fpu import FPUOp

LOG_2 = math.log(2.0)
_NONE = 0                              # M of a semiring whose shape is still to be chosen


@dataclass(frozen=True, init=False, repr=False)
class Semiring(FPUOp):
    """``add`` and ``mul`` in the place of + and *, by the fragments and shapes of `FPUOp`.

    Args:
        add, mul: Python functions of two scalars of the accumulator's dtype (``min`` and ``max`` themselves will do).
        zero: the neutral element of ``add``, which ``mul`` must keep. Operands have this value beyond their edges, and an
            empty sum is this value. An infinite zero stands for the extreme number of an integer dtype.
        M, N, K, MB, NB, dtype, b_dtype, accumulator: as for `FPUOp`. Without M, gemmkit chooses shape and dtypes for the
            sizes and dtypes of the arrays.
        sample: numbers on which gemmkit tests the laws: ``add(zero, x) == x`` and ``add(x, mul(zero, y)) == x``. By default
            some are negative. ``sample=(1, 2, 3)`` states that operands have no negative numbers; results for others are
            undefined.

    Raises ValueError when the laws do not hold on the sample, TypeError for what is no Python function.

    >>> import math, numpy as np, gemmkit
    >>> widest = Semiring(max, min, -math.inf)    # the path with the widest narrowest edge
    >>> roads = np.array([[9, 3, 0], [3, 9, 5], [0, 5, 9]], np.float32)
    >>> with gemmkit.emulate():
    ...     gemmkit.matmul(roads, roads, operator=widest).tolist()
    [[9.0, 3.0, 3.0], [3.0, 9.0, 5.0], [3.0, 5.0, 9.0]]
    """

    add: Any = None
    mul: Any = None
    zero: Any = None
    sample: Any = None

    merges = True                                          # add is associative, and zero its neutral element

    def __init__(self, add: Callable[[Any, Any], Any], mul: Callable[[Any, Any], Any], zero: Numeric, *,
                 M: int | None = None, N: int | None = None, K: int = 1, MB: int = 4, NB: int = 8, dtype: Any = None,
                 accumulator: Any = None, b_dtype: Any = None, sample: Iterable[Any] | None = None):
        if not isinstance(zero, (bool, int, float, np.bool_, np.integer, np.floating)):
            raise TypeError(f"Semiring(zero={zero!r}): a number is needed")
        given = _sample_for(zero) if sample is None else sample
        sample = tuple(given) if isinstance(given, Iterable) and not isinstance(given, type) else (None,)
        if not all(isinstance(x, (int, float, complex, np.bool_, np.number)) for x in sample):
            raise TypeError(f"Semiring(sample={given!r}): a tuple of numbers is needed")
        fields = dict(add=_function(add, "add"), mul=_function(mul, "mul"), zero=zero, sample=sample, M=M or _NONE,
                      N=N or _NONE, K=K, MB=MB, NB=NB, dtype=dtype, accumulator=accumulator, b_dtype=b_dtype)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        _check_laws(self.add, self.mul, zero, sample)
        if self.is_sized:
            if dtype is None:
                object.__setattr__(self, "dtype", np.dtype(np.float32))
            self.__post_init__()

    def __repr__(self) -> str:
        parts = [self.add.__name__, self.mul.__name__, repr(self.zero)]
        parts += [f"{name}={getattr(self, name)}" for name in ("M", "N", "K", "MB", "NB", "dtype") if self.is_sized]
        return f"Semiring({', '.join(parts)})"

    @cached_property
    def is_sized(self) -> bool:
        return self.M != _NONE

    def sized(self, shape: dict[str, int], a: np.dtype, b: np.dtype, accumulator: np.dtype) -> Semiring:
        """This semiring with a shape, and with dtypes if it has none. Operands whose dtype has no number for an infinite
        zero are read in the accumulator's dtype."""
        made = dataclasses.replace(self, **shape, dtype=self.dtype or a, b_dtype=self.b_dtype or b,
                                   accumulator=self.accumulator or accumulator)
        dtypes = made.dtype, made.b_dtype
        if not math.isinf(made.zero) or any(x.kind not in "iub" for x in dtypes) or {*dtypes} == {made.accumulator}:
            return made
        return dataclasses.replace(made, **{name: made.accumulator for name in ("dtype", "b_dtype")
                                            if getattr(self, name) is None})

    @cached_property
    def identity(self) -> Any:
        """``zero`` as a number of the accumulator's type."""
        if self.accumulator is None or self.accumulator.kind not in "iu" or not math.isinf(self.zero):
            return self.zero
        limits = np.iinfo(self.accumulator)
        return int(limits.max if self.zero > 0 else limits.min)

    @cached_property
    def start(self) -> Any:
        return self.identity

    @cached_property
    def is_absorbing(self) -> bool:
        """Whether ``zero`` is a stand-in, which ``mul`` would not keep by itself."""
        return bool(self.identity != self.zero)

    @cached_property
    def is_light(self) -> bool:
        """Whether it is known to need few registers, so that blocks may share a multiprocessor."""
        return (self.add in (minimum, maximum, either) and self.mul in (plus, times, both)
                and min(self.dtype.itemsize, self.b_dtype.itemsize) >= 4)

    @cached_property
    def is_elementwise(self) -> bool:
        """Whether the emulator may call it with arrays: by gemmkit's functions, in which nothing branches."""
        return not self.is_absorbing and {self.add.__code__, self.mul.__code__} <= _ELEMENTWISE

    def multiply(self, a: Numeric, b: Numeric) -> Any:
        if self.is_absorbing:
            zero = self.accumulator.type(self.identity)
            return zero if a == zero or b == zero else self.accumulator.type(self.mul(a, b))
        return self.accumulator.type(self.mul(a, b))

    def combine(self, c: Numeric, product: Numeric) -> Any:
        return self.add(c, product)


# -- what is asked of the functions -----------------------------------------------------------------------------------

def _function(given: Any, name: str) -> FunctionType:
    known: FunctionType | None = next((function for builtin, function in _BUILTINS.items() if builtin is given), None)
    if known is not None:
        return known
    if not isinstance(given, FunctionType) or required(given) != 2:
        raise TypeError(f"Semiring({name}={given!r}): a Python function of two numbers is needed, for example "
                        "lambda x, y: x + y")
    return given


def _sample_for(zero: Numeric) -> tuple[Any, ...]:
    if isinstance(zero, (bool, np.bool_)):
        return False, True
    return (1, 2, 3, -1, -2) if isinstance(zero, (int, np.integer)) else (0.25, 0.5, 0.75, -0.25, -2.0)


def _is_number(x: Numeric) -> bool:
    return isinstance(x, (bool, int, float, np.bool_, np.integer, np.floating))


def _check_laws(add: Callable[..., Any], mul: Callable[..., Any], zero: Numeric, sample: tuple[Any, ...]) -> None:
    for x, y in itertools.product(sample, (zero, *sample)):
        if not _is_number(mul(zero, y)):
            raise ValueError(f"Semiring(mul={mul.__name__}): mul(zero, {y!r}) is {mul(zero, y)!r}; a number is needed")
        for text, found in (("add(zero, x)", add(zero, x)), ("add(x, zero)", add(x, zero)),
                            (f"add(x, mul(zero, {y!r}))", add(x, mul(zero, y)))):
            if not _is_number(found):
                raise ValueError(f"Semiring({add.__name__}, {mul.__name__}): {text} is {found!r} for x={x!r}; add and mul "
                                 "must return numbers")
            if found != x:
                raise ValueError(f"Semiring({add.__name__}, {mul.__name__}, zero={zero!r}): {text} is {found!r} for x={x!r} "
                                 "and must be x: elements beyond an operand's edge count as zero (-math.inf for max, "
                                 "math.inf for min; if only some numbers occur, give sample=; a distance is a subclass of "
                                 "FPUOp)")


def selects(semiring: Semiring) -> bool:
    """Whether ``add`` returns one of its arguments, as far as a sample shows."""
    return all(semiring.add(x, y) in (x, y) for x in semiring.sample for y in semiring.sample)


def minimum(x: Numeric, y: Numeric) -> Any:
    return min(x, y)


def maximum(x: Numeric, y: Numeric) -> Any:
    return max(x, y)


def plus(x: Numeric, y: Numeric) -> Any:
    return x + y


def times(x: Numeric, y: Numeric) -> Any:
    return x * y


def either(x: Any, y: Any) -> Any:
    return x | y


def both(x: Any, y: Any) -> Any:
    return x & y


_ELEMENTWISE = {function.__code__ for function in (minimum, maximum, plus, times, either, both)}


def log_sum(x: Numeric, y: Numeric) -> Any:
    """log(e^x + e^y) without overflow; right for infinities too."""
    if x == y:
        return x + LOG_2
    return max(x, y) + math.log1p(math.exp(-abs(x - y)))


_BUILTINS: dict[Any, Any] = {min: minimum, max: maximum}

MIN_PLUS = Semiring(minimum, plus, math.inf)
MAX_PLUS = Semiring(maximum, plus, -math.inf)
MAX_TIMES = Semiring(maximum, times, 0.0, sample=(0.25, 0.5, 0.75))
LOG_SUM_EXP = Semiring(log_sum, plus, -math.inf)
OR_AND = Semiring(either, both, 0)
