"""Which axes of arrays are the same: a program says it, and lengths that happen to be equal do not.

An axis is a symbol, (array, axis). An index goes along the axis that it is made of, ``a.columns``; lengths of axes that a
program makes the same must agree.

| a program | says |
|---|---|
| an index stands on an axis of another array: ``b[k, n]`` with ``k`` of ``a.columns`` | b's rows are a's columns |
| an index stands on both axes of the array that it is of: ``a[m, k] @ a[k, n]`` | a is square |
| whole axes meet in a sum, a product, a cell or a store: ``x[m] + y[m]`` | their axes are the same |

So these are slips, whatever lengths are: an index that stands on another axis of its own array and never on its own,
``a[m, k]`` with ``k`` of ``a.rows``; one that stands on two axes of another array; and two whole axes of one array that meet
element by element, and are not the same through other arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmkit.programs.lines import line_here, refused
from gemmkit.programs.values import Axis, Index, Parameter, shown

Symbol = tuple[str, int]


def _stands(index: Index, at: Symbol, key: tuple) -> str:
    return f"{at[0]}[{shown(key)}]: {index} goes along {index.extent}, and axis {at[1]} of {at[0]}"


class Axes:
    """What a program has said so far."""

    def __init__(self) -> None:
        self._parents: dict[Symbol, Symbol] = {}
        self._uses: dict[Index, dict[Symbol, tuple[tuple, str]]] = {}  # where indices stand: among which, and the line

    def _first(self, x: Symbol) -> Symbol:
        while x in self._parents:
            x = self._parents[x]
        return x

    def are_same(self, x: Symbol, y: Symbol) -> bool:
        return self._first(x) == self._first(y)

    def join(self, x: Symbol, y: Symbol) -> None:
        if not self.are_same(x, y):
            self._parents[self._first(y)] = self._first(x)

    # -- indices ------------------------------------------------------------------------------------------------------

    def use(self, index: Index, parameter: Parameter, axis: int, key: tuple) -> None:
        """An index stands on an axis of an array. Raises ValueError for a length that differs, an index twice, and for one
        that stands on two axes of an array that it is not of."""
        extent, name, at = index.extent, parameter.name, (parameter.name, axis)
        if index.is_over:
            raise refused(ValueError, f"{name}[{shown(key)}]: the loop of {index} is over")
        if sum(other is index for other in key) > 1:
            raise refused(ValueError, f"{name}[{shown(key)}]: {index} stands there twice, and a block has rows and columns "
                                      "of its own; go along them by two loops")
        if extent.size != parameter.shape[axis]:
            raise refused(ValueError, f"{_stands(index, at, key)} has {parameter.shape[axis]} elements")
        uses = self._uses.setdefault(index, {})
        if at not in uses:
            uses[at] = key, line_here()
        if name != extent.parameter:
            if any(other == name and where != axis for other, where in uses):
                raise refused(ValueError, f"{name}[{shown(key)}]: {index} stands on two axes of {name}, and goes along "
                                          f"{extent}; where {name} is square, make it of {name}.rows or {name}.columns")
            self.join((extent.parameter, extent.axis), at)

    def check(self) -> None:
        """Raises ValueError, with the line, for an index that stands on other axes of its array alone."""
        for index, uses in self._uses.items():
            own = index.extent.parameter, index.extent.axis
            for at, (key, line) in uses.items():
                if at[0] == own[0] and at != own and own not in uses:
                    raise refused(ValueError, f"{_stands(index, at, key)} is another one: equal lengths do not make them "
                                              "the same", line)

    # -- whole axes ---------------------------------------------------------------------------------------------------

    def meet(self, what: Callable[[], str], x: Axis, y: Axis, is_contracted: bool = False) -> None:
        """Two whole axes of a length are the same. Raises ValueError where they are two of one array, which only a product
        that sums over both makes the same."""
        if x.of is None or y.of is None or x == y:
            return
        if x.of[0] == y.of[0] and not is_contracted and not self.are_same(x.of, y.of):
            raise refused(ValueError, f"{what()}: {x} meets {y}, and equal lengths do not make them the same")
        self.join(x.of, y.of)

    def renamed(self, what: Callable[[], str], dims: tuple, other: tuple) -> tuple:
        """``other`` with the whole axes of ``dims`` in place of those that meet them: one that is the same already, or else
        the last of that length, which is along columns. A block that is columns of its own rows meets the rows."""
        found: list[Any] = []
        for d in other:
            if isinstance(d, Axis) and d not in dims:
                fits = [e for e in reversed(dims) if isinstance(e, Axis) and e.size == d.size and e not in other
                        and e not in found]
                known = [e for e in fits if d.of and e.of and self.are_same(d.of, e.of)]
                if fits:
                    e = (known or fits)[0]
                    self.meet(what, e, d)
                    d = e
            elif isinstance(d, Index) and d.twin is not None and d not in dims and d.twin in dims and d.twin not in other:
                d = d.twin
            found.append(d)
        return tuple(found)
