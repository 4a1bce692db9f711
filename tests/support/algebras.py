"""Algebras of a user's, and their products by the definition."""

from __future__ import annotations

import numpy as np

from gemmkit.operators import Algebra

# a user's own, in one line: 2 x 2 upper triangular matrices (e11, e12, e22) as numbers; the product is not commutative
TRIANGULAR = Algebra(None, [[[1, 0, 0], [0, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 1]]])
FRACTIONS = Algebra(None, [[[1, 0], [0, 1]], [[0, 1], [0.5, -2]]])            # e1 e1 = 0.5 - 2 e1


def product64(algebra: Algebra, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By the definition: sum over k of e_i e_j products."""
    return np.einsum("mki,knj,ijp->mnp", a.astype("f8"), b.astype("f8"), np.array(algebra.table, "f8"), optimize=True)
