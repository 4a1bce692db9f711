"""The machine code of the warp-specialised kernel, without a GPU: nothing spills, nothing makes tensor cores wait, and an
algebra takes as many products as its table asks for."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.blas import CONJUGATE
from gemmkit.epilogues import ReLU, Residual
from gemmkit.kernels.sm90.mainloop import AlternatingMainloop
from gemmkit.layouts import ColMajor, Interleaved, Planar, RowMajor
from gemmkit.operators import COMPLEX, DUAL, QUATERNION, SPLIT_COMPLEX, Algebra, WGMMAOp, dual
from gemmkit.plans.ahead import CompiledKernel, compile_config, recorded
from gemmkit.runtime.device import H100
from gemmkit.transforms import Map
from gemmkit.tuning.model import CostedTile
from gemmkit.tuning.sm90 import ACROSS, ALIGNED, CLUSTERED, MAPPINGS, PROMOTED, REWRITTEN, SPLIT, TRANSFORMED, TRANSPOSED
from tests.support.algebras import TRIANGULAR
from tests.support.machines import BF16, E4M3
from tests.support.sm90 import F16, F32, mapping
from tests.support.user_layouts import Toeplitz

# ==========================================================================================================================
# The machine code of the warp-specialised kernel, without a GPU: nothing spills, and nothing makes tensor cores wait.

LARGEST = next(mapping for mapping in MAPPINGS if (mapping.M, mapping.N) == (128, 256))
SMALL = next(mapping for mapping in MAPPINGS if mapping.N == 64)
PINGPONG = next(mapping for mapping in MAPPINGS if (mapping.M, mapping.N) == (128, 128))


def config(mapping: CostedTile, operator: Any = None, **fields: Any) -> gk.Config:
    """A shipped mapping: rows of A, columns of B, rows of 16-bit D for 16-bit operands."""
    operator = operator or WGMMAOp(mapping.N)
    wide = operator.accumulator if operator.dtype.itemsize != 2 else operator.dtype
    return gk.get_config(**{**dict(
        operator=operator, block_shape=gk.Tile(M=mapping.M, N=operator.N, K=128 // operator.dtype.itemsize),
        schedule=mapping.schedule, warps_per_block=mapping.warps, global_a_layout=RowMajor(operator.dtype),
        global_b_layout=ColMajor(operator.b_dtype), global_d_layout=RowMajor(wide), device=H100), **fields})


class Code:
    """A kernel's instructions in their order."""

    def __init__(self, conf: gk.Config, **operands: Any):
        self.conf = conf
        self.kernel: CompiledKernel = compile_config(conf, device=H100, operands=operands)
        self.lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;\n]*;)", self.kernel.sass)

    def count(self, opcode: str) -> int:
        return sum(line.startswith((opcode + ".", opcode + " ")) for line in self.lines)

    def check_tidy(self) -> None:
        """Everything lives in registers, and nothing is called."""
        usage = self.kernel.assembled.usage
        assert (usage.spill_stores, usage.spill_loads, usage.stack_bytes) == (0, 0, 0)
        assert [self.count(opcode) for opcode in ("LDL", "STL", "CALL")] == [0, 0, 0]

    def check_asynchronous(self, opcode: str = "HGMMA") -> None:
        """Of the products of a stage (of a fragment, if these are promoted one by one) only the last signals (gsb0): where
        each does, the assembler has made them wait for each other."""
        issued = [line for line in self.lines if "GMMA" in line]
        assert issued and all(opcode in line for line in issued)
        spec: Any = self.conf.spec()
        fragments = 1 if isinstance(spec.mainloop, AlternatingMainloop) else self.conf.compute_warp.size.M // 64
        group = fragments * (self.conf.block_shape.size.K // self.conf.operator.K)
        assert len(issued) % group == 0
        assert ["gsb0" in line for line in issued] == ([False] * (group - 1) + [True]) * (len(issued) // group)

    def check_by_registers(self, opcode: str = "LDSM", loads: int = 1) -> None:
        """Every step along K is a group of wgmmas that take A from registers; a step's are fetched one step ahead, each
        fragment by so many ``loads``."""
        fragments, steps = self.conf.compute_warp.size.M // 64, self.conf.block_shape.size.K // self.conf.operator.K
        issued = [line for line in self.lines if "GMMA" in line]
        assert len(issued) == fragments * steps and all(re.match(r"HGMMA\S* R\d+, R\d+, gdesc", line) for line in issued)
        assert ["gsb0" in line for line in issued] == ([False] * (fragments - 1) + [True]) * steps
        assert self.count(opcode) == fragments * (steps + 1) * loads
        self.check_fragments_stay()

    def check_fragments_stay(self) -> None:
        """No register of a fragment of A is written while a wgmma that reads it is on its way: not in a round of the loop, and
        not in the next one. (ptxas sees to it only where a register is written after the wait for its last reader.)"""
        for loop in self.loops("HGMMA"):
            pending: list[set[int]] = [set()]
            for line in 2 * loop:
                if waits := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", line):
                    pending = pending[len(pending) - 1 - int(waits[1]):] if int(waits[1]) < len(pending) - 1 else pending
                elif reads := re.match(r"HGMMA\S* R\d+, -?R(\d+), gdesc", line):
                    pending[-1] |= set(range(int(reads[1]), int(reads[1]) + 4))
                    if "gsb0" in line:
                        pending.append(set())
                elif writes := re.match(r"(?!ST|RED|BAR|SYNCS)\S+ R(\d+)[.,]", line):
                    wide = 4 if re.match(r"\S*(\.128|M88\.4)", line) else 2 if re.match(r"\S*(\.64|\.WIDE)", line) else 1
                    written = set(range(int(writes[1]), int(writes[1]) + wide))
                    assert not any(written & each for each in pending), line

    def loops(self, opcode: str) -> list[list[str]]:
        """The innermost loops with this instruction."""
        places: dict[str, int] = {}
        lines: list[str] = []
        found: list[tuple[int, int]] = []
        for line in self.kernel.sass.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                places[label[1]] = len(lines)
            elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;\n]*;)", line):
                lines.append(code[1])
                back = re.match(r"BRA `\((\.L_x_\d+)\)", code[1])
                if back and back[1] in places and any(x.startswith(opcode) for x in lines[places[back[1]]:]):
                    found.append((places[back[1]], len(lines)))
        inner = [(a, b) for a, b in found if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in found)]
        return [lines[a:b] for a, b in inner]

    def check_copied(self) -> None:
        """A, B and D by TMA alone."""
        assert self.count("UTMALDG") > 0 and self.count("UTMASTG") > 0
        assert self.count("LDG") == 0 and self.count("STG") == 0

    def check_dealt(self) -> None:
        """Where two or three warpgroups multiply, the producer gives them registers."""
        assert self.count("USETMAXREG") == (2 if self.conf.warps_per_block > 4 else 0)


