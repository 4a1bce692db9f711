"""Functions of numbers inside programs, `gp.call`: what they compute in every form of a program, what they are told, what they
have captured, and calls that come again with other components."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from bench import stand_ins
from gemmkit import epilogues, masks
from gemmkit import programs as gp
from gemmkit.components import number as number_brought
from gemmkit.epilogues import activations
from gemmkit.plans.launch import forget
from gemmkit.programs import calls
from gemmkit.runtime.arrays import describe
from tests.programs.test_language import check_refused
from tests.support.chains import computed
from tests.support.chains import empty as poisoned
from tests.support.checks import assert_close
from tests.support.patches import Set
from tests.support.programs import online

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
MULTISTAGE = gk.Mapping(kernel="multistage")


# -- every form of a program ------------------------------------------------------------------------------------------------

@gk.program
def of_tiles(a: Any, b: Any, d: Any, f: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = gp.call(f, acc, m, n)


@gk.program
def of_stacks(a: Any, b: Any, d: Any, y: Any, f: Any, g: Any) -> None:
    for h, m, n in gp.parallel(a.count, a.rows, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.columns):
            acc += a[h, m, k] @ b[h, k, n]
            sums += a[h, m, k].sum(axis=1)
        d[h, m, n] = gp.call(f, acc, m, n, h) + gp.place(h)
        with gp.once(n):
            y[h, m] = gp.call(g, sums, m)


@gk.program
def of_chains(a: Any, b: Any, c: Any, d: Any, f: Any, g: Any) -> None:
    for m in gp.parallel(a.rows):
        out, total = gp.zeros(m, c.columns), gp.zeros(m)
        for n in gp.sequential(b.rows):
            s = gp.call(f, a[m] @ b[n].T, m, n)
            total += s.sum(axis=1)
            out += s.astype(a.dtype) @ c[n]
        d[m] = out + gp.call(g, total, m)


@gk.program
def of_rows(x: Any, w: Any, y: Any, z: Any, f: Any, g: Any) -> None:
    for m in gp.parallel(x.rows):
        t = gp.call(f, x[m], m)
        y[m] = t * gp.call(g, w) - t.mean(axis=1)
        z[m] = gp.call(g, t.max(axis=1))


@gk.program
def attention(q: Any, k: Any, v: Any, o: Any, scale: float, score: Any = None, seen: Any = None) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = scale * (q[h, m] @ k[h, n].T)
            if score is not None:
                s = gp.call(score, s, m, n, h)
            if seen is not None:
                s = gp.where(gp.call(seen, m, n, h, dtype=bool), s, -math.inf)
            online(s, v[h, n], v.dtype, best, total, out)
        o[h, m] = out / total


def half(rng: np.random.Generator, *shape: int, dtype: Any = F16) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def check(program: gk.Program, *arrays: Any, mapping: gk.Mapping | None = None, tolerance: float = 4e-3, **more: Any) -> Any:
    """A program's kernel in the emulator, against its reference."""
    plan, results, wanted = computed(program, arrays, mapping, **more)
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert_close(got, exact, tolerance)
    return plan


BIAS = np.linspace(-1, 1, 136).astype(F32)
TABLE = np.random.default_rng(5).standard_normal((100, 90)).astype(F32)
STEP = np.float32(0.25)


def branched(x: Any, m: int, n: int) -> Any:
    """Branches, a loop, arrays and a number that it has captured."""
    if m % 3 == 0:
        return x + BIAS[n]
    out = STEP * x
    for _ in range(m % 4):
        out = out + 1.0
    return out


@pytest.mark.parametrize("mapping", [None, gk.Mapping({"n": 128}, warpgroups=1), MULTISTAGE], ids=["", "wide", "multistage"])
def test_a_function_with_branches_and_arrays_in_tiles(mapping: gk.Mapping | None, rng: np.random.Generator) -> None:
    """Of as many columns as its array has: what is told of elements that are not there must not leave it."""
    check(of_tiles, half(rng, 100, 72), half(rng, 72, 136), poisoned(100, 136), branched, mapping=mapping)


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [None, MULTISTAGE], ids=["", "multistage"])
def test_stacks_and_results_of_rows(mapping: gk.Mapping | None, rng: np.random.Generator) -> None:
    rows, planes = half(rng, 70, dtype=F32), half(rng, 3, 72, dtype=F32)
    check(of_stacks, half(rng, 3, 70, 40), half(rng, 3, 40, 72), poisoned(3, 70, 72), poisoned(3, 70, dtype=F32),
          lambda x, m, n, h: x * planes[h, n] - rows[m], lambda x, m: x if m < 40 else rows[m], mapping=mapping)


@pytest.mark.parametrize("mapping", [None, gk.Mapping({"n": 32}), MULTISTAGE], ids=["", "short", "multistage"])
def test_chains(mapping: gk.Mapping | None, rng: np.random.Generator) -> None:
    """A function of places that leaves no element 0 where an array ends: sums must not have it."""
    scale = half(rng, 100, dtype=F32)
    a, b, c = (half(rng, *shape) / F16(8) for shape in ((100, 64), (90, 64), (90, 64)))
    check(of_chains, a, b, c, poisoned(100, 64), lambda x, m, n: x + 0.25 * TABLE[m, n],
          lambda x, m: x * scale[m] if x > 0.5 else -x, mapping=mapping, tolerance=8e-3)


@pytest.mark.parametrize("columns", [1000, 8, 257])
def test_functions_of_rows(columns: int, rng: np.random.Generator) -> None:
    scales, along = half(rng, 9, dtype=F32), half(rng, columns, dtype=F32)
    check(of_rows, half(rng, 9, columns), half(rng, columns), poisoned(9, columns), poisoned(9, dtype=F32),
          lambda x, m: x * scales[m] + x * x, lambda x: x if x > 0 else 0.1 * x)

    @gk.program
    def placed(x: Any, y: Any, f: Any) -> None:
        for m in gp.parallel(x.rows):
            p = gp.exp(x[m] - x[m].max(axis=1))
            y[m] = gp.call(f, p / p.sum(axis=1), m)

    check(placed, half(rng, 5, columns), poisoned(5, columns, dtype=F32), lambda x, m: x + along[m])


