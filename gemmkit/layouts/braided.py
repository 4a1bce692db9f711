"""Several matrices as one whose columns are interleaved, so that one product computes those of all; and D of such a product.

Columns are interleaved eight by eight: eight of the first part, the same eight of the second, and so on, then the next
eight of the first. Why eight: the accumulators of every tensor-core instruction (mma.sync, wgmma) are fragments of eight
columns, of which a thread has the same two in each. So the thread that has column j of one part has column j of all parts
in registers of its own, and a function of them needs no exchange (`gemmkit.epilogues.Fold`). Eight columns of 16-bit
elements are 16 bytes besides: what a thread loads at a time comes from one part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.components import Scalar
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.values import convert, convert_all, fill
from gemmkit.layouts.base import GlobalLayout, OfArray, ResultLayout, load_elements
from gemmkit.layouts.joined import Joined
from gemmkit.layouts.plain import FewerColumns, Plain
from gemmkit.ptx.special import udiv
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.tiling import translate

WORD = np.dtype(np.uint32)
OCTET = 8                              # neighbouring columns of a part, and of an accumulator's fragment
MOST = 4                               # parts: the smallest tiles have 32 columns, eight of each


@dataclass(frozen=True)
class Braided(OfArray, GlobalLayout):
    """B of ``parts`` matrices of ``columns`` columns each, which ``layout`` has side by side.

    The kernel multiplies by ``slots`` parts, the next power of two, so that a tile holds all parts of its columns. Where a
    slot has no part, and in the last eight columns beyond a part's end, elements are 0. D is stored by `Folded`.

    Raises ValueError for fewer than 2 or more than 4 parts. `gemmkit.Braid` makes one from arrays.

    >>> import numpy as np
    >>> from gemmkit.layouts import RowMajor
    >>> side_by_side = np.float32([[*range(8), *range(100, 108)]])
    >>> braid = Braided(RowMajor("float32"), 8, 2)
    >>> [float(braid.element(side_by_side, 0, n, None)) for n in (0, 7, 8, 15)]
    [0.0, 7.0, 100.0, 107.0]
    """

    columns: Scalar
    parts: int
    is_even: bool = False                        # whether the columns are a multiple of eight

    def __init__(self, layout: GlobalLayout, columns: int, parts: int, is_even: bool | None = None):
        if not isinstance(layout, GlobalLayout):
            raise TypeError(f"Braided(layout={layout!r}): a Layout is needed, for example RowMajor('float16')")
        if not isinstance(parts, int) or not 2 <= parts <= MOST:
            raise ValueError(f"Braided(parts={parts!r}): 2 to {MOST} are needed")
        if isinstance(columns, bool) or not isinstance(columns, (int, np.integer)) or columns < 0:
            raise TypeError(f"Braided(columns={columns!r}): the number of columns of each part is needed, 0 or more")
        is_even = columns % OCTET == 0 if is_even is None else is_even
        for name, value in dict(dtype=layout.dtype, layout=layout, columns=columns, parts=parts, is_even=is_even).items():
            object.__setattr__(self, name, value)

    # -- device methods ---------------------------------------------------------------------------------------------

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        part, column = self.part_of(j), self.column_of(j)
        if part < self.parts and column < self.columns:
            return convert(self.dtype, self.layout.element(data, i, part * self.columns + column, shape))
        return convert(self.dtype, 0)

    def load(self, data: Any, tile: Any, shape: Any) -> tuple:
        if self.begins_anywhere:
            return load_elements(self, data, tile, shape)
        if OCTET % tile.size[1] == 0:
            part, column = self.part_of(tile.index[1]), self.column_of(tile.index[1])
            own = translate(tile, 0, part * self.columns + column - tile.index[1])
            if self.is_full and self.is_even:
                return convert_all(self.dtype, self.layout.load(data, own, shape))
            if part < self.parts and column + tile.size[1] <= self.columns:
                return convert_all(self.dtype, self.layout.load(data, own, shape))
            if self.is_even:
                return fill(self.dtype, tile.count, 0)
        return load_elements(self, data, tile, shape)

    def load_packed(self, data: Any, tile: Any, shape: Any) -> tuple:
        """What `load` gives, in 32-bit words, of a tile that it `packs`."""
        part, column = self.part_of(tile.index[1]), self.column_of(tile.index[1])
        own = translate(tile, 0, part * self.columns + column - tile.index[1])
        if self.is_full:
            return self.layout.load_packed(data, own, shape)
        if part < self.parts:
            return self.layout.load_packed(data, own, shape)
        return fill(WORD, tile.count * self.itemsize // 4, 0)

    def found(self, data: Any, i: int, j: int) -> tuple:
        """The array that has an element, and the element's row and column in it."""
        return self.layout.found(data, i, self.part_of(j) * self.columns + self.column_of(j))

    def part_of(self, j: int) -> int:
        """Which part column ``j`` is of: ``parts`` or more where it is of none."""
        return udiv(j, OCTET) % self.slots

    def column_of(self, j: int) -> int:
        """Which of its part's columns it is."""
        return udiv(j, OCTET * self.slots) * OCTET + j % OCTET

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return slots_of(self.parts)

    @property
    def is_found(self) -> bool:
        """Whether `found` finds any element: there is none without a part."""
        return self.is_full and self.is_even and isinstance(self.layout, Joined) and self.layout.is_found

    @property
    def infos(self) -> list[ArrayInfo]:
        return list(self.layout.infos)

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """The fields to the arrays behind the operand's own."""
        return [("layout", *path) for path in self.layout.paths]

    @property
    def line_axis(self) -> int:
        return int(self.layout.line_axis)

    @property
    def neighbours(self) -> int:
        return OCTET

    def packs(self, tile: Any) -> bool:
        return self.is_even and OCTET % tile.extents[1] == 0 and self.layout.packs(tile)

    @property
    def begins_anywhere(self) -> bool:
        """Whether parts of one array begin where no vector does. (Joined ones know what boundaries are multiples of.)"""
        return not self.is_even and not (isinstance(self.layout, Joined) and self.layout.axis == 1)

    @property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def is_full(self) -> bool:
        """Whether every slot has a part."""
        return self.parts == self.slots

    @property
    def run(self) -> int:
        return min(OCTET, super().run) if self.vector_axis == 1 else super().run

    def as_operand(self, name: str, transformed: bool) -> GlobalLayout:
        if name != "b":
            raise ConfigError(f"global_{name}_layout={self!r}: a braid's columns become columns of D: it can be B alone")
        return self

    def of_result(self, layout: ResultLayout) -> ResultLayout:
        return layout if isinstance(layout, Folded) else Folded(layout, self.columns, self.slots)

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return self.layout.extents(array)[0], braided_columns(self.columns, self.slots)

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        self.layout.check(array, rows, self.parts * self.columns, name)


