"""What a Python function, class or constant *is*, as text: equal text means equal device code.

The text is the key of compiled kernels, in the process and on disk, so it has to cover all that compiling looks at:
code, defaults, captured variables, the globals and the attributes of modules and classes that the code names, and the
same of every helper. A `Reader` collects in one walk the text and the facts that it rests on
(:mod:`gemmkit.lang.references`): what is in the key is what is guarded. gemmkit's own functions and classes are their
names, because a kernel's key holds a digest of gemmkit's source (:mod:`gemmkit.lang.fingerprint`).

A value that can change in place (a list, an array, an object with state) has no text that stays true. It is noted by name
(`Reading.mutable`), and refused where device code uses it, not before: a component may have fields for the host alone.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import hashlib
import inspect
import operator
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple, cast

import numpy as np

from gemmkit.lang import references
from gemmkit.lang.deferred import Later, has_later, made_later
from gemmkit.lang.numba_hooks import Atom
from gemmkit.lang.number_rules import record_text
from gemmkit.lang.references import (
    NOTHING,
    UNSEEN,
    Fact,
    Guards,
    attributes,
    class_version,
    function_of,
    globals_of,
    imports_of,
    is_device,
    is_fixed,
    is_gemmkit,
    names_of,
    of_process,
)

__all__ = [
    "Array", "Scalar", "annotated",
]


# --------------------------------------------------------------------------------------------------
# Whether gemmkit's own code, on disk and in the process, is what a kernel's key says that it is.
#
# The key holds a digest of gemmkit's source files, and so says nothing more of gemmkit's own functions and classes than
# their names. Nobody edits them while a process runs. Whoever does (a test, a patch at run time) must not store the
# result under the unpatched code's key, so what each module defines is noted when its body has run, and compared around
# each compilation.

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
    return _is_as_seen() and all(map(references.holds, unique.values()))


def look_anew() -> None:
    """Take what is replaced now for what gemmkit is, under a `mark` of its own."""
    _seen[:] = _replaced(), _seen[1] + 1
    of_packages.clear()


def mark() -> str:
    """What tells code of gemmkit's that is replaced from the code in its files: empty where all is as imported."""
    return f"replaced {_seen[1]}" if _seen[0] else ""


class Reading(NamedTuple):
    """What was read: the text, whether the user's code still says so, the names of what can change in place, each with what
    it is, and of what depends on the process (its environment, clocks, files), each with its module."""

    text: str
    guards: Guards
    mutable: tuple[tuple[str, str], ...] = ()
    of_process: tuple[tuple[str, str], ...] = ()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- reading ----------------------------------------------------------------------------------------------------------

def shipped_name(thing: FunctionType | type) -> str | None:
    """The name that stands for a function or a class of gemmkit's. None for others', and for what is not found under its
    name: a lambda, or a function that another one made."""
    if not is_gemmkit(thing):
        return None
    found: Any = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    found = function_of(found) or found
    if found is not thing and getattr(found, "__wrapped__", None) is not thing:
        return None
    return f"{thing.__module__}.{thing.__qualname__}{mark()}"


@lru_cache(maxsize=8192)
def code_text(code: CodeType) -> str:
    """A code object without its place in a file."""
    constants = [code_text(c) if isinstance(c, CodeType) else _constant_text(c) for c in code.co_consts]
    return repr((code.co_name, code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars,
                 code.co_cellvars, code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags,
                 _exceptions(code)))


def _exceptions(code: CodeType) -> str:
    return getattr(code, "co_exceptiontable", b"").hex()       # from Python 3.11 on the code alone does not say them


def _constant_text(value: Any) -> str:
    """A constant of a code object: numbers, strings, None, ..., tuples and frozensets of them."""
    if isinstance(value, tuple):
        return "(" + ",".join(map(_constant_text, value)) + ")"
    if isinstance(value, frozenset):                           # in an order of its own in every process
        return "{" + ",".join(sorted(map(_constant_text, value))) + "}"
    return f"{type(value).__name__}:{value!r}"


_GROWING = (dict, list, set)
_IMMUTABLE = (bool, int, float, str, complex, bytes, type(None), type(Ellipsis), range, np.generic)


