"""Errors of user code inside a kernel, during in the user's terms."""

from __future__ import annotations

import contextlib
import re
from typing import Any, NamedTuple

# --------------------------------------------------------------------------------------------------
# What Numba says of a form that types cannot describe, in words that say what to write instead.

class Saying(NamedTuple):
    """A pattern in Numba's text; ``words`` take its groups."""

    pattern: str
    words: str


_TUPLE = r"(?:Uni)?Tuple\(.*\)|\w+\(.* x \d+\)|\w+\(.*\)"
_CHOSEN = "which function is called is decided at run time, and device code has no pointers to functions; "
_SAYINGS = (
    Saying(r"Cannot unify (?:device\(|Function\(|closure |Function<)",
           _CHOSEN + "call each where it is chosen: f(x) if c else g(x)"),
    Saying(r"Cannot cast type\(CUDADispatcher", _CHOSEN + "write one function, with the condition in it"),
    Saying(r"Unknown attribute 'astype' of type (.*)", "a {0} has no astype; write np.float16(x) or its like"),
    Saying(r"Cannot unify dtype\(", "which type is converted to is decided at run time; convert on each way"),
    Saying(r"getitem\((.*), slice",
           "a slice of {0} by what is known at run time alone, and a tuple's length is part of its type; slice by a literal "
           "or a static field, or take one value: t[i]"),
    Saying(rf"getitem\(((?:{_TUPLE})), [^)]*\)",
           "which value of {0} is taken is decided at run time, and they are of several types; convert them to one, or take "
           "each where it is chosen: t[0] if i == 0 else t[1]"),
    Saying(r"Invalid use of getiter with parameters \((.*)\)$",
           "a loop over {0}, whose values are of several types; convert them to one, or write the body once for each"),
    Saying(r"signature: >>> (enumerate|zip)\((.*)\) No match",
           "{0} of {1}, of which one is no tuple of one type; convert its values to one, or write the body once for each"),
    Saying(r"found for signature: >>> (.*?\)) (?:No match|Rejected).* specific error: (?:\w+Error: )?(\S.*)$",
           "{0} has no device code: {1}"),
    Saying(r"found for signature: >>> ((?!\w*(?:getitem|setitem))\w+\(.*?View\(.*?\)) (?:No match|Rejected|Operator|Type)",
           "{0} has no device code; take an element of the array: x[n], or x[()] of one without dimensions"),
    Saying(r"found for signature: >>> (.*?\)) (?:No match|Rejected|Operator|Type)", "{0} has no device code"),
    Saying(rf"Cannot unify ({_TUPLE}) and ({_TUPLE}) for '",
           "it is {0} on one way and {1} on another; give it as many values, of the same types, on every way"),
    Saying(r"Cannot unify (.*) and (.*) for '",
           "it is {0} on one way and {1} on another; convert one of them, so that it has one type"),
    Saying(r"Can't unify return type from the following types: (.*?)(?: Return of:|$)",
           "it returns one of several types ({0}); return the same on every way"),
)


def in_words(text: str) -> str:
    """A message of Numba's in gemmkit's words; itself where there are none.

    >>> in_words("Cannot unify UniTuple(float32 x 1) and UniTuple(float32 x 4) for 't', defined at a (6)").split("; ")[0]
    'it is UniTuple(float32 x 1) on one way and UniTuple(float32 x 4) on another'
    """
    for pattern, words in _SAYINGS:
        found = re.search(pattern, text)
        if found:
            return words.format(*found.groups())
    return text


class ComponentError(TypeError):
    """A component's method cannot be compiled; the message names its file, line and what was wrong there."""


class ConfigError(ValueError):
    """A configuration that no kernel can carry out; the message names the field, its value and the rule."""


def changeable(what: str, kind: str) -> str:
    """Why device code cannot refer to what can change in place, and what would do."""
    return (f"{what} is a {kind}, which can change in place while the kernel keeps the old value; use a tuple or an Enum "
            "for a constant, and a gk.Array field for an array, or capture it in the function that you give to the "
            "component")


def line_of(function: Any, name: str) -> int:
    """The first line of a function that looks ``name`` up; the function's first where none does."""
    import dis

    first = line = int(function.__code__.co_firstlineno)
    for instruction in dis.get_instructions(function.__code__):
        begun: Any = getattr(instruction, "line_number", instruction.starts_line)          # from Python 3.13 on, and before
        line = begun or line
        if instruction.argval == name:
            return line
    return first


def explain(function: Any, args: tuple, error: Exception) -> ComponentError:
    """``error``, raised by Numba while it compiled ``function`` for the argument types, with the user's place first."""
    filename = function.__code__.co_filename
    line = _line(filename, error) or function.__code__.co_firstlineno
    kinds = ", ".join(str(a) for a in args)
    return refused(function, line, f"its argument types are ({kinds})\n  {in_words(_first_line(str(error)))}")


def _plain(text: str) -> str:
    """Text without the colours that Numba gives it where colorama is installed."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def place_of(function: Any) -> str:
    """Where a function is written, in two lines of an error's text; nothing for what has no code of its own."""
    import linecache

    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    if code is None:
        return ""
    line = code.co_firstlineno
    source = linecache.getline(code.co_filename, line).strip()
    return f'  File "{code.co_filename}", line {line}\n    {source}\n'


def _line(filename: str, error: Exception) -> int | None:
    """The line of the user's file where Numba met the error: by the error itself, by its text, or by where Numba stood."""
    loc = getattr(error, "loc", None)
    if loc is None or loc.filename != filename:
        during = re.search(rf"^During: typing of .* at {re.escape(filename)} \((\d+)\)$", _plain(str(error)), re.MULTILINE)
        if during:
            return int(during[1])
        loc = _stood_at(error)
    return int(loc.line) if loc is not None and loc.filename == filename else None


def _stood_at(error: Exception) -> Any:
    """Where in the function Numba stood: an error of numba.core's types does not say, but its type inference knows."""
    trace, found = error.__traceback__, None
    while trace is not None:
        with contextlib.suppress(TypeError):                   # of a stand-in for a run-time field, which refuses any use
            found = getattr(trace.tb_frame.f_locals.get("self"), "loc", None) or found
        trace = trace.tb_next
    return found if hasattr(found, "filename") and hasattr(found, "line") else None


def _first_line(text: str) -> str:
    """What Numba says first, up to the source lines that it shows below."""
    lines = [line.strip() for line in _plain(text).splitlines() if line.strip()]
    skip = ("Failed in", "During:", "<source", "- Resolution", "- Of which", "With argument", "Overload", "There are")
    useful: list[str] = []
    for line in lines:
        if line.startswith("File ") and useful:
            break
        if not line.startswith(("File ", *skip)):
            useful.append(line)
    return " ".join(useful[:4]) if useful else (lines[0] if lines else "unknown reason")


def refused(function: Any, line: int, reason: str) -> ComponentError:
    """What a function contains in this line has no device code; in the form of `explain`."""
    return refused_at(function.__qualname__, function.__code__.co_filename, line, reason)


def refused_at(name: str, filename: str, line: int, reason: str) -> ComponentError:
    import linecache

    source = linecache.getline(filename, line).strip()
    return ComponentError(f'{name} cannot be compiled as device code\n  File "{filename}", line {line}\n    {source}\n'
                          f"  {reason}")
