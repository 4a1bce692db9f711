"""Epilogues of several columns: `Fold` makes one value of several products; `Pairs`, `Rotary` and `Pack` see neighbours."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.components import Array, with_fields
from gemmkit.epilogues.base import ComposedEpilogue, Default, Epilogue, answered_by, finish_edge_element
from gemmkit.kernels.collectives.lanes import Lanes, Team, store_together
from gemmkit.kernels.collectives.operand import delivered, finished, inside
from gemmkit.kernels.collectives.scheduler import TileCoord
from gemmkit.lang.checks import dtype_given, function_given, number, numbers, required
from gemmkit.lang.component_products import ProblemShape, StackShape, with_number
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric, SharedPointer, View
from gemmkit.lang.registers import apply, each, generate, join, split
from gemmkit.layouts.base import ResultLayout
from gemmkit.layouts.joined import MOST, OCTET
from gemmkit.layouts.plain import Packed
from gemmkit.ptx.special import thread_index, udiv
from gemmkit.runtime.arrays import describe
from gemmkit.tiling import Tile, translate

if TYPE_CHECKING:
    from gemmkit.kernels.spec import Spec

LINE = Tile(M=1, N=OCTET)              # of each part, and of D


@dataclass(frozen=True)
@answered_by("then", "finishes_blocks", "is_last", "neighbours", "of_result", "reads_tiles", "reduces", "writes")
class Fold(Epilogue):
    """D's element (m, n) is ``f`` of the parts' at (m, n): ``f(gate, up)``, or with the coordinates ``f(gate, up, m, n)``.

    B is a `gemmkit.layouts.InterleavedColumns` of as many parts as ``f`` takes: D = f(A W, A V, ...), in the parts' shape.
    ``f`` receives the sums in the accumulator's type; arrays and NumPy scalars that it captured are kernel arguments. An
    epilogue that follows, ``Fold(f) | Residual(x)``, acts on the folded values at coordinates of D. No epilogue can precede
    a fold.

    Raises TypeError for an ``f`` that is no function of 2 to 6 arguments, ConfigError if B interleaves another number.

    >>> import numpy as np, gemmkit as gk
    >>> x, w, v = np.float32([[1, 2]]), np.float32([[1], [1]]), np.float32([[5], [0]])
    >>> with gk.emulate():
    ...     gk.matmul(x, gk.layouts.InterleavedColumns(w, v), epilogue=Fold(lambda gate, up: max(gate, 0) * up)).tolist()
    [[15.0]]
    """

    alone = "takes interleaved columns, so no epilogue can precede it; make that epilogue part of its function"

    f: Any
    then: Epilogue = Default()

    def __post_init__(self) -> None:
        wanted = "a function of the parts, f(gate, up), or of the parts and the coordinates, f(gate, up, m, n),"
        object.__setattr__(self, "f", function_given(self.f, "Fold", "f", range(2, MOST + 3), wanted))
        if not isinstance(self.then, Epilogue):
            raise TypeError(f"Fold(then={self.then!r}): an Epilogue is needed; wrap a function in epilogues.Elementwise")
        if self.then.stores_itself:
            raise TypeError(f"then={self.then!r} stores D in its own way (it overrides tile or store) and cannot follow a "
                            "Fold; override finish instead")

    # -- device methods ---------------------------------------------------------------------------------------------

    def fold(self, values: Elements, m: int, n: int) -> Any:
        """One value of D from the parts' values at its place."""
        if len(values) == self.arguments:
            return number(self, "f", self.f(*values), values[0])
        return number(self, "f", self.f(*values, m, n), values[0])

    def finish(self, values: Elements, tile: Tile, shape: StackShape) -> Elements:
        return self.then.finish(values, tile, shape)

    def store(self, spec: Any, d: Any, pointer: Any, block_m: int, block_n: int, warp: int, shape: ProblemShape) -> None:
        """Step 6 of the kernels with D's tile in shared memory. The thread that stores eight columns of D loads those eight
        of all parts: lanes lie along rows of D, or down its columns where these are contiguous."""
        own = with_number(shape, "N", spec.d.layout.columns)
        if self.finishes_blocks:
            block = TileCoord(block_m, udiv(block_n, spec.b.layout.slots), own.M, own.N)
            store_together(self, spec, d, pointer, block, warp, own)
        else:
            self.store_lines(spec, d, pointer, block_m, block_n, own)

    def store_lines(self, spec: Spec, d: View, pointer: SharedPointer, block_m: int, block_n: int, own: Any) -> None:
        slots, leading = spec.b.layout.slots, spec.d.shared.leading(spec.block.size)
        rows, lines = spec.block.size.M, spec.block.size.N // (OCTET * spec.b.layout.slots)
        for n in range(thread_index(), rows * lines, spec.threads):
            row, line = (n % rows, udiv(n, rows)) if spec.d.layout.vector_axis == 0 else (udiv(n, lines), n % lines)
            first = translate(LINE, row, line * OCTET * slots)
            parts = generate(spec.b.layout.parts, load_line, spec, pointer, first, leading)
            place = translate(LINE, block_m + row, udiv(block_n, slots) + line * OCTET)
            self.tile(spec, d, place, generate(OCTET, fold_line, self, parts, place, own), own)

    def finish_block(self, values: Elements, group: Lanes, at: Any) -> Elements:
        return self.then.finish_block(values, group, at)

    def values_at(self, spec: Spec, pointer: SharedPointer, tile: Tile, place: Tile, shape: StackShape) -> Elements:
        """Folded values; ``tile`` counts folded columns."""
        first = translate(LINE, tile.index[0], tile.index[1] * spec.b.layout.slots)
        parts = generate(spec.b.layout.parts, load_line, spec, pointer, first, spec.d.shared.leading(spec.block.size))
        return generate(OCTET, fold_line, self, parts, place, shape)

    def complete(self, team: Team, shape: StackShape) -> None:
        self.then.complete(team, shape)

    def ending(self) -> Any:
        return self.then.ending()

    def tile(self, spec: Any, d: Any, tile: Any, values: Elements, shape: Any) -> None:
        """Store folded values; ``shape`` has D's extents."""
        if inside(tile, shape.M, shape.N):
            spec.d.layout.store(d, tile, delivered(spec, finished(self, values, spec.d.layout, tile, shape)), shape)
        else:
            each(finish_edge_element, values, self, spec, d, tile, shape)

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def arguments(self) -> int:
        """How many arguments f takes."""
        return int(required(self.f))

    stores_itself = True
    stores_blocks = False
    passes_on = False

    def stages(self) -> tuple[Epilogue, ...]:
        return (self, *self.then.stages())

    def mapped(self, change: Callable[[Epilogue], Epilogue]) -> Epilogue:
        then = self.then.mapped(change)
        return change(self if then is self.then else with_fields(self, {"then": then}))

    def check(self, M: int, N: int) -> None:
        check = getattr(self.then, "check", None)
        if check is not None:
            check(M, N)

    def __or__(self, other: Any) -> Epilogue:
        return Fold(self.f, other if type(self.then) is Default else ComposedEpilogue(self.then, other))

    def __repr__(self) -> str:
        return f"Fold({self.f!r})" + ("" if type(self.then) is Default else f" | {self.then!r}")


