"""Progress of a search, on standard error."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["Progress"]


class Progress:
    """A bar for each of a search's parts, where it is to be shown: ``is_shown`` None says where standard error is a
    terminal."""

    def __init__(self, is_shown: bool | None = None):
        self._bars: Any = None
        self._task: Any = None
        if sys.stderr.isatty() if is_shown is None else is_shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                              console=Console(file=sys.stderr))

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, what: str, total: int) -> None:
        if self._bars is not None:
            self._task = self._bars.add_task(what, total=total)

    def advance(self) -> None:
        if self._bars is not None:
            self._bars.advance(self._task)
