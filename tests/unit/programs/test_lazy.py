"""Rounds that rescale lazily (``Mapping(lazy=True)``): drawn ones in the emulator, what they leave out, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from tests.support import chains
from tests.support import programs as listing
from tests.support.chains import check

LAZY = gk.Mapping({"n": 32}, warpgroups=1, lazy=True)
UPWARDS = gk.Mapping({"n": 32}, warpgroups=1, lazy=True, descending=False)


@pytest.mark.sample(16)
@pytest.mark.parametrize("seed", range(120))
def test_drawn(seed: int) -> None:
    program, arrays, mapping, more = chains.drawn_lazy(seed)
    why = [held.get(program.function.__name__) for held in (chains.NOT_LAZY, chains.NO_SHARES if mapping.splits else {})]
    try:
        plan = check(program, arrays, mapping, seed, **more)
    except gk.ConfigError as error:
        assert any(reason is not None and reason in str(error) for reason in why), str(error)
        return
    assert "lazy" in plan.text.splitlines()[0] and "rare = changes(" in plan.text
    assert program.plan(*arrays, mapping=plan.mapping, **more).text == plan.text


def heads(growth: float, dtype: Any = np.float16) -> list[np.ndarray]:
    """Three blocks of 32 keys; scores of a block are larger by ``growth`` than those of the one before, in powers of 2."""
    q, k, v = (np.random.default_rng(n).standard_normal((1, rows, 64)).astype(dtype) for n, rows in ((0, 70), (1, 96), (2, 96)))
    q[..., 0], k[..., 0] = 1, np.arange(96) // 32 * growth * math.log(2)
    return [q, k, v, np.full(q.shape, np.nan, dtype)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("growth", [0.0, 1.0, 6.0, 7.9, 8.1, 20.0, -20.0])
def test_growth(growth: float, dtype: Any) -> None:
    q, *others = heads(growth, dtype)
    q[..., 1:] /= 4
    o, exact = others[-1], listing.attention.reference(q, *others, 1.0)
    with gk.emulate():
        listing.attention(q, *others, 1.0, mapping=UPWARDS)
    assert np.abs(o.astype(float) - exact).max() <= (2e-2 if dtype is ml_dtypes.bfloat16 else 3e-3) * np.abs(exact).max()


def test_rows_are_left_as_they_are() -> None:
    """Of maxima that grow by a factor of 2 a round sums are never scaled, of 2^20 in every round."""
    def times(growth: float, mapping: gk.Mapping) -> int:
        q, k, v, o = heads(growth)
        q, o = q[:, :64], o[:, :64]                    # warps without rows have nothing to scale
        q[..., 1:] = 0
        plan = listing.attention.plan(q, k, v, o, 1.0, mapping=mapping)
        text = plan.text.replace("def make_out(", "CALLS = []\n\n\ndef make_out(").replace(
            "    return out * row_value(shrink, i)", "    CALLS.append(i)\n    return out * row_value(shrink, i)")
        assert text.count("CALLS") == 2
        again = listing.attention.plan(q, k, v, o, 1.0, mapping=mapping, text=text)
        with gk.emulate():
            again.run(dict(q=q, k=k, v=v, o=o, scale=1.0))
        return len(again.module.CALLS)

    every = times(1.0, gk.Mapping({"n": 32}, warpgroups=1, descending=False, lazy=False))
    assert times(1.0, UPWARDS) == 0 and times(20.0, UPWARDS) == every > 0


def test_the_text_has_a_branch() -> None:
    plan = listing.attention.plan(*heads(1.0), 1.0, mapping=LAZY)
    assert re.search(r"rare = changes\(drop, least\)(?s:.*?)if rare:\n +out = apply\(make_out, out, shrink\)", plan.text)
    assert "rare" not in listing.attention.plan(*heads(1.0), 1.0, mapping=gk.Mapping({"n": 32}, lazy=False)).text


@gk.program
def with_largest(q: Any, k: Any, v: Any, o: Any, largest: Any) -> None:
    """Attention that stores the largest score of a row as well."""
    for m in gp.parallel(q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = q[m] @ k[n].T
            top = gp.maximum(best, s.max(axis=1))
            p, shrink = gp.exp(s - top), gp.exp(best - top)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[n]
            best[:] = top
        o[m] = out / total
        largest[m] = best


@gk.program
def weighted(q: Any, k: Any, v: Any, gate: Any, o: Any) -> None:
    """Weights that are multiplied before they are handed over: of float16 nothing says that there is room."""
    for m in gp.parallel(q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = q[m] @ k[n].T
            top = gp.maximum(best, s.max(axis=1))
            p, shrink = gp.exp(s - top) * gate[m], gp.exp(best - top)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[n]
            best[:] = top
        o[m] = out / total


def test_refused() -> None:
    q, k, v, o = (x[0] for x in heads(1.0))
    row = np.full(70, np.nan, np.float32)
    with pytest.raises(gk.ConfigError, match=r"(?s)lazy=True\): results depend on the maximum that best keeps.*test_lazy.py"):
        with_largest.plan(q, k, v, o, row, mapping=LAZY)
    with pytest.raises(gk.ConfigError, match=r"p is handed over to a product in float16, and may be 2\^8 times as large"):
        weighted.plan(q, k, v, row, o, mapping=LAZY)
    with pytest.raises(gk.ConfigError, match=r"lazy=True\): no cell of rows keeps a maximum"):
        chains.gated_chain.plan(q, k, row, v, o, mapping=LAZY)
    with pytest.raises(gk.ConfigError, match="lazy=True.*these rounds only add to cells"):
        a = np.zeros((64, 64), np.float16)
        listing.gemm.plan(a, a, a.copy(), mapping=gk.Mapping(lazy=True))


def test_bfloat16_has_room() -> None:
    q, k, v, o = (x[0] for x in heads(3.0, ml_dtypes.bfloat16))
    q[:, 1:] /= 4
    gate = np.random.default_rng(3).random(70).astype(np.float32) + np.float32(0.5)
    exact = weighted.reference(q, k, v, gate, o)
    with gk.emulate():
        weighted(q, k, v, gate, o, mapping=LAZY)
    assert np.abs(o.astype(float) - exact).max() <= 2e-2 * np.abs(exact).max()


@pytest.mark.parametrize("old, new", [("if (-8.0 <= drop) else lane_value", "if (-40.0 <= drop) else lane_value"),
                                      ("return 1.0 if (-8.0 <= drop)", "return 1.0 if (-12.0 <= drop)"),
                                      ("    return out * row_value(shrink, i)", "    return out")])
def test_faults_are_found(old: str, new: str) -> None:
    """Of scores that grow by 2^10 or 2^20 a round."""
    for growth in (10.0, 20.0):
        q, k, v, o = heads(growth)
        q[..., 1:] /= 4
        plan = listing.attention.plan(q, k, v, o, 1.0, mapping=UPWARDS)
        assert plan.text.count(old) == 1
        edited = listing.attention.plan(q, k, v, o, 1.0, mapping=UPWARDS, text=plan.text.replace(old, new))
        with gk.emulate():
            edited.run(dict(q=q, k=k, v=v, o=o, scale=1.0))
        exact = listing.attention.reference(q, k, v, o, 1.0)
        if not np.abs(o.astype(float) - exact).max() <= 3e-3 * np.abs(exact).max():
            return
    pytest.fail("not found")
