"""The class of kernels for operands of 2^31 elements and more: user code gets 64-bit coordinates.

`widened` looks at a configuration and its operands, and puts an adapter around each component whose user code could compute
a place beyond 32 bits: a `WideLayout`, a `WideTransform`, a `WideEpilogue`, a `WideCondition`. Everything else of the kernel
stays as it is, and so does every kernel of smaller operands. gemmkit's own components compute no places: they index arrays
by row and column, and displacements are 64 bits wide in every kernel. They are left as they are.

An adapter's ``coordinate_bits`` is 64 (`coordinate_bits` of any other component is 32): by it the emulator can tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import FunctionType
from typing import Any, cast

from gemmkit.component_arrays import Held, arrays_of
from gemmkit.components import Component, field_values, with_fields
from gemmkit.config import Config
from gemmkit.epilogues import Composed, Epilogue, Fold
from gemmkit.epilogues.pack import Pack
from gemmkit.epilogues.pairs import Pairs, Pairwise
from gemmkit.kernels.spec import Condition
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.references import is_gemmkit
from gemmkit.lang.returned import number
from gemmkit.lang.wide import COUNT, NARROW, WIDE, narrowed
from gemmkit.lang.wide import widened as wide
from gemmkit.layouts import Layout
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.transforms import Transform
from gemmkit.transforms.base import transformed

__all__ = ["WideCondition", "WideEpilogue", "WideLayout", "WideTransform", "coordinate_bits", "widened"]


def coordinate_bits(component: Any) -> int:
    """How wide the coordinates are that a component's user code gets: 32, or 64 in the class of large operands.

    >>> from gemmkit.layouts import RowMajor
    >>> coordinate_bits(RowMajor("float16"))
    32
    """
    return int(getattr(component, "coordinate_bits", NARROW))


# -- adapters ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class WideLayout(Layout):
    """A layout whose methods get 64-bit coordinates. Tiles are loaded and stored element by element: a ``load`` or ``store``
    of its own, which are there for speed alone, would get the coordinates of tiles, of 32 bits."""

    layout: Layout
    coordinate_bits = WIDE

    def __init__(self, layout: Layout):
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "dtype", layout.dtype)

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return self.layout.element(data, wide(i), wide(j), wide(shape))

    def store_element(self, data: Any, i: int, j: int, value: Any, shape: Any) -> None:
        self.layout.store_element(data, wide(i), wide(j), value, wide(shape))       # type: ignore[attr-defined]

    def k_range(self, begin: int, end: int, shape: Any) -> tuple:
        first, last = self.layout.k_range(wide(begin), wide(end), wide(shape))
        return narrowed(first), narrowed(last)

    @property
    def vector_axis(self) -> int | None:
        return self.layout.vector_axis

    def __repr__(self) -> str:
        return f"WideLayout({self.layout!r})"


@dataclass(frozen=True)
class WideTransform(Transform):
    """A transform of an element and its 64-bit coordinates."""

    transform: Transform
    coordinate_bits = WIDE

    def __call__(self, x: Any, i: int, j: int) -> Any:
        return self.at(x, i, j)

    def at(self, x: Any, i: int, j: int) -> Any:
        return transformed(self.transform, x, wide(i), wide(j))


@dataclass(frozen=True)
class WideEpilogue(Epilogue):
    """An element-wise epilogue that gets 64-bit coordinates."""

    epilogue: Epilogue
    coordinate_bits = WIDE

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return self.epilogue(x, wide(m), wide(n))

    @property
    def reads_tiles(self) -> bool:
        return self.epilogue.reads_tiles

    @property
    def writes(self) -> bool:
        return self.epilogue.writes


@dataclass(frozen=True)
class WideFold(Fold):
    """A fold whose function gets 64-bit coordinates."""

    coordinate_bits = WIDE

    def fold(self, values: tuple, m: int, n: int) -> Any:
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


# -- which are needed -------------------------------------------------------------------------------------------------

def widened(conf: Config, infos: dict[str, ArrayInfo | None], sizes: tuple[int, int, int], held: Iterable[Held]) -> Config:
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
                changed[field] = WideTransform(transform)
    size = max(counts["out"], _largest(conf.epilogue))
    if size >= COUNT:
        changed["epilogue"] = _wide_epilogue(conf.epilogue, size)
    if max(*counts.values(), _largest(conf.condition)) >= COUNT and type(conf.condition) is not Condition:
        changed["condition"] = WideCondition(conf.condition)
    changed = {field: value for field, value in changed.items() if value is not getattr(conf, field)}
    return cast(Config, with_fields(conf, changed))


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


def _wide_layout(layout: Layout, name: str, size: int) -> WideLayout:
    if layout.packed > 1:
        raise ValueError(f"{name} or an operand has {size} elements; packed results are of products below {COUNT}: compute "
                         "the rows in several calls")
    if name == "out" and not hasattr(layout, "store_element"):
        _refuse(layout, name, size, "store", "write store_element(data, i, j, value, shape)")
    return WideLayout(layout)


def _wide_epilogue(epilogue: Epilogue, size: int) -> Epilogue:
    if isinstance(epilogue, Composed):
        parts = {name: _wide_epilogue(getattr(epilogue, name), size) for name in ("first", "second")}
        return cast(Epilogue, with_fields(epilogue, {k: v for k, v in parts.items() if v is not getattr(epilogue, k)}))
    if isinstance(epilogue, Fold):
        return WideFold(epilogue.f, _wide_epilogue(epilogue.then, size))
    if isinstance(epilogue, (Pack, Pairs)) and epilogue.with_coordinates and not is_gemmkit(epilogue.f):
        _refuse(epilogue, "out", size, "f(x, y, m, n)", "give an f(x, y)")
    if epilogue.is_last or isinstance(epilogue, Pairwise):
        return epilogue                                # its coordinates are rows and columns
    if epilogue.reduces:
        op = epilogue.op                               # type: ignore[attr-defined]
        if op.of is not None and op.has_coordinates and not is_gemmkit(op.of):
            _refuse(epilogue, "out", size, "op.of(x, m, n)", "give an of(x) or a reduction by name")
        return epilogue
    if not _computes(epilogue) and not _methods(epilogue, ("tile", "store")):
        return epilogue
    own = _methods(epilogue, ("finish", "tile", "store"))
    if own:
        _refuse(epilogue, "out", size, own[0], "write __call__(x, m, n)")
    return WideEpilogue(epilogue) if type(epilogue).finish is Epilogue.finish else epilogue


def _refuse(component: Any, name: str, size: int, method: str, instead: str) -> None:
    raise ValueError(f"{name} or an array of {type(component).__qualname__} has {size} elements, and its {method} works on "
                     f"tiles, whose coordinates are 32-bit integers: that is safe below {COUNT} elements alone; {instead}, "
                     "which gets 64-bit ones")
