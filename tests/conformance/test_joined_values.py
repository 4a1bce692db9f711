"""What was compiled of joined and braided operands, run without a GPU: by the PTX of their kernels (`tests.ptx_machine`), against
NumPy in float64. (TMA and wgmma the interpreter does not have: Hopper's kernel is emulated, and runs on a GPU.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.epilogues import Fold
from gemmkit.layouts import ColMajor, RowMajor
from tests.ptx_machine.compare import PTX
from tests.support.joined import F32, FAMILIES, JOINS, folded_product, joined_product
from tests.support.machines import whole

pytestmark = pytest.mark.compile

INTERPRETED = [family for family in FAMILIES if family != "warp_specialised"]


@pytest.mark.kin(4)
@pytest.mark.sample(5)
@pytest.mark.parametrize("family", INTERPRETED)
@pytest.mark.parametrize("join", ["K at odds", "M and N", "K, nothing of one"])
def test_joined(family: str, join: str) -> None:
    assert join in JOINS
    got, expected = joined_product(PTX, family, join)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.kin(4)
@pytest.mark.sample(9)
@pytest.mark.parametrize("family", INTERPRETED)
@pytest.mark.parametrize(("order", "shift", "gap"), [(("C", "F"), 1, 0), (("F", "C"), 8, 8), (("F", "F"), 0, 3)], ids=str)
def test_joined_of_any_order_and_alignment(family: str, order: tuple[str, str], shift: int, gap: int) -> None:
    got, expected = joined_product(PTX, family, "K", order, shift, gap)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.kin(4)
@pytest.mark.sample(12)
@pytest.mark.parametrize("family", INTERPRETED)
@pytest.mark.parametrize(("count", "shape", "order", "d"), [(2, (37, 29, 33), "C", RowMajor(F32)), (3, (20, 32, 16), "F", ColMajor(F32)),
                                                            (4, (33, 24, 40), "C", RowMajor(F32)), (4, (5, 13, 0), "F", RowMajor(F32))], ids=str)
def test_folded(family: str, count: int, shape: tuple[int, int, int], order: str, d: Any) -> None:
    got, expected = folded_product(PTX, family, count, shape, order, d=d, coordinates=True)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.kin(4)
def test_parts_of_different_orders_and_stacks() -> None:
    rng = np.random.default_rng(3)
    x, h, w = whole(rng, (2, 21, 20), "f4"), whole(rng, (2, 13, 21), "f4").swapaxes(1, 2), whole(rng, (33, 9), "f4")
    with PTX.session():
        got = gk.matmul(gk.Concat(x, h, axis=-1), gk.Braid(w, 2 * w, w + 1), epilogue=Fold(lambda i, f, g: f - i + g) | epilogues.ReLU())
    a = np.concatenate([x, h], -1).astype("f8")
    np.testing.assert_array_equal(got, np.maximum(a @ w + a @ (w + 1), 0))
