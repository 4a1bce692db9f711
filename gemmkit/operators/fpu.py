"""``FPUOp``: any arithmetic on the ordinary units, each thread an outer product of register vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.lang.control import each, join, outer
from gemmkit.lang.given import dtype_given
from gemmkit.lang.registers import Fragment, generate
from gemmkit.lang.returned import converted, number
from gemmkit.lang.values import convert_all
from gemmkit.operators.base import Operator
from gemmkit.ptx.arithmetic import outer_fma
from gemmkit.ptx.fragments import FragmentMap, fragment_coordinate
from gemmkit.ptx.memory import load_shared, store_shared
from gemmkit.ptx.special import lane_index
from gemmkit.tiling import translate


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

    ``identity`` stands where an operand has nothing (a masked edge): multiplied by anything it must leave the
    accumulator as it was. ``start`` is the accumulator of an empty sum.

    Raises ValueError unless MB * NB = 32, and M and N are multiples of MB and NB.
    """

    device_methods = (*Operator.device_methods, "multiply", "combine")

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
            raise ValueError(f"{type(self).__name__}(M={self.M}, N={self.N}): multiples of MB={self.MB} and "
                             f"NB={self.NB} are needed")
        if self.K < 1:
            raise ValueError(f"{type(self).__name__}(K={self.K}): 1 or more is needed")

    # -- the arithmetic -------------------------------------------------------------------------------------------

    def multiply(self, a: Any, b: Any) -> Any:
        return a * b

    def combine(self, c: Any, product: Any) -> Any:
        return c + product

    @cached_property
    def is_ordinary(self) -> bool:
        return (type(self).multiply is FPUOp.multiply and type(self).combine is FPUOp.combine
                and self.accumulator.kind != "c")

    @cached_property
    def merges(self) -> bool:                                       # type: ignore[override]
        """Of a subclass with another `combine` it is not known: it says ``merges = True`` if it is so."""
        return type(self).combine is FPUOp.combine and bool(self.start == 0)

    def merge(self, x: Any, y: Any) -> Any:
        return self.combine(x, y)

    # -- which thread holds what -------------------------------------------------------------------------------------------

    @cached_property
    def vector_m(self) -> int:
        """Neighbouring rows a thread holds: 16 bytes of them if there are as many."""
        return _vector(self.M // self.MB, self.dtype.itemsize)

    @cached_property
    def vector_n(self) -> int:
        return _vector(self.N // self.NB, self.b_dtype.itemsize)

    @cached_property
    def lanes(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """A lane's place among the MB x NB, as a shape and the steps (rows, columns) of its digits.

        Of a load of 16 bytes a lane, shared memory serves half a warp at once where neighbouring lanes ask for the same
        bytes, of A and of B. So lanes that differ in the first bit share columns, and the other rows lie 16 lanes apart.
        """
        if (self.MB, self.NB) == (4, 8):
            return (2, 8, 2), ((1, 0), (0, 1), (2, 0))
        if (self.MB, self.NB) == (8, 4):
            return (2, 8, 2), ((0, 1), (1, 0), (0, 2))
        return (self.MB, self.NB), ((1, 0), (0, 1))

    def _lane_strides(self, m: int, n: int) -> tuple[tuple[int, int], ...]:
        """The strides of lanes whose rows and columns come in vectors of m and n elements."""
        return tuple((rows * m, columns * n) for rows, columns in self.lanes[1])

    @cached_property
    def map_a(self) -> FragmentMap:
        v = self.vector_m
        return FragmentMap(self.M, self.K, self.lanes[0], self._lane_strides(v, 0),
                           (v, self.M // self.MB // v, self.K), ((1, 0), (self.MB * v, 0), (0, 1)))

    @cached_property
    def map_b(self) -> FragmentMap:
        v = self.vector_n
        return FragmentMap(self.K, self.N, self.lanes[0], self._lane_strides(0, v),
                           (v, self.N // self.NB // v, self.K), ((0, 1), (0, self.NB * v), (1, 0)))

    @cached_property
    def map_c(self) -> FragmentMap:
        m, n = self.vector_m, self.vector_n
        return FragmentMap(self.M, self.N, self.lanes[0], self._lane_strides(m, n),
                           (m, self.M // self.MB // m, n, self.N // self.NB // n),
                           ((1, 0), (self.MB * m, 0), (0, 1), (0, self.NB * n)))

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, self.M // self.MB * self.K)

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.b_dtype, self.N // self.NB * self.K)

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(self.accumulator, self.M // self.MB * self.N // self.NB)

    def line_alignment(self, operand: str, layout: Any) -> int:
        """Vectors of neighbours, where the layout has them as neighbours."""
        vector = {("a", 0): self.vector_m, ("b", 1): self.vector_n, ("c", 0): self.vector_m}.get((operand, layout.axis), 1)
        return math.gcd(16, vector * layout.dtype.itemsize)

    # -- the operator ---------------------------------------------------------------------------------------------

    def load_a(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        if layout.axis == 0:
            return _load_vectors(self.map_a, self.vector_m, self.fragment_a, layout, pointer, tile, leading)
        return _load_elements(self.map_a, self.vector_m, self.fragment_a, layout, pointer, tile, leading)

    def load_b(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        if layout.axis == 1:
            return _load_vectors(self.map_b, self.vector_n, self.fragment_b, layout, pointer, tile, leading)
        return _load_elements(self.map_b, self.vector_n, self.fragment_b, layout, pointer, tile, leading)

    def load_c(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        if layout.axis == 0:
            return _load_vectors(self.map_c, self.vector_m, self.fragment_c, layout, pointer, tile, leading)
        return _load_elements(self.map_c, self.vector_m, self.fragment_c, layout, pointer, tile, leading)

    def mma(self, a: tuple, b: tuple, c: tuple) -> tuple:
        """The outer product of the fragments in the accumulator's type; fused where the arithmetic is the usual one."""
        a, b = convert_all(self.accumulator, a), convert_all(self.accumulator, b)
        return outer_fma(c, a, b, self.K) if self.is_ordinary else outer(_combine_product, c, a, b, self.K, self)

    def store_d(self, layout: Any, pointer: Any, tile: Any, leading: int, d: tuple) -> None:
        each(_store_element, d, self.map_c, layout, pointer, tile, leading, lane_index(),
             layout.position(tile.offset, leading))


def _vector(count: int, itemsize: int) -> int:
    return next(v for v in (16, 8, 4, 2, 1) if count % v == 0 and v * itemsize <= 16)


def _combine_product(c: Any, a: Any, b: Any, operator: Any) -> Any:
    product = number(operator, "multiply", operator.multiply(a, b), c)
    return converted(operator, "combine", number(operator, "combine", operator.combine(c, product), c), operator.accumulator)


def _place(fragment_map: Any, tile: Any, lane: int, n: int) -> Any:
    """The tile moved to where a thread's n-th value lies."""
    return translate(tile, fragment_coordinate(fragment_map, lane, n, 0), fragment_coordinate(fragment_map, lane, n, 1))


def _load_vectors(fragment_map: Any, vector: int, fragment: Any, layout: Any, pointer: Any, tile: Any,
                  leading: int) -> tuple:
    return join(generate(fragment.count // vector, _load_vector, vector, fragment_map, layout, pointer, tile, leading,
                         lane_index(), layout.position(tile.offset, leading)))


def _load_vector(n: int, vector: int, fragment_map: Any, layout: Any, pointer: Any, tile: Any, leading: int, lane: int,
                 offset: int) -> tuple:
    return load_shared(pointer, layout.position(_place(fragment_map, tile, lane, n * vector).base, leading), offset, vector)


def _load_elements(fragment_map: Any, vector: int, fragment: Any, layout: Any, pointer: Any, tile: Any,
                   leading: int) -> tuple:
    return join(generate(fragment.count, _load_vector, 1, fragment_map, layout, pointer, tile, leading, lane_index(),
                         layout.position(tile.offset, leading)))


def _store_element(value: Any, n: int, fragment_map: Any, layout: Any, pointer: Any, tile: Any, leading: int, lane: int,
                   offset: int) -> None:
    store_shared(pointer, layout.position(_place(fragment_map, tile, lane, n).base, leading), offset, (value,))
