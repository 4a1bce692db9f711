"""Tensors and thread tensors in kernels: emulated, against NumPy; and what the emulator finds wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import specs
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.specs import ALL, WARP, T, shape
from tests.support.harness import Out, emulated


@dataclass(frozen=True)
class Spec(gk.Component):
    """What kernels here are given."""

    whole: Any = T[4, 8].fp32.GL
    tile: Any = T[4, 8].fp32.SH.stored("[((2,2),(2,4)):((1,4),(2,8))]")
    rows: Any = shape(2, 2)
    columns: Any = shape((2, 2), (1, 4))
    held: Any = T[2, 3].fp32.RF
    warp: Any = WARP
    quad_pairs: Any = WARP.tile(shape((4, 2), (1, 16)))


def through_shared(spec: Spec, out: Any, a: Any) -> None:
    """Rows in, Fig. 4d's tiles out, by shared memory laid out as Fig. 3d."""
    t = thread_index()
    source, tile, target = specs.on(a, spec.whole), specs.Allocate(spec.tile, 64), specs.on(out, spec.whole)
    base, offset = tile[t // 8, t % 8].element_at
    tile.storage[base + offset] = source.storage[source[t // 8, t % 8].at]
    barrier()
    i, j, k, n = t // 16, t // 8 % 2, t % 8 // 4, t % 4
    base, offset = tile.tile(spec.rows, spec.columns)[i, j][k, n].element_at
    target.storage[target.tile(spec.rows, spec.columns)[i, j][k, n].at] = tile.storage[base + offset]


def test_tiles_by_shared_memory() -> None:
    a = np.arange(32, dtype="f4").reshape(4, 8)
    (out,) = emulated(through_shared, Spec(), Out((4, 8), "f4"), a, shared=192)
    np.testing.assert_array_equal(out, a)


def group_numbers(spec: Spec, out: Any) -> None:
    t = thread_index()
    i, j = spec.warp.tile(8).reshape(2, 2).indices()
    out[t, 0], out[t, 1], out[t, 2] = i, j, spec.warp.tile(8).local()
    out[t, 3], out[t, 4] = spec.quad_pairs.indices()[0], spec.quad_pairs.local()


def test_threads_of_figures_5_and_6() -> None:
    (out,) = emulated(group_numbers, Spec(), Out((32, 5), "i4"))
    t = np.arange(32)
    np.testing.assert_array_equal(out.T, [t // 16, t // 8 % 2, t % 8, t // 4 % 4, t % 4 + t // 16 * 4])


def by_registers(spec: Spec, out: Any, a: Any) -> None:
    source, held = specs.on(a, spec.whole), specs.Allocate(spec.held)
    for i in range(2):
        for j in range(3):
            held.storage[held[i, j].at] = (source.storage[source[i, j].at],)
    out[thread_index(), 0] = held.storage[1, 2][0]


def test_registers() -> None:
    a = np.arange(32, dtype="f4").reshape(4, 8)
    (out,) = emulated(by_registers, Spec(), Out((32, 1), "f4"), a)
    assert set(out[:, 0]) == {10.0}


# -- faults -----------------------------------------------------------------------------------------------------------

def outside(spec: Spec, out: Any, a: Any) -> None:
    source = specs.on(a, spec.whole).tile(1, ALL)
    out[0, thread_index()] = source.storage[source[thread_index(), 0][0, 0].at]


def another_rank(spec: Spec, out: Any, a: Any) -> None:
    out[0, 0] = a[specs.on(a, spec.whole)[0].at]


def another_dtype(spec: Spec, out: Any, a: Any) -> None:
    out[0, 0] = a[specs.on(out, spec.whole)[0, 0].at]


def never_set(spec: Spec, out: Any, a: Any) -> None:
    out[0, 0] = specs.Allocate(spec.held).storage[0, 0][0]


@pytest.mark.parametrize(("kernel", "words"), [
    (outside, r"\[4,1\].\[1,8\].fp32.GL is indexed with \(4, 0\), which is outside"),
    (another_rank, "has 2 dimensions and is indexed with 1"),
    (another_dtype, r"\[4,8\].fp32.GL stands on memory of int32"),
    (never_set, "read before anything set it"),
])
def test_faults(kernel: Any, words: str) -> None:
    with pytest.raises(Exception, match=words):
        emulated(kernel, Spec(), Out((4, 8), "i4" if kernel is another_dtype else "f4"), np.zeros((4, 8), "f4"))


def test_shared_memory_has_an_end() -> None:
    from gemmkit.emulator.errors import BoundsError

    with pytest.raises(BoundsError):
        emulated(through_shared, Spec(), Out((4, 8), "f4"), np.zeros((4, 8), "f4"), shared=160)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: T[4, 8].fp17, r"T\[4, 8\].fp17: write an element type \(fp16"),
    (lambda: T[4, 8].fp16.XX, "write a memory"),
    (lambda: T[4, 8].fp16.GL.stored("[(4,8):(8,1)]"), "a layout is of a tensor in SH"),
    (lambda: T[4, 8].fp16.SH.stored("[(8,4):(4,1)]"), "has its extents"),
    (lambda: specs.Allocate(T[4, 8].fp16.GL), "a form in SH or RF is needed"),
    (lambda: specs.Allocate(T[None, 8].fp16.RF), "must be known"),
    (lambda: specs.Allocate(T[4, 8].fp16.RF, 64), "registers have no offset"),
    (lambda: WARP.tile(5), "do not divide 32"),
])
def test_refused(make: Any, words: str) -> None:
    with pytest.raises((AttributeError, ValueError), match=words):
        make()
