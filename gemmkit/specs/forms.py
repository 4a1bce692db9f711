"""Forms: what is known of a tensor when a kernel is compiled (Graphene, section 3.1): its shapes, element type and memory.

>>> form = T[16, 16].fp16.SH
>>> print(form)
[16,16].fp16.SH
>>> print(form.tile(8, 8), "->", form.tile(8, 8).inner)
[2,2].[8,8].fp16.SH -> [8,8].fp16.SH

A tensor stands on a *storage* that has coordinates of its own: a matrix in global memory, a tile in shared memory, an array
of registers. Strides of a form's levels are `Step`s in these coordinates, so that tiling never asks how the storage lies in
memory, and a matrix may have run-time extents. Shared memory has one more shape: ``layout`` leads from its coordinates to
elements (Fig. 3's dims:strides).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang.statics import Static
from gemmkit.shapes import Shape, ShapeError, Step, local
from gemmkit.strides import NOTHING, span
from gemmkit.swizzles import NONE, Swizzle

#: Global memory, shared memory, a thread's registers (register file), a warp's fragments in registers.
GL, SH, RF, FR = "GL", "SH", "RF", "FR"

_NAMES = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "bf16": ml_dtypes.bfloat16, "i8": np.int8,
          "u8": np.uint8, "i32": np.int32, "u32": np.uint32}
_NAME_OF = {np.dtype(dtype): name for name, dtype in _NAMES.items()}


#: Which instruction a fragment is of: wmma, of which only the hardware knows who holds what, or mma.sync.
WMMA, MMA = "wmma", "mma"


@dataclass(frozen=True)
class Role:
    """What a fragment is for: operand ``"a"``, ``"b"`` or ``"c"``, the ``order`` of the matrix that it is loaded from
    (``"row"``, ``"col"``; of c None), the instruction's dtypes, and which instruction's it is (`WMMA`, `MMA`)."""

    operand: str
    order: Any
    input: np.dtype
    accumulator: np.dtype
    by: str = WMMA

    @property
    def dtype(self) -> np.dtype:
        """Of its elements."""
        return self.accumulator if self.operand == "c" else self.input


class Form(Static):
    """What is known of a tensor: see the module.

    ``levels`` are shapes, the outermost first: an index takes one off. ``unit`` is the axis of a global matrix along which
    elements are neighbours, and ``alignment`` what its rows are aligned to, in bytes. ``rank`` is how many coordinates the
    storage has. ``swizzle`` says where elements of shared memory go behind their layout. Of a matrix that ``is_partial``
    tiles reach over its edge (section 3.4): there reads give zeros, and nothing is written.
    """

    def __init__(self, levels: tuple[Shape, ...], memory: str, dtype: Any, layout: Shape | None = None,
                 unit: int | None = None, alignment: int = 16, role: Role | None = None, rank: int | None = None,
                 is_partial: bool = False, swizzle: Swizzle = NONE):
        self.levels, self.memory, self.dtype = levels, memory, np.dtype(dtype)
        self.layout, self.unit, self.alignment, self.role = layout, unit, alignment, role
        self.rank, self.is_partial = levels[0].rank if rank is None else rank, is_partial
        self.swizzle = swizzle
        self._parts = (levels, memory, self.dtype, layout, unit, alignment, role, self.rank, is_partial, swizzle)
        self._hash = hash(self._parts)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Form) and self._hash == other._hash and self._parts == other._parts)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        said = ".".join(map(repr, self.levels))
        further = f":{self.layout}" if self.memory == SH else f", unit {self.unit}, align {self.alignment}, {self.rank}-D"
        further += (", partial" if self.is_partial else "") + (f", {self.swizzle}" if self.swizzle.terms else "")
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

    # -- the algebra: every result is made once ---------------------------------------------------------------------

    def replaced(self, **changed: Any) -> Form:
        """The form with other fields."""
        names = "levels", "memory", "dtype", "layout", "unit", "alignment", "role", "rank", "is_partial", "swizzle"
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

    def tile(self, *tilers: Any) -> Form:
        """Tiles of the outermost level, as `Shape.tile` has them; the levels inside stay."""
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
    return form.replaced(levels=(outer, inner, *form.levels[1:]))


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


# -- notation ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class T:
    """A tensor's type as one writes it: ``T[1024, 1024].fp16.GL``; ``T[...]`` of one element is ``T[()]``.

    ``None`` is an extent that is known at run time (section 3.4). In SH elements lie row-major, unless `Form.stored` says
    otherwise. Raises AttributeError for an element type or memory that there is none of.

    >>> T[None, 64].fp32.GL.extents
    (None, 64)
    """

    extents: tuple
    dtype: Any = None

    def __class_getitem__(cls, extents: Any) -> T:
        return cls(extents if isinstance(extents, tuple) else (extents,))

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES and self.dtype is None:
            return replace(self, dtype=np.dtype(_NAMES[name]))
        if name in (GL, SH, RF) and self.dtype is not None:
            layout = Shape(self.extents) if name == SH else None
            return Form((local(*self.extents),), name, self.dtype, layout)
        known = f"a memory ({GL}, {SH}, {RF})" if self.dtype is not None else f"an element type ({', '.join(_NAMES)})"
        raise AttributeError(f"T{list(self.extents)}.{name}: write {known}")
