"""What device code may contain: one check for the emulator and for the compiler, before anything runs or is compiled.

A GPU has no exceptions, no heap and no Python: `raise` would end a thread early, its results missing and its barriers
skipped. What a function contains is read from its bytecode, which lambdas and cells of notebooks have, too. `check` looks at
a component's device methods (`device_methods` of its class), the functions in its fields, and all that these call.
gemmkit's own functions and Numba's are not looked at.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import inspect
import math
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from gemmkit.lang import number_rules
from gemmkit.lang.errors import changeable, line_of, refused
from gemmkit.lang.numba_hooks import FunctionPass, StateDict, register_pass, types
from gemmkit.lang.numba_hooks import numba_ir as ir
from gemmkit.lang.references import is_fixed, is_library

# --------------------------------------------------------------------------------------------------
# A function's bytecode as steps: with the source line, and the height of the stack before and after each.
#
# Lambdas, cells of notebooks and strings given to ``exec`` have bytecode where they have no source. Opcodes are known by
# their names, those of Python 3.10 to 3.13.

_JUMPS = {*dis.hasjrel, *dis.hasjabs, *getattr(dis, "hasjump", ())}
_ALWAYS = {"JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_NOTHING = {"CACHE", "EXTENDED_ARG", "NOP", "RESUME"}
_TUPLE_OF_LIST = 6                        # CALL_INTRINSIC_1's number of what was LIST_TO_TUPLE until 3.11


class BytecodeStep(NamedTuple):
    """One instruction. ``value`` is its argument as `dis` resolves it: a name, a constant, the offset of a jump."""

    name: str
    value: Any
    line: int
    offset: int
    before: int
    after: int

    @property
    def jumps(self) -> bool:
        return self.name in _ALWAYS

    @property
    def makes_tuple(self) -> bool:
        """Whether it turns the list on top of the stack into a tuple: ``(*a, b)``, ``f(a, *b)``."""
        return self.name == "LIST_TO_TUPLE" or (self.name == "CALL_INTRINSIC_1" and self.value == _TUPLE_OF_LIST)


def steps_of(code: CodeType) -> list[BytecodeStep]:
    """The instructions of a code object, without those of its nested functions."""
    heights: dict[int, int] = {}          # at the targets of jumps
    out: list[BytecodeStep] = []
    height, line = 0, code.co_firstlineno
    for i in dis.get_instructions(code):
        positions: Any = getattr(i, "positions", None)
        line = (positions.lineno if positions is not None else i.starts_line) or line
        before = heights.get(i.offset, height)
        if i.opname in _NOTHING:
            height = before
            continue
        height = before + dis.stack_effect(i.opcode, i.arg, jump=False)
        if i.opcode in _JUMPS:
            heights.setdefault(i.argval, before + dis.stack_effect(i.opcode, i.arg, jump=True))
        elif i.opname in _ENDS:
            height = 0
        out.append(BytecodeStep(i.opname, i.arg if i.opname == "CALL_INTRINSIC_1" else i.argval, line, i.offset, before,
                                height))
    return out


def region(steps: list[BytecodeStep], start: int) -> int:
    """The step at which what is put on the stack at ``start`` has become one value: of a function, its call."""
    base = steps[start].before
    for n in range(start + 1, len(steps)):
        if steps[n].after <= base + 1 and steps[n].name.startswith("CALL"):
            return n
    return start


# --------------------------------------------------------------------------------------------------
# What a function's bytecode contains: what has no device code, the names that it reads, and how it ends.
#
# A function is looked at as written, whatever it is called with: `gemmkit.lang.source` says what becomes of it.

RAISE = ("raise ends a thread of a GPU early: its results are missing, and others wait for it; return a value that says so "
         "(math.nan), or check on the host, before the call")
ASSERT = "this assertion always fails, which ends a thread of a GPU early; return a value here"
TRY = "try has no device code, for nothing is raised there; ask with if before"
WITH = "with has no device code"
GENERATOR = "generators and coroutines have no device code; write a loop"
LIST = "lists have no device code; write a tuple, or a loop that sums up"
DICT = "dicts have no device code; write a tuple, or arguments by name"
SET = "sets have no device code; write a tuple: x in (1, 2)"
STRING = "strings have no device code but to be compared; for debugging in the emulator, print them"
GLOBAL = "device code cannot bind names outside the function; return the value"
DELETE = "del has no device code; let the name be"
IMPORT = "device code cannot import; import at the top of the file"
ATTRIBUTE = "device code cannot change attributes; return the value, or write to an array"
UNPACK = "a starred name in an assignment is a list, which has no device code; name every value, or take a slice"
MATCH = "patterns of several parts have no device code; write if and comparisons"
CLASS = "device code cannot define classes; define it outside the function"
NONE = "a name that is None on some ways has no type in device code; let it begin with a value"
STARS = "it takes any number of arguments; device code needs a fixed number"
WALRUS = "a name bound within an expression (y := x) or a pattern has no device code; assign it on a line of its own"
IN_RANGE = "x in range(...) has no device code; write a <= x < b"
GROWING = "+= of tuples has no device code; write y = (*y, x), or a loop over numbers"
TUPLE_OF = "tuple() takes a tuple in device code; write its values"
REPLACE = "named tuples are not changed in device code; make a new one"
TEXT = "device code makes no numbers of strings; write the number, or math.inf, math.nan"
NOTHING = "it ends here without a value, and returns one elsewhere; return a value on every way"
_STEPS = {
    "RAISE_VARARGS": RAISE, "SETUP_FINALLY": TRY, "SETUP_EXCEPT": TRY, "PUSH_EXC_INFO": TRY, "CHECK_EXC_MATCH": TRY,
    "SETUP_WITH": WITH, "BEFORE_WITH": WITH, "YIELD_VALUE": GENERATOR, "YIELD_FROM": GENERATOR,
    "GET_YIELD_FROM_ITER": GENERATOR, "GET_AWAITABLE": GENERATOR, "GET_AITER": GENERATOR,
    "SETUP_ASYNC_WITH": GENERATOR, "BEFORE_ASYNC_WITH": GENERATOR, "BUILD_LIST": LIST, "LIST_APPEND": LIST,
    "LIST_EXTEND": LIST, "BUILD_MAP": DICT, "BUILD_CONST_KEY_MAP": DICT, "MAP_ADD": DICT, "DICT_MERGE": DICT,
    "DICT_UPDATE": DICT, "BUILD_SET": SET, "SET_ADD": SET, "SET_UPDATE": SET, "FORMAT_VALUE": STRING,
    "FORMAT_SIMPLE": STRING, "FORMAT_WITH_SPEC": STRING, "CONVERT_VALUE": STRING, "BUILD_STRING": STRING,
    "STORE_GLOBAL": GLOBAL,
    "DELETE_FAST": DELETE, "DELETE_DEREF": DELETE, "DELETE_GLOBAL": DELETE, "DELETE_NAME": DELETE, "DELETE_ATTR": DELETE,
    "DELETE_SUBSCR": DELETE, "IMPORT_NAME": IMPORT, "STORE_ATTR": ATTRIBUTE, "UNPACK_EX": UNPACK, "MATCH_SEQUENCE": MATCH,
    "MATCH_MAPPING": MATCH, "MATCH_CLASS": MATCH, "LOAD_BUILD_CLASS": CLASS,
}
_COMPREHENSIONS = {"<listcomp>": LIST, "<genexpr>": GENERATOR, "<setcomp>": SET, "<dictcomp>": DICT}
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE

_BY_KEYWORD = {"KW_NAMES", "CALL_KW", "CALL_FUNCTION_KW"}
_COPIES = ("COPY", "DUP_TOP")
_INPLACE_ADD = 13                      # BINARY_OP's number of +=


class Fault(NamedTuple):
    """What may not be there; ``allowed`` where the emulator takes it (in what is printed)."""

    line: int
    reason: str
    allowed: bool = False


class Name(NamedTuple):
    """A value that the code reads: ``root`` is a global, a captured name or a parameter, ``path`` attributes of it."""

    line: int
    kind: str                              # "global", "free" or "local"
    root: str
    path: tuple[str, ...]
    allowed: bool

    def __str__(self) -> str:
        return ".".join((self.root, *self.path))


@dataclasses.dataclass
class Contents:
    """What a code object contains. ``calls`` are the names whose results it returns, ``by_keyword`` those called with
    arguments by name, ``nothing`` the lines where it ends without a value, ``ends`` whether it ends at all other than by an
    exception."""

    faults: list[Fault]
    names: list[Name]
    calls: list[Name]
    by_keyword: list[Name]
    gives: bool
    nothing: list[int]
    ends: bool


_known: dict[int, tuple[CodeType, Contents]] = {}           # by id: codes that differ in their file alone are equal
_MOST = 4096


def contents(code: CodeType) -> Contents:
    """What a code object contains, kept: reading it takes some hundred microseconds."""
    found = _known.get(id(code))
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[id(code)] = code, _read(code)
    return found[1]


def _read(code: CodeType) -> Contents:
    steps = steps_of(code)
    allowed, names = _asserted(steps), _names(steps)
    printed: set[int] = set()
    for n, name in names.items():
        if name.kind == "global" and name.root == "print" and not name.path:
            printed.update(range(n, region(steps, n) + 1))
    out = Contents([], [], [], [], False, [], any(s.name in ("RETURN_VALUE", "RETURN_CONST") for s in steps))
    if code.co_flags & _GENERATORS:
        line = next((s.line for s in steps if s.name.startswith(("YIELD", "GET_A"))), code.co_firstlineno)
        out.faults.append(Fault(line, GENERATOR))
    tuples = _tuples(steps)
    for n, step in enumerate(steps):
        if n in allowed:
            continue
        reason = _STEPS.get(step.name) or _constant_fault(steps, n) or _form_fault(steps, n, names)
        if step.name == "STORE_DEREF" and step.value in code.co_freevars:
            reason = GLOBAL
        if step.name == "RAISE_VARARGS":
            error = next((other for other in reversed(steps[:n]) if other.before < step.before), step)
            reason = ASSERT if error.name == "LOAD_ASSERTION_ERROR" else RAISE
        if reason is not None and n not in tuples:
            out.faults.append(Fault(step.line, reason, n in printed))
        if isinstance(step.value, CodeType):
            _nested(step, out)
        if n in names:
            out.names.append(names[n]._replace(allowed=n in printed))
        if step.name in _BY_KEYWORD:
            call = next(k for k in range(n, len(steps)) if steps[k].name.startswith("CALL"))
            called = names.get(_callee(steps, call))
            out.by_keyword += [] if called is None else [called._replace(line=step.line)]
    _returns(steps, names, out)
    out.faults.sort(key=lambda fault: fault.line)
    return out


def _asserted(steps: list[BytecodeStep]) -> set[int]:
    """The steps that make and raise the errors of assertions: what stands behind a test that jumps over them."""
    out: set[int] = set()
    for n, step in enumerate(steps):
        if step.name == "LOAD_ASSERTION_ERROR" and n and "JUMP" in steps[n - 1].name and not steps[n - 1].jumps:
            last = next(k for k in range(n, len(steps)) if steps[k].name == "RAISE_VARARGS")
            out.update(range(n, last + 1))
    return out


def _tuples(steps: list[BytecodeStep]) -> set[int]:
    """The steps of lists that become tuples at once: ``(*a, b)``."""
    out: set[int] = set()
    for n, step in enumerate(steps):
        if step.name == "BUILD_LIST":
            for k in range(n + 1, len(steps)):
                if steps[k].after < step.after:
                    break
                if steps[k].makes_tuple and steps[k].before == step.after:
                    out.update(k for k in range(n, k + 1) if steps[k].name in ("LIST_APPEND", "LIST_EXTEND") or k == n)
                    break
    return out


def _constant_fault(steps: list[BytecodeStep], n: int) -> str | None:
    """What is wrong with a constant: strings may be compared, and be arguments."""
    value, after = steps[n].value, steps[n].after
    if steps[n].name not in ("LOAD_CONST", "RETURN_CONST"):
        return None
    if value is None and steps[n].name == "LOAD_CONST" and steps[n + 1].name.startswith("STORE_"):
        return NONE
    if isinstance(value, frozenset):
        return SET
    if not isinstance(value, (str, bytes)):
        return None
    if steps[n].name == "RETURN_CONST" or steps[n + 1].name in ("LOAD_ATTR", "LOAD_METHOD", "RETURN_VALUE", "GET_ITER"):
        return STRING
    user = next((s for s in steps[n + 1:] if s.after <= after), None)
    return STRING if user is not None and user.name.startswith(("BINARY", "INPLACE")) else None


def _form_fault(steps: list[BytecodeStep], n: int, names: dict[int, Name]) -> str | None:
    """What is wrong with an expression that Python computes, and that types do not have."""
    step, last = steps[n], steps[n - 1]
    if step.name in ("LOAD_METHOD", "LOAD_ATTR") and step.value in ("_replace", "_asdict"):
        return REPLACE
    if step.name.startswith("STORE_") and step.name != "STORE_FAST_STORE_FAST" and last.name in _COPIES:
        return None if steps[n + 1].name.startswith("STORE_") or steps[n + 1].name in _COPIES else WALRUS
    if step.name in ("BINARY_OP", "INPLACE_ADD") and last.name == "BUILD_TUPLE" and step.value in (_INPLACE_ADD, None):
        return GROWING
    given = names.get(_callee(steps, n - 1)) if last.name.startswith("CALL") else None
    if step.name == "CONTAINS_OP" and given is not None and str(given) == "range":
        return IN_RANGE
    if step.name.startswith("CALL") and n and step.after < step.before:
        name = str(names.get(_callee(steps, n), ""))
        before = next((k for k in range(n - 1, 0, -1) if steps[k].name != "PRECALL"), 0)
        argument = steps[before]
        is_text = argument.name == "LOAD_CONST" and isinstance(argument.value, (str, bytes))
        if name in ("int", "float", "complex") and is_text:
            return TEXT
        made = names.get(_callee(steps, before)) if argument.name.startswith("CALL") else None
        if name == "tuple" and made is not None and str(made) in ("enumerate", "range", "zip"):
            return TUPLE_OF
    return None


def _names(steps: list[BytecodeStep]) -> dict[int, Name]:
    """The names that are read, each by its step."""
    out: dict[int, Name] = {}
    for n, step in enumerate(steps):
        if step.name in ("LOAD_GLOBAL", "LOAD_NAME"):
            kind = "global"
        elif step.name in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            kind = "free"
        elif step.name.startswith("LOAD_FAST") or step.name == "STORE_FAST_LOAD_FAST":
            kind = "local"
        else:
            continue
        root = step.value[-1] if isinstance(step.value, tuple) else step.value
        path = []
        for after in steps[n + 1:]:
            if after.name not in ("LOAD_ATTR", "LOAD_METHOD"):
                break
            path.append(after.value)
        out[n] = Name(step.line, kind, root, tuple(path), False)
    return out


def _nested(step: BytecodeStep, out: Contents) -> None:
    """A function in the function: Numba inlines it where it is called."""
    inner = step.value
    if inner.co_name in _COMPREHENSIONS:
        out.faults.append(Fault(step.line, _COMPREHENSIONS[inner.co_name]))
        return
    found = contents(inner)
    out.faults += found.faults
    if inner.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        out.faults.append(Fault(inner.co_firstlineno, STARS))
    if inner.co_name in inner.co_freevars:
        again = next((name.line for name in found.names if name.root == inner.co_name), inner.co_firstlineno)
        out.faults.append(Fault(again, f"{inner.co_name} calls itself, which device code cannot; write a loop"))
    if found.gives and found.nothing:
        out.faults.append(Fault(found.nothing[0], NOTHING))
    out.names += [name for name in found.names if name.kind != "local"]


def _returns(steps: list[BytecodeStep], names: dict[int, Name], out: Contents) -> None:
    """Where the code ends, and whether with a value."""
    for n, step in enumerate(steps):
        if step.name == "RETURN_CONST":
            _given(step.value is not None, step.line, out)
        if step.name != "RETURN_VALUE":
            continue
        jumps = [k for k, other in enumerate(steps) if other.jumps and other.value == step.offset]
        for last in [n - 1, *(k - 1 for k in jumps)]:
            given = steps[last]
            called = names.get(_callee(steps, last)) if given.name.startswith("CALL") else None
            if called is not None and called.kind != "free":
                out.calls.append(called._replace(line=given.line))
            else:
                _given(not (given.name == "LOAD_CONST" and given.value is None), given.line, out)


def _given(value: bool, line: int, out: Contents) -> None:
    if value:
        out.gives = True
    else:
        out.nothing.append(line)


def _callee(steps: list[BytecodeStep], call: int) -> int:
    """The step that puts the function of a call on the stack."""
    base = steps[call].after - 1
    start = next((k for k in range(call - 1, -1, -1) if steps[k].before == base), call)
    return start + 1 if steps[start].name == "PUSH_NULL" else start


BREAKPOINT = "breakpoint() stops in the emulator alone (with gemmkit.emulate(): ...); take it out to compile"
MAYBE = "what it returns is None on some ways; give it a value on every way"
NO_VALUE = "it returns nothing, and a value is needed; return one"

# Python's own functions that both worlds have. (isinstance is not among them: np.float32 is no float in Python.)
_BUILTINS = {"abs", "bool", "complex", "divmod", "enumerate", "float", "int", "len", "max", "min", "pow", "print", "range",
             "round", "slice", "sum", "tuple", "zip"}
_NO_MATH = {"cbrt", "comb", "dist", "exp2", "factorial", "fma", "frexp", "fsum", "gcd", "isclose", "isqrt", "lcm", "modf",
            "nextafter", "perm", "prod", "remainder", "sumprod", "ulp"}
_NUMPY = {"where": "x if condition else y", "maximum": "max(x, y)", "minimum": "min(x, y)", "fmax": "max(x, y)",
          "fmin": "min(x, y)", "clip": "min(max(x, low), high)", "absolute": "abs(x)", "abs": "abs(x)", "power": "x ** y",
          "round": "round(x)", "rint": "round(x)", "sign": "math.copysign(1, x)", "square": "x * x",
          "arcsin": "math.asin", "arccos": "math.acos", "arctan": "math.atan", "arctan2": "math.atan2",
          "arcsinh": "math.asinh", "arccosh": "math.acosh", "arctanh": "math.atanh", "dot": "a loop", "sum": "a loop"}


# -- what a function reaches ------------------------------------------------------------------------------------------

_MISSING = object()


def plain(function: Any) -> FunctionType | None:
    """The Python function that a device function or a static method is."""
    if type(function).__name__ == "DeviceFunction":
        function = function.function
    function = function.__func__ if isinstance(function, staticmethod) else function
    return function if isinstance(function, FunctionType) else None


class SourceWalk:
    """One look at a component, or at a function, and all that it reaches. ``compiled`` is stricter in what is printed."""

    def __init__(self, compiled: bool):
        self.compiled = compiled
        self.seen: dict[Any, bool] = {}                    # whether a function gives a value
        self.components: set[int] = set()
        self.within: list[Any] = []

    def component(self, component: Any) -> None:
        """Raise ComponentError for what a component, or one in its fields, has in its device code."""
        if id(component) in self.components:
            return
        self.components.add(id(component))
        cls: Any = type(component)
        if not _is_shipped(cls):
            for name in cls.device_methods:
                method = plain(inspect.getattr_static(cls, name, None))
                if method is not None and not is_library(method) and contents(method.__code__).ends:
                    self.function(method, component, name not in cls.without_value)
        for field in dataclasses.fields(component) if dataclasses.is_dataclass(component) else ():
            value = getattr(component, field.name, None)
            for part in value if type(value) is tuple else (value,):
                if is_component(part):
                    self.component(part)
                elif plain(part) is not None:
                    self.function(plain(part), None, _is_shipped(cls) and field.name not in cls.without_value)

    def function(self, function: Any, owner: Any = None, needed: bool = False) -> bool:
        """Check a function, a method of ``owner`` if it has one; returns whether it gives a value."""
        if is_library(function):
            return True
        key = function, id(owner)
        if key in self.within:
            raise refused(function, line_of(function, function.__name__), f"{function.__qualname__} calls itself, which "
                          "device code cannot; write a loop")
        if key not in self.seen:
            self.within.append(key)
            self.seen[key] = self._look(function, owner)
            self.within.pop()
        if needed and not self.seen[key]:
            found = contents(function.__code__)
            line = [*found.nothing, *(call.line for call in found.calls), function.__code__.co_firstlineno][0]
            raise refused(function, line, NO_VALUE)
        return self.seen[key]

    def _look(self, function: FunctionType, owner: Any) -> bool:
        code = function.__code__
        found = contents(code)
        for fault in found.faults:
            if self.compiled or not fault.allowed:
                raise refused(function, fault.line, fault.reason)
        if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            raise refused(function, code.co_firstlineno, STARS)
        for name in found.names:
            reason = self._fault(function, name, owner) if self.compiled or not name.allowed else None
            if reason is not None:
                raise refused(function, name.line, reason)
        for name in found.by_keyword:
            called = resolve(function, name, owner)[0]
            if called is not print and called is getattr(builtins, name.root, None):
                raise refused(function, name.line, f"{name} takes no arguments by name in device code; write them by place")
        gives, nothing = found.gives, list(found.nothing)
        for call in found.calls:
            if self._gives(resolve(function, call, owner)):
                gives = True
            else:
                nothing.append(call.line)
        if gives and nothing:
            raise refused(function, min(nothing), NOTHING)
        return gives or not nothing

    def _gives(self, found: tuple[Any, Any]) -> bool:
        """Whether a call of this gives a value, as far as it is known."""
        value, owner = found
        called = plain(value)
        return value is not print and (called is None or self.function(called, owner))

    def _fault(self, function: FunctionType, name: Name, owner: Any) -> str | None:
        value, held = resolve(function, name, owner)
        if value is _MISSING:
            return f"name {name.root!r} is not defined" if name.kind == "global" and not name.path else None
        if is_component(value):
            self.component(value)
        called = plain(value)
        if called is not None and not is_numpy(value):
            self.function(called, held)
            return None
        return _value_fault(name, value, self.compiled)


def is_component(value: Any) -> bool:
    return hasattr(type(value), "device_methods")


def is_numpy(value: Any) -> bool:
    """Whether a value is a function of NumPy's."""
    if not callable(value) or isinstance(value, type):
        return False
    holder = value if isinstance(value, (FunctionType, BuiltinFunctionType)) else type(value)
    of_type = getattr(holder, "__module__", "")               # classes may have none
    return str(of_type).partition(".")[0] == "numpy"


