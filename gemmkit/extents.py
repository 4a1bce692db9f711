"""Arithmetic of what has an extent: ``conf.block_shape.M`` as a number, on the host."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


def _operated(f: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """An operator of an extent and a number, and the reflected one."""
    def left(self: Any, other: Any) -> Any:
        number = _number(other)
        return NotImplemented if number is None else f(self.__index__(), number)

    def right(self: Any, other: Any) -> Any:
        number = _number(other)
        return NotImplemented if number is None else f(number, self.__index__())

    return left, right


def _number(x: Any) -> Any:
    return x if isinstance(x, (int, float)) else x.__index__() if hasattr(x, "__index__") else None


class Extent:
    """What has one extent computes as that number does; the results are plain numbers.

    >>> from gemmkit import Tile
    >>> block = Tile(M=64, N=32)
    >>> int(block.M), block.M * block.N, -(-1000 // block.M), block.M == 64, block.M < 100
    (64, 2048, 16, True, True)
    """

    __slots__ = ()

    @property
    def names(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def extents(self) -> tuple[int, ...]:
        raise NotImplementedError

    def __index__(self) -> int:
        if len(self.extents) != 1:
            raise TypeError(f"{self!r} has {len(self.extents)} dimensions; one alone is a number: {self!r}.{self.names[0]}")
        return self.extents[0]

    __add__, __radd__ = _operated(operator.add)
    __sub__, __rsub__ = _operated(operator.sub)
    __mul__, __rmul__ = _operated(operator.mul)
    __floordiv__, __rfloordiv__ = _operated(operator.floordiv)
    __truediv__, __rtruediv__ = _operated(operator.truediv)
    __mod__, __rmod__ = _operated(operator.mod)
    __lt__, __gt__ = _operated(operator.lt)
    __le__, __ge__ = _operated(operator.le)
