"""The machine code of algebras in the warp-specialised kernel, without a GPU: as many products as the table asks for, nothing
spilt, and tensor cores that wait for nobody."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.blas import CONJUGATE
from gemmkit.layouts import Interleaved, Planar
from gemmkit.operators import COMPLEX, DUAL, QUATERNION, SPLIT_COMPLEX, Algebra, WGMMAOp, dual
from gemmkit.runtime.device import H100
from tests.codegen.test_sm90_code import Code
from tests.support.algebras import TRIANGULAR
from tests.support.machines import BF16

pytestmark = [pytest.mark.compile, pytest.mark.thorough]           # `make gate` looks at these kernels every time

LARGE = dict(M=4096, N=4096, K=4096)
ORDERS = {"N": "row", "T": "col"}


def config(algebra: Algebra, orders: str = "NN", dtype: Any = "f2", kind: Any = Interleaved, **fields: Any) -> gk.Config:
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


@pytest.mark.parametrize("dtype", ["f2", BF16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("orders", ["NN", "NT"])
@pytest.mark.parametrize("algebra", [COMPLEX, DUAL, SPLIT_COMPLEX], ids=lambda a: f"{a.products}-{a.names[1]}")
def test_a_by_registers(algebra: Algebra, orders: str, dtype: Any) -> None:
    """Numbers of A are read once, 16 x 16 of them in two instructions, and nobody writes them."""
    conf = config(algebra, orders, dtype)
    made = code(conf, by_registers=True)
    made.check_copied()
    made.check_dealt()
    words = conf.block_shape.KN.count // 128                                        # of a thread that takes B apart
    assert made.count("LDS") == words // 4
    assert made.count("STS") <= words // (2 if orders == "NN" else 4) + conf.block_shape.size.N // 4    # the latter are D's


@pytest.mark.parametrize("size", [(4096, 128, 4096), (512, 512, 512), (128, 128, 128), (128, 32, 128), (64, 16, 64)], ids=str)
@pytest.mark.parametrize("algebra", [COMPLEX, DUAL], ids=lambda a: a.names[1])
def test_tiles_by_registers(algebra: Algebra, size: tuple[int, int, int]) -> None:
    code(config(algebra, gemm_shape=dict(zip("MNK", size))), by_registers=True)


@pytest.mark.parametrize("fields", [dict(schedule="pingpong", warps_per_block=8, block_shape=gk.Tile(M=64, N=128, K=32)),
                                    dict(block_shape=gk.Tile(M=128, N=128, K=16), warps_per_block=8),
                                    dict(block_shape=gk.Tile(M=128, N=64, K=32), warps_per_block=4),
                                    dict(block_shape=gk.Tile(M=64, N=32, K=128), warps_per_block=4)],
                         ids=["ping-pong", "one step", "two fragments", "eight steps"])
@pytest.mark.parametrize("algebra", [COMPLEX, DUAL], ids=lambda a: a.names[1])
def test_mappings_by_registers(algebra: Algebra, fields: dict[str, Any]) -> None:
    N = fields["block_shape"].size.N
    code(config(algebra, operator=Algebra(WGMMAOp(N), algebra), **fields), by_registers=True)


@pytest.mark.parametrize("algebra, orders", [(COMPLEX, "TN"), (DUAL, "TT"), (dual(3), "TN"), (QUATERNION, "NT"),
                                             (QUATERNION, "TN")], ids=lambda x: x if isinstance(x, str) else f"{x.parts}-{x.products}")
def test_interleaved_numbers_land(algebra: Algebra, orders: str) -> None:
    """All that comes from global memory is brought by TMA; a read of 16 bytes is written in one access a part."""
    conf = config(algebra, orders)
    made = code(conf)
    made.check_copied()
    made.check_dealt()
    words = (conf.block_shape.MK.count + conf.block_shape.KN.count) * algebra.parts // 2 // 64        # of a thread of either team
    assert made.count("LDS") == words // 4
    assert made.count("STS") <= words // 4 * algebra.parts + conf.block_shape.size.N // 4       # the latter are D's


def test_a_conjugate_lands() -> None:
    """Out of range it is masked; in range nothing is but the sign."""
    made = code(config(COMPLEX, "TN", transform_global_to_shared_a=CONJUGATE))
    made.check_copied()


@pytest.mark.parametrize("algebra", [COMPLEX, DUAL, TRIANGULAR, QUATERNION], ids=lambda a: f"{a.parts}-{a.products}")
def test_planes_go_by_tma(algebra: Algebra) -> None:
    a = np.zeros((algebra.parts, 256, 256), "f2")
    made = code(config(algebra, "NT", kind=Planar), a=a, b=a.transpose(0, 2, 1), out=np.zeros((4096, 4096, algebra.parts), "f2"))
    made.check_dealt()
    assert made.count("UTMALDG") > 0 and made.count("LDG") == 0
    assert made.count("LDS") == 0


def test_planes_beside_numbers_that_land() -> None:
    conf = config(COMPLEX, "NT", global_a_layout=Planar(COMPLEX.number_dtype("f2")))
    made = code(conf, a=np.zeros((2, 4096, 4096), "f2"))
    made.check_copied()
    made.check_dealt()


@pytest.mark.parametrize("algebra", [dual(2), dual(4), dual(7)], ids=lambda a: f"{a.parts}-{a.products}")
def test_numbers_that_tma_does_not_know(algebra: Algebra) -> None:
    """Of 6, 10 and 16 bytes: by warps."""
    made = code(config(algebra))
    assert made.count("UTMALDG") == 0 and made.count("LDG") > 0


def test_numbers_at_odd_places() -> None:
    """2-byte alignment: part by part, and no wider access."""
    parts = np.zeros(4096 * 64 * 2 + 1, np.float16)[1:].reshape(4096, 64, 2)
    assert parts.ctypes.data % 4 == 2
    made = code(config(COMPLEX), a=parts)
    assert any(line.startswith("LDG.E.U16") for line in made.lines)


FIELDS: dict[str, tuple[Algebra, dict[str, Any]]] = {
    "bf16": (COMPLEX, dict(dtype=BF16)),
    "f16 in f16": (COMPLEX, dict(operator=Algebra(WGMMAOp(128, accumulator="f2"), COMPLEX))),
    "small": (QUATERNION, dict(gemm_shape=dict(M=128, N=128, K=64))),
    "c and a bias": (COMPLEX, dict(global_c_layout=Interleaved(COMPLEX.number_dtype("f2")),
                                   epilogue=epilogues.Bias(np.ones(4096, "f2")))),
}


@pytest.mark.parametrize("name", FIELDS)
def test_others(name: str) -> None:
    algebra, fields = FIELDS[name]
    code(config(algebra, **fields), by_registers=algebra is COMPLEX)
