"""Kernels of `specs.kernel` whose extents are known at run time: any number of tensors, grids made of the extents, tiles over
an edge; drawn sizes, tiles, orders and views against float64; what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import specs
from gemmkit.specs import ALL, T, TensorError, cdiv
from tests.support.harness import aligned

A, B, C = T["M", "K"].fp32.GL, T["K", "N"].fp32.GL, T["M", "N"].fp32.GL
ROWS, COLUMNS = T["M"].fp32.GL, T["N"].fp32.GL
ONE, SUMS = T[()].fp32.RF, T[2, 2].fp32.RF
LEFT, RIGHT = T[2, 1].fp32.RF, T[1, 2].fp32.RF


@cache
def product(m: int, n: int) -> Any:
    """``scale[:, None] * (a @ b) + bias + c``: six tensors; a block computes m x n, a thread 2 x 2."""
    @specs.kernel(grid=(cdiv("M", m), cdiv("N", n)), block=(m // 2, n // 2))
    def kernel(blocks: Any, threads: Any, a: A, b: B, c: C, scale: ROWS, bias: COLUMNS, out: C) -> None:  # type: ignore[valid-type]
        (i, j), (y, x), one = blocks.indices(), threads.indices(), threads.scalar()
        left, right = a.tile(m, ALL)[i, 0].tile(2, ALL)[y, 0], b.tile(ALL, n)[0, j].tile(ALL, 2)[0, x]
        sums, of_a, of_b = specs.Allocate(SUMS), specs.Allocate(LEFT), specs.Allocate(RIGHT)
        for p in range(2):
            specs.Init(one, sums.tile(1, 2)[p, 0])
        for k in range(a.size(1)):
            specs.Move(one, left.tile(2, 1)[0, k], of_a)
            specs.Move(one, right.tile(1, 2)[k, 0], of_b)
            specs.MatMul(one, of_a, of_b, sums)
        own, target = c.tile(m, n)[i, j].tile(2, 2)[y, x], out.tile(m, n)[i, j].tile(2, 2)[y, x]
        factor, line, further = specs.Allocate(ONE), specs.Allocate(RIGHT), specs.Allocate(RIGHT)
        specs.Move(one, bias.tile(n)[j].tile(2)[x], further)
        for p in range(2):
            specs.Move(one, scale.tile(m)[i].tile(2)[y][p], factor)
            for q in range(2):
                specs.BinaryPointwise("*", one, sums[p, q], factor, sums[p, q])
            specs.Move(one, own.tile(1, 2)[p, 0], line)
            specs.BinaryPointwise("+", one, line, further, line)
            specs.BinaryPointwise("+", one, sums.tile(1, 2)[p, 0], line, line)
            specs.Move(one, line, target.tile(1, 2)[p, 0])

    return kernel


@dataclass(frozen=True)
class Case:
    """Sizes, a block's tile, and how the arrays lie: an order and a shift of each, in elements."""

    sizes: tuple[int, int, int]
    tile: tuple[int, int]
    orders: str
    shifts: tuple[int, ...]

    @staticmethod
    def drawn(rng: np.random.Generator, most: int) -> Case:
        tile = (int(rng.choice([4, 8])), int(rng.choice([8, 16])))
        m, n, k = (int(x) for x in rng.integers(1, most, 3))
        if rng.integers(3) == 0:                              # tiles that divide the array
            m, n = -(-m // tile[0]) * tile[0], -(-n // tile[1]) * tile[1]
        return Case((m, n, k), tile, "".join(rng.choice(["C", "F"], 4)), tuple(int(x) for x in rng.integers(0, 4, 6)))

    def arrays(self, rng: np.random.Generator) -> list[np.ndarray]:
        m, n, k = self.sizes
        shapes = (m, k), (k, n), (m, n), (m,), (n,), (m, n)
        orders = (*self.orders[:3], "C", "C", self.orders[3])
        return [shifted(rng.standard_normal(shape).astype("f4"), order, by)
                for shape, order, by in zip(shapes, orders, self.shifts)]


def shifted(array: np.ndarray, order: str, by: int) -> np.ndarray:
    """In memory of NaN, of which each line has one element more than the array's, ``by`` elements from where it begins."""
    lines = array.T if order == "F" else array
    padded = (*lines.shape[:-1], lines.shape[-1] + 1) if lines.ndim > 1 else lines.shape
    whole = aligned(np.full(int(np.prod(padded)) + 8, np.nan, "f4"))
    out = whole[by:by + int(np.prod(padded))].reshape(padded)[..., :lines.shape[-1]]
    out[...] = lines
    return out.T if order == "F" else out


def expected(a: np.ndarray, b: np.ndarray, c: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return np.asarray(scale.astype(float)[:, None] * (a.astype(float) @ b) + bias + c)


def check(case: Case, rng: np.random.Generator, run: Any) -> None:
    *given, out = case.arrays(rng)
    out[...] = np.nan
    wanted, before = expected(*given), memory_of(out).copy()
    found = np.array(run(product(*case.tile), *given, out))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * case.sizes[2], err_msg=str(case))
    out[...] = np.nan
    assert (memory_of(out) == before).all(), f"{case}: written beside the array"


def memory_of(array: np.ndarray) -> np.ndarray:
    """The bytes that an array is a part of."""
    assert isinstance(array.base, np.ndarray) and array.base.dtype == np.uint8
    return array.base


def emulated(kernel: Any, *arrays: np.ndarray) -> np.ndarray:
    with gk.emulate(seed=3):
        kernel(*arrays)
    return arrays[-1]


@pytest.mark.parametrize("seed", range(8))
def test_drawn_in_the_emulator(seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(Case.drawn(rng, 20), rng, emulated)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8, 100))
def test_many_drawn_in_the_emulator(seed: int) -> None:
    test_drawn_in_the_emulator(seed)


