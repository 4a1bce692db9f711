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

from typing import Any

import numpy as np

from gemmkit.lang.aggregates import Number
from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import TypingError, signature
from gemmkit.lang.registers import Fragment, call_function, registers
from gemmkit.lang.scalars import WeakIntLiteral, i32
from gemmkit.lang.static import Held, NotKnown, Split, known, lowered, traced, type_of
from gemmkit.ptx import wmma
from gemmkit.ptx.memory import shared
from gemmkit.shapes import ShapeError
from gemmkit.specs.forms import FR, GL, RF, SH, WMMA, Form


class TensorError(ValueError):
    """A tensor that its storage cannot be, or an index outside of it."""


class Tensor(Split):
    """A tensor: ``form`` is what is known, ``storage`` what it stands on, ``base`` and ``offset`` where it begins there."""

    __slots__ = ("base", "form", "offset", "storage")

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

    def tile(self, *tilers: Any) -> Tensor:
        """The tensor of its tiles (`gemmkit.shapes.Shape.tile`). Raises ShapeError."""
        return Tensor(self.form.tile(*tilers), self.storage, self.base, self.offset)

    def reshape(self, *extents: int) -> Tensor:
        """The same elements, or tiles, in other dimensions, the last fastest. Raises ShapeError."""
        return Tensor(self.form.reshape(*extents), self.storage, self.base, self.offset)

    def __getitem__(self, key: Any) -> Tensor:
        """One tile, or one element, of the outermost level. Raises TensorError for an index outside of it."""
        form, key = self.form, key if isinstance(key, tuple) else (key,)
        _check(form, key)
        return self._moved(form.inner, form.shape(*key), len(form.levels) > 1)

    def seen_as(self, form: Form) -> Tensor:
        """What is here under another form: of a matrix that all workers have together, one's own part."""
        return Tensor(form, self.storage, self.base, self.offset)

    def part(self, rows: Any, columns: Any, i: Any, j: Any, how: Any) -> Tensor:
        """Tile (i, j) of ``rows`` x ``columns``. ``how`` says where that moves it: ``"base"``, ``"offset"``, or ``"own"``:
        nowhere, for each worker has a part of its own; and (rows, columns) are what a worker has of each tile in turn."""
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
    def element_at(self) -> tuple:
        """(base, offset): where it begins in shared memory, in elements; their sum is the place."""
        return self.ahead(0)

    def ahead(self, distance: Any) -> tuple:
        """The same of what lies ``distance`` elements behind it in its layout. A swizzle moves what its bits depend on;
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


# -- from storage -----------------------------------------------------------------------------------------------------

def _on(storage: Any, form: Form) -> Tensor:
    """The tensor of a form at the beginning of a storage: a global array, a pointer into shared memory, registers.

    Raises TensorError where dtype or number of dimensions are not the storage's.
    """
    if not isinstance(form, Form):
        raise TensorError(f"a tensor's form is {form!r}; write T[...], for example T[None, 64].fp16.GL")
    kind = storage.ty if isinstance(storage, Held) else storage
    rank, dtype = form.shape.rank, getattr(kind, "dtype", form.dtype)
    if np.dtype(dtype) != form.dtype:
        raise TensorError(f"{form} stands on memory of {np.dtype(dtype)}")
    if form.memory == GL:
        if getattr(kind, "ndim", None) != rank:
            raise TensorError(f"{form} has {rank} dimensions, and stands on {kind}")
        form = form.replaced(unit=kind.unit, alignment=kind.alignment)
    return Tensor(form, storage, (0,) * rank, (0,) * rank)


on = traced(_on)
on.__name__ = "on"


def fragments_of(form: Form) -> tuple[Fragment, tuple[int, ...]]:
    """What a form in registers consists of: elements, or fragments of 16 x 16, and how many along each dimension."""
    if form.memory == RF:
        return Fragment(form.dtype, 1), form.extents
    assert form.role is not None
    role = form.role
    spec = wmma.SPECS[(16, 16, 16), role.input, role.accumulator]
    kept = Fragment(role.dtype, spec.count(role.operand) if role.by == WMMA else 16 * 16 // 32)
    return kept, tuple(extent // 16 for extent in form.extents)


def _type_allocate(context: Any, form: Any, *offset: Any) -> Any:
    try:
        of = known(form)
        origin = _check_allocation(of, tuple(map(known, offset)))
    except (NotKnown, ShapeError, TensorError) as error:
        raise TypingError(str(error)) from None
    zeros = (0,) * of.shape.rank
    function = shared if of.memory == SH else registers
    static = (of.dtype, origin) if of.memory == SH else (fragments_of(of)[0], *fragments_of(of)[1])
    given = [WeakIntLiteral(x) if isinstance(x, int) else type_of(x) for x in static]
    inner = context.resolve_function_type(function.device_type, tuple(given), {})
    example = Tensor(of, Held(inner.return_type, None), zeros, zeros)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        values = [i32(x) if isinstance(x, int) else c.get_dummy_value() for x in static]
        made = call_function(c, b, function.device_type, None, inner, values)
        return lowered(c, b, Tensor(of, Held(inner.return_type, made), zeros, zeros))

    return signature(type_of(example), form, *offset), codegen


def _check_allocation(form: Any, offset: tuple) -> int:
    if not isinstance(form, Form) or form.memory not in (SH, RF, FR):
        raise TensorError(f"Allocate({form}): a form in SH or RF is needed, for example T[8, 8].fp32.RF")
    if None in form.extents:
        raise TensorError(f"Allocate({form}): its extents must be known when the kernel is compiled")
    if offset and form.memory != SH:
        raise TensorError(f"Allocate({form}, {offset[0]}): registers have no offset")
    return int(offset[0]) if offset else 0


@atom(_type_allocate)
def allocate(form: Form, *offset: int) -> Tensor:
    """Allocate (Table 1): a new tensor in registers, or in shared memory ``offset`` bytes from its beginning on.

    Registers belong to the function that allocates them: it may pass them on, and not return them.
    """
    origin, zeros = _check_allocation(form, offset), (0,) * form.shape.rank
    if form.memory == SH:
        return Tensor(form, shared(form.dtype, origin), zeros, zeros)
    fragment, counts = fragments_of(form)
    return Tensor(form, registers(fragment, *counts), zeros, zeros)
