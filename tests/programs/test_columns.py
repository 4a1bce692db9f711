"""Sums of columns beside a product, and sums of rows and columns at the end of its tile, in the emulator, against NumPy."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.emulator.errors import EmulatorError
from gemmkit.programs import sums as module
from gemmkit.programs.collectives import StagedTile
from gemmkit.programs.sums import ColumnSums, ColumnValues
from gemmkit.runtime.device import H100, assumed
from tests.support import programs as listing
from tests.support.patches import Seeded

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
EPS = {F16: 2.0 ** -11, BF16: 2.0 ** -8, F32: 2.0 ** -20}
ONE = dataclasses.replace(H100, sm_count=1)            # a block goes on from tile to tile
CLUSTERS: tuple[dict[str, int], ...] = ({}, {}, {"m": 2}, {"n": 2}, {"m": 2, "n": 2})


def wide(rng: np.random.Generator, *shape: int, dtype: Any = F16) -> np.ndarray:
    """A view of an array whose rows TMA takes, with numbers behind it that no sum may have."""
    whole = np.full((*shape[:-1], shape[-1] + -shape[-1] % 8), 99, dtype)
    whole[..., :shape[-1]] = rng.standard_normal(shape)
    return whole[..., :shape[-1]]


def nothing(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def check(program: gp.Program, *arrays: Any, mapping: gk.Mapping | None = None, seed: int | None = None, **more: Any) -> Any:
    """Every result is the reference's to the rounding of its dtype, and of sums that cancel."""
    wanted = program.reference(*arrays, **more)
    given = program.bound(arrays, more)
    with assumed(ONE):
        plan = program.plan(*arrays, mapping=mapping, **more)
    with gk.emulate(seed):
        plan.run(given)
    results = [given[name] for name in given if name in plan.results]
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert np.abs(got.astype(float) - exact).max(initial=0.0) <= 4 * EPS[got.dtype] * max(np.abs(exact).max(initial=0.0), 8.0)
    return plan


