"""The warp-specialised kernel's results: schedules, sizes, types, views; small tiles in the emulator, large ones on a GPU.

Values are small whole numbers, so that every result is exactly right or wrong. A configuration is compiled once for all
sizes of a class (what TMA takes, what threads' tiles divide), so sizes are looped over within a test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.collectives.operand import OperandArrays
from gemmkit.kernels.collectives.scheduler import Columns, Grouped, Hilbert
from gemmkit.kernels.sm90.mainloop import AlternatingMainloop
from gemmkit.layouts import ColMajor, RowMajor, Swizzled
from gemmkit.operators import WGMMAOp
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.support.machines import BF16, E4M3, E5M2, MACHINES, on_machines, poison, reference, whole
from tests.support.sm90 import F16, F32, SCHEDULES, mapping, ordered, product

KINDS = {"R": RowMajor, "C": ColMajor}


def check(machine: Any, conf: gk.Config, rng: np.random.Generator, m: int, n: int, k: int, **how: Any) -> None:
    a, b = whole(rng, (m, k), conf.operator.dtype), whole(rng, (k, n), conf.operator.b_dtype)
    d = product(machine, conf, a, b, **how)
    assert np.array_equal(d, reference(a, b).astype(d.dtype)), (m, n, k)


# -- sizes and schedules ----------------------------------------------------------------------------------------------

ALIGNED = {False: [(1024, 1000, 520), (136, 1096, 72), (1000, 8, 2048)], True: [(136, 40, 200), (8, 16, 8)]}
RAGGED = {False: [(1021, 997, 499), (7, 1009, 131), (257, 3, 67)], True: [(67, 37, 71), (2, 3, 5)]}


@pytest.mark.kin(5)
@pytest.mark.sample(9)
@on_machines
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sizes_for_tma(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    conf = mapping(schedule)
    for size in ALIGNED[machine.emulated][:1 + ("-" not in schedule)]:
        check(machine, conf, rng, *size)


@pytest.mark.kin(4)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("few, lines", [(1, 1), (5, 8), (20, 32)])
def test_few_rows_or_columns(machine: Any, few: int, lines: int, rng: np.random.Generator) -> None:
    """TMA brings as many lines as there are, or a few more; a configuration that has computed many rows brings few, too."""
    conf = mapping("one", WGMMAOp(64), b=ColMajor, stages=2)
    for m, n in ((136, 72), (few, 72), (136, few), (few, few)):
        check(machine, conf, rng, m, n, 136)
        spec: Any = conf.spec(OperandArrays(None, None, None, m, n, 136))
        for operand, extent in ((spec.a, m), (spec.b, n)):
            assert operand.route.copy.lines == (lines if extent == few else 64)
            assert operand.route.copy.lines + operand.route.copy.missing == 64


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("schedule", ["one", "three", "pingpong", "one-2x1"])
def test_sizes_that_tma_refuses(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    """Both operands by the producer's warps, D by the consumers' threads."""
    conf = mapping(schedule, depth=32)
    for size in RAGGED[machine.emulated][:1 + ("-" not in schedule)]:
        check(machine, conf, rng, *size)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("schedule", ["pingpong", "one-2x1", "one-1x2"])
def test_one_operand_by_tma_and_the_other_by_warps(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    m, n = (1021, 1000) if not machine.emulated else (67, 40)
    check(machine, mapping(schedule), rng, m, n, 77)              # A's rows are no multiples of 16 bytes, B's are
    check(machine, mapping(schedule), rng, m, n + 1, 72)          # and the other way around


@on_machines
def test_single_rows_columns_and_products(machine: Any, rng: np.random.Generator) -> None:
    conf = mapping("one", depth=16)
    for size in [(1, 1, 1), (2, 2, 17)]:
        check(machine, conf, rng, *size)


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("schedule", ["one", "pingpong", "two-2x1"])
def test_no_elements(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    """K = 0 gives zeros, and M = 0 or N = 0 nothing."""
    conf = mapping(schedule)
    check(machine, conf, rng, 72, 40, 0)
    for m, n in [(0, 40), (72, 0), (0, 0)]:
        check(machine, conf, rng, m, n, 24)


@on_machines
def test_no_products_leave_c(machine: Any, rng: np.random.Generator) -> None:
    conf = mapping("one", global_c_layout=RowMajor(F32), transform_shared_to_regs_c=Map(lambda x: 3 * x + 1))
    c = whole(rng, (72, 40), F32)
    d = product(machine, conf, np.zeros((72, 0), F16), np.zeros((0, 40), F16), c)
    assert np.array_equal(d, 3 * c + 1)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("schedule, n", [("one", 16), ("one", 48), ("pingpong", 48), ("one-2x1", 48)])
def test_blocks_with_several_tiles(machine: Any, schedule: str, n: int, rng: np.random.Generator, few_blocks: Any) -> None:
    """The ring goes on turning from one tile to the next, and panels of D are used again: one a tile, or three."""
    conf = mapping(schedule, WGMMAOp(n), depth=16, stages=3, a=RowMajor, b=ColMajor)
    check(machine, conf, rng, 64 * 5, n, 40)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("k", [16, 32, 48, 80])
def test_pingpong_with_any_number_of_stages_a_tile(machine: Any, k: int, rng: np.random.Generator, few_blocks: Any) -> None:
    """A consumer passes over the stages of the other's tiles: fewer, as many or more than the ring has."""
    check(machine, mapping("pingpong", WGMMAOp(8), depth=16, stages=2), rng, 64 * 7, 8, k)


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("order", [Columns(), Grouped(2), Hilbert()], ids=repr)
def test_orders_decide_nothing(machine: Any, order: Any, rng: np.random.Generator, few_blocks: Any) -> None:
    check(machine, mapping("one", WGMMAOp(8), depth=16, order=order), rng, 64 * 2 + 8, 8 * 3 + 4, 16)


