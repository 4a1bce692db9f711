"""Strided matrices, in global and in shared memory: row-major, column-major, padded, packed, and the zero matrix."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from gemmkit.lang import static  # noqa: F401  (how a Swizzle is compiled)
from gemmkit.lang.aggregates import fill
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import Elements, Numeric, SharedPointer, View
from gemmkit.lang.registers import each, generate, join, split
from gemmkit.layouts.base import (
    GlobalLayout,
    OfArray,
    ResultLayout,
    SharedLayout,
    element_tile,
    load_elements,
    store_elements,
)
from gemmkit.ptx.copy_async import offset_of
from gemmkit.ptx.memory import load_global, load_shared, store_global, store_shared, store_words
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.shapes import CHUNK, Swizzle, lines
from gemmkit.tiling import Coord, Tile

LINE = 16                              # elements, and more, that lie side by side
PAIR = 2                               # neighbours that a thread of every kernel holds, and `Packed` makes one


@dataclass(frozen=True)
class Plain(GlobalLayout, ResultLayout, SharedLayout):
    """A strided matrix: what row- and column-major have in common. ``axis`` is the one whose neighbours are adjacent."""

    axis = 0
    array_ndim = 2

    # -- global memory ----------------------------------------------------------------------------------------------

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return data[i, j]

    def store_element(self, data: View, i: int, j: int, value: Numeric, shape: StackShape) -> None:
        data[i, j] = value

    def load(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        if tile.size[self.axis] == tile.count:
            return load_global(data, self.axis, tile.base, tile.offset, tile.count)
        return load_elements(self, data, tile, shape)

    def store(self, data: View, tile: Tile, values: Elements, shape: StackShape) -> None:
        if tile.size[self.axis] == tile.count:
            store_global(data, self.axis, tile.base, tile.offset, values)
        else:
            store_elements(self, data, tile, values, shape)

    def row_offset(self, data: View, i: int) -> int:
        return offset_of(data, (i, 0))

    def column_offset(self, data: View, j: int) -> int:
        return offset_of(data, (0, j))

    # -- shared memory ----------------------------------------------------------------------------------------------

    def leading(self, size: Coord) -> int:
        """Elements from one line to the next in shared memory."""
        return size[self.axis]

    def position(self, coord: Coord, leading: int) -> int:
        """Where a coordinate of a shared tile lies, in elements."""
        return coord[self.axis] + coord[1 - self.axis] * leading

    def load_shared(self, pointer: Any, tile: Any, leading: int) -> Elements:
        """A tile's elements, first dimension fastest: one access when it extends along ``axis`` only."""
        if tile.size[self.axis] == tile.count:
            return load_shared(pointer, self.position(tile.base, leading), self.position(tile.offset, leading), tile.count)
        return join(generate(tile.count, lambda n: _load_shared_element(self, pointer, element_tile(tile, n), leading)))

    def store_shared(self, pointer: Any, tile: Any, values: Elements, leading: int) -> None:
        """Store a tile's elements: one access when it extends along ``axis``, else element by element."""
        if tile.size[self.axis] == tile.count:
            store_shared(pointer, self.position(tile.base, leading), self.position(tile.offset, leading), values)
        else:
            each(lambda value, n: _store_shared_element(value, self, pointer, element_tile(tile, n), leading), values)

    def store_words(self, pointer: SharedPointer, tile: Tile, words: Elements, leading: int) -> None:
        """Store a tile that is a line, as 32-bit words."""
        store_words(pointer, self.position(tile.base, leading), self.position(tile.offset, leading), words)

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def is_plain(self) -> bool:
        return type(self).load is Plain.load and type(self).element is Plain.element

    @property
    def is_separable(self) -> bool:
        return self.is_plain

    @property
    def neighbours(self) -> int:
        return LINE

    @property
    def vector_axis(self) -> int | None:
        return self.axis

    padding = 0

    def physical_size(self, rows: int, columns: int) -> int:
        """Elements of shared memory that a tile takes."""
        size = (rows, columns)
        return (size[self.axis] + self.padding) * size[1 - self.axis]

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return array.shape[0], array.shape[1]

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        if array is None:
            raise ValueError(f"{name} is None, and {self!r} needs an array")
        if array.shape != (rows, columns):
            raise ValueError(f"{name} has shape {array.shape}; ({rows}, {columns}) is needed")
        if array.dtype != self.dtype:
            raise ValueError(f"{name} has dtype {array.dtype} and its layout is {self!r}; convert the array, or give a "
                             f"layout of dtype {array.dtype}")


@dataclass(frozen=True)
class RowMajor(Plain):
    """A matrix whose rows are contiguous (or strided: any leading dimension, any strides).

    In global memory any strides work. If the last axis has stride 1, accesses are as wide as the strides and the address
    allow; otherwise the kernel moves single elements. As a shared layout, row (i) of a tile of C columns starts at element
    i * C.
    """

    axis = 1


