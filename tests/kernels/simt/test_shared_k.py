"""Blocks of a cluster that share the K of a tile in the kernel with one stage: products, rules, defaults, faults."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors, machine
from gemmkit.epilogues import Bias, ReLU
from gemmkit.functions.number_systems import IndexSplit, Selecting, WithIndex
from gemmkit.kernels import simt
from gemmkit.kernels.collectives.scheduler import Grouped
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, Padded, RowMajor
from gemmkit.layouts.structured import Triangular
from gemmkit.operators import COMPLEX, DUAL, MIN_PLUS, QUATERNION, Algebra, FPUOp, MMAOp, WMMAOp, dual
from gemmkit.plans.ahead import occupancy
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from gemmkit.tuning.operators import operator_for
from tests.support.compiling import machine_code
from tests.support.machines import MACHINES, on_machines, poison, reference, whole
from tests.support.patches import Seeded

EMULATOR = MACHINES["emulator"]
F2, F4, F8, I4 = map(np.dtype, ("f2", "f4", "f8", "i4"))
SMALL = FPUOp(16, 16)
SHAPES = [(32, 32, 128), (37, 41, 150), (1, 1, 40), (33, 5, 16), (20, 20, 1), (32, 32, 0)]     # some with fewer blocks than 4


def config(operator: Any, splits: int, a: Any = None, b: Any = None, **fields: Any) -> gk.Config:
    m, n, k = operator.shape
    given = dict(operator=operator, global_a_layout=a or RowMajor(operator.fragment_a.dtype), splits=splits, device=H100,
                 global_b_layout=b or RowMajor(operator.fragment_b.dtype),
                 global_d_layout=RowMajor(operator.fragment_c.dtype), compute_warp=Tile(M=m, N=n, K=max(4, k)),
                 block_shape=Tile(M=m, N=2 * n, K=16), warps_per_block=2)
    return gk.get_config(**{**given, **fields})


def product(machine: Any, conf: gk.Config, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, *,
            seed: int | None = None) -> np.ndarray:
    out = machine.array(poison((a.shape[0], b.shape[1]), conf.global_d_layout.dtype))
    with gk.emulate(seed) if machine.emulated else machine.session():
        gk.matmul(machine.array(a), machine.array(b), None if c is None else machine.array(c), conf, out=out)
    return np.asarray(machine.numpy(out))


@pytest.mark.sample(18)
@on_machines
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("splits", [2, 4, 8])
def test_sums_are_gathered(machine: Any, splits: int, shape: tuple, rng: np.random.Generator) -> None:
    m, n, k = shape
    a, b = whole(rng, (m, k), F4), whole(rng, (k, n), F4)
    assert np.array_equal(product(machine, config(SMALL, splits), a, b), reference(a, b))


@pytest.mark.sample(11)
@on_machines
@pytest.mark.parametrize("operator", [
    FPUOp(8, 16, dtype=F8), FPUOp(8, 16, dtype=I4), FPUOp(8, 16, dtype="i1"), FPUOp(16, 16, dtype=F2, accumulator=F4),
    FPUOp(8, 16, dtype=F2), FPUOp(8, 16, dtype="i1", accumulator="i2"), MMAOp(), MMAOp(accumulator=F2), WMMAOp(),
    WMMAOp(accumulator=F2), WMMAOp(8, 8, 4, F8, F8), WMMAOp(dtype="i1", accumulator=I4), FPUOp(4, 8)], ids=repr)
def test_other_operators(machine: Any, operator: Any, rng: np.random.Generator) -> None:
    """Accumulators of 1 to 8 bytes, several fragments a warp."""
    m, n, k = operator.shape
    dtype = operator.fragment_a.dtype
    a, b = whole(rng, (2 * m + 1, 7 * 16 + 3), dtype), whole(rng, (7 * 16 + 3, 2 * n - 1), dtype)
    conf = config(operator, 4, compute_warp=Tile(M=2 * m, N=n, K=max(4, k)), block_shape=Tile(M=2 * m, N=2 * n, K=16),
                  **({"shared_a_layout": Padded(ColMajor(dtype), 16 // dtype.itemsize)} if isinstance(operator, WMMAOp) else {}))
    if isinstance(operator, WMMAOp):
        assert conf.operator.a_order == "col"
    expected = reference(a, b).astype(operator.fragment_c.dtype)
    assert np.array_equal(product(machine, conf, a, b), expected)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("algebra", [COMPLEX, DUAL, QUATERNION], ids=["complex", "dual", "quaternion"])
def test_numbers_of_several_parts(machine: Any, algebra: Any, rng: np.random.Generator) -> None:
    operator = algebra.with_base(FPUOp(8, 8))
    dtype = algebra.number_dtype(F4)
    parts = algebra.parts
    a, b = (whole(rng, (*shape, parts), F4) for shape in ((9, 70), (70, 15)))
    table = np.array(algebra.table, F4)
    expected = np.einsum("mki,knj,ijp->mnp", a, b, table)
    conf = config(operator, 4, RowMajor(dtype), RowMajor(dtype), global_d_layout=RowMajor(dtype))
    d = product(machine, conf, *(np.ascontiguousarray(x).view(dtype)[..., 0] for x in (a, b)))
    assert np.array_equal(np.ascontiguousarray(d).view(F4).reshape(expected.shape), expected)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("k", [150, 20, 0])
def test_only_the_first_takes_c_and_finishes(machine: Any, k: int, rng: np.random.Generator) -> None:
    """C, a bias, and transforms at both ends with coordinates: once, and not once for every block."""
    a, b, c = whole(rng, (37, k), F4), whole(rng, (k, 41), F4), whole(rng, (37, 41), F4)
    bias = whole(rng, (41,), F4)
    conf = config(SMALL, 4, global_c_layout=RowMajor(F4), epilogue=Bias(machine.array(bias)) | ReLU(),
                  transform_global_to_shared_a=Map(lambda x, i, k: x + k % 2),
                  transform_shared_to_regs_c=Map(lambda x: 2 * x),
                  transform_regs_to_shared_d=Map(lambda x, i, j: x + i % 3 - j % 5))
    i, j = np.indices((37, 41))
    expected = (a + np.arange(k) % 2) @ b + 2 * c + i % 3 - j % 5 + bias
    assert np.array_equal(product(machine, conf, a, b, c), expected.clip(0))


@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("lower", [True, False])
def test_what_the_layouts_leave_of_k_is_shared(machine: Any, lower: bool, rng: np.random.Generator) -> None:
    """Of a triangle, the blocks along K that matter to a tile."""
    a, b = whole(rng, (100, 100), F4), whole(rng, (100, 20), F4)
    conf = config(SMALL, 4, Triangular(RowMajor(F4), "lower" if lower else "upper"))
    assert np.array_equal(product(machine, conf, a, b), reference(np.tril(a) if lower else np.triu(a), b))


@dataclass(frozen=True)
class EverySecond(Condition):
    """Odd blocks along K are left out."""

    def __call__(self, m: int, n: int, k: int) -> bool:
        return k // 16 % 2 == 0


@pytest.mark.kin(5)
@on_machines
def test_a_condition_still_chooses(machine: Any, rng: np.random.Generator) -> None:
    a, b = whole(rng, (20, 150), F4), whole(rng, (150, 20), F4)
    kept = np.arange(150) // 16 % 2 == 0
    d = product(machine, config(SMALL, 4, condition=EverySecond()), a, b)
    assert np.array_equal(d, reference(a[:, kept], b[kept]))


@pytest.mark.thorough
@on_machines
def test_a_semiring_merges_in_its_own_way(machine: Any, rng: np.random.Generator) -> None:
    semiring = MIN_PLUS.sized(dict(M=16, N=16, MB=4, NB=8), F4, F4, F4)
    a, b, c = whole(rng, (37, 70), F4, 9), whole(rng, (70, 41), F4, 9), whole(rng, (37, 41), F4, 9) - 12
    paths = (a[:, :, None] + b[None]).min(1)
    assert np.array_equal(product(machine, config(semiring, 4), a, b), paths)
    with_c = product(machine, config(semiring, 4, global_c_layout=RowMajor(F4)), a, b, c)
    assert np.array_equal(with_c, np.minimum(paths, c))


@pytest.mark.thorough
@on_machines
def test_of_equal_paths_the_first_is_kept(machine: Any, rng: np.random.Generator) -> None:
    """Few different lengths, so that the least k is in one block and others with the same product in the next."""
    semiring = MIN_PLUS.sized(dict(M=16, N=16, MB=4, NB=8), F4, F4, F4)
    a, b = whole(rng, (37, 70), F4, 1), whole(rng, (70, 41), F4, 1)
    a[0] = math.inf                                                 # no path leads from here
    index = machine.array(poison((37, 41), I4))
    conf = config(Selecting.of(semiring), 4, RowMajor(F4), RowMajor(F4), global_d_layout=RowMajor(F4),
                  transform_global_to_shared_a=WithIndex(), epilogue=IndexSplit(index))
    d = product(machine, conf, a, b)
    sums = a[:, :, None] + b[None]
    assert np.array_equal(d, sums.min(1))
    expected = np.where(np.isinf(sums.min(1)), -1, sums.argmin(1))
    assert np.array_equal(machine.numpy(index), expected)


@pytest.mark.kin(5)
@on_machines
def test_blocks_of_their_own_order(machine: Any, rng: np.random.Generator) -> None:
    """More tiles than one along both sides: a cluster is one tile of the order."""
    a, b = whole(rng, (60, 20), F4), whole(rng, (20, 70), F4)
    assert np.array_equal(product(machine, config(SMALL, 2, order=Grouped(2)), a, b), reference(a, b))


@pytest.mark.thorough
@on_machines
def test_the_default_for_a_long_k(machine: Any, rng: np.random.Generator) -> None:
    a, b = whole(rng, (5, 1100), F4), whole(rng, (1100, 8), F4)
    with machine.session():
        d = gk.matmul(machine.array(a), machine.array(b))
    assert default((5, 8, 1100)).splits > 1
    assert np.array_equal(machine.numpy(d), reference(a, b))


# -- rules ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Largest(FPUOp):
    identity = start = -math.inf

    def multiply(self, a: Any, b: Any) -> Any:
        return a + b

    def combine(self, c: Any, product: Any) -> Any:
        return max(c, product)


@dataclass(frozen=True)
class LargestOfParts(Largest):
    merges = True


@pytest.mark.parametrize("operator, splits, said", [
    (SMALL, 3, "splits=3: .* one of 1, 2, 4, 8"), (SMALL, 16, "one of 1, 2, 4, 8"), (SMALL, 0, "positive"),
    (Largest(16, 16), 2, "splits=2: with Largest.*combine must be associative, and start its neutral element.*set merges = True"),
    (FPUOp(4, 8, dtype="i1"), 2, "holds 1 numbers of 1 bytes"),
    (dual(2).with_base(FPUOp(8, 8)), 2, "numbers of 12 bytes")], ids=repr)
def test_rules(operator: Any, splits: int, said: str) -> None:
    with pytest.raises(gk.ConfigError, match=said):
        config(operator, splits)


def test_clusters_need_compute_capability_9() -> None:
    older = dataclasses.replace(H100, arch=(8, 0), name="an older GPU")
    with pytest.raises(gk.ConfigError, match=r"splits=2: .* compute capability 9\.0, and an older GPU has 8\.0"):
        config(SMALL, 2, device=older)
    sizes = 360, 372, 133920
    operator = operator_for(F4, F4, sizes, older)
    conf = gk.get_config(operator=operator, global_a_layout=RowMajor(F4), gemm_shape=dict(zip("MNK", sizes)), device=older)
    assert conf.splits == 1


@pytest.mark.kin(5)
@on_machines
def test_an_operator_may_say_that_it_merges(machine: Any, rng: np.random.Generator) -> None:
    a, b = whole(rng, (20, 70), F4), whole(rng, (70, 20), F4)
    expected = (a[:, :, None] + b[None]).max(1)
    assert np.array_equal(product(machine, config(LargestOfParts(16, 16), 4), a, b), expected)


# -- what is chosen ---------------------------------------------------------------------------------------------------

def default(sizes: tuple, dtype: Any = F4, **fields: Any) -> gk.Config:
    dtype = np.dtype(dtype)
    fields.setdefault("operator", operator_for(dtype, dtype, sizes, H100))
    return gk.get_config(global_a_layout=RowMajor(dtype), gemm_shape=dict(zip("MNK", sizes)), device=H100, **fields)


@pytest.mark.parametrize("sizes, dtype", [((360, 372, 133920), F4), ((360, 372, 133920), F8), ((64, 64, 9000), "i4"),
                                          ((256, 256, 16384), F2)], ids=str)
def test_few_tiles_and_a_long_k_are_split(sizes: tuple, dtype: Any) -> None:
    conf = default(sizes, dtype)
    assert conf.splits > 1 and conf.kernel == "singlestage"
    M, N, K = sizes
    blocks = conf.spec().blocks(M, N, H100.sm_count)
    rows, columns = conf.spec().scheduler.tiles(M, N)
    assert blocks == rows * columns * conf.splits
    assert K // conf.splits >= 16 * conf.block_shape.size.K


@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (8192, 8192, 64), (360, 372, 500), (20, 20, 0)], ids=str)
def test_others_are_not(sizes: tuple) -> None:
    assert default(sizes).splits == 1


def test_what_is_given_of_a_mapping_is_kept() -> None:
    sizes = 360, 372, 133920
    assert default(sizes, block_shape=Tile(M=64, N=64, K=32), operator=SMALL).splits == 1
    assert default(sizes, operator=Largest(16, 16)).splits == 1
    assert default(sizes, operator=LargestOfParts(16, 16)).splits > 1
    assert default(sizes, splits=2).splits == 2
    assert default(sizes, operator=Algebra(SMALL, COMPLEX), dtype="c8").splits == 1


# -- faults -----------------------------------------------------------------------------------------------------------

def skipping(which: int) -> Any:
    """`cluster_barrier`, but that every thread goes on when it comes for the ``which``-th time."""
    real, calls = simt.cluster_barrier, {}

    def partly() -> None:
        thread = machine.current()
        calls[thread] = calls.get(thread, -1) + 1
        if calls[thread] != which:
            real()

    return partly


@pytest.mark.kin(5)
@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("which, error", [
    (0, (errors.UninitialisedRead, errors.RaceError)), (1, errors.ProtocolError)], ids=["before", "after"])
def test_blocks_that_do_not_meet_are_found(which: int, error: Any, seed: int | None, seeded: Seeded,
                                           rng: np.random.Generator) -> None:
    a, b = whole(rng, (10, 70), F4), whole(rng, (70, 10), F4)
    conf = config(SMALL, 2)
    assert np.array_equal(product(EMULATOR, conf, a, b, seed=seed), reference(a, b))
    seeded(simt, "cluster_barrier", skipping(which))
    with pytest.raises(error):
        product(EMULATOR, conf, a, b, seed=seed)


# -- the machine code -------------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(6)
@pytest.mark.compile
@pytest.mark.parametrize("sizes, dtype", [((360, 372, 133920), F4), ((360, 372, 133920), F8), ((256, 256, 16384), F2)], ids=str)
@pytest.mark.parametrize("is_whole", [True, False])
def test_sums_take_no_registers_from_the_loop(sizes: tuple, dtype: np.dtype, is_whole: bool) -> None:
    """Nothing spills, sums come in 16 bytes, and as many blocks fit a multiprocessor as the choice counts on."""
    conf = default(sizes, dtype)
    code = machine_code(conf, whole=is_whole)
    assert (code.usage.spill_stores, code.usage.stack_bytes) == (0, 0)
    assert code.count("LD") == code.count("LD", "128") > 0
    fit = occupancy(code.usage.registers, conf.threads, conf.spec().shared_bytes, H100)
    assert fit.blocks * H100.sm_count >= conf.spec().blocks(*sizes[:2], H100.sm_count)


@pytest.mark.kin(5)
@pytest.mark.compile
def test_a_block_alone_has_nothing_of_it() -> None:
    code = machine_code(default((4096, 4096, 4096)))
    assert not any(code.count(opcode) for opcode in ("LD", "UCGABAR_ARV", "UCGABAR_WAIT", "MEMBAR", "CCTL"))
    assert "cluster" not in code.ptx
