"""`Pairs`, `Rotary` and `Pack`: epilogues of two neighbours in a row of D, or of the product.

A thread holds both. On Hopper lane l of a wgmma fragment has columns 2 (l mod 4) and the next one of an octet. In the other
kernels a thread takes lines of D's tile from shared memory, of eight columns where D's own vectors lie down its columns.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.components import Array
from gemmkit.epilogues.base import Epilogue
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import join, split
from gemmkit.lang.given import dtype_given, function_given, required
from gemmkit.lang.registers import apply
from gemmkit.lang.returned import number, numbers
from gemmkit.layouts.base import ResultLayout
from gemmkit.layouts.plain import Packed
from gemmkit.runtime.arrays import describe, info_of


@dataclass(frozen=True)
class Pairwise(Epilogue):
    """An epilogue with ``pair(x, y, m, n)``: two values for those in row m, columns n and n + 1, n even."""

    def pair(self, x: Any, y: Any, m: int, n: int) -> tuple:
        return x, y

    def finish_block(self, values: tuple, group: Any, at: Any) -> tuple:
        """Beyond D's edge it is asked with the coordinates of the nearest pair in range."""
        return join(apply(finish_pair, split(values, 2), self, group, at))

    # -- host -------------------------------------------------------------------------------------------------------

    finishes_blocks = True
    neighbours = 2
    passes_on = False

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless columns come in pairs."""
        if N % 2:
            raise ValueError(f"{type(self).__name__} needs an even number of columns; the result is {M} x {N}")


def finish_pair(pair: tuple, i: int, epilogue: Any, group: Any, at: Any) -> tuple:
    m, n = group.row_at(2 * i, at), min(group.column(2 * i, at), at.shape.N - 2)
    return numbers(epilogue, "f", epilogue.pair(pair[0], pair[1], m, n), pair)


@dataclass(frozen=True)
class Pairs(Pairwise):
    """D's elements (m, n) and (m, n + 1), for each even n, are ``f`` of both: ``f(x, y)``, or ``f(x, y, m, n)`` with the
    coordinates of the first, gives a tuple of two.

    It stands anywhere in a chain, and gets values as they are there. Arrays and NumPy scalars that f captured are arguments
    of the kernel. Works in every kernel, with stacks and folds (of a fold neighbours are those of D).

    Raises TypeError for an f that is no function of 2 or 4 arguments, ValueError where D has an odd number of columns.

    >>> import numpy as np, gemmkit as gk
    >>> a = np.float32([[1, 2], [3, 4]])
    >>> with gk.emulate():
    ...     gk.matmul(a, np.eye(2, dtype=np.float32), epilogue=Pairs(lambda x, y: (x + y, x - y))).tolist()
    [[3.0, -1.0], [7.0, -1.0]]
    """

    f: Any

    def __post_init__(self) -> None:
        wanted = "f(x, y) or f(x, y, m, n), a function of two neighbours,"
        object.__setattr__(self, "f", function_given(self.f, "Pairs", "f", (2, 4), wanted))

    @property
    def with_coordinates(self) -> bool:
        return required(self.f) == 4

    def pair(self, x: Any, y: Any, m: int, n: int) -> tuple:
        if self.with_coordinates:
            return self.f(x, y, m, n)
        return self.f(x, y)


@dataclass(frozen=True)
class Rotary(Pairwise):
    """Rotary position embedding (Su et al., 2021): the pair in columns (2 i, 2 i + 1) of each head turns by an angle of its
    row: x cos - y sin, x sin + y cos.

    Args:
        cos, sin: arrays (M, H / 2) of cos and sin of the angles of each row, H the size of a head. Columns of D are those of
            the heads side by side: a multiple of H. Of a stack all products have the same.

    Pairs are neighbours, as in the paper. (Models whose pairs are (i, i + H / 2) have the columns of their weights in
    another order: a permutation of these makes neighbours of them.)

    Raises ValueError for arrays of other shapes.

    >>> import numpy as np, gemmkit as gk
    >>> angles = np.float32([[0.0], [np.pi / 2]])
    >>> with gk.emulate():
    ...     gk.matmul(np.float32([[1, 2], [3, 4]]), np.eye(2, dtype=np.float32),
    ...               epilogue=Rotary(np.cos(angles), np.sin(angles))).round(3).tolist()
    [[1.0, 2.0], [-4.0, 3.0]]
    """

    cos: Array
    sin: Array
    head: int = 0                      # columns of a head: found by the arrays

    array_ndims = MappingProxyType({"cos": 2})

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = [info_of(of, f"{name} of Rotary").shape
                  for name, of in (("cos", self.cos), ("sin", self.sin))]
        if len(shapes[0]) != 2 or shapes[0] != shapes[1] or shapes[0][1] == 0:
            raise ValueError(f"Rotary: cos has shape {shapes[0]} and sin {shapes[1]}; both need (M, H / 2), an element for "
                             "each row and each pair of a head")
        object.__setattr__(self, "head", 2 * shapes[0][1])

    def pair(self, x: Any, y: Any, m: int, n: int) -> tuple:
        i = n % self.head // 2
        c, s = self.cos[m, i], self.sin[m, i]
        return x * c - y * s, x * s + y * c

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless D has a row for each of the angles', and whole heads."""
        rows = describe(self.cos, "cos").shape[0]
        if rows != M or N % self.head:
            raise ValueError(f"Rotary: cos has shape {(rows, self.head // 2)}, that is angles of {rows} rows and heads of "
                             f"{self.head} columns; the result is {M} x {N}")


