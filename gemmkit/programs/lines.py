"""Errors of programs, with the line of the user's that they are about."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import CodeType
from typing import TypeVar

__all__ = ["line_here", "refused"]

_FOLDER = str(Path(__file__).parent)
_Error = TypeVar("_Error", bound=Exception)


def line_here() -> str:
    """The line of a program that is being executed: ``file:number``. Frames of this folder are not the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename.startswith(_FOLDER) or _is_generated(frame.f_code)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_generated(code: CodeType) -> bool:
    """Whether it is the initialiser that `dataclass` has written."""
    return code.co_filename == "<string>" and code.co_name == "__init__"


def refused(kind: type[_Error], rule: str, line: str = "") -> _Error:
    """An error that says the rule, the place, and what is written there: ``raise refused(ValueError, ...)``."""
    line = line or line_here()
    file, _, number = line.rpartition(":")
    source = linecache.getline(file, int(number)).strip()
    return kind(f"{rule}\n  at {line}" + (f"\n    {source}" if source else ""))
