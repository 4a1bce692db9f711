"""``//`` and ``%`` of floats in compiled code: run as PTX, and NumPy's to the bit, with infinities, zeros and NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.ptx.special import thread_index
from tests.ptx_machine.launch import run_ptx
from tests.support.harness import Out, compiled

SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 7.0, -7.0, 1e-3, -3e5, np.inf, -np.inf, np.nan)
PAIRS = [(x, y) for x in SPECIAL for y in SPECIAL]
COUNT = 32 * -(-len(PAIRS) // 32)


def dividing(out: Any, a: Any, b: Any) -> None:
    i = thread_index()
    out[i] = a[i] // b[i]
    out[i + COUNT] = a[i] % b[i]


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_division_of_floats_is_numpys(dtype: str) -> None:
    rng = np.random.default_rng(0)
    pairs = PAIRS + [tuple(rng.standard_normal(2) * 9) for _ in range(COUNT - len(PAIRS))]
    a, b = (np.array([pair[n] for pair in pairs]).astype(dtype) for n in (0, 1))
    out = np.full(2 * COUNT, np.nan, dtype)
    ptx = compiled(dividing, Out((2 * COUNT,), dtype), a, b, threads=COUNT)
    run_ptx(ptx, COUNT, 1, [out, 2 * COUNT, a, COUNT, b, COUNT], [out, a, b])
    with np.errstate(all="ignore"):
        expected = np.concatenate([a // b, a % b])
    wrong = [(x, y, ours, numpys) for x, y, ours, numpys in zip(np.tile(a, 2), np.tile(b, 2), out, expected)
             if ours.tobytes() != numpys.tobytes() and not (np.isnan(ours) and np.isnan(numpys))]
    assert not wrong, wrong[:8]
