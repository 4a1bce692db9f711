"""A product over no k has a mapping: its tiles hold the identity, which the epilogue and C still meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.operators import MIN_PLUS
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.device import A100, H100, T4
from tests.support.machines import BF16

DTYPES = ["f2", BF16, "f4", "f8", "c8", "c16", "i1"]


@pytest.mark.parametrize("device", [H100, A100], ids=["H100", "A100"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_size_has_a_mapping(dtype: Any, device: Any) -> None:
    """(Streams of K divided by their shares, of which there are none: 4096 x 8192 of float32 raised ZeroDivisionError.)"""
    for M, N in ((1, 1), (17, 4000), (300, 300), (1536, 1536), (4096, 8192)):
        a, b = np.empty((M, 0), dtype), np.empty((0, N), dtype)
        for given in ({}, {"operator": MIN_PLUS} if np.dtype(dtype) == np.float32 else {}):
            (found,) = recorded(lambda: gk.matmul(a, b, **given), device, zeros=False)
            assert found.problem.K == 0


@pytest.mark.parametrize("device", [H100, A100, T4], ids=["H100", "A100", "T4"])
@pytest.mark.parametrize("dtype", [*DTYPES, "i4"], ids=lambda dtype: np.dtype(dtype).name)
def test_a_stack_of_no_products(dtype: Any, device: Any) -> None:
    """What shares K asks how many tiles there are."""
    for M, N, K in ((513, 65, 17), (17, 33, 4096), (0, 65, 17), (513, 0, 17), (513, 65, 0), (0, 0, 0)):
        a, b = np.empty((0, M, K), dtype), np.empty((0, K, N), dtype)
        assert recorded(lambda: gk.matmul(a, b), device) == []
        with gk.emulate():
            assert gk.matmul(a, b).shape == (0, M, N)
