"""Where a test's products run: the same test in the emulator, and on a GPU (marked `gpu`).

    @on_machines
    def test_something(machine): ...
        with machine.session():
            d = gk.matmul(machine.array(a), machine.array(b))
        machine.numpy(d)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
TORCHS = {BF16: "bfloat16", E4M3: "float8_e4m3fn", E5M2: "float8_e5m2"}       # what CuPy may not know
SENTINEL = 0x5B                              # every byte of an integer that nobody has written


def turned(x: Any, *axes: int) -> Any:
    """A view with its axes in another order (PyTorch calls it permute)."""
    return x.permute(*axes) if hasattr(x, "permute") else x.transpose(*axes)


class Emulator:
    """NumPy arrays, emulated kernels."""

    emulated = True

    def __repr__(self) -> str:
        return "emulator"

    def session(self) -> contextlib.AbstractContextManager[Any]:
        return gk.emulate()

    def array(self, x: np.ndarray) -> Any:
        """A copy of ``x`` where the machine multiplies, in ``x``'s order (C or Fortran)."""
        return np.array(x, order="K")

    def numpy(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def product64(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """A B in float64."""
        return np.asarray(a.astype(np.float64) @ b.astype(np.float64))

    def compiles_nothing(self) -> contextlib.AbstractContextManager[Any]:
        """Asserts that no kernel is compiled meanwhile (nothing ever is in the emulator)."""
        return contextlib.nullcontext()


class Gpu(Emulator):
    """CuPy arrays; PyTorch tensors where CuPy may not know the dtype (bfloat16, 8-bit floats)."""

    emulated = False

    def __repr__(self) -> str:
        return "gpu"

    def session(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def array(self, x: np.ndarray) -> Any:
        flip = x.flags.f_contiguous and not x.flags.c_contiguous
        if x.dtype in TORCHS:
            import torch

            words = np.ascontiguousarray(x.T if flip else x).view((np.uint8, np.int16)[x.dtype.itemsize - 1])
            tensor = torch.from_numpy(words.copy()).cuda().view(getattr(torch, TORCHS[x.dtype]))
            return tensor.T if flip else tensor
        import cupy

        return cupy.array(x, order="F" if flip else "C")

    def numpy(self, x: Any) -> np.ndarray:
        if hasattr(x, "get"):
            return np.asarray(x.get())
        import torch

        for dtype, name in TORCHS.items():
            if x.dtype == getattr(torch, name):
                words = x.contiguous().view((torch.uint8, torch.int16)[dtype.itemsize - 1])
                return np.asarray(words.cpu().numpy().view(dtype))
        return np.asarray(x.cpu().numpy())

    def product64(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        import cupy

        a64, b64 = (cupy.asarray(x.astype(np.float64) if x.dtype in TORCHS else x).astype(np.float64) for x in (a, b))
        return np.asarray((a64 @ b64).get())

    @contextlib.contextmanager
    def compiles_nothing(self) -> Iterator[None]:
        from gemmkit.runtime.compile import stats

        before = stats.compiled
        yield
        assert stats.compiled == before, f"{stats.compiled - before} kernels were compiled"


MACHINES = {"emulator": Emulator(), "gpu": Gpu()}

on_machines = pytest.mark.parametrize(
    "machine", [pytest.param(MACHINES["emulator"], id="emulator"),
                pytest.param(MACHINES["gpu"], id="gpu", marks=pytest.mark.gpu)])

#: Where tensors of PyTorch lie: the fixture ``device`` of tests/pytorch.
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


def poison(shape: tuple[int, ...], dtype: Any, order: Any = "C") -> np.ndarray:
    """An array with nothing written: NaN, or the sentinel in every byte of an integer."""
    dtype = np.dtype(dtype)
    out = np.empty(shape, dtype, order=order)
    if dtype.kind in "iu":
        out.reshape(-1, order="A").view(np.uint8)[:] = SENTINEL
    else:
        out.fill(np.nan)
    return out


def is_poison(x: np.ndarray) -> bool:
    """Whether nothing has been written to any element."""
    return bool(np.array_equal(np.ascontiguousarray(x).view(np.uint8), poison(x.shape, x.dtype).view(np.uint8)))


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, order: Any = "C") -> np.ndarray:
    """Standard normal floats, or integers of the dtype's whole range."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray(rng.integers(limits.min, limits.max, shape, dtype, endpoint=True), order=order)
    return np.asarray(rng.standard_normal(shape).astype(dtype), order=order)


def whole(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, most: int = 3) -> np.ndarray:
    """Small whole numbers: sums of their products are exact in every float, so a result is right or wrong."""
    return rng.integers(-most, most, shape, endpoint=True).astype(dtype)


def reference(a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, dtype: Any = None) -> np.ndarray:
    """A B + C in float64; of integers in int64, wrapped to ``dtype`` as the hardware wraps."""
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        with np.errstate(all="ignore"):
            out = a.astype(np.int64) @ b.astype(np.int64)
            return (out if c is None else out + c.astype(np.int64)).astype(dtype or np.int64)
    out = a.astype(np.float64) @ b.astype(np.float64)
    return out if c is None else out + c.astype(np.float64)


def epsilon(dtype: Any) -> float:
    """The distance from 1 to the next number; 0 for integers, which are exact."""
    dtype = np.dtype(dtype)
    return 0.0 if dtype.kind in "iu" else float(ml_dtypes.finfo(dtype).eps)


def tolerance(dtype: Any, accumulator: Any, out: Any, K: int) -> float:
    """sqrt(eps) of the input's type, or tighter: K roundings of the accumulator and one of the result."""
    return min(epsilon(dtype) ** 0.5, (K + 2) * epsilon(accumulator) + epsilon(out))
