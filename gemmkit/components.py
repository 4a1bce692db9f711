"""Components: the pluggable parts of a kernel (layouts, transforms, operators, epilogues, ...).

A component is a frozen dataclass whose plain Python methods are device code. Its fields are of two kinds:

* **static** (sizes, dtypes, functions, tiles, other components): part of the compiled kernel, as constants;
* **runtime** (arrays; scalars given as NumPy scalars or annotated `Scalar`): kernel arguments, so that another bias
  vector or another alpha compiles nothing.

>>> from dataclasses import dataclass
>>> import gemmkit as gk
>>> @dataclass(frozen=True)
... class Shift(gk.Component):
...     by: gk.Scalar                      # runtime
...     times: int = 2                     # static
...     def __call__(self, x):
...         return x + self.by * self.times
>>> Shift(0.5)(1.0)                        # in Python, and so in the emulator, it is just an object
2.0

In device code a component is a Numba value: static fields and properties fold to constants, methods are compiled for
the types they meet and inlined. Nothing of Numba shows in the class; a new component touches no file of gemmkit.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
import weakref
from functools import cached_property, lru_cache, partial
from itertools import repeat
from types import FunctionType
from typing import Any

import numpy as np

from gemmkit.lang.aggregates import Aggregate
from gemmkit.lang.closures import captured, is_runtime, without_captures
from gemmkit.lang.component_class import ComponentClass
from gemmkit.lang.component_types import component_kind
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.fingerprint import Reading, digest, read_class, read_value, when_forgetting
from gemmkit.lang.freezing import Frozen, freeze_function, freeze_runtime, freeze_scalar
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.given import check_fields
from gemmkit.lang.guards import Guards, class_version
from gemmkit.lang.kinds import Kind, kind
from gemmkit.lang.numba_hooks import typeof_impl, types
from gemmkit.lang.runtime_fields import Array, Scalar, annotated
from gemmkit.lang.values import static_maker
from gemmkit.runtime.arrays import ArrayInfo, describe, is_array

__all__ = ["Array", "Component", "ComponentError", "Frozen", "Scalar", "freeze"]


class Component(metaclass=ComponentClass):
    """Base class of every pluggable part; subclasses are frozen dataclasses.

    ``device_methods`` names the methods that are device code by contract; those among them that are ``without_value`` store
    something and return nothing. (Of a component of gemmkit's own that may be a field, too, in which a user's function is.)
    """

    device_methods: typing.ClassVar[tuple[str, ...]] = ("__call__",)
    without_value: typing.ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):
            cls.__repr__ = _paste_able                                    # type: ignore[method-assign]

    def __post_init__(self, *_: Any) -> None:
        check_fields(self)

    def __device_type__(self) -> types.Type:
        return freeze(self).type

    def __reading__(self) -> Reading:
        frozen = freeze(self)
        return Reading(frozen.fingerprint, Guards(fact for guards in frozen.guards for fact in guards.facts), ())


def _paste_able(component: Any) -> str:
    """``RowMajor('float16')``: a component as one would write it, without the fields that are at their defaults."""
    parts = []
    leading = True
    for field in dataclasses.fields(component) if dataclasses.is_dataclass(component) else ():
        value = getattr(component, field.name)
        holds_array = is_array(value)
        if not holds_array and field.default is not dataclasses.MISSING and _same(value, field.default):
            leading = leading and bool(field.kw_only)      # such a field has no place
            continue
        if holds_array and not isinstance(value, np.ndarray):          # its elements may lie on a device
            shape = getattr(value, "shape", None)
            text = f"<array{'' if shape is None else f' of shape {tuple(shape)}'}, {type(value).__qualname__}>"
        else:
            text = repr(value.name) if isinstance(value, np.dtype) else repr(value)
        parts.append(text if leading and not field.kw_only else f"{field.name}={text}")
    return f"{type(component).__qualname__}({', '.join(parts)})"


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, np.dtype):
        return default is not None and value == np.dtype(default)
    return type(value) is type(default) and value == default


def field_values(component: Any) -> dict[str, Any]:
    cls: Any = type(component)
    names = _field_names(cls)
    return dict(zip(names, map(getattr, repeat(component), names)))


@lru_cache(maxsize=4096)
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


def without_arrays(component: Any) -> Any:
    """The component with descriptions (ArrayInfo) in place of arrays, also of nested ones and of those that a function
    captured: it freezes to the same type, and keeps no array alive."""
    changed: dict[str, Any] = {}
    for field, value in field_values(component).items():
        if isinstance(value, Component):
            inner = without_arrays(value)
            if inner is not value:
                changed[field] = inner
        elif isinstance(value, FunctionType):
            held = {name: describe(x, name) for name, x in captured(value).items() if is_array(x)}
            if held:
                changed[field] = without_captures(value, held, held.__getitem__)
        elif not isinstance(value, NO_ARRAYS) and is_array(value):
            changed[field] = describe(value, field)
    return with_fields(component, changed)


def with_fields(component: Any, changed: dict[str, Any]) -> Any:
    """The component with other values in some fields, which nothing checks, and without what its cached properties remember:
    itself if there are none."""
    if not changed:
        return component
    out = copy.copy(component)
    for name in remembered(component):
        del vars(out)[name]
    for field, value in changed.items():
        object.__setattr__(out, field, value)
    return out


def at_path(component: Any, path: tuple[str, ...]) -> Any:
    """What lies at a path of fields: ``at_path(x, ("a", "b"))`` is ``x.a.b``."""
    for field in path:
        component = getattr(component, field)
    return component


def with_at_path(component: Any, path: tuple[str, ...], value: Any) -> Any:
    """The component with ``value`` at a path of fields, which nothing checks."""
    if not path:
        return value
    return with_fields(component, {path[0]: with_at_path(getattr(component, path[0]), path[1:], value)})


def remembered(component: Any) -> list[str]:
    """The names of the cached properties that a component has computed."""
    cls: Any = type(component)
    return list(_cached_properties(cls, class_version[0]) & vars(component).keys())


@lru_cache(maxsize=4096)
def _cached_properties(cls: type, _version: int) -> frozenset[str]:
    found = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    fields = getattr(cls, "__dataclass_fields__", ())
    return frozenset(name for name, value in found.items() if isinstance(value, cached_property) and name not in fields)


def anew(component: Any) -> Any:
    """The component without what its cached properties, and those of nested ones, remember: the code may be another now."""
    if not isinstance(component, Component):
        return component
    changed = {name: new for name, value in field_values(component).items()
               if isinstance(value, Component) and (new := anew(value)) is not value}
    kept = remembered(component)
    if not changed and not kept:
        return component
    out = copy.copy(component)
    for name in kept:
        del vars(out)[name]
    for name, value in changed.items():
        object.__setattr__(out, name, value)
    return out


#: Constants that are their text; and, with them, what is quickly seen to be no array.
CONSTANTS: frozenset[type] = frozenset((bool, int, float, complex, str, bytes, type(None)))
NO_ARRAYS: tuple[type, ...] = (*CONSTANTS, np.dtype, Aggregate)


# -- freezing ---------------------------------------------------------------------------------------------------------

def freeze(value: Any, name: str = "value", readonly: bool = False) -> Frozen:
    """A Python object as a kernel argument.

    Components freeze field by field; arrays become views, NumPy scalars and annotated numbers runtime scalars, and all
    else compile-time constants. An array that is ``readonly`` device code may not write. Raises TypeError, naming the
    field, for what device code cannot hold, and ValueError for an array whose address is no multiple of its elements'.
    """
    if isinstance(value, Component):
        return _frozen_part(value, name)
    if isinstance(value, (FunctionType, DeviceFunction)):
        return freeze_function(value, name)
    if is_runtime(value):
        return freeze_runtime(value, name, readonly)
    try:
        make = static_maker(value)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    reading = read_value(value, name)
    text = reading.text
    return Frozen(kind(("static", text), lambda: Kind(text, make)), text, [], [], (reading.guards,))


def _freeze_field(component: Component, field: str, value: Any, path: str) -> Frozen | None:
    """None for a constant."""
    cls: Any = type(component)
    kind, where = annotated(cls).get(field), f"{path}.{field}"
    if kind is Scalar and value is not None and not isinstance(value, Component):
        try:
            return freeze_scalar(value)
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from None
    if kind is Array and value is not None and not is_array(value) and not isinstance(value, ArrayInfo):
        raise TypeError(f"{where}: got {type(value).__name__}; an array (CuPy, PyTorch, NumPy under emulation) is needed")
    if is_runtime(value):
        return freeze_runtime(value, where, field not in getattr(cls, "outputs", ()))
    return freeze(value, where) if isinstance(value, (Component, FunctionType)) else None


def _freeze_component(component: Component, path: str) -> Frozen:
    cls: Any = type(component)
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        if parameters is not None or getattr(cls, "__annotations__", None):
            raise TypeError(f"{cls.__qualname__}: a component is a frozen dataclass; write @dataclass(frozen=True)")
    path = cls.__qualname__ if path == "value" else path
    runtime: dict[str, Any] = {}
    static: dict[str, Any] = {}
    reading, kinds = read_class(cls, Component), annotated(cls)
    texts, made = [reading.text], Frozen(None, "", [], [], (reading.guards,) if reading.guards.facts else ())
    values = field_values(component)
    if not vars(component).keys() <= values.keys():
        values.update(further_state(component))
    for field, value in values.items():
        frozen: Frozen | None = None
        if field not in kinds and type(value) in CONSTANTS:
            text = f"{type(value).__name__}:{value!r}"
        elif field not in kinds and isinstance(value, Aggregate) and hasattr(type(value), "__device_type__"):     # a tile
            text = f"{type(value).__qualname__}:{value!r}"
        else:
            if field not in kinds and isinstance(value, Component):
                frozen = _frozen_part(value, f"{path}.{field}")
            else:
                frozen = _freeze_field(component, field, value, path)
            if frozen is None:
                found = read_value(value, f"{path}.{field}")
                text = found.text
                if found.guards.facts:
                    made.guards += (found.guards,)
            else:
                text = frozen.fingerprint
                made.guards += frozen.guards
                made.captures += frozen.captures
                made.places += frozen.places
                if frozen.leaves or not isinstance(value, (Component, FunctionType)):
                    runtime[field] = frozen.kind
                    made.leaves += frozen.leaves
                    made.arrays += frozen.arrays
                    texts.append(f"{field}:{text}")
                    continue
        static[field] = value
        texts.append(f"{field}={text}")
    made.fingerprint = digest("\n".join(texts))
    made.kind = component_kind(cls, made.fingerprint, made.places, runtime, static, component)
    return made


#: What components are that hold nothing but constants, by their ids: configurations have them in common.
_parts: dict[int, tuple[weakref.ref[Any], Frozen]] = {}
_PARTS = 4096
when_forgetting(_parts.clear)


def _frozen_part(component: Component, path: str) -> Frozen:
    """A component, alone or in a field of another. One without arrays, numbers and code of the user's stays what it is."""
    known = _parts.get(id(component))
    if known is not None and known[0]() is component:
        return known[1]
    found = _freeze_component(component, path)
    if not (found.leaves or found.arrays or found.guards or found.captures or found.places):
        if len(_parts) >= _PARTS:
            _parts.clear()
        _parts[id(component)] = weakref.ref(component, partial(_parts.pop, id(component))), found
    return found


def further_state(component: Any) -> dict[str, Any]:
    """What an object holds beside its fields: attributes that ``__post_init__`` set. They are compile-time constants. An
    array among them raises TypeError: it is to be a field."""
    beside = vars(component).keys() - getattr(component, "__dataclass_fields__", {}).keys()
    found = {name: vars(component)[name] for name in sorted(beside.difference(remembered(component)))}
    for name, value in found.items():
        if is_array(value):
            raise TypeError(f"{type(component).__qualname__}.{name}: an array beside the fields would be a constant, and "
                            f"can change in place; declare it as a field, {name}: gk.Array")
    return found


# -- for Numba -------------------------------------------------------------------------------------------------------

@typeof_impl.register(Component)
def _typeof(value: Component, c: Any) -> types.Type:
    return freeze(value).type
