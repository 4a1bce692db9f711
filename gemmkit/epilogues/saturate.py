"""Narrow results, asked for by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.epilogues.base import Epilogue
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.records import device_dtype
from gemmkit.ptx.saturate import saturate


@dataclass(frozen=True)
class Saturate(Epilogue):
    """Converts to ``dtype``, clamped to what it holds: the end of a quantised product.

    Floats become the nearest integers, ties to even; what is too large or too small, infinities included, becomes the
    largest or smallest number of the dtype (of a float: the largest finite one), and NaN becomes 0 (of a float: stays NaN).
    Raises TypeError for a dtype that is no integer and no float, or that device code does not have.

    >>> from gemmkit.epilogues import Scale
    >>> int8 = Scale(0.5) | Saturate("int8")
    >>> [int(int8(np.int32(x), 0, 0)) for x in (5, 7, 1000, -1000)]
    [2, 4, 127, -128]
    """

    dtype: Any

    def __post_init__(self) -> None:
        try:
            dtype = np.dtype(self.dtype)
            known = dtype.kind not in "bcO" and dtype.names is None and device_dtype(dtype) is not None
        except TypeError:
            known = False
        if not known:
            raise TypeError(f"Saturate(dtype={self.dtype!r}): an integer or a float that device code has is needed, for "
                            "example 'int8'")
        object.__setattr__(self, "dtype", dtype)

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return saturate(self.dtype, x)

    @property
    def result_dtype(self) -> Any:
        return self.dtype


__all__ = ["Saturate"]
