"""Products in other number systems: dual numbers, which carry derivatives, and semirings that say which k decided.

>>> import numpy as np, gemmkit as gk
>>> x = gk.functions.Dual.seed(np.float64([0.5, 2.0]))                     # the derivatives by x_0 and by x_1
>>> y = np.exp(x) * x
>>> y.value.round(4).tolist(), y.tangents.round(4).tolist()      # (x + 1) e^x
([0.8244, 14.7781], [[2.4731, 0.0], [0.0, 22.1672]])

Products of dual numbers are gemmkit's: ``a @ b`` multiplies values and tangents in one kernel, ``1 + 2p`` real products
for p tangents. ``gk.matmul`` and ``gk.blas.gemmEx`` take dual arrays as they take real ones. A PyTorch tensor on the left
does not know them: ``gk.matmul(tensor, dual)`` is what ``tensor @ dual`` would be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from gemmkit.components import Array
from gemmkit.epilogues import Epilogue
from gemmkit.functions.matmul import matmul
from gemmkit.kernels.config import names_keywords
from gemmkit.lang.components import dataclass
from gemmkit.layouts.matrices import Matrix, plain_layout
from gemmkit.operators import FPUOp
from gemmkit.operators.algebra import MIN_PLUS, MOST_TANGENTS, Semiring, dual, selects
from gemmkit.plans.problem import HOST, check_places
from gemmkit.runtime.arrays import ArrayInfo, describe, empty_like
from gemmkit.runtime.device import target
from gemmkit.transforms import Transform
from gemmkit.tuning.operators import fpu_shape


class Dual(Matrix):
    """An array of dual numbers.

    ``parts`` is a real array of shape (..., 1 + p) of any library: values, then p tangents, in a last axis. Dual uses it
    without a copy. ``value`` has shape (...), ``tangents`` shape (..., p); both are views.

    Raises ValueError for an array without a last axis of 2 or more, TypeError for one that is not of floats.
    """

    __array_priority__ = 1000.0                # NumPy's operators leave theirs to ours

    def __init__(self, parts: Any):
        info = describe(parts, "parts")
        if not info.shape or info.shape[-1] < 2:
            raise ValueError(f"parts has shape {info.shape}; a last axis of 1 + p is needed: a value and p tangents")
        _floats(parts, "parts")
        self.parts = parts
        self.shape: Any = tuple(info.shape[:-1])
        self.count = info.shape[-1] - 1

    # -- making them ------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, value: Any, tangents: Any) -> Dual:
        """From values of shape (...) and tangents of shape (..., p) or, for one tangent, (...)."""
        dtype = _floats(value, "value")
        (shape, given), (*_, kind) = zip(*((info.shape, info.dtype) for info in _described(value=value, tangents=tangents)))
        if kind.kind not in "biuf":
            raise TypeError(f"tangents has dtype {kind}; real numbers are needed")
        is_one = given == shape
        given = (*shape, 1) if is_one else given
        if given[:-1] != shape:
            raise ValueError(f"tangents has shape {given}, and value {shape}; {shape} or {(*shape, 'p')} is needed")
        if given[-1] < 1:
            raise ValueError(f"tangents has shape {given}; one tangent or more is needed")
        parts = empty_like(value, (*shape, 1 + given[-1]), dtype)
        _put(parts, 0, value, "value")
        _put(parts, 1 if is_one else slice(1, None), tangents, "tangents")
        return cls(parts)

    @classmethod
    def constant(cls, value: Any, count: int = 1) -> Dual:
        """Numbers that depend on nothing: all tangents are zero."""
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_TANGENTS:
            raise ValueError(f"count={count!r}: a number of tangents from 1 to {MOST_TANGENTS} is needed")
        return cls._constant(value, count, "value")

    @classmethod
    def _constant(cls, value: Any, count: int, name: str) -> Dual:
        """`constant`, of an argument called ``name``."""
        dtype = _floats(value, name)
        parts = empty_like(value, (*describe(value, name).shape, 1 + count), dtype)
        parts[..., 0] = value
        parts[..., 1:] = 0
        return cls(parts)

    @classmethod
    def seed(cls, value: Any) -> Dual:
        """Independent variables: as many tangents as elements, of which each has its own."""
        size = math.prod(describe(value, "value").shape)
        if not 1 <= size <= MOST_TANGENTS:
            raise ValueError(f"value has {size} elements, each of which would have a tangent; 1 to {MOST_TANGENTS} are "
                             "needed")
        out = cls.constant(value, size)
        flat = out.parts.reshape(size, 1 + size)
        for n in range(size):
            flat[n, 1 + n] = 1
        return out

    # -- reading them -----------------------------------------------------------------------------------------------

    @property
    def value(self) -> Any:
        return self.parts[..., 0]

    @property
    def tangents(self) -> Any:
        return self.parts[..., 1:]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the parts."""
        return describe(self.parts, "parts").dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def T(self) -> Dual:
        if self.ndim != 2:
            raise ValueError(f"a dual array of shape {self.shape} has no transpose; a matrix has")
        return Dual(self.parts.swapaxes(0, 1))

    def __getitem__(self, key: Any) -> Dual:
        key = key if isinstance(key, tuple) else (key,)
        return Dual(self.parts[(*key, slice(None))] if any(k is Ellipsis for k in key) else self.parts[key])

    def __repr__(self) -> str:
        return f"Dual(value={self.value!r}, tangents={self.tangents!r})"

    # -- arithmetic -------------------------------------------------------------------------------------------------

    def _with(self, value: Any, tangents: Any) -> Dual:
        return Dual.of(value, tangents)

    def _other(self, other: Any) -> Dual | None:
        """The other operand where it is dual too; None for real numbers and arrays. Raises TypeError for anything else."""
        if not isinstance(other, (Dual, int, float, np.integer, np.floating)):
            info = describe(other, "the number or array beside a dual array")
            if info.dtype.kind not in "biuf" and info.dtype.name != "bfloat16":
                raise TypeError(f"an array of dtype {info.dtype} is combined with a dual array; real numbers are needed")
            try:
                np.broadcast_shapes(info.shape, self.shape)
            except ValueError:
                raise ValueError(f"an array of shape {info.shape} and a dual array of shape {self.shape} cannot be "
                                 "broadcast together") from None
        if isinstance(other, Dual):
            try:
                np.broadcast_shapes(other.shape, self.shape)
            except ValueError:
                raise ValueError(f"dual arrays of shapes {self.shape} and {other.shape} cannot be broadcast "
                                 "together") from None
        if isinstance(other, Dual) and other.count != self.count:
            raise ValueError(f"dual numbers with {self.count} and {other.count} tangents cannot be combined")
        return other if isinstance(other, Dual) else None

    def __add__(self, other: Any) -> Dual:
        dual_other = self._other(other)
        if dual_other is None:
            value = self.value + other
            return self._with(value, _spread(self.tangents, value))
        value = self.value + dual_other.value
        return self._with(value, _spread(self.tangents + dual_other.tangents, value))

    __radd__ = __add__

    def __neg__(self) -> Dual:
        return Dual(-self.parts)

    def __sub__(self, other: Any) -> Dual:
        self._other(other)
        return self.__add__(-other)

    def __rsub__(self, other: Any) -> Dual:
        return (-self).__add__(other)

    def __mul__(self, other: Any) -> Dual:
        dual_other = self._other(other)
        if dual_other is None:
            factor = other[..., None] if getattr(other, "shape", ()) else other
            value = self.value * other
            return self._with(value, _spread(self.tangents * factor, value))
        value = self.value * dual_other.value
        return self._with(value, self.tangents * dual_other.value[..., None] + dual_other.tangents * self.value[..., None])

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Dual:
        dual_other = self._other(other)
        if dual_other is None:
            return self.__mul__(1 / other)
        value = self.value / dual_other.value
        return self._with(value, (self.tangents - value[..., None] * dual_other.tangents) / dual_other.value[..., None])

    def __rtruediv__(self, other: Any) -> Dual:
        self._other(other)
        value = other / self.value
        return self._with(value, -value[..., None] / self.value[..., None] * self.tangents)

    def __pow__(self, exponent: Any) -> Dual:
        if isinstance(exponent, Dual):
            raise TypeError("the exponent is dual; write exp(log(x) * y)")
        return self.map(lambda x: x**exponent, lambda x, y: exponent * x ** (exponent - 1))

    def __matmul__(self, other: Any) -> Dual:
        return Dual.product(self, other)

    def __rmatmul__(self, other: Any) -> Dual:
        return Dual.product(other, self)

    def map(self, f: Callable[[Any], Any], derivative: Callable[[Any, Any], Any]) -> Dual:
        """``f`` of every number; ``derivative(x, f(x))`` is its derivative, both of arrays.

        >>> Dual.seed(np.float64([3])).map(lambda x: x**2, lambda x, y: 2 * x).tangents.tolist()
        [[6.0]]
        """
        for name, given in (("f", f), ("derivative", derivative)):
            if not callable(given):
                raise TypeError(f"{name}={given!r}: a function of arrays is needed")
        value = _result(f, "f", self.value)
        slope = _result(derivative, "derivative", self.value, value)
        for name, made in (("f", value), ("derivative", slope)):
            if getattr(made, "shape", None) != self.shape:
                raise ValueError(f"{name} returned {type(made).__name__} of shape {getattr(made, 'shape', None)}; an array "
                                 f"of shape {self.shape} is needed")
        return self._with(value, slope[..., None] * self.tangents)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        if method != "__call__" or keywords:
            return NotImplemented
        operation = _OPERATORS.get(ufunc.__name__)
        if operation is not None:
            return operation(*inputs)
        if ufunc.__name__ not in DERIVATIVES:
            raise TypeError(f"{ufunc.__name__} of dual numbers is not known; give its derivative: x.map(f, derivative). "
                            f"Known are {', '.join(DERIVATIVES)}")
        return getattr(self, ufunc.__name__)()

    # -- products ---------------------------------------------------------------------------------------------------

    @staticmethod
    def product(a: Any, b: Any, c: Any = None, conf: Any = None, out: Any = None, stream: Any = None,
                **keywords: Any) -> Dual:
        """`gemmkit.matmul` of dual arrays, matrices or stacks of them; real ones among them, also matrices with structure,
        count as constants."""
        count = next((x.count for x in (a, b) if isinstance(x, Dual)), 0)
        if not count:
            raise TypeError(f"a is {type(a).__name__} and b is {type(b).__name__}; a Dual is needed among them")
        given = [x if x is None or isinstance(x, Dual) else
                 real_operand(x, name) if conf is None and name != "c" else Dual._constant(x, count, name)
                 for name, x in (("a", a), ("b", b), ("c", c))]                          # (of a conf all are dual numbers)
        if out is not None and not isinstance(out, Dual):
            raise TypeError("out is not a dual array, but the product is; give a Dual, or leave it out")
        for name, x in zip(("a", "b", "c", "out"), (*given, out)):
            if isinstance(x, Dual) and x.count != count:
                raise ValueError(f"{name} has {x.count} tangents and another operand {count}; all need as many")
            if isinstance(x, Dual) and x.ndim < 2:
                raise ValueError(f"{name} has shape {x.shape}; a matrix of 2 dimensions is needed, or a stack of them")
        if conf is None:
            keywords.setdefault("operator", dual(count))
        arrays = [x.parts if isinstance(x, Dual) else x for x in (*given, out)]
        made = matmul(arrays[0], arrays[1], arrays[2], conf, out=arrays[3], stream=stream, **keywords)
        return Dual(made) if out is None else out


