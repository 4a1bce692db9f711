"""Algebras of a user's, and their products by the definition."""

from __future__ import annotations

import numpy as np

from gemmkit.operators import Algebra

# a user's own, in one line: 2 x 2 upper triangular matrices (e11, e12, e22) as numbers; the product is not commutative
TRIANGULAR = Algebra(None, [[[1, 0, 0], [0, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 1]]])
FRACTIONS = Algebra(None, [[[1, 0], [0, 1]], [[0, 1], [0.5, -2]]])            # e1 e1 = 0.5 - 2 e1


def product64(algebra: Algebra, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By the definition: sum over k of e_i e_j products."""
    found = np.zeros((a.shape[0], b.shape[1], algebra.parts))
    for (i, j, p), sign in np.ndenumerate(np.array(algebra.table, "f8")):
        if sign:                                           # (one einsum of all three takes minutes beside 15 others on 16 cores)
            found[..., p] += sign * (a[..., i].astype("f8") @ b[..., j].astype("f8"))
    return found