THREE = [one for one in CLUSTERED if one.warps == 12]          # consumers, which have 160 registers a thread


@pytest.mark.kin(5)
@pytest.mark.compile
@pytest.mark.sample(7)
@pytest.mark.parametrize("mapping", [*MAPPINGS, *ALIGNED, *THREE],
                         ids=lambda m: f"{m.M}x{m.N}-{m.schedule}-{m.cluster[0]}x{m.cluster[1]}")
def test_shipped_mappings(mapping: CostedTile) -> None:
    code = Code(config(mapping, cluster=gk.Tile(M=mapping.cluster[0], N=mapping.cluster[1])))
    code.check_tidy()
    code.check_asynchronous()
    code.check_copied()
    code.check_dealt()
    assert code.count("STSM") > 0                                  # D's panels are written matrix by matrix


TYPES = {
    "bf16, both across K": (WGMMAOp(128, BF16), "HGMMA", dict(global_a_layout=ColMajor(BF16), global_b_layout=RowMajor(BF16))),
    "f16 in f16": (WGMMAOp(128, accumulator=F16), "HGMMA", {}),
    "tf32": (WGMMAOp(128, F32), "HGMMA", {}),
    "i8": (WGMMAOp(128, "i1"), "IGMMA", {}),
    "e4m3": (WGMMAOp(64, E4M3, promote=128), "QGMMA", {}),
}


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.sample(5)
@pytest.mark.parametrize("name", TYPES)
def test_types(name: str) -> None:
    operator, opcode, fields = TYPES[name]
    code = Code(config(PINGPONG, operator, **fields))
    code.check_tidy()
    code.check_asynchronous(opcode)
    code.check_copied()
    code.check_dealt()


@pytest.mark.compile
@pytest.mark.kin(5)
def test_a_bias_costs_no_memory() -> None:
    code = Code(config(LARGEST, epilogue=epilogues.Bias(np.ones(4096, F16))))
    code.check_tidy()
    code.check_asynchronous()
    assert code.count("UTMALDG") > 0 and code.count("UTMASTG") > 0 and code.count("STG") == 0