# -- one of two -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Pack(Pairwise):
    """D's element (m, j) is ``f`` of the product's (m, 2 j) and (m, 2 j + 1): D has half the product's columns.

    Args:
        f: ``f(x, y)``, or ``f(x, y, m, n)`` with the coordinates of the first in the product, gives a number of ``dtype``.
        dtype: D's, where no out is given.

    It is the last epilogue of a chain, which acts on the product's columns. D is plain; from Hopper's fragments it leaves
    element by element, in the other kernels in vectors.

    Raises TypeError for an epilogue behind it and for an f that is no function of 2 or 4 arguments, ValueError for an odd
    number of columns, ConfigError where D is not plain, or behind a fold (whose own function can pack).

    Two int4 a byte, clamped and rounded:

    >>> import numpy as np, gemmkit as gk
    >>> def int4(x):
    ...     return np.int32(round(min(max(x, -8), 7))) & 15
    >>> with gk.emulate():
    ...     gk.matmul(np.float32([[1, 2, -1, 9]]), np.eye(4, dtype=np.float32),
    ...               epilogue=Pack(lambda x, y: np.uint8(int4(x) | int4(y) << 4))).tolist()
    [[33, 127]]
    """

    f: Any
    dtype: Any = np.dtype(np.uint8)

    ends = "packs the values of D, so that nothing can follow it"

    def __post_init__(self) -> None:
        wanted = "f(x, y) or f(x, y, m, n), a function of two neighbours,"
        object.__setattr__(self, "f", function_given(self.f, "Pack", "f", (2, 4), wanted))
        object.__setattr__(self, "dtype", dtype_given(self.dtype, "Pack", "dtype"))

    @property
    def with_coordinates(self) -> bool:
        return required(self.f) == 4

    def one(self, x: Any, y: Any, m: int, n: int) -> Any:
        if self.with_coordinates:
            return number(self, "f", self.f(x, y, m, n), x)
        return number(self, "f", self.f(x, y), x)

    def finish_block(self, values: tuple, group: Any, at: Any) -> tuple:
        return apply(pack_pair, split(values, 2), self, group, at)

    # -- host -------------------------------------------------------------------------------------------------------

    is_last = True

    def of_result(self, layout: ResultLayout) -> ResultLayout:
        return layout if isinstance(layout, Packed) else Packed(layout)

    @property
    def result_dtype(self) -> Any:
        return self.dtype


def pack_pair(pair: tuple, i: int, epilogue: Any, group: Any, at: Any) -> Any:
    m, n = group.row_at(2 * i, at), min(group.column(2 * i, at), at.shape.N - 2)
    return epilogue.one(pair[0], pair[1], m, n)