@gk.program
def apart(a: Any, b: Any, c: Any, e: Any, d: Any, y: Any, z: Any) -> None:
    """Sums of rows and columns that no product takes."""
    for m, n in gp.parallel(a.rows, b.columns):
        acc, sums, more, columns, lines = gp.zeros(m, n), gp.zeros(m), gp.zeros(m), gp.zeros(n), gp.zeros(n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            sums += c[m, k].sum(axis=1)
            more += a[m, k].sum(axis=1) + c[m, k].sum(axis=1)
            columns += b[k, n].sum(axis=0)
            lines += e[n, k].sum(axis=1)
        d[m, n] = acc + lines - columns
        with gp.once(n):
            y[m] = sums - more
        with gp.once(m):
            z[n] = lines


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@pytest.mark.parametrize("kernel", ["warp_specialised", "multistage"])
@pytest.mark.parametrize("m, n, k", [(100, 131, 72), (7, 9, 200), (130, 64, 64), (1, 1, 1)])
def test_sums_that_no_product_takes(m: int, n: int, k: int, kernel: str, rng: np.random.Generator) -> None:
    for dtype, cluster in ((F16, {}), (BF16, {"m": 2} if kernel == "warp_specialised" else {})):
        arrays = wide(rng, m, k, dtype=dtype), wide(rng, k, n, dtype=dtype), wide(rng, m, k, dtype=dtype), wide(rng, n, k, dtype=dtype)
        mapping = gk.Mapping({"n": 64}, kernel=kernel, warpgroups=1, cluster=cluster)
        check(apart, *arrays, nothing(m, n), nothing(m), nothing(n), mapping=mapping)


def drawn(seed: int) -> tuple[gp.Program, tuple, gk.Mapping, dict[str, float]]:
    rng = np.random.default_rng(seed)
    m, n, k = (int(rng.choice([1, 2, 7, 31, 64, 97, 131, 200])) for _ in range(3))
    dtype, out = (BF16 if rng.integers(2) else F16), (F16, BF16, F32)[rng.integers(3)]
    row, column = (rng.standard_normal(extent).astype(F32) for extent in (m, n))
    warpgroups = int(rng.integers(1, 4))
    blocks = {"n": int(rng.choice([64, 128] if warpgroups == 3 else [64, 128, 192])), "k": int(rng.choice([64, 64, 128]))}
    cluster = CLUSTERS[rng.integers(len(CLUSTERS))]
    mapping = gk.Mapping(blocks, warpgroups=warpgroups, stages=2, cluster=cluster)
    which = rng.integers(5)
    if which == 0:
        return (listing.product_and_columns, (wide(rng, m, k, dtype=dtype), wide(rng, k, n, dtype=dtype), nothing(m, n, dtype=out),
                                              nothing(n, dtype=out)), mapping, {})
    if which < 3:
        arrays = wide(rng, m, k, dtype=dtype), wide(rng, k, n, dtype=dtype), row, column, column[::-1], nothing(m, n, dtype=out)
        return listing.zero_points, arrays, mapping, {}
    stack = int(rng.integers(1, 4))
    arrays = (wide(rng, stack, m, k, dtype=dtype), wide(rng, stack, n, k, dtype=dtype), rng.standard_normal((stack, m)).astype(F32),
              nothing(stack, m, n, dtype=out), nothing(stack, n, dtype=out))
    return listing.zero_points_of_weights, arrays, mapping, dict(of_all=0.25)


@pytest.mark.kin(1)
@pytest.mark.sample(40, at=1)
@pytest.mark.parametrize("seed", range(80))
def test_drawn(seed: int) -> None:
    program, arrays, mapping, more = drawn(seed)
    try:
        plan = check(program, *arrays, mapping=mapping, seed=seed if seed % 3 else None, **more)
    except gk.ConfigError as error:
        assert "bytes of shared memory" in str(error)
        return
    with assumed(ONE):
        assert program.plan(*arrays, mapping=plan.mapping, **more).text == plan.text


@pytest.mark.kin(1)
@pytest.mark.sample(30, at=16)
@pytest.mark.parametrize("seed", range(60))
def test_drawn_multistage(seed: int) -> None:
    """Of blocks that threads copy, by all of them; with 32 columns a line is half as long."""
    program, arrays, mapping, more = drawn(seed)
    mapping = listing.multistage(dataclasses.replace(mapping, blocks={**mapping.blocks, "k": (32, 64)[seed % 2]}))
    try:
        plan = check(program, *arrays, mapping=mapping, seed=seed if seed % 3 else None, **more)
    except gk.ConfigError as error:
        assert "bytes of shared memory" in str(error)
        return
    assert plan.is_multistage and "ColumnSums" in plan.text


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (1, 1, 1)], ids=str)
def test_sizes_of_nothing_and_of_one(sizes: tuple[int, int, int], rng: np.random.Generator) -> None:
    m, n, k = sizes
    arrays = wide(rng, m, k), wide(rng, k, n), nothing(m, n), nothing(n)
    if m:
        check(listing.product_and_columns, *arrays)
    else:                                              # no tile stores them
        with gk.emulate():
            listing.product_and_columns(*arrays)
        assert np.isnan(arrays[3]).all()


@gk.program
def two_loops(x: Any, w: Any, h: Any, u: Any, d: Any, y: Any, z: Any) -> None:
    """One cell of columns has both loops' sums, another one the second's alone; a result is of both."""
    for m, n in gp.parallel(x.rows, w.columns):
        acc, both, last = gp.zeros(m, n), gp.full(n, 2.0), gp.zeros(n)
        for k in gp.sequential(x.columns):
            acc += x[m, k] @ w[k, n]
            both += w[k, n].sum(axis=0)
        for j in gp.sequential(h.columns):
            acc += h[m, j] @ u[j, n]
            both += u[j, n].sum(axis=0)
            last += u[j, n].sum(axis=0)
        d[m, n] = gp.where(lambda i, j: j <= i, acc * gp.tanh(both), last)
        with gp.once(m):
            y[n] = both * both - last
            z[n] = gp.where(lambda j: j < 100, last, -1.0)


@pytest.mark.kin(1)
def test_cells_that_two_loops_add_to(rng: np.random.Generator) -> None:
    arrays = wide(rng, 35, 72), wide(rng, 72, 131), wide(rng, 35, 72), wide(rng, 72, 131)
    check(two_loops, *arrays, nothing(35, 131), nothing(131), nothing(131, dtype=F16), mapping=gk.Mapping({"n": 64}, warpgroups=1),
          seed=3)