@pytest.mark.compile
@pytest.mark.kin(5)
def test_c_costs_no_memory() -> None:
    code = Code(config(LARGEST, global_c_layout=RowMajor(F16), transform_global_to_shared_c=Map(lambda x: max(x, 0))))
    code.check_tidy()
    code.check_asynchronous()
    assert code.count("UTMASTG") > 0


@pytest.mark.compile
@pytest.mark.thorough
def test_composed_epilogues_cost_no_memory() -> None:
    bias, residual = np.ones(4096, F16), np.ones((4096, 4096), F16)
    code = Code(config(PINGPONG, epilogue=epilogues.Bias(bias) | epilogues.ReLU() | epilogues.Residual(residual)))
    code.check_tidy()
    code.check_asynchronous()
    assert code.count("UTMALDG") > 0 and code.count("UTMASTG") > 0 and code.count("STG") == 0


ROWS_OF = {"K": RowMajor, "M": ColMajor}


@pytest.mark.compile
@pytest.mark.kin(5)
@pytest.mark.sample(6)
@pytest.mark.parametrize("mapping, along, depth", [(TRANSFORMED[0], "K", 64), (TRANSFORMED[0], "M", 48), (TRANSFORMED[1], "M", 64),
                                                   (TRANSFORMED[1], "K", 48), (TRANSFORMED[2], "K", 16), (TRANSFORMED[3], "M", 64)],
                         ids=lambda x: f"{x.M}x{x.N}" if isinstance(x, CostedTile) else str(x))
def test_a_transform_of_a_costs_no_shared_memory(mapping: CostedTile, along: str, depth: int) -> None:
    """relu(A + 1) @ B: no warp touches shared memory but to fetch A, which tensor cores would have read as well."""
    code = Code(config(mapping, block_shape=gk.Tile(M=mapping.M, N=mapping.N, K=depth), global_a_layout=ROWS_OF[along](F16),
                       transform_global_to_shared_a=Map(lambda x: max(x + 1, 0))))
    code.check_tidy()
    code.check_by_registers()
    code.check_copied()
    code.check_dealt()
    assert code.count("LDS") == 0