def real_operand(x: Any, name: str) -> Any:
    """A real operand as a product of dual numbers takes it: a stack says that its last axis is columns, which could be
    parts. Raises TypeError for an array of no floats."""
    if isinstance(x, Matrix):
        return x
    _floats(x, name)
    return x if len(describe(x, name).shape) < 3 else Matrix(x, plain_layout(x))


def _result(f: Callable[..., Any], name: str, *arrays: Any) -> Any:
    try:
        return f(*arrays)
    except Exception as error:
        raise TypeError(f"{name}={f!r} of {len(arrays)} arrays raised {type(error).__name__}: {error}") from error


def _put(parts: Any, n: int | slice, x: Any, name: str) -> None:
    """Assign an array to parts of a dual array, which the library of the parts does."""
    try:
        parts[..., n] = x
    except TypeError as error:
        kind = type(parts)
        raise TypeError(f"{name} is a {type(x).__qualname__}, which a {kind.__module__}.{kind.__qualname__} does not take; "
                        "give value and tangents of one library") from error


def _described(**arrays: object) -> list[ArrayInfo]:
    """Arrays of the host, where nothing need be emulated, or of one GPU: an emulator takes none of those."""
    infos = {name: describe(x, name) for name, x in arrays.items()}
    if any(info.device != HOST for info in infos.values()):
        check_places({**infos})
    return [*infos.values()]


