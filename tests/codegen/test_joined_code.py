"""Machine code of joined and braided operands: no spills, no calls, accesses as wide as the parts allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import Fold, Scale, activations
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import FPUOp, MMAOp, WGMMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile

SIZE = 512
MAPPINGS: dict[str, tuple[str, Any, Tile]] = {
    "singlestage": ("singlestage", MMAOp(), Tile(M=64, N=64, K=32)), "multistage": ("multistage", MMAOp(), Tile(M=64, N=64, K=32)),
    "warp_specialised": ("warp_specialised", WGMMAOp(128), Tile(M=128, N=128, K=64)),
    "ordinary units": ("multistage", FPUOp(32, 32), Tile(M=64, N=64, K=16))}


def gated(gate: Any, up: Any) -> Any:
    return activations.silu(gate) * up


def gates(i: Any, f: Any, g: Any, o: Any, m: int, n: int) -> Any:
    return i * f + g * o + m


def compiled(name: str, a: Any, b: Any, d: Any = RowMajor, columns: int = SIZE, **fields: Any) -> ahead.CompiledKernel:
    """The kernel of operands that are matrices or come with layouts."""
    kernel, operator, block = MAPPINGS[name]
    dtype = operator.fragment_a.dtype
    of_a, of_b = (x.layout if isinstance(x, gk.Matrix) else (ColMajor if x.flags.f_contiguous else RowMajor)(dtype) for x in (a, b))
    conf = gk.get_config(operator=operator, kernel=kernel, block_shape=block, global_a_layout=of_a, global_b_layout=of_b,
                         global_d_layout=d(dtype), **fields)
    out = np.zeros((SIZE, columns), dtype, order="F" if d is ColMajor else "C")
    arrays = {name: x.array if isinstance(x, gk.Matrix) else x for name, x in (("a", a), ("b", b))}
    return ahead.compile_config(conf, device=H100, gemm_shape=dict(M=SIZE, N=SIZE, K=SIZE), operands=dict(arrays, out=out))


def zeros(name: str, rows: int, columns: int, order: Any = "C") -> np.ndarray:
    return np.zeros((rows, columns), MAPPINGS[name][1].fragment_a.dtype, order=order)


@pytest.mark.thorough
@pytest.mark.sample(12)
@pytest.mark.compile
@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("boundary", [256, 100, 7])
def test_joined_along_k(name: str, boundary: int) -> None:
    a = gk.Concat(zeros(name, SIZE, boundary), zeros(name, SIZE, SIZE - boundary), axis=1)
    b = gk.Concat(zeros(name, boundary, SIZE), zeros(name, SIZE - boundary, SIZE), axis=0)
    kernel = compiled(name, a, b)
    assert kernel.usage.spill_stores == kernel.usage.stack_bytes == 0
    assert "ld.local" not in kernel.ptx and "call" not in kernel.ptx.replace("callprototype", "")
    if boundary == 256:
        assert "ld.global.v4" in kernel.ptx or "ld.global.nc.v4" in kernel.ptx or "cp.async.cg" in kernel.ptx      # 16 bytes


@pytest.mark.sample(16)
@pytest.mark.compile
@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("count", "f"), [(2, gated), (4, gates)])
def test_braids(name: str, order: str, count: int, f: Any) -> None:
    """As many loads as a plain operand's: the part is chosen in front of them."""
    b = gk.Braid(*(zeros(name, SIZE, SIZE // count, order) for _ in range(count)))
    kernel = compiled(name, zeros(name, SIZE, SIZE), b, columns=SIZE // count, epilogue=Fold(f) | Scale(2.0))
    assert kernel.usage.spill_stores == kernel.usage.stack_bytes == 0
    assert kernel.instructions["LDL"] == 0
    assert kernel.instructions["LDG"] <= 24
    if name == "warp_specialised":
        assert kernel.instructions["UTMASTG"] == 1 and kernel.instructions["UTMALDG"] > 0      # D and A by TMA
