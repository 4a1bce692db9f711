"""What a function's code names outside itself, and whose code can change while the process runs.

Device code takes the values of these names when it is compiled. A user may bind a name anew afterwards, or replace the
code of a function (another cell of a notebook, ``%autoreload 2``): :mod:`gemmkit.lang.fingerprint` reads them, and
:mod:`gemmkit.lang.references` tells whether what it read still holds.
"""

from __future__ import annotations

import dis
import enum
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, NamedTuple, cast

#: Packages that device code may call into, and that nobody edits beside a running program.
_PACKAGES = ("numba", "numba_cuda", "llvmlite", "ml_dtypes", "numpy", "cuda", "greenlet")


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

class Owner(enum.Enum):
    """Whose code something is. Nobody edits it while the process runs unless it is the user's."""

    GEMMKIT = "gemmkit"
    PACKAGE = "a package that gemmkit stands on"
    PYTHON = "the standard library"
    USER = "the user"


@lru_cache(maxsize=1)
def _roots() -> tuple[tuple[Owner, tuple[str, ...]], ...]:
    """The folders of the packages that count as fixed, and those of the standard library, in which they may lie."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    packages = [path for name in _PACKAGES for path in _locations(name)]
    return tuple((owner, tuple(map(_folder, paths))) for owner, paths in (
        (Owner.GEMMKIT, _locations("gemmkit")), (Owner.PACKAGE, packages), (Owner.PYTHON, standard)))


def _locations(package: str) -> tuple[str, ...]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ()
    return () if spec is None else tuple(spec.submodule_search_locations or ())


def _folder(path: str) -> str:
    return os.path.join(os.path.abspath(path), "")


@lru_cache(maxsize=4096)
def _owner_of_file(file: str) -> Owner:
    """Whose a file is. The name of a module says nothing: a user's own may be called ``token`` or ``gemmkit_layers``."""
    if file.startswith("<frozen ") or file in ("built-in", "frozen"):
        return Owner.PYTHON
    found = next((owner for owner, folders in _roots() if file.startswith(folders)), Owner.USER)
    installed = "site-packages" in file or "dist-packages" in file
    return Owner.USER if found is Owner.PYTHON and installed else found


def owner_of(thing: Any) -> Owner:
    """Whose code a function is, or a module, a class, a built-in function, or the class of another object."""
    if isinstance(thing, (staticmethod, classmethod)):
        thing = thing.__func__
    if isinstance(thing, FunctionType):
        return _owner_of_file(thing.__code__.co_filename)
    if not isinstance(thing, ModuleType):
        module = sys.modules.get(getattr(thing, "__module__", None) or "")
        return Owner.USER if module is None else owner_of(module)
    if thing.__name__ == "__main__":                          # a script's: even where `python -m` runs it by way of another
        return Owner.USER
    spec = getattr(thing, "__spec__", None)
    file = getattr(thing, "__file__", None) or getattr(spec, "origin", None)
    if file is None:
        return Owner.PYTHON if thing.__name__ in sys.builtin_module_names else Owner.USER
    return _owner_of_file(file)


def is_fixed(thing: FunctionType | ModuleType | type) -> bool:
    """Whether nobody edits a function, module or class while the process runs: it is not the user's."""
    return owner_of(thing) is not Owner.USER


def is_gemmkit(thing: Any) -> bool:
    """Whether code comes with gemmkit."""
    return owner_of(thing) is Owner.GEMMKIT


def is_library(thing: Any) -> bool:
    """Whether code is gemmkit's or of a package that it stands on: they know what a GPU can do."""
    return owner_of(thing) in (Owner.GEMMKIT, Owner.PACKAGE)


#: Packages and modules of gemmkit without device code.
_HOST = ("runtime", "emulator", "cli", "report", "tuning", "tuner", "ahead", "inspection", "launch", "planning", "products",
         "attention_plans", "mlp_plans", "row_plans")


@lru_cache(maxsize=1)
def _host_folders() -> tuple[str, ...]:
    return tuple(os.path.join(path, name, "") for path in _locations("gemmkit") for name in _HOST)


def is_host(function: FunctionType) -> bool:
    """Whether a function is gemmkit's own and never device code: the driver's, the emulator's, the tuner's."""
    return function.__code__.co_filename.startswith(_host_folders())


def is_device(module: str) -> bool:
    """Whether a module of this name is gemmkit's and may hold device code."""
    package, _, rest = module.partition(".")
    return package == "gemmkit" and rest.partition(".")[0] not in _HOST


