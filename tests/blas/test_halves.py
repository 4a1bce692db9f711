"""BLAS of matrices of which one half is in memory: syrk, herk, symm and trmm, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.functions.number_systems import Dual
from tests.support.machines import on_machines, poison, whole

DTYPES = "f2", "f4", "f8", "c8", "c16"
HALVES = {"L": np.tril, "U": np.triu}


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    x = whole(rng, shape, "f8")
    return (x + 1j * whole(rng, shape, "f8") if dtype[0] == "c" else x).astype(dtype)


def half_of(x: np.ndarray, uplo: str, n: int) -> np.ndarray:
    """With NaN in the other half."""
    return np.where(HALVES[uplo](np.ones((n, n), bool)), x, np.nan).astype(x.dtype)


@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("uplo", HALVES)
@pytest.mark.parametrize("trans", ["N", "T", "C"])
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_k(machine: Any, dtype: str, beta: float, trans: str, uplo: str, rng: np.random.Generator) -> None:
    """syrk by "N" and "T", herk by "N" and "C"; what is in the other half stays, and with beta 0 so does C's NaN matter to none."""
    n, K = 37, 21
    a, c = values(rng, (n, K) if trans == "N" else (K, n), dtype), values(rng, (n, n), dtype)
    hermitian = trans == "C"
    left = a if trans == "N" else np.swapaxes(a, 0, 1)
    wide = left.astype("c16")
    if hermitian:
        wide = wide.conj()
    other = wide.conj().T if hermitian or (trans == "N" and dtype[0] == "c") else wide.T
    wanted = 2 * wide @ other + (beta * c if beta else 0)
    if hermitian or (trans == "N" and dtype[0] == "c"):
        np.fill_diagonal(wanted, np.diag(wanted).real)
    given = half_of(c, uplo, n)
    if beta == 0:
        given = poison((n, n), dtype)
    with machine.session():
        put = machine.array(given)
        call = gk.blas.herk if hermitian or (dtype[0] == "c" and trans == "N") else gk.blas.syrk
        assert call(uplo, trans, 2.0, machine.array(a), beta, put) is put
        found = machine.numpy(put)
    there = HALVES[uplo](np.ones((n, n), bool))
    np.testing.assert_array_equal(found[there], wanted[there])
    np.testing.assert_array_equal(found[~there], given[~there])


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("uplo", HALVES)
def test_complex_syrk(machine: Any, uplo: str, rng: np.random.Generator) -> None:
    """Symmetric, not Hermitian; with complex alpha and beta."""
    a, c = values(rng, (19, 8), "c8"), values(rng, (19, 19), "c8")
    with machine.session():
        put = machine.array(half_of(c, uplo, 19))
        gk.blas.syrk(uplo.lower(), 0, 1j, machine.array(a), 2 - 1j, put)
        found = machine.numpy(put)
    wanted, there = 1j * a.astype("c16") @ a.T.astype("c16") + (2 - 1j) * c, HALVES[uplo](np.ones((19, 19), bool))
    np.testing.assert_array_equal(found[there], wanted[there])


@pytest.mark.sample(2)
@on_machines
def test_alpha_of_zero(machine: Any, rng: np.random.Generator) -> None:
    """A is not read; the half is multiplied by beta."""
    c = values(rng, (9, 9), "f4")
    with machine.session():
        put = machine.array(c)
        gk.blas.syrk("L", "N", 0.0, machine.array(poison((9, 4), "f4")), 2.0, put)
        np.testing.assert_array_equal(machine.numpy(put), np.where(np.tril(np.ones((9, 9), bool)), 2 * c, c))


@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("side", ["L", "R"])
@pytest.mark.parametrize("uplo", HALVES)
@pytest.mark.parametrize(("dtype", "hermitian"), [("f4", False), ("f2", False), ("f8", False), ("c8", False), ("c8", True), ("c16", True)])
def test_symmetric_operand(machine: Any, dtype: str, hermitian: bool, uplo: str, side: str, rng: np.random.Generator) -> None:
    M, N = 33, 18
    n = M if side == "L" else N
    a, b, c = values(rng, (n, n), dtype), values(rng, (M, N), dtype), values(rng, (M, N), dtype)
    half = HALVES[uplo](a).astype("c16")
    strict = half - np.diag(np.diag(half))
    whole_a = half.real + strict.imag * 1j + strict.conj().T if hermitian else half + strict.T     # hemm: a real diagonal
    with machine.session():
        put = machine.array(c)
        gk.blas.symm(side, uplo, 2.0, machine.array(half_of(a, uplo, n)), machine.array(b), 3.0, put, hermitian=hermitian)
        found = machine.numpy(put)
    wide = b.astype("c16")
    np.testing.assert_array_equal(found, 2 * (whole_a @ wide if side == "L" else wide @ whole_a) + 3 * c.astype("c16"))


