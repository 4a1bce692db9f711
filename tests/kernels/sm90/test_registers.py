"""A by way of registers, transformed there or of an algebra: exact products, at edges, in any order of the threads; and
faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.epilogues import Bias, ReLU
from gemmkit.kernels.collectives import pipeline
from gemmkit.kernels.sm90 import mainloop, rewrite
from gemmkit.kernels.sm90.mainloop import PermutedPlanes, RegisterMainloop, Transformed, permuted
from gemmkit.kernels.sm90.rewrite import DeinterleaveProducer, Rewrite
from gemmkit.kernels.sm90.routes import Tma
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, Interleaved, RowMajor, Swizzled, Triangular
from gemmkit.operators import COMPLEX, DUAL, QUATERNION, SPLIT_COMPLEX, Algebra, WGMMAOp
from gemmkit.ptx.barriers import mbarrier_arrive
from gemmkit.ptx.special import thread_index
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.kernels.sm90.test_algebras import run, small, swapped, whole
from tests.kernels.sm90.test_rewrite import spec_of as spec_of_transformed
from tests.support.algebras import product64
from tests.support.machines import BF16, E4M3, E5M2, MACHINES, on_machines, poison
from tests.support.patches import Seeded
from tests.support.sm90 import F16, F32, mapping, ordered, product

# ==========================================================================================================================
# A of algebras by registers in the warp-specialised kernel: exact products, at edges, in any order of the threads; and faults
# put into it are found.

EMULATOR = MACHINES["emulator"]
BOTH = Algebra(None, [[[1, 0], [0, -1]], [[0, 1], [-1, 0]]])               # every product of parts, with either sign


def by_registers(spec: Any) -> bool:
    """Whether the consumers fetch A themselves."""
    return isinstance(spec.mainloop, RegisterMainloop)


def by_registers_of(plan: Any) -> bool:
    return by_registers(plan._compiled.spec)


def check(machine: Any, algebra: Algebra, size: tuple[int, int, int], rng: np.random.Generator, orders: str = "NN",
          dtype: Any = "f2", seed: int | None = None, **keywords: Any) -> None:
    """D of numbers that go by registers, exactly."""
    M, N, K = size
    a, b = whole(rng, M, K, 2, orders[0], dtype), whole(rng, K, N, 2, orders[1], dtype)
    d, plan = run(machine, a, b, dtype=dtype, seed=seed, **(keywords or dict(operator=algebra)))
    assert by_registers_of(plan)
    assert np.array_equal(d, product64(algebra, a, b).astype(dtype))


# -- the order along K ----------------------------------------------------------------------------------------------------

@pytest.mark.usefixtures("few_blocks")
def test_places_are_those_of_a_fragment() -> None:
    """What lane t of four gets of a line, by `ldmatrix` of numbers, is where the instruction has t's elements."""
    fragment = WGMMAOp(8).spec.a_map
    for t in range(4):
        numbers = [t, t + 4, t + 8, t + 12]
        assert [permuted(k) for k in numbers] == [fragment.column(t, value) for value in (0, 1, 4, 5)]
    assert sorted(permuted(k) for k in range(64)) == list(range(64))


# -- products ---------------------------------------------------------------------------------------------------------------

@pytest.mark.usefixtures("few_blocks")
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("orders", ["NN", "NT"])
@pytest.mark.parametrize("algebra", [COMPLEX, DUAL, SPLIT_COMPLEX, BOTH], ids=["complex", "dual", "split", "both signs"])
def test_tables(machine: Any, algebra: Algebra, orders: str, rng: np.random.Generator) -> None:
    check(machine, algebra, (69, 24, 44) if machine.emulated else (1021, 524, 332), rng, orders)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.kin(4)
@pytest.mark.sample(7)
@on_machines
@pytest.mark.parametrize("K", [4, 12, 16, 20, 32, 36, 100])
def test_ends_along_k(machine: Any, K: int, rng: np.random.Generator) -> None:
    """TMA brings zeros for what is beyond; of A, and of B in its own order."""
    for orders in ("NN", "NT"):
        check(machine, COMPLEX, (65, 20, K) if machine.emulated else (517, 260, K), rng, orders)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.kin(4)
@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", BF16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("rows, warps, depth, stages, schedule", [
    (64, 4, 16, 2, "cooperative"), (64, 4, 16, 5, "cooperative"), (64, 4, 48, 3, "cooperative"), (128, 4, 32, 3, "cooperative"),
    (128, 8, 64, 2, "cooperative"), (64, 8, 32, 4, "pingpong")], ids=lambda x: str(x))
