"""Derivatives of scores as device code: against differences, where code branches, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import fast
from gemmkit.functions import slope as slopes
from gemmkit.functions.slope import slope_of
from gemmkit.kernels.masks import ALiBi, PlainScores, Score, ScoreBias, ScoreFunction, SoftCap
from gemmkit.lang.components import dataclass

TABLE, WEIGHT, STEP = np.linspace(-1, 1, 12).reshape(3, 4).astype(np.float32), np.float32(0.75), np.int32(2)


def leaky(x: Any) -> Any:
    return x if x > 0 else 0.1 * x


def recursive(x: Any, n: int) -> Any:
    return x if n == 0 else x * recursive(x, n - 1)


@dataclass(frozen=True)
class Own(Score):
    by: gk.Scalar
    table: gk.Array
    power: int = 2

    real_places = True

    def weight(self, head: int) -> Any:
        return self.table[head, 0] * self.by

    def __call__(self, s: Any, m: Any, n: Any, head: int) -> Any:
        return s**self.power * self.weight(head) + 0.5 * (m - n)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda s, m, n: 3.0 - s + s * 2 - 1, "product": lambda s, m, n: s * s * (m - n), "quotient": lambda s, m, n: s / (2 + s * s),
    "reciprocal": lambda s, m, n: 2.0 / (3.0 + s), "powers": lambda s, m, n: (s * s + 1)**0.5 + s**3 + s**2, "negative": lambda s, m, n: -(+s),
    "abs": lambda s, m, n: abs(s - 0.25) * 2, "tanh": lambda s, m, n: 3 * math.tanh(s / 3), "exp": lambda s, m, n: math.exp(-s * s),
    "logs": lambda s, m, n: math.log(s * s + 1) + math.log1p(s * s) + math.sqrt(s * s + 2), "sines": lambda s, m, n: math.sin(s) * math.cos(2 * s),
    "hyperbolic": lambda s, m, n: math.sinh(s) + math.cosh(s) / 2 + math.expm1(s), "erf": lambda s, m, n: math.erf(s) - math.atan(s),
    "extrema": lambda s, m, n: max(s, 0.3) + min(s, -0.2, 2 * s), "clamped": lambda s, m, n: min(max(s, -0.5), 0.5),
    "places": lambda s, m, n, head, batch: s * (head + 1) if n % 3 else s - batch * (m // 2),
    "branches": lambda s, m, n: leaky(s) if (m > n) & (s < 0.5) else s * 0.5 if n > m + 1 or s > 0.9 else 0.0,
    "helper": lambda s, m, n: recursive(s, 3), "chosen": lambda s, m, n: s * (2.0 if m == n else 1.0),
    "table": lambda s, m, n, head: s * TABLE[head, min(n, TABLE.shape[1] - 1)] * WEIGHT + float(m) * s, "step": lambda s, m, n: s * STEP,
    "conversions": lambda s, m, n: s * float(m) + int(n / 2) * s, "mask": lambda s, m, n: -math.inf if n > m else s,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    """Central differences, wherever there is no kink."""
    score = ScoreFunction(FUNCTIONS[name])
    made = slope_of(score)
    for s in (-1.3, -0.31, 0.17, 0.72, 1.45):
        for m, n, head, batch in ((0, 0, 0, 0), (5, 2, 1, 1), (2, 3, 2, 0), (1, 4, 0, 1)):
            above, below = (float(score.at(np.float64(s + step), m, n, head, batch)) for step in (1e-6, -1e-6))
            wanted = 0.0 if math.isinf(above) else (above - below) / 2e-6
            found = 1.0 if made is None else float(made(np.float64(s), m, n, head, batch))
            assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_what_has_a_derivative_of_one() -> None:
    biased = ScoreFunction(lambda s, m, n, head: s + TABLE[head, n] if n < 4 else s - 1)
    assert all(slope_of(x) is None for x in (PlainScores(), ALiBi(TABLE[:, 0]), ScoreBias(TABLE[None]), biased))


def test_components() -> None:
    """A number of a component is an argument of the derivative's code, so that another one is no other code."""
    one, other = (slope_of(Own(by, TABLE, power)) for by, power in ((0.5, 2), (0.25, 2)))
    assert one is not None and other is not None and one.real_places
    assert one.f.__code__ is other.f.__code__ and one(2.0, 0.0, 0.0, 1, 0) == 2 * other(2.0, 0.0, 0.0, 1, 0)
    assert float(one(2.0, 0.0, 0.0, 1, 0)) == pytest.approx(2 * 2.0 * float(TABLE[1, 0]) * 0.5)
    cap = slope_of(SoftCap(5.0))
    assert cap is not None and float(cap(1.0, 0, 0, 0, 0)) == pytest.approx(1 - math.tanh(0.2)**2, abs=2e-3)


def test_arrays_that_the_derivative_does_not_read_are_no_arguments() -> None:
    made = slope_of(ScoreFunction(lambda s, m, n, head: WEIGHT * s + TABLE[head, n]))
    assert made is not None and [type(cell.cell_contents) for cell in made.f.__closure__] == [np.float32]


def endless(s: Any, m: int, n: int) -> Any:
    while s < m:
        s = s + 1.0
    return s


@pytest.mark.parametrize("f,words", [
    (lambda s, m, n: math.gamma(s), "math.gamma, whose derivative is not known"), (lambda s, m, n: s % 2, "x % x of a number that depends"),
    (lambda s, m, n: 2.0**s, r"x \*\* x of a number that depends"), (lambda s, m, n: TABLE[0, int(s)], r"int\(x\) of a number that depends"),
    (lambda s, m, n: m**s, r"exponent depends on the score|x \*\* x of a number"), (endless, "more than 64 branches"),
    (lambda s, m, n: (s, s), "it returns tuple"), (lambda s, m, n: sum(s for _ in range(n)), "a function of Python's own, or a loop"),
    (lambda s, m, n: round(s), "round"), (lambda s, m, n: s + "1", "str beside a number"),
], ids=lambda x: x if isinstance(x, str) else "score")
def test_what_is_refused(f: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"the derivative of this score is not known: .*({words})"):
        slope_of(ScoreFunction(f))


def test_ways_are_counted() -> None:
    def many(s: Any, m: int, n: int) -> Any:
        for _ in range(7):
            s = s * 2.0 if s * m > n * s else s + s * m
            m = m + 1
        return s

    with pytest.raises(TypeError, match="more than 64 ways"):
        slope_of(ScoreFunction(many))


def test_a_fast_function_is_one_of_its_kind() -> None:
    text = slopes._Writer().text(ScoreFunction(lambda s, m, n: fast.exp2(s) + fast.log2(s) * fast.reciprocal(s) + fast.maximum(s, 1.0)))
    assert text is not None and "fast.exp2(s)" in text and "fast.reciprocal(s)" in text and "max(" not in text