@dataclass(frozen=True)
class ColMajor(Plain):
    """A matrix whose columns are contiguous; otherwise as `RowMajor`."""

    axis = 0


@dataclass(frozen=True)
class Padded(SharedLayout):
    """A shared layout whose lines are ``padding`` elements longer, which moves them to other banks.

    >>> Padded(RowMajor("float16"), 8).physical_size(64, 32)
    2560
    """

    layout: Plain
    padding: int

    def __init__(self, layout: Plain, padding: int):
        if not isinstance(layout, Plain):
            raise TypeError(f"Padded(layout={layout!r}): a RowMajor or ColMajor layout is needed")
        if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
            raise ValueError(f"Padded(padding={padding!r}): a number of elements, 0 or more, is needed")
        for name, value in (("layout", layout), ("padding", padding), ("dtype", layout.dtype)):
            object.__setattr__(self, name, value)

    @property
    def axis(self) -> int:
        return self.layout.axis

    @property
    def vector_axis(self) -> int | None:
        return self.layout.axis

    def leading(self, size: Coord) -> int:
        return self.layout.leading(size) + self.padding

    def position(self, coord: Coord, leading: int) -> int:
        return self.layout.position(coord, leading)

    def load_shared(self, pointer: SharedPointer, tile: Coord, leading: int) -> Elements:
        return self.layout.load_shared(pointer, tile, leading)

    def store_shared(self, pointer: SharedPointer, tile: Coord, values: Elements, leading: int) -> None:
        self.layout.store_shared(pointer, tile, values, leading)

    def store_words(self, pointer: SharedPointer, tile: Tile, words: Elements, leading: int) -> None:
        self.layout.store_words(pointer, tile, words, leading)

    def physical_size(self, rows: int, columns: int) -> int:
        size = (rows, columns)
        return (size[self.axis] + self.padding) * size[1 - self.axis]

    def __repr__(self) -> str:
        return f"Padded({self.layout!r}, {self.padding})"


