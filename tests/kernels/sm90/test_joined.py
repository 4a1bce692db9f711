"""Operands of several arrays by TMA, a tensor map each, in Hopper's kernel: values against NumPy in float64, and which
operands come so.

Values are small whole numbers and folds exact in float32, so results are right or wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import Fold, Scale
from gemmkit.layouts import ColMajor, RowMajor, Swizzled
from gemmkit.operators import WGMMAOp
from gemmkit.transforms import Map
from tests.support import sm90
from tests.support.joined import FOLDS, folded
from tests.support.machines import on_machines, poison, whole

F16 = np.dtype("f2")
pytestmark = pytest.mark.sample(30)


def routes(run: gk.plans.Plan) -> tuple[str, str]:
    spec: Any = run._compiled.spec
    return type(spec.a.route).__name__, type(spec.b.route).__name__


def braided(machine: Any, conf: gk.Config, shape: tuple[int, int, int], count: int, order: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """The plan, D by it with arrays that it was not made with, and D in float64."""
    (M, N, K), rng = shape, np.random.default_rng(sum(shape))
    x, w = whole(rng, (M, K), F16, 2), [np.asarray(whole(rng, (K, N), F16, 2), order=order) for _ in range(count)]
    others = [np.asarray(whole(rng, (K, N), F16), order=order) for _ in range(count)]
    with machine.session():
        there, out = machine.array(x), machine.array(poison((M, N), "f4"))
        run = gk.plan(there, gk.layouts.InterleavedColumns(*map(machine.array, others)), conf=conf, out=out, epilogue=Fold(FOLDS[count]))
        run(there, gk.layouts.InterleavedColumns(*map(machine.array, w)), out=out)
    return run, machine.numpy(out), folded(count, [x.astype("f8") @ one.astype("f8") for one in w])


def braid_of(columns: int, count: int, order: str) -> dict[str, Any]:
    """B's layouts; swizzled lines across K hold columns of one part."""
    if order == "F":
        return dict(b=ColMajor)
    return dict(b=RowMajor, shared_b_layout=Swizzled(RowMajor(F16), min(128, 2 * columns // count)))


@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize(("schedule", "order", "count", "columns"), [
    ("one", "C", 2, 64), ("two", "F", 2, 64), ("pingpong", "C", 4, 128), ("pingpong", "F", 4, 64), ("three", "C", 2, 64),
    ("one-2x1", "C", 2, 64), ("one-2x1", "F", 2, 64), ("one-1x2", "F", 2, 64), ("two-2x2", "C", 4, 128), ("pingpong-2x1", "F", 4, 64)])
@pytest.mark.parametrize("shape", [(70, 104, 136), (1, 8, 8), (201, 64, 64)], ids=str)
def test_braids(machine: Any, schedule: str, order: str, count: int, columns: int, shape: tuple[int, int, int]) -> None:
    """Columns and rows that do not divide, parts that blocks of a cluster share, and the launch of a plan with other parts."""
    conf = sm90.mapping(schedule, WGMMAOp(columns), **braid_of(columns, count, order))
    run, got, expected = braided(machine, conf, shape, count, order)
    assert routes(run) == ("Tma", "InterleavedTma")
    np.testing.assert_array_equal(got, expected)


@on_machines
@pytest.mark.parametrize("N", [5, 13, 57])
def test_any_number_of_columns_where_lines_lie_along_k(machine: Any, N: int) -> None:
    run, got, expected = braided(machine, sm90.mapping("one", WGMMAOp(64), b=ColMajor), (37, N, 72), 2, "F")
    assert routes(run)[1] == "InterleavedTma"
    np.testing.assert_array_equal(got, expected)


@on_machines
@pytest.mark.parametrize(("fields", "count", "order", "shape"), [
    (dict(), 3, "C", (37, 64, 64)), (dict(), 2, "C", (37, 41, 64)), (dict(), 2, "F", (37, 64, 63)), (dict(splits=2), 2, "C", (37, 64, 256)),
    (dict(transform_global_to_shared_b=Map(lambda x: x + x)), 2, "C", (37, 64, 64))],
    ids=["three", "odd lines", "odd lines along K", "splits", "a transform"])
def test_what_tma_cannot_bring_threads_stage(machine: Any, fields: Any, count: int, order: str, shape: tuple[int, int, int]) -> None:
    """Three parts of four, rows that begin anywhere, blocks that exchange columns, a transform."""
    conf = sm90.mapping("one", WGMMAOp(64), b=ColMajor if order == "F" else RowMajor, **fields)
    run, got, expected = braided(machine, conf, shape, count, order)
    assert routes(run)[1] != "InterleavedTma"
    np.testing.assert_array_equal(got, expected * (2 if "transform_global_to_shared_b" in fields else 1))


JOINS = {                              # extents along the joined axis, of tiles of 64 x 32 x 64
    "K": (1, (64, 128), 0, (64, 128)), "K in three": (1, (128, 64, 24), 0, (64, 64, 88)), "M": (0, (64, 128, 9), None, (200,)),
    "N": (None, (72,), 1, (64, 32, 40)), "M and N": (0, (64, 1), 1, (96, 16))}


@pytest.mark.kin(1)
@pytest.mark.sample(40)
@on_machines
@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("schedule", ["one", "pingpong-2x1", "one-1x2", "pingpong-2x2"])
@pytest.mark.parametrize("orders", ["CC", "FF"])
def test_joins(machine: Any, join: str, schedule: str, orders: str) -> None:
    """Parts begin where tiles do, and end where they like."""
    a_axis, a_parts, b_axis, b_parts = JOINS[join]
    rng, K = np.random.default_rng(len(join)), sum(a_parts) if a_axis == 1 else sum(b_parts) if b_axis == 0 else 72
    rows, columns = (sum(a_parts) if a_axis == 0 else 72), (sum(b_parts) if b_axis == 1 else 40)
    a, b = whole(rng, (rows, K), F16, 2), whole(rng, (K, columns), F16, 2)

    def cut(x: np.ndarray, axis: int | None, parts: tuple[int, ...], order: str) -> Any:
        there = [machine.array(np.array(one, order=order))                                   # type: ignore[call-overload]
                 for one in ([x] if axis is None else np.split(x, np.cumsum(parts)[:-1], axis))]
        return gk.layouts.Concat(*there, axis=axis) if len(there) > 1 else there[0]                 # type: ignore[arg-type]

    conf = sm90.mapping(schedule, a=ColMajor if orders[0] == "F" else RowMajor, b=ColMajor if orders[1] == "F" else RowMajor)
    with machine.session():
        out = machine.array(poison((rows, columns), "f4"))
        of_a, of_b = cut(a, a_axis, a_parts, orders[0]), cut(b, b_axis, b_parts, orders[1])
        run = gk.plan(of_a, of_b, conf=conf, out=out, epilogue=Scale(2.0))
        run(of_a, of_b, out=out)
    np.testing.assert_array_equal(machine.numpy(out), 2 * (a.astype("f8") @ b.astype("f8")))
    unlike = ("M" in join and orders == "FF") or ("N" in join and orders == "CC")     # lines of 9 or 40 elements are no 16 bytes' multiples
    if not unlike:
        assert routes(run) == ("Tma" if a_axis is None else "JoinedTma", "Tma" if b_axis is None else "JoinedTma")


@on_machines
def test_parts_that_begin_inside_of_a_tile_are_staged(machine: Any) -> None:
    rng = np.random.default_rng(3)
    x, h, w, u = (whole(rng, shape, F16) for shape in ((70, 48), (70, 80), (48, 40), (80, 40)))
    with machine.session():
        x, h, w, u = map(machine.array, (x, h, w, u))
        out = machine.array(poison((70, 40), "f4"))
        of = gk.layouts.Concat(x, h, axis=1), gk.layouts.Concat(w, u, axis=0)
        run = gk.plan(*of, conf=sm90.mapping("one"), out=out)
        run(*of, out=out)
    assert "JoinedTma" not in routes(run)
    x, h, w, u = (machine.numpy(each).astype("f8") for each in (x, h, w, u))
    np.testing.assert_array_equal(machine.numpy(out), x @ w + h @ u)


@on_machines
def test_parts_that_lie_otherwise_have_a_plan_of_their_own(machine: Any) -> None:
    """Tensor maps know where lines begin: other strides are refused by a plan, and planned anew by matmul."""
    rng = np.random.default_rng(4)
    x, w, v = (whole(rng, shape, F16, 1) for shape in ((64, 64), (64, 32), (64, 48)))
    fold, conf = Fold(lambda gate, up: gate - up), sm90.mapping("one", WGMMAOp(64), b=RowMajor)
    with machine.session():
        x, w, v = map(machine.array, (x, w, v))
        near, far = machine.array(machine.numpy(v)[:, :32].copy()), v[:, :32]
        outs = [machine.array(poison((64, 32), "f4")) for _ in range(2)]
        for out, part in zip(outs, (near, far)):
            gk.matmul(x, gk.layouts.InterleavedColumns(w, part), out=out, conf=conf, epilogue=fold)
        run = gk.plan(x, gk.layouts.InterleavedColumns(w, near), conf=conf, epilogue=fold)
        with pytest.raises(ValueError, match="b differs from the plan's"):
            run(x, gk.layouts.InterleavedColumns(w, far))
    x, w, near = (machine.numpy(each).astype("f8") for each in (x, w, near))
    for out in outs:
        np.testing.assert_array_equal(machine.numpy(out), x @ w - x @ near)
