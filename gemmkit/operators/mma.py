"""``MMAOp``: tensor cores by ``mma.sync``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from gemmkit.lang.checks import dtype_given
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, SharedPointer
from gemmkit.lang.registers import Fragment, apply, deal, each, fold, generate, interleave, join, split
from gemmkit.layouts.plain import BOX, RUN, Boxed, Plain
from gemmkit.operators.base import Operator
from gemmkit.ptx.memory import interleave_words, load_shared, pack_narrow, repoint, store_shared, unpack_narrow
from gemmkit.ptx.mma import MMA, SPECS, FragmentMap, MmaSpec, fragment_coordinate, ldmatrix, map_b, map_c, places
from gemmkit.ptx.registers import is_pinned
from gemmkit.ptx.special import lane_index
from gemmkit.ptx.wmma import LOAD, STORE, WmmaSpec
from gemmkit.ptx.wmma import MMA as WMMA
from gemmkit.ptx.wmma import SPECS as WMMA_SPECS
from gemmkit.tiling import Coord, Tile, translate, translate_offset

if TYPE_CHECKING:
    from gemmkit.layouts.base import SharedLayout

# --------------------------------------------------------------------------------------------------
# Between shared memory and the fragments of a warp: by each lane its own values, or by ``ldmatrix``.
#
# A lane loads and stores neighbours at once where its map has some and the layout has them side by side. ``ldmatrix`` is
# for matrix instructions (`gemmkit.ptx.mma`): it gives a lane 32 bits of a row of 16 bytes, as they lie where a row (of
# B: a column) is contiguous along K, transposed where 16-bit elements lie across.

LINE = 16                              # bytes of a row of ldmatrix


def own_place(fragment_map: FragmentMap, tile: Tile, n: int) -> Any:
    """The tile moved to where this lane's n-th value lies."""
    lane = lane_index()
    return translate(tile, fragment_coordinate(fragment_map, lane, n, 0), fragment_coordinate(fragment_map, lane, n, 1))


def pinned_place(fragment_map: FragmentMap, tile: Tile, n: int) -> Any:
    """The same with what is known when a kernel is compiled apart: the base is the same for all of a lane's values."""
    return translate_offset(own_place(fragment_map, tile, 0), fragment_coordinate(fragment_map, 0, n, 0),
                            fragment_coordinate(fragment_map, 0, n, 1))


# -- element by element -----------------------------------------------------------------------------------------------