class Reader:
    """One walk over a value and all that it stands on.

    ``text(value)`` returns its text and enters what that rests on; ``reading(text)`` is the whole.
    """

    def __init__(self) -> None:
        self._user: list[Fact] = []
        self._mutable: dict[str, str] = {}
        self._of_process: dict[str, str] = {}
        self._open: list[Any] = []                             # what is being read: it may refer to itself
        self.is_cyclic = False

    def reading(self, text: str) -> Reading:
        return Reading(text, Guards(self._user) if self._user else NOTHING, tuple(self._mutable.items()),
                       tuple(self._of_process.items()))

    def add(self, reading: Reading) -> str:
        """Enter what another walk has read; its text."""
        self._user += reading.guards.facts
        self._mutable.update(reading.mutable)
        self._of_process.update(reading.of_process)
        return reading.text

    # -- functions

    def function(self, function: FunctionType, runtime: Collection[str] = ()) -> str:
        """A function with all that it refers to. Of the names in ``runtime`` the values do not matter: they become arguments
        (:mod:`gemmkit.lang.functions`)."""
        name = shipped_name(function)
        if name is not None:
            return name
        if function in self._open:
            self.is_cyclic = True
            return f"recursive:{function.__qualname__}"
        self._open.append(function)
        try:
            facts = of_packages if is_fixed(function) else self._user
            facts += references.code(function)
            parts = [self._outside(function, frozenset(runtime)), self._each("a default", function.__defaults__ or ()),
                     *(f"{name}={self._named(name, value)}" for name, value in (function.__kwdefaults__ or {}).items())]
            names = names_of(function.__code__)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                if name not in runtime:
                    facts.append(references.cell(cell))
                    parts.append(self._looked_up(name, references.contents(cell), names))
            return digest("\n".join(parts))
        finally:
            self._open.pop()

    def _outside(self, function: FunctionType, runtime: frozenset[str]) -> str:
        """A function's code and the globals that it names. Lambdas are made anew all the time, with other captured
        variables; this part of them stays, so it is kept."""
        code, scope = function.__code__, function.__globals__
        key = id(code), id(scope), runtime
        known = _outsides.get(key)
        if known is not None and known[0] is code and known[1] is scope and known[2].guards.stand():
            return self.add(known[2])
        inner = Reader()
        inner._open = list(self._open)
        facts = of_packages if is_fixed(function) else inner._user
        parts = [code_text(code)]
        if is_gemmkit(function):                               # the digest of gemmkit's source says what its globals are
            return digest(f"{scope.get('__name__')}.{parts[0]}{mark()}")
        for name in sorted(globals_of(code)):
            parts.append(name if name in runtime else inner._global(function, name, names_of(code), facts))
        if is_fixed(function):                                 # a package's own tables stay what they are
            inner._mutable.clear()
            inner._of_process.clear()
        else:
            for name in imports_of(code):
                inner._process(name, sys.modules.get(name), names_of(code))
        found = inner.reading(digest("\n".join(parts)))
        if inner.is_cyclic and len(self._open) > 1:            # the text depends on where the walk began
            self.is_cyclic = True
        else:
            _keep(_outsides, key, (code, scope, found))
        return self.add(found)

    def _global(self, function: FunctionType, name: str, names: Collection[str], facts: list[Fact]) -> str:
        scope = function.__globals__
        if made_later(scope, name):                            # by gemmkit and Numba, whose sources are in the key
            return name
        facts.append(references.item(scope, name))
        if name in scope:
            return f"{name}={self._looked_up(name, scope[name], names)}"
        built_in = cast(Any, function).__builtins__            # which typeshed does not know
        of_packages.append(references.item(built_in, name))
        return f"{name}:{self._named(name, built_in[name])}" if name in built_in else f"{name} is not there"

    def _process(self, name: str, value: Any, names: Collection[str]) -> None:
        """Note what a user's function names that depends on the process: of a module, those attributes that it names."""
        if isinstance(value, ModuleType):
            if is_fixed(value) and value not in self._open and not is_gemmkit(value):
                self._open.append(value)
                for attribute in names & vars(value).keys():
                    held = vars(value)[attribute]
                    if isinstance(held, _GROWING) and of_process(value) is not None:                 # sys.argv
                        self._of_process[f"{name}.{attribute}"] = value.__name__
                    self._process(f"{name}.{attribute}", held, names)
                self._open.pop()
        elif not isinstance(value, _IMMUTABLE):
            found = of_process(value)
            if found is not None:
                self._of_process[name] = found

    def _looked_up(self, name: str, value: Any, names: Collection[str]) -> str:
        """The text of what a function's code names; a user's module or class, with the attributes that it may read."""
        if not isinstance(value, (ModuleType, type)) or value in self._open:
            return self._named(name, value)
        self._process(name, value, names)
        self._open.append(value)
        try:
            text = self._named(name, value)
            for scope, attribute in attributes(value, names):
                self._user.append(references.item(scope, attribute))
                found = scope.get(attribute, references.MISSING)
                if found is not references.MISSING:
                    text += f";{attribute}={self._looked_up(f'{name}.{attribute}', function_of(found) or found, names)}"
            return text
        finally:
            self._open.pop()

    # -- classes

    def component_class(self, cls: type, base: type) -> str:
        """A component's class: its name, its constants, and the code of all its functions (inherited ones too, down to
        ``base``)."""
        parts = [f"{cls.__module__}.{cls.__qualname__}"]
        for each in cls.__mro__[:-1]:
            if each is base:
                continue
            name = shipped_name(each)
            if name is not None:
                parts.append(name)
                continue
            facts = of_packages if is_fixed(each) else self._user
            facts += references.class_facts(each, is_fixed(each))
            parts += self._members(each)
        return digest("\n".join(parts))

    def _members(self, cls: type) -> list[str]:
        parts = []
        for name, value in sorted(vars(cls).items()):
            if name.startswith("__") and name != "__call__":
                continue
            function = function_of(value)
            if function is not None:
                parts.append(f"{name}:{type(value).__name__}:{self._named(name, function)}")
            elif not is_slot(value):
                parts.append(f"{name}={self._named(f'{cls.__qualname__}.{name}', value)}")
        return parts

    def _class(self, cls: type) -> str:
        """A class as a value: by name, and what its instances are made of."""
        text = f"{cls.__module__}.{cls.__qualname__}"
        if is_fixed(cls):
            return text
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            text += f"{cls._fields}{self._each('a default', tuple(getattr(cls, '_field_defaults', {}).items()))}"
        elif issubclass(cls, enum.Enum):
            text += self._each("a member", tuple((name, member.value) for name, member in cls.__members__.items()))
        elif dataclasses.is_dataclass(cls):
            text += ",".join(f"{field.name}:{field.type}" for field in dataclasses.fields(cls))
        return text

    def whole_class(self, cls: type) -> str:
        """A class in a component's field: any of its attributes may be read."""
        text = self._class(cls)
        if is_fixed(cls) or cls in self._open:
            return text
        self._open.append(cls)
        try:
            for base in cls.__mro__[:-1]:
                if not is_fixed(base):
                    self._user += references.class_facts(base)
                    text += ";" + ";".join(self._members(base))
            return text
        finally:
            self._open.pop()

    # -- values

    def _named(self, name: str, value: Any) -> str:
        """Text that tells one compile-time value from another; a message may have to speak of it by name."""
        if isinstance(value, _IMMUTABLE):
            return f"{type(value).__name__}:{value!r}"
        own = getattr(type(value), "__reading__", None)
        if own is not None:
            return self.add(own(value))
        self._process(name, value, ())
        if isinstance(value, Atom):                            # an instruction
            return f"{type(value).__qualname__}:{value!r}"
        if isinstance(value, FunctionType):
            return "function:" + self.add(self.of_function(value))
        function = function_of(value) or getattr(value, "__wrapped__", None) or getattr(value, "py_func", None)
        if isinstance(function, FunctionType):                 # a device function, a cuda.jit helper, what lru_cache makes
            return f"{type(value).__name__}:{self._named(name, function)}"
        if hasattr(type(value), "__device_type__"):            # a tile
            return f"{type(value).__qualname__}:{value!r}"
        if isinstance(value, ModuleType):
            return "module:" + value.__name__
        if isinstance(value, type):
            return self._class(value)
        own = getattr(value, "__self__", None)
        if isinstance(value, MethodType):
            return f"{self._named(name, value.__func__)} of {self._named(name, own)}"
        if isinstance(value, BuiltinFunctionType) and not isinstance(own, (ModuleType, type, NoneType)):
            return f"{value.__qualname__} of {self._named(name, own)}"
        if isinstance(value, (BuiltinFunctionType, np.ufunc)):
            return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
        if hasattr(type(value), "__get__"):                    # a property of an enumeration's, a slot: code, not a value
            return f"descriptor:{type(value).__qualname__}"
        if isinstance(value, np.dtype):
            return f"dtype:{value.name if value.names is None else record_text(value)}"
        return self._of_several(name, value)

    def _of_several(self, name: str, value: Any) -> str:
        """Values made of others, and what cannot be told by text."""
        kind = type(value)
        if isinstance(value, enum.Enum):
            return f"{self._class(kind)}.{value.name}"
        if isinstance(value, tuple):
            return f"{self._class(kind) if kind is not tuple else ''}({self._each(name, value)})"
        if isinstance(value, frozenset):
            return "{" + ",".join(sorted(self._named(name, v) for v in value)) + "}"
        if dataclasses.is_dataclass(value) and kind.__dataclass_params__.frozen:
            held = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
            return self._class(kind) + "(" + ",".join(f"{n}={self._named(f'{name}.{n}', v)}" for n, v in held) + ")"
        if isinstance(value, MappingProxyType):                # a table that is declared read-only
            return "{" + ",".join(f"{self._named(name, k)}:{self._named(name, v)}" for k, v in value.items()) + "}"
        self._mutable[name] = kind.__qualname__
        if isinstance(value, np.ndarray):                      # its repr leaves elements out
            return f"array:{value.dtype}{value.shape}:{hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, (list, set, bytearray)):
            parts = [self._named(name, v) for v in value]
            return f"{kind.__name__}({','.join(parts if isinstance(value, list) else sorted(parts))})"
        if isinstance(value, dict):
            return "{" + ",".join(f"{self._named(name, k)}:{self._named(name, v)}" for k, v in value.items()) + "}"
        return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}:{_ADDRESS.sub('', repr(value))}"

    def _each(self, name: str, values: tuple) -> str:
        return "(" + ",".join(self._named(name, v) for v in values) + ")"

    def of_function(self, function: FunctionType, runtime: Collection[str] = ()) -> Reading:
        """The `Reading` of `function`, from memory if it was read before and what it rests on still holds."""
        found = None if runtime else _known(function)
        if found is None:
            inner = Reader()
            inner._open = list(self._open)
            found = inner.reading(inner.function(function, runtime))
            self.is_cyclic |= inner.is_cyclic
            depends_on_start = inner.is_cyclic and self._open      # those with closures are made anew all the time
            if not runtime and not function.__closure__ and not depends_on_start:
                _keep(_readings, id(function), (function, found))
        return found


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def is_slot(value: Any) -> bool:
    return type(value).__name__ in ("member_descriptor", "getset_descriptor", "wrapper_descriptor", "method_descriptor")


