"""Observers of A: reductions of its rows beside the product, into poisoned outputs; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import ColumnReduce, Combine, Elementwise, Fold
from gemmkit.epilogues.observers import OperandRowReduce, OperandRowSum
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from tests.epilogues.test_reductions import expected, operands, same
from tests.support import sm90
from tests.support.joined import config, dtype_of
from tests.support.machines import is_poison, on_machines, poison, whole
from tests.support.patches import Seeded

FAMILIES = "singlestage", "warp_specialised"


def observed(machine: Any, op: Any, a: np.ndarray, b: np.ndarray, conf: Any, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    with machine.session():
        out = machine.array(poison((a.shape[0], b.shape[1]), "f4"))
        found = machine.array(poison((a.shape[0],), "i4" if op == "argmax" else "f4"))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=conf, observe_a=OperandRowReduce(found, op), **more)
    return machine.numpy(out), machine.numpy(found)


@pytest.mark.sample(64)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("op", ["sum", "argmax", "max", "logsumexp"])
@pytest.mark.parametrize("a_layout", [RowMajor, ColMajor])
@pytest.mark.parametrize("shape", [(37, 29, 33), (64, 70, 200), (5, 1, 1), (1, 150, 7)], ids=str)
def test_reductions_of_rows(machine: Any, family: str, op: str, a_layout: Any, shape: tuple[int, int, int]) -> None:
    a, b, product = operands(shape, dtype_of(family))
    d, found = observed(machine, op, np.asarray(a, order="F" if a_layout is ColMajor else "C"), b, config(family, a=a_layout))
    np.testing.assert_array_equal(d, product)
    same(found, expected(op, a.astype("f8"), 1), op)


@pytest.mark.kin(1)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("schedule", ["one", "two", "pingpong", "one-1x2", "two-2x1", "two-2x2"])
def test_schedules_of_the_warp_specialised_kernel(machine: Any, schedule: str) -> None:
    """With more tiles along N than k-tiles, and with fewer."""
    for shape in ((70, 40, 200), (40, 130, 70)):
        a, b, product = operands(shape, np.dtype("f2"))
        d, found = observed(machine, "sum", a, b, sm90.mapping(schedule, WGMMAOp(32)))
        np.testing.assert_array_equal(d, product)
        np.testing.assert_array_equal(found, a.astype("f8").sum(1))


@pytest.mark.kin(1)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_beside_an_epilogue_and_one_of_ones_own(machine: Any, family: str) -> None:
    """Weights by column, captured; D is reduced as well, and B is a braid."""
    rng, dtype = np.random.default_rng(3), dtype_of(family)
    a, w, v = whole(rng, (35, 50), dtype), whole(rng, (50, 21), dtype), whole(rng, (50, 21), dtype)
    weights = whole(rng, (50,), "f4")
    with machine.session():
        by, rows = machine.array(weights), machine.array(np.arange(35, dtype=np.float32))
        found, columns = machine.array(poison((35,), "f4")), machine.array(poison((21,), "f4"))
        op = Combine(lambda x, y: x + y, 0, of=lambda x, m, k: by[k] * x + rows[m])
        d = gk.matmul(machine.array(a), gk.layouts.InterleavedColumns(machine.array(w), machine.array(v)), conf=config(family), observe_a=OperandRowReduce(found, op),
                      epilogue=Fold(lambda x, y: x - y) | ColumnReduce(columns, "max"))
    product = a.astype("f8") @ w.astype("f8") - a.astype("f8") @ v.astype("f8")
    np.testing.assert_array_equal(machine.numpy(d), product)
    np.testing.assert_array_equal(machine.numpy(columns), product.max(0))
    np.testing.assert_array_equal(machine.numpy(found), a.astype("f8") @ weights + 50 * np.arange(35))


@pytest.mark.kin(1)
@on_machines
def test_without_a_configuration(machine: Any) -> None:
    """Hopper's kernel where it applies, without split K; else singlestage. A second call gets its own output."""
    for dtype in ("f2", "f4"):
        a, b, product = operands((40, 24, 64), dtype)
        with machine.session():
            outs = [machine.array(poison((40,), "f4")) for _ in range(2)]
            for out in outs:
                d = gk.matmul(machine.array(a), machine.array(b), observe_a=OperandRowSum(out))
                np.testing.assert_array_equal(machine.numpy(d), product)
                np.testing.assert_array_equal(machine.numpy(out), a.astype("f8").sum(1))


