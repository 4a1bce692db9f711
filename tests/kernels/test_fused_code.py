"""Attention and MLPs as compiled: nothing spills, a group of products signals once, and the PTX computes what NumPy does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import activations
from gemmkit.kernels.masks import ALiBi, Causal, Documents, SoftCap, Window
from gemmkit.plans.ahead import recorded
from gemmkit.programs.chains.chain import dots
from gemmkit.runtime.compile import disassemble
from gemmkit.runtime.device import H100
from tests.ptx_machine.launch import Ptx
from tests.support.machines import BF16, poison
from tests.support.mlp import close, draw, reference, relu, whole
from tests.support.sass import instructions, loops, written_in_flight

# ==========================================================================================================================
# The machine code of attention, without a GPU: nothing spills, a group of products signals once, and no register of P is written
# while a product reads it.

F16 = np.dtype("f2")


def launch(head_dim: int, dtype: Any = F16, packed: bool = False, device: Any = H100, **keywords: Any) -> Any:
    x = [np.zeros((1, 256, head_dim) if packed else (1, 1, 256, head_dim), dtype) for _ in range(3)]
    if packed:
        keywords["lengths"] = [0, 100, 256], [0, 100, 256]
    return recorded(lambda: gk.attention(*x, **keywords), device)[0]


HALF = np.float32(0.5)
CASES: dict[str, Callable[..., Any]] = {
    **{f"{d}{' causal' if mask else ''} {dtype}": lambda d=d, mask=mask, dtype=dtype, **how: launch(d, dtype, mask=mask, **how)
       for d in (32, 64, 96, 128, 192, 256) for mask in (None, Causal()) for dtype in (F16, BF16)},
    **{f"{d} logarithms, window": lambda d=d, **how: launch(d, mask=Window(100), return_lse=True, **how) for d in (64, 128, 192, 256)},
    **{f"{d} documents, causal": lambda d=d, **how: launch(d, mask=Documents.of([0, 100, 256]) & Causal(), **how) for d in (64, 128, 192)},
    **{f"{d} function": lambda d=d, **how: launch(d, score=lambda s, m, n: s - HALF * abs(m - n), **how) for d in (64, 128, 192)},
    **{f"{d} alibi, causal": lambda d=d, **how: launch(d, score=ALiBi(np.zeros(1, np.float32)), mask=Causal(), **how) for d in (64, 128, 192)},
    **{f"{d} alibi": lambda d=d, **how: launch(d, BF16, score=ALiBi(np.zeros(1, np.float32)), **how) for d in (32, 64, 256)},
    "64 alibi, window, logarithms": lambda **how: launch(64, score=ALiBi(np.zeros(1, np.float32)), mask=Window(100), return_lse=True, **how),
    "64 alibi, documents, causal": lambda **how: launch(64, score=ALiBi(np.zeros(1, np.float32)), mask=Documents.of([0, 100, 256]) & Causal(), **how),
    **{f"{d} soft cap": lambda d=d, **how: launch(d, score=SoftCap(30.0), **how) for d in (64, 128, 192, 256)},
    **{f"{d} packed": lambda d=d, **how: launch(d, packed=True, mask=Causal(), **how) for d in (64, 128, 192, 256)},
    **{f"{d} lengths": lambda d=d, **how: launch(d, key_lengths=[100], mask=Causal(), **how) for d in (64, 128, 192, 256)},
}


@pytest.mark.compile
@pytest.mark.sample(30)
@pytest.mark.kin(1)
@pytest.mark.parametrize("name", CASES)
def test_machine_code(name: str) -> None:
    made = CASES[name]()
    entry = made.launchable.entry()
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    sass = disassemble(entry.cubin)
    lines = instructions(sass)
    assert not [line for line in lines if line.startswith(("LDL", "STL", "CALL"))]
    assert any(line.startswith("HGMMA") for line in lines) and any(line.startswith("UTMALDG") for line in lines)
    found = loops(sass)
    assert found and not any(written_in_flight(loop) for loop in found)
    assert any(line.startswith("UTMASTG") for line in lines) == ("TmaOut(" in made.text)


@pytest.mark.compile
@pytest.mark.sample(30)
@pytest.mark.kin(1)
@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (10, 0)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_machine_code_by_warps(name: str, arch: tuple[int, int]) -> None:
    """On GPUs without wgmma: nothing spills, shared memory is there, and products are the tensor cores'."""
    made = CASES[name](device=dataclasses.replace(H100, arch=arch, name="another GPU"))
    entry = made.launchable.entry()
    assert entry.meta["usage"]["spill_stores"] == entry.meta["usage"]["stack_bytes"] == 0
    assert made.module.SHARED_BYTES <= 99 << 10
    lines = instructions(disassemble(entry.cubin))
    assert any(line.startswith("HMMA") for line in lines)
    assert not any(line.startswith(("LDL", "STL")) for line in lines)   # (a division of whole numbers is a CALL on some)