def _is_shipped(cls: type) -> bool:
    """Whether a class of components comes with gemmkit, all of it."""
    return is_library(cls)


def resolve(function: FunctionType, name: Name, owner: Any) -> tuple[Any, Any]:
    """What a name is, and the component that it is a method of. Nothing of the user's is executed for it."""
    value: Any = _MISSING
    if name.kind == "global":
        value = function.__globals__.get(name.root, getattr(builtins, name.root, _MISSING))
    elif name.kind == "free" and name.root in function.__code__.co_freevars:
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name.root)]
        try:
            value = cell.cell_contents
        except ValueError:                                 # not bound yet
            return _MISSING, None
    elif name.kind == "local" and owner is not None and name.root == function.__code__.co_varnames[0]:
        value = owner
    held = None
    for attribute in name.path:
        if value is _MISSING:
            break
        held, value = _attribute(value, attribute)
    return value, held


def _attribute(value: Any, name: str) -> tuple[Any, Any]:
    """An attribute of a module, a class or a component, and the component if it is its method."""
    if isinstance(value, ModuleType):
        return None, getattr(value, name, _MISSING)
    if not isinstance(value, type) and not is_component(value):
        return None, _MISSING
    found = inspect.getattr_static(value, name, _MISSING)
    if isinstance(found, (property, cached_property)):
        return None, _MISSING
    is_method = is_component(value) and isinstance(found, FunctionType) and name not in vars(value)
    return value if is_method else None, found


