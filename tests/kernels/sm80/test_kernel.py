"""The multistage kernel's products: orders, types, sizes, the ring, how operands get there; and GPUs without cp.async."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.sm80.kernel import InStepMainloop
from gemmkit.kernels.sm80.routes import StagedCopies
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import COMPLEX, DUAL, MIN_PLUS, FPUOp, MMAOp
from gemmkit.runtime.device import T4, assumed
from gemmkit.tiling import Tile
from gemmkit.tuning.sm80 import TABLES
from tests.ptx_machine import launch
from tests.support.machines import BF16, MACHINES, is_poison, on_machines, poison, whole
from tests.support.patches import Seeded
from tests.support.sm80 import C64, C128, F16, F32, F64, KINDS, expected, mapping, named, numbers, operands, product, routes

# ==========================================================================================================================
# The multistage kernel's products, in the emulator and on a GPU: orders, types, sizes, the ring, and how operands get there.
#
# Values are small whole numbers, so that every result is exactly right or wrong; D is poisoned before.

ORDERS = {"N": RowMajor, "T": ColMajor}
F32_OPERATOR = KINDS["f32"]


@pytest.mark.kin(5)
@pytest.mark.sample(64)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_in_every_order(machine: Any, kind: str, trans: str, rng: np.random.Generator) -> None:
    """Several tiles and rounds, none of them whole; and sizes of which copies are wide."""
    operator = KINDS[kind]
    m, n, k = operator.shape
    for size in ((2 * m + 3, n + 5, 7 * k + 1), (2 * m + 16, n + 16, 4 * k + 16)):
        a, b = operands(rng, operator, *size)
        conf = mapping(operator, ORDERS[trans[0]], ORDERS[trans[1]], ORDERS[trans[0]])
        assert np.array_equal(product(machine, conf, a, b), expected(operator, a, b)), size


SIZES = [(1, 1, 1), (1, 37, 5), (31, 1, 29), (13, 17, 1), (33, 35, 97), (0, 5, 7), (5, 0, 7), (0, 0, 0), (37, 41, 0)]


@pytest.mark.kin(5)
@pytest.mark.sample(9)
@on_machines
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["f16", "f32", "f64 by dmma"])
def test_sizes(machine: Any, kind: str, size: tuple[int, int, int], rng: np.random.Generator) -> None:
    """Nothing, one, primes; without K sums are zero."""
    a, b = operands(rng, KINDS[kind], *size)
    assert np.array_equal(product(machine, mapping(KINDS[kind]), a, b), expected(KINDS[kind], a, b))


# -- the ring -----------------------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(40)
@on_machines
@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["f16", "f64 by dmma"])
def test_stages_and_steps(machine: Any, kind: str, steps: int, stages: int, rng: np.random.Generator) -> None:
    """Both main loops; an odd number of steps moves fragments at a round's end; K shorter than the ring, as long, and longer."""
    operator = KINDS[kind]
    conf = mapping(operator, b=ColMajor, steps=steps, stages=stages)
    depth = conf.block_shape.size.K
    assert isinstance(conf.spec().mainloop, InStepMainloop) == (kind != "f16") and conf.spec().steps_k == steps
    for k in (depth, (stages - 1) * depth, (stages + 1) * depth - 8):
        a, b = operands(rng, operator, 16, 24, k)
        assert np.array_equal(product(machine, conf, a, b), expected(operator, a, b)), k


@pytest.mark.kin(5)
@on_machines
def test_sixteen_products_a_step_go_across_rounds(machine: Any, rng: np.random.Generator) -> None:
    """float64 with enough products for ptxas to keep its waits: the usual main loop."""
    operator = MMAOp(M=8, K=4, dtype="f8")
    conf = mapping(operator, block_shape=Tile(M=32, N=32, K=8), compute_warp=Tile(M=32, N=32, K=8), stages=2)
    assert not isinstance(conf.spec().mainloop, InStepMainloop)
    a, b = operands(rng, operator, 33, 35, 27)
    assert np.array_equal(product(machine, conf, a, b), expected(operator, a, b))


@pytest.mark.kin(5)
@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["f16", "f32", "f64 by dmma"])
def test_threads_in_any_order(kind: str, seed: int, rng: np.random.Generator) -> None:
    """Only the emulator draws orders; no race, and the same sums."""
    from tests.support.machines import MACHINES

    operator = KINDS[kind]
    a, b = operands(rng, operator, 19, 21, 5 * operator.K * 2 + 1)
    conf = mapping(operator, stages=2 + seed % 3)
    assert np.array_equal(product(MACHINES["emulator"], conf, a, b, seed=seed), expected(operator, a, b))


