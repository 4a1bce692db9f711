"""Block scales of 8-bit floats (`BlockScaledOp`) on the warp-specialised kernel: results, refusals, machine code.

Elements are small whole numbers and scales powers of two, so that every result is exactly right or wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts
from gemmkit.epilogues import Bias
from gemmkit.kernels.collectives.split_k import StreamK
from gemmkit.kernels.spec import Condition
from gemmkit.lang.components import dataclass
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import COMPLEX, BlockScaledOp
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.tuning.model import CostedTile
from gemmkit.tuning.sm90 import SCALED
from tests.kernels.sm90.test_code import Code
from tests.support.machines import BF16, E4M3, E5M2, on_machines, whole
from tests.support.sm90 import F32, mapping, product

KINDS = [(1, 128), (128, 128), (1, 1), (128, 1)]       # rows and columns that have a scale together


def scales(rng: np.random.Generator, m: int, n: int, k: int, rows: int = 1, columns: int = 128) -> dict[str, np.ndarray]:
    """Views of arrays that hold NaN beside the scales, one by columns."""
    blocks, found = -(-k // 128), {}
    for name, shape in (("scale_a", (-(-m // rows), blocks)), ("scale_b", (blocks, -(-n // columns)))):
        held = np.full((shape[0] + 3, shape[1] + 5), np.nan, F32, order="F" if name == "scale_a" else "C")
        held[1:shape[0] + 1, 2:shape[1] + 2] = np.exp2(rng.integers(-2, 3, shape))
        found[name] = held[1:shape[0] + 1, 2:shape[1] + 2]
    return found


def scaled(x: np.ndarray, scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """In float64, each element by its block's scale."""
    wide = np.repeat(np.repeat(scale.astype(np.float64), rows, 0), columns, 1)
    return np.asarray(x.astype(np.float64) * wide[:x.shape[0], :x.shape[1]])


def operator(machine: Any, of: dict[str, np.ndarray], N: int = 32, **fields: Any) -> BlockScaledOp:
    """With the scales where the machine multiplies, at the strides that they have."""
    if machine.emulated:
        held = of
    else:
        import cupy

        held = {name: cupy.asarray(x.base, order="A")[1:x.shape[0] + 1, 2:x.shape[1] + 2] for name, x in of.items()}
    return BlockScaledOp(N, **{"dtype": E4M3, **held, **fields})


def check(machine: Any, rng: np.random.Generator, sizes: tuple[int, int, int], schedule: str = "one", rows: int = 1,
          columns: int = 128, N: int = 32, b_dtype: Any = E4M3, **fields: Any) -> None:
    m, n, k = sizes
    a, b, of = whole(rng, (m, k), E4M3), whole(rng, (k, n), b_dtype), scales(rng, m, n, k, rows, columns)
    given = operator(machine, of, N, b_dtype=b_dtype, rows=rows, columns=columns)
    conf = mapping(schedule, given, **{"a": RowMajor, "b": ColMajor, "d": RowMajor(F32), **fields})
    wanted = scaled(a, of["scale_a"], rows, 128) @ scaled(b, of["scale_b"], 128, columns)
    found = product(machine, conf, a, b)
    assert np.array_equal(found, wanted.astype(found.dtype)), sizes


SIZES = {True: [(80, 48, 272), (67, 37, 131)], False: [(1024, 1040, 1040), (1021, 997, 499), (67, 37, 131), (130, 8, 4096)]}


@pytest.mark.kin(1)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("rows, columns", KINDS)
def test_kinds(machine: Any, rows: int, columns: int, rng: np.random.Generator) -> None:
    """Sizes that TMA takes and others, of which none is whole blocks."""
    for sizes in SIZES[machine.emulated]:
        check(machine, rng, sizes, rows=rows, columns=columns)


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("schedule", ["two", "tall", "three", "pingpong", "two-2x1", "one-1x2", "two-2x2"])
def test_schedules(machine: Any, schedule: str, rng: np.random.Generator, few_blocks: Any) -> None:
    """Tiles one after the other, whose columns begin anywhere in a block of 128: a tile of 48 may have those of two."""
    for sizes in [(144, 160, 400)] if machine.emulated else [(1040, 1008, 1040), (200, 3000, 400)]:
        check(machine, rng, sizes, schedule, N=48, rows=1 if "2" in schedule else 128)


