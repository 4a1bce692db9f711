"""Errors of user code inside a kernel, told in the user's terms."""

from __future__ import annotations

import re
from typing import Any


class ComponentError(TypeError):
    """A component's method cannot be compiled; the message names its file, line and what was wrong there."""


def refuse(function: Any, args: tuple, reason: str, name: str | None = None) -> ComponentError:
    """A ComponentError for a fault of the user's ``function``, at the first line that looks ``name`` up, if that is said."""
    import dis

    line = function.__code__.co_firstlineno
    if name is not None:
        for instruction in dis.get_instructions(function.__code__):
            line = (instruction.starts_line if type(instruction.starts_line) is int else
                    getattr(instruction, "line_number", None)) or line
            if instruction.argval == name:
                break
    return _error(function, args, line, reason)


def explain(function: Any, args: tuple, error: Exception) -> ComponentError:
    """``error``, raised by Numba while it compiled ``function`` for the argument types, with the user's place first."""
    filename = function.__code__.co_filename
    return _error(function, args, _line(filename, error) or function.__code__.co_firstlineno, _first_line(str(error)))


def _error(function: Any, args: tuple, line: int, reason: str) -> ComponentError:
    import linecache

    filename = function.__code__.co_filename
    source = linecache.getline(filename, line).strip()
    kinds = ", ".join(str(a) for a in args)
    return ComponentError(
        f'{function.__qualname__} cannot be compiled as device code\n  File "{filename}", line {line}\n    {source}\n'
        + (f"  with arguments ({kinds})\n" if args else "") + f"  {reason}")


def _plain(text: str) -> str:
    """Text without the colours that Numba gives it where colorama is installed."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _line(filename: str, error: Exception) -> int | None:
    """The line of the user's file where Numba met the error: by the error itself, by its text, or by where Numba stood."""
    loc = getattr(error, "loc", None)
    if loc is None or loc.filename != filename:
        told = re.search(rf"^During: typing of .* at {re.escape(filename)} \((\d+)\)$", _plain(str(error)), re.MULTILINE)
        if told:
            return int(told[1])
        loc = _stood_at(error)
    return int(loc.line) if loc is not None and loc.filename == filename else None


def _stood_at(error: Exception) -> Any:
    """Where in the function Numba stood: an error of numba.core's types does not say, but its type inference knows."""
    trace, found = error.__traceback__, None
    while trace is not None:
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
