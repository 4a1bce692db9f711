"""Products that say which k decided: of a shortest path not only the length, but where it goes through.

In a semiring whose ``add`` picks one of its two arguments (min, max), every element of D is one product A_ik * B_kj.
`select` returns that k beside it. Each accumulator is a (value, index) pair in registers, which costs two instructions a
product more than the value alone, a compare and a select; A's elements get their k on the way to shared memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from gemmkit.components import Array
from gemmkit.epilogues import Epilogue
from gemmkit.functions.matmul import matmul
from gemmkit.kernels.config import names_keywords
from gemmkit.lang.components import dataclass
from gemmkit.operators import FPUOp
from gemmkit.operators.algebra import MIN_PLUS, Semiring, selects
from gemmkit.runtime.arrays import describe, empty_like
from gemmkit.runtime.device import target
from gemmkit.transforms import Transform
from gemmkit.tuning.operators import fpu_shape

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