def load_elements(fragment_map: Any, width: int, layout: SharedLayout, pointer: SharedPointer, tile: Tile,
                  leading: int) -> Elements:
    """A fragment, ``width`` neighbours at a time."""
    return join(generate(fragment_map.values // width, _load_group, width, 1, fragment_map, layout, pointer, tile, leading))


def load_apart(fragment_map: FragmentMap, width: int, apart: int, layout: SharedLayout, pointer: SharedPointer, tile: Tile,
               leading: int) -> Elements:
    """A fragment, ``width`` neighbours at a time, which are ``apart`` values from each other in it."""
    groups = generate(fragment_map.values // width, _load_group, width, apart, fragment_map, layout, pointer, tile, leading)
    return join(apply(_interleaved, split(groups, apart)))


def _load_group(n: int, width: int, apart: int, fragment_map: FragmentMap, layout: Plain, pointer: SharedPointer, tile: Tile,
                leading: int) -> Elements:
    if is_pinned(pointer):
        at = pinned_place(fragment_map, tile, _first(n, width, apart))
    else:                              # apart, FFMA loops of the single-stage kernel would be unrolled once, not four times
        at = own_place(fragment_map, tile, _first(n, width, apart))
    return load_shared(pointer, layout.position(at.base, leading), layout.position(at.offset, leading), width)


def _interleaved(groups: Elements, _: int) -> Elements:
    return interleave(groups)


def store_elements(fragment_map: FragmentMap, width: int, apart: int, layout: SharedLayout, pointer: SharedPointer,
                   tile: Tile, leading: int, values: Elements) -> None:
    """A fragment, ``width`` neighbours at a time, which are ``apart`` values from each other in it."""
    each(_store, join(apply(_dealt, split(values, width * apart), apart)), width, apart, fragment_map, layout, pointer, tile,
         leading)


def _first(n: int, width: int, apart: int) -> int:
    """Which value the n-th group of neighbours begins with."""
    return n % apart + n // apart * apart * width


def _dealt(values: Elements, _: int, apart: int) -> Elements:
    return deal(values, apart)


def _store(values: Elements, n: int, width: int, apart: int, fragment_map: FragmentMap, layout: Plain,
           pointer: SharedPointer, tile: Tile, leading: int) -> None:
    at = own_place(fragment_map, tile, _first(n, width, apart))
    store_shared(pointer, layout.position(at.base, leading), layout.position(at.offset, leading), values)


def element_place(fragment_map: Any, layout: Plain, tile: Tile, leading: int) -> int:
    """Where a lane's elements begin."""
    return layout.position(own_place(fragment_map, tile, 0).base, leading)


# -- matrices ---------------------------------------------------------------------------------------------------------

def a_along(operator: MMAOp, tile: Tile) -> Any:
    """A, contiguous along K: lane l addresses row l % 16, 16 bytes further along K from lane 16 on."""
    return translate(tile, lane_index() % 16, lane_index() // 16 * operator.line)


def a_mn_major(operator: Operator, tile: Tile) -> Any:
    """A of 16-bit elements, contiguous along M: lane l addresses column l % 8 of one of four 8 x 8 matrices (of K = 8:
    of two)."""
    return translate(tile, lane_index() // 8 % 2 * 8, lane_index() % 8 + lane_index() // 16 * 8)


def b_along(operator: MMAOp, tile: Tile) -> Any:
    """B, contiguous along K: lane l addresses column l % 8, further along K and then 8 columns on in turn."""
    return translate(tile, lane_index() // 8 % operator.lines * operator.line,
                     lane_index() % 8 + lane_index() // (8 * operator.lines) * operator.further)


def b_mn_major(operator: MMAOp, tile: Tile) -> Any:
    """B of 16-bit elements, contiguous along N: lane l addresses row l % 16 (of K = 8: l % 8), and then 8 columns on."""
    rows = 8 * operator.lines
    return translate(tile, lane_index() % rows, lane_index() // rows * operator.further)


def load_matrices(layout: Plain, pointer: SharedPointer, tile: Tile, leading: int, count: int, trans: bool) -> Elements:
    """``ldmatrix``; ``tile`` lies where this lane's row does."""
    return ldmatrix(pointer, layout.position(tile.base, leading), layout.position(tile.offset, leading), count, trans)


_SUMS = {"i": np.dtype(np.int32), "u": np.dtype(np.int32)}


@dataclass(frozen=True)
class MMAOp(Operator):
    """Products of a warp on tensor cores; sm_75+.

    | ``dtype`` | M x N x K | ``accumulator`` | from |
    |---|---|---|---|
    | float16, bfloat16 | 16 x 8 x 16 (float16: 8) | float32 (of float16 also float16) | sm_80 (8: sm_75) |
    | float32: its products are those of tf32 | 16 x 8 x 8 (or 4) | float32 | sm_80 |
    | int8, uint8 | 16 x 8 x 32; 8 x 8 x 16 | int32; sums wrap | sm_80; sm_75 |
    | float8_e4m3fn, float8_e5m2 | 16 x 8 x 32 | float32 | sm_89 |
    | float64 | 16 x 8 x 8 (4 or 16); 8 x 8 x 4 | float64 | sm_90; sm_80 |

    tf32 rounds inputs to 10 bits of mantissa; gemmkit never chooses it for the caller. ``b_dtype`` is for 8-bit types, which
    can be mixed. N = 16 issues two instructions, with both columns of B in one ``ldmatrix``.

    Shared operands may be contiguous along K, or along M and N; 8-bit operands along K only. `padding` returns the bytes by
    which a line is longer, so that no two accesses of a warp meet in a bank.

    Raises ValueError for a shape or dtypes that no instruction has.

    >>> MMAOp(dtype="float64").shape
    (16, 8, 8)
    """

    M: int = 16
    N: int = 8
    K: Any = None
    dtype: Any = np.float16
    accumulator: Any = None
    b_dtype: Any = None

    merges = True
    has_places = True

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype = dtype_given(self.dtype, "MMAOp")
        b_dtype = dtype if self.b_dtype is None else dtype_given(self.b_dtype, "MMAOp", "b_dtype")
        accumulator = (_usual_sums(dtype) if self.accumulator is None
                       else dtype_given(self.accumulator, "MMAOp", "accumulator"))
        K = _usual_depth(dtype) if self.K is None else self.K
        for name, value in (("dtype", dtype), ("b_dtype", b_dtype), ("accumulator", accumulator), ("K", K)):
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        given = self.dtype, self.b_dtype, self.accumulator
        if given not in {key[2:] for key in SPECS}:
            known = dict.fromkeys(f"{a} x {b} -> {acc}" if a != b else f"{a} -> {acc}" for _, _, a, b, acc in SPECS)
            said = f", b_dtype={self.b_dtype}" if self.b_dtype != self.dtype else ""
            raise ValueError(f"MMAOp(dtype={self.dtype}, accumulator={self.accumulator}{said}): the instructions have "
                             + ", ".join(known))
        if not all(isinstance(x, int) for x in self.shape) or self.N not in (8, 16) or self._key not in SPECS:
            shapes = ", ".join(f"M={M}, N=8 or 16, K={K}" for M, K, *types in SPECS if tuple(types) == given)
            raise ValueError(f"MMAOp(M={self.M}, N={self.N}, K={self.K}): the shapes for {self.dtype} are {shapes}")

    def __repr__(self) -> str:
        """As one would write it, without what follows from the dtype."""
        usual = {"M": 16, "N": 8, "K": _usual_depth(self.dtype), "dtype": np.dtype(np.float16),
                 "accumulator": _usual_sums(self.dtype), "b_dtype": self.dtype}
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        parts = [f"{name}={getattr(value, 'name', value)!r}" for name, value in given.items() if value != usual.get(name)]
        return f"{type(self).__name__}({', '.join(parts)})"

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        return self.spec.minimum_arch

    def instead(self, arch: tuple[int, int]) -> str:
        """The shape of the same dtypes that the GPU has, if it has one."""
        there = (dataclasses.replace(self, M=spec.M, K=spec.K) for key, spec in SPECS.items()
                 if key[2:] == self._key[2:] and spec.minimum_arch <= arch)
        return " or ".join((*map(repr, list(there)[:1]), super().instead(arch)))

    @cached_property
    def _key(self) -> Any:
        return self.M, self.K, self.dtype, self.b_dtype, self.accumulator

    @cached_property
    def spec(self) -> MmaSpec:
        return SPECS[self._key]

    @cached_property
    def instruction(self) -> Callable[..., Elements]:
        return MMA[self._key]

    # -- which lane holds what ------------------------------------------------------------------------------------------

    @cached_property
    def map_a(self) -> FragmentMap:
        return self.spec.a

    @cached_property
    def map_b(self) -> FragmentMap:
        return map_b(self.K, self.N, self.b_dtype.itemsize)

    @cached_property
    def map_c(self) -> FragmentMap:
        return map_c(self.M, self.N)

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, self.map_a.values)

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.b_dtype, self.map_b.values)

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(self.accumulator, self.map_c.values)

    # -- how they come out of shared memory -----------------------------------------------------------------------------

    @cached_property
    def line(self) -> int:
        """Elements in a row of ldmatrix."""
        return LINE // int(self.dtype.itemsize)

    @cached_property
    def lines(self) -> int:
        """Rows of ldmatrix along K: 1 or 2."""
        return int(self.K) // self.line

    @cached_property
    def columns(self) -> int:
        """Instructions side by side."""
        return self.N // 8

    @cached_property
    def further(self) -> int:
        """Columns from one instruction to the next, if there is one: no lane addresses what is not the operation's."""
        return 8 * (self.columns - 1)

    def by_matrices(self, operand: str, axis: int) -> bool:
        """Whether ``ldmatrix`` loads A or B, contiguous along ``axis`` of the matrix, and not each lane its elements."""
        return self.along_by_matrices if axis == (1 if operand == "a" else 0) else self.mn_major_by_matrices

    @cached_property
    def along_by_matrices(self) -> bool:
        """Where inputs are contiguous along K."""
        return bool(self.dtype.itemsize < 8)

    @cached_property
    def mn_major_by_matrices(self) -> bool:
        """Where they are not: ldmatrix turns elements of 16 bits alone."""
        return bool(self.dtype.itemsize == 2)

    def refuses(self, operand: str, layout: Any) -> str | None:
        if operand in ("a", "b") and self.dtype.itemsize == 1 and not self.by_matrices(operand, layout.axis):
            order = "RowMajor" if operand == "a" else "ColMajor"
            return (f"{self!r} loads elements of 8 bits that are contiguous along K only; use Padded({order}(...), 16), and "
                    "the copy to shared memory turns them")
        return None

    def line_alignment(self, operand: str, layout: Any) -> int:
        """16 bytes for ``ldmatrix``, pairs of neighbours for C and D."""
        if operand in ("a", "b"):
            return LINE if self.by_matrices(operand, layout.axis) else int(layout.dtype.itemsize)
        return int(layout.dtype.itemsize) * (2 if layout.axis == 1 else 1)

    def shared_axis(self, operand: str, axis: int) -> int:
        """Elements of 8 bits along K, wherever they come from."""
        if self.dtype.itemsize > 1 or operand not in ("a", "b"):
            return axis
        return 1 if operand == "a" else 0

    def padding(self, operand: str, axis: int) -> int:
        """ldmatrix reads 16 bytes of 8 lines at a time: 16. Lanes that load elements read 32 bytes of 4 lines: 32. Pairs of
        float64 go out in 64 bytes of 2 lines: 64."""
        if operand in ("a", "b"):
            return 16 if self.by_matrices(operand, axis) else 32
        return 64 if axis == 1 and self.accumulator.itemsize == 8 else 16

    def load_a(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int) -> Elements:
        if layout.axis == 1 and self.along_by_matrices:
            return load_matrices(layout, pointer, a_along(self, tile), leading, self.M // 8 * self.lines, False)
        if layout.axis == 0 and self.mn_major_by_matrices:
            return load_matrices(layout, pointer, a_mn_major(self, tile), leading, 2 * self.lines, True)
        return load_elements(self.map_a, 1, layout, pointer, tile, leading)

    def load_b(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int) -> Elements:
        if layout.axis == 0 and self.along_by_matrices:
            return load_matrices(layout, pointer, b_along(self, tile), leading, self.lines * self.columns, False)
        if layout.axis == 1 and self.mn_major_by_matrices:
            return load_matrices(layout, pointer, b_mn_major(self, tile), leading, self.lines * self.columns, True)
        return load_elements(self.map_b, 1, layout, pointer, tile, leading)

    def place_a(self, layout: Plain, tile: Tile, leading: int) -> int:
        if layout.axis == 1 and self.along_by_matrices:
            return layout.position(a_along(self, tile).base, leading)
        if layout.axis == 0 and self.mn_major_by_matrices:
            return layout.position(a_mn_major(self, tile).base, leading)
        return element_place(self.map_a, layout, tile, leading)

    def place_b(self, layout: Plain, tile: Tile, leading: int) -> int:
        if layout.axis == 0 and self.along_by_matrices:
            return layout.position(b_along(self, tile).base, leading)
        if layout.axis == 1 and self.mn_major_by_matrices:
            return layout.position(b_mn_major(self, tile).base, leading)
        return element_place(self.map_b, layout, tile, leading)

    def load_c(self, layout: Plain, pointer: SharedPointer, tile: Coord, leading: int) -> Elements:
        """Pairs of neighbours where a row is contiguous, else element by element."""
        if layout.axis == 1:
            return _load_c_rows(self, layout, pointer, tile, leading)
        return _load_c_columns(self, layout, pointer, tile, leading)

    def mma(self, a: Elements, b: Elements, c: Elements) -> Elements:
        return self.instruction(a, b, c)

    def store_d(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int, d: Elements) -> None:
        store_elements(self.map_c, (1, 2)[layout.axis], 1, layout, pointer, tile, leading, d)


def _usual_sums(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.itemsize == 8 else _SUMS.get(dtype.kind, np.dtype(np.float32))


def _usual_depth(dtype: np.dtype) -> int:
    return 8 if dtype.itemsize == 8 else 32 // int(dtype.itemsize)


def _load_c_rows(operator: MMAOp, layout: Plain, pointer: Any, tile: Any, leading: int) -> Elements:
    return load_elements(operator.map_c, 2, layout, pointer, tile, leading)


def _load_c_columns(operator: MMAOp, layout: Plain, pointer: Any, tile: Any, leading: int) -> Elements:
    return load_elements(operator.map_c, 1, layout, pointer, tile, leading)


# --------------------------------------------------------------------------------------------------
# ``BoxMMAOp``: mma.sync for operands that are contiguous along different indices of K.
#
# In a contraction K may stand for two indices, p and q, of which A has neighbours along p and B along q. An operation of
# m16n8k16 sums over 16 places, and any term of K may stand in any place, as long as A and B agree. K is taken in boxes of
# 8 p's by 8 q's, four operations each. Lane (g, t) = (lane / 4, lane % 4) supplies, in operation s of a box, with u = s
# XOR t:
#
# | places of the operation | p | q |
# |---|---|---|
# | 2 t, 2 t + 1 | 2 u | 2 t, 2 t + 1 |
# | 2 t + 8, 2 t + 9 | 2 u + 1 | 2 t, 2 t + 1 |
#
# The places of t = 0 to 3 have all eight q's and, over s, all eight p's: the four operations sum the box. Both operands
# stand in shared memory as in global memory, in pieces of 16 bytes:
#
# * the *combed* operand, contiguous along q, has a piece for each p. The lane loads word t of pieces 2 u and 2 u + 1, the
#   operation's registers as they are;
# * the other, contiguous along p, has a piece for each q. The lane loads word u of pieces 2 t and 2 t + 1, the pairs
#   (2 u, 2 u + 1) of two q's, which two PRMTs make pairs of q's.
#
# u differs among the four t's. With lines padded by 16 bytes the 32 words of a load then lie in 32 banks; with the same
# p's for all lanes, four of the other operand's words would lie in each bank. No value goes from lane to lane.

PIECE, WORD = 16, 4                    # bytes


@dataclass(frozen=True)
class BoxMMAOp(MMAOp):
    """Products on tensor cores of 16-bit operands that are contiguous along different indices of K; sm_80+.

    ``combed`` is "a" or "b": the operand whose neighbours in memory are eight apart along K (a `layouts.Matricised` with
    ``comb`` = 8); it is `layouts.Boxed` in shared memory. The other operand is contiguous along K. The other fields are
    those of `MMAOp`. It requires kernel="multistage", k-tiles of multiples of 64, and no transform between shared memory and
    registers.

    Raises ValueError for dtypes that are not of 16 bits, another K, or no such operand.

    >>> BoxMMAOp(N=16, combed="a")
    BoxMMAOp(N=16, combed='a')
    """

    combed: str = "b"

    __repr__ = MMAOp.__repr__

    def _check(self) -> None:
        super()._check()
        if self.dtype.itemsize != 2 or self.K != 16:
            raise ValueError(f"BoxMMAOp(dtype={self.dtype}, K={self.K}): float16 or bfloat16 and K=16 are needed")
        if self.combed not in ("a", "b"):
            raise ValueError(f"BoxMMAOp(combed={self.combed!r}): 'a' or 'b' is needed")

    def instead(self, arch: tuple[int, int]) -> str:
        return MMAOp(N=self.N, dtype=self.dtype, accumulator=self.accumulator).instead(arch)

    # -- which lane holds what: of A and B that depends on the operation

    @cached_property
    def map_a(self) -> Any:
        return None

    @cached_property
    def map_b(self) -> Any:
        return None

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, 8)

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.dtype, 4 * self.columns)

    # -- shared memory

    def refuses(self, operand: str, layout: Any) -> str | None:
        if operand not in ("a", "b"):
            return None
        along_k = 1 if operand == "a" else 0
        if layout.axis != along_k:
            order = ("ColMajor", "RowMajor")[along_k]
            return f"{self!r} loads lines along K; use Padded({order}(...), {RUN})"
        if isinstance(layout, Boxed) != (operand == self.combed):
            return f"{self!r} reads boxes of {self.combed!r} alone: that operand's shared layout, and no other, is Boxed"
        return None

    def line_alignment(self, operand: str, layout: Any) -> int:
        return WORD if operand in ("a", "b") else super().line_alignment(operand, layout)

    def shared_axis(self, operand: str, axis: int) -> int:
        return {"a": 1, "b": 0}.get(operand, axis)

    def padding(self, operand: str, axis: int) -> int:
        return PIECE

    def place_a(self, layout: Plain, tile: Tile, leading: int) -> int:
        return layout.position(lane_place(tile, 1, self.combed == "a").base, leading)

    def place_b(self, layout: Plain, tile: Tile, leading: int) -> int:
        return layout.position(lane_place(tile, 0, self.combed == "b").base, leading)

    def load_a(self, layout: SharedLayout, pointer: SharedPointer, tile: Tile, leading: int) -> Elements:
        near, far = load_lines(self, 1, self.combed == "a", 2, layout, pointer, tile, leading)
        return unpack_narrow(self.dtype, (near[0], far[0], near[1], far[1]))

    def load_b(self, layout: SharedLayout, pointer: SharedPointer, tile: Tile, leading: int) -> Elements:
        return unpack_narrow(self.dtype, join(load_lines(self, 0, self.combed == "b", self.columns, layout, pointer, tile,
                                                         leading)))


# -- device code ------------------------------------------------------------------------------------------------------

def lane_place(tile: Tile, k_axis: int, is_combed: bool) -> Any:
    """The tile moved to this lane's line (g), and to word t of the line's pieces or to piece 2 t."""
    g, t = lane_index() // 4, lane_index() % 4
    along = 2 * t if is_combed else 2 * RUN * t
    return translate(tile, g, along) if k_axis == 1 else translate(tile, along, g)


def load_lines(operator: MMAOp, k_axis: int, is_combed: bool, lines: int, layout: SharedLayout, pointer: SharedPointer,
               tile: Tile, leading: int) -> Elements:
    """The two words of an operation of each of a lane's lines, which are eight apart."""
    u = tile.offset[k_axis] // 16 % 4 ^ lane_index() % 4
    moved = repoint(pointer, operator.dtype, u * 2 * PIECE if is_combed else u * WORD)
    return generate(lines, load_line, k_axis, is_combed, layout, moved, lane_place(tile, k_axis, is_combed), leading)


def load_line(n: int, k_axis: int, is_combed: bool, layout: Plain, pointer: SharedPointer, tile: Coord,
              leading: int) -> Elements:
    first = load_piece(0, n, k_axis, layout, pointer, tile, leading)
    second = load_piece(1, n, k_axis, layout, pointer, tile, leading)
    if is_combed:
        return first[0], second[0]
    return interleave_words((first, second))


def load_piece(piece: int, n: int, k_axis: int, layout: Any, pointer: Any, tile: Any, leading: int) -> Elements:
    """A word of the box's piece ``piece`` behind the lane's first, of the n-th line."""
    along, across = tile.offset[k_axis] // BOX * BOX + piece * RUN, tile.offset[1 - k_axis] + 8 * n
    ahead = (across, along) if k_axis == 1 else (along, across)
    return pack_narrow(load_shared(pointer, layout.position(tile.base, leading), layout.position(ahead, leading), 2))


# --------------------------------------------------------------------------------------------------
# ``WMMAOp``: tensor cores by the ``wmma`` instructions (the operator of the paper's experiments).

@dataclass(frozen=True)
class WMMAOp(Operator):
    """Products of a warp on tensor cores through ``wmma``, which loads and stores its own fragments.

    | ``dtype`` | M x N x K | ``accumulator`` | from |
    |---|---|---|---|
    | float16, bfloat16 | 16 x 16 x 16, 8 x 32 x 16, 32 x 8 x 16 | float32 (of float16 also float16) | sm_70, sm_80 |
    | int8, uint8 | the same | int32; sums wrap | sm_75 |
    | float32: its products are those of tf32 | 16 x 16 x 8 | float32 | sm_80 |
    | float64 | 8 x 8 x 4 | float64 | sm_80 |

    ``a_order`` and ``b_order`` ("row" or "col") say how the shared tiles are laid out: the fragments depend on it, and
    `get_config` sets them from the shared layouts. Fragments are opaque, so a shared-to-registers transform may not ask
    for coordinates.

    Raises ValueError for a shape or a pair of dtypes that the instructions do not have.

    >>> WMMAOp(8, 8, 4, "float64", "float64").shape
    (8, 8, 4)
    """

    M: int = 16
    N: int = 16
    K: int = 16
    dtype: Any = np.float16
    accumulator: Any = np.float32
    a_order: str = "col"
    b_order: str = "col"

    merges = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dtype", "accumulator"):
            object.__setattr__(self, name, dtype_given(getattr(self, name), "WMMAOp", name))
        shapes = [shape for shape, *kinds in WMMA_SPECS if kinds == [self.dtype, self.accumulator]]
        if not shapes:
            known = ", ".join(sorted({f"{i} -> {a}" for _, i, a in WMMA_SPECS}))
            raise ValueError(f"WMMAOp(dtype={self.dtype}, accumulator={self.accumulator}): the instructions have {known}")
        if self.shape not in shapes:
            raise ValueError(f"WMMAOp(M={self.M}, N={self.N}, K={self.K}): the shapes for {self.dtype} are "
                             + ", ".join("x".join(map(str, s)) for s in shapes))
        for name in ("a_order", "b_order"):
            if getattr(self, name) not in ("row", "col"):
                raise ValueError(f'WMMAOp({name}={getattr(self, name)!r}): "row" or "col" is needed')

    @cached_property
    def _key(self) -> Any:
        return self.shape, self.dtype, self.accumulator

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        return self.spec.minimum_arch

    @cached_property
    def spec(self) -> WmmaSpec:
        return WMMA_SPECS[self._key]

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, self.spec.count("a"))

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.dtype, self.spec.count("b"))

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(self.accumulator, self.spec.count("c"))

    @cached_property
    def load_a_atom(self) -> Callable[..., Elements]:
        return LOAD[self._key, "a", self.a_order]

    @cached_property
    def load_b_atom(self) -> Callable[..., Elements]:
        return LOAD[self._key, "b", self.b_order]

    @cached_property
    def load_c_atoms(self) -> tuple[Callable[..., Elements], ...]:
        return LOAD[self._key, "c", "col"], LOAD[self._key, "c", "row"]

    @cached_property
    def store_d_atoms(self) -> Any:
        return STORE[self._key, "col"], STORE[self._key, "row"]

    @cached_property
    def mma_atom(self) -> Callable[..., Elements]:
        return WMMA[self._key, self.a_order, self.b_order]

    def line_alignment(self, operand: str, layout: SharedLayout) -> int:
        """What the instructions ask of a stride."""
        return 16

    def refuses(self, operand: str, layout: Any) -> str | None:
        order, actual = getattr(self, f"{operand}_order", None), ("col", "row")[layout.axis]
        if order is None or order == actual:
            return None
        return f"{self!r} loads tiles of {operand} in {order} order; give it {operand}_order={actual!r}"

    def load_a(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int) -> Elements:
        return self.load_a_atom(pointer, layout.position(tile.base, leading), layout.position(tile.offset, leading), leading)

    def load_b(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int) -> Elements:
        return self.load_b_atom(pointer, layout.position(tile.base, leading), layout.position(tile.offset, leading), leading)

    def load_c(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int) -> Elements:
        return self.load_c_atoms[layout.axis](pointer, layout.position(tile.base, leading),
                                              layout.position(tile.offset, leading), leading)

    def mma(self, a: Elements, b: Elements, c: Elements) -> Elements:
        return self.mma_atom(a, b, c)

    def store_d(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int, d: Elements) -> None:
        self.store_d_atoms[layout.axis](pointer, layout.position(tile.base, leading),
                                        layout.position(tile.offset, leading), leading, d)


# --------------------------------------------------------------------------------------------------
# ``QuantisedMMAOp``: mma.sync for a B of packed integers, which become float16 or bfloat16 in registers.
#
# D^T = B^T A^T is computed: columns of B are the 16 rows of an instruction, rows of A its 8 columns, of which few are then
# left empty. Any term of K may stand in any place of an operation as long as A and B agree, and any column of B in any
# place as long as D is stored accordingly. So a lane takes what lies beside each other in memory. Lane (g, t) = (lane / 4,
# lane % 4) has
#
# | operand | of an operation of 8 x 32 x 4 R, R integers in a word |
# |---|---|
# | B | the words of columns 4 g to 4 g + 3 and rows t R to t R + R - 1: 16 bytes |
# | A | the same R places along K of row g: R / 8 times 16 bytes, or 8 bytes of float8 |
# | D | columns 4 g to 4 g + 3 of rows 2 t and 2 t + 1 |
#
# Its columns 2 h and 2 h + 1 are what instruction h of two takes for rows g and g + 8. Of the lane's R places along K, pair
# p is (p, p + R / 2), which `gemmkit.ptx.registers` makes at once; instruction s along K takes pairs 2 s and 2 s + 1.
# Nothing passes through shared memory, and no value goes from lane to lane.

F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
COLUMNS = 4                            # of B that a lane has: instructions side by side


@dataclass(frozen=True)
class QuantisedMMAOp(Operator):
    """Products on tensor cores of an A of ``dtype``, float16, bfloat16 or float8_e4m3fn, and a B of integers of ``bits``
    bits in `layouts.GroupQuantised`, with float32 accumulators. It requires sm_80 and kernel="quantised". The sums
    of a warp's part of K are multiplied by its scale if A has a few rows: no weight is rounded. Else weights become float16,
    and then bfloat16 if A is bfloat16, which takes three more instructions a pair. An A of float8_e4m3fn becomes float16,
    which holds it exactly; it has a few rows and 4 bits beside it, and requires sm_89.

    Raises ValueError for other bits than 2 and 4 and for another dtype.

    >>> QuantisedMMAOp(bits=4).shape
    (8, 32, 32)
    """

    bits: int = 4
    dtype: Any = np.float16

    M, N = 8, 32
    merges = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 4):
            raise ValueError(f"QuantisedMMAOp(bits={self.bits!r}): 2 or 4 is needed")
        object.__setattr__(self, "dtype", dtype_given(self.dtype, "QuantisedMMAOp"))
        if self.dtype not in ((F16, BF16, E4M3) if self.bits == 4 else (F16, BF16)):
            raise ValueError(f"QuantisedMMAOp(bits={self.bits}, dtype={self.dtype}): float16 or bfloat16 is needed, or with "
                             "4 bits float8_e4m3fn")

    @property
    def K(self) -> int:
        return 4 * self.rows

    @property
    def rows(self) -> int:
        """Integers in a word."""
        return 32 // self.bits

    @property
    def pairs(self) -> int:
        """Words of float16, or bfloat16, that a word of integers becomes."""
        return self.rows // 2

    @property
    def is_bfloat16(self) -> bool:
        return bool(self.dtype == BF16)

    @property
    def is_float8(self) -> bool:
        return bool(self.dtype == E4M3)

    @property
    def multiplied(self) -> np.dtype:
        """The dtype of an instruction's factors."""
        return BF16 if self.is_bfloat16 else F16

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        return (8, 9) if self.is_float8 else (8, 0)

    def instead(self, arch: tuple[int, int]) -> str:
        return "the default operator, which has B dequantised on its way to shared memory"

    @cached_property
    def instruction(self) -> Callable[..., Elements]:
        return MMA[16, 16, self.multiplied, self.multiplied, F32]

    @cached_property
    def map_c(self) -> FragmentMap:
        return FragmentMap(8, 32, places((4, (2, 0)), (8, (0, 4))), places((4, (0, 1)), (2, (1, 0))))

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, self.rows)

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.dtype, COLUMNS * self.rows)

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(F32, 8)

    def refuses(self, operand: str, layout: SharedLayout) -> str | None:
        if operand in ("a", "b"):
            return f"{self!r} takes A and B from global memory; use kernel='quantised'"
        return None

    def line_alignment(self, operand: str, layout: Any) -> int:
        return int(layout.dtype.itemsize) * (4 if layout.axis == 1 else 1)

    def mma(self, a: Elements, b: Elements, c: Elements) -> Elements:
        """``a``: the pairs of a row's places along K; ``b``: those of four columns; ``c``: four columns of a row, and of the
        next."""
        x, y = generate(2, two_columns, self, a, b, c)
        return x[0], x[2], y[0], y[2], x[1], x[3], y[1], y[3]

    def store_d(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int, d: Elements) -> None:
        store_elements(self.map_c, (1, 4)[layout.axis], 1, layout, pointer, tile, leading, d)


# -- device code ------------------------------------------------------------------------------------------------------

def two_columns(h: int, operator: QuantisedMMAOp, a: Elements, b: Elements, c: Elements) -> Elements:
    """The sums of a lane's columns 2 h and 2 h + 1, of each for two rows."""
    sums = c[2 * h], c[4 + 2 * h], c[2 * h + 1], c[5 + 2 * h]
    return fold(operator.pairs // 2, along_k, sums, operator, a, b[2 * h], b[2 * h + 1])


def along_k(sums: Elements, s: int, operator: QuantisedMMAOp, a: Elements, near: Elements, far: Elements) -> Elements:
    dtype = operator.multiplied
    return operator.instruction(unpack_narrow(dtype, (near[2 * s], far[2 * s], near[2 * s + 1], far[2 * s + 1])),
                                unpack_narrow(dtype, (a[2 * s], a[2 * s + 1])), sums)
