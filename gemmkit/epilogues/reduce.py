"""`RowReduce` and `ColumnReduce`: sums, extremes and other reductions of D's rows and columns, beside D.

Threads combine the finished values that they hold of a row (or column) of D's tile, lanes exchange what each has, and one of
them stores the tile's state into a workspace. A small kernel behind the product combines the states of all tiles
(`gemmkit.kernels.common.completion`). Nothing is added by atomics: every run combines in the same order.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from gemmkit.components import Array, Scalar, with_fields
from gemmkit.epilogues.combine import Combine
from gemmkit.epilogues.partial import Partial, Reducing
from gemmkit.epilogues.reductions import NAMES, combine_named
from gemmkit.kernels.common.rules import rule
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.narrowing import fitting, narrows, refusal
from gemmkit.lang.values import convert
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.workspace import PARTIALS as ROLES
from gemmkit.runtime.workspace import described

__all__ = ["ColumnReduce", "Reduce", "RowReduce", "States"]


@dataclass(frozen=True)
class States(Partial):
    """A reduction along one dimension of a matrix. Beside ``out`` and ``op`` all is the kernel's own (`reserved`): dtypes
    of states and of ``out``, the workspace of partial states and how many a row has."""

    out: Array
    op: Any
    state: Any = None
    stored: Any = None
    partials: Array = None
    slots: Scalar = None

    outputs: ClassVar[tuple[str, ...]] = ("out", "partials")
    along_m = False                    # whether it runs down columns

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.op, str) and self.op in NAMES:
            object.__setattr__(self, "op", combine_named(self.op, self.along_m))
        elif not isinstance(self.op, Combine):
            raise TypeError(f"{type(self).__name__}(op={self.op!r}): one of {', '.join(map(repr, NAMES))}, or an "
                            "epilogues.Combine(combine, identity), is needed")

    # -- device methods -----------------------------------------------------------------------------------------------

    def nothing(self) -> Any:
        """The identity."""
        return convert(self.state, self.op.identity)

    def state_of(self, x: Any, m: int, n: int) -> Any:
        return self.op.state_of(self.state, x, m, n)

    def combine(self, a: Any, b: Any) -> Any:
        return self.op.both(self.state, a, b)

    def extent(self, shape: Any) -> int:
        """How many rows (or columns) are reduced."""
        return shape.N if self.along_m else shape.M

    def complete(self, team: Any, shape: Any) -> None:
        """All slots of this thread's row, combined and stored."""
        i = team.index()
        state = self.nothing()
        if i < self.extent(shape):
            slot = team.first()
            while slot < self.slots:
                state = self.combine(state, self.kept(i, slot, shape))
                slot += team.warps
        state = team.gather(self, state)
        if team.is_first() and i < self.extent(shape):
            self.out[i] = fitting(OUT, self.stored, (self.op.value_of(state),))[0]

    # -- host -------------------------------------------------------------------------------------------------------

    def check_out(self, count: int, length: int, said: str, line: str) -> None:
        """Raise ValueError unless out has ``count`` elements, and each can have a value of ``length`` ones."""
        name, shape = type(self).__name__, describe(self.out, f"out of {type(self).__name__}").shape
        if shape[-1:] != (count,):
            raise ValueError(f"out of {name} has shape {shape}; {said} need {(count,)}")
        if getattr(self.op, "has_place", False) and count and not length:
            raise ValueError(f"{name}(op='argmax') with {said}: a {line} of no elements has no largest one")

    def reserved(self, number: int, slots: int, across: int, products: int, accumulator: np.dtype) -> Any:
        """The reduction with its workspace, the ``number``-th of a launch: of ``across`` rows of ``slots`` partial states.

        Raises ConfigError where ``out`` cannot hold what comes of it, or states are too many.
        """
        name, stored = type(self).__name__, describe(self.out, "out").dtype
        state = self.op.state(accumulator, stored)
        made = self.op.made(state)
        if made is not None and narrows(made, stored):
            raise ConfigError(refusal(f"out of {name}", made.name, stored))
        rule(number < len(ROLES), "epilogue", self, f"a launch may have {len(ROLES)} reductions; this is one more")
        count = products * slots * across
        rule(count < 2**31, "epilogue", self, f"its {count} partial states are 2**31 or more; reduce fewer rows at a time")
        return with_fields(self, dict(op=self.op.of_states(state), state=state, stored=stored, slots=slots,
                                      partials=described(ROLES[number], count, state)))


@dataclass(frozen=True)
class Reduce(States, Reducing):
    """A reduction of D."""

    array_ndims = MappingProxyType({"out": 1})

    def finish_block(self, values: tuple, group: Any, at: Any) -> tuple:
        if self.along_m:
            group.reduce_columns(self, values, at)
        else:
            group.reduce_rows(self, values, at)
        return values

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless out has an element for each row (or column) of a D of M x N, and each can have one."""
        line = "column" if self.along_m else "row"
        self.check_out(*((N, M) if self.along_m else (M, N)), f"the {line}s of a {M} x {N} result", line)


OUT = "out of RowReduce or ColumnReduce"


@dataclass(frozen=True)
class RowReduce(Reduce):
    """Reduces every row of D into ``out[m]``, beside D, which is stored as without it.

    Args:
        out: M elements, written; of a stack of products with the stack's dimensions before.
        op: "sum", "sumsq" (of squares), "max", "min", "argmax", "logsumexp", or a `Combine` of your own.

    Values are those at its place in the chain, before they are converted to D's type: ``ReLU() | RowReduce(sums, "sum") |
    Scale(2.0)`` sums what the ReLU gives. They are combined in the accumulator's type (float32 of narrower ones) or that of
    ``out``, the wider of the two, in an order that depends on the kernel's tiles alone. NaN in a row makes its sum, max, min
    and logsumexp NaN, and is its argmax; an empty row gives 0, -inf, inf, and raises ValueError for argmax.

    >>> import numpy as np, gemmkit as gk
    >>> a, squares = np.float32([[1, 2], [3, 4]]), np.empty(2, np.float32)
    >>> with gk.emulate():
    ...     gk.matmul(a, np.eye(2, dtype=np.float32), epilogue=RowReduce(squares, "sumsq")).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    >>> squares.tolist()
    [5.0, 25.0]
    """


@dataclass(frozen=True)
class ColumnReduce(Reduce):
    """Reduces every column of D into ``out[n]``: `RowReduce` of the other dimension.

    >>> import numpy as np, gemmkit as gk
    >>> a, largest = np.float32([[1, 5], [3, 4]]), np.empty(2, np.float32)
    >>> with gk.emulate():
    ...     _ = gk.matmul(a, np.eye(2, dtype=np.float32), epilogue=ColumnReduce(largest, "max"))
    >>> largest.tolist()
    [3.0, 5.0]
    """

    along_m = True
