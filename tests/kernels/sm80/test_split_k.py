"""Blocks that share the K of a tile by a workspace, in equal shares or as Stream-K deals them: sums are right, the same in
every run, and met in order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.epilogues import Bias, ReLU
from gemmkit.kernels.collectives import scheduler, split_k
from gemmkit.kernels.collectives.scheduler import Cluster, Columns, OneTilePerBlock
from gemmkit.kernels.collectives.split_k import (
    SlicedSums,
    StreamedScheduler,
    StreamedSums,
    StreamK,
    WorkspaceSums,
    division,
    reduction_of,
)
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, RowMajor, Triangular
from gemmkit.operators import COMPLEX, MIN_PLUS, FPUOp, MMAOp
from gemmkit.plans.ahead import compile_config
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from gemmkit.tuning import sm80
from gemmkit.tuning.model import ENOUGH, Asked, shares_to_try
from tests.support.machines import on_machines, poison, whole
from tests.support.patches import Seeded
from tests.support.sm80 import KINDS, expected, mapping, operands

# ==========================================================================================================================
# Blocks that share the K of a tile by a workspace in memory: sums are right, the same in every run, and met in order.
#
# Values are small whole numbers where a result is compared bit for bit, so that every order of sums gives the same; the order itself
# is tested with numbers that round.

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")


def mapped(splits: int, operator: Any = None, **fields: Any) -> Any:
    operator = operator or MMAOp()
    dtype = operator.fragment_a.dtype
    tiles = dict(block_shape=Tile(M=16, N=16, K=32), stages=2)
    return gk.get_config(**{**dict(operator=operator, global_a_layout=RowMajor(dtype), kernel="multistage", splits=splits,
                                   global_d_layout=RowMajor(operator.fragment_c.dtype)), **tiles, **fields})


def product(machine: Any, conf: Any, a: np.ndarray, b: np.ndarray, c: Any = None, seed: int | None = None,
            **fields: Any) -> np.ndarray:
    out = machine.array(poison((*a.shape[:-1], b.shape[-1]), conf.global_d_layout.dtype))
    with gk.emulate(seed) if machine.emulated else machine.session():
        gk.matmul(machine.array(a), machine.array(b), None if c is None else machine.array(c), conf, out=out, **fields)
    return np.asarray(machine.numpy(out))


def planned(conf: Any, m: int = 16, n: int = 16, k: int = 96) -> Any:
    a, b = np.zeros((m, k), conf.global_a_layout.dtype), np.zeros((k, n), conf.global_b_layout.dtype)
    with gk.emulate():
        return gk.plan(a, b, None, conf)


# -- results ----------------------------------------------------------------------------------------------------------

SHAPES = [(16, 16, 512), (17, 19, 331), (1, 1, 97), (33, 16, 32), (5, 40, 1), (16, 16, 0), (0, 7, 64)]


@pytest.mark.sample(35)
@on_machines
@pytest.mark.parametrize("splits", [2, 3, 7, 8, 13])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_shares(machine: Any, splits: int, shape: tuple, rng: np.random.Generator) -> None:
    """Shares of k-tiles that do not divide, more shares than k-tiles, few shares (the last sums) and many (all do)."""
    m, n, k = shape
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    assert np.array_equal(product(machine, mapped(splits), a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("splits", [3, 9])
@pytest.mark.parametrize("operator", [FPUOp(16, 16), FPUOp(16, 16, dtype=F64), MMAOp(accumulator=F16)], ids=["f32", "f64", "f16"])
def test_operators(machine: Any, splits: int, operator: Any, rng: np.random.Generator) -> None:
    dtype = operator.fragment_a.dtype
    a, b = whole(rng, (17, 140), dtype, 1), whole(rng, (140, 16), dtype, 1)
    assert np.array_equal(product(machine, mapped(splits, operator), a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("splits", [3, 9])
def test_semirings(machine: Any, splits: int, rng: np.random.Generator) -> None:
    a, b = whole(rng, (17, 100), F32), whole(rng, (100, 16), F32)
    conf = gk.get_config(operator=MIN_PLUS, global_a_layout=RowMajor(F32), kernel="multistage", splits=splits,
                         gemm_shape=dict(M=17, N=16, K=100))
    assert np.array_equal(product(machine, conf, a, b), (a[:, :, None] + b[None]).min(1))


@pytest.mark.kin(5)
@pytest.mark.sample(2, at=0)
@on_machines
@pytest.mark.parametrize("splits", [3, 9])
def test_complex_numbers(machine: Any, splits: int, rng: np.random.Generator) -> None:
    a, b = whole(rng, (17, 100), F32), whole(rng, (100, 16), F32)
    u, v = (a + 1j * a[::-1]).astype("c8"), (b - 2j * b[:, ::-1]).astype("c8")
    conf = gk.get_config(operator=COMPLEX, global_a_layout=RowMajor("c8"), kernel="multistage", splits=splits,
                         gemm_shape=dict(M=17, N=16, K=100))
    assert np.array_equal(product(machine, conf, u, v), u @ v)


@pytest.mark.kin(5)
@on_machines
def test_c_and_the_epilogue_count_once(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = whole(rng, (20, 200), F16), whole(rng, (200, 18), F16), whole(rng, (20, 18), F32)
    bias = whole(rng, (18,), F32)
    expected = np.maximum(a.astype(F64) @ b.astype(F64) + c + bias, 0)
    for splits in (3, 9):
        conf = mapped(splits, global_c_layout=RowMajor(F32), epilogue=Bias(machine.array(bias)) | ReLU())
        assert np.array_equal(product(machine, conf, a, b, c), expected)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("splits", [2, 9])
def test_stacks(machine: Any, splits: int, rng: np.random.Generator) -> None:
    a, b = whole(rng, (3, 17, 100), F16), whole(rng, (3, 100, 18), F16)
    assert np.array_equal(product(machine, mapped(splits), a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("splits", [3, 11])
def test_the_same_bits_in_every_run(machine: Any, splits: int, rng: np.random.Generator) -> None:
    """Whatever order blocks come in (in the emulator, shuffled)."""
    a, b = rng.standard_normal((16, 700)).astype(F16), rng.standard_normal((700, 16)).astype(F16)
    conf, found = mapped(splits), set()
    for seed in range(3 if machine.emulated else 50):
        found.add(product(machine, conf, a, b, seed=seed).tobytes())
    assert len(found) == 1


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("splits", [3, 9])
def test_counters_are_ready_for_the_next_launch(machine: Any, splits: int, rng: np.random.Generator) -> None:
    """One plan, launched again; and another plan of other sizes in between, which finds the same workspace."""
    shapes = [(16, 16, 300), (24, 20, 200)]
    with machine.session():
        runs = []
        for m, n, k in shapes:
            a, b = machine.array(whole(rng, (m, k), F16)), machine.array(whole(rng, (k, n), F16))
            runs.append((gk.plan(a, b, None, mapped(splits)), a, b))
        for _ in range(2):
            for run, a, b in runs:
                expected = machine.numpy(a).astype(F64) @ machine.numpy(b).astype(F64)
                assert np.array_equal(machine.numpy(run(a, b)), expected)
        if machine.emulated:
            for run, _, _ in runs:
                assert not run._compiled.spec_on_host.reduction.counts.any()


# -- which kind, and what is refused -------------------------------------------------------------------------------------

def test_blocks_wait_only_where_all_are_resident() -> None:
    spec = mapped(4).spec()
    assert type(reduction_of(spec, 4, 1, 132)) is WorkspaceSums
    assert type(reduction_of(spec, 132, 1, 132)) is SlicedSums
    assert type(reduction_of(spec, 133, 1, 132)) is WorkspaceSums
    assert type(reduction_of(spec, 16, 9, 132)) is WorkspaceSums
    compiled = planned(mapped(16))._compiled
    assert compiled.launchable.waits and compiled.launchable.cluster == 1 and compiled.blocks == 16


def test_shares_differ_by_one_k_tile() -> None:
    for count in (0, 1, 5, 16, 17):
        for splits in (1, 2, 3, 7, 20):
            sums = WorkspaceSums(splits, np.zeros(1, F32), np.zeros(1, "u4"))
            found = [sums.share(count, rank) for rank in range(splits)]
            assert [first for first, _ in found] == [sum(n for _, n in found[:r]) for r in range(splits)]
            assert sum(n for _, n in found) == count and max(n for _, n in found) - min(n for _, n in found) <= 1


def test_rules() -> None:
    with pytest.raises(gk.ConfigError, match=r"splits=0: a positive number"):
        mapped(0)
    with pytest.raises(gk.ConfigError, match=r"splits=3: blocks of a cluster"):
        gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), splits=3)
    from dataclasses import replace

    old = replace(H100, arch=(8, 0), name="an A100")
    assert mapped(5, device=old).splits == 5
    with pytest.raises(gk.ConfigError, match="splits=2.*compute capability 9.0"):
        gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), splits=2, device=old)
    with pytest.raises(ValueError, match=r"splits=100000000: .*less than 2\*\*31"):
        planned(mapped(100_000_000))


def test_an_operator_that_cannot_merge() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Last(FPUOp):
        """Its sum is its last term."""

        def combine(self, x: Any, y: Any) -> Any:
            return y

    with pytest.raises(gk.ConfigError, match="splits=3"):
        mapped(3, Last(16, 16), global_b_layout=ColMajor(F32))


@pytest.mark.parametrize("dtype, shape, expected", [
    ("f4", (64, 64, 65536), True), ("f4", (4096, 64, 4096), True), ("c8", (256, 256, 8192), True), ("c8", (1024, 1024, 1024), False), ("f8", (64, 64, 8192), True),
    ("f4", (4096, 4096, 4096), False), ("f8", (1024, 1024, 1024), False), ("f4", (64, 64, 64), False), ("f4", (0, 64, 4096), False),
])
def test_products_of_few_tiles_and_a_long_k_are_split(dtype: str, shape: tuple, expected: bool) -> None:
    layout = RowMajor(dtype)
    found = sm80.propose(Asked({}, dict(a=layout, b=layout, c=None, d=None), shape, {}), H100)
    assert found is not None and (found[1]["splits"] > 1) == expected


def test_the_choice_of_shares_reaches_a_plan() -> None:
    a, b = np.ones((64, 4096), "f4"), np.ones((4096, 64), "f4")
    with gk.emulate(mapping="device"):
        made = gk.plan(a, b)
    assert made.config.kernel == "multistage" and made.config.splits > 1


def test_shares_have_k_tiles_to_multiply() -> None:
    for tiles in (0, 1, 2, 7, 100, 1000):
        for k_tiles in (0, 1, 16, 63, 4096):
            found = shares_to_try(tiles, k_tiles, 132, 4)
            assert found[0] == 1 and all(n == 1 or n * ENOUGH <= k_tiles for n in found)


# -- seeded faults: the emulator finds what orders the sums -----------------------------------------------------------

def run_small(splits: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    a, b = whole(rng, (16, 300), F16), whole(rng, (300, 16), F16)
    with gk.emulate():
        d = gk.matmul(a, b, None, mapped(splits, warps_per_block=1))
    return np.asarray(d - a.astype(F64) @ b.astype(F64))


def ordered(order: dict[str, str]) -> Any:
    real = split_k.atomic_add
    return lambda view, at, number, how: real(view, at, number, order.get(how, how))


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@pytest.mark.parametrize("splits", [3, 9])
@pytest.mark.parametrize("order", [{"acq_rel": "release"}, {"acq_rel": "acquire"}, {"acq_rel": "relaxed"}], ids=str)
def test_a_count_that_orders_too_little(splits: int, order: dict[str, str], seeded: Seeded) -> None:
    assert not run_small(splits).any()
    seeded(split_k, "atomic_add", ordered(order))
    with pytest.raises(errors.RaceError, match="sums"):
        run_small(splits)


def test_arrivals_that_release_nothing(seeded: Seeded) -> None:
    seeded(split_k, "atomic_add", ordered({"release": "relaxed"}))
    with pytest.raises(errors.RaceError, match="sums"):
        run_small(9)


def test_a_wait_that_acquires_nothing(seeded: Seeded) -> None:
    real = split_k.await_counter
    seeded(split_k, "await_counter", lambda view, at, n, how: real(view, at, n, "relaxed"))
    with pytest.raises(errors.RaceError, match="sums"):
        run_small(9)


def test_nobody_waits(seeded: Seeded) -> None:
    seeded(split_k, "await_counter", lambda view, at, n, how: None)
    with pytest.raises((errors.RaceError, errors.UninitialisedRead), match="sums"):
        run_small(9)


def test_what_stops_a_launch_is_no_fault_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    conf = mapped(9, warps_per_block=1)
    a, b = np.ones((16, 300), F16), np.ones((300, 16), F16)
    with gk.emulate():
        plan = gk.plan(a, b, None, conf)
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(split_k, "await_counter", lambda view, at, n, how: None)
                with pytest.raises((errors.RaceError, errors.UninitialisedRead)):
                    plan(a, b)
            assert (plan(a, b) == 300).all()


def test_a_block_that_is_not_counted(seeded: Seeded) -> None:
    real = split_k.await_counter
    seeded(split_k, "await_counter", lambda view, at, n, how: real(view, at, n + 1, how))
    with pytest.raises(errors.DeadlockError, match="counter that is 9 to become 10"):
        run_small(9)


@pytest.mark.parametrize("splits", [3, 9])
def test_every_barrier_matters(splits: int, seeded: Seeded) -> None:
    """In a block of two warps, the first barriers of `gather` (those behind have nothing more to order than the next)."""
    from gemmkit.emulator import machine

    def conf_run() -> None:
        rng = np.random.default_rng(3)
        a, b = whole(rng, (32, 300), F16), whole(rng, (300, 16), F16)
        with gk.emulate(1):
            gk.matmul(a, b, None, mapped(splits, block_shape=Tile(M=32, N=16, K=32), compute_warp=Tile(M=16, N=16, K=32)))

    real = split_k.barrier
    for which in range(2):
        arrivals: dict[Any, int] = {}

        def barrier(which: int = which, arrivals: dict[Any, int] = arrivals) -> None:
            thread = machine.current()
            arrivals[thread] = arrivals.get(thread, -1) + 1
            if arrivals[thread] != which:
                real()

        seeded(split_k, "barrier", barrier)
        with pytest.raises((errors.RaceError, errors.UninitialisedRead)):
            conf_run()


# -- compiled ---------------------------------------------------------------------------------------------------------

@pytest.mark.thorough
@pytest.mark.sample(2)
@pytest.mark.compile
@pytest.mark.parametrize("splits, atomics", [(4, {"ATOMG": 1}), (128, {"ATOMG": 1, "REDG": 1})])
def test_code(splits: int, atomics: dict[str, int]) -> None:
    """No spill, vectors of 16 bytes to the workspace and back, one atomic of a thread for each time blocks meet."""
    conf = mapped(splits, block_shape=Tile(M=64, N=64, K=64), stages=3)
    found = compile_config(conf, gemm_shape=dict(M=64, N=64, K=65536))
    assert found.usage.spill_stores == found.usage.spill_loads == found.usage.stack_bytes == 0
    assert {name: found.instructions[name] for name in atomics} == atomics
    assert "LDG.E.128" in found.sass and "STG.E.128" in found.sass


@pytest.mark.compile
def test_another_number_of_shares_compiles_nothing() -> None:
    kinds = [planned(mapped(n), k=4096)._compiled.arguments[0].fingerprint for n in (2, 5)]
    assert kinds[0] == kinds[1]


# ==========================================================================================================================
# Shares of K in the multistage kernel's mappings, compiled without a GPU: where they are chosen, nothing spills.

STREAMING = [(code, n) for code in ("f4", "f8")
             for n, one in enumerate(sm80.TABLES[np.dtype(code)]) if one.merges and one.streams]
MERGING = [(code, n) for code in ("f4", "f8", "c8", "c16")
           for n, one in enumerate(sm80.TABLES[np.dtype(code)]) if one.merges]


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.sample(120)
@pytest.mark.parametrize("shape", [(64, 64, 8192), (67, 63, 8191)], ids=str)
@pytest.mark.parametrize("splits", [2, 40])
@pytest.mark.parametrize("order", ["nn", "nt"])
@pytest.mark.parametrize("code, n", MERGING)
def test_nothing_spills(code: str, n: int, order: str, splits: int, shape: tuple[int, int, int]) -> None:
    check_spills(code, n, order, splits, shape)


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.sample(72)
@pytest.mark.parametrize("shape", [(1536, 1536, 1536), (1531, 1533, 1537)], ids=str)
@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("code, n", STREAMING)
def test_nothing_spills_where_k_is_streamed(code: str, n: int, order: str, shape: tuple[int, int, int]) -> None:
    check_spills(code, n, order, gk.kernels.StreamK(), shape)


def check_spills(code: str, n: int, order: str, splits: Any, shape: tuple[int, int, int]) -> None:
    dtype, sizes = np.dtype(code), dict(zip("MNK", shape))
    one: Any = sm80.TABLES[dtype][n]
    a, b = (RowMajor(dtype) if o == "n" else ColMajor(dtype) for o in order)
    conf = gk.get_config(operator=sm80.operator(dtype, one, H100), global_a_layout=a, global_b_layout=b,
                         global_d_layout=RowMajor(dtype), device=H100, gemm_shape=sizes, splits=splits, **one.fields)
    usage = compile_config(conf, device=H100, gemm_shape=sizes).usage
    assert (usage.spill_stores, usage.spill_loads, usage.stack_bytes) == (0, 0, 0)


@pytest.mark.compile
def test_a_mapping_without_registers_for_it_is_not_shared() -> None:
    for table in sm80.TABLES.values():
        for one in table:
            if not one.merges:
                assert one.splits((64, 64, 65536), 1, 0, H100.sm_count) == 1


# ==========================================================================================================================
# Stream-K: k-tiles dealt evenly to blocks that stay. Sums are right, the same in every run, and met in order.
#
# Values are small whole numbers where a result is compared bit for bit, so that every order of sums gives the same.

ORDERS = {"n": RowMajor, "t": ColMajor}


def mapped_by_stream_k(blocks: int | None, waves: int = 2, operator: Any = None, **fields: Any) -> Any:
    operator = operator or MMAOp()
    dtype = operator.fragment_a.dtype
    given = dict(operator=operator, global_a_layout=RowMajor(dtype), kernel="multistage", splits=StreamK(blocks, waves),
                 global_d_layout=RowMajor(operator.fragment_c.dtype), block_shape=Tile(M=16, N=16, K=32), stages=2)
    return gk.get_config(**{**given, **fields})


# -- who has which k-tiles --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 7, 40])
@pytest.mark.parametrize("tiles, steps", [(1, 1), (1, 9), (3, 5), (4, 4), (9, 3), (23, 2), (8, 1)])
def test_every_k_tile_is_once_and_who_waits_comes_behind(blocks: int, waves: int, tiles: int, steps: int, seeded: Seeded) -> None:
    """Each k-tile is one block's; a block hands over first of all; who finishes a tile finds the others' sums by number."""
    launched, first = division(tiles, steps, blocks, waves)
    at = {}
    seeded(scheduler, "block_x", lambda: at["block"])
    reduction = StreamedSums(1, np.zeros(1, F32), np.zeros(1, "u4"))
    cluster = Cluster(2, 2) if tiles % 2 else Cluster()                      # of which any block has the cluster's parts
    whole = OneTilePerBlock(Columns(), Tile(M=16, N=16, K=32), cluster)
    one = StreamedScheduler.of(whole, reduction, tiles, steps, first, launched)
    found, shares = [], []
    for block in range(launched):
        at["block"], begin, parts = block * cluster.size + block % cluster.size, None, []
        begin = one.begin()
        while begin < one.end(None):
            part = replace(one, at=begin)
            parts.append((part.first(), part.rank(), part.length()))
            begin = one.following(begin, one.step())
        assert all(rank == 0 for _, rank, _ in parts[1:])
        found += [(tile, rank + k) for tile, rank, count in parts for k in range(count)]
        shares.append(sum(count for tile, _, count in parts if tile < first))
    assert sorted(found) == [(tile, k) for tile in range(tiles) for k in range(steps)]
    assert max(shares) - min(shares) <= 1 and (first == 0 or waves == 1 or tiles < launched or min(shares) >= steps)


def test_the_division() -> None:
    assert division(0, 8, 132) == (0, 0) and division(132, 8, 132) == (132, 0)
    assert division(136, 8, 132) == (132, 136) and division(136, 8, 132, waves=1) == (132, 4)
    assert division(300, 8, 132) == (132, 168)                               # 36 more than a wave, and a wave with them
    assert division(2, 8, 132, least=4) == (4, 2) and division(2, 8, 132) == (16, 2)


# -- results ----------------------------------------------------------------------------------------------------------

SHAPES_STREAM_K = [(48, 48, 160), (17, 19, 331), (16, 16, 512), (1, 1, 97), (80, 16, 96), (33, 16, 32), (33, 16, 1), (33, 16, 0), (0, 7, 64)]


@pytest.mark.kin(5)
@pytest.mark.sample(72)
@on_machines
@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2, 4, 7])
@pytest.mark.parametrize("shape", SHAPES_STREAM_K, ids=str)
def test_any_number_of_blocks(machine: Any, blocks: int, waves: int, shape: tuple, rng: np.random.Generator) -> None:
    """Blocks that divide nothing, one tile, fewer tiles than blocks, more blocks than k-tiles."""
    m, n, k = shape
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    assert np.array_equal(product(machine, mapped_by_stream_k(blocks, waves), a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("orders", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("operator", [FPUOp(16, 16), FPUOp(16, 16, dtype=F64), MMAOp(dtype=F64), MMAOp(accumulator=F16), MMAOp(dtype="i1")],
                         ids=["f32", "f64", "dmma", "f16", "s8"])
def test_operators_by_stream_k(machine: Any, operator: Any, orders: str, rng: np.random.Generator) -> None:
    dtype = operator.fragment_a.dtype
    a, b = whole(rng, (33, 140), dtype, 1), whole(rng, (140, 16), dtype, 1)
    conf = mapped_by_stream_k(4, operator=operator, global_a_layout=ORDERS[orders[0]](dtype), global_b_layout=ORDERS[orders[1]](dtype))
    a, b = (x if order == "n" else np.asfortranarray(x) for x, order in zip((a, b), orders))
    assert np.array_equal(product(machine, conf, a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("kind", ["min-plus", "c64", "c128"])
def test_semirings_and_complex_numbers(machine: Any, kind: str, rng: np.random.Generator) -> None:
    a, b = whole(rng, (17, 70), F32), whole(rng, (70, 16), F32)
    if kind == "min-plus":
        conf = mapped_by_stream_k(3, operator=replace(MIN_PLUS, M=16, N=16, MB=8, NB=4))
        assert np.array_equal(product(machine, conf, a, b), (a[:, :, None] + b[None]).min(1))
        return
    operator = KINDS[kind]
    u, v = operands(rng, operator, 17, 16, 70)
    assert np.array_equal(product(machine, mapping(operator, splits=StreamK(3)), u, v), expected(operator, u, v))


@pytest.mark.kin(5)
@on_machines
def test_c_and_the_epilogue_count_once_by_stream_k(machine: Any, rng: np.random.Generator) -> None:
    """And transforms see the coordinates that they would; operands are views."""
    a, b, c = whole(rng, (20, 200), F16), whole(rng, (200, 34), F16), whole(rng, (20, 34), F32)
    bias = whole(rng, (34,), F32)
    result = np.maximum((a * np.arange(20)[:, None]).astype(F64) @ b.astype(F64) + c + bias, 0)
    conf = mapped_by_stream_k(3, global_c_layout=RowMajor(F32), epilogue=Bias(machine.array(bias)) | ReLU(),
                  transform_shared_to_regs_a=Map(lambda x, i, k: x * i))
    assert np.array_equal(product(machine, conf, a, b, c), result)
    wide = machine.array(np.repeat(b, 2, axis=1))
    out = machine.array(poison((40, 34), F32))
    with machine.session():
        gk.matmul(machine.array(a), wide[:, ::2], None, mapped_by_stream_k(3), out=out[::2])
    assert np.array_equal(machine.numpy(out)[::2], a.astype(F64) @ b.astype(F64)) and np.isnan(machine.numpy(out)[1::2]).all()


@dataclass(frozen=True)
class Nearby(Condition):
    """Leaves out k-tiles that lie far from the diagonal."""

    def __call__(self, m: Any, n: Any, k: Any) -> Any:
        return abs(m - k) < 64


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("blocks", [2, 5])
def test_stacks_by_stream_k(machine: Any, blocks: int, rng: np.random.Generator) -> None:
    """Tiles of several products share one stream."""
    a, b = whole(rng, (3, 17, 70), F16), whole(rng, (3, 70, 18), F16)
    assert np.array_equal(product(machine, mapped_by_stream_k(blocks), a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@on_machines
def test_structure(machine: Any, rng: np.random.Generator) -> None:
    """Where k-tiles are left out shares are not equal, and sums are right."""
    a, b = whole(rng, (100, 100), F16), whole(rng, (100, 16), F16)
    conf = mapped_by_stream_k(5, global_a_layout=Triangular(RowMajor(F16)), global_b_layout=RowMajor(F16))
    assert np.array_equal(product(machine, conf, a, b), np.tril(a).astype(F64) @ b.astype(F64))
    kept = np.array([[abs(m // 16 * 16 - k // 32 * 32) < 64 for k in range(100)] for m in range(100)])
    assert np.array_equal(product(machine, mapped_by_stream_k(5, condition=Nearby()), a, b), (a * kept).astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@on_machines
def test_the_same_bits_in_every_run_by_stream_k(machine: Any, rng: np.random.Generator) -> None:
    """Whatever order blocks come in (in the emulator, shuffled)."""
    a, b = rng.standard_normal((48, 400)).astype(F16), rng.standard_normal((400, 16)).astype(F16)
    found = {product(machine, mapped_by_stream_k(7), a, b, seed=seed).tobytes() for seed in range(3 if machine.emulated else 50)}
    assert len(found) == 1


@pytest.mark.kin(5)
@on_machines
def test_counters_are_ready_for_the_next_launch_by_stream_k(machine: Any, rng: np.random.Generator) -> None:
    with machine.session():
        runs = []
        for m, n, k in [(16, 16, 300), (24, 20, 100)]:
            a, b = machine.array(whole(rng, (m, k), F16)), machine.array(whole(rng, (k, n), F16))
            runs.append((gk.plan(a, b, None, mapped_by_stream_k(4)), a, b))
        for _ in range(2):
            for run, a, b in runs:
                assert np.array_equal(machine.numpy(run(a, b)), machine.numpy(a).astype(F64) @ machine.numpy(b).astype(F64))
        if machine.emulated:
            for run, _, _ in runs:
                assert not run._compiled.spec_on_host.reduction.counts.any()


# -- what is launched, and what is refused ------------------------------------------------------------------------------

def planned_by_stream_k(conf: Any, m: int = 16, n: int = 16, k: int = 96) -> Any:
    a, b = np.zeros((m, k), conf.global_a_layout.dtype), np.zeros((k, n), conf.global_b_layout.dtype)
    with gk.emulate():
        return gk.plan(a, b, None, conf)._compiled


def test_blocks_wait_and_are_as_many_as_are_resident() -> None:
    found = planned_by_stream_k(mapped_by_stream_k(None, blocks_per_sm=2), 1024, 1024)
    assert found.launchable.waits and not found.launchable.dependent and found.blocks == 2 * H100.sm_count
    assert planned_by_stream_k(mapped_by_stream_k(None), 16, 16, 32 * 40).blocks == 10                       # shares of four k-tiles
    assert planned_by_stream_k(mapped_by_stream_k(3), 16, 16, 32 * 40).blocks == 3
    kinds = [planned_by_stream_k(mapped_by_stream_k(n), k=k).arguments[0].fingerprint for n, k in ((2, 64), (5, 640))]
    assert kinds[0] == kinds[1]                                                      # another number compiles nothing


def test_rules_by_stream_k() -> None:
    for bad in (0, -1, 1.5, True, "4"):
        with pytest.raises(ValueError, match=r"StreamK\(blocks="):
            StreamK(bad)                                                             # type: ignore[arg-type]
    for bad in (0, 3, None):
        with pytest.raises(ValueError, match=r"StreamK\(.*waves="):
            StreamK(2, bad)                                                          # type: ignore[arg-type]
    with pytest.raises(gk.ConfigError, match=r"splits=StreamK\(.*multistage"):
        gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), kernel="singlestage", splits=StreamK())
    with pytest.raises(gk.ConfigError, match=r"splits=StreamK\(blocks=100000.*use fewer blocks"):
        planned_by_stream_k(mapped_by_stream_k(100_000))
    with pytest.raises(gk.ConfigError, match="splits=.*the tiles of a group"), gk.emulate():
        gk.grouped([np.ones((4, 4), F16)], [np.ones((4, 4), F16)], conf=mapped_by_stream_k(3))

    @dataclass(frozen=True)
    class Last(FPUOp):
        """Its sum is its last term."""

        def combine(self, x: Any, y: Any) -> Any:
            return y

    with pytest.raises(gk.ConfigError, match="splits=StreamK"):
        mapped_by_stream_k(3, operator=Last(16, 16))


def chosen(dtype: Any, sizes: tuple[int, int, int], **fields: Any) -> Any:
    layout = fields.pop("layout", RowMajor(dtype))
    found = sm80.propose(Asked({}, dict(a=layout, b=RowMajor(dtype), c=None, d=None), sizes, fields), H100)
    assert found is not None
    return found[1]["splits"]


def test_where_it_is_chosen() -> None:
    """Where the last wave is nearly empty: 1536^3 measured 1.17 of cuBLAS streamed and 0.95 without (f32). Of float64, whose
    tiles of 96 rows fill the waves of 1536^3, 1672 x 984 x 2944 took 201 us streamed."""
    assert isinstance(chosen(F32, (1536, 1536, 1536)), StreamK)
    assert isinstance(chosen(F64, (1672, 984, 2944)), StreamK)
    for dtype in (F32, F64):
        assert chosen(dtype, (4096, 4096, 4096)) == chosen(dtype, (2048, 2048, 2048)) == 1       # whole waves
        assert not isinstance(chosen(dtype, (64, 64, 65536)), StreamK)                           # one tile: shares
    assert chosen(np.dtype(np.complex128), (1536, 1536, 1536)) == 1                              # no faster: not in the list


def test_operands_that_leave_k_tiles_out_are_not_streamed() -> None:
    """Shares are dealt as if all k-tiles took as long."""
    sizes = (1536, 1536, 1536)
    assert chosen(F32, sizes, layout=Triangular(RowMajor(F32), "lower")) == 1
    assert chosen(F32, sizes, transform_global_to_shared_a=Map(lambda x: x + 1)) == 1


# -- seeded faults ------------------------------------------------------------------------------------------------------

def run_small_by_stream_k() -> np.ndarray:
    rng = np.random.default_rng(3)
    a, b = whole(rng, (32, 200), F16), whole(rng, (200, 16), F16)
    with gk.emulate():
        d = gk.matmul(a, b, None, mapped_by_stream_k(5, warps_per_block=1))
    return np.asarray(d - a.astype(F64) @ b.astype(F64))


FAULTS: dict[str, tuple[str, Any, Any]] = {
    "a signal dropped": ("atomic_add", lambda real: lambda *given: 0, errors.DeadlockError),
    "a signal that releases nothing": ("atomic_add", lambda real: lambda view, at, n, how: real(view, at, n, "relaxed"), errors.RaceError),
    "a wait dropped": ("await_counter", lambda real: lambda *given: None, (errors.RaceError, errors.UninitialisedRead)),
    "a wait that acquires nothing": ("await_counter", lambda real: lambda view, at, n, how: real(view, at, n, "relaxed"),
                                     errors.RaceError),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults(what: str, seeded: Seeded) -> None:
    assert not run_small_by_stream_k().any()
    name, wrong, error = FAULTS[what]
    seeded(split_k, name, wrong(getattr(split_k, name)))
    with pytest.raises(error):
        run_small_by_stream_k()


def test_counters_that_are_not_set_back(seeded: Seeded) -> None:
    """The next launch would not wait."""
    seeded(split_k, "set_counter", lambda *given: None)
    a, b = np.ones((32, 200), F16), np.ones((200, 16), F16)
    with gk.emulate(), pytest.raises((errors.RaceError, errors.UninitialisedRead)):
        run = gk.plan(a, b, None, mapped_by_stream_k(5, warps_per_block=1))
        run(a, b)
        assert run._compiled.spec_on_host.reduction.counts.any()
        run(a, b)


# -- compiled -----------------------------------------------------------------------------------------------------------

@pytest.mark.thorough
@pytest.mark.compile
def test_code_by_stream_k() -> None:
    """No spill, vectors of 16 bytes to the workspace and back, one addition to a counter, one main loop."""
    conf = mapped_by_stream_k(None, block_shape=Tile(M=64, N=64, K=32), stages=3)
    found = compile_config(conf, gemm_shape=dict(M=1024, N=1024, K=1024))
    alone = compile_config(replace(conf, splits=1), gemm_shape=dict(M=1024, N=1024, K=1024))
    assert found.usage.spill_stores == found.usage.spill_loads == found.usage.stack_bytes == 0
    assert found.instructions["REDG"] == 1 and found.instructions["ATOMG"] == 0
    assert "LDG.E.128" in found.sass and "STG.E.128" in found.sass
    assert found.instructions["HMMA"] == alone.instructions["HMMA"]
