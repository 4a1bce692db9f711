"""Algebras, products of complex, dual, quaternion and other numbers by real multiply-accumulates; and semirings.

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
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.lang.checks import required
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric
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


COMPLEX = Algebra(None, [[[1, 0], [0, 1]], [[0, 1], [-1, 0]]], ("real", "imag"), (1, -1))
SPLIT_COMPLEX = Algebra(None, [[[1, 0], [0, 1]], [[0, 1], [1, 0]]], ("real", "hyper"), (1, -1))
DUAL = dual(1)
QUATERNION = Algebra(None, [[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
                            [[0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 1], [0, 0, -1, 0]],
                            [[0, 0, 1, 0], [0, 0, 0, -1], [-1, 0, 0, 0], [0, 1, 0, 0]],
                            [[0, 0, 0, 1], [0, 0, 1, 0], [0, -1, 0, 0], [-1, 0, 0, 0]]],
                     ("real", "i", "j", "k"), (1, -1, -1, -1))


# --------------------------------------------------------------------------------------------------
# Semirings: products in which other operations stand for addition and multiplication.
#
# ``D_ij = C_ij + A_i0 * B_0j + A_i1 * B_1j + ...`` with ``+`` and ``*`` two plain Python functions, on the ordinary units.
# The shipped ones:
#
# | | + | * | zero | solves |
# |---|---|---|---|---|
# | `MIN_PLUS` | min | + | infinity | shortest paths |
# | `MAX_PLUS` | max | + | -infinity | longest paths, schedules, Viterbi in logarithms |
# | `MAX_TIMES` | max | * | 0 | most probable paths (of numbers >= 0: with others it is no semiring) |
# | `LOG_SUM_EXP` | log(e^x + e^y) | + | -infinity | sums of probabilities that are kept as logarithms |
# | `OR_AND` | or | and | 0 | reachability: of booleans, or of every bit of integers at once |
#
# **Integers have no infinity**: the largest number of the accumulator's type stands for it (the smallest for -infinity), in
# A and B as in D: what it is added to stays it. Sums of other numbers wrap when they overflow, as integers do. The
# accumulator holds what the result is asked to hold, so that of int8 into int32 no number of A or B is infinite.
#
# **NaN**: ``min`` and ``max`` pass it on, as everywhere in device code: what meets a NaN becomes NaN. (From compute
# capability 8.0 on that costs nothing, but for float64.)

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
        is_one = isinstance(given, type) or (isinstance(given, np.ndarray) and not given.ndim)  # (Iterable, too)
        sample = tuple(given) if isinstance(given, Iterable) and not is_one else (None,)
        if not all(isinstance(x, (int, float, complex, np.bool_, np.number)) for x in sample):
            raise TypeError(f"Semiring(sample={given!r}): a tuple of numbers is needed")
        for name, extent in (("M", M), ("N", N)):
            if isinstance(extent, (np.ndarray, bool)) or (extent is not None and not extent):
                raise ValueError(f"Semiring({name}={extent!r}): a whole number from 1 on is needed, or None")
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