def _floats(x: Any, name: str) -> np.dtype:
    """The dtype of an array; raises TypeError for one that derivatives cannot have."""
    dtype = _described(**{name: x})[0].dtype
    if (dtype.kind != "f" or dtype.itemsize > 8) and dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {dtype}; derivatives are floats, float16 to float64 or bfloat16")
    return dtype


def _spread(tangents: Any, value: Any) -> Any:
    """Tangents in the shape that broadcasting has given the values."""
    wanted = (*value.shape, tangents.shape[-1])
    return tangents if tuple(tangents.shape) == wanted else tangents + (value * 0)[..., None]


def _call(name: str, x: Any) -> Any:
    """A function of an array, by its own method (PyTorch) or by NumPy's protocol (NumPy, CuPy)."""
    method = getattr(x, name, None)
    return method() if callable(method) else getattr(np, name)(x)


# Of every function: its derivative, from x and f(x).
DERIVATIVES: dict[str, Callable[[Any, Any], Any]] = {
    "exp": lambda x, y: y,
    "log": lambda x, y: 1 / x,
    "sqrt": lambda x, y: 0.5 / y,
    "sin": lambda x, y: _call("cos", x),
    "cos": lambda x, y: -_call("sin", x),
    "tan": lambda x, y: 1 + y * y,
    "tanh": lambda x, y: 1 - y * y,
    "sinh": lambda x, y: _call("cosh", x),
    "cosh": lambda x, y: _call("sinh", x),
    "absolute": lambda x, y: _call("sign", x),
    "square": lambda x, y: 2 * x,
    "reciprocal": lambda x, y: -y * y,
    "log1p": lambda x, y: 1 / (1 + x),
    "expm1": lambda x, y: y + 1,
}
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: y + x if isinstance(y, Dual) else x + y,
    "subtract": lambda x, y: x - y if isinstance(x, Dual) else -y + x,
    "multiply": lambda x, y: y * x if isinstance(y, Dual) else x * y,
    "divide": lambda x, y: x / y if isinstance(x, Dual) else y.__rtruediv__(x),
    "matmul": lambda x, y: Dual.product(x, y),
    "negative": lambda x: -x,
    "power": lambda x, y: x**y,
}


