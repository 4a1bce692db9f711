"""`Pack`: one element of D from two neighbours of the product, as int4 are packed into bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.epilogues.pairs import Pairwise
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import split
from gemmkit.lang.given import dtype_given, function_given, required
from gemmkit.lang.registers import apply
from gemmkit.lang.returned import number
from gemmkit.layouts.base import ResultLayout
from gemmkit.layouts.plain import Packed

__all__ = ["Pack"]


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
