"""einsum against NumPy: contractions, NumPy's notation, and the order of the dimensions. Values are small whole numbers, so
results are exact."""

from __future__ import annotations

import itertools
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
from gemmkit.functions.einsum import _lies_across, _recipe, as_product, subscripts
from gemmkit.kernels.spec import FAMILIES
from gemmkit.layouts.tensor import LARGER, Mode, ordered
from gemmkit.operators import FPUOp, MMAOp, WGMMAOp
from gemmkit.plans import ahead
from gemmkit.ptx.arithmetic import divided, divisor_reciprocal
from gemmkit.runtime.arrays import describe, strided
from gemmkit.runtime.compile import assemble, to_ptx
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.support.checks import assert_close
from tests.support.machines import on_machines, poison, random, whole

# ==========================================================================================================================
# einsum, tensors as operands, and stacks of matrices, against NumPy; values are small whole numbers, so results are exact.

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


@on_machines
@pytest.mark.parametrize("dtypes, value", [("??f", 1), ("bbf", 100), ("eef", 100), ("??b", 1)],
                         ids=["counts", "bytes", "halves", "counts in bytes"])
def test_an_intermediate_of_narrow_operands_holds_what_the_result_does(machine: Any, dtypes: str, value: int) -> None:
    arrays = [np.full(shape, x, dtype) for shape, x, dtype in zip([(3, 40), (40, 3), (3, 3)], (value, value, 1), dtypes)]
    for operator, expected in ((None, 120 * value * value), (gk.operators.MIN_PLUS, 2 * value + 1)):
        with machine.session():
            d = machine.numpy(gk.einsum("ij,jk,kl->il", *(machine.array(x) for x in arrays), operator=operator,
                                        optimize=[(0, 1), (0, 1)]))
        assert d.dtype == arrays[2].dtype and np.all(d == expected)
        if dtypes[0] == "?":                               # a bool is no distance
            break


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
        made = kernel(layouts.Matricised.of(describe(array), 2), a=array)
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
    (lambda: gk.einsum("ii,ij->j", gk.layouts.TriangularMatrix(A[:, :3]), A), ValueError, ("operand 0 is a Triangular", "two indices")),
    (lambda: gk.einsum("ij,ik->ijk", gk.layouts.TriangularMatrix(A[:, :3]), A), ValueError, ("operand 0 is a Triangular", "summed over")),
    (lambda: gk.einsum("ij->j", gk.layouts.DiagonalMatrix(A[0])), ValueError, ("operand 0 is a Diagonal", "one other operand")),
    (lambda: gk.einsum("ij,jk", *[gk.layouts.GeneratedMatrix(lambda i, j: i - j, (3, 3), F32)] * 2), TypeError, ("no arrays", "where to compute")),
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
    (lambda: layouts.Matricised(F32, 3, (4,)), ValueError, ("rows=3", "extents")),
    (lambda: layouts.Matricised(F32, (3,), (4,), axis=2), ValueError, ("axis=2",)),
    (lambda: layouts.Matricised(F32, (3,), (4,), 1, vector=3), ValueError, ("vector=3",)),
    (lambda: layouts.Matricised(F32, (4, 3), (4,), 0, comb=3), ValueError, ("comb=3",)),
    (lambda: layouts.Matricised(F32, (4,), (3, 4), 0, comb=4), ValueError, ("comb=4", "axis=0", "two dimensions")),
    (lambda: layouts.Matricised(F32, (8, 3), (4,), 0, comb=4), ValueError, ("comb=4", "has 4 elements")),
    (lambda: layouts.Matricised(F32, (4, 3), (4,), comb=4), ValueError, ("comb=4", "axis=None")),
    (lambda: gk.matmul(np.ones((3, 2, 4), F32), B, global_a_layout=layouts.Matricised(F32, (2, 3), (4,))), ValueError, ("(3, 2, 4)", "(2, 3, 4)")),
])
def test_refusals(call: Any, kind: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught, gk.emulate():
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_host_arrays_need_the_emulator() -> None:
    for call in (lambda: gk.einsum("ij,jk->ik", A, B), lambda: gk.matmul(A[None], B)):
        with pytest.raises(TypeError, match="emulat"):
            call()


# ==========================================================================================================================
# NumPy's notation in einsum: ellipses, diagonals, broadcasting, one operand, matrices with structure. Values are small whole
# numbers, so results are exact.


def drawn(shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    return np.random.default_rng(0).integers(-3, 4, shape).astype(dtype)


CASES_SUBSCRIPTS = {
    "an ellipsis": ("...ij,jk->...k", (2, 3, 4), (4, 5)),
    "an ellipsis behind": ("ij...,j...->i...", (2, 3, 4), (3, 4)),
    "nothing but ellipses": ("...,...", (2, 3), (3,)),
    "ellipses that are broadcast": ("...i,...i", (2, 1, 4), (3, 4)),
    "a trace in a product": ("ii,ij->j", (3, 3), (3, 4)),
    "a diagonal in a product": ("iij,j->i", (3, 3, 4), (4,)),
    "a summed index of 1": ("ij,jk", (3, 1), (4, 5)),
    "both have an index of 1": ("ij,ij->", (1, 4), (3, 1)),
    "a vector of 1": ("i,i->i", (1,), (4,)),
    "a number": (",ij->ij", (), (2, 3)),
    "a product by columns": ("ij,j->ij", (3, 4), (4,)),
    "a trace": ("ii", (5, 5)),
    "a sum": ("ij->", (3, 7)),
    "a sum of columns": ("ij->i", (3, 7)),
    "a sum over the ellipsis' last": ("...i->...", (2, 3, 4)),
    "a partial trace": ("iji->j", (3, 2, 3)),
    "an empty sum": ("ij->i", (3, 0)),
    "an empty result": ("ij->i", (0, 3)),
    "three, of which one is a trace": ("ij,jk,kk->i", (2, 3), (3, 4), (4, 4)),
    "three with ellipses": ("...i,ij,j...->...", (2, 3), (3, 4), (4, 2)),
}


@pytest.mark.sample(3)
@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("case", CASES_SUBSCRIPTS)
def test_numpys_notation(machine: Any, case: str) -> None:
    spec, *shapes = CASES_SUBSCRIPTS[case]
    arrays = [drawn(shape) for shape in shapes]
    wanted = np.einsum(spec, *arrays)
    out = machine.array(poison(wanted.shape, F32))
    with machine.session():
        assert gk.einsum(spec, *map(machine.array, arrays), out=out) is out
    np.testing.assert_array_equal(machine.numpy(out), wanted)


@pytest.mark.sample(3)
@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", "f8", "c8", "i4", "?"])
def test_sums_of_other_dtypes(machine: Any, dtype: str) -> None:
    x = drawn((5, 3, 5), dtype)
    with machine.session():
        made = gk.einsum("iji->j", machine.array(x))
        transposed = gk.einsum("ijk->kij", machine.array(x), out=machine.array(np.ones((5, 5, 3), dtype)))
    assert made.dtype == np.einsum("iji->j", x).dtype
    np.testing.assert_array_equal(machine.numpy(made), np.einsum("iji->j", x))
    np.testing.assert_array_equal(machine.numpy(transposed), np.einsum("ijk->kij", x))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("spec", "shape"), [("ij->ji", (3, 4)), ("ii->i", (4, 4)), ("...ii->i...", (2, 3, 3)), ("iii", (2, 2, 2)),
                                             ("ij", (2, 3))])
def test_what_sums_nothing_is_a_view(spec: str, shape: tuple[int, ...]) -> None:
    x = drawn(shape)
    with gk.emulate():
        made = gk.einsum(spec, x)
    assert np.shares_memory(made, x) == (spec != "iii")                   # a trace is a sum
    np.testing.assert_array_equal(made, np.einsum(spec, x))


@pytest.mark.sample(3)
def test_an_epilogue_of_a_sum() -> None:
    x = drawn((3, 5))
    with gk.emulate():
        made = gk.einsum("ij->i", x, epilogue=gk.epilogues.ReLU())
    np.testing.assert_array_equal(made, np.maximum(x.sum(axis=1), 0))


STRUCTURED = {
    "as it is": ("ij,jk->ik", "ij"), "transposed": ("ij,ik->jk", "ij"), "to columns": ("ij,jk->ki", "ij"),
    "second": ("ki,ij->kj", "ij"), "second, transposed": ("ki,ji->kj", "ji"),
    "beside a tensor": ("ij,ajb->bia", "ij"), "a tensor before it": ("aib,ij->ajb", "ij"),
}


@pytest.mark.sample(3)
@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("case", STRUCTURED)
@pytest.mark.parametrize("kind", ["triangular", "diagonal", "generated"])
def test_matrices_with_structure(machine: Any, case: str, kind: str) -> None:
    spec, own = STRUCTURED[case]
    terms = spec.partition("->")[0].split(",")
    array = drawn((4, 4))
    i, j = np.indices((4, 4))
    matrix, dense = {"triangular": (lambda: gk.layouts.TriangularMatrix(machine.array(array)), np.tril(array)),
                     "diagonal": (lambda: gk.layouts.DiagonalMatrix(machine.array(array[0].copy())), np.diag(array[0])),
                     "generated": (lambda: gk.layouts.GeneratedMatrix(lambda i, j: 2 * i - j, (4, 4), F32), (2 * i - j).astype(F32))}[kind]
    other = drawn((3, 4, 5) if "a" in spec else (4, 5) if terms[0] == own else (5, 4))
    wanted = np.einsum(spec, *(dense if term == own else other for term in terms))
    with machine.session():
        made = gk.einsum(spec, *(matrix() if term == own else machine.array(other) for term in terms))
    np.testing.assert_array_equal(machine.numpy(made), wanted)


@pytest.mark.sample(3)
@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["ij,jk->ik", "ij,jk->ki"])
def test_two_matrices_with_structure(spec: str) -> None:
    x, y = drawn((4, 4)), drawn((4,))
    with gk.emulate():
        made = gk.einsum(spec, gk.layouts.TriangularMatrix(x, "upper"), gk.layouts.DiagonalMatrix(y))
    np.testing.assert_array_equal(made, np.einsum(spec, np.triu(x), np.diag(y)))


