"""`RowReduce` and `ColumnReduce`: sums, extremes and other reductions of D's rows and columns, beside D.

Threads combine the finished values that they hold of a row (or column) of D's tile, lanes exchange what each has, and one of
them stores the tile's state into a workspace. A small kernel behind the product combines the states of all tiles
(`gemmkit.kernels.collectives.lanes`). Nothing is added by atomics: every run combines in the same order.

A reduction is an associative function of two states (`Combine`). Those with names:

| name | state | combine | result |
|---|---|---|---|
| "sum" | x | a + b | |
| "sumsq" | x x | a + b | |
| "max", "min" | x | the larger, the smaller; NaN where one is | |
| "argmax" | (x, coordinate) | the larger x, of equal ones the first; NaN is larger than all | the coordinate |
| "logsumexp" | (x, 1) | the larger x, and both sums scaled to it | x + log(sum) |

These are NumPy's answers: ``max`` and ``argmax`` of a row with a NaN are NaN and the first NaN's place.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gemmkit.components import Array, Component, Scalar, with_fields
from gemmkit.epilogues.base import Epilogue
from gemmkit.kernels.spec import rule
from gemmkit.lang.aggregates import convert
from gemmkit.lang.checks import function_given, number, required
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import Elements, Numeric, fitting, refusal
from gemmkit.lang.number_rules import device_dtype, narrows, part_dtypes
from gemmkit.ptx.memory import load_global, store_global
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.launch import PARTIALS as ROLES
from gemmkit.runtime.launch import described

if TYPE_CHECKING:
    from gemmkit.kernels.collectives.lanes import Lanes, Team

MOST_PARTS = 4                         # of a state


@dataclass(frozen=True)
class Combine(Component):
    """A reduction of one's own: ``combine(a, b)`` of two states is a state.

    Args:
        combine: device code; associative and commutative, for values meet in the order of the kernel's threads (which is
            the same every time).
        identity: the neutral state, a number or a tuple of a state's parts; an empty row gives it. If states are whole
            numbers, infinity is their type's largest and -infinity its smallest.
        of: the state of one value, ``of(x)`` or ``of(x, m, n)``; by default x itself.
        result: what is stored of the last state, ``result(state)``; by default the state itself.
        dtype: the dtype of a state. A state of several parts has a structured dtype of up to 4 numbers of one size,
            ``[("largest", "f4"), ("place", "i4")]``: read its parts by number or name, ``a[0]`` or ``a.largest``, and make
            it as a tuple. Default: the wider of the accumulator's type and that of ``out``.

    Raises TypeError for what is no function of as many arguments, ValueError for a dtype or an identity of other parts.

    The product of a row's values:

    >>> import numpy as np, gemmkit as gk
    >>> a, product = np.float32([[1, 2], [3, 4]]), np.empty(2, np.float32)
    >>> times = gk.epilogues.Combine(lambda a, b: a * b, 1)
    >>> with gk.emulate():
    ...     gk.matmul(a, np.eye(2, dtype=np.float32), epilogue=gk.epilogues.RowReduce(product, times)).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    >>> product.tolist()
    [2.0, 12.0]
    """

    combine: Any
    identity: Any
    of: Any = None
    result: Any = None
    dtype: Any = None

    def __post_init__(self) -> None:
        fields = dict(combine=function_given(self.combine, "Combine", "combine", (2,), "f(a, b), a function of two states,"))
        if self.of is not None:
            fields["of"] = function_given(self.of, "Combine", "of", (1, 3), "f(x) or f(x, m, n), a function of a value,")
        if self.result is not None:
            fields["result"] = function_given(self.result, "Combine", "result", (1,), "f(state)")
        if self.dtype is not None:
            fields["dtype"] = _state_dtype(self.dtype)
        count = len(self.identity) if isinstance(self.identity, tuple) else 1
        parts = 1 if self.dtype is None else len(part_dtypes(fields["dtype"]))
        if count != parts:
            raise ValueError(f"Combine(identity={self.identity!r}): it has {count} parts, and a state of "
                             f"dtype={self.dtype!r} has {parts}; give both of one kind, for example identity=(0.0, 0) with "
                             'dtype=[("value", "f4"), ("place", "i4")]')
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    # -- device methods -----------------------------------------------------------------------------------------------

    def state_of(self, dtype: np.dtype, x: Numeric, m: int, n: int) -> Any:
        """The state of a value."""
        if self.of is None:
            return convert(dtype, x)
        if self.has_coordinates:
            return convert(dtype, self.of(x, m, n))
        return convert(dtype, self.of(x))

    def both(self, dtype: np.dtype, a: Numeric, b: Numeric) -> Any:
        """The state of two."""
        return convert(dtype, self.combine(a, b))

    def value_of(self, state: Any) -> Any:
        """What is stored of a state."""
        if self.result is None:
            return state
        return number(self, "result", self.result(state), state)

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def has_coordinates(self) -> bool:
        return required(self.of) == 3

    def state(self, accumulator: np.dtype, out: np.dtype) -> np.dtype:
        """The dtype of states for sums of ``accumulator`` and an array of ``out``."""
        return self.dtype if self.dtype is not None else working(accumulator, out)

    def made(self, state: np.dtype) -> np.dtype | None:
        """The dtype of what is stored; None where only the function knows."""
        return state if self.result is None else None

    def of_states(self, state: np.dtype) -> Combine:
        """The reduction, with its identity as states of a dtype have it: of whole numbers infinity is the largest.

        Raises ConfigError where a state cannot hold it.
        """
        given = self.identity if isinstance(self.identity, tuple) else (self.identity,)
        held = tuple(self._held(part, dtype, state) for part, dtype in zip(given, part_dtypes(state), strict=True))
        return with_fields(self, dict(identity=held if isinstance(self.identity, tuple) else held[0]))

    def _held(self, part: Any, dtype: np.dtype, state: np.dtype) -> Any:
        if dtype.kind not in "iu":
            return part
        limits = np.iinfo(dtype)
        if part in (math.inf, -math.inf):
            return int(limits.max if part > 0 else limits.min)
        rule(part == part and part == int(part) and limits.min <= part <= limits.max, "epilogue", self,
             f"its identity {self.identity!r} is not a value of states of {state}; a whole number from {limits.min} to "
             f"{limits.max}, infinity for the largest, or dtype= of floats is needed")
        return int(part)


def _state_dtype(given: Any) -> np.dtype:
    try:
        dtype = device_dtype(given)
    except TypeError as error:
        raise TypeError(f"Combine(dtype={given!r}): {error}") from None
    if len(part_dtypes(dtype)) > MOST_PARTS or part_dtypes(dtype)[0].itemsize not in (2, 4, 8):
        raise ValueError(f"Combine(dtype={given!r}): 1 to {MOST_PARTS} numbers of 2, 4 or 8 bytes are needed")
    return dtype


def working(accumulator: np.dtype, out: np.dtype) -> np.dtype:
    """The type in which values are combined: NumPy's common one, of narrower floats float32, of narrower integers int32."""
    wide = np.dtype(np.float32) if accumulator.itemsize < 4 and accumulator.kind not in "iub" else accumulator
    if out.names is not None or wide.names is not None:
        return wide
    out = part_dtypes(out)[0]                              # a complex array takes real numbers
    holds = out.kind == "f" or (out.kind in "iu" and wide.kind in "iu")
    common = np.result_type(wide, out) if holds and out.itemsize >= wide.itemsize else wide
    return np.dtype(np.int32) if common.kind in "iub" and common.itemsize < 4 else common


