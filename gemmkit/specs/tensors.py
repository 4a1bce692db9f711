"""Tensors as values of device code: a `Form` that is known, and where the tensor is (Graphene, sections 3 and 4).

    a = on(view, T[None, None].fp16.GL)           # a matrix in global memory
    tile = a.tile(128, 32)[block, k]              # [128,32].fp16.GL, at row 128 * block, column 32 * k
    row = tile.tile(1, 8)[thread, 0]              # [1,8].fp16.GL

Nothing is moved by that: `tile`, `reshape` and an index compute with shapes. Of a position two parts are kept, as a `Tile`'s
are: picking a tile moves the ``base``, picking an element the ``offset``; what of the latter is known when the kernel is
compiled becomes the immediate of an address.

In Python, and so in the emulator, tensors are these objects, and indices are checked: by the extents here, and by the memory
that is touched (bounds, alignment, races).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit.lang.aggregates import Number
from gemmkit.lang.numba_hooks import (
    Context,
    Signature,
    TypingContext,
    TypingError,
    Values,
    atom,
    cgutils,
    ir,
    signature,
    types,
)
from gemmkit.lang.references import Static
from gemmkit.lang.registers import Fragment, call_function, registers
from gemmkit.lang.scalars import WeakIntLiteral, i32
from gemmkit.lang.static import NotKnown, OpaqueStorage, Split, SplitType, known, lowered, traced, type_of
from gemmkit.ptx import wmma
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import block_x, thread_index, udiv
from gemmkit.runtime.tensor_maps import Box, box_of_layout
from gemmkit.shapes import NONE, NOTHING, Shape, ShapeError, Step, Swizzle, lines, local, shape, span

# --------------------------------------------------------------------------------------------------
# Forms: what is known of a tensor when a kernel is compiled (Graphene, section 3.1): its shapes, element type and memory.
#
# >>> form = T[16, 16].fp16.SH
# >>> print(form)
# [16,16].fp16.SH
# >>> print(form.tile(8, 8), "->", form.tile(8, 8).inner)
# [2,2].[8,8].fp16.SH -> [8,8].fp16.SH
#
# A tensor stands on a *storage* that has coordinates of its own: a matrix in global memory, a tile in shared memory, an
# array of registers. Strides of a form's levels are `Step`s in these coordinates, so that tiling never asks how the
# storage lies in memory, and a matrix may have run-time extents. Shared memory has one more shape: ``layout`` leads from
# its coordinates to elements (Fig. 3's dims:strides).

#: Global memory, shared memory, a thread's registers (register file), fragments in registers: a warp's, a warpgroup's, a
#: quad-pair's.
GL, SH, RF, FR, WR, QP = "GL", "SH", "RF", "FR", "WR", "QP"

_NAMES = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "bf16": ml_dtypes.bfloat16, "i8": np.int8,
          "u8": np.uint8, "i32": np.int32, "u32": np.uint32, "e4m3": ml_dtypes.float8_e4m3fn,
          "e5m2": ml_dtypes.float8_e5m2, "mbar": np.uint64}
_NAME_OF = {np.dtype(dtype): name for name, dtype in _NAMES.items()}


#: What mbarriers are of.
MBARRIER = np.dtype(np.uint64)
#: Which instruction a fragment is of: wmma, of which only the hardware knows who holds what, mma.sync, or wgmma.
WMMA, MMA, WGMMA, QUADS = "wmma", "mma", "wgmma", "mma.m8n8k4"
#: Extents of a quad-pair's fragments.
OF_QUADS = {"a": (8, 4), "b": (4, 8), "c": (8, 8)}


@dataclass(frozen=True)
class FragmentRole:
    """What a fragment is for: operand ``"a"``, ``"b"`` or ``"c"``, the ``order`` of the matrix that it is loaded from
    (``"row"``, ``"col"``; of c None), the instruction's dtypes, and which instruction's it is (`WMMA`, `MMA`)."""

    operand: str
    order: Any
    input: np.dtype
    accumulator: np.dtype
    by: str = WMMA
    columns: int = 16

    @property
    def dtype(self) -> np.dtype:
        """Of its elements."""
        return self.accumulator if self.operand == "c" else self.input


class NamedExtent(NamedTuple):
    """An extent that is known at run time, a multiple of ``divisor``. Tensors with one ``name`` have the same. The grid goes
    along it in tiles of ``step`` elements (None: a loop does), which may reach over the edge (``is_partial``)."""

    name: str
    step: int | None = None
    divisor: int = 1
    is_partial: bool = False


class Form(Static):
    """What is known of a tensor: see the module.

    ``levels`` are shapes, the outermost first; an index removes one. ``unit`` is the axis of a global matrix along which
    elements are neighbours, and ``alignment`` the alignment of its rows in bytes. ``rank`` is the number of coordinates of
    the storage. ``swizzle`` permutes the places of elements in shared memory. If a matrix ``is_partial``, tiles reach over
    its edge (section 3.4): reads give zeros there, and nothing is written. ``names`` has, for each axis of the storage, its
    `NamedExtent` or None. What a ``scaling`` form is stored to is `on_scaled`: 1 multiplies by alpha, 2 adds beta C too.
    TMA copies a ``box`` at a time (`in_boxes`).
    """

    def __init__(self, levels: tuple[Shape, ...], memory: str, dtype: np.dtype, layout: Shape | None = None,
                 unit: int | None = None, alignment: int = 16, role: FragmentRole | None = None, rank: int | None = None,
                 is_partial: bool = False, swizzle: Swizzle = NONE, names: tuple = (), scaling: int = 0,
                 box: Box | None = None):
        self.levels, self.memory, self.dtype = levels, memory, np.dtype(dtype)
        self.layout, self.unit, self.alignment, self.role = layout, unit, alignment, role
        self.rank, self.is_partial = levels[0].rank if rank is None else rank, is_partial
        self.swizzle, self.names, self.scaling, self.box = swizzle, names, scaling, box
        self._parts = (levels, memory, self.dtype, layout, unit, alignment, role, self.rank, is_partial, swizzle, names,
                       scaling, box)
        self._hash = hash(self._parts)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Form) and self._hash == other._hash and self._parts == other._parts)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        said = ".".join(map(repr, self.levels))
        further = f":{self.layout}" if self.memory == SH else f", unit {self.unit}, align {self.alignment}, {self.rank}-D"
        further += (", partial" if self.is_partial else "") + (f", {self.swizzle}" if self.swizzle.terms else "")
        further += (f", {self.names}" if self.names else "") + (f", scaled {self.scaling}" if self.scaling else "")
        further += f", boxes {self.box!r}" if self.box else ""
        return f"{said}.{self.element}.{self.memory}{further}{f', {self.role}' if self.role else ''}"

    def __str__(self) -> str:
        levels = (",".join("?" if e is None else str(e) for e in level.extents) for level in self.levels)
        return "".join(f"[{level}]." for level in levels) + f"{self.element}.{self.memory}"

    @property
    def element(self) -> str:
        """The element type's name in the paper: fp16, fp32, ..."""
        return _NAME_OF.get(self.dtype, self.dtype.name)

    @property
    def shape(self) -> Shape:
        """The outermost level: what an index is of."""
        return self.levels[0]

    @property
    def extents(self) -> tuple:
        return self.levels[0].extents

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """What a tensor in shared memory takes: up to its last element."""
        assert self.layout is not None
        return (1 + sum(map(span, self.layout.modes))) * self.itemsize

    @property
    def partial_axes(self) -> tuple[int, ...]:
        """The axes of the storage along which tiles reach over the edge."""
        return tuple(n for n, name in enumerate(self.names) if name is not None and name.is_partial) if self.names else (
            tuple(range(self.rank)) if self.is_partial else ())

    def counted(self, axis: int) -> tuple[int, int, int]:
        """(how many elements or tiles the outermost level has along a dimension as far as is known, the axis of the storage
        along which the others are, the step of those); the last is 0 if all are known."""
        if not 0 <= axis < len(self.extents):
            raise TensorError(f"{self} has {len(self.extents)} dimensions, and none is number {axis}")
        modes = self.shape.modes[axis]
        known = math.prod(extent for extent, _ in modes if extent is not None)
        return known, *next(((along, step) for along, step in _runs(modes)), (0, 0))

    # -- the algebra: every result is made once ---------------------------------------------------------------------

    def replaced(self, **changed: Any) -> Form:
        """The form with other fields."""
        names = ("levels", "memory", "dtype", "layout", "unit", "alignment", "role", "rank", "is_partial", "swizzle",
                 "names", "scaling", "box")
        fields = dict(zip(names, self._parts))
        return Form(**{**fields, **changed})

    def stored(self, layout: Shape | str) -> Form:
        """A form in shared memory with this layout: dims:strides over its coordinates, or their text.

        Raises ShapeError where the extents are others.

        >>> T[16, 16].fp16.SH.stored("[(16,16):(24,1)]").bytes           # rows of 24: no two in the same banks
        752
        """
        made = Shape.parse(layout) if isinstance(layout, str) else layout
        if made.extents != self.extents or self.memory != SH:
            raise ShapeError(f"{self}.stored({made}): a layout is of a tensor in SH, and has its extents {self.extents}")
        return self.replaced(layout=made)

    def in_lines(self, nbytes: int = 128, order: str = "row") -> Form:
        """A matrix in shared memory as TMA brings it and wgmma reads it: lines of ``nbytes`` (32, 64 or 128) along the rows
        (or columns: ``order`` "col"), whose chunks of 16 bytes are swizzled; further panels of such lines behind. It
        begins at a multiple of 1024 bytes. Raises ShapeError for an extent that is no multiple of a line's.

        >>> T[64, 128].fp16.SH.in_lines().layout
        [(64,(64,2)):(64,(1,4096))]
        """
        axis, width = int(order == "row"), nbytes // self.itemsize
        if self.memory != SH or len(self.extents) != 2 or nbytes not in (32, 64, 128) or self.extents[axis] % width:
            raise ShapeError(f"{self}.in_lines({nbytes}, {order!r}): a matrix in SH is needed, of a multiple of "
                             f"{width} elements along its lines of 32, 64 or 128 bytes")
        across = self.extents[1 - axis]
        modes: list = [((across, width),)] * 2
        modes[axis] = ((width, 1), (self.extents[axis] // width, width * across))
        return self.replaced(layout=Shape.of_modes(modes), swizzle=lines(nbytes, self.itemsize))

    def in_boxes(self, tile: Form) -> Form:
        """A parameter of a kernel whose tiles TMA copies (sm_90): each is as large as ``tile``, a form in SH, and lies there
        so: plain, or `in_lines`. The call makes the tensor map. Raises TensorError for a tile that TMA cannot bring.

        >>> str(T["M", "K"].fp16.GL.in_boxes(T[64, 128].fp16.SH.in_lines()).box)
        '[64,128] in lines of 64 along axis 1, swizzled by 128 bytes'
        """
        found = box_of(tile)
        if isinstance(found, str) or self.memory != GL or (tile.rank, tile.dtype) != (self.rank, self.dtype):
            raise TensorError(f"{self}.in_boxes({tile}): {found}; a tensor in GL takes a tile in SH of its rank and type")
        return self.replaced(box=found)

    def tile(self, *tilers: object) -> Form:
        """Tiles of the outermost level, as `Shape.tile` has them; the levels inside stay. Raises ShapeError; TensorError
        if a grid goes along the tensor in other steps."""
        return _tiled(self, tilers)

    def reshape(self, *extents: int, order: str = "row") -> Form:
        """The outermost level in other dimensions (`Shape.reshape`)."""
        return _reshaped(self, extents, order)

    @property
    def inner(self) -> Form:
        """What an index leaves: a tile, or of the innermost level one element."""
        return _inner(self)

    def part(self, tilers: tuple) -> Form:
        """What one worker has of a tensor that all have together: to itself, from the beginning on."""
        return _part(self, tilers)


@lru_cache(maxsize=8192)
def _tiled(form: Form, tilers: tuple) -> Form:
    outer, inner = form.shape.tile(*tilers)
    names = form.names
    for along, step in (run for dim in outer.modes for run in _runs(dim)):
        of = names[along] if names else None
        if of is not None and of.divisor % step:
            names = (*names[:along], of._replace(is_partial=True), *names[along + 1:])
    made = form.replaced(levels=(outer, inner, *form.levels[1:]), names=names,
                         is_partial=form.is_partial or names != form.names)
    if names:
        _check_steps(made)
    return made


def _runs(dim: Any) -> Iterator[tuple[int, int]]:
    """(axis of the storage, step) of each part of a dimension whose extent is known at run time."""
    for extent, stride in dim:
        if extent is None:
            yield next((axis, int(step)) for axis, step in enumerate(stride) if step)


@lru_cache(maxsize=1024)
def _reshaped(form: Form, extents: tuple, order: str) -> Form:
    return form.replaced(levels=(form.shape.reshape(*extents, order=order), *form.levels[1:]))


@lru_cache(maxsize=8192)
def _inner(form: Form) -> Form:
    return form.replaced(levels=form.levels[1:] or (Shape.of_modes(()),))


@lru_cache(maxsize=1024)
def _part(form: Form, tilers: tuple) -> Form:
    return form.replaced(levels=(local(*form.shape.tile(*tilers)[1].extents),))


# -- lines: what one thread moves -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Line:
    """The elements of a form along one ``axis`` of its storage: ``count`` neighbours there."""

    axis: int
    count: int


@lru_cache(maxsize=8192)
def line_of(form: Form) -> Line | str:
    """A form as a line, or why it is none."""
    if form.dtype == MBARRIER:
        return "is of barriers, which Init, CopyAsync, Arrive and Await take"
    if len(form.levels) > 1:
        return "is tiled"
    dims = [dim for dim in form.shape.modes if dim != NOTHING]
    if not dims:
        return Line(form.unit or 0, 1)
    if len(dims) > 1:
        return "has two dimensions"
    (extent, step), *more = dims[0]
    if more or extent is None or not isinstance(step, Step) or sorted(step) != [0] * (len(step) - 1) + [1]:
        return "is not a run of neighbours"
    return Line(step.index(1), extent)


def is_block(form: Form, rank: int = 2) -> bool:
    """Whether a form's elements are the storage's own, one beside the other."""
    return len(form.levels) == 1 and form.shape.rank == form.rank == rank and all(
        len(dim) == 1 and (dim[0][0] == 1 or dim[0][1] == tuple(int(axis == n) for n in range(rank)))
        for axis, dim in enumerate(form.shape.modes))


def box_of(form: object) -> Box | str:
    """How TMA would bring a form in shared memory, or why it cannot."""
    if not isinstance(form, Form) or form.layout is None or not is_block(form, form.rank) or form.layout.rank != form.rank:
        return f"{form} is no block in SH"
    return box_of_layout(form.extents, form.dtype, form.layout, form.swizzle)


# -- notation ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class T:
    """A tensor's type as one writes it: ``T[1024, 1024].fp16.GL``; ``T[...]`` of one element is ``T[()]``.

    An extent of ``None``, or with a name (``T["M", 64]``: tensors of a kernel that have the same name have the same extent),
    is known at run time (section 3.4). In SH elements lie row-major, unless `Form.stored` says
    otherwise. Raises AttributeError for an unknown element type or memory.

    >>> T[None, 64].fp32.GL.extents
    (None, 64)
    """

    extents: tuple
    dtype: Any = None

    def __class_getitem__(cls, extents: object) -> T:
        return cls(extents if isinstance(extents, tuple) else (extents,))

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES and self.dtype is None:
            return replace(self, dtype=np.dtype(_NAMES[name]))
        if name == WR and self.dtype is not None:
            return sums_of_warpgroup(self.extents, self.dtype)
        if self.dtype == MBARRIER and self.dtype is not None:
            return ring_of_barriers(self.extents, name)
        if name in (GL, SH, RF) and self.dtype is not None:
            extents = tuple(None if isinstance(e, str) else e for e in self.extents)
            if name != GL and extents != self.extents:
                raise TensorError(f"T{list(self.extents)}.{name}: extents with names are known at run time, and tensors in "
                                  f"{name} need numbers")
            names = tuple(NamedExtent(e) if isinstance(e, str) else None for e in self.extents)
            return Form((local(*extents),), name, self.dtype, Shape(extents) if name == SH else None,
                        names=names if any(names) else ())
        known = f"a memory ({GL}, {SH}, {RF}, {WR})" if self.dtype is not None else f"an element type ({', '.join(_NAMES)})"
        raise AttributeError(f"T{list(self.extents)}.{name}: write {known}")


def sums_of_warpgroup(extents: tuple, dtype: Any, columns: int | None = None) -> Form:
    """The form of wgmma's accumulators: fragments of 64 rows and ``columns`` (None: all). Raises TensorError for others."""
    wide = extents[-1] if columns is None else columns
    if len(extents) != 2 or any(type(e) is not int for e in extents) or extents[0] % 64 or not 8 <= wide <= 256 or wide % 8:
        raise TensorError(f"T{list(extents)}.{WR}: a warpgroup holds multiples of 64 rows, and 8 to 256 columns, a multiple "
                          "of 8")
    role = FragmentRole("c", None, np.dtype(dtype), np.dtype(dtype), WGMMA, wide)
    return Form((local(*extents),), WR, dtype, role=role)


def ring_of_barriers(extents: tuple, memory: str) -> Form:
    """The form of mbarriers: number n is barrier ``n % extent`` in its phase ``n // extent``. Raises TensorError."""
    if memory != SH or len(extents) != 1 or type(extents[0]) is not int or extents[0] < 1:
        raise TensorError(f"T{list(extents)}.mbar.{memory}: barriers are in SH, and one extent says how many, as in "
                          "T[4].mbar.SH")
    ring = (extents[0], Step((0, 1))), (None, Step((1, 0)))
    return Form((Shape.of_modes((ring,)),), SH, MBARRIER, Shape((1, *extents), (0, 1)), rank=2)


class TensorError(ValueError):
    """A tensor that its storage cannot be, or an index outside of it."""


class Tensor(Split):
    """A tensor: ``form`` is what is known, ``storage`` what it stands on, ``base`` and ``offset`` where it begins there."""

    __slots__ = ("base", "form", "offset", "storage")
    device_methods: ClassVar[tuple[str, ...]] = ("size",)

    def __init__(self, form: Form, storage: Any, base: tuple, offset: tuple):
        self.form, self.storage, self.base, self.offset = form, storage, base, offset

    def __split__(self) -> tuple[Any, Any, tuple]:
        return self.form, self.storage, (*self.base, *self.offset)

    @classmethod
    def __of_parts__(cls, static: Any, storage: Any, numbers: tuple) -> Tensor:
        half = len(numbers) // 2
        return cls(static, storage, numbers[:half], numbers[half:])

    def __repr__(self) -> str:
        return f"Tensor({self.form}, at {self.at})"

    @property
    def extents(self) -> tuple:
        """Of the outermost level; None where it is known at run time."""
        return self.form.extents

    @property
    def at(self) -> tuple:
        """Where it begins, in its storage's coordinates."""
        return tuple(map(_plus, self.base, self.offset))

    def tile(self, *tilers: object) -> Tensor:
        """The tensor of its tiles (`gemmkit.shapes.Shape.tile`). Raises ShapeError."""
        return Tensor(self.form.tile(*tilers), self.storage, self.base, self.offset)

    def reshape(self, *extents: int) -> Tensor:
        """The same elements, or tiles, in other dimensions, the last fastest. Raises ShapeError."""
        return Tensor(self.form.reshape(*extents), self.storage, self.base, self.offset)

    def __getitem__(self, key: object) -> Tensor:
        """One tile, or one element, of the outermost level. Raises TensorError for an index outside of it."""
        form, key = self.form, key if isinstance(key, tuple) else (key,)
        _check(form, key)
        return self._moved(form.inner, form.shape(*key), len(form.levels) > 1)

    def size(self, axis: int) -> int:
        """How many elements, or tiles, the outermost level has along a dimension, also where that is known at run time
        (device code)."""
        count, along, step = self.form.counted(axis)
        if step == 0:
            return count
        return count * udiv(self.storage.shape[along] + step - 1, step)

    def seen_as(self, form: Form) -> Tensor:
        """What is here under another form: of a matrix that all workers have together, one's own part."""
        return Tensor(form, self.storage, self.base, self.offset)

    def part(self, rows: object, columns: object, i: object, j: object, how: object) -> Tensor:
        """Tile (i, j) of ``rows`` x ``columns``. ``how`` says what a tile's coordinates change: ``"base"``, ``"offset"``,
        or, with ``"own"``, nothing, because each worker has a part of its own; (rows, columns) is then the worker's part of
        each tile."""
        if how == "own":
            return Tensor(self.form.part((rows, columns)), self.storage, self.base, self.offset)
        if isinstance(how, tuple):
            return self._moved(self.form.part((rows, columns)), (i * how[0], j * how[1]), False)
        tiled = self.form.tile(rows, columns)
        _check(tiled, (i, j))
        return self._moved(tiled.inner, tiled.shape(i, j), how == "base")

    def window(self, rows: int, columns: int, at: Any, how: str) -> Tensor:
        """``rows`` x ``columns`` elements, from coordinates ``at`` on."""
        return self._moved(self.form.tile(rows, columns).inner, self.form.shape(*at), how == "base")

    def _moved(self, form: Form, by: Any, is_base: bool) -> Tensor:
        base, offset = self.base, self.offset
        if type(by) is not int:
            base, offset = (tuple(map(_plus, base, by)), offset) if is_base else (base, tuple(map(_plus, offset, by)))
        return Tensor(form, self.storage, base, offset)

    @property
    def unswizzled_at(self) -> Any:
        """Where it begins in its layout, before the swizzle, in elements: what wgmma's descriptors and TMA are told."""
        layout: Any = self.form.layout
        return _plus(layout(*self.base), layout(*self.offset)) if is_linear(layout) else layout(*self.at)

    @property
    def element_at(self) -> tuple:
        """(base, offset): where it begins in shared memory, in elements; their sum is the place."""
        return self.ahead(0)

    def ahead(self, distance: Any) -> tuple:
        """The tensor that begins ``distance`` elements later in its layout. A swizzle depends on some bits of the place;
        multiples of its period stay in the offset, and become the immediate of an address."""
        layout, swizzle = self.form.layout, self.form.swizzle
        if layout is None:
            raise TensorError(f"{self.form} has no layout: it is not in shared memory")
        base, offset = (layout(*self.base), layout(*self.offset)) if is_linear(layout) else (layout(*self.at), 0)
        offset = _plus(offset, distance)
        if not swizzle.terms:
            return base, offset
        return swizzle(_plus(base, offset & swizzle.period - 1)), offset & -swizzle.period


def is_linear(layout: Any) -> bool:
    """Whether a layout has one stride a dimension, so that it may be applied to parts of a position."""
    return all(len(dim) == 1 for dim in layout.modes)


def _plus(a: Any, b: Any) -> Any:
    return b if type(a) is int and a == 0 else a if type(b) is int and b == 0 else a + b


def _check(form: Form, key: tuple) -> None:
    extents = form.extents
    if len(key) != len(extents):
        raise TensorError(f"{form} has {len(extents)} dimensions and is indexed with {len(key)}")
    for i, extent in zip(key, extents):
        if extent is not None and not isinstance(i, Number) and not 0 <= i < extent:
            raise TensorError(f"{form} is indexed with {tuple(map(int, key))}, which is outside of it")
    if form.names:
        _check_steps(form)


def _check_steps(form: Form) -> None:
    """Raise TensorError if the outermost level goes along an extent in other steps than the grid."""
    for along, step in (run for dim in form.shape.modes for run in _runs(dim)):
        of = form.names[along]
        if of.step not in (None, step):
            raise TensorError(f"{form}: {of.name} goes along the grid in steps of {of.step}, and here in steps of {step}; "
                              f"tile it by {of.step} first, or give the grid cdiv({of.name!r}, {step})")


# -- from storage -----------------------------------------------------------------------------------------------------

def on_storage(storage: Any, form: Form) -> Tensor:
    """The tensor of a form at the beginning of a storage: a global array, a pointer into shared memory, registers.

    Raises TensorError where dtype or number of dimensions are not the storage's.
    """
    if not isinstance(form, Form):
        raise TensorError(f"a tensor's form is {form!r}; write T[...], for example T[None, 64].fp16.GL")
    kind = storage.ty if isinstance(storage, OpaqueStorage) else storage
    rank, dtype = form.shape.rank, getattr(kind, "dtype", form.dtype)
    if np.dtype(dtype) != form.dtype:
        raise TensorError(f"{form} stands on memory of {np.dtype(dtype)}")
    if form.memory == GL:
        if getattr(kind, "ndim", None) != rank:
            raise TensorError(f"{form} has {rank} dimensions, and stands on {kind}")
        form = form.replaced(unit=kind.unit, alignment=kind.alignment)
    return Tensor(form, storage, (0,) * rank, (0,) * rank)


on = traced(on_storage)
on.__name__ = "on"


def _type_scaled(context: TypingContext, out: types.Type, c: types.Type, alpha: types.Type, beta: types.Type,
                 form: types.Type) -> Any:
    try:
        made = on_storage(OpaqueStorage(out, None), known(form))
    except (NotKnown, TensorError) as error:
        raise TypingError(str(error)) from None
    both = types.Tuple((out, c, alpha, beta))

    def codegen(x: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        return lowered(x, b, Tensor(made.form, OpaqueStorage(both, x.make_tuple(b, both, v[:4])), made.base, made.offset))

    return signature(type_of(Tensor(made.form, OpaqueStorage(both, None), made.base, made.offset)), out, c, alpha, beta,
                     form), codegen


@atom(_type_scaled)
def on_scaled(out: Any, c: Any, alpha: Any, beta: Any, form: Form) -> Tensor:
    """The tensor of a form whose stores of x put ``alpha x`` (`Form.scaling` 1), or ``alpha x + beta c`` (2) there."""
    made = on_storage(out, form)
    return Tensor(made.form, (out, c, alpha, beta), made.base, made.offset)


def _type_matrix(context: TypingContext, tensor: types.Type) -> Any:
    if not isinstance(tensor, SplitType):
        return None
    scaling = tensor.static.scaling                           # type: ignore[attr-defined]

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        storage = cgutils.create_struct_proxy(tensor)(c, b, value=v[0]).storage
        return b.extract_value(storage, 0) if scaling else storage

    return signature(tensor.storage.types[0] if scaling else tensor.storage, tensor), codegen


@atom(_type_matrix)
def stored_matrix(tensor: Any) -> Any:
    """The array in global memory that a tensor stands on, scaled or not."""
    return tensor.storage[0] if tensor.form.scaling else tensor.storage


def fragments_of(form: Form) -> tuple[Fragment, tuple[int, ...]]:
    """What a form in registers consists of: elements, or fragments of 16 x 16, and how many along each dimension."""
    if form.memory == RF:
        return Fragment(form.dtype, 1), form.extents
    assert form.role is not None
    role = form.role
    if role.by == WGMMA:
        return Fragment(role.dtype, 64 * role.columns // 128), (form.extents[0] // 64, form.extents[1] // role.columns)
    if role.by == QUADS:
        rows, columns = OF_QUADS[role.operand]
        return Fragment(role.dtype, 8 if role.operand == "c" else 4), (form.extents[0] // rows, form.extents[1] // columns)
    spec = wmma.SPECS[(16, 16, 16), role.input, role.accumulator]
    kept = Fragment(role.dtype, spec.count(role.operand) if role.by == WMMA else 16 * 16 // 32)
    return kept, tuple(extent // 16 for extent in form.extents)


def _type_allocate(context: TypingContext, form: types.Type, *offset: types.Type) -> Any:
    try:
        of = known(form)
        origin = _check_allocation(of, tuple(map(known, offset)))
    except (NotKnown, ShapeError, TensorError) as error:
        raise TypingError(str(error)) from None
    zeros = (0,) * of.rank
    function: Any = shared if of.memory == SH else registers
    static = (of.dtype, origin) if of.memory == SH else (fragments_of(of)[0], *fragments_of(of)[1])
    given = [WeakIntLiteral(x) if isinstance(x, int) else type_of(x) for x in static]
    inner = context.resolve_function_type(function.device_type, tuple(given), {})
    of = of.replaced(alignment=math.gcd(origin, 1024)) if of.memory == SH else of
    example = Tensor(of, OpaqueStorage(inner.return_type, None), zeros, zeros)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        values = [i32(x) if isinstance(x, int) else c.get_dummy_value() for x in static]
        made = call_function(c, b, function.device_type, None, inner, values)
        return lowered(c, b, Tensor(of, OpaqueStorage(inner.return_type, made), zeros, zeros))

    return signature(type_of(example), form, *offset), codegen


def _check_allocation(form: object, offset: tuple) -> int:
    if not isinstance(form, Form) or form.memory not in (SH, RF, FR, WR, QP):
        raise TensorError(f"Allocate({form}): a form in SH or RF is needed, for example T[8, 8].fp32.RF")
    if None in form.extents and form.dtype != MBARRIER:
        raise TensorError(f"Allocate({form}): its extents must be known when the kernel is compiled")
    if offset and form.memory != SH:
        raise TensorError(f"Allocate({form}, {offset[0]}): registers have no offset")
    if form.dtype == MBARRIER and offset and offset[0] % MBARRIER.itemsize:
        raise TensorError(f"Allocate({form}, {offset[0]}): barriers begin at a multiple of 8 bytes")
    return int(offset[0]) if offset else 0


@atom(_type_allocate)
def allocate(form: Form, *offset: int) -> Tensor:
    """Allocate (Table 1): a new tensor in registers, or in shared memory ``offset`` bytes from its beginning on.

    Registers belong to the function that allocates them: it may pass them on, and not return them.
    """
    origin, zeros = _check_allocation(form, offset), (0,) * form.rank
    if form.memory == SH:
        return Tensor(form.replaced(alignment=math.gcd(origin, 1024)), shared(form.dtype, origin), zeros, zeros)
    fragment, counts = fragments_of(form)
    return Tensor(form, registers(fragment, *counts), zeros, zeros)


# --------------------------------------------------------------------------------------------------
# Thread tensors: blocks and threads as shapes over their numbers, tiled and reshaped like data (Graphene, section 4).
#
# >>> groups = WARP.tile(8).reshape(2, 2)                   # Fig. 5: four groups of eight threads, two by two
# >>> print(groups)
# [2,2].[8].thread
# >>> print(WARP.tile(shape((4, 2), (1, 16))))              # Fig. 6: quad-pairs
# [4].[8].thread
#
# ``groups.indices()`` is where a thread's group is among the groups, ``groups.local()`` its number in the group, and
# ``groups.size`` how many threads execute a spec together.

class Threads(Static):
    """Threads of a block: ``levels`` of shapes, the outermost first; the innermost are those that act together."""

    device_methods: ClassVar[tuple[str, ...]] = ("indices", "local")
    kind = "thread"

    def __init__(self, levels: tuple[Shape, ...]):
        self.levels = levels

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Threads) and self.levels == other.levels

    def __hash__(self) -> int:
        return hash((self.kind, self.levels))

    def __repr__(self) -> str:
        return ".".join(map(repr, self.levels)) + "." + self.kind

    def __str__(self) -> str:
        return ".".join(f"[{','.join(map(str, level.extents))}]" for level in self.levels) + "." + self.kind

    @property
    def outer(self) -> Shape:
        return self.levels[0]

    @property
    def inner(self) -> Shape:
        return self.levels[-1]

    @property
    def size(self) -> int:
        """How many act together."""
        return self.inner.size

    def tile(self, *tilers: object) -> Threads:
        """Groups of the outermost level (`gemmkit.shapes.Shape.tile`). Raises ShapeError."""
        outer, inner = self.outer.tile(*tilers)
        return type(self)((outer, inner, *self.levels[1:]))

    def reshape(self, *extents: int) -> Threads:
        """The outermost level in other dimensions, the last fastest. Raises ShapeError."""
        return type(self)((self.outer.reshape(*extents), *self.levels[1:]))

    def scalar(self) -> Threads:
        """One of them: ``[].thread``, which executes a spec by itself."""
        return type(self)((Shape.of_modes(()),))

    def indices(self) -> tuple:
        """This thread's coordinates in the outermost level (device code)."""
        return self.outer.places(thread_index())

    def local(self) -> int:
        """This thread's number in its innermost group (device code)."""
        return self.inner.places(thread_index())[0]


class Blocks(Threads):
    """Blocks of a grid, as `Threads` are of a block."""

    kind = "block"

    def indices(self) -> tuple:
        """This block's coordinates in the outermost level (device code)."""
        return self.outer.places(block_x())

    def local(self) -> int:
        """This block's number in its innermost group (device code)."""
        return self.inner.places(block_x())[0]


class Grid(Split):
    """Blocks of a grid whose extents are known at run time: ``counts`` are those of all dimensions but the first."""

    __slots__ = ("counts", "storage")
    device_methods: ClassVar[tuple[str, ...]] = ("indices",)

    def __init__(self, storage: Any, counts: tuple):
        self.storage, self.counts = storage, counts

    def __split__(self) -> tuple[Any, Any, tuple]:
        return len(self.counts), self.storage, self.counts

    @classmethod
    def __of_parts__(cls, static: Any, storage: Any, numbers: tuple) -> Grid:
        return cls(storage, numbers)

    def places(self, number: Any) -> tuple:
        """The coordinates of a block's number, the last fastest."""
        out: tuple = ()
        for count in reversed(self.counts):
            number, out = number // count, (number % count, *out)
        return number, *out

    def indices(self) -> tuple:
        """This block's coordinates (device code)."""
        return self.places(block_x())


class GridAxis(NamedTuple):
    """A dimension of a grid: as many blocks as tiles of ``step`` cover the extent ``name``."""

    name: str
    step: int


def cdiv(name: str, step: int) -> GridAxis:
    """A dimension of a grid that goes along an extent with a name, in steps of so many elements. Raises TensorError.

    >>> cdiv("M", 64)
    GridAxis(name='M', step=64)
    """
    if not isinstance(name, str) or type(step) is not int or step < 1:
        raise TensorError(f"cdiv({name!r}, {step!r}): give an extent's name and a number of at least 1, as in cdiv('M', 64)")
    return GridAxis(name, step)


def threads(*dims: int) -> Threads:
    """A block's threads in dimensions, the last fastest: ``threads(16, 16)``."""
    return Threads((Shape(dims),))


def blocks(*dims: int) -> Blocks:
    """A grid's blocks in dimensions, the last fastest."""
    return Blocks((Shape(dims),))


THREAD = Threads((Shape.of_modes(()),))
WARP = Threads((shape(32),))
WARPGROUP = Threads((shape(128),))
QUADPAIR = WARP.tile(shape((4, 2), (1, 16)))
