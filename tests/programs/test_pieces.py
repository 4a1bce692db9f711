"""Tiles of rows and columns where rows are packed: products of groups of rows with matrices of their own, and with each other;
and where an array names rows of operands and results."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.lang.errors import ConfigError
from gemmkit.runtime.device import A100, H100, assumed
from tests.programs.test_language import check_refused
from tests.support.chains import check_close
from tests.support.machines import on_machines
from tests.support.machines import poison as poisoned
from tests.verifier import verify

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16


@gk.program
def products(x: Any, w: Any, offsets: Any, d: Any) -> None:
    rows = gp.packed(x.rows, offsets)
    for i, m, n in gp.parallel(rows.count, rows.rows, w.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            acc += x[m, k] @ w[i, k, n]
        d[m, n] = acc


@gk.program
def turned(x: Any, w: Any, offsets: Any, d: Any) -> None:
    """Of matrices whose rows are columns of the result."""
    rows = gp.packed(x.rows, offsets)
    for i, m, n in gp.parallel(rows.count, rows.rows, w.rows):
        acc = gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            acc += x[m, k] @ w[i, n, k].T
        d[m, n] = acc


@gk.program
def of_rows(x: Any, y: Any, offsets: Any, d: Any) -> None:
    """Of each piece the product of its rows with others."""
    rows = gp.packed(x.rows, offsets)
    for i, m, n in gp.parallel(rows.count, x.columns, y.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(rows[i]):
            acc += x[k, m].T @ y[k, n]
        d[i, m, n] = acc


@gk.program
def gated(x: Any, w: Any, v: Any, offsets: Any, bias: Any, scale: Any, d: Any, sums: Any) -> None:
    """Two products at once; a bias of each piece's columns, a factor and a sum of each row, and where a row is in its piece."""
    rows = gp.packed(x.rows, offsets)
    for i, m, n in gp.parallel(rows.count, rows.rows, w.columns):
        gate, up, total = gp.zeros(m, n), gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(x.columns):
            gate += x[m, k] @ w[i, k, n]
            up += x[m, k] @ v[i, k, n]
            total += x[m, k].sum(axis=1)
        d[m, n] = (gp.maximum(gate, 0.0) * up + bias[i, n]) * scale[m] + 0.01 * gp.place(m) + 0.1 * gp.place(i)
        with gp.once(n):
            sums[m] = total * scale[m]


