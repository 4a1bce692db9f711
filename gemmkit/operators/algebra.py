"""Algebras: products of complex, dual, quaternion and other numbers by real multiply-accumulates.

A finite-dimensional algebra is its multiplication table: ``e_i e_j = sum_k table[i][j][k] e_k``. `Algebra` holds numbers as
planes (all first parts, all second parts, ...) and issues one real operation of its ``base`` for every entry of the table
that is not zero: 4 for complex numbers, 3 for dual ones (1 + 2p with p tangents), 16 for quaternions. The base is any
operator of real numbers: tensor cores (`MMAOp`; Hopper's, `WGMMAOp`, where all entries are +1 or -1) or the ordinary units
(`FPUOp`).

One number is one element everywhere else: transforms and epilogues see a value whose parts are ``x[0]``, ``x[1]``, ... (or
``x.real``, ``x.value``, by the algebra's names), which can be added and multiplied, and they may return a tuple of parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements
from gemmkit.lang.number_rules import number_dtype, terms
from gemmkit.lang.records import numbers_of, planes_of
from gemmkit.lang.registers import Fragment, each, fold, generate
from gemmkit.layouts import Planes, SharedLayout
from gemmkit.operators.base import Operator
from gemmkit.operators.fpu import FPUOp
from gemmkit.operators.mma import MMAOp, element_place, load_elements
from gemmkit.operators.wgmma import within
from gemmkit.ptx.arithmetic import accumulate_terms, multiply_planes
from gemmkit.ptx.mma import FragmentMap
from gemmkit.ptx.wgmma import advance
from gemmkit.tiling import Coord

if TYPE_CHECKING:
    from gemmkit.layouts.plain import Plain

MOST_TANGENTS = 127                    # a multiplication table has the cube of as many entries
Table = tuple[tuple[tuple[Any, ...], ...], ...]


@dataclass(frozen=True, init=False, repr=False)
class Algebra(Operator):
    """Products of an algebra's numbers.

    Args:
        base: the operator that multiplies their parts; None chooses one by the dtypes and sizes of the arrays.
        table: ``table[i][j][k]`` is the coefficient of e_k in e_i e_j; or an algebra that has it.
        names: of the parts; e0, e1, ... by default. The first part is the real one: a real number r is r e_0.
        conjugate: the signs that a conjugate's parts get (+1 or -1); none changes by default.

    Raises ValueError for a table that is not n x n x n, names or signs that are not n, or a base that is no operator of
    real numbers.

    >>> split_complex = Algebra(None, [[[1, 0], [0, 1]], [[0, 1], [1, 0]]])      # j * j = 1
    >>> split_complex.products
    4
    """

    base: Any = None
    table: Any = None
    names: Any = None
    conjugate: Any = None

    def __init__(self, base: Operator | None, table: Sequence[Any] | np.ndarray | Algebra,
                 names: Sequence[str] | None = None, conjugate: Sequence[int] | None = None):
        if isinstance(table, Algebra):
            names, conjugate, table = names or table.names, conjugate or table.conjugate, table.table
        table = _checked_table(table)
        count = len(table)
        names = tuple(f"e{n}" for n in range(count)) if names is None else names
        signs = (1,) * count if conjugate is None else conjugate
        if not _is_list_of(names, str) or len(set(names)) != count or len(names) != count or not all(
                name.isidentifier() for name in names):
            raise ValueError(f"Algebra(names={names!r}): {count} different names are needed, as many as the table has parts")
        if not _is_list_of(signs, (int, np.integer)) or len(signs) != count or any(s not in (1, -1) for s in signs):
            raise ValueError(f"Algebra(conjugate={conjugate!r}): {count} signs, +1 or -1, are needed")
        names, signs = tuple(names), tuple(int(s) for s in signs)
        if base is not None and (not isinstance(base, Operator) or isinstance(base, Algebra)
                                 or not getattr(base, "is_sized", True) or base.map_c is None):
            raise ValueError(f"Algebra(base={base!r}): an MMAOp, WGMMAOp or FPUOp (an instance) is needed")
        for name, value in (("base", base), ("table", table), ("names", names), ("conjugate", signs)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Algebra({self.base!r}, {self.table!r}, {self.names!r}, {self.conjugate!r})"

    # -- host -------------------------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> int:
        return len(self.table)

    @cached_property
    def products(self) -> int:
        """Real multiply-accumulates for each product of two numbers."""
        return len(terms(self.table))

    def number_dtype(self, part: Any) -> np.dtype:
        """The dtype of numbers with parts of a real dtype: a structured one (complex ones of float32 are complex64).

        >>> DUAL.number_dtype("float16")
        dtype([('value', '<f2'), ('tangent', '<f2')])
        """
        return number_dtype(self.names, np.dtype(part), self.table, self.conjugate)

    @cached_property
    def is_sized(self) -> bool:
        return self.base is not None

    def with_base(self, base: Operator) -> Algebra:
        return dataclasses.replace(self, base=base)

    def split(self, plane: Any, dtype: np.dtype) -> Planes:
        """The shared layout of numbers of ``dtype`` whose parts are in ``plane``."""
        return Planes(plane, dtype)

    @cached_property
    def threads(self) -> int:                                    # type: ignore[override]
        return 32 if self.base is None else int(self.base.threads)

    @cached_property
    def merges(self) -> bool:                                    # type: ignore[override]
        return bool(self.base.merges)

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        return tuple(self.base.minimum_arch)

    def instead(self, arch: tuple[int, int]) -> str:
        return str(self.base.instead(arch))

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        return tuple(self.base.shape)

    @cached_property
    def map_a(self) -> FragmentMap | None:
        return self.base.map_a  # type: ignore[no-any-return]

    @cached_property
    def map_b(self) -> FragmentMap | None:
        return self.base.map_b  # type: ignore[no-any-return]

    @cached_property
    def map_c(self) -> FragmentMap | None:
        return self.base.map_c  # type: ignore[no-any-return]

    @cached_property
    def fragment_a(self) -> Fragment:
        return self._numbers(self.base.fragment_a)

    @cached_property
    def fragment_b(self) -> Fragment:
        return self._numbers(self.base.fragment_b)

    @cached_property
    def fragment_c(self) -> Fragment:
        return self._numbers(self.base.fragment_c)

    @cached_property
    def is_signed(self) -> bool:
        """Whether every entry of the table is +1 or -1 (or 0): a sign is free, any other factor is not."""
        return all(abs(factor) == 1 for *_, factor in terms(self.table))

    # what the warp-specialised kernel asks of a base that is a WGMMAOp

    @cached_property
    def sums(self) -> int:                                       # type: ignore[override]
        """Accumulators of a 64-row fragment: one for each part."""
        return self.parts

    @cached_property
    def registers(self) -> Fragment:
        return self.base.registers  # type: ignore[no-any-return]

    @cached_property
    def sums_in_words(self) -> bool:
        return bool(self.base.sums_in_words)

    @cached_property
    def promote(self) -> int:                                    # type: ignore[override]
        return int(self.base.promote)

    def _numbers(self, fragment: Fragment) -> Fragment:
        return Fragment(self.number_dtype(fragment.dtype), fragment.count)

    @cached_property
    def has_places(self) -> bool:                                # type: ignore[override]
        return bool(self.base.has_places)

    def line_alignment(self, operand: str, layout: SharedLayout) -> int:
        return int(self.base.line_alignment(operand, layout))    # of each plane

    def shared_axis(self, operand: str, axis: int) -> int:
        return int(self.base.shared_axis(operand, axis))

    def padding(self, operand: str, axis: int) -> int:
        return int(self.base.padding(operand, axis))

    def refuses(self, operand: str, layout: SharedLayout) -> str | None:
        if not isinstance(layout, Planes):
            if operand in ("a", "b") and self.loads_numbers(operand, layout):
                return None
            return "an algebra's numbers are in planes in shared memory: Planes(Padded(RowMajor(...), ...), ...)"
        refusal: str | None = self.base.refuses(operand, layout.plane)
        return refusal

    def loads_numbers(self, operand: str, layout: SharedLayout) -> bool:
        """Whether A's or B's numbers may lie in shared memory as they lie in memory, in a layout of their dtype. This holds
        for complex numbers whose base loads each lane's elements, because a load brings both parts."""
        if not isinstance(layout, SharedLayout) or layout.dtype.kind != "c":
            return False
        axis = layout.axis                                                                  # type: ignore[attr-defined]
        return isinstance(self.base, FPUOp) or (isinstance(self.base, MMAOp) and not self.base.by_matrices(operand, axis))

    # -- device -----------------------------------------------------------------------------------------------------

    def load_a(self, layout: Any, pointer: Any, tile: Any, leading: Any) -> Elements:
        if layout.in_planes:
            return numbers_of(self.fragment_a.dtype, generate(self.parts, lambda n: self.base.load_a(
                layout.plane, layout.plane_at(n, pointer, leading), tile, leading[0])))
        return load_elements(self.map_a, 1, layout, pointer, tile, leading)

    def load_b(self, layout: Any, pointer: Any, tile: Any, leading: Any) -> Elements:
        if layout.in_planes:
            return numbers_of(self.fragment_b.dtype, generate(self.parts, lambda n: self.base.load_b(
                layout.plane, layout.plane_at(n, pointer, leading), tile, leading[0])))
        return load_elements(self.map_b, 1, layout, pointer, tile, leading)

    def load_c(self, layout: Any, pointer: Any, tile: Coord, leading: Any) -> Elements:
        return numbers_of(self.fragment_c.dtype, generate(self.parts, lambda n: self.base.load_c(
            layout.plane, layout.plane_at(n, pointer, leading), tile, leading[0])))

    def place_a(self, layout: Any, tile: Any, leading: Any) -> int:
        if layout.in_planes:
            return self.base.place_a(layout.plane, tile, leading[0])  # type: ignore[no-any-return]
        return element_place(self.map_a, layout, tile, leading)

    def place_b(self, layout: Any, tile: Any, leading: Any) -> int:
        if layout.in_planes:
            return self.base.place_b(layout.plane, tile, leading[0])  # type: ignore[no-any-return]
        return element_place(self.map_b, layout, tile, leading)

    def mma(self, a: Elements, b: Elements, c: Elements) -> Elements:
        """One real operation for every entry of the table."""
        return multiply_planes(self, a, b, c)

    def multiply(self, accumulators: Elements, a: int, b: int, a_layout: Plain, b_layout: Plain, block: Any,
                 accumulate: int) -> Elements:
        """One stage of the warp-specialised kernel: real wgmmas of planes, all those of a k-block before the next's."""
        first = accumulate_terms(self, accumulators, _multiply_term, self, a, b, a_layout, b_layout, block, 0, accumulate)
        return fold(block.size.K // self.base.K - 1, _multiply_step, first, self, a, b, a_layout, b_layout, block)

    def multiply_fragments(self, accumulators: Elements, fragments: Elements, b: int, b_layout: SharedLayout, block: Coord,
                           step: int, accumulate: int) -> Elements:
        """A k-block with A in registers: ``fragments`` holds the parts of each 64-row fragment."""
        return accumulate_terms(self, accumulators, _multiply_registers, self, fragments, b, b_layout, block, step,
                                accumulate)

    def store_d(self, layout: Any, pointer: Any, tile: Coord, leading: Any, d: Elements) -> None:
        each(lambda plane, n: self.base.store_d(layout.plane, layout.plane_at(n, pointer, leading), tile, leading[0], plane),
             planes_of(d))


def _multiply_step(sums: Elements, n: int, algebra: Algebra, a: int, b: int, a_layout: SharedLayout, b_layout: SharedLayout,
                   block: Coord) -> Elements:
    return accumulate_terms(algebra, sums, _multiply_term, algebra, a, b, a_layout, b_layout, block, n + 1, 1)


def _multiply_term(sums: Elements, m: int, i: int, j: int, is_negative: bool, is_first: bool, algebra: Algebra, a: int,
                   b: int, a_layout: Any, b_layout: Any, block: Any, step: int, accumulate: int) -> Any:
    k = step * algebra.base.K
    a_plane = advance(a, _within_planes(a_layout, i, (m * 64, k), block.MK.size))
    b_plane = advance(b, _within_planes(b_layout, j, (k, 0), block.KN.size))
    if is_negative:
        return algebra.base.negated_instruction(sums, a_plane, b_plane, accumulate if is_first else 1)
    return algebra.base.instruction(sums, a_plane, b_plane, accumulate if is_first else 1)


def _within_planes(layout: Planes, n: int, coord: tuple[int, int], size: Coord) -> int:
    """How many bytes a coordinate of plane ``n`` lies into a tile."""
    return n * layout.leading(size)[1] * layout.itemsize + within(layout.plane, coord, size)  # type: ignore[no-any-return]


def _multiply_registers(sums: Elements, m: int, i: int, j: int, is_negative: bool, is_first: bool, algebra: Any,
                        fragments: Elements, b: int, b_layout: Any, block: Any, step: int, accumulate: int) -> Any:
    b_plane = advance(b, _within_planes(b_layout, j, (step * algebra.base.K, 0), block.KN.size))
    if is_negative:
        return algebra.base.negated_register_instruction(sums, fragments[m][i], b_plane, accumulate if is_first else 1)
    return algebra.base.register_instruction(sums, fragments[m][i], b_plane, accumulate if is_first else 1)


def _checked_table(table: Sequence[Any] | np.ndarray | Algebra) -> Table:
    try:
        array = np.asarray(table, dtype=object)
    except Exception as error:                     # NumPy raises what it likes for what has ragged rows
        raise ValueError(f"Algebra(table=...): {error}; n x n x n numbers are needed") from None
    if array.ndim != 3 or len(set(array.shape)) != 1 or array.shape[0] < 2:
        raise ValueError(f"Algebra(table=...): it has shape {array.shape}, and must be n x n x n with n of 2 or more: "
                         "table[i][j][k] is the coefficient of e_k in e_i e_j")
    for value in array.flat:
        is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ValueError(f"Algebra(table=...): {value!r} is not a real number")
    return tuple(tuple(tuple(_plain(x) for x in sums) for sums in row) for row in array.tolist())


def _plain(x: Any) -> Any:
    return int(x) if float(x).is_integer() else float(x)


# -- the algebras that come with gemmkit --------------------------------------------------------------------------------

def _is_list_of(x: Any, kind: Any) -> bool:
    return isinstance(x, (tuple, list)) and all(isinstance(part, kind) for part in x)


def dual(tangents: int) -> Algebra:
    """Dual numbers with so many tangents: of forward-mode derivatives in as many directions at once.

    A real matrix extended by derivatives is still real: "C" (the conjugate transpose) of it is its transpose.

    >>> dual(3).products
    7
    """
    if isinstance(tangents, bool) or not isinstance(tangents, int) or not 1 <= tangents <= MOST_TANGENTS:
        raise ValueError(f"dual(tangents={tangents!r}): a number from 1 to {MOST_TANGENTS} is needed")
    n = tangents + 1
    table = np.zeros((n, n, n), int)
    for k in range(n):
        table[0, k, k] = table[k, 0, k] = 1
    names = ("value", "tangent") if tangents == 1 else ("value", *(f"tangent{k}" for k in range(tangents)))
    return Algebra(None, table, names)


def units(operator: Operator) -> Any:
    """What multiplies: of an algebra its base, of other operators themselves."""
    return getattr(operator, "base", operator)


COMPLEX = Algebra(None, [[[1, 0], [0, 1]], [[0, 1], [-1, 0]]], ("real", "imag"), (1, -1))
SPLIT_COMPLEX = Algebra(None, [[[1, 0], [0, 1]], [[0, 1], [1, 0]]], ("real", "hyper"), (1, -1))
DUAL = dual(1)
QUATERNION = Algebra(None, [[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
                            [[0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 1], [0, 0, -1, 0]],
                            [[0, 0, 1, 0], [0, 0, 0, -1], [-1, 0, 0, 0], [0, 1, 0, 0]],
                            [[0, 0, 0, 1], [0, 0, 1, 0], [0, -1, 0, 0], [-1, 0, 0, 0]]],
                     ("real", "i", "j", "k"), (1, -1, -1, -1))
