"""Progress of a search, or of compiling ahead: on standard error, or on a console."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """A bar for each part, where it is to be shown: ``is_shown`` None says where standard error is a terminal. ``console``
    is a `rich.console.Console` in its place, from which bars go when all is done."""

    def __init__(self, is_shown: bool | None = None, console: Any = None):
        self._bars: Any = None
        self._task: Any = None
        if sys.stderr.isatty() if is_shown is None else is_shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                              console=console or Console(file=sys.stderr), transient=console is not None)

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
