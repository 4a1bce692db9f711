"""Legal calls, drawn and resolved for an H100, an A100 and a T4: each finds a kernel.

``python -m tests.resolved_calls --count 20000 --seed 1 --jobs 16`` draws more; GEMMKIT_RESOLVED_CALLS sets how many here.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.resolved_calls.draw import draw, view
from tests.resolved_calls.resolve import refusals

COUNT, PART = int(os.environ.get("GEMMKIT_RESOLVED_CALLS", 300)), 50


@pytest.mark.sample(6)
@pytest.mark.parametrize("first", range(0, COUNT, PART))
def test_a_legal_call_finds_a_kernel(first: int) -> None:
    went, found = refusals(5, range(first, min(first + PART, COUNT)))
    assert not found, "\n\n".join(f"case {one.number} of seed 5 for the {one.device}: {one.text}\n{one.code}" for one in found)
    assert len(went) > 3


def test_views_are_what_they_say() -> None:
    x = view("f4", 3, 5, order=(1, 0), steps=(-1, 2), pad=4, offset=3)
    assert x.shape == (3, 5) and x.strides == (-4, 2 * (3 + 4) * 4) and x.dtype == np.float32
    x[...] = np.arange(15).reshape(3, 5)
    assert (x == np.arange(15).reshape(3, 5)).all()
    assert draw(1, 7) == draw(1, 7) != draw(1, 8)