# -- types ------------------------------------------------------------------------------------------------------------

TYPES = {
    "bf16": (WGMMAOp(32, BF16), F32),
    "f16 in f16": (WGMMAOp(32, accumulator=F16), F16),
    "tf32": (WGMMAOp(32, F32), F32),
    "i8": (WGMMAOp(32, "i1"), "i4"),
    "i8 u8": (WGMMAOp(32, "i1", b_dtype="u1"), "i4"),
    "e4m3": (WGMMAOp(32, E4M3, promote=128), F32),
    "e5m2": (WGMMAOp(32, E5M2, promote=256), F32),
    "e4m3 fast": (WGMMAOp(32, E4M3), F16),
    "e4m3 e5m2 in f16": (WGMMAOp(32, E4M3, F16, b_dtype=E5M2), F16),
    "bf16 to bf16": (WGMMAOp(32, BF16), BF16),
}


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("name", TYPES)
def test_types(machine: Any, name: str, rng: np.random.Generator) -> None:
    """K-major, as TMA takes every type."""
    operator, d = TYPES[name]
    conf = mapping("pingpong" if "16" in name else "one", operator, a=RowMajor, b=ColMajor, d=RowMajor(d))
    for m, n, k in ([(72, 48, 2 * conf.block_shape.size.K + 16)] if machine.emulated else [(520, 272, 528), (72, 1008, 48)]):
        check(machine, conf, rng, m, n, k)


@on_machines
def test_fragments_are_promoted_one_by_one(machine: Any, rng: np.random.Generator) -> None:
    """A thread has the totals of two fragments, and registers for the sums of one of them beside."""
    conf: Any = mapping("tall", WGMMAOp(72, E4M3, promote=128), a=RowMajor, b=ColMajor)
    assert type(conf.spec().mainloop) is AlternatingMainloop
    check(machine, conf, rng, *((136, 80, 272) if machine.emulated else (1040, 1008, 1040)))


@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("dtype, kinds", [("f2", "RR"), ("f2", "RC"), ("f2", "CR"), ("f2", "CC"), (BF16, "CR"), ("f4", "RR"),
                                          ("f4", "CC"), ("i1", "CR"), ("i1", "CC"), (E4M3, "RR"), (E4M3, "CR")], ids=str)