@pytest.mark.compile
@pytest.mark.sample(30)
def test_another_scale_window_or_array_compiles_nothing() -> None:

    kinds = {launch(64, mask=Window(left), score=SoftCap(cap), scale=scale).launchable.code_key
             for left, cap, scale in ((10, 5.0, 1.0), (200, 50.0, 0.1))}
    assert len(kinds) == 1


# ==========================================================================================================================
# The machine code of MLPs, without a GPU: nothing spills, a group of products signals once, no register of an activation is written
# while a product reads it, and activations touch no memory in between.

F32 = np.dtype("f4")


def launch_mlp(widths: list[int], dtype: Any = F16, order: Any = "C", bias: Any = F32, rows: int = 16384, device: Any = H100,
           **keywords: Any) -> Any:
    x = np.zeros((rows, widths[0]), dtype)
    weights = [np.zeros((k, n), dtype, order=order) for k, n in pairwise(widths)]
    biases = None if bias is None else [np.zeros(n, bias) for n in widths[1:]]
    return recorded(lambda: gk.mlp(x, weights, biases, **keywords), device, zeros=False)[0]


CASES_MLP: dict[str, dict[str, Any]] = {
    **{f"{width} {order} {dtype}": dict(widths=[width] * 5, order=order, dtype=dtype)
       for width in range(32, 257, 32) for order, dtype in (("C", F16), ("F", BF16))},
    **{f"{width} without biases": dict(widths=[width] * 5, bias=None) for width in (64, 256)},
    **{f"{width} of float16": dict(widths=[width] * 5, bias=F16) for width in (128, 256)},
    **{f"{widths}": dict(widths=widths) for widths in ([128, 128], [256, 256], [48, 80, 16], [256, 32, 40, 256], [32, 256, 256, 16])},
    **{f"{width} gelu": dict(widths=[width] * 4, activation=activations.gelu_tanh, last=activations.silu) for width in (64, 128, 256)},
    "one tile": dict(widths=[128] * 4, rows=100),
}


