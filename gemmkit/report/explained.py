"""`explain`: a product as it would be computed, to be read in a notebook, a browser or a terminal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gemmkit.config import Config
from gemmkit.drawing import framed
from gemmkit.report.choice import Choice, choice_of, microseconds_text
from gemmkit.report.page import page, title
from gemmkit.report.subject import Subject, of_call


class Explanation:
    """What `explain` returns. A notebook shows the page; ``print`` shows what was chosen, and why.

    ``config`` is the configuration, ``choice`` what chose it (``by``, ``reason``, ``microseconds``, ``others``).
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._page: str | None = None

    @property
    def config(self) -> Config:
        return self.subject.compiled.problem.config

    @property
    def choice(self) -> Choice:
        return choice_of(self.subject.compiled)

    def html(self) -> str:
        """The page: the kernel is compiled and a small product emulated when it is first asked for (a few seconds)."""
        if self._page is None:
            self._page = page(self.subject)
        return self._page

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page; raises ValueError, before anything is computed, where the folder is not there."""
        file = Path(path)
        if not file.parent.is_dir():
            raise ValueError(f"path={os.fspath(path)!r}: there is no folder {file.parent}")
        file.write_text(self.html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        return framed(self.html(), 900)

    def __repr__(self) -> str:
        choice, conf = self.choice, self.config
        time = "" if choice.microseconds is None else f"\nmodelled: {microseconds_text(choice.microseconds)}"
        return (
            f"{title(self.subject)}\n{conf.kernel}, {'x'.join(map(str, conf.block_shape.extents))}, {conf.operator!r}"
            f"\nchosen because: {choice.reason} ({choice.owner}){time}"
        )


def explain(a: Any, b: Any, c: Any = None, conf: Config | None = None, *, out: Any = None, **keywords: Any) -> Explanation:
    """How `gemmkit.matmul` would compute a product, and why: nothing is launched, and no element read or written.

    Takes what `matmul` takes. Arrays of NumPy need no GPU: the product is planned for the one that is here, or for an H100.
    An array of another library is planned on its GPU, where D is allocated if ``out`` is not given.

    Raises what `matmul` raises for arguments that do not go together, and ValueError for a product without elements.

    >>> import numpy as np, gemmkit as gk
    >>> a = np.empty((512, 512), np.float32)
    >>> said = gk.explain(a, a)
    >>> said.config.kernel, said.choice.by
    ('multistage', 'multistage')
    >>> print(said)                                             # doctest: +ELLIPSIS
    D (512 x 512) = A (512 x 512) @ B (512 x 512)
    multistage, ..., FPUOp(...)
    chosen because: the least modelled time among ...
    >>> said.save("no/such/folder/report.html")
    Traceback (most recent call last):
    ValueError: path='no/such/folder/report.html': there is no folder no/such/folder
    """
    return Explanation(of_call(a, b, c, conf, out, keywords))