ACTIVATIONS = [getattr(activations, name) for name in activations.__all__]


@pytest.mark.kin(1)
@pytest.mark.sample(12)
@pytest.mark.parametrize("f", ACTIVATIONS, ids=activations.__all__)
def test_every_activation_in_every_form(f: Callable[[Any], Any], rng: np.random.Generator) -> None:
    @gk.program
    def tiles(a: Any, b: Any, d: Any) -> None:
        for m, n in gp.parallel(a.rows, b.columns):
            acc = gp.zeros(m, n)
            for k in gp.sequential(a.columns):
                acc += a[m, k] @ b[k, n]
            d[m, n] = gp.call(f, acc)

    @gk.program
    def chain(a: Any, b: Any, c: Any, d: Any) -> None:
        for m in gp.parallel(a.rows):
            out = gp.zeros(m, c.columns)
            for n in gp.sequential(b.rows):
                out += gp.call(f, a[m] @ b[n].T).astype(a.dtype) @ c[n]
            d[m] = out

    @gk.program
    def rows(x: Any, y: Any) -> None:
        for m in gp.parallel(x.rows):
            y[m] = gp.call(f, x[m])

    a, b, c = half(rng, 70, 32) / F16(2), half(rng, 32, 72), half(rng, 64, 64) / F16(8)
    for mapping in (None, MULTISTAGE):
        check(tiles, a, b, poisoned(70, 72), mapping=mapping)
    check(chain, half(rng, 66, 64) / F16(4), half(rng, 64, 64), c, poisoned(66, 64), tolerance=8e-3)
    check(rows, half(rng, 3, 72), poisoned(3, 72))


# -- gemmkit's own components -----------------------------------------------------------------------------------------------

def scores(rng: np.random.Generator) -> list[Any]:
    slopes = half(rng, 2, dtype=F32)
    return [masks.ALiBi(slopes), masks.ScoreBias(half(rng, 2, 44, 40)), lambda s, m, n, h: s - slopes[h] * abs(m - n)]


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [gk.Mapping(splits=1), gk.Mapping({"n": 16}, splits=2), gk.Mapping(kernel="multistage", splits=1)],
                         ids=["whole", "splits", "multistage"])
def test_scores_and_conditions_of_attention(mapping: gk.Mapping, rng: np.random.Generator) -> None:
    shape = (2, 44, 32), (2, 40, 32), (2, 40, 32)
    of_keys = rng.integers(0, 4, 40).astype(np.int32)
    for n, score in enumerate(scores(rng)):
        seen = (lambda m, n, h: of_keys[n] <= h + m % 3) if n != 1 else None
        check(attention, *(half(rng, *s) for s in shape), poisoned(2, 44, 32), 0.125, score, seen, mapping=mapping)


def test_scores_of_two_arguments_and_their_numbers(rng: np.random.Generator) -> None:
    @gk.program
    def capped(q: Any, k: Any, v: Any, o: Any, f: Any) -> None:
        for m in gp.parallel(q.rows):
            total, out = gp.zeros(m), gp.zeros(m, v.columns)
            for n in gp.sequential(k.rows):
                p = gp.exp(gp.call(f, q[m] @ k[n].T, m, n))
                total += p.sum(axis=1)
                out += p.astype(v.dtype) @ v[n]
            o[m] = out / total

    q, k, v = (half(rng, rows, 64) / F16(2) for rows in (70, 90, 90))
    check(capped, q, k, v, poisoned(70, 64), masks.SoftCap(2.5))


def elementwise(rng: np.random.Generator) -> dict[str, Any]:
    bias, rows, whole = half(rng, 136), half(rng, 100, dtype=F32), half(rng, 100, 136, dtype=F32)
    made = dict(bias=epilogues.Bias(bias), rows=epilogues.Bias(rows, along="M"), scale=epilogues.Scale(0.5),
                vector=epilogues.Scale(bias), clamp=epilogues.Clamp(-1.0, 2.0), gelu=epilogues.GELU(), silu=epilogues.SiLU(),
                causal=epilogues.CausalMask(0.0), where=epilogues.Where(lambda m, n: (m + n) % 2 == 0, -1.0),
                residual=epilogues.Residual(whole), function=epilogues.Elementwise(lambda x, m, n: x + whole[m, n]))
    return {**made, "composed": made["scale"] | made["bias"] | epilogues.ReLU() | made["residual"]}


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", list(elementwise(np.random.default_rng(0))))
def test_elementwise_epilogues(name: str, rng: np.random.Generator) -> None:
    check(of_tiles, half(rng, 100, 24), half(rng, 24, 136), poisoned(100, 136), elementwise(rng)[name],
          mapping=MULTISTAGE if len(name) % 2 else None)


@dataclass(frozen=True)
class Swish(gk.Component):
    """A user's own."""

    beta: gk.Scalar
    table: gk.Array

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return x / (1.0 + math.exp(-self.beta * x)) + self.table[n]


@pytest.mark.kin(1)
def test_a_users_own_component(rng: np.random.Generator) -> None:
    for mapping in (None, MULTISTAGE):
        check(of_tiles, half(rng, 70, 24), half(rng, 24, 72), poisoned(70, 72), Swish(1.5, half(rng, 72)), mapping=mapping)


# -- masks ------------------------------------------------------------------------------------------------------------------

@gk.program
def masked(q: Any, k: Any, v: Any, o: Any, scale: float, seen: Any) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = gp.where(seen, scale * (q[h, m] @ k[h, n].T), -math.inf)
            online(s, v[h, n], v.dtype, best, total, out)
        o[h, m] = gp.where(total > 0.0, out / total, 0.0)


