"""The machine code of the multistage kernel, without a GPU: nothing spills, wide copies, and the instructions that one expects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts import ColMajor, Interleaved, RowMajor
from gemmkit.operators import COMPLEX, FPUOp, MMAOp
from gemmkit.operators.algebra import units
from gemmkit.plans.ahead import CompiledKernel, compile_config
from gemmkit.runtime.device import GPUS, H100
from gemmkit.tiling import Tile
from gemmkit.tuning.sm80 import TABLES
from gemmkit.tuning.sm80 import operator as operator_of
from tests.support.dmma_waits import unwaited_products
from tests.support.machines import BF16, E4M3

pytestmark = pytest.mark.compile

F16, F32, F64, C64, C128 = (np.dtype(code) for code in ("f2", "f4", "f8", "c8", "c16"))
ARCHS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@dataclasses.dataclass(frozen=True)
class Shipped:
    """A configuration's fields, the instruction that multiplies, and whether both operands are copied in 16 bytes."""

    fields: Callable[[], dict[str, Any]]
    multiplies: str
    is_wide: bool = True


def shaped(operator: Any, block: tuple[int, int, int], warp: tuple[int, int], stages: int, a: Any, b: Any, d: Any = None) -> dict[str, Any]:
    return dict(operator=operator, global_a_layout=a, global_b_layout=b, global_d_layout=d or RowMajor(operator.fragment_c.dtype),
                block_shape=Tile(**dict(zip("MNK", block))), compute_warp=Tile(M=warp[0], N=warp[1], K=block[2]), stages=stages)


CONFIGS = {
    "f16": Shipped(lambda: shaped(MMAOp(N=16), (128, 128, 32), (64, 64), 4, RowMajor(F16), ColMajor(F16)), "HMMA"),
    "f16 across": Shipped(lambda: shaped(MMAOp(N=16), (128, 128, 32), (64, 64), 4, ColMajor(F16), RowMajor(F16)), "HMMA"),
    "bf16": Shipped(lambda: shaped(MMAOp(N=16, dtype=BF16), (128, 256, 32), (64, 64), 3, RowMajor(BF16), RowMajor(BF16)), "HMMA"),
    "tf32": Shipped(lambda: shaped(MMAOp(N=16, dtype=F32), (128, 128, 32), (64, 64), 3, RowMajor(F32), ColMajor(F32)), "HMMA"),
    "s8": Shipped(lambda: shaped(MMAOp(N=16, dtype="i1"), (128, 128, 64), (64, 64), 4, RowMajor("i1"), ColMajor("i1")), "IMMA"),
    # Hopper has 8-bit floats in wgmma alone: ptxas makes float16 of them first, for which 64x64 leaves no registers (80 bytes).
    "e4m3": Shipped(lambda: shaped(MMAOp(N=16, dtype=E4M3), (128, 128, 64), (64, 32), 4, RowMajor(E4M3), ColMajor(E4M3)), "QMMA"),
    "f32": Shipped(lambda: shaped(FPUOp(64, 32, MB=8, NB=4), (128, 128, 16), (64, 32), 3, ColMajor(F32), RowMajor(F32)), "FFMA"),
    "f32 across": Shipped(lambda: shaped(FPUOp(64, 32, MB=8, NB=4), (128, 128, 16), (64, 32), 3, RowMajor(F32), ColMajor(F32)), "FFMA", False),
    "f64": Shipped(lambda: shaped(MMAOp(dtype=F64), (128, 64, 16), (32, 32), 3, RowMajor(F64), RowMajor(F64)), "DMMA"),
    "f64 along K": Shipped(lambda: shaped(MMAOp(dtype=F64), (64, 64, 16), (32, 32), 4, RowMajor(F64), ColMajor(F64)), "DMMA"),
    "f64 8x8x4": Shipped(lambda: shaped(MMAOp(8, 8, 4, F64), (64, 64, 16), (32, 32), 4, RowMajor(F64), RowMajor(F64)), "DMMA"),
    "c64": Shipped(lambda: shaped(FPUOp(32, 16, MB=8, NB=4, dtype=C64), (64, 64, 8), (32, 16), 3, ColMajor(C64), RowMajor(C64)), "FFMA"),
    "c128": Shipped(lambda: shaped(COMPLEX.with_base(MMAOp(K=4, dtype=F64)), (64, 64, 8), (32, 16), 3, *[Interleaved(C128)] * 3), "DMMA"),
}


@functools.cache
def compiled(name: str, arch: tuple[int, int], stages: int = 0) -> CompiledKernel:
    device = dataclasses.replace(H100, name="another GPU", arch=arch)
    fields = CONFIGS[name].fields()
    conf = gk.get_config(kernel="multistage", device=device, **{**fields, "stages": stages or fields["stages"]})
    arrays = {name: np.zeros((64, 64), C128) for name in ("a", "b", "out")} if isinstance(fields["global_a_layout"], Interleaved) else None
    return compile_config(conf, device=device, operands=arrays, gemm_shape=dict(M=64, N=64, K=64) if arrays else dict(M=4096, N=4096, K=4096))


def count(kernel: CompiledKernel, opcode: str, *modifiers: str) -> int:
    """Lines with an opcode that has all of these modifiers."""
    found = 0
    for line in kernel.sass.splitlines():
        for word in line.split():
            parts = word.split(".")
            found += parts[0] == opcode and set(modifiers) <= set(parts[1:])
    return found


