"""Operands of 2^31 elements and more: user code gets 64-bit coordinates, in kernels of their own.

Arrays of that size cost nothing here: `numpy.zeros` takes memory when it is written to.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.components import freeze
from gemmkit.kernels.spec import Condition
from gemmkit.lang.components import COUNT
from gemmkit.plans import ahead
from gemmkit.plans.adapters import WideLayout, coordinate_bits
from gemmkit.plans.plan import plan
from gemmkit.runtime.arrays import ArrayInfo
from tests.support.checks import assert_close

ROW = layouts.RowMajor("float32")
FPU = {"operator": operators.FPUOp(M=16, N=16), "block_shape": gk.Tile(M=16, N=16, K=8)}


@dataclass(frozen=True)
class Symmetric(layouts.Layout):                      # as in docs/components.md
    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        row, column = max(i, j), min(i, j)
        return data[row * (row + 1) // 2 + column]

    def store_element(self, data: Any, i: int, j: int, value: Any, shape: Any) -> None:
        if i >= j:
            data[i * (i + 1) // 2 + j] = value


@dataclass(frozen=True)
class Flat(layouts.Layout):
    """A matrix in one dimension, of which the last columns alone matter."""

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return data[i * shape.K + j]

    def k_range(self, begin: int, end: int, shape: Any) -> tuple:
        return (begin + 9) * shape.K // (begin + 9) - 16, shape.K         # 2.7e9 // 9


def imagined(count: int, dtype: str = "f4") -> ArrayInfo:
    return ArrayInfo(2**20, (count,), (1,), np.dtype(dtype), -1, False, "numpy")


class Array:
    """An array of any size, for what never looks at its elements."""

    def __init__(self, *shape: int, dtype: str = "f4"):
        strides = [math.prod(shape[n + 1:]) * np.dtype(dtype).itemsize for n in range(len(shape))]
        self.__cuda_array_interface__ = {"shape": shape, "typestr": np.dtype(dtype).str, "data": (2**20, False), "version": 3,
                                         "strides": tuple(strides)}


def spec_of(sizes: tuple[int, int, int], arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """The specialisation that operands of these sizes get; nothing is compiled."""
    seen: list[Any] = []

    def stop(kernel: Any, arguments: Any, *rest: Any) -> str:
        seen.append(arguments)
        return ""

    monkeypatch.setattr(ahead, "to_ptx", stop)
    monkeypatch.setattr(ahead, "assemble", lambda ptx, arch: None)
    conf = gk.get_config(**{**FPU, "global_a_layout": ROW, "global_b_layout": ROW, "global_d_layout": ROW, **fields})
    ahead.compile_config(conf, operands=arrays, gemm_shape=dict(zip("MNK", sizes)))
    return seen[0]


def bits(spec_type: Any) -> dict[str, int]:
    """By slot, how wide the coordinates are that user code gets."""
    spec = spec_type.skeleton
    found = {name: coordinate_bits(getattr(spec, name).layout) for name in "abd"}
    return {**found, "to a": coordinate_bits(spec.a.to_shared), "epilogue": coordinate_bits(spec.epilogue),
            "condition": coordinate_bits(spec.condition)}


NARROW = dict.fromkeys(("a", "b", "d", "to a", "epilogue", "condition"), 32)
TOUCH = transforms.Map(lambda x, i, j: x + i * j)


class Always(Condition):
    def __call__(self, m: int, n: int, k: int) -> bool:
        return m * k >= 0


def packed(M: int) -> int:
    return M * (M + 1) // 2


# What is wide follows from the elements of each operand: M K, K N and M N, or those of its array.
CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any], dict[str, Any], set[str]]] = {
    "packed, the last that 32 bits hold": ((46_340, 8, 46_340), {"a": Array(packed(46_340))}, {"global_a_layout": Symmetric("float32")},
                                           set()),
    "packed, i (i + 1) overflows": ((46_341, 8, 46_341), {"a": Array(packed(46_341))}, {"global_a_layout": Symmetric("float32")},
                                    {"a"}),
    "packed D": ((70_000, 70_000, 8), {"out": Array(packed(70_000))}, {"global_d_layout": Symmetric("float32")}, {"d"}),
    "plain operands": ((70_000, 70_000, 70_000), {}, {}, set()),
    "a transform of a plain one": ((70_000, 8, 70_000), {}, {"transform_global_to_shared_a": TOUCH}, {"to a"}),
    "without coordinates": ((70_000, 8, 70_000), {}, {"transform_global_to_shared_a": transforms.Map(lambda x: x + 1)}, set()),
    "a function in the epilogue": ((70_000, 70_000, 8), {}, {"epilogue": epilogues.Elementwise(lambda x, m, n: x + m * n)},
                                   {"epilogue"}),
    "the library's epilogues": ((70_000, 70_000, 8), {}, {"epilogue": epilogues.CausalMask()}, set()),
    "a small array, large sizes": ((70_000, 8, 70_000), {"a": Array(8)}, {"global_a_layout": layouts.Generated("float32", lambda i, j: i * j)},
                                   {"a"}),
    "a large array, small sizes": ((64, 64, 64), {"a": Array(COUNT)}, {"global_a_layout": Symmetric("float32")}, {"a"}),
    "a condition": ((70_000, 8, 70_000), {}, {"condition": Always()}, {"condition"}),
}


@pytest.mark.parametrize("case", CASES)
def test_which_user_code_gets_64_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, arrays, fields, wide = CASES[case]
    assert bits(spec_of(sizes, arrays, monkeypatch, **fields)[0]) == {**NARROW, **dict.fromkeys(wide, 64)}


def test_plain_operands_of_any_size_are_of_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (spec_of((n, n, n), {}, monkeypatch) for n in (4096, 4096 * 32))
    assert small == large


def test_an_extent_of_2_31_is_64_bits_wide() -> None:
    below, above = freeze(imagined(COUNT - 1)), freeze(imagined(COUNT))
    assert [code for code, _ in below.leaves] == ["u64", "i32"] and [code for code, _ in above.leaves] == ["u64", "i64"]
    assert above.type.wide and not below.type.wide and above.type != below.type


def test_a_large_array_of_a_component_makes_it_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Noise(epilogues.Epilogue):
        table: gk.Array

        def __call__(self, x: Any, m: int, n: int) -> Any:
            return x + self.table[m * 33_000_000 + n]

    sizes = (65, 64, 64)
    small, large = (spec_of(sizes, {}, monkeypatch, epilogue=Noise(Array(count)) | epilogues.ReLU())[0].skeleton.epilogue
                    for count in (COUNT - 1, COUNT))
    assert coordinate_bits(small.first) == 32 and coordinate_bits(large.first) == 64
    assert type(large.second) is epilogues.ReLU


@pytest.mark.usefixtures("always_wide")
def test_reductions_of_a_large_stack() -> None:
    """An array for each product: what is asked of a reduction is asked of the one in the adapter."""
    a, sums = np.ones((3, 8, 4), np.float32), np.empty((3, 8), np.float32)
    with gk.emulate():
        gk.matmul(a, a.transpose(0, 2, 1), epilogue=epilogues.RowReduce(sums, "sum"))
        placed = epilogues.Combine(lambda x, y: x + y, 0, of=lambda x, m, n: x + m * n)
        with pytest.raises(ValueError, match=r"out or an array of RowReduce has .*op.of\(x, m, n\)"):
            gk.matmul(a, a.transpose(0, 2, 1), epilogue=epilogues.RowReduce(sums, placed))
    assert (sums == 32).all()


@dataclass(frozen=True)
class Tilewise(epilogues.Epilogue):
    def finish(self, values: tuple, tile: Any, shape: Any) -> tuple:
        return values


@pytest.mark.parametrize(("fields", "match"), [
    ({"epilogue": Tilewise()}, "out .* has 4900000000 elements, and its finish works on tiles.* write __call__")])
def test_what_cannot_be_wide_is_refused_before_anything_is_compiled(fields: Any, match: str,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=match):
        spec_of((70_000, 70_000, 70_000), {"a": Array(70_000, 70_000)}, monkeypatch, **fields)
    spec_of((64, 64, 64), {"a": Array(64, 64)}, monkeypatch, **fields)


# -- in the emulator --------------------------------------------------------------------------------------------------

def test_an_operand_of_more_than_2_31_elements_in_the_emulator() -> None:
    M, N, K = 9, 5, 300_000_007                            # element (8, K - 1) is number 2,700,000,062
    data = np.zeros(M * K, np.int8)
    rows = np.random.default_rng(1).integers(-4, 5, (M, 16), np.int8)
    for i in range(M):
        data[(i + 1) * K - 16:(i + 1) * K] = rows[i]
    b = np.broadcast_to(np.arange(N, dtype=np.int8), (K, N))
    conf = gk.get_config(operator=operators.FPUOp(M=16, N=16, dtype="int8", accumulator="int32"), block_shape=FPU["block_shape"],
                         global_a_layout=Flat("int8"), global_b_layout=layouts.RowMajor("int8"),
                         global_d_layout=layouts.RowMajor("int32"))
    with gk.emulate():
        run = plan(data, b, conf=conf, gemm_shape={"M": M, "N": N, "K": K})
        assert isinstance(run._compiled.spec.a.layout, WideLayout)
        d = run(data, b)
    assert np.array_equal(d, rows.astype(d.dtype) @ np.broadcast_to(np.arange(N), (16, N)).astype(d.dtype))


def test_a_result_of_more_than_2_31_elements_is_stored_where_it_belongs() -> None:
    """The pieces: what the kernel calls, with the coordinates that it has."""
    from gemmkit.kernels.spec import ProblemShape

    seen: list[Any] = []

    class Data:
        def __setitem__(self, at: int, value: Any) -> None:
            seen.append((at, value))

    wide = WideLayout(Symmetric("float32"))
    wide.store_element(Data(), 69_999, 69_998, 2.0, ProblemShape(70_000, 70_000, 8))
    assert seen == [(packed(69_999) + 69_998, 2.0)]
    assert wide.writable and wide.readable and not wide.is_plain and wide.stored is None


# -- compiled ---------------------------------------------------------------------------------------------------------

def ptx_of(conf: Any, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], **arrays: Any) -> str:
    monkeypatch.setattr(ahead, "assemble", lambda ptx, arch: None)
    return ahead.compile_config(conf, operands=arrays, gemm_shape=dict(zip("MNK", sizes))).ptx


@pytest.mark.kin(1)
def test_the_wide_class_compiles_and_multiplies_in_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over coordinates, a square root of one, a function of them: all that user code may do with 32-bit ones."""
    def noise(x: Any, m: int, n: int) -> Any:
        total = 0
        for step in range(m * 70_000 + n, m * 70_000 + n + 3):
            total += abs(-step) % 7 if step > 4 else int(step) // 3
        return x + total + math.sqrt(m)

    conf = gk.get_config(**FPU, global_a_layout=Symmetric("float32"), global_b_layout=ROW, global_d_layout=Symmetric("float32"),
                         epilogue=epilogues.Elementwise(noise))
    M = 70_000
    ptx = ptx_of(conf, monkeypatch, (M, M, M), a=Array(packed(M)), out=Array(packed(M)))
    assert len(re.findall(r"mul\.lo\.s64|mad\.lo\.s64", ptx)) >= 20            # of M = 1,000 there is one