@gk.program
def masked_and_padded(q: Any, k: Any, v: Any, lengths: Any, o: Any, scale: float, seen: Any) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, stop=lengths[h]):
            s = gp.where(seen, scale * (q[h, m] @ k[h, n].T), -math.inf)
            online(s, v[h, n], v.dtype, best, total, out)
        o[h, m] = gp.where(total > 0.0, out / total, 0.0)


@dataclass(frozen=True)
class EveryThird(masks.Mask):
    """Of heads differently: visible alone."""

    by: gk.Scalar

    def visible(self, m: int, n: int, head: int) -> bool:                                      # type: ignore[override]
        return (m + self.by * n) % (3 + head) == 0


@dataclass(frozen=True)
class Bands(masks.Mask):
    """Of each query another interval, from an array; it says which blocks to visit."""

    starts: gk.Array

    def first_key(self, m: int) -> int:
        return self.starts[m]

    def end_key(self, m: int) -> int:
        return self.starts[m] + 40

    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return self.starts[begin], self.starts[end - 1] + 40

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return self.starts[end - 1], self.starts[begin] + 40


@dataclass(frozen=True)
class WrongBands(Bands):
    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return self.starts[end - 1], self.starts[end - 1] + 40


def all_masks(queries: int, keys: int) -> list[Any]:
    bounds = np.array([0, 17, queries])
    return [masks.Causal(), masks.Causal(aligned="upper left"), masks.Window(20, 10), masks.Window(20, 10) & masks.Causal(),
            masks.Everything(), masks.Documents.of(bounds) & masks.Causal(), EveryThird(2),
            Bands(np.sort(np.random.default_rng(1).integers(0, keys - 40, queries)).astype(np.int32)),
            Bands(np.linspace(0, keys - 40, queries).astype(np.int64)) & EveryThird(1)]


MASKED = [gk.Mapping({"n": 32}, splits=1), gk.Mapping({"n": 32}, splits=2, descending=False), gk.Mapping(kernel="multistage", splits=1),
          gk.Mapping({"n": 64}, warpgroups=1, cluster={"m": 2})]


@pytest.mark.kin(1)
@pytest.mark.sample(36)
@pytest.mark.parametrize("n", range(9))
@pytest.mark.parametrize("mapping", MASKED, ids=["", "splits", "multistage", "cluster"])
def test_masks_of_attention(mapping: gk.Mapping, n: int, rng: np.random.Generator) -> None:
    seen = all_masks(70, 98)[n]
    check(masked, half(rng, 2, 70, 64), half(rng, 2, 98, 64), half(rng, 2, 98, 64), poisoned(2, 70, 64), 0.125, seen, mapping=mapping)


@pytest.mark.kin(1)
@pytest.mark.sample(24)
@pytest.mark.parametrize("n", [0, 2, 6, 7])
@pytest.mark.parametrize("mapping", MASKED[:3], ids=["", "splits", "multistage"])
def test_masks_of_padded_attention(mapping: gk.Mapping, n: int, rng: np.random.Generator) -> None:
    """Aligned with the last key that a sequence has."""
    q, k, v, o = half(rng, 3, 70, 64), half(rng, 3, 98, 64), half(rng, 3, 98, 64), poisoned(3, 70, 64)
    check(masked_and_padded, q, k, v, np.array([98, 51, 0], np.int32), o, 0.125, all_masks(70, 98)[n], mapping=mapping)


def test_a_mask_says_which_blocks_are_visited() -> None:
    q, k, v = (np.zeros((2, rows, 64), F16) for rows in (256, 256, 256))
    for seen in (masks.Causal(), masks.Window(64), Bands(np.zeros(256, np.int32))):
        text = masked.plan(q, k, v, np.zeros_like(q), 0.125, seen).text
        assert "end_seen(" in text and "free_to(" in text and "visited(" in text
    assert "called_" not in masked.plan(q, k, v, np.zeros_like(q), 0.125, masks.Everything()).text


@pytest.mark.kin(1)
@pytest.mark.parametrize("seen", [masks.Causal(), masks.Window(5, 5), EveryThird(2) & masks.Causal()], ids=["causal", "window", "both"])
def test_masks_in_tiles_and_rows(seen: Any, rng: np.random.Generator) -> None:
    @gk.program
    def tiles(a: Any, b: Any, d: Any, seen: Any) -> None:
        for h, m, n in gp.parallel(a.count, a.rows, b.columns):
            acc = gp.zeros(m, n)
            for k in gp.sequential(a.columns):
                acc += a[h, m, k] @ b[h, k, n]
            d[h, m, n] = gp.where(seen, acc, -1.0)

    @gk.program
    def rows(x: Any, y: Any, seen: Any) -> None:
        for h, m in gp.parallel(x.count, x.rows):
            s = gp.where(seen, x[h, m], -math.inf)
            p = gp.exp(s - s.max(axis=1))
            y[h, m] = p / p.sum(axis=1)

    for mapping in (None, MULTISTAGE):
        check(tiles, half(rng, 2, 50, 24), half(rng, 2, 24, 72), poisoned(2, 50, 72), seen, mapping=mapping)
    if not isinstance(seen, masks.Intersection):
        check(rows, half(rng, 2, 9, 72), poisoned(2, 9, 72), seen)


def test_wrong_ranges_of_a_mask_are_found_and_wrong_arrays_refused(rng: np.random.Generator) -> None:
    arrays = half(rng, 2, 70, 64), half(rng, 2, 98, 64), half(rng, 2, 98, 64), poisoned(2, 70, 64), 0.125
    starts = np.linspace(0, 50, 70).astype(np.int32)
    with gk.emulate():
        with pytest.raises(gk.ComponentError, match="WrongBands.keys of queries"):
            masked(*arrays, WrongBands(starts))
        with pytest.raises(ValueError, match="starts of Documents has shape"):
            masked(*arrays, masks.Documents.of([0, 60]))
        with pytest.raises(ValueError, match="slopes of ALiBi has shape"):
            attention(*arrays, masks.ALiBi(np.zeros(3, F32)))
        a, b, d = half(rng, 64, 64), half(rng, 64, 64), poisoned(64, 64)
        with pytest.raises(ValueError, match=r"bias has shape \(63,\)"):
            of_tiles(a, b, d, epilogues.Bias(np.zeros(63, F32)))