def _value_fault(name: Name, value: Any, compiled: bool) -> str | None:
    """Why device code cannot have this value; None for what it can have, and for what Numba has to judge."""
    if is_numpy(value):
        called = getattr(value, "__name__", name.root)
        better = _NUMPY.get(called, f"math.{called}" if hasattr(math, called) and called not in _NO_MATH else "it "
                            "with functions of math")
        return f"NumPy's function {called} has no device code (np.float32(x) and its like have); write {better}"
    if isinstance(value, (list, dict, set, bytearray)) and name.kind != "local":      # fields: where they are read
        return changeable(str(name), type(value).__name__)
    if value is breakpoint:
        return BREAKPOINT if compiled else None
    if isinstance(value, type):
        return _class_fault(name, value)
    if isinstance(value, BuiltinFunctionType):
        module, called = value.__module__, value.__name__
        if module == "builtins" and called not in _BUILTINS:
            return f"Python's {called} has no device code"
        if module == "math" and called in _NO_MATH:
            return f"math.{called} has no device code"
        if module == "cmath" and called not in number_rules.CMATH:
            return f"cmath.{called} has no device code"
        if module not in ("builtins", "math", "cmath", "_operator") and not is_library(value):
            return f"{name} has no device code; it has the functions of math, and plain functions"
        return None
    if callable(value) and not is_component(value) and not is_library(type(value)):
        return f"{name} is of type {type(value).__name__}, which device code cannot call; write a plain function"
    return None