@pytest.mark.gpu
@pytest.mark.parametrize("M", [46_341, 70_000])
def test_the_packed_symmetric_layout_on_the_gpu(M: int) -> None:
    """docs/components.md's, as A and as D. 70,000: 2.45e9 elements, 4.9 GB of float16."""
    import cupy

    N, K = 16, 16
    symmetric = Symmetric("float16")
    a = cupy.random.default_rng(2).standard_normal((M, K), dtype=cupy.float32).astype(cupy.float16)
    data = cupy.full(packed(M), cupy.nan, cupy.float16)
    gk.matmul(a, a.T, out=data, global_d_layout=symmetric, gemm_shape={"M": M, "N": M, "K": K})
    for i in (0, 1, 46_339, 46_340, M // 2, M - 2, M - 1):
        row = cupy.asnumpy(data[packed(i - 1) if i else 0:packed(i)])
        wanted = (a[:i + 1].astype(cupy.float64) @ a[i].astype(cupy.float64))[:i + 1]
        got = data[i * (i + 1) // 2:i * (i + 1) // 2 + i + 1]
        assert_close(cupy.asnumpy(got).astype("f8"), cupy.asnumpy(wanted), 2e-3)
        assert row.size == i
    assert not bool(cupy.isnan(data).any())
    x = cupy.random.default_rng(3).standard_normal((M, N), dtype=cupy.float32).astype(cupy.float16)
    d = gk.matmul(data, x, global_a_layout=symmetric, gemm_shape={"M": M, "N": N, "K": M})
    for i in (0, 46_340, M - 1):                            # row i of the matrix that is stored
        below = data[i * (i + 1) // 2:i * (i + 1) // 2 + i + 1]
        rows = cupy.arange(i + 1, M, dtype=cupy.int64)
        row = cupy.concatenate([below, data[rows * (rows + 1) // 2 + i]]).astype(cupy.float64)
        assert_close(cupy.asnumpy(d[i]).astype("f8"), cupy.asnumpy(row @ x.astype(cupy.float64)), 5e-3)


@pytest.mark.gpu
def test_a_vector_of_more_than_2_31_elements_on_the_gpu() -> None:
    import cupy

    M, N, K = 9, 5, 300_000_007
    data = cupy.zeros(M * K, cupy.int8)
    rows = np.random.default_rng(1).integers(-4, 5, (M, 16), np.int8)
    for i in range(M):
        data[(i + 1) * K - 16:(i + 1) * K] = cupy.asarray(rows[i])
    b = cupy.broadcast_to(cupy.arange(N, dtype=cupy.int8), (K, N))
    d = cupy.asnumpy(gk.matmul(data, b, global_a_layout=Flat("int8"), gemm_shape={"M": M, "N": N, "K": K}))
    assert np.array_equal(d, rows.astype(d.dtype) @ np.broadcast_to(np.arange(N), (16, N)).astype(d.dtype))


@pytest.mark.gpu
def test_transforms_and_epilogues_of_large_results_on_the_gpu() -> None:
    """A function of the element's number, which 32 bits do not hold."""
    import cupy

    M = 50_000
    a, b = cupy.zeros((M, 8), cupy.float16), cupy.zeros((8, M), cupy.float16)
    number = epilogues.Elementwise(lambda x, m, n: x + (m * 50_000 + n) % 1_021)
    out = cupy.full((M, M), cupy.nan, cupy.float16)
    gk.matmul(a, b, out=out, epilogue=number)
    for i in (0, 42_949, 42_950, M - 1):
        wanted = (i * M + np.arange(M, dtype=np.int64)) % 1_021
        assert np.array_equal(cupy.asnumpy(out[i]).astype(np.int64), wanted)