@on_machines
def test_of_no_depth(machine: Any) -> None:
    """A sum of nothing is 0."""
    a, b, _ = operands((5, 3, 0), "f4")
    _, found = observed(machine, "sum", a, b, None)
    np.testing.assert_array_equal(found, np.zeros(5))


A, B = np.ones((7, 5), np.float32), np.ones((5, 9), np.float32)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no observer": (lambda out: gk.matmul(A, B, observe_a=out), gk.ConfigError, "an observer is needed, such as gemmkit.epilogues.observers.OperandRowSum"),
    "too short": (lambda out: gk.matmul(A, B, observe_a=OperandRowSum(out[:5])), ValueError, r"out of OperandRowSum has shape \(5,\); the rows of an A of 7 x 5 need \(7,\)"),
    "the result": (lambda out: gk.matmul(A, B, out=(d := poison((7, 9), "f4")), observe_a=OperandRowSum(d[:, 0])), ValueError, "out of OperandRowSum overlaps out"),
    "its own array": (lambda out: gk.matmul(A, B, observe_a=OperandRowSum(A[:, 0])), ValueError, "out of OperandRowSum overlaps a"),
    "integers": (lambda out: gk.matmul(A, B, observe_a=OperandRowSum(np.zeros(7, "i4"))), gk.ConfigError, "out of OperandRowSum holds int32 and would get float32"),
    "multistage": (lambda out: gk.matmul(A.astype("f2"), B.astype("f2"), conf=config("multistage"), observe_a=OperandRowSum(out)), gk.ConfigError,
                   "the kernels that observe are warp_specialised, singlestage; this is 'multistage'"),
    "split K": (lambda out: gk.matmul(A.astype("f2"), B.astype("f2"), conf=config("singlestage", splits=2), observe_a=OperandRowSum(out)), gk.ConfigError,
                "blocks that share K see shares of A; use splits=1"),
    "a transform": (lambda out: gk.matmul(A, B, observe_a=OperandRowSum(out), transform_global_to_shared_a=gk.transforms.Map(lambda x: 2 * x)),
                    gk.ConfigError, "A is transformed"),
    "a structured A": (lambda out: gk.matmul(gk.layouts.TriangularMatrix(A[:5]), B, observe_a=OperandRowSum(out[:5])), gk.ConfigError, "a plain matrix of real numbers is needed"),
    "a stack": (lambda out: gk.matmul(np.ones((2, 7, 5), "f4"), B, observe_a=OperandRowSum(out)), gk.ConfigError, "observe the products one by one"),
    "no columns": (lambda out: gk.matmul(A, B[:, :0], observe_a=OperandRowSum(out)), ValueError, "D has no columns"),
    "a group": (lambda out: gk.grouped([A.astype("f2")], [B.astype("f2")], conf=config("singlestage"), observe_a=OperandRowSum(out)), gk.ConfigError,
                "a group cannot reduce"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, said = REFUSED[name]
    out = poison((7,), "f4")
    with gk.emulate(), pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out)


def test_an_epilogue_is_no_observer() -> None:
    with pytest.raises(gk.ConfigError, match="observe_a"), gk.emulate():
        gk.matmul(A, B, observe_a=Elementwise(lambda x: x))


def test_a_stage_that_is_released_too_early_is_found(seeded: Seeded) -> None:
    """One thread releases a stage for all of its consumer: without their meeting TMA could refill what others still read."""
    from gemmkit.emulator.errors import EmulatorError
    from gemmkit.kernels.sm90 import mainloop as observe

    a, b, _ = operands((64, 32, 64 * 6), np.dtype("f2"))
    seeded(observe, "named_barrier", lambda *_: None)
    with gk.emulate(), pytest.raises(EmulatorError):
        gk.matmul(a, b, conf=sm90.mapping("one", WGMMAOp(32), stages=2), observe_a=OperandRowSum(poison((64,), "f4")))
