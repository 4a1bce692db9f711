"""Blocks of a cluster that exchange: sums of a shared K, and rows of D that they normalise together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.emulator.errors import EmulatorError
from gemmkit.emulator.machine import current
from gemmkit.epilogues import Bias, ReLU
from gemmkit.kernels.sm90 import exchange
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.device import H100, assumed
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.epilogues.test_normalise import BF16 as BF16_OF_ROW_EXCHANGE
from tests.epilogues.test_normalise import KINDS, QUARTER, ending, expected, normalised, operands, same
from tests.support import sm90
from tests.support.joined import F16 as F16_OF_ROW_EXCHANGE
from tests.support.joined import F32 as F32_OF_ROW_EXCHANGE
from tests.support.joined import F64
from tests.support.machines import BF16, on_machines, poison
from tests.support.patches import Seeded
from tests.support.sm90 import F16, F32, mapping, product

# ==========================================================================================================================
# Blocks of a cluster that share the K of a tile: their sums, exchanged, are the product's; the rules; what is chosen.

SHAPES = [(64, 32, 512), (70, 40, 600), (130, 72, 200), (64, 32, 64), (1, 8, 72), (64, 32, 0)]


def whole(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(dtype)


@pytest.mark.kin(1)
@pytest.mark.sample(18)
@on_machines
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("schedule, splits", [("one", 2), ("two", 2), ("one", 4)])
def test_sums_are_exchanged(machine: Any, schedule: str, splits: int, shape: tuple, rng: np.random.Generator) -> None:
    """Of blocks along K that do not divide, too, and where some blocks have none."""
    m, n, k = shape
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    conf = mapping(schedule, WGMMAOp(16 * splits), splits=splits)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F32) @ b.astype(F32))


@dataclass(frozen=True)
class Own(epilogues.Epilogue):
    """Adds an array, of which gemmkit knows nothing but that it is one."""

    array: gk.Array

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return x + self.array[m, n]


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("kind", ["Residual", "LinearCombination", "Own"])
def test_an_epilogue_that_reads_the_result(machine: Any, kind: str, rng: np.random.Generator) -> None:
    """Blocks whose slices lie out of range read nothing: the nearest element in range is stored by another block (a race that
    the emulator found at c5dc2f6)."""
    a, b, c = whole(rng, (64, 200), F16), whole(rng, (200, 40), F16), whole(rng, (64, 40), F16)
    conf = mapping("one", WGMMAOp(128), splits=4, d=RowMajor(F16))
    out = machine.array(c)
    epilogue = {"Residual": lambda: epilogues.Residual(out), "Own": lambda: Own(out),
                "LinearCombination": lambda: epilogues.LinearCombination(2.0, 0.5, out, RowMajor(F16))}[kind]()
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), conf=conf, out=out, epilogue=epilogue)
    alpha, beta = (2.0, 0.5) if kind == "LinearCombination" else (1.0, 1.0)
    expected = alpha * (a.astype(F32) @ b.astype(F32)) + beta * c.astype(F32)
    assert np.array_equal(machine.numpy(out), expected.astype(F16))


@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("dtype", [F16, BF16, np.dtype("i1")], ids=str)
def test_eight_blocks_and_other_types(machine: Any, dtype: np.dtype, rng: np.random.Generator) -> None:
    """Each block of a cluster has some of K, and one of 16-bit numbers more than the others."""
    k = 1008 if dtype.itemsize == 1 else 520
    a, b = whole(rng, (40, k), dtype), whole(rng, (k, 144), dtype)
    conf = mapping("one", WGMMAOp(128, dtype), b=ColMajor if dtype.itemsize == 1 else RowMajor, splits=8)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F32) @ b.astype(F32))


@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("columns", [136, 135])
def test_every_slot_stays_open(machine: Any, columns: int, rng: np.random.Generator) -> None:
    """C, a bias, a transform in place and one by the epilogue, with global coordinates; D by TMA, and by threads."""
    a, b, c = whole(rng, (100, 264), F16), whole(rng, (264, columns), F16), whole(rng, (100, columns), F32)
    bias = whole(rng, (columns,), F32)
    conf = mapping("two", WGMMAOp(64), splits=2, global_c_layout=RowMajor(F32), epilogue=Bias(machine.array(bias)) | ReLU(),
                   transform_global_to_shared_a=Map(lambda x: x + 1),
                   transform_regs_to_shared_d=Map(lambda x, i, j: x + i % 3 - j % 5))
    i, j = np.indices((100, columns))
    expected = (a.astype(F32) + 1) @ b.astype(F32) + c + i % 3 - j % 5 + bias
    assert np.array_equal(product(machine, conf, a, b, c), expected.clip(0))


@pytest.mark.parametrize("fields, said", [
    (dict(splits=8), "multiple of 8"), (dict(splits=2, operator=WGMMAOp(32, accumulator=F16)), "cannot exchange"),
    (dict(splits=0), "positive")])
def test_rules(fields: dict, said: str) -> None:
    with pytest.raises(gk.ConfigError, match=said):
        mapping("one", **{"operator": WGMMAOp(32), **fields})


def test_ping_pong_does_not_split() -> None:
    with pytest.raises(gk.ConfigError, match="ping-pong"):
        mapping("pingpong", splits=2)


@pytest.mark.parametrize("shape, least", [((512, 512, 16384), 4), ((4096, 4096, 4096), 1), ((8192, 8192, 64), 1)])
def test_long_thin_products_are_split(shape: tuple, least: int) -> None:
    conf = gk.get_config(global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16), global_d_layout=RowMajor(F16),
                         gemm_shape=dict(zip("MNK", shape)), device=H100, operator=gk.operators.WGMMAOp(128))
    assert conf.splits >= least if least > 1 else conf.splits == 1


# ==========================================================================================================================
# Rows of D that the blocks of a cluster normalise together: results, where it is done, bits, and faults that the emulator finds.


def config(schedule: str, blocks: int, d: Any = None, N: int = 32, **fields: Any) -> gk.Config:
    return sm90.mapping(schedule, WGMMAOp(N), d=d or RowMajor(F32_OF_ROW_EXCHANGE), cluster=Tile(M=1, N=blocks), **{"depth": 16, "stages": 2, **fields})


def passes(conf: gk.Config, M: int, N: int, kind: str = "softmax") -> str | None:
    a, b, _ = operands((M, N, 16), F16_OF_ROW_EXCHANGE)
    with gk.emulate():
        return gk.plan(a, b, conf=conf, out=poison((M, N), conf.global_d_layout.dtype, "CF"[conf.global_d_layout.vector_axis == 0]),
                       epilogue=ending(kind)).row_passes


@pytest.mark.sample(40)
@on_machines
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("schedule", "blocks", "shape"), [
    ("one", 2, (64, 64, 33)), ("one", 2, (70, 45, 8)), ("two", 2, (250, 64, 40)), ("three", 2, (180, 33, 16)),
    ("pingpong", 2, (200, 50, 16)), ("one", 4, (37, 101, 33)), ("two", 4, (128, 128, 8)), ("one", 8, (9, 250, 8)),
    ("pingpong", 4, (130, 97, 0))], ids=str)
@pytest.mark.parametrize("d", [RowMajor(F32_OF_ROW_EXCHANGE), RowMajor(F16_OF_ROW_EXCHANGE), ColMajor(BF16_OF_ROW_EXCHANGE)], ids=str)
def test_rows(machine: Any, kind: str, schedule: str, blocks: int, shape: tuple[int, int, int], d: Any) -> None:
    """Stored by TMA, by vectors, and pair by pair where lines are odd; against NumPy in float64."""
    a, b, product = operands(shape, F16_OF_ROW_EXCHANGE)
    gain, bias = np.random.default_rng(1).standard_normal((2, shape[1])).astype("f4")
    conf = config(schedule, blocks, d)
    assert passes(conf, *shape[:2], kind) == "one cluster"
    same(normalised(machine, kind, a, b, conf, gain, bias if kind == "layer" else None),
         expected(kind, product, gain, bias), 3e-6 if d.dtype == F32_OF_ROW_EXCHANGE else 4e-3 if d.dtype == F16_OF_ROW_EXCHANGE else 3e-2)


@pytest.mark.sample(40)
@pytest.mark.kin(1)
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["one", "two", "pingpong"])
def test_tile_after_tile(schedule: str, kind: str, seed: int | None) -> None:
    """A block's consumers go through several tiles, and their barriers through as many phases."""
    a, b, product = operands((6 * 64, 40, 8), F16_OF_ROW_EXCHANGE)
    out = poison(product.shape, F32_OF_ROW_EXCHANGE)
    with assumed(replace(H100, sm_count=2)), gk.emulate(seed):
        gk.matmul(a, b, out=out, conf=config(schedule, 2), epilogue=QUARTER | ending(kind))
    same(out, expected(kind, product), 3e-6)


