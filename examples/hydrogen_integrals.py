"""A chain of hydrogen atoms in the STO-3G basis: its integrals and its Hartree-Fock orbitals, by NumPy on the host.

All basis functions are sums of three s-type Gaussians, for which every integral has a closed form (A. Szabo and
N. Ostlund, *Modern Quantum Chemistry*, appendix A). Lengths are in bohr and energies in hartree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

EXPONENTS = np.array([3.42525091, 0.62391373, 0.16885540])  # of hydrogen's 1s function, STO-3G
WEIGHTS = np.array([0.15432897, 0.53532814, 0.44463454]) * (2 * EXPONENTS / np.pi) ** 0.75

MAX_ITERATIONS = 200
CONVERGED = 1e-9  # the largest element of the orbital gradient
REMEMBERED = 8  # Fock matrices that are extrapolated from


def boys(t: np.ndarray) -> np.ndarray:
    """The integral of exp(-t u²) over u from 0 to 1."""
    root = np.sqrt(np.maximum(t, 1e-12))
    erf, near = np.ones_like(root), root < 6  # beyond, the error function is 1 in float64
    erf[near] = [math.erf(x) for x in root[near]]
    return np.where(t < 1e-12, 1.0, np.sqrt(np.pi) / 2 * erf / root)


@dataclass(frozen=True)
class Pairs:
    """Products of two Gaussians of a chain: each is a Gaussian. All fields are (n, n, 9) for n atoms."""

    exponent: np.ndarray
    centre: np.ndarray
    factor: np.ndarray
    reduced: np.ndarray  # a b / (a + b) of the two exponents
    squared: np.ndarray  # the two atoms' distance, squared

    @classmethod
    def of(cls, atoms: np.ndarray) -> Pairs:
        a, b = (x.ravel() for x in np.meshgrid(EXPONENTS, EXPONENTS, indexing="ij"))
        weights = np.outer(WEIGHTS, WEIGHTS).ravel()
        left, right = atoms[:, None, None], atoms[None, :, None]
        reduced, squared = np.broadcast_arrays(a * b / (a + b), (left - right) ** 2)
        centre = (a * left + b * right) / (a + b)
        exponent = np.broadcast_to(a + b, centre.shape)
        return cls(exponent, centre, weights * np.exp(-reduced * squared), reduced, squared)


def one_electron(atoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, n) overlaps, and kinetic energy plus attraction by all nuclei."""
    p = Pairs.of(atoms)
    overlap = p.factor * (np.pi / p.exponent) ** 1.5
    kinetic = p.reduced * (3 - 2 * p.reduced * p.squared) * overlap
    attraction = np.zeros_like(overlap)
    for atom in atoms:
        attraction -= 2 * np.pi / p.exponent * p.factor * boys(p.exponent * (p.centre - atom) ** 2)
    return overlap.sum(axis=2), (kinetic + attraction).sum(axis=2)


def repulsion(atoms: np.ndarray) -> np.ndarray:
    """(n, n, n, n) repulsions (pq|rs) of two electrons: one in the product of functions p and q, one in r and s."""
    n = len(atoms)
    p = Pairs.of(atoms)
    exponent, centre, factor = (x.reshape(n * n, 9) for x in (p.exponent, p.centre, p.factor))
    out = np.empty((n * n, n * n))
    for i in range(n * n):  # (pq|rs) is (rs|pq): of each two the first is computed
        a, b = exponent[i][:, None, None], exponent[i:]
        reduced = a * b / (a + b)
        distance = centre[i][:, None, None] - centre[i:]
        terms = factor[i][:, None, None] * factor[i:] / (a * b * np.sqrt(a + b))
        out[i:, i] = out[i, i:] = 2 * np.pi**2.5 * np.sum(terms * boys(reduced * distance**2), axis=(0, 2))
    return out.reshape(n, n, n, n)


@dataclass(frozen=True)
class Orbitals:
    """The molecular orbitals of a closed shell: columns of `coefficients`, the first `occupied` of them filled."""

    energy: float
    levels: np.ndarray
    coefficients: np.ndarray
    repulsion: np.ndarray
    occupied: int


def hartree_fock(atoms: np.ndarray) -> Orbitals:
    """The restricted Hartree-Fock solution, by Roothaan's iteration with Pulay's extrapolation (DIIS).

    Raises:
        ValueError: an odd number of atoms, or none: the shell would be open.
        RuntimeError: the iteration does not converge.
    """
    if len(atoms) < 2 or len(atoms) % 2:
        raise ValueError(f"got {len(atoms)} atoms, must be an even number from 2 on: a closed shell")
    overlap, core = one_electron(atoms)
    electrons = repulsion(atoms)
    distances = np.abs(atoms[:, None] - atoms)[np.triu_indices(len(atoms), 1)]
    nuclei = float(np.sum(1 / distances))
    values, vectors = np.linalg.eigh(overlap)
    orthogonal = vectors / np.sqrt(values) @ vectors.T
    occupied = len(atoms) // 2
    fock, density = core, np.zeros_like(core)
    focks: list[np.ndarray] = []
    errors: list[np.ndarray] = []
    for _ in range(MAX_ITERATIONS):
        levels, vectors = np.linalg.eigh(orthogonal @ fock @ orthogonal)
        coefficients = orthogonal @ vectors
        density = coefficients[:, :occupied] @ coefficients[:, :occupied].T
        fock = core + 2 * np.tensordot(electrons, density) - np.einsum("prqs,rs->pq", electrons, density)
        error = orthogonal @ (fock @ density @ overlap - overlap @ density @ fock) @ orthogonal
        if np.abs(error).max() < CONVERGED:
            energy = float(np.sum((core + fock) * density)) + nuclei
            levels, vectors = np.linalg.eigh(orthogonal @ fock @ orthogonal)
            coefficients = orthogonal @ vectors
            return Orbitals(energy, levels, coefficients, electrons, occupied)
        focks, errors = [*focks, fock][-REMEMBERED:], [*errors, error][-REMEMBERED:]
        fock = extrapolated(focks, errors)
    raise RuntimeError(f"Hartree-Fock has not converged after {MAX_ITERATIONS} iterations")


def extrapolated(focks: list[np.ndarray], errors: list[np.ndarray]) -> np.ndarray:
    """The combination of Fock matrices, with weights of sum 1, whose error is the least."""
    flat = np.array([error.ravel() for error in errors])
    size = len(focks)
    system = np.zeros((size + 1, size + 1))
    system[:size, :size] = flat @ flat.T
    system[size, :size] = system[:size, size] = -1
    right = np.zeros(size + 1)
    right[size] = -1
    weights = np.linalg.lstsq(system, right, rcond=None)[0][:size]
    return np.asarray(np.tensordot(weights, np.array(focks), axes=1))