# -- what was read before ---------------------------------------------------------------------------------------------

class _Memory(dict):
    """No plain dict, in which `gemmkit.lang.deferred` looks for stand-ins: it would copy the namespaces in here."""


_readings: dict[int, tuple[Any, Reading]] = _Memory()                   # by the id of what was read, which is kept beside it
_outsides: dict[tuple, tuple[Any, Any, Reading]] = _Memory()
_LIMIT = 20000                            # of each: a notebook makes new functions for ever
_forgetting: list[Callable[[], None]] = []


def _known(thing: FunctionType | type) -> Reading | None:
    """What was read of a function or a class, if that still holds."""
    known = _readings.get(id(thing))
    return known[1] if known is not None and known[0] is thing and known[1].guards.stand() else None


def _keep(memory: dict, key: Any, found: Any) -> None:
    if len(memory) >= _LIMIT:
        memory.clear()
    memory[key] = found


def read(function: FunctionType) -> Reading:
    """A function's `Reading`, from memory if what it rests on still holds."""
    return read_closure(function, ())


def read_class(cls: type, base: type) -> Reading:
    """A component class's `Reading`, from memory if what it rests on still holds."""
    found = _known(cls)
    if found is None:
        reader = Reader()
        reader._open = [cls]
        found = reader.reading(reader.component_class(cls, base))
        _keep(_readings, id(cls), (cls, found))
    return found