# -- reductions with names ------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class NamedReduction(Combine):
    """A reduction that comes with gemmkit."""

    name: str = ""

    def __repr__(self) -> str:
        return repr(self.name)


@dataclass(frozen=True)
class Extreme(NamedReduction):
    """The largest or smallest value: the identity is the type's own."""

    __repr__ = NamedReduction.__repr__

    def state(self, accumulator: np.dtype, out: np.dtype) -> np.dtype:
        return working(accumulator, accumulator)


@dataclass(frozen=True)
class Placed(NamedReduction):
    """States of a value and a coordinate."""

    __repr__ = NamedReduction.__repr__
    has_place = True

    def state(self, accumulator: np.dtype, out: np.dtype) -> np.dtype:
        value = working(accumulator, accumulator)
        return np.dtype([("value", value), ("place", f"i{value.itemsize}")])

    def made(self, state: np.dtype) -> np.dtype | None:
        return np.dtype(np.int32)


@dataclass(frozen=True)
class Scaled(NamedReduction):
    """States of the largest value and of a sum relative to it."""

    __repr__ = NamedReduction.__repr__

    def state(self, accumulator: np.dtype, out: np.dtype) -> np.dtype:
        value = working(accumulator, out if out.kind == "f" else accumulator)
        return np.dtype([("largest", value), ("total", value)])

    def made(self, state: np.dtype) -> np.dtype | None:
        return state["total"]


def add(a: Numeric, b: Numeric) -> Any:
    return a + b


def square(x: Numeric) -> Any:
    return x * x


def larger(a: Numeric, b: Numeric) -> Any:
    return max(a, b)


def smaller(a: Numeric, b: Numeric) -> Any:
    return min(a, b)


def first_largest(a: Any, b: Any) -> Any:
    """The state with the larger value, of equal ones that of the first place; a NaN is larger than any number. Without
    branches: of each element there would be several, and Hopper's kernel has no registers left to keep across them."""
    is_earlier = b.place < a.place
    is_larger = (b.value > a.value) | ((b.value == a.value) & is_earlier)
    is_nan = (b.value != b.value) & ((a.value == a.value) | is_earlier)
    takes = is_larger | is_nan
    return b.value if takes else a.value, b.place if takes else a.place


def place(state: Any) -> Any:
    """As all coordinates it fits 32 bits; a state holds it in 64 beside a value of 64."""
    return np.int32(state.place)