# -- how operands get into the stages -----------------------------------------------------------------------------------

def test_the_widest_copy_is_taken() -> None:
    """By what is known of addresses: 16 bytes along the stage's lines, an element where lines lie across."""
    spec = mapping(MMAOp(), block_shape=Tile(M=32, N=16, K=32)).spec()
    assert named(spec.a.route) == "CpAsync 8"
    spec = mapping(F32_OPERATOR, steps=16).spec()
    assert (named(spec.a.route), named(spec.b.route)) == ("CpAsync 1", "CpAsync 4")          # A is turned on its way
    spec = mapping(F32_OPERATOR, ColMajor, ColMajor, steps=16).spec()
    assert (named(spec.a.route), named(spec.b.route)) == ("CpAsync 4", "CpAsync 1")
    spec = mapping(F32_OPERATOR, transform_global_to_shared_a=gk.transforms.Map(lambda x: x + 1)).spec()
    assert named(spec.a.route) == "StagedByThreads"


# what is cut out of a larger matrix: (rows skipped, columns skipped, columns of memory), and the routes
VIEWS = {
    "whole": (0, 0, 64, "CpAsync 8", "CpAsync 8"), "aligned rows": (3, 8, 80, "CpAsync 8", "CpAsync 8"),
    "8 bytes": (0, 4, 80, "CpAsync 4", "CpAsync 4"), "4 bytes": (1, 2, 70, "CpAsync 2", "CpAsync 2"),
    "2 bytes": (0, 1, 80, "StagedByThreads", "StagedByThreads"), "odd lines": (0, 0, 69, "StagedByThreads", "StagedByThreads"),
}


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_f16(machine: Any, name: str, rng: np.random.Generator) -> None:
    """cp.async refuses what is not aligned to 4 bytes, and threads take over."""
    down, right, line, *by = VIEWS[name]
    a = machine.array(whole(rng, (40, line), F16))[down:down + 35, right:right + 64]
    b = machine.array(whole(rng, (70, line), F16))[down:down + 64, right:right + 48]
    conf = mapping(MMAOp(), block_shape=Tile(M=32, N=32, K=32), compute_warp=Tile(M=16, N=32, K=32))
    assert routes(machine, conf, a, b) == tuple(by)
    out = machine.array(poison((35, 48), F32))
    with machine.session():
        gk.matmul(a, b, None, conf, out=out)
    assert np.array_equal(machine.numpy(out), expected(MMAOp(), machine.numpy(a), machine.numpy(b)))


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("view", range(5))
def test_views_of_f32(machine: Any, view: int, rng: np.random.Generator) -> None:
    """Any address of float32 is one of cp.async: 4 bytes. Reversed and spread columns are no lines of memory."""
    base = machine.array(whole(rng, (70, 140), F32))
    conf = mapping(F32_OPERATOR, ColMajor, steps=16)
    b = base[:33, 1:38]
    a, route = ((base.T[:64, :33], "CpAsync 4"), (base.T[1:65, :33], "CpAsync 1"), (base.T[:66:2, :33], "CpAsync 1"),
                (base.T[64:0:-1, :33], "CpAsync 1"), (base.T[:64, 32::-1], "CpAsync 4"))[view]
    assert routes(machine, conf, a, b) == (route, "CpAsync 1")
    out = machine.array(poison((a.shape[0], 37), F32))
    with machine.session():
        gk.matmul(a, b, None, conf, out=out)
    assert np.array_equal(machine.numpy(out), expected(F32_OPERATOR, machine.numpy(a), machine.numpy(b)))


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("columns", [24, 40])
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
def test_tiles_that_warps_do_not_divide_evenly(machine: Any, trans: str, columns: int, rng: np.random.Generator) -> None:
    """Three or five warps, and four lines of pieces along K: a thread's pieces are at no fixed distance from its first."""
    operator = gk.operators.FPUOp(16, 8, 4, MB=4, NB=8, accumulator=np.float64)
    block = dict(block_shape=Tile(M=32, N=columns, K=32), compute_warp=Tile(M=32, N=8, K=32), warps_per_block=columns // 8)
    conf = mapping(operator, ORDERS[trans[0]], ORDERS[trans[1]], stages=2, **block)
    a, b = operands(rng, operator, 37, columns + 3, 70)
    assert np.array_equal(product(machine, conf, a, b), expected(operator, a, b))


@on_machines
def test_what_is_not_an_operand_is_not_touched(machine: Any, rng: np.random.Generator) -> None:
    """NaN around A and B, and D is a view whose surroundings stay as they were."""
    a, b = (np.full((40, 72), np.nan, F16) for _ in range(2))
    a[3:36, 8:45], b[1:38, 16:47] = whole(rng, (33, 37), F16), whole(rng, (37, 31), F16)
    around = machine.array(poison((40, 40), F32))
    with machine.session():
        gk.matmul(machine.array(a)[3:36, 8:45], machine.array(b)[1:38, 16:47], None, mapping(MMAOp()), out=around[2:35, 4:35])
    d = machine.numpy(around).copy()
    assert np.array_equal(d[2:35, 4:35], expected(MMAOp(), a[3:36, 8:45], b[1:38, 16:47]))
    d[2:35, 4:35] = np.nan
    assert is_poison(d)


# ==========================================================================================================================
# The multistage kernel on GPUs that have no cp.async (sm_75): all operands by way of registers, two stages, and the tiles that fit.
#
# Products run in the emulator, and by the PTX that is compiled for such a GPU. Values are small whole numbers, so that every result
# is exactly right or wrong; D is poisoned before.

EMULATOR = MACHINES["emulator"]
HALVES = MMAOp(K=8)
NEWER = "cp.async", "mbarrier", ".NaN", "redux", "m16n8k16", "m16n8k32", "L2::cache_hint", "cvt.rn.bf16"     # instructions of sm_80 on
KINDS_SM75: dict[str, Any] = {
    "f32": FPUOp(16, 16), "f64": FPUOp(8, 16, dtype=F64), "c64": FPUOp(8, 16, dtype=C64), "c128": FPUOp(8, 16, dtype=C128), "f16": HALVES,
    "f16 in pairs": MMAOp(N=16, K=8, accumulator=F16), "s8": MMAOp(M=8, K=16, dtype="i1"), "u8 s8": MMAOp(M=8, N=16, K=16, dtype="u1", b_dtype="i1"),
    "c64 in parts": COMPLEX.with_base(FPUOp(8, 16)), "dual f16": DUAL.with_base(HALVES),
}


def small(operator: Any, a: Any = RowMajor, b: Any = RowMajor, d: Any = RowMajor, **fields: Any) -> gk.Config:
    """A mapping of two stages, for a T4."""
    return mapping(operator, a, b, d, **{**dict(stages=2, device=T4), **fields})


# -- values, in the emulator ----------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(40)
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("kind", KINDS_SM75)
def test_every_type_in_every_order_on_sm75(kind: str, trans: str, rng: np.random.Generator) -> None:
    """Several tiles and rounds, none of them whole; and sizes of which loads are wide."""
    operator = KINDS_SM75[kind]
    m, n, k = operator.shape
    conf = small(operator, ORDERS[trans[0]], ORDERS[trans[1]], ORDERS[trans[0]])
    for size in ((2 * m + 3, n + 5, 7 * k + 1), (2 * m + 16, n + 16, 4 * k + 16)):
        a, b = operands(rng, operator, *size)
        with assumed(T4):
            assert np.array_equal(product(EMULATOR, conf, a, b), expected(operator, a, b)), size


@pytest.mark.sample(6)
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_rings_of_any_length(kind: str, stages: int, rng: np.random.Generator) -> None:
    """Threads in an order that is drawn; K shorter than the ring, as long, and longer."""
    operator = KINDS_SM75[kind]
    conf = small(operator, stages=stages)
    depth = conf.block_shape.size.K
    for k in (1, depth, (stages - 1) * depth, (stages + 1) * depth - 3):
        a, b = operands(rng, operator, 19, 21, k)
        with assumed(T4):
            assert np.array_equal(product(EMULATOR, conf, a, b, seed=stages), expected(operator, a, b)), k


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_blocks_that_share_k(kind: str, rng: np.random.Generator) -> None:
    operator = KINDS_SM75[kind]
    for splits in (3, 9):
        a, b = operands(rng, operator, 21, 19, 13 * operator.K * 2 + 1)
        with assumed(T4):
            assert np.array_equal(product(EMULATOR, small(operator, splits=splits), a, b), expected(operator, a, b))


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The min-plus product in float64."""
    return np.asarray((a.astype(F64)[:, :, None] + b.astype(F64)[None]).min(1))


DEFAULTS: dict[str, tuple[Any, dict[str, Any]]] = {"f32": (F32, {}), "f64": (F64, {}), "c64": (C64, {}), "c128": (C128, {}), "f16": (F16, {}),
                                                   "min-plus": (F32, dict(operator=MIN_PLUS))}


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@pytest.mark.parametrize("name", DEFAULTS)
def test_what_matmul_chooses(name: str, rng: np.random.Generator) -> None:
    """The same kernel as from sm_80 on, with nothing but registers between global memory and the stages."""
    dtype, fields = DEFAULTS[name]
    a, b = numbers(rng, (37, 45), dtype), numbers(rng, (45, 35), dtype)
    d = poison((37, 35), F32 if dtype == F16 else dtype)
    with assumed(T4), gk.emulate():
        plan = gk.plan(a, b, out=d, **fields)
        spec, conf = plan._compiled.spec, plan.config
        gk.matmul(a, b, out=d, **fields)
    assert (conf.kernel, conf.stages, spec.copies) == ("multistage", 2, StagedCopies())
    assert np.array_equal(d, distances(a, b) if fields else expected(KINDS_SM75["f32"], a, b))


def test_no_operand_goes_by_cp_async(rng: np.random.Generator) -> None:
    """Aligned or not; on a GPU that has it the same configuration takes it."""
    a, b = whole(rng, (64, 64), F32), whole(rng, (64, 64), F32)
    conf = small(KINDS_SM75["f32"], ColMajor, steps=16)
    with assumed(T4):
        assert routes(EMULATOR, conf, a.T, b) == routes(EMULATOR, conf, a.T[1:], b[:, 1:]) == ("StagedByThreads", "StagedByThreads")
    assert routes(EMULATOR, conf, a.T, b) == ("CpAsync 4", "CpAsync 4")


@pytest.mark.kin(5)
def test_groups(rng: np.random.Generator) -> None:
    a, b = [whole(rng, (5, 70), F32), whole(rng, (33, 17), F32)], [whole(rng, (70, 9), F32), whole(rng, (17, 31), F32)]
    with assumed(T4), gk.emulate():
        found = gk.grouped(a, b)
    assert all(np.array_equal(d, expected(KINDS_SM75["f32"], x, y)) for d, x, y in zip(found, a, b))


# -- values, by what was compiled -----------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.compile
@pytest.mark.sample(7)
@pytest.mark.parametrize("kind,trans", [("f32", "NT"), ("f32", "TN"), ("c64", "NN"), ("f16", "NT"), ("f16", "TN"), ("s8", "NN"), ("min-plus", "NN")])
def test_compiled_values(kind: str, trans: str, rng: np.random.Generator, seeded: Seeded) -> None:
    texts, compiled = [], launch.ptx_of
    seeded(launch, "ptx_of", lambda plan: texts.append(compiled(plan)) or texts[-1])
    operator = KINDS_SM75.get(kind) or MIN_PLUS.sized(dict(M=16, N=16, MB=4, NB=8), F32, F32, F32)
    conf = small(operator, ORDERS[trans[0]], ORDERS[trans[1]])
    m, n, k = operator.shape
    a, b = operands(rng, operator, m + 3, n + 5, 9 * k + 1)
    with assumed(T4):
        d = product(launch.Ptx(), conf, a, b)
    assert np.array_equal(d, distances(a, b) if kind == "min-plus" else expected(operator, a, b))
    assert all(".target sm_75" in text and not any(word in text for word in NEWER) for text in texts) and texts


@pytest.mark.kin(5)
@pytest.mark.compile
def test_bfloat16_is_rounded_without_its_instruction() -> None:
    """To nearest, ties to even, over the whole range; of NaN nothing but NaN is left."""
    bits = np.arange(2**16, dtype=np.uint32) << 16
    values = np.stack([bits, bits + 0x7FFF, bits + 0x8000, bits + 0x8001]).view(F32)[:, 64::131].copy()
    conf = gk.get_config(operator=FPUOp(16, 16), global_a_layout=RowMajor(F32), global_d_layout=RowMajor(BF16), device=T4, kernel="singlestage")
    a, out = values.reshape(-1, 1), poison((values.size, 1), BF16)
    with assumed(T4), launch.Ptx().session():
        gk.matmul(a, np.ones((1, 1), F32), None, conf, out=out)
    with np.errstate(all="ignore"):
        wanted = a.astype(BF16)
    assert np.array_equal(out.view(np.uint16)[~np.isnan(a)], wanted.view(np.uint16)[~np.isnan(a)]) and np.isnan(out[np.isnan(a)].astype(F32)).all()


# -- mappings -------------------------------------------------------------------------------------------------------------

def test_mappings_have_two_stages_and_fit() -> None:
    """A tile of each table does, on a T4."""
    for dtype, table in TABLES.items():
        found = [one.on(T4) for one in table]
        fit = [one for one in found if one.nbytes <= T4.shared_memory_per_block]
        assert fit and {one.stages for one in found} == {2}, dtype
        assert all(one.blocks == 1 or one.blocks * one.nbytes <= T4.shared_memory_per_sm for one in fit)
