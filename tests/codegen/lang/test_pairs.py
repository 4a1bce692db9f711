"""Functions of 16-bit floats computed two at a time: the same values as one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.lang.pairs import is_pairwise
from gemmkit.layouts import RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.transforms import Elementwise
from tests.support.lang.typing import BF16, result
from tests.support.machines import on_machines

F16 = np.dtype("f2")
PAIRWISE = [lambda x: max(x + 1, 0), lambda x: -x * 3 - x, lambda x: min(2, abs(x)), lambda x: max(0, 1 - x)]
SINGLY = [lambda x: x if x > 0 else 0, lambda x: math.exp(x), lambda x: max(x, x + 1), lambda x: x / 2]


def decided(f: Any, dtype: np.dtype) -> bool:
    """What device code is told of a function."""
    ty: Any = result(lambda t, kind: is_pairwise(t, kind), gk.components.freeze(Elementwise(f)).type,
                     gk.components.freeze(dtype).type)
    return bool(ty.literal_value)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_what_is_computed_in_pairs(dtype: np.dtype) -> None:
    assert all(decided(f, dtype) for f in PAIRWISE)
    assert not any(decided(f, dtype) for f in SINGLY)
    assert not decided(PAIRWISE[0], np.dtype("f4"))
    assert decided(lambda x: x * 0.5, dtype) == (dtype == F16)             # a bfloat16 and a Python float make a float32


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("n", range(len(PAIRWISE)))
def test_pairs_are_rounded_as_single_floats(machine: Any, n: int) -> None:
    """A product with the identity gives back what the transform made, to the bit."""
    f, size = PAIRWISE[n], 64
    rng = np.random.default_rng(n)
    a = rng.standard_normal((size, size)).astype(F16)
    a[0, :4] = 0, -1, 65504, 6e-8
    conf = gk.get_config(operator=WGMMAOp(32), global_a_layout=RowMajor(F16), global_d_layout=RowMajor(F16),
                         transform_global_to_shared_a=Elementwise(f))
    with machine.session():
        d = machine.numpy(gk.matmul(machine.array(a), machine.array(np.eye(size, dtype=F16)), conf=conf))
    with np.errstate(over="ignore"):
        expected = np.array([[f(x) for x in row] for row in a], F16)
    finite = np.isfinite(expected).all(axis=1)                              # an infinity times 0 is no number
    assert finite.sum() >= size - 1 and np.array_equal(d[finite], expected[finite])
