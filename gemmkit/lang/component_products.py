"""One product of a stack: views of its matrices, components that know which product they are asked about, and its sizes.

A kernel takes whole stacks and computes one product at a time. At the beginning of a tile of D it asks for that product's
matrices (`matrix_of`) and components (`of_product`); all that it calls then sees a product of two matrices.
"""

from __future__ import annotations

import copy
import inspect
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

from gemmkit.components import Component, Scalar, field_values, remembered, with_fields
from gemmkit.lang.components import ComponentType, dataclass
from gemmkit.lang.fingerprint import digest
from gemmkit.lang.host import View
from gemmkit.lang.memory import ViewType, coordinates_of, proxy
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, cgutils, ir, signature, types
from gemmkit.lang.registers import call_function

i64 = ir.IntType(64)


# -- arrays -----------------------------------------------------------------------------------------------------------

def _matrix_type(view: ViewType, count: int) -> ViewType:
    unit = None if view.unit is None or view.unit < count else view.unit - count
    return ViewType(view.dtype, view.ndim - count, unit, view.alignment, view.wide, view.readonly)


def _matrix(c: Context, b: ir.IRBuilder, view: ViewType, value: ir.Value, key: types.Type, coordinates: ir.Value) -> Any:
    """The view of a matrix: what is left of extents and strides, at its own address."""
    given, at = proxy(c, b, view, value), coordinates_of(c, b, key, coordinates, view.coordinate)
    count = len(at)
    to = _matrix_type(view, count)
    out, address = proxy(c, b, to, None), given.address
    for axis, coordinate in enumerate(reversed(at)):
        step = coordinate if coordinate.type == i64 else b.sext(coordinate, i64)
        if axis != view.unit:
            step = b.mul(step, getattr(given, f"stride{axis}"), flags=("nsw",))
        address = b.add(address, b.mul(step, i64(view.dtype.itemsize), flags=("nsw",)))
    out.address = address
    for axis in range(to.ndim):
        setattr(out, f"extent{axis}", getattr(given, f"extent{axis + count}"))
        if axis != to.unit:
            setattr(out, f"stride{axis}", getattr(given, f"stride{axis + count}"))
    return out._getvalue()


def _type_matrix_of(context: TypingContext, view: types.Type, coordinates: types.Type) -> Any:
    if not isinstance(coordinates, types.BaseTuple):
        return None
    if not isinstance(view, ViewType) or not coordinates.types:
        return signature(view, view, coordinates), lambda c, b, s, v: v[0]
    return (signature(_matrix_type(view, len(coordinates.types)), view, coordinates),
            lambda c, b, s, v: _matrix(c, b, view, v[0], coordinates, v[1]))


@atom(_type_matrix_of)
def matrix_of(view: Any, coordinates: tuple) -> Any:
    """The matrix of a stack, as a view: ``coordinates`` are those of the array's first dimensions, the last of them first.

    Without coordinates, and of an operand that is not there, the thing itself.
    """
    return view.at(tuple(reversed(coordinates))) if isinstance(view, View) and coordinates else view


# -- components -------------------------------------------------------------------------------------------------------

def _with_types(ty: ComponentType, changed: dict[str, Any]) -> ComponentType:
    """A component's type with other types of runtime fields."""
    if all(ty.runtime[name] == new for name, new in changed.items()):
        return ty
    skeleton = copy.copy(ty.skeleton)
    for name in [n for n in vars(skeleton) if isinstance(inspect.getattr_static(ty.cls, n, None), cached_property)]:
        del vars(skeleton)[name]
    for name, new in changed.items():
        if isinstance(new, ComponentType):
            object.__setattr__(skeleton, name, new.skeleton)
    _, fingerprint, places, _ = ty.key
    fingerprint = digest("\n".join([fingerprint, *(f"{name}:{new.name}" for name, new in changed.items())]))
    return ComponentType(ty.cls, fingerprint, places, {**ty.runtime, **changed}, ty.static, skeleton)


def _replaced(c: Context, b: ir.IRBuilder, ty: ComponentType, value: ir.Value, to: ComponentType,
              changed: dict[str, Any]) -> Any:
    """A component's value with others in some runtime fields."""
    given, out = cgutils.create_struct_proxy(ty)(c, b, value=value), cgutils.create_struct_proxy(to)(c, b)
    for name in ty.runtime:
        setattr(out, name, changed[name] if name in changed else getattr(given, name))
    return out._getvalue()


def _type_with_number(context: TypingContext, component: types.Type, name: types.Type, number: types.Type) -> Any:
    field = _field(component, name)
    if field is None or not isinstance(field, types.Integer) or not isinstance(number, types.Integer):
        return None
    return signature(component, component, name, number), lambda c, b, s, v: _replaced(
        c, b, component, v[0], component, {name.literal_value: c.cast(b, v[2], number, field)})