@pytest.mark.sample(3)
def test_a_product_of_a_matrix_with_structure_is_told() -> None:
    """(What the tuner asks.)"""
    x, y, out = drawn((4, 4)), drawn((3, 4, 5)), poison((5, 4, 3), F32)
    with gk.emulate():
        a, b, d, keywords = as_product("ij,ajb->bia", gk.layouts.TriangularMatrix(x), y, out=out)
        gk.matmul(a, b, out=d, **keywords)
    np.testing.assert_array_equal(out, np.einsum("ij,ajb->bia", np.tril(x), y))


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """A spec of one or two operands with repeated indices, ellipses and extents of 1, and the operands' shapes."""
    sizes = dict(zip("abcd", draw(st.tuples(*[st.integers(1, 3)] * 4))))
    unnamed = draw(st.tuples(*[st.integers(1, 2)] * 2))
    terms, shapes = [], []
    for _ in range(draw(st.integers(1, 2))):
        term = draw(st.text("abcd", max_size=3))
        shape = [sizes[label] for label in term]
        alone = [n for n, label in enumerate(term) if term.count(label) == 1]
        for n in draw(st.lists(st.sampled_from(alone), max_size=1)) if alone else []:
            shape[n] = 1
        count = draw(st.integers(0, 2))
        if count:
            at = draw(st.integers(0, len(term)))
            term, shape = term[:at] + "..." + term[at:], [*shape[:at], *unnamed[2 - count:], *shape[at:]]
        terms.append(term)
        shapes.append(tuple(shape))
    spec = ",".join(terms)
    if draw(st.booleans()):
        labels = sorted(set(spec) & set(string.ascii_letters))
        result = "".join(draw(st.permutations(draw(st.lists(st.sampled_from(labels), unique=True))))) if labels else ""
        spec += "->" + ("..." + result if "..." in spec else result)
    return spec, shapes


