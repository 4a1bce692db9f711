"""The machine code of default configurations, without a GPU: what is in the inner loop, and that nothing spills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import FPUOp, MMAOp, WMMAOp
from gemmkit.runtime.device import H100
from gemmkit.transforms import Map
from gemmkit.tuning.operators import fpu_shape, operator_for
from tests.kernels.test_slots import MinPlus
from tests.support.compiling import MachineCode, machine_code
from tests.support.machines import BF16

pytestmark = pytest.mark.compile

LARGE = dict(M=4096, N=4096, K=4096)
TENSOR = {"mma-f16": MMAOp(), "mma-f16-f16": MMAOp(accumulator="f2"), "mma-bf16": MMAOp(dtype=BF16), "wmma-f16": WMMAOp(),
          "wmma-8x32": WMMAOp(8, 32)}


def default(operator: Any, a: Any = RowMajor, b: Any = RowMajor, **fields: Any) -> gk.Config:
    dtype = operator.fragment_a.dtype
    return gk.get_config(**{**dict(operator=operator, global_a_layout=a(dtype), global_b_layout=b(dtype),
                                   global_d_layout=RowMajor(operator.accumulator), gemm_shape=LARGE, device=H100), **fields})


def check_tidy(code: MachineCode) -> None:
    """Everything lives in registers, and nothing is called."""
    usage = code.usage
    assert (usage.spill_stores, usage.spill_loads, usage.stack_bytes) == (0, 0, 0)
    assert [code.count(opcode) for opcode in ("LDL", "STL", "CALL")] == [0, 0, 0]


def check_wide_moves(conf: gk.Config, code: MachineCode) -> None:
    """A's and B's tiles come in 16 bytes a thread at a time, and D leaves so."""
    tiles = (conf.block_shape.MK.count * conf.global_a_layout.dtype.itemsize
             + conf.block_shape.KN.count * conf.global_b_layout.dtype.itemsize)
    assert code.count("LDG") == code.count("LDG", "128") == tiles // (16 * conf.threads)
    assert code.count("STS", "128") > 0
    assert code.count("STG") == code.count("STG", "128") > 0


@pytest.mark.sample(7)
@pytest.mark.parametrize("name,a,b", [
    ("mma-f16", RowMajor, RowMajor), ("mma-f16", ColMajor, ColMajor), ("mma-f16-f16", RowMajor, RowMajor),
    ("mma-bf16", ColMajor, ColMajor), ("wmma-f16", RowMajor, RowMajor), ("wmma-f16", ColMajor, ColMajor),
    ("wmma-8x32", ColMajor, ColMajor)], ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.kin(5)
def test_tensor_cores(name: str, a: Any, b: Any) -> None:
    conf = default(TENSOR[name], a, b)
    code = machine_code(conf)
    check_tidy(code)
    check_wide_moves(conf, code)
    warp, K = conf.compute_warp.size, conf.operator.shape[2]
    products = warp.M * warp.N * K // (16 * 8 * 16)               # of one step along K, which may be unrolled
    assert code.count("HMMA") == code.count("HMMA", "16816") > 0
    assert code.count("HMMA") % products == 0
    assert code.count("LDSM") > 0


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["f2", BF16], ids=str)
def test_narrow_results_are_packed_and_leave_in_wide_stores(dtype: Any) -> None:
    """One conversion for two elements, and 16 bytes a store."""
    conf = default(MMAOp(dtype=dtype), global_d_layout=RowMajor(dtype))
    code = machine_code(conf)
    check_tidy(code)
    check_wide_moves(conf, code)
    assert code.count("F2FP", "PACK_AB") == 4 * code.count("STG") and code.count("F2F") == 0


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype,opcode", [("f4", "FFMA"), ("f8", "DFMA")])
@pytest.mark.parametrize("a,b", [(RowMajor, RowMajor), (ColMajor, ColMajor)], ids=["NN", "TT"])
def test_ordinary_units(dtype: str, opcode: str, a: Any, b: Any) -> None:
    operator = FPUOp(**fpu_shape(np.dtype(dtype).itemsize, (4096, 4096, 4096), H100), dtype=dtype)
    conf = default(operator, a, b)
    code = machine_code(conf)
    check_tidy(code)
    check_wide_moves(conf, code)
    warp = conf.compute_warp.size
    assert code.count(opcode) > 0
    assert code.count(opcode) % (warp.M * warp.N * operator.K // 32) == 0
    assert code.count("LDS", "128") > 0


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mma-f16", "fpu-f32"])
@pytest.mark.kin(5)
def test_edges_do_not_narrow_the_inside(name: str) -> None:
    """Sizes that are no multiples of a thread's tile: whole tiles are still moved at full width."""
    operator = MMAOp() if name == "mma-f16" else operator_for(np.dtype("f4"), np.dtype("f4"), (4096, 4096, 4096), H100)
    code = machine_code(default(operator), whole=False)
    check_tidy(code)
    for opcode in ("LDG", "STS", "STG"):
        assert code.count(opcode, "128") > 0
    assert code.count("LDG") > code.count("LDG", "128")           # the edges, element by element


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mma-f16", "fpu-f32"])
def test_transforms_everywhere_cost_no_memory(name: str) -> None:
    """All eight points, with coordinates and with a captured array."""
    operator = MMAOp() if name == "mma-f16" else FPUOp()
    table = np.ones(256, "f4")
    points = {f"transform_{point}": Map(lambda x, i, j: x + i - j) for point in (
        "global_to_shared_a", "global_to_shared_b", "global_to_shared_c", "shared_to_regs_a", "shared_to_regs_b",
        "shared_to_regs_c")}
    points["transform_regs_to_shared_d"] = Map(lambda x, i, j: max(x, 0) * table[j])
    points["transform_shared_to_global_d"] = Map(lambda x: x + 1)
    conf = default(operator, block_shape=gk.Tile(M=64, N=64, K=32), warps_per_block=4,
                   global_c_layout=RowMajor(operator.accumulator), **points)
    check_tidy(machine_code(conf))