@dataclass(frozen=True)
class Folded(FewerColumns):
    """D of a product by a `Braided` B, of ``columns`` columns in the array; ``folds`` columns are computed for each.

    What is stored is one value for all parts of a column, in the order of ``layout``; coordinates are those of D. A
    configuration whose B is braided makes one of its ``global_d_layout``.

    Raises TypeError for a layout that is not plain.
    """

    columns: Scalar
    folds: int

    def __init__(self, layout: ResultLayout, columns: int, folds: int):
        if not isinstance(layout, Plain):
            raise TypeError(f"out (global_d_layout={layout!r}) of a folded product: RowMajor or ColMajor is needed")
        for name, value in dict(dtype=layout.dtype, layout=layout, columns=columns, folds=folds).items():
            object.__setattr__(self, name, value)

    @property
    def is_separable(self) -> bool:
        return self.layout.is_separable

    def finished_columns(self, columns: int) -> int:
        return self.columns

    def stored_columns(self, columns: int) -> int:
        return self.columns

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return array.shape[0], braided_columns(self.columns, self.folds)


def slots_of(parts: int) -> int:
    """Parts that a tile has room for: the next power of two.

    >>> [slots_of(parts) for parts in (2, 3, 4)]
    [2, 4, 4]
    """
    return 1 << (parts - 1).bit_length()


def braided_columns(columns: int, slots: int) -> int:
    """Columns that a kernel computes of parts of ``columns`` each.

    >>> braided_columns(5, 2), braided_columns(0, 4)
    (16, 0)
    """
    return -(-columns // OCTET) * OCTET * slots