def read_closure(function: FunctionType, runtime: Collection[str]) -> Reading:
    """The `Reading` of a function that captured the runtime values of these names."""
    return Reader().of_function(function, runtime)


def read_value(value: Any, name: str) -> Reading:
    """The `Reading` of a compile-time value, of which messages speak by name."""
    if isinstance(value, _IMMUTABLE):
        return Reading(f"{type(value).__name__}:{value!r}", NOTHING, ())
    if isinstance(value, np.dtype) and value.names is None:
        return Reading(f"dtype:{value.name}", NOTHING, ())
    reader = Reader()
    if isinstance(value, type):
        return reader.reading(reader.whole_class(value))
    return reader.reading(reader._named(name, value))


def function_text(function: Any) -> str:
    """The text of a function with all that it refers to."""
    return read(getattr(function, "__wrapped__", function)).text


def forget_readings() -> None:
    """Read everything anew, and compile anew what was compiled: some code changed that is not the user's."""
    look_anew()
    for memory in (_readings, _outsides):
        memory.clear()
    for forget in _forgetting:
        forget()


def look_again() -> None:
    """`forget_readings` if some code did change: before kernels are described that other processes are to compile, for these
    cannot have them described anew."""
    if not packages_stand():
        forget_readings()


def when_forgetting(forget: Callable[[], None]) -> Callable[[], None]:
    """Have ``forget()`` called by `forget_readings`."""
    _forgetting.append(forget)
    return forget


