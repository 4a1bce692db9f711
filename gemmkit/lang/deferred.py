"""What is loaded when it is needed: the modules behind a package's public names, and Numba.

`public_names` gives a package a ``__getattr__`` that imports a name's module when the name is asked for first, so that a
program loads what it uses.

Importing Numba takes longer than all of gemmkit, and a program that makes configurations, or runs the emulator, never needs
it. Until it is loaded, `names_later` gives stand-ins for modules of Numba's and names in them. What the body of one of
gemmkit's modules does with a stand-in (an attribute, a call, a class that inherits from it) makes another, and is done when
it is needed: `load` imports, does in order all that was written down, and puts the real objects where stand-ins were. So
modules are written as if Numba were there. From then on no stand-in is left in gemmkit, and none is in the way.

Any other use of a stand-in loads, too: no function has to ask for it.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import importlib
import importlib.util
import json
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from itertools import pairwise
from pathlib import Path
from types import CodeType, ModuleType, prepare_class
from typing import Any, ClassVar

__all__ = [
    "Later", "at_load", "by_old_name", "load", "made_later", "names_later", "public_names",
]


# --------------------------------------------------------------------------------------------------
# A first call without walks of the garbage collector: Numba's modules, and what a compilation makes, are alive or are
# many.
#
# Loading Numba sets off two hundred collections, a fifth of the time that it takes; a compilation sets off as many.

@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Load or compile with no garbage collection in between; the caller holds a lock that keeps a second one out."""
    if not gc.isenabled():
        yield
        return
    before = gc.get_count()[0]
    gc.disable()
    try:
        yield
    finally:
        _set_aside(gc.get_count()[0] - before)
        gc.enable()


_LEAST = 1_000_000                     # objects, some 90 MB: a kernel leaves up to 300,000 dead ones; a walk takes 0.5 s
_made = 0                              # since the last walk
_alive = 0                             # after it


def _set_aside(made: int) -> None:
    """Put what was made among the old objects. The collector would walk through all of it as soon as it may (0.13 s of a
    first call's 2.0, and seconds in a process that has millions of objects); so it does once as much was made as is alive.
    That much may then lie dead, and a kernel's share of the walks is the same in a large process as in a small one."""
    global _made, _alive
    _made += max(0, made)
    if _made >= max(_LEAST, _alive):
        gc.collect()
        _made, _alive = 0, len(gc.get_objects())
    elif gc.get_freeze_count() == 0:                          # somebody else's frozen objects stay frozen
        gc.freeze()
        gc.unfreeze()


# --------------------------------------------------------------------------------------------------
# Whether the packages that compile and launch kernels are installed, and which of gemmkit's extras has them.
#
# They are gemmkit's extras, not its dependencies: the emulator needs none of them, and there are none for macOS. What
# needs them asks `require` first, so that a machine without them gets one answer wherever it asks.

#: By the module that each one gives, the distribution. (``numba.cuda`` is no sign of numba-cuda: Numba has one of its own.)
_OF_CUDA = {"llvmlite": "llvmlite", "numba": "numba", "numba_cuda": "numba-cuda", "cuda.bindings": "cuda-bindings",
            "cuda.core": "cuda-core"}
_not_found: list[str] = []             # libraries of CUDA's toolkit that were looked for in this process


class NotInstalledError(ImportError):
    """What is asked for needs packages that are not installed; the message names them, and the extra that has them."""


@cache
def missing() -> tuple[str, ...]:
    """The distributions that compile and launch kernels and are not installed. Looked up once a process.

    >>> set(missing()) <= {"llvmlite", "numba", "numba-cuda", "cuda-bindings", "cuda-core"}
    True
    """
    return tuple(name for module, name in _OF_CUDA.items() if not _is_there(module))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):                 # its parent is not there, or None stands in its place
        return False


def require(what: str = "Kernels are compiled") -> None:
    """Raise NotInstalledError, which says what to install, unless the packages of CUDA are there, and all libraries of its
    toolkit that were looked for."""
    if missing():
        raise NotInstalledError(f"{what} by packages that are not installed here ({', '.join(missing())}). {advice()}")
    if _not_found:
        raise NotInstalledError(
            f"Kernels are compiled by CUDA's toolkit, which is not found here ({_not_found[0]}). {advice()}")


@contextmanager
def toolkit() -> Iterator[None]:
    """Within it libraries of CUDA's toolkit are loaded. For one that is not found NotInstalledError is raised, and from then
    on by `require`: looking takes as long each time."""
    try:
        yield
    except RuntimeError as error:
        from cuda import pathfinder

        if not isinstance(error, pathfinder.DynamicLibNotFoundError):
            raise
        _not_found.append(str(error).partition("\n")[0])
        require()


