"""The correlation energy of a chain of hydrogen atoms, by tensor contractions: `python -m examples.hydrogen_chain`.

Hartree-Fock lets each electron feel the others on average. What that misses is computed from the repulsions of pairs
of orbitals. With (ia|jb) for occupied orbitals i, j and empty ones a, b, second-order perturbation theory (MP2) has

    t_iajb = (ia|jb) / (e_i + e_j - e_a - e_b)        E = sum over iajb of t_iajb (2 (ia|jb) - (ib|ja))

and coupled-cluster theory starts from the same t. `gemmkit.einsum` does the expensive parts, each contraction one
kernel that reads the tensors as they lie in memory, and transposes none:

    (ia|jb) from the atoms' repulsions (pq|rs): four contractions, each over one atom index
    E: a contraction over all four indices, to a number
    the particle ladder  sum over cd of (ac|bd) t_icjd: the costliest term of coupled cluster, of order n⁶

All are in float64, and compared with `numpy.einsum`. The two atoms of H₂ at 1.4 bohr are checked against the energies
in A. Szabo and N. Ostlund's *Modern Quantum Chemistry*.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import gemmkit as gk

from . import machine
from .hydrogen_integrals import Orbitals, hartree_fock

SPACING = 1.8  # bohr: about where the chain is stable
TRANSFORM = "pqrs,pi,qj,rk,sl->ijkl"
LADDER = "acbd,icjd->iajb"

WANTED_ERROR = 1e-12  # of float64 sums, relative to the largest element
ATOMS, EMULATED_ATOMS = 32, 4

# Of H2 at 1.4 bohr, hartree: Hartree-Fock (Szabo and Ostlund, 3.5.2: -1.1167), and MP2's correlation with their
# integrals, (0.1813)² / 2 (-0.5782 - 0.6703) = -0.0132 (6.7).
BOOK_ENERGY, BOOK_CORRELATION = -1.1167, -0.0132


@dataclass(frozen=True)
class Correlation:
    """What the contractions gave: (ia|jb), the amplitudes t, the energy, (ac|bd) and the ladder term."""

    repulsion: np.ndarray
    amplitudes: np.ndarray
    energy: float
    empty: np.ndarray
    ladder: np.ndarray


def chain(count: int, spacing: float = SPACING) -> np.ndarray:
    """The places of `count` atoms in a row."""
    return np.arange(count) * spacing


def einsum(spec: str, operands: Sequence[np.ndarray], where: machine.Machine) -> np.ndarray:
    """A contraction by gemmkit: operands and result are host arrays."""
    with where.session():
        return where.to_host(gk.einsum(spec, *(where.to_device(x) for x in operands)))


def numpy_einsum(spec: str, operands: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray(np.einsum(spec, *operands, optimize=True))


def correlation(orbitals: Orbitals, where: machine.Machine | None) -> Correlation:
    """MP2 and the particle ladder, by gemmkit; for None by NumPy."""

    def contract(spec: str, *operands: np.ndarray) -> np.ndarray:
        return numpy_einsum(spec, operands) if where is None else einsum(spec, operands, where)

    filled = np.ascontiguousarray(orbitals.coefficients[:, : orbitals.occupied])
    vacant = np.ascontiguousarray(orbitals.coefficients[:, orbitals.occupied :])
    repulsion = contract(TRANSFORM, orbitals.repulsion, filled, vacant, filled, vacant)
    below, above = orbitals.levels[: orbitals.occupied], orbitals.levels[orbitals.occupied :]
    gaps = below[:, None] - above
    amplitudes = repulsion / (gaps[:, :, None, None] + gaps)
    exchanged = np.ascontiguousarray(2 * repulsion - repulsion.transpose(0, 3, 2, 1))
    energy = float(contract("iajb,iajb->", amplitudes, exchanged))
    empty = contract(TRANSFORM, orbitals.repulsion, vacant, vacant, vacant, vacant)
    return Correlation(repulsion, amplitudes, energy, empty, contract(LADDER, empty, amplitudes))


def relative_error(found: np.ndarray, reference: np.ndarray) -> float:
    return float(np.max(np.abs(found - reference)) / np.max(np.abs(reference)))


def errors(found: Correlation, reference: Correlation) -> dict[str, float]:
    """Of each result against NumPy's."""
    return {
        "(ia|jb)": relative_error(found.repulsion, reference.repulsion),
        "energy": abs(found.energy / reference.energy - 1),
        "(ac|bd)": relative_error(found.empty, reference.empty),
        "ladder": relative_error(found.ladder, reference.ladder),
    }


def main(emulate: bool | None = None, atoms: int | None = None) -> bool:
    """Compute the energy, print what came out, and return whether it is as good as it must be.

    Without `atoms`, a chain of 32 on a GPU, and of 4 in the emulator.
    """
    where = machine.find(emulate)
    atoms = atoms or (EMULATED_ATOMS if where.emulated else ATOMS)
    print(f"The correlation energy of a chain of hydrogen atoms, {where}")
    good = True
    for count, spacing in ((2, 1.4), (atoms, SPACING)):
        orbitals = hartree_fock(chain(count, spacing))
        found, reference = correlation(orbitals, where), correlation(orbitals, None)
        print(
            f"  H{count}, {spacing} bohr apart: Hartree-Fock {orbitals.energy:.5f}, MP2 {found.energy:+.5f} hartree"
        )
        if count == 2:
            same = abs(orbitals.energy - BOOK_ENERGY) < 5e-5 and abs(found.energy - BOOK_CORRELATION) < 5e-5
            print(f"    {'as' if same else 'NOT as'} in the book ({BOOK_ENERGY}, {BOOK_CORRELATION})")
            good &= same
        worst = errors(found, reference)
        said = ", ".join(f"{name} {error:.0e}" for name, error in worst.items())
        print(f"    against numpy.einsum: {said} (wanted: at most {WANTED_ERROR})")
        good &= max(worst.values()) <= WANTED_ERROR
    return good


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.hydrogen_chain",
        description="The correlation energy of a chain of hydrogen atoms.",
    )
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    parser.add_argument("--atoms", type=int, help="how many, an even number (default: 32; 4 in the emulator)")
    options = parser.parse_args(arguments)
    return 0 if main(options.emulate, options.atoms) else 1


if __name__ == "__main__":
    raise SystemExit(command())