# -- what functions are told ------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_elements_of_arrays_of_whole_numbers_are_whole(dtype: Any, rng: np.random.Generator) -> None:
    """They index a table, exactly; a sum of places does, too."""
    table, shifted = half(rng, 7, 5, dtype=F32), half(rng, 200, dtype=F32)

    @gk.program
    def looked_up(a: Any, b: Any, left: Any, right: Any, d: Any) -> None:
        for m, n in gp.parallel(a.rows, b.columns):
            acc = gp.zeros(m, n)
            for k in gp.sequential(a.columns):
                acc += a[m, k] @ b[k, n]
            d[m, n] = acc + gp.call(lambda r, c: table[r, c], left[m], right[n]) + gp.call(
                lambda at: shifted[at], gp.place(m) - gp.place(n) + 71)

    rows, columns = rng.integers(0, 7, 70).astype(dtype), rng.integers(0, 5, 72).astype(dtype)
    for mapping in (None, MULTISTAGE):
        check(looked_up, half(rng, 70, 24), half(rng, 24, 72), rows, columns, poisoned(70, 72), mapping=mapping)


@pytest.mark.kin(1)
def test_whole_numbers_in_rounds(rng: np.random.Generator) -> None:
    table = half(rng, 6, 6, dtype=F32)

    @gk.program
    def biased_chain(a: Any, b: Any, c: Any, left: Any, right: Any, d: Any) -> None:
        for m in gp.parallel(a.rows):
            out = gp.zeros(m, c.columns)
            for n in gp.sequential(b.rows):
                s = a[m] @ b[n].T + gp.call(lambda r, c: table[r, c], left[m], right[n])
                near = gp.call(lambda x, far: x > 0 and far < 60, s, abs(gp.place(m) - gp.place(n)), dtype=bool)
                out += gp.where(near, s, 0.0).astype(a.dtype) @ c[n]
            d[m] = out

    a, b, c = (half(rng, rows, 32) / F16(8) for rows in (44, 90, 90))
    rows, columns = (rng.integers(0, 6, count).astype(np.int32) for count in (44, 90))
    for mapping in (None, MULTISTAGE):
        check(biased_chain, a, b, c, rows, columns, poisoned(44, 32), mapping=mapping, tolerance=8e-3)


@pytest.mark.kin(1)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("mapping", [gk.Mapping(), gk.Mapping({"n": 32}, ahead=False), MULTISTAGE], ids=["", "read ahead", "multistage"])
def test_whole_numbers_beyond_float32_are_compared_exactly(mapping: gk.Mapping, dtype: Any, rng: np.random.Generator) -> None:
    """Also where a round reads them before it multiplies."""
    @gk.program
    def of_segments(a: Any, b: Any, c: Any, left: Any, right: Any, d: Any) -> None:
        for m in gp.parallel(a.rows):
            out = gp.zeros(m, c.columns)
            for n in gp.sequential(b.rows):
                s = a[m] @ b[n].T
                out += gp.where(left[m] == right[n], s, 0.0).astype(a.dtype) @ c[n]
            d[m] = out

    a, b, c = (half(rng, rows, 64) / F16(4) for rows in (66, 40, 40))
    left, right = ((2**30 + rng.integers(0, 6, rows)).astype(dtype) for rows in (66, 40))
    plan = check(of_segments, a, b, c, left, right, poisoned(66, 64), mapping=mapping, tolerance=8e-3)
    assert ("column_value" in plan.text) == (mapping != gk.Mapping())


def test_conditions_of_functions_combine(rng: np.random.Generator) -> None:
    @gk.program
    def chosen(x: Any, y: Any, f: Any) -> None:
        for m in gp.parallel(x.rows):
            holds = gp.call(f, x[m], dtype=bool)
            y[m] = gp.where(holds & (x[m] < 1.0), 2.0, gp.where(~holds | (gp.place(m) == 1), -1.0, x[m]))

    check(chosen, half(rng, 5, 72), poisoned(5, 72), lambda x: x > 0.25)


def test_arguments_that_are_numbers_and_no_arguments(rng: np.random.Generator) -> None:
    @gk.program
    def numbered(x: Any, y: Any, alpha: float) -> None:
        for m in gp.parallel(x.rows):
            y[m] = x[m] + gp.call(lambda a, b: a * b, alpha, 3.0) + gp.call(lambda x, a: x if a > 1 else -x, x[m], alpha)

    for alpha in (0.5, 2.0):
        check(numbered, half(rng, 5, 72), poisoned(5, 72), alpha)