@pytest.mark.sample(40)
@pytest.mark.kin(1)
@on_machines
def test_a_chain_with_c_and_a_stack(machine: Any) -> None:
    """C, a bias and a mask come before; of a stack each product has its rows."""
    rng = np.random.default_rng(2)
    a, b = rng.integers(-2, 3, (3, 70, 16)).astype(F16_OF_ROW_EXCHANGE), rng.integers(-2, 3, (3, 16, 48)).astype(F16_OF_ROW_EXCHANGE)
    c = rng.integers(-2, 3, (3, 70, 48)).astype(F32_OF_ROW_EXCHANGE)
    epilogue = gk.epilogues.Scale(0.5) | gk.epilogues.CausalMask() | gk.epilogues.Softmax()
    with machine.session():
        out = machine.array(poison(c.shape, F32_OF_ROW_EXCHANGE))
        gk.matmul(machine.array(a), machine.array(b), machine.array(c), config("one", 2), out=out, epilogue=epilogue)
    x = np.where(np.tri(70, 48) > 0, 0.5 * (a.astype("f8") @ b.astype("f8") + c), -np.inf)
    same(np.asarray(machine.numpy(out)), expected("softmax", x))


@pytest.mark.sample(40)
@on_machines
def test_what_is_not_finite(machine: Any) -> None:
    """A NaN in one block's columns makes its row NaN and no other; a block whose part is -inf has weights 0."""
    a, b, _ = operands((64, 64, 16), F16_OF_ROW_EXCHANGE)
    c = np.zeros((64, 64), F32_OF_ROW_EXCHANGE)
    c[3, 60], c[5, :32], c[6] = np.nan, -np.inf, -np.inf
    with machine.session():
        out = machine.array(poison(c.shape, F32_OF_ROW_EXCHANGE))
        gk.matmul(machine.array(a), machine.array(b), machine.array(c), config("one", 2), out=out, epilogue=gk.epilogues.Softmax())
    same(np.asarray(machine.numpy(out)), expected("softmax", a.astype("f8") @ b.astype("f8") + c))


