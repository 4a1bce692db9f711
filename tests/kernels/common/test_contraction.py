"""einsum, tensors as operands, and stacks of matrices, against NumPy; values are small whole numbers, so results are exact."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gemmkit as gk
from bench.experiments.contractions import tccg_cases, tccg_sizes
from bench.prepare import recorded
from gemmkit import layouts
from gemmkit.epilogues import ReLU, Scale
from gemmkit.functions.einsum import _lies_across, _recipe
from gemmkit.kernels.spec import FAMILIES
from gemmkit.operators import FPUOp, MMAOp, WGMMAOp
from gemmkit.plans import ahead
from gemmkit.ptx.arithmetic import divided, divisor_reciprocal
from gemmkit.runtime.arrays import describe, strided
from gemmkit.runtime.compile import assemble, to_ptx
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.support.checks import assert_close
from tests.support.machines import on_machines, poison, random, whole

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
CASES = tccg_cases()


def contract(machine: Any, spec: str, *arrays: np.ndarray, order: str = "C", dtype: Any = None, **fields: Any) -> np.ndarray:
    """The result, poisoned before."""
    shape = np.einsum(spec, *(x.astype(F64) for x in arrays)).shape
    out = machine.array(poison(shape, dtype or arrays[0].dtype, order))
    with machine.session():
        assert gk.einsum(spec, *(machine.array(x) for x in arrays), out=out, **fields) is out
    return np.asarray(machine.numpy(out))


def reference(spec: str, *arrays: np.ndarray) -> np.ndarray:
    return np.asarray(np.einsum(spec, *(x.astype(F64) for x in arrays)))


@pytest.mark.parametrize("dtype", [F16, F32, np.dtype("i4")], ids=str)
def test_an_operator_that_is_open_makes_a_result(dtype: Any, rng: np.random.Generator) -> None:
    """A semiring without dtypes takes the operands', and so does the array that the call makes."""
    from tests.support.machines import MACHINES

    a, b = whole(rng, (2, 5, 3), dtype), whole(rng, (4, 5), dtype)
    with MACHINES["emulator"].session():
        d = gk.einsum("adb,cd->cba", a, b, operator=gk.operators.MAX_PLUS)
    assert d.dtype == dtype
    assert np.array_equal(d, (a.astype(F64).transpose(2, 0, 1)[None] + b.astype(F64)[:, None, None]).max(axis=-1))


# -- the 48 contractions of the TCCG benchmark ------------------------------------------------------------------------

def einsum_spec(case: str) -> str:
    d, a, b = case.split("-")
    return f"{a},{b}->{d}"


def small(case: str, extents: tuple[int, ...]) -> dict[str, int]:
    return {label: extents[n % len(extents)] for n, label in enumerate(sorted(set(case) - {"-"}))}


def test_there_are_48() -> None:
    assert len(CASES) == len(set(CASES)) == 48


@pytest.mark.sample(24)
@pytest.mark.parametrize("case", CASES)
def test_tccg_in_small(case: str, rng: np.random.Generator) -> None:
    """Extents that no line of a thread divides, column-major as in the original."""
    from tests.support.machines import MACHINES

    sizes = small(case, (3, 2, 5))
    _, a, b = case.split("-")
    arrays = [np.asfortranarray(whole(rng, tuple(sizes[x] for x in term), F32)) for term in (a, b)]
    d = contract(MACHINES["emulator"], einsum_spec(case), *arrays, order="F")
    assert np.array_equal(d, reference(einsum_spec(case), *arrays))


@pytest.mark.kin(4)
@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ["ij-ikl-ljk", "abcijk-ijmb-mkac", "ajbdc-ckbad-jk"])
def test_tccg_on_tensor_cores_in_small(case: str, rng: np.random.Generator) -> None:
    """Extents of which lines of 4 and 8 are multiples, so that vectors are moved."""
    from tests.support.machines import MACHINES

    sizes = small(case, (8, 2, 4))
    _, a, b = case.split("-")
    arrays = [np.asfortranarray(whole(rng, tuple(sizes[x] for x in term), F16)) for term in (a, b)]
    d = contract(MACHINES["emulator"], einsum_spec(case), *arrays, order="F", dtype=F32)
    assert np.array_equal(d, reference(einsum_spec(case), *arrays))


