"""Adapters: what a kernel is specialised with in place of a component that has to be asked in another way.

A kernel asks for an element by its row and column, in 32 bits, of one product. `Coordinates` say what a component is asked
with instead, and an adapter around the component asks so:

| put around by | if | the component is asked |
|---|---|---|
| `for_products` | it takes ``f(x, i, j, batch)`` | with the product's number, too (`OfProduct`) |
| `for_products` | it holds an array of a stack | with the product's matrix in it (`EpilogueOfStack`, `PartOfStack`) |
| `for_swap_ab` | D^T = B^T A^T is computed (`gemmkit.tuning.choose`) | with rows and columns exchanged (`Transposed`) |
| `widened` | an operand has 2^31 elements or more | with 64-bit coordinates (`Wide`) |

An adapter with a device method ``of_product(batch)`` becomes at the beginning of a tile what that returns
(`gemmkit.lang.component_products.of_product`). gemmkit's own components compute no places, so that they need no wide
coordinates: they index arrays by row and column, and displacements are 64 bits wide in every kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, ClassVar, cast

import numpy as np

from gemmkit.components import CapturedArray, Component, Scalar, arrays_of, field_values, freeze, with_fields
from gemmkit.epilogues import Epilogue, Fold
from gemmkit.epilogues.base import ELEMENT, Alongside, answered_by
from gemmkit.epilogues.pairs import Pack, Pairs, Pairwise
from gemmkit.kernels.collectives.operand import column_of, row_of
from gemmkit.kernels.collectives.scheduler import StackSteps
from gemmkit.kernels.config import TRANSFORMS, Config
from gemmkit.kernels.spec import Condition
from gemmkit.lang.aggregates import fill
from gemmkit.lang.checks import number, numbers
from gemmkit.lang.component_products import with_matrix, with_number
from gemmkit.lang.components import COUNT, NARROW, WIDE, dataclass, narrowed
from gemmkit.lang.components import widened as wide
from gemmkit.lang.functions import DeviceFunction, freeze_array, freeze_scalar
from gemmkit.lang.host import Elements, Numeric, View
from gemmkit.lang.references import is_gemmkit
from gemmkit.lang.registers import apply, each, fold, generate, join
from gemmkit.layouts import ArrayLayout, GlobalLayout, ResultLayout
from gemmkit.layouts.joined import PartArray
from gemmkit.layouts.tensor import Modes
from gemmkit.plans.launch import Launch, Put
from gemmkit.plans.problem import described, first_matrix
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.special import barrier, block_x, thread_index, udiv
from gemmkit.runtime.arrays import ArrayInfo, describe, strided, whole
from gemmkit.runtime.arrays import on_host as as_numpy
from gemmkit.runtime.device import target
from gemmkit.runtime.launch import Launchable
from gemmkit.shapes import Step, merged, span
from gemmkit.tiling import translate
from gemmkit.transforms import Transform
from gemmkit.transforms.base import ComposedTransform, transformed


def coordinate_bits(component: Any) -> int:
    """How wide the coordinates are that a component's user code gets: 32, or 64 in the class of large operands.

    >>> from gemmkit.layouts import RowMajor
    >>> coordinate_bits(RowMajor("float16"))
    32
    """
    return int(getattr(component, "coordinate_bits", NARROW))


# -- coordinates ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Coordinates(Component):
    """What an adapter asks its component with."""

    coordinate_bits: ClassVar[int] = NARROW

    def transform(self, transform: Any, x: Any, i: int, j: int) -> Any:
        raise NotImplementedError

    def epilogue(self, epilogue: Any, x: Any, m: int, n: int) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class OfProduct(Coordinates):
    """The number of the product, too."""

    batch: Scalar = 0

    def transform(self, transform: Any, x: Any, i: int, j: int) -> Any:
        return number(transform, "__call__", transform.in_product(x, i, j, self.batch), x)

    def epilogue(self, epilogue: Any, x: Any, m: int, n: int) -> Any:
        return epilogue.in_product(x, m, n, self.batch)

    def of_product(self, batch: int) -> Any:
        return with_number(self, "batch", batch)


@dataclass(frozen=True)
class Transposed(Coordinates):
    """Those of the operand whose transpose the kernel has."""

    def transform(self, transform: Any, x: Any, i: int, j: int) -> Any:
        return transformed(transform, x, j, i)

    def epilogue(self, epilogue: Any, x: Any, m: int, n: int) -> Any:
        return number(epilogue, "__call__", epilogue(x, n, m), x)


@dataclass(frozen=True)
class Wide(Coordinates):
    """The same in 64 bits."""

    coordinate_bits = WIDE

    def transform(self, transform: Any, x: Any, i: int, j: int) -> Any:
        return transformed(transform, x, wide(i), wide(j))

    def epilogue(self, epilogue: Any, x: Any, m: int, n: int) -> Any:
        return epilogue(x, wide(m), wide(n))


# -- adapters ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class AdaptedTransform(Transform):
    """A transform that is asked with other coordinates."""

    transform: Transform
    coordinates: Coordinates

    def __call__(self, x: Any, i: int, j: int) -> Any:
        return self.at(x, i, j)

    def at(self, x: Any, i: int, j: int) -> Any:
        return self.coordinates.transform(self.transform, x, i, j)

    @property
    def coordinate_bits(self) -> int:
        return self.coordinates.coordinate_bits


@dataclass(frozen=True)
@answered_by("epilogue", "finishes_blocks", "is_last", "neighbours", "of_result", "passes_on", "reads_tiles", "reduces",
             "stages", "stores_blocks", "stores_itself", "writes")
class Adapted(Epilogue):
    """An epilogue that stands for another, which is asked what it does."""

    epilogue: Epilogue

    def ending(self) -> Any:
        return self.epilogue.ending()

    def reads_alongside(self) -> bool:
        return self.epilogue.reads_alongside()


@dataclass(frozen=True)
class AdaptedEpilogue(Adapted):
    """An epilogue that is asked with other coordinates, one element at a time."""

    coordinates: Coordinates

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return self.coordinates.epilogue(self.epilogue, x, m, n)

    @property
    def coordinate_bits(self) -> int:
        return self.coordinates.coordinate_bits


@dataclass(frozen=True)
class EpilogueOfTranspose(AdaptedEpilogue):
    """An epilogue of D, asked by the kernel that computes D^T: a tile of D^T is none of D in the order of its elements."""

    coordinates: Coordinates = Transposed()

    def finish(self, values: Elements, tile: Any, shape: Any) -> Elements:
        of_d = with_number(with_number(shape, "M", shape.N), "N", shape.M)
        return apply(finish_transposed, values, self.epilogue, tile, of_d)


def finish_transposed(x: Any, n: int, epilogue: Any, tile: Any, shape: Any) -> Any:
    """The epilogue of a tile's n-th element, which is the element of D at the column and row that it has in D^T."""
    place = translate(ELEMENT, column_of(tile, n), row_of(tile, n))
    return numbers(epilogue, "finish", epilogue.finish((x,), place, shape), (x,))[0]


