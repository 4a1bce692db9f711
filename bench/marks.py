"""A part of a text that is made from result files: it stands between two marks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def put(into: str, part: str, begin: str, end: str) -> str:
    """``into`` with the part between its marks.

    Raises:
        ValueError: it has no such marks.

    >>> put("a<old>b", "new", "<", ">") == "a<\\nnew\\n>b"
    True
    """
    before, opened, rest = into.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"the text lacks {begin!r} and, after it, {end!r}")
    return f"{before}{begin}\n{part}\n{end}{after}"


def command(name: str, text: Callable[[], str], begin: str, end: str, arguments: Sequence[str] | None) -> int:
    """The command line ``python -m name``: prints the part, or writes it into a text, between its marks."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description="A part of a text, made from result files.")
    parser.add_argument("--into", type=Path, help="a text to write it into, between its marks")
    into = parser.parse_args(arguments).into
    if into is None:
        print(text())
    else:
        into.write_text(put(into.read_text(encoding="utf-8"), text(), begin, end), encoding="utf-8")
    return 0
