"""The Python blocks of a text in Markdown, run in order in one namespace, with NumPy where they have CuPy."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
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
    for name in ("arange", "ascontiguousarray", "empty", "float16", "float32", "float64", "ones", "zeros"):
        setattr(module, name, getattr(np, name))
    module.random = ModuleType("cupy.random")                          # type: ignore[attr-defined]
    module.random.rand = lambda *shape, dtype: rng.random(shape).astype(dtype)
    return module


def run(path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, sizes: dict[str, str],
        check: Callable[[Block, dict[str, Any], str], None]) -> int:
    """Run a file's Python blocks in the emulator; ``check(block, namespace, printed)`` after each. Returns their number.

    ``sizes`` are replacements that make a block small; each must occur.
    """
    monkeypatch.setitem(sys.modules, "cupy", stand_in(rng))
    text = path.read_text(encoding="utf-8")
    for old in sizes:
        assert old in text, f"{path.name} has no {old!r} to make small"
    linecache.cache[path.name] = (len(text), None, text.splitlines(keepends=True), path.name)
    module = ModuleType(path.stem)                                     # where dataclasses and typing look names up
    monkeypatch.setitem(sys.modules, path.stem, module)
    namespace = vars(module)
    count = 0
    for block in (b for b in blocks(path) if b.language == "python"):
        source = block.text
        for old, new in sizes.items():
            source = source.replace(old, new)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), gk.emulate():
            exec(compile("\n" * (block.line - 1) + source, path.name, "exec"), namespace)
        check(block, namespace, printed.getvalue())
        count += 1
    return count


def without_places(report: str) -> Iterator[str]:
    """The lines of a report without what varies: file names, line and thread numbers, addresses."""
    for line in report.strip().splitlines():
        for pattern, name in ((r"(?<=at |om )\S+:\d+:", "FILE:"), (r'File "[^"]*", line \d+', "FILE"),
                              (r"thread \d+", "thread T"), (r"0x[0-9a-f]+", "ADDRESS")):
            line = re.sub(pattern, name, line)
        yield line.strip()
