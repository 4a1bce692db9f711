"""Sums over ranks, in the order of ranks: the same bits in every call, and on every rank."""

from __future__ import annotations

from types import FunctionType
from typing import Any, ClassVar

import numpy as np

from gemmkit.components import Array, Component, Scalar
from gemmkit.config import ConfigError
from gemmkit.epilogues import Epilogue
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.registers import apply
from gemmkit.lang.values import convert
from gemmkit.layouts import RowMajor
from gemmkit.operators import Algebra, FPUOp, MMAOp, WGMMAOp, WMMAOp
from gemmkit.runtime.arrays import info_of
from gemmkit.tiling import translate
from gemmkit.transforms.base import transformed


def plus(x: Any, y: Any) -> Any:
    return x + y


def least(x: Any, y: Any) -> Any:
    return min(x, y)


def most(x: Any, y: Any) -> Any:
    return max(x, y)


@dataclass(frozen=True)
class Rule(Component):
    """An associative function of two sums, called as an operator's own `merge`."""

    device_methods: ClassVar[tuple[str, ...]] = ("merge",)

    function: Any

    def merge(self, x: Any, y: Any) -> Any:
        return self.function(x, y)


@dataclass(frozen=True)
class InRankOrder(Epilogue):
    """Merges the partial sums of all ``ranks``, from the first to the last, in ``dtype``; with ``follows`` behind the value
    of D that is there already (a C).

    ``parts`` has ``rows`` rows from each rank, one rank's below the other's. With ``travels`` the value of D is rank
    ``own``'s partial sum, which was not sent, and is rounded to that dtype as the others were. ``rule`` has the
    ``merge(x, y)``: an operator, or a `Rule`.

    >>> parts = np.arange(6, dtype=np.float32).reshape(3, 2)                      # a row from each of three ranks
    >>> float(InRankOrder(parts, 1, Rule(plus), np.dtype(np.float32), 3)(np.float32(0), 0, 1))
    9.0
    """

    parts: Array
    rows: Scalar
    rule: Any
    dtype: Any
    ranks: int
    follows: bool = False
    travels: Any = None
    own: int = -1                      # static: a kernel for each rank, which loads nothing for its own
    layout: Any = None                 # of ``parts``: row-major, as ranks send them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout is None:
            object.__setattr__(self, "layout", RowMajor(info_of(self.parts, "parts").dtype))

    def __call__(self, x: Any, m: int, n: int) -> Any:
        total = self.part(0, x, m, n)
        if self.follows:
            total = convert(self.dtype, self.rule.merge(convert(self.dtype, x), total))
        for rank in range(1, self.ranks):
            total = convert(self.dtype, self.rule.merge(total, self.part(rank, x, m, n)))
        return total

    def part(self, rank: int, x: Any, m: int, n: int) -> Any:
        """A rank's partial sum: what it sent, or of its own the product's, rounded as if it had been sent."""
        if self.takes_own and rank == self.own:
            return convert(self.dtype, convert(self.travels, x))
        return convert(self.dtype, self.parts[rank * self.rows + m, n])

    def finish(self, values: tuple, tile: Any, shape: Any) -> tuple:
        """The same of a thread's tile, whose parts it loads in vectors."""
        total = self.parts_at(0, values, tile, shape)
        if self.follows:
            total = apply(merge_parts, apply(as_sum, values, self), total, self)
        for rank in range(1, self.ranks):
            total = apply(merge_parts, total, self.parts_at(rank, values, tile, shape), self)
        return total

    def parts_at(self, rank: int, values: tuple, tile: Any, shape: Any) -> tuple:
        if self.takes_own and rank == self.own:
            return apply(as_sent, values, self)
        return apply(as_sum, self.layout.load(self.parts, translate(tile, rank * self.rows, 0), shape), self)

    @property
    def takes_own(self) -> bool:
        return self.travels is not None

    reads_tiles = True


def as_sum(x: Any, n: int, merging: Any) -> Any:
    return convert(merging.dtype, x)


def as_sent(x: Any, n: int, merging: Any) -> Any:
    return convert(merging.dtype, convert(merging.travels, x))


def merge_parts(x: Any, n: int, others: tuple, merging: Any) -> Any:
    return convert(merging.dtype, merging.rule.merge(x, others[n]))


@dataclass(frozen=True)
class WithOther(Epilogue):
    """`InRankOrder` of two ranks, whose own partial sums the product has. ``other`` are the other rank's, in an array of D's
    form, which Hopper's kernel fetches ahead of time; ``is_second``: they are rank 1's.

    >>> others = np.float32([[1, 2]])
    >>> float(WithOther(others, Rule(plus), np.dtype(np.float32), np.dtype(np.float32), True)(np.float32(3), 0, 1))
    5.0
    """

    other: Array
    rule: Any
    dtype: Any
    travels: Any
    is_second: bool
    layout: Any = None

    beside = "other"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout is None:
            object.__setattr__(self, "layout", RowMajor(info_of(self.other, "other").dtype))

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return self.merged(x, self.other[m, n])

    def merged(self, x: Any, other: Any) -> Any:
        """The product's sum, rounded as if it had been sent, and the other rank's, the first rank's first."""
        own, sent = convert(self.dtype, convert(self.travels, x)), convert(self.dtype, other)
        if self.is_second:
            return convert(self.dtype, self.rule.merge(own, sent))
        return convert(self.dtype, self.rule.merge(sent, own))

    def finish(self, values: tuple, tile: Any, shape: Any) -> tuple:
        return apply(merge_other, values, self.layout.load(self.other, tile, shape), self)

    reads_tiles = True


def merge_other(x: Any, n: int, others: tuple, merging: Any) -> Any:
    return merging.merged(x, others[n])


@dataclass(frozen=True)
class OfTransform(Epilogue):
    """A transform of D as a part of the epilogue.

    >>> from gemmkit.transforms import Elementwise
    >>> OfTransform(Elementwise(lambda x, m, n: x + 10 * m))(0.5, 1, 2)
    10.5
    """

    transform: Any

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return transformed(self.transform, x, m, n)


def rule_of(operator: Any, combine: Any) -> Component:
    """How two ranks' sums become one: by ``combine``, or by what the operator says of sums over parts of K.

    Raises TypeError for a ``combine`` that is no plain function, ConfigError where none is given and the operator says
    nothing.
    """
    if combine is not None:
        found = least if combine is min else most if combine is max else combine
        if not isinstance(found, FunctionType):
            raise TypeError(f"combine={combine!r}: a plain Python function of two numbers is needed, or min, or max")
        return Rule(found)
    base = operator.base if isinstance(operator, Algebra) else operator
    if isinstance(base, (MMAOp, WGMMAOp, WMMAOp)):                # tensor cores add, and a Rule adds numbers of any parts
        return Rule(plus)
    if not base.merges:
        raise ConfigError(f"combine: {type(base).__name__} does not say that sums over parts of K may be combined; say "
                          "merges = True in its class where combine is associative and start its neutral element, or give "
                          "combine=")
    if isinstance(base, FPUOp) and base.is_ordinary:
        return Rule(plus)
    if isinstance(operator, Algebra):
        raise ConfigError(f"combine: give it beside {operator!r}: numbers of several parts, whose base has a combine of its "
                          "own")
    return base


def accumulator_of(config: Any, dtype: np.dtype) -> np.dtype:
    """The dtype in which results of ``dtype`` are added up: the accumulator's, or complex numbers of two float32 or more."""
    if dtype.names is not None:
        return dtype
    if dtype.kind == "c":
        return np.result_type(dtype, np.complex64)
    return np.dtype(config.operator.fragment_c.dtype)
