"""Kernels of two papers: Fireiron's listings and Graphene's Fig. 8 and attention; emulated and compiled."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import specs
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.specs import ALL, WARP, T, products
from gemmkit.specs.products import cuda_wmma_sample, maxwell_optimized
from tests.support.code_lines import source_of
from tests.support.harness import aligned

# ==========================================================================================================================
# Both listings of Fireiron's paper, emulated: right, and without a race.


def matrix(rng: np.random.Generator, rows: int, columns: int, dtype: str, order: str) -> np.ndarray:
    return aligned(np.asarray(rng.standard_normal((rows, columns)).astype(dtype), order=order))  # type: ignore[call-overload]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("schedule", "dtype", "orders", "k"), [(cuda_wmma_sample, "f2", "CFC", 256), (maxwell_optimized, "f4", "FFF", 16)],
                         ids=["cuda_wmma_sample", "maxwell_optimized"])
@pytest.mark.kin(1)
def test_listing(schedule: Any, dtype: str, orders: str, k: int, rng: np.random.Generator) -> None:
    a, b = matrix(rng, 128, k, dtype, orders[0]), matrix(rng, k, 128, dtype, orders[1])
    out = aligned(np.asarray(np.full((128, 128), np.nan, "f4"), order=orders[2]))  # type: ignore[call-overload]
    with gk.emulate(seed=1):
        assert schedule(a, b, out=out) is out
    np.testing.assert_allclose(out, a.astype(float) @ b.astype(float), atol=5e-5)


@pytest.mark.kin(1)
def test_blocks_of_a_grid(rng: np.random.Generator) -> None:
    """Two blocks, each with a tile of C of its own."""
    a, b = matrix(rng, 128, 8, "f4", "F"), matrix(rng, 8, 256, "f4", "F")
    out = aligned(np.zeros((128, 256), "f4", order="F"))
    with gk.emulate():
        maxwell_optimized(a, b, out=out)
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "dtype", "orders"), [(cuda_wmma_sample, "f2", "CFC"), (maxwell_optimized, "f4", "FFF")],
                         ids=["cuda_wmma_sample", "maxwell_optimized"])
def test_on_the_gpu(schedule: Any, dtype: str, orders: str, rng: np.random.Generator) -> None:
    import cupy

    a, b = (cupy.asarray(rng.standard_normal((1024, 1024)).astype(dtype), order=order) for order in orders[:2])
    out = cupy.zeros((1024, 1024), "f4", order=orders[2])
    schedule(a, b, out=out)
    cupy.testing.assert_allclose(out, a.astype("f8") @ b.astype("f8"), atol=2e-3)


# ==========================================================================================================================
# Both listings of Fireiron's paper, compiled: as many lines, the expected instructions, no spill, stack or call.

WMMA = (("f2", "row"), ("f2", "col"), ("f4", "row"))
MAXWELL = (("f4", "col"),) * 3


def lines_of(first: str, last: str) -> int:
    """Lines of the listings' file from one that begins with ``first`` on: no empty ones, no comments or docstrings."""
    text = source_of("gemmkit/specs/products.py")
    start = text.index(f"\n{first}") + 1
    part = re.sub(r'\n *"""(?s:.*?)"""', "", text[start:text.index(last, start) + len(last)])
    return sum(1 for line in part.splitlines() if line.strip() and not line.strip().startswith("#"))