def load_line(part: int, spec: Spec, pointer: SharedPointer, first: Any, leading: int) -> Elements:
    """A part's eight columns."""
    return spec.d.shared.load_shared(pointer, translate(first, 0, part * OCTET), leading)  # type: ignore[no-any-return]


def fold_line(n: int, fold: Any, parts: Elements, place: Tile, shape: StackShape) -> Any:
    """The ``n``-th of eight values of D. Beyond D's edge f gets the coordinates of the nearest element in range."""
    values = generate(len(parts), lambda part: parts[part][n])
    return fold.fold(values, min(place.index[0], shape.M - 1), min(place.index[1] + n, shape.N - 1))


# --------------------------------------------------------------------------------------------------
# `Pairs`, `Rotary` and `Pack`: epilogues of two neighbours in a row of D, or of the product.
#
# A thread holds both. On Hopper lane l of a wgmma fragment has columns 2 (l mod 4) and the next one of an octet. In the
# other kernels a thread takes lines of D's tile from shared memory, of eight columns where D's own vectors lie down its
# columns.

@dataclass(frozen=True)
class Pairwise(Epilogue):
    """An epilogue with ``pair(x, y, m, n)``: two values for those in row m, columns n and n + 1, n even."""

    def pair(self, x: Numeric, y: Numeric, m: int, n: int) -> tuple[Any, ...]:
        return x, y

    def finish_block(self, values: Elements, group: Lanes, at: Any) -> Elements:
        """Beyond D's edge it is asked with the coordinates of the nearest pair in range."""
        return join(apply(finish_pair, split(values, 2), self, group, at))

    # -- host -------------------------------------------------------------------------------------------------------

    finishes_blocks = True
    neighbours = 2
    passes_on = False

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless columns come in pairs."""
        if N % 2:
            raise ValueError(f"{type(self).__name__} needs an even number of columns; the result is {M} x {N}")


def finish_pair(pair: tuple[Any, ...], i: int, epilogue: Any, group: Lanes, at: Any) -> tuple[Any, ...]:
    m, n = group.row_at(2 * i, at), min(group.column(2 * i, at), at.shape.N - 2)
    return numbers(epilogue, "f", epilogue.pair(pair[0], pair[1], m, n), pair)


@dataclass(frozen=True)
class Pairs(Pairwise):
    """For each even n, ``f`` computes D's elements (m, n) and (m, n + 1) from both: ``f(x, y)``, or ``f(x, y, m, n)`` with
    the coordinates of the first, returns a tuple of two.

    It may stand anywhere in a chain, and receives the values at its place. Arrays and NumPy scalars that f captured are
    arguments of the kernel. It works in every kernel, with stacks and folds (after a fold, neighbours are those of D).

    Raises TypeError for an f that is no function of 2 or 4 arguments, ValueError where D has an odd number of columns.

    >>> import numpy as np, gemmkit as gk
    >>> a = np.float32([[1, 2], [3, 4]])
    >>> with gk.emulate():
    ...     gk.matmul(a, np.eye(2, dtype=np.float32), epilogue=Pairs(lambda x, y: (x + y, x - y))).tolist()
    [[3.0, -1.0], [7.0, -1.0]]
    """

    f: Any

    def __post_init__(self) -> None:
        wanted = "f(x, y) or f(x, y, m, n), a function of two neighbours,"
        object.__setattr__(self, "f", function_given(self.f, "Pairs", "f", (2, 4), wanted))

    @property
    def with_coordinates(self) -> bool:
        return required(self.f) == 4

    def pair(self, x: Numeric, y: Numeric, m: int, n: int) -> tuple[Any, ...]:
        if self.with_coordinates:
            return self.f(x, y, m, n)  # type: ignore[no-any-return]
        return self.f(x, y)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Rotary(Pairwise):
    """Rotary position embedding (Su et al., 2021): the pair in columns (2 i, 2 i + 1) of each head turns by an angle of its
    row: x cos - y sin, x sin + y cos.

    Args:
        cos, sin: arrays (M, H / 2) of cos and sin of the angles of each row; H is the size of a head. D's columns are the
            heads side by side: a multiple of H. All products of a stack share the arrays.

    Pairs are neighbours, as in the paper. (Models whose pairs are (i, i + H / 2) have the columns of their weights in
    another order: a permutation of these makes neighbours of them.)

    Raises ValueError for arrays of other shapes.

    >>> import numpy as np, gemmkit as gk
    >>> angles = np.float32([[0.0], [np.pi / 2]])
    >>> with gk.emulate():
    ...     gk.matmul(np.float32([[1, 2], [3, 4]]), np.eye(2, dtype=np.float32),
    ...               epilogue=Rotary(np.cos(angles), np.sin(angles))).round(3).tolist()
    [[1.0, 2.0], [-4.0, 3.0]]
    """

    cos: Array
    sin: Array
    head: int = 0                      # columns of a head: found by the arrays

    array_ndims = MappingProxyType({"cos": 2})

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = [describe(of, f"{name} of Rotary").shape
                  for name, of in (("cos", self.cos), ("sin", self.sin))]
        if len(shapes[0]) != 2 or shapes[0] != shapes[1] or shapes[0][1] == 0:
            raise ValueError(f"Rotary: cos has shape {shapes[0]} and sin {shapes[1]}; both need (M, H / 2), an element for "
                             "each row and each pair of a head")
        object.__setattr__(self, "head", 2 * shapes[0][1])

    def pair(self, x: Numeric, y: Numeric, m: int, n: int) -> tuple[Any, ...]:
        i = n % self.head // 2
        c, s = self.cos[m, i], self.sin[m, i]
        return x * c - y * s, x * s + y * c

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless D has a row for each of the angles', and whole heads."""
        rows = describe(self.cos, "cos").shape[0]
        if rows != M or N % self.head:
            raise ValueError(f"Rotary: cos has shape {(rows, self.head // 2)}, that is angles of {rows} rows and heads of "
                             f"{self.head} columns; the result is {M} x {N}")


