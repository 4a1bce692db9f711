"""What a function's code stands on outside itself: globals, captured variables, attributes of modules.

Device code takes these values when it is compiled. A user may bind a name anew afterwards (another cell of a notebook);
then the function is compiled again, as its fingerprint is another.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

_FIXED = {*sys.stdlib_module_names, "cuda", "gemmkit", "llvmlite", "ml_dtypes", "numba", "numba_cuda", "numpy"}
_MISSING = object()


def names_of(code: CodeType) -> Iterator[str]:
    """The names that a code object, or one nested in it, looks up (attributes too)."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from names_of(const)


def may_change(module: str | None) -> bool:
    """Whether a module is a user's, whose names may be bound anew."""
    return (module or "").partition(".")[0] not in _FIXED


def attributes(module: ModuleType, names: Collection[str]) -> dict[str, Any]:
    """Of ``names``, those that a user's module has, with their values."""
    return {name: vars(module)[name] for name in sorted(names) if name in vars(module)} \
        if may_change(module.__name__) else {}


class References:
    """The names that a function refers to, directly or through its helpers, and their values when it was looked at.

    Those in ``runtime`` do not matter: they are arguments.
    """

    def __init__(self, function: FunctionType, runtime: Collection[str] = ()):
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._seen: set[Any] = set()
        self._walk(function, runtime)

    def _walk(self, function: FunctionType, runtime: Collection[str] = ()) -> None:
        if function in self._seen or not may_change(function.__module__):
            return
        self._seen.add(function)
        names = set(names_of(function.__code__))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            value = _contents(cell)
            if name not in runtime and value is not _MISSING:
                self._cells.append((cell, value))
                self._follow(value, names)
        self._look_at(function.__globals__, names - set(runtime), names)

    def _look_at(self, scope: dict[str, Any], wanted: Collection[str], names: Collection[str]) -> None:
        for name in wanted:
            value = scope.get(name, _MISSING)
            if value is not _MISSING:
                self._names.append((scope, name, value))
                self._follow(value, names)

    def _follow(self, value: Any, names: Collection[str]) -> None:
        value = getattr(value, "__wrapped__", value)           # a DeviceFunction's function
        if isinstance(value, FunctionType):
            self._walk(value)
        elif isinstance(value, ModuleType) and value not in self._seen:
            self._seen.add(value)
            self._look_at(vars(value), attributes(value, names), names)

    def stand(self) -> bool:
        """Whether all names still have these values."""
        return (all(scope.get(name, _MISSING) is value for scope, name, value in self._names)
                and all(_contents(cell) is value for cell, value in self._cells))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:                                         # not bound yet
        return _MISSING


__all__ = ["References", "attributes", "may_change", "names_of"]