@atom(_type_with_number)
def with_number(component: Any, name: str, number: int) -> Any:
    """The component with another number in a runtime field."""
    return with_fields(component, {name: number})


def _type_with_matrix(context: TypingContext, component: types.Type, name: types.Type, coordinates: types.Type) -> Any:
    view = _field(component, name)
    if not isinstance(view, ViewType) or not isinstance(coordinates, types.BaseTuple):
        return None
    field = name.literal_value
    to = component if not coordinates.types else _with_types(component, {field: _matrix_type(view, len(coordinates.types))})

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        if not coordinates.types:
            return v[0]
        given = getattr(cgutils.create_struct_proxy(component)(c, b, value=v[0]), field)
        return _replaced(c, b, component, v[0], to, {field: _matrix(c, b, view, given, coordinates, v[2])})

    return signature(to, component, name, coordinates), codegen


@atom(_type_with_matrix)
def with_matrix(component: Any, name: str, coordinates: tuple) -> Any:
    """The component with `matrix_of` its array ``name`` in the array's place."""
    return with_fields(component, {name: matrix_of(getattr(component, name), coordinates)})


def _field(component: Any, name: Any) -> Any:
    if not isinstance(component, ComponentType) or not isinstance(name, types.StringLiteral):
        return None
    return component.runtime.get(name.literal_value)


def _bound(context: TypingContext, ty: Any, batch: Any, which: str) -> Any:
    """(type, code) of a component for one product, or part: what methods of the name ``which`` return; None where there are
    none."""
    if not isinstance(ty, ComponentType):
        return None
    if hasattr(ty.cls, which):
        method = context.resolve_getattr(ty, which)
        inner = context.resolve_function_type(method, (batch,), {})
        return None if inner is None else (inner.return_type, lambda c, b, value, number: call_function(
            c, b, method, value, inner, [c.cast(b, number, batch, inner.args[-1])]))
    found = {name: bound for name, field in ty.runtime.items()
             if (bound := _bound(context, field, batch, which)) is not None}
    if not found:
        return None
    to = _with_types(ty, {name: new for name, (new, _) in found.items()})

    def codegen(c: Context, b: ir.IRBuilder, value: ir.Value, number: ir.Value) -> Any:
        given = cgutils.create_struct_proxy(ty)(c, b, value=value)
        return _replaced(c, b, ty, value, to, {name: code(c, b, getattr(given, name), number)
                                               for name, (_, code) in found.items()})

    return to, codegen


def _type_bound(which: str) -> Any:
    def typer(context: TypingContext, component: types.Type, number: types.Type) -> Any:
        if not isinstance(component, ComponentType) or not isinstance(number, types.Integer):
            return None
        found = _bound(context, component, number, which)
        if found is None:
            return signature(component, component, number), lambda c, b, s, v: v[0]
        to, code = found
        return signature(to, component, number), lambda c, b, s, v: code(c, b, v[0], v[1])

    return typer


def _bound_on_host(component: Any, number: int, which: str) -> Any:
    if hasattr(component, which):
        return getattr(component, which)(number)
    if _WITHOUT.get((id(component), which)) is component:
        return component
    changed = {name: new for name, value in field_values(component).items()
               if isinstance(value, Component) and (new := _bound_on_host(value, number, which)) is not value}
    if changed:
        return _without_known(component, changed)
    if isinstance(component, Component):
        _WITHOUT[id(component), which] = component
    return component


#: Components in which none has a method, by address and its name: every emulated thread asks for every tile, and to go
#: through all fields each time was a fifth of the emulator's time.
_WITHOUT: WeakValueDictionary[tuple[int, str], Any] = WeakValueDictionary()


@atom(_type_bound("of_product"))
def of_product(component: Any, batch: int) -> Any:
    """The component for product ``batch`` of a stack: of each component in it with a method ``of_product(batch)``, what that
    returns. The component itself where there is none."""
    return _bound_on_host(component, batch, "of_product")


@atom(_type_bound("of_part"))
def of_part(component: Any, at: int) -> Any:
    """The same with ``of_part(at)``: for the part of a block's work that begins at ``at`` (`TileScheduler.begin`)."""
    return _bound_on_host(component, at, "of_part")


def _without_known(component: Any, changed: dict[str, Any]) -> Any:
    """The component with other components in some fields, and nothing that cached properties knew of those before."""
    out = with_fields(component, changed)
    for name in remembered(out):
        del vars(out)[name]
    return out



# -- sizes ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ProblemShape(Component):
    """The run-time sizes of a problem: what layouts get as ``shape``. Without a stack ``batch`` is 0."""

    M: Scalar
    N: Scalar
    K: Scalar

    batch = 0


@dataclass(frozen=True)
class StackShape(ProblemShape):
    """The run-time sizes of a product of a stack, and which product it is, counted in C order."""

    batch: Scalar = 0

    def of_product(self, batch: int) -> Any:
        return with_number(self, "batch", batch)
