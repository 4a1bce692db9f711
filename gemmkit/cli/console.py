"""Where the commands print: tables that are as wide as the terminal, or wide enough where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gemmkit.runtime.device import absence

_WIDTH = 118                           # columns of a file or a pipe


def console() -> Console:
    """A console on the present standard output."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def pairs(title: str, rows: Iterable[tuple[str, object]]) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(escape(name), escape(str(value)))
    return table


def grid(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """A table with a header."""
    table = Table(title=title, title_justify="left", min_width=60)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row))
    return table


def no_gpu() -> str | None:
    """In a few words why there is no GPU; None when there is one."""
    reason = absence()
    if reason is None or "DynamicLibNotFound" not in reason:
        return reason
    return "no NVIDIA driver is installed"


def bytes_text(count: int) -> str:
    """A number of bytes for people.

    >>> bytes_text(0), bytes_text(232448), bytes_text(50 * 2**20)
    ('0 bytes', '227 KiB', '50 MiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"