@dataclass(frozen=True)
class EpilogueOfStack(Adapted):
    """An epilogue whose array ``field`` has a vector or a matrix for each product."""

    field: str
    steps: StackSteps

    def alongside(self) -> tuple[Alongside, ...]:
        return tuple(one._replace(path=("epilogue",), steps=self.steps) for one in self.epilogue.alongside()
                     if one.field == self.field)

    def of_product(self, batch: int) -> Any:
        return with_matrix(self.epilogue, self.field, self.steps.coordinates(batch))


@dataclass(frozen=True)
class PartOfStack(PartArray):
    """A layout's array that has a matrix for each product."""

    steps: StackSteps

    def of_product(self, batch: int) -> Any:
        return with_matrix(self, "array", self.steps.coordinates(batch))


@dataclass(frozen=True)
class WideLayout(GlobalLayout, ResultLayout):
    """A layout whose methods get 64-bit coordinates. Tiles are loaded and stored element by element: a ``load`` or ``store``
    of its own, which are there for speed alone, would get the coordinates of tiles, of 32 bits."""

    layout: Any
    coordinate_bits = WIDE

    def __init__(self, layout: ArrayLayout):
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "dtype", layout.dtype)

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return self.layout.element(data, wide(i), wide(j), wide(shape))

    def store_element(self, data: Any, i: int, j: int, value: Any, shape: Any) -> None:
        self.layout.store_element(data, wide(i), wide(j), value, wide(shape))

    def k_range(self, begin: int, end: int, shape: Any) -> tuple[int, int]:
        first, last = self.layout.k_range(wide(begin), wide(end), wide(shape))
        return narrowed(first), narrowed(last)

    @property
    def vector_axis(self) -> int | None:
        axis: int | None = self.layout.vector_axis
        return axis

    def __repr__(self) -> str:
        return f"WideLayout({self.layout!r})"