def attributes(holder: ModuleType | type, names: Collection[str]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Where those of ``names`` are that a user's module or class has: (namespace, name), and each namespace before, which
    lacks it and would hide that one."""
    if is_fixed(holder):
        return
    scopes = [vars(holder)] if isinstance(holder, ModuleType) else [vars(base) for base in holder.__mro__[:-1]]
    for name in sorted(names):
        found = next((n for n, scope in enumerate(scopes) if name in scope), None)
        if found is not None and not name.startswith("__"):
            yield from ((scope, name) for scope in scopes[:found + 1])


# -- what only the process knows ----------------------------------------------------------------------------------------

#: Of the standard library: what is called with equal values gives equal ones.
_PURE = frozenset(
    "abc bisect cmath collections contextlib copy dataclasses decimal enum fractions functools heapq itertools logging math "
    "numbers operator re statistics string struct textwrap types typing warnings".split())
_IMPURE_BUILT_INS = frozenset("__import__ breakpoint eval exec globals hash id input locals open".split())


def of_process(value: Any) -> str | None:
    """What a module, function, class or object of others' depends on beside its arguments (the environment, files, clocks,
    random numbers): the module's name. None where it depends on nothing, and for the user's, whose code is read."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if not isinstance(module, str):                            # a built-in method, or an object
        holder = getattr(value, "__self__", value)
        module = holder.__name__ if isinstance(holder, ModuleType) else getattr(
            holder if isinstance(holder, type) else type(holder), "__module__", "")          # classes may have none
    if module == "builtins":
        return module if getattr(value, "__name__", "") in _IMPURE_BUILT_INS else None
    if module.startswith(("numpy.random", "numpy._random")):
        return module
    owner = Owner.USER if module not in sys.modules else owner_of(sys.modules[module])
    return module if owner is Owner.PYTHON and module.lstrip("_").partition(".")[0] not in _PURE else None


@lru_cache(maxsize=4096)
def imports_of(code: CodeType) -> frozenset[str]:
    """The modules that a code object, or one nested in it, imports."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"}
    return frozenset(own).union(*(imports_of(c) for c in code.co_consts if isinstance(c, CodeType)))


# --------------------------------------------------------------------------------------------------
# Guards: whether what a fingerprint was made of still is what it was.
#
# A kernel is found by the text of all code and constants in it. Making that text takes tens of microseconds and a call of
# a plan takes seven, so the text is kept, and beside it the *facts* that it rests on: this function has this code object,
# this global is this object, this class has these attributes. Constants cannot change in place (what can is refused), so
# that identity is enough, and the facts become one expression of ``is`` comparisons, 20 to 30 ns each. (TorchDynamo does
# the same for its graphs, under the same name.)

MISSING = object()


class Fact(NamedTuple):
    """One thing that was seen: ``kind`` is "item" (of a mapping), "absent" (a key of it), "length" (of it), "cell",
    "attribute" or "class"."""

    kind: str
    holder: Any
    name: str
    value: Any

    @property
    def key(self) -> tuple:
        return self.kind, id(self.holder), self.name


def item(scope: Mapping[str, Any], name: str) -> Fact:
    """That a namespace has this value under a name, or nothing."""
    value = scope.get(name, MISSING)
    return Fact("absent", scope, name, None) if value is MISSING else Fact("item", scope, name, value)


def cell(of: CellType) -> Fact:
    """That a captured variable holds what it does."""
    return Fact("cell", of, "", contents(of))


def contents(of: CellType) -> Any:
    """What a captured variable holds; MISSING while it is not bound yet."""
    try:
        return of.cell_contents
    except ValueError:
        return MISSING


def function_of(value: Any) -> FunctionType | None:
    """The function in an entry of a class: a method, a static method or a property's getter."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) else None


def code(function: FunctionType) -> list[Fact]:
    """That a function has the code and the defaults that it has."""
    names = ["__code__", "__defaults__"] + ["__kwdefaults__"] * (function.__code__.co_kwonlyargcount > 0)
    facts = [Fact("attribute", function, name, getattr(function, name)) for name in names]
    named = function.__kwdefaults__ or {}
    return facts + [item(named, name) for name in named]


# -- classes of components --------------------------------------------------------------------------------------------

class_version = [0]                      # counts every attribute set on any class of components (`ComponentClass`)

UNSEEN = ("__abstractmethods__", "_abc_impl", "__slotnames__", "__doc__", "__annotations__", "__weakref__", "__dict__",
           "__module__", "__firstlineno__", "__static_attributes__")


