"""Reductions and observers as compiled: values of the PTX, registers, spills, and that wgmmas stay asynchronous."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import ColumnReduce, Combine, RowReduce, Scale
from gemmkit.epilogues.observers import RowSum
from gemmkit.plans import ahead
from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.runtime.device import H100
from tests.kernels.common.test_reduce import KINDS, OPS, PAIR, expected, operands, same, span
from tests.ptx_machine.launch import Ptx
from tests.support.joined import config, dtype_of
from tests.support.machines import poison


@pytest.mark.kin(3)
@pytest.mark.compile
@pytest.mark.sample(24)
@pytest.mark.parametrize("family", ["singlestage", "multistage"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_what_was_compiled_computes(family: str, kind: str, op: str) -> None:
    """The kernels' PTX, all threads in step, against NumPy in float64. (Tensor maps are no numbers: not Hopper's kernel.)"""
    a, b, product = operands((35, 21, 9), dtype_of(family))
    axis = 1 if kind == "rows" else 0
    out, d = poison((product.shape[1 - axis],), "i4" if op == "argmax" else "f4"), poison(product.shape, "f4")
    with Ptx().session():
        gk.matmul(a, b, out=d, conf=config(family), epilogue=Scale(2.0) | KINDS[kind](out, op))
    np.testing.assert_array_equal(d, 2 * product)
    same(out, expected(op, 2 * product, axis), op)


@pytest.mark.kin(3)
@pytest.mark.sample(3)
@pytest.mark.compile
@pytest.mark.parametrize("op", ["max", "min", "argmax"])
def test_extremes_of_integers(op: str) -> None:
    rng = np.random.default_rng(11)
    a, b = rng.integers(-9, 0, (35, 21)).astype("i4"), rng.integers(1, 9, (21, 9)).astype("i4")
    b = -b if op == "min" else b
    out = poison((35,), "i4")
    with Ptx().session():
        gk.matmul(a, b, epilogue=RowReduce(out, op))
    np.testing.assert_array_equal(out, getattr(a @ b, op)(1))


@pytest.mark.kin(3)
@pytest.mark.compile
def test_an_observer_and_states_of_ones_own_compute() -> None:
    a, b, product = operands((35, 40, 37), dtype_of("singlestage"))
    sums, ranges, d = poison((35,), "f4"), poison((40,), "f4"), poison(product.shape, "f4")
    op = Combine(span, (np.inf, -np.inf), of=lambda x: (x, x), result=lambda s: s.most - s.least, dtype=PAIR)
    with Ptx().session():
        gk.matmul(a, b, out=d, conf=config("singlestage"), observe_a=RowSum(sums), epilogue=ColumnReduce(ranges, op))
    np.testing.assert_array_equal(d, product)
    np.testing.assert_array_equal(sums, a.astype("f8").sum(1))
    np.testing.assert_array_equal(ranges, product.max(0) - product.min(0))


def machine_code(size: int, **keywords: Any) -> tuple[Any, Counter[str], list[Any]]:
    """The resources and opcodes of a product's kernel, and the kernels behind it."""
    a, b, out = (np.empty((size, size), np.float16) for _ in range(3))
    first, *behind = ahead.recorded(lambda: gk.matmul(a, b, out=out, **keywords), H100, zeros=False)
    entry = first.launchable.entry()
    counts = Counter({name: number for name, number in instruction_counts(disassemble(entry.cubin), full=True).items()})
    return entry.meta["usage"], counts, behind


def groups(counts: Counter[str]) -> int:
    """Where a group of wgmmas is waited for, or begins."""
    return sum(number for name, number in counts.items() if name.startswith(("WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR")))


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.sample(8)
@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("what", ["max", "sumsq", "argmax", "columns", "observed"])
def test_hoppers_kernel_spills_nothing_and_waits_as_the_plain_product(what: str, size: int) -> None:
    """But for argmax on tiles of 192 columns: two states of a value and a place, beside 192 sums, take 14 registers too many."""
    out = np.empty(size, np.int32 if what == "argmax" else np.float32)
    keywords: dict[str, Any] = (dict(observe_a=RowSum(out)) if what == "observed" else
                                dict(epilogue=ColumnReduce(out, "sum") if what == "columns" else RowReduce(out, what)))
    _, plain, nothing = machine_code(size)
    usage, counts, behind = machine_code(size, **keywords)
    assert not nothing and len(behind) == 1
    assert usage["stack_bytes"] <= (64 if what == "argmax" and size == 8192 else 0)
    assert usage["spill_stores"] == 0 or usage["stack_bytes"] > 0
    assert behind[0].launchable.entry().meta["usage"]["spill_stores"] == 0
    assert groups(counts) == groups(plain)
    assert sum(n for name, n in counts.items() if "HGMMA" in name) == sum(n for name, n in plain.items() if "HGMMA" in name)