@dataclass(frozen=True)
class WideFold(Fold):
    """A fold whose function gets 64-bit coordinates."""

    coordinate_bits = WIDE

    def fold(self, values: Elements, m: int, n: int) -> Any:
        if len(values) == self.arguments:
            return number(self, "f", self.f(*values), values[0])
        return number(self, "f", self.f(*values, wide(m), wide(n)), values[0])


@dataclass(frozen=True)
class WideCondition(Condition):
    """A condition that gets 64-bit coordinates."""

    condition: Condition
    coordinate_bits = WIDE

    def __call__(self, m: int, n: int, k: int) -> bool:
        return self.condition(wide(m), wide(n), wide(k))


# -- of products in a stack -------------------------------------------------------------------------------------------

def for_products(conf: Config, stack: tuple[int, ...] | None) -> Config:
    """The configuration with adapters where components ask for the product, or have arrays of stacks; else itself."""
    changed = {name: new for name in (*TRANSFORMS, "epilogue", "global_a_layout", "global_b_layout")
               if (new := component_for_products(value := getattr(conf, name), stack)) is not value}
    return with_fields(conf, changed)


def component_for_products(component: Component, stack: tuple[int, ...] | None) -> Component:
    """A transform, an epilogue or a layout as kernels of a stack take it; any other component as it is."""
    if isinstance(component, ArrayLayout):
        return component if stack is None else _layout_for_products(component, stack)
    if isinstance(component, Epilogue):
        return component.mapped(lambda stage: _epilogue_for_products(stage, stack))
    if isinstance(component, ComposedTransform):
        return _with_changed(component, {name: component_for_products(getattr(component, name), stack)
                                         for name in ("first", "second")})
    if isinstance(component, Transform) and not component.is_identity and component.with_batch:
        return AdaptedTransform(component, OfProduct())
    return component


def _with_changed(component: Component, fields: dict[str, Any]) -> Component:
    changed = {name: new for name, new in fields.items() if new is not getattr(component, name)}
    return with_fields(component, changed)


def _layout_for_products(component: Component, stack: tuple[int, ...]) -> Component:
    """A layout, or a component of it, whose arrays are stacks."""
    if isinstance(component, PartArray):
        first, array = _first(component.array, 2, stack)
        changed = with_fields(component, {"array": array})
        return PartOfStack(array, StackSteps.of(first.steps)) if first.steps else changed
    return _with_changed(component, {name: _layout_for_products(value, stack)
                                     for name, value in field_values(component).items() if isinstance(value, Component)})


def _first(array: Any, own: int, stack: tuple[int, ...] | None) -> tuple[ArrayInfo, Any]:
    """The first matrix (or vector) of an array of stacks, and the array with the dimensions that `StackSteps` count."""
    info = described(array)
    assert info is not None
    first = first_matrix(info, len(info.shape) - own, stack)
    matrices = whole(first)
    return first, matrices if isinstance(array, ArrayInfo) else strided(array, info, matrices.shape, matrices.strides)


