"""Programs on NumPy, and the rules that are checked when a program is traced: each error names the user's line."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from tests.support import programs as listing

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


BROKEN = [(inner_differs, ValueError, "sum goes over"), (stored_twice_as_wide, ValueError, "48.*56 elements"),
          (carried_changes, ValueError, "keeps its dimensions"), (branches, TypeError, "control flow"),
          (breaks, ValueError, "left before its end"), (by_numpy, TypeError, "no number before the kernel runs"),
          (wrong_key, TypeError, "index 0 is 0"), (third_axis_reduced, ValueError, "axis=1, or its columns, axis=0"),
          (rounds_alone, ValueError, "outside of parallel"), (too_many_dimensions, ValueError, "three dimensions")]


@pytest.mark.parametrize("function, kind, words", BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_rule_names_the_line(function: Any, kind: Any, words: str) -> None:
    source, first = inspect.getsourcelines(function)
    line = first + next(n for n, text in enumerate(source) if "# here" in text)
    with pytest.raises(kind, match=words) as error:
        gk.program(function).reference(A, B, D)
    assert f"{__file__}:{line}" in str(error.value)


def test_words_and_calls_out_of_place() -> None:
    with pytest.raises(TypeError, match="outside of one"):
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
    with pytest.raises(ValueError, match=r"(?s)sum\(axis=1\) goes over .*of which a tile has a part.*test_reference.py"):
        sums_of_a_tile.reference(x, x, x.copy(), np.zeros(70))
    with pytest.raises(ValueError, match="of which a tile has a part"):
        product_of_a_tile.reference(np.ones((2, 70, 70)), x, x.copy())
