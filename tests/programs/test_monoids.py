"""What rounds do to their cells: proved to be sums, products and maxima in any order, or left in the program's order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.programs.chains import algebra
from gemmkit.programs.chains.chain import chain_of
from gemmkit.programs.chains.monoids import Unproved, is_independent, monoids
from gemmkit.runtime.device import H100, assumed
from tests.support import chains
from tests.support import programs as listing
from tests.support.patches import Seeded

F16, F32 = np.float16, np.float32
Update = Callable[..., Any]


@gk.program
def folded(q: Any, k: Any, v: Any, o: Any, y: Any, scale: float, update: Update, begin: Any) -> None:
    """Sums of products, and a cell of rows that becomes what ``update`` makes of it and of a round's scores."""
    for m in gp.parallel(q.rows):
        cell, out = gp.full(m, begin()), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = scale * (q[m] @ k[n].T)
            out += s.astype(v.dtype) @ v[n]
            cell[:] = update(cell, s, gp.place(n))
        o[m] = out
        y[m] = cell


def arrays(rows: int = 20, keys: int = 100, scale: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(rows)
    q, k, v = ((rng.random((extent, 64)) * scale).astype(F16) for extent in (rows, keys, keys))
    return [q, k, v / F16(64), np.full((rows, 64), np.nan, F32), np.full(rows, np.nan, F32)]


def saturated(at: float) -> Update:
    return lambda cell, s, n: gp.minimum(cell + s.sum(axis=1), at)


#: Updates that depend on the order of rounds, or of which it is not seen that they do not.
ORDERED: dict[str, Update] = {
    **{f"at most {at:g}": saturated(at) for at in (1.0, 7.0, 300.0, 5e4, 1e6)},
    "at least 0": lambda cell, s, n: gp.maximum(cell + (s - 20.0).sum(axis=1), 0.0),
    "the last": lambda cell, s, n: s.sum(axis=1), "the last of some": lambda cell, s, n: gp.where(s.max(axis=1) < 14.0, cell, s.max(axis=1)),
    "decayed": lambda cell, s, n: 0.5 * cell + s.sum(axis=1), "bounded sums": lambda cell, s, n: cell + gp.minimum(s.sum(axis=1), 1000.0 - cell),
    "above a bound": lambda cell, s, n: cell + gp.where(cell < 2000.0, s, 0.5 * s).sum(axis=1),
    "folded back": lambda cell, s, n: gp.where(cell < 4000.0, cell + s.sum(axis=1), cell - 3000.0),
    "squared": lambda cell, s, n: gp.sqrt(cell * cell + s.sum(axis=1)), "the largest or the sum": lambda cell, s, n: gp.maximum(cell, s.max(axis=1) + 0.1 * cell),
}
#: And such as do not.
FREE: dict[str, tuple[Update, float]] = {
    "sum": (lambda cell, s, n: cell + s.sum(axis=1), 0.0), "sum from the right": (lambda cell, s, n: s.sum(axis=1) - (-cell), 3.0),
    "sum of what is cut": (lambda cell, s, n: cell + gp.minimum(s, 15.0).sum(axis=1), 0.0),
    "sum of some": (lambda cell, s, n: cell + gp.where(s < 14.0, s, 0.0).sum(axis=1), 0.0),
    "largest": (lambda cell, s, n: gp.maximum(s.max(axis=1), cell), -math.inf), "least": (lambda cell, s, n: gp.minimum(cell, s.min(axis=1)), math.inf),
    "least of the sums": (lambda cell, s, n: gp.minimum(cell, s.sum(axis=1)), 1e5), "product": (lambda cell, s, n: cell * (s.max(axis=1) / 16.0), 1.0),
    "largest of three": (lambda cell, s, n: gp.maximum(gp.maximum(cell, s.max(axis=1)), s.min(axis=1) + 3.0), 0.0),
    "by places": (lambda cell, s, n: cell + (s * n).sum(axis=1), 0.0),
}


def chain(program: Any, given: list[Any], **more: Any) -> Any:
    return chain_of(program.traced(program.bound(tuple(given), more)))


@pytest.mark.kin(1)
@pytest.mark.parametrize("name", ORDERED)
def test_what_is_not_recognised_keeps_its_order(name: str) -> None:
    given, more = arrays(), dict(scale=1.0, update=ORDERED[name], begin=float)
    with pytest.raises(Unproved):
        monoids(chain(folded, given, **more), {"scale": 1.0})
    plan = folded.plan(*given, mapping=gk.Mapping({"n": 32}), **more)
    assert not plan.mapping.descending and plan.mapping.splits == 1
    with pytest.raises(gk.ConfigError, match="rounds of .* do not commute"):
        folded.plan(*given, mapping=gk.Mapping(descending=True), **more)
    with pytest.raises(gk.ConfigError, match=r"cannot be split: .*\n  at .*test_monoids.py:\d+"):
        folded.plan(*given, mapping=gk.Mapping(splits=2), **more)
    with assumed(H100):
        assert folded.plan(*arrays(8, 8192), **more).mapping.splits == 1              # for which most processors are idle


def check(given: list[np.ndarray], mapping: gk.Mapping, **more: Any) -> None:
    """Results may depend on the length of blocks: the reference has the kernel's."""
    plan, wanted = folded.plan(*given, mapping=mapping, **more), folded.reference(*given, block=16, **more)
    with gk.emulate():
        plan.run(folded.bound(tuple(given), more))
    chains.check_close(given[-2:], wanted, lambda got: 3e-3)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ORDERED)
