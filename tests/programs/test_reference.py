"""Programs on NumPy, the rules that are checked when a program is traced, and numbers and places as texts."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from tests.support import chains
from tests.support import programs as listing

# ==========================================================================================================================
# Programs on NumPy, and the rules that are checked when a program is traced: each error names the user's line.

rng = np.random.default_rng(1)


def drawn(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape)


def test_products() -> None:
    a, b, c, out = drawn(41, 75), drawn(75, 39), drawn(75, 39), drawn(41, 39)
    kept = out.copy()
    np.testing.assert_allclose(listing.gemm.reference(a, b, out), a @ b)
    np.testing.assert_allclose(listing.transposed.reference(a.T, b.T, out), a @ b)
    x, y = a @ b, a @ c
    np.testing.assert_allclose(listing.dual.reference(a, b, c, out, gate=listing.silu_times), x / (1 + np.exp(-x)) * y)
    bias, scale = drawn(39), drawn(41)
    np.testing.assert_allclose(listing.biased.reference(a, b, bias, scale, out, alpha=0.5),
                               np.maximum(0.5 * x * scale[:, None] + bias, 0))
    for got, wanted in zip(listing.residual.reference(a, b, kept, out, out), (x + kept, np.tril((x + kept) ** 2))):
        np.testing.assert_allclose(got, wanted)
    d, sums = listing.product_and_sums.reference(a, b, out, np.empty(41))
    np.testing.assert_allclose(d, x)
    np.testing.assert_allclose(sums, a.sum(1))
    assert (out == kept).all()                         # a reference writes nothing


def test_rounds_that_carry() -> None:
    x, w, h, u, bias = drawn(40, 50), drawn(50, 45), drawn(40, 3), drawn(3, 45), drawn(45)
    np.testing.assert_allclose(listing.lstm.reference(x, w, h, u, bias, np.empty((40, 45))), np.tanh(x @ w + h @ u + bias))
    weights, biases = drawn(3, 5, 5), drawn(3, 5)
    wanted = small = drawn(41, 5)
    for layer in range(3):
        wanted = np.maximum(wanted @ weights[layer] + biases[layer], 0)
    np.testing.assert_allclose(listing.mlp.reference(small, weights, biases, np.empty((41, 5))), wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    q, k, v = drawn(2, 41, 8), drawn(2, 75, 8), drawn(2, 75, 8)
    s = 20 * np.tanh(0.3 * q @ k.transpose(0, 2, 1) / 20)
    if causal:
        s = np.where(np.arange(75) <= np.arange(41)[:, None], s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    got = listing.attention.reference(q, k, v, np.empty((2, 41, 8)), 0.3, score=lambda s: 20.0 * gp.tanh(s / 20.0),
                                      visible=(lambda m, n: n <= m) if causal else None)
    np.testing.assert_allclose(got, p / p.sum(-1, keepdims=True) @ v)


def test_attention_is_traced() -> None:
    half = np.zeros((2, 64, 64), np.float16)
    loop = listing.attention.traced(listing.attention.bound((half, half, half, half, 0.125), {}))
    (rounds,) = (x for x in loop.body if hasattr(x, "body"))
    assert [index.name for index in (*loop.indices, *rounds.indices)] == ["h", "m", "n"]
    assert [carried.inside.name for carried in rounds.carried] == ["best", "total", "out"]


# -- rules ----------------------------------------------------------------------------------------------------------------

A, B, D = np.zeros((40, 48), np.float16), np.zeros((48, 56), np.float16), np.zeros((40, 56), np.float16)


def inner_differs(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        d[m, n] = a[m] @ d[m, n]                       # here


def stored_twice_as_wide(a: Any, b: Any, d: Any) -> None:
    for m, k in gp.parallel(a.rows, a.columns):
        d[m, k] = a[m, k]                              # here


def carried_changes(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m)
        for k in gp.sequential(a.columns):
            acc[:] = a[m, k] @ b[k, n]                 # here
        d[m, n] = acc


def branches(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        if d[m, n] < 0.0:                              # here
            d[m, n] = 0.0


def breaks(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):        # here
        d[m, n] = 0.0
        break


def by_numpy(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        d[m, n] = math.exp(d[m, n])                    # here


def wrong_key(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        d[m, n] = a[0, n]                              # here


def third_axis_reduced(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        d[m, n] = d[m, n].sum(axis=2)                  # here


def rounds_alone(a: Any, b: Any, d: Any) -> None:
    for k in gp.sequential(a.columns):                 # here
        d[k] = 0.0


def too_many_dimensions(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        for k in gp.sequential(a.columns):
            d[m, n] = a[m, k] * b[k, n]                # here


BROKEN = [(inner_differs, ValueError, "to sum over"), (stored_twice_as_wide, ValueError, "48.*56 elements"),
          (carried_changes, ValueError, "keep its dimensions"), (branches, TypeError, "control flow"),
          (breaks, ValueError, "must run to its end"), (by_numpy, TypeError, "no number before the kernel runs"),
          (wrong_key, TypeError, "index 0 is 0"), (third_axis_reduced, ValueError, "axis=0 its columns"),
          (rounds_alone, ValueError, "outside of parallel"), (too_many_dimensions, ValueError, "at most two dimensions")]


@pytest.mark.parametrize("function, kind, words", BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_rule_names_the_line(function: Any, kind: Any, words: str) -> None:
    source, first = inspect.getsourcelines(function)
    line = first + next(n for n, text in enumerate(source) if "# here" in text)
    with pytest.raises(kind, match=words) as error:
        gk.program(function).reference(A, B, D)
    assert f"{__file__}:{line}" in str(error.value)


def test_words_and_calls_out_of_place() -> None:
    with pytest.raises(TypeError, match="outside of a program"):
        gp.zeros()
    with pytest.raises(TypeError, match="gemm: missing a required argument: 'd'"):
        listing.gemm.reference(A, B)
    with pytest.raises(TypeError, match="a function is needed"):
        gk.program(3)                                  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the call has an argument of this name \(mapping"):
        gk.program(lambda a, mapping: None)
    assert gk.Mapping({"m": 1, "n": 2}) == gk.Mapping({"n": 2, "m": 1})
    assert hash(gk.Mapping({"m": 1, "n": 2})) == hash(gk.Mapping({"n": 2, "m": 1}))


@pytest.mark.parametrize("given", [dict(stages=-1), dict(warpgroups=4), dict(blocks={"m": 0}), dict(blocks={3: 64}),
                                   dict(shared_bytes=1.5), dict(stages=True), dict(blocks="f4"), dict(blocks=3),
                                   dict(blocks=[("m", 64)]), dict(cluster=2), dict(places="p"), dict(stages="3")])
def test_a_mapping_out_of_range(given: dict[str, Any]) -> None:
    with pytest.raises(gk.ConfigError, match=f"Mapping\\({next(iter(given))}="):
        gk.Mapping(**given)


@gk.program
def sums_of_a_tile(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = acc
        y[m] = acc.sum(axis=1)                         # of the tile's columns alone


@gk.program
def product_of_a_tile(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, a.columns):
        acc = gp.zeros(m, b.columns)
        for _k in gp.sequential(a.count):
            acc += a[_k, m, n] @ b[n]
        d[m] = acc


def test_what_goes_over_a_part_of_an_axis_is_refused_by_the_reference_too() -> None:
    """Its result would depend on how long blocks are."""
    x = np.ones((70, 70))
    with pytest.raises(ValueError, match=r"(?s)sum\(axis=1\) reduces .*but a tile has only a part.*test_reference.py"):
        sums_of_a_tile.reference(x, x, x.copy(), np.zeros(70))
    with pytest.raises(ValueError, match="but a tile has only a part"):
        product_of_a_tile.reference(np.ones((2, 70, 70)), x, x.copy())


# ==========================================================================================================================
# Numbers and places as texts: whatever expressions they are in, a text says what the program does.

F16 = np.float16
F32 = np.float32
KERNELS = pytest.mark.parametrize("kernel", ["warp_specialised", "multistage"])
#: Of an element, a run-time number near 2, and the places of the element's row and column.
EXPRESSIONS: list[Any] = [
    lambda s, x, i, j: s / x, lambda s, x, i, j: -s * (1.0 / x), lambda s, x, i, j: s * (x + 1.0) / (x - 4.0) - x,
    lambda s, x, i, j: s * gp.exp(-(x * 0.5)) + gp.sqrt(x) * gp.log(x + 1.5), lambda s, x, i, j: s * gp.maximum(x, 2.5) - gp.minimum(-x, 1.0),
    lambda s, x, i, j: gp.where(s < x, s, x * x), lambda s, x, i, j: s * gp.where(s <= x, 3.0, x / 7.0), lambda s, x, i, j: s * gp.tanh(x / 3.0),
    lambda s, x, i, j: (s + gp.exp(0.5)) * gp.sqrt(2.0) / gp.log(3.0), lambda s, x, i, j: s * (i * 2.0 - j) * 0.0625,
    lambda s, x, i, j: (1.5 - i) * x + s, lambda s, x, i, j: s + x * (j + 1.0) / (i + x), lambda s, x, i, j: -i * 0.5 + -(i - j) * s,
    lambda s, x, i, j: gp.where((s <= x) & (-x < s), s - j, i), lambda s, x, i, j: gp.sqrt(i + 1.0) * s - gp.sqrt(j),
    lambda s, x, i, j: gp.maximum(s, i - j), lambda s, x, i, j: s / (i + 1.0) + 1.0 / (j + 1.0), lambda s, x, i, j: gp.where(i < j, i, j) + s,
    lambda s, x, i, j: gp.exp(-(0.05 * (i + j))) * s, lambda s, x, i, j: gp.finite(s) - (x - (s - (x - 1.0))),
]


@gk.program
def of_sums(a: Any, b: Any, d: Any, x: float, f: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = f(acc, x, gp.place(m), gp.place(n))


@gk.program
def of_scores(q: Any, k: Any, v: Any, o: Any, x: float, f: Any) -> None:
    for m in gp.parallel(q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            out += f(q[m] @ k[n].T, x, gp.place(m), gp.place(n)).astype(v.dtype) @ v[n]
        o[m] = out


@gk.program
def of_rows(a: Any, y: Any, x: float, f: Any) -> None:
    for m in gp.parallel(a.rows):
        y[m] = f(a[m], x, gp.place(m), gp.place(m))


def drawn_text(*shape: int) -> np.ndarray:
    return (np.random.default_rng(5).standard_normal(shape) / 4).astype(F16)


@KERNELS
@pytest.mark.sample(8)
@pytest.mark.parametrize("n", range(len(EXPRESSIONS)))
def test_of_a_tile(kernel: str, n: int) -> None:
    arrays = [drawn_text(20, 64), drawn_text(64, 24), np.full((20, 24), np.nan, F32)]
    chains.check(of_sums, arrays, gk.Mapping({"n": 64}, warpgroups=1, kernel=kernel), x=2.25, f=EXPRESSIONS[n])


@KERNELS
@pytest.mark.sample(8)
@pytest.mark.parametrize("n", range(len(EXPRESSIONS)))
def test_of_rounds(kernel: str, n: int) -> None:
    arrays = [drawn_text(20, 64), drawn_text(30, 64), drawn_text(30, 64), np.full((20, 64), np.nan, F32)]
    chains.check(of_scores, arrays, gk.Mapping({"n": 16}, warpgroups=1, kernel=kernel), x=2.25, f=EXPRESSIONS[n])


@pytest.mark.sample(8)
@pytest.mark.parametrize("n", range(len(EXPRESSIONS)))
def test_of_rows(n: int) -> None:
    chains.check(of_rows, [drawn_text(20, 24), np.full((20, 24), np.nan, F32)], gk.Mapping(), x=2.25, f=EXPRESSIONS[n])


@gk.program
def both_ways(x: Any, w: Any, y: Any) -> None:
    """A block that is taken as it is, and as its transpose."""
    for m in gp.parallel(x.rows):
        out = gp.zeros(m, w.columns)
        for layer in gp.sequential(w.count):
            out += x[m] @ w[layer] + gp.tanh(x[m] @ w[layer].T)
        y[m] = out


@pytest.mark.kin(1)
@KERNELS
def test_products_of_the_same_blocks_are_told_apart(kernel: str) -> None:
    chains.check(both_ways, [drawn_text(20, 64), drawn_text(2, 64, 64), np.full((20, 64), np.nan, F32)], gk.Mapping(warpgroups=1, kernel=kernel))


# -- elements of arrays ---------------------------------------------------------------------------------------------------------

#: Of an element, one of an array by rows, and one of an array by columns, whose squares are beyond their dtype.
ELEMENTS: list[Any] = [
    lambda s, r, c: s + r * r, lambda s, r, c: s + r * c - c * r * 1e-6, lambda s, r, c: s + gp.maximum(r, 1e-3) * gp.minimum(c, 1e3),
    lambda s, r, c: gp.where(r < c, r * r, c + c) + s, lambda s, r, c: (r - c) * (r + c) * 1e-3 + s, lambda s, r, c: s - -r * c + gp.sqrt(r * r),
    lambda s, r, c: s * 1e-3 + r / c + gp.tanh(r), lambda s, r, c: gp.where(s < r, gp.where(r <= 3.0, r, s), c), lambda s, r, c: gp.exp(r / 400.0) * s + c,
]


@gk.program
def tile_of_arrays(a: Any, b: Any, r: Any, c: Any, d: Any, f: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = f(acc, r[m], c[n])


@gk.program
def rounds_of_arrays(q: Any, k: Any, v: Any, r: Any, c: Any, o: Any, y: Any, f: Any) -> None:
    for m in gp.parallel(q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = f(q[m] @ k[n].T, r[m], c[n])
            out += (s * 1e-4).astype(v.dtype) @ v[n]
        o[m] = out
        y[m] = f(out, r[m], r[m])


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int32", "float64"])
@pytest.mark.parametrize("n", range(len(ELEMENTS)))
def test_elements_of_arrays_meet_in_float32(dtype: str, n: int) -> None:
    rng, most = np.random.default_rng(n), 100 if dtype == "int8" else 300
    r, c = (rng.integers(-most, most, extent).astype(dtype) for extent in (20, 24))
    r[r == 0], c[c == 0] = 1, 1
    chains.check(tile_of_arrays, [drawn_text(20, 64), drawn_text(64, 24), r, c, np.full((20, 24), np.nan, F32)], gk.Mapping({"n": 64}, warpgroups=1),
                 f=ELEMENTS[n])
    chains.check(rounds_of_arrays, [drawn_text(20, 64), drawn_text(24, 64), drawn_text(24, 64), r, c, np.full((20, 64), np.nan, F32), np.full((20, 64), np.nan, F32)],
                 gk.Mapping({"n": 16}, warpgroups=1), f=ELEMENTS[n])


# -- names ----------------------------------------------------------------------------------------------------------------------

@gk.program
def cell_of_an_array(a: Any, b: Any, c: Any, d: Any) -> None:
    e = c
    for m, n in gp.parallel(a.rows, b.columns):
        c = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            c += a[m, k] @ b[k, n]
        d[m, n] = c + e[m, n]


@gk.program
def one_name_twice(a: Any, b: Any, x: Any, y: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        for k in gp.sequential(x.columns):
            acc += x[m, k] @ y[k, n]
        d[m, n] = acc


@gk.program
def index_of_an_array(a: Any, b: Any, m: Any, d: Any) -> None:
    c = m
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = acc + c[m]


@KERNELS
def test_names_that_a_program_has_twice(kernel: str) -> None:
    mapping = gk.Mapping({"n": 64}, warpgroups=1, kernel=kernel)
    chains.check(cell_of_an_array, [drawn_text(20, 40), drawn_text(40, 24), drawn_text(20, 24), np.full((20, 24), np.nan, F32)], mapping)
    for one, other in ((40, 200), (200, 40), (40, 40)):
        chains.check(one_name_twice, [drawn_text(20, one), drawn_text(one, 24), drawn_text(20, other), drawn_text(other, 24), np.full((20, 24), np.nan, F32)],
                     mapping)
    with pytest.raises(ValueError, match="m: the derived kernel uses this name"):
        index_of_an_array.plan(drawn_text(20, 40), drawn_text(40, 24), drawn_text(20), np.zeros((20, 24), F32), mapping=mapping)