def test_mappings(machine: Any, rows: int, warps: int, depth: int, stages: int, schedule: str, dtype: Any,
                  rng: np.random.Generator) -> None:
    """One step in a stage, three and four; one fragment of 64 rows and two; D of 16-bit numbers and of the sums' own."""
    number = DUAL.number_dtype(dtype)
    for orders in ("NN", "NT"):
        conf = gk.get_config(operator=Algebra(WGMMAOp(64, dtype), DUAL), block_shape=Tile(M=rows, N=64, K=depth),
                             warps_per_block=warps, schedule=schedule, stages=stages, global_a_layout=Interleaved(number),
                             global_b_layout=Interleaved(number, {"N": "row", "T": "col"}[orders[1]]),
                             global_d_layout=Interleaved(number))
        check(machine, DUAL, (133, 36, 104) if machine.emulated else (1021, 524, 332), rng, orders, dtype, conf=conf)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.kin(4)
@on_machines
def test_b_is_transformed_on_its_way(machine: Any, rng: np.random.Generator) -> None:
    """In range and beyond, along K and across it; its coordinates are those of the matrix."""
    M, N, K = (67, 20, 36) if machine.emulated else (517, 260, 332)
    for order in "NT":
        a, b = whole(rng, M, K, 2), whole(rng, K, N, 2, order)
        d, plan = run(machine, a, b, operator=COMPLEX, dtype="f4", global_d_layout=Interleaved("complex64"),
                      transform_global_to_shared_b=Map(lambda x, k, n: (x[0] + k % 5, x[1] - n % 3)))
        assert by_registers_of(plan)
        k, n = np.indices((K, N))
        assert np.array_equal(d, product64(COMPLEX, a, np.stack([b[..., 0] + k % 5, b[..., 1] - n % 3], -1)))


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.kin(4)
@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_threads_is_right(seed: int, rng: np.random.Generator) -> None:
    check(EMULATOR, COMPLEX, (200, 16, 72), rng, "NT", seed=seed, conf=small(
        COMPLEX, "two", N=32, stages=3, global_b_layout=Interleaved(COMPLEX.number_dtype("f2"), "col")))


# -- where it is not done ---------------------------------------------------------------------------------------------------

def spec_of(algebra: Algebra = COMPLEX, dtype: Any = "f2", orders: str = "NN", K: int = 64, **fields: Any) -> Any:
    a, b = (whole(np.random.default_rng(0), *shape, algebra.parts, order, dtype)
            for shape, order in zip(((64, K), (K, 64)), orders))
    with gk.emulate():
        return gk.plan(a, b, **{**dict(operator=algebra), **fields})._compiled.spec


@pytest.mark.usefixtures("few_blocks")
def test_who_goes_by_registers() -> None:
    assert by_registers(spec_of()) and by_registers(spec_of(orders="NT"))
    others = {
        "A across K": spec_of(orders="TN"), "four parts": spec_of(QUATERNION),
        "32-bit parts": spec_of(dtype="f4", orders="NT", operator=Algebra(WGMMAOp(32, "f4"), COMPLEX)),
        "A is transformed": spec_of(transform_global_to_shared_a=Map(swapped)),
        "three consumers": _spec(small(COMPLEX, "three")), "a cluster": _spec(small(COMPLEX, "one-1x2")),
        "a B too small to divide": _spec(small(COMPLEX, N=8, block_shape=Tile(M=64, N=8, K=16))),
    }
    assert {name: by_registers(spec) for name, spec in others.items()} == dict.fromkeys(others, False)
    assert not isinstance(spec_of(K=65).producer, DeinterleaveProducer)


def _spec(conf: gk.Config) -> Any:
    a, b = (np.zeros((64, 64, 2), "f2") for _ in "ab")
    with gk.emulate():
        return gk.plan(a, b, None, conf)._compiled.spec


@pytest.mark.usefixtures("few_blocks")
def test_b_alone_is_woven() -> None:
    spec = spec_of(orders="NT")
    assert isinstance(spec.b.shared, PermutedPlanes) and not isinstance(spec.a.shared, PermutedPlanes)
    assert spec.a.numbers == Swizzled(Interleaved(COMPLEX.number_dtype("f2")), 128) and spec.b.thread == Tile(K=8, N=1)
    assert "PermutedPlanes(Planes(" in repr(spec.b.shared)
    assert spec_of().b.numbers is None and spec_of().b.plane == Swizzled(RowMajor("f2"), spec_of().b.plane.width)


# -- faults -------------------------------------------------------------------------------------------------------------------

def nothing(*given: Any) -> None:
    pass