@pytest.mark.kin(1)
@pytest.mark.sample(1)
@on_machines
@pytest.mark.parametrize("splits", [2, 3, StreamK(3)], ids=repr)
def test_shares_of_k_read_their_own_scales(machine: Any, splits: Any, rng: np.random.Generator) -> None:
    check(machine, rng, (72, 48, 700) if machine.emulated else (400, 150, 5000), splits=splits)


@pytest.mark.kin(1)
@on_machines
def test_types_and_orders(machine: Any, rng: np.random.Generator) -> None:
    """A and B of two types, either of them by the other axis, and a bias behind."""
    check(machine, rng, (72, 48, 272), b_dtype=E5M2, d=ColMajor(F32))
    check(machine, rng, (72, 48, 272), a=ColMajor, b=RowMajor)
    check(machine, rng, (72, 48, 0))
    m, n, k = 70, 40, 300
    a, b, of, bias = whole(rng, (m, k), E4M3), whole(rng, (n, k), E4M3).T, scales(rng, m, n, k), whole(rng, (n,), F32)
    wanted = scaled(a, of["scale_a"], 1, 128) @ scaled(b, of["scale_b"], 128, 128) + bias
    with machine.session():
        found = gk.matmul(machine.array(a), machine.array(b), operator=operator(machine, of), dtype=BF16,
                          epilogue=Bias(machine.array(bias)))
    assert np.array_equal(machine.numpy(found), wanted.astype(BF16))


@on_machines
def test_sums_beyond_a_block_are_in_float32(machine: Any, rng: np.random.Generator) -> None:
    """Of numbers that are not whole: as close to float64 as sums of 128 in tensor cores are."""
    m, n, k = 64, 32, 2048
    a, b = rng.standard_normal((m, k)).astype(E4M3), rng.standard_normal((n, k)).astype(E4M3).T
    of = {name: rng.uniform(0.5, 2, x.shape).astype(F32) for name, x in scales(rng, m, n, k).items()}
    with machine.session():
        held = {name: machine.array(x) for name, x in of.items()}
        found = machine.numpy(gk.matmul(machine.array(a), machine.array(b), operator=BlockScaledOp(32, E4M3, **held), dtype=F32))
    a64, b64 = scaled(a, of["scale_a"], 1, 128), scaled(b, of["scale_b"], 128, 128)
    assert (np.abs(found - a64 @ b64) <= 2.0**-12 * (np.abs(a64) @ np.abs(b64))).all()


@on_machines
def test_scales_of_no_number_stay_in_their_rows(machine: Any) -> None:
    a, b = np.ones((64, 256), E4M3), np.ones((32, 256), E4M3).T
    scale_a = np.ones((64, 2), F32)
    scale_a[3, 1], scale_a[5, 0], scale_a[7] = np.nan, np.inf, 0
    with machine.session():
        given = BlockScaledOp(32, E4M3, scale_a=machine.array(scale_a), scale_b=machine.array(np.ones((2, 1), F32)))
        found = machine.numpy(gk.matmul(machine.array(a), machine.array(b), operator=given, dtype=F32))
    wanted = np.full((64, 32), 256, F32)
    wanted[3], wanted[5], wanted[7] = np.nan, np.inf, 0
    assert np.array_equal(found, wanted, equal_nan=True)


# -- refusals ---------------------------------------------------------------------------------------------------------

ONES = dict(scale_a=np.ones((70, 2), F32), scale_b=np.ones((2, 1), F32))


