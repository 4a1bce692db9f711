"""Stacks of matrices in every form of a program: several, ``q[b, h, m]``, and neighbours that share a matrix, ``k[h // 4, n]``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import masks
from gemmkit import programs as gp
from gemmkit.lang.components import dataclass
from gemmkit.programs import calls
from gemmkit.runtime.device import H100, assumed
from tests.programs.test_called import check, half
from tests.programs.test_language import check_refused
from tests.support.chains import empty as poisoned
from tests.support.programs import online

F16, F32 = np.float16, np.float32
MULTISTAGE = gk.Mapping(kernel="multistage")


@gk.program
def attention(q: Any, k: Any, v: Any, o: Any, scale: float, group: int, seen: Any = None) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = scale * (q[h, m] @ k[h // group, n].T)
            s = s if seen is None else gp.where(seen, s, -math.inf)
            online(s, v[h // group, n], v.dtype, best, total, out)
        o[h, m] = out / total


@gk.program
def biased_and_padded(q: Any, k: Any, v: Any, lengths: Any, bias: Any, o: Any, scale: float, group: int) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, stop=lengths[h // group]):
            s = scale * (q[h, m] @ k[h // group, n].T) + bias[h // group, n] + gp.call(lambda h: 0.5 * h, h // group)
            online(s, v[h // group, n], v.dtype, best, total, out)
        o[h, m] = out / total + gp.place(h // group)


@gk.program
def tiles(a: Any, b: Any, s: Any, c: Any, d: Any) -> None:
    for h, m, n in gp.parallel(a.count, a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[h, m, k] @ b[h // 3, k, n]
        d[h, m, n] = acc * s[h // 3] + c[h // 6, m, n] + gp.place(h // 3)


@gk.program
def rows(x: Any, w: Any, s: Any, y: Any) -> None:
    for h, m in gp.parallel(x.count, x.rows):
        y[h, m] = x[h, m] * s[h // 2] + w[h // 2, m] + gp.place(h // 2)


#: Tiles of 64 rows and columns: of stacks there are many, which emulated threads take one after the other.
NARROW = gk.Mapping({"n": 64}, warpgroups=1), gk.Mapping({"n": 64}, warpgroups=1, kernel="multistage")
MAPPINGS = {"": gk.Mapping({"n": 32}, splits=1), "splits": gk.Mapping({"n": 32}, splits=2), "multistage": gk.Mapping(
    kernel="multistage", splits=1), "cluster": gk.Mapping({"n": 64}, warpgroups=1, cluster={"m": 2}, splits=1),
    "plain": gk.Mapping({"n": 32}, splits=1, ahead=False)}


@pytest.mark.kin(1)
@pytest.mark.sample(12)
@pytest.mark.parametrize("seen", [None, masks.Causal(), masks.Window(20, 10)], ids=["all", "causal", "window"])
@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_grouped_heads(mapping: gk.Mapping, seen: Any, rng: np.random.Generator) -> None:
    rows = 70 if mapping.cluster else 40               # the second block of a cluster has some
    q, k, v = half(rng, 6, rows, 32), half(rng, 2, 98, 32), half(rng, 2, 98, 32)
    check(attention, q, k, v, poisoned(6, rows, 32), 0.125, 3, seen, mapping=mapping)


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", list(MAPPINGS.values())[:3], ids=list(MAPPINGS)[:3])
def test_lengths_biases_and_numbers_of_groups(mapping: gk.Mapping, rng: np.random.Generator) -> None:
    q, k, v = half(rng, 4, 40, 32), half(rng, 2, 70, 32), half(rng, 2, 70, 32)
    lengths, bias = np.array([70, 33], np.int32), half(rng, 2, 70)
    check(biased_and_padded, q, k, v, lengths, bias, poisoned(4, 40, 32), 0.125, 2, mapping=mapping)


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", NARROW, ids=["", "multistage"])
def test_tiles(mapping: gk.Mapping, rng: np.random.Generator) -> None:
    check(tiles, half(rng, 6, 50, 24), half(rng, 2, 24, 72), half(rng, 2), half(rng, 1, 50, 72), poisoned(6, 50, 72), mapping=mapping)


def test_rows(rng: np.random.Generator) -> None:
    check(rows, half(rng, 6, 5, 72), half(rng, 3, 5, 72), half(rng, 3), poisoned(6, 5, 72))


# -- several stacks -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Striped(masks.Mask):
    """Keys that depend on the head and the batch."""

    def visible(self, m: int, n: int, head: int, batch: int) -> bool:
        return (m + n + head) % (batch + 2) > 0

    def keys(self, begin: int, end: int, keys: int, head: int, batch: int) -> tuple[int, int]:
        return 0, keys

    def free(self, begin: int, end: int, keys: int, head: int, batch: int) -> tuple[int, int]:
        return 0, 0


@gk.program
def batched(q: Any, k: Any, v: Any, sink: Any, bias: Any, lengths: Any, o: Any, lse: Any, scale: float, group: int, seen: Any = None) -> None:
    """Attention of a batch with grouped heads; keys have lengths, one head for two values', a bias for each batch."""
    for b, h, m in gp.parallel(*q.counts, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, stop=lengths[b]):
            s = scale * (q[b, h, m] @ k[b, h // group, n].T) + bias[b, n]
            s = s if seen is None else gp.where(seen, s, -math.inf)
            online(s, v[h // group, n], v.dtype, best, total, out)
        top = gp.finite(best)
        total = total + gp.exp(sink[h] - top)
        o[b, h, m] = out / total + gp.place(b)
        lse[b, h, m] = top + gp.log(total)


@pytest.mark.kin(1)
@pytest.mark.sample(6)
@pytest.mark.parametrize("seen", [None, Striped(), masks.Causal()], ids=["all", "striped", "causal"])
@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_batch_and_heads(mapping: gk.Mapping, seen: Any, rng: np.random.Generator) -> None:
    q, k, v, bias = half(rng, 3, 2, 40, 32), half(rng, 3, 1, 50, 32), half(rng, 1, 50, 32), half(rng, 3, 50)
    lengths = np.array([50, 0, 33], np.int32)
    check(batched, q, k, v, half(rng, 2), bias, lengths, poisoned(3, 2, 40, 32), poisoned(3, 2, 40, dtype=F32), 0.125, 2, seen,
          mapping=mapping, tolerance=1e-2)


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [MAPPINGS[""], MAPPINGS["splits"]], ids=["", "splits"])
def test_stacks_of_views(mapping: gk.Mapping, rng: np.random.Generator) -> None:
    """Batch and heads as (batch, rows, heads, columns), and parts of both."""
    q, o = half(rng, 2, 24, 4, 32), poisoned(2, 24, 4, 32)
    k, v, lengths = half(rng, 4, 6, 50, 32)[1:3, ::3], half(rng, 50, 2, 32).swapaxes(0, 1), np.array([50, 33], np.int64)
    check(batched, q.swapaxes(1, 2), k, v, half(rng, 4), half(rng, 2, 50), lengths, o.swapaxes(1, 2), poisoned(2, 4, 24, dtype=F32), 0.125, 2,
          mapping=mapping, tolerance=1e-2)


@gk.program
def three_stacks(a: Any, b: Any, s: Any, c: Any, d: Any, sums: Any) -> None:
    for x, y, z, m, n in gp.parallel(*a.counts, a.rows, b.columns):
        acc, total = gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.columns):
            acc += a[x, y, z, m, k] @ b[y // 2, x, k, n]
            total += a[x, y, z, m, k].sum(axis=1)
        d[x, y, z, m, n] = acc * s[y] + c[x, z, m, n] + gp.place(x) - gp.place(z)
        with gp.once(n):
            sums[x, y, z, m] = total


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [*NARROW, gk.Mapping({"n": 64}, warpgroups=1, cluster={"m": 2})], ids=["", "multistage", "cluster"])
def test_three_stacks(mapping: gk.Mapping, rng: np.random.Generator) -> None:
    rows = 66 if mapping.cluster else 34
    a, b, c = half(rng, 2, 2, 2, rows, 24), half(rng, 1, 2, 24, 72), half(rng, 2, 2, rows, 72)
    check(three_stacks, a, b, half(rng, 2), c, poisoned(2, 2, 2, rows, 72), poisoned(2, 2, 2, rows, dtype=F32), mapping=mapping)


@gk.program
def rows_of_stacks(x: Any, w: Any, s: Any, y: Any, most: Any) -> None:
    for a, b, m in gp.parallel(*x.counts, x.rows):
        y[a, b, m] = x[a, b, m] * s[b] + w[a, m] + gp.place(a)
        most[a, b, m] = x[a, b, m].max(axis=1) + s[b]


def test_rows_of_stacks(rng: np.random.Generator) -> None:
    check(rows_of_stacks, half(rng, 3, 2, 5, 72), half(rng, 3, 5, 72), half(rng, 2), poisoned(3, 2, 5, 72), poisoned(3, 2, 5, dtype=F32))


def test_stacks_have_sizes_of_their_own() -> None:
    """One derivation is every batch's and every number of heads."""
    calls.forget_all()
    with assumed(H100):
        texts = set()
        for batch, heads in ((2, 8), (1, 64), (16, 8)):
            q, k = np.zeros((batch, heads, 256, 64), F16), np.zeros((batch, heads // 4, 256, 64), F16)
            given = q, k, k[0].copy(), np.zeros(heads, F16), np.zeros((batch, 256), F16), np.zeros(batch, np.int32), q.copy(), np.zeros(
                (batch, heads, 256), F32)
            plan = calls.plan_of_call(batched, batched.bound((*given, 0.125, 4), {}), gk.Mapping(splits=1, longest_first=False))
            assert (plan.extents["b"], plan.extents["h"]) == (batch, heads)
            texts.add(plan.text)
    assert len(texts) == 1


def test_what_stacks_cannot_be(rng: np.random.Generator) -> None:
    @gk.program
    def masked(q: Any, k: Any, v: Any, o: Any) -> None:
        for a, b, c, m in gp.parallel(*q.counts, q.rows):
            best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
            for n in gp.sequential(k.rows):
                online(gp.where(masks.Causal(), q[a, b, c, m] @ k[n].T, -math.inf), v[n], v.dtype, best, total, out)
            o[a, b, c, m] = out / total

    @gk.program
    def lost(q: Any, k: Any, o: Any) -> None:
        for b, h, m in gp.parallel(*q.counts, q.rows):
            total = gp.zeros(m)
            for n in gp.sequential(k.rows):
                total[:] = total + (q[b, h, m] @ k[n].T).sum(axis=1)
            o[b, m] = total

    q, k = half(rng, 2, 2, 2, 70, 64), half(rng, 70, 64)
    with pytest.raises(ValueError, match="tiles of 3 stacks: a mask is given a head and a batch"):
        masked.plan(q, k, k.copy(), poisoned(2, 2, 2, 70, 64))
    with pytest.raises(ValueError, match="stored for each h of axis 1 of q"):
        lost.plan(half(rng, 2, 3, 70, 64), k, poisoned(2, 70, dtype=F32))


def test_groups_of_groups_are_groups() -> None:
    @gk.program
    def nested(a: Any, b: Any, d: Any) -> None:
        for h, m, n in gp.parallel(a.count, a.rows, b.columns):
            acc = gp.zeros(m, n)
            for k in gp.sequential(a.columns):
                acc += a[h // 1, m, k] @ b[h // 2 // 3, k, n]
            d[h, m, n] = acc

    assert "udiv(h, 6)" in nested.plan(np.zeros((12, 64, 64), F16), np.zeros((2, 64, 64), F16), np.zeros((12, 64, 64), F16)).text


def planned(heads: int, of_keys: int, keys: int, group: int) -> Any:
    arrays = [np.zeros((count, extent, 64), F16) for count, extent in ((heads, 128), (of_keys, keys), (of_keys, keys), (heads, 128))]
    return calls.plan_of_call(attention, attention.bound((*arrays, 0.125, group), {}), gk.Mapping(splits=1))


def test_other_sizes_are_of_one_derivation_and_must_fit(replaced: Any) -> None:
    calls.forget_all()
    derived, original = list[int](), calls.planned

    def noted(*given: Any) -> Any:
        derived.append(1)
        return original(*given)

    replaced(calls, "planned", noted)
    with assumed(H100):
        for sizes in ((8, 2, 256, 4), (16, 4, 256, 4), (8, 2, 512, 4)):
            plan = planned(*sizes)
            assert plan.extents["h"] == sizes[0] and len(derived) == 1
        for sizes, words in (((8, 4, 256, 4), r"h // 4 is a block of axis 0 of q \(2\)|\(4 elements\)"), ((6, 2, 256, 4), "no multiple of 4")):
            with pytest.raises(ValueError, match=words):
                planned(*sizes)
        planned(8, 4, 256, 2)                              # another constant
        assert len(derived) == 4


STACKED = """def f(a, b, d):
    for h, m, n in gp.parallel(a.count, a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += {}  #
        d[h, m, n] = acc
"""


@pytest.mark.parametrize(("expression", "words"), [
    ("a[h, m, k] @ b[h // 0, k, n]", "a whole number of 1 or more"), ("a[h, m, k] @ b[h // 2.0, k, n]", "a whole number of 1 or more"),
    ("a[h, m, k] @ b[h // 5, k, n]", "a has 6 matrices, no multiple of 5"), ("a[h, m, k] @ b[h // 3, k, n]", r"\(6 elements\)"),
    ("a[h, m, k] @ b[m // 2, k, n]", "m is a block; only an index along a stack"), ("a[h, m, k] @ b[6 // h, k, n]", "not a number"),
    ("a[h, h // 2, k] @ b[h, k, n]", "used twice|used here"),
])
def test_what_is_no_group(expression: str, words: str) -> None:
    arrays = [np.zeros((6, 64, 64), F16) for _ in range(3)]
    check_refused(STACKED.format(expression), words, lambda f: f.plan(*arrays))


def test_a_group_stores_nothing() -> None:
    text = STACKED.format("a[h, m, k] @ b[h, k, n]").replace("  #", "").replace("d[h, m, n] = acc", "d[h // 2, m, n] = acc  #")
    arrays = [np.zeros((count, 64, 64), F16) for count in (6, 6, 3)]
    check_refused(text, "each overwrites the one before", lambda f: f.plan(*arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("mapping", [None, MULTISTAGE], ids=["", "multistage"])
def test_on_a_gpu(mapping: gk.Mapping | None, rng: np.random.Generator) -> None:
    import cupy

    for heads, of_keys, keys in ((8, 2, 300), (12, 4, 700)):
        q, k, v = half(rng, heads, 100, 64), half(rng, of_keys, keys, 64), half(rng, of_keys, keys, 64)
        for seen in (None, masks.Causal()):
            o = cupy.full(q.shape, cupy.nan, "f2")
            attention(*map(cupy.asarray, (q, k, v)), o, 0.125, heads // of_keys, seen, mapping=mapping)
            exact = attention.reference(q, k, v, o.get(), 0.125, heads // of_keys, seen)
            assert np.abs(o.get() - exact).max() < 4e-3 * np.abs(exact).max()
