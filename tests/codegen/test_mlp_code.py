"""The machine code of MLPs, without a GPU: nothing spills, a group of products signals once, no register of an activation is written
while a product reads it, and layers touch no memory in between."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import activations
from gemmkit.plans.ahead import kernel_of, recorded
from gemmkit.runtime.compile import disassemble
from gemmkit.runtime.device import H100
from tests.support.machines import BF16
from tests.support.sass import instructions, loops, written_in_flight

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
pytestmark = [pytest.mark.compile, pytest.mark.sample(5)]


def launch(widths: list[int], dtype: Any = F16, order: Any = "C", bias: Any = F32, rows: int = 16384, device: Any = H100,
           **keywords: Any) -> Any:
    x = np.zeros((rows, widths[0]), dtype)
    weights = [np.zeros((k, n), dtype, order=order) for k, n in pairwise(widths)]
    biases = None if bias is None else [np.zeros(n, bias) for n in widths[1:]]
    return recorded(lambda: gk.mlp(x, weights, biases, **keywords), device, zeros=False)[0]


CASES: dict[str, dict[str, Any]] = {
    **{f"{width} {order} {dtype}": dict(widths=[width] * 5, order=order, dtype=dtype)
       for width in range(32, 257, 32) for order, dtype in (("C", F16), ("F", BF16))},
    **{f"{width} without biases": dict(widths=[width] * 5, bias=None) for width in (64, 256)},
    **{f"{width} of float16": dict(widths=[width] * 5, bias=F16) for width in (128, 256)},
    **{f"{widths}": dict(widths=widths) for widths in ([128, 128], [256, 256], [48, 80, 16], [256, 32, 40, 256], [32, 256, 256, 16])},
    **{f"{width} gelu": dict(widths=[width] * 4, activation=activations.gelu_tanh, last=activations.silu) for width in (64, 128, 256)},
    "one tile": dict(widths=[128] * 4, rows=100),
}


@pytest.mark.kin(2)
@pytest.mark.sample(15)
@pytest.mark.parametrize("name", CASES)
def test_machine_code(name: str) -> None:
    made = launch(**CASES[name])
    entry, spec = made.launchable.entry(), made.spec
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    assert spec.shared_bytes <= H100.shared_memory_per_block
    sass = disassemble(entry.cubin)
    lines = instructions(sass)
    assert not any(line.startswith(("LDL", "STL")) for line in lines)
    products = [line for line in lines if line.startswith("HGMMA")]
    layers = [spec.first] if spec.single else [spec.first, spec.middle, spec.final]
    assert len(products) == sum(layer.steps for layer in layers)
    assert sum("gsb0" in line for line in products) == sum(layer.chunks for layer in layers)
    assert any(line.startswith("UTMASTG") for line in lines) == spec.store.uses_tma
    assert sum(line.startswith("UTMACCTL.IV") for line in lines) == 1                                  # maps are acquired
    assert any("MULTICAST" in line for line in lines) == (spec.cluster.size > 1)
    if not spec.single:
        found = loops(sass)
        assert found and not any(written_in_flight(loop) for loop in found)
        # From layer to layer nothing is stored, and nothing loaded but biases.
        loop = min((loop for loop in found if sum(line.startswith("HGMMA") for line in loop) == spec.middle.steps), key=len)
        loads = [line for line in loop if line.startswith(("LD", "ST")) and not line.startswith("LDC")]
        assert all(line.startswith("LDS") for line in loads if not spec.has_padding)
        assert spec.has_bias or not loads


@pytest.mark.kin(2)
@pytest.mark.sample(18)
@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (10, 0)], ids=str)
@pytest.mark.parametrize("widths,order", [([64] * 4, "C"), ([128] * 4, "F"), ([128] * 4, "C"), ([30, 50, 10], "C"), ([64, 64], "F"), ([192] * 4, "C")], ids=str)
def test_machine_code_by_warps(widths: list[int], order: str, arch: tuple[int, int]) -> None:
    """On GPUs without wgmma: nothing spills up to a width of 192, and every product is a tensor core's."""
    made = launch(widths, order=order, device=dataclasses.replace(H100, arch=arch, name="another GPU"))
    entry, spec = made.launchable.entry(), made.spec
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0 and spec.shared_bytes <= 99 << 10
    lines = instructions(disassemble(entry.cubin))
    layers = [spec.first] if spec.single else [spec.first, spec.middle, spec.final]
    assert sum(line.startswith("HMMA") for line in lines) == sum(layer.k // 16 * layer.n // 8 for layer in layers)
    assert any(line.startswith("LDGSTS.E.BYPASS") for line in lines) == (spec.run == 8)


def test_another_depth_number_of_rows_or_address_compiles_nothing() -> None:
    """Where weights do not fit shared memory: those that do stay there, which is another kernel."""
    kinds = {kernel_of(launch([128] * (layers + 1), rows=rows).launchable) for layers, rows in ((6, 129), (20, 16384), (200, 1000))}
    assert len(kinds) == 1