@pytest.mark.parametrize("change, error, words", [
    (dict(scale_a=np.ones((70, 2))), TypeError, "scale_a has dtype float64; float32 is needed"),
    (dict(scale_b=np.ones(2, F32)), ValueError, r"scale_b has shape \(2,\); a matrix of 2 dimensions"),
    (dict(scale_b=None), TypeError, "scale_b"),
    (dict(rows=64), ValueError, r"BlockScaledOp\(rows=64\): 1 or 128 is needed"),
    (dict(promote=256), ValueError, "blocks are of 128 elements along K"),
    (dict(dtype=np.float16), TypeError, "8-bit floats have block scales"),
    (dict(dtype=E4M3, accumulator=np.float16), ValueError, "cannot be promoted"),
])
def test_operators_that_are_none(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BlockScaledOp(32, **{"dtype": E4M3, **ONES, **change})


@pytest.mark.parametrize("change, words", [
    (dict(scale_a=np.ones((69, 2), F32)), r"scale_a has shape \(69, 2\); a product of 70 x 40 x 256 needs \(70, 2\)"),
    (dict(scale_a=np.ones((70, 3), F32)), r"needs \(70, 2\)"),
    (dict(scale_b=np.ones((2, 2), F32)), r"scale_b has shape \(2, 2\); a product of 70 x 40 x 256 needs \(2, 1\)"),
    (dict(rows=128), r"needs \(1, 2\)"), (dict(columns=1), r"needs \(2, 40\)")])
def test_scales_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    a, b = np.zeros((70, 256), E4M3), np.zeros((40, 256), E4M3).T
    with gk.emulate(), pytest.raises(ValueError, match=words):
        gk.matmul(a, b, operator=BlockScaledOp(32, **{"dtype": E4M3, **ONES, **change}), dtype=F32)


def test_what_a_product_with_scales_does_not_take() -> None:
    a, b, given = np.zeros((70, 256), E4M3), np.zeros((40, 256), E4M3).T, BlockScaledOp(32, E4M3, **ONES)

    @dataclass(frozen=True)
    class Half(Condition):
        def __call__(self, m: int, n: int, k: int) -> bool:
            return k < 128

    with gk.emulate():
        with pytest.raises(ValueError, match=r"a stack of products of shape \(2,\)"):
            gk.matmul(np.stack((a, a)), np.stack((b, b)), operator=given, dtype=F32)
        with pytest.raises(gk.ConfigError, match="a condition leaves k-tiles out"):
            gk.matmul(a, b, operator=given, dtype=F32, condition=Half())
        with pytest.raises(gk.ConfigError, match="a stage is a block of 128 elements along K"):
            mapping("one", given, a=RowMajor, b=ColMajor, d=RowMajor(F32), depth=64)
    of = layouts.Planar(COMPLEX.number_dtype(E4M3))
    with pytest.raises(gk.ConfigError, match="numbers of several parts have no block scales"):
        gk.get_config(operator=COMPLEX.with_base(given), gemm_shape=dict(M=64, N=32, K=256), device=H100,
                      global_a_layout=of, global_b_layout=of)


# -- machine code -------------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.compile
def test_scales_of_columns_have_registers() -> None:
    def config(N: int) -> gk.Config:
        given = BlockScaledOp(N, E4M3, scale_a=np.ones((4096, 32), F32), scale_b=np.ones((32, 4096), F32), columns=1)
        return gk.get_config(operator=given, block_shape=Tile(M=128, N=N, K=128), schedule="cooperative", warps_per_block=8,
                             global_a_layout=RowMajor(E4M3), global_b_layout=ColMajor(E4M3), global_d_layout=RowMajor(BF16),
                             device=H100)

    Code(config(128)).check_tidy()
    with pytest.raises(gk.ConfigError, match="a scale for each of its columns beside 160 accumulators"):
        config(160)


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(2)
@pytest.mark.parametrize("one", SCALED, ids=lambda one: f"{one.M}x{one.N}")
def test_a_round_is_products_and_scaling(one: CostedTile) -> None:
    """Nothing spills, the products of a fragment are one group, and beside a fused multiplication and addition for each sum a
    round has few instructions."""
    given = BlockScaledOp(one.N, E4M3, scale_a=np.ones((4096, 32), F32), scale_b=np.ones((32, 32), F32))
    code = Code(gk.get_config(operator=given, block_shape=Tile(M=one.M, N=one.N, K=128), schedule=one.schedule,
                              warps_per_block=one.warps, cluster=Tile(M=one.cluster[0], N=one.cluster[1]),
                              global_a_layout=RowMajor(E4M3), global_b_layout=ColMajor(E4M3), global_d_layout=RowMajor(BF16),
                              device=H100))
    code.check_tidy()
    code.check_asynchronous("QGMMA")
    assert code.count("UTMALDG") > 0 and code.count("UTMASTG") > 0 and code.count("STG") == 0
    (loop,) = code.loops("QGMMA")
    counts = Counter(re.split(r"[. ;]", line)[0] for line in loop)
    consumers = one.warps // 4
    sums, groups = one.M * one.N // 128 // consumers, one.M // 32 // consumers * one.N // given.width
    assert counts["FFMA"] == sums and counts["FMUL"] <= groups
    assert counts["LDGSTS"] == counts["LDG"] == 0             # the producer's threads copy the scales
    assert len(loop) < sums + 2 * groups + 90