def on_gpu(kernel: Any, *arrays: np.ndarray) -> np.ndarray:
    """As they lie, in memory of the GPU."""
    import cupy

    wholes = [memory_of(x) for x in arrays]
    there = [cupy.asarray(x) for x in wholes]
    views = []
    for x, whole, far in zip(arrays, wholes, there):
        at = far.data.ptr - far.data.mem.ptr + x.ctypes.data - whole.ctypes.data
        views.append(cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(far.data.mem, at), x.strides))
    kernel(*views)
    wholes[-1][...] = there[-1].get()
    return arrays[-1]


@pytest.mark.gpu
@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(40))
def test_drawn_on_the_gpu(seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(Case.drawn(rng, 200), rng, on_gpu)


# -- one kernel for many sizes -------------------------------------------------------------------------------------------

def test_sizes_share_their_code() -> None:
    """What is compiled depends on which tiles reach over an edge, and on what divides the extent of a loop."""
    kernel = product(8, 16)
    codes = {kernel._kernel({"M": m, "N": n, "K": 256}).component for m in (64, 128, 8) for n in (16, 32)}
    edges = {kernel._kernel({"M": m, "N": n, "K": 256}).component for m in (9, 17) for n in (16, 33)}
    assert len(codes) == 1 and len(edges) == 2 and not codes & edges
    assert kernel._kernel({"M": 65, "N": 17, "K": 1}).blocks == 9 * 2


@pytest.mark.compile
@pytest.mark.sample(2)
def test_edges_are_checked_where_tiles_reach_over_them_alone() -> None:
    whole, edge = (product(8, 16).compile(**sizes) for sizes in ({}, {"M": 4095, "N": 4097}))
    for code in (whole, edge):
        assert code.usage.spill_stores == code.usage.stack_bytes == 0
    assert "ld.global.v2" in whole.ptx and whole.ptx.count("st.global.v2") == 2 and "st.global.f32" not in whole.ptx
    assert whole.ptx.count("setp") < edge.ptx.count("setp")


def test_nothing_to_do() -> None:
    with gk.emulate():
        copied(np.zeros((0, 3, 4), "f4"), np.zeros((0, 3, 4), "f4"))


CUBE = T["B", 3, "N"].fp32.GL


@specs.kernel(grid=("B", cdiv("N", 4)), block=(3, 2))
def copied(blocks: Any, threads: Any, x: CUBE, y: CUBE) -> None:  # type: ignore[valid-type]
    """Three dimensions; a block for each element of the first."""
    (b, j), (m, n) = blocks.indices(), threads.indices()
    source, target = x.tile(1, 3, 4)[b, 0, j], y.tile(1, 3, 4)[b, 0, j]
    specs.Move(threads.scalar(), source.tile(1, 1, 2)[0, m, n], target.tile(1, 1, 2)[0, m, n])


@pytest.mark.parametrize("n", [4, 7, 1])
def test_three_dimensions(n: int, rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((2, 3, n)).astype("f4"), np.full((2, 3, n), np.nan, "f4")
    with gk.emulate():
        copied(x, y)
    np.testing.assert_array_equal(x, y)


LINE, PAIR = T[4].fp32.RF, T[32, 4].fp32.SH


@specs.kernel(grid=(1,), block=(32,))
def total(blocks: Any, threads: Any, x: ROWS, y: T[1].fp32.GL) -> None:  # type: ignore[valid-type]
    """A loop of the kernel's own goes along an extent that is in no dimension of the grid."""
    one, lane = threads.scalar(), threads.indices()[0]
    tiles = x.tile(128)
    line, part, sums = specs.Allocate(LINE), specs.Allocate(ONE), specs.Allocate(ONE)
    specs.Init(one, sums)
    for k in range(tiles.size(0)):
        specs.Move(one, tiles[k].tile(4)[lane], line)
        specs.Reduction("+", one, line, part)
        specs.BinaryPointwise("+", one, sums, part, sums)
    for step in (16, 8, 4, 2, 1):
        specs.Shfl("bfly", step, threads, sums, part)
        specs.BinaryPointwise("+", one, sums, part, sums)
    if lane == 0:
        specs.Move(one, sums, y[0])


@pytest.mark.parametrize("m", [1, 100, 128, 300])
def test_a_loop_over_an_extent(m: int, rng: np.random.Generator) -> None:
    x, y = rng.standard_normal(m).astype("f4"), np.full(1, np.nan, "f4")
    with gk.emulate():
        total(x, y)
    np.testing.assert_allclose(y[0], x.astype(float).sum(), atol=1e-4)


# -- refused ---------------------------------------------------------------------------------------------------------------

def of(*forms: Any) -> Any:
    """A function of tensors of these forms."""
    def function(blocks, threads, a, b=None):  # type: ignore[no-untyped-def]
        pass

    function.__annotations__ = dict(zip("ab", forms))
    import inspect

    function.__signature__ = inspect.Signature([                            # type: ignore[attr-defined]
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("blocks", "threads", *"ab"[:len(forms)])])
    return function


@pytest.mark.parametrize(("grid", "forms", "words"), [
    ((2, 2), (T[None, None].fp32.GL,), r"an extent that is known at run time and has no name"),
    ((cdiv("Q", 4),), (ROWS,), r"Q: no tensor has an extent of that name \(they have M\)"),
    ((cdiv("M", 4), cdiv("M", 8)), (ROWS,), r"M: goes along it in steps of 8 too"),
    ((2,), (), "give at least one tensor"),
    ((2,), (T[4].fp32.SH,), r"function\(a\): annotate each tensor with its type"),
])
def test_kernels_that_are_refused(grid: tuple, forms: tuple, words: str) -> None:
    with pytest.raises(TensorError, match=words):
        specs.kernel(grid=grid, block=(32,))(of(*forms))


@pytest.mark.parametrize("given", [("M", 0), ("M", 2.0), (4, "M")])
def test_steps_that_are_none(given: tuple) -> None:
    with pytest.raises(TensorError, match=r"cdiv\(.*give an extent's name and a number"):
        cdiv(*given)


def test_extents_of_one_name_are_equal() -> None:
    with gk.emulate(), pytest.raises(ValueError, match=r"y has shape \(2, 3, 5\), and N is 4 in x; extents of one name"):
        copied(np.zeros((2, 3, 4), "f4"), np.zeros((2, 3, 5), "f4"))


@specs.kernel(grid=(cdiv("M", 64),), block=(32,))
def half_of_it(blocks: Any, threads: Any, x: ROWS) -> None:  # type: ignore[valid-type]
    specs.Init(threads.scalar(), x.tile(32)[blocks.indices()[0]].tile(1)[threads.indices()[0]])


@pytest.mark.parametrize("where", ["emulated", "compiled"])
def test_tiles_that_are_not_the_grids(where: str) -> None:
    """A block for 64 elements that writes 32 would leave half of them."""
    words = r"M goes along the grid in steps of 64, and here in steps of 32; tile it by 64 first"
    with gk.emulate(), pytest.raises((TensorError, gk.ComponentError), match=words):
        half_of_it(np.zeros(256, "f4")) if where == "emulated" else half_of_it.compile()


def test_names_are_of_global_memory() -> None:
    with pytest.raises(TensorError, match="tensors in SH need numbers"):
        T["M", 4].fp32.SH                                     # noqa: B018
