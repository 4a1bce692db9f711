"""What tests of operands of several arrays share: small mappings of every kernel, and parts that are views of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.epilogues import Fold
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import FPUOp, MMAOp, WGMMAOp
from gemmkit.tiling import Tile
from tests.support import sm90
from tests.support.machines import Gpu, poison, whole

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
    if x.base is None:
        return machine.array(x)
    if not isinstance(machine, Gpu):
        return x
    import cupy

    base: Any = x
    while base.base is not None:
        base = base.base
    start = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    return cupy.lib.stride_tricks.as_strided(machine.array(base.reshape(-1))[start:], x.shape, x.strides)


# -- joined ---------------------------------------------------------------------------------------------------------------

JOINS = {                              # rows and columns of A's parts, axis; the same of B's
    "K": (((37,) * 2, (20, 13), 1), ((20, 13), (29,) * 2, 0)),
    "K in three": (((37,) * 3, (16, 1, 24), 1), ((16, 1, 24), (29,) * 3, 0)),
    "K at odds": (((37,) * 3, (20, 12, 9), 1), ((20, 12, 9), (29,) * 3, 0)),
    "K differently": (((19,) * 2, (8, 24), 1), ((24, 7, 1), (33,) * 3, 0)),
    "K, nothing of one": (((19,) * 2, (0, 17), 1), ((17, 0), (9,) * 2, 0)),
    "M and N": (((5, 32), (40,) * 2, 0), ((40,) * 2, (16, 17), 1)),
    "M": (((1, 30, 4), (24,) * 3, 0), ((24,), (33,), 0)),
    "N": (((33,), (16,), 0), ((16,) * 2, (8, 24), 1)),
}


def joined_operand(machine: Any, given: list[np.ndarray], axis: int) -> Any:
    there = [carried(machine, x) for x in given]
    return gk.layouts.Concat(*there, axis=axis) if len(there) > 1 else there[0]


def joined_product(machine: Any, family: str, join: str, order: tuple[str, str] = ("C", "C"), shift: int = 0, gap: int = 0,
            transposed: bool = False, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    """D by a kernel, and in float64."""
    rng, dtype = np.random.default_rng(len(join)), dtype_of(family)
    (a_rows, a_columns, a_axis), (b_rows, b_columns, b_axis) = JOINS[join]
    a = parts(rng, a_rows, a_columns, dtype, order[0], shift, gap)
    b = parts(rng, b_rows, b_columns, dtype, order[1], shift, gap)
    expected = np.concatenate(a, a_axis).astype("f8") @ np.concatenate(b, b_axis).astype("f8")
    with machine.session():
        out = machine.array(poison(expected.shape, "f4"))
        if transposed:
            of_a, of_b = joined_operand(machine, [x.T for x in a], 1 - a_axis).T, joined_operand(machine, [x.T for x in b], 1 - b_axis).T
        else:
            of_a, of_b = joined_operand(machine, a, a_axis), joined_operand(machine, b, b_axis)
        conf = config(family, orders(order[0]), orders(order[1]))
        got = gk.matmul(of_a, of_b, out=out, conf=conf, **fields)
    assert got is out
    return machine.numpy(got), expected


# -- folded ---------------------------------------------------------------------------------------------------------------

FOLDS: dict[int, Any] = {2: lambda gate, up: max(gate, 0) - up, 3: lambda i, f, g: i + 2 * f - 3 * g,
                         4: lambda i, f, g, o: i - 2 * f + 3 * g - 4 * o}
WITH_COORDINATES: dict[int, Any] = {2: lambda gate, up, m, n: gate - up + 64 * m + n, 3: lambda i, f, g, m, n: i + f - g + 64 * m + n,
                                    4: lambda i, f, g, o, m, n: i + f - g - o + 64 * m + n}


def folded(count: int, products: list[np.ndarray], coordinates: bool = False) -> np.ndarray:
    """What a fold makes of the parts' products, in float64."""
    m, n = np.indices(products[0].shape[-2:])
    if coordinates:
        return np.asarray(WITH_COORDINATES[count](*products, m, n))
    if count == 2:
        return np.maximum(products[0], 0) - products[1]
    return np.asarray(FOLDS[count](*products))


def folded_product(machine: Any, family: str, count: int, shape: tuple[int, int, int], order: str = "C", shift: int = 0, gap: int = 0,
            d: Any = None, coordinates: bool = False, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    """D by a kernel, and in float64."""
    (M, N, K), dtype = shape, dtype_of(family)
    rng = np.random.default_rng(sum(shape))
    x = whole(rng, (M, K), dtype)
    w = parts(rng, (K,) * count, (N,) * count, dtype, order, shift, gap)
    expected = folded(count, [x.astype("f8") @ one.astype("f8") for one in w], coordinates)
    d = d or RowMajor(F32)
    with machine.session():
        out = machine.array(poison((M, N), d.dtype, "F" if d.axis == 0 else "C"))
        got = gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(*(carried(machine, one) for one in w)), out=out,
                        conf=config(family, RowMajor, orders(order), d, **fields),
                        epilogue=Fold((WITH_COORDINATES if coordinates else FOLDS)[count]))
    assert got is out
    return machine.numpy(got), expected
