"""C, and what epilogues read beside D, by TMA into D's subtiles ahead of time: values, who is refused, seeded faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.emulator import errors
from gemmkit.epilogues import LinearCombination, ReLU, Residual, RowReduce
from gemmkit.kernels.sm90 import epilogue_load, store
from gemmkit.kernels.sm90.epilogue_load import PrefetchedStore
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.plans.ahead import compile_config
from gemmkit.runtime.device import H100
from gemmkit.transforms import Map
from gemmkit.tuning.model import CostedTile
from gemmkit.tuning.sm90 import MAPPINGS
from tests.support.machines import MACHINES, on_machines, poison, whole
from tests.support.patches import Seeded
from tests.support.sm90 import F16, F32, mapping

pytestmark = pytest.mark.sample(24)
EMULATOR = MACHINES["emulator"]


@pytest.fixture(autouse=True)
def few_blocks(clusters: Any) -> None:
    """One cluster that does everything in the emulator, so that tiles follow each other."""
    clusters(1, waiting=False)


def config(schedule: str, columns: int = 32, dtype: np.dtype = F16, **fields: Any) -> gk.Config:
    given = dict(d=RowMajor(dtype), depth=16, stages=2)
    return mapping(schedule, WGMMAOp(columns), **{**given, **fields})


def run(machine: Any, conf: gk.Config, a: np.ndarray, b: np.ndarray, c: Any = None, out: Any = None, seed: int | None = None,
        is_ahead: bool = True, **keywords: Any) -> np.ndarray:
    """D, poisoned before; ``is_ahead``: that the kernel is the one which is meant."""
    stack = a.shape[:-2]
    given = [None if x is None else machine.array(x) for x in (a, b)]
    if out is None:
        out = machine.array(poison((*stack, a.shape[-2], b.shape[-1]), conf.global_d_layout.dtype))
    with gk.emulate(seed) if machine.emulated else machine.session():
        plan = gk.plan(*given, c, conf, out=out, **keywords)
        assert isinstance(plan._compiled.spec.store, PrefetchedStore) == is_ahead
        plan(*given, c, out=out)
    return np.asarray(machine.numpy(out))


def operands(rng: np.random.Generator, m: int, n: int, k: int = 40, stack: tuple[int, ...] = ()) -> tuple:
    return whole(rng, (*stack, m, k), F16), whole(rng, (*stack, k, n), F16), whole(rng, (*stack, m, n), F16)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a.astype("f8") @ b.astype("f8"))


SCHEDULES = [("one", 32), ("two", 32), ("three", 32), ("pingpong", 32), ("pingpong", 96), ("one", 128), ("two", 192),
             ("one-2x1", 32), ("two-2x2", 32), ("pingpong-1x2", 32)]
SIZES = [(64, 32), (136, 40), (449, 8), (72, 200), (1, 8), (257, 104)]


@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("schedule, columns", SCHEDULES)
def test_c(machine: Any, schedule: str, columns: int, size: tuple[int, int], rng: np.random.Generator) -> None:
    a, b, c = operands(rng, *size)
    conf = config(schedule, columns, global_c_layout=RowMajor(F16))
    assert np.array_equal(run(machine, conf, a, b, machine.array(c)), product(a, b) + c)


@pytest.mark.kin(5)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("size", [(264, 136), (72, 264)], ids=str)
@pytest.mark.parametrize("schedule, rows, columns", [("pingpong", 128, 128), ("two", 256, 128), ("one", 128, 96)])
def test_fragments(machine: Any, schedule: str, rows: int, columns: int, size: tuple[int, int],
                   rng: np.random.Generator) -> None:
    """Consumers with two fragments of several subtiles, as the shipped tiles have; some out of range."""
    a, b, c = operands(rng, *size, 16)
    conf = config(schedule, columns, block_shape=gk.Tile(M=rows, N=columns, K=16), global_c_layout=RowMajor(F16))
    assert np.array_equal(run(machine, conf, a, b, machine.array(c)), product(a, b) + c)


@pytest.mark.kin(5)
@pytest.mark.sample(60)
@on_machines
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("schedule, columns", SCHEDULES)
def test_a_residual(machine: Any, schedule: str, columns: int, size: tuple[int, int], rng: np.random.Generator) -> None:
    """Between other epilogues, which do not notice."""
    a, b, c = operands(rng, *size)
    bias = whole(rng, (size[1],), F32)
    epilogue = epilogues.Bias(machine.array(bias)) | ReLU() | Residual(machine.array(c)) | epilogues.Clamp(-99.0, 99.0)
    d = run(machine, config(schedule, columns, epilogue=epilogue), a, b)
    assert np.array_equal(d, np.clip(np.maximum(product(a, b) + bias, 0) + c, -99, 99))
    epilogue = epilogues.Bias(machine.array(bias)) | epilogues.Binary(machine.array(c), f=lambda x, y, m, n: x * (y + n - m)) | ReLU()
    d = run(machine, config(schedule, columns, epilogue=epilogue), a, b)
    m, n = np.ogrid[:size[0], :size[1]]
    assert np.array_equal(d, np.maximum((product(a, b) + bias) * (c + n - m), 0).astype(d.dtype))


@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("schedule", ["two", "pingpong"])
def test_transforms_and_dtypes(machine: Any, schedule: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, 200, 72)
    conf = config(schedule, dtype=dtype, global_c_layout=RowMajor(dtype),
                  transform_shared_to_regs_c=Map(lambda x, m, n: x * 2 + m - n),
                  transform_regs_to_shared_d=Map(lambda x: x * 0.5))
    m, n = np.ogrid[:200, :72]
    want = (product(a, b) + 2 * c.astype("f8") + m - n) / 2
    assert np.array_equal(run(machine, conf, a, b, machine.array(c.astype(dtype))), want.astype(dtype))


@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("schedule", ["two", "pingpong", "one-2x1"])
@pytest.mark.parametrize("which", ["c", "residual", "linear combination"])
def test_in_place(machine: Any, schedule: str, which: str, rng: np.random.Generator) -> None:
    """Each tile of it is read before the same tile is stored, and tiles are disjoint."""
    a, b, c = operands(rng, 200, 72)
    held = machine.array(c.copy())
    if which == "c":
        d = run(machine, config(schedule, global_c_layout=RowMajor(F16)), a, b, held, held)
        assert np.array_equal(d, product(a, b) + c)
    elif which == "residual":
        d = run(machine, config(schedule, epilogue=Residual(held)), a, b, None, held)
        assert np.array_equal(d, product(a, b) + c)
    else:
        epilogue = LinearCombination(2.0, -1.0, held, RowMajor(F16))
        assert np.array_equal(run(machine, config(schedule, epilogue=epilogue), a, b, None, held), 2 * product(a, b) - c)


@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("schedule", ["two", "pingpong"])
def test_beta_of_nothing(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    """It is a number of the launch: TMA brings nothing, and the same kernel takes C with another beta."""
    a, b, c = operands(rng, 200, 72)
    c[...] = np.nan
    epilogue = LinearCombination(2.0, 0.0, machine.array(c), RowMajor(F16))
    assert np.array_equal(run(machine, config(schedule, epilogue=epilogue), a, b), 2 * product(a, b))
    out = machine.array(poison((200, 72), F16))                      # and where nothing has been written yet
    epilogue = LinearCombination(2.0, 0.0, out, RowMajor(F16))
    assert np.array_equal(run(machine, config(schedule, epilogue=epilogue), a, b, None, out), 2 * product(a, b))


@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("schedule", ["one", "pingpong"])
@pytest.mark.parametrize("which", ["c", "each", "slower", "faster", "all"])
def test_stacks(machine: Any, schedule: str, which: str, rng: np.random.Generator) -> None:
    """C and residuals with a matrix for each product, of part of the stack, and one for all."""
    a, b, c = operands(rng, 72, 32, 16, stack=(2, 2))
    if which == "c":
        conf = config(schedule, global_c_layout=RowMajor(F16))
        assert np.array_equal(run(machine, conf, a, b, machine.array(c)), product(a, b) + c)
        return
    given = {"each": c, "slower": c[:, :1].copy(), "faster": c[1], "all": c[0, 0]}[which]
    d = run(machine, config(schedule, epilogue=ReLU() | Residual(machine.array(given))), a, b)
    assert np.array_equal(d, np.maximum(product(a, b), 0) + given)


@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("splits", [2, 3])
def test_shares_of_k(machine: Any, splits: int, rng: np.random.Generator) -> None:
    """It is added once, by the blocks that finish a slice: in a cluster, and by a workspace."""
    a, b, c = operands(rng, 128, 128, 16 * 12)
    conf = config("one", 64, splits=splits, global_c_layout=RowMajor(F16))
    assert np.array_equal(run(machine, conf, a, b, machine.array(c)), product(a, b) + c)


@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("schedule", ["two", "pingpong"])
def test_views(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    """A part of a larger matrix, which begins at 16 bytes; nothing around D is written."""
    a, b, _ = operands(rng, 136, 72)
    large = whole(rng, (300, 160), F16)
    held, out = machine.array(large), machine.array(np.full((200, 120), 7, F16))
    c = held[9:145, 8:80]
    run(machine, config(schedule, global_c_layout=RowMajor(F16)), a, b, c, out[5:141, 16:88])
    d = np.asarray(machine.numpy(out))
    assert np.array_equal(d[5:141, 16:88], product(a, b) + large[9:145, 8:80])
    d = d.copy()
    d[5:141, 16:88] = 7
    assert (d == 7).all()


# -- machine code -----------------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.compile
@pytest.mark.sample(30)
@pytest.mark.parametrize("which", ["c", "residual", "linear combination"])
@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda x: f"{x.M}x{x.N}-{x.schedule}-{x.cluster[0]}x{x.cluster[1]}")
def test_shipped_mappings_load_nothing_themselves(mapping: CostedTile, which: str) -> None:
    """64 pairs a thread of a 128 x 128 tile come from shared memory, and nothing spills."""
    held = np.zeros((4096, 4096), F16)
    fields: dict[str, Any] = {"c": dict(global_c_layout=RowMajor(F16)),
                              "residual": dict(epilogue=epilogues.GELU("tanh") | Residual(held)),
                              "linear combination": dict(epilogue=LinearCombination(2.0, 1.0, held, RowMajor(F16)))}[which]
    conf = gk.get_config(
        operator=WGMMAOp(mapping.N), block_shape=gk.Tile(M=mapping.M, N=mapping.N, K=64), schedule=mapping.schedule,
        warps_per_block=mapping.warps, cluster=gk.Tile(M=mapping.cluster[0], N=mapping.cluster[1]),
        global_a_layout=RowMajor(F16), global_b_layout=ColMajor(F16), global_d_layout=RowMajor(F16), device=H100, **fields)
    kernel = compile_config(conf, device=H100, gemm_shape=dict(M=4096, N=4096, K=4096))
    usage, consumers = kernel.usage, 1 if mapping.schedule == "pingpong" else mapping.warps // 4
    assert (usage.spill_stores, usage.spill_loads, usage.stack_bytes) == (0, 0, 0)
    assert kernel.instructions["LDG"] == 0
    assert kernel.instructions["LDS"] == mapping.M // consumers * mapping.N // 128 // 2


# -- who is refused ---------------------------------------------------------------------------------------------------

def wide(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    return np.zeros((shape[0], shape[1] + 1), dtype)[:, :-1]


@pytest.mark.parametrize("name, kind, make", [
    ("lies across", ColMajor(F16), lambda m, n: np.zeros((m, n), F16, order="F")),
    ("another dtype", RowMajor(F32), lambda m, n: np.zeros((m, n), F32)),
    ("rows at odd places", RowMajor(F16), lambda m, n: wide((m, n), F16)),
    ("one row for all", RowMajor(F16), lambda m, n: np.broadcast_to(np.zeros(n, F16), (m, n))),
], ids=lambda x: x if isinstance(x, str) else "")
def test_others_are_read_late(name: str, kind: Any, make: Callable[..., Any], rng: np.random.Generator) -> None:
    a, b, c = operands(rng, 72, 40)
    given = make(72, 40)
    if given.flags.writeable:
        given[...] = c
    conf = config("two", global_c_layout=kind)
    d = run(EMULATOR, conf, a, b, given, is_ahead=False)
    assert np.array_equal(d, (product(a, b) + given).astype(F16)), name


@pytest.mark.kin(5)
def test_reductions_and_second_arrays_are_read_late(rng: np.random.Generator) -> None:
    a, b, c = operands(rng, 72, 40)
    sums = np.zeros(72, F32)
    d = run(EMULATOR, config("two", epilogue=Residual(c) | RowReduce(sums, "sum")), a, b, is_ahead=False)
    assert np.array_equal(d, product(a, b) + c) and np.array_equal(sums, d.astype("f8").sum(1))
    other = whole(rng, (72, 40), F16)
    conf = config("two", epilogue=Residual(other) | Residual(c), global_c_layout=RowMajor(F16))
    assert np.array_equal(run(EMULATOR, conf, a, b, c), product(a, b) + other + 2 * c)


def test_an_epilogue_reads_ahead_where_c_cannot(rng: np.random.Generator) -> None:
    """The first that can, in the order of C and the epilogue's stages."""
    a, b, c = operands(rng, 72, 40)
    scaled = LinearCombination(1.0, 0.0, wide((72, 40), F16), RowMajor(F16))
    conf = config("two", epilogue=scaled | Residual(c), global_c_layout=RowMajor(F32))
    d = run(EMULATOR, conf, a, b, c.astype(F32))
    assert np.array_equal(d, product(a, b) + 2 * c)