def test_as_many_lines_as_the_paper() -> None:
    assert lines_of("cuda_wmma_sample =", ".tile(16, 16).done)") == 26
    schedule = lines_of("maxwell_optimized =", ".tile(1, 1).unroll.done)")
    assert schedule + lines_of("@micro_kernel", "\n        barrier()\n\n") + lines_of("def swizz", "<< 3)\n") <= 44


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.parametrize(("schedule", "kinds", "blocks", "loop", "whole"), [
    (products.cuda_wmma_sample, WMMA, 1, {"HMMA": 128, "LDSM": 48}, {"LDG.E.128": 16, "STS.128": 16, "STG.E.128": 16}),
    (products.maxwell_optimized, MAXWELL, 2, {"FFMA": 512, "LDS": 32}, {"STG.E.128": 16, "LDG.E.64": 2, "STS.64": 2}),
], ids=["cuda_wmma_sample", "maxwell_optimized"])
@pytest.mark.sample(2)
def test_machine_code(schedule: Any, kinds: tuple, blocks: int, loop: dict, whole: dict) -> None:
    code = schedule.compile(*kinds, blocks_per_sm=blocks)
    assert (code.usage.spill_stores, code.usage.spill_loads, code.usage.stack_bytes) == (0, 0, 0)
    assert not re.search(r"\bcall\b", code.ptx)
    text = disassemble(code.cubin)
    assert {name: main_loop(text).count(name) for name in loop} == loop
    full = instruction_counts(text, full=True)
    assert {name: sum(n for opcode, n in full.items() if opcode.startswith(name)) for name in whole} == whole


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.parametrize(("schedule", "kinds", "loop", "whole"), [
    (products.tensor_cores((128, 128), 64, (64, 32), ahead=True, occupancy=2), WMMA, {"HMMA": 64, "LDSM": 24, "LDGSTS": 8}, {"STG.E.128": 16}),
    (products.multiply_adds(ahead=True, occupancy=2), MAXWELL, {"FFMA": 512, "LDGSTS": 5}, {"LDS.128": 32, "STG.E.128": 16}),
], ids=["wmma", "maxwell"])
@pytest.mark.sample(2)
def test_a_step_ahead(schedule: Any, kinds: tuple, loop: dict, whole: dict) -> None:
    """Two blocks of 256 threads have 128 registers a thread on a multiprocessor."""
    code = schedule.compile(*kinds)
    assert code.usage.spill_stores == code.usage.stack_bytes == 0 and code.usage.registers <= 128
    text = disassemble(code.cubin)
    assert {name: main_loop(text).count(name) for name in loop} == loop
    assert {name: instruction_counts(text, full=True)[name] for name in whole} == whole


def main_loop(text: str) -> list[str]:
    """The opcodes of the longest loop: from a label to the last branch back to it."""
    code, labels = [], {}
    for line in text.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = len(code)
        found = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w[\w.]*)(.*?);", line)
        if found:
            code.append((found[1], found[2]))
    loops = [code[labels[to]:n] for n, (name, rest) in enumerate(code) if name.startswith("BRA")
             for to in re.findall(r"\.L_x_\d+", rest) if labels.get(to, n) < n]
    return [name.split(".")[0] for name, _ in max(loops, key=len)]


# ==========================================================================================================================
# Kernels in Graphene's way: Fig. 8, smaller; what is refused.


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


@pytest.mark.kin(1)
def test_figure_8(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal((32, 32)).astype("f2") for _ in "ab")
    out = np.zeros((32, 32), "f2")
    with gk.emulate():
        figure_8(a, b, out)
    np.testing.assert_allclose(out.astype(float), a.astype(float) @ b.astype(float), atol=0.05)


