"""``MMAOp``: tensor cores by ``mma.sync`` and ``ldmatrix``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.lang.control import choose, each, join
from gemmkit.lang.given import dtype_given
from gemmkit.lang.registers import Fragment, generate
from gemmkit.operators.base import Operator
from gemmkit.ptx.fragments import FragmentMap, fragment_coordinate
from gemmkit.ptx.ldmatrix import ldmatrix
from gemmkit.ptx.memory import load_shared, store_shared
from gemmkit.ptx.mma import MMA, SPECS, MmaSpec
from gemmkit.ptx.special import lane_index
from gemmkit.tiling import translate


@dataclass(frozen=True)
class MMAOp(Operator):
    """16 x 8 x 16 products on tensor cores: float16 or bfloat16 in, float32 (or float16) accumulation; sm_80+.

    Shared operands may be row- or column-major (``ldmatrix`` transposes on the way), padded for the banks.

    Raises ValueError for a shape or a pair of dtypes that the instruction does not have.
    """

    M: int = 16
    N: int = 8
    K: int = 16
    dtype: Any = np.float16
    accumulator: Any = np.float32

    merges = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dtype", "accumulator"):
            object.__setattr__(self, name, dtype_given(getattr(self, name), "MMAOp", name))
        if (self.M, self.N, self.K) != (16, 8, 16):
            raise ValueError(f"MMAOp(M={self.M}, N={self.N}, K={self.K}): the instruction is M=16, N=8, K=16")
        if (self.dtype, self.accumulator) not in SPECS:
            known = ", ".join(f"{i} -> {a}" for i, a in SPECS)
            raise ValueError(f"MMAOp(dtype={self.dtype}, accumulator={self.accumulator}): the instruction has {known}")

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        return 8, 0

    @cached_property
    def spec(self) -> MmaSpec:
        return SPECS[self.dtype, self.accumulator]

    @cached_property
    def map_a(self) -> FragmentMap:
        return self.spec.a

    @cached_property
    def map_b(self) -> FragmentMap:
        return self.spec.b

    @cached_property
    def map_c(self) -> FragmentMap:
        return self.spec.c

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, 8)

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.dtype, 4)

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(self.accumulator, 4)

    @cached_property
    def instruction(self) -> Any:
        return MMA[self.dtype, self.accumulator]

    def line_alignment(self, operand: str, layout: Any) -> int:
        """16 bytes for ``ldmatrix``, pairs of neighbours for C and D."""
        if operand in ("a", "b"):
            return 16
        return int(layout.dtype.itemsize) * (2 if layout.axis == 1 else 1)

    def load_a(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        """16 x 16 of A. Lane l addresses row l % 16 (of a column-major A: column) of the left or right half."""
        return choose(layout.axis == 1, _load_a_rows, _load_a_columns, layout, pointer, tile, leading)

    def load_b(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        """16 x 8 of B. A row-major B holds the transposes of the 8 x 8 matrices that the instruction wants."""
        return choose(layout.axis == 1, _load_b_rows, _load_b_columns, layout, pointer, tile, leading)

    def load_c(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        """16 x 8 of C: pairs of neighbours where a row is contiguous, else element by element."""
        return choose(layout.axis == 1, _load_c_rows, _load_c_columns, self, layout, pointer, tile, leading)

    def mma(self, a: tuple, b: tuple, c: tuple) -> tuple:
        return self.instruction(a, b, c)

    def store_d(self, layout: Any, pointer: Any, tile: Any, leading: int, d: tuple) -> None:
        choose(layout.axis == 1, _store_d_rows, _store_d_columns, self, layout, pointer, tile, leading, d)


def _matrices(layout: Any, pointer: Any, tile: Any, leading: int, i: int, j: int, count: int, trans: bool) -> tuple:
    """``ldmatrix`` with this lane's row of 8 at (i, j) in the tile."""
    return ldmatrix(pointer, layout.position(translate(tile, i, j).base, leading), layout.position(tile.offset, leading),
                    count, trans)


def _load_a_rows(layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    lane = lane_index()
    return _matrices(layout, pointer, tile, leading, lane % 16, lane // 16 * 8, 4, False)


def _load_a_columns(layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    lane = lane_index()
    return _matrices(layout, pointer, tile, leading, lane // 8 % 2 * 8, lane % 8 + lane // 16 * 8, 4, True)


def _load_b_columns(layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    lane = lane_index()
    return _matrices(layout, pointer, tile, leading, lane // 8 % 2 * 8, lane % 8, 2, False)


def _load_b_rows(layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    lane = lane_index()
    return _matrices(layout, pointer, tile, leading, lane % 16, 0, 2, True)


def _own(operator: Any, tile: Any, n: int) -> Any:
    """The tile moved to where this thread's n-th value of C lies."""
    lane = lane_index()
    return translate(tile, fragment_coordinate(operator.map_c, lane, n, 0), fragment_coordinate(operator.map_c, lane, n, 1))


def _load_c_rows(operator: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return join(generate(2, _load_c_pair, operator, layout, pointer, tile, leading))


def _load_c_pair(n: int, operator: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return load_shared(pointer, layout.position(_own(operator, tile, 2 * n).base, leading),
                       layout.position(tile.offset, leading), 2)


def _load_c_columns(operator: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return join(generate(4, _load_c_one, operator, layout, pointer, tile, leading))


def _load_c_one(n: int, operator: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return load_shared(pointer, layout.position(_own(operator, tile, n).base, leading),
                       layout.position(tile.offset, leading), 1)


def _store_d_rows(operator: Any, layout: Any, pointer: Any, tile: Any, leading: int, d: tuple) -> None:
    offset = layout.position(tile.offset, leading)
    store_shared(pointer, layout.position(_own(operator, tile, 0).base, leading), offset, (d[0], d[1]))
    store_shared(pointer, layout.position(_own(operator, tile, 2).base, leading), offset, (d[2], d[3]))


def _store_d_columns(operator: Any, layout: Any, pointer: Any, tile: Any, leading: int, d: tuple) -> None:
    each(_store_d_one, d, operator, layout, pointer, tile, leading)


def _store_d_one(value: Any, n: int, operator: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> None:
    store_shared(pointer, layout.position(_own(operator, tile, n).base, leading), layout.position(tile.offset, leading),
                 (value,))
