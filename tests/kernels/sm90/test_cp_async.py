"""Operands that threads have copied (cp.async), and D that leaves in lines from panels: every order, size and epilogue."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.epilogues import Bias, ReLU
from gemmkit.kernels.collectives.pipeline import Pipeline
from gemmkit.kernels.sm90 import mainloop, store
from gemmkit.kernels.sm90.routes import CpAsyncLines, CpAsyncProducer, Tma
from gemmkit.kernels.sm90.store import TmaStore, VectorStore
from gemmkit.layouts import ColMajor, Matricised, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.plans.plan import Plan
from gemmkit.runtime.arrays import describe
from tests.support.machines import MACHINES, on_machines, poison, turned, whole
from tests.support.patches import Seeded
from tests.support.sm90 import F16, F32, mapping

BF16 = np.dtype(ml_dtypes.bfloat16)
EMULATOR = MACHINES["emulator"]


def tensor(machine: Any, x: np.ndarray, fast: int, inner: int) -> tuple[Any, int]:
    """A matrix as a view of three dimensions, whose axis ``fast`` is contiguous in lines of ``inner``: they are far apart in
    memory, so that it is no strided matrix; and how many of its dimensions are rows."""
    rows, columns = x.shape
    extent = x.shape[fast] // inner
    if fast == 1:
        memory = np.ascontiguousarray(x.reshape(rows, extent, inner).transpose(1, 0, 2))      # [k1, i, k0]
        return turned(machine.array(memory), 1, 2, 0), 1                                     # [i, k0, k1]
    memory = np.ascontiguousarray(x.reshape(extent, inner, columns).transpose(0, 2, 1))      # [i1, j, i0]
    return turned(machine.array(memory), 2, 0, 1), 2                                         # [i0, i1, j]


def run(machine: Any, a: np.ndarray, b: np.ndarray, schedule: str = "one", operator: Any = None, fast: tuple = (1, 1),
        inner: tuple = (8, 8), which: str = "ab", out_dtype: Any = F16, d_fast: int | None = None, **fields: Any) -> Any:
    """D of tensors with those values, and the plan that computed it."""
    operator = operator or WGMMAOp(32, a.dtype)
    layouts, views = {}, {}
    for name, x, axis, lines in (("a", a, fast[0], inner[0]), ("b", b, fast[1], inner[1])):
        if name in which:
            views[name], rows = tensor(machine, x, axis, lines)
            layouts[f"global_{name}_layout"] = Matricised.of(describe(views[name]), rows)
        else:
            views[name] = machine.array(np.asarray(x, order="FC"[axis]))
            layouts[f"global_{name}_layout"] = (ColMajor, RowMajor)[axis](x.dtype)
    M, N = a.shape[0], b.shape[1]
    layouts["global_d_layout"] = RowMajor(out_dtype)
    out = machine.array(poison((M, N), out_dtype, "CF"[d_fast == 0]))
    if d_fast == 0:
        layouts["global_d_layout"] = ColMajor(out_dtype)
    if d_fast == 2:                                        # rows of 8 that are far apart
        out = machine.array(poison((N // 8, M, 8), out_dtype)).transpose(1, 2, 0)
        layouts["global_d_layout"] = Matricised.of(describe(out), 1)
    base = mapping(schedule, operator, d=layouts["global_d_layout"])
    conf = gk.get_config(operator=operator, block_shape=base.block_shape, warps_per_block=base.warps_per_block,
                         schedule=base.schedule, **{**layouts, **fields})
    with machine.session():
        plan = gk.plan(views["a"], views["b"], None, conf, out=out)
        plan(views["a"], views["b"], out=out)
    got = np.asarray(machine.numpy(out))
    return (got.transpose(0, 2, 1).reshape(M, N) if d_fast == 2 else got), plan


def run_length(plan: Any) -> int:
    """Elements that a thread stores together; 0 where it stores pairs."""
    store = spec_of(plan).store
    return store.run_length if isinstance(store, VectorStore) else 0


def spec_of(plan: Plan) -> Any:
    return plan._compiled.spec


def operands(rng: np.random.Generator, m: int, n: int, k: int, dtype: Any = F16) -> tuple[np.ndarray, np.ndarray]:
    return whole(rng, (m, k), dtype), whole(rng, (k, n), dtype)


@pytest.mark.kin(5)
@pytest.mark.sample(40)
@on_machines
@pytest.mark.parametrize("fast", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("shape", [(64, 32, 64), (72, 40, 88), (16, 16, 16), (136, 80, 200)], ids=str)
def test_every_order(machine: Any, fast: tuple, shape: tuple, rng: np.random.Generator) -> None:
    a, b = operands(rng, *shape)
    d, plan = run(machine, a, b, "two", fast=fast)
    assert np.array_equal(d, a.astype(F32) @ b.astype(F32))
    assert isinstance(spec_of(plan).a.route, CpAsyncLines) and isinstance(spec_of(plan).b.route, CpAsyncLines)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("inner, count", [((4, 8), 4), ((2, 4), 2), ((8, 2), 8)], ids=str)
def test_pieces_of_4_and_8_bytes(machine: Any, inner: tuple, count: int, rng: np.random.Generator) -> None:
    a, b = operands(rng, 72, 40, 88)
    d, plan = run(machine, a, b, inner=inner)
    assert np.array_equal(d, a.astype(F32) @ b.astype(F32))
    assert isinstance(spec_of(plan).producer, CpAsyncProducer) and plan.config.mem_a_thread.count == count


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("which", ["a", "b"])
def test_beside_tma(machine: Any, which: str, rng: np.random.Generator) -> None:
    a, b = operands(rng, 72, 40, 88)
    d, plan = run(machine, a, b, which=which)
    assert np.array_equal(d, a.astype(F32) @ b.astype(F32))
    assert [type(x.route) for x in (spec_of(plan).a, spec_of(plan).b)] == ([CpAsyncLines, Tma] if which == "a" else [Tma, CpAsyncLines])


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("schedule, fields", [("pingpong", {}), ("two", dict(stages=2)), ("one", dict(producer_warps=8)),
                                              ("one", dict(splits=2))], ids=str)
def test_every_schedule(machine: Any, schedule: str, fields: dict, rng: np.random.Generator) -> None:
    a, b = operands(rng, 136, 40, 200)
    d, plan = run(machine, a, b, schedule, fast=(0, 1), **fields)
    assert np.array_equal(d, a.astype(F32) @ b.astype(F32)) and isinstance(spec_of(plan).producer, CpAsyncProducer)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("dtype, accumulator", [(BF16, F32), (np.dtype("i1"), np.dtype("i4")), (F32, F32)], ids=str)
def test_other_types(machine: Any, dtype: np.dtype, accumulator: np.dtype, rng: np.random.Generator) -> None:
    """8- and 32-bit operands (tf32) lie along K."""
    a, b = operands(rng, 72, 40, 96, dtype)
    d, plan = run(machine, a, b, fast=(1, 0), inner=(16, 16), out_dtype=accumulator)
    assert np.array_equal(d, a.astype(F32) @ b.astype(F32)) and isinstance(spec_of(plan).producer, CpAsyncProducer)


@pytest.mark.kin(5)
@pytest.mark.sample(48)
@on_machines
@pytest.mark.parametrize("d_fast", [0, 2])
@pytest.mark.parametrize("out_dtype", [F16, F32, np.dtype("f8")], ids=str)
@pytest.mark.parametrize("shape", [(64, 32, 16), (136, 72, 24), (16, 16, 8), (200, 104, 40)], ids=str)
def test_d_in_lines(machine: Any, d_fast: int, out_dtype: np.dtype, shape: tuple, rng: np.random.Generator) -> None:
    """Of columns, which TMA stores, and of a tensor's rows."""
    a, b = operands(rng, *shape)
    d, plan = run(machine, a, b, "two", out_dtype=out_dtype, d_fast=d_fast)
    assert np.array_equal(d, (a.astype(F32) @ b.astype(F32)).astype(out_dtype))
    assert isinstance(spec_of(plan).store, TmaStore) == (d_fast == 0)
    assert d_fast == 0 or run_length(plan) == min(8, 16 // out_dtype.itemsize)


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("m, run_", [(130, 2), (132, 4), (131, 1)])
def test_columns_of_any_length(machine: Any, m: int, run_: int, rng: np.random.Generator) -> None:
    """Lines are as long as divides them: an element a lane, where that is less than a word."""
    a, b = operands(rng, m, 40, 64)
    d, plan = run(machine, a, b, which="", fast=(1, 1), d_fast=0)
    assert np.array_equal(d, a.astype(F32) @ b.astype(F32)) and run_length(plan) == run_


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("d_fast", [0, 2])
def test_the_epilogue_is_applied_before(machine: Any, d_fast: int, rng: np.random.Generator) -> None:
    a, b = operands(rng, 200, 72, 40)
    bias = whole(rng, (72,), F32)
    d, plan = run(machine, a, b, "pingpong", d_fast=d_fast, epilogue=Bias(machine.array(bias)) | ReLU())
    assert np.array_equal(d, (a.astype(F32) @ b.astype(F32) + bias).clip(0)) and run_length(plan) == (0 if d_fast == 0 else 8)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["fence", "copies", "panels"])
