"""Plans of calls are kept: what finds an earlier one, and what is derived anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.products import forget_plans
from gemmkit.programs import remembered
from gemmkit.runtime.device import H100, assumed
from tests.support import chains
from tests.support import programs as listing
from tests.support.checks import named_functions_run

F16, BF16 = np.float16, ml_dtypes.bfloat16
SLOPE = 2.0


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Host arrays are planned for a GPU that need not be here, and not run."""
    remembered.plans.clear()
    with assumed(H100):
        yield


def heads(rows: int = 70, keys: int = 90, dtype: Any = F16) -> list[np.ndarray]:
    return [np.zeros((2, extent, 64), dtype) for extent in (rows, keys, keys, rows)]


def planned(*arrays: Any, mapping: gk.Mapping | None = None, program: gk.Program = listing.attention, **more: Any) -> Any:
    return remembered.plan_of_call(program, program.bound(arrays, {"scale": 0.125, **more} if program is listing.attention else more),
                                   mapping)


def helped(s: Any) -> Any:
    return SLOPE * s


def sloped(s: Any) -> Any:
    return helped(s)


def test_a_call_like_an_earlier_one_finds_its_plan() -> None:
    first = planned(*heads(), visible=chains.causal, mapping=gk.Mapping({"n": 64}))
    assert planned(*heads(), visible=chains.causal, mapping=gk.Mapping({"n": 64})) is first
    assert named_functions_run(lambda: planned(*heads(), visible=chains.causal, mapping=gk.Mapping({"n": 64}))) <= 60  # deriving: 14,000


@pytest.mark.parametrize("change", ["rows", "keys", "dtype", "strides", "alignment", "scale", "mapping", "function", "no function", "device"])
def test_what_a_plan_depends_on_is_another_plan(change: str) -> None:
    arrays, more, mapping = heads(), dict(scale=0.125, visible=chains.causal), gk.Mapping({"n": 64})
    first = planned(*arrays, mapping=mapping, **more)
    if change in ("rows", "keys"):
        arrays = heads(**{change: 91})
    elif change == "dtype":
        arrays = heads(dtype=BF16)
    elif change == "strides":
        arrays[1] = np.zeros((2, 90, 128), F16)[:, :, :64]
    elif change == "alignment":
        arrays[3] = np.zeros(2 * 70 * 64 + 1, F16)[1:].reshape(2, 70, 64)
    elif change == "scale":
        more["scale"] = 0.25
    elif change == "mapping":
        mapping = gk.Mapping({"n": 32})
    elif change == "function":
        more["visible"] = chains.window
    elif change == "no function":
        del more["visible"]
    other = dataclasses.replace(H100, sm_count=7) if change == "device" else H100
    with assumed(other):
        second = planned(*arrays, mapping=mapping, **more)
        assert second is not first and planned(*arrays, mapping=mapping, **more) is second
    assert second.numbers["scale"] == more["scale"] and second.device == other


def test_code_that_changes_is_derived_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant and a helper that a score names, and what it captured."""
    texts = [planned(*heads(), score=sloped).text]
    monkeypatch.setitem(globals(), "SLOPE", 3.0)
    texts.append(planned(*heads(), score=sloped).text)
    monkeypatch.setitem(globals(), "helped", lambda s: gp.tanh(s))
    texts.append(planned(*heads(), score=sloped).text)
    assert len(set(texts)) == 3
    cap = 5.0

    def capped(s: Any) -> Any:
        return cap * gp.tanh(s / cap)

    found = planned(*heads(), score=capped)
    assert planned(*heads(), score=capped) is found
    cap = 7.0
    assert planned(*heads(), score=capped).text not in (*texts, found.text)


def test_a_program_s_own_code_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    @gk.program
    def scaled(a: Any, b: Any, d: Any) -> None:
        for m, n in gp.parallel(a.rows, b.columns):
            acc = gp.zeros(m, n)
            for k in gp.sequential(a.columns):
                acc += a[m, k] @ b[k, n]
            d[m, n] = SLOPE * acc

    arrays = [np.zeros((64, 64), F16) for _ in range(3)]
    first = planned(*arrays, program=scaled)
    assert planned(*arrays, program=scaled) is first
    monkeypatch.setitem(globals(), "SLOPE", 3.0)
    assert planned(*arrays, program=scaled).text != first.text


def test_what_can_change_in_place_is_not_kept() -> None:
    slopes = [2.0]

    def by_list(s: Any) -> Any:
        return slopes[0] * s

    class Called:
        slope = 2.0

        def __call__(self, s: Any) -> Any:
            return self.slope * s

    called = Called()
    texts = [planned(*heads(), score=score).text for score in (by_list, called)]
    slopes[0] = called.slope = 3.0
    assert all(planned(*heads(), score=score).text != text for score, text in zip((by_list, called), texts))
    assert not remembered.plans


def test_tuned_mappings_and_many_calls_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(*heads())
    forget_plans()
    assert planned(*heads()) is not first
    monkeypatch.setattr(remembered, "LIMIT", 3)
    for rows in range(1, 9):
        planned(*heads(rows))
        assert len(remembered.plans) <= 3


def test_the_emulator_derives_anew() -> None:
    arrays = [np.ones((64, 64), F16) for _ in range(3)]
    with gk.emulate():
        listing.gemm(*arrays)
    assert not remembered.plans and np.all(arrays[2] == 64)
    with pytest.raises(TypeError, match="emulate its kernel"):
        listing.gemm(*arrays)


def test_arrays_that_share_memory_are_refused_by_a_plan_too() -> None:
    """Where arrays lie is no part of a kind. (A plan that was there was not asked about it.)"""
    whole = np.ones((3, 64, 64), F16)
    a, b, d = whole
    plan = listing.gemm.plan(a, b, d)
    with pytest.raises(TypeError, match="emulate its kernel"):
        listing.gemm(a, b, d)
    assert len(remembered.plans) == 1
    with gk.emulate():
        plan.run(dict(a=a, b=a, d=d))                  # operands may be one array
    assert np.all(d == 64)
    for given in (dict(a=a, b=b, d=b), dict(a=d, b=b, d=d), dict(a=a, b=b, d=whole.reshape(-1)[4096 + 64:][:4096].reshape(64, 64))):
        with pytest.raises(ValueError, match="share memory, and a result is among them"):
            listing.gemm(*given.values())
        with gk.emulate(), pytest.raises(ValueError, match="share memory, and a result is among them"):
            plan.run(given)
    assert len(remembered.plans) == 1
    two = np.ones((64, 128), F16)
    left, right = listing.gemm.plan(a, two[:, :64], two[:, 64:]), dict(a=a, b=two[:, :64], d=two[:, 64:])      # side by side
    with gk.emulate():
        left.run(right)