# -- faults -----------------------------------------------------------------------------------------------------------

def nothing(*given: Any) -> None:
    pass


def of_other(store: Any, k: int, turn: int) -> int:
    return 1


FAULTS = {
    "C is not waited for": (PrefetchedStore, "await_subtile", nothing, errors.RaceError),
    "an old phase is waited for": (PrefetchedStore, "phase", of_other, (errors.RaceError, errors.ProtocolError,
                                                                   errors.DeadlockError)),
    "C comes while D leaves": (epilogue_load, "tma_wait_read", nothing, errors.RaceError),
    "D is written before all have read C": (epilogue_load, "named_barrier", nothing, errors.RaceError),
    "D leaves before it is written": (store, "named_barrier", nothing, (errors.RaceError, errors.UninitialisedRead)),
    "C never comes": (PrefetchedStore, "begin", nothing, errors.DeadlockError),
}


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", ["two", "pingpong"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, schedule: str, rng: np.random.Generator, seeded: Seeded) -> None:
    a, b, c = operands(rng, 64 * 5, 72, 16)
    conf = config(schedule, 96, global_c_layout=RowMajor(F16))
    assert np.array_equal(run(EMULATOR, conf, a, b, c), product(a, b) + c)
    module, what, instead, error = FAULTS[name]
    seeded(module, what, instead)
    with pytest.raises(error):
        run(EMULATOR, conf, a, b, c)


@pytest.mark.kin(5)
@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", ["two", "pingpong", "one-2x1"])
def test_any_order_of_threads_is_right(schedule: str, seed: int, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, 200, 104)
    conf = config(schedule, global_c_layout=RowMajor(F16))
    assert np.array_equal(run(EMULATOR, conf, a, b, c, seed=seed), product(a, b) + c)
