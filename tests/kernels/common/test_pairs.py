"""Epilogues of neighbours in a row: in every kernel, against NumPy, into poisoned outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.epilogues import Fold, Pairs, Rotary, RowReduce, Softmax
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from tests.support import sm90
from tests.support.joined import F16, F32, FAMILIES, FOLDS, config, dtype_of, folded
from tests.support.machines import is_poison, on_machines, poison, whole


def operands(shape: tuple[int, int, int], dtype: Any, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    M, N, K = shape
    a, b = whole(rng, (M, K), dtype, 2), whole(rng, (K, N), dtype, 2)
    return a, b, a.astype("f8") @ b.astype("f8")


def turned(x: Any, y: Any, m: Any, n: Any) -> Any:
    return y + 2 * m, x - n


def expected(x: np.ndarray) -> np.ndarray:
    m, n = np.indices(x[:, ::2].shape)
    out = np.empty_like(x)
    out[:, ::2], out[:, 1::2] = x[:, 1::2] + 2 * m, x[:, ::2] - 2 * n
    return out


@pytest.mark.kin(4)
@pytest.mark.sample(40)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("d", [RowMajor(F32), ColMajor(F32), RowMajor(F16), ColMajor(F16)], ids=str)
@pytest.mark.parametrize("shape", [(37, 30, 33), (64, 32, 64), (5, 2, 3), (1, 66, 8), (3, 10, 0), (9, 40, 16)], ids=str)
def test_pairs(machine: Any, family: str, d: Any, shape: tuple[int, int, int]) -> None:
    """All N are even, and not all multiples of what a thread stores."""
    a, b, product = operands(shape, dtype_of(family))
    with machine.session():
        out = machine.array(poison(product.shape, d.dtype, "F" if d.axis == 0 else "C"))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family, d=d), epilogue=Pairs(turned))
    np.testing.assert_array_equal(machine.numpy(out), expected(product))


@pytest.mark.kin(4)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("N", [32, 46])
def test_chains(machine: Any, family: str, N: int) -> None:
    """At any place, beside epilogues of elements, outputs, reductions, and in front of a softmax; twice."""
    a, b, product = operands((35, N, 24), dtype_of(family))
    bias = whole(np.random.default_rng(1), (N,), "f4")
    with machine.session():
        kept, sums, out = (machine.array(poison(shape, "f4")) for shape in ((35, N), (35,), (35, N)))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family),
                  epilogue=epilogues.Bias(machine.array(bias)) | Pairs(turned) | epilogues.ReLU() | epilogues.Store(kept)
                  | RowReduce(sums, "sum") | Pairs(lambda x, y: (x - y, y)) | epilogues.Scale(1 / 64) | Softmax())
    values = np.maximum(expected(product + bias), 0)
    np.testing.assert_array_equal(machine.numpy(kept), values)
    np.testing.assert_array_equal(machine.numpy(sums), values.sum(1))
    values[:, ::2] -= values[:, 1::2]
    raised = np.exp(values / 64 - (values / 64).max(1, keepdims=True))
    np.testing.assert_allclose(machine.numpy(out), raised / raised.sum(1, keepdims=True), rtol=3e-6, atol=1e-7)


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("of", ["stack", "fold"])
def test_stacks_and_folds(machine: Any, family: str, of: str) -> None:
    rng, dtype = np.random.default_rng(5), dtype_of(family)
    with machine.session():
        if of == "stack":
            a, b = whole(rng, (3, 37, 24), dtype), whole(rng, (24, 22), dtype)
            out, values = machine.array(poison((3, 37, 22), "f4")), a.astype("f8") @ b.astype("f8")
            gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family), epilogue=Pairs(turned))
            np.testing.assert_array_equal(machine.numpy(out), np.stack([expected(x) for x in values]))
        else:
            x, w = whole(rng, (37, 24), dtype, 1), [whole(rng, (24, 22), dtype, 1) for _ in range(2)]
            out = machine.array(poison((37, 22), "f4"))
            gk.matmul(machine.array(x), gk.Braid(*map(machine.array, w)), out=out, conf=config(family),
                      epilogue=Fold(FOLDS[2]) | Pairs(turned))
            np.testing.assert_array_equal(machine.numpy(out), expected(folded(2, [x.astype("f8") @ one.astype("f8") for one in w])))


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", [2, 6, 16])
def test_rotary(machine: Any, family: str, head: int) -> None:
    a, b, product = operands((37, 48, 24), dtype_of(family))
    angles = np.arange(37)[:, None] * 100.0 ** (-np.arange(head // 2) / head)
    cos, sin = np.cos(angles).astype("f4"), np.sin(angles).astype("f4")
    with machine.session():
        out = machine.array(poison((37, 48), "f4"))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family), epilogue=Rotary(machine.array(cos), machine.array(sin)))
    numbers = (product.reshape(37, 48 // head, head // 2, 2) @ [1, 1j]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(machine.numpy(out), np.stack([numbers.real, numbers.imag], -1).reshape(37, 48), rtol=1e-5, atol=1e-4)


@pytest.mark.kin(4)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("schedule", ["pingpong", "one-1x2", "two-2x1", "three"])
def test_schedules_of_the_warp_specialised_kernel(machine: Any, schedule: str) -> None:
    a, b, product = operands((70, 70, 64), F16)
    with machine.session():
        out = machine.array(poison((70, 70), "f4"))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=sm90.mapping(schedule, WGMMAOp(64)), epilogue=Pairs(turned))
    np.testing.assert_array_equal(machine.numpy(out), expected(product))


@pytest.mark.kin(4)
@on_machines
def test_groups_and_other_types(machine: Any) -> None:
    """Products of a group; float64, of which a thread stores two; and a plan without a configuration."""
    with machine.session():
        a, b = [machine.array(np.eye(n, 8, dtype="f2")) for n in (5, 9)], [machine.array(np.ones((8, n), "f2")) for n in (6, 12)]
        for found, n in zip(gk.grouped(a, b, epilogue=Pairs(lambda x, y: (x, x + y))), (5, 9)):
            found = machine.numpy(found)
            np.testing.assert_array_equal(found, (np.arange(n) < 8)[:, None] * np.resize([1, 2], found.shape[1])[None])
        x = machine.array(np.arange(12.0).reshape(2, 6))
        found = machine.numpy(gk.matmul(machine.array(np.eye(2)), x, epilogue=Pairs(lambda x, y: (y, x))))
        np.testing.assert_array_equal(found, [[1, 0, 3, 2, 5, 4], [7, 6, 9, 8, 11, 10]])


CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "an odd row": (lambda out: gk.matmul(np.ones((4, 3), "f4"), np.ones((3, 5), "f4"), out=out[:, :5], epilogue=Pairs(lambda x, y: (x, y))),
                   ValueError, "Pairs needs an even number of columns; the result is 4 x 5"),
    "a function of one": (lambda out: Pairs(lambda x: x), TypeError, r"f\(x, y\) or f\(x, y, m, n\), a function of two neighbours"),
    "one for two": (lambda out: gk.matmul(np.ones((4, 3), "f4"), np.ones((3, 6), "f4"), out=out, epilogue=Pairs(lambda x, y: x)),
                    gk.ComponentError, "a tuple of 2, one for each value, is needed"),
    "angles of other rows": (lambda out: gk.matmul(np.ones((4, 3), "f4"), np.ones((3, 6), "f4"), out=out, epilogue=Rotary(*np.ones((2, 5, 3), "f4"))),
                             ValueError, r"angles of 5 rows and heads of 6 columns; the result is 4 x 6"),
    "half a head": (lambda out: gk.matmul(np.ones((4, 3), "f4"), np.ones((3, 6), "f4"), out=out, epilogue=Rotary(*np.ones((2, 4, 2), "f4"))),
                    ValueError, "heads of 4 columns; the result is 4 x 6"),
    "cos and sin apart": (lambda out: Rotary(np.ones((4, 2)), np.ones((4, 3))), ValueError, r"cos has shape \(4, 2\) and sin \(4, 3\)"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name: str) -> None:
    call, kind, said = CALLS[name]
    out = poison((4, 6), "f4")
    with gk.emulate(), pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out)