def members(of: type) -> dict[str, Any]:
    """What a class itself defines."""
    return {name: value for name, value in vars(of).items() if name not in UNSEEN}


def class_facts(of: type, is_fixed: bool = False) -> list[Fact]:
    """That a class defines what it does.

    A class of components counts its changes (`ComponentClass`), so its fact is looked at only after some such class has
    changed; so is that of a class which nobody edits, ``is_fixed``. Any other class has a fact for each entry, one for its
    bases, and one for the number of entries, because a new entry may hide a base's.
    """
    if is_fixed or hasattr(type(of), "counts_changes"):
        return [Fact("class", of, "", members(of))]
    scope = vars(of)
    return [Fact("attribute", of, "__bases__", of.__bases__), Fact("length", scope, "", len(scope)),
            *(item(scope, name) for name in members(of))]


def _has_members(fact: Fact) -> bool:
    now = members(fact.holder)
    return now.keys() == fact.value.keys() and all(now[name] is value for name, value in fact.value.items())


def holds(fact: Fact) -> bool:
    """Whether one fact still holds: for those that are looked at rarely."""
    if fact.kind == "class":
        return _has_members(fact)
    if fact.kind == "attribute":
        return getattr(fact.holder, fact.name, MISSING) is fact.value
    if fact.kind == "cell":
        return contents(fact.holder) is fact.value
    if fact.kind == "length":
        return len(fact.holder) == fact.value
    return fact.holder.get(fact.name, MISSING) is (MISSING if fact.kind == "absent" else fact.value)


# -- all facts of something -------------------------------------------------------------------------------------------

class Guards:
    """Facts, and ``stand()``: whether all of them still hold.

    >>> scope = {"SCALE": 2.0}
    >>> guards = Guards([item(scope, "SCALE"), item(scope, "max")])
    >>> guards.stand()
    True
    >>> scope["max"] = min                           # a built-in's name is shadowed
    >>> guards.stand()
    False
    """

    def __init__(self, facts: Iterable[Fact]):
        self.facts: tuple[Fact, ...] = tuple({fact.key: fact for fact in facts}.values())
        self.stand: Callable[[], bool] = self._first

    def ready(self) -> Callable[[], bool]:
        """``stand`` for one who keeps it: a function without a look into this object."""
        self.stand()
        return self.stand

    def __bool__(self) -> bool:
        return bool(self.facts)

    def _first(self) -> bool:
        """The first look makes the function that all others are."""
        self.stand = _checker(self.facts)
        return self.stand()


def _checker(facts: tuple[Fact, ...]) -> Callable[[], bool]:
    """A function of one expression, since a loop over the facts would cost three times as much."""
    if not facts:
        return _true
    space: dict[str, Any] = {}
    clauses = []
    classes = [fact for fact in facts if fact.kind == "class"]
    if classes:
        seen = [class_version[0]] if all(map(_has_members, classes)) else [-1]

        def changed() -> bool:
            version = class_version[0]
            if not all(map(_has_members, classes)):
                return True
            seen[0] = version
            return False

        space.update(version=class_version, seen=seen, changed=changed)
        clauses.append("(version[0] == seen[0] or not changed())")
    for n, fact in enumerate(facts):
        if fact.kind == "class":
            continue
        space[f"h{n}"], space[f"v{n}"] = fact.holder, fact.value
        clauses.append({"item": f"h{n}[{fact.name!r}] is v{n}", "absent": f"{fact.name!r} not in h{n}",
                        "length": f"len(h{n}) == v{n}", "cell": f"h{n}.cell_contents is v{n}",
                        "attribute": f"h{n}.{fact.name} is v{n}"}[fact.kind])
    text = ("def stand():\n    try:\n        return " + "\\\n            and ".join(clauses)
            + "\n    except (KeyError, ValueError, AttributeError):\n        return False\n")
    exec(text, space)
    return cast("Callable[[], bool]", space["stand"])


def _true() -> bool:
    return True


NOTHING = Guards(())


# --------------------------------------------------------------------------------------------------
# The base class of host objects that device code may hold: shapes, swizzles, thread tensors, forms of tensors.
#
# How they are compiled is said in `gemmkit.lang.static`, which gives the class its ``__device_type__``; that is apart,
# so that what the emulator and the host use of them does not wait for the compiler's modules.

class Static:
    """Base class of host objects that device code may hold. The ``repr`` of one must say all that it is: kernels are
    remembered by it."""

    #: Methods that are device code, not run by the compiler.
    device_methods: ClassVar[tuple[str, ...]] = ()
