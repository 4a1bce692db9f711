"""The words that programs are written in.

| word | what |
|---|---|
| ``for m, n in parallel(a.rows, b.columns)`` | tiles, in no order: each is one thread block's |
| ``for k in sequential(a.columns)`` | rounds, one after the other |
| ``for n in sequential(k.rows, stop=lengths[h])`` | the same, up to a length of the tile's own |
| ``zeros(m, n)``, ``full(m, value)``, ``copy(x)`` | cells, whose values rounds carry |
| ``x @ y``, ``.T`` | of matrices |
| ``x.max(axis=1)``, ``min``, ``sum``, ``mean`` | of a matrix's rows; with ``axis=0`` of its columns |
| ``exp``, ``log``, ``tanh``, ``sqrt``, ``rsqrt``, ``finite``, ``maximum``, ``minimum``, ``where`` | element by element |
| ``x == y``, ``!=``, ``<``, ``<=``, ``c & d``, ``c | d``, ``~c`` | conditions, for ``where`` |
| ``place(m)`` | where the elements of a block are |
| ``with once(n)`` | what is stored by the first block along ``n`` alone |
"""

from __future__ import annotations

from typing import Any

from gemmkit.programs.interpreter import Along
from gemmkit.programs.lines import refused
from gemmkit.programs.values import Cell, Extent, Index, Place, Term, current, term


def parallel(*extents: Extent) -> Along:
    """Blocks of one or several axes, which do not know of each other."""
    if not extents:
        raise refused(TypeError, "parallel() goes along one axis or more")
    return Along(current().loop(current().extents(extents), "parallel"))


def sequential(extent: Extent, stop: Any = None) -> Along:
    """Blocks of an axis, one after the other: cells keep what a round has put there.

    ``stop``: an element of an array of whole numbers, ``lengths[h]``, behind which nothing is there (`lengths`).
    """
    return Along(current().loop(current().extents((extent,)), "sequential", stop))


def zeros(*dims: Any) -> Cell:
    """A cell of zeros; its dimensions are blocks, ``zeros(m, n)``, or whole axes, ``zeros(m, v.columns)``."""
    return Cell(current().full(dims, 0.0))


def full(*dims_and_value: Any) -> Cell:
    """A cell of one value, which stands last: ``full(m, -math.inf)``."""
    return Cell(current().full(dims_and_value[:-1], dims_and_value[-1] if dims_and_value else None))


def copy(x: Any) -> Cell:
    """A cell that begins with a value."""
    return Cell(current().lift(x))


def exp(x: Any) -> Any:
    return term("exp", x)


def log(x: Any) -> Any:
    return term("log", x)


def tanh(x: Any) -> Any:
    return term("tanh", x)


def sqrt(x: Any) -> Any:
    return term("sqrt", x)


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x)."""
    return term("div", 1.0, sqrt(x))


def finite(x: Any) -> Any:
    """0 in place of -inf."""
    return term("finite", x)


def maximum(x: Any, y: Any) -> Any:
    return term("max", x, y)


def minimum(x: Any, y: Any) -> Any:
    return term("neg", term("max", term("neg", x), term("neg", y)))


def place(index: Index) -> Any:
    """Where each element of a block is along its axis, from 0: ``place(m) - place(n)`` is the distance from the diagonal."""
    if isinstance(index, Place):
        return index                                   # a condition's function is given places
    if not isinstance(index, Index) or index.stack:
        raise refused(TypeError, f"place({index!r}): a variable of parallel(...) or sequential(...) that goes along rows or "
                                 "columns is needed")
    return current().place(index)


def where(condition: Any, x: Any, other: Any) -> Any:
    """Element by element ``x`` or ``other``; ``condition`` is a value, or a function of an element's places."""
    return Term(current().where(condition, x, other))


class once:
    """What is stored within it is stored by the first block along an index alone: the others have the same."""

    def __init__(self, index: Index):
        if not isinstance(index, Index):
            raise refused(TypeError, f"once({index!r}): a variable of parallel(...) is needed")
        self.index = index

    def __enter__(self) -> None:
        current().only = self.index

    def __exit__(self, *error: object) -> None:
        current().only = None