def test_transposes(machine: Any, dtype: Any, kinds: str, rng: np.random.Generator) -> None:
    """Those of 16 bits stay as they are; of the others, what is contiguous across K is transposed on the way in."""
    conf = mapping("one", WGMMAOp(32, dtype), a=KINDS[kinds[0]], b=KINDS[kinds[1]], depth=32)
    wanted = {"R": "K", "C": "MN"}
    if np.dtype(dtype).itemsize == 2:
        assert (conf.operator.a_major, conf.operator.b_major) == (wanted[kinds[0]], {"R": "MN", "C": "K"}[kinds[1]])
    else:
        assert (conf.operator.a_major, conf.operator.b_major) == ("K", "K")
    check(machine, conf, rng, *((80, 32, 48) if machine.emulated else (1008, 528, 304)))


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("schedule, kinds", [("two-2x1", "RC"), ("pingpong-1x2", "CC")])
def test_clusters_share_operands_of_either_kind(machine: Any, schedule: str, kinds: str, rng: np.random.Generator) -> None:
    """Parts that blocks load for all are lines of each panel, or some of the panels."""
    conf = mapping(schedule, a=KINDS[kinds[0]], b=KINDS[kinds[1]])
    check(machine, conf, rng, *((136, 40, 72) if machine.emulated else (1008, 520, 304)))


@on_machines
@pytest.mark.parametrize("n", [8, 24])
def test_stages_begin_where_the_swizzle_does(machine: Any, n: int, rng: np.random.Generator) -> None:
    """A's and B's panels of different widths, and a stage of them that is no multiple of the wider pattern (512 bytes): the
    TMA, threads and tensor cores must mean the same place."""
    conf = mapping("one", WGMMAOp(n), a=ColMajor, b=ColMajor, depth=16, stages=3, shared_a_layout=Swizzled(ColMajor(F16), 64))
    assert (64 * 16 + n * 16) * 2 % 512 == 256
    for m in (72, 71):
        check(machine, conf, rng, m, n, 64)


# -- views ------------------------------------------------------------------------------------------------------------

def view(machine: Any, x: np.ndarray, padding: int, offset: int, layout: Any) -> Any:
    """``x`` as a part of a larger array of NaNs, ``offset`` elements from its beginning, with padded lines."""
    axis = layout.axis
    shape = [extent + (padding if n == axis else 1) for n, extent in enumerate(x.shape)]
    held = ordered(poison(tuple(shape), x.dtype), layout)
    place = [slice(0, extent) for extent in x.shape]
    place[axis] = slice(offset, offset + x.shape[axis])
    held[tuple(place)] = x
    return machine.array(held)[tuple(place)]


@pytest.mark.kin(5)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("kinds", ["RR", "CC"])
@pytest.mark.parametrize("offset", [0, 1, 8], ids=["first", "misaligned", "aligned"])
def test_views(machine: Any, offset: int, kinds: str, rng: np.random.Generator) -> None:
    """Padded lines; a base one element on, which TMA refuses; one 16 bytes on, which it takes."""
    conf = mapping("one", a=KINDS[kinds[0]], b=KINDS[kinds[1]], depth=32)
    m, n, k = 72, 40, 48
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    around = machine.array(poison((m + 1, n + 16), F32))
    out = around[:m, offset:offset + n]
    with machine.session():
        gk.matmul(view(machine, a, 16, offset, conf.global_a_layout), view(machine, b, 16, offset, conf.global_b_layout),
                  None, conf, out=out)
    d = machine.numpy(around)
    assert np.array_equal(d[:m, offset:offset + n], reference(a, b))
    d[:m, offset:offset + n] = np.nan
    assert np.isnan(d).all()                                      # nothing beside it was written


@on_machines
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_d_column_by_column(machine: Any, dtype: np.dtype, rng: np.random.Generator) -> None:
    """TMA's panels are rows: it leaves from the registers."""
    check(machine, mapping("one", d=ColMajor(dtype)), rng, 72, 41, 24)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_d_by_threads(machine: Any, dtype: np.dtype, rng: np.random.Generator) -> None:
    """Lines of an odd length: not TMA's, and pairs straddle the edge."""
    check(machine, mapping("pingpong", d=RowMajor(dtype)), rng, 72, 41, 24)


