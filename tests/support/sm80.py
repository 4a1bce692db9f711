"""What tests of the multistage kernel share: small mappings, operands of whole numbers, and products with the routes that they take."""

from __future__ import annotations

from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.layouts import Interleaved, RowMajor
from gemmkit.operators import COMPLEX, DUAL, Algebra, FPUOp, MMAOp
from gemmkit.tiling import Tile
from tests.support.algebras import product64
from tests.support.machines import BF16, poison, whole

F16, F32, F64, C64, C128 = (np.dtype(code) for code in ("f2", "f4", "f8", "c8", "c16"))
KINDS: dict[str, Any] = {
    "f16": MMAOp(), "f16 in pairs": MMAOp(N=16, accumulator=F16), "bf16": MMAOp(dtype=BF16), "tf32": MMAOp(dtype=F32), "s8": MMAOp(dtype="i1"),
    "u8 s8": MMAOp(N=16, dtype="u1", b_dtype="i1"), "f32": FPUOp(16, 16), "f32 wide": FPUOp(32, 32), "f64": FPUOp(8, 16, dtype=F64),
    "c64": FPUOp(8, 16, dtype=C64), "f64 by dmma": MMAOp(dtype=F64), "f64 by 8x8x4": MMAOp(M=8, K=4, dtype=F64),
    "c128": COMPLEX.with_base(MMAOp(dtype=F64, K=4)), "c64 in parts": COMPLEX.with_base(FPUOp(8, 16)),
    "dual": DUAL.with_base(FPUOp(8, 16)), "dual f16": DUAL.with_base(MMAOp()),
}


def mapping(operator: Any, a: Any = RowMajor, b: Any = RowMajor, d: Any = RowMajor, steps: int = 2, stages: int = 3,
            warps: tuple[int, int] = (2, 1), **fields: Any) -> gk.Config:
    """A block of one operation a warp along M and N, and of ``steps`` along K. ``a``, ``b``, ``d``: orders, or layouts."""
    m, n, k = operator.shape
    block = Tile(M=m * warps[0], N=n * warps[1], K=k * steps)
    layouts = [order if not isinstance(order, type) else layout_of(operator, order, fragment.dtype)
               for order, fragment in ((a, operator.fragment_a), (b, operator.fragment_b), (d, operator.fragment_c))]
    given = dict(kernel="multistage", operator=operator, global_a_layout=layouts[0], global_b_layout=layouts[1],
                 global_d_layout=layouts[2], block_shape=block, compute_warp=Tile(M=m, N=n, K=block.size.K), stages=stages)
    return gk.get_config(**{**given, **fields})


def layout_of(operator: Any, order: Any, dtype: np.dtype) -> Any:
    """Of an algebra's numbers: as the parts of each lie in memory."""
    return Interleaved(dtype, "row" if order is RowMajor else "col") if isinstance(operator, Algebra) else order(dtype)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Small whole numbers: complex ones too; of an algebra's other numbers, arrays with their parts along the last axis."""
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        return (whole(rng, shape, "f8", 2) + 1j * whole(rng, shape, "f8", 2)).astype(dtype)
    if dtype.names is not None:
        return whole(rng, (*shape, len(dtype.names)), dtype[0], 2)
    return np.abs(whole(rng, shape, "i4", 2)).astype(dtype) if dtype.kind == "u" else whole(rng, shape, dtype, 2)


def operands(rng: np.random.Generator, operator: Any, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    return numbers(rng, (m, k), operator.fragment_a.dtype), numbers(rng, (k, n), operator.fragment_b.dtype)


def expected(operator: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """In float64 or complex128."""
    if a.ndim == 3:
        return np.asarray(product64(operator, a, b))
    wide = np.result_type(a.dtype, np.complex128) if a.dtype.kind == "c" else F64
    return np.asarray(a.astype(wide) @ b.astype(wide))


def ordered(x: np.ndarray, layout: Any) -> np.ndarray:
    """As a matrix of this layout lies in memory."""
    if getattr(layout, "axis", None) != 0 and getattr(layout, "order", "row") != "col":
        return np.ascontiguousarray(x)
    return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)


def on(machine: Any, x: np.ndarray) -> Any:
    """The machine's copy; a matrix of numbers in parts keeps its order, too."""
    if x.ndim == 3 and not x.flags.c_contiguous:
        return machine.array(np.ascontiguousarray(x.swapaxes(0, 1))).swapaxes(0, 1)
    return machine.array(x)


def product(machine: Any, conf: gk.Config, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, seed: int | None = None,
            shape: Any = None, **fields: Any) -> np.ndarray:
    """D, poisoned before; with ``seed`` in an order of the emulator's threads that it draws."""
    layout = conf.global_d_layout
    shape = shape or (a.shape[0], b.shape[1])
    dtype = layout.dtype
    if isinstance(layout, Interleaved) and a.ndim == 3:
        shape, dtype = (*shape, a.shape[2]), a.dtype if dtype.names is None else dtype[0]
    out = on(machine, ordered(poison(shape, dtype), layout))
    with gk.emulate(seed) if machine.emulated else machine.session():
        assert gk.matmul(on(machine, ordered(a, conf.global_a_layout)), on(machine, ordered(b, conf.global_b_layout)),
                         None if c is None else machine.array(c), conf, out=out, **fields) is out
    return np.asarray(machine.numpy(out))


def routes(machine: Any, conf: gk.Config, a: Any, b: Any, **fields: Any) -> tuple[str, str]:
    """How the operands of a plan reach the stages: "CpAsync 4" copies four elements at a time."""
    with machine.session():
        spec = gk.plan(a, b, None, conf, **fields)._compiled.spec
    return named(spec.a.route), named(spec.b.route)


def named(route: Any) -> str:
    return type(route).__name__ + (f" {route.width}" if hasattr(route, "width") else "")


__all__ = ["KINDS", "expected", "mapping", "named", "numbers", "on", "operands", "ordered", "product", "routes"]
