"""Components that come with call after call: frozen once, and looked at in each call.

Freezing reads all of a component's code and constants: 10 to 20 us for each one nested in it. What that rests on takes a
look: code and constants at their guards (`gemmkit.lang.guards`), arrays at what identifies them
(`gemmkit.runtime.recognition`), since an array's memory may be another in the next call. Fields are those of a frozen
dataclass, and do not change. Of gemmkit's own part of a call that leaves 15 us in place of 190 (a plan with a braid), 14 of
49 (`matmul` with a residual).
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from gemmkit.component_arrays import held_values
from gemmkit.components import Component, freeze
from gemmkit.lang.fingerprint import when_forgetting
from gemmkit.lang.freezing import Frozen
from gemmkit.lang.guards import Guards
from gemmkit.runtime.arrays import is_array
from gemmkit.runtime.recognition import KEYS, key_of

__all__ = ["frozen"]

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


def _reference(component: Component) -> weakref.ref[Any]:
    """Of a component that, when it dies, is forgotten with its arrays."""
    return weakref.ref(component, partial(_forget, _kept, id(component)))


def _forget(known: dict[int, _Kept], at: int, of: weakref.ref[Any]) -> None:
    """(At the end of the process this module's names are gone before the last components are.)"""
    found = known.get(at)
    if found is not None and found.of is of:
        del known[at]