@pytest.mark.kin(5)
def test_another_algebra_is_as_tight() -> None:
    """Min-plus: one addition and one minimum where the ordinary product has one fused instruction."""
    conf = default(MinPlus(M=64, N=32, MB=8, NB=4), block_shape=gk.Tile(M=64, N=64, K=16), warps_per_block=2)
    code = machine_code(conf)
    check_tidy(code)
    work = conf.compute_warp.M.count * conf.compute_warp.N.count // 32
    additions, minima = code.count("FADD"), code.count("FMNMX") + code.count("FMNMX3")
    assert additions >= work and additions % work == 0 and code.count("FFMA") == 0
    assert minima >= work and code.count("FSEL") == 0


@pytest.mark.kin(5)
def test_a_line_of_16_bit_floats_by_one_thread() -> None:
    """NVVM made vectors of `half` of it and gave up on them ("unsupported operation")."""
    tiles: dict[str, Any] = dict(block_shape=gk.Tile(M=16, N=32, K=1), compute_warp=gk.Tile(M=16, N=16, K=1))
    moves: dict[str, Any] = {f"mem_{name}_{what}": gk.Tile(**{axis: 1 for axis in axes})
                             for name, axes in (("a", "MK"), ("b", "KN"), ("cd", "MN")) for what in ("warp", "thread")}
    shared: dict[str, Any] = {f"shared_{name}_layout": gk.layouts.Padded(RowMajor("f2"), 0) for name in "ab"}
    conf = gk.get_config(operator=FPUOp(16, 16, 1, 2, 16, dtype="f2", accumulator="f4"), global_a_layout=RowMajor("f2"),
                         **tiles, **moves, **shared)
    check_tidy(machine_code(conf))


@pytest.mark.kin(5)
def test_a_product_of_float16_is_rounded_before_it_is_added() -> None:
    """As NumPy rounds it; a fused multiply-add would not."""
    conf = default(MMAOp(), transform_global_to_shared_a=Map(lambda x: x - 7 * x * x))
    code = machine_code(conf)
    assert code.count("HMUL2") and not code.count("HFMA2")
