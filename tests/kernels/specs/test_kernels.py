"""Kernels in Graphene's way: Fig. 8, smaller; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import specs
from gemmkit.specs import ALL, T


@specs.kernel(grid=(2, 2), block=(4, 4))
def figure_8(blocks: Any, threads: Any, A: T[32, 32].fp16.GL, B: T[32, 32].fp16.GL, C: T[32, 32].fp16.GL) -> None:  # type: ignore[name-defined]
    """The paper's, with 16 x 16 a block and 4 x 4 a thread."""
    bm, bn = blocks.indices()
    tm, tn = threads.indices()
    a = A.tile(16, ALL)[bm, 0].tile(4, ALL)[tm, 0]
    b = B.tile(ALL, 16)[0, bn].tile(ALL, 4)[0, tn]
    c = C.tile(16, 16)[bm, bn].tile(4, 4)[tm, tn]
    for k in range(32):
        for m in range(4):
            for n in range(4):
                specs.MatMul(threads.scalar(), a[m, k], b[k, n], c[m, n])


@specs.kernel(grid=(8, 8), block=(16, 16))
def figure_8_whole(blocks: Any, threads: Any, A: T[1024, 1024].fp16.GL, B: T[1024, 1024].fp16.GL, C: T[1024, 1024].fp16.GL) -> None:  # type: ignore[name-defined]
    """The paper's (section 5.4): 128 x 128 a block, 8 x 8 a thread."""
    bm, bn = blocks.indices()
    tm, tn = threads.indices()
    a = A.tile(128, ALL)[bm, 0].tile(8, ALL)[tm, 0]
    b = B.tile(ALL, 128)[0, bn].tile(ALL, 8)[0, tn]
    c = C.tile(128, 128)[bm, bn].tile(8, 8)[tm, tn]
    for k in range(1024):
        for m in range(8):
            for n in range(8):
                specs.MatMul(threads.scalar(), a[m, k], b[k, n], c[m, n])


def test_figure_8(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal((32, 32)).astype("f2") for _ in "ab")
    out = np.zeros((32, 32), "f2")
    with gk.emulate():
        figure_8(a, b, out)
    np.testing.assert_allclose(out.astype(float), a.astype(float) @ b.astype(float), atol=0.05)


@pytest.mark.parametrize(("arrays", "words"), [
    ((np.zeros((32, 32), "f2"),) * 2, "takes 3 arrays, not 2"),
    ((np.zeros((32, 16), "f2"),) * 3, r"A is of shape \(32, 16\), and its type is \[32,32\].fp16.GL"),
    ((np.zeros((32, 32), "f4"),) * 3, "A is of float32"),
])
def test_arrays_that_are_not_of_their_types(arrays: tuple, words: str) -> None:
    with gk.emulate(), pytest.raises((TypeError, ValueError), match=words):
        figure_8(*arrays)


@specs.kernel(grid=(1,), block=(32,))
def with_a_list(blocks: Any, threads: Any, A: T[4, 4].fp32.GL) -> None:  # type: ignore[name-defined]
    kept = [1, 2]
    A.storage[0, 0] = kept[0]


def test_what_is_no_device_code_is_refused_in_the_emulator() -> None:
    with gk.emulate(), pytest.raises(gk.ComponentError, match="list"):
        with_a_list(np.zeros((4, 4), "f4"))


def in_shared_memory(blocks: Any, threads: Any, a: T[4, 4].fp16.SH) -> None:  # type: ignore[name-defined]
    pass


def without_a_type(blocks: Any, threads: Any, a) -> None:  # type: ignore[no-untyped-def]
    pass


@pytest.mark.parametrize("function", [in_shared_memory, without_a_type])
def test_tensors_need_types(function: Any) -> None:
    with pytest.raises(specs.TensorError, match=rf"{function.__name__}\(a\): annotate each of 1 to 4 tensors"):
        specs.kernel(grid=(1,), block=(32,))(function)