# -- what the language has beside -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("power", [0, 1, 2, 3, 7, 13, -1, -2, 0.5, -0.5, 1.5, 2.25, np.float32(3)])
def test_powers(power: Any, rng: np.random.Generator) -> None:
    @gk.program
    def powers(x: Any, w: Any, y: Any, z: Any) -> None:
        for m in gp.parallel(x.rows):
            y[m] = (x[m] ** power).sum(axis=1) + gp.erf(x[m]).sum(axis=1)
            z[m] = x[m] ** w + 2.0 ** x[m] - abs(w)

    x = (0.5 + np.abs(rng.standard_normal((5, 72)))).astype(F32)
    check(powers, x, half(rng, 72, dtype=F32), poisoned(5, dtype=F32), poisoned(5, 72, dtype=F32), tolerance=1e-5)


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [None, MULTISTAGE], ids=["", "multistage"])
def test_error_functions_powers_and_sizes_in_products(mapping: gk.Mapping | None, rng: np.random.Generator) -> None:
    @gk.program
    def tiles(a: Any, b: Any, d: Any) -> None:
        for m, n in gp.parallel(a.rows, b.columns):
            acc = gp.zeros(m, n)
            for k in gp.sequential(a.columns):
                acc += a[m, k] @ b[k, n]
            d[m, n] = gp.erf(acc) * abs(acc) + (acc * acc) ** 0.75 + abs(gp.place(m) - gp.place(n)) / 64.0

    @gk.program
    def chain(a: Any, b: Any, c: Any, d: Any) -> None:
        for m in gp.parallel(a.rows):
            out = gp.zeros(m, c.columns)
            for n in gp.sequential(b.rows):
                s = a[m] @ b[n].T
                p = gp.erf(s) * abs(s) + (s * s) ** 0.75 - abs(gp.place(m) - gp.place(n)) / 64.0
                out += p.astype(a.dtype) @ c[n]
            d[m] = out

    check(tiles, half(rng, 70, 24) / F16(2), half(rng, 24, 72), poisoned(70, 72), mapping=mapping)
    a, b, c = (half(rng, rows, 64) / F16(8) for rows in (70, 90, 90))
    check(chain, a, b, c, poisoned(70, 64), mapping=mapping, tolerance=8e-3)


def test_a_mask_of_two_numbers_is_tried(rng: np.random.Generator) -> None:
    """Found by a drawn program: where a trial's condition held nowhere, the choice of two numbers had lost its dimensions."""
    @gk.program
    def chosen(a: Any, b: Any, c: Any, d: Any) -> None:
        for m in gp.parallel(a.rows):
            total, out = gp.zeros(m), gp.zeros(m, c.columns)
            for n in gp.sequential(b.rows):
                s = gp.where(lambda i, j: j <= i, a[m] @ b[n].T, 0.0)
                p = s * gp.exp(gp.where(gp.place(m) == gp.place(n), 0.25, -1.0) * gp.where(gp.place(n) < gp.place(m), 0.5, 0.25))
                total += p.sum(axis=1)
                out += p.astype(c.dtype) @ c[n]
            d[m] = out + total

    check(chosen, *(half(rng, rows, 64) / F16(8) for rows in (66, 70, 70)), poisoned(66, 64), tolerance=8e-3)


@pytest.mark.parametrize("mapping", [gk.Mapping(), gk.Mapping({"n": 32}, warpgroups=1, ahead=False), MULTISTAGE], ids=["", "plain", "multistage"])
def test_a_matrix_is_added_to_a_product_as_it_is(mapping: gk.Mapping, rng: np.random.Generator) -> None:
    """Found by a drawn program: a product was to begin with a matrix's elements, which had no register."""
    @gk.program
    def added(a: Any, b: Any, bias: Any, c: Any, d: Any) -> None:
        for m in gp.parallel(a.rows):
            out = gp.zeros(m, c.columns)
            for n in gp.sequential(b.rows):
                p = gp.exp(gp.minimum(bias[m, n] + a[m] @ b[n].T, 1.0))
                out += p.astype(c.dtype) @ c[n]
            d[m] = out

    a, b, c = (half(rng, rows, 64) / F16(8) for rows in (66, 70, 70))
    check(added, a, b, half(rng, 66, 70), c, poisoned(66, 64), mapping=mapping, tolerance=8e-3)


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [gk.Mapping({"n": 32}, warpgroups=1), gk.Mapping(kernel="multistage", warpgroups=1)], ids=["", "multistage"])
def test_exponents_times_a_number_of_the_stack(mapping: gk.Mapping, rng: np.random.Generator) -> None:
    """Found by a drawn program: an exponential's factor that has no line of its own was None, which is NaN."""
    @gk.program
    def sharpened(q: Any, k: Any, v: Any, bias: Any, o: Any) -> None:
        for h, m in gp.parallel(q.count, q.rows):
            best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
            for n in gp.sequential(k.rows):
                s = (q[h, m] @ k[h, n].T) * gp.exp(bias[h]) + gp.call(lambda h: 0.25 * h, h)
                online(s, v[h, n], v.dtype, best, total, out)
            o[h, m] = out / total

    q, k, v = half(rng, 2, 66, 64) / F16(4), half(rng, 2, 70, 64) / F16(4), half(rng, 2, 70, 64)
    check(sharpened, q, k, v, half(rng, 2), poisoned(2, 66, 64), mapping=mapping)


# -- what analyses may assume -----------------------------------------------------------------------------------------------

def test_rounds_with_a_function_of_what_they_multiply_may_be_split() -> None:
    """It is unknown, but the same for the same: rounds commute, and cells merge."""
    q, k, v = (np.zeros((2, rows, 64), F16) for rows in (64, 600, 600))
    plan = attention.plan(q, k, v, np.zeros_like(q), 0.125, lambda s, m, n, h: s * h,
                          mapping=gk.Mapping(splits=3, descending=True))
    assert plan.mapping.splits == 3 and plan.merge is not None


def test_a_function_of_a_cell_keeps_the_order() -> None:
    @gk.program
    def folded(a: Any, b: Any, c: Any, d: Any) -> None:
        for m in gp.parallel(a.rows):
            out, total = gp.zeros(m, c.columns), gp.zeros(m)
            for n in gp.sequential(b.rows):
                s = a[m] @ b[n].T
                total[:] = gp.call(lambda t: t if t < 1 else 1.0, total + s.sum(axis=1))
                out += s.astype(a.dtype) @ c[n]
            d[m] = out * total

    arrays = [np.zeros((rows, 64), F16) for rows in (64, 600, 600, 64)]
    assert not folded.plan(*arrays).mapping.splits > 1
    for said in (gk.Mapping(splits=2), gk.Mapping(descending=True)):
        with pytest.raises(gk.ConfigError):
            folded.plan(*arrays, mapping=said)