@pytest.mark.compile
@pytest.mark.kin(1)
@pytest.mark.sample(15)
@pytest.mark.parametrize("name", CASES_MLP)
def test_machine_code_of_an_mlp(name: str) -> None:
    made = launch_mlp(**CASES_MLP[name])
    entry, chain = made.launchable.entry(), made.resizing.made.chain
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    assert made.launchable.shared_bytes <= H100.shared_memory_per_block
    sass = disassemble(entry.cubin)
    lines = instructions(sass)
    assert not any(line.startswith(("LDL", "STL")) for line in lines)
    products, widths = [line for line in lines if line.startswith("HGMMA")], CASES_MLP[name]["widths"]
    assert len(products) == sum(-(-k // 16) for k in widths[:-1])
    assert sum("gsb0" in line for line in products) == len(dots(chain.body))                           # parts of layers
    assert any(line.startswith("UTMASTG") for line in lines)
    assert not any(written_in_flight(loop) for loop in loops(sass))
    assert not any(line.startswith(("LDS", "STG")) for line in lines)                                  # activations stay


@pytest.mark.compile
@pytest.mark.kin(1)
@pytest.mark.sample(18)
@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (10, 0)], ids=str)
@pytest.mark.parametrize("widths,order", [([64] * 4, "C"), ([128] * 4, "F"), ([128] * 4, "C"), ([30, 50, 10], "C"), ([64, 64], "F"), ([192] * 4, "C")], ids=str)
def test_machine_code_by_warps_of_an_mlp(widths: list[int], order: str, arch: tuple[int, int]) -> None:
    """On GPUs without wgmma: nothing spills up to a width of 192, and every product is a tensor core's."""
    made = launch_mlp(widths, order=order, device=dataclasses.replace(H100, arch=arch, name="another GPU"))
    entry = made.launchable.entry()
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0 and made.launchable.shared_bytes <= 99 << 10
    lines = instructions(disassemble(entry.cubin))
    assert sum(line.startswith("HMMA") for line in lines) == sum(-(-k // 16) * -(-n // 16) * 2 for k, n in pairwise(widths))
    assert any(line.startswith("LDGSTS.E.BYPASS") for line in lines) == (widths[0] % 8 == 0)


@pytest.mark.compile
@pytest.mark.sample(5)
def test_another_number_of_rows_or_address_compiles_nothing() -> None:
    kinds = {launch_mlp([64] * 4, rows=rows).launchable.code_key for rows in (129, 1000, 16384)}
    assert len(kinds) == 1


# ==========================================================================================================================
# The PTX of the kernel by mma.sync, run without a GPU (`tests.ptx_machine`), against NumPy and the emulator.


def run(x: np.ndarray, weights: Any, biases: Any, **keywords: Any) -> np.ndarray:
    out = poison((x.shape[0], weights[-1].shape[1]), x.dtype)
    with Ptx().session():
        gk.mlp(x, weights, biases, out=out, **keywords)
    return out


@pytest.mark.compile
@pytest.mark.kin(1)
@pytest.mark.sample(8)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("widths,dtype,bias", [([32, 64, 64, 32], F16, np.float32), ([64, 64], BF16, BF16), ([30, 50, 20, 10], F16, F16),
                                               ([16, 96, 40], F16, None)], ids=str)
def test_widths(widths: list[int], dtype: Any, bias: Any, order: str, rng: np.random.Generator, without_wgmma: Any) -> None:
    """The emulator's bits, and right: several layers, one, lines of 4 bytes, no biases."""
    without_wgmma()
    x, weights, biases = draw(rng, 37, widths, dtype, order, bias)
    found = run(x, weights, biases)
    close(found, reference(x, weights, biases))
    with gk.emulate():
        emulated = gk.mlp(x, weights, biases)
    close(found, (emulated.astype(np.float64), reference(x, weights, biases)[1]))


@pytest.mark.compile
@pytest.mark.sample(3)
@pytest.mark.kin(1)
def test_whole_numbers_and_functions(rng: np.random.Generator, without_wgmma: Any) -> None:
    """Two blocks, a function at both ends, whose zero is none."""
    without_wgmma()
    x, weights, biases = whole(rng, 70, [32, 64, 32, 32], F16)
    found = run(x, weights, biases, last=activations.relu)
    assert np.array_equal(found, reference(x, weights, biases, last=relu)[0])
    some = [weights[0][:, :40].copy(), weights[1][:40].copy(), weights[2]]
    shorter = [biases[0][:40].copy(), *biases[1:]]
    assert np.array_equal(run(x, some, shorter, activation=lambda v: v + 1), reference(x, some, shorter, lambda v: v + 1)[0])
