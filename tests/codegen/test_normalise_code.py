"""Normalised rows of D as compiled: values of the PTX of both passes, registers, spills, and that wgmmas stay asynchronous."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import LayerNorm, RMSNorm, Softmax
from gemmkit.layouts import ColMajor, RowMajor
from tests.codegen.test_reductions_code import groups, machine_code
from tests.kernels.common.test_normalise import EPS, KINDS, QUARTER, ending, expected, operands, same
from tests.ptx_machine.launch import Ptx
from tests.support.joined import F16, F32, config, dtype_of
from tests.support.machines import poison


@pytest.mark.compile
@pytest.mark.sample(24)
@pytest.mark.parametrize("family", ["singlestage", "multistage"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "N"), [(RowMajor(F32), 21), (RowMajor(F32), 72), (RowMajor(F16), 72), (ColMajor(F32), 45)], ids=str)
def test_what_was_compiled_computes(family: str, kind: str, d: Any, N: int) -> None:
    """The PTX of both kernels, all threads in step, against NumPy in float64."""
    a, b, product = operands((35, N, 9), dtype_of(family))
    gain, bias = np.random.default_rng(3).standard_normal((2, N)).astype("f4")
    out = poison(product.shape, d.dtype, "F" if d.axis == 0 else "C")
    with Ptx().session():
        gk.matmul(a, b, out=out, conf=config(family, d=d), epilogue=QUARTER | ending(kind, gain, bias))
    same(out, expected(kind, product, gain, bias), 4e-3 if d.dtype == F16 else 3e-6)


@pytest.mark.compile
@pytest.mark.sample(6)
@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_hoppers_kernel_spills_nothing_and_waits_as_the_plain_product(kind: str, size: int) -> None:
    gain = np.empty(size, np.float16)
    norms = {"softmax": Softmax(), "rms": RMSNorm(gain, EPS), "layer": LayerNorm(gain, gain, EPS)}
    _, plain, _ = machine_code(size)
    usage, counts, behind = machine_code(size, epilogue=norms[kind])
    assert usage["spill_stores"] == 0 and len(behind) == 1 and behind[0].launchable.entry().meta["usage"]["spill_stores"] == 0
    assert groups(counts) == groups(plain)
    assert sum(n for name, n in counts.items() if "HGMMA" in name) == sum(n for name, n in plain.items() if "HGMMA" in name)
