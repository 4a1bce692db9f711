"""What a function's code stands on outside itself: globals, captured variables, attributes of modules.

Device code takes these values when it is compiled. A user may bind a name anew afterwards (another cell of a notebook);
then the function is compiled again, as its fingerprint is another.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

_FIXED = {*sys.stdlib_module_names, "cuda", "gemmkit", "llvmlite", "ml_dtypes", "numba", "numba_cuda", "numpy"}
_MISSING = object()


@lru_cache(maxsize=4096)
def globals_of(code: CodeType) -> frozenset[str]:
    """The global names that a code object, or one nested in it, looks up."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(names.union(*(globals_of(c) for c in code.co_consts if isinstance(c, CodeType))))


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> frozenset[str]:
    """The names that a code object, or one nested in it, looks up: globals and attributes."""
    return frozenset(code.co_names).union(*(names_of(c) for c in code.co_consts if isinstance(c, CodeType)))


def may_change(module: str | None) -> bool:
    """Whether a module is a user's, whose names may be bound anew."""
    return (module or "").partition(".")[0] not in _FIXED


def attributes(holder: ModuleType | type, names: Collection[str]) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """(namespace, name, value) of those of ``names`` that a user's module or class has."""
    module = isinstance(holder, ModuleType)
    if may_change(holder.__name__ if isinstance(holder, ModuleType) else holder.__module__):
        for scope in [vars(holder)] if module else [vars(base) for base in holder.__mro__[:-1]]:
            for name in sorted(names):
                if name in scope and not name.startswith("__"):
                    yield scope, name, scope[name]


class References:
    """The names that a function refers to, directly or through its helpers, and their values when it was looked at.

    Those in ``runtime`` do not matter: they are arguments.
    """

    def __init__(self, function: FunctionType, runtime: Collection[str] = ()):
        self._names: list[tuple[Mapping[str, Any], str, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._seen: set[Any] = set()
        self._walk(function, runtime)

    def _walk(self, function: FunctionType, runtime: Collection[str] = ()) -> None:
        if function in self._seen or not may_change(function.__module__):
            return
        self._seen.add(function)
        names = names_of(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            value = _contents(cell)
            if name not in runtime and value is not _MISSING:
                self._cells.append((cell, value))
                self._follow(value, names)
        scope = function.__globals__
        for name in globals_of(function.__code__) - set(runtime):
            if name in scope:
                self._note(scope, name, scope[name], names)

    def _note(self, scope: Mapping[str, Any], name: str, value: Any, names: Collection[str]) -> None:
        self._names.append((scope, name, value))
        self._follow(value, names)

    def _follow(self, value: Any, names: Collection[str]) -> None:
        value = getattr(value, "__wrapped__", value)           # a DeviceFunction's function
        if isinstance(value, FunctionType):
            self._walk(value)
        elif isinstance(value, (ModuleType, type)) and value not in self._seen:
            self._seen.add(value)
            for scope, name, found in attributes(value, names):
                self._note(scope, name, found, names)

    def stand(self) -> bool:
        """Whether all names still have these values."""
        return (all(scope.get(name, _MISSING) is value for scope, name, value in self._names)
                and all(_contents(cell) is value for cell, value in self._cells))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:                                         # not bound yet
        return _MISSING


__all__ = ["References", "attributes", "globals_of", "may_change", "names_of"]