@gk.program
def with_zeros(x: Any, w: Any, offsets: Any, d: Any) -> None:
    """Of rows from which a number is subtracted: minus the sums of a matrix's columns."""
    rows = gp.packed(x.rows, offsets)
    for i, m, n in gp.parallel(rows.count, rows.rows, w.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(n)
        for k in gp.sequential(x.columns):
            acc += x[m, k] @ w[i, k, n]
            sums += w[i, k, n].sum(axis=0)
        d[m, n] = acc - 0.5 * sums


@gk.program
def named(x: Any, w: Any, index: Any, offsets: Any, d: Any) -> None:
    """Of rows that an array names."""
    rows = gp.packed(d.rows, offsets)
    for i, m, n in gp.parallel(rows.count, rows.rows, w.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            acc += x[index[m], k] @ w[i, k, n]
        d[m, n] = acc


@gk.program
def scattered(x: Any, w: Any, to: Any, offsets: Any, weight: Any, d: Any) -> None:
    """To rows that an array names."""
    rows = gp.packed(x.rows, offsets)
    for i, m, n in gp.parallel(rows.count, rows.rows, w.rows):
        acc = gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            acc += x[m, k] @ w[i, n, k].T
        d[to[m], n] = acc * weight[m]


@gk.program
def both(x: Any, w: Any, v: Any, index: Any, to: Any, offsets: Any, d: Any, sums: Any) -> None:
    """From and to rows that arrays name, in two products; a sum of each row, and where it is in its piece."""
    rows = gp.packed(index.columns, offsets)
    for i, m, n in gp.parallel(rows.count, rows.rows, w.columns):
        gate, up, total = gp.zeros(m, n), gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(x.columns):
            gate += x[index[m], k] @ w[i, k, n]
            up += x[index[m], k] @ v[i, k, n]
            total += x[index[m], k].sum(axis=1)
        d[to[m], n] = gp.maximum(gate, 0.0) * up + 0.01 * gp.place(m)
        with gp.once(n):
            sums[m] = total


@gk.program
def of_named_rows(x: Any, y: Any, index: Any, offsets: Any, d: Any) -> None:
    """Of each piece the product of rows that an array names with its own."""
    rows = gp.packed(y.rows, offsets)
    for i, m, n in gp.parallel(rows.count, x.columns, y.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(rows[i]):
            acc += x[index[k], m].T @ y[k, n]
        d[i, m, n] = acc


@gk.program
def with_named_rows(x: Any, y: Any, index: Any, offsets: Any, d: Any) -> None:
    """The same of its own with those."""
    rows = gp.packed(x.rows, offsets)
    for i, m, n in gp.parallel(rows.count, x.columns, y.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(rows[i]):
            acc += x[k, m].T @ y[index[k], n]
        d[i, m, n] = acc


@gk.program
def whole(x: Any, w: Any, to: Any, which: Any, d: Any) -> None:
    """Without pieces; of the right operand, too: a product of a matrix with itself, at places that arrays name."""
    for m, n in gp.parallel(to.columns, which.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            acc += x[m, k] @ w[which[n], k].T
        d[to[m], n] = acc


#: No rows, one, several tiles; rows of no piece in front and behind; one piece; many; none.
OFFSETS = {
    "usual": [0, 20, 20, 148, 149, 300],
    "gaps": [7, 7, 90, 260],
    "one": [0, 300],
    "empty": [40, 40, 40],
    "many": [0, *range(3, 293, 17), 300, 300, 300],
}
MAPPINGS = {"": None, "narrow": gk.Mapping({"n": 64}, band=1), "one": gk.Mapping({"n": 64}, warpgroups=1), "three": gk.Mapping({"n": 128}, warpgroups=3),
            "rows": gk.Mapping({"n": 64}, cluster={"m": 2}), "columns": gk.Mapping({"n": 64}, cluster={"n": 2}),
            "both": gk.Mapping({"n": 64}, warpgroups=1, cluster={"m": 2, "n": 2})}


def normal(rng: np.random.Generator, *shape: int, dtype: Any = F16) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def check(machine: Any, program: gk.Program, arrays: list[np.ndarray], results: int, mapping: gk.Mapping | None, columns: int | None = None) -> None:
    """A program's results, the last of the arrays, which are poisoned: they are the reference's, and stay so where that stores nothing.
    ``columns``: stacks are views of so many."""
    check_named(machine, program, arrays, {} if columns is None else {at: columns for at, x in enumerate(arrays) if x.ndim == 3}, mapping, results)


@on_machines
@pytest.mark.kin(1)
@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("program", [products, turned, of_rows], ids=lambda x: x.function.__name__)
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_pieces(machine: Any, mapping: str, offsets: str, program: gk.Program, dtype: Any, rng: np.random.Generator) -> None:
    """Each is what it is alone. What other pieces have, infinities and NaN, is in none."""
    cuts = np.array(OFFSETS[offsets], np.int32 if dtype is F16 else np.int64)
    count, rows, k, n = len(cuts) - 1, 300, 104, 136
    x, d = normal(rng, rows, k, dtype=dtype), poisoned((rows, n), dtype)
    x[:cuts[0]], x[cuts[-1]:] = np.nan, np.inf
    if program is of_rows:
        y, d = normal(rng, rows, n, dtype=dtype), poisoned((count, k, n), dtype)
        y[:cuts[0]], y[cuts[-1]:] = np.inf, np.nan
        check(machine, program, [x, y, cuts, d], 1, MAPPINGS[mapping])
        return
    w = normal(rng, count, *((k, n) if program is products else (n, k)), dtype=dtype)
    check(machine, program, [x, w, cuts, d], 1, MAPPINGS[mapping])


@on_machines
@pytest.mark.kin(1)
@pytest.mark.sample(3)
@pytest.mark.parametrize("columns,dtype", [(136, F16), (67, F16), (72, F32)])
@pytest.mark.parametrize("mapping", ["", "columns"])
def test_elements_of_rows_and_of_pieces(machine: Any, mapping: str, columns: int, dtype: Any, rng: np.random.Generator) -> None:
    """Arrays are read where a piece begins; places count from there."""
    cuts, width = np.array(OFFSETS["usual"], np.int32), -(-columns // 8) * 8
    x, bias, scale = normal(rng, 300, 40), normal(rng, 5, columns), normal(rng, 300)
    w, v = (normal(rng, 5, 40, width) for _ in range(2))
    d, sums = poisoned((300, columns), dtype), poisoned((300,), F32)
    check(machine, gated, [x, w, v, cuts, bias, scale, d, sums], 2, MAPPINGS[mapping], columns)


@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("mapping", ["", "rows"])
def test_sums_of_columns(machine: Any, mapping: str, rng: np.random.Generator) -> None:
    """All warps add them up and meet, though some have no rows of the piece."""
    cuts = np.array(OFFSETS["usual"], np.int32)
    check(machine, with_zeros, [normal(rng, 300, 104), normal(rng, 5, 104, 136), cuts, poisoned((300, 136), F16)], 1, MAPPINGS[mapping])


def names(rng: np.random.Generator, count: int, rows: int, dtype: Any = np.int32) -> np.ndarray:
    """Of rows: some twice, some of none, far away and below 0."""
    found = rng.integers(0, rows, count).astype(dtype)
    found[::7], found[3::11] = -1, rows
    found[5::29], found[8::31] = np.iinfo(dtype).max, np.iinfo(dtype).min
    return found


def places(rng: np.random.Generator, count: int, rows: int, dtype: Any = np.int32) -> np.ndarray:
    """The same, of none twice."""
    found = rng.permutation(np.arange(-20, max(rows, count) + 20))[:count].astype(dtype)
    found[3::11], found[5::29] = np.iinfo(dtype).max, np.iinfo(dtype).min
    return found


NAMED = {"": None, "narrow": gk.Mapping({"n": 64}, band=1), "one": gk.Mapping({"n": 64}, warpgroups=1), "three": gk.Mapping({"n": 128}, warpgroups=3),
         "deep": gk.Mapping({"n": 64, "k": 128}, stages=2)}


@on_machines
@pytest.mark.kin(1)
@pytest.mark.sample(8)
@pytest.mark.parametrize("program", [named, scattered, of_named_rows, with_named_rows], ids=lambda x: x.function.__name__)
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("mapping", NAMED)
def test_named_rows(machine: Any, mapping: str, offsets: str, program: gk.Program, rng: np.random.Generator) -> None:
    """A number of no row is a row of zeros, and is stored nowhere. Elements of 16 bytes that a row ends within are zeros, whatever lies
    behind them."""
    of = np.int32 if mapping in ("", "one") else np.int64
    cuts, count, rows, k, n = np.array(OFFSETS[offsets], of), len(OFFSETS[offsets]) - 1, 300, 100 if mapping == "" else 104, 136
    x = normal(rng, 90 if program is not scattered else rows, 112)
    x[:, k:] = np.nan
    if program is scattered:
        w, d = normal(rng, count, n, k + -k % 8), poisoned((310, n), F16)
        x[:cuts[0]], x[cuts[-1]:] = np.nan, np.inf
        check_named(machine, program, [x, w, places(rng, rows, 310, of), cuts, normal(rng, rows), d], {0: k, 1: k}, NAMED[mapping])
    elif program is named:
        w, d = normal(rng, count, k, n), poisoned((rows, n), F16)
        check_named(machine, program, [x, w, names(rng, rows, 90, of), cuts, d], {0: k}, NAMED[mapping])
    else:
        y, d = normal(rng, rows, n), poisoned((count, k, n) if program is of_named_rows else (count, n, k), F16)
        y[:cuts[0]], y[cuts[-1]:] = np.inf, np.nan
        given = [(x, k), (y, n)] if program is of_named_rows else [(y, n), (x, k)]
        check_named(machine, program, [x for x, _ in given] + [names(rng, rows, 90, of), cuts, d], {at: width for at, (_, width) in enumerate(given)},
                    NAMED[mapping])


def check_named(machine: Any, program: gk.Program, arrays: list[np.ndarray], widths: dict[int, int], mapping: gk.Mapping | None, results: int = 1) -> None:
    """Those of ``widths`` are views of so many columns."""
    def cut(held: list[Any]) -> list[Any]:
        return [x[..., :widths[at]] if at in widths else x for at, x in enumerate(held)]

    wanted, held = program.reference(*cut(arrays)), cut([machine.array(x) for x in arrays])
    with machine.session(), assumed(dataclasses.replace(H100, sm_count=5)):
        program(*held, mapping=mapping)
    check_close([machine.numpy(x) for x in held[-results:]], wanted, lambda got: 2e-2 if got.dtype == BF16 else 3e-3)


@on_machines
@pytest.mark.kin(1)
@pytest.mark.sample(3)
@pytest.mark.parametrize("columns,dtype", [(136, F16), (67, F16), (72, F32), (136, BF16)], ids=str)
@pytest.mark.parametrize("mapping", ["", "narrow"])
def test_rows_from_and_to_where_arrays_say(machine: Any, mapping: str, columns: int, dtype: Any, rng: np.random.Generator) -> None:
    cuts, width, of = np.array(OFFSETS["usual"], np.int32), -(-columns // 8) * 8, BF16 if dtype is BF16 else F16
    x, (w, v) = normal(rng, 40, 72, dtype=of), (normal(rng, 5, 72, width, dtype=of) for _ in range(2))
    d, sums = poisoned((330, columns), dtype), poisoned((300,), F32)
    check_named(machine, both, [x, w, v, names(rng, 300, 40), places(rng, 300, 330, np.int64), cuts, d, sums], {1: columns, 2: columns},
                NAMED[mapping], 2)


@pytest.mark.kin(1)
@on_machines
@pytest.mark.sample(2)
@pytest.mark.parametrize("mapping", ["", "three"])
def test_named_rows_without_pieces(machine: Any, mapping: str, rng: np.random.Generator) -> None:
    """Of no rows, too, and of arrays of numbers that do not lie side by side."""
    for rows, columns in ((150, 200), (0, 40), (30, 0)):
        x, w = normal(rng, rows, 72), normal(rng, 33, 72)
        to, which = places(rng, 2 * rows, 170)[::2], names(rng, columns, 33, np.int64)
        check_named(machine, whole, [x, w, to, which, poisoned((170, columns), F16)], {}, NAMED[mapping])


@pytest.mark.gpu
@pytest.mark.parametrize("mapping", NAMED)
@pytest.mark.parametrize("program", [named, scattered, of_named_rows, with_named_rows], ids=lambda x: x.function.__name__)
def test_drawn_names_on_a_gpu(program: gk.Program, mapping: str, rng: np.random.Generator) -> None:
    """Many rows, on all multiprocessors: the same bits as of rows that are copied first."""
    import cupy

    for _ in range(2):
        count, k, n = int(rng.integers(1, 60)), 8 * int(rng.integers(1, 60)), 8 * int(rng.integers(1, 60))
        cuts = np.cumsum([0, *rng.choice([0, 1, 7, 63, 64, 65, 128, 129, 500], count)])
        rows, offsets = max(1, int(cuts[-1])), cupy.asarray(cuts.astype(np.int32))
        x, index = cupy.asarray(normal(rng, rows, k)), names(rng, rows, rows)
        there = cupy.asarray((index >= 0) & (index < rows))
        copied = cupy.where(there[:, None], x[cupy.asarray(np.clip(index, 0, rows - 1))], 0).astype(F16)
        if program is scattered:
            w, to, weight = cupy.asarray(normal(rng, count, n, k)), cupy.asarray(rng.permutation(rows + 9)[:rows]), cupy.ones(rows, F32)
            d, wanted = cupy.full((rows + 9, n), np.nan, F16), cupy.full((rows, n), np.nan, F16)
            scattered(x, w, to, offsets, weight, d, mapping=NAMED[mapping])
            turned(x, w, offsets, wanted, mapping=NAMED[mapping])
            d, wanted = d[to[:int(cuts[-1])]], wanted[:int(cuts[-1])]
        elif program is named:
            w, d, wanted = cupy.asarray(normal(rng, count, k, n)), cupy.full((rows, n), np.nan, F16), cupy.full((rows, n), np.nan, F16)
            named(x, w, cupy.asarray(index), offsets, d, mapping=NAMED[mapping])
            products(copied, w, offsets, wanted, mapping=NAMED[mapping])
        else:
            y = cupy.asarray(normal(rng, rows, n))
            d, wanted = (cupy.full((count, k, n) if program is of_named_rows else (count, n, k), np.nan, F16) for _ in range(2))
            given = (x, y) if program is of_named_rows else (y, x)
            program(*given, cupy.asarray(index), offsets, d, mapping=NAMED[mapping])
            of_rows(*(copied if z is x else z for z in given), offsets, wanted, mapping=NAMED[mapping])
        assert cupy.array_equal(d.view(np.int16), wanted.view(np.int16))


@pytest.mark.kin(1)
@on_machines
def test_offsets_that_are_none(machine: Any, rng: np.random.Generator) -> None:
    """No row beyond the array is read or written, wherever offsets point; pieces that end before they begin are none."""
    x, w, y = normal(rng, 100, 64), normal(rng, 3, 64, 64), normal(rng, 100, 64)
    for cuts, begin in (([-70, -80, 40, 900], 0), ([90, 60, 40, 900], 40)):
        held = [machine.array(a) for a in (x, w, np.array(cuts, np.int64), poisoned((164, 64), F16), y, poisoned((3, 64, 64), F16))]
        with machine.session():
            products(*held[:3], held[3][:100])
            of_rows(held[0], held[4], held[2], held[5])
        found, wanted = machine.numpy(held[3]), x.astype(float) @ w.astype(float)
        assert np.isnan(found[100:]).all() and np.isnan(found[:begin]).all()
        check_close([found[begin:40], found[40:100]], (wanted[1, begin:40], wanted[2, 40:]), lambda got: 3e-3)
        of = [x[first:last].astype(float).T @ y[first:last] for first, last in ((0, 0), (begin, 40), (40, 100))]
        check_close([machine.numpy(held[5])], np.array(of), lambda got: 3e-3)


@on_machines
def test_no_pieces(machine: Any, rng: np.random.Generator) -> None:
    """Nothing is launched, and no tensor map is made of arrays without elements."""
    for program, rows in ((products, 40), (products, 0), (of_rows, 40)):
        x, w = normal(rng, rows, 64), normal(rng, *((0, 64, 72) if program is products else (rows, 72)))
        arrays = [x, w, np.array([0], np.int32), poisoned((rows, 72) if program is products else (0, 64, 72), F16)]
        check(machine, program, arrays, 1, None)
        with assumed(H100):
            assert program.plan(*arrays).launches.kernels == ()


@pytest.mark.gpu
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("program", [products, turned, of_rows], ids=lambda x: x.function.__name__)
def test_drawn_pieces_on_a_gpu(program: gk.Program, mapping: str, rng: np.random.Generator) -> None:
    """Many, of drawn lengths, on all multiprocessors, against products one by one; results twice, with the same bits."""
    import cupy

    for _ in range(2):
        count, k, n = int(rng.integers(1, 80)), 8 * int(rng.integers(1, 60)), 8 * int(rng.integers(1, 80))
        cuts = np.cumsum([0, *rng.choice([0, 1, 7, 63, 64, 65, 127, 128, 129, 500], count)])
        rows = max(1, int(cuts[-1]))
        x = cupy.asarray(normal(rng, rows, k))
        if program is of_rows:
            other, d = cupy.asarray(normal(rng, rows, n)), cupy.full((count, k, n), np.nan, F16)
        else:
            other, d = cupy.asarray(normal(rng, count, *((k, n) if program is products else (n, k)))), cupy.full((rows, n), np.nan, F16)
        offsets, again = cupy.asarray(cuts.astype(np.int32)), d.copy()
        for result in (d, again):
            program(x, other, offsets, result, mapping=MAPPINGS[mapping])
        assert cupy.array_equal(d.view(np.int16), again.view(np.int16))
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            own = x[begin:end].astype(F32)
            matrix = other[begin:end] if program is of_rows else other[i].T if program is turned else other[i]
            found, wanted = (d[i], own.T @ matrix.astype(F32)) if program is of_rows else (d[begin:end], own @ matrix.astype(F32))
            assert not cupy.isnan(found).any()
            assert wanted.size == 0 or float(cupy.abs(found - wanted).max()) <= 3e-3 * max(1.0, float(cupy.abs(wanted).max()))


# -- texts ------------------------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
def test_texts_are_sound(rng: np.random.Generator) -> None:
    x, w, y, cuts = normal(rng, 300, 104), normal(rng, 3, 104, 136), normal(rng, 300, 136), np.array([0, 100, 100, 300])
    for mapping in MAPPINGS.values():
        verify(products.plan(x, w, cuts, poisoned((300, 136), F16), mapping=mapping))
        verify(of_rows.plan(x, y, cuts, poisoned((3, 104, 136), F16), mapping=mapping))
    index = names(rng, 300, 300)
    for mapping in NAMED.values():
        verify(named.plan(x, w, index, cuts, poisoned((300, 136), F16), mapping=mapping))
        verify(of_named_rows.plan(x, y, index, cuts, poisoned((3, 104, 136), F16), mapping=mapping))
        verify(with_named_rows.plan(x, y, index, cuts, poisoned((3, 104, 136), F16), mapping=mapping))
        verify(scattered.plan(x, normal(rng, 3, 136, 104), index, cuts, normal(rng, 300), poisoned((300, 136), F16), mapping=mapping))
        verify(whole.plan(x, x, index, index[:40], poisoned((300, 40), F16), mapping=mapping))


def test_another_number_of_pieces_has_the_same_text(rng: np.random.Generator) -> None:
    with assumed(H100):
        texts = {products.plan(normal(rng, 700 * count, 64), normal(rng, count, 64, 64), np.arange(count + 1) * 700,
                               poisoned((700 * count, 64), F16), mapping=gk.Mapping({"n": 64}, band=4)).text for count in (2, 3, 9)}
    assert len(texts) == 1


# -- what is refused --------------------------------------------------------------------------------------------------------

HEAD = """def f(x, w, y, offsets, d, z, v, t):
    rows = gp.packed(x.rows, offsets)
"""
TILE = """    for {} in gp.parallel({}):{}
        acc = gp.zeros(m, n)
        for k in gp.sequential({}):{}
            acc += {}
        {} = acc
"""


@pytest.mark.parametrize("body,words", [
    (TILE.format("i, h, m, n", "rows.count, z.count, rows.rows, w.columns", "  #", "x.columns", "", "x[m, k] @ w[i, k, n]", "z[h, m, n]"),
     "rows of m are packed; tiles of rows and columns then have no stacks but the pieces"),
    (TILE.format("i, m, n", "rows.count, rows.rows, w.columns", "", "w.rows", "", "t[i, k, m].T @ w[i, k, n]  #", "d[m, n]"),
     r"t\[k, m\].T: rows of m are packed, and lie along this array's columns"),
    (TILE.format("i, n, m", "rows.count, w.columns, rows.rows", "  #", "x.columns", "", "x[m, k] @ w[i, k, n]", "d[m, n]").replace(
        "zeros(m, n)", "zeros(n, m)").replace("x[m, k] @ w[i, k, n]", "w[i, k, n].T @ x[m, k].T").replace("d[m, n]", "t[i, n, m]"),
     "are a tile's columns; a kernel has pieces of a tile's rows, or of rounds"),
    (TILE.format("i, m, n", "rows.count, x.columns, x.columns", "", "rows[i]", "  #", "x[k, m].T @ y[k, n]", "v[i, m, n]").replace(
        "x.columns, x.columns", "x.columns, y.columns").replace(
        "x[k, m].T @ y[k, n]", "x[k, m].T @ y[k, n]\n        for j in gp.sequential(w.rows):\n            acc += w[i, j, m].T @ w[i, j, n]"),
     "rounds along pieces of k: a kernel has one loop"),
])
def test_what_is_refused(body: str, words: str) -> None:
    given = (np.zeros((30, 64), F16), np.zeros((2, 64, 64), F16), np.zeros((30, 64), F16), np.array([0, 10, 30]), np.zeros((30, 64), F16),
             np.zeros((2, 30, 64), F16), np.zeros((2, 64, 64), F16), np.zeros((2, 64, 30), F16))
    check_refused(HEAD + body, words, lambda program: program.plan(*given))


def test_other_gpus_are_refused(rng: np.random.Generator) -> None:
    given = normal(rng, 30, 64), normal(rng, 2, 64, 64), np.array([0, 10, 30]), poisoned((30, 64), F16)
    for device, mapping in ((A100, None), (H100, gk.Mapping(kernel="multistage"))):
        with assumed(device), pytest.raises(ConfigError, match=r"packed\(...\) in tiles of rows and columns: the kernel for TMA and wgmma"):
            products.plan(*given, mapping=mapping)


NAMES = """def f(x, w, y, index, d, s, t, u):
    for {} in gp.parallel({}):
        acc = gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            acc += {}
        {} = acc{}
"""


@pytest.mark.parametrize("loop,product,stored,more,words", [
    ("m, n;index.columns, w.columns", "x[index[m], k] @ y[index[n], k].T", "d[m, n]", "", "of all their operands; a kernel brings one at least with TMA"),
    ("i, m, n;t.count, index.columns, w.columns", "t[i, index[m], k] @ w[k, n]", "u[i, m, n]", "", "a kernel looks rows of a matrix up, and none of a stack's"),
    ("m, n;x.rows, index.columns", "x[m, k] @ w[k, index[n]]", "d[m, n]", "", r"index\[n\] stands for rows, and is used for axis 1 of w"),
    ("m, n;index.columns, w.columns", "x[index[m], k] @ w[k, n]", "d[m, n]", " + y[index[m], n]", "is read where a tile is stored"),
    ("m, n;index.columns, w.columns", "x[index[m], k] @ w[k, n]", "d[m, n]", " + s[index[m]]", "stands for rows, and is used for axis 0 of s"),
    ("m, n;index.columns, w.columns", "x[index[m], k] @ w[k, n]", "d[index[n], m]", "", "is stored; a kernel stores whole tiles"),
    ("m, n;index.columns, w.columns", "x[index[m], m] @ w[k, n]", "d[m, n]", "", "is used twice"),
    ("m, n;index.columns, w.columns", "x[s[m], k] @ w[k, n]", "d[m, n]", "", "index 0 is <value of"),
])
def test_named_rows_that_are_refused(loop: str, product: str, stored: str, more: str, words: str) -> None:
    given = (np.zeros((64, 64), F16), np.zeros((64, 64), F16), np.zeros((64, 64), F16), np.arange(64), np.zeros((64, 64), F16),
             np.zeros(64, F32), np.zeros((2, 64, 64), F16), np.zeros((2, 64, 64), F16))
    check_refused(NAMES.format(*loop.split(";"), product, stored, more), words, lambda program: program.plan(*given))


@gk.program
def of_whole_rows(x: Any, w: Any, index: Any, d: Any) -> None:
    for m in gp.parallel(d.rows):
        acc = gp.zeros(m, w.columns)
        for n in gp.sequential(w.rows):
            acc += x[index[m], n] @ w[n]
        d[m] = acc


def test_kernels_that_look_no_rows_up(rng: np.random.Generator) -> None:
    x, w, index, d = normal(rng, 30, 64), normal(rng, 64, 64), names(rng, 40, 30), poisoned((40, 64), F16)
    with pytest.raises(ValueError, match="a kernel has them in functions of rows, and in tiles of rows and columns"):
        of_whole_rows.plan(x, w, index, d)
    wanted = np.where(((index >= 0) & (index < 30))[:, None], x[np.clip(index, 0, 29)], 0).astype(float)
    assert np.allclose(of_whole_rows.reference(x, w, index, d), wanted @ w)
    offsets, w = np.array([0, 40]), w[None]
    for mapping in (gk.Mapping(cluster={"m": 2}), gk.Mapping(kernel="multistage")):
        with assumed(H100), pytest.raises(ConfigError, match="rows that an array names|reads offsets"):
            named.plan(x, w, index, offsets, d, mapping=mapping)
    with assumed(A100), pytest.raises(ConfigError, match=r"x\[index\[m\], k\] in tiles of rows and columns: the kernel for wgmma"):
        whole.plan(normal(rng, 40, 64), x, index, index[:20], d[:, :20])
