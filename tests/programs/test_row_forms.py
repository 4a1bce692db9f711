"""Functions of rows in other forms than rows of one length of floats: rows of two lengths, transposes, rows that arrays name,
values alone, results in place, float64 and whole numbers. In the emulator, on a GPU, as PTX, and as compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.plans.ahead import assumed
from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.runtime.device import H100
from tests.programs.test_row_programs import close
from tests.ptx_machine.launch import Ptx
from tests.support import row_programs as listing
from tests.support.machines import on_machines
from tests.support.row_programs import F16, F32

F64, I32 = np.dtype(np.float64), np.dtype(np.int32)
Arrays = list[np.ndarray]


def nan(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


class Drawn:
    """Arrays of so many rows and columns; results are NaN."""

    def __init__(self, rng: np.random.Generator, rows: int, columns: int):
        self.rng, self.rows, self.columns = rng, rows, columns

    def floats(self, *shape: int, dtype: Any = F32) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(dtype)

    def names(self, count: int, dtype: Any) -> np.ndarray:
        """Different ones of so many rows, some of which are not there."""
        return (self.rng.permutation(count + 4) - 2)[:self.rows].astype(dtype)


def outer(d: Drawn) -> Arrays:
    return [d.floats(d.rows), d.floats(d.columns, dtype=F16), nan(d.rows, d.columns), nan(d.rows, d.columns, dtype=F16)]


def turned(d: Drawn) -> Arrays:
    return [d.floats(2, d.rows, d.columns, dtype=F16), d.floats(d.rows), nan(2, d.columns, d.rows), nan(2, d.rows, d.columns)]


def lengths(d: Drawn) -> Arrays:
    other = 3 * d.columns + 1
    return [d.floats(d.rows, d.columns), d.floats(d.rows, other, dtype=F16), nan(d.rows, d.columns), nan(d.rows, other), d.floats(other)]


def embedded(d: Drawn) -> Arrays:
    return [d.names(7, I32), d.floats(d.rows, d.columns), d.floats(7, d.columns, dtype=F16), d.floats(d.columns), nan(d.rows, d.columns),
            nan(d.rows)]


def scattered(d: Drawn) -> Arrays:
    return [d.names(d.rows + 3, np.int64), d.floats(2, d.rows, d.columns), nan(2, d.rows + 3, d.columns), nan(2, d.rows, d.columns, dtype=F16)]


def in_double(d: Drawn) -> Arrays:
    return [d.floats(d.rows, d.columns, dtype=F64), d.floats(d.columns, dtype=F16), nan(d.rows, d.columns, dtype=F64), nan(d.rows, dtype=F64)]


FORMS: dict[str, tuple[gp.Program, Callable[[Drawn], Arrays], dict[str, float]]] = {
    "outer": (listing.outer, outer, {}),
    "values": (listing.values, lambda d: [d.floats(d.rows), d.floats(d.rows), nan(d.rows)], dict(c=0.1)),
    "turned": (listing.turned, turned, {}),
    "turned_folds": (listing.turned_folds, lambda d: [d.floats(d.rows, d.columns, dtype=F16), nan(d.columns, d.rows)], {}),
    "symmetric": (listing.symmetric, lambda d: [d.floats(d.columns, d.columns), nan(d.columns, d.columns), nan(d.columns, d.columns)], {}),
    "lengths": (listing.lengths, lengths, {}),
    "embedded": (listing.embedded, embedded, {}),
    "scattered": (listing.scattered, scattered, {}),
    "counted": (listing.counted, lambda d: [d.floats(d.rows), d.floats(d.rows, d.columns), nan(d.rows, d.columns)], {}),
    "swapped": (listing.swapped, lambda d: [d.floats(d.rows, d.columns), d.floats(d.rows, d.columns)], {}),
    "in_double": (listing.in_double, in_double, dict(c=0.1)),
}
SHAPES = [(5, 7), (1, 1), (3, 97), (2, 1000), (3, 2056)]


def compare(machine: Any, program: gp.Program, arrays: Arrays, ulps: float = 400.0, **more: Any) -> None:
    wanted, plan = program.reference(*arrays, **more), program.plan(*arrays, **more)
    held = [machine.array(x) for x in arrays]
    given = program.bound(tuple(held), more)
    with machine.session():
        program(*held, **more)
    results = [machine.numpy(x) for name, x in given.items() if name in plan.results]
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        close(got, exact, ulps)


@pytest.mark.sample(20)
@on_machines
@pytest.mark.parametrize("shape", [*SHAPES, (2, 70_000)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms(machine: Any, form: str, shape: tuple[int, int], rng: np.random.Generator) -> None:
    program, arrays, more = FORMS[form]
    if (form == "swapped" and shape[1] > 2056) or (machine.emulated and shape[1] > 97 and form in ("symmetric", "in_double")):
        return
    compare(machine, program, arrays(Drawn(rng, *shape)), **more)


@pytest.mark.parametrize("form", FORMS)
def test_forms_without_elements(form: str, rng: np.random.Generator) -> None:
    program, arrays, more = FORMS[form]
    for shape in ((0, 5), (3, 0)):
        with gk.emulate(1):
            program(*arrays(Drawn(rng, *shape)), **more)


@pytest.mark.compile
@pytest.mark.sample(10)
@pytest.mark.kin(4)
@pytest.mark.parametrize("columns", [7, 520, 4608])
@pytest.mark.parametrize("form", FORMS)
def test_forms_as_compiled(form: str, columns: int, rng: np.random.Generator) -> None:
    """The PTX computes what the reference does, and nothing spills."""
    program, make, more = FORMS[form]
    arrays = make(Drawn(rng, 3, columns if form != "symmetric" else 17))
    wanted, plan, given = program.reference(*arrays, **more), program.plan(*arrays, **more), program.bound(tuple(arrays), more)
    entry = plan.launchable.entry()
    usage, counts = entry.meta["usage"], instruction_counts(disassemble(entry.cubin), full=True)
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    assert not any(op.startswith(("LDL", "STL")) for op in counts)
    with Ptx().session():
        plan.run(given)
    results = [x for name, x in given.items() if name in plan.results]
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        close(got, exact, 400)


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_whole_numbers(machine: Any, dtype: str, rng: np.random.Generator) -> None:
    """Sums of 32 bits are exact: they are computed in float64."""
    most = min(np.iinfo(dtype).max, 2 ** 40)
    for rows, columns in ((5, 45), (2, 1000)):
        x = (rng.integers(0, most, (rows, columns)) - (most // 2 if dtype.startswith("i") else 0)).astype(dtype)
        wide = F64 if x.itemsize > 2 else F32
        arrays = [x, rng.standard_normal(rows).astype(F32), rng.integers(0, 100, columns).astype(dtype), nan(rows, columns, dtype=wide),
                  nan(rows, dtype=wide)]
        compare(machine, listing.dequantised, arrays, c=0.5)


def test_double_is_double(rng: np.random.Generator) -> None:
    """Numbers too, and float32 that become float64."""
    x, y = rng.standard_normal((3, 40)), nan(3, 40, dtype=F64)
    for given in (x, x.astype(F32)):
        with gk.emulate():
            listing.softmax(given, y, scale=0.1)
        exact = listing.softmax.reference(given, y, scale=0.1)
        assert np.abs(y - exact).max() < 1e-15
    plans = [listing.softmax.plan(x, y, scale=scale) for scale in (0.1, 0.7)]
    assert plans[0].text == plans[1].text and plans[0].sizes.scale == np.float64(0.1)
    assert [leaf for leaf in plans[1].arguments[0].leaves if leaf[0] == "f64"] == [("f64", 0.7)]


def test_rows_of_other_sizes_share_a_text(rng: np.random.Generator) -> None:
    for form, (program, arrays, more) in FORMS.items():
        if form != "symmetric":
            plans = [program.plan(*arrays(Drawn(rng, rows, 40)), **more) for rows in (3, 9)]
            assert plans[0].text == plans[1].text


# -- refused ----------------------------------------------------------------------------------------------------------------

@gk.program
def turned_in_place(x: Any) -> None:
    for m, n in gp.parallel(x.rows, x.columns):
        x[n, m] = x[n, m] * 2.0


@gk.program
def added_where_named(to: Any, x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[to[m]] = y[to[m]] + x[m]


@gk.program
def columns_named(ids: Any, x: Any, y: Any) -> None:
    for m, n in gp.parallel(y.rows, y.columns):
        y[m, n] = x[ids[n], m]


def test_what_is_refused() -> None:
    """Nothing is computed of what could be read after it is stored."""
    x, ids = nan(6, 6), np.zeros(6, I32)
    long = nan(2, 70_000)
    for program, arrays in ((turned_in_place, (x,)), (added_where_named, (ids, x, x.copy())), (columns_named, (ids, x, x.copy())),
                            (listing.swapped, (long, long.copy()))):
        with pytest.raises(ValueError, match=f"{__file__}|row_programs.py"), gk.emulate():
            program(*arrays)
    with pytest.raises(ValueError, match="each is made of both: a row does not fit"):
        listing.swapped.plan(long, long.copy())
    with pytest.raises(TypeError, match="x has dtype bool; a function of rows reads float16"):
        listing.softmax.plan(x.astype(bool), x)
    with pytest.raises(TypeError, match="y has dtype int32; a result must be"):
        listing.softmax.plan(x, np.zeros((6, 6), I32))

    @gk.program
    def own_names(columns_2: Any, y: Any, z: Any) -> None:
        for m in gp.parallel(columns_2.rows):
            y[m] = columns_2[m]
            z[m] = columns_2[m].sum(axis=1)

    own_names.plan(x, x.copy(), nan(6))
    with pytest.raises(ValueError, match="columns_2: the derived kernel uses this name"):
        own_names.plan(x, x.copy(), nan(6, 9))


@pytest.mark.parametrize("by", [1500001.0, 1499999.0])
def test_a_sum_over_almost_all_columns_is_no_mean(by: float) -> None:
    """Of the variance of a sample, for example: in float64 the quotients differ in the seventh digit."""
    @gk.program
    def quotient(x: Any, y: Any) -> None:
        for m in gp.parallel(x.rows):
            y[m] = x[m].sum(axis=1) / by

    for dtype in (np.float64, np.float32):
        with assumed(H100):
            text = quotient.plan(np.empty((1, 1500000), dtype), np.empty(1, dtype)).printed.text
        assert "sizes.columns)" not in text.partition("total(")[2]
