"""Fragment maps: which element of a matrix a thread's n-th value is.

A map is two `Shape`s, one of the thread's number and one of the value's, each stride a `Step` of (row, column) (Graphene's
atomic specs; Hagedorn et al., ASPLOS 2023, table 2). From it come the emulation of an instruction, the coordinates that
transforms see, and a picture:

>>> print(FragmentMap(8, 8, places((4, (0, 2)), (8, (1, 0))), places((2, (0, 1)))).table(rows=2))
         0    1    2    3    4    5    6    7
   0  T0.0 T0.1 T1.0 T1.1 T2.0 T2.1 T3.0 T3.1
   1  T4.0 T4.1 T5.0 T5.1 T6.0 T6.1 T7.0 T7.1
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.lang.aggregates import Number
from gemmkit.lang.atoms import atom
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.component_types import ComponentType
from gemmkit.lang.numba_hooks import signature, types
from gemmkit.lang.scalars import i32, index
from gemmkit.shapes import Shape
from gemmkit.strides import Modes, Step, walk


def places(*modes: tuple[int, tuple[int, int]]) -> Shape:
    """A number's place in a matrix: (extent, (rows, columns)) of its digits, the fastest first.

    >>> places((4, (0, 2)), (8, (1, 0)))(5)                       # a lane of mma's
    (1, 2)
    """
    return Shape.of_modes([[(extent, Step(step)) for extent, step in modes]])


@dataclass(frozen=True)
class FragmentMap(Component):
    """(thread, value) -> (row, column) of a ``rows`` x ``columns`` operand: the sum of two `places`."""

    rows: int
    columns: int
    thread_shape: Shape
    value_shape: Shape

    @cached_property
    def threads(self) -> int:
        return self.thread_shape.size

    @cached_property
    def values(self) -> int:
        return self.value_shape.size

    def beside(self, count: int) -> FragmentMap:
        """Of ``count`` instructions side by side along the columns, a thread's values of one behind those of another."""
        further = count, Step((0, self.columns))
        return FragmentMap(self.rows, self.columns * count, self.thread_shape,
                           Shape.of_modes([(*self.value_shape.modes[0], further)]))

    def row(self, thread: int, value: int) -> int:
        """The row of a thread's value."""
        return self._of_threads[0][thread] + self._of_values[0][value]

    def column(self, thread: int, value: int) -> int:
        return self._of_threads[1][thread] + self._of_values[1][value]

    @cached_property
    def _of_threads(self) -> tuple[list[int], list[int]]:
        return _table(self.thread_shape)

    @cached_property
    def _of_values(self) -> tuple[list[int], list[int]]:
        return _table(self.value_shape)

    @cached_property
    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of all values, as arrays of shape (threads, values)."""
        rows, columns = (np.add.outer(*parts) for parts in zip(self._of_threads, self._of_values))
        return rows, columns

    def gather(self, fragments: list) -> np.ndarray:
        """The matrix that the threads' fragments make up, in float64 (or the integers' own type)."""
        values = np.asarray(fragments)
        out = np.zeros((self.rows, self.columns), values.dtype)
        out[self.indices] = values
        return out

    def scatter(self, matrix: np.ndarray) -> list[tuple]:
        """The threads' fragments of a matrix."""
        return [tuple(row) for row in matrix[self.indices]]

    def table(self, rows: int | None = None) -> str:
        """Who holds each element, as text: ``T5.1`` is value 1 of thread 5."""
        cells = [["" for _ in range(self.columns)] for _ in range(self.rows)]
        for t in range(self.threads):
            for v in range(self.values):
                cells[self.row(t, v)][self.column(t, v)] = f"T{t}.{v}"
        shown = cells[:rows]
        width = max(len(c) for row in shown for c in row) + 1
        head = " " * 5 + "".join(f"{c:>{width}}" for c in range(self.columns))
        return "\n".join([head] + [f"{r:>4} " + "".join(f"{c:>{width}}" for c in cells[r])
                                   for r in range(len(shown))])


def _table(shape: Shape) -> tuple[list[int], list[int]]:
    """Rows and columns of all numbers."""
    rows, columns = (Shape.of_modes([_along(shape, axis)]).offsets() for axis in (0, 1))
    return rows, columns


def _along(shape: Shape, axis: int) -> Modes:
    """One axis of its places."""
    return tuple((extent, step[axis] if isinstance(step, Step) else step) for extent, step in shape.modes[0])


def _type_coordinate(context: Any, fragment_map: Any, thread: Any, value: Any, axis: Any) -> Any:
    if not isinstance(fragment_map, ComponentType) or not isinstance(axis, types.IntegerLiteral):
        return None
    of, which = fragment_map.skeleton, int(axis.literal_value)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        numbers = (Number(b, c.cast(b, v[1], thread, index)), Number(b, c.cast(b, v[2], value, index)))
        parts = [walk(_along(shape, which), number) for shape, number in zip((of.thread_shape, of.value_shape), numbers)]
        found = parts[0] + parts[1]
        return found.value if isinstance(found, Number) else i32(found)

    return signature(index, fragment_map, thread, value, axis), codegen


@atom(_type_coordinate)
def fragment_coordinate(fragment_map: FragmentMap, thread: int, value: int, axis: int) -> int:
    """The row (axis 0) or column (axis 1) of a thread's value."""
    return fragment_map._of_threads[axis][thread] + fragment_map._of_values[axis][value]