def test_what_keeps_its_order_computes(name: str) -> None:
    """Large sums, which caps that trials of small numbers do not see cut."""
    scale = 6.0 if name.startswith("at most") else 1.0
    check(arrays(8, 70, scale), gk.Mapping({"n": 16}), scale=scale, update=ORDERED[name], begin=float)


@pytest.mark.parametrize("name", FREE)
def test_monoids_go_in_any_order(name: str) -> None:
    update, begin = FREE[name]
    given, more = arrays(), dict(scale=1.0, update=update, begin=lambda: begin)
    plan = folded.plan(*given, mapping=gk.Mapping({"n": 32}), **more)
    assert plan.mapping.descending
    if name in ("sum", "least", "largest", "sum of what is cut", "by places"):
        assert folded.plan(*given, mapping=gk.Mapping({"n": 32}, splits=2), **more).mapping.splits == 2


@pytest.mark.sample(4)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", FREE)
def test_monoids_compute(name: str, splits: int) -> None:
    update, begin = FREE[name]
    try:
        check(arrays(8, 70), gk.Mapping({"n": 16}, splits=splits), scale=1.0, update=update, begin=lambda: begin)
    except gk.ConfigError as error:
        assert splits > 1 and "cannot be split" in str(error)


def test_a_sum_that_begins_with_a_number_is_not_split() -> None:
    given, more = arrays(), dict(scale=1.0, update=FREE["sum"][0], begin=lambda: 3.0)
    assert folded.plan(*given, mapping=gk.Mapping(), **more).mapping.descending
    with pytest.raises(gk.ConfigError, match="cannot be split"):
        folded.plan(*given, mapping=gk.Mapping(splits=2), **more)


# -- sums that are relative to other cells --------------------------------------------------------------------------------------

