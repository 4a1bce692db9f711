"""Instructions of `gemmkit.ptx` as specs: every mma.sync, every ldmatrix, wgmma; emulated, compiled, on a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import specs
from gemmkit.emulator.errors import DeadlockError, ProtocolError
from gemmkit.ptx.mma import MMA
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.ptx.wgmma import fence_async
from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.runtime.device import H100, assumed
from gemmkit.shapes import Swizzle
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
    """The bytes go, from the first element to the last, at an address that is as much aligned; PyTorch has narrow floats."""
    import torch

    views = []
    for x in arrays:
        span, shift = x.itemsize + sum((n - 1) * step for n, step in zip(x.shape, x.strides)), x.ctypes.data % 16
        near = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(x.ctypes.data))
        far = torch.zeros(shift + span + 16, dtype=torch.uint8, device="cuda")[shift:shift + span]
        far.copy_(torch.from_numpy(near))
        views.append(far.view(getattr(torch, str(x.dtype))).as_strided(x.shape, [step // x.itemsize for step in x.strides]))
    kernel(*views)
    arrays[-1][...] = views[-1].contiguous().cpu().view(torch.uint8).numpy().view(arrays[-1].dtype).reshape(arrays[-1].shape)


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


# -- TMA and mbarriers -----------------------------------------------------------------------------------------------------

#: The dtype, a tile's extents, its swizzled lines in bytes (0: it lies plain) and their order.
BOXES = [("f2", (16, 64), 128, "row"), ("f2", (64, 16), 128, "col"), ("f4", (24, 32), 64, "row"), ("i1", (8, 64), 32, "row"),
         ("f2", (16, 128), 128, "row"), ("f2", (3, 64), 0, "row"), ("f4", (2, 4, 8), 0, "row")]


@cache
def brought(dtype: Any, extents: tuple, nbytes: int, order: str, named: bool = True) -> Any:
    """Each block brings two tiles, one after the other to one place, and its threads store what came."""
    tile, rank, last = form(extents, dtype, "SH"), len(extents), extents[-1]
    tile = tile.in_lines(nbytes, order) if nbytes else tile
    ring, most = T[1].mbar.SH, max(1, int(np.prod(extents[:-1])))
    along = form(("M", "N", "P")[:rank], dtype, "GL")

    def kernel(blocks, threads, X, Y):  # type: ignore[no-untyped-def]
        one, t, at = threads.scalar(), thread_index(), blocks.indices()
        place, there = specs.Allocate(tile, 1024), specs.Allocate(ring)
        if t == 0:
            specs.Init(1, one, there)
        barrier()
        for n in range(2):
            if t == 0:
                specs.CopyAsync(one, X.tile(*extents)[at], place, there[n])
            specs.Await(one, there[n])
            if t < most:
                mine = Y.tile(*extents)[at]
                for j in range(last):
                    if rank == 2:
                        specs.Move(one, place[t, j], mine[t, j])
                    else:
                        specs.Move(one, place[t // extents[1], t % extents[1], j], mine[t // extents[1], t % extents[1], j])
            barrier()

    kernel.__annotations__ = {"X": along.in_boxes(tile), "Y": along}
    return specs.kernel(tuple(specs.cdiv(*x) for x in zip("MNP", extents)), (64,), 1024 + 128 * 128)(kernel)


@RUNS
@pytest.mark.parametrize("case", BOXES, ids=str)
def test_tiles_that_tma_brings(run: Any, case: tuple, rng: np.random.Generator) -> None:
    """Two tiles and a part along each dimension, of lines that are longer than what is seen of them."""
    dtype, extents, _, order = case
    sizes = tuple(2 * extent + 3 for extent in extents)
    if order == "col":
        x = values(rng, (sizes[1], sizes[0] + -sizes[0] % 16), dtype)[:, :sizes[0]].T
    else:
        x = values(rng, (*sizes[:-1], sizes[-1] + -sizes[-1] % 16), dtype)[..., :sizes[-1]]
    out = aligned(np.full(sizes, 113, dtype))
    run(brought(*case), x, out)
    np.testing.assert_array_equal(out, x)


@pytest.mark.compile
@pytest.mark.parametrize(("case", "copies"), [(BOXES[0], 1), (BOXES[4], 2), (BOXES[6], 1)], ids=str)
def test_tiles_compiled(case: tuple, copies: int) -> None:
    """One thread arrives with the bytes, and asks for each panel."""
    code = brought(*case).compile(M=64, N=64, P=64)
    assert code.usage.spill_stores == code.usage.stack_bytes == 0
    counts = instruction_counts(disassemble(code.cubin))
    assert counts["UTMALDG"] >= copies and code.ptx.count("mbarrier.arrive.expect_tx") >= 1


def awaited(arrivals: int, copies: int, arrives: int = 0) -> Any:
    """A phase of so many arrivals, awaited behind so many copies and arrivals of one thread."""
    @specs.kernel(grid=(1,), block=(32,), shared_bytes=2048)
    def kernel(blocks, threads, X: T[8, 64].fp16.GL.in_boxes(LINES)):  # type: ignore[no-untyped-def, valid-type, name-defined]
        place, there = specs.Allocate(LINES), specs.Allocate(T[2].mbar.SH, 1024)
        if thread_index() == 0:
            specs.Init(arrivals, threads.scalar(), there)
        barrier()
        if thread_index() == 0:
            for _ in range(copies):
                specs.CopyAsync(threads.scalar(), X, place, there[2])
            for _ in range(arrives):
                specs.Arrive(threads.scalar(), there[2])
        specs.Await(threads.scalar(), there[0])

    return kernel


@pytest.mark.parametrize(("given", "lacks"), [((1, 0), "1 of 1 arrivals"), ((2, 1), "1 of 2 arrivals"), ((3, 0, 2), "1 of 3 arrivals")], ids=str)
def test_waits_that_would_hang(given: tuple, lacks: str) -> None:
    with pytest.raises(DeadlockError, match=lacks):
        run(awaited(*given), aligned(np.zeros((8, 64), "f2")))


def product_of_tiles(is_awaited: bool) -> Any:
    """A product that may be under way when its sums are stored."""
    @specs.kernel(grid=(1,), block=(128,), shared_bytes=64 * 96 * 2 + 8)
    def kernel(blocks, threads, A: T[64, 64].fp16.GL.in_boxes(LEFT), B: T[64, 32].fp16.GL.in_boxes(RIGHT), C: T[64, 32].fp32.GL):  # type: ignore[no-untyped-def, valid-type, name-defined]
        one, a, b = threads.scalar(), specs.Allocate(LEFT), specs.Allocate(RIGHT, 8192)
        sums, there = specs.Allocate(SUMS), specs.Allocate(T[1].mbar.SH, 64 * 96 * 2)
        if thread_index() == 0:
            specs.Init(2, one, there)
        barrier()
        if thread_index() == 0:
            specs.CopyAsync(one, A, a, there[0])
            specs.CopyAsync(one, B, b, there[0])
        specs.Await(one, there[0])
        specs.Init(0, threads, sums)
        specs.MatMulAsync(threads, a, b, sums)
        if is_awaited:
            specs.Await(threads, sums)
        specs.Move(threads, sums, C)

    return kernel


def test_sums_that_are_not_awaited(rng: np.random.Generator) -> None:
    a, b, c = values(rng, (64, 64), "f2"), values(rng, (64, 32), "f2"), aligned(np.full((64, 32), np.nan, "f4"))
    run(product_of_tiles(True), a, b, c)
    np.testing.assert_array_equal(c, a.astype(float) @ b.astype(float))
    with pytest.raises(ProtocolError, match="accumulators are used while wgmmas in flight"):
        run(product_of_tiles(False), a, b, c)


def test_arrays_that_tma_cannot_copy() -> None:
    kernel, out = brought(*BOXES[0]), np.zeros((16, 64), "f2")
    for x, why in ((np.zeros((16, 67), "f2")[:, :64], "is 134 bytes, not a multiple of 16"), (np.zeros((64, 16), "f2").T, "its stride along axis 0 is 2 bytes"),
                   (np.zeros(16 * 64 + 8, "f2")[1:1025].reshape(16, 64), "not a multiple of 16 bytes")):
        with pytest.raises(ValueError, match=f"X: TMA copies its boxes, and cannot: .*{why}"):
            run(kernel, x, out)
    with pytest.raises(ValueError, match="an A100.* has no TMA"), assumed(replace(H100, name="an A100", arch=(8, 0))):
        run(kernel, np.zeros((16, 64), "f2"), out)


# -- refused --------------------------------------------------------------------------------------------------------------

TILE = T[16, 16].fp16.SH.stored("[(16,16):(24,1)]")
LINES, ONE = T[8, 64].fp16.SH.in_lines(), T[2].mbar.SH.inner
BOXED = T["M", 64].fp16.GL.in_boxes(LINES).tile(8, 64).inner


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
    (("CopyAsync", THREAD, BOXED, LINES, ONE), "allocated at a multiple of 16 bytes, not of 1024"),
    (("CopyAsync", THREAD, T[8, 64].fp16.GL, LINES, ONE), r"has no tensor map; annotate the parameter with T\[...\].GL.in_boxes"),
    (("CopyAsync", THREAD, BOXED.tile(4, 64).inner, LINES, ONE), r"the source is \[4,64\].fp16.GL, and its boxes are \[8,64\]"),
    (("CopyAsync", THREAD, BOXED, T[8, 64].fp16.SH, ONE), "not swizzled, and the source's boxes are .* swizzled by 128"),
    (("CopyAsync", THREAD, BOXED, T[16, 64].fp16.SH.in_lines(), ONE), r"the destination is \[16,64\] in lines"),
    (("CopyAsync", THREAD, BOXED, LINES, T[2].mbar.SH), "not one barrier of a ring"),
    (("CopyAsync", WARP, BOXED, LINES, ONE), "32 threads execute it, not 1"),
    (("CopyAsync", THREAD, BOXED, LINES), "it takes 3 tensors, not 2"),
    (("Init", 0, THREAD, T[2].mbar.SH), "a phase takes 1 to 1048575 arrivals, not 0"),
    (("Init", THREAD, T[2].mbar.SH), "arrivals, not none"),
    (("Init", 1, WARP, T[2].mbar.SH), "32 threads execute it, not 1"),
    (("Init", 1, THREAD, ONE), "not a ring of barriers"),
    (("Arrive", WARP, ONE), "32 threads execute it, not 1"),
    (("Arrive", THREAD, LINES), "not one barrier of a ring"),
    (("Await", 1, THREAD, ONE), "or with -1 the one before is awaited, not 1"),
    (("Await", THREAD, T[2].mbar.SH), "not one barrier of a ring"),
    (("Await", WARP, T[64, 32].fp32.WR), "32 threads execute it, not 128"),
    (("Move", THREAD, ONE, ONE), "is of barriers, which Init, CopyAsync, Arrive and Await take"),
])
def test_no_instruction(given: tuple, words: str) -> None:
    with pytest.raises(NoAtom, match=words):
        instruction(*given)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: T[8, 64].fp16.GL.in_boxes(T[8, 64].fp16.GL), r"\[8,64\].fp16.GL is no block in SH"),
    (lambda: T[8, 64].fp16.SH.in_boxes(LINES), "a tensor in GL takes a tile in SH of its rank and type"),
    (lambda: T[8, 64].bf16.GL.in_boxes(LINES), "a tile in SH of its rank and type"),
    (lambda: T[8, 8, 64].fp16.GL.in_boxes(LINES), "a tile in SH of its rank and type"),
    (lambda: T["M", 512].fp16.GL.in_boxes(T[8, 512].fp16.SH), "1 to 5 extents from 1 to 256 are needed"),
    (lambda: T["M", 64].fp16.GL.in_boxes(T[304, 64].fp16.SH.in_lines()), "1 to 5 extents from 1 to 256 are needed"),
    (lambda: T["M", 4].fp16.GL.in_boxes(T[16, 4].fp16.SH), "8 bytes; a multiple of 16 is needed"),
    (lambda: T["M", 16].fp16.GL.in_boxes(TILE), "has gaps between its lines of 16"),
    (lambda: T["M", 64].fp16.GL.in_boxes(T[4, 64].fp16.SH.in_lines()), "of a multiple of 8 lines"),
    (lambda: T["M", 64].fp16.GL.in_boxes(T[8, 64].fp16.SH.replaced(swizzle=Swizzle((4, 24)))), "TMA's is that of in_lines"),
    (lambda: T["M"].fp16.GL.in_boxes(T[64].fp16.SH), "has 1 dimensions, and a tensor map 2 to 5"),
    (lambda: T["M", 8].fp16.GL.in_boxes(T[3, 8].fp16.SH), "in panels of a multiple of 128 bytes"),
    (lambda: T[4].mbar.GL, "barriers are in SH"), (lambda: T[4, 2].mbar.SH, "one extent says how many"),
    (lambda: specs.Allocate(T[4].mbar.SH, 4), "barriers begin at a multiple of 8 bytes"),
])
def test_boxes_and_barriers_that_are_none(make: Any, words: str) -> None:
    with pytest.raises(specs.TensorError, match=words):
        make()


@pytest.mark.parametrize("make", [lambda: T[64, 48].fp16.SH.in_lines(), lambda: T[64, 64].fp16.RF.in_lines(), lambda: T[64, 64].fp16.SH.in_lines(16)])
def test_lines_that_are_none(make: Any) -> None:
    with pytest.raises(specs.ShapeError, match="a matrix in SH is needed"):
        make()


def test_sums_that_are_none() -> None:
    with pytest.raises(specs.TensorError, match="a warpgroup holds multiples of 64 rows"):
        T[32, 64].fp32.WR                                     # noqa: B018
