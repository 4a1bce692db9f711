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
import math
import typing
import weakref
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cached_property, lru_cache, partial
from itertools import repeat
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from gemmkit.lang.aggregates import Aggregate, static_maker
from gemmkit.lang.checks import check_fields
from gemmkit.lang.components import ComponentClass, component_kind
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.fingerprint import Array, Reading, Scalar, annotated, digest, read_class, read_value, when_forgetting
from gemmkit.lang.functions import (
    DeviceFunction,
    Frozen,
    Kind,
    captured,
    freeze_function,
    freeze_runtime,
    freeze_scalar,
    is_runtime,
    kind,
    without_captures,
)
from gemmkit.lang.numba_hooks import typeof_impl, types
from gemmkit.lang.references import Guards, class_version, is_gemmkit
from gemmkit.runtime.array_info import are_the_same
from gemmkit.runtime.arrays import KEYS, ArrayInfo, describe, is_array, key_of, overlaps, overlaps_itself, shares_memory

__all__ = [
    "Array", "Component", "ComponentError", "Frozen", "Scalar", "freeze",
]

C = TypeVar("C")


class Component(metaclass=ComponentClass):
    """Base class of every pluggable part; subclasses are frozen dataclasses.

    ``device_methods`` names the methods that are device code by contract. Those that are also in ``without_value`` store
    something and return nothing. (In a component of gemmkit's own, ``device_methods`` may name a field that holds a user's
    function.) ``known_by`` are numbers that decide how it is computed with though its kernel takes them as arguments.
    """

    device_methods: typing.ClassVar[tuple[str, ...]] = ("__call__",)
    without_value: typing.ClassVar[tuple[str, ...]] = ()
    known_by: typing.ClassVar[tuple[Any, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):
            cls.__repr__ = _paste_able                                    # type: ignore[method-assign]

    __post_init__ = check_fields

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
        if holds_array and not isinstance(value, (np.ndarray, ArrayInfo)):          # its elements may lie on a device
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
            held = {name: describe(x, name) for name, x in captured(value).items() if _has_elements(x)}
            if held:
                changed[field] = without_captures(value, held, held.__getitem__)
        elif not isinstance(value, NO_ARRAYS) and _has_elements(value):
            changed[field] = describe(value, field)
    return with_fields(component, changed)


def _has_elements(x: object) -> bool:
    return is_array(x) and not isinstance(x, ArrayInfo)


def with_fields(component: C, changed: dict[str, Any]) -> C:
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


def uncached(component: Any) -> Any:
    """The component without what its cached properties, and those of nested ones, remember: the code may be another now."""
    if not isinstance(component, Component):
        return component
    changed = {name: new for name, value in field_values(component).items()
               if isinstance(value, Component) and (new := uncached(value)) is not value}
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
    if kind is Array and value is not None and not is_array(value):
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
            raise TypeError(f"{type(component).__qualname__}.{name}: an array outside of the fields would be a constant, "
                            f"but it can change in place; declare it as a field: {name}: gk.Array")
    return found


# -- for Numba -------------------------------------------------------------------------------------------------------

@typeof_impl.register(Component)                          # type: ignore[untyped-decorator]
def _typeof(value: Component, c: Any) -> types.Type:
    return freeze(value).type


# --------------------------------------------------------------------------------------------------
# The arrays that components hold, in fields and in the functions among them, and what may share their memory.
#
# Operands are checked by name where they come in (`gemmkit.plans.problem`). A component's arrays are read, or written,
# by any block at any time, so that those which the product writes must be memory of their own.

#: The components that are asked for an element of C or D where that element is read or written, by the same block: an array
#: of theirs may be out itself, as c may.
ALONGSIDE = frozenset({"epilogue", "transform_global_to_shared_c", "transform_shared_to_regs_c",
                       "transform_regs_to_shared_d", "transform_shared_to_global_d"})


class CapturedArray(NamedTuple):
    """An array of a component: what messages call it, the array, and whether the kernel writes it."""

    name: str
    info: ArrayInfo
    is_output: bool


def arrays_of(component: Any) -> list[CapturedArray]:
    """The arrays of a component, of those nested in it and of the functions among its fields, in the order of its leaves."""
    found = held_values(component)
    return [CapturedArray(name, describe(x, name), is_output) for name, x, is_output in found] if found else []


def held_values(component: Any) -> list[tuple[str, Any, bool]]:
    """The arrays themselves, or what describes them, with their names and whether the kernel writes them."""
    kind, found = type(component), list[tuple[str, Any, bool]]()
    for field, value in field_values(component).items():
        if isinstance(value, Component):
            found += held_values(value)
        elif isinstance(value, (FunctionType, DeviceFunction)):
            found += [(f"{name}, captured by {value.__name__} of {kind.__qualname__},", x, False)
                      for name, x in captured(value).items() if is_array(x)]
        elif not isinstance(value, NO_ARRAYS) and is_array(value):
            name = getattr(kind, "array_names", {}).get(field, f"{field} of {kind.__qualname__}")
            found.append((name, value, field in getattr(kind, "outputs", ())))
    return found


#: Why a symmetric D of both halves is not computed in place.
MIRRORED = "a SymmetricMatrix of both halves is written at (j, i) while other blocks read it there"


def check_held(held: Iterable[tuple[str, CapturedArray]], infos: dict[str, ArrayInfo | None],
               same: tuple[ArrayInfo, ...] = (), in_place: bool = True) -> None:
    """Raise ValueError where arrays of components share memory with what is written.

    Args:
        held: the arrays, each with the name of its component's place in a configuration.
        infos: a, b, c and out.
        same: out as it may be described otherwise: an array that equals one of these is out itself. How the dimensions of
            a stack are counted does not matter.
        in_place: whether what is read beside D may be out itself.
    """
    arrays, out = list(held), infos.get("out")
    written = [(part, x) for part, x in arrays if x.is_output]
    for _, x in written:
        if x.info.readonly:
            raise ValueError(f"{x.name} is read-only, and values are stored into it")
        if overlaps_itself(x.info):
            raise ValueError(f"{x.name} has strides {x.info.strides}: several of its elements share memory")
        for other, operand in infos.items():
            if operand is not None and overlaps(x.info, operand):
                raise ValueError(f"{x.name} overlaps {other} in memory; give it memory of its own")
    for part, x in arrays:
        if out is not None and not x.is_output:
            is_out = any(are_the_same(x.info, one) for one in (out, *same))
            if not (is_out and in_place and part in ALONGSIDE) and shares_memory(x.info, out):
                why = (MIRRORED if is_out and not in_place else
                       "it is read at other elements than those that a block writes" if is_out or part not in ALONGSIDE else
                       "it may be out itself (the same address, shape, strides and dtype), but no other part of it")
                raise ValueError(f"{x.name} overlaps out in memory, and {why}; give it memory of its own")
        for _, output in written:
            if x is not output and shares_memory(x.info, output.info):
                raise ValueError(f"{output.name} overlaps {x.name} in memory; give it memory of its own")


# --------------------------------------------------------------------------------------------------
# Components that come with call after call: what a call is known by, and what it brings (`seen`).
#
# Of gemmkit's own components, whose code nobody changes, the fields are read. Components with code of the user's are
# `frozen` once, and looked at in each call.
#
# Freezing reads all of a component's code and constants: 10 to 20 us for each one nested in it. What that rests on takes
# a look: code and constants at their guards (`gemmkit.lang.references`), arrays at what identifies them
# (`gemmkit.runtime.arrays`), since an array's memory may be another in the next call. Fields are those of a frozen
# dataclass, and do not change. Of gemmkit's own part of a call that leaves 15 us in place of 190 (a plan with a Fold),
# 14 of 49 (`matmul` with a residual).

_LIMIT = 1024                          # components that are remembered


class _Kept:
    """What is known of a component. Its guards are made when it comes a second time: most that come once are made anew in
    every call."""

    __slots__ = ("_guards", "arrays", "frozen", "of")

    def __init__(self, of: weakref.ref[Any], found: Frozen, arrays: list[tuple[Any, Any]]):
        self.of, self.frozen, self.arrays = of, found, arrays
        self._guards: Guards | None = None

    def stands(self) -> bool:
        if self._guards is None:
            self._guards = Guards(self.frozen.facts)
        return self._guards.stand() and all(KEYS.get(type(x), key_of)(x, "") == seen for x, seen in self.arrays)


_kept: dict[int, _Kept] = {}
when_forgetting(_kept.clear)


def frozen(component: Component, name: str = "value") -> Frozen:
    """`gemmkit.components.freeze` of a component, by what is known of this very one where that still holds.

    >>> from gemmkit.epilogues import Scale
    >>> twice = Scale(2.0)
    >>> frozen(twice) is frozen(twice), frozen(twice) is frozen(Scale(2.0))
    (True, False)
    """
    known = _kept.get(id(component))
    if known is not None and known.of() is component and known.stands():
        return known.frozen
    found = freeze(component, name)
    if len(_kept) >= _LIMIT:
        _kept.clear()
    arrays = [(x, KEYS.get(type(x), key_of)(x, "")) for _, x, _ in held_values(component)
              if is_array(x)] if found.arrays else []
    _kept[id(component)] = _Kept(weakref.ref(component, partial(_forget, _kept, id(component))), found, arrays)
    return found


# -- what a call is known by, and what it brings ------------------------------------------------------------------------

def seen(component: Component, key: list[Any], brought: list[Any], arrays: list[Any] | None = None) -> None:
    """Add to ``key`` what decides how a component is computed with, and to ``brought`` its run-time values that calls with
    that key differ in: addresses of arrays and numbers, as `exact` says (`slots_of` tells where they stand). Arrays that are
    added to ``arrays`` the caller recognises, and puts their addresses where `ADDRESS` stands.

    >>> from gemmkit.epilogues import ReLU, Scale
    >>> key, brought = [], []
    >>> seen(Scale(2.0) | ReLU(), key, brought)
    >>> brought, slots_of(Scale(2.0) | ReLU())
    ([2.0], [0])
    """
    known, count, given = len(key), len(brought), 0 if arrays is None else len(arrays)
    read = READERS.get(type(component)) or _reader_of(type(component))
    if read is None or not read(component, key, brought, arrays):
        del key[known:], brought[count:]
        if arrays is not None:
            del arrays[given:]
        found = frozen(component)
        key += found.kind, found.fingerprint, component.known_by
        key.append(tuple((info.shape, info.strides, info.device) for info in found.arrays))
        brought += [exact(value) for _, value in found.leaves]


def slots_of(component: Component) -> list[int]:
    """Where among its leaves each of what `seen` says that it brings stands."""
    return _read_slots(component) if _read(component, False, [], []) else list(range(len(frozen(component).leaves)))


class FrozenComponents(NamedTuple):
    """Components as they are frozen, where among the leaves of all of them a launch puts what they bring, what that is
    (`seen`), and the leaves that stay, such as an array's strides."""

    frozen: list[Frozen]
    slots: list[int]
    brought: list[Any]
    fixed: list[Any]

    @property
    def key(self) -> Any:
        """What decides, of them, which launch a call has."""
        return (tuple((one.kind, one.fingerprint, tuple(info.device for info in one.arrays)) for one in self.frozen),
                tuple(self.slots), tuple(self.fixed))


def given_by(*components: Component) -> FrozenComponents:
    found, before = FrozenComponents([], [], [], []), 0
    for component in components:
        one, own = frozen(component), slots_of(component)
        found.frozen.append(one)
        found.slots.extend(before + slot for slot in own)
        found.brought.extend(exact(one.leaves[slot][1]) for slot in own)
        found.fixed.extend(value for slot, (_, value) in enumerate(one.leaves) if slot not in own)
        before += len(one.leaves)
    return found


#: What stands for -0.0 among what a call brings: that is compared, and zeros compare equal and differ.
NEGATIVE_ZERO = "-0.0"


def exact(value: Any) -> Any:
    """A number as a call brings it."""
    return NEGATIVE_ZERO if type(value) is float and not value and math.copysign(1.0, value) < 0 else value


def number(value: Any) -> Any:
    """The number that was brought as `exact` says."""
    return -0.0 if value is NEGATIVE_ZERO else value


#: What stands for an address that is not looked up yet.
ADDRESS = "address"


def _read(value: Any, is_scalar: bool, key: list[Any], brought: list[Any], arrays: list[Any] | None = None) -> bool:
    """`seen` of a field's value, or of a component of gemmkit's own, whose code nobody changes. False, with both half done,
    for one with code of the user's, or with values that cannot be told from others so quickly."""
    kind = type(value)
    read = READERS.get(kind) or (_reader_of(kind) if isinstance(value, Component) else None)
    if read is not None:
        return read(value, key, brought, arrays)
    if arrays is not None and kind in KEYS:
        arrays.append(value)
        key.append(ADDRESS)
        brought.append(ADDRESS)
    elif kind is float and is_scalar:
        key.append(kind)
        brought.append(value if value else exact(value))
    elif kind is int and is_scalar and -2**31 <= value < 2**31:         # others are of another type in a kernel
        key.append(kind)
        brought.append(value)
    elif kind in _CONSTANTS and not is_scalar:
        key += kind, value
    elif value is None or isinstance(value, (np.dtype, type)) or (kind is FunctionType and _is_constant(value)):
        key.append(value)
    elif kind in KEYS or is_array(value):
        try:
            at, of_array = KEYS.get(kind, key_of)(value, "")
        except (TypeError, ValueError):
            return False                                                # `frozen` raises it, naming the field
        key += of_array, at & 15
        brought.append(at)
    else:
        return False
    return True


_CONSTANTS = frozenset((bool, int, str))
#: Of classes whose components have come before what reads one: `seen` where it answers True, else both are half done.
READERS: dict[type, Callable[..., bool]] = {}
#: What a field's reader tries first, by the field's annotation: a condition, and what it does then.
_QUICK = {
    "Array": ("arrays is not None and type(x) in KEYS", "arrays.append(x); key.append(ADDRESS); brought.append(ADDRESS)"),
    "Scalar": ("type(x) is float and x", "key.append(float); brought.append(x)"),
    "str": ("type(x) is str", "key += str, x"),
}
_OF_COMPONENT = "(read := readers.get(type(x))) is not None", "if not read(x, key, brought, arrays): return False"


def _reader_of(cls: type) -> Callable[..., bool] | None:
    """What reads one of gemmkit's own components: a function that is made for its fields, because a loop takes three times
    as long. None for another class. (A user's class, and a function with what it captured, are not kept alive here.)"""
    if not (is_gemmkit(cls) and is_dataclass(cls)):
        return None
    lines = ["def read_all(component, key, brought, arrays):", "key.append(cls)"]
    if getattr(cls, "known_by", ()) != ():         # (a property, of a class that says it)
        lines.append("key.append(component.known_by)")
    for name, is_scalar in _fields_of(cls):
        text = str(cls.__dataclass_fields__[name].type)
        quick, then = _QUICK.get("str" if text.startswith("Literal[") else text, _OF_COMPONENT)
        lines += [f"x = component.{name}", f"if {quick}:", f"    {then}",
                  f"elif not read_value(x, {is_scalar}, key, brought, arrays):", "    return False"]
    space = {"cls": cls, "KEYS": KEYS, "ADDRESS": ADDRESS, "readers": READERS, "read_value": _read}
    exec("\n    ".join((*lines, "return True")), space)
    found = READERS[cls] = cast("Callable[..., bool]", space["read_all"])
    return found


@lru_cache(maxsize=4096)
def _fields_of(cls: Any) -> list[tuple[str, bool]]:
    """The names of the fields of one of gemmkit's own components, and which have a run-time number."""
    runtime = annotated(cls)
    return [(field.name, runtime.get(field.name) is Scalar) for field in fields(cls)]


def _is_constant(function: FunctionType) -> bool:
    return function.__closure__ is None and not function.__defaults__ and is_gemmkit(function)


def _read_slots(component: Component) -> list[int]:
    slots: list[int] = []
    at = 0
    for name, is_scalar in _fields_of(type(component)):
        value = getattr(component, name)
        if isinstance(value, Component):
            slots += [at + slot for slot in _read_slots(value)]
            at += len(freeze(value).leaves)
        elif is_scalar and type(value) in (float, int):
            slots.append(at)
            at += 1
        elif is_array(value):
            slots.append(at)
            at += len(freeze_runtime(value, name).leaves)
    return slots


def _forget(known: dict[int, _Kept], at: int, of: weakref.ref[Any]) -> None:
    """(At the end of the process this module's names are gone before the last components are.)"""
    found = known.get(at)
    if found is not None and found.of is of:
        del known[at]
