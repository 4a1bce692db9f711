"""Operands whose rows TMA does not take are copied first, where that costs less: right in every order, of stacks and views,
with epilogues, and said by `gemmkit.explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from bench.prepare import recorded
from gemmkit.epilogues import Bias, ReLU
from gemmkit.plans.launch import forget
from gemmkit.runtime.device import A100, H100, assumed
from gemmkit.tuning import choose
from tests.support.machines import BF16, on_machines, poison, whole

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
ORDERS = ("nn", "nt", "tn", "tt")


@pytest.fixture
def cheap_copies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copies are worth any time."""
    monkeypatch.setattr(choose, "WORTH_COPYING", 1e9)
    monkeypatch.setattr(choose, "SAVED", -1e18)
    forget()
    yield
    forget()


def in_order(x: np.ndarray, order: str) -> np.ndarray:
    """The matrices, which lie row by row ("n") or column by column."""
    return np.ascontiguousarray(x) if order == "n" else np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def copies(*arguments: Any, **keywords: Any) -> list[str]:
    """The operands that a product copies, on an H100."""
    (*before, made) = recorded(lambda: gk.matmul(*arguments, **keywords))
    assert len(before) == len(made.problem.copies)
    return sorted(made.problem.copies)


@on_machines
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_any_length(machine: Any, order: str, dtype: Any, rng: np.random.Generator, cheap_copies: Any) -> None:
    """Twice with each plan, from bases that are aligned to an element alone, into a poisoned result."""
    for (M, N, K), a_stack, b_stack in (((33, 47, 65), (), ()), ((70, 24, 131), (3,), ()), ((9, 50, 41), (2, 1), (2, 2))):
        a, b = whole(rng, (*a_stack, M, K), dtype), whole(rng, (*b_stack, K, N), dtype)
        wanted = np.matmul(a.astype(F64), b.astype(F64))
        x, y = machine.array(in_order(a, order[0])), machine.array(in_order(b, order[1]))
        with machine.session():
            for _ in range(2):
                out = machine.array(poison(wanted.shape, dtype))
                gk.matmul(x, y, out=out)
                assert np.array_equal(machine.numpy(out).astype(F64), wanted)
            run = gk.plan(x, y)
            assert np.array_equal(machine.numpy(run(x, y)).astype(F64), wanted)
            assert run._compiled.copies
            if not a_stack and order[0] == "n":
                wide = machine.array(np.concatenate([a.ravel()[:1], a.ravel()]))
                moved = wide[1:].reshape(a.shape)
                assert np.array_equal(machine.numpy(gk.matmul(moved, y)).astype(F64), wanted)


@on_machines
@pytest.mark.parametrize("order", ORDERS)
def test_float32_as_tf32(machine: Any, order: str, rng: np.random.Generator, cheap_copies: Any) -> None:
    """Operands that lie across K are turned, whether their rows begin between multiples of 16 bytes or not."""
    for M, N, K in ((33, 47, 65), (40, 64, 128)):
        a, b = whole(rng, (2, M, K), F32), whole(rng, (2, K, N), F32)
        wanted = np.matmul(a.astype(F64), b.astype(F64))
        x, y = machine.array(in_order(a, order[0])), machine.array(in_order(b, order[1]))
        with machine.session():
            run = gk.plan(x, y, precision="tf32")
            for _ in range(2):
                assert np.array_equal(machine.numpy(run(x, y)).astype(F64), wanted)
            assert set(run._compiled.copies) == {1 + n for n in (0, 1) if K % 4 or order[n] != "nt"[n]}


@on_machines
@pytest.mark.parametrize(("M", "N", "K"), [(33, 1, 65), (1, 33, 65), (33, 24, 1), (1, 1, 9)])
def test_lines_of_one_element(machine: Any, M: int, N: int, K: int, rng: np.random.Generator, cheap_copies: Any) -> None:
    """A copy of one column has no neighbours in memory: its rows are 16 bytes apart."""
    a, b = whole(rng, (M, 2 * K), F16), whole(rng, (2 * K, 2 * N), F16)
    x, y = machine.array(a)[:, ::2], machine.array(b)[::2, ::2]
    with machine.session():
        run = gk.plan(x, y)
        assert run._compiled.copies
        assert np.array_equal(machine.numpy(run(x, y)).astype(F64), a[:, ::2].astype(F64) @ b[::2, ::2].astype(F64))


@on_machines
def test_epilogues_and_c(machine: Any, rng: np.random.Generator, cheap_copies: Any) -> None:
    """Arrays of components and C stand behind other addresses than the copies'."""
    a, b, c, bias = (whole(rng, shape, F16) for shape in ((35, 77), (77, 51), (35, 51), (51,)))
    wanted = np.maximum(a.astype(F64) @ b.astype(F64) + c.astype(F64) + bias.astype(F64), 0)
    x, y, z, w = map(machine.array, (a, b, c, bias))
    with machine.session():
        for other in (w, machine.array(bias + F16.type(1))):
            shift = 0.0 if other is w else 1.0
            got = gk.matmul(x, y, z, epilogue=Bias(other) | ReLU())
            assert np.array_equal(machine.numpy(got).astype(F64), np.maximum(wanted_before(a, b, c, bias) + shift, 0))
        assert np.array_equal(machine.numpy(gk.matmul(x, y, z, epilogue=Bias(w) | ReLU())).astype(F64), wanted)


