"""Anchors: nothing in the emulator, and two instructions that stay behind what a value is made of."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gemmkit.kernels.collectives.pipeline import BARRIERS
from gemmkit.ptx.arithmetic import exp2
from gemmkit.ptx.barriers import mbarrier_init
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.ptx.wgmma import NEVER, anchor
from gemmkit.runtime.compile import assemble, disassemble
from tests.support.harness import Out, compiled, emulated

pytestmark = pytest.mark.compile


def anchored(out: Any, a: Any) -> None:
    t = thread_index()
    if t == 0:
        mbarrier_init(shared(BARRIERS, 0), 0, 1)
    barrier()
    x = exp2(a[t])
    anchor(shared(BARRIERS, 0), x)
    out[t] = x


def test_nothing_happens() -> None:
    a = np.linspace(-3, 3, 32).astype("f4")
    a[7] = np.nan
    (out,) = emulated(anchored, Out(32, "f4"), a, shared=8)
    np.testing.assert_allclose(out, np.exp2(a), rtol=1e-6)


def test_code() -> None:
    """The arrival is one of a NaN that arithmetic never gives: of a result that is none there is another pattern."""
    ptx = compiled(anchored, Out(32, "f4"), np.zeros(32, "f4"))
    assert len(re.findall(rf"setp\.eq\.b32 never, bits, {NEVER:#x}", ptx)) == 1
    lines = [line for line in disassemble(assemble(ptx).cubin).splitlines() if re.search(r"MUFU\.EX2|SYNCS\.ARRIVE", line)]
    assert len(lines) == 2 and "MUFU" in lines[0] and "@" in lines[1]
    assert np.isnan(np.uint32(NEVER).view(np.float32))