@pytest.mark.kin(1)
@pytest.mark.sample(40)
def test_the_same_bits_in_any_order() -> None:
    a, b, _ = operands((64, 60, 16), F16_OF_ROW_EXCHANGE)
    found = []
    for seed in (None, 1):
        out = poison((64, 60), F32_OF_ROW_EXCHANGE)
        with gk.emulate(seed):
            gk.matmul(a, b, out=out, conf=config("one", 2), epilogue=QUARTER | ending("layer"))
        found.append(out)
    assert all(np.array_equal(found[0], one) for one in found[1:])


@pytest.mark.sample(40)
def test_where_it_is_done() -> None:
    """Where the blocks of one cluster of 1 x n have just the columns of D, each fragment has rows, and states are float32."""
    assert passes(config("one", 2), 64, 64) == passes(config("one", 2), 64, 33) == "one cluster"
    assert passes(config("one", 2), 64, 32) == "one tile"
    assert passes(config("one", 2), 64, 65) == passes(config("one", 4), 64, 96) == "two passes"
    assert passes(config("two", 2), 65, 64) == "one cluster" and passes(config("two", 2), 64, 64) == "two passes"
    assert passes(sm90.mapping("two-2x2", WGMMAOp(32), d=RowMajor(F32_OF_ROW_EXCHANGE)), 128, 64) == "two passes"
    assert passes(config("one", 2, RowMajor(F64)), 64, 64) == "two passes"
    assert passes(config("one", 1, splits=2), 64, 64) == "two passes"


@pytest.mark.sample(40)
def test_stages_leave_room_for_it() -> None:
    """As many as fit beside the states, where sizes are known; all that fit else, and then there are two passes."""
    fields = dict(operator=WGMMAOp(256), global_a_layout=RowMajor(F16_OF_ROW_EXCHANGE), global_b_layout=RowMajor(F16_OF_ROW_EXCHANGE), block_shape=Tile(M=128, N=256, K=64), warps_per_block=8, schedule="cooperative",
                  cluster=Tile(M=1, N=4), global_d_layout=RowMajor(F16_OF_ROW_EXCHANGE), epilogue=gk.epilogues.Softmax())
    stages = {N: gk.get_config(gemm_shape=dict(M=8192, N=N, K=4096), **fields).stages for N in (1024, 512, 4096)}
    assert stages == {1024: 3, 512: 4, 4096: 4}
    assert passes(gk.get_config(gemm_shape=dict(M=8192, N=1024, K=4096), **fields), 128, 1024) == "one cluster"
    assert passes(gk.get_config(**fields), 128, 1024) == "two passes"