def advice() -> str:
    """How to get the packages of CUDA, and what can be done without them.

    >>> "with gemmkit.emulate()" in advice()
    True
    """
    if sys.platform == "darwin":
        get = "There is no CUDA for macOS."
    else:
        get = ("Get it with pip install 'gemmkit[cu13]' (a driver for CUDA 13, or none) or 'gemmkit[cu12]' (a driver for "
               "CUDA 12).")
    return f"{get} The emulator computes without it: with gemmkit.emulate(): ..."


_MISSING = object()
_PACKAGE = __name__.partition(".")[0]


class _State:
    busy = False                                              # loading, in the thread that has the lock
    loaded = False
    lock = threading.RLock()
    unfinished: ClassVar[list[ModuleType]] = []               # of the package, whose bodies ran while Numba was loaded
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
        return not _State.loaded and not _State.busy and self._value is _MISSING and _in_a_body()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and self._value is _MISSING:
            raise AttributeError(name)                        # Python's own questions: whether it is abstract, or wrapped
        if self._is_recorded():
            return Later(lambda: getattr(self._real(), name))
        return getattr(self._real(), name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._is_recorded():
            return Later(lambda: self._real()(*_real(args), **_real(keywords)))
        return self._real()(*_real(args), **_real(keywords))

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


def names_later(scope: dict[str, Any]) -> None:
    """The names that a module, which calls this, imports ``if TYPE_CHECKING``: stand-ins for them before Numba is loaded."""
    for name, home, origin in list(_imports(sys._getframe(1).f_code)):
        if name not in scope:
            make = partial(_imported, home, origin)
            scope[name] = make() if _State.loaded else Later(make)


def _imports(body: CodeType) -> Iterator[tuple[str, str, str]]:
    """The ``from`` imports in the code of a module's body, also of those that do not run: names, modules, names there."""
    module = ""
    for one, following in pairwise(dis.get_instructions(body)):
        if one.opname == "IMPORT_NAME":
            module = one.argval
        elif one.opname == "IMPORT_FROM":
            yield following.argval, module, one.argval


def _imported(module: str, name: str) -> Any:
    """What a module has by a name, or the module of that name in it."""
    found = getattr(importlib.import_module(module), name, None)
    return importlib.import_module(f"{module}.{name}") if found is None else found


def at_load(function: Callable[..., Any], *args: Any) -> None:
    """Call a function as soon as Numba is loaded, with the real objects for stand-ins; now if it is."""
    with _State.lock:
        if not _State.loaded:
            _State.steps.append(lambda: function(*_real(args)))
            return
    function(*args)


def _in_a_body() -> bool:
    """Whether this thread is importing one of the package's modules: what its body does with Numba can wait."""
    frame = sys._getframe(2)
    while frame is not None and not (frame.f_code.co_name == "<module>" and _is_ours(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back                                  # type: ignore[assignment]
    return frame is not None


def load() -> None:
    """Load Numba, and do all that was written down for it. What raises (Numba may not be importable) is tried again by the
    next call. NotInstalledError where it is not installed."""
    if _State.loaded and not _State.unfinished:
        return
    with _State.lock:
        if _State.busy:
            return
        if _State.loaded:
            _put_the_rest()
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
    _State.unfinished[:] = _half_imported()
    places = _places()
    while _State.steps:
        made = _State.steps[0]()
        for scope, name in places.pop(_State.steps.pop(0), ()):
            scope[name] = made
    for scope, name, container in _containers():
        scope[name] = _real(container)


def _half_imported() -> list[ModuleType]:
    """The package's modules whose bodies run now, in any thread: one may be about to store a stand-in."""
    return [module for name, module in list(sys.modules.items())
            if _is_ours(name) and getattr(getattr(module, "__spec__", None), "_initializing", False)]


def _put_the_rest() -> None:
    """Put the real objects where bodies that ran while Numba was loaded have stored stand-ins."""
    still = _half_imported()
    for module in [module for module in _State.unfinished if module not in still]:
        scope = vars(module)
        scope.update({name: _real(value) for name, value in scope.items() if name != "__builtins__" and has_later(value)})
        _State.unfinished.remove(module)


def made_later(scope: dict[str, Any], name: str) -> bool:
    """Whether a name of a module is one that Numba makes, and has not made yet."""
    return not _State.loaded and has_later(scope.get(name))


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
            if type(value) in (tuple, list, dict) and name != "__builtins__" and has_later(value)]


def has_later(value: Any) -> bool:
    if type(value) is dict:
        return any(map(has_later, value)) or any(map(has_later, value.values()))
    return type(value) is Later or (type(value) in (tuple, list) and any(map(has_later, value)))


def _real(value: Any) -> Any:
    """A value with the real objects in place of stand-ins."""
    if type(value) is Later:
        return value._real()
    if type(value) in (tuple, list):
        return type(value)(map(_real, value))
    return {_real(k): _real(v) for k, v in value.items()} if type(value) is dict else value


# -- public names ------------------------------------------------------------------------------------------------------

def public_names(scope: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, which calls this: a name's module is imported when the name is asked for
    first. A package's modules can be asked for, too.

    ``scope`` is the package's namespace. Its imports ``if TYPE_CHECKING``, which editors and type checkers read, say which
    module has a name: these statements do not run, and are in the code of the package's body all the same.

    >>> import gemmkit as gk
    >>> gk.layouts.ColMayor                                   # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AttributeError: module 'gemmkit.layouts' has no attribute 'ColMayor'; the nearest is 'ColMajor'...
    """
    package, body = scope["__name__"], sys._getframe(1).f_code

    @cache
    def homes() -> dict[str, tuple[str, str]]:
        return {own: (home, origin) for own, home, origin in _imports(body)
                if home != package and own in scope.get("__all__", ())}

    def get(name: str) -> Any:
        if name.startswith("_"):                              # what Python asks of any module
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in homes():
            scope[name] = _imported(*homes()[name])           # asked for once
            return scope[name]
        if f"{package}.{name}" in _table()["names"]:
            return by_old_name(package, name)
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise                                         # it is there, and imports what is not
        of = {f"{home}.{origin}": f"{package}.{one}" for one, (home, origin) in homes().items()}
        raise AttributeError(f"module {package!r} has no attribute {name!r}" + _what_would_do(name, names(), of)) from None

    def names() -> list[str]:
        return sorted({*scope, *scope.get("__all__", ())})

    return get, names


def _what_would_do(name: str, names: list[str], short: dict[str, str]) -> str:
    """In words: the name in another case (Gelu), else the module that has it (found in texts, in 10 ms: nothing is
    imported), else the nearest. ``short`` are shorter names of modules."""
    from difflib import get_close_matches

    folded = {other.lower().replace("_", ""): other for other in names if other[0] != "_"}
    wanted, root = name.lower().replace("_", ""), Path(__file__).resolve().parents[1]
    files = root.rglob("*.py") if wanted not in folded else ()
    for path in sorted(files, key=lambda path: (path.name != "__init__.py", len(path.parts), path)):
        listed = path.read_text(encoding="utf-8").partition("\n__all__ = [")[2].partition("]")[0]
        if f'"{name}"' in listed:
            home = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
            return f"; {short.get(home, home)} has it"
    return "".join(f"; the nearest is {folded[near]!r}" for near in get_close_matches(wanted, folded, 1))


# -- names that modules had -------------------------------------------------------------------------------------------

@cache
def _table() -> dict[str, dict[str, str]]:
    """Modules and public names by those that they had before; the table goes with gemmkit 0.2."""
    return json.loads((Path(__file__).resolve().parents[1] / "moved.json").read_text(encoding="utf-8"))


def moved() -> dict[str, str]:
    """The modules that lie elsewhere now, by their names before."""
    return _table()["modules"]


def by_old_name(module: str, name: str) -> Any:
    """What ``module`` called ``name``, with a DeprecationWarning; AttributeError if it never did. A module whose names
    changed says ``__getattr__ = partial(by_old_name, __name__)``."""
    now = None if name.startswith("__") else _table()["names"].get(f"{module}.{name}")         # imports ask for __path__
    if now is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{module}.{name} is {now} now; the old name goes with gemmkit 0.2", DeprecationWarning, 3)
    home, _, new = now.rpartition(".")
    return getattr(importlib.import_module(home), new)


class _Moved(MetaPathFinder, Loader):
    """Imports a module by the name that it had, with a DeprecationWarning that says where it lies."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not _is_ours(fullname) or fullname not in moved():
            return None
        return spec_from_loader(fullname, self, is_package=any(name.startswith(f"{fullname}.") for name in moved()))

    def exec_module(self, module: ModuleType) -> None:
        now = moved()[module.__name__]
        if not hasattr(module, "__path__"):       # a package is imported on the way to its modules
            warnings.warn(f"{module.__name__} is {now} now; the old name goes with gemmkit 0.2", DeprecationWarning, 2)
        module.__dict__["__getattr__"] = partial(getattr, importlib.import_module(now))


sys.meta_path.append(_Moved())                                # behind the others: it is asked for what they do not find
