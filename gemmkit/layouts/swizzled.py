"""Swizzled shared layouts: the order in which TMA writes, tensor cores read, and no two lines share banks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmkit.lang.control import choose, each, join, split
from gemmkit.lang.registers import generate
from gemmkit.layouts.base import Layout
from gemmkit.layouts.plain import Plain
from gemmkit.ptx.memory import load_shared, store_shared
from gemmkit.ptx.words import store_words
from gemmkit.tiling import translate_offset

CHUNK = 16                                     # bytes that stay together
PATTERN = 1024                                 # bytes of the widest swizzle's pattern: tiles that begin there suit any


def pattern_of(size: int) -> int:
    """``size`` bytes, up to the next place where a swizzled tile may begin."""
    return -(-size // PATTERN) * PATTERN


@dataclass(frozen=True)
class Swizzled(Layout):
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

    @property
    def line(self) -> int:
        """Elements of a panel's line."""
        return self.width // int(self.dtype.itemsize)

    @property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def chunk(self) -> int:
        """Elements that stay together."""
        return max(1, CHUNK // self.itemsize)

    @property
    def mask(self) -> int:
        """Which bits of an element's index change: those of its chunk in the line."""
        return (self.width - CHUNK) // int(self.dtype.itemsize)

    @property
    def padding(self) -> int:
        return 0

    def leading(self, size: Any) -> int:
        """Lines of a tile: what tells where the next panel starts."""
        return size[1 - self.axis]

    def position(self, coord: Any, leading: int) -> int:
        """Where a coordinate of a shared tile lies, in elements."""
        along, across = coord[self.axis], coord[1 - self.axis]
        linear = across * self.line + along % self.line
        return along // self.line * (leading * self.line) + (linear ^ ((linear >> 3) & self.mask))

    def load_shared(self, pointer: Any, tile: Any, leading: int) -> tuple:
        """A tile's elements, first dimension fastest: in accesses of whole chunks when it extends along ``axis`` only."""
        return choose(tile.size[self.axis] == tile.count, _load_line, _load_block, self, pointer, tile, leading)

    def store_shared(self, pointer: Any, tile: Any, values: tuple, leading: int) -> None:
        choose(tile.size[self.axis] == tile.count, _store_line, _store_block, self, pointer, tile, values, leading)

    def store_words(self, pointer: Any, tile: Any, words: tuple, leading: int) -> None:
        """Store a line, as 32-bit words."""
        choose(tile.count > self.chunk, _store_chunks_of_words, _store_chunk_of_words, words, self, pointer, tile, leading)

    def physical_size(self, rows: int, columns: int) -> int:
        size = (rows, columns)
        return -(-size[self.axis] // self.line) * self.line * size[1 - self.axis]

    def __repr__(self) -> str:
        return f"Swizzled({self.layout!r}, {self.width})"


# A line of a power of two elements, at most a chunk and at a multiple of its length, is one access; a longer one an access
# for each of its chunks. `get_config` refuses tiles of threads that are neither.

def _load_line(layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return choose(tile.count > layout.chunk, _load_chunks, _load_chunk, layout, pointer, tile, leading)


def _load_chunk(layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return load_shared(pointer, layout.position(tile.index, leading), 0, tile.count)


def _load_chunks(layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return join(generate(tile.count // layout.chunk, _load_next_chunk, layout, pointer, tile, leading))


def _load_next_chunk(n: int, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return load_shared(pointer, layout.position(_ahead(tile, n * layout.chunk).index, leading), 0, layout.chunk)


def _ahead(tile: Any, n: int) -> Any:
    """The tile whose first element is the n-th of this one."""
    return translate_offset(tile, n % tile.size[0], n // tile.size[0])


def _load_block(layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return join(generate(tile.count, _load_element, layout, pointer, tile, leading))


def _load_element(n: int, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return load_shared(pointer, layout.position(_ahead(tile, n).index, leading), 0, 1)


def _store_line(layout: Any, pointer: Any, tile: Any, values: tuple, leading: int) -> None:
    choose(tile.count > layout.chunk, _store_chunks, _store_chunk, layout, pointer, tile, values, leading)


def _store_chunks(layout: Any, pointer: Any, tile: Any, values: tuple, leading: int) -> None:
    each(_store_next_chunk, split(values, layout.chunk), layout, pointer, tile, leading)


def _store_next_chunk(values: tuple, n: int, layout: Any, pointer: Any, tile: Any, leading: int) -> None:
    store_shared(pointer, layout.position(_ahead(tile, n * layout.chunk).index, leading), 0, values)


def _store_chunks_of_words(words: tuple, layout: Any, pointer: Any, tile: Any, leading: int) -> None:
    each(_store_next_words, split(words, CHUNK // 4), layout, pointer, tile, leading)


def _store_next_words(words: tuple, n: int, layout: Any, pointer: Any, tile: Any, leading: int) -> None:
    store_words(pointer, layout.position(_ahead(tile, n * layout.chunk).index, leading), 0, words)


def _store_chunk_of_words(words: tuple, layout: Any, pointer: Any, tile: Any, leading: int) -> None:
    store_words(pointer, layout.position(tile.index, leading), 0, words)


def _store_chunk(layout: Any, pointer: Any, tile: Any, values: tuple, leading: int) -> None:
    store_shared(pointer, layout.position(tile.index, leading), 0, values)


def _store_block(layout: Any, pointer: Any, tile: Any, values: tuple, leading: int) -> None:
    each(_store_element, values, layout, pointer, tile, leading)


def _store_element(value: Any, n: int, layout: Any, pointer: Any, tile: Any, leading: int) -> None:
    store_shared(pointer, layout.position(_ahead(tile, n).index, leading), 0, (value,))


__all__ = ["Swizzled"]