def _epilogue_for_products(epilogue: Epilogue, stack: tuple[int, ...] | None) -> Epilogue:
    """An epilogue that is no chain."""
    for field, own in epilogue.array_dimensions().items() if stack is not None else ():
        array = getattr(epilogue, field)
        info = described(array)
        if info is None or len(info.shape) == own:
            continue
        if epilogue.with_batch:
            raise TypeError(f"{type(epilogue).__qualname__} asks for the number of the product and declares {field} as an "
                            "array of stacks (array_ndims); one or the other")
        first, view = _first(array, own, stack)
        changed = with_fields(epilogue, {field: view})
        # gemmkit's epilogues have one array
        return EpilogueOfStack(changed, field, StackSteps.of(first.steps)) if first.steps else changed
    return AdaptedEpilogue(epilogue, OfProduct()) if epilogue.with_batch else epilogue


# -- of the transpose -------------------------------------------------------------------------------------------------

def for_swap_ab(conf: Config) -> Config:
    """The configuration of a transposed product, with adapters around components that ask for coordinates; else itself.
    Nothing of the transpose is seen by the caller."""
    changed: dict[str, Any] = {name: AdaptedTransform(value, Transposed()) for name in TRANSFORMS
                               if not (value := getattr(conf, name)).is_identity and value.with_coordinates}
    if not conf.epilogue.passes_on:
        changed["epilogue"] = EpilogueOfTranspose(conf.epilogue)
    return with_fields(conf, changed)


# -- of large operands ------------------------------------------------------------------------------------------------

def widened(conf: Config, infos: dict[str, ArrayInfo | None], sizes: tuple[int, int, int],
            held: Iterable[CapturedArray]) -> Config:
    """The configuration with adapters where an operand has 2^31 elements or more, by its array or by its rows and columns,
    or a component an array of that size; itself where none has. ``held`` are the arrays of its components.

    Raises ValueError, naming the operand, its elements and the method, for user code that works on tiles and so cannot be
    given 64-bit coordinates.
    """
    M, N, K = sizes
    extents = {"a": M * K, "b": K * N, "c": M * N, "out": M * N}
    counts = {name: max(extents[name], 0 if info is None else math.prod(info.shape)) for name, info in infos.items()}
    if max(*counts.values(), *(math.prod(one.info.shape) for one in held)) < COUNT:
        return conf
    changed: dict[str, Any] = {}
    for name, count in counts.items():
        short = "d" if name == "out" else name
        layout = getattr(conf, f"global_{short}_layout")
        size = max(count, _largest(layout))
        if size >= COUNT and _computes(layout):
            changed[f"global_{short}_layout"] = _wide_layout(layout, name, size)
        first, second = (("shared_to_global", "regs_to_shared") if short == "d" else ("global_to_shared", "shared_to_regs"))
        for field in (f"transform_{first}_{short}", f"transform_{second}_{short}"):
            transform = getattr(conf, field)
            if max(count, _largest(transform)) >= COUNT and not transform.is_identity and transform.with_coordinates:
                changed[field] = AdaptedTransform(transform, Wide())
    size = max(counts["out"], _largest(conf.epilogue))
    if size >= COUNT:
        changed["epilogue"] = conf.epilogue.mapped(lambda stage: _wide_epilogue(stage, size))
    if max(*counts.values(), _largest(conf.condition)) >= COUNT and type(conf.condition) is not Condition:
        changed["condition"] = WideCondition(conf.condition)
    return cast(Config, _with_changed(conf, changed))


def _largest(component: Any) -> int:
    """The most elements that an array has which a component holds."""
    return max((math.prod(held.info.shape) for held in arrays_of(component)), default=0)


_PLACES = ("element", "store_element", "load", "store", "k_range", "of_stored")


def _methods(component: Any, names: Iterable[str]) -> list[str]:
    """Those of the methods that are a user's."""
    mro = type(component).__mro__
    found = {name: next((vars(base)[name] for base in mro if name in vars(base)), None) for name in names}
    return [name for name, method in found.items() if method is not None and not is_gemmkit(method)]


def _computes(component: Component) -> bool:
    """Whether coordinates come to a user's code: its own methods, or a function or component that it holds."""
    if _methods(component, (*_PLACES, "__call__", "finish")):
        return True
    return any(isinstance(value, (FunctionType, DeviceFunction)) or (isinstance(value, Component) and _computes(value))
               for value in field_values(component).values())