# -- one of two -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Pack(Pairwise):
    """D's element (m, j) is ``f`` of the product's (m, 2 j) and (m, 2 j + 1): D has half the product's columns.

    Args:
        f: ``f(x, y)``, or ``f(x, y, m, n)`` with the coordinates of the first in the product, gives a number of ``dtype``.
        dtype: D's, where no out is given.

    It must be the last epilogue of a chain, and acts on the product's columns. D is plain. Hopper's kernel stores it element
    by element, the other kernels in vectors.

    Raises TypeError for an epilogue behind it and for an f that is no function of 2 or 4 arguments, ValueError for an odd
    number of columns, ConfigError where D is not plain, or behind a fold (whose own function can pack).

    Two int4 a byte, clamped and rounded:

    >>> import numpy as np, gemmkit as gk
    >>> def int4(x):
    ...     return np.int32(round(min(max(x, -8), 7))) & 15
    >>> with gk.emulate():
    ...     gk.matmul(np.float32([[1, 2, -1, 9]]), np.eye(4, dtype=np.float32),
    ...               epilogue=Pack(lambda x, y: np.uint8(int4(x) | int4(y) << 4))).tolist()
    [[33, 127]]
    """

    f: Any
    dtype: Any = np.dtype(np.uint8)

    ends = "packs the values of D, so that nothing can follow it"

    def __post_init__(self) -> None:
        wanted = "f(x, y) or f(x, y, m, n), a function of two neighbours,"
        object.__setattr__(self, "f", function_given(self.f, "Pack", "f", (2, 4), wanted))
        object.__setattr__(self, "dtype", dtype_given(self.dtype, "Pack", "dtype"))

    @property
    def with_coordinates(self) -> bool:
        return required(self.f) == 4

    def one(self, x: Numeric, y: Numeric, m: int, n: int) -> Any:
        if self.with_coordinates:
            return number(self, "f", self.f(x, y, m, n), x)
        return number(self, "f", self.f(x, y), x)

    def finish_block(self, values: Elements, group: Lanes, at: Any) -> Elements:
        return apply(pack_pair, split(values, 2), self, group, at)

    # -- host -------------------------------------------------------------------------------------------------------

    is_last = True

    def of_result(self, layout: ResultLayout) -> ResultLayout:
        return layout if isinstance(layout, Packed) else Packed(layout)

    @property
    def result_dtype(self) -> Any:
        return self.dtype


def pack_pair(pair: tuple[Any, ...], i: int, epilogue: Any, group: Lanes, at: Any) -> Any:
    m, n = group.row_at(2 * i, at), min(group.column(2 * i, at), at.shape.N - 2)
    return epilogue.one(pair[0], pair[1], m, n)
