"""``FPUOp``: any arithmetic on the ordinary units, each thread an outer product of register vectors."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.lang.aggregates import convert_all
from gemmkit.lang.checks import converted, dtype_given, number
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric, SharedPointer
from gemmkit.lang.registers import Fragment, outer
from gemmkit.operators.base import Operator
from gemmkit.operators.mma import element_place, load_apart, load_elements, store_elements
from gemmkit.ptx.arithmetic import outer_fma
from gemmkit.ptx.mma import FragmentMap, places
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.layouts.plain import Plain


@dataclass(frozen=True)
class FPUOp(Operator):
    """An M x N x K product by a warp of MB x NB threads, each M/MB x N/NB elements; any real dtypes.

    ``dtype`` is the type of A and B in shared memory (``b_dtype`` if B's differs), ``accumulator`` that of C and D. A
    subclass gives another algebra in three lines (plain Python functions of scalars):

    >>> import math
    >>> @dataclass(frozen=True)
    ... class MinPlus(FPUOp):
    ...     identity = start = math.inf
    ...     def multiply(self, a, b): return a + b
    ...     def combine(self, c, product): return min(c, product)

    ``identity`` replaces elements beyond an operand's edge: multiplied by anything, it must leave the accumulator unchanged.
    ``start`` is the accumulator of an empty sum.

    Raises ValueError unless MB * NB = 32, M and N are multiples of MB and NB, and two ``identity`` keep ``start``.
    """

    device_methods = (*Operator.device_methods, "multiply", "combine")
    has_places = True

    M: int = 32
    N: int = 32
    K: int = 1
    MB: int = 4
    NB: int = 8
    dtype: Any = np.float32
    accumulator: Any = None
    b_dtype: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        what = type(self).__name__
        object.__setattr__(self, "dtype", dtype_given(self.dtype, what))
        for name in ("accumulator", "b_dtype"):
            given = getattr(self, name)
            object.__setattr__(self, name, self.dtype if given is None else dtype_given(given, what, name))
        if self.MB * self.NB != 32 or self.MB < 1:
            raise ValueError(f"{type(self).__name__}(MB={self.MB}, NB={self.NB}): MB * NB = 32 threads are needed")
        if self.M < 1 or self.N < 1 or self.M % self.MB or self.N % self.NB:
            raise ValueError(f"{what}(M={self.M}, N={self.N}): multiples of MB={self.MB} and NB={self.NB} are needed")
        if self.K < 1:
            raise ValueError(f"{type(self).__name__}(K={self.K}): 1 or more is needed")
        if self.is_ordinary:
            return
        try:                                           # elements beyond both operands' edges must change no sum
            with np.errstate(all="ignore"):
                start, edges = self.accumulator.type(self.start), (x.type(self.identity) for x in (self.dtype, self.b_dtype))
                found = self.combine(start, product := self.multiply(*edges))
                is_kept = found is None or bool(found == start)
        except Exception:                              # device code that Python cannot run; whatever a user's method raises
            return
        if not is_kept:
            raise ValueError(f"{what}: beyond the edge of K elements count as identity={self.identity}; multiply makes "
                             f"{product} of two of them, and combine(start={self.start}, {product}) is {found} and must be "
                             "start; give another identity, or test for it in multiply")

    # -- the arithmetic -------------------------------------------------------------------------------------------

    def multiply(self, a: Numeric, b: Numeric) -> Any:
        return a * b

    def combine(self, c: Numeric, product: Numeric) -> Any:
        return c + product

    @cached_property
    def is_ordinary(self) -> bool:
        return type(self).multiply is FPUOp.multiply and type(self).combine is FPUOp.combine

    @cached_property
    def merges(self) -> bool:                                       # type: ignore[override]
        """Of a subclass with another `combine` it is not known: it says ``merges = True`` if it is so."""
        return type(self).combine is FPUOp.combine and bool(self.start == 0)

    def merge(self, x: Numeric, y: Numeric) -> Any:
        return self.combine(x, y)

    # -- which thread holds what -------------------------------------------------------------------------------------------

    @cached_property
    def vector_m(self) -> int:
        """Neighbouring rows a thread holds: 16 bytes of them if there are as many."""
        return _vector(self.M // self.MB, self.dtype.itemsize)

    @cached_property
    def vector_n(self) -> int:
        return _vector(self.N // self.NB, self.b_dtype.itemsize)

    def _map(self, rows: int, columns: int, m: int, n: int, *values: tuple[int, tuple[int, int]]) -> FragmentMap:
        """A map whose lanes are m rows and n columns apart, with values by modes (extent, (rows, columns)).

        Two rows of lanes, then all columns, then the other rows: eight lanes, which shared memory serves at a time, load two
        vectors of A and four of B, and store 2 x 4 of D.
        """
        first = 2 if self.MB % 2 == 0 else 1
        lanes = places((first, (m, 0)), (self.NB, (0, n)), (self.MB // first, (first * m, 0)))
        return FragmentMap(rows, columns, lanes, places(*values))

    @cached_property
    def map_a(self) -> FragmentMap:
        v = self.vector_m
        return self._map(self.M, self.K, v, 0, (v, (1, 0)), (self.M // self.MB // v, (self.MB * v, 0)), (self.K, (0, 1)))

    @cached_property
    def map_b(self) -> FragmentMap:
        v = self.vector_n
        return self._map(self.K, self.N, 0, v, (v, (0, 1)), (self.N // self.NB // v, (0, self.NB * v)), (self.K, (1, 0)))

    @cached_property
    def map_c(self) -> FragmentMap:
        m, n = self.vector_m, self.vector_n
        return self._map(self.M, self.N, m, n, (m, (1, 0)), (self.M // self.MB // m, (self.MB * m, 0)), (n, (0, 1)),
                         (self.N // self.NB // n, (0, self.NB * n)))

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, self.M // self.MB * self.K)

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.b_dtype, self.N // self.NB * self.K)

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(self.accumulator, self.M // self.MB * self.N // self.NB)

    @cached_property
    def rows(self) -> int:
        """Rows of C that a thread holds: in its fragment they come first."""
        return self.M // self.MB

    @cached_property
    def d_vectors(self) -> tuple[int, int]:
        """Neighbours along M and along N that D is stored in at once, where the layout has them side by side.

        Not of float32 sums of fused products: for vector stores ptxas lays them out in quads of registers, where they meet
        the factors in a register bank (0.80 of the FFMAs read all their operands at once, with vectors 0.65).
        """
        if self.is_ordinary and self.accumulator == np.float32:
            return 1, 1
        return self.vector_m, self.vector_n

    @cached_property
    def c_vectors(self) -> tuple[int, int]:
        """As many for loads of C."""
        return self.vector_m, self.d_vectors[1]

    def line_alignment(self, operand: str, layout: Any) -> int:
        """Vectors of neighbours, where the layout has them as neighbours."""
        vectors = {"a": (self.vector_m, 1), "b": (1, self.vector_n), "c": self.c_vectors, "d": self.d_vectors}[operand]
        return math.gcd(16, vectors[layout.axis] * layout.dtype.itemsize)

    # -- the operator ---------------------------------------------------------------------------------------------

    def load_a(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int) -> Elements:
        return load_elements(self.map_a, (self.vector_m, 1)[layout.axis], layout, pointer, tile, leading)

    def load_b(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int) -> Elements:
        return load_elements(self.map_b, (1, self.vector_n)[layout.axis], layout, pointer, tile, leading)

    def place_a(self, layout: Any, tile: Any, leading: int) -> int:
        return element_place(self.map_a, layout, tile, leading)

    def place_b(self, layout: Any, tile: Any, leading: int) -> int:
        return element_place(self.map_b, layout, tile, leading)

    def load_c(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int) -> Elements:
        """Vectors of rows where a column is contiguous, else of columns, which are put in their places."""
        return load_apart(self.map_c, self.c_vectors[layout.axis], (1, self.rows)[layout.axis], layout, pointer, tile,
                          leading)

    def mma(self, a: Elements, b: Elements, c: Elements) -> Elements:
        """The outer product of the fragments in the accumulator's type; fused where the arithmetic is the usual one."""
        a, b = convert_all(self.accumulator, a), convert_all(self.accumulator, b)
        return outer_fma(c, a, b, self.K) if self.is_ordinary else outer(_combine_product, c, a, b, self.K, self)

    def store_d(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int, d: Elements) -> None:
        store_elements(self.map_c, self.d_vectors[layout.axis], (1, self.rows)[layout.axis], layout, pointer, tile,
                       leading, d)


def _vector(count: int, itemsize: int) -> int:
    return next(v for v in (16, 8, 4, 2, 1) if count % v == 0 and v * itemsize <= 16)


def _combine_product(c: Numeric, a: Numeric, b: Numeric, operator: FPUOp) -> Any:
    product = number(operator, "multiply", operator.multiply(a, b), c)
    return converted(operator, "combine", number(operator, "combine", operator.combine(c, product), c), operator.accumulator)