def _class_fault(name: Name, cls: type) -> str | None:
    if issubclass(cls, np.generic) or is_library(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return None
    if cls.__module__ == "builtins" and cls.__name__ in _BUILTINS:
        return None
    reasons: dict[type, str] = {list: LIST, dict: DICT, set: SET, frozenset: SET, str: STRING, bytes: STRING}
    return reasons.get(cls, f"{name} makes objects of class {cls.__name__}, which has no device code; a tuple or a "
                       "NamedTuple has")


# -- the two worlds ---------------------------------------------------------------------------------------------------

def check(component: Any) -> None:
    """In the emulator, before it runs: raise ComponentError for what a component's device code may not contain."""
    SourceWalk(compiled=False).component(component)


def check_compiled(function: FunctionType, args: tuple) -> None:
    """Before a function is compiled for argument types: the same of it and of the components that it gets."""
    walk = SourceWalk(compiled=True)
    for ty in _component_types(args):
        walk.component(ty.skeleton)
    if not is_library(function):
        owner = getattr(args[0], "skeleton", None) if args else None
        walk.function(function, owner)


def check_result(function: FunctionType, result: Any) -> None:
    """After it is compiled: what may be None is no value (a name that is None on some ways, which only types tell), and an
    integer literal by itself has 64 bits."""
    if isinstance(result, types.Optional):
        raise refused(function, function.__code__.co_firstlineno, MAYBE)
    for ty in result.types if isinstance(result, types.BaseTuple) else (result,):
        if isinstance(ty, types.IntegerLiteral) and not -2**63 <= ty.literal_value < 2**63 and not is_fixed(function):
            raise refused(function, function.__code__.co_firstlineno,
                          f"it returns {ty.literal_value}, which 64 bits do not hold; write a float, or say the type: "
                          f"np.float32({ty.literal_value})")


_checked: set[Any] = set()


def _component_types(args: tuple) -> Iterator[Any]:
    """The types of components among argument types, each once."""
    for ty in args:
        if hasattr(ty, "skeleton") and ty not in _checked:
            yield ty
            _checked.add(ty)


# --------------------------------------------------------------------------------------------------
# The end of a function is in its code once, as it is written.
#
# Python 3.12 and later copy a short end (a call and the return, for example) to every jump that leads there. Threads of a
# warp that take different ways then meet a barrier at different instructions, and one that is ``.aligned`` (`bar.sync`,
# `barrier.cluster`, wgmma's) waits for ever:
#
#     if thread_index() == 0:
#         produce(sizes, map_a, map_b)
#     cluster_barrier()                  # 3.12: one copy for thread 0, one for the other threads of its warp
#
# Copies are known by their places: they are ends of blocks that do the same at the same lines and columns, up to the
# names of intermediate values. All jump to one of them again. What an end takes from before may differ from way to way,
# as in ``return of_warp(found if lane_index() < 8 else identity)``: each way assigns it to one variable, as Python 3.11's
# code does.

class Use(NamedTuple):
    """Where one end takes a variable and the other end another one: an element of an expression of the one's."""

    holder: Any
    key: Any
    ours: Any
    theirs: Any


class Endings(FunctionPass):
    """Joins the copies of a function's end."""

    _name = "gemmkit_endings"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: StateDict) -> bool:
        blocks, place = state.func_ir.blocks, _places(state.func_id.code)
        ends = [label for label, block in blocks.items() if isinstance(block.body[-1], ir.Return)]
        changed = False
        while ends:
            first = ends.pop(0)
            for other in list(ends):
                count, uses = _common(blocks[first].body, blocks[other].body, place)
                if count and any(_calls(statement) for statement in blocks[first].body[-count:]):
                    first = _join(blocks, first, other, count, uses)
                    ends.remove(other)
                    changed = True
        return changed


