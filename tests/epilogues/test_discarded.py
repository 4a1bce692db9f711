"""D left out: reductions, stores and observers alone, in every kernel; nothing of D is allocated or stored; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.epilogues import ColumnReduce, RowReduce
from gemmkit.epilogues.observers import OperandRowSum
from gemmkit.layouts import Discard, Discarded, RowMajor
from gemmkit.operators import FPUOp, WGMMAOp
from tests.epilogues.test_reductions import KINDS, OPS, expected, machine_code, operands, same
from tests.support import sm90
from tests.support.joined import F16, F32, FAMILIES, config, dtype_of
from tests.support.machines import is_poison, on_machines, poison, whole


@pytest.mark.sample(32)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(37, 29, 33), (64, 32, 64), (5, 1, 3), (3, 9, 0), (0, 5, 3)], ids=str)
def test_reductions(machine: Any, family: str, kind: str, op: str, shape: tuple[int, int, int]) -> None:
    if 0 in shape[:2] and op in ("argmax", "min"):
        return
    a, b, product = operands(shape, dtype_of(family))
    with machine.session():
        out = machine.array(poison((shape[0 if kind == "rows" else 1],), "i4" if op == "argmax" else "f4"))
        chain = epilogues.Scale(2.0) | KINDS[kind](out, op)
        assert gk.matmul(machine.array(a), machine.array(b), out=Discard(), conf=config(family), epilogue=chain) is None
        found = machine.numpy(out)
    with np.errstate(all="ignore"):
        same(found, expected(op, 2 * product, 1 if kind == "rows" else 0), op)


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("schedule", ["one", "two", "pingpong", "one-1x2", "two-2x2"])
def test_schedules_of_the_warp_specialised_kernel(machine: Any, schedule: str) -> None:
    a, b, product = operands((150, 40, 130), F16)
    with machine.session():
        rows, columns = machine.array(poison((150,), "f4")), machine.array(poison((40,), "i4"))
        gk.matmul(machine.array(a), machine.array(b), out=Discard(), conf=sm90.mapping(schedule, WGMMAOp(32)),
                  epilogue=RowReduce(rows, "sum") | ColumnReduce(columns, "argmax"))
        np.testing.assert_array_equal(machine.numpy(rows), product.sum(1))
        np.testing.assert_array_equal(machine.numpy(columns), product.argmax(0))


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("family", ["singlestage", "warp_specialised"])
def test_an_observer_alone(machine: Any, family: str) -> None:
    a, b, _ = operands((37, 29, 33), dtype_of(family))
    with machine.session():
        sums = machine.array(poison((37,), "f4"))
        assert gk.matmul(machine.array(a), machine.array(b), out=Discard(), conf=config(family), observe_a=OperandRowSum(sums)) is None
        np.testing.assert_array_equal(machine.numpy(sums), a.astype("f8").sum(1))


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_stored_beside(machine: Any, family: str) -> None:
    """In a view of a wider array, at odd sizes."""
    a, b, product = operands((37, 29, 33), dtype_of(family))
    with machine.session():
        wide = machine.array(poison((40, 41), "f4"))
        gk.matmul(machine.array(a), machine.array(b), out=Discard(), conf=config(family), epilogue=epilogues.Store(wide[1:38, 5:34]))
        found = machine.numpy(wide)
    np.testing.assert_array_equal(found[1:38, 5:34], product)
    found[1:38, 5:34] = poison((37, 29), "f4")
    assert is_poison(found)


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1"])
def test_as_chosen_and_planned(machine: Any, dtype: str, rng: np.random.Generator) -> None:
    """In stacks, with C, and of vectors; a plan takes its arrays anew."""
    a, b = whole(rng, (3, 21, 40), dtype), whole(rng, (40, 17), dtype)
    c = whole(rng, (3, 21, 17), "i4" if dtype == "i1" else dtype)
    sums = "i4" if dtype == "i1" else "f8" if dtype == "f8" else "f4"
    product = a.astype("f8") @ b.astype("f8") + c.astype("f8")
    with machine.session():
        rows = machine.array(poison((3, 21), sums))
        given = machine.array(a), machine.array(b), machine.array(c)
        assert gk.matmul(*given, out=Discard(), epilogue=RowReduce(rows, "max")) is None
        np.testing.assert_array_equal(machine.numpy(rows), product.max(2))
        one = machine.array(poison((21,), sums))
        plan = gk.plan(given[0][0], given[1], out=Discard(), epilogue=RowReduce(one, "sum"))
        for n in (1, 2, 0):
            assert plan(given[0][n], given[1]) is None
            np.testing.assert_array_equal(machine.numpy(one), (a[n].astype("f8") @ b.astype("f8")).sum(1))
        best = machine.array(poison((1,), "i8"))
        gk.matmul(given[0][0], given[1][:, 0], out=Discard(), epilogue=ColumnReduce(best, "argmax"))
        np.testing.assert_array_equal(machine.numpy(best), (a[0].astype("f8") @ b[:, 0].astype("f8")).argmax())


@pytest.mark.kin(1)
@pytest.mark.sample(2)
def test_nothing_is_allocated_or_stored() -> None:
    """In the machine's code only states are stored: none of the stores of D's tile is left."""
    a, sums = np.empty((512, 512), F16), np.empty(512, F32)
    counts = []
    for out in (np.empty((512, 512), F32), Discard("float32")):
        _, found, behind = machine_code(512, out=out, epilogue=RowReduce(sums, "sum"))
        assert len(behind) == 1
        counts.append(sum(n for name, n in found.items() if name.startswith(("STG", "UTMASTG", "STSM", "STS"))))
    assert counts[1] < counts[0] / 2
    with gk.emulate():
        plan = gk.plan(a, a, out=Discard(), epilogue=RowReduce(sums, "sum"))
    assert plan._infos[3].shape == (0, 0)


X, ROWS = np.ones((8, 8), F32), poison((8,), F32)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("call", "kind", "said"), [
    (lambda: gk.matmul(X, X, out=Discard()), gk.ConfigError, ("writes nothing beside D", "RowReduce")),
    (lambda: gk.matmul(X, X, out=Discard(), epilogue=epilogues.ReLU()), gk.ConfigError, ("ReLU", "writes nothing beside D")),
    (lambda: gk.matmul(X, X, out=Discard(), epilogue=epilogues.Softmax()), gk.ConfigError, ("Softmax", "finishes D")),
    (lambda: gk.matmul(X, X, out=Discard(), epilogue=epilogues.Pack(lambda x, y: x)), gk.ConfigError, ("Discarded()", "plain matrix")),
    (lambda: gk.matmul(X, X, out=Discard(), epilogue=RowReduce(ROWS[:7], "sum")), ValueError, ("(7,)", "(8,)")),
    (lambda: gk.matmul(Discard(), X, out=Discard()), TypeError, ("a is a Discard", "give an array")),
    (lambda: gk.matmul(X, X[:7], out=Discard(), epilogue=RowReduce(ROWS, "sum")), ValueError, ("K=7", "K=8")),
    (lambda: gk.matmul(X, X, out=np.empty((8, 8), F32), global_d_layout=Discarded(F32), epilogue=RowReduce(ROWS, "sum")), ValueError,
     ("out is given", "stores nothing")),
    (lambda: Discard("three"), TypeError, ("three",)),
    (lambda: gk.get_config(operator=FPUOp(16, 16), global_a_layout=RowMajor(F32), global_b_layout=RowMajor(F32), global_d_layout=Discarded()), gk.ConfigError,
     ("says the type", "Discarded('float32')")),
])
def test_refused(call: Any, kind: type, said: tuple[str, ...]) -> None:
    with gk.emulate(), pytest.raises(kind) as caught:
        call()
    for part in said:
        assert part in str(caught.value)
    assert is_poison(ROWS)