# -- refusals ---------------------------------------------------------------------------------------------------------------

END = """def f(a, b, d, g):
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        x = {}  #
        d[m, n] = acc
"""
WHOLE = np.zeros((64, 64), F32)


@pytest.mark.parametrize(("expression", "given", "words"), [
    ("gp.call(3.0, acc)", None, "a function of 1 number, or a component"), ("gp.call(g, acc)", None, "None"),
    ("gp.call(lambda x, y: x, acc)", None, "takes 2 arguments; a function of 1 number"),
    ("gp.call(lambda *x: x[0], acc)", None, r"takes \*x, and device code needs"),
    ("gp.call(lambda x: x, acc, dtype=int)", None, "a number, dtype=None, or a condition, dtype=bool"),
    ("gp.call(lambda x: x, acc > 0)", None, "a condition is not a number"),
    ("gp.call(lambda x: x, a)", None, "only an array with one element for each column"),
    ("acc + gp.call(lambda x: x > 0, acc, dtype=bool)", None, "a condition is not a number"),
    ("gp.where(gp.call(lambda x: x, acc), acc, 0.0)", None, "a number is not a condition"),
    ("g(acc, m, n)", epilogues.Scale(2.0), r"g is a component.*gp.call\(g, ...\)"),
    ("acc * g.by", epilogues.Scale(2.0), r"g.by: a program calls a component.*an argument of its own"),
    ("gp.call(g, acc)", epilogues.Scale(2.0), "takes 3 arguments"),
    ("gp.call(g, acc, m, n)", epilogues.Store(WHOLE), "it stores into array"),
    ("gp.call(g, acc, m, n)", epilogues.LinearCombination(1.0, 1.0, WHOLE, gk.layouts.RowMajor("float32")), "finishes whole tiles"),
    ("gp.call(g, acc, m, n)", epilogues.Softmax(), "finishes whole tiles"),
    ("gp.where(g, acc.sum(axis=1), 0.0)", masks.Causal(), "reduces n|a mask is of scores"), ("gp.where(g, 1.0, acc)", masks.Causal(), "a mask is of scores"),
    ("gp.call(g, acc, m, n)", epilogues.Scale(2.0) | epilogues.Store(WHOLE), "finishes whole tiles"),
])
def test_what_cannot_be_called(expression: str, given: Any, words: str) -> None:
    square = np.zeros((64, 64), F16)
    check_refused(END.format(expression), words, lambda f: f.plan(square, square, square.copy(), given))


def test_a_function_that_returns_no_number_is_named(rng: np.random.Generator) -> None:
    def forgotten(x: Any, m: int, n: int) -> Any:
        if x > 0:
            return x

    arrays = half(rng, 64, 64), half(rng, 64, 64), poisoned(64, 64)
    with gk.emulate(), pytest.raises((gk.ComponentError, TypeError), match="forgotten|None"):
        of_tiles(*arrays, forgotten)


def test_captured_arrays_are_apart_from_results(rng: np.random.Generator) -> None:
    a, b, d = half(rng, 64, 64), half(rng, 64, 64), poisoned(64, 64)
    for f in (lambda x, m, n: x + d[m, n], epilogues.Residual(d)):
        with gk.emulate(), pytest.raises(ValueError, match="shares memory with d, a result"):
            of_tiles(a, b, d, f)
    assert np.isnan(d).all()


# -- calls that come again --------------------------------------------------------------------------------------------------

