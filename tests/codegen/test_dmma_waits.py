"""Products in float64 wait for what they add to: machine code of every mapping that the defaults choose, and the check itself."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
import gemmkit.kernels.sm80.kernel as sm80
from gemmkit.kernels.sm80.kernel import InStepMainloop
from gemmkit.layouts import ColMajor, Interleaved, RowMajor
from gemmkit.operators import MMAOp
from gemmkit.plans.ahead import CompiledKernel, compile_config
from gemmkit.runtime.device import H100, target
from gemmkit.tuning import model
from gemmkit.tuning import sm80 as multistage
from gemmkit.tuning.operators import operator_for
from tests.support.dmma_waits import hex_listing, in_text, listing, unwaited_products

pytestmark = pytest.mark.compile

A100 = dataclasses.replace(H100, name="an A100", arch=(8, 0), sm_count=108, shared_memory_per_block=166912, shared_memory_per_sm=167936)
DEVICES = {"sm_80": A100, "sm_90": H100}
SIZES = 4096, 512, 128                            # each of the tiles
ORDERS = {"nn": (RowMajor, RowMajor), "nt": (RowMajor, ColMajor), "tn": (ColMajor, RowMajor), "tt": (ColMajor, ColMajor)}


def kernel(dtype: str, size: int, trans: str, device: Any, operator: Any = None) -> CompiledKernel:
    """What the defaults choose for a product of squares, by the single-stage kernel."""
    kind, sizes = np.dtype(dtype), dict(M=size, N=size, K=size)
    orders = [Interleaved(kind, "row" if order is RowMajor else "col") if kind.kind == "c" else order(kind) for order in ORDERS[trans]]
    conf = gk.get_config(operator=operator or operator_for(kind, kind, (size,) * 3, device), global_a_layout=orders[0],
                         global_b_layout=orders[1], global_d_layout=Interleaved(kind) if kind.kind == "c" else RowMajor(kind),
                         gemm_shape=sizes, device=device, kernel="singlestage")
    arrays = {name: np.zeros((64, 64), kind) for name in ("a", "b", "out")} if kind.kind == "c" else None
    return compile_config(conf, device=device, operands=arrays, gemm_shape=dict(M=64, N=64, K=64) if arrays else sizes)


@pytest.mark.kin(3)
@pytest.mark.sample(36)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype,trans", [*(("float64", trans) for trans in ORDERS), ("complex128", "nn"), ("complex128", "tt")])
def test_every_product_waits_for_the_one_before(dtype: str, trans: str, size: int, device: str) -> None:
    found = kernel(dtype, size, trans, DEVICES[device])
    assert found.instructions["DMMA"] > 0 and found.instructions["DFMA"] == 0
    assert (found.usage.spill_stores, found.usage.stack_bytes) == (0, 0)
    assert unwaited_products(found.assembled.cubin) == []


@pytest.mark.kin(3)
@pytest.mark.sample(8)
@pytest.mark.parametrize("K", [4, 16])
@pytest.mark.parametrize("trans", ORDERS)
def test_the_other_shapes_of_hopper(K: int, trans: str) -> None:
    found = kernel("float64", 4096, trans, H100, MMAOp(K=K, dtype="float64"))
    assert found.usage.spill_stores == 0 and unwaited_products(found.assembled.cubin) == []


RINGS = [(np.dtype(dtype), one) for dtype in ("f8", "c16") for one in multistage.TABLES[np.dtype(dtype)]]
FITTING = [(device, dtype, one) for device in DEVICES for dtype, one in RINGS
           if one.nbytes <= DEVICES[device].shared_memory_per_block]


def ring(dtype: np.dtype, one: Any, trans: str, device: Any) -> gk.Config:
    a, b = (order(dtype) for order in ORDERS[trans])
    return gk.get_config(operator=multistage.operator(dtype, one, device), global_a_layout=a, global_b_layout=b,
                         global_d_layout=RowMajor(dtype), device=device, gemm_shape=dict(M=4096, N=4096, K=4096), **one.fields)


@pytest.mark.thorough
@pytest.mark.sample(64)
@pytest.mark.parametrize("trans", ORDERS)
@pytest.mark.parametrize("device, dtype, one", FITTING, ids=str)
def test_every_mapping_of_the_multistage_kernel(device: str, dtype: np.dtype, one: Any, trans: str) -> None:
    """Fragments are fetched ahead across rounds with as few as eight products a step."""
    gpu = DEVICES[device]
    found = compile_config(ring(dtype, one, trans, gpu), device=gpu, gemm_shape=dict(M=4096, N=4096, K=4096))
    assert found.usage.spill_stores == 0 and found.instructions["DMMA"] > 0
    assert unwaited_products(found.assembled.cubin) == []


STREAMING = [(device, dtype, one) for device, dtype, one in FITTING if dtype in model.STREAMING and one.merges and one.streams]


@pytest.mark.thorough
@pytest.mark.sample(23)
@pytest.mark.parametrize("trans", ORDERS)
@pytest.mark.parametrize("device, dtype, one", STREAMING, ids=str)
def test_every_mapping_that_streams_k(device: str, dtype: np.dtype, one: Any, trans: str) -> None:
    gpu, sizes = DEVICES[device], dict(M=1536, N=1536, K=1536)
    conf = dataclasses.replace(ring(dtype, one, trans, gpu), splits=gk.StreamK())
    found = compile_config(conf, device=gpu, gemm_shape=sizes)
    assert found.instructions["DMMA"] > 0 and unwaited_products(found.assembled.cubin) == []


@pytest.mark.gpu
@pytest.mark.sample(6)
@pytest.mark.parametrize("trans", ["nn", "tt"])
@pytest.mark.parametrize("dtype, one", RINGS, ids=str)
def test_both_main_loops_give_the_same_bits(dtype: np.dtype, one: Any, trans: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where a product that begins too early would take another's sums: with several warps side by side, of many
    draws, all of D. The loop that fetches nothing ahead adds up in the same order."""
    torch = pytest.importorskip("torch")
    kind = torch.float64 if dtype == np.float64 else torch.complex128
    conf = ring(dtype, one, trans, target())

    def drawn() -> Any:
        pair = [torch.randn(768, 768, device="cuda", dtype=kind) for _ in "ab"]
        return [x.T if order == "t" else x for x, order in zip(pair, trans)]

    a, b = drawn()
    plans, outs = [], []
    for mainloop in (None, InStepMainloop()):
        if mainloop is not None:
            monkeypatch.setattr(sm80, "_mainloop", lambda spec: InStepMainloop())
        outs.append(torch.empty(768, 768, device="cuda", dtype=kind))
        plans.append(gk.plan(a, b, None, conf, out=outs[-1]))
    assert isinstance(plans[1]._compiled.spec.mainloop, InStepMainloop)
    for _ in range(40):
        a, b = drawn()
        for run, out in zip(plans, outs):
            out.fill_(float("nan"))
            run(a, b, out=out)
        assert torch.equal(*(torch.view_as_real(out) if dtype.kind == "c" else out for out in outs))


