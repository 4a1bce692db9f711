"""The Python blocks of a text in Markdown, run in order in one namespace, with NumPy where they have CuPy."""

from __future__ import annotations

import contextlib
import dis
import io
import linecache
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

import gemmkit as gk

ROOT = Path(__file__).resolve().parents[2]


class Block(NamedTuple):
    """A fenced block: its language, the number of its first line, its text."""

    language: str
    line: int
    text: str


def blocks(path: Path) -> list[Block]:
    """All fenced blocks of a file, in order."""
    text = path.read_text(encoding="utf-8")
    return [Block(found[1], text.count("\n", 0, found.start(2)) + 1, found[2])
            for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def stand_in(rng: np.random.Generator) -> ModuleType:
    """What the texts use of CuPy, by NumPy. It has no ``ndarray``: gemmkit would take NumPy's arrays for CuPy's."""
    module = ModuleType("cupy")
    for name in ("arange", "ascontiguousarray", "empty", "float16", "float32", "float64", "full", "ones", "zeros"):
        setattr(module, name, getattr(np, name))
    module.random = ModuleType("cupy.random")                          # type: ignore[attr-defined]
    module.random.rand = lambda *shape, dtype: rng.random(shape).astype(dtype)
    return module


def run(path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, sizes: dict[str, str],
        check: Callable[[Block, dict[str, Any], str], None], only: Collection[int] | None = None, emulated: bool = True) -> int:
    """Run a file's Python blocks in the emulator, or as they are (on a GPU, with CuPy); ``check(block, namespace, printed)``
    after each. Returns how many ran.

    ``sizes`` are replacements that make a block small; each must occur. ``only`` are the numbers of the blocks to run, from 0
    on; what they need of those before runs, too.
    """
    if emulated:
        monkeypatch.setitem(sys.modules, "cupy", stand_in(rng))
    text = path.read_text(encoding="utf-8")
    for old in sizes:
        assert old in text, f"{path.name} has no {old!r} to make small"
    linecache.cache[path.name] = (len(text), None, text.splitlines(keepends=True), path.name)
    module = ModuleType(f"page {path.stem}")                           # where dataclasses and typing look names up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    count = 0
    python = [b for b in blocks(path) if b.language == "python"]
    for block in python if only is None else [python[n] for n in with_needed([b.text for b in python], only)]:
        source = block.text
        for old, new in sizes.items():
            source = source.replace(old, new)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), gk.emulate() if emulated else contextlib.nullcontext():
            exec(compile("\n" * (block.line - 1) + source, path.name, "exec"), namespace)
        check(block, namespace, printed.getvalue())
        count += 1
    return count


def with_needed(sources: Sequence[str], wanted: Collection[int]) -> list[int]:
    """The numbers of these sources and of those that last bound the names which they read, ascending.

    >>> with_needed(["a = 1", "b = a", "c = 3", "def d(): return b + c"], [1]), with_needed(["a = 1", "a = 2", "a += 1", "print(a)"], [3])
    ([0, 1], [1, 2, 3])
    """
    names = [_names(compile(source, "a block", "exec")) for source in sources]
    needed = set(wanted)
    for n in range(len(sources) - 1, -1, -1):
        if n in needed:
            binders = ([before for before in range(n) if name in names[before][0]] for name in names[n][1])
            needed |= {last[-1] for last in binders if last}
    return sorted(needed)


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """The names that a module's code binds, and those that it reads before, or in its functions."""
    bound: set[str] = set()
    read: set[str] = set()
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_NAME":
            bound.add(instruction.argval)
        elif instruction.opname == "LOAD_NAME" and instruction.argval not in bound:
            read.add(instruction.argval)
    while inner:
        function = inner.pop()
        inner += [constant for constant in function.co_consts if isinstance(constant, CodeType)]
        read |= {i.argval for i in dis.get_instructions(function) if i.opname in ("LOAD_NAME", "LOAD_GLOBAL")} - bound
    return bound, read


def without_places(report: str) -> Iterator[str]:
    """The lines of a report without what varies: file names, line and thread numbers, addresses."""
    for line in report.strip().splitlines():
        for pattern, name in ((r"(?<=at |om )\S+:\d+:", "FILE:"), (r'File "[^"]*", line \d+', "FILE"),
                              (r"thread \d+", "thread T"), (r"0x[0-9a-f]+", "ADDRESS")):
            line = re.sub(pattern, name, line)
        yield line.strip()