def _wide_layout(layout: ArrayLayout, name: str, size: int) -> WideLayout:
    if isinstance(layout, ResultLayout) and layout.packed > 1:
        raise ValueError(f"{name} or an operand has {size} elements; packed results are of products below {COUNT}: compute "
                         "the rows in several calls")
    if name == "out" and not hasattr(layout, "store_element"):
        _refuse(layout, name, size, "store", "write store_element(data, i, j, value, shape)")
    return WideLayout(layout)


def _wide_epilogue(epilogue: Epilogue, size: int) -> Epilogue:
    """An epilogue that is no chain."""
    if isinstance(epilogue, EpilogueOfTranspose):      # coordinates are exchanged first
        inner = epilogue.epilogue.mapped(lambda stage: _wide_epilogue(stage, size))
        return cast(Epilogue, _with_changed(epilogue, {"epilogue": inner}))
    if isinstance(epilogue, Fold):
        return WideFold(epilogue.f, epilogue.then)
    if isinstance(epilogue, (Pack, Pairs)) and epilogue.with_coordinates and not is_gemmkit(epilogue.f):
        _refuse(epilogue, "out", size, "f(x, y, m, n)", "give an f(x, y)")
    if epilogue.is_last or isinstance(epilogue, Pairwise):
        return epilogue                                # its coordinates are rows and columns
    if epilogue.reduces:
        for reduction in epilogue.stages():
            op = reduction.op                          # type: ignore[attr-defined]
            if op.of is not None and op.has_coordinates and not is_gemmkit(op.of):
                _refuse(reduction, "out", size, "op.of(x, m, n)", "give an of(x) or a reduction by name")
        return epilogue
    if not _computes(epilogue) and not _methods(epilogue, ("tile", "store")):
        return epilogue
    own = _methods(epilogue, ("finish", "tile", "store"))
    if own:
        _refuse(epilogue, "out", size, own[0], "write __call__(x, m, n)")
    return AdaptedEpilogue(epilogue, Wide()) if type(epilogue).finish is Epilogue.finish else epilogue


def _refuse(component: Any, name: str, size: int, method: str, instead: str) -> None:
    raise ValueError(f"{name} or an array of {type(component).__qualname__} has {size} elements, and its {method} works on "
                     f"tiles, whose coordinates are 32-bit integers: that is safe below {COUNT} elements alone; {instead}, "
                     "which gets 64-bit ones")


# --------------------------------------------------------------------------------------------------
# A tensor's elements in another order.
#
# Neighbours in memory move as vectors where the fastest dimension stays the fastest. Where another one becomes it, a tile
# of both goes through shared memory, so that loads and stores are of whole lines.

THREADS, PIECES = 256, 4               # of a block; vectors that a thread moves at once
LONGEST = 96                           # elements of a tile along a dimension, of 2 bytes


