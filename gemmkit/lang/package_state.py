"""Whether gemmkit's own code, on disk and in the process, is what a kernel's key says that it is.

The key holds a digest of gemmkit's source files, and so says nothing more of gemmkit's own functions and classes than their
names. Nobody edits them while a process runs. Whoever does (a test, a patch at run time) must not store the result under the
unpatched code's key, so what each module defines is noted when its body has run, and compared around each compilation.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import operator
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from gemmkit.lang import guards
from gemmkit.lang.guards import UNSEEN, Fact
from gemmkit.lang.later import Later, has_later
from gemmkit.lang.references import is_device

_ROOT = Path(__file__).resolve().parent.parent


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:                       # a third of the time of Path.rglob
        for entry in entries:
            if entry.is_dir():
                yield from _files(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path, (stat := entry.stat()).st_mtime_ns, stat.st_size


def _source_state() -> tuple:
    """Name, time and size of every file of gemmkit's source."""
    return tuple(sorted(_files(str(_ROOT))))


_imported = _source_state()               # when gemmkit was imported: its modules are loaded from then on, as they are used
_PROCESS = os.urandom(16)


@lru_cache(maxsize=1)
def _state_with(modules: int) -> tuple:
    """`_source_state` when so many of gemmkit's modules were loaded: more may come from other files."""
    return _source_state()


@lru_cache(maxsize=2)
def _digest(state: tuple) -> str:
    """A digest of all files' text. ``state`` tells one text from another."""
    found = hashlib.sha256()
    for path, *_ in state:
        found.update(os.path.relpath(path, _ROOT).encode() + b"\0" + Path(path).read_bytes())
    return found.hexdigest()


def package_digest(of_process: bool = True) -> str:
    """A digest of gemmkit's own source: a new version of any file invalidates every compiled kernel.

    A process whose modules are loaded while files change has old code and new, and would store what it compiles under the
    newer files' key: its digest is of this process alone, or, unless ``of_process``, of the files' times, too. So is the
    digest of a process in which code of gemmkit's is replaced.
    """
    state = _state_with(sum(name.startswith("gemmkit.") for name in list(sys.modules)))
    if state == _imported and not mark():
        return _digest(state)
    text = repr((_digest(state), _imported, mark(), _PROCESS if of_process else None))
    return hashlib.sha256(text.encode()).hexdigest()


# -- in the process ---------------------------------------------------------------------------------------------------

#: What other packages' functions and classes, and the built-ins, were when they were read.
of_packages: list[Fact] = []

_BUILT_INS = frozenset(vars(builtins))
_OF_PYTHON = {*UNSEEN, "__builtins__", "__spec__", "__loader__", "__cached__", "__file__", "__name__", "__package__",
              "__all__", "__path__"}


class _Defined:
    """What a module, and each class of components in it, defines when the module's body has run; and its functions' code."""

    def __init__(self, module: ModuleType):
        scope, name = vars(module), module.__name__
        own = [vars(value) for value in scope.values()
               if hasattr(type(value), "counts_changes") and value.__module__ == name]
        self.spaces: list[tuple[Mapping[str, Any], frozenset[str], dict[str, Any]]] = [
            (space, frozenset(space), {name: value for name, value in space.items() if name not in _OF_PYTHON and (
                type(value) is not Later and (type(value) not in _CONTAINERS or not has_later(value)))})
            for space in (scope, *own)]
        self.functions: list[FunctionType] = []
        for value in [value for *_, held in self.spaces for value in held.values() if value is not None]:
            kind = type(value)
            if kind is not FunctionType:                       # what a method, a device function or `lru_cache` wraps
                wrapper = _WRAPPERS.get(kind, "__wrapped__")
                value = None if kind in (ModuleType, type) else getattr(value, wrapper, None)
            if type(value) is FunctionType and value.__module__ == name:
                self.functions.append(value)
        self.code = [list(map(part, self.functions)) for part in _CODE]

    def replaced(self) -> Iterator[tuple[str, Any]]:
        """The names and values of what is something else now."""
        for scope, names, held in self.spaces:
            if not all(map(operator.is_, map(scope.get, held), held.values())):
                for name, value in list(held.items()):
                    now = scope.get(name)
                    if now is not value and not any(_binds(code, name) for code in self.code[0]):
                        yield name, now
            if len(scope) != len(names):                       # a new name hides a built-in function, or a base's attribute
                hides = _BUILT_INS if type(scope) is dict else scope.keys()
                yield from ((name, scope[name]) for name in (scope.keys() - names - _OF_PYTHON) & hides)
        for part, parts in zip(_CODE, self.code):
            if not all(map(operator.is_, map(part, self.functions), parts)):
                yield from ((function.__qualname__, part(function)) for function, was in zip(self.functions, parts)
                            if part(function) is not was)


_CONTAINERS = (tuple, list, dict)         # (whose stand-ins Numba's real objects replace)
_WRAPPERS = {staticmethod: "__func__", classmethod: "__func__", property: "fget", cached_property: "func"}
_CODE = [operator.attrgetter(part) for part in ("__code__", "__defaults__", "__kwdefaults__")]
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


def _binds(code: CodeType, name: str) -> bool:
    return name in code.co_names and _STORE_GLOBAL in code.co_code[::2]


_defined: dict[str, _Defined] = {}


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        known = _defined.get(module.__name__)
        if known is None or known.spaces[0][0] is not vars(module):        # a module that is loaded again is another
            _defined[module.__name__] = _Defined(module)


class _Finder:
    """Finds gemmkit's modules as Python does, and has noted what they define."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not is_device(name):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)


_seen: list[Any] = [[], 0]                # what was replaced when it was last looked at, and how many times that was another


def _replaced() -> list[tuple[str, str, Any]]:
    return [(module, *found) for module, defined in list(_defined.items()) for found in defined.replaced()]


def _is_as_seen() -> bool:
    now, then = _replaced(), _seen[0]
    return len(now) == len(then) and all(x[:2] == y[:2] and x[2] is y[2] for x, y in zip(now, then))


def packages_stand() -> bool:
    """Whether gemmkit's own code, and what was read of other packages, is what it was. Looked at once a kernel: 2 ms."""
    unique = {fact.key: fact for fact in of_packages}
    of_packages[:] = unique.values()
    return _is_as_seen() and all(map(guards.holds, unique.values()))


def look_anew() -> None:
    """Take what is replaced now for what gemmkit is, under a `mark` of its own."""
    _seen[:] = _replaced(), _seen[1] + 1
    of_packages.clear()


def mark() -> str:
    """What tells code of gemmkit's that is replaced from the code in its files: empty where all is as imported."""
    return f"replaced {_seen[1]}" if _seen[0] else ""