# --------------------------------------------------------------------------------------------------
# Properties that a kernel takes for constants: whether what they read can change in place.

def mutable_in_property(component: Any, name: str) -> str | None:
    """What a property, a constant of a kernel, reads that can change while its text stays: a clause, or None."""
    entry = inspect.getattr_static(type(component), name, None)
    getter = function_of(entry)
    if getter is None or is_fixed(getter) or not isinstance(entry, (property, cached_property)):
        return None
    return _found(component, {name}, [])


def _found(holder: Any, names: set[str], looked_at: list[Any]) -> str | None:
    """`mutable_in_property`, of the attributes ``names`` of an object, and of what these read."""
    if any(holder is other for other in looked_at):
        return None
    looked_at.append(holder)
    cls, seen = type(holder), set[str]()
    names = set(names)
    held: list[Any] = []
    while names - seen:                                       # the attributes of self that it reads, by way of others
        each = (names - seen).pop()
        seen.add(each)
        entry = inspect.getattr_static(cls, each, None)
        function = function_of(entry)
        clause = None
        if function is not None:
            if not is_fixed(function):
                names |= names_of(function.__code__)
                clause = _clause(read(function))
        elif each in getattr(holder, "__dict__", ()) or entry is not None:
            value = getattr(holder, "__dict__", {}).get(each, entry)
            clause = None if is_slot(value) else _clause(read_value(value, f"{cls.__qualname__}.{each}"))
            if not isinstance(value, type) and not is_fixed(type(value)):
                held.append(value)                            # with properties of its own
        if clause is not None:
            return clause
    return next((clause for value in held if (clause := _found(value, names, looked_at)) is not None), None)


def _clause(reading: Reading) -> str | None:
    if reading.mutable:
        name, kind = reading.mutable[0]
        return f"{name}, a {kind}, which can change in place"
    if reading.of_process:
        name, module = reading.of_process[0]
        return f"{name}, which is not of the program (of {module}) and may be another at each call"
    return None


# --------------------------------------------------------------------------------------------------
# Which fields of a component are runtime by their annotation: `Array` and `Scalar`.

if typing.TYPE_CHECKING:                # to a type checker they are what they hold: anything number-like
    class Array(typing.Protocol):
        """An array of any library, and what it is in device code."""

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> Any: ...
        def __getitem__(self, key: Any, /) -> Any: ...
        def __setitem__(self, key: Any, value: Any, /) -> None: ...

    Scalar = Any
else:
    class Array:
        """Annotation of a runtime array field: a CuPy array, PyTorch tensor, NumPy array (emulated), ..."""

    class Scalar:
        """Annotation of a runtime scalar field: a number. Python numbers are weak (NEP 50), NumPy scalars keep their
        type."""


def annotated(cls: type) -> dict[str, Any]:
    """Fields whose annotation says that they are runtime."""
    return _annotated(cls, class_version[0])


@lru_cache(maxsize=4096)
def _annotated(cls: type, _version: int) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls)
    except Exception:                     # names that only a type checker can see: read the text of the annotation
        hints = {}
        for base in reversed(cls.__mro__):
            for name, text in getattr(base, "__annotations__", {}).items():
                last = str(text).rpartition(".")[2]
                hints[name] = {"Array": Array, "Scalar": Scalar}.get(last)
    out = {}
    for name, hint in hints.items():
        kinds = set(typing.get_args(hint)) | {hint}
        if Array in kinds:
            out[name] = Array
        elif Scalar in kinds:
            out[name] = Scalar
    return out
