"""Fragment maps: which element of a matrix a thread's n-th value is.

A map is two hierarchical shape:stride layouts, one over the thread's number and one over the value's, each stride a
(row, column) pair (Graphene's atomic specs; Hagedorn et al., ASPLOS 2023, table 2). From it come the emulation of an
instruction, the coordinates that transforms see, and a picture:

>>> print(FragmentMap(8, 8, (4, 8), ((0, 2), (1, 0)), (2,), ((0, 1),)).table(rows=2))
         0    1    2    3    4    5    6    7
   0  T0.0 T0.1 T1.0 T1.1 T2.0 T2.1 T3.0 T3.1
   1  T4.0 T4.1 T5.0 T5.1 T6.0 T6.1 T7.0 T7.1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.lang.atoms import atom
from gemmkit.lang.component_types import ComponentType
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.scalars import index

Strides = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class FragmentMap(Component):
    """(thread, value) -> (row, column) of a ``rows`` x ``columns`` operand; the first mode varies fastest."""

    rows: int
    columns: int
    thread_shape: tuple[int, ...]
    thread_strides: Strides
    value_shape: tuple[int, ...]
    value_strides: Strides

    @cached_property
    def threads(self) -> int:
        return int(np.prod(self.thread_shape))

    @cached_property
    def values(self) -> int:
        return int(np.prod(self.value_shape))

    def row(self, thread: int, value: int) -> int:
        """The row of a thread's value."""
        return self._of_threads[0][thread] + self._of_values[0][value]

    def column(self, thread: int, value: int) -> int:
        return self._of_threads[1][thread] + self._of_values[1][value]

    @cached_property
    def _of_threads(self) -> tuple[list[int], list[int]]:
        return _table(self.thread_shape, self.thread_strides)

    @cached_property
    def _of_values(self) -> tuple[list[int], list[int]]:
        return _table(self.value_shape, self.value_strides)

    def __hash__(self) -> int:
        return hash((self.rows, self.columns, self.thread_shape, self.thread_strides, self.value_shape))

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


def _table(shape: tuple[int, ...], strides: Strides) -> tuple[list[int], list[int]]:
    """Layout evaluation: every number's digits in the mixed radix ``shape``, times the strides of rows, and of columns."""
    rows, columns = [0], [0]
    for extent, (down, along) in zip(shape, strides):
        rows = [at + n * down for n in range(extent) for at in rows]
        columns = [at + n * along for n in range(extent) for at in columns]
    return rows, columns


def _emit(builder: Any, shape: tuple[int, ...], strides: Strides, number: Any, axis: int) -> Any:
    """Layout evaluation of one number and one axis, as LLVM instructions."""
    total = ir.IntType(32)(0)
    for n, (extent, stride) in enumerate(zip(shape, strides)):
        last = n == len(shape) - 1
        digit = number if last else builder.urem(number, ir.IntType(32)(extent))
        number = number if last else builder.udiv(number, ir.IntType(32)(extent))
        total = builder.add(total, builder.mul(digit, ir.IntType(32)(stride[axis])))
    return total


def _type_coordinate(context: Any, fragment_map: Any, thread: Any, value: Any, axis: Any) -> Any:
    if not isinstance(fragment_map, ComponentType) or not isinstance(axis, types.IntegerLiteral):
        return None
    of, which = fragment_map.skeleton, int(axis.literal_value)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        number = c.cast(b, v[1], thread, index)
        from_thread = _emit(b, of.thread_shape, of.thread_strides, number, which)
        return b.add(from_thread, _emit(b, of.value_shape, of.value_strides, c.cast(b, v[2], value, index), which))

    return signature(index, fragment_map, thread, value, axis), codegen


@atom(_type_coordinate)
def fragment_coordinate(fragment_map: FragmentMap, thread: int, value: int, axis: int) -> int:
    """The row (axis 0) or column (axis 1) of a thread's value."""
    return fragment_map._of_threads[axis][thread] + fragment_map._of_values[axis][value]