@pytest.mark.compile
@pytest.mark.kin(5)
@pytest.mark.sample(12)
@pytest.mark.parametrize("mapping", ACROSS, ids=lambda m: f"{m.M}x{m.N}")
@pytest.mark.parametrize("d", [RowMajor, ColMajor])
def test_a_across_k_is_fetched_word_by_word(mapping: CostedTile, d: Any) -> None:
    """tf32 with A by columns: TMA moves all, consumers load each word once, and nobody writes to a stage. The places of a
    stage's words are computed once: what is left of its loop is rounding and two selections a word."""
    code = Code(config(mapping, WGMMAOp(mapping.N, F32), global_a_layout=ColMajor(F32), global_d_layout=d(F32)))
    code.check_tidy()
    code.check_by_registers("LDS", 4)
    code.check_copied()
    code.check_dealt()
    (loop,) = code.loops("HGMMA")
    assert len(loop) < 80 + 110 * (code.conf.compute_warp.size.M // 64)


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.sample(3)
@pytest.mark.parametrize("mapping", TRANSPOSED[:3], ids=lambda m: f"{m.M}x{m.N}")
def test_b_is_transposed_beside_a_from_registers(mapping: CostedTile) -> None:
    """tf32 with both across K."""
    code = Code(config(mapping, WGMMAOp(mapping.N, F32), global_a_layout=ColMajor(F32), global_b_layout=RowMajor(F32)))
    code.check_tidy()
    issued = [line for line in code.lines if "GMMA" in line]
    fragments = code.conf.compute_warp.size.M // 64
    assert ["gsb0" in line for line in issued] == ([False] * (fragments - 1) + [True]) * (len(issued) // fragments)
    code.check_fragments_stay()
    code.check_copied()


@pytest.mark.compile
@pytest.mark.kin(5)
@pytest.mark.sample(4)
@pytest.mark.parametrize("mapping", MAPPINGS[:4], ids=lambda m: f"{m.M}x{m.N}-{m.schedule}")
def test_d_by_columns_leaves_by_tma(mapping: CostedTile) -> None:
    code = Code(config(mapping, global_d_layout=ColMajor(F16)))
    code.check_tidy()
    code.check_asynchronous()
    code.check_copied()
    assert code.count("STSM") > 0


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize("mapping", REWRITTEN[:3], ids=lambda m: f"{m.M}x{m.N}-{m.schedule}")
def test_transforms_cost_no_memory(mapping: CostedTile) -> None:
    """ReLU(relu(A + 1) @ (B + 1) + bias): TMA brings both operands, and the producer's warps change B in place."""
    bias = np.ones(4096, F16)
    code = Code(config(mapping, epilogue=epilogues.Bias(bias) | epilogues.ReLU(),
                       transform_global_to_shared_a=Map(lambda x: max(x + 1, 0)),
                       transform_global_to_shared_b=Map(lambda x: x + 1)))
    code.check_tidy()
    code.check_by_registers()
    assert code.count("UTMALDG") > 0 and code.count("UTMASTG") > 0
    assert code.count("LDS") > 0 and code.count("HADD2") > 0       # two elements at a time


@pytest.mark.compile
@pytest.mark.kin(5)
def test_a_layout_of_the_users_costs_no_memory() -> None:
    code = Code(config(LARGEST, global_a_layout=Toeplitz(F16)), a=np.ones(8191, F16))
    code.check_tidy()
    code.check_asynchronous()
    assert code.count("UTMALDG") > 0                               # B still goes by TMA


@pytest.mark.compile
@pytest.mark.kin(5)
@pytest.mark.sample(2)
@pytest.mark.parametrize("half", ["lower", "upper"])
def test_a_triangular_operand_costs_no_memory(half: str) -> None:
    code = Code(config(LARGEST, global_a_layout=layouts.Triangular(RowMajor(F16), half)), a=np.ones((512, 512), F16))
    code.check_tidy()
    code.check_asynchronous()
    assert code.count("UTMALDG") > 0 and code.count("LDG") == 0    # A by TMA, too


@pytest.mark.compile
@pytest.mark.kin(5)
@pytest.mark.sample(5)
@pytest.mark.parametrize("mapping", TRANSPOSED, ids=lambda m: f"{m.M}x{m.N}")
def test_turned_tiles_cost_no_memory(mapping: CostedTile) -> None:
    code = Code(config(mapping, WGMMAOp(mapping.N, F32), global_b_layout=RowMajor(F32)))
    code.check_tidy()
    code.check_asynchronous()
    assert code.count("UTMALDG") > 0 and code.count("LDG") == 0


@pytest.mark.compile
@pytest.mark.kin(5)
@pytest.mark.sample(3)
@pytest.mark.parametrize("mapping", SPLIT[1:3] + SPLIT[-1:], ids=lambda m: f"{m.M}x{m.N}-{m.splits}")
def test_exchanged_sums_cost_no_memory(mapping: CostedTile) -> None:
    code = Code(config(mapping, splits=mapping.splits))
    code.check_tidy()
    code.check_asynchronous()
    code.check_copied()
    assert code.count("STG") == 0


@pytest.mark.compile
@pytest.mark.kin(5)
@pytest.mark.sample(3)
@pytest.mark.parametrize("mapping", PROMOTED, ids=lambda m: f"{m.M}x{m.N}")
def test_promoted_sums_cost_no_memory(mapping: CostedTile) -> None:
    code = Code(config(mapping, WGMMAOp(mapping.N, E4M3, promote=128), cluster=gk.Tile(M=mapping.cluster[0], N=mapping.cluster[1])))
    code.check_tidy()
    code.check_asynchronous("QGMMA")
    code.check_copied()


@pytest.mark.compile
@pytest.mark.kin(5)
def test_clusters_load_for_each_other() -> None:
    code = Code(config(SMALL, cluster=gk.Tile(M=2, N=1)))
    code.check_tidy()
    code.check_asynchronous()
    code.check_copied()
    assert 0 < sum("UTMALDG" in line and "MULTICAST" in line for line in code.lines) < code.count("UTMALDG")


@pytest.mark.compile
@pytest.mark.kin(5)
@pytest.mark.sample(4)
@pytest.mark.parametrize("shape", [(2, 2, 72, 32), (2, 1, 72, 32), (2, 72, 32), (72, 32)], ids=str)
def test_residuals_of_stacks_compile(shape: tuple[int, ...]) -> None:
    """Where a product's matrix is has as many coordinates as the array has steps, none among them."""
    a, b, residual = (np.zeros(s, F16) for s in ((2, 2, 72, 16), (2, 2, 16, 32), shape))
    conf = mapping("one", WGMMAOp(32), d=RowMajor(F16), epilogue=ReLU() | Residual(residual))
    launch = recorded(lambda: gk.matmul(a, b, conf=conf), H100)[0]
    assert launch.launchable.entry().meta["usage"]["spill_stores"] == 0


# ==========================================================================================================================
# The machine code of algebras in the warp-specialised kernel, without a GPU: as many products as the table asks for, nothing
# spilt, and tensor cores that wait for nobody.

LARGE = dict(M=4096, N=4096, K=4096)
ORDERS = {"N": "row", "T": "col"}


def config_of_algebra(algebra: Algebra, orders: str = "NN", dtype: Any = "f2", kind: Any = Interleaved, **fields: Any) -> gk.Config:
    number = algebra.number_dtype(dtype)
    return gk.get_config(**{**dict(operator=algebra, global_a_layout=kind(number, ORDERS[orders[0]]), gemm_shape=LARGE, device=H100,
                                   global_b_layout=kind(number, ORDERS[orders[1]]), global_d_layout=Interleaved(number)), **fields})


class AlgebraCode(Code):
    def __init__(self, conf: gk.Config, **operands: Any):
        super().__init__(conf, **operands)
        algebra: Any = conf.operator
        self.algebra, self.base = algebra, algebra.base

    @property
    def issued(self) -> list[str]:
        return [line for line in self.lines if "GMMA" in line]

    @property
    def fragments(self) -> int:
        return int(self.conf.compute_warp.size.M // 64)

    @property
    def steps(self) -> int:
        return int(self.conf.block_shape.size.K // self.base.K)

    @property
    def by_registers(self) -> bool:
        return any(re.match(r"HGMMA\S* R\d+, -?R", line) for line in self.issued)

    def check_products(self) -> None:
        """One wgmma for every entry of the table, 64 rows and step along K; only the last of a stage signals (gsb0), or the
        last of each step where A comes by registers."""
        groups = self.steps if self.by_registers else 1
        negative = sum(factor < 0 for row in self.algebra.table for sums in row for factor in sums)
        count = self.fragments * self.steps
        assert len(self.issued) == count * self.algebra.products
        assert sum("negA" in line or ", -R" in line for line in self.issued) == count * negative
        assert ["gsb0" in line for line in self.issued] == ([False] * (len(self.issued) // groups - 1) + [True]) * groups
        assert self.count("LDSM") == (2 * (count + self.fragments) if self.by_registers else 0)       # and the first ones


def code(conf: gk.Config, by_registers: bool = False, **operands: Any) -> AlgebraCode:
    made = AlgebraCode(conf, **operands)
    assert made.by_registers == by_registers
    made.check_tidy()
    made.check_products()
    made.check_fragments_stay()
    return made


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["f2", BF16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("orders", ["NN", "NT"])
@pytest.mark.parametrize("algebra", [COMPLEX, DUAL, SPLIT_COMPLEX], ids=lambda a: f"{a.products}-{a.names[1]}")
def test_a_by_registers(algebra: Algebra, orders: str, dtype: Any) -> None:
    """Numbers of A are read once, 16 x 16 of them in two instructions, and nobody writes them."""
    conf = config_of_algebra(algebra, orders, dtype)
    made = code(conf, by_registers=True)
    made.check_copied()
    made.check_dealt()
    words = conf.block_shape.KN.count // 128                                        # of a thread that takes B apart
    assert made.count("LDS") == words // 4
    assert made.count("STS") <= words // (2 if orders == "NN" else 4) + conf.block_shape.size.N // 4    # the latter are D's


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize("size", [(4096, 128, 4096), (512, 512, 512), (128, 128, 128), (128, 32, 128), (64, 16, 64)], ids=str)
@pytest.mark.parametrize("algebra", [COMPLEX, DUAL], ids=lambda a: a.names[1])
def test_tiles_by_registers(algebra: Algebra, size: tuple[int, int, int]) -> None:
    code(config_of_algebra(algebra, gemm_shape=dict(zip("MNK", size))), by_registers=True)


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize("fields", [dict(schedule="pingpong", warps_per_block=8, block_shape=gk.Tile(M=64, N=128, K=32)),
                                    dict(block_shape=gk.Tile(M=128, N=128, K=16), warps_per_block=8),
                                    dict(block_shape=gk.Tile(M=128, N=64, K=32), warps_per_block=4),
                                    dict(block_shape=gk.Tile(M=64, N=32, K=128), warps_per_block=4)],
                         ids=["ping-pong", "one step", "two fragments", "eight steps"])
@pytest.mark.parametrize("algebra", [COMPLEX, DUAL], ids=lambda a: a.names[1])
def test_mappings_by_registers(algebra: Algebra, fields: dict[str, Any]) -> None:
    N = fields["block_shape"].size.N
    code(config_of_algebra(algebra, operator=Algebra(WGMMAOp(N), algebra), **fields), by_registers=True)


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize("algebra, orders", [(COMPLEX, "TN"), (DUAL, "TT"), (dual(3), "TN"), (QUATERNION, "NT"),
                                             (QUATERNION, "TN")], ids=lambda x: x if isinstance(x, str) else f"{x.parts}-{x.products}")
def test_interleaved_numbers_land(algebra: Algebra, orders: str) -> None:
    """All that comes from global memory is brought by TMA; a read of 16 bytes is written in one access a part."""
    conf = config_of_algebra(algebra, orders)
    made = code(conf)
    made.check_copied()
    made.check_dealt()
    words = (conf.block_shape.MK.count + conf.block_shape.KN.count) * algebra.parts // 2 // 64        # of a thread of either team
    assert made.count("LDS") == words // 4
    assert made.count("STS") <= words // 4 * algebra.parts + conf.block_shape.size.N // 4       # the latter are D's


@pytest.mark.compile
@pytest.mark.thorough
def test_a_conjugate_lands() -> None:
    """Out of range it is masked; in range nothing is but the sign."""
    made = code(config_of_algebra(COMPLEX, "TN", transform_global_to_shared_a=CONJUGATE))
    made.check_copied()


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize("algebra", [COMPLEX, DUAL, TRIANGULAR, QUATERNION], ids=lambda a: f"{a.parts}-{a.products}")
def test_planes_go_by_tma(algebra: Algebra) -> None:
    a = np.zeros((algebra.parts, 256, 256), "f2")
    made = code(config_of_algebra(algebra, "NT", kind=Planar), a=a, b=a.transpose(0, 2, 1), out=np.zeros((4096, 4096, algebra.parts), "f2"))
    made.check_dealt()
    assert made.count("UTMALDG") > 0 and made.count("LDG") == 0
    assert made.count("LDS") == 0


@pytest.mark.compile
@pytest.mark.thorough
def test_planes_beside_numbers_that_land() -> None:
    conf = config_of_algebra(COMPLEX, "NT", global_a_layout=Planar(COMPLEX.number_dtype("f2")))
    made = code(conf, a=np.zeros((2, 4096, 4096), "f2"))
    made.check_copied()
    made.check_dealt()


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize("algebra", [dual(2), dual(4), dual(7)], ids=lambda a: f"{a.parts}-{a.products}")
def test_numbers_that_tma_does_not_know(algebra: Algebra) -> None:
    """Of 6, 10 and 16 bytes: by warps."""
    made = code(config_of_algebra(algebra))
    assert made.count("UTMALDG") == 0 and made.count("LDG") > 0


@pytest.mark.compile
@pytest.mark.thorough
def test_numbers_at_odd_places() -> None:
    """2-byte alignment: part by part, and no wider access."""
    parts = np.zeros(4096 * 64 * 2 + 1, np.float16)[1:].reshape(4096, 64, 2)
    assert parts.ctypes.data % 4 == 2
    made = code(config_of_algebra(COMPLEX), a=parts)
    assert any(line.startswith("LDG.E.U16") for line in made.lines)


FIELDS: dict[str, tuple[Algebra, dict[str, Any]]] = {
    "bf16": (COMPLEX, dict(dtype=BF16)),
    "f16 in f16": (COMPLEX, dict(operator=Algebra(WGMMAOp(128, accumulator="f2"), COMPLEX))),
    "small": (QUATERNION, dict(gemm_shape=dict(M=128, N=128, K=64))),
    "c and a bias": (COMPLEX, dict(global_c_layout=Interleaved(COMPLEX.number_dtype("f2")),
                                   epilogue=epilogues.Bias(np.ones(4096, "f2")))),
}


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize("name", FIELDS)
def test_others(name: str) -> None:
    algebra, fields = FIELDS[name]
    code(config_of_algebra(algebra, **fields), by_registers=algebra is COMPLEX)
