"""A product over no k has a mapping: its tiles hold the identity, which the epilogue and C still meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.ahead import recorded
from gemmkit.operators import MIN_PLUS
from gemmkit.runtime.device import H100
from gemmkit.runtime.gpus import A100
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