@pytest.mark.parametrize(("arrays", "words"), [
    ((np.zeros((32, 32), "f2"),) * 2, "takes 3 arrays, not 2"),
    ((np.zeros((32, 16), "f2"),) * 3, r"A has shape \(32, 16\), and its type is \[32,32\].fp16.GL"),
    ((np.zeros((32, 32), "f4"),) * 3, "A has dtype float32"),
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
    with pytest.raises(specs.TensorError, match=rf"{function.__name__}\(a\): annotate each tensor with its type"):
        specs.kernel(grid=(1,), block=(32,))(function)


# ==========================================================================================================================
# Attention's inner decomposition by specs (Graphene, section 6): two products by tensor cores, a softmax of rows between, all in
# registers of one warp: the sums of the first product lie as the second takes its left operand.

QUADS = WARP.tile(4)
TILE, LEFT = T[16, 16].fp16.SH.stored("[(16,16):(24,1)]"), T[2, 4].fp16.RF
RIGHT, SUMS = T[4, 1].fp16.RF, T[2, 2].fp32.RF
SCORES, ROW = T[2, 4].fp32.RF, T[2, 1].fp32.RF


def to_half(x: Any) -> Any:
    return np.float16(x)


def exponential(x: Any) -> Any:
    return math.exp(x)


def inverse(x: Any) -> Any:
    return 1 / x


def left_operand(tile: Any, target: Any) -> None:
    """Fig. 1d: ldmatrix."""
    i, j = WARP.tile(8).reshape(2, 2).indices()
    specs.Move(WARP, tile.tile(8, 8)[i, j].tile(1, 8)[WARP.tile(8).local(), 0], target.tile(1, 2))


def right_operand(matrix: Any, target: Any) -> None:
    """16 x 8, whose columns are neighbours: pairs of rows, and those eight below."""
    part = matrix.tile(specs.shape((2, 2), (1, 8)), 1)[QUADS.local(), QUADS.indices()[0]]
    for n in range(2):
        specs.Move(specs.THREAD, part.tile(2, 1)[n, 0], target.tile(2, 1)[n, 0])


def over_rows(name: str, part: Any) -> None:
    """Of a thread's two rows what its quad has: a row's elements are a quad's."""
    other = specs.Allocate(ROW)
    for lane in (1, 2):
        specs.Shfl("bfly", lane, WARP, part, other)
        specs.BinaryPointwise(name, specs.THREAD, part, other, part)


@specs.kernel(grid=(1,), block=(32,), shared_bytes=768)
def attention(blocks: Any, threads: Any, Q: T[16, 16].fp16.GL, K: T[16, 16].fp16.GL, V: T[16, 8].fp16.GL, O: T[16, 8].fp32.GL) -> None:  # type: ignore[name-defined]  # noqa: E741
    """softmax(Q K) V of 16 queries and 16 keys; K is given with a key a column."""
    one = threads.scalar()
    tile, left, right = specs.Allocate(TILE), specs.Allocate(LEFT), specs.Allocate(RIGHT)
    scores, row, out = specs.Allocate(SCORES), specs.Allocate(ROW), specs.Allocate(SUMS)
    half, line = thread_index() % 2, thread_index() // 2
    specs.Move(one, Q.tile(1, 8)[line, half], tile.tile(1, 8)[line, half])
    barrier()
    left_operand(tile, left)
    specs.Init(one, scores)
    specs.Init(one, out)
    for n in range(2):                                        # 8 keys at a time
        right_operand(K.tile(16, 8)[0, n], right)
        specs.MatMul(WARP, left.tile(1, 2), right.tile(2, 1), scores.tile(2, 2)[0, n].tile(1, 2))
    for i in range(2):
        specs.Reduction("max", one, scores.tile(1, 4)[i, 0], row[i, 0])
    over_rows("max", row)
    for i in range(2):
        specs.BinaryPointwise("-", one, scores.tile(1, 4)[i, 0], row[i, 0], scores.tile(1, 4)[i, 0])
        specs.UnaryPointwise(exponential, one, scores.tile(1, 4)[i, 0], scores.tile(1, 4)[i, 0])
        specs.Reduction("+", one, scores.tile(1, 4)[i, 0], row[i, 0])
        specs.UnaryPointwise(to_half, one, scores.tile(1, 4)[i, 0], left.tile(1, 4)[i, 0])
    over_rows("+", row)
    right_operand(V, right)
    specs.MatMul(WARP, left.tile(1, 2), right.tile(2, 1), out.tile(1, 2))
    own = O.tile(specs.shape(2, 8), 2)[QUADS.indices()[0], QUADS.local()]
    for i in range(2):
        specs.UnaryPointwise(inverse, one, row[i, 0], row[i, 0])
        specs.BinaryPointwise("*", one, out.tile(1, 2)[i, 0], row[i, 0], out.tile(1, 2)[i, 0])
        specs.Move(one, out.tile(1, 2)[i, 0], own.tile(1, 2)[i, 0])


def test_attention(rng: np.random.Generator) -> None:
    q, k = rng.standard_normal((16, 16)).astype("f2"), np.asfortranarray(rng.standard_normal((16, 16)).astype("f2"))
    v, out = np.asfortranarray(rng.standard_normal((16, 8)).astype("f2")), np.zeros((16, 8), "f4")
    with gk.emulate():
        attention(q, k, v, out)
    scores = q.astype(float) @ k.astype(float)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(out, weights @ v.astype(float) / weights.sum(1, keepdims=True), atol=5e-3)


@pytest.mark.kin(1)
@pytest.mark.compile
def test_its_code() -> None:
    code = attention.compile("row", "col", "col", "row")
    assert len(re.findall("mma.sync.aligned.m16n8k16", code.ptx)) == 3
    assert code.usage.stack_bytes == code.usage.spill_stores == 0 and not re.search(r"\bcall\b", code.ptx)
