"""Specs that are instructions: emulated, against NumPy. (tests/codegen/specs has what they are compiled to.)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import specs
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.shapes import local
from gemmkit.specs import ALL, THREAD, WARP, NoAtom, T, instruction, shape
from gemmkit.specs.tensors import FR, Form, Role
from tests.support.harness import Out, emulated

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
    role = Role(operand, order, F16, F32)
    return Form((local(16, 16),), FR, F32 if operand == "c" else F16, role=role)


TILE = T[16, 16].fp16.SH.stored("[(16,16):(24,1)]")


@pytest.mark.parametrize(("name", "given"), [
    ("MoveLine", ("Move", THREAD, T[()].fp32.GL, T[()].fp32.RF)),
    ("MoveLine", ("Move", THREAD, T[8].fp16.GL, T[8].fp16.RF)),
    ("MoveLine", ("Move", THREAD, T[4].fp32.RF, T[4].fp32.SH)),
    ("LoadMatrices", ("Move", WARP, TILE.tile(1, 8).inner, T[2, 4].fp16.RF.tile(1, 2))),
    ("CombineHalves", ("BinaryPointwise", "*", THREAD, T[()].fp16.RF, T[()].fp16.RF, T[()].fp16.RF)),
    ("CombineHalves", ("BinaryPointwise", "+", THREAD, T[2].fp16.RF, T[2].fp16.RF, T[2].fp16.RF)),
    ("Combine", ("BinaryPointwise", "max", THREAD, T[2].fp16.RF, T[2].fp16.RF, T[2].fp16.RF)),
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
    ("Exchange", ("Shfl", "bfly", 16, WARP, T[()].fp32.RF, T[()].fp32.RF)),
])
def test_table_2(name: str, given: tuple) -> None:
    assert type(instruction(*given)).__name__ == name


@pytest.mark.parametrize(("given", "words"), [
    (("Move", THREAD, T[4, 2].fp32.SH, T[4, 2].fp32.RF), r"Move <<<\[\].thread>>> (?s:.)*ld and st.*\n    but the source \[4,2\].fp32.SH has two dimensions"),
    (("Move", THREAD, T[8].fp16.GL, T[4].fp16.RF), "8 elements go to 4"),
    (("Move", THREAD, T[8].fp16.GL, T[8].fp32.RF), "float16 goes to float32"),
    (("Move", WARP, T[8].fp16.GL, T[8].fp16.RF), "32 threads execute it, not 1"),
    (("Move", WARP, T[16, 16].fp16.SH.tile(1, 8).inner, T[2, 2].fp16.RF.tile(1, 2)), r"destination is \[2,1\].\[1,2\].fp16.RF, not \[2,2\].\[1,2\]"),
    (("Move", WARP, T[16, 16].fp16.SH.stored("[(16,16):(20,1)]").tile(1, 8).inner, T[2, 4].fp16.RF.tile(1, 2)), "a row is not 16 bytes of neighbours, aligned"),
    (("Move", WARP, T[16, 16].fp16.SH.stored("[(16,16):(20,1)]"), fragment("a")), "no multiple of 16 bytes"),
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


