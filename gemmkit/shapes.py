"""Shapes: dimensions and strides, both nested; tiles of them that need not be contiguous (Graphene, sections 3.1 to 3.3).

A `Shape` maps logical coordinates to an offset. A dimension is a whole number, or a tuple of them: a hierarchical dimension,
whose first number varies fastest, with a stride for each number. A dimension takes one coordinate, however it is laid out.
Figure 3c of the paper, in which pairs of columns are neighbours and four rows lie in between:

>>> layout = Shape((4, (2, 4)), (2, (1, 8)))
>>> layout
[(4,(2,4)):(2,(1,8))]
>>> layout(0, 1), layout(1, 0), layout(0, 2)
(1, 2, 8)

Tiles are shapes of shapes. Figure 4d: every other row, and pairs of columns four apart:

>>> outer, inner = Shape((4, 8), (1, 4)).tile(shape(2, 2), shape((2, 2), (1, 4)))
>>> outer, inner
([(2,2):(1,8)], [(2,(2,2)):(2,(4,16))])

A stride is a number, or a `Step`: a number for each dimension of the indexed object. With steps one algebra serves offsets
in memory, coordinates of an array, numbers of threads, and the places of fragments. An extent may be None: it is known at
run time. Coordinates may be run-time numbers too; every function here that takes coordinates is device code
(`gemmkit.lang.static`).
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterable
from functools import lru_cache, reduce
from operator import or_, xor
from typing import Any

from gemmkit.lang.references import Static

__all__ = [
    "ALL", "Shape", "ShapeError", "Step", "local", "shape",
]


# --------------------------------------------------------------------------------------------------
# Strides, and the modes of one dimension: (extent, stride) pairs, the fastest first.
#
# What `gemmkit.shapes` says of dimensions is computed here: which modes visit every second element of a dimension, and
# where tiles of one begin.

Mode = tuple[Any, Any]                                        # (extent, stride)
Modes = tuple[Mode, ...]                                      # of one dimension, the fastest first
NOTHING: Modes = ((1, 0),)                                    # a dimension of one element


class ShapeError(ValueError):
    """Shapes, tiles or coordinates that do not go together."""


class Step(tuple[Any, ...]):
    """A stride of several parts: how far one coordinate leads along each dimension of what is indexed.

    >>> Step((1, 0)) * 3 + Step((0, 2))
    (3, 2)
    """

    __slots__ = ()

    def __mul__(self, count: Any) -> Step:
        return Step(0 if is_number(part, 0) else count if is_number(part, 1) else part * count for part in self)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Step:
        return self if is_number(other, 0) else Step(map(plus, self, other))

    __radd__ = __add__


def walk(dim: Modes, i: Any) -> Any:
    """The offset of one dimension's coordinate: its digits, the first the fastest, times their strides."""
    total: Any = 0
    for extent, stride in dim[:-1]:
        total, i = total + stride * (i % extent), i // extent
    return total + (i if is_number(dim[-1][1], 1) else dim[-1][1] * i)        # a Step multiplies, not a number


# -- the algebra of one dimension -----------------------------------------------------------------------------------------

def composed(dim: Modes, inner: Modes) -> Modes:
    return merged([mode for extent, stride in inner for mode in every(dim, extent, stride)])


def every(dim: Modes, count: Any, apart: int) -> list[Mode]:
    """The modes that visit ``count`` coordinates of a dimension, ``apart`` from each other, from the first on."""
    out, refused = [], f"{count} elements {apart} apart are none of its own strides"
    left, skip = count, apart
    for extent, stride in dim:
        if left == 1:
            break
        if extent is not None and skip >= extent:
            if skip % extent:
                raise ShapeError(refused)
            skip //= extent
            continue
        if extent is None:
            out.append((left, stride * skip))
            left = 1
            break
        if extent % skip:
            raise ShapeError(refused)
        there = extent // skip
        take = there if left is None else min(left, there)
        if left is not None and (left % take or (left < there and there % take)):
            raise ShapeError(refused)
        out.append((take, stride * skip))
        left, skip = None if left is None else left // take, 1
    if left not in (1, None):
        raise ShapeError(f"{count} elements {apart} apart are more than there are")
    return out


