"""Arithmetic of halves, shuffles: emulated against NumPy, and the instructions that they become."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gemmkit.ptx.arithmetic import hadd, hadd2, hfma, hfma2, hmul, hmul2
from gemmkit.ptx.special import SHUFFLE, thread_index
from gemmkit.runtime.compile import assemble
from tests.support.harness import Out, compiled, emulated

pytestmark = pytest.mark.compile
bfly, idx, up, down = (SHUFFLE[mode] for mode in ("bfly", "idx", "up", "down"))


def arithmetic(out: Any, a: Any, b: Any, c: Any) -> None:
    t = thread_index()
    x, y, z = a[t, 0], b[t, 0], c[t, 0]
    pairs = (x, a[t, 1]), (y, b[t, 1]), (z, c[t, 1])
    out[t, 0], out[t, 1], out[t, 2] = hadd(x, y), hmul(x, y), hfma(x, y, z)
    out[t, 3], out[t, 4] = hadd2(pairs[0], pairs[1])[1], hmul2(pairs[0], pairs[1])[1]
    out[t, 5] = hfma2(pairs[0], pairs[1], pairs[2])[1]


def test_halves(rng: np.random.Generator) -> None:
    a, b, c = ((rng.standard_normal((32, 2)) * 100).astype("f2") for _ in range(3))
    (out,) = emulated(arithmetic, Out((32, 6), "f2"), a, b, c)
    x, y, z = (v.astype(float) for v in (a, b, c))
    wanted = [x[:, 0] + y[:, 0], x[:, 0] * y[:, 0], x[:, 0] * y[:, 0] + z[:, 0], x[:, 1] + y[:, 1], x[:, 1] * y[:, 1], x[:, 1] * y[:, 1] + z[:, 1]]
    np.testing.assert_array_equal(out.T, np.array(wanted).astype("f2"))
    ptx = compiled(arithmetic, Out((32, 6), "f2"), a, b, c)
    for operation in ("add", "mul", "fma"):
        assert len(re.findall(rf"{operation}\.rn\.f16 ", ptx)) == len(re.findall(rf"{operation}\.rn\.f16x2", ptx)) == 1
    assemble(ptx)


def test_pairs_have_two() -> None:
    with pytest.raises(TypeError, match="hadd2 is of pairs"):
        hadd2((np.float16(1),), (np.float16(1),))


def exchanged(out: Any, a: Any) -> None:
    t = thread_index()
    x = a[t]
    out[t, 0], out[t, 1], out[t, 2], out[t, 3] = bfly(x, 5), idx(x, 7), up(x, 3), down(x, 30)
    out[t, 4] = idx(x, 31 - t)


@pytest.mark.parametrize("dtype", ["f4", "f2", "i4"])
def test_shuffles(dtype: str) -> None:
    a = np.arange(100, 132).astype(dtype)
    (out,) = emulated(exchanged, Out((32, 5), dtype), a)
    lanes = np.arange(32)
    wanted = [a[lanes ^ 5], a[[7] * 32], a[np.where(lanes >= 3, lanes - 3, lanes)], a[np.where(lanes < 2, lanes + 30, lanes)], a[31 - lanes]]
    np.testing.assert_array_equal(out.T, wanted)
    ptx = compiled(exchanged, Out((32, 5), dtype), a)
    assert {mode: len(re.findall(rf"shfl\.sync\.{mode}\.b32", ptx)) for mode in SHUFFLE} == {"bfly": 1, "idx": 2, "up": 1, "down": 1}
    assert re.search(r"shfl\.sync\.up\.b32 .*, 0x0, 0xffffffff", ptx)
    assemble(ptx)
