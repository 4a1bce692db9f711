"""Errors of programs, with the line of the user's that they are about."""

from __future__ import annotations

import linecache
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

_FOLDER = str(Path(__file__).parent)
_Error = TypeVar("_Error", bound=Exception)


@lru_cache(maxsize=4096)
def _is_of_this_folder(file: str) -> bool:
    return file.startswith(_FOLDER)


def is_ours(code: CodeType) -> bool:
    """Whether code is of this folder, or the initialiser that `dataclass` has written."""
    file = code.co_filename
    return _is_of_this_folder(file) or (file == "<string>" and code.co_name == "__init__")


def users_frame() -> FrameType:
    """The frame of the program that is being executed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_ours(frame.f_code):
        frame = frame.f_back
    return frame


def line_here() -> str:
    """The line of a program that is being executed: ``file:number``."""
    frame = users_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def name_here(x: Any) -> str:
    """What the program that is being executed calls a thing, or nothing."""
    frame: FrameType | None = users_frame()
    while frame is not None and not is_ours(frame.f_code):
        name = next((name for name, held in frame.f_locals.items() if held is x), "")
        if name:
            return name
        frame = frame.f_back
    return ""


def refused(kind: type[_Error], rule: str, line: str = "") -> _Error:
    """An error that says the rule, the place, and what is written there: ``raise refused(ValueError, ...)``."""
    line = line or line_here()
    file, _, number = line.rpartition(":")
    source = linecache.getline(file, int(number)).strip()
    found = kind(f"{rule}\n  at {line}" + (f"\n    {source}" if source else ""))
    found.line = line                                  # type: ignore[attr-defined]
    return found


def explained(error: Exception, code: CodeType, arguments: dict[str, Any]) -> Exception:
    """What is raised for an error of a program's code: the error itself if it names its line, or if the code has raised a
    kind of its own; else ValueError or TypeError with the line. ``arguments``: of the program."""
    if hasattr(error, "line") or type(error).__module__ != "builtins":
        return error
    at, trace = f"{code.co_filename}:{code.co_firstlineno}", error.__traceback__
    entered = False
    while trace is not None:
        entered = entered or trace.tb_frame.f_code is code
        if entered and _is_program(trace, code):
            at = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    kind = ValueError if isinstance(error, ValueError) else TypeError
    named = "" if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: "
    return refused(kind, f"{named}{error}{_hint(error, arguments)}", at)


def _is_program(trace: TracebackType, code: CodeType) -> bool:
    """Whether a frame is of the program, or of a function that is written beside it."""
    return trace.tb_frame.f_code is code or trace.tb_frame.f_code.co_filename == code.co_filename


def _hint(error: Exception, arguments: dict[str, Any]) -> str:
    if isinstance(error, UnboundLocalError):
        return "; a cell that rounds add to is made before them: acc = gp.zeros(m, n)"
    if isinstance(error, IndexError):
        return "; an array that a program reads is an argument of it, f(..., x), and x[m, n] a block"
    wrong = [f"{name} is {'None' if x is None else f'of type {type(x).__name__}'}" for name, x in arguments.items()
             if f"{type(x).__name__}' object" in str(error) or f"{type(x).__name__} indices" in str(error)]
    return f"; {' and '.join(wrong)}, and a program's arrays are needed" if wrong else ""
