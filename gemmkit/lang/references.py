"""What a function's code names outside itself, and whose code can change while the process runs.

Device code takes the values of these names when it is compiled. A user may bind a name anew afterwards, or replace the
code of a function (another cell of a notebook, ``%autoreload 2``): :mod:`gemmkit.lang.fingerprint` reads them, and
:mod:`gemmkit.lang.guards` tells whether what it read still holds.
"""

from __future__ import annotations

import dis
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

#: Packages that device code may call into, and that nobody edits beside a running program.
_PACKAGES = ("gemmkit", "numba", "numba_cuda", "llvmlite", "ml_dtypes", "numpy", "cuda", "greenlet")


@lru_cache(maxsize=4096)
def globals_of(code: CodeType) -> frozenset[str]:
    """The global names that a code object, or one nested in it, looks up."""
    return frozenset(_looked_up(code).union(*(globals_of(c) for c in code.co_consts if isinstance(c, CodeType))))


_LOAD_GLOBAL, _LOAD_NAME = dis.opmap["LOAD_GLOBAL"], dis.opmap["LOAD_NAME"]
_NAME_SHIFT = 1 if sys.version_info >= (3, 11) else 0     # from 3.11 on LOAD_GLOBAL's lowest bit says something else


def _looked_up(code: CodeType) -> set[str]:
    """Straight from the bytes: `dis.get_instructions` took half of a first call whose kernel lies on disk (0.1 s)."""
    names, extended, raw = set(), 0, code.co_code
    for opcode, low in zip(raw[::2], raw[1::2]):
        argument = extended | low
        if opcode == _LOAD_GLOBAL:
            names.add(code.co_names[argument >> _NAME_SHIFT])
        elif opcode == _LOAD_NAME:
            names.add(code.co_names[argument])
        extended = argument << 8 if opcode == dis.EXTENDED_ARG else 0
    return names


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> frozenset[str]:
    """The names that a code object, or one nested in it, looks up: globals and attributes."""
    return frozenset(code.co_names).union(*(names_of(c) for c in code.co_consts if isinstance(c, CodeType)))


# -- whose code it is -------------------------------------------------------------------------------------------------

@lru_cache(maxsize=1)
def _roots() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The folders of the standard library, and those of the packages that count as fixed."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    packages: set[str] = set()
    for name in _PACKAGES:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is not None:
            packages.update(spec.submodule_search_locations or ())
    return tuple(_folder(path) for path in standard), tuple(_folder(path) for path in packages)


def _folder(path: str) -> str:
    return os.path.join(os.path.abspath(path), "")


@lru_cache(maxsize=4096)
def _is_fixed_file(file: str) -> bool:
    """Whether a file belongs to the standard library or to one of the fixed packages. The name of a module says nothing: a
    user's own may be called ``token`` or ``profile``."""
    if file.startswith("<frozen ") or file in ("built-in", "frozen"):
        return True
    standard, packages = _roots()
    if file.startswith(packages):
        return True
    return file.startswith(standard) and "site-packages" not in file and "dist-packages" not in file


@lru_cache(maxsize=1)
def _host_folders() -> tuple[str, ...]:
    root = importlib.util.find_spec("gemmkit")
    return tuple(os.path.join(path, name, "") for path in (root.submodule_search_locations or () if root else ())
                 for name in ("runtime", "emulator", "cli", "tuning"))


def is_host(function: FunctionType) -> bool:
    """Whether a function is gemmkit's own and never device code: the driver's, the emulator's, the tuner's."""
    return function.__code__.co_filename.startswith(_host_folders())


def is_fixed(thing: FunctionType | ModuleType | type) -> bool:
    """Whether nobody edits a function, module or class while the process runs: it is not the user's."""
    if isinstance(thing, FunctionType):
        return _is_fixed_file(thing.__code__.co_filename)
    if isinstance(thing, type):
        module = sys.modules.get(thing.__module__)
        return module is not None and is_fixed(module)
    spec = getattr(thing, "__spec__", None)
    file = getattr(thing, "__file__", None) or getattr(spec, "origin", None)
    return thing.__name__ in sys.builtin_module_names if file is None else _is_fixed_file(file)


def attributes(holder: ModuleType | type, names: Collection[str]) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """(namespace, name, value) of those of ``names`` that a user's module or class has."""
    if is_fixed(holder):
        return
    scopes = [vars(holder)] if isinstance(holder, ModuleType) else [vars(base) for base in holder.__mro__[:-1]]
    for scope in scopes:
        for name in sorted(names):
            if name in scope and not name.startswith("__"):
                yield scope, name, scope[name]


__all__ = ["attributes", "globals_of", "is_fixed", "is_host", "names_of"]
