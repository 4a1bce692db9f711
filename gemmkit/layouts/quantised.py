"""Weights of 2 and 4 bits with a scale for each group of rows, read as floating-point numbers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang.checks import check_flag
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import View
from gemmkit.layouts.base import GlobalLayout, OfArray, SharedLayout
from gemmkit.layouts.matrices import Matrix
from gemmkit.runtime.arrays import ArrayInfo, describe

__all__ = [
    "dequantise", "quantise",
]


WORD_BITS = 32
IN_A_WORD = 8                          # integers of 4 bits
PORTION = 128                          # elements along K whose sum 8-bit floats have before it is scaled
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
#: Why a product of these weights is refused.
FLOAT8_WEIGHTS = ("8-bit floats by integers of 4 bits are multiplied by the kernel of up to 16 rows of A, and by Hopper's "
                  "as D^T = B^T A^T: that takes rows of A, D, words, scales and zero points that begin at multiples of 16 "
                  "bytes, and no C, transform or condition")


@dataclass(frozen=True)
class GroupQuantised(GlobalLayout):
    """B (K x N) of integers of ``bits`` bits. Its array has K * bits / 32 rows of N uint32: a word holds consecutive rows of
    one column, the first in its lowest bits. ``scales`` (float16) and ``zeros`` (uint8) are K / group x N. An element is
    ``(q - zero) * scale``, computed in float32; without ``zeros`` the zero is ``2 ** (bits - 1)``.

    ``dtype`` is A's: float16, bfloat16 or float32, to which elements are rounded; or float8_e4m3fn, which holds ``q - zero``
    exactly. With the latter, of 4 bits and groups of a multiple of 128, sums are multiplied by their group's scale in
    float32 (compute capability 9.0); so are those of up to 16 rows of float16 and bfloat16, of groups of a multiple of 64.

    `gemmkit.layouts.quantised.quantise` makes the arrays, and an object that `matmul` takes for B.

    Raises ConfigError for other bits than 2 and 4 and for a group that is no multiple of a word's rows, ValueError for
    arrays whose shapes do not fit, TypeError for arrays of other dtypes.
    """

    scales: Any
    bits: int = 4
    group: int = 128
    zeros: Any = None

    array_ndim = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 4):
            raise ConfigError(f"bits={self.bits!r}: 2 or 4 is needed")
        if not isinstance(self.group, int) or self.group < 1 or self.group % self.rows:
            raise ConfigError(f"group={self.group!r}: a multiple of the {self.rows} rows in a word is needed")
        if self.dtype.itemsize == 1 and not (self.dtype == E4M3 and self.bits == 4 and self.group % PORTION == 0):
            raise ConfigError(f"dtype={self.dtype}, bits={self.bits}, group={self.group}: with 8-bit floats go "
                              f"float8_e4m3fn, 4 bits and a group that is a multiple of {PORTION}")

    @property
    def rows(self) -> int:
        """Rows of B in a word."""
        return WORD_BITS // self.bits

    @property
    def middle(self) -> int:
        """What stands for zero where no zeros are given."""
        return 1 << (self.bits - 1)

    @property
    def has_zeros(self) -> bool:
        return self.zeros is not None

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return self.value(data[i // self.rows, j], i, j)

    def value(self, word: Any, i: int, j: int) -> Any:
        """The element in row ``i``, column ``j``, which is in ``word``."""
        q = np.float32((word >> np.uint32(i % self.rows * self.bits)) & np.uint32((1 << self.bits) - 1))
        scale = np.float32(self.scales[i // self.group, j])
        if self.has_zeros:
            return (q - np.float32(self.zeros[i // self.group, j])) * scale
        return (q - np.float32(self.middle)) * scale

    @property
    def storage(self) -> np.dtype:
        return np.dtype(np.uint32)

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return array.shape[0] * self.rows, array.shape[1]

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows // self.rows, columns

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        wanted = rows // self.group, columns
        if rows % self.group:
            raise ValueError(f"{name} has {rows} rows; a multiple of group={self.group} is needed")
        for field, dtype in (("scales", np.float16), ("zeros", np.uint8)) if self.has_zeros else (("scales", np.float16),):
            info = describe(getattr(self, field), field)
            if info.shape != wanted:
                raise ValueError(f"{field} has shape {info.shape}; {wanted} is needed for {name}, which is {rows} x "
                                 f"{columns} in groups of {self.group} rows")
            if info.dtype != dtype:
                raise TypeError(f"{field} has dtype {info.dtype}; {np.dtype(dtype)} is needed: kernels read its bits")
        if array is not None and array.dtype != self.storage:
            raise TypeError(f"{name} has dtype {array.dtype}; words of {self.storage} are needed")


@dataclass(frozen=True, init=False)
class QuantisedTranspose(OfArray, GlobalLayout):
    """The transpose of a B in ``layout``, which is A where swap-AB computes D^T = B^T A^T: its array is B's, transposed."""

    layout: GroupQuantised

    def __init__(self, layout: GroupQuantised):
        for name, value in dict(dtype=layout.dtype, layout=layout).items():
            object.__setattr__(self, name, value)

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return self.layout.value(data[i, j // self.layout.rows], j, i)

    @property
    def vector_axis(self) -> int | None:
        return None

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return array.shape[0], array.shape[1] * self.layout.rows

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, columns // self.layout.rows

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        self.layout.check(array, columns, rows, name)


@dataclass(frozen=True)
class QuantisedTile(SharedLayout):
    """A tile of a `QuantisedTranspose` of 4 bits in shared memory, in bytes: lines of ``rows`` words, a line for each 8
    elements along K; then lines of as many scales (float16), one for each ``group``; then of zero points (uint8), if there
    are some."""

    rows: int
    depth: int
    group: int
    has_zeros: bool

    def __init__(self, rows: int, depth: int, group: int, has_zeros: bool):
        for name, value in dict(dtype=np.dtype(np.uint8), rows=rows, depth=depth, group=group, has_zeros=has_zeros).items():
            object.__setattr__(self, name, value)

    @property
    def spans(self) -> tuple[int, int, int]:
        """Elements along K of a line of words, of scales and of zero points."""
        return IN_A_WORD, self.group, self.group

    @property
    def lines(self) -> int:
        """Lines of words."""
        return self.depth // IN_A_WORD

    @property
    def groups(self) -> int:
        """Lines of scales."""
        return max(1, self.depth // self.group)

    @property
    def begins(self) -> tuple[int, int, int]:
        """The bytes at which words, scales and zero points begin."""
        scales = self.lines * self.rows * 4
        return 0, scales, scales + self.groups * self.rows * 2

    def physical_size(self, rows: int, columns: int) -> int:
        return self.begins[2] + self.groups * self.rows * self.has_zeros


# --------------------------------------------------------------------------------------------------
# Weights of 2 and 4 bits with group scales: quantised and dequantised on the host.

def quantise(weights: Any, bits: int = 4, group: int = 128, symmetric: bool = True, dtype: Any = "float16") -> Matrix:
    """A NumPy matrix B (K x N, float16 or float32) as integers of ``bits`` bits, for B of `matmul` with an A of ``dtype``
    (`GroupQuantised` says which).

    Each ``group`` rows of a column share a float16 scale, rounded to nearest: symmetric around zero, or from the least
    to the greatest with a zero point of its own, kept as uint8.

    Raises TypeError for what is no such matrix, ConfigError for other bits and groups than `GroupQuantised` takes,
    ValueError for K that is no multiple of ``group``, for numbers that are not finite and for scales that float16 does
    not hold.

    >>> import gemmkit as gk
    >>> b = quantise(np.tile(np.float32([[-8], [7]]), (4, 1)), bits=4, group=8)
    >>> with gk.emulate():
    ...     gk.matmul(np.ones((1, 8), np.float16), b).tolist()
    [[-4.0]]
    """
    if not isinstance(weights, np.ndarray) or weights.ndim != 2 or weights.dtype not in (np.float16, np.float32):
        raise TypeError("weights: a NumPy matrix of float16 or float32 is needed")
    layout = GroupQuantised(dtype, np.empty((0, 0), np.float16), bits, group)
    rows, columns = weights.shape
    if rows % group:
        raise ValueError(f"weights has {rows} rows; a multiple of group={group} is needed")
    check_flag(symmetric, "quantise", "symmetric")
    if not np.isfinite(weights).all():
        raise ValueError("weights has elements that are not finite")
    grouped = weights.astype(np.float64).reshape(rows // group, group, columns)
    top = (1 << bits) - 1
    low, high = grouped.min(axis=1, initial=0.0), grouped.max(axis=1, initial=0.0)
    with np.errstate(over="ignore"):
        exact = np.maximum(-low / layout.middle, high / (layout.middle - 1)) if symmetric else (high - low) / top
        scales = np.maximum(exact, np.finfo(np.float16).smallest_subnormal).astype(np.float16)
    if not np.isfinite(scales).all():
        raise ValueError("weights has a group whose scale is too large for float16")
    steps = scales.astype(np.float64)
    zeros = None if symmetric else np.clip(np.rint(-low / steps), 0, top).astype(np.uint8)
    middle = layout.middle if zeros is None else zeros[:, None]
    integers = np.clip(np.rint(grouped / steps[:, None]) + middle, 0, top).astype(np.uint32)
    integers = integers.reshape(rows // layout.rows, layout.rows, columns)
    shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32)[:, None]
    words = np.bitwise_or.reduce(integers << shifts, axis=1)
    return Matrix(words, GroupQuantised(dtype, scales, bits, group, zeros))


def dequantise(matrix: Matrix) -> np.ndarray:
    """What `quantise` gave as a float32 matrix: the reference of `GroupQuantised`.

    >>> dequantise(quantise(np.float32(8 * [[-8]]), bits=4, group=8))[:2].tolist()
    [[-8.0], [-8.0]]
    """
    layout = getattr(matrix, "layout", None)
    if not isinstance(matrix, Matrix) or not isinstance(layout, GroupQuantised):
        raise TypeError(f"matrix={matrix!r}: a Matrix of a GroupQuantised layout is needed, as quantise makes it")
    rows, columns = matrix.shape
    shifts = np.arange(0, WORD_BITS, layout.bits, dtype=np.uint32)[:, None]
    integers = (matrix.array[:, None] >> shifts) & np.uint32((1 << layout.bits) - 1)
    grouped = integers.reshape(rows // layout.group, layout.group, columns).astype(np.float32)
    middle = np.float32(layout.middle) if layout.zeros is None else layout.zeros[:, None].astype(np.float32)
    values: np.ndarray = (grouped - middle) * layout.scales[:, None].astype(np.float32)
    return values.reshape(rows, columns)
