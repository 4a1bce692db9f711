"""Components that come with call after call: what a call is known by, and what it brings (`seen`).

Of gemmkit's own components, whose code nobody changes, the fields are read. Components with code of the user's are `frozen`
once, and looked at in each call.

Freezing reads all of a component's code and constants: 10 to 20 us for each one nested in it. What that rests on takes a
look: code and constants at their guards (`gemmkit.lang.guards`), arrays at what identifies them
(`gemmkit.runtime.recognition`), since an array's memory may be another in the next call. Fields are those of a frozen
dataclass, and do not change. Of gemmkit's own part of a call that leaves 15 us in place of 190 (a plan with a braid), 14 of
49 (`matmul` with a residual).
"""

from __future__ import annotations

import math
import weakref
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from gemmkit.component_arrays import held_values
from gemmkit.components import Component, freeze
from gemmkit.lang.fingerprint import when_forgetting
from gemmkit.lang.freezing import Frozen, freeze_runtime
from gemmkit.lang.guards import Guards
from gemmkit.lang.references import is_gemmkit
from gemmkit.lang.runtime_fields import Scalar, annotated
from gemmkit.runtime.arrays import is_array
from gemmkit.runtime.recognition import KEYS, key_of

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
        return self._guards.stand() and all(KEYS.get(type(x), key_of)(x) == seen for x, seen in self.arrays)


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
    arrays = [(x, KEYS.get(type(x), key_of)(x)) for _, x, _ in held_values(component) if is_array(x)] if found.arrays else []
    _kept[id(component)] = _Kept(_reference(component), found, arrays)
    return found


# -- what a call is known by, and what it brings ------------------------------------------------------------------------

def seen(component: Component, key: list[Any], brought: list[Any]) -> None:
    """Add to ``key`` what decides how a component is computed with, and to ``brought`` its run-time values that calls with
    that key differ in: addresses of arrays and numbers, as `exact` says (`slots_of` tells where they stand).

    >>> from gemmkit.epilogues import ReLU, Scale
    >>> key, brought = [], []
    >>> seen(Scale(2.0) | ReLU(), key, brought)
    >>> brought, slots_of(Scale(2.0) | ReLU())
    ([2.0], [0])
    """
    known, count = len(key), len(brought)
    if not _read(component, key, brought):
        del key[known:], brought[count:]
        found = frozen(component)
        key += found.kind, found.fingerprint, tuple((info.shape, info.strides, info.device) for info in found.arrays)
        brought += [exact(value) for _, value in found.leaves]


def slots_of(component: Component) -> list[int]:
    """Where among its leaves each of what `seen` says that it brings stands."""
    return _read_slots(component) if _read(component, [], []) else list(range(len(frozen(component).leaves)))


class Given(NamedTuple):
    """Components as they are frozen, where among the leaves of all of them a launch puts what they bring, and what that is
    (`seen`)."""

    frozen: list[Frozen]
    slots: list[int]
    brought: list[Any]

    @property
    def key(self) -> Any:
        """What decides, of them, which launch a call has."""
        return (tuple((one.kind, one.fingerprint, tuple((info.shape, info.device) for info in one.arrays))
                      for one in self.frozen), tuple(self.slots))


def given_by(*components: Component) -> Given:
    found, before = Given([], [], []), 0
    for component in components:
        one, own = frozen(component), slots_of(component)
        found.frozen.append(one)
        found.slots.extend(before + slot for slot in own)
        found.brought.extend(exact(one.leaves[slot][1]) for slot in own)
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


def _read(component: Component, key: list[Any], brought: list[Any]) -> bool:
    """`seen` of a component of gemmkit's own, whose code nobody changes. False, with both half done, for one with code of
    the user's, or with values that cannot be told from others so quickly."""
    read = _fields_of(type(component))
    if read is None:
        return False
    key.append(type(component))
    for name, is_scalar in read:
        value = getattr(component, name)
        kind = type(value)
        if kind is float and is_scalar:
            key.append(kind)
            brought.append(value if value else exact(value))
        elif kind is int and is_scalar and -2**31 <= value < 2**31:         # others are of another type in a kernel
            key.append(kind)
            brought.append(value)
        elif kind in _CONSTANTS and not is_scalar:
            key += kind, value
        elif isinstance(value, Component):
            if not _read(value, key, brought):
                return False
        elif kind in KEYS or is_array(value):
            at, of_array = KEYS.get(kind, key_of)(value, name)
            key += of_array, at & 15
            brought.append(at)
        elif value is None or isinstance(value, (np.dtype, type)):
            key.append(value)
        elif kind is FunctionType and _is_constant(value):
            key.append(value)
        else:
            return False
    return True


_CONSTANTS = frozenset((bool, int, str))
_fields: dict[type, list[tuple[str, bool]]] = {}


def _fields_of(cls: type) -> list[tuple[str, bool]] | None:
    """The names of the fields of one of gemmkit's own components, and which have a run-time number. (A user's class, and a
    function with what it captured, are not kept alive here.)"""
    found = _fields.get(cls)
    if found is None and is_gemmkit(cls) and is_dataclass(cls):
        runtime = annotated(cls)
        found = _fields[cls] = [(field.name, runtime.get(field.name) is Scalar) for field in fields(cls)]
    return found


def _is_constant(function: FunctionType) -> bool:
    return function.__closure__ is None and not function.__defaults__ and is_gemmkit(function)


def _read_slots(component: Component) -> list[int]:
    slots: list[int] = []
    at = 0
    for name, is_scalar in _fields_of(type(component)) or ():
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


def _reference(component: Component) -> weakref.ref[Any]:
    """Of a component that, when it dies, is forgotten with its arrays."""
    return weakref.ref(component, partial(_forget, _kept, id(component)))


def _forget(known: dict[int, _Kept], at: int, of: weakref.ref[Any]) -> None:
    """(At the end of the process this module's names are gone before the last components are.)"""
    found = known.get(at)
    if found is not None and found.of is of:
        del known[at]
