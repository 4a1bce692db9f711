"""Asking for the types and values of device code, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numba.cuda import types

from gemmkit.lang.functions import device
from gemmkit.lang.scalars import index, numba_type, weak_float64

BF16 = np.dtype(ml_dtypes.bfloat16)
NARROW = [np.dtype("f2"), BF16]
FLOATS = [*NARROW, np.dtype("f4"), np.dtype("f8")]
INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]

INDEX, WEAK, BOOL = index, weak_float64, types.boolean


def result(function: Callable[..., Any], *arguments: Any) -> types.Type:
    """The device type that a function returns for arguments of these dtypes or device types."""
    given = tuple(a if isinstance(a, types.Type) else numba_type(a) for a in arguments)
    return device(function).compile(given).signature.return_type