@pytest.mark.kin(2)
@pytest.mark.sample(78)
@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_it_compiles_for_every_gpu(name: str, arch: tuple[int, int]) -> None:
    """No spill, no local memory; A and B by cp.async, in 16 bytes where lines lie as memory has them."""
    shipped = CONFIGS[name]
    if arch < shipped.fields()["operator"].minimum_arch:
        with pytest.raises(gk.ConfigError, match="need compute capability"):
            compiled(name, arch)
        return
    kernel = compiled(name, arch)
    usage = kernel.usage
    assert (usage.spill_stores, usage.spill_loads, usage.stack_bytes) == (0, 0, 0)
    assert kernel.instructions["LDL"] == kernel.instructions["STL"] == 0
    assert kernel.instructions["CALL"] == count(kernel, "CALL", "NOINC")      # before Hopper ptxas leaves a loop by such a jump
    multiplies = shipped.multiplies
    if multiplies == "QMMA" and not kernel.instructions["QMMA"]:
        multiplies = "HMMA"                                  # Hopper has products of 8-bit floats in wgmma alone
    assert kernel.instructions[multiplies] > 0
    copies, wide = count(kernel, "LDGSTS"), count(kernel, "LDGSTS", "128")
    assert copies > 0 and (wide == copies) == shipped.is_wide
    if shipped.multiplies == "DMMA":
        assert unwaited_products(kernel.assembled.cubin) == []
    assert kernel.instructions["LDG"] == 0                    # nothing of A and B by way of registers, and there is no C


@pytest.mark.thorough
@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [name for name in CONFIGS if CONFIGS[name].multiplies in ("HMMA", "IMMA")])
def test_fragments_by_ldmatrix(name: str) -> None:
    kernel = compiled(name, (9, 0))
    assert count(kernel, "LDSM") > 0 and count(kernel, "LDSM", "4") == count(kernel, "LDSM")
    across = CONFIGS[name].fields()["global_a_layout"].axis == 0
    assert (count(kernel, "LDSM", "MT88") > 0) == (across or name == "bf16")


@pytest.mark.thorough
@pytest.mark.sample(16)
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["f64", "f64 along K", "f64 8x8x4", "c128"])
def test_products_in_float64_wait_in_rings_of_any_length(name: str, stages: int) -> None:
    for arch in ((9, 0), (8, 0)):
        if arch >= CONFIGS[name].fields()["operator"].minimum_arch:
            assert unwaited_products(compiled(name, arch, stages).assembled.cubin) == []


@pytest.mark.kin(2)
def test_the_ring_waits_once_a_round() -> None:
    """cp.async's wait and the block's barrier stand in the loop once; stages are not counted by division."""
    kernel = compiled("f16", (9, 0))
    assert 0 < kernel.instructions["LDGDEPBAR"] <= 4
    assert kernel.instructions["DEPBAR"] <= 3 and kernel.instructions["BAR"] <= 6


# -- the mappings of the tables, on every GPU -----------------------------------------------------------------------------

TABLE = {f"{dtype} {'x'.join(map(str, one.block))}": (dtype, one) for dtype, listed in TABLES.items() for one in listed}

# Bytes that 256 threads with 128 registers each spill, two blocks a multiprocessor: ptxas 13.0 needs more there than on Hopper.
SPILLED = {("float32 128x128x16", "nn", "sm_120a"): 80}


def copied(dtype: np.dtype, operator: Any, orders: str) -> set[int]:
    """Bytes of a copy of A and of B: on the ordinary units an operand that is contiguous along K goes element by element."""
    along_k = orders[0] == "n", orders[1] == "t"
    is_fpu = isinstance(units(operator), FPUOp)
    return {dtype.itemsize if is_fpu and across else 16 for across in along_k}


@pytest.mark.thorough
@pytest.mark.sample(400)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("orders", ["nn", "nt"])
@pytest.mark.parametrize("name", TABLE)
def test_every_mapping_of_the_tables(name: str, orders: str, gpu: str) -> None:
    """As `matmul` takes it: no spill, no local memory (but for `SPILLED`), and every copy as wide as its operand's lines are; by LDGSTS where the GPU
    has it, and by no instruction of cp.async where it has not."""
    dtype, listed = TABLE[name]
    device, one = GPUS[gpu], listed.on(GPUS[gpu])
    units = operator_of(dtype, one, device)
    if units is None or one.nbytes > device.shared_memory_per_block:
        return
    a, b = (ColMajor if order == "t" else RowMajor for order in orders)
    conf = gk.get_config(operator=units, global_a_layout=a(dtype), global_b_layout=b(dtype), device=device, **one.fields)
    kernel = compile_config(conf, device=device, gemm_shape=dict(M=4096, N=4096, K=4096))
    spilled = SPILLED.get((name, orders, gpu), 0)
    assert kernel.usage.spill_stores <= spilled and kernel.usage.stack_bytes <= spilled
    assert spilled or kernel.instructions["LDL"] == kernel.instructions["STL"] == 0
    opcodes = {F32: "FFMA", C64: "FFMA", F16: "HMMA", BF16: "HMMA"}
    doubles = "DFMA" if device.arch < (8, 0) else "DMMA"
    assert kernel.instructions[opcodes.get(dtype, doubles)] > 0
    copies, others = ("LDGSTS", "LDG") if device.arch >= (8, 0) else ("LDG", "LDGSTS")
    assert kernel.instructions[others] == 0 and widths(kernel, copies) == copied(dtype, units, orders)
    if device.arch < (8, 0):
        assert kernel.instructions["LDGDEPBAR"] == 0 and kernel.occupancy.blocks >= one.blocks


def widths(kernel: CompiledKernel, opcode: str) -> set[int]:
    """Bytes that a thread moves by the instructions of an opcode."""
    found = [word.split(".")[1:] for line in kernel.sass.splitlines() for word in line.split() if word.split(".")[0] == opcode]
    return {next((int(part) // 8 for part in modifiers if part in ("64", "128")), 4) for modifiers in found}