register_pass(mutates_CFG=True, analysis_only=False)(Endings)


def _calls(statement: ir.Stmt) -> bool:
    """Whether it does more than name a value and return it."""
    if isinstance(statement, ir.Assign):
        return isinstance(statement.value, ir.Expr) and statement.value.op != "cast"
    return not isinstance(statement, ir.Return)


def _places(code: CodeType) -> Callable[[Any], Any]:
    """What tells where in the source a statement is: lines and columns, by the bytecode's offset in an intermediate's name.
    Numba counts offsets from 2 on. Python 3.10 has no columns, and copies nothing."""
    positions = list(code.co_positions()) if hasattr(code, "co_positions") else []

    def place(statement: ir.Stmt) -> Any:
        found = re.match(r"\$(\d+)", statement.target.name) if isinstance(statement, ir.Assign) else None
        at = int(found[1]) // 2 - 1 if found else len(positions)
        return positions[at] if at < len(positions) else statement.loc.line

    return place


def _common(one: list, other: list, place: Callable[[Any], Any]) -> tuple[int, list[Use]]:
    """How many statements at the ends of two blocks do the same, and what of it they take from before that differs."""
    wanted: list[Use] = []             # taken, and not assigned yet
    found, uses = 0, list[Use]()
    for count, (x, y) in enumerate(zip(reversed(one), reversed(other), strict=False), 1):
        if type(x) is not type(y) or (_calls(x) and place(x) != place(y)):       # a return's line is Python's choice
            break
        if isinstance(x, ir.Assign):
            met = [use for use in wanted if x.target.name == use.ours.name or y.target.name == use.theirs.name]
            if not _same_name(x.target, y.target) or any(
                    (use.ours.name, use.theirs.name) != (x.target.name, y.target.name) for use in met):
                break
            wanted = [use for use in wanted if use not in met]
            same = _same(x.value, y.value, wanted, x, "value")
        elif isinstance(x, ir.Return):
            same = _same(x.value, y.value, wanted, x, "value")
        else:
            same = (isinstance(x, (ir.SetItem, ir.StaticSetItem, ir.SetAttr))
                    and all(_same(value, getattr(y, name), wanted, x, name) for name, value in _fields(x)))
        if not same:
            break
        if all(isinstance(use.holder, (dict, list)) for use in wanted):
            found, uses = count, list(wanted)
    return found, uses


