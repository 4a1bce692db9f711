"""Numba, loaded at the first compilation: until then, what modules do with it is written down.

Importing Numba takes longer than all of gemmkit, and a program that makes configurations, or runs the emulator, never needs
it. While ``import gemmkit`` is under way, `later` gives a stand-in for a module of Numba's or a name in it. What a module
body does with a stand-in (an attribute, a call, a class that inherits from it) makes another, and is done when it is needed:
`load` imports, does in order all that was written down, and puts the real objects where stand-ins were. So modules are
written as if Numba were there. From then on no stand-in is left in gemmkit, and none is in the way.

Any other use of a stand-in loads, too: no function has to ask for it.
"""

from __future__ import annotations

import importlib
import operator
import sys
import threading
from collections.abc import Callable
from types import ModuleType, prepare_class
from typing import Any, ClassVar

from gemmkit.lang.garbage import without_collections
from gemmkit.lang.installed import require, toolkit

__all__ = ["Later", "at_load", "imported", "later", "load", "made_later"]

_MISSING = object()
_PACKAGE = __name__.partition(".")[0]


class _State:
    importing = True                                          # the package itself: module bodies run, and nothing else
    busy = False                                              # loading, in the thread that has the lock
    loaded = False
    lock = threading.RLock()
    names: ClassVar[set[tuple[int, str]]] = set()             # where stand-ins were: modules' namespaces, and names in them
    steps: ClassVar[list[Callable[[], Any]]] = []             # what was written down, in order


class Later:
    """A stand-in for an object that is made when Numba is loaded."""

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], Any]):
        self._make: Any = make
        self._value: Any = _MISSING
        _State.steps.append(self._real)

    def _real(self) -> Any:
        """The object that it stands for."""
        if self._value is _MISSING:
            load()
        if self._value is _MISSING:                           # it is just being loaded, and somebody asks out of order
            self._value, self._make = self._make(), None      # (it keeps no other stand-in)
        return self._value

    def _is_recorded(self) -> bool:
        """Whether what is done with it is written down, not done."""
        return _State.importing and not _State.busy and self._value is _MISSING

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and self._value is _MISSING:
            raise AttributeError(name)                        # Python's own questions: whether it is abstract, or wrapped
        if self._is_recorded():
            return Later(lambda: getattr(self._real(), name))
        return getattr(self._real(), name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._is_recorded():
            return Later(lambda: self._real()(*_real(args), **_real(keywords)))
        return self._real()(*args, **keywords)

    def __setitem__(self, key: Any, value: Any) -> None:
        at_load(operator.setitem, self, key, value)

    def __mro_entries__(self, bases: tuple) -> tuple:
        if not self._is_recorded():
            return (self._real(),)
        return (_Class,) if next(base for base in bases if isinstance(base, Later)) is self else ()

    def __instancecheck__(self, value: Any) -> bool:
        return self._value is not _MISSING and isinstance(value, self._value)         # of a class that is not there: none

    def __repr__(self) -> str:
        return "<loaded later>" if self._value is _MISSING else repr(self._value)


class _ClassOfLater(type):
    """A class statement with a stand-in among its bases makes another stand-in."""

    def __new__(mcs, name: str, bases: tuple, namespace: dict[str, Any], **keywords: Any) -> Any:
        declared = namespace.pop("__orig_bases__", None)
        if declared is None:
            return super().__new__(mcs, name, bases, namespace, **keywords)

        def make() -> Any:
            real = _real(declared)
            kind, _, kept = prepare_class(name, real, keywords)
            return kind(name, real, _real(namespace), **kept)

        return Later(make)

    def __init__(cls, name: str, bases: tuple, namespace: dict[str, Any], **keywords: Any):
        super().__init__(name, bases, namespace)


class _Class(metaclass=_ClassOfLater):
    """The base that stands for a stand-in."""


def later(module: str, name: str | None = None) -> Any:
    """``module``, or a name in it; a stand-in before Numba is loaded."""
    def make() -> Any:
        found = importlib.import_module(module)
        return found if name is None else getattr(found, name)

    return make() if _State.loaded else Later(make)


def at_load(function: Callable[..., Any], *args: Any) -> None:
    """Call a function as soon as Numba is loaded, with the real objects for stand-ins; now if it is."""
    with _State.lock:
        if not _State.loaded:
            _State.steps.append(lambda: function(*_real(args)))
            return
    function(*args)


def imported() -> None:
    """The package is imported: from now on a use of Numba loads it."""
    _State.importing = False


def load() -> None:
    """Load Numba, and do all that was written down for it. What raises (Numba may not be importable) is tried again by the
    next call. NotInstalledError where it is not installed."""
    with _State.lock:
        if _State.loaded or _State.busy:
            return
        require()
        _State.busy = True
        try:
            with without_collections(), toolkit():      # (numba-cuda loads a library of it while it is imported)
                _make_all()
            _State.loaded = True
        finally:
            _State.busy = False


def _make_all() -> None:
    """Do what was written down, and put the real objects where stand-ins were."""
    places = _places()
    while _State.steps:
        made = _State.steps[0]()
        for scope, name in places.pop(_State.steps.pop(0), ()):
            _put(scope, name, made)
    for scope, name, container in _containers():
        _put(scope, name, _real(container))


def made_later(scope: dict[str, Any], name: str) -> bool:
    """Whether a name of a module stands for what is made when Numba is loaded, or stood for it."""
    return (id(scope), name) in _State.names or (not _State.loaded and _has_later(scope.get(name)))


def _put(scope: dict[str, Any], name: str, made: Any) -> None:
    if _is_ours(scope.get("__name__", "")):
        _State.names.add((id(scope), name))                   # before the name has another value: `made_later` has no lock
    scope[name] = made


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == _PACKAGE


def _places() -> dict[Any, list[tuple[dict[str, Any], str]]]:
    """Where stand-ins are, by the step that makes the object: names in any module (5 ms), which may have it from here."""
    found: dict[Any, list[tuple[dict[str, Any], str]]] = {}
    for scope in [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        for name, value in list(scope.items()):
            if type(value) is Later:
                found.setdefault(value._real, []).append((scope, name))
    return found


def _containers() -> list[tuple[dict[str, Any], str, Any]]:
    """The package's tuples, lists and dicts that have stand-ins in them."""
    scopes = [vars(module) for name, module in list(sys.modules.items()) if _is_ours(name)]
    return [(scope, name, value) for scope in scopes for name, value in list(scope.items())
            if type(value) in (tuple, list, dict) and name != "__builtins__" and _has_later(value)]


def _has_later(value: Any) -> bool:
    if type(value) is dict:
        return any(map(_has_later, value)) or any(map(_has_later, value.values()))
    return type(value) is Later or (type(value) in (tuple, list) and any(map(_has_later, value)))


def _real(value: Any) -> Any:
    """A value with the real objects in place of stand-ins."""
    if type(value) is Later:
        return value._real()
    if type(value) in (tuple, list):
        return type(value)(map(_real, value))
    return {_real(k): _real(v) for k, v in value.items()} if type(value) is dict else value
