"""Rows of D that the blocks of a cluster normalise together: results, where it is done, bits, and faults that the emulator finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import EmulatorError
from gemmkit.emulator.machine import current
from gemmkit.kernels.sm90 import exchange
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.device import H100, assumed
from gemmkit.tiling import Tile
from tests.kernels.common.test_normalise import BF16, KINDS, QUARTER, ending, expected, normalised, operands, same
from tests.support import sm90
from tests.support.joined import F16, F32, F64
from tests.support.machines import on_machines, poison

pytestmark = pytest.mark.sample(40)


def config(schedule: str, blocks: int, d: Any = None, N: int = 32, **fields: Any) -> gk.Config:
    return sm90.mapping(schedule, WGMMAOp(N), d=d or RowMajor(F32), cluster=Tile(M=1, N=blocks), **{"depth": 16, "stages": 2, **fields})


def passes(conf: gk.Config, M: int, N: int, kind: str = "softmax") -> str | None:
    a, b, _ = operands((M, N, 16), F16)
    with gk.emulate():
        return gk.plan(a, b, conf=conf, out=poison((M, N), conf.global_d_layout.dtype, "CF"[conf.global_d_layout.vector_axis == 0]),
                       epilogue=ending(kind)).row_passes


@on_machines
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("schedule", "blocks", "shape"), [
    ("one", 2, (64, 64, 33)), ("one", 2, (70, 45, 8)), ("two", 2, (250, 64, 40)), ("three", 2, (180, 33, 16)),
    ("pingpong", 2, (200, 50, 16)), ("one", 4, (37, 101, 33)), ("two", 4, (128, 128, 8)), ("one", 8, (9, 250, 8)),
    ("pingpong", 4, (130, 97, 0))], ids=str)
@pytest.mark.parametrize("d", [RowMajor(F32), RowMajor(F16), ColMajor(BF16)], ids=str)
def test_rows(machine: Any, kind: str, schedule: str, blocks: int, shape: tuple[int, int, int], d: Any) -> None:
    """Stored by TMA, by vectors, and pair by pair where lines are odd; against NumPy in float64."""
    a, b, product = operands(shape, F16)
    gain, bias = np.random.default_rng(1).standard_normal((2, shape[1])).astype("f4")
    conf = config(schedule, blocks, d)
    assert passes(conf, *shape[:2], kind) == "one cluster"
    same(normalised(machine, kind, a, b, conf, gain, bias if kind == "layer" else None),
         expected(kind, product, gain, bias), 3e-6 if d.dtype == F32 else 4e-3 if d.dtype == F16 else 3e-2)


@pytest.mark.kin(2)
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["one", "two", "pingpong"])
def test_tile_after_tile(schedule: str, kind: str, seed: int | None) -> None:
    """A block's consumers go through several tiles, and their barriers through as many phases."""
    a, b, product = operands((6 * 64, 40, 8), F16)
    out = poison(product.shape, F32)
    with assumed(replace(H100, sm_count=2)), gk.emulate(seed):
        gk.matmul(a, b, out=out, conf=config(schedule, 2), epilogue=QUARTER | ending(kind))
    same(out, expected(kind, product), 3e-6)


@pytest.mark.kin(2)
@on_machines
def test_a_chain_with_c_and_a_stack(machine: Any) -> None:
    """C, a bias and a mask come before; of a stack each product has its rows."""
    rng = np.random.default_rng(2)
    a, b = rng.integers(-2, 3, (3, 70, 16)).astype(F16), rng.integers(-2, 3, (3, 16, 48)).astype(F16)
    c = rng.integers(-2, 3, (3, 70, 48)).astype(F32)
    epilogue = gk.epilogues.Scale(0.5) | gk.epilogues.Causal() | gk.epilogues.Softmax()
    with machine.session():
        out = machine.array(poison(c.shape, F32))
        gk.matmul(machine.array(a), machine.array(b), machine.array(c), config("one", 2), out=out, epilogue=epilogue)
    x = np.where(np.tri(70, 48) > 0, 0.5 * (a.astype("f8") @ b.astype("f8") + c), -np.inf)
    same(np.asarray(machine.numpy(out)), expected("softmax", x))


@on_machines
def test_what_is_not_finite(machine: Any) -> None:
    """A NaN in one block's columns makes its row NaN and no other; a block whose part is -inf has weights 0."""
    a, b, _ = operands((64, 64, 16), F16)
    c = np.zeros((64, 64), F32)
    c[3, 60], c[5, :32], c[6] = np.nan, -np.inf, -np.inf
    with machine.session():
        out = machine.array(poison(c.shape, F32))
        gk.matmul(machine.array(a), machine.array(b), machine.array(c), config("one", 2), out=out, epilogue=gk.epilogues.Softmax())
    same(np.asarray(machine.numpy(out)), expected("softmax", a.astype("f8") @ b.astype("f8") + c))


