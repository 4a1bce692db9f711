"""Functions of one instruction, packed fragments, reductions: emulated against NumPy, what they become, and on a GPU within what PTX says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit import fast
from gemmkit.lang.registers import reduce, split, together
from gemmkit.ptx.mma import pack_fragment, pack_relu
from gemmkit.ptx.special import thread_index
from gemmkit.runtime.compile import assemble
from tests.support.harness import Out, compiled, emulated, instructions, on_device, same_bits
from tests.support.machines import BF16

F16 = np.dtype("f2")
pytestmark = pytest.mark.compile
TEXTS = {"exp2": "ex2.approx.ftz.f32", "log2": "lg2.approx.ftz.f32", "reciprocal": "rcp.approx.ftz.f32", "tanh": "tanh.approx.f32",
         "maximum": "max.f32"}
ERRORS = 2**-22, 2**-21, 2**-22, 2**-10.9, 0.0


def functions(out: Any, a: Any) -> None:
    t = thread_index()
    x = a[t]
    out[t, 0], out[t, 1], out[t, 2], out[t, 3] = fast.exp2(x), fast.log2(abs(x)), fast.reciprocal(x), fast.tanh(x)
    out[t, 4] = fast.maximum(x, a[31 - t])


def expected(a: np.ndarray) -> np.ndarray:
    x = a.astype(np.float64)
    with np.errstate(all="ignore"):
        return np.stack([np.exp2(x), np.log2(abs(x)), 1 / x, np.tanh(x), np.fmax(x, x[::-1])], axis=1)


def given(rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([rng.standard_normal(26) * 5, [0, np.inf, -np.inf, np.nan, 1, -1]]).astype("f4")


def close(found: np.ndarray, a: np.ndarray) -> None:
    wanted = expected(a)
    for n, bound in enumerate(ERRORS):
        same = (found[:, n] == wanted[:, n]) | (np.isnan(found[:, n]) & np.isnan(wanted[:, n]))
        with np.errstate(all="ignore"):
            error = abs(found[:, n] - wanted[:, n]) / np.maximum(abs(wanted[:, n]), 2**-3 if n == 1 else 0)
        assert np.all(same | (error <= bound + 2**-23)), list(TEXTS)[n]


def test_functions(rng: np.random.Generator) -> None:
    a = given(rng)
    close(emulated(functions, Out((32, 5), "f4"), a)[0], a)
    ptx = compiled(functions, Out((32, 5), "f4"), a)
    found = instructions(ptx)
    assert {text: found[text] for text in TEXTS.values()} == dict.fromkeys(TEXTS.values(), 1)
    assemble(ptx)


@pytest.mark.gpu
def test_functions_on_a_gpu(rng: np.random.Generator) -> None:
    a = given(rng)
    close(on_device(functions, Out((32, 5), "f4"), a)[0], a)


def of_any_number(out: Any, a: Any) -> None:
    t = thread_index()
    out[t, 0], out[t, 1], out[t, 2] = fast.exp2(3), fast.exp2(t), fast.maximum(a[t], 0.5)


@pytest.mark.parametrize("dtype", ["f2", "f8", "i4"])
def test_numbers_are_converted(dtype: str) -> None:
    a = np.arange(-16, 16).astype(dtype)
    (out,) = emulated(of_any_number, Out((32, 3), "f4"), a)
    np.testing.assert_array_equal(out.T, [[8] * 32, 2.0 ** np.arange(32), np.maximum(a, 0.5)])
    assemble(compiled(of_any_number, Out((32, 3), "f4"), a))


def f16_words(out: Any, a: Any) -> None:
    t = thread_index()
    words = pack_fragment(F16, (a[t, 0], a[t, 1], a[t, 2], a[t, 3]))
    out[t, 0], out[t, 1] = words[0], words[1]


def bf16_words(out: Any, a: Any) -> None:
    t = thread_index()
    words = pack_fragment(BF16, (a[t, 0], a[t, 1], a[t, 2], a[t, 3]))
    out[t, 0], out[t, 1] = words[0], words[1]


def relu_words(out: Any, a: Any) -> None:
    t = thread_index()
    words = pack_relu(F16, (a[t, 0], a[t, 1], a[t, 2], a[t, 3]))
    out[t, 0], out[t, 1] = words[0], words[1]


def relu_words_expected(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """With what is no number, and infinities."""
    a = (rng.standard_normal((32, 4)) * 100).astype("f4")
    a[0], a[1, :2] = (np.nan, np.inf, -np.inf, 1e6), (-1e6, 0)
    with np.errstate(all="ignore"):
        return a, np.where(a < 0, 0, a).astype("f2")


def test_packed_relu(rng: np.random.Generator) -> None:
    a, wanted = relu_words_expected(rng)
    (out,) = emulated(relu_words, Out((32, 2), "u4"), a, threads=32)
    assert np.array_equal(out.view("f2"), wanted, equal_nan=True)
    ptx = compiled(relu_words, Out((32, 2), "u4"), a)
    assert instructions(ptx)["cvt.rn.relu.f16x2.f32"] == 2
    assemble(ptx)


@pytest.mark.gpu
def test_packed_relu_on_a_gpu(rng: np.random.Generator) -> None:
    a, wanted = relu_words_expected(rng)
    assert np.array_equal(on_device(relu_words, Out((32, 2), "u4"), a)[0].view("f2"), wanted, equal_nan=True)


@pytest.mark.parametrize("kernel,dtype,text", [(f16_words, F16, "cvt.rn.f16x2.f32"), (bf16_words, BF16, "cvt.rn.bf16x2.f32")])
def test_packed_fragments(kernel: Any, dtype: Any, text: str, rng: np.random.Generator) -> None:
    a = (rng.standard_normal((32, 4)) * 100).astype("f4")
    (out,) = emulated(kernel, Out((32, 2), "u4"), a, threads=32)
    assert same_bits(out, a.astype(dtype).view("u4"))
    ptx = compiled(kernel, Out((32, 2), "u4"), a)
    assert instructions(ptx)[text] == 2
    assemble(ptx)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel,dtype", [(f16_words, F16), (bf16_words, BF16)])
def test_packed_fragments_on_a_gpu(kernel: Any, dtype: Any, rng: np.random.Generator) -> None:
    a = (rng.standard_normal((32, 4)) * 100).astype("f4")
    assert same_bits(on_device(kernel, Out((32, 2), "u4"), a)[0], a.astype(dtype).view("u4"))


def scaled_sum(total: Any, x: Any, by: Any) -> Any:
    return total + x * by


def larger(a: tuple, b: tuple) -> tuple:
    return together(fast.maximum, a, b)


def reductions(out: Any, a: Any) -> None:
    t = thread_index()
    values = a[t, 0], a[t, 1], a[t, 2], a[t, 3]
    out[t, 0] = reduce(scaled_sum, values[0], values[1:], a[t, 1])
    groups = split(values, 2)
    out[t, 1], out[t, 2] = reduce(larger, groups[0], groups[1:])


def test_reductions(rng: np.random.Generator) -> None:
    a = rng.integers(-9, 9, (32, 4)).astype("f4")
    (out,) = emulated(reductions, Out((32, 3), "f4"), a)
    np.testing.assert_array_equal(out.T, [a[:, 0] + a[:, 1:].sum(1) * a[:, 1], a[:, ::2].max(1), a[:, 1::2].max(1)])
    ptx = compiled(reductions, Out((32, 3), "f4"), a)
    assert instructions(ptx)["max.f32"] == 2
    assemble(ptx)