@gk.program
def dual_columns(a: Any, b: Any, c: Any, bias: Any, d: Any, y: Any) -> None:
    """Of a product's columns, the other product's, with an array of columns; and rows' sums in the tile."""
    for m, n in gp.parallel(a.rows, b.columns):
        x, z, sums, across = gp.zeros(m, n), gp.zeros(m, n), gp.zeros(n), gp.zeros(m)
        for k in gp.sequential(a.columns):
            x += a[m, k] @ b[k, n]
            z += a[m, k] @ c[k, n]
            sums += c[k, n].sum(axis=0)
            across += a[m, k].sum(axis=1)
        d[m, n] = (x - z) * across + sums * sums
        with gp.once(m):
            y[n] = gp.maximum(sums + bias[n], 0.0)


@pytest.mark.kin(1)
def test_of_two_products(rng: np.random.Generator) -> None:
    a, b, c = wide(rng, 100, 72), wide(rng, 72, 131), wide(rng, 72, 131)
    plan = check(dual_columns, a, b, c, rng.standard_normal(131).astype(F16), nothing(100, 131), nothing(131), seed=2)
    assert "row_value(across, i)" in plan.text and plan.text.count("kept_sums.at(") == 1


@pytest.mark.kin(1)
def test_a_transposed_left_operand_and_infinities(rng: np.random.Generator) -> None:
    """Columns of B have sums beside A by columns; an infinity is its column's alone."""
    @gk.program
    def by_columns(a: Any, b: Any, d: Any, y: Any) -> None:
        for m, n in gp.parallel(a.columns, b.columns):
            acc, sums = gp.zeros(m, n), gp.zeros(n)
            for k in gp.sequential(a.rows):
                acc += a[k, m].T @ b[k, n]
                sums += b[k, n].sum(axis=0)
            d[m, n] = acc
            with gp.once(m):
                y[n] = sums

    a, b = wide(rng, 72, 70), wide(rng, 72, 131)
    check(by_columns, a, b, nothing(70, 131), nothing(131), mapping=gk.Mapping({"n": 192}, warpgroups=1))
    b[5, 17], b[6, 90] = math.inf, math.nan
    y = nothing(131)
    with gk.emulate():
        by_columns(a, b, nothing(70, 131), y)
    assert y[17] == math.inf and np.isnan(y[90]) and np.isfinite(np.delete(y, [17, 90])).all()


@pytest.mark.parametrize("columns", [64, 128, 192, 256])
@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_warps_share_the_columns_evenly(columns: int, consumers: int, transposed: bool) -> None:
    lines, length = (columns, 64) if transposed else (64, columns)
    sums = ColumnSums(StagedTile("float16", lines, length, 0, 2 * lines * length), consumers, transposed)
    assert sums.columns == columns == 8 * sums.octets * sums.warps and sums.warps <= 4 * consumers
    assert sums.steps * 32 == 64 and ColumnValues(sums, 0).threads == 128 * consumers


@pytest.mark.kin(1)
@pytest.mark.parametrize("which", [0, 1], ids=["before they are put", "behind"])
def test_a_barrier_that_is_not_there_is_found(which: int, seeded: Seeded, rng: np.random.Generator) -> None:
    """Of the two around what is put into shared memory: a warpgroup reads what is not there yet, or no longer."""
    met: dict[tuple, int] = {}
    real, current = module.named_barrier, module.thread_index

    def every_other(number: int, threads: int) -> None:
        thread = int(current())
        met[thread, ] = met.get((thread,), -1) + 1
        if met[thread, ] % 2 != which:
            real(number, threads)

    seeded(module, "named_barrier", every_other)
    arrays = wide(rng, 150, 72), wide(rng, 72, 140), nothing(150), nothing(140), nothing(140), nothing(150, 140)
    for x in arrays[2:5]:
        x[...] = 1.0
    found = 0
    for seed in (1, 2, 3):
        try:
            check(listing.zero_points, *arrays, mapping=gk.Mapping({"n": 64}, warpgroups=2, stages=2), seed=seed)
        except (EmulatorError, AssertionError):
            found += 1
        met.clear()
    assert found


# -- refused ----------------------------------------------------------------------------------------------------------------

A, B, D, Y = np.zeros((40, 48), F16), np.zeros((48, 56), F16), np.zeros((40, 56), F16), np.zeros(56, F32)


