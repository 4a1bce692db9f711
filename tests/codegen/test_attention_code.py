"""The machine code of attention, without a GPU: nothing spills, a group of products signals once, and no register of P is written
while a product reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.collectives.softmax import QuadOut
from gemmkit.kernels.masks import ALiBi, Causal, Documents, SoftCap, Window
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.compile import disassemble
from gemmkit.runtime.device import H100
from tests.support.machines import BF16
from tests.support.sass import instructions, loops, written_in_flight

F16 = np.dtype(np.float16)
pytestmark = [pytest.mark.compile, pytest.mark.sample(30)]


def launch(head_dim: int, dtype: Any = F16, packed: bool = False, **keywords: Any) -> Any:
    x = [np.zeros((1, 256, head_dim) if packed else (1, 1, 256, head_dim), dtype) for _ in range(3)]
    if packed:
        keywords["lengths"] = [0, 100, 256], [0, 100, 256]
    return recorded(lambda: gk.attention(*x, **keywords), H100)[0]


HALF = np.float32(0.5)
CASES: dict[str, Callable[[], Any]] = {
    **{f"{d}{' causal' if mask else ''} {dtype}": lambda d=d, mask=mask, dtype=dtype: launch(d, dtype, mask=mask)
       for d in (32, 64, 96, 128, 192, 256) for mask in (None, Causal()) for dtype in (F16, BF16)},
    **{f"{d} logarithms, window": lambda d=d: launch(d, mask=Window(100), return_lse=True) for d in (64, 128, 192, 256)},
    **{f"{d} documents, causal": lambda d=d: launch(d, mask=Documents.of([0, 100, 256]) & Causal()) for d in (64, 128, 192)},
    **{f"{d} function": lambda d=d: launch(d, score=lambda s, m, n: s - HALF * abs(m - n)) for d in (64, 128, 192)},
    **{f"{d} alibi, causal": lambda d=d: launch(d, score=ALiBi(np.zeros(1, np.float32)), mask=Causal()) for d in (64, 128, 192)},
    **{f"{d} alibi": lambda d=d: launch(d, BF16, score=ALiBi(np.zeros(1, np.float32))) for d in (32, 64, 256)},
    "64 alibi, window, logarithms": lambda: launch(64, score=ALiBi(np.zeros(1, np.float32)), mask=Window(100), return_lse=True),
    "64 alibi, documents, causal": lambda: launch(64, score=ALiBi(np.zeros(1, np.float32)), mask=Documents.of([0, 100, 256]) & Causal()),
    **{f"{d} soft cap": lambda d=d: launch(d, score=SoftCap(30.0)) for d in (64, 128, 192, 256)},
    **{f"{d} packed": lambda d=d: launch(d, packed=True, mask=Causal()) for d in (64, 128, 192, 256)},
}


@pytest.mark.kin(2)
@pytest.mark.parametrize("name", CASES)
def test_machine_code(name: str) -> None:
    made = CASES[name]()
    entry, spec = made.launchable.entry(), made.spec
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    sass = disassemble(entry.cubin)
    lines = instructions(sass)
    assert not [line for line in lines if line.startswith(("LDL", "STL", "CALL"))]
    # One group for S and one for O of each round: three kinds of rounds at most, a tile's first, and one of each alone.
    rounds = 1 + 2 * (spec.tests_above + spec.mask.has_free + spec.tests_below + 1) + 1
    products = [line for line in lines if line.startswith("HGMMA")]
    assert sum("gsb0" in line for line in products) == rounds
    both = (rounds - 2) // 2 + 1
    assert len(products) == both * (spec.qk_steps + spec.pv_steps)
    found = loops(sass)
    assert found and not any(written_in_flight(loop) for loop in found)
    weights = spec.values_s * both                                      # exponentials, and no library's in their place
    assert sum(line.startswith("MUFU.EX2") for line in lines) >= weights
    assert any(line.startswith("UTMASTG") for line in lines) == spec.store.uses_tma
    assert any(line.startswith("STG.E.128") for line in lines) == isinstance(spec.store, QuadOut)
    if spec.head_dim == 256:                                            # descriptors stay in uniform registers
        assert all(sum(x.startswith("R2UR") for x in loop) < 8 for loop in found if len(loop) < 1000)


@pytest.mark.kin(2)
@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (10, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_machine_code_by_warps(head_dim: int, arch: tuple[int, int]) -> None:
    """On GPUs without wgmma: nothing spills, shared memory is there, and every product is a tensor core's."""
    device = dataclasses.replace(H100, arch=arch, name="another GPU")
    x = [np.zeros((1, 1, 256, head_dim), F16) for _ in range(3)]
    made = recorded(lambda: gk.attention(*x, mask=Causal()), device)[0]
    entry, spec = made.launchable.entry(), made.spec
    assert entry.meta["usage"]["spill_stores"] == entry.meta["usage"]["stack_bytes"] == 0 and spec.shared_bytes <= 99 << 10
    lines = instructions(disassemble(entry.cubin))
    blocks = 3                                                          # the first of a tile, tested ones, free ones
    assert sum(line.startswith("HMMA") for line in lines) == blocks * 2 * (head_dim // 16) * (spec.block_n // 16) * 2
    assert not any(line.startswith(("LDL", "STL")) for line in lines)   # (a division of whole numbers is a CALL on some)


def test_another_scale_window_or_array_compiles_nothing() -> None:
    from gemmkit.plans.ahead import kernel_of

    kinds = {kernel_of(launch(64, mask=Window(left), score=SoftCap(cap), scale=scale).launchable)
             for left, cap, scale in ((10, 5.0, 1.0), (200, 50.0, 0.1))}
    assert len(kinds) == 1