@gk.program
def relative(q: Any, k: Any, v: Any, o: Any, scale: float, kind: str) -> None:
    """Attention in other words, and what looks like it."""
    for m in gp.parallel(q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = q[m] @ k[n].T
            top = gp.maximum(best, s.max(axis=1))
            if kind == "scaled":
                p, shrink = gp.exp(scale * s - scale * top), gp.exp(scale * (best - top))
            elif kind == "quotient":
                p, shrink = gp.exp(s) / gp.exp(top), gp.exp(best) / gp.exp(top)
            elif kind == "another factor":
                p, shrink = gp.exp(s - top), gp.exp(scale * (best - top))
            elif kind == "forgets":
                p, shrink = gp.exp(s - top), 0.9 * gp.exp(best - top)
            elif kind == "bounded":
                p, shrink = gp.exp(s - top), gp.maximum(gp.exp(best - top), 1e-4)
            else:
                p, shrink = gp.exp(s - top), gp.exp(best - top)
            total[:] = gp.minimum(total * shrink + p.sum(axis=1), 90.0) if kind == "at most 90" else total * shrink + p.sum(axis=1)
            weights = p * total if kind == "by the sum so far" else p
            out[:] = out * shrink + weights.astype(v.dtype) @ v[n]
            best[:] = top
        o[m] = gp.minimum(out, 5000.0) if kind == "cut sums" else out / total


@pytest.mark.parametrize("kind, is_free", [("", True), ("scaled", True), ("quotient", True), ("another factor", False), ("forgets", False),
                                           ("bounded", False), ("at most 90", False), ("by the sum so far", False)])
def test_sums_relative_to_a_maximum(kind: str, is_free: bool) -> None:
    given = arrays()[:4]
    plan = relative.plan(*given, mapping=gk.Mapping({"n": 32}), scale=0.5, kind=kind)
    assert plan.mapping.descending is is_free
    if not is_free:
        for said in (dict(splits=2), dict(lazy=True)):
            with pytest.raises(gk.ConfigError, match="cannot be split|results depend on the maximum"):
                relative.plan(*given, mapping=gk.Mapping(**said), scale=0.5, kind=kind)


def test_results_that_depend_on_the_reference() -> None:
    """A quotient does not, a sum alone does, and neither does one that is cut at what no trial would reach."""
    found = {}
    for kind in ("", "scaled", "cut sums"):
        made = chain(relative, arrays()[:4], scale=0.5, kind=kind)
        found[kind] = is_independent(made, {"scale": 0.5}, made.carried[0])
    assert found == {"": True, "scaled": True, "cut sums": False}


# -- rows that are shown nothing ------------------------------------------------------------------------------------------------

@gk.program
def masked(q: Any, k: Any, v: Any, o: Any, weight: Any) -> None:
    for m in gp.parallel(q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = q[m] @ k[n].T
            out += weight(gp.where(lambda i, j: j <= i, s, 0.0), s).astype(v.dtype) @ v[n]
        o[m] = out


def test_a_hidden_block_counts_where_something_else_of_it_does() -> None:
    """Scores beyond 5000, which no trial of small numbers has."""
    given = [*arrays(100, 100)[:3], np.full((100, 64), np.nan, F32)]
    less, all_blocks = (masked.plan(*given, mapping=gk.Mapping({"n": 16}), weight=weight).text for weight in
                        (lambda hidden, s: gp.tanh(hidden), lambda hidden, s: gp.tanh(hidden) + gp.maximum(s - 5000.0, 0.0)))
    assert "def end_seen" in less and "def end_seen" not in all_blocks


@gk.program
def raised(q: Any, k: Any, v: Any, high: Any, y: Any, o: Any) -> None:
    """What places beyond the last one would be depends on the row: 0 for small numbers, and more for large ones."""
    for m in gp.parallel(q.rows):
        total, out = gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            p = gp.maximum(q[m] @ k[n].T + high[m] - 5.0, 0.0)
            total += p.sum(axis=1)
            out += p.astype(v.dtype) @ v[n]
        y[m] = total
        o[m] = out


def test_what_is_out_of_range_is_known_for_all_numbers() -> None:
    q, k, v, o, y = arrays(8, 21)
    chains.check(raised, [q, k, v, np.linspace(-9, 30, 8, dtype=F32), y, o], gk.Mapping({"n": 16}))


# -- trials, the second look ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("at", [1.0, 7.0, 300.0, 5e4, 1e6])
def test_trials_alone_find_what_is_cut(at: float, seeded: Seeded) -> None:
    """They are drawn around each constant of a program."""
    seeded(algebra, "monoids", lambda chain, signs: {})
    assert not algebra.commutes(chain(folded, arrays(), scale=1.0, update=saturated(at), begin=float), {"scale": 1.0})
    assert algebra.commutes(chain(folded, arrays(), scale=1.0, update=FREE["sum of what is cut"][0], begin=float), {"scale": 1.0})


# -- programs that others measure -----------------------------------------------------------------------------------------------

@gk.program
def gradients(q: Any, k: Any, v: Any, do: Any, lse: Any, delta: Any, dk: Any, dv: Any, scale: float) -> None:
    """Attention's backward pass, of keys and values."""
    for h, n in gp.parallel(k.count, k.rows):
        left, right = gp.zeros(n, k.columns), gp.zeros(n, v.columns)
        for m in gp.sequential(q.rows):
            p = gp.exp(scale * (k[h, n] @ q[h, m].T) - lse[h, m])
            p = gp.where(lambda i, j: i <= j, p, 0.0)
            right += p.astype(v.dtype) @ do[h, m]
            ds = p * (v[h, n] @ do[h, m].T - delta[h, m])
            left += ds.astype(q.dtype) @ q[h, m]
        dk[h, n] = scale * left
        dv[h, n] = right


@gk.program
def entropy(x: Any, w: Any, y: Any) -> None:
    """Of the softmax of X W^T: sums and weighted sums relative to the largest logit."""
    for m in gp.parallel(x.rows):
        best, total, dot = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m)
        for n in gp.sequential(w.rows):
            s = x[m] @ w[n].T
            top = gp.maximum(best, s.max(axis=1))
            p, shrink = gp.exp(s - top), gp.exp(best - top)
            total[:] = total * shrink + p.sum(axis=1)
            dot[:] = dot * shrink + (p * s).sum(axis=1)
            best[:] = top
        y[m] = best + gp.log(total) - dot / total


@gk.program
def linear_attention(q: Any, k: Any, v: Any, o: Any, decay: float) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = q[h, m] @ k[h, n].T * gp.exp(decay * (gp.place(m) - gp.place(n)))
            out += gp.where(lambda i, j: j <= i, s, 0.0).astype(v.dtype) @ v[h, n]
        o[h, m] = out


def half(*shape: int) -> np.ndarray:
    return np.zeros(shape, F16)


SCHEDULES: dict[str, tuple[Any, list[np.ndarray], dict[str, Any], dict[str, Any]]] = {
    "attention": (listing.attention, [half(8, 4096, 128)] * 4, dict(scale=0.125), dict(descending=True, lazy=False, splits=1)),
    "causal": (listing.attention, [half(8, 4096, 128)] * 4, dict(scale=0.125, visible=chains.causal), dict(descending=True, longest_first=True)),
    "soft cap": (listing.attention, [half(8, 4096, 128)] * 4, dict(scale=0.125, score=chains.soft_cap), dict(descending=True, turns=True)),
    "wide heads": (listing.attention, [half(8, 4096, 256)] * 4, dict(scale=0.125), dict(descending=True, lazy=True)),
    "decoding": (listing.attention, [half(8, 1, 128), half(8, 8192, 128), half(8, 8192, 128), half(8, 1, 128)], dict(scale=0.125),
                 dict(descending=True, splits=16)),
    "lengths": (chains.bounded, [half(8, 512, 64), half(8, 512, 64), half(8, 512, 64), np.zeros(8, np.int32), half(8, 512, 64),
                                 np.zeros((8, 512), F32)], dict(scale=0.125), dict(descending=True)),
    "decayed": (chains.decayed, [half(8, 512, 64), half(8, 512, 64), half(8, 512, 64), np.zeros(8, F32), half(512, 512), half(8, 512, 64),
                                 np.zeros((8, 512), F32)], dict(scale=0.125), dict(descending=False, splits=1)),
    "normalised": (chains.normalised, [half(512, 64)] * 4, {}, dict(descending=True)),
    "gradients": (gradients, [half(8, 512, 64)] * 4 + [np.zeros((8, 512), F32)] * 2 + [half(8, 512, 64)] * 2, dict(scale=0.125),
                  dict(descending=True)),
    "entropy": (entropy, [half(4096, 256), half(8192, 256), np.zeros(4096, F32)], {}, dict(descending=True)),
    "linear attention": (linear_attention, [half(8, 512, 64)] * 4, dict(decay=-0.01), dict(descending=True, longest_first=True)),
    "mlp": (listing.mlp, [half(16384, 128), half(20, 128, 128), half(20, 128), half(16384, 128)], {}, dict(descending=False)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    program, given, more, wanted = SCHEDULES[name]
    with assumed(H100):
        mapping = program.plan(*(x.copy() for x in given), **more).mapping
    assert {key: getattr(mapping, key) for key in wanted} == wanted
