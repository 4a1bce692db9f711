"""A classifier of handwritten digits whose Gram matrix is one fused product: `python -m examples.digits`.

Kernel ridge regression with a radial basis function: K_ij = exp(-gamma |x_i - x_j|²) between training digits,
solve (K + lambda I) alpha = Y for one-hot labels Y, and a new digit x is of the class with the largest entry
of K(x, training) alpha. Since |x_i - y_j|² = |x_i|² + |y_j|² - 2 x_i·y_j, a Gram matrix is a product X Yᵀ
with an epilogue that knows its row and column: `RBF` below. The norms and gamma are run-time fields, so that
the two Gram matrices (train x train, test x train) are computed by one compiled kernel.

The data are scikit-learn's bundled digits: 1797 images of 8 x 8 pixels with values 0 to 16. Divided by 16
they are exact in f16, and so is every product of two and the f32 sum of 64 of them: the only rounding is that
of exp and of the result.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import gemmkit as gk
from gemmkit import epilogues

from . import machine

# The best pair of a five-fold cross-validation on the training digits alone (0.9917), over gamma from 0.03 to
# 0.4 and lambda from 0.001 to 0.1. The held-out digits had no say in it.
GAMMA = 0.1
LAMBDA = 1e-3

WANTED_ACCURACY = 0.97
WANTED_ERROR = 1e-6  # of f32 results with an exact argument of exp: a few units in the last place

# In the emulator each element of a Gram matrix takes 0.1 ms, and so does each that a tile has beyond it.
EMULATED_TRAIN, EMULATED_TEST = 192, 64


@dataclass(frozen=True)
class RBF(epilogues.Epilogue):
    """exp(-gamma |x_m - y_n|²) from the product x_m·y_n and the squared norms of the rows of X and Y."""

    row_norms: gk.Array
    column_norms: gk.Array
    gamma: gk.Scalar

    def __call__(self, x, m, n):  # type: ignore[no-untyped-def]
        return math.exp(-self.gamma * (self.row_norms[m] + self.column_norms[n] - 2.0 * x))


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 pixels in [0, 1] (f16, exact) and their labels 0 to 9."""

    train_x: np.ndarray
    train_labels: np.ndarray
    test_x: np.ndarray
    test_labels: np.ndarray


def spaced(count: int, wanted: int | None) -> np.ndarray:
    """`wanted` evenly spaced numbers out of 0 .. count - 1; all of them for None."""
    if wanted is None:
        return np.arange(count)
    if not 1 <= wanted <= count:
        raise ValueError(f"got {wanted} digits to take, must be 1 to {count}")
    return np.arange(wanted) * count // wanted


def load(train: int | None = None, test: int | None = None) -> Digits:
    """The digits, every third held out for testing; `train` and `test` take evenly spaced ones of each part.

    Raises:
        ValueError: there are not that many (1198 for training, 599 for testing).
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, labels = (bunch.data / 16.0).astype(np.float16), bunch.target
    held_out = np.arange(len(x)) % 3 == 0
    kept, tested = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    kept, tested = kept[spaced(len(kept), train)], tested[spaced(len(tested), test)]
    return Digits(x[kept], labels[kept], x[tested], labels[tested])


def reference_gram(x: np.ndarray, y: np.ndarray, gamma: float) -> np.ndarray:
    """exp(-gamma |x_i - y_j|²) in float64 by NumPy, from the differences themselves and not from norms."""
    difference = x.astype(np.float64)[:, None, :] - y.astype(np.float64)[None, :, :]
    squared: np.ndarray = np.einsum("ijk,ijk->ij", difference, difference)
    return np.exp(-gamma * squared)


def reference_error(gram: np.ndarray, x: np.ndarray, y: np.ndarray, gamma: float, rows: int = 128) -> float:
    """norm(gram - reference) / norm(reference), a band of `rows` rows at a time to spare memory."""
    squares = np.zeros(2)
    for i in range(0, len(x), rows):
        reference = reference_gram(x[i : i + rows], y, gamma)
        squares += np.sum((gram[i : i + rows] - reference) ** 2), np.sum(reference**2)
    return float(np.sqrt(squares[0] / squares[1]))


def fit(gram: np.ndarray, labels: np.ndarray, ridge: float) -> np.ndarray:
    """The (training digits, 10) coefficients of the classifier, solved in float64."""
    one_hot = np.eye(10)[labels]
    return np.linalg.solve(gram.astype(np.float64) + ridge * np.eye(len(gram)), one_hot)


def classify(gram: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """The class of each row of a (new digits, training digits) Gram matrix."""
    return np.argmax(gram.astype(np.float64) @ coefficients, axis=1)


def gram_matrix(x: np.ndarray, y: np.ndarray, gamma: float, where: machine.Machine) -> np.ndarray:
    """exp(-gamma |x_i - y_j|²) as one gemmkit product of f16 images with an f32 result."""

    def norms(rows: np.ndarray) -> machine.Array:
        return where.to_device(np.sum(rows.astype(np.float32) ** 2, axis=1))

    epilogue = RBF(norms(x), norms(y), np.float32(gamma))
    return where.to_host(
        gk.matmul(where.to_device(x), where.to_device(y).T, epilogue=epilogue, dtype=np.float32)
    )


def main(emulate: bool | None = None, train: int | None = None, test: int | None = None) -> bool:
    """Classify, print what came out, and return whether it is as good as it must be.

    Without `train` and `test`, all digits are used on a GPU, and a subset in the emulator.
    """
    where = machine.find(emulate)
    if where.emulated:
        train, test = train or EMULATED_TRAIN, test or EMULATED_TEST
    digits = load(train, test)
    print(f"Handwritten digits, {where}")
    trained, tested = len(digits.train_x), len(digits.test_x)
    print(f"  {trained} of 1198 for training, {tested} of 599 held out (every third of all)")
    if trained + tested < 1797:
        print("  a subset, evenly spaced: emulating a GPU is slow; on a GPU all digits are used")

    with where.session():
        train_gram = gram_matrix(digits.train_x, digits.train_x, GAMMA, where)
        test_gram = gram_matrix(digits.test_x, digits.train_x, GAMMA, where)
    found = classify(test_gram, fit(train_gram, digits.train_labels, LAMBDA))
    accuracy = float(np.mean(found == digits.test_labels))
    error = max(
        reference_error(train_gram, digits.train_x, digits.train_x, GAMMA),
        reference_error(test_gram, digits.test_x, digits.train_x, GAMMA),
    )
    print(f"  accuracy on held-out digits {accuracy:.4f} (wanted: at least {WANTED_ACCURACY})")
    print(
        f"  error of the Gram matrices {error:.1e}, against NumPy in float64 (wanted: at most {WANTED_ERROR})"
    )
    return accuracy >= WANTED_ACCURACY and error <= WANTED_ERROR


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.digits", description="Classify handwritten digits."
    )
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    parser.add_argument(
        "--train", type=int, help="how many training digits (default: all; 192 in the emulator)"
    )
    parser.add_argument(
        "--test", type=int, help="how many held-out digits (default: all; 64 in the emulator)"
    )
    options = parser.parse_args(arguments)
    return 0 if main(options.emulate, options.train, options.test) else 1


if __name__ == "__main__":
    raise SystemExit(command())