def _function(name: str) -> Callable[[Dual], Dual]:
    def function(self: Dual) -> Dual:
        return self.map(lambda x: _call(name, x), DERIVATIVES[name])

    function.__name__, function.__doc__ = name, f"``{name}`` of every number."
    return function


for _name in DERIVATIVES:
    setattr(Dual, _name, _function(_name))


# --------------------------------------------------------------------------------------------------
# Products that say which k decided: of a shortest path not only the length, but where it goes through.
#
# In a semiring whose ``add`` picks one of its two arguments (min, max), every element of D is one product A_ik * B_kj.
# `select` returns that k beside it. Each accumulator is a (value, index) pair in registers, which costs two instructions a
# product more than the value alone, a compare and a select; A's elements get their k on the way to shared memory.

NOBODY = -1                            # the index where no product is better than the semiring's zero


@names_keywords
def select(a: Any, b: Any, *, operator: Semiring = MIN_PLUS, out: Any = None, index: Any = None,
           stream: Any = None, **others: NoReturn) -> tuple[Any, Any]:
    """A B in a semiring, and for each element the k whose product it is.

    Args:
        a: (M, K), or a stack, as `gemmkit.matmul` takes it, of a dtype of 4 or 8 bytes.
        b: (K, N), or a stack, of a's dtype.
        operator: a semiring whose ``add`` returns one of its arguments.
        out: (M, N), of a stack (..., M, N), written and returned; None allocates one.
        index: an array of out's shape, int32 for dtypes of 4 bytes and int64 for those of 8; None allocates one.
        stream: where to launch; None is the current stream of a's library.

    Returns:
        (out, index). Of several k with the same product, index is the least; it is -1 where every product is the
        semiring's zero (no path leads there).

    Raises:
        ValueError: an ``add`` that makes new numbers (log-sum-exp), or shapes that do not fit; what `matmul` raises.
        TypeError: dtypes that differ or have another size; other keywords (there are no transforms).

    >>> import numpy as np, gemmkit
    >>> roads = np.array([[0, 1, 9], [9, 0, 2], [9, 9, 0]], np.float32)
    >>> with gemmkit.emulate():
    ...     lengths, via = gemmkit.functions.select(roads, roads)
    >>> float(lengths[0, 2]), int(via[0, 2])               # 1 + 2 = 3, through node 1
    (3.0, 1)
    """
    if others:
        raise TypeError(f"select() got unknown keywords {', '.join(sorted(others))}; it takes operator, out, index and "
                        "stream, and no transforms: transform the operand first (x.T, abs(x))")
    a_info, b_info = describe(a, "a"), describe(b, "b")
    if a_info.dtype != b_info.dtype or a_info.dtype.itemsize not in (4, 8) or a_info.dtype.kind not in "iuf":
        raise TypeError(f"a has dtype {a_info.dtype} and b {b_info.dtype}; both must be float32, float64, or integers of 4 "
                        "or 8 bytes: the index beside a value is as wide as the value")
    if not isinstance(operator, Semiring) or not selects(operator):
        raise ValueError(f"operator={operator!r}: a semiring is needed whose add returns one of its arguments (min or max)")
    if len(a_info.shape) < 2 or len(b_info.shape) < 2:
        raise ValueError(f"a has shape {a_info.shape} and b {b_info.shape}; matrices of 2 dimensions are needed, or stacks "
                         "of them")
    try:
        stack = np.broadcast_shapes(a_info.shape[:-2], b_info.shape[:-2])
    except ValueError:
        raise ValueError(f"a has shape {a_info.shape} and b has shape {b_info.shape}: the stacks {a_info.shape[:-2]} and "
                         f"{b_info.shape[:-2]} cannot be broadcast together") from None
    sizes = a_info.shape[-2], b_info.shape[-1], a_info.shape[-1]
    wanted = (*stack, *sizes[:2])
    dtype, index_dtype = a_info.dtype, np.dtype(f"i{a_info.dtype.itemsize}")
    if out is None:
        out = empty_like(a, wanted, dtype)
    if index is None:
        index = empty_like(a, wanted, index_dtype)
    where = describe(index, "index")
    if where.shape != wanted or where.dtype != index_dtype:
        raise ValueError(f"index has shape {where.shape} and dtype {where.dtype}; {wanted} and {index_dtype} are needed")
    given: Iterable[str] = ("M", "N", "K", "MB", "NB")
    shape = ({name: getattr(operator, name) for name in given} if operator.is_sized
             else fpu_shape(2 * dtype.itemsize, sizes, target(a_info.device), products=math.prod(stack)))
    semiring = dataclasses.replace(operator, **shape, dtype=dtype, b_dtype=dtype, accumulator=dtype)
    matmul(a, b, out=out, stream=stream, operator=Selecting.of(semiring), transform_global_to_shared_a=WithIndex(),
           epilogue=IndexSplit(index))
    return out, index