def placed_column(x: Numeric, m: int, n: int) -> Any:
    return x, n


def placed_row(x: Numeric, m: int, n: int) -> Any:
    return x, m


def one(x: Numeric) -> Any:
    return x, 1


def scaled_sum(a: Any, b: Any) -> Any:
    """exp(largest) total of both. Equal ones, infinities among them, are not subtracted: that would be NaN."""
    top = max(a.largest, b.largest)
    return top, scaled(a, top) + scaled(b, top)


def scaled(a: Any, top: Any) -> Any:
    if a.largest == top:
        return a.total
    return a.total * math.exp(a.largest - top)


def log_of(state: Any) -> Any:
    """Of no values there is no logarithm to take."""
    if state.total == 0:
        return state.largest
    return state.largest + math.log(state.total)


_PAIR = np.dtype([("value", "f4"), ("place", "i4")])
NAMES = ("sum", "sumsq", "max", "min", "argmax", "logsumexp")


def combine_named(name: str, along_m: bool) -> Combine:
    """One of `NAMES`; ``along_m`` where it runs down columns, so that places are rows."""
    infinity = float("inf")
    if name == "argmax":
        return Placed(first_largest, (-infinity, 2**31 - 1), placed_row if along_m else placed_column, place, _PAIR, name)
    if name == "logsumexp":
        return Scaled(scaled_sum, (-infinity, 0.0), one, log_of, _PAIR, name)
    if name in ("max", "min"):
        return Extreme(*((larger, -infinity) if name == "max" else (smaller, infinity)), name=name)
    return NamedReduction(add, 0, square if name == "sumsq" else None, name=name)


# -- states in a workspace ------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Partial(Component):
    """What a component may do with its workspace ``partials``: states of the dtype ``state``, ``slots`` of each row."""

    def keep(self, state: Any, i: int, slot: int, shape: StackShape) -> None:
        """A part's state of row (or column) ``i``: neighbours of one slot are neighbours in memory."""
        store_global(self.partials, 0, (self.place(i, slot, shape),), (0,), (state,))          # type: ignore[attr-defined]

    def kept(self, i: int, slot: int, shape: StackShape) -> Any:
        return load_global(self.partials, 0, (self.place(i, slot, shape),), (0,), 1)[0]        # type: ignore[attr-defined]

    def place(self, i: int, slot: int, shape: StackShape) -> int:
        return (shape.batch * self.slots + slot) * self.extent(shape) + i       # type: ignore[attr-defined,no-any-return]

    @property
    def state_parts(self) -> int:
        return len(part_dtypes(self.state))                                                    # type: ignore[attr-defined]

    def extent(self, shape: StackShape) -> Any:
        """How many rows (or columns) have states."""
        return shape.M


@dataclass(frozen=True)
class RowStates(Partial):
    """States of rows, each of ``width`` columns."""

    partials: Array
    state: Any
    slots: Scalar
    width: int

    outputs: ClassVar[tuple[str, ...]] = ("partials",)


@dataclass(frozen=True)
class Reducing(Epilogue):
    """Base class of epilogues that combine values of several threads, by `finish_block`."""

    reduces = True
    passes_on = False
    writes = False                     # what it stores is not stored when an element is finished


# -- of rows and columns --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class States(Partial):
    """A reduction along one dimension of a matrix. Beside ``out`` and ``op`` all is the kernel's own (`reserved`): dtypes
    of states and of ``out``, the workspace of partial states and how many a row has."""

    out: Array
    op: Any
    state: Any = None
    stored: Any = None
    partials: Array = None                                                     # type: ignore[assignment]
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

    def state_of(self, x: Numeric, m: int, n: int) -> Any:
        return self.op.state_of(self.state, x, m, n)

    def combine(self, a: Numeric, b: Numeric) -> Any:
        return self.op.both(self.state, a, b)

    def extent(self, shape: StackShape) -> int:
        """How many rows (or columns) are reduced."""
        return shape.N if self.along_m else shape.M  # type: ignore[no-any-return]

    def complete(self, team: Team, shape: StackShape) -> None:
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
        has_own = self.op.dtype is not None and not isinstance(self.op, NamedReduction)
        rule(has_own or accumulator.kind != "c", "epilogue", self,
             f"D's values are {accumulator.name}, and real numbers are reduced: give an epilogues.Combine with a real "
             "dtype, and an of= that makes such numbers of D's")
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

    def finish_block(self, values: Elements, group: Lanes, at: Any) -> Elements:
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

    It reads the values at its place in the chain, before they are converted to D's type:
    ``ReLU() | RowReduce(sums, "sum") | Scale(2.0)`` sums the ReLU's results. It combines them in the wider of the
    accumulator's type (at least float32) and that of ``out``, in an order that depends only on the kernel's tiles. A NaN in
    a row makes its sum, max, min and logsumexp NaN, and is its argmax. An empty row gives 0, -inf or inf, and raises
    ValueError for argmax.

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
