"""Rows that lie along an array's columns, and the largest and smallest elements of rows and columns, in rounds of tiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from tests.programs.test_derived import check, empty
from tests.programs.test_types import E4M3, F16, F32, I8, MULTISTAGE, checked, drawn, read


@gk.program
def turned(a: Any, b: Any, d: Any, y: Any) -> None:
    """Rows of the product are columns of A."""
    for m, n in gp.parallel(a.columns, b.columns):
        acc, left = gp.zeros(m, n), gp.full(m, 1.0)
        for k in gp.sequential(a.rows):
            acc += a[k, m].T @ b[k, n]
            left += a[k, m].sum(axis=0) + a[k, m].T.sum(axis=1)
        d[m, n] = acc + left
        with gp.once(n):
            y[m] = left


@gk.program
def extremes(a: Any, b: Any, d: Any, high: Any, low: Any, top: Any, bottom: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, most, least = gp.zeros(m, n), gp.full(m, -math.inf), gp.full(m, math.inf)
        highest, lowest = gp.full(n, -math.inf), gp.full(n, 0.25)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            most[:] = gp.maximum(most, a[m, k].max(axis=1))
            least[:] = gp.minimum(a[m, k].min(axis=1), least)
            highest[:] = gp.maximum(b[k, n].max(axis=0), highest)
            lowest[:] = gp.minimum(lowest, b[k, n].min(axis=0))
        d[m, n] = acc * most + highest
        with gp.once(n):
            high[m] = most
        with gp.once(n):
            low[m] = least
        with gp.once(m):
            top[n] = highest
        with gp.once(m):
            bottom[n] = lowest


@gk.program
def extremes_of_lines(a: Any, b: Any, d: Any, y: Any, z: Any, of: Any) -> None:
    """Of a stack; columns of the product are lines of B."""
    for h, m, n in gp.parallel(a.count, a.rows, b.rows):
        acc, most, least = gp.zeros(m, n), gp.full(m, 0.0), gp.full(n, math.inf)
        for k in gp.sequential(a.columns):
            acc += of(a[h, m, k]) @ of(b[n, k]).T
            most[:] = gp.maximum(most, a[h, m, k].max(axis=1))
            least[:] = gp.minimum(least, b[n, k].min(axis=1))
        d[h, m, n] = acc
        with gp.once(n):
            y[h, m] = most
        with gp.once(m):
            z[h, n] = least


@gk.program
def turned_extremes(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.columns, b.rows):
        acc, least = gp.zeros(m, n), gp.full(m, math.inf)
        for k in gp.sequential(a.rows):
            acc += a[k, m].T @ b[n, k].T
            least[:] = gp.minimum(least, a[k, m].T.min(axis=1))
        d[m, n] = acc
        with gp.once(n):
            y[m] = least


def result(*shape: int) -> np.ndarray:
    return empty(*shape, dtype=F32)


MAPPINGS = [gk.Mapping({"n": 128, "k": 64}, warpgroups=1, stages=2), gk.Mapping({"n": 64}, kernel=MULTISTAGE),
            gk.Mapping({"n": 64}, cluster={"m": 2}), gk.Mapping({"n": 64}, warpgroups=3)]


@pytest.mark.parametrize("mapping, m, n, k", [(MAPPINGS[0], 70, 72, 200), (MAPPINGS[1], 130, 72, 65), (MAPPINGS[2], 130, 8, 1)],
                         ids=str)
def test_rows_along_columns(rng: np.random.Generator, mapping: gk.Mapping, m: int, n: int, k: int) -> None:
    check(turned, drawn(rng, F16, k, m), drawn(rng, F16, k, n), result(m, n), result(m), mapping=mapping)
    check(turned_extremes, drawn(rng, F16, k, m), drawn(rng, F16, n, k), result(m, n), result(m), mapping=mapping)


def of_one_sign(rng: np.random.Generator, sign: int, m: int, n: int, k: int) -> list[np.ndarray]:
    """Zeros behind an array's end would show."""
    a, b = (sign * np.abs(drawn(rng, F16, *shape)) for shape in ((m, k), (k, n)))
    a, b = (np.pad(x, ((0, 0), (0, -x.shape[1] % 8)))[:, :x.shape[1]] for x in (a, b))
    return [a, b, result(m, n), result(m), result(m), result(n), result(n)]


@pytest.mark.parametrize("mapping, sign, m, n, k", [
    (MAPPINGS[0], 1, 70, 72, 200), (MAPPINGS[1], -1, 130, 72, 65), (MAPPINGS[2], 1, 130, 8, 1), (MAPPINGS[3], -1, 3, 67, 70),
    (MAPPINGS[1], 1, 1, 8, 33)], ids=str)
def test_extremes(rng: np.random.Generator, mapping: gk.Mapping, sign: int, m: int, n: int, k: int) -> None:
    check(extremes, *of_one_sign(rng, sign, m, n, k), mapping=mapping)


@pytest.mark.parametrize("dtype", [F16, F32, E4M3, I8], ids=str)
@pytest.mark.parametrize("kernel", ["", MULTISTAGE])
def test_extremes_of_other_types(rng: np.random.Generator, dtype: np.dtype, kernel: str) -> None:
    a, b = drawn(rng, dtype, 2, 70, 100), drawn(rng, dtype, 72, 100)
    checked(extremes_of_lines, 2.0 ** -9, a, b, result(2, 70, 72), result(2, 70), result(2, 72), of=read(dtype),
            mapping=gk.Mapping({"n": 64}, kernel=kernel))


def test_nan_is_the_largest_and_the_smallest(rng: np.random.Generator) -> None:
    a, b = drawn(rng, F16, 70, 72), drawn(rng, F16, 72, 72)
    a[3, 5], b[7, 9] = np.nan, np.nan
    y = [result(70, 72), *(result(70) for _ in range(2)), *(result(72) for _ in range(2))]
    with gk.emulate():
        extremes(a, b, *y)
    for found in y[1:3]:
        assert np.flatnonzero(np.isnan(found)).tolist() == [3]
    for found in y[3:]:
        assert np.flatnonzero(np.isnan(found)).tolist() == [9]


@gk.program
def both(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, most = gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            most += a[m, k].sum(axis=1)
            most[:] = gp.maximum(most, a[m, k].max(axis=1))
        d[m, n] = acc + most


@gk.program
def of_columns(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.columns, b.rows):
        acc, left = gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.rows):
            acc += a[k, m].T @ b[n, k].T
            left += a[k, m].sum(axis=0)
        d[m, n] = acc + left


def test_mistakes() -> None:
    a = np.zeros((64, 64), np.float16)
    with pytest.raises(ValueError, match="sums, largest or smallest elements in one cell"):
        both.plan(a, a.copy(), a.copy())
    with pytest.raises(TypeError, match="reads rows along an array's columns of elements of 16 bits"):
        of_columns.plan(a.astype(np.int8), a.astype(np.int8), a)