def pair(dtype: np.dtype) -> np.dtype:
    """A value and the k that it came from."""
    return np.dtype([("value", dtype), ("index", f"i{dtype.itemsize}")])


@dataclass(frozen=True)
class Selecting(FPUOp):
    """A semiring on (value, k) pairs: A's elements and the accumulators are pairs, B's elements values."""

    semiring: Any = None

    merges = True                                          # of equal values the first is kept, that of the least k

    @classmethod
    def of(cls, semiring: Semiring) -> Selecting:
        both = pair(semiring.dtype)
        return cls(semiring.M, semiring.N, semiring.K, semiring.MB, semiring.NB, both, both, semiring.dtype, semiring)

    @cached_property
    def identity(self) -> Any:
        return self.semiring.identity

    @cached_property
    def start(self) -> Any:
        return self.semiring.identity, NOBODY

    def multiply(self, a: Any, b: Any) -> Any:
        return self.semiring.multiply(a[0], b[0]), a[1]

    def combine(self, c: Any, product: Any) -> Any:
        best = self.semiring.combine(c[0], product[0])
        return best, c[1] if best == c[0] else product[1]


@dataclass(frozen=True)
class WithIndex(Transform):
    """An element of A and its column."""

    def __call__(self, x: Any, i: int, k: int) -> Any:
        return x, k


@dataclass(frozen=True)
class IndexSplit(Epilogue):
    """Writes the index to an array of its own, and the value to D."""

    index: Array
    outputs = ("index",)
    array_ndims = MappingProxyType({"index": 2})

    def __call__(self, x: Any, m: int, n: int) -> Any:
        self.index[m, n] = x[1]
        return x[0]
