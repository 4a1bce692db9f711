"""A of algebras by registers in the warp-specialised kernel: exact products, at edges, in any order of the threads; and faults
put into it are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.kernels.collectives import pipeline
from gemmkit.kernels.sm90 import mainloop, rewrite
from gemmkit.kernels.sm90.family import Sm90Spec
from gemmkit.kernels.sm90.mainloop import PermutedPlanes, RegisterMainloop, permuted
from gemmkit.kernels.sm90.rewrite import DeinterleaveProducer
from gemmkit.layouts import Interleaved, RowMajor, Swizzled
from gemmkit.operators import COMPLEX, DUAL, QUATERNION, SPLIT_COMPLEX, Algebra, WGMMAOp
from gemmkit.ptx.barriers import mbarrier_arrive
from gemmkit.ptx.special import thread_index
from gemmkit.tiling import Tile
from gemmkit.transforms import Elementwise
from tests.kernels.sm90.test_algebras import run, small, swapped, whole
from tests.support.algebras import product64
from tests.support.machines import BF16, MACHINES, on_machines

EMULATOR = MACHINES["emulator"]
BOTH = Algebra(None, [[[1, 0], [0, -1]], [[0, 1], [-1, 0]]])               # every product of parts, with either sign


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks: each has several tiles, one after the other."""
    monkeypatch.setattr(Sm90Spec, "blocks", lambda spec, M, N, sm_count: 2 * spec.cluster.size)


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

def test_places_are_those_of_a_fragment() -> None:
    """What lane t of four gets of a line, by `ldmatrix` of numbers, is where the instruction has t's elements."""
    fragment = WGMMAOp(8).spec.a_map
    for t in range(4):
        numbers = [t, t + 4, t + 8, t + 12]
        assert [permuted(k) for k in numbers] == [fragment.column(t, value) for value in (0, 1, 4, 5)]
    assert sorted(permuted(k) for k in range(64)) == list(range(64))


# -- products ---------------------------------------------------------------------------------------------------------------

@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("orders", ["NN", "NT"])
@pytest.mark.parametrize("algebra", [COMPLEX, DUAL, SPLIT_COMPLEX, BOTH], ids=["complex", "dual", "split", "both signs"])
def test_tables(machine: Any, algebra: Algebra, orders: str, rng: np.random.Generator) -> None:
    check(machine, algebra, (69, 24, 44) if machine.emulated else (1021, 524, 332), rng, orders)


@pytest.mark.kin(4)
@pytest.mark.sample(7)
@on_machines
@pytest.mark.parametrize("K", [4, 12, 16, 20, 32, 36, 100])
def test_ends_along_k(machine: Any, K: int, rng: np.random.Generator) -> None:
    """TMA brings zeros for what is beyond; of A, and of B in its own order."""
    for orders in ("NN", "NT"):
        check(machine, COMPLEX, (65, 20, K) if machine.emulated else (517, 260, K), rng, orders)


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


@pytest.mark.kin(4)
@on_machines
def test_b_is_transformed_on_its_way(machine: Any, rng: np.random.Generator) -> None:
    """In range and beyond, along K and across it; its coordinates are those of the matrix."""
    M, N, K = (67, 20, 36) if machine.emulated else (517, 260, 332)
    for order in "NT":
        a, b = whole(rng, M, K, 2), whole(rng, K, N, 2, order)
        d, plan = run(machine, a, b, operator=COMPLEX, dtype="f4", global_d_layout=Interleaved("complex64"),
                      transform_global_to_shared_b=Elementwise(lambda x, k, n: (x[0] + k % 5, x[1] - n % 3)))
        assert by_registers_of(plan)
        k, n = np.indices((K, N))
        assert np.array_equal(d, product64(COMPLEX, a, np.stack([b[..., 0] + k % 5, b[..., 1] - n % 3], -1)))


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


def test_who_goes_by_registers() -> None:
    assert by_registers(spec_of()) and by_registers(spec_of(orders="NT"))
    others = {
        "A across K": spec_of(orders="TN"), "four parts": spec_of(QUATERNION),
        "32-bit parts": spec_of(dtype="f4", orders="NT", operator=Algebra(WGMMAOp(32, "f4"), COMPLEX)),
        "A is transformed": spec_of(transform_global_to_shared_a=Elementwise(swapped)),
        "three consumers": _spec(small(COMPLEX, "three")), "a cluster": _spec(small(COMPLEX, "one-1x2")),
        "a B too small to divide": _spec(small(COMPLEX, N=8, block_shape=Tile(M=64, N=8, K=16))),
    }
    assert {name: by_registers(spec) for name, spec in others.items()} == dict.fromkeys(others, False)
    assert not isinstance(spec_of(K=65).producer, DeinterleaveProducer)


def _spec(conf: gk.Config) -> Any:
    a, b = (np.zeros((64, 64, 2), "f2") for _ in "ab")
    with gk.emulate():
        return gk.plan(a, b, None, conf)._compiled.spec


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


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    module, function, instead, error = FAULTS[name]
    conf = small(COMPLEX, stages=3)
    check(EMULATOR, COMPLEX, (136, 16, 136), rng, conf=conf)
    monkeypatch.setattr(module, function, instead)
    with pytest.raises(error):
        check(EMULATOR, COMPLEX, (136, 16, 136), rng, conf=conf)


def test_an_order_of_b_that_is_not_as_of_a_is_wrong(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    from gemmkit.kernels.sm90 import mainloop as module

    monkeypatch.setattr(module, "permuted", lambda k: k)
    with pytest.raises(AssertionError):
        check(EMULATOR, COMPLEX, (64, 16, 32), rng)
