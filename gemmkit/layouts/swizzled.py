"""Swizzled shared layouts: the order in which TMA writes, tensor cores read, and no two lines share banks."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from gemmkit.lang import static  # noqa: F401  (how a Swizzle is compiled)
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, join, split
from gemmkit.lang.registers import generate
from gemmkit.layouts.base import SharedLayout, element_tile
from gemmkit.layouts.plain import Padded, Plain
from gemmkit.ptx.memory import load_shared, store_shared
from gemmkit.ptx.words import store_words
from gemmkit.swizzles import CHUNK, Swizzle, lines

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

    def leading(self, size: Any) -> int:
        """Lines of a tile: what tells where the next panel starts."""
        return size[1 - self.axis]

    def position(self, coord: Any, leading: int) -> int:
        """Where a coordinate of a shared tile lies, in elements."""
        along, across = coord[self.axis], coord[1 - self.axis]
        linear = across * self.line + along % self.line
        return along // self.line * (leading * self.line) + self.swizzle(linear)

    # A line of a power of two elements, at most a chunk and at a multiple of its length, is one access; a longer one an
    # access for each of its chunks. `get_config` refuses tiles of threads that are neither.

    def load_shared(self, pointer: Any, tile: Any, leading: int) -> tuple:
        """A tile's elements, first dimension fastest: in accesses of whole chunks when it extends along ``axis`` only."""
        if tile.size[self.axis] != tile.count:
            return join(generate(tile.count, lambda n: load_shared(pointer, _ahead(self, tile, n, leading), 0, 1)))
        if tile.count > self.chunk:
            return join(generate(tile.count // self.chunk, lambda n: load_shared(
                pointer, _ahead(self, tile, n * self.chunk, leading), 0, self.chunk)))
        return load_shared(pointer, self.position(tile.index, leading), 0, tile.count)

    def store_shared(self, pointer: Any, tile: Any, values: tuple, leading: int) -> None:
        if tile.size[self.axis] != tile.count:
            each(lambda value, n: store_shared(pointer, _ahead(self, tile, n, leading), 0, (value,)), values)
        elif tile.count > self.chunk:
            each(lambda chunk, n: store_shared(pointer, _ahead(self, tile, n * self.chunk, leading), 0, chunk),
                 split(values, self.chunk))
        else:
            store_shared(pointer, self.position(tile.index, leading), 0, values)

    def store_words(self, pointer: Any, tile: Any, words: tuple, leading: int) -> None:
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


def _ahead(layout: Any, tile: Any, n: int, leading: int) -> int:
    """The position of a tile's n-th element."""
    return layout.position(element_tile(tile, n).index, leading)


@dataclass(frozen=True)
class Boxed(Padded):
    """A padded shared tile of a tensor whose neighbours in memory are eight apart along K (`Tensor`, ``comb`` = 8).

    K is cut into boxes of 64: element ``64 r + 8 q + p`` of K, with p and q below 8, stands at ``64 r + 8 p + q`` of its
    line. So 16 bytes of the tensor's memory are 16 bytes of the tile. `operators.BoxMMAOp` reads such a tile, and
    `gemmkit.kernels.sm80.boxes.CpAsyncBoxes` fills it; coordinates along K are positions in the line.

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
