"""Stacks of products: which matrix of each operand belongs to a product.

A stack has any number of dimensions, and an operand any strides along them. Products are counted in C order; of that count
each operand makes the coordinates of its own matrix. Dimensions of an operand that lie in each other's stride are merged on
the host (`gemmkit.stacks`), so that most have one, and the count itself is the coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from gemmkit.component_products import matrix_of
from gemmkit.components import Component, Scalar
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import join
from gemmkit.ptx.division import divided, reciprocal


@dataclass(frozen=True)
class Steps(Component):
    """The dimensions of an operand's stack: the fastest, and the ``rest``, slower ones.

    Where the fastest is the only one it needs no ``extent`` (with the ``multiplier`` and ``shift`` that divide by it).
    ``is_still`` says that the operand does not change along it: its array has no such dimension.
    """

    is_still: bool = False
    extent: Scalar = None
    multiplier: Scalar = None
    shift: Scalar = None
    rest: Any = None

    @classmethod
    def of(cls, steps: Sequence[tuple[int, int]]) -> Steps:
        """Of (extent, stride) of each dimension, the slowest first; none is an operand that all products share.

        >>> Steps.of(((5, 48),)).coordinates(3), Steps.of(((5, 48), (7, 0))).coordinates(8), Steps.of(()).coordinates(3)
        ((3,), (1,), ())
        """
        if not steps:
            return cls(True)
        (extent, stride), slower = steps[-1], steps[:-1]
        if not slower:
            return cls(stride == 0)
        multiplier, shift = reciprocal(max(1, extent))
        return cls(stride == 0, extent, multiplier, shift, cls.of(slower))

    @cached_property
    def is_last(self) -> bool:
        return self.rest is None

    def coordinates(self, batch: int) -> tuple:
        """Of a product's matrix in the operand's array, the fastest dimension first."""
        if self.is_last:
            return self.own(batch)
        slower = divided(batch, self.multiplier, self.shift)
        return join((self.own(batch - slower * self.extent), self.rest.coordinates(slower)))

    def own(self, coordinate: int) -> tuple:
        if self.is_still:
            return ()
        return (coordinate,)

    def matrix(self, data: Any, batch: int) -> Any:
        """The view of a product's matrix."""
        return matrix_of(data, self.coordinates(batch))


@dataclass(frozen=True)
class Stack(Component):
    """The matrices of A, B, C and D that belong to each product."""

    a: Steps = Steps(True)
    b: Steps = Steps(True)
    c: Steps = Steps(True)
    d: Steps = Steps(True)


ALONE = Stack()                        # one product: its operands are the matrices themselves
