"""Instructions of `gemmkit.ptx` as specs: every mma.sync, every ldmatrix, wgmma; emulated, compiled, on a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import specs
from gemmkit.ptx.mma import MMA
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.ptx.wgmma import fence_async
from gemmkit.specs import THREAD, WARP, NoAtom, T, instruction, shape
from gemmkit.specs.tensors import WARPGROUP
from tests.support.harness import aligned

NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int8": "i8", "uint8": "u8", "int32": "i32",
         "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
QUADS = WARP.tile(4)


def form(extents: tuple, dtype: Any, memory: str) -> Any:
    return getattr(getattr(T[extents], NAMES[np.dtype(dtype).name]), memory)


def values(rng: np.random.Generator, extents: tuple, dtype: Any) -> np.ndarray:
    whole = rng.integers(0 if np.dtype(dtype) == np.uint8 else -3, 4, extents)
    return aligned(whole.astype(dtype))


def run(kernel: Any, *arrays: np.ndarray) -> None:
    with gk.emulate(seed=1):
        kernel(*arrays)


def on_gpu(kernel: Any, *arrays: np.ndarray) -> None:
    """CuPy knows no narrow floats: their bytes go."""
    import cupy
    import torch

    there = [cupy.asarray(x.view(np.uint8).reshape(-1)) for x in arrays]
    views = [torch.as_tensor(far, device="cuda").view(getattr(torch, str(x.dtype))).view(x.shape) for far, x in zip(there, arrays)]
    kernel(*views)
    arrays[-1][...] = there[-1].get().view(arrays[-1].dtype).reshape(arrays[-1].shape)


RUNS = pytest.mark.parametrize("run", [run, pytest.param(on_gpu, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])


# -- mma.sync -------------------------------------------------------------------------------------------------------------

@cache
def multiplied(key: tuple) -> Any:
    """M x 8 by a warp: registers are filled and stored by the threads themselves, tiles of strided parts."""
    m, k, a_type, b_type, c_type = key
    w = max(1, 4 // a_type.itemsize)
    down, deep = m // 8, k // (4 * w)
    of_a, of_b, of_c = form((down, deep * w), a_type, "RF"), form((deep * w, 1), b_type, "RF"), form((down, 2), c_type, "RF")
    rows, columns = shape(down, 8), shape((w, deep), (1, 4 * w))
    left, right, sums = form((m, k), a_type, "GL"), form((k, 8), b_type, "GL"), form((m, 8), c_type, "GL")

    def kernel(blocks, threads, A, B, C):  # type: ignore[no-untyped-def]
        one, g, t = threads.scalar(), QUADS.indices()[0], QUADS.local()
        a, b, c = specs.Allocate(of_a), specs.Allocate(of_b), specs.Allocate(of_c)
        mine, yours, ours = A.tile(rows, columns)[g, t], B.tile(columns, 1)[t, g], C.tile(rows, 2)[g, t]
        for j in range(deep):
            for i in range(down):
                specs.Move(one, mine.tile(1, w)[i, j], a.tile(1, w)[i, j])
            specs.Move(one, yours.tile(w, 1)[j, 0], b.tile(w, 1)[j, 0])
        for i in range(down):
            specs.Move(one, ours.tile(1, 2)[i, 0], c.tile(1, 2)[i, 0])
        specs.MatMul(threads, a.tile(1, w), b.tile(w, 1), c.tile(1, 2))
        for i in range(down):
            specs.Move(one, c.tile(1, 2)[i, 0], ours.tile(1, 2)[i, 0])

    kernel.__annotations__ = {"A": left, "B": right, "C": sums}
    return specs.kernel(grid=(1,), block=(32,))(kernel)


def said(key: tuple) -> str:
    return "-".join(str(part) for part in key)


@RUNS
@pytest.mark.parametrize("key", MMA, ids=said)
def test_every_mma(run: Any, key: tuple, rng: np.random.Generator) -> None:
    m, k, a_type, b_type, c_type = key
    a, b, c = values(rng, (m, k), a_type), values(rng, (k, 8), b_type), values(rng, (m, 8), c_type)
    wanted = a.astype(float) @ b.astype(float) + c.astype(float)
    run(multiplied(key), a, b, c)
    np.testing.assert_array_equal(c.astype(float), wanted)


@pytest.mark.compile
@pytest.mark.parametrize("key", [key for key in MMA if key[0] == 16 and key[2] == key[3]], ids=said)
@pytest.mark.sample(4)
def test_every_mma_compiled(key: tuple) -> None:
    code = multiplied(key).compile()
    assert code.usage.spill_stores == code.usage.stack_bytes == 0
    assert code.ptx.count(f"mma.sync.aligned.m16n8k{key[1]}.row.col") == 1


# -- ldmatrix -------------------------------------------------------------------------------------------------------------

@cache
def loaded(dtype: Any, outer: tuple, turned: bool, by_columns: bool = False) -> Any:
    """``outer`` matrices of eight lines of 16 bytes, from a tile that holds two by two of them; each lane stores what it has."""
    line, part = 16 // np.dtype(dtype).itemsize, 4 // np.dtype(dtype).itemsize
    down, across = outer
    count = down * across
    inner = (part, 1) if turned != by_columns else (1, part)
    of_tile = form((2 * line, 16), dtype, "SH").stored(f"[({2 * line},16):(1,{2 * line})]") if by_columns else form((16, 2 * line), dtype, "SH")
    of_matrix = (line, 8) if by_columns else (8, line)
    of_lane = (line, 1) if by_columns else (1, line)
    held, source = form((down * inner[0], across * inner[1]), dtype, "RF"), form(of_tile.extents, dtype, "GL")
    result, flat = form((32, count * part), dtype, "GL"), form((1, part), dtype, "RF")

    def kernel(blocks, threads, X, Y):  # type: ignore[no-untyped-def]
        one, lane = threads.scalar(), thread_index()
        tile, registers, whole = specs.Allocate(of_tile), specs.Allocate(held), specs.Allocate(flat)
        pieces, places = X.tile(*of_lane), tile.tile(*of_lane)
        if by_columns:
            specs.Move(one, pieces[lane // 16, lane % 16], places[lane // 16, lane % 16])
        else:
            specs.Move(one, pieces[lane % 16, lane // 16], places[lane % 16, lane // 16])
        barrier()
        number = lane // 8 % count
        matrix = tile.tile(*of_matrix)[number // across, number % across]
        line_of = matrix.tile(*of_lane)
        if by_columns:
            specs.Move(threads, line_of[0, lane % 8], registers.tile(*inner))
        else:
            specs.Move(threads, line_of[lane % 8, 0], registers.tile(*inner))
        for i in range(down):
            for j in range(across):
                for p in range(part):
                    specs.Move(one, registers.tile(*inner)[i, j].reshape(1, part)[0, p], whole[0, p])
                specs.Move(one, whole, Y.tile(1, part)[lane, i * across + j])

    kernel.__annotations__ = {"X": source, "Y": result}
    return specs.kernel(grid=(1,), block=(32,), shared_bytes=1024)(kernel)


CASES = [("f2", (1, 1), False, False), ("f2", (2, 1), False, False), ("f2", (1, 2), True, False), ("f2", (2, 2), False, False),
         ("f2", (2, 2), True, False), ("f2", (2, 2), True, True), ("f2", (1, 1), False, True), (ml_dtypes.bfloat16, (2, 2), True, False),
         ("i1", (2, 2), False, False), ("f4", (2, 1), False, False), ("i1", (1, 1), False, True)]


@RUNS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_ldmatrix(run: Any, case: tuple, rng: np.random.Generator) -> None:
    dtype, (down, across), turned, by_columns = case
    line, part = 16 // np.dtype(dtype).itemsize, 4 // np.dtype(dtype).itemsize
    tile = np.arange(32 * line).reshape(16, 2 * line)
    source = (tile % 127).astype(dtype)
    out = aligned(np.zeros((32, down * across * part), dtype))
    run(loaded(*case), aligned(np.ascontiguousarray(source.T if by_columns else source)), out)
    order = (lambda i, j: (j, i)) if by_columns else (lambda i, j: (i, j))
    for i in range(down):
        for j in range(across):
            y, x = order(i, j)
            matrix = source[8 * y:8 * y + 8, line * x:line * x + line]
            matrix = matrix.T if turned else matrix
            mine = out[:, (i * across + j) * part:][:, :part]
            np.testing.assert_array_equal(mine, matrix.reshape(32, part))


@pytest.mark.compile
@pytest.mark.parametrize(("case", "text"), [(CASES[0], "x1.shared"), (CASES[2], "x2.trans.shared"), (CASES[4], "x4.trans.shared")])
def test_ldmatrix_compiled(case: tuple, text: str) -> None:
    code = loaded(*case).compile()
    assert code.ptx.count(f"ldmatrix.sync.aligned.m8n8.{text}.b16") == 1 and code.usage.stack_bytes == 0


# -- wgmma ----------------------------------------------------------------------------------------------------------------

LEFT, RIGHT = T[64, 64].fp16.SH.in_lines(), T[64, 32].fp16.SH.in_lines(64)
SUMS, PIECE = T[64, 32].fp32.WR, T[1, 8].fp16.RF


@specs.kernel(grid=(1,), block=(128,), shared_bytes=64 * 96 * 2)
def by_a_warpgroup(blocks: Any, threads: Any, A: T[64, 64].fp16.GL, B: T[64, 32].fp16.GL, C: T[64, 32].fp32.GL) -> None:  # type: ignore[name-defined]
    """Threads copy both matrices to swizzled lines, and a warpgroup multiplies them."""
    one, t = threads.scalar(), thread_index()
    a, b, sums = specs.Allocate(LEFT), specs.Allocate(RIGHT, 8192), specs.Allocate(SUMS)
    for n in range(4):
        specs.Move(one, A.tile(1, 8)[16 * n + t // 8, t % 8], a.tile(1, 8)[16 * n + t // 8, t % 8])
    for n in range(2):
        specs.Move(one, B.tile(1, 8)[32 * n + t // 4, t % 4], b.tile(1, 8)[32 * n + t // 4, t % 4])
    fence_async()
    barrier()
    specs.Init(0, threads, sums)
    specs.MatMul(threads, a, b, sums)
    specs.Move(threads, sums, C)


@RUNS
def test_wgmma(run: Any, rng: np.random.Generator) -> None:
    a, b, c = values(rng, (64, 64), "f2"), values(rng, (64, 32), "f2"), aligned(np.full((64, 32), np.nan, "f4"))
    run(by_a_warpgroup, a, b, c)
    np.testing.assert_array_equal(c, a.astype(float) @ b.astype(float))


@pytest.mark.compile
def test_wgmma_compiled() -> None:
    code = by_a_warpgroup.compile()
    assert code.ptx.count("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16") == 4
    assert code.usage.spill_stores == code.usage.stack_bytes == 0


# -- refused --------------------------------------------------------------------------------------------------------------

TILE = T[16, 16].fp16.SH.stored("[(16,16):(24,1)]")


@pytest.mark.parametrize(("given", "words"), [
    (("Move", WARP, TILE.tile(1, 8).inner, T[3, 2].fp16.RF.tile(1, 2)), r"the destination is \[3,1\].\[1,2\].fp16.RF, not \[2,2\]"),
    (("Move", WARP, T[16, 16].i8.SH.tile(1, 16).inner, T[4, 1].i8.RF), "elements of 8 bits are not turned"),
    (("MatMul", WARP, T[2, 2].fp16.RF.tile(1, 2), T[2, 1].fp16.RF.tile(2, 1), T[2, 2].fp16.RF.tile(1, 1)), r"c has parts of \(1, 1\)"),
    (("MatMul", WARP, T[2, 8].fp32.RF.tile(1, 1), T[8, 1].fp32.RF.tile(1, 1), T[2, 2].fp32.RF.tile(1, 2)),
     "16 x 32 of A are not 16 x 4 or 16 x 8"),
    (("MatMul", WARP, T[2, 4].fp16.RF.tile(1, 2), T[4, 1].bf16.RF.tile(2, 1), T[2, 2].fp32.RF.tile(1, 2)), "float16 by bfloat16 is not added to float32"),
    (("MatMul", WARPGROUP, T[64, 64].fp16.SH, T[64, 32].fp16.SH.in_lines(64), T[64, 32].fp32.WR), "does not lie in swizzled lines"),
    (("MatMul", WARPGROUP, T[64, 64].fp16.SH.in_lines(), T[64, 32].fp16.SH.in_lines(64), T[64, 64].fp32.WR), "is not 64 rows of"),
    (("MatMul", WARPGROUP, T[64, 64].i8.SH.in_lines(64), T[64, 32].i8.SH.in_lines(32), T[64, 32].i32.WR), "int8 is read K-major only"),
    (("MatMul", THREAD, T[64, 64].fp16.SH.in_lines(), T[64, 32].fp16.SH.in_lines(64), T[64, 32].fp32.WR), "1 threads execute it, not 128"),
])
def test_no_instruction(given: tuple, words: str) -> None:
    with pytest.raises(NoAtom, match=words):
        instruction(*given)


@pytest.mark.parametrize("make", [lambda: T[64, 48].fp16.SH.in_lines(), lambda: T[64, 64].fp16.RF.in_lines(), lambda: T[64, 64].fp16.SH.in_lines(16)])
def test_lines_that_are_none(make: Any) -> None:
    with pytest.raises(specs.ShapeError, match="a matrix in SH is needed"):
        make()


def test_sums_that_are_none() -> None:
    with pytest.raises(specs.TensorError, match="a warpgroup holds multiples of 64 rows"):
        T[32, 64].fp32.WR                                     # noqa: B018
