"""Algebras in the warp-specialised kernel: against the definition, with small whole numbers, which come out exactly.

Numbers that lie side by side in memory *land* where TMA can bring them, and are taken apart in shared memory;
elsewhere the producer's warps load them; planes come by TMA alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import ConfigError, epilogues
from gemmkit.kernels.sm90.rewrite import DeinterleaveProducer
from gemmkit.kernels.sm90.routes import StagedProducer
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, Interleaved, Padded, Planar, Planes, RowMajor, Swizzled
from gemmkit.operators import COMPLEX, DUAL, QUATERNION, Algebra, FPUOp, MMAOp, WGMMAOp, dual
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.support.algebras import FRACTIONS, TRIANGULAR, product64
from tests.support.machines import BF16, E4M3, on_machines, poison
from tests.support.sm90 import SCHEDULES

SIGNED = {"complex": COMPLEX, "dual": DUAL, "dual2": dual(2), "quaternion": QUATERNION, "a user's": TRIANGULAR}
EVEN = {True: (72, 24, 72), False: (1032, 520, 328)}              # for TMA; several tiles
ODD = {True: (67, 21, 45), False: (1021, 517, 333)}


def whole(rng: np.random.Generator, rows: int, columns: int, parts: int, order: str = "N", dtype: Any = "f2") -> np.ndarray:
    """Small whole parts, along a last axis; other orders than "N" are stored as the transpose."""
    shape = (rows, columns) if order == "N" else (columns, rows)
    stored = rng.integers(-2, 2, (*shape, parts), endpoint=True).astype(dtype)
    return stored if order == "N" else stored.swapaxes(0, 1)


def moved(machine: Any, x: np.ndarray) -> Any:
    """The array where the machine multiplies, in its order."""
    if x.strides[0] < x.strides[1]:
        return machine.array(np.ascontiguousarray(x.swapaxes(0, 1))).swapaxes(0, 1)
    return machine.array(x)


def run(machine: Any, a: Any, b: Any, c: Any = None, *, seed: int | None = None, dtype: Any = "f2", **keywords: Any) -> Any:
    """D, poisoned before, and the plan that made it."""
    parts = keywords["operator"].parts if "operator" in keywords else keywords["conf"].operator.parts
    out = machine.array(poison((a.shape[0], b.shape[1], parts), dtype))
    given = [None if x is None else moved(machine, x) for x in (a, b, c)]
    with gk.emulate(seed, mapping="device") if machine.emulated else machine.session():
        plan = gk.plan(*given, out=out, **keywords)
        plan(*given, out=out)
    return machine.numpy(out), plan


def lands(plan: Any) -> bool:
    assert plan.config.is_pipeline
    return isinstance(plan._compiled.spec.producer, DeinterleaveProducer)


def small(algebra: Algebra, schedule: str = "one", N: int = 16, **fields: Any) -> gk.Config:
    """A configuration with the smallest tiles of a schedule."""
    rows, warps, name, cluster = SCHEDULES[schedule]
    number = algebra.number_dtype("f2")
    given = dict(operator=Algebra(WGMMAOp(N), algebra), global_a_layout=Interleaved(number), global_d_layout=Interleaved(number),
                 block_shape=Tile(M=rows, N=N, K=32), warps_per_block=warps, schedule=name, cluster=Tile(M=cluster[0], N=cluster[1]))
    return gk.get_config(**{**given, **fields})


# -- tables, sizes, orders ----------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(10)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", BF16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("name", SIGNED)
def test_every_algebra(machine: Any, name: str, dtype: Any, rng: np.random.Generator, few_blocks: Any) -> None:
    """Chosen by `matmul` itself. In the emulator odd sizes have numbers of one type: their parts are as wide as the other's."""
    algebra = SIGNED[name]
    for size, even in ((EVEN, True), (ODD, False))[: 1 if machine.emulated and dtype is BF16 else 2]:
        M, N, K = size[machine.emulated]
        K = min(K, 40) if machine.emulated and algebra.parts == 4 else K            # two blocks along K
        a, b = whole(rng, M, K, algebra.parts, dtype=dtype), whole(rng, K, N, algebra.parts, dtype=dtype)
        d, plan = run(machine, a, b, operator=algebra, dtype=dtype)
        assert np.array_equal(d, product64(algebra, a, b).astype(dtype))
        assert lands(plan) == (even and algebra.parts in (2, 4))           # numbers of 6 bytes are no elements of TMA's


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("orders", ["NN", "NT", "TN", "TT", "CN", "NC", "CT", "CC"])
@pytest.mark.parametrize("name", ["complex", "quaternion"])
def test_gemm_ex(machine: Any, name: str, orders: str, rng: np.random.Generator) -> None:
    """All transposes, of numbers that land and of those that do not; "C" conjugates on the way, alpha and beta as well."""
    algebra = SIGNED[name]
    signs = np.array(algebra.conjugate)
    even = (68, 16, 40) if algebra is COMPLEX else (36, 16, 40)
    for M, N, K in [even, (9, 18, 5)] if machine.emulated else [EVEN[False], ODD[False]]:
        a, b = (whole(rng, *shape, algebra.parts, order) for shape, order in zip(((M, K), (K, N)), orders))
        c = whole(rng, M, N, algebra.parts)
        out = machine.array(c)
        stored = [x if order == "N" else x.swapaxes(0, 1) for x, order in zip((a, b), orders)]
        with machine.session():
            gk.blas.gemmEx(*orders, 2.0, *map(machine.array, stored), -1.0, out, operator=algebra)
        operated = [x * signs if order == "C" else x for x, order in zip((a, b), orders)]
        expected = 2 * product64(algebra, *operated) - c
        assert np.array_equal(machine.numpy(out), expected.astype("f2"))


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("size", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("orders", ["NN", "TT"])
def test_planes(machine: Any, orders: str, size: Any, rng: np.random.Generator, few_blocks: Any) -> None:
    """Both planar: TMA alone; one planar and one that lands; planar ones that TMA refuses; a planar D."""
    number = COMPLEX.number_dtype("f2")
    layout = {order: Planar(number, "row" if order == "N" else "col") for order in "NT"}
    for M, N, K in (size[machine.emulated],):
        a, b = whole(rng, M, K, 2, orders[0]), whole(rng, K, N, 2, orders[1])
        planes = [_planes(machine, x) for x in (a, b)]
        expected = product64(COMPLEX, a, b).astype("f2")
        out = machine.array(poison((2, M, N), "f2"))
        with machine.session():
            plan = gk.plan(*planes, out=out, operator=COMPLEX, global_a_layout=layout[orders[0]], global_d_layout=Planar(number),
                           global_b_layout=layout[orders[1]])
            plan(*planes, out=out)
        assert isinstance(plan._compiled.spec.producer, StagedProducer) == (M % 2 == 1) and not lands(plan)
        assert np.array_equal(np.moveaxis(machine.numpy(out), 0, 2), expected)
        out = machine.array(poison((M, N, 2), "f2"))
        with machine.session():
            plan = gk.plan(planes[0], moved(machine, b), out=out, operator=COMPLEX, global_a_layout=layout[orders[0]])
            plan(planes[0], moved(machine, b), out=out)
        assert lands(plan) == (M % 2 == 0)
        assert np.array_equal(machine.numpy(out), expected)


def _planes(machine: Any, x: np.ndarray) -> Any:
    if x.strides[0] < x.strides[1]:
        return machine.array(np.ascontiguousarray(x.transpose(2, 1, 0))).swapaxes(1, 2)
    return machine.array(np.ascontiguousarray(np.moveaxis(x, 2, 0)))


@on_machines
def test_nothing_to_multiply(machine: Any, rng: np.random.Generator) -> None:
    for M, N, K in ((72, 40, 0), (0, 40, 8), (72, 0, 8), (1, 1, 1)):
        a, b = whole(rng, M, K, 2), whole(rng, K, N, 2)
        d, plan = run(machine, a, b, operator=DUAL)
        assert plan.config.is_pipeline and np.array_equal(d, product64(DUAL, a, b))


@pytest.mark.kin(2)
@on_machines
@pytest.mark.parametrize("name", ["complex", "dual"])
def test_c_and_d_of_float32(machine: Any, name: str, rng: np.random.Generator) -> None:
    """Of float16 numbers, in a tile of 128 columns; rows and columns end within tiles."""
    algebra, (M, N, K) = SIGNED[name], (70, 134, 24) if machine.emulated else (390, 402, 136)
    wide = Interleaved(algebra.number_dtype("f4"))
    conf = small(algebra, N=128, block_shape=Tile(M=64, N=128, K=32), global_c_layout=wide, global_d_layout=wide)
    a, b = whole(rng, M, K, algebra.parts), whole(rng, K, N, algebra.parts)
    c, out = whole(rng, M, N, algebra.parts, dtype="f4"), np.full((M, N, algebra.parts), np.nan, "f4")
    with machine.session():
        given = [machine.array(x) for x in (a, b, c, out)]
        gk.matmul(*given[:3], conf, out=given[3])
    assert np.array_equal(machine.numpy(given[3]), (product64(algebra, a, b) + c).astype("f4"))


# -- mappings -----------------------------------------------------------------------------------------------------------

SPLIT = {schedule: dict(shared_b_layout=Planes(Swizzled(RowMajor("f2"), 32), COMPLEX.number_dtype("f2")), N=32)
         for schedule in SCHEDULES if "2x1" in schedule or "2x2" in schedule}                  # two panels of B, for two blocks


@pytest.mark.kin(5)
@pytest.mark.sample(11)
@on_machines
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(machine: Any, schedule: str, rng: np.random.Generator, few_blocks: Any) -> None:
    """In a cluster each block loads its own numbers, and nothing lands; nor beside three consumers, which leave too few
    registers to hold it."""
    M, N, K = (200, 40 if schedule in SPLIT else 24, 40) if machine.emulated else EVEN[False]
    a, b = whole(rng, M, K, 2), whole(rng, K, N, 2)
    d, plan = run(machine, a, b, conf=small(COMPLEX, schedule, **SPLIT.get(schedule, {})))
    assert lands(plan) == ("x" not in schedule and schedule != "three")
    assert np.array_equal(d, product64(COMPLEX, a, b))


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("schedule", ["one-2x1", "one-1x2"])
def test_clusters_share_planes(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    M, N, K = (136, 40, 40) if machine.emulated else EVEN[False]
    number = COMPLEX.number_dtype("f2")
    a, b = whole(rng, M, K, 2), whole(rng, K, N, 2, "T")
    conf = small(COMPLEX, schedule, global_a_layout=Planar(number), global_b_layout=Planar(number, "col"))
    planes = _planes(machine, a), _planes(machine, b)
    out = machine.array(poison((M, N, 2), "f2"))
    with machine.session():
        gk.matmul(*planes, None, conf, out=out)
    assert np.array_equal(machine.numpy(out), product64(COMPLEX, a, b))


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_rings(machine: Any, stages: int, rng: np.random.Generator, few_blocks: Any) -> None:
    """Copies start one stage ahead at least, in whatever order the threads run."""
    M, N, K = (200, 16, 104) if machine.emulated else EVEN[False]
    a, b = whole(rng, M, K, 2), whole(rng, K, N, 2)
    for seed in range(2 if machine.emulated else 1):
        d, plan = run(machine, a, b, conf=small(DUAL, "pingpong", stages=stages), seed=seed)
        assert lands(plan) and np.array_equal(d, product64(DUAL, a, b))


@on_machines
def test_stages_begin_where_the_swizzle_does(machine: Any, rng: np.random.Generator) -> None:
    """A panel of 128 bytes beside one of 32: what warps write must lie as tensor cores look for it."""
    conf = small(COMPLEX, N=8, block_shape=Tile(M=64, N=8, K=16), global_a_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"),
                 global_b_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"))
    a, b = whole(rng, 72, 40, 2, "T"), whole(rng, 40, 8, 2, "T")
    d, _ = run(machine, a, b, conf=conf)
    assert np.array_equal(d, product64(COMPLEX, a, b))


@dataclass(frozen=True)
class EveryOther(Condition):
    """Leaves blocks along K out, and all of some tiles'."""

    def __call__(self, m: int, n: int, k: int) -> bool:
        return (k // 32) % 2 == 1 and m >= 64


@pytest.mark.kin(5)
@on_machines
def test_a_condition(machine: Any, rng: np.random.Generator, few_blocks: Any) -> None:
    a, b = whole(rng, 264, 136, 2), whole(rng, 136, 40, 2)
    d, plan = run(machine, a, b, conf=small(COMPLEX, condition=EveryOther()))
    kept = (np.arange(136) // 32 % 2 == 1)[None, :, None] * (np.arange(264) >= 64)[:, None, None]
    assert lands(plan) and np.array_equal(d, product64(COMPLEX, a * kept, b))


# -- functions ------------------------------------------------------------------------------------------------------------

def swapped(x):
    return x[1], x[0] + 1


def weighed(x, i, j):
    return x[0] + i % 3, x[1] - j % 2


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("size", [EVEN, ODD], ids=["even", "odd"])
def test_transforms(machine: Any, size: Any, rng: np.random.Generator) -> None:
    """They make something of zeros, which beyond the edges must not count."""
    M, N, K = size[machine.emulated]
    a, b = whole(rng, M, K, 2), whole(rng, K, N, 2)
    d, plan = run(machine, a, b, operator=COMPLEX, transform_global_to_shared_a=Map(swapped),
                  transform_global_to_shared_b=Map(weighed), dtype="f4", global_d_layout=Interleaved("complex64"))
    assert lands(plan) == (size is EVEN)
    i, j = np.indices((K, N))
    expected = product64(COMPLEX, np.stack([a[..., 1], a[..., 0] + 1], -1), np.stack([b[..., 0] + i % 3, b[..., 1] - j % 2], -1))
    assert np.array_equal(d, expected)


@pytest.mark.thorough
@on_machines
def test_c_a_bias_and_a_column_major_d(machine: Any, rng: np.random.Generator) -> None:
    M, N, K = EVEN[machine.emulated]
    a, b, c = whole(rng, M, K, 3), whole(rng, K, N, 3), whole(rng, M, N, 3)
    bias = np.arange(N, dtype="f4") % 5
    d, _ = run(machine, a, b, c, operator=dual(2), epilogue=epilogues.Bias(machine.array(bias)))
    expected = product64(dual(2), a, b) + c
    expected[..., 0] += bias
    assert np.array_equal(d, expected)
    conf = small(dual(2), global_d_layout=Interleaved(dual(2).number_dtype("f4"), "col"))
    out = machine.array(poison((N, M, 3), "f4")).swapaxes(0, 1)
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), None, conf, out=out)
    assert np.array_equal(machine.numpy(out), product64(dual(2), a, b))


# -- types ----------------------------------------------------------------------------------------------------------------

TYPES = {"f16 in f16": (COMPLEX, WGMMAOp(32, accumulator="f2"), True), "tf32": (COMPLEX, WGMMAOp(32, "f4"), True),
         "int8": (DUAL, WGMMAOp(32, "i1"), True), "fp8": (QUATERNION, WGMMAOp(32, E4M3, promote=128), False)}


@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("name", TYPES)
def test_types(machine: Any, name: str, rng: np.random.Generator) -> None:
    """8-bit and 32-bit parts are read K-major: so they lie, or the warps transpose them."""
    algebra, base, landing = TYPES[name]
    M, N, K = (72, 48, 144 if base.dtype.itemsize == 1 else 80) if machine.emulated else (520, 272, 528)
    for order in "TN":
        a, b = whole(rng, M, K, algebra.parts, dtype=base.dtype), whole(rng, K, N, algebra.parts, order, base.dtype)
        number = algebra.number_dtype(base.accumulator)
        d, plan = run(machine, a, b, operator=Algebra(base, algebra), dtype=base.accumulator, global_d_layout=Interleaved(number))
        assert lands(plan) == (landing and (order == "T" or base.dtype.itemsize == 2))
        assert np.array_equal(d, product64(algebra, a, b))


# -- what is chosen, and what is refused ------------------------------------------------------------------------------------

def test_it_is_chosen() -> None:
    """For tables of +1 and -1 and 16-bit floats on compute capability 9.0, when nothing of the mapping is given."""
    import dataclasses

    def config(algebra: Algebra = COMPLEX, dtype: Any = "f2", **fields: Any) -> gk.Config:
        return gk.get_config(**{**dict(operator=algebra, global_a_layout=Interleaved(algebra.number_dtype(dtype)), device=H100), **fields})

    for algebra in SIGNED.values():
        chosen = config(algebra, gemm_shape=dict(M=4096, N=4096, K=4096))
        assert chosen.is_pipeline and isinstance(chosen.operator, Algebra) and isinstance(chosen.operator.base, WGMMAOp)
        assert chosen.shared_a_layout.count == algebra.parts
    assert config(dtype=BF16).is_pipeline
    older = dataclasses.replace(H100, arch=(8, 0), name="an A100")
    for other in (config(FRACTIONS), config(dual(12)), config(device=older), config(kernel="singlestage"),
                  config(block_shape=Tile(M=64, N=64, K=32))):
        assert not other.is_pipeline and isinstance(other.operator, Algebra) and isinstance(other.operator.base, MMAOp)
    assert isinstance(config(dtype="f4").operator.base, FPUOp)                           # type: ignore[attr-defined]


def test_structured_arrays_choose_it(rng: np.random.Generator) -> None:
    """A NumPy array of numbers knows its algebra."""
    number = DUAL.number_dtype("f2")
    a, b = whole(rng, 72, 40, 2).view(number)[..., 0], whole(rng, 40, 24, 2).view(number)[..., 0]
    with gk.emulate():
        plan = gk.plan(a, b)
        d = plan(a, b)
    assert lands(plan) and d.dtype == number
    assert np.array_equal(d.view("f2").reshape(72, 24, 2), product64(DUAL, a.view("f2").reshape(72, 40, 2), b.view("f2").reshape(40, 24, 2)))


NUMBER = COMPLEX.number_dtype("f2")
REFUSED: dict[str, tuple[Algebra, dict[str, Any], str]] = {
    "coefficients": (FRACTIONS, {}, "operator=.*coefficients must be 1 or -1 .or 0.; use MMAOp or FPUOp"),
    "integers": (COMPLEX, dict(operator=Algebra(WGMMAOp(32, "i1"), COMPLEX), global_a_layout=Interleaved(COMPLEX.number_dtype("i1")),
                               global_d_layout=Interleaved(COMPLEX.number_dtype("i4")), block_shape=Tile(M=64, N=32, K=64)),
                 "operator=.*does not subtract products of integers.*use FPUOp"),
    "one plane": (COMPLEX, dict(shared_a_layout=Swizzled(Interleaved(NUMBER), 64)), "shared_a_layout=.*in swizzled planes"),
    "padded planes": (COMPLEX, dict(shared_b_layout=Planes(Padded(ColMajor("f2"), 8), NUMBER)), "shared_b_layout=.*in swizzled planes"),
    "registers": (QUATERNION, dict(operator=Algebra(WGMMAOp(128), QUATERNION), block_shape=Tile(M=64, N=128, K=32)),
                  "compute_warp=.*256 registers of sums"),
    "columns": (COMPLEX, dict(block_shape=Tile(M=64, N=64, K=32)), "operator=.*its N must be that of block_shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    algebra, fields, message = REFUSED[name]
    with pytest.raises(ConfigError, match=f"^{message}"):
        small(algebra, **fields)