def of_another(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            sums += gp.exp(b[k, n]).sum(axis=0)        # here
        d[m, n] = acc


def largest(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, most = gp.zeros(m, n), gp.full(n, -math.inf)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            most[:] = gp.maximum(most, b[k, n].max(axis=0))       # here
        d[m, n] = acc


def by_every_tile(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            sums += b[k, n].sum(axis=0)
        d[m, n] = acc
        y[n] = sums                                    # here


def before_the_last(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            sums += b[k, n].sum(axis=0)
        with gp.once(m):
            y[n] = sums                                # here
        for j in gp.sequential(a.columns):
            acc += a[m, j] @ b[j, n]
            sums += b[j, n].sum(axis=0)
        d[m, n] = acc


def sums_alone(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            sums += b[k, n].sum(axis=0)
        d[m, n] = gp.exp(sums)                         # here


def of_a_left_operand(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.columns, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.rows):
            acc += a[k, m].T @ b[k, n]
            sums += a[k, m].sum(axis=0)                # here
        d[m, n] = acc


def by_lines_and_by_columns(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            sums += b[k, n].sum(axis=0)
        for j in gp.sequential(y.columns):
            acc += a[m, j] @ y[n, j].T
            sums += y[n, j].sum(axis=1)                # here
        d[m, n] = acc


@pytest.mark.parametrize("function, words, shapes", [
    (of_another, "a sum of columns in rounds", None), (largest, r"other than by adding products and sums of rows or columns \(max\)", None),
    (by_every_tile, r"columns' within once\(m\)", None),
    (before_the_last, "a later loop adds to it", None), (sums_alone, "a result without an accumulator; it must contain", None),
    (of_a_left_operand, "a sum of rows in rounds", ((48, 40), (48, 56), (40, 56), (56,))),
    (by_lines_and_by_columns, "of columns and of lines", ((40, 48), (48, 56), (40, 56), (56, 48)))],
    ids=lambda x: getattr(x, "__name__", ""))
def test_what_has_no_kernel_names_the_line(function: Any, words: str, shapes: Any) -> None:
    source, first = inspect.getsourcelines(function)
    line = first + next(n for n, text in enumerate(source) if "# here" in text)
    arrays = (A, B, D, Y) if shapes is None else tuple(np.zeros(shape, F16) for shape in shapes)
    with pytest.raises(ValueError, match=words) as error:
        gk.program(function).plan(*arrays)
    assert f"{__file__}:{line}" in str(error.value)


def test_names_and_room() -> None:
    def kept_y(kept_y: Any, b: Any, d: Any) -> None:
        for m, n in gp.parallel(kept_y.rows, b.columns):
            acc = gp.zeros(m, n)
            for k in gp.sequential(kept_y.columns):
                acc += kept_y[m, k] @ b[k, n]
            d[m, n] = acc

    with pytest.raises(ValueError, match="kept_y: the derived kernel uses this name"):
        gk.program(kept_y).plan(A, B, D)
    with pytest.raises(gk.ConfigError, match="results of 256 need"):    # D leaves from registers where it has no room; 64 of float32
        listing.product_and_columns.plan(A, B, D, Y, mapping=gk.Mapping({"m": 128, "n": 64}, shared_bytes=40_000))
    smaller = listing.product_and_columns.plan(A, B, D, Y, mapping=gk.Mapping({"n": 64}, shared_bytes=50_000)).mapping
    assert smaller.blocks["m"] == 64 and smaller.blocks["n"] == 64                      # what the mapping leaves open shrinks
    with pytest.raises(gk.ConfigError, match="the cells of the program are acc, sums"):
        listing.product_and_columns.plan(A, B, D, Y, mapping=gk.Mapping(places={"p": "registers"}))


@pytest.mark.parametrize("function, words", [
    (lambda s, c, out: s - s.max(axis=0), "a reduction with axis=0"),
    (lambda s, c, out: s - s.T.sum(axis=1), "a reduction with axis=0, or of a transpose")])
def test_tiles_of_whole_rows_have_no_columns(function: Any, words: str) -> None:
    @gk.program
    def chained(a: Any, b: Any, c: Any, d: Any) -> None:
        for m in gp.parallel(a.rows):
            out = gp.zeros(m, c.columns)
            for n in gp.sequential(b.rows):
                out += function(a[m] @ b[n].T, c, out).astype(a.dtype) @ c[n]
            d[m] = out

    with pytest.raises(ValueError, match=words) as error:
        chained.plan(*(np.zeros((64, 64), F16) for _ in range(4)))
    assert __file__ in str(error.value)