@pytest.mark.kin(1)
@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("side", ["L", "R"])
@pytest.mark.parametrize("uplo", HALVES)
@pytest.mark.parametrize("trans", ["N", "T", "C"])
@pytest.mark.parametrize("diag", ["N", "U"])
@pytest.mark.parametrize("dtype", ["f4", "f2", "c8"])
def test_triangular_operand(machine: Any, dtype: str, diag: str, trans: str, uplo: str, side: str, rng: np.random.Generator) -> None:
    M, N = 33, 18
    n = M if side == "L" else N
    a, b = values(rng, (n, n), dtype), values(rng, (M, N), dtype)
    tri = HALVES[uplo](a).astype("c16")
    given = half_of(a, uplo, n)
    if diag == "U":
        np.fill_diagonal(tri, 1)
        np.fill_diagonal(given, np.nan)
    op = {"N": tri, "T": tri.T, "C": tri.conj().T}[trans]
    with machine.session():
        put = machine.array(poison((M, N), dtype))
        gk.blas.trmm(side, uplo, trans, diag, 2.0, machine.array(given), machine.array(b), put)
        found = machine.numpy(put)
    wide = b.astype("c16")
    np.testing.assert_array_equal(found, 2 * (op @ wide if side == "L" else wide @ op))


X, C = np.ones((4, 3), "f4"), poison((4, 4), "f4")


@pytest.mark.sample(4)
@pytest.mark.parametrize(("call", "kind", "said"), [
    (lambda: gk.blas.syrk("B", "N", 1.0, X, 0.0, C), ValueError, ("uplo is 'B'", '"L" or "U"')),
    (lambda: gk.blas.syrk(2, "N", 1.0, X, 0.0, C), ValueError, ("uplo is 2", '"L" or "U"')),
    (lambda: gk.blas.syrk("L", "C", 1.0, X, 0.0, C), ValueError, ("trans is 'C'", '"N" or "T"')),
    (lambda: gk.blas.herk("L", 1, 1.0, X, 0.0, C), ValueError, ("trans is 1", '"N" or "C"')),
    (lambda: gk.blas.herk("L", "N", 1j, X, 0.0, C), TypeError, ("alpha=1j", "real")),
    (lambda: gk.blas.syrk("L", "T", 1.0, X, 0.0, C), ValueError, ("c has shape (4, 4)", "(3, 3)")),
    (lambda: gk.blas.syrk("L", "N", 1.0, gk.layouts.DiagonalMatrix(X[0]), 0.0, C), TypeError, ("a is a DiagonalMatrix", "array")),
    (lambda: gk.blas.syrk("L", "N", 1.0, X, 0.0, Dual.constant(C, 1)), TypeError, ("c is a Dual", "array")),
    (lambda: gk.blas.syrk("L", "N", 1.0, C, 0.0, C), ValueError, ("c overlaps a",)),
    (lambda: gk.blas.symm("M", "L", 1.0, C, X, 0.0, X.copy()), ValueError, ("side is 'M'", '"L" or "R"')),
    (lambda: gk.blas.symm("L", "L", 1.0, X, X, 0.0, X.copy()), ValueError, ("(4, 3)", "square")),
    (lambda: gk.blas.symm("L", "L", 1.0, np.zeros((4, 4), ml_dtypes.int4), X, 0.0, X.copy()), TypeError, ("a has dtype int4",)),
    (lambda: gk.blas.trmm("L", "L", "N", "N", 1.0, C.astype(">f4"), X, X.copy()), ValueError, ("a has dtype >f4",)),
    (lambda: gk.blas.trmm("L", "L", "N", "T", 1.0, C, X, X.copy()), ValueError, ("diag is 'T'", '"N" or "U"')),
    (lambda: gk.blas.trmm("L", "L", "N", "N", 1.0, C, X, X), ValueError, ("overlaps b",)),
])
def test_refused(call: Any, kind: type, said: tuple[str, ...]) -> None:
    with gk.emulate(), pytest.raises(kind) as caught:
        call()
    for part in said:
        assert part in str(caught.value)
    assert np.isnan(C).all()
    np.testing.assert_array_equal(X, 1)