def test_the_same_bits_in_any_order() -> None:
    a, b, _ = operands((64, 60, 16), F16)
    found = []
    for seed in (None, 1):
        out = poison((64, 60), F32)
        with gk.emulate(seed):
            gk.matmul(a, b, out=out, conf=config("one", 2), epilogue=QUARTER | ending("layer"))
        found.append(out)
    assert all(np.array_equal(found[0], one) for one in found[1:])


def test_where_it_is_done() -> None:
    """Where the blocks of one cluster of 1 x n have just the columns of D, each fragment has rows, and states are float32."""
    assert passes(config("one", 2), 64, 64) == passes(config("one", 2), 64, 33) == "one cluster"
    assert passes(config("one", 2), 64, 32) == "one tile"
    assert passes(config("one", 2), 64, 65) == passes(config("one", 4), 64, 96) == "two passes"
    assert passes(config("two", 2), 65, 64) == "one cluster" and passes(config("two", 2), 64, 64) == "two passes"
    assert passes(sm90.mapping("two-2x2", WGMMAOp(32), d=RowMajor(F32)), 128, 64) == "two passes"
    assert passes(config("one", 2, RowMajor(F64)), 64, 64) == "two passes"
    assert passes(config("one", 1, splits=2), 64, 64) == "two passes"


def test_stages_leave_room_for_it() -> None:
    """As many as fit beside the states, where sizes are known; all that fit else, and then there are two passes."""
    fields = dict(operator=WGMMAOp(256), global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16), block_shape=Tile(M=128, N=256, K=64), warps_per_block=8, schedule="cooperative",
                  cluster=Tile(M=1, N=4), global_d_layout=RowMajor(F16), epilogue=gk.epilogues.Softmax())
    stages = {N: gk.get_config(gemm_shape=dict(M=8192, N=N, K=4096), **fields).stages for N in (1024, 512, 4096)}
    assert stages == {1024: 3, 512: 4, 4096: 4}
    assert passes(gk.get_config(gemm_shape=dict(M=8192, N=1024, K=4096), **fields), 128, 1024) == "one cluster"
    assert passes(gk.get_config(**fields), 128, 1024) == "two passes"


@pytest.mark.parametrize(("sizes", "said"), [
    ((8192, 512, 4096), "one cluster"), ((4096, 128, 4096), "one cluster"), ((4096, 256, 4096), "one cluster"),
    ((8192, 1024, 4096), "two passes"),                                # clusters of four leave a third round of few: 137 us for 104
    ((8192, 384, 512), "one cluster"), ((8192, 2048, 4096), "two passes"), ((30000, 256, 256), "one tile"), ((100, 1000, 512), "two passes"), ((64, 4096, 512), "two passes")], ids=str)
def test_the_choice(sizes: tuple[int, int, int], said: str) -> None:
    """By the estimated times of mappings: an exchange for those whose clusters have rows of D, a second pass for those without."""
    M, N, K = sizes
    a, b, d = (np.empty(shape, F16) for shape in ((M, K), (K, N), (M, N)))
    with assumed(H100), gk.emulate(mapping="device"):
        plan = gk.plan(a, b, out=d, epilogue=gk.epilogues.Softmax())
    assert plan.row_passes == said
    assert (tuple(plan.config.cluster.extents)[1] > 1) == (said == "one cluster")
    if said == "one cluster":                                          # with 192 sums a thread's values spill
        tile = plan.config.block_shape.size
        assert tile.M * tile.N <= 128 * 128 * (1 if plan.config.schedule == "pingpong" else plan.config.warps_per_block // 4)


# -- faults -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "of"), [("mbarrier_wait", "full"), ("mbarrier_wait", "free"), ("mbarrier_arrive_at", "free"),
                                          ("mbarrier_expect", "full"), ("warp_barrier", "")],
                         ids=["sent", "free", "told", "expected", "lanes"])
def test_faults_are_found(name: str, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(exchange, "mbarrier_init", noted)
    monkeypatch.setattr(exchange, name, call)
    a, b, _ = operands((4 * 64, 64, 8), F16)
    with assumed(replace(H100, sm_count=2)), gk.emulate(), pytest.raises(EmulatorError):
        gk.matmul(a, b, conf=config("one", 2), epilogue=gk.epilogues.Softmax())
    assert left_out


# -- on a GPU, tiles as they are used --------------------------------------------------------------------------------------

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
                         schedule=schedule, cluster=Tile(M=1, N=blocks), global_a_layout=RowMajor(F16),
                         global_b_layout=RowMajor(F16), global_d_layout=RowMajor(F16), epilogue=epilogue, gemm_shape=dict(M=M, N=N, K=K))
    plan = gk.plan(a, b, conf=conf, out=out)
    assert plan.row_passes == "one cluster"
    plan(a, b, out=out)
    x = (a[::97].astype(cupy.float64) @ b.astype(cupy.float64)).get() / 32
    same(out[::97].get(), expected(kind, x), 4e-3)
