"""Which operator computes a product of given dtypes, when the caller does not say."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from gemmkit.layouts import Layout
from gemmkit.operators import FPUOp, MMAOp, Operator
from gemmkit.runtime.device import DeviceInfo

_SIXTEEN = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def operator_for(a: np.dtype, b: np.dtype, sizes: tuple[int, int, int], device: DeviceInfo) -> Operator:
    """Tensor cores for float16 and bfloat16, the ordinary units for everything else real.

    float32 stays float32 (tf32 is a choice of the caller's). Raises TypeError for dtypes that no operator takes.
    """
    if a == b and a in _SIXTEEN and device.arch >= (8, 0):
        return MMAOp(dtype=a)
    for name, dtype in (("a", a), ("b", b)):
        if dtype.kind not in "iufc" and dtype not in _SIXTEEN:
            raise TypeError(f"{name} has dtype {dtype}; the operators take integers, floats and complex numbers")
    accumulator = accumulator_for(a, b)
    M, N, _ = sizes
    size = max(a.itemsize, b.itemsize, accumulator.itemsize)

    def tiles(m: int, n: int) -> float:
        """Blocks a multiprocessor gets when each computes m x n."""
        return -(-M // m) * -(-N // n) / device.sm_count

    if size == 16:
        shape = dict(M=16, N=16, MB=4, NB=8)
    elif size == 8:                               # half as many fit the registers
        shape = dict(M=32, N=32, MB=4, NB=8) if tiles(64, 64) >= 1 else dict(M=16, N=16, MB=4, NB=8)
    elif tiles(64, 128) >= 2:
        shape = dict(M=64, N=32, MB=8, NB=4)
    elif tiles(64, 64) >= 0.75:
        shape = dict(M=32, N=16, MB=8, NB=4)
    else:
        shape = dict(M=16, N=16, MB=4, NB=8)
    return FPUOp(**shape, dtype=a, b_dtype=b, accumulator=accumulator)


def accumulator_for(a: np.dtype, b: np.dtype) -> np.dtype:
    """NumPy's result type of the operands; at least float32 for floats."""
    try:
        common = np.result_type(a, b)
    except TypeError:
        raise TypeError(f"a is {a} and b is {b}: they have no common type; convert one of them") from None
    return np.dtype(np.float32) if common in _SIXTEEN else common


def result_dtype(a: np.dtype, b: np.dtype, c: Layout | None, operator: Operator) -> np.dtype:
    """The dtype of a result that the call makes: C's if there is one, else NumPy's result type of a and b."""
    if c is not None:
        return c.dtype
    if (a.kind in "iufc" and b.kind in "iufc") or (a in _SIXTEEN and b in _SIXTEEN):
        try:
            return np.result_type(a, b)
        except TypeError:
            pass
    return operator.fragment_c.dtype


__all__ = ["accumulator_for", "operator_for", "result_dtype"]