@pytest.mark.sample(40)
@pytest.mark.parametrize(("sizes", "said"), [
    ((8192, 512, 4096), "one cluster"), ((4096, 128, 4096), "one cluster"), ((4096, 256, 4096), "one cluster"),
    ((8192, 1024, 4096), "two passes"),                                # clusters of four leave a third round of few: 137 us for 104
    ((8192, 384, 512), "one cluster"), ((8192, 2048, 4096), "two passes"), ((30000, 256, 256), "one tile"), ((100, 1000, 512), "two passes"), ((64, 4096, 512), "two passes")], ids=str)
def test_the_choice(sizes: tuple[int, int, int], said: str) -> None:
    """By the estimated times of mappings: an exchange for those whose clusters have rows of D, a second pass for those without."""
    M, N, K = sizes
    a, b, d = (np.empty(shape, F16_OF_ROW_EXCHANGE) for shape in ((M, K), (K, N), (M, N)))
    with assumed(H100), gk.emulate(mapping="device"):
        plan = gk.plan(a, b, out=d, epilogue=gk.epilogues.Softmax())
    assert plan.row_passes == said
    assert (tuple(plan.config.cluster.extents)[1] > 1) == (said == "one cluster")
    if said == "one cluster":                                          # with 192 sums a thread's values spill
        tile = plan.config.block_shape.size
        assert tile.M * tile.N <= 128 * 128 * (1 if plan.config.schedule == "pingpong" else plan.config.warps_per_block // 4)


# -- faults -------------------------------------------------------------------------------------------------------------

@pytest.mark.sample(40)
@pytest.mark.parametrize(("name", "of"), [("mbarrier_wait", "full"), ("mbarrier_wait", "free"), ("mbarrier_arrive_at", "free"),
                                          ("mbarrier_expect", "full"), ("warp_barrier", "")],
                         ids=["sent", "free", "told", "expected", "lanes"])
def test_faults_are_found(name: str, of: str, seeded: Seeded) -> None:
    """In the first tile, or in the second, whose states come to where the first one's were."""
    original, make, made, left_out = getattr(exchange, name), exchange.mbarrier_init, dict[str, int](), list[int]()

    def noted(barriers: Any, n: int, count: int) -> None:
        made["free" if count > 1 else "full"] = barriers.offset
        make(barriers, n, count)

    def call(*given: Any) -> None:
        if not of or given[0].offset == made[of]:
            left_out.append(current().index)
        else:
            original(*given)

    seeded(exchange, "mbarrier_init", noted)
    seeded(exchange, name, call)
    a, b, _ = operands((4 * 64, 64, 8), F16_OF_ROW_EXCHANGE)
    with assumed(replace(H100, sm_count=2)), gk.emulate(), pytest.raises(EmulatorError):
        gk.matmul(a, b, conf=config("one", 2), epilogue=gk.epilogues.Softmax())
    assert left_out


# -- on a GPU, tiles as they are used --------------------------------------------------------------------------------------

@pytest.mark.sample(40)
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("N", "tile", "warps", "schedule", "blocks"), [
    (1024, (128, 256), 8, "cooperative", 4), (2048, (128, 256), 8, "cooperative", 8), (512, (64, 256), 8, "pingpong", 2),
    (512, (128, 128), 8, "pingpong", 4), (1000, (128, 256), 8, "cooperative", 4)])
def test_products_as_they_are_used(kind: str, N: int, tile: tuple[int, int], warps: int, schedule: str, blocks: int) -> None:
    import cupy

    rng = cupy.random.default_rng(0)
    M, K = 4096, 1024
    a, b = (rng.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16) for shape in ((M, K), (K, N)))
    out = cupy.full((M, N), cupy.nan, cupy.float16)
    epilogue = gk.epilogues.Scale(1 / 32) | ending(kind)
    conf = gk.get_config(operator=WGMMAOp(tile[1]), block_shape=Tile(M=tile[0], N=tile[1], K=64), warps_per_block=warps,
                         schedule=schedule, cluster=Tile(M=1, N=blocks), global_a_layout=RowMajor(F16_OF_ROW_EXCHANGE),
                         global_b_layout=RowMajor(F16_OF_ROW_EXCHANGE), global_d_layout=RowMajor(F16_OF_ROW_EXCHANGE), epilogue=epilogue, gemm_shape=dict(M=M, N=N, K=K))
    plan = gk.plan(a, b, conf=conf, out=out)
    assert plan.row_passes == "one cluster"
    plan(a, b, out=out)
    x = (a[::97].astype(cupy.float64) @ b.astype(cupy.float64)).get() / 32
    same(out[::97].get(), expected(kind, x), 4e-3)
