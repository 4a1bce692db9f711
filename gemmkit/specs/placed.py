"""How a tile lies in shared memory: ``.storage``, ``.pad``, ``.layout`` and ``.swizzle`` of a move to SH, checked.

A layout is dims:strides over a tile's coordinates, a swizzle a permutation of the elements' numbers behind it. `XOR` is the
swizzle that a layout asks for: chunks of 16 bytes change places along a line, by the line's number, so that eight lines'
chunks of one column lie in all 32 banks (they are what eight lanes of ldmatrix, or of 16-byte loads, read at once).
"""

from __future__ import annotations

from math import gcd

import numpy as np

from gemmkit import swizzles
from gemmkit.shapes import Shape, ShapeError
from gemmkit.specs import steps
from gemmkit.strides import span
from gemmkit.swizzles import CHUNK, NONE, Swizzle

#: The swizzle by the numbers of lines.
XOR = "xor"
BANKS = 128                                                   # bytes that shared memory serves at a time


def layout_of(step: steps.Move, extents: tuple[int, int], order: str) -> Shape:
    """The layout of a tile of these extents. Raises ScheduleError for one of other extents, or where elements meet."""
    rows, columns = extents
    if step.layout is None:
        return Shape(extents, (columns + step.pad, 1) if order == steps.ROW_MAJOR else (1, rows + step.pad))
    if step.order is not None or step.pad:
        raise step.refuse(".layout says how all elements lie; leave out .storage and .pad")
    try:
        made = step.layout if isinstance(step.layout, Shape) else Shape.parse(step.layout)
    except ShapeError as error:
        raise step.refuse(f".layout: {error}") from None
    if made.extents != extents:
        raise step.refuse(f".layout {made} is of {' x '.join(map(str, made.extents))}, and the tile is {rows} x {columns}")
    offsets = made.offsets()
    if len(set(offsets)) < len(offsets) or min(offsets) < 0:
        raise step.refuse(f".layout {made} has two elements in one place, or one before the first")
    return made


def swizzle_of(step: steps.Move, layout: Shape, dtype: np.dtype) -> Swizzle:
    """The swizzle of a tile with this layout. Raises ScheduleError where it is no permutation of the tile's elements, or
    takes 16 bytes apart."""
    if step.swizzle is None:
        return NONE
    if step.swizzle == XOR:
        return _by_lines(step, layout, dtype)
    count = 1 + sum(map(span, layout.modes))
    try:
        found = swizzles.of_function(step.swizzle, count)
    except ShapeError as error:
        raise step.refuse(f".swizzle: {error}") from None
    if found.terms and found.run * dtype.itemsize < CHUNK:
        raise step.refuse(f".swizzle takes {CHUNK} bytes apart, {CHUNK // dtype.itemsize} elements that one access moves: "
                          f"from {found.run} on elements change places")
    return found


def _by_lines(step: steps.Move, layout: Shape, dtype: np.dtype) -> Swizzle:
    lines = [dim[0] for dim in layout.modes if len(dim) == 1]
    along = next((extent for extent, stride in lines if stride == 1), 1)
    apart = next((stride for _, stride in lines if stride != 1), 0)
    chunk, size = max(1, CHUNK // dtype.itemsize), dtype.itemsize
    chunks = gcd(along // chunk, BANKS // CHUNK)
    if len(lines) < 2 or apart & (apart - 1) or along % chunk or chunks < 2:
        raise step.refuse(f".swizzle(XOR) is of lines of 32 bytes and more, a power of two apart; {layout} of {dtype} has "
                          "none; give a function of an element's number, or .pad")
    shift = max(apart * size, BANKS) // CHUNK
    return Swizzle((shift.bit_length() - 1, (chunks - 1) * chunk))