@pytest.mark.kin(4)
@pytest.mark.sample(3)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(calls())
def test_drawn_subscripts(call: tuple[str, list[tuple[int, ...]]]) -> None:
    spec, shapes = call
    arrays = [drawn(shape) for shape in shapes]
    wanted = np.einsum(spec, *(x.astype("f8") for x in arrays))
    with gk.emulate():
        made = gk.einsum(spec, *arrays)
    assert made.shape == wanted.shape
    np.testing.assert_array_equal(made, wanted)


@pytest.mark.sample(3)
@pytest.mark.kin(4)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(calls())
def test_drawn_subscripts_are_views(call: tuple[str, list[tuple[int, ...]]]) -> None:
    """Views, computed by NumPy: their product is that of the operands."""
    spec, shapes = call
    arrays = [drawn(shape) for shape in shapes]
    found = subscripts(spec, tuple(shapes), tuple(tuple(s // 4 for s in x.strides) for x in arrays))
    views = [np.lib.stride_tricks.as_strided(x, view.shape, [4 * s for s in view.strides]) for x, view in zip(arrays, found.views)]
    assert all(len(set(term)) == len(term) for term in found.terms)
    np.testing.assert_array_equal(np.einsum(f"{','.join(found.terms)}->{found.result}", *views), np.einsum(spec, *arrays))


# ==========================================================================================================================
# How the dimensions of contractions are ordered: what is cut, who leads, what is merged again.

ALIKE = (1000, 1000)
FIRST, SECOND = (1000 * LARGER, 1000), (1000, 1000 * LARGER)      # which of the two is much the larger
F16_WIDTHS, F32_WIDTHS, F64_WIDTHS = (2, 2), (4, 4), (8, 8)


# What two tensors have of each index (extent, strides), itemsizes, numbers of elements; and what comes of it.
ORDERS: dict[str, tuple[list[tuple], tuple, tuple, list[tuple]]] = {
    "one index": ([(48, 1, 100)], F16_WIDTHS, ALIKE, [(48, 1, 100)]),
    "one order": ([(48, 100, 1), (16, 4800, 48)], F16_WIDTHS, ALIKE, [(768, 100, 1)]),
    "one leads": ([(48, 7, 100), (16, 1, 3)], F16_WIDTHS, ALIKE, [(16, 1, 3), (48, 7, 100)]),
    "only the second can": ([(48, 7, 100), (16, 9, 1)], F16_WIDTHS, ALIKE, [(16, 9, 1), (48, 7, 100)]),
    "at odds, the first leads, and the other's are whole sectors":
        ([(32, 1, 48), (48, 32, 1)], F16_WIDTHS, ALIKE, [(8, 1, 48), (16, 32, 1), (4, 8, 384), (3, 512, 16)]),
    "three vectors, for 24 are no two and some": ([(24, 1, 24), (24, 24, 1)], F16_WIDTHS, ALIKE, [(8, 1, 24), (24, 24, 1), (3, 8, 192)]),
    "at odds, the larger leads": ([(32, 1, 48), (48, 32, 1)], F16_WIDTHS, SECOND, [(8, 32, 1), (8, 1, 48), (6, 256, 8), (4, 8, 384)]),
    "the first is the larger": ([(32, 1, 48), (48, 32, 1)], F16_WIDTHS, FIRST, [(8, 1, 48), (8, 32, 1), (4, 8, 384), (6, 256, 8)]),
    "as many as are 16 bytes": ([(32, 1, 48), (48, 32, 1)], F64_WIDTHS, FIRST, [(2, 1, 48), (2, 32, 1), (16, 2, 96), (24, 64, 2)]),
    "of each its own bytes": ([(32, 1, 48), (48, 32, 1)], (2, 4), FIRST, [(8, 1, 48), (4, 32, 1), (4, 8, 384), (12, 128, 4)]),
    "eight bytes at most": ([(32, 1, 48), (48, 32, 1)], (1, 1), FIRST, [(8, 1, 48), (8, 32, 1), (4, 8, 384), (6, 256, 8)]),
    "what divides": ([(12, 1, 10), (10, 12, 1)], F16_WIDTHS, FIRST, [(4, 1, 10), (2, 12, 1), (3, 4, 40), (5, 24, 2)]),
    "one of them does not divide": ([(15, 1, 48), (48, 15, 1)], F16_WIDTHS, ALIKE, [(8, 15, 1), (15, 1, 48), (6, 120, 8)]),
    "none does: as the lead has it": ([(15, 1, 9), (9, 15, 1)], F16_WIDTHS, SECOND, [(9, 15, 1), (15, 1, 9)]),
    "whole lines of the larger": ([(24, 1, 5000), (24, 24, 120000), (8, 576, 5)], F16_WIDTHS, SECOND, [(8, 1, 5000), (8, 576, 5), (72, 8, 40000)]),
    "of alike ones, of the lead": ([(24, 1, 5000), (24, 24, 120000), (8, 576, 5)], F16_WIDTHS, ALIKE, [(576, 1, 5000), (8, 576, 5)]),
    "no neighbours: whole lines of the larger": ([(8, 3, 50), (6, 50, 3)], F32_WIDTHS, SECOND, [(6, 50, 3), (8, 3, 50)]),
    "merged, then cut": ([(4, 1, 24), (6, 4, 96), (24, 24, 1)], F16_WIDTHS, FIRST, [(8, 1, 24), (8, 24, 1), (3, 8, 192), (3, 192, 8)]),
    "backwards": ([(8, -1, 16), (16, 8, 1)], F16_WIDTHS, ALIKE, [(16, 8, 1), (8, -1, 16)]),
    "one element for all": ([(8, 0, 1), (16, 1, 0)], F32_WIDTHS, FIRST, [(4, 1, 0), (4, 0, 1), (4, 4, 0), (2, 0, 4)]),
    "nothing": ([], F32_WIDTHS, ALIKE, [(1, 1, 1)]),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ORDERS)
def test_orders(name: str) -> None:
    modes, itemsizes, counts, expected = ORDERS[name]
    for given_in in itertools.permutations(modes):
        assert ordered([Mode(*mode) for mode in given_in], itemsizes, counts) == [Mode(*mode) for mode in expected]


@pytest.mark.sample(1)
@pytest.mark.parametrize("counts, expected", [
    (ALIKE, [(8, 1, 48), (16, 32, 1), (4, 8, 384), (3, 512, 16)]), (FIRST, [(8, 1, 48), (16, 32, 1), (4, 8, 384), (3, 512, 16)]),
    ((1000, 1200), [(4, 1, 48), (16, 32, 1), (8, 4, 192), (3, 512, 16)]), (SECOND, [(4, 1, 48), (48, 32, 1), (8, 4, 192)])])
def test_what_is_written_does_not_lead(counts: tuple[int, int], expected: list[tuple]) -> None:
    """Its neighbours are whole sectors; if it is the larger, four elements of the other's come before them, else eight."""
    assert ordered([Mode(32, 1, 48), Mode(48, 32, 1)], F16_WIDTHS, counts, stores=True) == [Mode(*mode) for mode in expected]


def test_what_is_written_leads_alone() -> None:
    assert ordered([Mode(48, 7, 100), Mode(16, 9, 1)], F16_WIDTHS, ALIKE, stores=True) == [Mode(16, 9, 1), Mode(48, 7, 100)]


def elements(modes: Any) -> set[tuple[int, int]]:
    """Where every element lies in the two tensors."""
    steps = [[(i * first, i * second) for i in range(extent)] for extent, first, second in modes]
    return {(sum(x for x, _ in at), sum(y for _, y in at)) for at in itertools.product(*steps)}


@given(st.lists(st.integers(2, 12), min_size=1, max_size=3), st.randoms(use_true_random=False), st.sampled_from([1, 2, 4, 8]),
       st.sampled_from([ALIKE, FIRST, SECOND]))
def test_every_element_stays(extents: list[int], random: Any, itemsize: int, counts: tuple[int, int]) -> None:
    """Of two tensors of these extents, the dimensions of each in an order of its own."""
    strides = []
    for _ in range(2):
        order, step, own = random.sample(range(len(extents)), len(extents)), 1, [0] * len(extents)
        for at in order:
            own[at], step = step, step * extents[at]
        strides.append(own)
    modes = [Mode(*mode) for mode in zip(extents, *strides)]
    made = ordered(modes, (itemsize, itemsize), counts)
    assert math.prod(mode.extent for mode in made) == math.prod(extents)
    assert elements(made) == elements(modes)