def without_waits(text: str) -> str:
    """A listing in which no instruction waits for any scoreboard."""
    def cleared(match: re.Match[str]) -> str:
        return f"/* 0x{int(match[1], 16) & ~(63 << 52):016x} */"

    lines = text.splitlines()
    return "\n".join(re.sub(r"/\* 0x([0-9a-f]{16}) \*/", cleared, line) if n and re.search(r"/\*[0-9a-f]{4,}\*/", lines[n - 1]) else line
                     for n, line in enumerate(lines))


def test_missing_waits_are_noticed() -> None:
    text = hex_listing(kernel("float64", 128, "nn", H100).assembled.cubin)
    code, _ = listing(text)
    assert sum("DMMA" in instruction.text for instruction in code) > 0
    assert in_text(text) == []
    found = in_text(without_waits(text))
    assert found and all("DMMA" in product.text and 0 < product.products_since <= 4 for product in found)


def written(text: str, holds: int = 7, waits: int = 0) -> str:
    """A line of nvdisasm's, and the one behind it."""
    return (f"        /*0000*/                   {text} ;       /* 0x{0:016x} */\n"
            f"                                                /* 0x{(holds << 5 | waits << 11) << 41:016x} */\n")


@pytest.mark.parametrize("at_branch, drain, found", [(0, "", 1), (0b100, "", 0), (0b010, "", 1), (0, written("DEPBAR.LE SB2, 0x0"), 0)])
def test_the_wait_may_stand_anywhere_on_the_way_back(at_branch: int, drain: str, found: int) -> None:
    products = "".join(written(f"DMMA.16x8x4 R{n}, R40, R60, R{n}", 2) for n in (0, 8, 16))
    body = f".L_x_1:\n{drain}{products}" + written("@!P0 BRA `(.L_x_1)", 7, at_branch)
    assert len([product for product in in_text(body) if "R0," in product.text]) == found
