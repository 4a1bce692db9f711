"""``MMAOp``: tensor cores by ``mma.sync``."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.lang.component_class import dataclass
from gemmkit.lang.given import dtype_given
from gemmkit.lang.registers import Fragment
from gemmkit.operators.base import Operator
from gemmkit.operators.warp_fragments import (
    LINE,
    a_across,
    a_along,
    b_across,
    b_along,
    element_place,
    load_elements,
    load_matrices,
    store_elements,
)
from gemmkit.ptx.fragments import FragmentMap
from gemmkit.ptx.mma import MMA, SPECS, MmaSpec, map_b, map_c

_SUMS = {"i": np.dtype(np.int32), "u": np.dtype(np.int32)}


@dataclass(frozen=True)
class MMAOp(Operator):
    """Products of a warp on tensor cores; sm_75+.

    | ``dtype`` | M x N x K | ``accumulator`` | from |
    |---|---|---|---|
    | float16, bfloat16 | 16 x 8 x 16 (float16: 8) | float32 (of float16 also float16) | sm_80 (8: sm_75) |
    | float32: its products are those of tf32 | 16 x 8 x 8 (or 4) | float32 | sm_80 |
    | int8, uint8 | 16 x 8 x 32; 8 x 8 x 16 | int32; sums wrap | sm_80; sm_75 |
    | float8_e4m3fn, float8_e5m2 | 16 x 8 x 32 | float32 | sm_89 |
    | float64 | 16 x 8 x 8 (4 or 16); 8 x 8 x 4 | float64 | sm_90; sm_80 |

    tf32 has 10 bits of the mantissa, to which inputs are rounded: a choice that is never made for the caller. ``b_dtype`` is
    for 8-bit types, which can be mixed. N = 16 issues two instructions, with both columns of B in one ``ldmatrix``.

    Shared operands may be contiguous along K or across it, of 8-bit types along K only. `padding` says how much longer
    lines are to be for no two accesses of a warp to meet in a bank.

    Raises ValueError for a shape or dtypes that no instruction has.

    >>> MMAOp(dtype="float64").shape
    (16, 8, 8)
    """

    M: int = 16
    N: int = 8
    K: Any = None
    dtype: Any = np.float16
    accumulator: Any = None
    b_dtype: Any = None

    merges = True
    has_places = True

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype = dtype_given(self.dtype, "MMAOp")
        b_dtype = dtype if self.b_dtype is None else dtype_given(self.b_dtype, "MMAOp", "b_dtype")
        accumulator = (_usual_sums(dtype) if self.accumulator is None
                       else dtype_given(self.accumulator, "MMAOp", "accumulator"))
        K = _usual_depth(dtype) if self.K is None else self.K
        for name, value in (("dtype", dtype), ("b_dtype", b_dtype), ("accumulator", accumulator), ("K", K)):
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        given = self.dtype, self.b_dtype, self.accumulator
        if given not in {key[2:] for key in SPECS}:
            known = dict.fromkeys(f"{a} x {b} -> {acc}" if a != b else f"{a} -> {acc}" for _, _, a, b, acc in SPECS)
            said = f", b_dtype={self.b_dtype}" if self.b_dtype != self.dtype else ""
            raise ValueError(f"MMAOp(dtype={self.dtype}, accumulator={self.accumulator}{said}): the instructions have "
                             + ", ".join(known))
        if not all(isinstance(x, int) for x in self.shape) or self.N not in (8, 16) or self._key not in SPECS:
            shapes = ", ".join(f"M={M}, N=8 or 16, K={K}" for M, K, *types in SPECS if tuple(types) == given)
            raise ValueError(f"MMAOp(M={self.M}, N={self.N}, K={self.K}): the shapes for {self.dtype} are {shapes}")

    def __repr__(self) -> str:
        """As one would write it, without what follows from the dtype."""
        usual = {"M": 16, "N": 8, "K": _usual_depth(self.dtype), "dtype": np.dtype(np.float16),
                 "accumulator": _usual_sums(self.dtype), "b_dtype": self.dtype}
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        parts = [f"{name}={getattr(value, 'name', value)!r}" for name, value in given.items() if value != usual.get(name)]
        return f"{type(self).__name__}({', '.join(parts)})"

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        return self.spec.minimum_arch

    def instead(self, arch: tuple[int, int]) -> str:
        """The shape of the same dtypes that the GPU has, if it has one."""
        there = (dataclasses.replace(self, M=spec.M, K=spec.K) for key, spec in SPECS.items()
                 if key[2:] == self._key[2:] and spec.minimum_arch <= arch)
        return " or ".join((*map(repr, list(there)[:1]), super().instead(arch)))

    @cached_property
    def _key(self) -> Any:
        return self.M, self.K, self.dtype, self.b_dtype, self.accumulator

    @cached_property
    def spec(self) -> MmaSpec:
        return SPECS[self._key]

    @cached_property
    def instruction(self) -> Any:
        return MMA[self._key]

    # -- which lane holds what ------------------------------------------------------------------------------------------

    @cached_property
    def map_a(self) -> FragmentMap:
        return self.spec.a

    @cached_property
    def map_b(self) -> FragmentMap:
        return map_b(self.K, self.N, self.b_dtype.itemsize)

    @cached_property
    def map_c(self) -> FragmentMap:
        return map_c(self.M, self.N)

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, self.map_a.values)

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.b_dtype, self.map_b.values)

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(self.accumulator, self.map_c.values)

    # -- how they come out of shared memory -----------------------------------------------------------------------------

    @cached_property
    def line(self) -> int:
        """Elements in a row of ldmatrix."""
        return LINE // int(self.dtype.itemsize)

    @cached_property
    def lines(self) -> int:
        """Rows of ldmatrix along K: 1 or 2."""
        return int(self.K) // self.line

    @cached_property
    def columns(self) -> int:
        """Instructions side by side."""
        return self.N // 8

    @cached_property
    def further(self) -> int:
        """Columns from one instruction to the next, if there is one: no lane addresses what is not the operation's."""
        return 8 * (self.columns - 1)

    def by_matrices(self, operand: str, axis: int) -> bool:
        """Whether ``ldmatrix`` loads A or B, contiguous along ``axis`` of the matrix, and not each lane its elements."""
        return self.along_by_matrices if axis == (1 if operand == "a" else 0) else self.across_by_matrices

    @cached_property
    def along_by_matrices(self) -> bool:
        """Where inputs are contiguous along K."""
        return bool(self.dtype.itemsize < 8)

    @cached_property
    def across_by_matrices(self) -> bool:
        """Where they are not: ldmatrix turns elements of 16 bits alone."""
        return bool(self.dtype.itemsize == 2)

    def refuses(self, operand: str, layout: Any) -> str | None:
        if operand in ("a", "b") and self.dtype.itemsize == 1 and not self.by_matrices(operand, layout.axis):
            order = "RowMajor" if operand == "a" else "ColMajor"
            return (f"{self!r} loads elements of 8 bits that are contiguous along K only; take Padded({order}(...), 16), "
                    "and the copy to shared memory turns them")
        return None

    def line_alignment(self, operand: str, layout: Any) -> int:
        """16 bytes for ``ldmatrix``, pairs of neighbours for C and D."""
        if operand in ("a", "b"):
            return LINE if self.by_matrices(operand, layout.axis) else int(layout.dtype.itemsize)
        return int(layout.dtype.itemsize) * (2 if layout.axis == 1 else 1)

    def shared_axis(self, operand: str, axis: int) -> int:
        """Elements of 8 bits along K, wherever they come from."""
        if self.dtype.itemsize > 1 or operand not in ("a", "b"):
            return axis
        return 1 if operand == "a" else 0

    def padding(self, operand: str, axis: int) -> int:
        """ldmatrix reads 16 bytes of 8 lines at a time: 16. Lanes that load elements read 32 bytes of 4 lines: 32. Pairs of
        float64 go out in 64 bytes of 2 lines: 64."""
        if operand in ("a", "b"):
            return 16 if self.by_matrices(operand, axis) else 32
        return 64 if axis == 1 and self.accumulator.itemsize == 8 else 16

    def load_a(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        if layout.axis == 1 and self.along_by_matrices:
            return load_matrices(layout, pointer, a_along(self, tile), leading, self.M // 8 * self.lines, False)
        if layout.axis == 0 and self.across_by_matrices:
            return load_matrices(layout, pointer, a_across(self, tile), leading, 2 * self.lines, True)
        return load_elements(self.map_a, 1, layout, pointer, tile, leading)

    def load_b(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        if layout.axis == 0 and self.along_by_matrices:
            return load_matrices(layout, pointer, b_along(self, tile), leading, self.lines * self.columns, False)
        if layout.axis == 1 and self.across_by_matrices:
            return load_matrices(layout, pointer, b_across(self, tile), leading, self.lines * self.columns, True)
        return load_elements(self.map_b, 1, layout, pointer, tile, leading)

    def place_a(self, layout: Any, tile: Any, leading: int) -> int:
        if layout.axis == 1 and self.along_by_matrices:
            return layout.position(a_along(self, tile).base, leading)
        if layout.axis == 0 and self.across_by_matrices:
            return layout.position(a_across(self, tile).base, leading)
        return element_place(self.map_a, layout, tile, leading)

    def place_b(self, layout: Any, tile: Any, leading: int) -> int:
        if layout.axis == 0 and self.along_by_matrices:
            return layout.position(b_along(self, tile).base, leading)
        if layout.axis == 1 and self.across_by_matrices:
            return layout.position(b_across(self, tile).base, leading)
        return element_place(self.map_b, layout, tile, leading)

    def load_c(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        """Pairs of neighbours where a row is contiguous, else element by element."""
        if layout.axis == 1:
            return _load_c_rows(self, layout, pointer, tile, leading)
        return _load_c_columns(self, layout, pointer, tile, leading)

    def mma(self, a: tuple, b: tuple, c: tuple) -> tuple:
        return self.instruction(a, b, c)

    def store_d(self, layout: Any, pointer: Any, tile: Any, leading: int, d: tuple) -> None:
        store_elements(self.map_c, (1, 2)[layout.axis], 1, layout, pointer, tile, leading, d)


def _usual_sums(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.itemsize == 8 else _SUMS.get(dtype.kind, np.dtype(np.float32))


def _usual_depth(dtype: np.dtype) -> int:
    return 8 if dtype.itemsize == 8 else 32 // int(dtype.itemsize)


def _load_c_rows(operator: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return load_elements(operator.map_c, 2, layout, pointer, tile, leading)


def _load_c_columns(operator: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    return load_elements(operator.map_c, 1, layout, pointer, tile, leading)