def test_a_fault_is_found(name: str, seed: int, rng: np.random.Generator, seeded: Seeded) -> None:
    """Consumers that do not fence; stages that are read before the copies have come; panels that are read too soon."""
    a, b = operands(rng, 64, 32, 64)

    def product() -> np.ndarray:
        return np.asarray(run(EMULATOR, a, b, d_fast=0)[0])

    assert np.array_equal(product(), a.astype(F32) @ b.astype(F32))
    module, what, error = {"fence": (mainloop, "fence_async", errors.ProxyError),
                           "copies": (Pipeline, "wait", errors.UninitialisedRead),
                           "panels": (store, "named_barrier", errors.UninitialisedRead)}[name]
    seeded(module, what, lambda *ignored: None)
    with pytest.raises(error):
        product()


@pytest.mark.kin(5)
def test_what_is_not_gathered() -> None:
    """Extents that a piece does not divide, and elements that a transform changes, go the other way."""
    rng = np.random.default_rng(0)
    a, b = operands(rng, 72, 40, 88)
    _, plan = run(EMULATOR, a, b, transform_global_to_shared_a=gk.transforms.Map(lambda x: x + x))
    assert not isinstance(spec_of(plan).producer, CpAsyncProducer) and not isinstance(spec_of(plan).a.route, CpAsyncLines)
    _, plan = run(EMULATOR, a, b, inner=(11, 8))
    assert not isinstance(spec_of(plan).a.route, CpAsyncLines)
