"""A program on NumPy, in float64: blocks are slices, and dimensions have names, so that a row's value meets its row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from gemmkit.programs.interpreter import Interpreter
from gemmkit.programs.values import Axis, Extent, Index, Parameter

BLOCK = 37                             # an odd length shows that a result does not depend on it
FUNCTIONS: dict[str, Any] = dict(
    add=np.add, sub=np.subtract, mul=np.multiply, div=np.divide, neg=np.negative, lt=np.less, le=np.less_equal, eq=np.equal,
    ne=np.not_equal, exp=np.exp, log=np.log, tanh=np.tanh, sqrt=np.sqrt, max=np.maximum,
    finite=lambda x: np.where(x == -np.inf, 0.0, x), where=np.where,
    **{"and": np.logical_and, "or": np.logical_or, "not": np.logical_not})


class Named:
    """Numbers with dimensions."""

    def __init__(self, dims: tuple, array: Any):
        self.dims, self.array = dims, np.asarray(array)

    def over(self, dims: tuple) -> np.ndarray:
        """The numbers with an axis for each of ``dims``, of length 1 where they have it not."""
        order = [self.dims.index(d) for d in dims if d in self.dims]
        return self.array.transpose(order)[tuple(slice(None) if d in self.dims else None for d in dims)]


class Reference(Interpreter):
    """``block``: how long blocks are."""

    kind = Named

    def __init__(self, block: int = BLOCK):
        super().__init__()
        self.block = block
        self.only: Index | None = None

    def constant(self, x: Any) -> Named:
        return Named((), np.float64(x))

    def number(self, value: Named) -> float | None:
        return None                                    # the trace has looked at constants

    def use(self, index: Index, parameter: Parameter, axis: int, key: tuple) -> None:
        """The trace has looked at it."""

    def is_condition(self, value: Named) -> bool:
        return value.array.dtype == np.bool_

    def renamed(self, value: Named, dims: tuple) -> Named:
        return Named(dims, value.array)

    def compute(self, op: str, args: tuple, dims: tuple, data: Any = None) -> Named:
        if op == "dot":
            return Named(dims, args[0].array @ args[1].array)
        if op == "transpose":
            return Named(dims, args[0].array.T)
        if op == "rowmax":
            return Named(dims, np.max(args[0].array, axis=1, initial=-np.inf))
        if op == "rowsum":
            return Named(dims, np.sum(args[0].array, axis=1))
        if op == "cast":
            return Named(dims, args[0].array.astype(data).astype(np.float64))
        with np.errstate(all="ignore"):
            return Named(dims, FUNCTIONS[op](*(x.over(dims) for x in args)))

    def filled(self, dims: tuple, value: float) -> Named:
        return Named(dims, np.full([_length(d) for d in dims], value))

    def fitted(self, value: Named, dims: tuple) -> Named:
        return Named(dims, np.broadcast_to(value.over(dims), [_length(d) for d in dims]))

    def load(self, parameter: Parameter, key: tuple, dims: tuple) -> Named:
        return Named(dims, np.asarray(parameter.data[_slices(key)], np.float64))

    def store(self, parameter: Parameter, key: tuple, dims: tuple, value: Named) -> None:
        if self.only is None or self.only.start == 0:
            parameter.data[_slices(key)] = value.over(dims)

    def coordinate(self, dim: Any) -> Named:
        return Named((dim,), np.arange(dim.size) if isinstance(dim, Axis) else np.arange(dim.start, dim.stop))

    def loop(self, extents: tuple[Extent, ...], kind: str, stop: Any = None) -> Iterator[Any]:
        if stop is not None:
            yield from self._blocks(extents[0], min(int(stop.value.array), extents[0].size))
            return
        of_tile = kind == "parallel"
        for blocks in itertools.product(*(self._blocks(extent, extent.size, of_tile) for extent in extents)):
            yield blocks if len(blocks) > 1 else blocks[0]

    def _blocks(self, extent: Extent, end: int, of_tile: bool = False) -> list[Index]:
        step = 1 if extent.stack else self.block
        return [Index(extent, "", start, min(start + step, end), of_tile) for start in range(0, end, step)]


def _length(dim: Any) -> int:
    return dim.size if isinstance(dim, Axis) else dim.stop - dim.start


def _slices(key: tuple) -> tuple:
    return tuple(index.start if index.stack else slice(index.start, index.stop) for index in key)