@dataclass(frozen=True)
class Reordering(Component):
    """How `reorder` shares out its work. ``steps`` are the vectors of dimension 0 and the other dimensions; or, if
    dimension 1 becomes the fastest, tiles of ``columns`` by ``rows`` elements of dimensions 0 and 1, and the other
    dimensions. Vectors that are loaded have ``loaded`` elements, those that are stored ``stored``."""

    steps: Any
    dtype: np.dtype
    columns: int
    rows: int
    loaded: int
    stored: int

    @property
    def is_tiled(self) -> bool:
        return self.rows > 0

    @property
    def pitch(self) -> int:
        """Elements from row to row in shared memory: an odd number of words."""
        return self.columns + max(1, 4 // self.dtype.itemsize)

    @property
    def loads(self) -> int:
        """Vectors of a tile that a thread loads."""
        return -(-self.rows * self.columns // (self.loaded * THREADS))

    @property
    def stores(self) -> int:
        return -(-self.rows * self.columns // (self.stored * THREADS))

    @property
    def blocks(self) -> int:
        count: int = math.prod(self.steps.extents())
        return count if self.is_tiled else -(-count // (THREADS * PIECES))

    @property
    def shared_bytes(self) -> int:
        return self.rows * self.pitch * self.dtype.itemsize

    @staticmethod
    def of(x: ArrayInfo, y: ArrayInfo) -> Reordering:
        """Of arrays as `TensorCopy` orders their dimensions."""
        is_tiled, size = y.strides[0] != min(y.strides), x.dtype.itemsize    # a copy of one column has no stride of 1
        loaded, stored = _vector(x, 0), _vector(y, int(is_tiled))
        if not is_tiled:
            loaded = stored = math.gcd(loaded, stored)
            return Reordering(Modes.of((x.shape[0] // loaded, *x.shape[1:])), x.dtype, 0, 0, loaded, stored)
        extents = range(16, max(16, min(LONGEST, 2 * LONGEST // size)) + 1, 16)
        columns, rows = (min(extents, key=lambda extent: (-(-n // extent) * extent, -extent)) for n in x.shape[:2])
        tiles = -(-x.shape[0] // columns), -(-x.shape[1] // rows), *x.shape[2:]
        return Reordering(Modes.of(tiles), x.dtype, columns, rows, loaded, stored)


def _vector(array: ArrayInfo, axis: int) -> int:
    """Elements along a dimension that are moved at once: 16 bytes at most, wholly in bounds and aligned."""
    if array.strides[axis] != 1:
        return 1
    size, others = array.dtype.itemsize, (*array.strides[:axis], *array.strides[axis + 1:])
    return math.gcd(max(1, 16 // size), array.shape[axis], (array.pointer % 16 or 16) // size, *others)


class TensorCopy:
    """The launch that copies a tensor x into y, of the same shape and other strides, which has no stride 0 and no element
    twice. Elements are bits: y holds x's, whatever they mean."""

    def __init__(self, x: ArrayInfo, y: ArrayInfo):
        modes = [(extent, *step) for extent, step in merged((extent, Step((own, other))) for extent, own, other in sorted(
            zip(x.shape, x.strides, y.strides), key=lambda mode: mode[2]) if extent != 1)] or [(1, 1, 1)]
        first = min(modes, key=lambda mode: abs(mode[1]))
        modes = [first, *(mode for mode in modes if mode is not first)]
        shape, of_x, of_y = zip(*modes)
        bits = np.dtype(f"u{x.dtype.itemsize}")
        self.x = x._replace(shape=shape, strides=of_x, dtype=bits)
        self.y = y._replace(shape=shape, strides=of_y, dtype=bits, readonly=False)
        self.spec = Reordering.of(self.x, self.y)
        self.frozen = [freeze_array(info, axis if info.strides[axis] == 1 else None, readonly=info is self.x)
                       for info, axis in ((self.x, 0), (self.y, int(self.spec.is_tiled)))]
        self.count = math.prod(self.spec.steps.extents())
        self.launchable = Launchable(reorder, [freeze(self.spec), *self.frozen, freeze_scalar(self.count)], THREADS,
                                     self.spec.blocks, target(x.device), x.device, self.spec.shared_bytes)

    @property
    def nbytes(self) -> int:
        """Of y, with what lies between its elements."""
        return self.y.dtype.itemsize * (1 + span(zip(self.y.shape, self.y.strides)))

    def launch(self, which: tuple[int, int] = (0, 1)) -> Launch:
        """A call brings the addresses of y and x, at these places."""
        places = self.launchable.slots
        assert places[1] is not None and places[2] is not None
        return Launch(self.launchable, [Put(places[2], which[0]), Put(places[1], which[1])])

    # -- without a GPU (`gemmkit.emulator`) ----------------------------------------------------------------------------

    def on_host(self, array: Any, mode: Any) -> np.ndarray:
        """The copy of x, which is this array."""
        space = np.empty(self.nbytes // self.y.dtype.itemsize, describe(array).dtype)
        mode.run(self, (array, space))
        return space

    def filled(self, arrays: tuple[Any, Any]) -> list[Any]:
        return [arrays[1]]

    def emulated(self, arrays: tuple[Any, Any], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        views = [arena.view_of(frozen.arrays[0], as_numpy(array).view(frozen.arrays[0].dtype), name, frozen.kind.unit,
                               frozen.kind.alignment, readonly=name == "x")
                 for name, array, frozen in zip("xy", arrays, self.frozen)]
        yield self.launchable, (arena.component(self.spec), *views, self.count)


def reorder(how: Reordering, x: View, y: View, count: int) -> None:
    """Copy x into y, which has the same dimensions, and ``count`` vectors if it has no tiles."""
    if how.is_tiled:
        at = how.steps.split(block_x())
        fold(how.loads, put_in_tile, 0, how, generate(how.loads, vector_of_tile, how, x, at))
        barrier()
        fold(how.stores, put_from_tile, 0, how, y, at)
    else:
        first = block_x() * (THREADS * PIECES) + thread_index()
        fold(PIECES, put_vector, 0, how, y, first, count, generate(PIECES, vector_at, how, x, first, count))


def vector_place(how: Reordering, n: int) -> tuple[Any, ...]:
    at = how.steps.split(n)
    return join(((at[0] * how.loaded,), at[1:]))


def vector_at(p: int, how: Reordering, x: View, first: int, count: int) -> tuple[Any, ...]:
    n = first + p * THREADS
    if n < count:
        return load_global(x, 0, vector_place(how, n), how.steps.nowhere(), how.loaded)
    return fill(how.dtype, how.loaded, 0)


def put_vector(_: int, p: int, how: Reordering, y: View, first: int, count: int, vectors: tuple[Any, ...]) -> int:
    n = first + p * THREADS
    if n < count:
        store_global(y, 0, vector_place(how, n), how.steps.nowhere(), vectors[p])
    return 0


def loaded_at(p: int, how: Reordering) -> tuple[int, int]:
    """The column and row in the tile of a thread's vector number p."""
    n, vectors = p * THREADS + thread_index(), how.columns // how.loaded
    row = udiv(n, vectors)
    return (n - row * vectors) * how.loaded, row


def stored_at(p: int, how: Reordering) -> tuple[int, int]:
    n, vectors = p * THREADS + thread_index(), how.rows // how.stored
    column = udiv(n, vectors)
    return column, (n - column * vectors) * how.stored


def tensor_place(how: Reordering, at: tuple[Any, ...], column: int, row: int) -> tuple[Any, ...]:
    return join(((at[0] * how.columns + column, at[1] * how.rows + row), at[2:]))


def vector_of_tile(p: int, how: Reordering, x: View, at: tuple[Any, ...]) -> tuple[Any, ...]:
    column, row = loaded_at(p, how)
    place = tensor_place(how, at, column, row)
    if row < how.rows and place[0] < x.shape[0] and place[1] < x.shape[1]:
        return load_global(x, 0, place, how.steps.nowhere(), how.loaded)
    return fill(how.dtype, how.loaded, 0)


def put_in_tile(_: int, p: int, how: Reordering, vectors: tuple[Any, ...]) -> int:
    column, row = loaded_at(p, how)
    if row < how.rows:
        each(put_element, vectors[p], how, row * how.pitch + column)
    return 0


def put_element(value: Numeric, n: int, how: Reordering, at: int) -> None:
    store_shared(shared(how.dtype, 0), at + n, 0, (value,))


def element_of_tile(n: int, how: Reordering, at: int) -> Numeric:
    value: Numeric = load_shared(shared(how.dtype, 0), at + n * how.pitch, 0, 1)[0]
    return value


def put_from_tile(_: int, p: int, how: Reordering, y: View, at: tuple[Any, ...]) -> int:
    column, row = stored_at(p, how)
    place = tensor_place(how, at, column, row)
    if column < how.columns and place[0] < y.shape[0] and place[1] < y.shape[1]:
        store_global(y, 1, place, how.steps.nowhere(), generate(how.stored, element_of_tile, how, row * how.pitch + column))
    return 0