@dataclass(frozen=True)
class Zero(GlobalLayout):
    """A matrix of zeros that is nowhere in memory: the C of a product without C. Reads nothing."""

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return 0

    def load(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        return fill(self.dtype, tile.count, 0)


@dataclass(frozen=True)
class Discarded(ResultLayout):
    """A D that is nowhere in memory: nothing of it is allocated or stored. Its elements are numbers of ``dtype`` where an
    epilogue reduces or writes them; None leaves the type to the operands, as for a new D. `gemmkit.layouts.Discard` gives it
    to a call."""

    dtype: Any = None

    is_discarded = True

    def __post_init__(self) -> None:
        if self.dtype is not None:
            super().__post_init__()

    def store(self, data: View, tile: Tile, values: Elements, shape: StackShape) -> None:
        """Nothing is stored."""

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return 0, 0

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        if array is not None:
            raise ValueError(f"{name} is given, and its layout {self!r} stores nothing; leave out one of the two")


@dataclass(frozen=True)
class FoldedColumns(OfArray, GlobalLayout, ResultLayout):
    """Base class of D's layouts whose array has fewer columns than the kernel computes, because an epilogue makes one value
    of several: elements are stored in the order of ``layout``, at coordinates of the array."""

    layout: Plain

    # -- device methods ---------------------------------------------------------------------------------------------

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return self.layout.element(data, i, j, shape)

    def store_element(self, data: View, i: int, j: int, value: Numeric, shape: StackShape) -> None:
        self.layout.store_element(data, i, j, value, shape)

    def store(self, data: View, tile: Tile, values: Elements, shape: StackShape) -> None:
        self.layout.store(data, tile, values, shape)

    # -- host -------------------------------------------------------------------------------------------------------

    def stored_columns(self, columns: int) -> int:
        """Columns of the array, of so many that the kernel computes."""
        raise NotImplementedError

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return self.layout.array_shape(rows, self.stored_columns(columns))

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        self.layout.check(array, rows, self.stored_columns(columns), name)


@dataclass(frozen=True)
class Packed(FoldedColumns):
    """A D with half the columns that the kernel computes, stored in the order of ``layout``; coordinates are those of the
    array. A configuration whose epilogue is a `gemmkit.epilogues.Pack` wraps its ``global_d_layout`` in this one.

    Raises ConfigError for a layout that is not plain.
    """

    packed = PAIR

    def __init__(self, layout: ResultLayout):
        if not isinstance(layout, Plain):
            raise ConfigError(f"global_d_layout={layout!r}: packed results go into a plain matrix (RowMajor, ColMajor); "
                              "those of a fold are packed by the fold's function")
        for name, value in dict(dtype=layout.dtype, layout=layout).items():
            object.__setattr__(self, name, value)

    def stored_columns(self, columns: int) -> int:
        return columns // PAIR

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return array.shape[0], array.shape[1] * PAIR


def _load_shared_element(layout: Any, pointer: Any, at: Any, leading: int) -> Elements:
    return load_shared(pointer, layout.position(at.base, leading), layout.position(at.offset, leading), 1)


def _store_shared_element(value: Any, layout: Any, pointer: Any, at: Any, leading: int) -> None:
    store_shared(pointer, layout.position(at.base, leading), layout.position(at.offset, leading), (value,))


# --------------------------------------------------------------------------------------------------
# Swizzled shared layouts: the order in which TMA writes, tensor cores read, and no two lines share banks.

RUN = 8                                # neighbours in the tensor's memory: 16 bytes of 16-bit elements
BOX = RUN * RUN
PATTERN = 1024                                 # bytes of the widest swizzle's pattern: tiles that begin there suit any


def pattern_of(size: int) -> int:
    """``size`` bytes, up to the next place where a swizzled tile may begin."""
    return -(-size // PATTERN) * PATTERN


@dataclass(frozen=True)
class Swizzled(SharedLayout):
    """A shared tile in panels of ``width`` bytes (32, 64 or 128) along the contiguous axis of ``layout``.

    A panel holds all lines of the tile, ``width`` bytes of each, one after the other; within a panel the 16-byte chunks of
    a line change places: bits 4-6 of an element's byte address are XORed with bits 7-9 (for 128 bytes; with 64 two bits,
    with 32 one). So 8 neighbours across lines lie in different banks, as do 8 along a line. It is the 32-, 64- and 128-byte
    swizzle of TMA and of wgmma's matrix descriptors (PTX ISA, "Shared memory matrix layout"), whose patterns start at
    multiples of 8 lines: tiles must be aligned to 8 * ``width`` bytes.

    >>> from gemmkit.layouts import RowMajor
    >>> layout = Swizzled(RowMajor("float16"), 128)
    >>> [layout.position((row, 0), 64) for row in range(4)]
    [0, 72, 144, 216]

    Raises TypeError for a layout that is not plain, ValueError for another width.
    """

    layout: Plain
    width: int

    def __init__(self, layout: Plain, width: int = 128):
        if not isinstance(layout, Plain):
            raise TypeError(f"Swizzled(layout={layout!r}): a RowMajor or ColMajor layout is needed")
        if not isinstance(width, int) or width not in (32, 64, 128):
            raise ValueError(f"Swizzled(width={width!r}): the hardware swizzles lines of 32, 64 or 128 bytes")
        for name, value in (("layout", layout), ("width", width), ("dtype", layout.dtype)):
            object.__setattr__(self, name, value)

    @property
    def axis(self) -> int:
        return self.layout.axis

    @property
    def vector_axis(self) -> int | None:
        return self.layout.axis

    @cached_property                           # with the next ones: the emulator asks for every access
    def line(self) -> int:
        """Elements of a panel's line."""
        return self.width // int(self.dtype.itemsize)

    @cached_property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @cached_property
    def chunk(self) -> int:
        """Elements that stay together."""
        return max(1, CHUNK // self.itemsize)

    @cached_property
    def swizzle(self) -> Swizzle:
        """How the elements of a panel change places: whole chunks of them."""
        return lines(self.width, self.itemsize)

    is_linear = False
    padding = 0

    def leading(self, size: Coord) -> int:
        """Lines of a tile: what tells where the next panel starts."""
        return size[1 - self.axis]

    def position(self, coord: tuple[int, ...], leading: int) -> int:
        """Where a coordinate of a shared tile lies, in elements."""
        along, across = coord[self.axis], coord[1 - self.axis]
        linear = across * self.line + along % self.line
        return along // self.line * (leading * self.line) + self.swizzle(linear)  # type: ignore[no-any-return]

    origin = 0                         # the line at which the first panel begins

    def lines_to(self, panel: int, lines: int) -> int:
        """How many lines a panel begins behind the first, in a tile of so many lines."""
        return panel * lines

    # A line of a power of two elements, at most a chunk and at a multiple of its length, is one access; a longer one an
    # access for each of its chunks. `get_config` refuses tiles of threads that are neither.

    def load_shared(self, pointer: Any, tile: Any, leading: int) -> Elements:
        """A tile's elements, first dimension fastest: in accesses of whole chunks when it extends along ``axis`` only."""
        if tile.size[self.axis] != tile.count:
            return join(generate(tile.count, lambda n: load_shared(pointer, _ahead(self, tile, n, leading), 0, 1)))
        if tile.count > self.chunk:
            return join(generate(tile.count // self.chunk, lambda n: load_shared(
                pointer, _ahead(self, tile, n * self.chunk, leading), 0, self.chunk)))
        return load_shared(pointer, self.position(tile.index, leading), 0, tile.count)

    def store_shared(self, pointer: Any, tile: Any, values: Elements, leading: int) -> None:
        if tile.size[self.axis] != tile.count:
            each(lambda value, n: store_shared(pointer, _ahead(self, tile, n, leading), 0, (value,)), values)
        elif tile.count > self.chunk:
            each(lambda chunk, n: store_shared(pointer, _ahead(self, tile, n * self.chunk, leading), 0, chunk),
                 split(values, self.chunk))
        else:
            store_shared(pointer, self.position(tile.index, leading), 0, values)

    def store_words(self, pointer: Any, tile: Any, words: Elements, leading: int) -> None:
        """Store a line, as 32-bit words."""
        if tile.count > self.chunk:
            each(lambda chunk, n: store_words(pointer, _ahead(self, tile, n * self.chunk, leading), 0, chunk),
                 split(words, CHUNK // 4))
        else:
            store_words(pointer, self.position(tile.index, leading), 0, words)

    def physical_size(self, rows: int, columns: int) -> int:
        size = (rows, columns)
        return -(-size[self.axis] // self.line) * self.line * size[1 - self.axis]

    def __repr__(self) -> str:
        return f"Swizzled({self.layout!r}, {self.width})"


@dataclass(frozen=True)
class Sliding(Swizzled):
    """A swizzled tile whose ``panels`` overlap: each is the same lines, ``step`` lines on (back, if it is negative).

    It holds a convolution's windows: each position is a line, and each tap a panel, which sees the line of another position.
    TMA brings a line once for all taps (`gemmkit.layouts.Im2col.slide`); the tile is for tensor cores alone. Raises
    TypeError and ValueError for what `Swizzled` does not take, for panels that are no count, and for a step of 0.

    >>> from gemmkit.layouts import RowMajor
    >>> layout = Sliding(RowMajor("float16"), 64, panels=3, step=1)      # three taps of 32 channels
    >>> layout.lines(64), [layout.position((8, 32 * tap), 64) for tap in range(3)]
    (72, [256, 288, 328])
    """

    panels: int
    step: int

    def __init__(self, layout: Plain, width: int = 128, *, panels: int, step: int):
        super().__init__(layout, width)
        for name, value in (("panels", panels), ("step", step)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Sliding({name}={value!r}): a whole number is needed")
        if panels < 1 or step == 0:
            raise ValueError(f"Sliding(panels={panels}, step={step}): a panel or more, and a step other than 0, are needed")
        object.__setattr__(self, "panels", panels)
        object.__setattr__(self, "step", step)

    @property
    def origin(self) -> int:                               # type: ignore[override]
        return (self.panels - 1) * max(0, -self.step)

    def lines_to(self, panel: int, lines: int) -> int:
        return panel * self.step

    def lines(self, across: int) -> int:
        """Lines of a tile: whole patterns of the swizzle."""
        return -(-(across + (self.panels - 1) * abs(self.step)) // 8) * 8

    def position(self, coord: tuple[int, ...], leading: int) -> int:
        along, across = coord[self.axis], coord[1 - self.axis]
        line = self.origin + self.lines_to(along // self.line, leading) + across
        return self.swizzle(line * self.line + along % self.line)        # type: ignore[no-any-return]

    def physical_size(self, rows: int, columns: int) -> int:
        return self.lines((rows, columns)[1 - self.axis]) * self.line

    def __repr__(self) -> str:
        return f"Sliding({self.layout!r}, {self.width}, panels={self.panels}, step={self.step})"


def _ahead(layout: Swizzled, tile: Tile, n: int, leading: int) -> int:
    """The position of a tile's n-th element."""
    return layout.position(element_tile(tile, n).index, leading)


@dataclass(frozen=True)
class Boxed(Padded):
    """A padded shared tile of a tensor whose neighbours in memory are eight apart along K (`Matricised`, ``comb`` = 8).

    The layout cuts K into boxes of 64: element ``64 r + 8 q + p`` of K, with p and q below 8, is at ``64 r + 8 p + q`` of
    its line. So 16 bytes of the tensor's memory are 16 bytes of the tile. `operators.BoxMMAOp` reads such a tile, and
    `gemmkit.kernels.sm80.routes.CpAsyncBoxes` fills it; coordinates along K are positions in the line.

    >>> from gemmkit.layouts import ColMajor
    >>> [Boxed(ColMajor("float16"), 8).element_at(n) for n in (0, 1, 8, 64)]
    [0, 8, 1, 64]

    Raises what `Padded` raises.
    """

    __init__ = Padded.__init__

    def element_at(self, n: int) -> int:
        """Which element of K stands at position ``n`` of a line."""
        return n // BOX * BOX + n % RUN * RUN + n // RUN % RUN

    def __repr__(self) -> str:
        return f"Boxed({self.layout!r}, {self.padding})"