@pytest.mark.gpu
@pytest.mark.sample(24)
@pytest.mark.parametrize("case", CASES)
def test_tccg_in_full(case: str) -> None:
    """At the benchmark's sizes, and at unpadded ones (an index or two shorter), in float32 and float16."""
    import cupy

    _, a, b = case.split("-")
    spec = einsum_spec(case)
    for dtype in (F32, F16):
        for less in (0, 1):
            sizes = {x: extent - less for x, extent in tccg_sizes(case).items()}
            rng = cupy.random.RandomState(len(case))
            arrays = [cupy.asfortranarray(rng.randint(-2, 3, tuple(sizes[x] for x in term), dtype=np.int32).astype(dtype))
                      for term in (a, b)]
            out = cupy.full(tuple(sizes[x] for x in case.split("-")[0]), cupy.nan, F32, order="F")
            gk.einsum(spec, *arrays, out=out)
            expected = cupy.einsum(spec, *(x.astype(F64) for x in arrays))
            assert bool((out == expected).all()), f"{spec} {dtype} {sizes}"


# -- every kind of index ----------------------------------------------------------------------------------------------

SPECS = ["ij,jk->ik", "ji,jk->ki", "ij,kj", "abj,jk->bak", "aij,ja->ia", "bij,bjk->bik", "ibj,kjb->bki", "ij,kl->ijkl", "ij,kl->kilj",
         "i,i->", "ij,j->i", "i,ij->j", "i,j->ij", "ij,ij->", "ab,ab->ab", "ij,ij->j", "ij,kl->ik", "ij,jk->k", "abcd,cdef->abef", "abcd,bdef->aecf"]


@pytest.mark.sample(20)
@on_machines
@pytest.mark.parametrize("spec", SPECS)
def test_specs(machine: Any, spec: str, rng: np.random.Generator) -> None:
    a, b = (whole(rng, tuple(2 + string.ascii_letters.index(x) % 5 for x in term), F32) for term in spec.split("->")[0].split(","))
    assert np.array_equal(contract(machine, spec, a, b), reference(spec, a, b))


@st.composite
def contractions(draw: Any) -> tuple[str, dict[str, int]]:
    kinds = {kind: draw(st.integers(0, 2)) for kind in "mnkb"}
    letters = iter(string.ascii_letters)
    made = {kind: [next(letters) for _ in range(count)] for kind, count in kinds.items()}
    a = draw(st.permutations(made["m"] + made["k"] + made["b"]))
    b = draw(st.permutations(made["n"] + made["k"] + made["b"]))
    d = draw(st.permutations(made["m"] + made["n"] + made["b"]))
    sizes = {x: draw(st.integers(1, 2 if kind == "b" else 4)) for kind, labels in made.items() for x in labels}
    return f"{''.join(a)},{''.join(b)}->{''.join(d)}", sizes


def computes(name: str, drawn: tuple[str, dict[str, int]], orders: str, seed: int, factor: int = 1) -> None:
    """A drawn contraction on a machine, its sizes times ``factor``; ``orders`` are those of A and B in memory."""
    from tests.support.machines import MACHINES

    spec, sizes = drawn
    rng = np.random.default_rng(seed)
    terms = spec.split("->")[0].split(",")
    a, b = (np.asarray(whole(rng, tuple(factor * sizes[x] for x in term), F32), order=order)      # type: ignore[call-overload]
            for term, order in zip(terms, orders))
    assert np.array_equal(contract(MACHINES[name], spec, a, b), reference(spec, a, b))


DRAWN = given(contractions(), st.sampled_from(["CC", "CF", "FC", "FF"]), st.integers(0, 2**32 - 1))


@pytest.mark.thorough
@settings(max_examples=12)
@DRAWN
def test_any_contraction(drawn: tuple[str, dict[str, int]], orders: str, seed: int) -> None:
    computes("emulator", drawn, orders, seed)


@pytest.mark.gpu
@pytest.mark.thorough
@pytest.mark.parametrize("part", range(5))
def test_any_contraction_on_a_gpu(part: int) -> None:
    """Forty drawn ones, in parts of their own: forty kernels one after the other take minutes to compile."""

    @hypothesis.seed(part)
    @settings(max_examples=8)
    @DRAWN
    def drawn_by_part(drawn: tuple[str, dict[str, int]], orders: str, seed: int) -> None:
        computes("gpu", drawn, orders, seed, factor=3)

    drawn_by_part()


