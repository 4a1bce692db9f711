"""``einsum`` of one operand, and of matrices with structure.

Where nothing is summed over the result is a view. A sum is a product with a column of ones that is nowhere in memory
(`layouts.Generated`): one launch of a product's kernel, which allocates nothing but its result. A matrix with structure is
taken where its two indices are the two modes that it has.
"""

from __future__ import annotations

import functools
from typing import Any

from gemmkit.joined import Braid
from gemmkit.matrices import Generated, Matrix
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.views import strided
from gemmkit.subscripts import Subscripts


def view_of(x: Any, info: ArrayInfo, term: str, result: str) -> Any:
    """An operand's dimensions in the order of the result's indices."""
    at = [term.index(label) for label in result]
    return strided(x, info, tuple(info.shape[n] for n in at), tuple(info.strides[n] for n in at))


@functools.lru_cache(maxsize=256)                          # a component is frozen once
def ones(count: int, dtype: Any) -> Generated:
    """A column of ones, generated as it is read.

    >>> ones(3, "float32").shape
    (3, 1)
    """
    return Generated(_one, (count, 1), dtype)


def _one(i: int, j: int) -> int:
    return 1


def check_matrix(spec: str, n: int, x: Matrix, found: Subscripts) -> None:
    """Raise ValueError unless operand ``n``, a matrix with structure, is a matrix of the product as it is."""
    name = f"einsum({spec!r}): operand {n} is a {type(x).__name__}"
    if isinstance(x, Braid) or hasattr(x, "product"):
        raise ValueError(f"{name}, which has a product of its own; give it to matmul")
    if len(found.terms) != 2:
        raise ValueError(f"{name}, and such a matrix is contracted with one other operand; contract two at a time")
    term, other = found.terms[n], found.terms[1 - n]
    rows = [label for label in term if label in found.result and label not in other]
    summed = {label for label in term + other if label not in found.result}
    if x.ndim != 2 or len(term) != 2 or len(rows) != 1 or len(summed) != 1 or not summed <= set(term) & set(other):
        raise ValueError(f"{name} of shape {x.shape}: of its two indices one must be the result's, which no other operand "
                         "has, and the other the one that is summed over, of both operands")
