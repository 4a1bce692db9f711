"""Errors of user code inside a kernel, told in the user's terms."""

from __future__ import annotations

from typing import Any


class ComponentError(TypeError):
    """A component's method cannot be compiled; the message names its file, line and what was wrong there."""


def explain(function: Any, args: tuple, error: Exception) -> ComponentError:
    """``error``, raised by Numba while it compiled ``function`` for the argument types, with the user's place first."""
    code = function.__code__
    where = f'{code.co_filename}:{code.co_firstlineno}'
    loc = getattr(error, "loc", None) or _stood_at(error)
    if loc is not None and loc.filename == code.co_filename:
        where = f"{loc.filename}:{loc.line}"
    import linecache

    filename, _, line = where.rpartition(":")
    source = linecache.getline(filename, int(line)).strip()
    kinds = ", ".join(str(a) for a in args)
    reason = _first_line(str(error))
    return ComponentError(
        f'{function.__qualname__} cannot be compiled as device code\n  File "{filename}", line {line}\n    {source}\n'
        f"  with arguments ({kinds})\n  {reason}")


def _stood_at(error: Exception) -> Any:
    """Where in the function Numba stood: an error of numba.core's types does not say, but its type inference knows."""
    trace, found = error.__traceback__, None
    while trace is not None:
        found = getattr(trace.tb_frame.f_locals.get("self"), "loc", None) or found
        trace = trace.tb_next
    return found if hasattr(found, "filename") and hasattr(found, "line") else None


def _first_line(text: str) -> str:
    """What Numba says first, up to the source lines that it shows below."""
    import re

    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    skip = ("Failed in", "During:", "<source", "- Resolution", "- Of which", "With argument", "Overload", "There are")
    useful: list[str] = []
    for line in lines:
        if line.startswith("File ") and useful:
            break
        if not line.startswith(("File ", *skip)):
            useful.append(line)
    return " ".join(useful[:4]) if useful else (lines[0] if lines else "unknown reason")
