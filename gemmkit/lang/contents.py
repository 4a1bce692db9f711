"""What a function's bytecode contains: what has no device code, the names that it reads, and how it ends.

A function is looked at as written, whatever it is called with: `gemmkit.lang.dialect` says what becomes of it.
"""

from __future__ import annotations

import dataclasses
import inspect
from types import CodeType
from typing import NamedTuple

from gemmkit.lang.bytecode import Step, region, steps_of

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


def _asserted(steps: list[Step]) -> set[int]:
    """The steps that make and raise the errors of assertions: what stands behind a test that jumps over them."""
    out: set[int] = set()
    for n, step in enumerate(steps):
        if step.name == "LOAD_ASSERTION_ERROR" and n and "JUMP" in steps[n - 1].name and not steps[n - 1].jumps:
            last = next(k for k in range(n, len(steps)) if steps[k].name == "RAISE_VARARGS")
            out.update(range(n, last + 1))
    return out


def _tuples(steps: list[Step]) -> set[int]:
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


def _constant_fault(steps: list[Step], n: int) -> str | None:
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


def _form_fault(steps: list[Step], n: int, names: dict[int, Name]) -> str | None:
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


def _names(steps: list[Step]) -> dict[int, Name]:
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


def _nested(step: Step, out: Contents) -> None:
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


def _returns(steps: list[Step], names: dict[int, Name], out: Contents) -> None:
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


def _callee(steps: list[Step], call: int) -> int:
    """The step that puts the function of a call on the stack."""
    base = steps[call].after - 1
    start = next((k for k in range(call - 1, -1, -1) if steps[k].before == base), call)
    return start + 1 if steps[start].name == "PUSH_NULL" else start
