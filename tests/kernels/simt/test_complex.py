"""Complex numbers on the ordinary units: products, all pairs of N, T and C, complex alpha and beta."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from tests.support.checks import assert_close
from tests.support.machines import on_machines, poison

OPERATION = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}
TOLERANCE = {"c8": 1e-5, "c16": 1e-13}


def complex_normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.asarray((rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype))


@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("transa,transb,dtype", [
    *((a, b, "c8") for a in "NTC" for b in "NTC"), ("N", "N", "c16"), ("T", "C", "c16"), ("C", "T", "c16")])
def test_gemm_ex(machine: Any, dtype: str, transa: str, transb: str, rng: np.random.Generator) -> None:
    sizes = [(9, 7, 5)] if machine.emulated else [(9, 7, 5), (64, 96, 32), (101, 67, 33)]
    for M, N, K in sizes:
        a = complex_normal(rng, (M, K) if transa == "N" else (K, M), dtype)
        b = complex_normal(rng, (K, N) if transb == "N" else (N, K), dtype)
        c = complex_normal(rng, (M, N), dtype)
        wide = np.complex128
        expected = (1.5 - 2j) * OPERATION[transa](a.astype(wide)) @ OPERATION[transb](b.astype(wide)) + 0.5j * c.astype(wide)
        out = machine.array(c)
        with machine.session():
            gk.blas.gemmEx(transa, transb, 1.5 - 2j, machine.array(a), machine.array(b), 0.5j, out)
        assert_close(machine.numpy(out), expected, TOLERANCE[dtype])


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_matmul_with_c_and_a_bias(machine: Any, dtype: str, rng: np.random.Generator) -> None:
    M, N, K = 17, 13, 11
    a, b, c = (complex_normal(rng, s, dtype) for s in ((M, K), (K, N), (M, N)))
    bias = rng.standard_normal(N).astype("f4")
    out = machine.array(poison((M, N), dtype))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), machine.array(c), out=out,
                  epilogue=gk.epilogues.Bias(machine.array(bias)))
    assert_close(machine.numpy(out), a.astype("c16") @ b.astype("c16") + c + bias, TOLERANCE[dtype])


def test_beta_zero_does_not_read_c(rng: np.random.Generator) -> None:
    a, b = complex_normal(rng, (5, 4), "c8"), complex_normal(rng, (4, 6), "c8")
    out = poison((5, 6), "c8")
    with gk.emulate():
        gk.blas.gemmEx("N", "N", 1.0, a, b, 0.0, out)
    assert_close(out, a @ b, 1e-5)


def test_a_complex_alpha_needs_a_complex_c(rng: np.random.Generator) -> None:
    a = np.ones((2, 2), np.float32)
    with gk.emulate(), pytest.raises(TypeError, match=r"alpha is 1j; a real number is needed for a C of float32"):
        gk.blas.gemmEx("N", "N", 1j, a, a, 0.0, a.copy())