class Launched:
    """Stands for cuLaunchKernelEx."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> int:
        self.count += 1
        return 0


@pytest.fixture
def launched() -> Iterator[Launched]:
    made = Launched()
    with stand_ins.gpu(made):
        forget(), calls.forget_all()
        yield made
        forget(), calls.forget_all()


@pytest.fixture
def derived(replaced: Any) -> list[str]:
    """The names of programs that passes have derived."""
    seen: list[str] = []
    planned = calls.planned

    def noted(program: Any, *given: Any) -> Any:
        seen.append(program.function.__name__)
        return planned(program, *given)

    replaced(calls, "planned", noted)
    return seen


def brought(program: gk.Program, *arrays: Any, **more: Any) -> list[Any]:
    """What the last values of a launch are: those of called functions."""
    plan = calls.plan_of_call(program, program.bound(arrays, more), None)
    return plan.called_with(program.bound(arrays, more)).brought


def test_another_number_or_array_of_a_component_derives_nothing(launched: Launched, derived: list[str]) -> None:
    with stand_ins.library("cupy") as make:
        a, b, d = make(64, 64), make(64, 64), make(64, 64)
        for n, scale in enumerate((2.0, 3.0, -0.0, 2.0), 1):
            of_tiles(a, b, d, epilogues.Scale(scale))
            assert launched.count == n and len(derived) == 1
            assert [float(x) for x in brought(of_tiles, a, b, d, epilogues.Scale(scale))] == [scale]
        vectors = [make(64) for _ in range(3)]
        for vector in vectors:
            of_tiles(a, b, d, epilogues.Bias(vector) | epilogues.ReLU())
            assert brought(of_tiles, a, b, d, epilogues.Bias(vector) | epilogues.ReLU()) == [describe(vector).pointer]
        assert derived == ["of_tiles"] * 2
        of_tiles(a, b, d, epilogues.Bias(make(64), along="M"))         # another constant of the kernel
        assert derived == ["of_tiles"] * 3


def test_another_size_is_launched_in_its_grid_and_binds_nothing_anew(derived: list[str], replaced: Any) -> None:
    grids: list[int] = []
    bound: list[Any] = []
    bind = stand_ins.Kernel.bind
    replaced(stand_ins.Kernel, "bind", lambda self, grid, *given, **more: bound.append(grid) or bind(
        self, grid, *given, **more))

    def entry(config: Any, *launch: Any) -> int:
        grids.append(config._obj.grid[0])
        return 0

    with stand_ins.gpu(entry), stand_ins.library("cupy") as make:
        forget(), calls.forget_all()
        for rows in (256, 512, 1024, 256, 8192):
            of_tiles(make(rows, 64), make(64, 64), make(rows, 64), epilogues.ReLU())
            plan = calls.plan_of_call(of_tiles, of_tiles.bound(
                (make(rows, 64), make(64, 64), make(rows, 64), epilogues.ReLU()), {}), None)
            assert grids[-1] == plan.blocks
        forget(), calls.forget_all()
    assert len(set(grids)) > 2 and len(derived) == 1 and len(bound) == 2         # the first plan, and the one that is kept


@pytest.mark.parametrize("number", [-0.0, 0.0, 1e-3, np.float32(0.5), float("inf")], ids=str)
def test_a_known_call_brings_its_number(launched: Launched, derived: list[str], number: Any) -> None:
    """-0.0 is another than 0.0; of numbers that are no float32 the call is refused, however known."""
    @gk.program
    def scaled(x: Any, y: Any, scale: float) -> None:
        for m in gp.parallel(x.rows):
            y[m] = scale * x[m]

    values: list[Any] = []
    with stand_ins.library("cupy") as make:
        x, y = make(64, 64), make(64, 64)
        for one in (0.0, number, -1.0, number):
            scaled(x, y, one)
        seen = calls._quickly(scaled, (x, y, number), {}, None)
        assert seen is not None
        known = calls.plans[calls._key_of(scaled, seen)]
        known.plan.__dict__["start"] = lambda stream, given: values.append(given)
        scaled.calls._known.clear()                            # made anew with the next that is kept
        known.keep(scaled, seen)
        scaled(x, y, number)
        (given,) = values
        assert str(number_brought(given[-1])) == str(float(number))
        count = launched.count
        for _ in range(2):
            with pytest.raises(ValueError, match="numbers of a kernel are float32"):
                scaled(x, y, 1e300)
        assert launched.count == count


class Offered:
    """An array of no library, which is written on a stream."""

    def __init__(self, pointer: int, stream: int):
        self.__cuda_array_interface__ = {"version": 3, "shape": (64, 64), "strides": None, "typestr": "<f4",
                                         "data": (pointer, False), "stream": stream}


def test_a_known_call_is_on_the_stream_that_a_first_one_is_on() -> None:
    """That of the array which the kernel takes first, wherever a call gives it."""
    def scaled(x: Any, y: Any, scale: float) -> None:
        for m in gp.parallel(x.rows):
            y[m] = scale * x[m]

    def scales(y: Any, x: Any, scale: float) -> None:
        for m in gp.parallel(x.rows):
            y[m] = scale * x[m]

    streams: list[int] = []

    def entry(config: Any, *_: Any) -> int:
        streams.append(config._obj.stream)
        return 0

    with stand_ins.gpu(entry):
        for function in scaled, scales:
            program, arrays = gk.program(function), (Offered(1 << 30, 5), Offered(1 << 31, 6))
            for _ in range(3):
                program(*arrays, 2.0)
            known = len(program.calls._known)
            assert known and len({*streams}) == 1 and len(streams) == 3
            streams.clear()
            program(Offered(1 << 30, 8), Offered(1 << 31, 9), 2.0)
            assert len(program.calls._known) == known and streams[0] in (8, 9)
            streams.clear()
    forget(), calls.forget_all()


def test_two_arguments_that_are_one_component_are_two_in_another_call(launched: Launched, derived: list[str]) -> None:
    @gk.program
    def twice(a: Any, b: Any, d: Any, f: Any, g: Any) -> None:
        for m, n in gp.parallel(a.rows, b.columns):
            acc = gp.zeros(m, n)
            for k in gp.sequential(a.columns):
                acc += a[m, k] @ b[k, n]
            d[m, n] = gp.call(f, acc, m, n) - gp.call(g, acc, m, n)

    with stand_ins.library("cupy") as make:
        a, b, d, scale = make(64, 64), make(64, 64), make(64, 64), epilogues.Scale(2.0)
        twice(a, b, d, scale, scale)
        twice(a, b, d, epilogues.Scale(2.0), epilogues.Scale(3.0))
        assert derived == ["twice"] and launched.count == 2
        assert brought(twice, a, b, d, epilogues.Scale(2.0), epilogues.Scale(3.0)) == [2.0, 3.0]


def test_other_sizes_with_other_components_derive_nothing(launched: Launched, derived: list[str]) -> None:
    with stand_ins.library("cupy") as make:
        for rows in (64, 128, 192):
            of_tiles(make(rows, 64), make(64, 64), make(rows, 64), epilogues.Scale(make(rows), along="M"))
        assert derived == ["of_tiles"] and launched.count == 3


@pytest.mark.kin(1)
def test_a_kept_plan_keeps_no_array_of_a_component(launched: Launched) -> None:
    with stand_ins.library("cupy") as make:
        a, b, d, vector = make(64, 64), make(64, 64), make(64, 64), make(64)
        of_tiles(a, b, d, epilogues.Bias(vector))
        died = weakref.ref(vector)
        del vector
        gc.collect()
        assert died() is None
        of_tiles(a, b, d, epilogues.Bias(make(64)))


def test_a_captured_array_on_another_device_or_in_a_result_is_refused_in_later_calls(launched: Launched) -> None:
    with stand_ins.library("cupy") as make:
        a, b, d, vector = make(64, 64), make(64, 64), make(64, 64), make(64)
        of_tiles(a, b, d, epilogues.Bias(vector))
        for wrong, words in ((epilogues.Bias(np.zeros(64, F16)), "on the host, and the program's arrays are on GPU 0"),
                             (epilogues.Residual(d), "shares memory")):
            for _ in range(2):
                with pytest.raises(ValueError, match=words):
                    of_tiles(a, b, d, wrong)
        assert launched.count == 1


SLOPE = 2.0


def sloped(x: Any, m: int, n: int) -> Any:
    return SLOPE * x


def test_a_function_whose_code_has_changed_is_derived_anew(launched: Launched, derived: list[str], rebound: Set) -> None:
    with stand_ins.library("cupy") as make:
        a, b, d, vector = make(64, 64), make(64, 64), make(64, 64), make(64)

        def shifted(x: Any, m: int, n: int) -> Any:
            return sloped(x, m, n) + vector[n]

        for _ in range(3):
            of_tiles(a, b, d, shifted)
        assert derived == ["of_tiles"]
        rebound(SLOPE=3.0)
        of_tiles(a, b, d, shifted)
        assert derived == ["of_tiles"] * 2
        vector = make(64)                              # another array in the closure is another launch
        of_tiles(a, b, d, shifted)
        assert launched.count == 5 and brought(of_tiles, a, b, d, shifted)[0] == describe(vector).pointer


def test_a_plan_takes_components_of_its_kind_alone(rng: np.random.Generator) -> None:
    a, b, d = half(rng, 64, 64), half(rng, 64, 64), poisoned(64, 64)
    plan = of_tiles.plan(a, b, d, epilogues.Scale(2.0))
    with gk.emulate():
        plan.run(dict(a=a, b=b, d=d, f=epilogues.Scale(0.5)))
        assert_close(d, 0.5 * (a.astype(float) @ b.astype(float)), 2e-3)
        with pytest.raises(ValueError, match="f is not the function that the plan was made for"):
            plan.run(dict(a=a, b=b, d=d, f=epilogues.ReLU()))


# -- compiled, and on a GPU -------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(6)
@pytest.mark.parametrize("called", ["a mask", "a score", "a condition"])
@pytest.mark.parametrize("mapping", [gk.Mapping(splits=1), MULTISTAGE], ids=["", "multistage"])
def test_nothing_spills(mapping: gk.Mapping, called: str, rng: np.random.Generator) -> None:
    q, k, v, o = (np.zeros((2, 256, 128), F16) for _ in range(4))
    slopes, of_keys = half(rng, 2, dtype=F32), rng.integers(0, 4, 256).astype(np.int32)
    program, given = {"a mask": (masked, (masks.Causal(),)), "a score": (attention, (masks.ALiBi(slopes), None)),
                      "a condition": (attention, (lambda s, m, n, h: s if n < m else s - slopes[h], lambda m, n, h: of_keys[n] <= h))}[called]
    usage = program.plan(q, k, v, o, 0.125, *given, mapping=mapping).launchable.entry().meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == 0, usage


@pytest.mark.gpu
@pytest.mark.parametrize("mapping", [None, MULTISTAGE], ids=["", "multistage"])
def test_on_a_gpu(mapping: gk.Mapping | None, rng: np.random.Generator) -> None:
    """Tiles, chains with shares, and rows; other components in later calls, by the plans of the first."""
    import cupy

    def on_gpu(x: np.ndarray) -> Any:
        return cupy.asarray(x)

    a, b = half(rng, 200, 72), half(rng, 72, 136)
    d = cupy.full((200, 136), cupy.nan, "f2")
    for n in range(3):
        bias = half(rng, 136)
        of_tiles(on_gpu(a), on_gpu(b), d, epilogues.Scale(0.5 + n) | epilogues.Bias(on_gpu(bias)) | epilogues.GELU(),
                 mapping=mapping)
        exact = of_tiles.reference(a, b, d.get(), epilogues.Scale(0.5 + n) | epilogues.Bias(bias) | epilogues.GELU())
        assert_close(d.get(), exact, 4e-3)
    table = half(rng, 136, dtype=F32)
    of_gpu = on_gpu(table)
    of_tiles(on_gpu(a), on_gpu(b), d, lambda x, m, n: x * m + of_gpu[n], mapping=mapping)
    assert_close(d.get(), of_tiles.reference(a, b, d.get(), lambda x, m, n: x * m + table[n]), 4e-3)
    q, k, v = half(rng, 2, 100, 64), half(rng, 2, 700, 64), half(rng, 2, 700, 64)
    o = cupy.full((2, 100, 64), cupy.nan, "f2")
    for _ in range(2):
        slopes = half(rng, 2, dtype=F32)
        attention(*map(on_gpu, (q, k, v)), o, 0.125, masks.ALiBi(on_gpu(slopes)), mapping=mapping)
        assert_close(o.get(), attention.reference(q, k, v, o.get(), 0.125, masks.ALiBi(slopes)), 4e-3)
    for n, seen in enumerate(all_masks(100, 700)):
        on = all_masks(100, 700)[n]
        if n in (5, 7, 8):                             # whose arrays a GPU has
            continue
        masked(*map(on_gpu, (q, k, v)), o, 0.125, on, mapping=mapping)
        assert_close(o.get(), masked.reference(q, k, v, o.get(), 0.125, seen), 4e-3)
    starts = np.sort(rng.integers(0, 660, 100)).astype(np.int32)
    masked(*map(on_gpu, (q, k, v)), o, 0.125, Bands(on_gpu(starts)), mapping=mapping)
    assert_close(o.get(), masked.reference(q, k, v, o.get(), 0.125, Bands(starts)), 4e-3)
    x, w = half(rng, 9, 1000), half(rng, 1000)
    y, z = cupy.full((9, 1000), cupy.nan, "f2"), cupy.full(9, cupy.nan, "f4")
    f, g = (lambda x, m: x * m), (lambda x: x if x > 0 else 0.1 * x)
    of_rows(on_gpu(x), on_gpu(w), y, z, f, g)
    for got, exact in zip((y, z), of_rows.reference(x, w, y.get(), z.get(), f, g), strict=True):
        assert_close(got.get(), exact, 4e-3)
