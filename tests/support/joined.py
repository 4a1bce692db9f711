"""What tests of operands of several arrays share: small mappings of every kernel, and parts that are views of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import FPUOp, MMAOp, WGMMAOp
from gemmkit.tiling import Tile
from tests.support import sm90
from tests.support.machines import poison, whole

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
FAMILIES = "singlestage", "multistage", "warp_specialised", "multistage on the ordinary units"


def config(family: str, a: Any = RowMajor, b: Any = RowMajor, d: Any = None, **fields: Any) -> gk.Config:
    """The smallest tile of a kernel that holds four parts of a braid; D is float32."""
    if family == "warp_specialised":
        return sm90.mapping("one", WGMMAOp(32), a=a, b=b, d=d, **fields)
    operator = FPUOp(32, 32) if "ordinary" in family else MMAOp()
    dtype, block = operator.fragment_a.dtype, Tile(M=32, N=32, K=16)
    warp = Tile(M=32 if "ordinary" in family else 16, N=32 if "ordinary" in family else 16, K=16)
    return gk.get_config(**{**dict(kernel=family.split(" ")[0], operator=operator, global_a_layout=a(dtype), global_b_layout=b(dtype),
                                   global_d_layout=d or RowMajor(F32), block_shape=block, compute_warp=warp), **fields})


def dtype_of(family: str) -> np.dtype:
    return F32 if "ordinary" in family else F16


def orders(order: str) -> Any:
    return ColMajor if order == "F" else RowMajor


def parts(rng: np.random.Generator, rows: tuple[int, ...], columns: tuple[int, ...], dtype: Any, order: str = "C",
          shift: int = 0, gap: int = 0) -> list[np.ndarray]:
    """Matrices of small whole numbers. ``shift`` elements stand before each in memory, and ``gap`` behind each of its lines: NaN."""
    out = []
    for m, n in zip(rows, columns):
        lines, length = (m, n) if order == "C" else (n, m)
        buffer = poison((shift + lines * (length + gap),), dtype)
        view = buffer[shift:].reshape(lines, length + gap)[:, :length]
        view[:] = whole(rng, (lines, length), dtype)
        out.append(view if order == "C" else view.T)
    return out


def carried(machine: Any, x: np.ndarray) -> Any:
    """A view on the machine, with the strides and the misalignment that it has here."""
    if machine.emulated or x.base is None:
        return machine.array(x) if x.base is None else x
    import cupy

    base: Any = x
    while base.base is not None:
        base = base.base
    start = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    return cupy.lib.stride_tricks.as_strided(machine.array(base.reshape(-1))[start:], x.shape, x.strides)