def complement(tiler: Modes, extent: int | None) -> Modes:
    out, at = [], 1
    for count, stride in sorted((m for m in tiler if m[0] != 1), key=lambda mode: mode[1]):
        if stride < at or stride % at:
            raise ShapeError("such tiles overlap")
        if stride > at:
            out.append((stride // at, at))
        at = count * stride
    if extent is not None and extent % at:
        raise ShapeError(f"{at} elements (a tile, and what lies between its elements) do not divide {extent}")
    return (*out, (None if extent is None else extent // at, at))


def merged(modes: Iterable[Mode]) -> Modes:
    out: list[Mode] = []
    for extent, stride in modes:
        if extent == 1:
            continue
        if out and out[-1][0] is not None and out[-1][1] * out[-1][0] == stride:
            out[-1] = (None if extent is None else out[-1][0] * extent, out[-1][1])
        else:
            out.append((extent, stride))
    return tuple(out) or NOTHING


def span(modes: Iterable[Mode]) -> int:
    """How far the last element lies from the first, whichever way the strides lead; none from no element.

    >>> span([(4, 1), (2, -8)])
    11
    """
    return sum((extent - 1) * abs(stride) for extent, stride in modes if extent > 1)


# -- numbers ----------------------------------------------------------------------------------------------------------

def is_number(value: Any, number: int) -> bool:
    """Whether it is this number, and no run-time number, of which nothing is known."""
    return type(value) is int and value == number


def plus(a: Any, b: Any) -> Any:
    return b if is_number(a, 0) else a if is_number(b, 0) else a + b


def backwards(items: Any) -> tuple[Any, ...]:
    return tuple(reversed(items))


def flat(dim: Any, stride: Any) -> Iterable[Mode]:
    if isinstance(dim, tuple):
        if type(stride) is not tuple or len(stride) != len(dim):
            raise ShapeError(f"the dimension {dim} has the strides {stride}; give one for each of its {len(dim)} parts")
        for d, s in zip(dim, stride):
            yield from flat(d, s)
        return
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 1):
        raise ShapeError(f"an extent is {dim!r}; give a whole number of at least 1, or None where it is known at run time")
    if isinstance(stride, tuple) and type(stride) is not Step:
        raise ShapeError(f"the dimension {dim} has the strides {stride}; give one number, or a Step")
    yield dim, stride


def row_major(dims: tuple[Any, ...]) -> tuple[Any, ...]:
    """Strides with the last dimension fastest; within a hierarchical one the first part is."""
    strides: list[Any] = []
    at = 1
    for dim in reversed(dims):
        made, at = runs(dim, at)
        strides.insert(0, made)
    return tuple(strides)


def runs(dim: Any, at: Any) -> tuple[Any, Any]:
    if not isinstance(dim, tuple):
        if dim is None:
            raise ShapeError("a dimension that is known at run time needs strides")
        return at, at * dim
    made = []
    for part in dim:
        stride, at = runs(part, at)
        made.append(stride)
    return tuple(made), at


def said(numbers: tuple[Any, ...]) -> str:
    parts = ["?" if n is None else str(n).replace(" ", "") for n in numbers]
    return parts[0] if len(parts) == 1 else f"({','.join(parts)})"


class Shape(Static):
    """Dimensions with their strides: ``Shape(dims, strides)``, in the paper's notation ``[dims:strides]``.

    ``dims`` is a number or a tuple, with a number or a (nested) tuple for each dimension; ``strides`` has the same form.
    Without strides the shape is row-major: the last dimension varies fastest. Raises ShapeError if strides do not have the
    form of the dimensions, or if an extent is less than 1.

    >>> Shape((16, 16))
    [(16,16):(16,1)]
    >>> Shape((16, 16))(1, 2)
    18
    """

    modes: tuple[Modes, ...]
    extents: tuple[Any, ...]
    origin: Any                                               # where the first element is: 0, or a step of as many zeros

    def __init__(self, dims: Any, strides: Any = None):
        dims = dims if isinstance(dims, tuple) else (dims,)
        strides = row_major(dims) if strides is None else strides if type(strides) is tuple else (strides,)
        if len(dims) != len(strides):
            raise ShapeError(f"dims={dims} are {len(dims)} dimensions and strides={strides} are {len(strides)}; "
                             "give a stride for each")
        self._set(tuple(tuple(flat(d, s)) for d, s in zip(dims, strides)))

    def _set(self, modes: tuple[Modes, ...]) -> None:
        self.modes = modes
        self.extents = tuple(None if any(e is None for e, _ in dim) else math.prod(e for e, _ in dim) for dim in modes)
        self.origin = next((Step((0,) * len(s)) for dim in modes for _, s in dim if type(s) is Step), 0)
        self._hash = hash(modes)

    @classmethod
    def of_modes(cls, modes: Iterable[Iterable[Mode]]) -> Shape:
        """The shape of these (extent, stride) pairs a dimension, the fastest first."""
        out = cls.__new__(cls)
        out._set(tuple(tuple(m for m in dim if m[0] != 1) or NOTHING for dim in modes))
        return out

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A shape in the paper's notation (Fig. 2); without strides it is row-major.

        Raises ShapeError for a text that is none.

        >>> Shape.parse("[(4,(2,4)):(2,(1,8))]")(3, 7)
        31
        """
        parts = text.strip().removeprefix("[").removesuffix("]").split(":")
        try:
            dims, *strides = (ast.literal_eval(part) for part in parts)
            if text.strip()[:1] != "[" or text.strip()[-1:] != "]" or len(strides) > 1:
                raise ValueError
        except (ValueError, SyntaxError):
            raise ShapeError(f"{text!r} is not a shape; write [dims:strides], for example [(16,16):(16,1)]") from None
        return cls(dims, *strides)

    # -- what it is -------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Shape) and self.modes == other.modes)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        def part_said(part: int) -> str:
            dims = [said(tuple(mode[part] for mode in dim)) for dim in self.modes]
            if len(dims) > 1:
                return f"({','.join(dims)})"
            return dims[0] if len(self.modes[0]) == 1 else f"({dims[0]},)"        # else it would have two dimensions

        return f"[{part_said(0)}:{part_said(1)}]" if self.modes else "[]"

    @property
    def rank(self) -> int:
        """How many coordinates it takes."""
        return len(self.modes)

    @property
    def size(self) -> int:
        """How many elements it has. Raises ShapeError where an extent is not known."""
        if None in self.extents:
            raise ShapeError(f"how many elements {self} has is known at run time only")
        return math.prod(self.extents)

    def __call__(self, *at: Any) -> Any:
        """The index function: the offset of logical coordinates, one a dimension (section 3.2).

        Raises ShapeError for another number of coordinates. They are not compared with the extents: that is done where
        memory is touched.
        """
        if len(at) != self.rank:
            raise ShapeError(f"{self} has {self.rank} dimensions and was given {len(at)} coordinates")
        total: Any = 0
        for dim, i in zip(self.modes, at):
            if dim != NOTHING and not is_number(i, 0):
                total = walk(dim, i) + total
        return self.origin if is_number(total, 0) else total

    def offsets(self) -> list[Any]:
        """The offsets of all elements, the last coordinate fastest."""
        return [self(*at) for at in itertools.product(*map(range, self._known("its elements")))]

    def places(self, offset: Any) -> tuple[Any, ...]:
        """The coordinates at which a shape has an offset: of thread tensors, where an offset is a thread's number.

        The strides must be those of numbers: each a multiple of the product of what varies faster.

        >>> Shape((2, 2), (16, 8)).places(24)
        (1, 1)
        """
        out = []
        for dim in self.modes:
            at, radix = 0, 1
            for extent, stride in dim:
                if extent != 1:
                    digit = (offset if stride == 1 else offset // stride) % extent
                    at, radix = plus(digit if radix == 1 else digit * radix, at), radix * extent
            out.append(at)
        return tuple(out)

    # -- the algebra ------------------------------------------------------------------------------------------------

    def tile(self, *tilers: Any) -> tuple[Shape, Shape]:
        """(outer, inner): the arrangement of the tiles, and of the elements in each (section 3.3).

        A tiler is a number (neighbours), a 1-D `shape` in logical coordinates (elements apart), or `ALL`. Both results have
        the rank of the tiled shape, and ``outer(*tile) + inner(*element)`` is the element's offset. Raises ShapeError if
        tiles overlap or do not divide a dimension.

        >>> Shape((4, 8), (1, 4)).tile(2, 4)                          # Fig. 4b
        ([(2,2):(2,16)], [(2,4):(1,4)])
        >>> Shape((4, 8), (1, 4)).tile(shape(2, 2), 4)                # Fig. 4c: interleaved rows
        ([(2,2):(1,16)], [(2,4):(2,4)])
        """
        if len(tilers) != self.rank:
            raise ShapeError(f"{self} has {self.rank} dimensions and was given {len(tilers)} tile sizes")
        return _tiled(self, tilers)

    def reshape(self, *extents: int, order: str = "row") -> Shape:
        """The same elements in other dimensions, numbered with the last dimension fastest, or the first (``"column"``).

        Raises ShapeError for another number of elements, or where a dimension would not have strides of its own.

        >>> groups, _ = shape(32).tile(8)                             # Fig. 5: groups of eight threads, two by two
        >>> groups.reshape(2, 2)
        [(2,2):(16,8)]
        """
        if order not in ("row", "column"):
            raise ShapeError(f"order={order!r}; give 'row' or 'column'")
        turn = backwards if order == "row" else tuple
        if math.prod(extents) != self.size:
            given = " x ".join(map(str, extents))
            raise ShapeError(f"{self} has {self.size} elements, and {given} are {math.prod(extents)}")
        fastest_first = tuple(mode for dim in turn(self.modes) for mode in dim)
        out, at = [], 1
        for extent in turn(extents):
            out.append(composed(fastest_first, ((extent, at),)))
            at *= extent
        return Shape.of_modes(turn(out))

    def compose(self, inner: Shape) -> Shape:
        """``self`` of ``inner``, both of one dimension: the shape that has ``self(inner(i))`` at i.

        >>> shape(8, 4).compose(shape(2, 2))
        [2:8]
        """
        return Shape.of_modes([composed(self._only("compose"), inner._only("compose"))])

    def complement(self, extent: int | None) -> Shape:
        """Where the tiles begin of which this 1-D shape is one, in a dimension of ``extent`` elements.

        >>> shape((2, 2), (1, 4)).complement(16)
        [((2,2),):((2,8),)]
        """
        return Shape.of_modes([complement(self._only("complement"), extent)])

    def coalesce(self) -> Shape:
        """The same offsets with fewer numbers: parts of a dimension that follow each other are one.

        >>> Shape(((2, 4), 8), ((1, 2), 8)).coalesce()
        [(8,8):(1,8)]
        """
        return Shape.of_modes(merged(dim) for dim in self.modes)

    def _only(self, what: str) -> Modes:
        if self.rank != 1:
            raise ShapeError(f".{what} is of shapes of one dimension, and {self} has {self.rank}")
        return self.modes[0]

    def _known(self, what: str) -> tuple[int, ...]:
        if None in self.extents:
            raise ShapeError(f"{what}: an extent of {self} is known at run time only")
        return self.extents

class _All(Static):
    """The tiler that leaves a dimension whole (the paper's ``_``)."""

    def __repr__(self) -> str:
        return "ALL"

ALL = _All()


def shape(extent: Any, stride: Any = 1) -> Shape:
    """A shape of one dimension, as tile sizes and groups of threads are: ``shape(2, 2)`` is every other one of four.

    >>> shape((4, 2), (1, 16)).offsets()                              # a quad-pair (Fig. 6)
    [0, 1, 2, 3, 16, 17, 18, 19]
    """
    return Shape((extent,), (stride,))


def local(*extents: int | None) -> Shape:
    """A shape whose strides are steps in coordinates of its own: it leads from coordinates to themselves.

    >>> local(4, None)
    [(4,?):((1,0),(0,1))]
    """
    rank = len(extents)
    return Shape.of_modes(((extent, Step(int(d == n) for n in range(rank))),) for d, extent in enumerate(extents))


@lru_cache(maxsize=4096)
def _tiled(of: Shape, tilers: tuple[Any, ...]) -> tuple[Shape, Shape]:
    outer, inner = [], []
    for number, (dim, extent, tiler) in enumerate(zip(of.modes, of.extents, tilers)):
        if tiler is ALL:
            outer.append(NOTHING)
            inner.append(dim)
            continue
        try:
            modes = merged((tiler if isinstance(tiler, Shape) else shape(tiler))._only("tile"))
            outer.append(composed(dim, complement(modes, extent)))
            inner.append(composed(dim, modes))
        except ShapeError as error:
            raise ShapeError(f"tile size {tiler} of dimension {number} of {of}: {error}") from None
    return Shape.of_modes(outer), Shape.of_modes(inner)


# --------------------------------------------------------------------------------------------------
# Swizzles: permutations of offsets that XOR bits of an offset with bits further up, so that columns meet in no bank.
#
# Shared memory of a GPU has 32 banks of 4 bytes. Rows that begin in the same bank are read one after the other where
# threads read a column of them. A swizzle moves what a row has in a place that depends on the row's number, and takes no
# memory for it, as padding would. TMA's and wgmma's are of this kind (PTX ISA, "Shared memory matrix layout"; CUTLASS's
# ``Swizzle<bits, base, shift>`` is ``Swizzle((shift, mask))`` with ``mask = (2**bits - 1) << base``):
#
# >>> swizzle = lines(128, itemsize=2)                          # rows of 128 bytes, of elements of 2 bytes
# >>> swizzle
# Swizzle((3, 56))
# >>> [swizzle(64 * row) for row in range(4)]                   # chunks of 8 elements change places
# [0, 72, 144, 216]
# >>> swizzle.run, swizzle.period
# (8, 512)

CHUNK = 16                                                    # bytes that the hardware's swizzles keep together


class Swizzle(Static):
    """``i ^ ((i >> shift) & mask) ^ ...``, a term for each ``(shift, mask)``; a negative shift is one to the left.

    Device code as it stands. Of other terms than `lines` and `of_function` give, the caller sees to it that no two offsets
    meet.
    """

    def __init__(self, *terms: tuple[int, int]):
        self.terms = terms

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Swizzle) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(self.terms)

    def __repr__(self) -> str:
        return f"Swizzle({', '.join(map(str, self.terms))})"

    def __call__(self, offset: Any) -> Any:
        """Where an offset goes: a number, an array of them, a run-time number."""
        out = offset
        for shift, mask in self.terms:
            out = out ^ ((offset >> shift if shift >= 0 else offset << -shift) & mask)
        return out

    @property
    def _bits(self) -> int:
        """All bits that are changed, or that say how others are."""
        return reduce(or_, (mask | (mask << shift if shift >= 0 else mask >> -shift) for shift, mask in self.terms), 0)

    @property
    def run(self) -> int:
        """How many offsets, from a multiple of the number on, stay neighbours: a power of two; of no terms 0."""
        return self._bits & -self._bits

    @property
    def period(self) -> int:
        """A power of two of which multiples move on unchanged: ``swizzle(i + period) == swizzle(i) + period``."""
        return 1 << self._bits.bit_length()


NONE = Swizzle()


def lines(width: int, itemsize: int = 1) -> Swizzle:
    """The hardware's swizzle of lines of ``width`` bytes (32, 64 or 128; 0: none), of elements of ``itemsize`` bytes: chunks
    of 16 bytes change places, by the line's number in a pattern of 1024 bytes.

    >>> lines(64)
    Swizzle((3, 48))
    """
    return Swizzle((3, (width - CHUNK) // itemsize)) if width else NONE


def of_function(function: Callable[[int], int], count: int) -> Swizzle:
    """The swizzle that a function of an offset is, checked at all of ``count`` offsets.

    Raises ShapeError where two offsets meet or one leaves, and for a permutation that is no XOR of bits: of that the machine
    code would be as long as the function.

    >>> of_function(lambda i: i ^ (i >> 2 & 3), 16)
    Swizzle((2, 3))
    >>> of_function(lambda i: i // 2, 16)
    Traceback (most recent call last):
    ...
    gemmkit.shapes.ShapeError: it is not a permutation of 16 offsets: 0 and 1 both go to 0
    """
    places = [int(function(i)) for i in range(count)]
    first: dict[int, int] = {}
    for i, place in enumerate(places):
        if not 0 <= place < count:
            raise ShapeError(f"it is not a permutation of {count} offsets: {i} goes to {place}")
        if place in first:
            raise ShapeError(f"it is not a permutation of {count} offsets: {first[place]} and {i} both go to {place}")
        first[place] = i
    masks: dict[int, int] = {}
    bits = [1 << n for n in range((count - 1).bit_length())]
    for n, bit in enumerate(bits):
        changed = places[bit] ^ bit
        for at in (m for m in range(changed.bit_length()) if changed >> m & 1):
            masks[n - at] = masks.get(n - at, 0) | 1 << at
    found = Swizzle(*sorted(masks.items()))
    odd = next((i for i in range(count) if found(i) != places[i]), None)
    if odd is not None:
        parts = reduce(xor, (places[bit] for bit in bits if odd & bit), 0)
        raise ShapeError(f"it is not an XOR of an offset's bits: {odd} "
                         f"goes to {places[odd]}, its bits one by one to {parts}")
    return found
