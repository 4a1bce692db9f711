"""Small mappings of the warp-specialised kernel, and products by them: for the emulator and the GPU alike."""

from __future__ import annotations

from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.layouts import ColMajor, RowMajor, Swizzled
from gemmkit.operators import WGMMAOp
from gemmkit.tiling import Tile
from tests.support.machines import poison

F16, F32 = np.dtype("f2"), np.dtype("f4")

# name: (rows of a tile, consumer warps, schedule, cluster); tiles have the operator's N columns, 32 unless told
SCHEDULES: dict[str, tuple[int, int, str, tuple[int, int]]] = {
    "one": (64, 4, "cooperative", (1, 1)),
    "two": (128, 8, "cooperative", (1, 1)),
    "three": (192, 12, "cooperative", (1, 1)),
    "tall": (128, 4, "cooperative", (1, 1)),
    "pingpong": (64, 8, "pingpong", (1, 1)),
    "one-2x1": (64, 4, "cooperative", (2, 1)),
    "one-1x2": (64, 4, "cooperative", (1, 2)),
    "two-2x1": (128, 8, "cooperative", (2, 1)),
    "pingpong-1x2": (64, 8, "pingpong", (1, 2)),
    "pingpong-2x1": (64, 8, "pingpong", (2, 1)),
    "two-2x2": (128, 8, "cooperative", (2, 2)),
    "pingpong-2x2": (64, 8, "pingpong", (2, 2)),
}


def mapping(schedule: str = "one", operator: Any = None, *, a: Any = RowMajor, b: Any = RowMajor, d: Any = None, depth: int = 0,
            **fields: Any) -> gk.Config:
    """A configuration with the smallest tiles of a schedule, ``depth`` deep; ``a`` and ``b`` are kinds of layouts.

    Shared operands across K have panels of 32 bytes, so that two blocks of a cluster can have some each.
    """
    operator = operator or WGMMAOp(32)
    rows, warps, name, cluster = SCHEDULES[schedule]
    depth = depth or 128 // operator.dtype.itemsize
    shared: dict[str, Any] = {}
    for which, kind, k_axis in (("a", a, 1), ("b", b, 0)):
        if operator.dtype.itemsize == 2 and kind is (ColMajor, RowMajor)[1 - k_axis] and "x" in schedule:
            shared[f"shared_{which}_layout"] = Swizzled(kind(operator.dtype), 32)
    layouts = dict(global_a_layout=a(operator.dtype), global_b_layout=b(operator.b_dtype),
                   global_d_layout=d or RowMajor(operator.accumulator))
    return gk.get_config(**{**dict(operator=operator, block_shape=Tile(M=rows, N=operator.N, K=depth), warps_per_block=warps,
                                   schedule=name, cluster=Tile(M=cluster[0], N=cluster[1])), **layouts, **shared, **fields})


def ordered(x: np.ndarray, layout: Any) -> np.ndarray:
    """The array in the order of a plain layout."""
    return np.asarray(x, order="CF"[getattr(layout, "axis", 1) == 0])


def product(machine: Any, conf: gk.Config, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, *,
            rows: int | None = None, columns: int | None = None, seed: int | None = None, **fields: Any) -> np.ndarray:
    """D, poisoned before, of arrays in the orders of the configuration's layouts."""
    a, b = ordered(a, conf.global_a_layout), ordered(b, conf.global_b_layout)
    shape = rows or a.shape[0], columns or b.shape[1]
    out = machine.array(poison(shape, conf.global_d_layout.dtype, "CF"[conf.global_d_layout.axis == 0]))
    held = None if c is None else machine.array(ordered(c, conf.global_c_layout))
    with gk.emulate(seed) if machine.emulated else machine.session():
        gk.matmul(machine.array(a), machine.array(b), held, conf, out=out, **fields)
    return np.asarray(machine.numpy(out))
