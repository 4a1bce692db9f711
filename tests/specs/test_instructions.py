"""Specs that are instructions, and tensors in kernels: emulated against NumPy, what they are compiled to, and what is found
wrong."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import specs
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.runtime.compile import assemble, disassemble, instruction_counts
from gemmkit.shapes import local
from gemmkit.specs import ALL, THREAD, WARP, NoAtom, T, instruction, shape
from gemmkit.specs.tensors import FR, Form, FragmentRole
from tests.specs.test_listings import figure_8_whole
from tests.support.harness import Out, compiled, emulated

# ==========================================================================================================================
# Specs that are instructions: emulated, against NumPy.

F16, F32 = np.dtype("f2"), np.dtype("f4")


@dataclass(frozen=True)
class Spec(gk.Component):
    """What kernels here are given."""

    one: Any = THREAD
    warp: Any = WARP
    pairs: Any = WARP.tile(shape((4, 2), (1, 16)))
    half: Any = T[None, None].fp16.GL
    single: Any = T[None, None].fp32.GL
    half8: Any = T[1, 8].fp16.RF
    half2: Any = T[2].fp16.RF
    single8: Any = T[1, 8].fp32.RF
    tile: Any = T[16, 16].fp16.SH.stored("[(16,16):(24,1)]")
    lines: Any = T[32, 4].fp32.SH
    of_a: Any = T[2, 4].fp16.RF
    of_b: Any = T[4, 1].fp16.RF
    of_c: Any = T[2, 2].fp32.RF
    row: Any = T[1, 4].fp16.RF
    column: Any = T[4, 1].fp16.RF
    sums: Any = T[2, 4].fp32.RF
    depth: int = 4


# -- moves ------------------------------------------------------------------------------------------------------------

def moved(spec: Spec, out: Any, a: Any) -> None:
    """Rows 1 to 3: eight halves by one load; four singles by one store to shared memory."""
    t = thread_index()
    source, target = specs.on(a, spec.single), specs.on(out, spec.single)
    held, lines = specs.Allocate(spec.single8), specs.Allocate(spec.lines)
    specs.Move(spec.one, source.tile(1, 8)[t, 0], held)
    specs.Move(spec.one, held.tile(1, 4)[0, 1], lines.tile(1, 4)[t, 0])
    specs.Move(spec.one, lines.tile(1, 4)[t, 0], target.tile(1, 4)[t, 0])
    specs.Move(spec.one, held[0, 0], target[t, 4])


def copied(spec: Spec, out: Any, a: Any) -> None:
    """cp.async, and its wait."""
    t = thread_index()
    lines = specs.Allocate(spec.lines)
    specs.CopyAsync(spec.one, specs.on(a, spec.single).tile(1, 4)[t, 1], lines.tile(1, 4)[t, 0])
    specs.wait()
    barrier()
    specs.Move(spec.one, lines.tile(1, 4)[31 - t, 0], specs.on(out, spec.single).tile(1, 4)[t, 0])


def test_lines(rng: np.random.Generator) -> None:
    a = rng.standard_normal((32, 8)).astype("f4")
    (out,) = emulated(moved, Spec(), Out((32, 5), "f4"), a, shared=512)
    np.testing.assert_array_equal(out, np.hstack([a[:, 4:], a[:, :1]]))


def test_copies_that_are_waited_for(rng: np.random.Generator) -> None:
    a = rng.standard_normal((32, 8)).astype("f4")
    (out,) = emulated(copied, Spec(), Out((32, 4), "f4"), a, shared=512)
    np.testing.assert_array_equal(out, a[::-1, 4:])


def not_waited(spec: Spec, out: Any, a: Any) -> None:
    t = thread_index()
    lines = specs.Allocate(spec.lines)
    specs.CopyAsync(spec.one, specs.on(a, spec.single).tile(1, 4)[t, 1], lines.tile(1, 4)[t, 0])
    barrier()
    specs.Move(spec.one, lines.tile(1, 4)[31 - t, 0], specs.on(out, spec.single).tile(1, 4)[t, 0])


def test_copies_that_are_not() -> None:
    from gemmkit.emulator.errors import EmulatorError

    with pytest.raises(EmulatorError):
        emulated(not_waited, Spec(), Out((32, 4), "f4"), np.zeros((32, 8), "f4"), shared=512)


# -- halves -----------------------------------------------------------------------------------------------------------

def of_halves(spec: Spec, out: Any, a: Any, b: Any) -> None:
    """hmul, hadd2, hfma, hfma2."""
    t = thread_index()
    x, y, z = specs.Allocate(spec.half8), specs.Allocate(spec.half8), specs.Allocate(spec.half8)
    specs.Move(spec.one, specs.on(a, spec.half).tile(1, 8)[t, 0], x)
    specs.Move(spec.one, specs.on(b, spec.half).tile(1, 8)[t, 0], y)
    specs.Init(1, spec.one, z)
    specs.BinaryPointwise("*", spec.one, x[0, 0], y[0, 0], z[0, 0])
    specs.BinaryPointwise("+", spec.one, x.tile(1, 2)[0, 1], y.tile(1, 2)[0, 1], z.tile(1, 2)[0, 1])
    specs.MatMul(spec.one, x[0, 4], y[0, 4], z[0, 4])
    u, v, w = specs.Allocate(spec.half2), specs.Allocate(spec.half2), specs.Allocate(spec.half2)
    specs.Init(2, spec.one, w)
    for n in range(2):
        specs.Move(spec.one, x[0, 6 + n], u[n])
        specs.Move(spec.one, y[0, 6 + n], v[n])
    specs.MatMul(spec.one, u, v, w)
    for n in range(2):
        specs.Move(spec.one, w[n], z[0, 6 + n])
    specs.Move(spec.one, z, specs.on(out, spec.half).tile(1, 8)[t, 0])


def test_halves(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal((32, 8)).astype("f2") for _ in "ab")
    (out,) = emulated(of_halves, Spec(), Out((32, 8), "f2"), a, b)
    x, y = a.astype(float), b.astype(float)
    wanted = np.ones((32, 8))
    wanted[:, 0], wanted[:, 2:4], wanted[:, 4] = x[:, 0] * y[:, 0], x[:, 2:4] + y[:, 2:4], x[:, 4] * y[:, 4] + 1
    wanted[:, 6:] = x[:, 6:] * y[:, 6:] + 2
    np.testing.assert_array_equal(out, wanted.astype("f2"))


# -- tensor cores -----------------------------------------------------------------------------------------------------

def move_by_ldmatrix(warp: Any, src: Any, dst: Any) -> None:
    """Fig. 1d: [16,16].fp16.SH -> [2,2].[1,2].fp16.RF."""
    groups = warp.tile(8).reshape(2, 2)
    i, j = groups.indices()
    specs.Move(warp, src.tile(8, 8)[i, j].tile(1, ALL)[groups.local(), 0], dst.tile(1, 2))


def by_tensor_cores(spec: Spec, out: Any, a: Any, b: Any) -> None:
    """16 x 8 by one warp: A by ldmatrix, B by pairs; mma.m16n8k16."""
    quads = spec.warp.tile(4)
    row, column = quads.indices()[0], quads.local()
    A, B, C = specs.on(a, spec.half), specs.on(b, spec.half), specs.on(out, spec.single)
    tile = specs.Allocate(spec.tile)
    x, y, z = specs.Allocate(spec.of_a), specs.Allocate(spec.of_b), specs.Allocate(spec.of_c)
    specs.Init(spec.one, z.tile(1, 2)[0, 0])
    specs.Init(spec.one, z.tile(1, 2)[1, 0])
    for k in range(spec.depth):
        half, line = thread_index() % 2, thread_index() // 2
        specs.Move(spec.one, A.tile(ALL, 16)[0, k].tile(1, 8)[line, half], tile.tile(1, 8)[line, half])
        barrier()
        move_by_ldmatrix(spec.warp, tile, x)
        part = B.tile(16, ALL)[k, 0].tile(specs.shape((2, 2), (1, 8)), 1)[column, row]
        specs.Move(spec.one, part.tile(2, 1)[0, 0], y.tile(2, 1)[0, 0])
        specs.Move(spec.one, part.tile(2, 1)[1, 0], y.tile(2, 1)[1, 0])
        specs.MatMul(spec.warp, x.tile(1, 2), y.tile(2, 1), z.tile(1, 2))
        barrier()
    own = C.tile(specs.shape(2, 8), 2)[row, column]
    for i in range(2):
        specs.Move(spec.one, z.tile(1, 2)[i, 0], own.tile(1, 2)[i, 0])


def test_figure_1_and_mma(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((16, 64)).astype("f2"), np.asfortranarray(rng.standard_normal((64, 8)).astype("f2"))
    (out,) = emulated(by_tensor_cores, Spec(), Out((16, 8), "f4"), a, b, shared=768)
    np.testing.assert_allclose(out, a.astype(float) @ b.astype(float), atol=1e-4)


def by_quad_pairs(spec: Spec, out: Any, a: Any, b: Any) -> None:
    """Four products of 8 x 8 x 4, by a warp's quad-pairs: A's 8 x 4 parts and C's 8 x 8 parts lie below each other."""
    pair, lane = spec.pairs.indices()[0], spec.pairs.local()
    x, y, z = specs.Allocate(spec.column), specs.Allocate(spec.row), specs.Allocate(spec.sums)
    for i in range(2):
        specs.Init(spec.one, z.tile(1, 4)[i, 0])
    A, B, C = specs.on(a, spec.half), specs.on(b, spec.half), specs.on(out, spec.single)
    for k in range(4):
        specs.Move(spec.one, A[pair * 8 + lane, k], x[k, 0])
        specs.Move(spec.one, B[k, lane], y[0, k])
    specs.MatMul(spec.pairs, x, y, z)
    mine = C.tile(8, 8)[pair, 0]
    rows = mine.tile(specs.shape((2, 1), (2, 8)), specs.shape((2, 2), (1, 4)))
    part = rows[lane % 2 + lane // 4 * 2, lane // 2 % 2]
    for i in range(2):
        for j in range(4):
            specs.Move(spec.one, z[i, j], part[i, j])


def test_quad_pairs(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((32, 4)).astype("f2"), rng.standard_normal((4, 8)).astype("f2")
    (out,) = emulated(by_quad_pairs, Spec(), Out((32, 8), "f4"), a, b)
    np.testing.assert_allclose(out, a.astype(float) @ b.astype(float), atol=1e-5)


# -- the others -------------------------------------------------------------------------------------------------------

def squared(x: Any) -> Any:
    return x * x


def norms(spec: Spec, out: Any, a: Any) -> None:
    """Of each row of 256 the sum of squares and the largest element, by a warp."""
    lane, row = thread_index() % 32, thread_index() // 32
    x, y = specs.Allocate(spec.single8), specs.Allocate(spec.single8)
    z = specs.Allocate(spec.of_c)
    specs.Move(spec.one, specs.on(a, spec.single).tile(1, 8)[row, lane], x)
    specs.UnaryPointwise(squared, spec.one, x, y)
    specs.Reduction("+", spec.one, y, z[0, 0])
    specs.Reduction("max", spec.one, x, z[0, 1])
    specs.Shfl("bfly", 16, spec.warp, z.tile(1, 2)[0, 0], z.tile(1, 2)[1, 0])
    folded(spec, z)
    specs.Shfl("bfly", 8, spec.warp, z.tile(1, 2)[0, 0], z.tile(1, 2)[1, 0])
    folded(spec, z)
    specs.Shfl("bfly", 4, spec.warp, z.tile(1, 2)[0, 0], z.tile(1, 2)[1, 0])
    folded(spec, z)
    specs.Shfl("bfly", 2, spec.warp, z.tile(1, 2)[0, 0], z.tile(1, 2)[1, 0])
    folded(spec, z)
    specs.Shfl("bfly", 1, spec.warp, z.tile(1, 2)[0, 0], z.tile(1, 2)[1, 0])
    folded(spec, z)
    if lane == 0:
        specs.Move(spec.one, z.tile(1, 2)[0, 0], specs.on(out, spec.single).tile(1, 2)[row, 0])


def folded(spec: Spec, z: Any) -> None:
    specs.BinaryPointwise("+", spec.one, z[0, 0], z[1, 0], z[0, 0])
    specs.BinaryPointwise("max", spec.one, z[0, 1], z[1, 1], z[0, 1])


def test_reductions_and_shuffles(rng: np.random.Generator) -> None:
    a = rng.standard_normal((2, 256)).astype("f4")
    (out,) = emulated(norms, Spec(), Out((2, 2), "f4"), a, threads=64)
    np.testing.assert_allclose(out, np.stack([(a * a).sum(1), a.max(1)], 1), rtol=1e-5)


# -- matching ---------------------------------------------------------------------------------------------------------

def fragment(operand: str, order: str | None = "row") -> Form:
    role = FragmentRole(operand, order, F16, F32)
    return Form((local(16, 16),), FR, F32 if operand == "c" else F16, role=role)


TILE = T[16, 16].fp16.SH.stored("[(16,16):(24,1)]")


@pytest.mark.parametrize(("name", "given"), [
    ("MoveLine", ("Move", THREAD, T[()].fp32.GL, T[()].fp32.RF)),
    ("MoveLine", ("Move", THREAD, T[8].fp16.GL, T[8].fp16.RF)),
    ("MoveLine", ("Move", THREAD, T[4].fp32.RF, T[4].fp32.SH)),
    ("LoadMatrices", ("Move", WARP, TILE.tile(1, 8).inner, T[2, 4].fp16.RF.tile(1, 2))),
    ("CombineHalves", ("BinaryPointwise", "*", THREAD, T[()].fp16.RF, T[()].fp16.RF, T[()].fp16.RF)),
    ("CombineHalves", ("BinaryPointwise", "+", THREAD, T[2].fp16.RF, T[2].fp16.RF, T[2].fp16.RF)),
    ("CombineElements", ("BinaryPointwise", "max", THREAD, T[2].fp16.RF, T[2].fp16.RF, T[2].fp16.RF)),
    ("MultiplyAdd", ("MatMul", THREAD, T[()].fp16.RF, T[()].fp16.RF, T[()].fp16.RF)),
    ("MultiplyAddPairs", ("MatMul", THREAD, T[2].fp16.RF, T[2].fp16.RF, T[2].fp16.RF)),
    ("MultiplyAdd", ("MatMul", THREAD, T[()].fp32.RF, T[()].fp32.RF, T[()].fp32.RF)),
    ("MultiplyQuadPairs", ("MatMul", WARP.tile(shape((4, 2), (1, 16))), T[4, 1].fp16.RF, T[1, 4].fp16.RF, T[2, 4].fp32.RF)),
    ("MultiplyMatrices", ("MatMul", WARP, T[2, 4].fp16.RF.tile(1, 2), T[4, 1].fp16.RF.tile(2, 1), T[2, 2].fp32.RF.tile(1, 2))),
    ("MultiplyAddBlock", ("MatMul", THREAD, T[8, 2].fp32.RF, T[2, 8].fp32.RF, T[8, 8].fp32.RF)),
    ("LoadFragment", ("Move", WARP, TILE, fragment("a"))),
    ("StoreFragment", ("Move", WARP, fragment("c"), T[16, 16].fp32.SH)),
    ("MultiplyFragments", ("MatMul", WARP, fragment("a"), fragment("b"), fragment("c"))),
    ("InitFragment", ("Init", WARP, fragment("c"))),
    ("ShuffleElements", ("Shfl", "bfly", 16, WARP, T[()].fp32.RF, T[()].fp32.RF)),
])
def test_table_2(name: str, given: tuple) -> None:
    assert type(instruction(*given)).__name__ == name


@pytest.mark.parametrize(("given", "words"), [
    (("Move", THREAD, T[4, 2].fp32.SH, T[4, 2].fp32.RF), r"Move <<<\[\].thread>>> (?s:.)*ld and st.*\n    but the source \[4,2\].fp32.SH has two dimensions"),
    (("Move", THREAD, T[8].fp16.GL, T[4].fp16.RF), "8 elements go to 4"),
    (("Move", THREAD, T[8].fp16.GL, T[8].fp32.RF), "float16 goes to float32"),
    (("Move", WARP, T[8].fp16.GL, T[8].fp16.RF), "32 threads execute it, not 1"),
    (("Move", WARP, T[16, 16].fp16.SH.tile(1, 8).inner, T[3, 2].fp16.RF.tile(1, 2)), r"destination is \[3,1\].\[1,2\].fp16.RF, not \[2,2\].\[1,2\]"),
    (("Move", WARP, T[16, 16].fp16.SH.stored("[(16,16):(20,1)]").tile(1, 8).inner, T[2, 4].fp16.RF.tile(1, 2)), "a row is not 16 bytes of neighbours, aligned"),
    (("Move", WARP, T[16, 16].fp16.SH.stored("[(16,16):(20,1)]"), fragment("a")), "not a multiple of 16 bytes"),
    (("Move", WARP, TILE, fragment("a", "col")), "the fragment is of a tile in col order"),
    (("Move", WARP, fragment("a"), TILE), "of an input, not of sums"),
    (("CopyAsync", THREAD, T[1].fp16.GL, T[1].fp16.SH), "are 2 bytes, not 4, 8 or 16"),
    (("MatMul", THREAD, T[2, 2].fp16.GL, T[2, 2].fp16.GL, T[2, 2].fp16.GL), "not one element"),
    (("MatMul", THREAD, T[()].fp16.RF, T[()].fp16.RF, T[()].fp32.RF), "all of one type are needed"),
    (("MatMul", THREAD, T[8, 2].fp32.RF, T[4, 8].fp32.RF, T[8, 8].fp32.RF), r"\[8,2\].fp32.RF by \[4,8\].fp32.RF is not"),
    (("MatMul", WARP, T[4, 1].fp16.RF, T[1, 4].fp16.RF, T[2, 4].fp32.RF), "are no quad-pairs"),
    (("BinaryPointwise", "/", THREAD, T[()].fp32.RF, T[()].fp32.RF, T[()].fp32.RF), "'/' is no operator"),
    (("Reduction", "-", THREAD, T[8].fp32.RF, T[()].fp32.RF), "depends on their order"),
    (("Reduction", "+", THREAD, T[8].fp32.RF, T[2].fp32.RF), "not one element"),
    (("Shfl", "left", 1, WARP, T[()].fp32.RF, T[()].fp32.RF), "'left' is none of bfly"),
    (("Shfl", "bfly", 32, WARP, T[()].u8.RF, T[()].u8.RF), "the lane is 32(?s:.)*not of 16, 32 or 64 bits"),
    (("Init", WARP, T[8].fp32.RF), "32 threads execute it, not 1"),
    (("UnaryPointwise", 3, THREAD, T[8].fp32.RF, T[8].fp32.RF), "no function"),
])
def test_no_instruction(given: tuple, words: str) -> None:
    with pytest.raises(NoAtom, match=words):
        instruction(*given)


# ==========================================================================================================================
# What specs are compiled to: the instructions of Table 2, and no stack or call.

F16_ARRAY = np.zeros((32, 8), "f2")
F32_ARRAY = np.zeros((32, 8), "f4")
ROWS = {
    moved: ((Out((32, 8), "f4"), F32_ARRAY), {r"ld\.global\.v4": 2, r"st\.shared\.v4": 1}),
    copied: ((Out((32, 4), "f4"), F32_ARRAY), {r"cp\.async\.cg": 1, r"cp\.async\.wait_group 0": 1}),
    of_halves: ((Out((32, 8), "f2"), F16_ARRAY, F16_ARRAY), {r"mul\.rn\.f16 ": 1, r"add\.rn\.f16x2": 1, r"fma\.rn\.f16 ": 1, r"fma\.rn\.f16x2": 1}),
    by_tensor_cores: ((Out((16, 8), "f4"), np.zeros((16, 64), "f2"), np.zeros((64, 8), "f2", order="F")),
                              {r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16": 4, r"mma\.sync\.aligned\.m16n8k16\.row\.col": 4}),  # unrolled
    by_quad_pairs: ((Out((32, 8), "f4"), np.zeros((32, 4), "f2"), np.zeros((4, 8), "f2")), {r"mma\.sync\.aligned\.m8n8k4\.row\.col\.f32\.f16\.f16\.f32": 1}),
    norms: ((Out((2, 2), "f4"), np.zeros((2, 256), "f4")), {r"shfl\.sync\.bfly": 10, r"ld\.global\.v4": 2}),
}


@pytest.mark.compile
@pytest.mark.kin(1)
@pytest.mark.sample(3)
@pytest.mark.parametrize("kernel", ROWS, ids=lambda kernel: kernel.__name__)
def test_opcodes(kernel: Any) -> None:
    arguments, wanted = ROWS[kernel]
    ptx = compiled(kernel, Spec(), *arguments)
    found = {text: len(re.findall(text, ptx)) for text in wanted}
    assert found == wanted
    assert not re.search(r"\.local|\bcall\b", ptx)
    made = assemble(ptx)
    assert made.usage.spill_stores == made.usage.spill_loads == made.usage.stack_bytes == 0


@pytest.mark.compile
@pytest.mark.kin(1)
def test_quad_pairs_on_hopper() -> None:
    """It has no such tensor cores any more: ptxas makes a subroutine of multiply-adds."""
    arguments, _ = ROWS[by_quad_pairs]
    counts: Counter[str] = instruction_counts(disassemble(assemble(compiled(by_quad_pairs, Spec(), *arguments)).cubin), full=True)
    assert counts["FFMA"] == 32 and not any(name.startswith("HMMA") for name in counts)


@pytest.mark.compile
def test_figure_8_at_its_size() -> None:
    code = figure_8_whole.compile()
    assert code.usage.stack_bytes == code.usage.spill_stores == 0
    assert re.search(r"fma\.rn\.f16 ", code.ptx) and not re.search(r"\bcall\b", code.ptx)


# ==========================================================================================================================
# Tensors and thread tensors in kernels: emulated, against NumPy; and what the emulator finds wrong.


@dataclass(frozen=True)
class TensorSpec(gk.Component):
    """What kernels here are given."""

    whole: Any = T[4, 8].fp32.GL
    tile: Any = T[4, 8].fp32.SH.stored("[((2,2),(2,4)):((1,4),(2,8))]")
    rows: Any = shape(2, 2)
    columns: Any = shape((2, 2), (1, 4))
    held: Any = T[2, 3].fp32.RF
    warp: Any = WARP
    quad_pairs: Any = WARP.tile(shape((4, 2), (1, 16)))


def through_shared(spec: TensorSpec, out: Any, a: Any) -> None:
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
    (out,) = emulated(through_shared, TensorSpec(), Out((4, 8), "f4"), a, shared=192)
    np.testing.assert_array_equal(out, a)


def group_numbers(spec: TensorSpec, out: Any) -> None:
    t = thread_index()
    i, j = spec.warp.tile(8).reshape(2, 2).indices()
    out[t, 0], out[t, 1], out[t, 2] = i, j, spec.warp.tile(8).local()
    out[t, 3], out[t, 4] = spec.quad_pairs.indices()[0], spec.quad_pairs.local()


def test_threads_of_figures_5_and_6() -> None:
    (out,) = emulated(group_numbers, TensorSpec(), Out((32, 5), "i4"))
    t = np.arange(32)
    np.testing.assert_array_equal(out.T, [t // 16, t // 8 % 2, t % 8, t // 4 % 4, t % 4 + t // 16 * 4])


def by_registers(spec: TensorSpec, out: Any, a: Any) -> None:
    source, held = specs.on(a, spec.whole), specs.Allocate(spec.held)
    for i in range(2):
        for j in range(3):
            held.storage[held[i, j].at] = (source.storage[source[i, j].at],)
    out[thread_index(), 0] = held.storage[1, 2][0]


def test_registers() -> None:
    a = np.arange(32, dtype="f4").reshape(4, 8)
    (out,) = emulated(by_registers, TensorSpec(), Out((32, 1), "f4"), a)
    assert set(out[:, 0]) == {10.0}


# -- faults -----------------------------------------------------------------------------------------------------------

def outside(spec: TensorSpec, out: Any, a: Any) -> None:
    source = specs.on(a, spec.whole).tile(1, ALL)
    out[0, thread_index()] = source.storage[source[thread_index(), 0][0, 0].at]


def another_rank(spec: TensorSpec, out: Any, a: Any) -> None:
    out[0, 0] = a[specs.on(a, spec.whole)[0].at]


def another_dtype(spec: TensorSpec, out: Any, a: Any) -> None:
    out[0, 0] = a[specs.on(out, spec.whole)[0, 0].at]


def never_set(spec: TensorSpec, out: Any, a: Any) -> None:
    out[0, 0] = specs.Allocate(spec.held).storage[0, 0][0]


@pytest.mark.parametrize(("kernel", "words"), [
    (outside, r"\[4,1\].\[1,8\].fp32.GL is indexed with \(4, 0\), which is outside"),
    (another_rank, "has 2 dimensions and is indexed with 1"),
    (another_dtype, r"\[4,8\].fp32.GL stands on memory of int32"),
    (never_set, "read before anything set it"),
])
def test_faults(kernel: Any, words: str) -> None:
    with pytest.raises(Exception, match=words):
        emulated(kernel, TensorSpec(), Out((4, 8), "i4" if kernel is another_dtype else "f4"), np.zeros((4, 8), "f4"))


def test_shared_memory_has_an_end() -> None:
    from gemmkit.emulator.errors import BoundsError

    with pytest.raises(BoundsError):
        emulated(through_shared, TensorSpec(), Out((4, 8), "f4"), np.zeros((4, 8), "f4"), shared=160)


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


# ==========================================================================================================================
# Tensors compiled: what is known when a kernel is compiled leaves nothing in it.

A = np.zeros((4, 8), "f4")


@pytest.mark.compile
@pytest.mark.parametrize("kernel", [through_shared, by_registers])
def test_no_stack_and_no_call(kernel: Any) -> None:
    ptx = compiled(kernel, TensorSpec(), Out((4, 8), "f4"), A)
    assert not re.search(r"\.local|\bcall|\b(div|rem)\.", ptx)


def allocated(spec: TensorSpec) -> Any:
    return specs.Allocate(spec.held)


def of_another_function(spec: TensorSpec, out: Any, a: Any) -> None:
    out[0, 0] = allocated(spec).storage[0, 0][0]


@pytest.mark.compile
def test_registers_are_not_returned() -> None:
    """They are the function's stack, which is gone when it returns."""
    with pytest.raises(Exception, match="registers"):
        compiled(of_another_function, TensorSpec(), Out((4, 8), "f4"), A)
