"""The machine code of the multistage kernel, without a GPU: nothing spills, wide copies, and products in float64 that wait for
what they add to."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
import gemmkit.kernels.sm80.kernel as sm80
from gemmkit.kernels.sm80.kernel import InStepMainloop
from gemmkit.layouts import ColMajor, Interleaved, RowMajor
from gemmkit.operators import COMPLEX, FPUOp, MMAOp
from gemmkit.operators.base import units
from gemmkit.plans.ahead import CompiledKernel, compile_config
from gemmkit.runtime.device import GPUS, H100, target
from gemmkit.tiling import Tile
from gemmkit.tuning import model
from gemmkit.tuning import sm80 as multistage
from gemmkit.tuning.operators import operator_for
from gemmkit.tuning.sm80 import TABLES
from gemmkit.tuning.sm80 import operator as operator_of
from tests.support.dmma_waits import hex_listing, in_text, listing, unwaited_products
from tests.support.machines import BF16, E4M3
from tests.support.patches import Seeded

pytestmark = pytest.mark.compile


# ==========================================================================================================================
# The machine code of the multistage kernel, without a GPU: nothing spills, wide copies, and the instructions that one expects.

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


@pytest.mark.kin(1)
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


@pytest.mark.kin(1)
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


# ==========================================================================================================================
# Products in float64 wait for what they add to: machine code of every mapping that the defaults choose, and the check itself.

A100 = dataclasses.replace(H100, name="an A100", arch=(8, 0), sm_count=108, shared_memory_per_block=166912, shared_memory_per_sm=167936)
DEVICES = {"sm_80": A100, "sm_90": H100}
SIZES = 4096, 512, 128                            # each of the tiles
ORDERS = {"nn": (RowMajor, RowMajor), "nt": (RowMajor, ColMajor), "tn": (ColMajor, RowMajor), "tt": (ColMajor, ColMajor)}


def kernel(dtype: str, size: int, trans: str, device: Any, operator: Any = None) -> CompiledKernel:
    """What the defaults choose for a product of squares, by the single-stage kernel."""
    kind, sizes = np.dtype(dtype), dict(M=size, N=size, K=size)
    orders = [Interleaved(kind, "row" if order is RowMajor else "col") if kind.kind == "c" else order(kind) for order in ORDERS[trans]]
    conf = gk.get_config(operator=operator or operator_for(kind, kind, (size,) * 3, device), global_a_layout=orders[0],
                         global_b_layout=orders[1], global_d_layout=Interleaved(kind) if kind.kind == "c" else RowMajor(kind),
                         gemm_shape=sizes, device=device, kernel="singlestage")
    arrays = {name: np.zeros((64, 64), kind) for name in ("a", "b", "out")} if kind.kind == "c" else None
    return compile_config(conf, device=device, operands=arrays, gemm_shape=dict(M=64, N=64, K=64) if arrays else sizes)


@pytest.mark.kin(1)
@pytest.mark.sample(36)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype,trans", [*(("float64", trans) for trans in ORDERS), ("complex128", "nn"), ("complex128", "tt")])
def test_every_product_waits_for_the_one_before(dtype: str, trans: str, size: int, device: str) -> None:
    found = kernel(dtype, size, trans, DEVICES[device])
    assert found.instructions["DMMA"] > 0 and found.instructions["DFMA"] == 0
    assert (found.usage.spill_stores, found.usage.stack_bytes) == (0, 0)
    assert unwaited_products(found.assembled.cubin) == []


@pytest.mark.thorough
@pytest.mark.sample(8)
@pytest.mark.parametrize("K", [4, 16])
@pytest.mark.parametrize("trans", ORDERS)
def test_the_other_shapes_of_hopper(K: int, trans: str) -> None:
    found = kernel("float64", 4096, trans, H100, MMAOp(K=K, dtype="float64"))
    assert found.usage.spill_stores == 0 and unwaited_products(found.assembled.cubin) == []


RINGS = [(np.dtype(dtype), one) for dtype in ("f8", "c16") for one in multistage.TABLES[np.dtype(dtype)]]
FITTING = [(device, dtype, one) for device in DEVICES for dtype, one in RINGS
           if one.nbytes <= DEVICES[device].shared_memory_per_block]


def ring(dtype: np.dtype, one: Any, trans: str, device: Any) -> gk.Config:
    a, b = (order(dtype) for order in ORDERS[trans])
    return gk.get_config(operator=multistage.operator(dtype, one, device), global_a_layout=a, global_b_layout=b,
                         global_d_layout=RowMajor(dtype), device=device, gemm_shape=dict(M=4096, N=4096, K=4096), **one.fields)


@pytest.mark.thorough
@pytest.mark.sample(64)
@pytest.mark.parametrize("trans", ORDERS)
@pytest.mark.parametrize("device, dtype, one", FITTING, ids=str)
def test_every_mapping_of_the_multistage_kernel(device: str, dtype: np.dtype, one: Any, trans: str) -> None:
    """Fragments are fetched ahead across rounds with as few as eight products a step."""
    gpu = DEVICES[device]
    found = compile_config(ring(dtype, one, trans, gpu), device=gpu, gemm_shape=dict(M=4096, N=4096, K=4096))
    assert found.usage.spill_stores == 0 and found.instructions["DMMA"] > 0
    assert unwaited_products(found.assembled.cubin) == []


STREAMING = [(device, dtype, one) for device, dtype, one in FITTING if dtype in model.STREAMING and one.merges and one.streams]


@pytest.mark.thorough
@pytest.mark.sample(23)
@pytest.mark.parametrize("trans", ORDERS)
@pytest.mark.parametrize("device, dtype, one", STREAMING, ids=str)
def test_every_mapping_that_streams_k(device: str, dtype: np.dtype, one: Any, trans: str) -> None:
    gpu, sizes = DEVICES[device], dict(M=1536, N=1536, K=1536)
    conf = dataclasses.replace(ring(dtype, one, trans, gpu), splits=gk.kernels.StreamK())
    found = compile_config(conf, device=gpu, gemm_shape=sizes)
    assert found.instructions["DMMA"] > 0 and unwaited_products(found.assembled.cubin) == []


@pytest.mark.gpu
@pytest.mark.sample(6)
@pytest.mark.parametrize("trans", ["nn", "tt"])
@pytest.mark.parametrize("dtype, one", RINGS, ids=str)
def test_both_main_loops_give_the_same_bits(dtype: np.dtype, one: Any, trans: str, seeded: Seeded) -> None:
    """On a GPU, where a product that begins too early would take another's sums: with several warps side by side, of many
    draws, all of D. The loop that fetches nothing ahead adds up in the same order."""
    torch = pytest.importorskip("torch")
    kind = torch.float64 if dtype == np.float64 else torch.complex128
    conf = ring(dtype, one, trans, target())

    def drawn() -> Any:
        pair = [torch.randn(768, 768, device="cuda", dtype=kind) for _ in "ab"]
        return [x.T if order == "t" else x for x, order in zip(pair, trans)]

    a, b = drawn()
    plans, outs = [], []
    for mainloop in (None, InStepMainloop()):
        if mainloop is not None:
            seeded(sm80, "_mainloop", lambda spec: InStepMainloop())
        outs.append(torch.empty(768, 768, device="cuda", dtype=kind))
        plans.append(gk.plan(a, b, None, conf, out=outs[-1]))
    assert isinstance(plans[1]._compiled.spec.mainloop, InStepMainloop)
    for _ in range(40):
        a, b = drawn()
        for run, out in zip(plans, outs):
            out.fill_(float("nan"))
            run(a, b, out=out)
        assert torch.equal(*(torch.view_as_real(out) if dtype.kind == "c" else out for out in outs))


def without_waits(text: str) -> str:
    """A listing in which no instruction waits for any scoreboard."""
    def cleared(match: re.Match[str]) -> str:
        return f"/* 0x{int(match[1], 16) & ~(63 << 52):016x} */"

    lines = text.splitlines()
    return "\n".join(re.sub(r"/\* 0x([0-9a-f]{16}) \*/", cleared, line) if n and re.search(r"/\*[0-9a-f]{4,}\*/", lines[n - 1]) else line
                     for n, line in enumerate(lines))


@pytest.mark.kin(1)
def test_missing_waits_are_noticed() -> None:
    text = hex_listing(kernel("float64", 128, "nn", H100).assembled.cubin)
    code, _ = listing(text)
    assert sum("DMMA" in instruction.text for instruction in code) > 0
    assert in_text(text) == []
    found = in_text(without_waits(text))
    assert found and all("DMMA" in product.text and 0 < product.products_since <= 4 for product in found)


def written(text: str, holds: int = 7, waits: int = 0) -> str:
    """A line of nvdisasm's, and the one behind it."""
    return (f"        /*0000*/                   {text} ;       /* 0x{0:016x} */\n"
            f"                                                /* 0x{(holds << 5 | waits << 11) << 41:016x} */\n")


@pytest.mark.parametrize("at_branch, drain, found", [(0, "", 1), (0b100, "", 0), (0b010, "", 1), (0, written("DEPBAR.LE SB2, 0x0"), 0)])
def test_the_wait_may_stand_anywhere_on_the_way_back(at_branch: int, drain: str, found: int) -> None:
    products = "".join(written(f"DMMA.16x8x4 R{n}, R40, R60, R{n}", 2) for n in (0, 8, 16))
    body = f".L_x_1:\n{drain}{products}" + written("@!P0 BRA `(.L_x_1)", 7, at_branch)
    assert len([product for product in in_text(body) if "R0," in product.text]) == found