def by_one_thread(self: pipeline.Pipeline, stage: int) -> None:
    """As the other consumers do, whose threads read nothing; it counts for all warps."""
    if thread_index() % 128 == 0:
        for _ in range(4):
            mbarrier_arrive(self.empty(), stage)


FAULTS = {
    "nobody waits for A": (mainloop, "wait_for_a", nothing, errors.EmulatorError),
    "the lanes of a warp do not meet": (pipeline, "warp_barrier", nothing, errors.RaceError),
    "one thread speaks for all": (pipeline.Pipeline, "release", by_one_thread, errors.RaceError),
    "stages are given back while they are read": (mainloop, "wgmma_wait", lambda pending, sums: sums, errors.ProtocolError),
    "B is written without a fence": (rewrite, "fence_async", nothing, errors.ProxyError),
    "warps write before all have read": (rewrite, "named_barrier", nothing, errors.RaceError),
}


@pytest.mark.kin(4)
@pytest.mark.usefixtures("few_blocks")
@pytest.mark.sample(6)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, seeded: Seeded, rng: np.random.Generator) -> None:
    module, function, instead, error = FAULTS[name]
    conf = small(COMPLEX, stages=3)
    check(EMULATOR, COMPLEX, (136, 16, 136), rng, conf=conf)
    seeded(module, function, instead)
    with pytest.raises(error):
        check(EMULATOR, COMPLEX, (136, 16, 136), rng, conf=conf)


@pytest.mark.usefixtures("few_blocks")
def test_an_order_of_b_that_is_not_as_of_a_is_wrong(seeded: Seeded, rng: np.random.Generator) -> None:
    from gemmkit.kernels.sm90 import mainloop as module

    seeded(module, "permuted", lambda k: k)
    with pytest.raises(AssertionError):
        check(EMULATOR, COMPLEX, (64, 16, 32), rng)


# ==========================================================================================================================
# A that is transformed on its way into registers (`gemmkit.kernels.sm90.mainloop`): exact products, at edges, in any order of the
# threads; and faults put into it are found.

KINDS = {"R": RowMajor, "C": ColMajor}


def plus_one(x: Any) -> Any:
    return max(x + 1, 0)


def by_place(x: Any, i: int, j: int) -> Any:
    return x + i % 3 - j % 2