def _fields(statement: ir.Stmt) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(statement).items() if name != "loc"]


def _is_intermediate(variable: Any) -> bool:
    return str(variable.name).startswith("$")


def _same_name(x: Any, y: Any) -> bool:
    return (_is_intermediate(x) and _is_intermediate(y)) or x.name == y.name


def _same(x: Any, y: Any, wanted: list[Use], holder: Any, key: Any) -> bool:
    """Whether values are the same if the variables are that they take from before, which are added to ``wanted``."""
    if isinstance(x, ir.Var) and isinstance(y, ir.Var):
        if _is_intermediate(x) or x.name != y.name:
            wanted.append(Use(holder, key, x, y))
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, ir.Expr):
        return x.op == y.op and _same(x._kws, y._kws, wanted, x, "")
    if isinstance(x, (ir.Global, ir.FreeVar)):
        return x.name == y.name and x.value is y.value
    if isinstance(x, ir.Const):
        return type(x.value) is type(y.value) and bool(x.value == y.value)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_same(value, y[name], wanted, x, name) for name, value in x.items())
    if isinstance(x, (tuple, list)):
        return len(x) == len(y) and all(_same(a, b, wanted, x, n) for n, (a, b) in enumerate(zip(x, y, strict=True)))
    return bool(x is y or (isinstance(x, (str, int, bool)) and x == y))


def _join(blocks: dict[int, Any], first: int, other: int, count: int, uses: list[Use]) -> int:
    """The last ``count`` statements of both in one block; returns its label. What differs in its ``uses`` is a variable that
    both assign."""
    label = max(blocks) + 1
    end = blocks[label] = ir.Block(blocks[first].scope, blocks[first].body[-count].loc)
    end.body = blocks[first].body[-count:]
    for block in (blocks[first], blocks[other]):
        at = block.body[-count].loc
        block.body[-count:] = [ir.Jump(label, at)]
    for n, use in enumerate(uses):
        name = f"$end{label}.{n}"
        for block, value in ((blocks[first], use.ours), (blocks[other], use.theirs)):
            at = block.body[-1].loc
            block.body.insert(-1, ir.Assign(value, block.scope.get_or_define(name, at), at))
        use.holder[use.key] = end.scope.get_or_define(name, end.loc)
    return label
