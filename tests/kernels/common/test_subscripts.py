"""NumPy's notation in einsum: ellipses, diagonals, broadcasting, one operand, matrices with structure. Values are small whole
numbers, so results are exact."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gemmkit as gk
from gemmkit.functions.einsum import as_product, subscripts
from tests.support.machines import on_machines, poison

pytestmark = pytest.mark.sample(3)

F32 = np.dtype("f4")


def drawn(shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    return np.random.default_rng(0).integers(-3, 4, shape).astype(dtype)


CASES = {
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


@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("case", CASES)
def test_numpys_notation(machine: Any, case: str) -> None:
    spec, *shapes = CASES[case]
    arrays = [drawn(shape) for shape in shapes]
    wanted = np.einsum(spec, *arrays)
    out = machine.array(poison(wanted.shape, F32))
    with machine.session():
        assert gk.einsum(spec, *map(machine.array, arrays), out=out) is out
    np.testing.assert_array_equal(machine.numpy(out), wanted)


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


@pytest.mark.parametrize(("spec", "shape"), [("ij->ji", (3, 4)), ("ii->i", (4, 4)), ("...ii->i...", (2, 3, 3)), ("iii", (2, 2, 2)),
                                             ("ij", (2, 3))])
def test_what_sums_nothing_is_a_view(spec: str, shape: tuple[int, ...]) -> None:
    x = drawn(shape)
    with gk.emulate():
        made = gk.einsum(spec, x)
    assert np.shares_memory(made, x) == (spec != "iii")                   # a trace is a sum
    np.testing.assert_array_equal(made, np.einsum(spec, x))


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


@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("case", STRUCTURED)
@pytest.mark.parametrize("kind", ["triangular", "diagonal", "generated"])
def test_matrices_with_structure(machine: Any, case: str, kind: str) -> None:
    spec, own = STRUCTURED[case]
    terms = spec.partition("->")[0].split(",")
    array = drawn((4, 4))
    i, j = np.indices((4, 4))
    matrix, dense = {"triangular": (lambda: gk.Triangular(machine.array(array)), np.tril(array)),
                     "diagonal": (lambda: gk.Diagonal(machine.array(array[0].copy())), np.diag(array[0])),
                     "generated": (lambda: gk.Generated(lambda i, j: 2 * i - j, (4, 4), F32), (2 * i - j).astype(F32))}[kind]
    other = drawn((3, 4, 5) if "a" in spec else (4, 5) if terms[0] == own else (5, 4))
    wanted = np.einsum(spec, *(dense if term == own else other for term in terms))
    with machine.session():
        made = gk.einsum(spec, *(matrix() if term == own else machine.array(other) for term in terms))
    np.testing.assert_array_equal(machine.numpy(made), wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["ij,jk->ik", "ij,jk->ki"])
def test_two_matrices_with_structure(spec: str) -> None:
    x, y = drawn((4, 4)), drawn((4,))
    with gk.emulate():
        made = gk.einsum(spec, gk.Triangular(x, "upper"), gk.Diagonal(y))
    np.testing.assert_array_equal(made, np.einsum(spec, np.triu(x), np.diag(y)))


def test_a_product_of_a_matrix_with_structure_is_told() -> None:
    """(What the tuner asks.)"""
    x, y, out = drawn((4, 4)), drawn((3, 4, 5)), poison((5, 4, 3), F32)
    with gk.emulate():
        a, b, d, keywords = as_product("ij,ajb->bia", gk.Triangular(x), y, out=out)
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
