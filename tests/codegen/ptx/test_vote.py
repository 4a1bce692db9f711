"""Votes of a warp: emulated against NumPy, and the instruction that they become."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gemmkit.ptx.special import any_lane, thread_index
from gemmkit.runtime.compile import assemble, disassemble
from tests.support.harness import Out, compiled, emulated

pytestmark = pytest.mark.compile


def voted(out: Any, a: Any) -> None:
    t = thread_index()
    out[t, 0], out[t, 1] = 0, 0
    if any_lane(a[t] > 3.0):
        out[t, 0] = 1
    if any_lane((a[t] != a[t]) | (a[t] < 0.0)):
        out[t, 1] = 1


@pytest.mark.parametrize("value", [0.0, 3.5, -1.0, np.nan])
@pytest.mark.parametrize("lane", [0, 17, 31])
def test_votes(value: float, lane: int) -> None:
    a = np.zeros(32, "f4")
    a[lane] = value
    (out,) = emulated(voted, Out((32, 2), "i4"), a)
    np.testing.assert_array_equal(out, [[value > 3, value != value or value < 0]] * 32)


def test_code() -> None:
    ptx = compiled(voted, Out((32, 2), "i4"), np.zeros(32, "f4"))
    assert len(re.findall(r"vote\.sync\.any\.pred", ptx)) == 2
    assert len(re.findall(r"VOTE\.ANY", disassemble(assemble(ptx).cubin))) == 2