def apply64(function: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    """A transform of every element, in float64, one by one."""
    x64, out = x.astype(np.float64), np.empty(x.shape)
    for i, j in np.ndindex(x.shape):
        out[i, j] = function(x64[i, j], i, j) if function is by_place else function(x64[i, j])
    return out


def few(rng: np.random.Generator, shape: tuple[int, int], dtype: Any, low: int = -2) -> np.ndarray:
    return rng.integers(low, 3, shape).astype(dtype)


def check_transformed(machine: Any, conf: gk.Config, size: tuple[int, int, int], rng: np.random.Generator, function: Any = plus_one,
          seed: int | None = None) -> None:
    """D exactly; A and B have rows (columns) that are longer than what is multiplied, so that they may end anywhere."""
    M, N, K = size
    a_type, b_type = conf.global_a_layout.dtype, conf.global_b_layout.dtype
    line = 16 // a_type.itemsize
    a = few(rng, (-(-M // line) * line, -(-K // line) * line), a_type, 0 if a_type.kind == "u" else -2)
    b = few(rng, (-(-K // line) * line, -(-N // line) * line), b_type)
    assert by_registers(spec_of_transformed(conf, a, b))
    a, b = ordered(a, conf.global_a_layout), ordered(b, conf.global_b_layout)
    out = machine.array(poison((M, N), conf.global_d_layout.dtype))
    with gk.emulate(seed) if machine.emulated else machine.session():
        gk.matmul(machine.array(a)[:M, :K], machine.array(b)[:K, :N], None, conf, out=out)
    b64 = b[:K, :N].astype(np.float64)
    changed = conf.transform_global_to_shared_b
    want = apply64(function, a[:M, :K]) @ (b64 if changed.is_identity else apply64(changed.f, b64))
    assert np.array_equal(machine.numpy(out), want.astype(conf.global_d_layout.dtype))


# -- products ---------------------------------------------------------------------------------------------------------------

@pytest.mark.usefixtures("few_blocks")
@pytest.mark.kin(4)
@pytest.mark.sample(48)
@on_machines
@pytest.mark.parametrize("function", [plus_one, by_place], ids=["in pairs", "by place"])
@pytest.mark.parametrize("schedule", ["one", "two", "pingpong"])
@pytest.mark.parametrize("orders", ["RR", "RC", "CR", "CC"])
def test_orders(machine: Any, orders: str, schedule: str, function: Any, rng: np.random.Generator) -> None:
    conf = mapping(schedule, a=KINDS[orders[0]], b=KINDS[orders[1]], transform_global_to_shared_a=Map(function))
    check_transformed(machine, conf, (139, 37, 149), rng, function)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("dtype", [BF16, F32, E4M3, E5M2, np.dtype("i1"), np.dtype("u1")], ids=lambda d: d.name)
def test_dtypes(machine: Any, dtype: np.dtype, rng: np.random.Generator) -> None:
    """tf32, 8-bit floats and integers, which tensor cores take along K alone: a register holds one element, or four."""
    for function in (plus_one, by_place):
        conf = mapping("two", WGMMAOp(32, dtype), b=ColMajor, stages=3,
                       transform_global_to_shared_a=Map((lambda x: x + 1) if dtype.kind == "u" else function))
        check_transformed(machine, conf, (139, 37, 149), rng, (lambda x: x + 1) if dtype.kind == "u" else function)


def reciprocals(machine: Any, K: int, kind: Any, rng: np.random.Generator) -> bool:
    """Whether D of 2 / A is right, where rows of A go on beyond K; the zeros there have no reciprocal."""
    conf = mapping("one", a=kind, transform_global_to_shared_a=Map(lambda x: 2 / x))
    M, N = 67, 24
    a = ordered(rng.choice([-2.0, -1.0, 1.0, 2.0], (72, -(-K // 8) * 8)).astype(F16), kind(F16))
    b = few(rng, (K, N), F16)
    out = machine.array(poison((M, N), F32))
    with machine.session():
        gk.matmul(machine.array(a)[:M, :K], machine.array(b), None, conf, out=out)
    return np.array_equal(machine.numpy(out), 2 / a[:M, :K].astype(np.float64) @ b.astype(np.float64))


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.kin(4)
@pytest.mark.sample(24)
@on_machines
@pytest.mark.parametrize("K", [1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130])
def test_ends_along_k_when_transformed(machine: Any, K: int, rng: np.random.Generator) -> None:
    """Nothing is made of the zeros beyond K: infinity times B's zero is no number."""
    assert all(reciprocals(machine, K, kind, rng) for kind in (RowMajor, ColMajor))


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("rows, warps, depth, stages, schedule", [
    (64, 4, 16, 2, "cooperative"), (64, 4, 16, 5, "cooperative"), (64, 4, 32, 3, "cooperative"), (64, 4, 48, 3, "cooperative"),
    (128, 4, 64, 2, "cooperative"), (256, 8, 64, 3, "cooperative"), (128, 8, 128, 2, "cooperative"), (64, 8, 16, 4, "pingpong"),
    (128, 8, 48, 3, "pingpong")], ids=str)
def test_mappings_when_transformed(machine: Any, rows: int, warps: int, depth: int, stages: int, schedule: str,
                  rng: np.random.Generator) -> None:
    """One step in a stage, two, three, four and eight; one fragment of 64 rows and two; alone, and B is changed in place."""
    size = (rows + 37, 37, 139) if machine.emulated else (1021, 165, 331)
    for fields in ({}, {"transform_global_to_shared_b": Map(lambda x: x - 1)}):
        conf = gk.get_config(operator=WGMMAOp(32), block_shape=Tile(M=rows, N=32, K=depth), warps_per_block=warps,
                             schedule=schedule, stages=stages, global_a_layout=RowMajor(F16), global_b_layout=ColMajor(F16),
                             global_d_layout=RowMajor(F32), transform_global_to_shared_a=Map(plus_one), **fields)
        check_transformed(machine, conf, size, rng)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.kin(4)
@on_machines
def test_captured_arrays_are_read_in_range(machine: Any, rng: np.random.Generator) -> None:
    """Factors of rows and of columns of A: out of range there are none, and none are asked for."""
    M, N, K = 75, 24, 104
    a, b = few(rng, (M, K), F16), few(rng, (K, N), F16)
    rows, columns = rng.integers(1, 4, M).astype("f4"), rng.integers(1, 4, K).astype("f4")
    r, c = machine.array(rows), machine.array(columns)
    conf = mapping("two", transform_global_to_shared_a=Map(lambda x, i, j: x * r[i] * c[j]))
    assert by_registers(spec_of_transformed(conf, a, b))
    want = (a.astype(np.float64) * rows[:, None] * columns) @ b.astype(np.float64)
    assert np.array_equal(product(machine, conf, a, b), want)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.thorough
@on_machines
def test_all_slots_at_once(machine: Any, rng: np.random.Generator) -> None:
    """The last row of the paper's Table 2."""
    M, N, K = 200, 72, 136
    a, b, c = few(rng, (M, K), F16), few(rng, (K, N), F16), few(rng, (M, N), F16)
    bias = few(rng, (1, N), F16)[0]
    conf = mapping("two", d=RowMajor(F16), global_c_layout=RowMajor(F16), epilogue=Bias(machine.array(bias)) | ReLU(),
                   transform_global_to_shared_a=Map(plus_one), transform_global_to_shared_b=Map(lambda x: x + 1),
                   transform_global_to_shared_c=Map(lambda x: max(x, 0)))
    spec = spec_of_transformed(conf, a, b)
    assert spec.mainloop == RegisterMainloop(Transformed(2), spec.mainloop.steps)
    assert (type(spec.a.route), type(spec.b.route), spec.pipeline.has_raw) == (Tma, Rewrite, True)
    want = apply64(plus_one, a) @ (b.astype(np.float64) + 1) + bias.astype(np.float64) + np.maximum(c, 0).astype(np.float64)
    assert np.array_equal(product(machine, conf, a, b, c), np.maximum(want, 0).astype(F16))


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_threads_is_right_when_transformed(seed: int, rng: np.random.Generator) -> None:
    conf = mapping("two", stages=3, depth=32, transform_global_to_shared_a=Map(plus_one),
                   transform_global_to_shared_b=Map(lambda x: x - 1))
    check_transformed(EMULATOR, conf, (264, 40, 104), rng, seed=seed)


# -- where it is not done ---------------------------------------------------------------------------------------------------

class Halves(Condition):
    def __call__(self, m: int, n: int, k: int) -> bool:
        return k < 64


@pytest.mark.usefixtures("few_blocks")
def test_who_goes_by_registers_when_transformed() -> None:
    change = dict(transform_global_to_shared_a=Map(plus_one))
    array, bytes_ = np.zeros((128, 128), F16), np.zeros((128, 128), "i1")
    assert by_registers(spec_of_transformed(mapping("two", **change), array, array))
    others = {
        "nothing to do": (mapping("two"), array), "a cluster": (mapping("one-1x2", **change), array),
        "three consumers": (mapping("three", **change), array), "a condition": (mapping("two", condition=Halves(), **change), array),
        "A is turned": (mapping("two", WGMMAOp(64, np.dtype("i1")), a=ColMajor, b=ColMajor, **change), bytes_),
        "a half of A": (mapping("two", global_a_layout=Triangular(RowMajor(F16), "lower"), **change), array),
        "promoted sums": (mapping("two", WGMMAOp(32, E4M3, promote=128), b=ColMajor, **change), np.zeros((128, 128), E4M3)),
        "more sums than registers": (mapping("two", WGMMAOp(192), block_shape=Tile(M=256, N=192, K=16), stages=2, **change), array),
    }
    found = {name: by_registers(spec_of_transformed(conf, x, x)) for name, (conf, x) in others.items()}
    assert found == dict.fromkeys(others, False)


# -- faults -------------------------------------------------------------------------------------------------------------------

FAULTS_TRANSFORMED: dict[str, tuple[Any, str, Any, type[BaseException]]] = {
    "nobody waits for A": (mainloop, "wait_for_a", nothing, errors.EmulatorError),
    "the lanes of a warp do not meet": (pipeline, "warp_barrier", nothing, errors.RaceError),
    "one thread speaks for all": (pipeline.Pipeline, "release", by_one_thread, errors.RaceError),
    "stages are given back while they are read": (mainloop, "wgmma_wait", lambda pending, sums: sums, errors.ProtocolError),
}


@pytest.mark.kin(4)
@pytest.mark.usefixtures("few_blocks")
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAULTS_TRANSFORMED)
def test_a_fault_is_found_when_transformed(name: str, seeded: Seeded, rng: np.random.Generator) -> None:
    module, function, instead, error = FAULTS_TRANSFORMED[name]
    conf = mapping("two", stages=3, transform_global_to_shared_a=Map(plus_one),
                   transform_global_to_shared_b=Map(lambda x: x - 1))
    check_transformed(EMULATOR, conf, (136, 16, 205), rng)
    seeded(module, function, instead)
    with pytest.raises(error):
        check_transformed(EMULATOR, conf, (136, 16, 205), rng)


@pytest.mark.usefixtures("few_blocks")
def test_what_is_made_of_zeros_would_be_seen(seeded: Seeded, rng: np.random.Generator) -> None:
    seeded(mainloop, "first_elements", lambda dtype, word, count: word)
    with np.errstate(all="ignore"):
        assert not reciprocals(EMULATOR, 33, RowMajor, rng)