@on_machines
def test_views(machine: Any, rng: np.random.Generator) -> None:
    """Operands and results that are slices, transposed, backwards."""
    a, b = whole(rng, (5, 6, 8), F32), whole(rng, (9, 12), F32)
    out = machine.array(poison((18, 5, 9), F32))
    x, y = machine.array(a)[:, ::2, 1:7], machine.array(b)[::-1, ::2]
    with machine.session():
        gk.einsum("aij,nj->nai", x, y, out=out[::2, :, ::3])
    got = machine.numpy(out)
    assert np.array_equal(got[::2, :, ::3], reference("aij,nj->nai", a[:, ::2, 1:7], b[::-1, ::2]))
    assert np.isnan(got[1::2]).all() and np.isnan(got[:, :, 1::3]).all()


@on_machines
def test_empty(machine: Any) -> None:
    """No terms is a sum of nothing; no elements is nothing to do."""
    for spec, shapes in (("ij,jk->ik", ((3, 0), (0, 4))), ("ijl,jk->ilk", ((3, 0, 2), (0, 4))), ("ij,jk->ik", ((0, 3), (3, 4)))):
        a, b = (np.zeros(shape, F32) for shape in shapes)
        assert np.array_equal(contract(machine, spec, a, b), reference(spec, a, b))


@dataclass(frozen=True)
class MaxPlus(FPUOp):
    identity = start = -math.inf

    def multiply(self, a, b):
        return a + b

    def combine(self, c, product):
        return max(c, product)


@on_machines
def test_another_algebra_and_an_epilogue(machine: Any, rng: np.random.Generator) -> None:
    a, b = whole(rng, (3, 4, 5), F32), whole(rng, (4, 6, 3), F32)
    d = contract(machine, "aij,ina->jn", a, b, operator=MaxPlus(M=16, N=16), epilogue=Scale(2.0) | ReLU())
    sums = a[:, :, :, None] + b.transpose(2, 0, 1)[:, :, None, :]
    assert np.array_equal(d, np.maximum(2 * sums.max(axis=(0, 1)), 0))


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("spec", ["ab,bc,cd->ad", "ab,cb,cd,de->ae", "abc,bd,ce->ade", "i,ij,j->"])
def test_chains(machine: Any, spec: str, rng: np.random.Generator) -> None:
    terms = spec.split("->")[0].split(",")
    arrays = [whole(rng, tuple(2 + string.ascii_letters.index(x) for x in term), F32, 2) for term in terms]
    assert np.array_equal(contract(machine, spec, *arrays), reference(spec, *arrays))
    assert np.array_equal(contract(machine, spec, *arrays, epilogue=Scale(0.5), optimize=False), reference(spec, *arrays) / 2)


@pytest.mark.kin(4)
@on_machines
def test_other_sizes_compile_nothing(machine: Any, rng: np.random.Generator) -> None:
    def call(i: int, j: int, k: int) -> None:
        a, b = whole(rng, (3, i, j), F32), whole(rng, (j, 3, k), F32)
        assert np.array_equal(contract(machine, "aij,jak->ik", a, b, operator=FPUOp(M=16, N=16)), reference("aij,jak->ik", a, b))

    call(5, 7, 9)
    with machine.compiles_nothing():
        call(11, 13, 5)


def test_dimensions_are_merged() -> None:
    """What is one matrix product of ordinary matrices is one, on the ordinary layouts."""
    def rows(spec: str, *shapes: tuple[int, ...], orders: str = "CCC") -> tuple:
        arrays = tuple((info.shape, info.strides, 4) for info in (
            describe(np.zeros(shape, F32, order=order)) for shape, order in zip(shapes, orders)))     # type: ignore[call-overload]
        left, d = spec.split("->")
        recipe = _recipe(spec, tuple(left.split(",")), d, arrays)
        return recipe.rows, [view[0] for view in recipe.views]

    assert rows("abk,kn->abn", (2, 3, 4), (4, 5), (2, 3, 5)) == ((0, 0, 0), [(6, 4), (4, 5), (6, 5)])
    assert rows("abjk,jkn->abn", (2, 3, 4, 5), (4, 5, 6), (2, 3, 6)) == ((0, 0, 0), [(6, 20), (20, 6), (6, 6)])
    assert rows("abk,kn->ban", (2, 3, 4), (4, 5), (3, 2, 5)) == ((0, 0, 2), [(6, 4), (4, 5), (3, 2, 5)])
    assert rows("bik,bkn->bin", (2, 3, 4), (2, 4, 5), (2, 3, 5)) == ((0, 0, 0), [(2, 3, 4), (2, 4, 5), (2, 3, 5)])