def wanted_before(a: np.ndarray, b: np.ndarray, c: np.ndarray, bias: np.ndarray) -> np.ndarray:
    found: np.ndarray = a.astype(F64) @ b.astype(F64) + c.astype(F64) + bias.astype(F64)
    return found


def test_drawn_products(cheap_copies: Any) -> None:
    """Of any sizes, orders and strides, beside NumPy; what has elements twice is computed as it is."""
    draw = np.random.default_rng(1201)
    for _ in range(40):
        M, N, K = (int(draw.integers(1, 90)) for _ in range(3))
        stack = tuple(int(n) for n in draw.integers(1, 4, draw.integers(0, 3)))
        a, b = whole(draw, (*stack, M, 2 * K), F16), whole(draw, (*stack[draw.integers(0, len(stack) + 1):], K, N), F16)
        way = draw.integers(0, 4)
        x = a[..., ::2] if way == 0 else a[..., K:] if way == 1 else a[..., :K]
        y = b if way != 3 else np.broadcast_to(b[..., :1], b.shape)
        x, y = in_order(x, "nt"[way % 2]) if way > 1 else x, in_order(y, "nt"[draw.integers(0, 2)]) if way != 3 else y
        with gk.emulate():
            got = gk.matmul(x, y)
        assert np.array_equal(got.astype(F64), np.matmul(x.astype(F64), y.astype(F64))), (M, N, K, stack, way)


def test_copies_pay_where_the_product_is_long(rng: np.random.Generator) -> None:
    """1346 x 3328 x 2423 took 290 us as it is and 66 behind copies (H200); few rows, or a short K, repay none."""
    def matrix(rows: int, columns: int, dtype: Any = F16) -> np.ndarray:
        return np.empty((rows, columns), dtype)

    long = matrix(1346, 2423), matrix(3328, 2423).T
    assert copies(*long) == ["a", "b"] == copies(*long, epilogue=ReLU())
    assert copies(matrix(2048, 2048), matrix(2048, 1995)) == ["b"]
    assert copies(matrix(2048, 2048), matrix(2048, 2048)) == []
    assert copies(matrix(16, 12003), matrix(12003, 465)) == []
    assert copies(matrix(4096, 17), matrix(17, 4096)) == []
    assert copies(*(x.astype(F32) for x in long)) == []
    assert copies(*long, mapping="batch_invariant") == []
    with assumed(A100), gk.emulate(mapping="device"):
        assert not gk.plan(*long)._compiled.copies


def test_explain_says_what_is_copied() -> None:
    a, b = np.zeros((2048, 2051), F16), np.zeros((2051, 2048), F16)
    assert "A (8.2 MiB) copied first into rows that begin at multiples of 16 bytes" in str(gk.explain(a, b))
    assert "copied" not in str(gk.explain(np.zeros((2048, 2048), F16), b[:2048]))


def test_a_product_behind_copies_is_exported(tmp_path: Path, cheap_copies: Any) -> None:
    """The copies' kernels come first, and their workspaces are the caller's."""
    a = np.ones((64, 67), F16)
    with gk.emulate(mapping="device"), assumed(H100):
        files = gk.plan(a, np.ones((67, 64), F16)).export(tmp_path, "odd")
    assert [path.name for path in files] == ["odd.h", "odd_0.cubin", "odd_1.cubin", "odd_example.cpp"]
    header = files[0].read_text()
    assert header.index("/* kernel reorder") < header.index("odd_1_parameters") and "uint64_t)(workspace)" in header


def test_out_in_an_operand_is_refused(cheap_copies: Any, rng: np.random.Generator) -> None:
    x = whole(rng, (33, 33), F16)
    with gk.emulate(), pytest.raises(ValueError, match="out overlaps a in memory"):
        gk.matmul(x, x.T, out=x)


@pytest.mark.parametrize("K", [64, 65])
@pytest.mark.parametrize("order", ORDERS)
def test_where_rows_begin_in_a_copy(order: str, K: int, cheap_copies: Any) -> None:
    """At multiples of 16 bytes, of 128 where that adds an eighth at most."""
    a, b = in_order(np.empty((300, K), F16), order[0]), in_order(np.empty((K, 70), F16), order[1])
    (*_, made) = recorded(lambda: gk.matmul(a, b))
    for name, of in made.problem.copies.items():
        rows = max(of.strides)
        extent = of.shape[0 if of.strides[0] == 1 else 1]
        assert rows * 2 % 16 == 0 and extent <= rows < extent + 64, (name, of)
        assert rows * 2 % 128 == 0 or -(-extent * 2 // 128) * 128 > 1.125 * extent * 2
