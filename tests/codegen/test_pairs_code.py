"""Epilogues of neighbours as compiled: values of the PTX, and that Hopper's kernel spills nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import Bias, Pack, Pairs, Rotary
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from tests.codegen.test_reductions_code import groups, machine_code
from tests.kernels.common.test_pack import packed, two
from tests.kernels.common.test_pairs import expected, operands, turned
from tests.ptx_machine.launch import Ptx
from tests.support.joined import F16, F32, config, dtype_of
from tests.support.machines import poison


@pytest.mark.kin(3)
@pytest.mark.compile
@pytest.mark.sample(6)
@pytest.mark.parametrize("family", ["singlestage", "multistage"])
@pytest.mark.parametrize("d", [RowMajor(F32), RowMajor(F16), ColMajor(F32)], ids=str)
def test_what_was_compiled_computes(family: str, d: Any) -> None:
    a, b, product = operands((35, 46, 9), dtype_of(family))
    bias, out = np.arange(46, dtype="f4"), poison(product.shape, d.dtype, "F" if d.axis == 0 else "C")
    with Ptx().session():
        gk.matmul(a, b, out=out, conf=config(family, d=d), epilogue=Bias(bias) | Pairs(turned))
    np.testing.assert_array_equal(out, expected(product + bias))


@pytest.mark.thorough
@pytest.mark.compile
def test_hoppers_kernel_spills_nothing_and_waits_as_the_plain_product() -> None:
    angles = np.empty((4096, 64), np.float32)
    _, plain, _ = machine_code(4096)
    usage, counts, behind = machine_code(4096, epilogue=Rotary(angles, angles))
    assert usage["spill_stores"] == 0 and not behind
    assert groups(counts) == groups(plain)


@pytest.mark.kin(3)
@pytest.mark.compile
@pytest.mark.sample(4)
@pytest.mark.parametrize("family", ["singlestage", "multistage"])
@pytest.mark.parametrize("d", [RowMajor, ColMajor], ids=["row", "column"])
def test_what_was_packed(family: str, d: Any) -> None:
    a, b, product = operands((35, 46, 9), dtype_of(family))
    out = poison((35, 23), "u1", "F" if d is ColMajor else "C")
    with Ptx().session():
        gk.matmul(a, b, out=out, conf=config(family, d=d("uint8"), epilogue=Pack(two)))
    np.testing.assert_array_equal(out, packed(product))


@pytest.mark.kin(3)
@pytest.mark.compile
def test_hoppers_kernel_packs_without_spills() -> None:
    a, b, out = np.empty((4096, 4096), np.float16), np.empty((4096, 4096), np.float16), np.empty((4096, 2048), np.uint8)
    first, = ahead.recorded(lambda: gk.matmul(a, b, out=out, epilogue=Pack(two)), H100, zeros=False)
    assert first.problem.config.kernel == "warp_specialised" and first.launchable.entry().meta["usage"]["spill_stores"] == 0