# -- large tiles ------------------------------------------------------------------------------------------------------

LARGE = {
    "128x256-2x1": dict(operator=WGMMAOp(256), block_shape=Tile(M=128, N=256, K=64), warps_per_block=8,
                        schedule="cooperative", cluster=Tile(M=2, N=1)),
    "128x192": dict(operator=WGMMAOp(192), block_shape=Tile(M=128, N=192, K=64), warps_per_block=8, schedule="pingpong"),
    "128x128": dict(operator=WGMMAOp(128), block_shape=Tile(M=128, N=128, K=64), warps_per_block=8, schedule="pingpong"),
    "256x128": dict(operator=WGMMAOp(128), block_shape=Tile(M=256, N=128, K=64), warps_per_block=8, schedule="cooperative"),
    "192x96": dict(operator=WGMMAOp(96), block_shape=Tile(M=192, N=96, K=64), warps_per_block=12, schedule="cooperative"),
    "192x192-1x2": dict(operator=WGMMAOp(192), block_shape=Tile(M=192, N=192, K=64), warps_per_block=12,
                        schedule="cooperative", cluster=Tile(M=1, N=2)),
    "192x64-1x2": dict(operator=WGMMAOp(64), block_shape=Tile(M=192, N=64, K=64), warps_per_block=12,
                       schedule="cooperative", cluster=Tile(M=1, N=2)),
    "128x224": dict(operator=WGMMAOp(224), block_shape=Tile(M=128, N=224, K=64), warps_per_block=8, schedule="cooperative"),
    "64x192": dict(operator=WGMMAOp(192), block_shape=Tile(M=64, N=192, K=64), warps_per_block=8, schedule="pingpong"),
    "64x96": dict(operator=WGMMAOp(96), block_shape=Tile(M=64, N=96, K=64), warps_per_block=4, schedule="cooperative"),
}


@pytest.mark.gpu
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LARGE)
def test_large_tiles(name: str, rng: np.random.Generator) -> None:
    machine = MACHINES["gpu"]
    conf = gk.get_config(global_a_layout=RowMajor(F16), global_d_layout=RowMajor(F16), **LARGE[name])  # type: ignore[arg-type]
    for m, n, k in [(1024, 1024, 1024), (1000, 3000, 200), (2048, 4096, 64), (4096, 72, 136), (1021, 997, 131),
                    (1000, 1000, 999)]:
        a, b = whole(rng, (m, k), F16, 1), whole(rng, (k, n), F16, 1)
        d = product(machine, conf, a, b)
        assert np.array_equal(d, machine.product64(a, b)), (m, n, k)


@pytest.mark.gpu
def test_matmul_chooses_it(rng: np.random.Generator) -> None:
    machine = MACHINES["gpu"]
    for dtype, size in [(F16, (1024, 1024, 512)), (BF16, (1000, 520, 264))]:
        m, n, k = size
        a, b = machine.array(whole(rng, (m, k), dtype, 1)), machine.array(whole(rng, (k, n), dtype, 1))
        plan = gk.plan(a, b)
        assert plan.config.is_pipeline
        d = machine.numpy(plan(a, b))
        assert np.array_equal(d, machine.product64(machine.numpy(a), machine.numpy(b)).astype(d.dtype))


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("columns", [92, 61, 96])
def test_nothing_beside_d_is_written(machine: Any, columns: int, rng: np.random.Generator) -> None:
    """Where rows of D are 16 bytes apart but end between: TMA would write up to the next multiple of 16 bytes."""
    a, b = (rng.integers(-3, 4, shape).astype(F16) for shape in ((70, 48), (48, columns)))
    wide = machine.array(np.full((70, 104), 7, F16))
    conf = mapping("two", WGMMAOp(32), d=RowMajor(F16))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), None, conf, out=wide[:, :columns])
    found = machine.numpy(wide)
    assert np.array_equal(found[:, :columns], a.astype("f4") @ b.astype("f4")) and (found[:, columns:] == 7).all()
