"""`MMAOp` compiled for every GPU that has it, without one: the instruction, 16-byte moves, and nothing in local memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import MMAOp
from gemmkit.plans.ahead import compile_config
from gemmkit.runtime.device import H100
from tests.support.dmma_waits import unwaited_products

pytestmark = pytest.mark.compile

ARCHS = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
OPERATORS = {"f16": (MMAOp(N=16), "HMMA"), "f16 x8": (MMAOp(N=16, K=8), "HMMA"), "s8 8x8x16": (MMAOp(M=8, N=16, K=16, dtype="i1"), "IMMA"), "tf32": (MMAOp(dtype="f4"), "HMMA"), "s8": (MMAOp(N=16, dtype="i1"), "IMMA"),
             "e4m3": (MMAOp(dtype=ml_dtypes.float8_e4m3fn), "QMMA"), "f64": (MMAOp(dtype="f8"), "DMMA"), "f64 8x8x4": (MMAOp(M=8, K=4, dtype="f8"), "DMMA")}

#: Bytes that ptxas spills of the tile of large products. 8x8x16 is Turing's shape: from sm_80 on 16x8x32 is the default.
SPILLED = {("s8 8x8x16", (10, 0)): 380, ("s8 8x8x16", (12, 0)): 360}


@pytest.mark.sample(72)
@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_it_compiles_where_it_is(name: str, arch: tuple[int, int]) -> None:
    operator, opcode = OPERATORS[name]
    device: Any = dataclasses.replace(H100, name="another GPU", arch=arch)
    def compiled() -> Any:
        conf = gk.get_config(operator=operator, global_a_layout=RowMajor(operator.dtype), global_b_layout=ColMajor(operator.b_dtype),
                             global_d_layout=RowMajor(operator.accumulator), gemm_shape=dict(M=4096, N=4096, K=4096), device=device, kernel="singlestage")
        return compile_config(conf, device=device)

    if arch < operator.minimum_arch:
        with pytest.raises(gk.ConfigError, match="its instructions need compute capability"):
            compiled()
        return
    kernel = compiled()
    # On Hopper products of 8-bit floats are those of float16: it has them in wgmma alone.
    there = kernel.instructions[opcode] or (opcode == "QMMA" and kernel.instructions["HMMA"])
    spilled = SPILLED.get((name, arch), 0)
    assert there and (spilled or kernel.instructions["LDL"] == kernel.instructions["STL"] == 0)
    assert kernel.usage.spill_stores <= spilled and kernel.usage.stack_bytes <= spilled
    if opcode == "DMMA":
        assert unwaited_products(kernel.assembled.cubin) == []
    assert np.all([size in kernel.sass for size in ("LDG.E.128", "STG.E.128")])