@pytest.mark.parametrize("order, across", [("C", False), ("F", True)])
def test_the_operand_that_d_is_contiguous_along_comes_second(order: Any, across: bool) -> None:
    out = describe(np.zeros((4, 5, 6), F32, order=order))
    assert _lies_across(("abk", "kn"), "abn", out) == across
    assert not _lies_across(("bk", "bkn"), "bn", describe(np.zeros((4, 5), F32, order="F")))     # a batch is no row


# -- tensors as layouts -----------------------------------------------------------------------------------------------

def test_division_by_multiplication() -> None:
    numbers = [0, 1, 2, 3, 5, 7, 100, 2**16 - 1, 2**16, 2**30, 2**31 - 2, 2**31 - 1]
    for d in [*range(1, 300), 641, 2**15 + 1, 2**30 + 1, 2**31 - 1]:
        multiplier, shift = divisor_reciprocal(d)
        assert int(multiplier) < 2**32
        for n in [*numbers, d - 1, d, (2**31 - 1) // d * d - 1, (2**31 - 1) // d * d]:
            assert divided(n, multiplier, shift) == n // d


@pytest.mark.thorough
@pytest.mark.compile
def test_lines_of_tensors_are_moved_at_once() -> None:
    """A dimension of stride 1 and a multiple of 8 in 16-bit elements: loads of 16 bytes, and no division."""
    def kernel(layout: Any, **given: Any) -> ahead.CompiledKernel:
        conf = gk.get_config(operator=MMAOp(), global_a_layout=layout, global_b_layout=layouts.RowMajor(F16),
                             global_d_layout=layouts.RowMajor(F32), device=H100, block_shape=Tile(M=64, N=64, K=32))
        return ahead.compile_config(conf, device=H100, gemm_shape=dict(M=512, N=256, K=128), operands=given)

    plain = kernel(layouts.RowMajor(F16))
    x = np.zeros((16, 8, 32, 16), F16)
    for array in (x.transpose(3, 2, 0, 1), x.reshape(16, 32, 8, 16).transpose(0, 1, 3, 2)):
        made = kernel(layouts.Tensor.of(describe(array), 2), a=array)
        assert made.usage.stack_bytes == 0 and made.usage.spill_stores == 0
        assert made.sass.count("LDG.E.128") == plain.sass.count("LDG.E.128") > 0
        assert made.instructions["MUFU"] == plain.instructions["MUFU"] and made.instructions["CALL"] == 0


@pytest.mark.kin(4)
@pytest.mark.sample(2)
@pytest.mark.compile
@pytest.mark.parametrize("spec", ["njmi,mknl->lkji", "njmi,kmln->lkji"])
def test_lines_across_k_are_moved_at_once_on_hopper(spec: str) -> None:
    """Tensor cores read 16-bit operands along M and N too: a tensor lies in shared memory as it does in global memory."""
    sizes = dict(zip("ijklmn", (16, 12, 8, 16, 24, 8)))
    terms = spec.replace("->", ",").split(",")
    a, b, out = (np.zeros([sizes[label] for label in term], F16) for term in terms)
    (made,) = recorded(lambda: gk.einsum(spec, a, b, out=out, operator=WGMMAOp(128)))
    conf = made.problem.config
    ptx = to_ptx(FAMILIES[conf.kernel].kernel, tuple(argument.type for argument in made.arguments), conf.threads, H100, conf.blocks_per_sm)
    kernel = ahead.CompiledKernel(conf, H100, ptx, assemble(ptx, H100.arch_name))
    assert "LDGSTS.E.BYPASS.LTC128B.128" in kernel.sass and "LDG.E" not in kernel.sass
    assert kernel.usage.stack_bytes == kernel.usage.spill_stores == 0


def test_the_order_is_the_larger_tensors() -> None:
    """Where K is small D is nearly all that moves: fewer of A's neighbours come before its own."""
    def first_of_d(k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sizes = dict(a=16, b=8, c=8, i=32, j=8, m=k)
        terms = ("amji", "cbm", "jicba")
        arrays = tuple((info.shape, info.strides, 2) for info in (
            describe(np.zeros([sizes[label] for label in term], F16)) for term in terms))
        shape, strides = _recipe("amji,cbm->jicba", terms[:2], terms[2], arrays).views[2]
        return shape[:2], strides[:2]

    assert first_of_d(4) == ((4, 16), (16 * 8 * 8, 1))                     # i, as A has it; then a, as D has it
    assert first_of_d(4096) == ((8, 16), (16 * 8 * 8, 1))


def test_views_of_an_array() -> None:
    x = np.arange(24).reshape(4, 6)
    view = strided(x, describe(x), (2, 2, 6), (12, 6, 1))
    assert np.shares_memory(view, x) and np.array_equal(view, x.reshape(2, 2, 6))
    assert strided(x, describe(x), (4, 6), (6, 1)) is x


# -- stacks of matrices -----------------------------------------------------------------------------------------------

STACKS = [((3, 5, 6), (3, 6, 7)), ((3, 5, 6), (6, 7)), ((5, 6), (2, 3, 6, 7)), ((2, 1, 5, 6), (3, 6, 7)), ((4, 1, 5, 6), (1, 3, 6, 7)),
          ((0, 5, 6), (6, 7)), ((1, 5, 6), (1, 6, 7)), ((2, 3, 5, 6), (2, 3, 6, 7))]


@pytest.mark.thorough
@on_machines
def test_stacks(machine: Any, rng: np.random.Generator) -> None:
    for shape_a, shape_b in STACKS:
        a, b = whole(rng, shape_a, F32), whole(rng, shape_b, F32)
        with machine.session():
            d = machine.numpy(gk.matmul(machine.array(a), machine.array(b)))
        assert d.dtype == F32 and np.array_equal(d, a @ b)


@pytest.mark.kin(4)
@on_machines
def test_stacks_with_everything(machine: Any, rng: np.random.Generator) -> None:
    """A c that is broadcast, an out with strides, transposed matrices, an epilogue that knows its row, a structured layout."""
    a, b, c = whole(rng, (3, 6, 5), F32), whole(rng, (2, 1, 6, 7), F32), whole(rng, (3, 1, 7), F32)
    x, y, z = machine.array(a).swapaxes(1, 2), machine.array(b), machine.array(c)
    expected = a.swapaxes(1, 2) @ b
    out = machine.array(poison((3, 2, 5, 7), F32)).swapaxes(0, 1)
    with machine.session():
        gk.matmul(x, y, out=out)
        assert np.array_equal(machine.numpy(out), expected)
        with pytest.raises(ValueError, match="c has shape"):
            gk.matmul(x, y, z)
        z = machine.array(whole(rng, (3, 5, 7), F32))
        assert np.array_equal(machine.numpy(gk.matmul(x, y, z)), expected + machine.numpy(z))
        scale = machine.array(np.arange(5, dtype=F32))
        d = gk.matmul(x, y, epilogue=Scale(scale, along="M"))
        assert np.array_equal(machine.numpy(d), expected * np.arange(5)[:, None])


@on_machines
def test_stacks_in_float16(machine: Any, rng: np.random.Generator) -> None:
    a, b = random(rng, (2, 17, 24), F16), random(rng, (2, 24, 9), F16)
    with machine.session():
        d = gk.matmul(machine.array(a), machine.array(b))
    assert_close(machine.numpy(d), a.astype(F64) @ b.astype(F64), 1e-3)


# -- bad input --------------------------------------------------------------------------------------------------------

A, B = np.ones((3, 4), F32), np.ones((4, 5), F32)


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda: gk.einsum("ii,ij->j", A, A), ValueError, ("'ii' repeats i, which is 3 and 4 in operand 0", "diagonal")),
    (lambda: gk.einsum("ij,jk->iik", A, B), ValueError, ("result 'iik' repeats",)),
    (lambda: gk.einsum("ij,jk->iz", A, B), ValueError, ("the result has z, which no operand has",)),
    (lambda: gk.einsum("ij,jk->ik", A, A), ValueError, ("j is 3 in operand 1 (shape (3, 4)) and 4 in operand 0",)),
    (lambda: gk.einsum("ijk,jk->ik", A, B), ValueError, ("'ijk' names 3 dimensions", "(3, 4)")),
    (lambda: gk.einsum("ij,jk,kl->il", A, B), ValueError, ("3 terms", "2 operands")),
    (lambda: gk.einsum("ij->i"), ValueError, ("no operands",)),
    (lambda: gk.einsum("..j,jk->k", A, B), ValueError, ("three dots",)),
    (lambda: gk.einsum("...j...,jk->k", A, B), ValueError, ("three dots",)),
    (lambda: gk.einsum("...j,jk->k", A, B), ValueError, ("dimensions of an ellipsis", "the result has none")),
    (lambda: gk.einsum("...ijk,jk->i", A, B), ValueError, ("'...ijk' names 3 dimensions or more", "(3, 4)")),
    (lambda: gk.einsum("...j,...j->...", A, np.ones((2, 4), F32)), ValueError, ("a dimension of the ellipsis is 2 in operand 1",)),
    (lambda: gk.einsum("ij->i", A, operator=gk.operators.MIN_PLUS), ValueError, ("operator=", "multiplies by one")),
    (lambda: gk.einsum("ij->i", A, out=np.ones(4, F32)), ValueError, ("out has shape (4,)", "(3,)")),
    (lambda: gk.einsum("ii,ij->j", gk.Triangular(A[:, :3]), A), ValueError, ("operand 0 is a Triangular", "two indices")),
    (lambda: gk.einsum("ij,ik->ijk", gk.Triangular(A[:, :3]), A), ValueError, ("operand 0 is a Triangular", "summed over")),
    (lambda: gk.einsum("ij->j", gk.Diagonal(A[0])), ValueError, ("operand 0 is a Diagonal", "one other operand")),
    (lambda: gk.einsum("ij,jk", *[gk.Generated(lambda i, j: i - j, (3, 3), F32)] * 2), TypeError, ("no arrays", "where to compute")),
    (lambda: gk.einsum("ij;jk->ik", A, B), ValueError, ("letters",)),
    (lambda: gk.einsum("ij,jk->ik->k", A, B), ValueError, ("one ->",)),
    (lambda: gk.einsum(A, B), TypeError, ("spec=", "string")),
    (lambda: gk.einsum("ij,jk->ik", A, "B"), TypeError, ("operand 1",)),
    (lambda: gk.einsum("ij,jk->ik", A, B, out=np.ones((5, 3), F32)), ValueError, ("out has shape (5, 3)", "(3, 5)")),
    (lambda: gk.einsum("ij,jk->ik", A, B, out=A), ValueError, ("out has shape (3, 4)",)),
    (lambda: gk.einsum("ij,jk,kl->il", A, B, np.ones((5, 2), F32), optimize=[(0, 1, 2)]), ValueError, ("optimize", "two operands")),
    (lambda: gk.matmul(np.ones((2, 3, 4), F32), np.ones((3, 4, 5), F32)), ValueError, ("(2,) and (3,) cannot be broadcast",)),
    (lambda: gk.matmul(np.ones((2, 3, 4), F32), B[:3]), ValueError, ("4 columns", "3 rows")),
    (lambda: gk.matmul(np.ones((2, 3, 4), F32), B[0]), ValueError, ("b has shape (5,)", "4 columns and b 5 elements")),
    (lambda: gk.matmul(np.ones((2, 3, 4), F32), B, out=np.ones((3, 5), F32)), ValueError, ("out has shape (3, 5)", "(2, 3, 5)")),
    (lambda: layouts.Tensor(F32, 3, (4,)), ValueError, ("rows=3", "extents")),
    (lambda: layouts.Tensor(F32, (3,), (4,), axis=2), ValueError, ("axis=2",)),
    (lambda: layouts.Tensor(F32, (3,), (4,), 1, vector=3), ValueError, ("vector=3",)),
    (lambda: layouts.Tensor(F32, (4, 3), (4,), 0, comb=3), ValueError, ("comb=3",)),
    (lambda: layouts.Tensor(F32, (4,), (3, 4), 0, comb=4), ValueError, ("comb=4", "axis=0", "two dimensions")),
    (lambda: layouts.Tensor(F32, (8, 3), (4,), 0, comb=4), ValueError, ("comb=4", "has 4 elements")),
    (lambda: layouts.Tensor(F32, (4, 3), (4,), comb=4), ValueError, ("comb=4", "axis=None")),
    (lambda: gk.matmul(np.ones((3, 2, 4), F32), B, global_a_layout=layouts.Tensor(F32, (2, 3), (4,))), ValueError, ("(3, 2, 4)", "(2, 3, 4)")),
])
def test_refusals(call: Any, kind: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught, gk.emulate():
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_host_arrays_need_the_emulator() -> None:
    for call in (lambda: gk.einsum("ij,jk->ik", A, B), lambda: gk.matmul(A[None], B)):
        with pytest.raises(TypeError, match="emulat"):
            call()
