"""Where in the kernel something happened, noted cheaply and resolved to a line only when it is to be shown.

A site is (code object, instruction offset) of the *kernel line*: the innermost frame that is not machinery
(instruction atoms, device language, this emulator). When that line stands in a user's component, the line of
the template kernel that called it is noted as well.
"""
from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

from greenlet import getcurrent

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Thread

Site = tuple[CodeType, int, CodeType | None, int]

_MACHINERY, _USER, _TEMPLATE = 0, 1, 2
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

#: Path fragments of files that are never a kernel line.
INTERNAL_PATHS: tuple[str, ...] = tuple(
    os.path.join(_ROOT, name) + end for name in ("ptx", "lang", "emulator") for end in (os.sep, ".py"))
#: Path fragments of the template kernels.
TEMPLATE_PATHS: tuple[str, ...] = (os.path.join(_ROOT, "kernels") + os.sep,)

_internal, _template = INTERNAL_PATHS, TEMPLATE_PATHS
_HAS_COPIES = sys.version_info < (3, 11)
_LANGUAGE = os.path.join(_ROOT, "lang") + os.sep
_kinds: dict[str, int] = {}  # by file name, because hashing a code object is slow and a string's hash is kept


def current() -> Thread:
    """The emulated thread that runs now.

    Raises:
        RuntimeError: no kernel is being emulated in this operating-system thread.
    """
    try:
        return getcurrent().thread
    except AttributeError:
        raise RuntimeError("not inside an emulated kernel: device code runs under emulator.machine.launch, "
                           "or compiled on a GPU") from None


class Line(NamedTuple):
    """A line of source: file, number (from 1) and stripped text; ``str(line)`` is ``"file:number: text"``."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.text}" if self.text else f"{self.file}:{self.number}"


def configure(*, internal: Sequence[str] = INTERNAL_PATHS, templates: Sequence[str] = TEMPLATE_PATHS) -> None:
    """Sets which files are machinery and which hold template kernels, as fragments of their paths.

    Example: ``configure(internal=(*sites.INTERNAL_PATHS, "my_library/"))``; ``configure()`` restores the
        defaults.
    """
    global _internal, _template
    for name, fragments in (("internal", internal), ("templates", templates)):
        if isinstance(fragments, str):
            raise TypeError(f"{name} is {fragments!r}; pass a sequence of fragments, as ({fragments!r},)")
    _internal, _template = tuple(internal), tuple(templates)
    _kinds.clear()


def is_unrolled(code: CodeType) -> bool:
    """Whether this is a function of the device language that calls others once for each of some values (`lang`)."""
    return code.co_filename.startswith(_LANGUAGE)


def _classify(file: str) -> int:
    if any(fragment in file for fragment in _internal):
        kind = _MACHINERY
    elif any(fragment in file for fragment in _template):
        kind = _TEMPLATE
    else:
        kind = _USER
    _kinds[file] = kind
    return kind


def of_frame(frame: FrameType | None) -> Site:
    """The site of a running or suspended stack, given its innermost frame."""
    outermost = frame
    code: CodeType | None = None
    offset = 0
    while frame is not None:
        here_code = frame.f_code
        kind = _kinds.get(here_code.co_filename)
        if kind is None:
            kind = _classify(here_code.co_filename)
        if kind == _TEMPLATE:
            if code is None:
                return here_code, frame.f_lasti, None, 0
            return code, offset, here_code, frame.f_lasti
        if kind == _USER and code is None:
            code, offset = here_code, frame.f_lasti
        outermost, frame = frame, frame.f_back
    if code is None:  # machinery alone, as when an atom itself is the kernel
        assert outermost is not None
        return outermost.f_code, outermost.f_lasti, None, 0
    return code, offset, None, 0


def of_traceback(trace: TracebackType | None) -> Site:
    """The site where an exception was raised."""
    stack: list[tuple[CodeType, int]] = []
    while trace is not None:
        stack.append((trace.tb_frame.f_code, trace.tb_lasti))
        trace = trace.tb_next
    lines = [(_classify(code.co_filename), code, offset) for code, offset in reversed(stack)]
    innermost = next(((code, offset) for kind, code, offset in lines if kind != _MACHINERY), stack[0])
    template = next(((code, offset) for kind, code, offset in lines if kind == _TEMPLATE), innermost)
    return *innermost, *((None, 0) if template == innermost else template)


def here(skip: int = 0) -> Site:
    """The site of the caller's stack; the `skip` innermost frames are known to be machinery."""
    return of_frame(sys._getframe(1 + skip))


def _line(code: CodeType, offset: int) -> Line:
    number = code.co_firstlineno
    for start, end, candidate in code.co_lines():
        if start <= offset < end and candidate is not None:
            number = candidate
            break
    return Line(code.co_filename, number, linecache.getline(code.co_filename, number).strip())


def is_same_place(first: Site, second: Site) -> bool:
    """Whether two sites are one place of the source. Python 3.10 may compile what follows ``f() if x else None`` twice,
    a copy for each way, and tells columns of neither: two sites of one line are one place there."""
    if first == second or not _HAS_COPIES:
        return first == second
    return kernel_line(first) == kernel_line(second) and template_line(first) == template_line(second)


def kernel_line(site: Site) -> Line:
    """The innermost line that is not machinery."""
    return _line(site[0], site[1])


def template_line(site: Site) -> Line | None:
    """The template kernel's line that led there; None if that is the kernel line itself, or there is none."""
    return None if site[2] is None else _line(site[2], site[3])
